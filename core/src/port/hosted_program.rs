//! Interface between a shard and a program that it hosts: one that no [`Flow`](super::Flow) carries out, and that an
//! executor runs. The shard passes inputs in and takes values out. A run depends on nothing but the inputs and their
//! order, so that their record is the record of the run.

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::TrainerId;

/// Loads a program, in its binary form, for a job of so many trainers. A failure refuses the initialisation of the job.
pub type LoadProgram = fn(&[u8], u32) -> Result<Box<dyn HostedProgram>, Failure>;

/// A part of a hosted program that a trainer or the shard reaches: a variable that it keeps, or an end of a channel.
/// Each is a parameter of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramEnd {
    /// The name of its parameter.
    pub name: String,
    /// The sort of part.
    pub kind: EndKind,
    /// The type of its elements.
    pub element_type: ElementType,
    /// The dimensions of its value.
    pub shape: Vec<u64>,
}

/// The sort of a program's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndKind {
    /// A parameter or a state.
    Kept,
    /// The items that a trainer sends on a channel.
    Input(TrainerId),
    /// The items that a trainer receives on a channel. Another item is sent once the trainer has ended its step.
    Output(TrainerId),
    /// The steps that a trainer has ended: each one is an item.
    Steps(TrainerId),
}

impl EndKind {
    /// The trainer that sends to the end.
    #[must_use]
    pub const fn sender(self) -> Option<TrainerId> {
        match self {
            Self::Input(trainer) | Self::Steps(trainer) => Some(trainer),
            Self::Kept | Self::Output(_) => None,
        }
    }
}

/// A loaded program. Its ends are numbered as [`ends`](Self::ends) has them.
pub trait HostedProgram: Send {
    /// Its ends.
    fn ends(&self) -> &[ProgramEnd];

    /// Sets a kept variable to its initial value, or to the one it had.
    ///
    /// # Errors
    /// When the value does not fit.
    fn set_kept(&mut self, end: usize, value: &[u8]) -> Result<(), Failure>;

    /// Takes an item in, if there is room for it; returns whether there was.
    ///
    /// # Errors
    /// When the item does not fit.
    fn deliver(&mut self, end: usize, item: &[u8]) -> Result<bool, Failure>;

    /// No round waits for this trainer any more.
    fn forget_sender(&mut self, trainer: TrainerId);

    /// Rounds wait for this trainer again.
    fn await_sender(&mut self, trainer: TrainerId);

    /// A new run of the job begins: rounds wait for every trainer.
    fn await_all(&mut self);

    /// Runs until every op waits.
    ///
    /// # Errors
    /// The failure of an op, by name. The program runs no more.
    fn run_until_waiting(&mut self) -> Result<(), Failure>;

    /// The first end with a value that the shard has not published, with the value.
    fn unpublished(&mut self) -> Option<(usize, &[u8])>;

    /// Notes that this value is published.
    fn note_published(&mut self);

    /// All that a run depends on beside the kept variables that are published.
    fn encode_state(&self) -> Vec<u8>;

    /// Restores what [`encode_state`](Self::encode_state) returned, after the kept variables.
    ///
    /// # Errors
    /// When it is damaged.
    fn restore_state(&mut self, saved: &[u8]) -> Result<(), Failure>;

    /// The waits of its ops, for people.
    fn waits_for(&self) -> String;
}

/// The loader of a shard that hosts no programs.
///
/// # Errors
/// Always.
pub fn no_programs(_: &[u8], _: u32) -> Result<Box<dyn HostedProgram>, Failure> {
    Err(Failure::call("found a program to host; expected none on this shard"))
}

/// Puts the length of a program before its binary form, which is a parameter of 32-bit elements.
#[must_use]
pub fn enclose_program(program: &[u8]) -> Vec<u8> {
    let length = u32::try_from(program.len()).expect("a program is bounded, see `limits`");
    let mut whole = length.to_le_bytes().to_vec();
    whole.extend_from_slice(program);
    whole.resize(whole.len().next_multiple_of(4), 0);
    whole
}

/// The binary form in the value of a program's parameter.
///
/// # Errors
/// When the value is shorter than it says.
pub fn enclosed_program(value: &[u8]) -> Result<&[u8], Failure> {
    let found = value.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        rest.get(..length)
    });
    found.ok_or_else(|| Failure::call("the value of a hosted program ends before the program"))
}
