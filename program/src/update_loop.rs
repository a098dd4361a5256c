//! Update loop of a server for one parameter: the ops from the received gradient to the answer. The transpiler writes
//! these ops into a server's part, and a server derives them from the settings of its job.
//!
//! ```text
//! gradient, sender = recv
//! wide = cast(gradient)                              where it travels in half precision
//! merged = gradient_accumulator(gradient, sender)    count, merge and staleness depend on the mode
//! senders = string_accumulator(sender)
//! the optimizer ops
//! send(parameter, senders)                           of a table of rows its count of updates
//! ```

use pserver_core::accumulator::AccumulatorSettings;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;

use super::op::{Destination, Op, OpKind, OpRole};

/// Names of the variables between `recv` and the optimizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GradientNames {
    /// The channel, which is the name of the variable that trainers send.
    pub(crate) channel: String,
    /// One trainer's gradient.
    pub(crate) piece: String,
    /// The gradient in the parameter's type, if it is received in half precision.
    pub(crate) wide: String,
    /// The sender of the gradient.
    pub(crate) sender: String,
    /// The merged gradient.
    pub(crate) merged: String,
    /// The senders of all merged gradients.
    pub(crate) senders: String,
}

impl GradientNames {
    /// Receives one trainer's gradient of this type, converts it to `widened` if given, and adds it to the others.
    pub(crate) fn ops(
        &self,
        accumulators: AccumulatorSettings,
        element_type: ElementType,
        widened: Option<ElementType>,
    ) -> Vec<Op> {
        let AccumulatorSettings { count, merge, staleness, late } = accumulators;
        // A sum of integers is exact, and is not divided.
        let merge = if element_type.is_float() { merge } else { Merge::Sum };
        let mut ops =
            vec![communication(OpKind::Recv { channel: self.channel.clone() }, &[], &[&self.piece, &self.sender])];
        let mut gradient = &self.piece;
        if let Some(to) = widened {
            ops.push(communication(OpKind::Cast { to }, &[gradient], &[&self.wide]));
            gradient = &self.wide;
        }
        let accumulator = OpKind::GradientAccumulator { count, merge, staleness, late };
        ops.push(communication(accumulator, &[gradient, &self.sender], &[&self.merged]));
        ops.push(communication(OpKind::StringAccumulator { count }, &[&self.sender], &[&self.senders]));
        ops
    }

    /// Sends a variable, on the channel of a parameter's name, to the senders of the merged gradients.
    pub(crate) fn answer(&self, variable: &str, parameter: &str) -> Op {
        let kind = OpKind::Send { channel: parameter.to_owned(), to: Destination::Senders };
        communication(kind, &[variable, &self.senders], &[])
    }
}

/// The op that runs a block without end.
pub(crate) fn loop_forever(block: u32) -> Op {
    communication(OpKind::LoopForever { block }, &[], &[])
}

fn communication(kind: OpKind, inputs: &[&str], outputs: &[&str]) -> Op {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Op { kind, role: OpRole::Communication, inputs: owned(inputs), outputs: owned(outputs) }
}
