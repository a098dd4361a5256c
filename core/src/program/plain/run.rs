//! A program without communication, run op after op.

use crate::error::Failure;
use crate::port::{Arithmetic, Kernels};
use crate::program::graph::{Graph, Node, VariableIndex};
use crate::program::op::Role;
use crate::program::value::{Tensor, Value};
use crate::program::variable::{Facts, Purpose};

use super::update::apply_update;

/// The values of a graph's variables, and the plainest way to run it: block 0, in the program's order. It is what other
/// ways of running are compared with.
pub struct PlainRun<'a> {
    graph: &'a Graph,
    arithmetic: &'a mut dyn Arithmetic,
    kernels: &'a mut dyn Kernels,
    values: Vec<Option<Value>>,
}

impl<'a> PlainRun<'a> {
    /// Runs the ops of the role [`Initialise`](Role::Initialise).
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn new(
        graph: &'a Graph,
        arithmetic: &'a mut dyn Arithmetic,
        kernels: &'a mut dyn Kernels,
    ) -> Result<Self, Failure> {
        let mut run = Self { graph, arithmetic, kernels, values: vec![None; graph.variables().len()] };
        run.ops(|role| role == Role::Initialise)?;
        Ok(run)
    }

    /// Sets a variable: data for the next step, or a parameter or a state.
    ///
    /// # Errors
    /// When there is no such variable, or it cannot hold the value; names it, what was found and expected.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) -> Result<(), Failure> {
        let index = self.graph.find(name).ok_or_else(|| Failure::call(format!("found no variable {name:?}")))?;
        let value = value.into();
        let refuse = |failure| Failure::call(format!("variable {name:?}: {failure}"));
        value.check(&self.graph.variable(index).facts, &mut None).map_err(refuse)?;
        self.values[index.place()] = Some(value);
        Ok(())
    }

    /// A variable's value, if it has one; a temporary's is that of the last step.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.graph.find(name).and_then(|index| self.values[index.place()].as_ref())
    }

    /// Runs every other op once.
    ///
    /// # Errors
    /// When a variable has no value, the data have different batches, an op is flow, or an op refuses its inputs; names
    /// the op.
    pub fn step(&mut self) -> Result<(), Failure> {
        let mut batch = None;
        for (variable, value) in self.graph.variables().iter().zip(&self.values) {
            if let (Purpose::Data, Some(value)) = (variable.purpose, value) {
                let refuse = |failure| Failure::call(format!("variable {:?}: {failure}", variable.name));
                value.check(&variable.facts, &mut batch).map_err(refuse)?;
            }
        }
        self.ops(|role| role != Role::Initialise)
    }

    fn ops(&mut self, wanted: impl Fn(Role) -> bool) -> Result<(), Failure> {
        for (place, node) in self.graph.scopes()[0].nodes.iter().enumerate().filter(|(_, node)| wanted(node.role)) {
            let refuse = |reason| Failure::call(format!("block 0, op {place} {}: {reason}", node.kind.name()));
            run_node(self.graph, &mut self.values, self.arithmetic, self.kernels, node).map_err(refuse)?;
        }
        Ok(())
    }
}

/// Runs an op that is no flow on the values of a graph's variables.
///
/// # Errors
/// When a variable has no value, the op is flow, or it refuses its inputs; the caller knows the op.
pub(in crate::program) fn run_node(
    graph: &Graph,
    values: &mut [Option<Value>],
    arithmetic: &mut dyn Arithmetic,
    kernels: &mut dyn Kernels,
    node: &Node,
) -> Result<(), Failure> {
    if node.kind.is_flow() {
        return Err(Failure::call("found flow; expected arithmetic and updates only"));
    }
    if node.rule.is_some() {
        return update(graph, values, kernels, node);
    }
    let inputs = node.inputs.iter().map(|index| read(graph, values, *index));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let facts: Vec<&Facts> = node.outputs.iter().map(|index| &graph.variable(*index).facts).collect();
    let outputs = arithmetic.run(node, &inputs, &facts)?;
    for (index, value) in node.outputs.iter().zip(outputs) {
        values[index.place()] = Some(value);
    }
    Ok(())
}

fn update(graph: &Graph, values: &mut [Option<Value>], kernels: &mut dyn Kernels, node: &Node) -> Result<(), Failure> {
    let rule = node.rule.as_ref().expect("an update has a rule");
    let gradient = read(graph, values, node.inputs[1])?.clone();
    let mut own = node.outputs.iter().map(|index| take(graph, values, *index)).collect::<Result<Vec<_>, _>>()?;
    let [parameter, count, states @ ..] = &mut own[..] else { unreachable!("an update has a count") };
    let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
    let outcome = apply_update(kernels, rule, parameter, &gradient, count, &mut states);
    for (index, tensor) in node.outputs.iter().zip(own) {
        values[index.place()] = Some(tensor.into());
    }
    outcome
}

fn take(graph: &Graph, values: &mut [Option<Value>], index: VariableIndex) -> Result<Tensor, Failure> {
    match values[index.place()].take() {
        Some(Value::Dense(tensor)) => Ok(tensor),
        Some(other) => panic!("an update of {other} in a checked program"),
        None => Err(missing(graph, index)),
    }
}

/// The value of a variable.
///
/// # Errors
/// When it has none.
pub(in crate::program) fn read<'v>(
    graph: &Graph,
    values: &'v [Option<Value>],
    index: VariableIndex,
) -> Result<&'v Value, Failure> {
    values[index.place()].as_ref().ok_or_else(|| missing(graph, index))
}

fn missing(graph: &Graph, index: VariableIndex) -> Failure {
    let variable = graph.variable(index);
    Failure::call(format!("found no value in {} {:?}", variable.purpose.name(), variable.name))
}
