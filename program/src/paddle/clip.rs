//! Clipping by the global norm: ops of the role optimize between gradients and updates.

use std::collections::BTreeSet;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use crate::backward::ParameterGradient;
use crate::block::Program;
use crate::graph::Graph;
use crate::op::{Op, OpKind, OpRole};
use crate::variable::{Purpose, Variable, VariableFacts};

/// Appends `gradient * limit / max(limit, norm)` for each gradient, where the norm is that of all of them together, and
/// makes the list name the products.
pub(super) fn append_clipping(
    program: &mut Program,
    limit: f64,
    gradients: &mut [ParameterGradient],
) -> Result<(), Failure> {
    let graph = Graph::new(program.clone())?;
    let mut clipping = Clipping { program, types: BTreeSet::new() };
    let mut squares = Vec::new();
    for ParameterGradient { gradient, .. } in gradients.iter_mut() {
        let facts = graph.facts(gradient).expect("append_backward wrote the gradient");
        clipping.make_dense(gradient, facts);
        squares.push(clipping.sum_of_squares(gradient));
    }
    let [element_type] = clipping.types.iter().copied().collect::<Vec<_>>()[..] else {
        let found = &clipping.types;
        return Err(Failure::call(format!(
            "main program: found gradients of the types {found:?} clipped by one norm; expected one type"
        )));
    };
    clipping.factor(limit, element_type, &squares);
    for ParameterGradient { gradient, .. } in gradients {
        let clipped = format!("{gradient}@clipped");
        clipping.push(OpKind::Mul, &[gradient, "clip@factor"], &clipped);
        *gradient = clipped;
    }
    Ok(())
}

/// A program while clipping is appended.
struct Clipping<'a> {
    program: &'a mut Program,
    types: BTreeSet<ElementType>,
}

impl Clipping<'_> {
    fn push(&mut self, kind: OpKind, inputs: &[&str], output: &str) {
        self.push_as(OpRole::Optimize, kind, inputs, output);
    }

    fn push_as(&mut self, role: OpRole, kind: OpKind, inputs: &[&str], output: &str) {
        let inputs = inputs.iter().map(|name| (*name).to_owned()).collect();
        self.program.blocks[0].ops.push(Op { kind, inputs, outputs: vec![output.to_owned()], role });
    }

    fn fill(&mut self, role: OpRole, name: &str, facts: VariableFacts, value: f64) {
        let variable = Variable { name: name.to_owned(), facts, purpose: Purpose::Temporary };
        self.program.blocks[0].variables.push(variable);
        self.push_as(role, OpKind::Fill { value }, &[], name);
    }

    /// Makes a gradient dense where it has selected rows, in the backward part: servers have norms of dense ones only.
    fn make_dense(&mut self, gradient: &mut String, facts: &VariableFacts) {
        match facts {
            VariableFacts::Dense { element_type, .. } => {
                self.types.insert(*element_type);
            }
            VariableFacts::SelectedRows { element_type, height, width } => {
                self.types.insert(*element_type);
                let (zeros, dense) = (format!("{gradient}@zeros"), format!("{gradient}@dense"));
                self.fill(OpRole::Backward, &zeros, VariableFacts::fixed(*element_type, &[*height, *width]), 0.0);
                self.push_as(OpRole::Backward, OpKind::Sum, &[&zeros, gradient], &dense);
                *gradient = dense;
            }
            other => unreachable!("a gradient of {other}"),
        }
    }

    /// The scalar with the sum of a gradient's squares.
    fn sum_of_squares(&mut self, gradient: &str) -> String {
        let [square, sum] = ["square", "share"].map(|what| format!("{gradient}@{what}"));
        self.push(OpKind::Mul, &[gradient, gradient], &square);
        self.push(OpKind::ReduceSum { axes: Vec::new(), keep: false }, &[&square], &sum);
        sum
    }

    fn factor(&mut self, limit: f64, element_type: ElementType, squares: &[String]) {
        let squares: Vec<&str> = squares.iter().map(String::as_str).collect();
        self.push(OpKind::Sum, &squares, "clip@square");
        self.push(OpKind::Sqrt, &["clip@square"], "clip@norm");
        self.fill(OpRole::Optimize, "clip@limit", VariableFacts::fixed(element_type, &[]), limit);
        self.push(OpKind::Max, &["clip@limit", "clip@norm"], "clip@divisor");
        self.push(OpKind::Div, &["clip@limit", "clip@divisor"], "clip@factor");
    }
}
