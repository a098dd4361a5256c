//! Pulls of rows: the tables on servers that trainers only look up, and the ids that they ask for in a step.
//!
//! A table whose gradient is selected rows does not travel. An op `pull_rows` asks for the rows of all lookups whose
//! ids are known where the first of them is; a lookup whose ids are computed later, perhaps from rows of the same
//! table, has one of its own.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::{Graph, Node};
use crate::op::{OpKind, OpRole};
use crate::variable::VariableFacts;
use pserver_core::limits::PROGRAM_OPERANDS_MAX;

use super::group::Groups;

/// A table of which trainers pull rows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PulledTable<'a> {
    /// The count of its updates, which its server sends in place of the table.
    pub(super) count: &'a str,
    /// One or more, in the order in which trainers ask.
    pub(super) pulls: Vec<Pull<'a>>,
}

/// Lookups whose rows are pulled together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pull<'a> {
    /// The variables that have the ids, each once.
    pub(super) ids: Vec<&'a str>,
    /// The lookups, by their places in block 0.
    pub(super) lookups: Vec<usize>,
    /// The last op that computes ids, by its place in block 0; none where all are fed.
    pub(super) after: Option<usize>,
}

/// The tables among `wanted`, the variables on servers that trainers read.
pub(super) fn tables<'a>(
    graph: &'a Graph,
    groups: &Groups,
    wanted: &BTreeMap<&'a str, usize>,
) -> BTreeMap<&'a str, PulledTable<'a>> {
    let nodes = &graph.scopes()[0].nodes;
    let name = |index| graph.variable(index).name.as_str();
    let mut tables = BTreeMap::new();
    let has_rows = |name: &String| matches!(graph.facts(name), Some(VariableFacts::SelectedRows { .. }));
    for group in groups.all.iter().filter(|group| group.arrivals.iter().any(has_rows)) {
        for update in group.ops.iter().map(|place| &nodes[*place]).filter(|node| node.rule.is_some()) {
            let table = name(update.inputs[0]);
            if wanted.contains_key(table) {
                tables.insert(table, PulledTable { count: name(update.inputs[2]), pulls: Vec::new() });
            }
        }
    }
    let mut computed: BTreeMap<&str, usize> = BTreeMap::new();
    let mut read_whole = BTreeSet::new();
    for (place, node) in nodes.iter().enumerate().filter(|(_, node)| is_of_trainers(node)) {
        let mut others = &node.inputs[..];
        if let (OpKind::LookupTable { .. }, [table, ids]) = (&node.kind, others) {
            others = &node.inputs[1..];
            if let Some(table) = tables.get_mut(name(*table)) {
                table.look_up(place, name(*ids), computed.get(name(*ids)).copied());
            }
        }
        read_whole.extend(others.iter().map(|index| name(*index)));
        computed.extend(node.outputs.iter().map(|output| (name(*output), place)));
    }
    tables.retain(|name, _| !read_whole.contains(name));
    tables
}

const fn is_of_trainers(node: &Node) -> bool {
    matches!(node.role, OpRole::Forward | OpRole::Backward)
}

impl<'a> PulledTable<'a> {
    /// Adds a lookup to the first pull that comes after its ids are computed, or to a new one.
    fn look_up(&mut self, lookup: usize, ids: &'a str, computed: Option<usize>) {
        let fits = |pull: &&mut Pull<'_>| {
            let is_before = computed.is_none_or(|computed| computed < pull.lookups[0]);
            is_before && (pull.ids.contains(&ids) || pull.ids.len() + 1 < PROGRAM_OPERANDS_MAX)
        };
        let Some(pull) = self.pulls.iter_mut().find(fits) else {
            self.pulls.push(Pull { ids: vec![ids], lookups: vec![lookup], after: computed });
            return;
        };
        if !pull.ids.contains(&ids) {
            pull.ids.push(ids);
        }
        pull.lookups.push(lookup);
        pull.after = pull.after.max(computed);
    }
}
