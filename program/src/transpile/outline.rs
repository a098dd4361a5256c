//! Index of a program by variable name, built once, so that dividing a program of many thousand layers takes little
//! more time than reading it.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::Graph;
use crate::op::{Op, OpRole};
use crate::variable::{Purpose, Variable, VariableFacts};

/// Declarations and writers of the variables of block 0.
pub(super) struct Outline<'a> {
    graph: &'a Graph,
    declared: BTreeMap<&'a str, usize>,
    /// The ops that write a variable, in order.
    writers: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Outline<'a> {
    pub(super) fn of(graph: &'a Graph) -> Self {
        let variables = graph.program().blocks[0].variables.iter().enumerate();
        let declared = variables.map(|(place, known)| (known.name.as_str(), place)).collect();
        let mut writers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (place, op) in ops(graph) {
            op.outputs.iter().for_each(|output| writers.entry(output).or_default().push(place));
        }
        Self { graph, declared, writers }
    }

    pub(super) fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// A variable that is declared.
    pub(super) fn declared(&self, name: &str) -> Option<&'a Variable> {
        self.declared.get(name).map(|place| &self.graph.program().blocks[0].variables[*place])
    }

    /// The declared ones of these variables, in order of declaration.
    pub(super) fn in_order<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Vec<&'a Variable> {
        let places: BTreeSet<usize> = names.into_iter().filter_map(|name| self.declared.get(name).copied()).collect();
        places.into_iter().map(|place| &self.graph.program().blocks[0].variables[place]).collect()
    }

    /// The ops that write a variable, in order.
    pub(super) fn writers(&self, name: &str) -> impl Iterator<Item = &'a Op> {
        self.places(name).iter().map(|place| self.op(*place))
    }

    /// The ops of the role [`Initialise`](OpRole::Initialise) that these variables need, in order: those that fill
    /// them, and transitively those that fill the inputs of such an op.
    pub(super) fn beginnings<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Vec<usize> {
        let begins = |place: &usize| self.op(*place).role == OpRole::Initialise;
        let fillers = |name: &str| self.places(name).iter().copied().filter(begins);
        let mut pending: BTreeSet<usize> = names.into_iter().flat_map(fillers).collect();
        let mut places = Vec::new();
        while let Some(place) = pending.pop_last() {
            places.push(place);
            let read = self.op(place).inputs.iter();
            pending.extend(read.flat_map(|name| fillers(name)).filter(|before| *before < place));
        }
        places.reverse();
        places
    }

    fn places(&self, name: &str) -> &[usize] {
        self.writers.get(name).map_or(&[], Vec::as_slice)
    }

    fn op(&self, place: usize) -> &'a Op {
        &self.graph.program().blocks[0].ops[place]
    }
}

/// The ops of block 0 with their places.
pub(super) fn ops(graph: &Graph) -> impl Iterator<Item = (usize, &Op)> {
    graph.program().blocks[0].ops.iter().enumerate()
}

/// The declaration of a variable of block 0, or its inferred facts.
pub(super) fn variable<'a>(graph: &'a Graph, name: &str) -> (&'a VariableFacts, Purpose) {
    let index = graph.find(name).expect("a name of the program's own");
    let variable = graph.variable(index);
    (&variable.facts, variable.purpose)
}
