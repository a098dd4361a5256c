//! Initialisation of a shard: a generation fills the table of chunks, and once it is complete the shard serves.

use std::sync::Arc;

use super::bucket::RowsWorkspace;
use super::chunk_table::ChunkTable;
use super::compiled_flows::Flows;
use super::context::Origin;
use super::device::Device;
use super::frames::{Leases, decode};
use super::job::Job;
use super::needs::Holdings;
use super::options::ProcessMemory;
use super::pool::Pool;
use super::reply::{Refusal, Replies};
use super::serving::Serving;
use super::shard::{Phase, Shard};
use super::totals::check_totals;
use crate::error::Failure;
use crate::ids::{Generation, PeerId};
use crate::memory::Lease;
use crate::optim::{self};
use crate::time::Now;
use crate::wire::{Entry, ErrorCode, FinishMessage, Frame, InitMessage};

impl Shard {
    pub(super) fn init(
        &mut self,
        peer: Option<PeerId>,
        frame: &Frame,
        leases: Leases,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let generation = frame.head.generation;
        let bare = |entry: &Entry| Entry::bare(entry.id, entry.round, entry.element_type);
        let table = match &mut self.phase {
            // A resend: this generation is finished already.
            Phase::Serving(serving) if serving.table.generation == generation => {
                frame.entries.iter().for_each(|entry| replies.done(peer, &frame.head, bare(entry)));
                return Ok(());
            }
            Phase::Filling(table) if table.generation == generation => table,
            _ => self.begin(generation),
        };
        table.declare(decode::<InitMessage>(&frame.control)?, &frame.entries)?;
        let (mut leases, mut room) = (leases.into_iter(), RowsWorkspace::default());
        for entry in &frame.entries {
            let lease = (entry.bytes > 0).then(|| leases.next().expect("there is a lease for every payload"));
            table.begin(&mut room, entry, lease)?;
            replies.done(peer, &frame.head, bare(entry));
        }
        Ok(())
    }

    fn begin(&mut self, generation: Generation) -> &mut ChunkTable {
        self.pool = Pool::new(self.options.shares_memory, self.options.memory_limit.clone());
        self.counters.rounds.set(0);
        self.device.iter_mut().for_each(Device::forget);
        self.phase = Phase::Filling(ChunkTable::new(generation));
        match &mut self.phase {
            Phase::Filling(table) => table,
            Phase::Empty | Phase::Serving(_) => unreachable!("the phase was just set"),
        }
    }

    pub(super) fn finish(&mut self, peer: Option<PeerId>, frame: &Frame, replies: &mut Replies) -> Result<(), Refusal> {
        let generation = frame.head.generation;
        let message = decode::<FinishMessage>(&frame.control)?;
        match &self.phase {
            Phase::Serving(serving) if serving.table.generation == generation => {}
            Phase::Filling(table) if table.generation == generation => self.serve(&message)?,
            _ if message.chunks == 0 => {
                self.begin(generation);
                self.serve(&message)?;
            }
            _ => return Err(lost(message.chunks, 0)),
        }
        replies.done_whole(peer, &frame.head);
        Ok(())
    }

    /// Starts serving: computes the memory budget and creates the optimizer states. No chunk memory is mapped
    /// afterwards.
    pub(super) fn serve(&mut self, message: &FinishMessage) -> Result<(), Refusal> {
        let Phase::Filling(table) = &self.phase else {
            return Err(lost(message.chunks, 0));
        };
        let found = u64::try_from(table.chunks.len()).unwrap_or(u64::MAX);
        if found != message.chunks {
            return Err(lost(message.chunks, found));
        }
        let job = Job::from_message(message)?;
        let flows =
            Flows::new(&job, table, self.options.compile).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        check_totals(&job, table).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let receives = u64::try_from(self.options.receives).unwrap_or(u64::MAX);
        let rows = row_bytes(table, job.trainers, receives);
        let holdings = Holdings::declared(table, &job);
        let (needs, budget) = (holdings.needs_of(receives, self.has_journal()), holdings.budget(receives));
        let is_ample = self.pool.check_limit(&needs);
        if !is_ample.map_err(|failure| Refusal::invalid(failure.to_string()))? {
            let (most, limit) = (needs.most, self.options.memory_limit.as_ref().map_or(0, ProcessMemory::left));
            tracing::warn!(
                "parameters may need {most} bytes on this shard, where all trainers are ahead; found {limit} \
                 bytes for it below the memory limit (cgroup), at which the system ends this server"
            );
        }
        self.counters.expect_trainers(job.trainers);
        self.pool.seal(&budget, rows).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let Phase::Filling(table) = std::mem::replace(&mut self.phase, Phase::Empty) else {
            unreachable!("the phase was just looked at");
        };
        let serving = Serving::new(job, table, flows, self.options.load);
        let mut serving = serving.map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let made = make_states(&mut serving, &mut self.pool);
        self.phase = Phase::Serving(Box::new(serving));
        made.map_err(|failure| Refusal::invalid(failure.to_string()))?;
        if let Some((serving, mut cx)) = self.serving(Now(0), None, Origin::Unlogged, &mut Replies::default()) {
            serving.begin_programs(&mut cx);
        }
        Ok(())
    }
}

/// A lease for a payload. Rows have a pool of their own, because their count is not known in advance.
pub(super) fn take(phase: &Phase, pool: &mut Pool, entry: &Entry) -> Result<Lease, Failure> {
    match phase {
        Phase::Serving(serving) if serving.table.is_of_rows(entry) => pool.take_for_rows(entry.bytes),
        _ => pool.take(entry.bytes),
    }
}

fn lost(expected: u64, found: u64) -> Refusal {
    let text =
        format!("this shard holds {found} chunks, the initialiser sent {expected}: begin the initialisation anew");
    Refusal::new(ErrorCode::InitialisationLost, text)
}

/// Bytes of rows in flight, at most.
pub(super) fn row_bytes(table: &ChunkTable, trainers: u32, receives: u64) -> u64 {
    let plans = table.chunks.iter().filter_map(|chunk| table.held(chunk.id).rows.as_ref());
    plans.map(|plan| plan.bytes_in_flight(trainers.into(), receives)).fold(0, u64::saturating_add)
}

fn make_states(serving: &mut Serving, pool: &mut Pool) -> Result<(), Failure> {
    let table = &mut serving.table;
    for slot_index in table.chunks.slot_indices() {
        if table.chunks[slot_index].bucket().is_some() {
            continue;
        }
        let chunk = &mut table.chunks[slot_index];
        let rule = Arc::clone(&chunk.rule);
        chunk.states.reserve_exact(rule.states().len().saturating_sub(chunk.states.len()));
        for declared in rule.states().iter().skip(chunk.states.len()) {
            let mut state = pool.take(chunk.bytes)?;
            optim::fill(chunk.element_type, &mut state.bytes_mut()[..chunk.bytes as usize], declared.initial);
            chunk.states.push(state);
        }
    }
    Ok(())
}
