//! The ops that move values and hold them back.

use crate::config::Merge;
use crate::limits::{NAME_BYTES_MAX, PROGRAM_OPERANDS_MAX, PROGRAM_QUEUE_MAX};
use crate::program::op::{Destination, OpKind};
use crate::program::variable::Facts;

use super::operands::Operands;

type Outputs = Result<Vec<Facts>, String>;

/// The facts of a flow op's outputs.
pub(super) fn outputs(operands: &Operands<'_>) -> Outputs {
    match &operands.op.kind {
        OpKind::Send { channel, to } => {
            check_channel(channel)?;
            let addresses = usize::from(*to == Destination::Senders);
            operands.check_inputs(1 + addresses, 1 + addresses)?;
            if addresses == 1 {
                operands.exactly(1, &Facts::Strings)?;
            }
            Ok(Vec::new())
        }
        OpKind::Recv { channel } => {
            check_channel(channel)?;
            operands.check_inputs(0, 0)?;
            recv(operands)
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
                operands.exactly(1, &Facts::Strings)?;
            }
            accumulated(operands, *count, *merge)
        }
        OpKind::StringAccumulator { count } => {
            check_pieces(*count)?;
            operands.check_inputs(1, 1)?;
            operands.exactly(0, &Facts::Strings)?;
            Ok(vec![Facts::Strings])
        }
        OpKind::LoopForever { .. } => {
            operands.check_inputs(0, 0)?;
            Ok(Vec::new())
        }
        other => unreachable!("{} moves nothing", other.name()),
    }
}

/// What is received is as declared: it was sent by another program.
fn recv(operands: &Operands<'_>) -> Outputs {
    operands.outputs_between(1, 2)?;
    let mut outputs = vec![operands.declared(0)?.clone()];
    if operands.op.outputs.len() == 2 {
        outputs.push(Facts::Strings);
    }
    Ok(outputs)
}

/// What pieces become one of is what each of them is. A mean of integers would not be one; one piece is its own mean.
fn accumulated(operands: &Operands<'_>, count: u32, merge: Merge) -> Outputs {
    match operands.input(0) {
        Facts::SelectedRows { element_type, .. } | Facts::Dense { element_type, .. }
            if element_type.is_parameter_type() =>
        {
            if merge == Merge::Mean && count > 1 && !element_type.is_float() {
                return Err(operands.misfit(0, "floats, of which there is a mean; integers are added, with merge=sum"));
            }
            Ok(vec![operands.input(0).clone()])
        }
        _ => Err(operands.misfit(0, "dense or rows, of a type that parameters have")),
    }
}

fn dequeue(operands: &Operands<'_>, min_count: u32) -> Outputs {
    let (items, capacity) = queue(operands)?;
    let count = min_count as usize;
    if min_count == 0 || count > PROGRAM_OPERANDS_MAX || u64::from(min_count) > capacity {
        return Err(format!("found min_count {min_count}; expected 1 to {capacity}, the queue's capacity"));
    }
    Ok(vec![items.clone(); count])
}

/// A queue's items and capacity.
fn queue<'a>(operands: &Operands<'a>) -> Result<(&'a Facts, u64), String> {
    match operands.input(0) {
        Facts::Queue { of, capacity } => Ok((of, *capacity)),
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
