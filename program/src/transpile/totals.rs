//! Ops that make numbers of several parameters' numbers, such as the norm of all gradients.
//!
//! ```text
//! server of v    share = reduce_sum(v@gradient * v@gradient);  send(share);  total = recv;  v = update(v, .. total ..)
//! trainers       shares = recv of each;  total = sqrt(sum(shares));  send(total) to each
//! ```
//!
//! These ops tie no groups: trainers run them, on the shares that each group's server sends once its gradients are
//! merged.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::Graph;
use crate::op::{Op, OpKind};
use crate::variable::{Purpose, VariableFacts};

use super::ties::{Ties, is_number, optimizer_ops, purpose};

/// The ops that trainers run between two parts of the optimizer.
#[derive(Debug, Default)]
pub(super) struct TotalOps<'a> {
    /// Their places in block 0, in order, with those of the constants that they read.
    pub(super) ops: Vec<usize>,
    /// The places of ops that no group has.
    apart: BTreeSet<usize>,
    /// The numbers that they make, constants aside.
    made: BTreeSet<&'a str>,
    /// Their inputs.
    read: BTreeSet<&'a str>,
}

/// The variables that a number is computed from.
#[derive(Clone, Copy, PartialEq)]
enum NumberSource {
    /// No variable that an op writes.
    Constants,
    /// Variables of one group.
    Group(usize),
    /// Variables of several groups.
    Groups,
}

impl<'a> TotalOps<'a> {
    pub(super) fn find(graph: &'a Graph) -> Self {
        let numbers: Vec<(usize, &Op)> = optimizer_ops(graph).filter(|(_, op)| is_of_numbers(graph, op)).collect();
        let computed: BTreeSet<&str> = numbers.iter().flat_map(|(_, op)| &op.outputs).map(String::as_str).collect();
        let places: BTreeSet<usize> = numbers.iter().map(|(place, _)| *place).collect();
        let mut ties = Ties::new(graph, &|place| places.contains(&place), &|name| computed.contains(name));
        let mut sources: BTreeMap<&str, NumberSource> = BTreeMap::new();
        let mut new = Self::default();
        for (place, op) in &numbers {
            let mut source = NumberSource::Constants;
            for name in op.inputs.iter().map(String::as_str) {
                let found = match sources.get(name) {
                    Some(known) => *known,
                    None if purpose(graph, name).is_persistable() && !ties.is_written(name) => continue,
                    None => NumberSource::Group(ties.root(name)),
                };
                source = match (source, found) {
                    (NumberSource::Constants, found) => found,
                    (source, NumberSource::Constants) => source,
                    (source, found) if source == found => source,
                    _ => NumberSource::Groups,
                };
            }
            sources.extend(op.outputs.iter().map(|output| (output.as_str(), source)));
            if source == NumberSource::Groups {
                new.ops.push(*place);
                new.made.extend(op.outputs.iter().map(String::as_str));
            }
        }
        new.read = new
            .ops
            .iter()
            .flat_map(|place| &graph.program().blocks[0].ops[*place].inputs)
            .map(String::as_str)
            .collect();
        new.apart = new.ops.iter().copied().collect();
        new.add_constants(graph, &numbers, &sources);
        new
    }

    /// Adds the ops of constants that the others read; those that no group reads are apart.
    fn add_constants(&mut self, graph: &'a Graph, numbers: &[(usize, &'a Op)], sources: &BTreeMap<&str, NumberSource>) {
        for (place, op) in numbers.iter().rev() {
            let is_constant = |name: &String| sources.get(name.as_str()) == Some(&NumberSource::Constants);
            if !op.outputs.iter().all(is_constant) || !op.outputs.iter().any(|name| self.read.contains(name.as_str())) {
                continue;
            }
            let reads = |other: &Op| op.outputs.iter().any(|name| other.inputs.contains(name));
            if !optimizer_ops(graph).any(|(other, reader)| !self.apart.contains(&other) && reads(reader)) {
                self.apart.insert(*place);
            }
            self.ops.push(*place);
            self.read.extend(op.inputs.iter().map(String::as_str));
        }
        self.ops.sort_unstable();
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// Whether no group has the op at this place.
    pub(super) fn is_apart(&self, place: usize) -> bool {
        self.apart.contains(&place)
    }

    /// Whether they make this number.
    pub(super) fn makes(&self, name: &str) -> bool {
        self.made.contains(name)
    }

    /// Whether they read this number.
    pub(super) fn reads(&self, name: &str) -> bool {
        self.read.contains(name)
    }

    /// Whether one of them writes this variable.
    pub(super) fn writes(&self, graph: &Graph, name: &str) -> bool {
        self.ops.iter().any(|place| graph.program().blocks[0].ops[*place].outputs.iter().any(|output| output == name))
    }
}

/// Whether an op computes temporary numbers of numbers.
fn is_of_numbers(graph: &Graph, op: &Op) -> bool {
    let is_single = |name: &String| graph.facts(name).is_some_and(|facts: &VariableFacts| is_number(facts));
    let is_new = |name: &String| is_single(name) && purpose(graph, name) == Purpose::Temporary;
    !matches!(op.kind, OpKind::Update { .. }) && op.inputs.iter().all(is_single) && op.outputs.iter().all(is_new)
}

/// The channel on which a parameter's server sends its share.
pub(crate) fn share_channel(parameter: &str) -> String {
    format!("{parameter}@share")
}

/// The channel on which trainers send a parameter's total.
pub(crate) fn total_channel(parameter: &str) -> String {
    format!("{parameter}@total")
}
