//! Ties of variables: which ones the ops of an optimizer join.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::Graph;
use crate::op::{Op, OpRole};
use crate::variable::{Purpose, VariableFacts};

use super::outline::ops;

/// Union-find over the variables that join groups.
pub(super) struct Ties<'a> {
    places: BTreeMap<&'a str, usize>,
    parents: Vec<usize>,
    /// The outputs of optimizer ops.
    pub(super) written: BTreeSet<&'a str>,
}

impl<'a> Ties<'a> {
    /// An op joins its outputs with its inputs, except inputs that no op writes. Initialisation joins too: a state that
    /// is computed from a parameter lives with it.
    ///
    /// Optimizer ops at places that are `apart` join nothing, and names that are `loose` are not joined.
    pub(super) fn new(graph: &'a Graph, apart: &dyn Fn(usize) -> bool, loose: &dyn Fn(&str) -> bool) -> Self {
        let written = optimizer_ops(graph).flat_map(|(_, op)| &op.outputs).map(String::as_str).collect();
        let mut ties = Self { places: BTreeMap::new(), parents: Vec::new(), written };
        for (_, op) in optimizer_ops(graph).filter(|(place, _)| !apart(*place)) {
            let tied =
                |name: &&str| !loose(name) && (ties.written.contains(name) || !purpose(graph, name).is_persistable());
            let names: Vec<&str> = operands(op).filter(tied).collect();
            ties.tie(&names);
        }
        for (_, op) in ops(graph).filter(|(_, op)| op.role == OpRole::Initialise) {
            let names: Vec<&str> = operands(op).collect();
            ties.tie(&names);
        }
        ties
    }

    fn tie(&mut self, names: &[&'a str]) {
        let places: Vec<usize> = names.iter().map(|name| self.place(name)).collect();
        for pair in places.windows(2) {
            let (one, other) = (self.find(pair[0]), self.find(pair[1]));
            self.parents[one.max(other)] = one.min(other);
        }
    }

    /// Whether an optimizer op writes a variable.
    pub(super) fn is_written(&self, name: &str) -> bool {
        self.written.contains(name)
    }

    pub(super) fn root(&mut self, name: &'a str) -> usize {
        let place = self.place(name);
        self.find(place)
    }

    fn place(&mut self, name: &'a str) -> usize {
        let next = self.parents.len();
        let place = *self.places.entry(name).or_insert(next);
        if place == next {
            self.parents.push(next);
        }
        place
    }

    fn find(&mut self, mut place: usize) -> usize {
        while self.parents[place] != place {
            self.parents[place] = self.parents[self.parents[place]];
            place = self.parents[place];
        }
        place
    }
}

/// Whether a variable is one number, of which every piece has its own.
pub(super) fn is_number(facts: &VariableFacts) -> bool {
    matches!(facts, VariableFacts::Dense { shape, .. } if shape.is_empty())
}

/// The ops of the role `optimize` that write anything, with their places.
pub(super) fn optimizer_ops(graph: &Graph) -> impl Iterator<Item = (usize, &Op)> {
    ops(graph).filter(|(_, op)| op.role == OpRole::Optimize && !op.outputs.is_empty())
}

fn operands(op: &Op) -> impl Iterator<Item = &str> {
    op.inputs.iter().chain(&op.outputs).map(String::as_str)
}

/// The purpose of a variable; an undeclared one is a temporary.
pub(super) fn purpose(graph: &Graph, name: &str) -> Purpose {
    graph.find(name).map_or(Purpose::Temporary, |index| graph.variable(index).purpose)
}
