//! Stages of server parameters: the ops of the role `optimize` around each update of a server's part, compiled to the
//! text of a stage, which the parameter's declaration carries to the server.
//!
//! ```text
//! optimize half = scale(w@merged, factor=0.5)                        let value_0 = g * 0.5
//! optimize bounded = min(half, limit)                                let value_1 = min(value_0, 1.0)
//!                                                                    g = value_1
//! optimize w, w@count = update(w, bounded, w@count, config="...")    update
//! optimize old = scale(w@average, factor=0.9)                        let value_2 = average * 0.9
//! optimize new = scale(w, factor=0.1)                                let value_3 = w * 0.1
//! optimize w@average = add(old, new)                                 average = value_2 + value_3
//! ```
//!
//! A number that trainers make of numbers of several parameters, such as the norm of all gradients, is `total(share)`,
//! where `share` is this parameter's number.
//!
//! The text is lowered with the parameter's rule to one straight-line code, so a stage costs what its arithmetic costs.
//! Its bits are those of the executor, whose ops of the role `optimize` round as rules do.

mod stage_text;
mod stage_value;
#[cfg(test)]
mod tests;
mod without_update;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pserver_core::config::ParameterConfig;
use pserver_core::error::Failure;
use pserver_core::optim::Prepared;
use pserver_core::rule::CheckedRule;

use super::graph::{Graph, Node, VariableIndex};
use super::op::{OpKind, OpRole};
use super::transpile::totals::{share_channel, total_channel};

use stage_text::StageText;

pub use without_update::with_update;

/// An update of a server's part, with the ops around it.
#[derive(Clone, Debug)]
pub struct ServerStage<'g> {
    /// The update.
    pub update: &'g Node,
    /// The merged gradient that the ops begin with.
    pub merged: VariableIndex,
    /// The rule with its stage, as `OptimizerConfig` in protobuf's text form.
    pub config: String,
    /// The states that ops around the update keep, beside those of the rule, each with its initial value.
    pub states: Vec<(VariableIndex, f64)>,
    /// The number of several parameters that the ops read, if they read one.
    pub total: Option<StageTotal>,
}

/// A number that trainers make of several parameters' numbers, in the middle of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageTotal {
    /// The number, as the ops read it.
    pub number: VariableIndex,
    /// The number that the server gives for it, and its channel; none where it gives none.
    pub share: Option<(VariableIndex, String)>,
    /// The channel of the number.
    pub channel: String,
}

/// An op of the role `optimize`.
#[derive(Clone, Copy, Debug)]
struct StageOp<'g> {
    block: usize,
    place: usize,
    node: &'g Node,
}

/// Compiles the ops around every update of a part, in the order of the updates.
///
/// # Errors
/// When an op has no form in a stage, ties two parameters, or belongs to no update. Names the op, what was found and
/// what was expected.
pub fn server_stages(graph: &Graph) -> Result<Vec<ServerStage<'_>>, Failure> {
    let part = PartOps::of(graph);
    let owners = part.owners()?;
    let mut stages = Vec::new();
    for (number, update) in part.updates.iter().enumerate() {
        let own = |op: &&StageOp<'_>| op.node.outputs.iter().any(|output| owners.get(output) == Some(&number));
        let ops: Vec<StageOp<'_>> = part.ops.iter().filter(own).copied().collect();
        stages.push(part.stage(*update, &ops)?);
    }
    Ok(stages)
}

/// The optimizer ops of a part.
struct PartOps<'g> {
    graph: &'g Graph,
    ops: Vec<StageOp<'g>>,
    updates: Vec<StageOp<'g>>,
    /// The variables that these ops write.
    written: BTreeSet<VariableIndex>,
    /// The values of variables that an initialising `fill` is the last to write.
    fills: BTreeMap<VariableIndex, f64>,
}

impl<'g> PartOps<'g> {
    fn of(graph: &'g Graph) -> Self {
        let all = || {
            let scopes = graph.scopes().iter().enumerate();
            scopes.flat_map(|(block, scope)| {
                scope.nodes.iter().enumerate().map(move |(place, node)| StageOp { block, place, node })
            })
        };
        let ops: Vec<StageOp<'g>> = all().filter(|op| op.node.role == OpRole::Optimize).collect();
        let updates = ops.iter().filter(|op| op.node.rule.is_some()).copied().collect();
        let written = ops.iter().flat_map(|op| &op.node.outputs).copied().collect();
        let mut fills = BTreeMap::new();
        for node in all().map(|op| op.node).filter(|node| node.role == OpRole::Initialise) {
            for output in &node.outputs {
                match node.kind {
                    OpKind::Fill { value } => fills.insert(*output, value),
                    _ => fills.remove(output),
                };
            }
        }
        Self { graph, ops, updates, written, fills }
    }

    fn refuse(&self, op: StageOp<'_>, reason: &str) -> Failure {
        Failure::call(format!("{}: {reason}", self.graph.label(op.block, op.place)))
    }

    fn name(&self, index: VariableIndex) -> &'g str {
        &self.graph.variable(index).name
    }

    /// The number of the update to which each variable belongs. Constants belong to none.
    fn owners(&self) -> Result<BTreeMap<VariableIndex, usize>, Failure> {
        let constants = self.constants();
        let mut owners = BTreeMap::new();
        for (number, update) in self.updates.iter().enumerate() {
            owners.extend(self.touched(update, &constants).map(|index| (index, number)));
        }
        loop {
            let known = owners.len();
            for op in &self.ops {
                let mut owner: Option<(usize, VariableIndex)> = None;
                for index in self.touched(op, &constants) {
                    let Some(found) = owners.get(&index).copied() else { continue };
                    match owner {
                        Some((other, like)) if other != found => {
                            let (one, two) = (self.name(like), self.name(index));
                            return Err(self.refuse(
                                *op,
                                &format!(
                                    "found {one:?} of {:?} and {two:?} of {:?}; expected variables of one parameter, \
                                     because servers update each by itself",
                                    self.name(self.updates[other].node.outputs[0]),
                                    self.name(self.updates[found].node.outputs[0]),
                                ),
                            ));
                        }
                        _ => owner = Some((found, index)),
                    }
                }
                if let Some((owner, _)) = owner {
                    owners.extend(self.touched(op, &constants).map(|index| (index, owner)));
                }
            }
            if owners.len() == known {
                break;
            }
        }
        let is_lost =
            |op: &&StageOp<'_>| op.node.outputs.iter().any(|out| !owners.contains_key(out) && !constants.contains(out));
        match self.ops.iter().find(is_lost) {
            Some(lost) => Err(self.refuse(*lost, "found no update that it belongs to; expected one")),
            None => Ok(owners),
        }
    }

    /// The variables that ties an op to its parameter.
    fn touched<'s>(
        &'s self,
        op: &StageOp<'g>,
        constants: &'s BTreeSet<VariableIndex>,
    ) -> impl Iterator<Item = VariableIndex> + 's {
        let node = op.node;
        node.inputs.iter().chain(&node.outputs).copied().filter(|index| !constants.contains(index))
    }

    /// Variables that ops only read, and temporaries that are computed from such.
    fn constants(&self) -> BTreeSet<VariableIndex> {
        let kept = |index: &VariableIndex| self.graph.variable(*index).purpose.is_persistable();
        let read = self.ops.iter().flat_map(|op| &op.node.inputs).copied();
        let mut constants: BTreeSet<VariableIndex> =
            read.filter(|index| kept(index) && !self.written.contains(index)).collect();
        for op in &self.ops {
            let is_constant = op.node.inputs.iter().all(|input| constants.contains(input));
            if is_constant && !op.node.outputs.iter().any(kept) {
                constants.extend(&op.node.outputs);
            }
        }
        constants
    }

    /// The total that the ops of one update read: what the accumulator of its channel gives.
    fn total(&self, update: StageOp<'_>) -> Option<StageTotal> {
        let parameter = self.name(update.node.inputs[0]);
        let nodes = || self.graph.scopes().iter().flat_map(|scope| &scope.nodes);
        let channel = total_channel(parameter);
        let received =
            nodes().find(|node| matches!(&node.kind, OpKind::Recv { channel: found } if *found == channel))?;
        let is_merge = |node: &&Node| {
            matches!(node.kind, OpKind::GradientAccumulator { .. }) && node.inputs[0] == received.outputs[0]
        };
        let number = nodes().find(is_merge)?.outputs[0];
        let share = share_channel(parameter);
        let sent = nodes().find(|node| matches!(&node.kind, OpKind::Send { channel, .. } if *channel == share));
        Some(StageTotal { number, share: sent.map(|node| (node.inputs[0], share)), channel })
    }

    /// The gradient that the ops of one update begin with.
    fn merged(
        &self,
        update: StageOp<'_>,
        ops: &[StageOp<'_>],
        total: Option<&StageTotal>,
    ) -> Result<VariableIndex, Failure> {
        let arrives = |index: &VariableIndex| {
            !self.written.contains(index) && !self.graph.variable(*index).purpose.is_persistable()
        };
        let is_gradient = |index: &VariableIndex| arrives(index) && total.is_none_or(|total| total.number != *index);
        let found: BTreeSet<VariableIndex> =
            ops.iter().flat_map(|op| &op.node.inputs).copied().filter(is_gradient).collect();
        match found.iter().copied().collect::<Vec<_>>()[..] {
            [merged] => Ok(merged),
            _ => {
                let names: Vec<&str> = found.iter().map(|index| self.name(*index)).collect();
                Err(self.refuse(update, &format!("found the gradients {names:?} of one parameter; expected one")))
            }
        }
    }

    fn stage(&self, update: StageOp<'g>, ops: &[StageOp<'g>]) -> Result<ServerStage<'g>, Failure> {
        let total = self.total(update);
        let merged = self.merged(update, ops, total.as_ref())?;
        let (Some(prepared), OpKind::Update { config }) = (&update.node.rule, &update.node.kind) else {
            unreachable!("an update has a rule")
        };
        if ops.len() == 1
            && update.node.inputs[1] == merged
            && update.node.inputs.len() == update.node.outputs.len() + 1
        {
            let config = config.clone();
            return Ok(ServerStage { update: update.node, merged, config, states: Vec::new(), total });
        }
        if prepared.rule().stage.is_some() {
            return Err(
                self.refuse(update, "found ops around an update whose config has a stage; expected one of them")
            );
        }
        let mut text = StageText::new(self, update, merged, total.as_ref())?;
        for op in ops {
            text.op(*op).map_err(|reason| self.refuse(*op, &reason))?;
        }
        let stage = text.checked().map_err(|(op, failure)| self.refuse(op, &failure.to_string()))?;
        let mut rule = prepared.rule().clone();
        rule.clip_norm = None;
        rule.stage = Some(Arc::new(stage));
        let refused = |failure: Failure| self.refuse(update, &format!("with the ops around it, {failure}"));
        let rule = Prepared::new(rule).map_err(refused)?.into_rule();
        let config = ParameterConfig::of(rule).to_text();
        let states = text.states();
        Ok(ServerStage { update: update.node, merged, config, states, total })
    }

    /// The op that writes a temporary.
    fn writer(&self, index: VariableIndex) -> Option<StageOp<'g>> {
        self.ops.iter().find(|op| op.node.outputs.contains(&index)).copied()
    }

    /// Whether an op after the update reads a variable.
    fn is_read_after(&self, update: StageOp<'_>, index: VariableIndex) -> bool {
        let is_later = |op: &&StageOp<'_>| (update.block, update.place) < (op.block, op.place);
        self.ops.iter().filter(is_later).any(|op| op.node.inputs.contains(&index))
    }
}

/// The text of a stage, or the op whose line is refused.
type CheckedStage<'g> = Result<CheckedRule, (StageOp<'g>, Failure)>;
