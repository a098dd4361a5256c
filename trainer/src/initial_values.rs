//! Initial values of server parameters: the initialising ops of a server's part, checked and run.
//!
//! A server computes no dense initial value. The initialising trainer computes it and sends it. A server initialises
//! the rows of a table by the one op that the part names, and states by their rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pserver_core::error::Failure;
use pserver_program::executor::Executor;
use pserver_program::{Block, Graph, Node, OpKind, OpRole, Program, VariableIndex, VariableValue};

use super::arithmetic::executor_parts;

/// The initialising ops of a part.
pub(super) struct InitialValues<'g> {
    graph: &'g Graph,
    /// The ops that write each variable, in order; the last one decides its value.
    fillers: BTreeMap<VariableIndex, Vec<&'g Node>>,
}

impl<'g> InitialValues<'g> {
    pub(super) fn of(graph: &'g Graph) -> Self {
        let mut fillers: BTreeMap<VariableIndex, Vec<&Node>> = BTreeMap::new();
        for node in graph.scopes()[0].nodes.iter().filter(|node| node.role == OpRole::Initialise) {
            node.outputs.iter().for_each(|output| fillers.entry(*output).or_default().push(node));
        }
        Self { graph, fillers }
    }

    /// The last initialising op of a parameter. A table needs an op that fills each row alone.
    pub(super) fn check(&self, parameter: VariableIndex, is_table: bool) -> Result<OpKind, String> {
        let fillers = self.fillers.get(&parameter).map_or(&[][..], Vec::as_slice);
        let last = fillers.last().ok_or("found no initialising op; expected one")?;
        if is_table && !last.kind.is_filler() {
            let found = last.kind.name();
            return Err(format!(
                "found {found} as the initialising op of a table; expected fill, uniform, gaussian or given, \
                 whose rows do not depend on each other"
            ));
        }
        // An op without inputs overwrites the value, so earlier ops need no check.
        if !last.kind.is_filler() {
            self.check_read(parameter)?;
        }
        Ok(last.kind.clone())
    }

    /// Refuses a state whose initial value is not that of the rule.
    pub(super) fn check_state(&self, state: VariableIndex, initial: f64) -> Result<(), String> {
        let found = match self.fillers.get(&state).and_then(|fillers| fillers.last()).map(|node| &node.kind) {
            Some(OpKind::Fill { value }) if *value == initial => return Ok(()),
            Some(OpKind::Fill { value }) => format!("fill(value={value:?})"),
            Some(other) => other.name().to_owned(),
            None => "nothing".to_owned(),
        };
        let name = &self.graph.variable(state).name;
        Err(format!(
            "found {found} as the initial value of the state {name:?}; expected fill(value={initial:?}), as in the rule"
        ))
    }

    /// Refuses an initialising op that reads a variable which no earlier op has written.
    fn check_read(&self, parameter: VariableIndex) -> Result<(), String> {
        let mut filled = BTreeSet::new();
        for node in self.needed([parameter]) {
            if let Some(missing) = node.inputs.iter().find(|input| !filled.contains(*input)) {
                let (kind, name) = (node.kind.name(), &self.graph.variable(*missing).name);
                return Err(format!(
                    "found the initialising op {kind} of {name:?}, which no earlier op writes; expected an op that does"
                ));
            }
            filled.extend(node.outputs.iter().copied());
        }
        Ok(())
    }

    /// The ops that these variables need, in the program's order.
    fn needed(&self, variables: impl IntoIterator<Item = VariableIndex>) -> Vec<&'g Node> {
        self.op_indices(variables).into_iter().map(|index| &self.graph.scopes()[0].nodes[index]).collect()
    }

    /// The indices of these ops in block 0.
    fn op_indices(&self, variables: impl IntoIterator<Item = VariableIndex>) -> Vec<usize> {
        let mut needed: BTreeSet<VariableIndex> = variables.into_iter().collect();
        let mut places = Vec::new();
        for (place, node) in self.graph.scopes()[0].nodes.iter().enumerate().rev() {
            if node.role == OpRole::Initialise && node.outputs.iter().any(|output| needed.contains(output)) {
                // An op without inputs needs no earlier op.
                if node.kind.is_filler() {
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

/// Runs the initialising ops that a parameter needs, in order, and returns its value.
///
/// # Errors
/// The failure of an op.
pub(super) fn initial_value(graph: &Graph, name: &str) -> Result<VariableValue, Failure> {
    let index = graph.find(name).expect("a part knows its parameters");
    let places = InitialValues::of(graph).op_indices([index]);
    let whole = &graph.program().blocks[0];
    let ops: Vec<_> = places.iter().map(|place| whole.ops[*place].clone()).collect();
    let touched: BTreeSet<&String> = ops.iter().flat_map(|op| op.inputs.iter().chain(&op.outputs)).collect();
    let variables = whole.variables.iter().filter(|known| touched.contains(&known.name)).cloned().collect();
    let program = Program { blocks: vec![Block { parent: None, variables, ops }] };
    let alone = Arc::new(graph.part(program)?);
    let mut executor = Executor::new(Arc::clone(&alone), executor_parts())?;
    let value = alone.find(name).and_then(|index| executor.take(index));
    Ok(value.expect("the initialising ops were checked, and have run"))
}
