//! Gradients: the ops that compute the derivatives of a program's loss by its parameters.

mod rules;

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;

use super::block::Program;
use super::graph::Graph;
use super::op::{Op, OpKind, OpRole};
use super::variable::{Purpose, Variable, VariableFacts};

use rules::OpGradient;

/// A parameter and the variable that holds its gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterGradient {
    /// The parameter.
    pub parameter: String,
    /// Its gradient: dense, or selected rows when it is only looked up in.
    pub gradient: String,
}

/// Appends the ops that compute the gradient of `loss` by every parameter it depends on, and returns their variables.
///
/// The gradient of `x` is called `x@gradient`; where `x` is used more than once, the parts are called `x@gradient@0`
/// and so on, and a `sum` adds them, the last use first. The new ops have the role [`Backward`](OpRole::Backward) and
/// follow the last forward op. An op whose outputs the loss does not depend on gets none, and neither does a parameter
/// that an op of the role [`Optimize`](OpRole::Optimize) writes already.
///
/// # Errors
/// When the program is invalid; when `loss` is no scalar of f32 or f64 that an op of block 0 gives, or depends on no
/// parameter; when it depends on a parameter through an op that has no gradient, which is named. The program is then
/// unchanged.
pub fn append_backward(program: &mut Program, loss: &str) -> Result<Vec<ParameterGradient>, Failure> {
    let graph = Graph::new(program.clone())?;
    let facts = check_loss(&graph, loss)?;
    let mut backward = Backward::new(&graph);
    backward.begin(loss, facts);
    for (place, op) in graph.program().blocks[0].ops.iter().enumerate().rev() {
        if op.role == OpRole::Forward {
            let refuse = |reason| Failure::call(format!("{}: {reason}", graph.label(0, place)));
            backward.through(op).map_err(refuse)?;
        }
    }
    let gradients = backward.finish();
    if gradients.is_empty() {
        return Err(Failure::call(format!("the loss {loss:?} depends on no parameter; expected one or more")));
    }
    let Backward { variables, ops, .. } = backward;
    let mut appended = program.clone();
    let block = &mut appended.blocks[0];
    block.variables.extend(variables);
    // Optimizer ops that are there already come after it: gradients are those of the values before an update.
    let place = block.ops.iter().rposition(|op| op.role == OpRole::Forward).map_or(block.ops.len(), |last| last + 1);
    block.ops.splice(place..place, ops);
    *program = Graph::new(appended)?.into_program();
    Ok(gradients)
}

fn check_loss<'a>(graph: &'a Graph, loss: &str) -> Result<&'a VariableFacts, Failure> {
    let expected = "expected a scalar of float32 or float64 that an op of block 0 gives";
    let Some(facts) = graph.facts(loss) else {
        return Err(Failure::call(format!("found no variable {loss:?} to be the loss; {expected}")));
    };
    let is_given = graph.program().blocks[0].ops.iter().any(|op| op.outputs.iter().any(|output| output == loss));
    let is_scalar =
        matches!(facts, VariableFacts::Dense { element_type, shape } if element_type.is_float() && shape.is_empty());
    if is_given && is_scalar {
        return Ok(facts);
    }
    Err(Failure::call(format!("the loss {loss:?} is {facts}; {expected}")))
}

/// Gradients while they are gathered, from the loss upwards.
struct Backward<'a> {
    graph: &'a Graph,
    /// Variables that depend on a parameter.
    influenced: BTreeSet<&'a str>,
    /// For each variable the terms of its gradient.
    parts: BTreeMap<String, Vec<PartialGradient>>,
    /// For each variable the number of its gradient's parts that ops compute.
    made: BTreeMap<String, usize>,
    variables: Vec<Variable>,
    ops: Vec<Op>,
}

/// A part of a gradient: a variable, and the op that computes only this part.
#[derive(Clone, Debug)]
struct PartialGradient {
    name: String,
    op: Option<usize>,
}

impl<'a> Backward<'a> {
    fn new(graph: &'a Graph) -> Self {
        let block = &graph.program().blocks[0];
        let optimizing = block.ops.iter().filter(|op| op.role == OpRole::Optimize);
        let updated: BTreeSet<&str> = optimizing.flat_map(|op| &op.outputs).map(String::as_str).collect();
        let parameters = block.variables.iter().filter(|variable| variable.purpose == Purpose::Parameter);
        let mut influenced: BTreeSet<&str> =
            parameters.map(|variable| variable.name.as_str()).filter(|name| !updated.contains(name)).collect();
        for op in block.ops.iter().filter(|op| op.role == OpRole::Forward) {
            if rules::passes(&op.kind) && op.inputs.iter().any(|input| influenced.contains(input.as_str())) {
                influenced.extend(op.outputs.iter().map(String::as_str));
            }
        }
        let (parts, made) = (BTreeMap::new(), BTreeMap::new());
        Self { graph, influenced, parts, made, variables: Vec::new(), ops: Vec::new() }
    }

    /// The gradient of the loss by itself.
    fn begin(&mut self, loss: &str, facts: &VariableFacts) {
        if self.influenced.contains(loss) {
            let name = self.constant(&gradient_name(loss), facts.clone(), 1.0);
            self.parts.insert(loss.to_owned(), vec![PartialGradient { name, op: None }]);
        }
    }

    /// A scalar that is made from nothing.
    fn constant(&mut self, name: &str, facts: VariableFacts, value: f64) -> String {
        self.variables.push(Variable { name: name.to_owned(), facts, purpose: Purpose::Temporary });
        self.push(OpKind::Fill { value }, &[], vec![name.to_owned()]);
        name.to_owned()
    }

    fn push(&mut self, kind: OpKind, inputs: &[&str], outputs: Vec<String>) {
        let inputs = inputs.iter().map(|name| (*name).to_owned()).collect();
        self.ops.push(Op { kind, inputs, outputs, role: OpRole::Backward });
    }

    /// Propagates the gradients of an op's outputs to its inputs.
    fn through(&mut self, op: &'a Op) -> Result<(), String> {
        if !op.outputs.iter().any(|output| self.parts.contains_key(output)) {
            return Ok(());
        }
        let output_gradients: Vec<Option<String>> = op.outputs.iter().map(|output| self.gradient(output)).collect();
        let is_needed: Vec<bool> = op.inputs.iter().map(|input| self.influenced.contains(input.as_str())).collect();
        if is_needed.contains(&true) {
            rules::apply(&mut OpGradient { backward: self, op, output_gradients, is_needed })
        } else {
            Ok(())
        }
    }

    /// The variable that holds the whole gradient of `of`; none when the loss does not depend on it.
    fn gradient(&mut self, of: &str) -> Option<String> {
        let parts = self.parts.get(of)?.clone();
        let whole = gradient_name(of);
        let name = match &parts[..] {
            [PartialGradient { name, op: None }] => return Some(name.clone()),
            [PartialGradient { name, op: Some(op) }] => {
                let output = self.ops[*op].outputs.iter_mut().find(|output| *output == name);
                output.expect("a part's op gives it").clone_from(&whole);
                whole
            }
            parts => {
                let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
                self.push(OpKind::Sum, &names, vec![whole.clone()]);
                whole
            }
        };
        self.parts.insert(of.to_owned(), vec![PartialGradient { name: name.clone(), op: None }]);
        Some(name)
    }

    /// Adds an existing variable as a term of another gradient.
    fn share(&mut self, of: &str, name: &str) {
        self.parts.entry(of.to_owned()).or_default().push(PartialGradient { name: name.to_owned(), op: None });
    }

    /// A name for the next part of a gradient that an op will compute.
    fn part_name(&mut self, of: &str) -> String {
        let made = self.made.entry(of.to_owned()).or_default();
        *made += 1;
        format!("{}@{}", gradient_name(of), *made - 1)
    }

    /// Adds a part that the last op computes.
    fn record(&mut self, of: &str, name: String) {
        let op = Some(self.ops.len() - 1);
        self.parts.entry(of.to_owned()).or_default().push(PartialGradient { name, op });
    }

    /// Sums the remaining terms, and returns the parameters' gradients.
    fn finish(&mut self) -> Vec<ParameterGradient> {
        let graph = self.graph;
        let variables = graph.program().blocks[0].variables.iter();
        let parameters = variables.filter(|variable| variable.purpose == Purpose::Parameter);
        let gradients = parameters.filter_map(|variable| {
            let parameter = variable.name.clone();
            self.gradient(&parameter).map(|gradient| ParameterGradient { parameter, gradient })
        });
        gradients.collect()
    }

    fn facts(&self, name: &str) -> &'a VariableFacts {
        self.graph.facts(name).expect("a checked program knows its variables")
    }
}

fn gradient_name(of: &str) -> String {
    format!("{of}@gradient")
}
