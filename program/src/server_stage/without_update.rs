//! Optimizers in ops, without an op `update`: one that changes nothing is put before them, so that they are the ops
//! after it.

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use crate::{Graph, Op, OpKind, OpRole, Purpose, Variable, VariableFacts};

/// A rule by which a parameter stays as it is.
const STAYS: &str = "rule: 'w = w'";

/// A component of a server's part with an `update` before its optimizer ops.
///
/// # Errors
/// When the component has an update, or its ops do not make one parameter of one merged gradient.
pub fn with_update(component: &Graph) -> Result<Graph, Failure> {
    let refused = |found: String| {
        Failure::call(format!("found {found}; expected an update, or optimizer ops that make one parameter of one"))
    };
    let mut program = component.program().clone();
    let ops = || component.program().blocks.iter().flat_map(|block| &block.ops);
    if ops().any(|op| matches!(op.kind, OpKind::Update { .. })) {
        return Err(refused("an update of another form".to_owned()));
    }
    let is_parameter = |name: &&String| {
        let index = component.find(name);
        index.is_some_and(|index| component.variable(index).purpose == Purpose::Parameter)
    };
    let optimizer = || ops().filter(|op| op.role == OpRole::Optimize);
    let mut parameters: Vec<&String> = optimizer().flat_map(|op| &op.outputs).filter(is_parameter).collect();
    parameters.sort_unstable();
    parameters.dedup();
    let accumulators = ops().filter(|op| matches!(op.kind, OpKind::GradientAccumulator { .. }));
    let merged: Vec<&String> = accumulators.flat_map(|op| &op.outputs).collect();
    let ([parameter], [merged]) = (&parameters[..], &merged[..]) else {
        return Err(refused(format!(
            "optimizer ops of the gradients {merged:?} that write the parameters {parameters:?}"
        )));
    };
    let count = unused(component, format!("{parameter}@count"));
    let block = program.blocks.iter_mut().find(|block| block.ops.iter().any(|op| op.role == OpRole::Optimize));
    let block = block.expect("an optimizer op was found");
    let place = block.ops.iter().position(|op| op.role == OpRole::Optimize).expect("the block has one");
    let named = |names: &[&String]| names.iter().map(|name| (*name).clone()).collect();
    block.ops.insert(
        place,
        Op {
            kind: OpKind::Update { config: STAYS.to_owned() },
            role: OpRole::Optimize,
            inputs: named(&[parameter, merged, &count]),
            outputs: named(&[parameter, &count]),
        },
    );
    let outer = &mut program.blocks[0];
    let facts = VariableFacts::fixed(ElementType::Int64, &[]);
    outer.variables.push(Variable { name: count.clone(), facts, purpose: Purpose::State });
    let fill = OpKind::Fill { value: 0.0 };
    outer.ops.insert(0, Op { kind: fill, role: OpRole::Initialise, inputs: Vec::new(), outputs: vec![count] });
    component.part(program)
}

fn unused(graph: &Graph, mut name: String) -> String {
    while graph.find(&name).is_some() {
        name.push('_');
    }
    name
}
