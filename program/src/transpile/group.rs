//! Optimizer part of a program: groups of ops that share variables, and which groups may be cut by rows.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::{Graph, Node};
use crate::op::{Op, OpKind, OpRole};
use crate::variable::{Dim, Purpose, VariableFacts};
use pserver_core::error::Failure;

use super::outline::{Outline, ops};
use super::ties::{Ties, is_number, optimizer_ops, purpose};
use super::totals::TotalOps;

/// Ops of the role [`Optimize`](OpRole::Optimize) that share a variable, and therefore a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OpGroup {
    /// The optimizer ops, by their places in block 0.
    pub(super) ops: Vec<usize>,
    /// The parameters and states that they write, which live where they run; in the order of their declaration.
    pub(super) kept: Vec<String>,
    /// The parameters and states that they only read; each reader has a copy.
    pub(super) read: Vec<String>,
    /// The gradients that trainers compute for them, one piece each in every step.
    pub(super) arrivals: Vec<String>,
    /// The numbers of which trainers make numbers of several groups.
    pub(super) shares: Vec<String>,
    /// The numbers of several groups that its ops read.
    pub(super) totals: Vec<String>,
    /// Rows of its parameter, when it may be cut between any two of them.
    pub(super) rows: Option<u64>,
    /// The reason why it stays whole, when it does.
    pub(super) why_whole: String,
}

/// All groups, and the owner of each variable.
#[derive(Debug)]
pub(super) struct Groups<'a> {
    /// In the order of their first ops.
    pub(super) all: Vec<OpGroup>,
    /// The group that owns a variable.
    keeper: BTreeMap<String, usize>,
    /// The ops between groups.
    pub(super) totals: TotalOps<'a>,
}

impl<'a> Groups<'a> {
    /// Finds the optimizer part by its roles.
    ///
    /// # Errors
    /// When the program is a part already, has no optimizer part, or ties it to the rest by more than gradients in and
    /// parameters and states out.
    pub(super) fn find(outline: &Outline<'a>) -> Result<Self, Failure> {
        let graph = outline.graph();
        check_whole(graph)?;
        let totals = TotalOps::find(graph);
        let has_totals = !totals.is_empty();
        let found = Self::checked(outline, totals);
        match found {
            // Numbers that trainers cannot make join their groups.
            Err(failure) if has_totals => Self::checked(outline, TotalOps::default()).map_err(|_| failure),
            found => found,
        }
    }

    fn checked(outline: &Outline<'a>, totals: TotalOps<'a>) -> Result<Self, Failure> {
        let graph = outline.graph();
        let ties = Ties::new(graph, &|place| totals.is_apart(place), &|name| totals.makes(name));
        let groups = Self::of(outline, ties, totals);
        if groups.all.is_empty() {
            return Err(Failure::call("found no op of the role optimize; expected the ops that append_optimizer adds"));
        }
        groups.check_trainers(graph)?;
        groups.all.iter().try_for_each(|group| group.check(outline))?;
        Ok(groups)
    }

    /// The group that keeps a variable.
    pub(super) fn keeper(&self, name: &str) -> Option<usize> {
        self.keeper.get(name).copied()
    }

    fn of(outline: &Outline<'a>, mut ties: Ties<'a>, totals: TotalOps<'a>) -> Self {
        let graph = outline.graph();
        let mut by_root: BTreeMap<usize, usize> = BTreeMap::new();
        let mut groups = Self { all: Vec::new(), keeper: BTreeMap::new(), totals };
        for (place, op) in optimizer_ops(graph).filter(|(place, _)| !groups.totals.is_apart(*place)).collect::<Vec<_>>()
        {
            let root = ties.root(&op.outputs[0]);
            let number = *by_root.entry(root).or_insert_with(|| {
                groups.all.push(OpGroup::default());
                groups.all.len() - 1
            });
            groups.all[number].ops.push(place);
        }
        for (number, group) in groups.all.iter_mut().enumerate() {
            group.fill(outline, &ties.written, &groups.totals);
            groups.keeper.extend(group.kept.iter().map(|name| (name.clone(), number)));
        }
        groups
    }

    /// Refuses ops of trainers that only servers may run, or that need variables which only servers have.
    fn check_trainers(&self, graph: &Graph) -> Result<(), Failure> {
        let mut is_updated = BTreeSet::new();
        let mut hidden = BTreeSet::new();
        for (place, op) in ops(graph) {
            if op.role == OpRole::Optimize {
                let (kept, own): (Vec<_>, Vec<_>) = op.outputs.iter().partition(|name| self.keeper(name).is_some());
                is_updated.extend(kept);
                hidden.extend(own);
                continue;
            }
            let refuse = |found: String| Err(Failure::call(format!("{}: found {found}", graph.label(0, place))));
            if let Some(name) = op.inputs.iter().find(|name| hidden.contains(name)) {
                return refuse(format!(
                    "{name:?}, which an op of the role optimize writes; expected only parameters and states of it, or \
                     the role optimize for this op, as all ops of the optimizer have"
                ));
            }
            let is_parameter = |name: &&String| purpose(graph, name) == Purpose::Parameter;
            if let (Some(name), true) = (op.outputs.iter().find(is_parameter), op.role != OpRole::Initialise) {
                return refuse(format!(
                    "the parameter {name:?} written by an op of the role {}; expected the role optimize, as all ops of \
                     the optimizer have",
                    op.role.name()
                ));
            }
            if let Some(name) = op.inputs.iter().find(|name| is_updated.contains(name)) {
                return refuse(format!("{name:?} read after its update; expected every reader before it"));
            }
            let written = op.outputs.iter().find(|name| self.keeper(name).is_some());
            if let (Some(name), true) = (written, op.role != OpRole::Initialise) {
                return refuse(format!(
                    "{name:?}, which ops of the role optimize write too; expected one side to write it"
                ));
            }
        }
        Ok(())
    }
}

impl OpGroup {
    /// Its name in errors and reports: its first parameter, or its first state.
    pub(super) fn name(&self, graph: &Graph) -> String {
        let is_parameter = |name: &&String| purpose(graph, name) == Purpose::Parameter;
        self.kept.iter().find(is_parameter).or(self.kept.first()).cloned().unwrap_or_default()
    }

    /// Sorts the variables of its ops by use.
    fn fill(&mut self, outline: &Outline<'_>, written: &BTreeSet<&str>, totals: &TotalOps<'_>) {
        let graph = outline.graph();
        let block = &graph.program().blocks[0];
        let mut touched = BTreeSet::new();
        for place in &self.ops {
            let op = &block.ops[*place];
            for name in &op.inputs {
                let is_new = touched.insert(name.as_str());
                if is_new && totals.makes(name) {
                    self.totals.push(name.clone());
                }
                if is_new && !written.contains(name.as_str()) && !purpose(graph, name).is_persistable() {
                    self.arrivals.push(name.clone());
                }
            }
            self.shares.extend(op.outputs.iter().filter(|name| totals.reads(name) && !is_constant(op)).cloned());
            touched.extend(op.outputs.iter().map(String::as_str));
        }
        for variable in outline.in_order(touched).into_iter().filter(|known| known.purpose.is_persistable()) {
            let list = if written.contains(variable.name.as_str()) { &mut self.kept } else { &mut self.read };
            list.push(variable.name.clone());
        }
        match self.cut(outline) {
            Ok(rows) => self.rows = Some(rows),
            Err(why) => self.why_whole = why,
        }
    }

    /// Refuses a gradient that several trainers cannot send.
    fn check(&self, outline: &Outline<'_>) -> Result<(), Failure> {
        let graph = outline.graph();
        let refuse = |text: String| Err(Failure::call(format!("{}: {text}", graph.label(0, self.ops[0]))));
        if self.arrivals.is_empty() {
            return refuse("found no gradient among its inputs; expected one, whose arrival runs it".to_owned());
        }
        self.check_totals().or_else(&refuse)?;
        if let Some(name) = self.read.iter().find(|name| is_written_by_trainers(outline, name)) {
            return refuse(format!(
                "found {name:?}, which trainers write and keep; expected gradients, and state of the optimizer"
            ));
        }
        for name in &self.arrivals {
            let facts = graph.facts(name).expect("a name that an op reads has facts");
            let expected = match facts {
                VariableFacts::SelectedRows { .. } => continue,
                VariableFacts::Dense { shape, .. } if !shape.contains(&Dim::Batch) => continue,
                VariableFacts::Dense { .. } => "fixed dimensions, so that pieces of several trainers can be added",
                VariableFacts::Queue { .. } | VariableFacts::Strings => "a gradient",
            };
            return refuse(format!("found {name:?}, which is {facts}; expected {expected}"));
        }
        Ok(())
    }

    /// Refuses numbers of several groups beyond one that it reads, and one that it gives for it.
    fn check_totals(&self) -> Result<(), String> {
        match (&self.shares[..], &self.totals[..]) {
            (_, []) if self.shares.is_empty() => Ok(()),
            ([] | [_], [_]) => Ok(()),
            (shares, []) => Err(format!(
                "found {shares:?}, which a number of several parameters is made of, and no such number read; expected \
                 it read, as by a gradient that is clipped"
            )),
            (_, totals @ [_, _, ..]) => {
                Err(format!("found the numbers {totals:?} of several parameters; expected one"))
            }
            (shares, _) => {
                Err(format!("found {shares:?}, which a number of several parameters is made of; expected one of them"))
            }
        }
    }

    /// The number of its parameter's rows, when every op is element-wise and every initialisation can be done in
    /// pieces.
    fn cut(&self, outline: &Outline<'_>) -> Result<u64, String> {
        let graph = outline.graph();
        let nodes = || self.ops.iter().map(|place| (*place, &graph.scopes()[0].nodes[*place]));
        let parameters: Vec<&String> =
            self.kept.iter().filter(|name| purpose(graph, name) == Purpose::Parameter).collect();
        let [parameter] = parameters[..] else {
            return Err(format!("its optimizer ops have the parameters {parameters:?} in common"));
        };
        if nodes().filter(|(_, node)| node.rule.is_some()).count() > 1 {
            return Err("it has several updates".to_owned());
        }
        let shape = match graph.facts(parameter) {
            Some(VariableFacts::Dense { shape, .. }) => shape,
            _ => return Err("it is no tensor".to_owned()),
        };
        let Some(Dim::Fixed(rows @ 2..)) = shape.first() else { return Err("it has one row".to_owned()) };
        if let Some((place, _)) = nodes().find(|(_, node)| !is_element_wise(graph, node, shape)) {
            return Err(format!("{} is not element-wise", graph.label(0, place)));
        }
        match self.kept.iter().chain(&self.read).find(|name| !begins_from_nothing(outline, name)) {
            None => Ok(*rows),
            Some(name) => Err(format!("the initial value of {name:?} is computed of other variables")),
        }
    }
}

/// Whether an op computes each element of the parameter's shape from the same elements, and from numbers.
fn is_element_wise(graph: &Graph, node: &Node, shape: &[Dim]) -> bool {
    let mut touched = node.inputs.iter().chain(&node.outputs);
    let whole = |facts: &VariableFacts| is_number(facts) || is_cut_along(facts, shape);
    match &node.kind {
        OpKind::Update { .. } => node.rule.as_ref().is_some_and(|rule| rule.rule().is_element_wise()),
        OpKind::Scale { .. }
        | OpKind::Cast { .. }
        | OpKind::Fill { .. }
        | OpKind::Sum
        | OpKind::Sqrt
        | OpKind::Exp
        | OpKind::Log
        | OpKind::Tanh
        | OpKind::Abs
        | OpKind::Sign
        | OpKind::Relu
        | OpKind::Greater => touched.all(|index| whole(&graph.variable(*index).facts)),
        kind if kind.is_binary_arithmetic() => touched.all(|index| whole(&graph.variable(*index).facts)),
        _ => false,
    }
}

/// Whether an op computes a number of no variable.
fn is_constant(op: &Op) -> bool {
    matches!(op.kind, OpKind::Fill { .. })
}

/// Whether a variable has a row for each of the parameter's.
fn is_cut_along(facts: &VariableFacts, parameter: &[Dim]) -> bool {
    match facts {
        VariableFacts::Dense { shape, .. } => shape == parameter,
        VariableFacts::SelectedRows { height, .. } => parameter.first() == Some(&Dim::Fixed(*height)),
        VariableFacts::Queue { .. } | VariableFacts::Strings => false,
    }
}

/// Whether every initialising op of a variable has no inputs, so that pieces can be initialised alike.
fn begins_from_nothing(outline: &Outline<'_>, name: &str) -> bool {
    let mut fillers = outline.writers(name).filter(|op| op.role == OpRole::Initialise);
    fillers.all(|op| op.kind.is_filler())
}

/// Refuses a program that was divided before.
pub(super) fn check_whole(graph: &Graph) -> Result<(), Failure> {
    let blocks = graph.program().blocks.len();
    if let Some((place, op)) = ops(graph).find(|(_, op)| op.kind.is_flow() || op.role == OpRole::Communication) {
        let role = op.role.name();
        return Err(Failure::call(format!("{}: found the role {role}; expected no flow yet", graph.label(0, place))));
    }
    if blocks != 1 {
        return Err(Failure::call(format!("found a program of {blocks} blocks; expected one, without loops")));
    }
    Ok(())
}

fn is_written_by_trainers(outline: &Outline<'_>, name: &str) -> bool {
    outline.writers(name).any(|op| matches!(op.role, OpRole::Forward | OpRole::Backward))
}
