//! The compiled programs of a shard's parameters.

use super::chunk_table::{ChunkTable, ShardParameter};
use super::group::SlotIndex;
use super::job::Job;
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::TrainerId;
use crate::partition::TotalPart;
use crate::port::{CompileFlow, Flow, FlowSource};

/// Parameters whose programs differ in names, shapes and numbers of the rule only.
#[derive(PartialEq)]
struct ProgramKind {
    states: usize,
    is_float: bool,
    sender: Sender,
    backup_trainers: u32,
    is_hosted: bool,
}

/// The trainers that send gradients of a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// All, and a round awaits each.
    Everybody,
    /// One.
    Trainer(TrainerId),
    /// Any: the first completes a round.
    First,
    /// None: the server computes the value.
    Nobody,
}

/// The compiled programs of a shard, and which chunk runs which.
pub(super) struct Flows {
    compiled: Vec<(ProgramKind, Flow)>,
    by_slot_index: Vec<u32>,
}

impl Flows {
    /// Compiles the program of every parameter in a table.
    pub(super) fn new(job: &Job, table: &ChunkTable, compile: CompileFlow) -> Result<Self, Failure> {
        let mut new = Self { compiled: Vec::new(), by_slot_index: vec![0; table.chunks.len()] };
        for held in table.parameters.values() {
            let rule = job.rule_of(&held.rule);
            let sender = sender(job, held)?;
            let (backup_trainers, is_hosted) = (held.backup_trainers, held.declaration.hosted.is_some());
            let (states, is_float) = (rule.states().len(), held.element_type().is_float());
            let kind = ProgramKind { states, is_float, sender, backup_trainers, is_hosted };
            let number = match new.compiled.iter().position(|(one, _)| *one == kind) {
                Some(number) => number,
                None => {
                    let flow = compile(FlowSource {
                        // An item is a round, in every mode.
                        mode: if is_hosted { Mode::Sync } else { job.mode },
                        merge: job.merge,
                        trainers: job.trainers,
                        backup_trainers,
                        declaration: &held.declaration,
                        rule: &rule,
                    })?;
                    new.compiled.push((kind, flow));
                    new.compiled.len() - 1
                }
            };
            let number = u32::try_from(number).expect("there are few kinds");
            held.chunks.iter().for_each(|slot_index| new.by_slot_index[slot_index.place()] = number);
        }
        Ok(new)
    }

    /// The flow of a chunk.
    #[inline]
    pub(super) fn of(&self, slot_index: SlotIndex) -> &Flow {
        &self.compiled[self.by_slot_index[slot_index.place()] as usize].1
    }

    /// The trainers that send gradients of a chunk.
    #[inline]
    pub(super) fn sender(&self, slot_index: SlotIndex) -> Sender {
        self.compiled[self.by_slot_index[slot_index.place()] as usize].0.sender
    }

    /// Whether a round of a chunk awaits a trainer: as the parameter's only sender, or as one of all.
    #[inline]
    pub(super) fn is_awaited(&self, slot_index: SlotIndex, trainer: TrainerId) -> bool {
        match self.sender(slot_index) {
            Sender::Everybody => true,
            Sender::Trainer(sender) => sender == trainer,
            Sender::First | Sender::Nobody => false,
        }
    }
}

/// Refuses backup trainers where a round has none.
fn check_backup(job: &Job, held: &ShardParameter) -> Result<(), Failure> {
    let found = held.backup_trainers;
    let refused = |why: String| Failure::call(format!("parameter \"{}\" has backup_trainers: {why}", held.name()));
    if job.mode != Mode::Sync {
        return Err(refused(format!("found a job in {:?}; expected mode sync, which has rounds", job.mode)));
    }
    if held.declaration.sender.is_some() || held.declaration.total_part.is_some() || held.rule.rule().has_total() {
        return Err(refused("found rounds that one trainer ends; expected rounds of all".to_owned()));
    }
    if held.rows.is_none() && !held.rule.rule().is_element_wise() {
        let expected = "a rule that updates each chunk by itself, as chunks may count the gradients of other trainers";
        return Err(refused(format!("found a rule that needs the whole gradient; expected {expected}")));
    }
    if job.trainers <= found {
        return Err(refused(format!("found {found} of {} trainers; expected fewer", job.trainers)));
    }
    Ok(())
}

/// The checked senders of a parameter.
fn sender(job: &Job, held: &ShardParameter) -> Result<Sender, Failure> {
    if 0 < held.backup_trainers {
        check_backup(job, held)?;
    }
    if held.declaration.hosted.is_some() {
        return sender_to_host(job, held);
    }
    match held.declaration.total_part {
        Some(TotalPart::Share) => return Ok(Sender::Nobody),
        Some(TotalPart::Total) => return Ok(Sender::First),
        None => {}
    }
    let Some(sender) = held.declaration.sender else { return Ok(Sender::Everybody) };
    let refused = |why: String| Failure::call(format!("parameter \"{}\" has a sender: {why}", held.name()));
    if job.mode != Mode::Sync {
        return Err(refused(format!("found a job in {:?}; expected mode sync", job.mode)));
    }
    if job.trainers <= sender.0 {
        return Err(refused(format!("found trainer {sender}; expected one below {}", job.trainers)));
    }
    Ok(Sender::Trainer(sender))
}

/// The checked sender to an end of a hosted program.
fn sender_to_host(job: &Job, held: &ShardParameter) -> Result<Sender, Failure> {
    let refused = |why: String| Failure::call(format!("parameter \"{}\" of a hosted program: {why}", held.name()));
    if job.mode == Mode::Delta {
        return Err(refused("found a job in mode delta; expected another one, in which servers optimize".to_owned()));
    }
    match held.declaration.sender {
        None => Ok(Sender::Nobody),
        Some(sender) if sender.0 < job.trainers => Ok(Sender::Trainer(sender)),
        Some(sender) => Err(refused(format!("found trainer {sender}; expected one below {}", job.trainers))),
    }
}
