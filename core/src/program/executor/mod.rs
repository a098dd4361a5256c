//! The executor: runs a checked program one unit at a time, on a trainer, on a server, and in tests.

mod flow;
mod marking;
mod plan;
mod wait;

pub use flow::{Pace, Pieces, Queue, Sent};
pub use marking::{Marking, Port};
pub use plan::{Accumulator, Act, Fused, Plan, Unit, UnitIndex};
pub use wait::{Standing, Wait, standing};
