//! Inference of an op's output facts from its inputs, and the reasons why an op does not fit.
//!
//! Every reason names the operand, the found and the expected facts; [`Graph`](super::Graph) adds the place.

mod arithmetic;
mod flow;
mod math;
mod network;
mod operands;
mod update;

use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::limits::{DIMENSIONS_MAX, PARAMETER_BYTES_MAX, PROGRAM_QUEUE_MAX};
use pserver_core::optim::Prepared;
use pserver_core::rows::{Height, RowLayout};

use super::op::Op;
use super::variable::{Dim, Purpose, Variable, VariableFacts};

use operands::Operands;

pub(super) use update::rule;

/// The result for one op.
#[derive(Debug)]
pub(super) struct Inferred {
    /// The facts of its outputs, one for each.
    pub(super) facts: Vec<VariableFacts>,
    /// The rule, if it is an update.
    pub(super) rule: Option<Arc<Prepared>>,
}

/// The facts of an op's outputs for inputs with the facts `inputs`. `declared` has the declared facts of each output;
/// only ops whose outputs are declared (`fill`, `recv`) read it.
pub(super) fn outputs(
    op: &Op,
    inputs: &[&VariableFacts],
    declared: &[Option<&VariableFacts>],
) -> Result<Inferred, String> {
    let operands = Operands::new(op, inputs, declared);
    if let Some(inferred) = update::outputs(&operands)? {
        return Ok(inferred);
    }
    let facts = if op.kind.is_flow() { flow::outputs(&operands)? } else { arithmetic::outputs(&operands)? };
    operands.check_outputs(facts.len())?;
    Ok(Inferred { facts, rule: None })
}

/// Checks a declared variable on its own.
pub(super) fn check_declaration(variable: &Variable) -> Result<(), String> {
    let Variable { facts, purpose, .. } = variable;
    check_facts(facts).map_err(|reason| format!("is {facts}; {reason}"))?;
    let expected = match (purpose, facts) {
        (Purpose::Parameter, VariableFacts::Dense { element_type, .. }) if !element_type.is_parameter_type() => {
            "a type that parameters have"
        }
        (Purpose::Parameter, VariableFacts::Dense { shape, .. }) if !shape.contains(&Dim::Batch) => return Ok(()),
        (Purpose::Parameter, _) => "a parameter to be dense, of fixed dimensions",
        (Purpose::State, VariableFacts::Dense { shape, .. }) if shape.contains(&Dim::Batch) => {
            "a state of fixed dimensions"
        }
        (Purpose::Data | Purpose::Temporary, VariableFacts::Queue { .. }) => "a queue to be a state",
        _ => return Ok(()),
    };
    Err(format!("{} is {facts}; expected {expected}", purpose.name()))
}

/// Checks facts on their own.
pub(super) fn check_facts(facts: &VariableFacts) -> Result<(), String> {
    match facts {
        VariableFacts::Dense { element_type, shape } => check_shape(*element_type, shape),
        VariableFacts::SelectedRows { element_type, height, width } => {
            layout(*element_type, *height, *width).map(|_| ())
        }
        VariableFacts::Queue { of, capacity } => {
            if *capacity == 0 || *capacity > PROGRAM_QUEUE_MAX {
                return Err(format!("found a capacity of {capacity}; expected 1 to {PROGRAM_QUEUE_MAX}"));
            }
            match &**of {
                VariableFacts::Queue { .. } => {
                    Err("found a queue of queues; expected dense, rows or strings in it".to_owned())
                }
                of => check_facts(of),
            }
        }
        VariableFacts::Strings => Ok(()),
    }
}

/// The layout of selected rows.
pub(super) fn layout(element_type: ElementType, height: u64, width: u64) -> Result<RowLayout, String> {
    if height == 0 {
        return Err("found a height of 0; expected 1 or more".to_owned());
    }
    let narrow = u32::try_from(width).map_err(|_| format!("found rows of {width} elements; expected below 2^32"))?;
    RowLayout::new(element_type, narrow, Height::Rows(height)).map_err(|failure| failure.to_string())
}

fn check_shape(element_type: ElementType, shape: &[Dim]) -> Result<(), String> {
    if shape.len() > DIMENSIONS_MAX {
        return Err(format!("found {} dimensions; expected at most {DIMENSIONS_MAX}", shape.len()));
    }
    let mut bytes = element_type.bytes();
    for dim in shape {
        let length = match dim {
            Dim::Fixed(0) => return Err("found a dimension of 0; expected 1 or more".to_owned()),
            Dim::Fixed(length) => *length,
            Dim::Batch => 1,
        };
        bytes = bytes.checked_mul(length).filter(|bytes| *bytes <= PARAMETER_BYTES_MAX).ok_or_else(|| {
            format!("found a shape of more than {PARAMETER_BYTES_MAX} bytes; expected at most as many")
        })?;
    }
    Ok(())
}
