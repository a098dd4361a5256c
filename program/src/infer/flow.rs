//! The ops that move values and hold them back.

use crate::op::{Destination, OpKind};
use crate::variable::VariableFacts;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;
use pserver_core::limits::{NAME_BYTES_MAX, PROGRAM_OPERANDS_MAX, PROGRAM_QUEUE_MAX};

use super::operands::Operands;

type InferredOutputs = Result<Vec<VariableFacts>, String>;

/// The facts of a flow op's outputs.
pub(super) fn outputs(operands: &Operands<'_>) -> InferredOutputs {
    match &operands.op.kind {
        OpKind::Send { channel, to } => {
            check_channel(channel)?;
            let addresses = usize::from(*to == Destination::Senders);
            operands.check_inputs(1 + addresses, 1 + addresses)?;
            if addresses == 1 {
                operands.exactly(1, &VariableFacts::Strings)?;
            }
            Ok(Vec::new())
        }
        OpKind::Recv { channel } => {
            check_channel(channel)?;
            operands.check_inputs(0, 0)?;
            recv(operands)
        }
        OpKind::PullRows { channel, .. } => {
            check_channel(channel)?;
            operands.check_inputs(2, usize::MAX)?;
            pull_rows(operands)
        }
        OpKind::Enqueue => {
            operands.check_inputs(2, 2)?;
            let (items, _) = queue(operands)?;
            operands.exactly(1, items)?;
            Ok(Vec::new())
        }
        OpKind::Dequeue { min_count } => {
            operands.check_inputs(1, 1)?;
            dequeue(operands, *min_count)
        }
        OpKind::GradientAccumulator { count, merge, .. } => {
            check_pieces(*count)?;
            operands.check_inputs(1, 2)?;
            if operands.input_count() == 2 {
                operands.exactly(1, &VariableFacts::Strings)?;
            }
            accumulated(operands, *count, *merge)
        }
        OpKind::StringAccumulator { count } => {
            check_pieces(*count)?;
            operands.check_inputs(1, 1)?;
            operands.exactly(0, &VariableFacts::Strings)?;
            Ok(vec![VariableFacts::Strings])
        }
        OpKind::LoopForever { .. } => {
            operands.check_inputs(0, 0)?;
            Ok(Vec::new())
        }
        other => unreachable!("{} moves nothing", other.name()),
    }
}

/// Received values have the declared facts: another program sends them.
fn recv(operands: &Operands<'_>) -> InferredOutputs {
    operands.outputs_between(1, 2)?;
    let mut outputs = vec![operands.declared(0)?.clone()];
    if operands.op.outputs.len() == 2 {
        outputs.push(VariableFacts::Strings);
    }
    Ok(outputs)
}

/// The rows are those of a table that another program has.
fn pull_rows(operands: &Operands<'_>) -> InferredOutputs {
    operands.exactly_dense(0, ElementType::Int64, &[])?;
    (1..operands.input_count()).try_for_each(|place| operands.integers(place).map(|_| ()))?;
    operands.check_outputs(1)?;
    let facts = operands.declared(0)?;
    match facts {
        VariableFacts::SelectedRows { element_type: ElementType::Float32 | ElementType::Float64, .. } => {
            Ok(vec![facts.clone()])
        }
        _ => Err(format!("output {:?} is {facts}; expected rows of float32 or float64", operands.op.outputs[0])),
    }
}

/// Merging pieces keeps their facts. The mean of several integers is not an integer; the mean of one piece is the
/// piece.
fn accumulated(operands: &Operands<'_>, count: u32, merge: Merge) -> InferredOutputs {
    match operands.input(0) {
        VariableFacts::SelectedRows { element_type, .. } | VariableFacts::Dense { element_type, .. }
            if element_type.is_parameter_type() =>
        {
            if merge == Merge::Mean && count > 1 && !element_type.is_float() {
                return Err(operands.misfit(0, "floats, which have a mean; integers are added, with merge=sum"));
            }
            Ok(vec![operands.input(0).clone()])
        }
        _ => Err(operands.misfit(0, "dense or rows, of a type that parameters have")),
    }
}

fn dequeue(operands: &Operands<'_>, min_count: u32) -> InferredOutputs {
    let (items, capacity) = queue(operands)?;
    let count = min_count as usize;
    if min_count == 0 || count > PROGRAM_OPERANDS_MAX || u64::from(min_count) > capacity {
        return Err(format!("found min_count {min_count}; expected 1 to {capacity}, the queue's capacity"));
    }
    Ok(vec![items.clone(); count])
}

/// A queue's items and capacity.
fn queue<'a>(operands: &Operands<'a>) -> Result<(&'a VariableFacts, u64), String> {
    match operands.input(0) {
        VariableFacts::Queue { of, capacity } => Ok((of, *capacity)),
        _ => Err(operands.misfit(0, "a queue")),
    }
}

fn check_pieces(count: u32) -> Result<(), String> {
    if count != 0 && u64::from(count) <= PROGRAM_QUEUE_MAX {
        return Ok(());
    }
    Err(format!("found count {count}; expected 1 to {PROGRAM_QUEUE_MAX}"))
}

fn check_channel(channel: &str) -> Result<(), String> {
    let bytes = channel.len();
    if (1..=NAME_BYTES_MAX).contains(&bytes) {
        return Ok(());
    }
    Err(format!("found a channel of {bytes} bytes; expected 1 to {NAME_BYTES_MAX}"))
}
