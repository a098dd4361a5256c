//! How what a server keeps begins: what its part says, and that it can be done.
//!
//! A server of a job makes no values. Tables of rows begin by themselves, each row as one op says; states begin as
//! their rule says; every other parameter is computed by the trainer that initialises.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pserver_core::error::Failure;
use pserver_core::program::executor::Executor;
use pserver_core::program::{Block, Graph, Node, OpKind, Program, Role, Value, VariableIndex};

use super::trainer::machine;

/// The ops of a part that fill what a server keeps.
pub(super) struct Beginnings<'g> {
    graph: &'g Graph,
    /// By variable, the ops that fill it, in order; the last one is what counts.
    fillers: BTreeMap<VariableIndex, Vec<&'g Node>>,
}

impl<'g> Beginnings<'g> {
    pub(super) fn of(graph: &'g Graph) -> Self {
        let mut fillers: BTreeMap<VariableIndex, Vec<&Node>> = BTreeMap::new();
        for node in graph.scopes()[0].nodes.iter().filter(|node| node.role == Role::Initialise) {
            node.outputs.iter().for_each(|output| fillers.entry(*output).or_default().push(node));
        }
        Self { graph, fillers }
    }

    /// The op that a parameter begins with. A table's rows begin where they are, so that op is told all it needs.
    pub(super) fn check(&self, parameter: VariableIndex, is_table: bool) -> Result<OpKind, String> {
        let fillers = self.fillers.get(&parameter).map_or(&[][..], Vec::as_slice);
        let last = fillers.last().ok_or("found nothing that fills it at the beginning; expected an op that does")?;
        if is_table && last.kind.initializer().is_none() {
            let found = last.kind.name();
            return Err(format!(
                "found {found} at the beginning of a table; expected fill, uniform or gaussian, by which servers make \
                 rows"
            ));
        }
        // An op that fills from nothing leaves nothing of what was there before.
        if last.kind.initializer().is_none() {
            self.check_read(parameter)?;
        }
        Ok(last.kind.clone())
    }

    /// Refuses a state that begins otherwise than servers begin it.
    pub(super) fn check_state(&self, state: VariableIndex, initial: f64) -> Result<(), String> {
        let found = match self.fillers.get(&state).and_then(|fillers| fillers.last()).map(|node| &node.kind) {
            Some(OpKind::Fill { value }) if *value == initial => return Ok(()),
            Some(OpKind::Fill { value }) => format!("fill(value={value:?})"),
            Some(other) => other.name().to_owned(),
            None => "nothing".to_owned(),
        };
        let name = &self.graph.variable(state).name;
        Err(format!(
            "found {found} at the beginning of the state {name:?}; expected fill(value={initial:?}), as the rule begins"
        ))
    }

    /// Refuses a beginning that reads what nothing has filled before it: itself, for instance.
    fn check_read(&self, parameter: VariableIndex) -> Result<(), String> {
        let mut filled = BTreeSet::new();
        for node in self.needed([parameter]) {
            if let Some(missing) = node.inputs.iter().find(|input| !filled.contains(*input)) {
                let (kind, name) = (node.kind.name(), &self.graph.variable(*missing).name);
                return Err(format!(
                    "found {kind} of {name:?} at the beginning, which nothing fills before; expected an op that does"
                ));
            }
            filled.extend(node.outputs.iter().copied());
        }
        Ok(())
    }

    /// The ops that these variables need, in the program's order.
    fn needed(&self, variables: impl IntoIterator<Item = VariableIndex>) -> Vec<&'g Node> {
        self.places(variables).into_iter().map(|place| &self.graph.scopes()[0].nodes[place]).collect()
    }

    /// Their places in block 0.
    fn places(&self, variables: impl IntoIterator<Item = VariableIndex>) -> Vec<usize> {
        let mut needed: BTreeSet<VariableIndex> = variables.into_iter().collect();
        let mut places = Vec::new();
        for (place, node) in self.graph.scopes()[0].nodes.iter().enumerate().rev() {
            if node.role == Role::Initialise && node.outputs.iter().any(|output| needed.contains(output)) {
                // What is filled from nothing needs no earlier op.
                if node.kind.initializer().is_some() {
                    needed.retain(|index| !node.outputs.contains(index));
                }
                needed.extend(node.inputs.iter().copied());
                places.push(place);
            }
        }
        places.reverse();
        places
    }
}

/// Runs the ops that fill these parameters of a part, once and in order, and gives their values.
///
/// # Errors
/// What an op refuses.
pub(super) fn values(graph: &Graph, names: &[&str]) -> Result<Vec<Value>, Failure> {
    let indices = || names.iter().map(|name| graph.find(name).expect("a part knows its parameters"));
    let places = Beginnings::of(graph).places(indices());
    let whole = &graph.program().blocks[0];
    let ops: Vec<_> = places.iter().map(|place| whole.ops[*place].clone()).collect();
    let touched: BTreeSet<&String> = ops.iter().flat_map(|op| op.inputs.iter().chain(&op.outputs)).collect();
    let variables = whole.variables.iter().filter(|known| touched.contains(&known.name)).cloned().collect();
    let program = Program { blocks: vec![Block { parent: None, variables, ops }] };
    let alone = Arc::new(Graph::new(program)?);
    let mut executor = Executor::new(Arc::clone(&alone), machine())?;
    let taken = names.iter().map(|name| alone.find(name).and_then(|index| executor.take(index)));
    Ok(taken.map(|value| value.expect("a beginning was checked, and has run")).collect())
}
