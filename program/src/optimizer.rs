//! Optimizer ops of a program: their updates and states.

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::backward::ParameterGradient;
use super::block::{Block, Program};
use super::graph::Graph;
use super::infer;
use super::op::{Op, OpKind, OpRole};
use super::variable::{Purpose, Variable, VariableFacts};

/// Appends an [`Update`](OpKind::Update) of the role [`Optimize`](OpRole::Optimize) for each of the parameters, in
/// block 0.
///
/// `config` is the rule as `OptimizerConfig` in protobuf's text form. Beside the parameter `w` there are then the
/// states `w@count`, and `w@state.` with the name of each of the rule's states, which ops of the role
/// [`Initialise`](OpRole::Initialise) fill with what the rule begins with.
///
/// # Errors
/// When the configuration is invalid, the rule does not fit a parameter, or a parameter or a gradient does not exist.
/// The program is then unchanged.
pub fn append_optimizer(program: &mut Program, config: &str, gradients: &[ParameterGradient]) -> Result<(), Failure> {
    let graph = Graph::new(program.clone())?;
    let rule = infer::rule(config).map_err(Failure::call)?;
    // States in the rule's order, each with its initial value.
    let begins: Vec<(&str, f64)> = rule.states().iter().map(|state| (state.name.as_str(), state.initial)).collect();
    let mut appended = program.clone();
    let block = &mut appended.blocks[0];
    for ParameterGradient { parameter, gradient } in gradients {
        let facts = graph.facts(parameter).ok_or_else(|| {
            Failure::call(format!("found no parameter {parameter:?} to be updated by {gradient:?}; expected one"))
        })?;
        let count = (format!("{parameter}@count"), VariableFacts::fixed(ElementType::Int64, &[]), 0.0);
        let states = begins.iter().map(|(name, value)| (state_name(parameter, name), facts.clone(), *value));
        let kept: Vec<(String, VariableFacts, f64)> = std::iter::once(count).chain(states).collect();
        let mut outputs = vec![parameter.clone()];
        outputs.extend(kept.iter().map(|(name, ..)| name.clone()));
        let mut inputs = outputs.clone();
        inputs.insert(1, gradient.clone());
        kept.into_iter().for_each(|(name, facts, value)| add_state(block, name, facts, value));
        let kind = OpKind::Update { config: config.to_owned() };
        block.ops.push(Op { kind, inputs, outputs, role: OpRole::Optimize });
    }
    *program = Graph::new(appended)?.into_program();
    Ok(())
}

/// The name of a rule's state beside its parameter. A rule may call a state by any name, also by one that programs use,
/// such as `count`; program names have no point after the `@`.
pub(crate) fn state_name(parameter: &str, state: &str) -> String {
    format!("{parameter}@state.{state}")
}

/// Declares a state, and appends the op that fills it after the existing ones.
fn add_state(block: &mut Block, name: String, facts: VariableFacts, value: f64) {
    block.variables.push(Variable { name: name.clone(), facts, purpose: Purpose::State });
    let place = block.ops.iter().rposition(|op| op.role == OpRole::Initialise).map_or(0, |place| place + 1);
    let fill = Op { kind: OpKind::Fill { value }, inputs: Vec::new(), outputs: vec![name], role: OpRole::Initialise };
    block.ops.insert(place, fill);
}
