//! A server's turn: what it does with the gradients of a parameter, whoever writes it down. The transpiler writes it
//! into a server's part, and a server makes it of the settings of its job.
//!
//! ```text
//! gradient, sender = recv
//! wide = cast(gradient)                              where it travels as a half
//! merged = gradient_accumulator(gradient, sender)    count, merge and staleness say the mode
//! senders = string_accumulator(sender)
//! the optimizer ops
//! send(parameter, senders)
//! ```

use crate::config::{Merge, Mode};
use crate::dtype::ElementType;

use super::op::{Destination, Op, OpKind, Role};

/// What the mode says to the accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Pieces that make one.
    count: u32,
    /// How they become one.
    merge: Merge,
    /// How far a sender may be in front.
    staleness: Option<u32>,
}

impl Terms {
    /// A gradient that is an update alone is its own mean and sum, and is added.
    pub(crate) fn of(mode: Mode, merge: Merge, trainers: u32) -> Self {
        match mode {
            Mode::Sync => Self { count: trainers, merge, staleness: Some(0) },
            Mode::Async | Mode::Delta => Self { count: 1, merge: Merge::Sum, staleness: None },
            Mode::Staleness { bound } => Self { count: 1, merge: Merge::Sum, staleness: Some(bound) },
        }
    }
}

/// The names of a gradient on its way to the optimizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// The channel, and the name of what trainers send.
    pub(crate) channel: String,
    /// One trainer's piece.
    pub(crate) piece: String,
    /// That, in the parameter's type, when it comes in a narrower one.
    pub(crate) wide: String,
    /// Who sent it.
    pub(crate) sender: String,
    /// All pieces as one.
    pub(crate) merged: String,
    /// Those who sent them.
    pub(crate) senders: String,
}

impl Arrival {
    /// Receives one trainer's piece of this type, widens it when it is told to, and adds it to the others.
    pub(crate) fn ops(&self, terms: Terms, element_type: ElementType, widened: Option<ElementType>) -> Vec<Op> {
        let Terms { count, merge, staleness } = terms;
        // What integers add up to is exact, and is not divided.
        let merge = if element_type.is_float() { merge } else { Merge::Sum };
        let mut ops =
            vec![communication(OpKind::Recv { channel: self.channel.clone() }, &[], &[&self.piece, &self.sender])];
        let mut gradient = &self.piece;
        if let Some(to) = widened {
            ops.push(communication(OpKind::Cast { to }, &[gradient], &[&self.wide]));
            gradient = &self.wide;
        }
        let accumulator = OpKind::GradientAccumulator { count, merge, staleness };
        ops.push(communication(accumulator, &[gradient, &self.sender], &[&self.merged]));
        ops.push(communication(OpKind::StringAccumulator { count }, &[&self.sender], &[&self.senders]));
        ops
    }

    /// Sends a parameter, on the channel of its own name, to those whose gradients were in it.
    pub(crate) fn answer(&self, parameter: &str) -> Op {
        let kind = OpKind::Send { channel: parameter.to_owned(), to: Destination::Senders };
        communication(kind, &[parameter, &self.senders], &[])
    }
}

/// The op that takes turns for ever.
pub(crate) fn turns(block: u32) -> Op {
    communication(OpKind::LoopForever { block }, &[], &[])
}

fn communication(kind: OpKind, inputs: &[&str], outputs: &[&str]) -> Op {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Op { kind, role: Role::Communication, inputs: owned(inputs), outputs: owned(outputs) }
}
