//! The op that updates a parameter by a rule.

use std::sync::Arc;

use crate::op::OpKind;
use crate::variable::{Dim, VariableFacts};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::limits::PARAMETER_CONFIG_BYTES_MAX;
use pserver_core::optim::{Prepared, Rule};

use super::Inferred;
use super::operands::Operands;

/// Indices of the parameter, its gradient, its count of updates and its first state among the inputs.
const GRADIENT: usize = 1;
const COUNT: usize = 2;
const STATES: usize = 3;

/// The facts of an update's outputs and its rule; none for any other op.
pub(super) fn outputs(operands: &Operands<'_>) -> Result<Option<Inferred>, String> {
    let OpKind::Update { config } = &operands.op.kind else { return Ok(None) };
    let prepared = rule(config)?;
    let rule = prepared.rule();
    let states = rule.states().len();
    operands.check_inputs(STATES + states, STATES + states + 1).map_err(|reason| {
        let (states, name) = (rule.states(), rule.algorithm.name());
        format!("{reason}: parameter, gradient, count, the states {states:?} of {name}, and maybe a learning rate")
    })?;
    operands.check_outputs(2 + states)?;
    let VariableFacts::Dense { element_type, shape } = operands.input(0) else {
        return Err(operands.misfit(0, "a dense tensor, the parameter"));
    };
    let element_type = *element_type;
    rule.validate_for(element_type).map_err(|failure| operands.misfit(0, &failure.to_string()))?;
    check_gradient(operands, element_type, shape, rule)?;
    operands.exactly_dense(COUNT, ElementType::Int64, &[])?;
    (STATES..STATES + states).try_for_each(|place| operands.exactly_dense(place, element_type, shape))?;
    check_rate(operands, STATES + states)?;
    check_in_place(operands, STATES + states)?;
    let updated = std::iter::once(0).chain(COUNT..STATES + states);
    let facts = updated.map(|place| operands.input(place).clone()).collect();
    Ok(Some(Inferred { facts, rule: Some(Arc::new(prepared)) }))
}

/// The lowered rule of a configuration.
pub(crate) fn rule(config: &str) -> Result<Prepared, String> {
    let bytes = config.len();
    if bytes > PARAMETER_CONFIG_BYTES_MAX {
        return Err(format!("found a config of {bytes} bytes; expected at most {PARAMETER_CONFIG_BYTES_MAX}"));
    }
    let settings = OptimizerSettings::from_text(config).map_err(|failure| format!("in its config, {failure}"))?;
    if settings.mode.is_some() || settings.merge.is_some() {
        return Err("found a mode or a merge in the config; expected them as attributes of gradient_accumulator".into());
    }
    if settings.owner.is_some() {
        return Err("found a home in the config; expected none, because the transpiler places parameters".into());
    }
    if settings.sender.is_some() {
        return Err("found a sender in the config; expected none, because only queues have one".into());
    }
    if settings.total_part.is_some() {
        return Err("found a total_part in the config; expected none, because only numbers of servers have one".into());
    }
    if settings.sparse.is_some() {
        return Err("found sparse in the config; expected the gradient's rows to make its parameter one of rows".into());
    }
    let rule = settings.rule.ok_or_else(|| "found no rule in the config; expected one".to_owned())?;
    Prepared::new(rule).map_err(|failure| format!("in its config, {failure}"))
}

fn check_gradient(operands: &Operands<'_>, parameter: ElementType, shape: &[Dim], rule: &Rule) -> Result<(), String> {
    let fits = match operands.input(GRADIENT) {
        VariableFacts::Dense { element_type, shape: found } => {
            found == shape && element_type.is_gradient_for(parameter)
        }
        VariableFacts::SelectedRows { element_type, height, width } => {
            shape == [Dim::Fixed(*height), Dim::Fixed(*width)] && *element_type == parameter
        }
        _ => false,
    };
    if !fits {
        return Err(operands.misfit(GRADIENT, &format!("a gradient for {}", operands.input(0))));
    }
    if matches!(operands.input(GRADIENT), VariableFacts::SelectedRows { .. }) && !rule.is_row_wise() {
        return Err(operands.misfit(GRADIENT, "a dense gradient, because clip_norm, sum or norm needs the whole one"));
    }
    Ok(())
}

/// A learning rate is one number, and no variable that the update writes.
fn check_rate(operands: &Operands<'_>, rate: usize) -> Result<(), String> {
    if operands.input_count() <= rate {
        return Ok(());
    }
    let expected = "one number, the learning rate, in a variable of its own";
    let (_, shape) = operands.floats_of(rate, expected)?;
    let name = &operands.op.inputs[rate];
    if !shape.iter().all(|dim| *dim == Dim::Fixed(1)) || operands.op.outputs.contains(name) {
        return Err(operands.misfit(rate, expected));
    }
    Ok(())
}

/// An update writes the variables that it reads, except the gradient and what stands from `end` on.
fn check_in_place(operands: &Operands<'_>, end: usize) -> Result<(), String> {
    let (inputs, outputs) = (&operands.op.inputs, &operands.op.outputs);
    let read = inputs.iter().take(1).chain(inputs[COUNT..end].iter());
    for (place, (read, written)) in read.zip(outputs).enumerate() {
        if read != written {
            return Err(format!("output {} is {written:?}; expected {read:?}, which is read", place + 1));
        }
    }
    Ok(())
}
