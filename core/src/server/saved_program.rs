//! Hosted programs as a checkpoint has them, with what has arrived for them.

use prost::{Enumeration, Message};

use crate::ids::TrainerId;

/// An event that a hosted program takes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The decided item of an input.
    Item(usize),
    /// A trainer leaves.
    Leave(TrainerId),
    /// A new run of the job begins.
    Run,
    /// A trainer that has left comes again.
    Join(TrainerId),
}

/// A hosted program in a checkpoint.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SavedProgramMessage {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) program: Vec<u8>,
    #[prost(message, repeated, tag = "2")]
    pub(super) arrivals: Vec<ArrivalMessage>,
    #[prost(string, optional, tag = "3")]
    pub(super) failed: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ArrivalMessage {
    #[prost(enumeration = "ArrivalKind", tag = "1")]
    kind: i32,
    /// The number of the end, or of the trainer.
    #[prost(uint32, tag = "2")]
    number: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
enum ArrivalKind {
    Item = 0,
    Leave = 1,
    Run = 2,
    Join = 3,
}

impl ArrivalMessage {
    pub(super) fn of(arrival: &Arrival) -> Self {
        let (kind, number) = match *arrival {
            Arrival::Item(end) => (ArrivalKind::Item, u32::try_from(end).expect("a program has few ends")),
            Arrival::Leave(trainer) => (ArrivalKind::Leave, trainer.0),
            Arrival::Run => (ArrivalKind::Run, 0),
            Arrival::Join(trainer) => (ArrivalKind::Join, trainer.0),
        };
        Self { kind: kind.into(), number }
    }
}

impl Arrival {
    pub(super) fn of(message: &ArrivalMessage) -> Self {
        match message.kind() {
            ArrivalKind::Item => Self::Item(message.number as usize),
            ArrivalKind::Leave => Self::Leave(TrainerId(message.number)),
            ArrivalKind::Run => Self::Run,
            ArrivalKind::Join => Self::Join(TrainerId(message.number)),
        }
    }
}
