//! Hosted programs: programs of a shard that no flow carries out, and that the executor runs on the shard's thread.
//!
//! ```text
//! program        its binary form, never changed
//! w, w@state     variables that it keeps: next version after each run that wrote them
//! w@gradient     ends of channels, one for each trainer: what it sends is a round of one gradient,
//! w              and item n of what it receives is version n
//! steps          the steps that the trainer has ended, by which items that it received are forgotten
//! ```
//!
//! All of them are parameters on one shard, so that numbers, duplicates, waits, journal and checkpoint are those of
//! other parameters. An input arrives when its round is decided and recorded. Arrivals are delivered in the order of
//! their records, each as soon as the program has room, and after each the program runs until every op waits: so a
//! replay of the journal runs the same steps. A round of an input is closed when it is delivered; until then the
//! trainer's next item waits, and its call with it.
//!
//! A program whose op fails stops for good, and calls for its values are refused with the reason.
//!
//! Not here: deliveries and runs ([`program_runs`](super::program_runs)), what runs ([`HostedProgram`]), and the
//! trainers' part (`trainer`).

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::chunk_table::{ChunkTable, ShardParameter};
use super::group::{SlotIndex, SlotIndices};
use super::job::Job;
use super::reply::Refusal;
use super::saved_program::{Arrival, ArrivalMessage, SavedProgramMessage};
use crate::error::Failure;
use crate::ids::ParameterIndex;
use crate::partition::Hosted;
use crate::port::{EndKind, HostedProgram, LoadProgram, ProgramEnd, enclosed_program};

/// The programs that a shard hosts.
#[derive(Default)]
pub(super) struct Programs {
    pub(super) all: Vec<ShardProgram>,
    /// The program of each chunk that is of one, and the end.
    ends: FxHashMap<SlotIndex, (usize, Option<usize>)>,
    /// Inputs whose round was closed, of which a next item may wait.
    pub(super) awakened: SlotIndices,
}

/// A program and what it has not taken in.
pub(super) struct ShardProgram {
    name: String,
    /// The chunk of its binary form, by which stalls name it.
    pub(super) slot: SlotIndex,
    pub(super) program: Box<dyn HostedProgram>,
    /// The chunks of each end, in order.
    pub(super) slots: Vec<Arc<[SlotIndex]>>,
    /// The arrivals that wait, in order.
    pub(super) arrivals: VecDeque<Arrival>,
    /// Why it has stopped.
    pub(super) failed: Option<String>,
}

impl Programs {
    /// Loads the programs of a table, and gives them their kept variables. One that a checkpoint had goes on; others
    /// are new, and have not run.
    ///
    /// # Errors
    /// When a program is none, or its ends are not the parameters that follow it.
    pub(super) fn of_table(job: &Job, table: &ChunkTable, load: LoadProgram) -> Result<Self, Failure> {
        let mut new = Self::default();
        let mut last = None;
        for (index, held) in &table.parameters {
            match held.declaration.hosted {
                None => {}
                Some(Hosted::Program) => {
                    let program = ShardProgram::of_parameter(job, table, *index, load)?;
                    last = Some(index.0 + u32::try_from(program.slots.len()).unwrap_or(u32::MAX));
                    new.hold(held, program);
                }
                Some(Hosted::Part) if last.is_some_and(|last| index.0 <= last) => {}
                Some(Hosted::Part) => {
                    let name = held.name();
                    return Err(Failure::call(format!("parameter \"{name}\" is a part of no hosted program")));
                }
            }
        }
        Ok(new)
    }

    fn hold(&mut self, held: &ShardParameter, program: ShardProgram) {
        let number = self.all.len();
        self.ends.extend(held.chunks.iter().map(|slot_index| (*slot_index, (number, None))));
        for (end, slots) in program.slots.iter().enumerate() {
            self.ends.extend(slots.iter().map(|slot_index| (*slot_index, (number, Some(end)))));
        }
        tracing::info!("the executor runs {:?}, which has {} ends", program.name, program.slots.len());
        self.all.push(program);
    }

    /// Whether there are none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The program of a chunk.
    #[inline]
    pub(super) fn of(&self, slot_index: SlotIndex) -> Option<usize> {
        if self.all.is_empty() { None } else { self.ends.get(&slot_index).map(|(program, _)| *program) }
    }

    /// Notes that the item of an input is decided and recorded, at its last chunk.
    pub(super) fn note_arrival(&mut self, slot_index: SlotIndex) {
        let Some((program, Some(end))) = self.ends.get(&slot_index).copied() else { return };
        let program = &mut self.all[program];
        let is_whole = program.slots[end].last() == Some(&slot_index);
        // A checkpoint has it in its order already.
        if is_whole && !program.arrivals.contains(&Arrival::Item(end)) {
            program.arrivals.push_back(Arrival::Item(end));
        }
    }

    /// Forgets items of a checkpoint that no journal has carried over: nothing waits behind them.
    pub(super) fn forget_lost(&mut self, table: &ChunkTable) {
        for ShardProgram { arrivals, slots, .. } in &mut self.all {
            let is_here = |end: usize| slots[end].iter().all(|slot_index| table.chunks[*slot_index].decided > 0);
            arrivals.retain(|one| !matches!(one, Arrival::Item(end) if !is_here(*end)));
        }
    }

    /// A new run begins in every program that is not restored from a later state.
    pub(super) fn note_run(&mut self, is_before_restored: impl Fn(SlotIndex) -> bool) {
        for program in self.all.iter_mut().filter(|program| !is_before_restored(program.slot)) {
            program.arrivals.push_back(Arrival::Run);
        }
    }

    /// Refuses what is for a program that has stopped.
    pub(super) fn check_running(&self, slot_index: SlotIndex) -> Result<(), Refusal> {
        let failed = self.of(slot_index).and_then(|program| self.all[program].failed.as_ref());
        failed.map_or(Ok(()), |text| Err(Refusal::invalid(text.as_str())))
    }

    /// The wait of the program of a chunk.
    pub(super) fn program_wait(&self, slot_index: SlotIndex) -> Option<String> {
        let program = &self.all[self.of(slot_index)?];
        Some(program.failed.clone().unwrap_or_else(|| format!("its program, in which {}", program.state())))
    }

    /// The inputs of a program in the order in which a replay is to have them: first those that have arrived.
    pub(super) fn inputs_in_order(&self, program: usize) -> Vec<Arc<[SlotIndex]>> {
        let ShardProgram { program, slots, arrivals, .. } = &self.all[program];
        let arrived = arrivals.iter().filter_map(|arrival| match arrival {
            Arrival::Item(end) => Some(*end),
            Arrival::Leave(_) | Arrival::Join(_) | Arrival::Run => None,
        });
        let arrived: Vec<usize> = arrived.collect();
        let ends = program.ends().iter().enumerate();
        let inputs = ends.filter(|(_, end)| end.kind.sender().is_some()).map(|(number, _)| number);
        let rest = inputs.filter(|number| !arrived.contains(number));
        arrived.iter().copied().chain(rest).map(|end| Arc::clone(&slots[end])).collect()
    }

    /// A program as a checkpoint has it, at its first chunk.
    pub(super) fn saved(&self, slot_index: SlotIndex) -> Option<SavedProgramMessage> {
        let ShardProgram { slot, program, arrivals, failed, .. } = &self.all[self.of(slot_index)?];
        (*slot == slot_index).then(|| SavedProgramMessage {
            program: program.encode_state(),
            arrivals: arrivals.iter().map(ArrivalMessage::of).collect(),
            failed: failed.clone(),
        })
    }
}

impl ShardProgram {
    fn of_parameter(job: &Job, table: &ChunkTable, index: ParameterIndex, load: LoadProgram) -> Result<Self, Failure> {
        let held = &table.parameters[&index];
        let name = held.name().to_owned();
        let refused = |why: String| Failure::call(format!("the hosted program {name:?}: {why}"));
        check_whole(table, held).map_err(&refused)?;
        let value = whole_value(table, &held.chunks);
        let program = enclosed_program(&value).and_then(|program| load(program, job.trainers));
        let mut program = program.map_err(|failure| refused(failure.to_string()))?;
        let mut slots = Vec::new();
        for (number, end) in (1..).zip(program.ends()) {
            let at = ParameterIndex(index.0.saturating_add(number));
            let part = table.parameters.get(&at).filter(|part| is_end(part, end));
            let part =
                part.ok_or_else(|| refused(format!("parameter {at} is not its {:?} {:?}", end.kind, end.name)))?;
            check_whole(table, part).map_err(&refused)?;
            slots.push(Arc::from(part.chunks.as_slice()));
        }
        for (end, slots) in slots.iter().enumerate() {
            if program.ends()[end].kind == EndKind::Kept {
                let set = program.set_kept(end, &whole_value(table, slots));
                set.map_err(|failure| refused(failure.to_string()))?;
            }
        }
        let (mut arrivals, mut failed) = (VecDeque::new(), None);
        if let Some(saved) = table.programs.get(&index) {
            program.restore_state(&saved.program).map_err(|failure| refused(failure.to_string()))?;
            arrivals = saved.arrivals.iter().map(Arrival::of).collect();
            failed.clone_from(&saved.failed);
        }
        Ok(Self { slot: held.chunks[0], name, program, slots, arrivals, failed })
    }

    /// The waits of its ops, or why it has stopped.
    pub(super) fn state(&self) -> String {
        self.failed.clone().unwrap_or_else(|| self.program.waits_for())
    }

    /// The program stops for good.
    pub(super) fn stop_for(&mut self, failure: &Failure) {
        let text = format!("the program {:?} has stopped: {failure}", self.name);
        tracing::error!("{text}");
        self.failed = Some(text);
    }

    /// Whether an arrival may be taken before those in front of it, which wait.
    pub(super) fn may_overtake(&self, at: usize) -> bool {
        let sender = |end: usize| self.program.ends()[end].kind.sender();
        let mut earlier = self.arrivals.iter().take(at);
        match self.arrivals[at] {
            Arrival::Item(_) | Arrival::Run => true,
            // A trainer leaves behind its last item.
            Arrival::Leave(trainer) => {
                earlier.all(|one| !matches!(one, Arrival::Item(end) if sender(*end) == Some(trainer)))
            }
            Arrival::Join(trainer) => !earlier.any(|one| *one == Arrival::Leave(trainer)),
        }
    }

    /// Takes in that a trainer leaves or joins, or that a run begins, which all trainers are of: those that were about
    /// to leave the earlier one, too.
    pub(super) fn take_membership(&mut self, at: usize, arrival: Arrival) {
        self.arrivals.remove(at);
        match arrival {
            Arrival::Leave(trainer) => self.program.forget_sender(trainer),
            Arrival::Join(trainer) => self.program.await_sender(trainer),
            Arrival::Run => {
                let mut place = 0..;
                self.arrivals.retain(|one| place.next() >= Some(at) || matches!(one, Arrival::Item(_)));
                self.program.await_all();
            }
            Arrival::Item(_) => unreachable!("an item is delivered"),
        }
    }
}

/// Whether a parameter is this end of the program before it.
fn is_end(part: &ShardParameter, end: &ProgramEnd) -> bool {
    let declared = &part.declaration;
    declared.hosted == Some(Hosted::Part)
        && (declared.element_type, declared.sender) == (end.element_type, end.kind.sender())
        && declared.elements() == end.shape.iter().product::<u64>()
}

/// Refuses a parameter of which this shard lacks a chunk.
fn check_whole(table: &ChunkTable, part: &ShardParameter) -> Result<(), String> {
    let found: u64 = part.chunks.iter().map(|slot_index| u64::from(table.chunks[*slot_index].bytes)).sum();
    let (name, expected) = (part.name(), part.declaration.bytes);
    if found == expected && found > 0 {
        return Ok(());
    }
    Err(format!("found {found} bytes of \"{name}\" on this shard; expected all {expected}"))
}

/// The value of a dense parameter that is whole on this shard.
fn whole_value(table: &ChunkTable, slots: &[SlotIndex]) -> Vec<u8> {
    slots.iter().flat_map(|slot_index| table.chunks[*slot_index].value_bytes()).copied().collect()
}
