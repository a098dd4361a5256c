//! A program without communication, run op after op.

use crate::arithmetic::Arithmetic;
use crate::graph::{Graph, Node, VariableIndex};
use crate::op::{OpKind, OpRole};
use crate::value::{Elements, Tensor, VariableValue};
use crate::values::VariableValues;
use crate::variable::VariableFacts;
use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::port::Kernels;

use super::update::apply_update;

/// The values of a graph's variables, and the simplest way to run it: block 0, in program order. Other ways of running
/// are compared with it.
pub struct PlainRun<'a> {
    graph: &'a Graph,
    arithmetic: &'a mut dyn Arithmetic,
    kernels: &'a mut dyn Kernels,
    values: VariableValues,
}

impl<'a> PlainRun<'a> {
    /// Runs the ops of the role [`Initialise`](OpRole::Initialise).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn new(
        graph: &'a Graph,
        arithmetic: &'a mut dyn Arithmetic,
        kernels: &'a mut dyn Kernels,
    ) -> Result<Self, Failure> {
        let values = VariableValues::new(graph, PROGRAM_MEMORY_BYTES_MAX);
        let mut run = Self { graph, arithmetic, kernels, values };
        run.ops(|role| role == OpRole::Initialise)?;
        Ok(run)
    }

    /// Sets a variable: data for the next step, or a parameter or a state.
    ///
    /// # Errors
    /// When there is no such variable, or it cannot hold the value; names it, what was found and expected.
    pub fn set(&mut self, name: &str, value: impl Into<VariableValue>) -> Result<(), Failure> {
        let index = self.graph.find(name).ok_or_else(|| Failure::call(format!("found no variable {name:?}")))?;
        let value = value.into();
        let refuse = |failure| Failure::call(format!("variable {name:?}: {failure}"));
        value.check(&self.graph.variable(index).facts, &mut None).map_err(refuse)?;
        self.values.set(index, value);
        Ok(())
    }

    /// A variable's value, if it has one; a temporary's is that of the last step.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&VariableValue> {
        self.graph.find(name).and_then(|index| self.values.get(index))
    }

    /// Runs every other op once.
    ///
    /// # Errors
    /// When a variable has no value, the data have different batches, an op is flow, or an op refuses its inputs; names
    /// the op.
    pub fn step(&mut self) -> Result<(), Failure> {
        self.values.check_batch(self.graph)?;
        self.ops(|role| role != OpRole::Initialise)
    }

    fn ops(&mut self, wanted: impl Fn(OpRole) -> bool) -> Result<(), Failure> {
        for (place, node) in self.graph.scopes()[0].nodes.iter().enumerate().filter(|(_, node)| wanted(node.role)) {
            let refuse = |reason| Failure::call(format!("{}: {reason}", self.graph.label(0, place)));
            run_node(self.graph, &mut self.values, self.arithmetic, self.kernels, node).map_err(refuse)?;
        }
        Ok(())
    }
}

/// Runs an op that is no flow on the values of a graph's variables.
///
/// # Errors
/// When a variable has no value, the op is flow, or it refuses its inputs; the caller knows the op.
pub(crate) fn run_node(
    graph: &Graph,
    values: &mut VariableValues,
    arithmetic: &mut dyn Arithmetic,
    kernels: &mut dyn Kernels,
    node: &Node,
) -> Result<(), Failure> {
    if node.kind.is_flow() {
        return Err(Failure::call("found flow; expected arithmetic and updates only"));
    }
    values.check_room(graph, node)?;
    if node.rule.is_some() {
        return update(graph, values, kernels, node);
    }
    let inputs = node.inputs.iter().map(|index| read(graph, values, *index));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let facts: Vec<&VariableFacts> = node.outputs.iter().map(|index| &graph.variable(*index).facts).collect();
    let outputs = match &node.kind {
        OpKind::Given { name, first } => {
            vec![graph.given().tensor(name, *first, facts[0])?.into()]
        }
        _ => arithmetic.run(node, &inputs, &facts)?,
    };
    for (index, value) in node.outputs.iter().zip(outputs) {
        values.set(*index, value);
    }
    Ok(())
}

fn update(graph: &Graph, values: &mut VariableValues, kernels: &mut dyn Kernels, node: &Node) -> Result<(), Failure> {
    let rule = node.rule.as_ref().expect("an update has a rule");
    // No value is moved before all inputs are known to be present.
    let slope = node.inputs[1];
    node.inputs.iter().try_for_each(|index| read(graph, values, *index).map(|_| ()))?;
    let rate = rate(values, node);
    // A parameter may be its own gradient.
    let is_own = node.outputs.contains(&slope);
    let gradient = if is_own { values.get(slope).cloned() } else { values.take(slope) };
    let gradient = gradient.expect("it is there");
    let mut own: Vec<Tensor> = node.outputs.iter().map(|index| take(values, *index)).collect();
    let outcome = apply_update(kernels, rule, &mut own, &gradient, rate);
    for (index, tensor) in node.outputs.iter().zip(own) {
        values.set(*index, VariableValue::from(tensor));
    }
    if !is_own {
        values.set(slope, gradient);
    }
    outcome
}

/// The learning rate that the update is given behind its states.
fn rate(values: &VariableValues, node: &Node) -> Option<f64> {
    let index = node.inputs.get(node.outputs.len() + 1)?;
    match values.get(*index).expect("every input is there").tensor().elements() {
        Elements::Float32(rates) => Some(rates[0].into()),
        Elements::Float64(rates) => Some(rates[0]),
        other => panic!("a rate of {} in a checked program", other.element_type()),
    }
}

fn take(values: &mut VariableValues, index: VariableIndex) -> Tensor {
    match values.take(index) {
        Some(VariableValue::Dense(tensor)) => tensor,
        other => panic!("an update of {other:?} in a checked program"),
    }
}

/// The value of a variable.
///
/// # Errors
/// When it has none.
pub(crate) fn read<'v>(
    graph: &Graph,
    values: &'v VariableValues,
    index: VariableIndex,
) -> Result<&'v VariableValue, Failure> {
    values.get(index).ok_or_else(|| missing(graph, index))
}

fn missing(graph: &Graph, index: VariableIndex) -> Failure {
    let variable = graph.variable(index);
    Failure::call(format!("found no value in {} {:?}", variable.purpose.name(), variable.name))
}
