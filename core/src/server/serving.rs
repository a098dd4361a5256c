//! Serving state of an initialised shard: takes pushes, pulls, sets and leaves, and answers.
//!
//! A new gradient goes through the [`flow`](super::flow) of its chunk. An early gradient waits unacknowledged, at most
//! one per trainer and chunk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::bucket::{RowsRequest, RowsWorkspace};
use super::chunk::{CallId, Chunk, ContributionStage, OpenContribution, Waiter};
use super::device::Device;
use super::initialisation::{ChunkTable, ShardParameter, unknown};
use super::pool::Pool;
use super::presence::Presence;
use super::program::rule_of_mode;
use super::reply::{NO_PEER, Refusal, Replies};
use super::round::{Contribution, PushHeader};
use super::rows::RowsPull;
use super::stage::Flows;
use super::watch::StallLog;
use crate::config::{Merge, Mode};
use crate::dtype::Half;
use crate::error::Failure;
use crate::ids::{Incarnation, ParameterIndex, PeerId, Round, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::Numbers;
use crate::port::Kernels;
use crate::program::executor::AccumulatorPace;
use crate::time::Now;
use crate::wire::{Entry, ErrorCode, Flags, Frame, Head, Kind};

/// Settings of the job, from the finish frame.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) mode: Mode,
    pub(super) merge: Merge,
    pub(super) trainers: u32,
}

/// Resources for handling one frame.
pub(super) struct Context<'a> {
    pub(super) now: Now,
    pub(super) kernels: &'a mut dyn Kernels,
    pub(super) pool: &'a mut Pool,
    pub(super) device: Option<&'a mut Device>,
    pub(super) replies: &'a mut Replies,
    /// Connected trainers.
    pub(super) trainers: &'a Presence,
    /// The connection that sent the frame.
    pub(super) peer: PeerId,
    /// Position of the frame's journal record.
    pub(super) position: u64,
    /// Remaining budget for replaying missed row updates, in bytes of weights.
    pub(super) replay_left: u64,
}

/// Why the update of a complete round is stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StallReason {
    /// A lease for the next value.
    Memory,
    /// Another turn: its rows replay many missed updates.
    Time,
    /// A device that works on some of the chunks that step together.
    Device,
}

impl StallReason {
    /// The reason, for log lines and errors.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Memory => "memory that readers hold",
            Self::Time => "rows that catch up with what they have missed",
            Self::Device => "a device",
        }
    }
}

impl Context<'_> {
    /// The accelerator that holds chunks.
    pub(super) fn device(&mut self) -> &mut Device {
        self.device.as_deref_mut().expect("a chunk lives on it")
    }
}

/// State of a serving shard.
pub(super) struct Serving {
    pub(super) job: Job,
    pub(super) table: ChunkTable,
    pub(super) flows: Flows,
    /// Departed trainers, with the incarnation that left.
    pub(super) departed: Vec<Option<Incarnation>>,
    /// Count of pushes so far.
    arrivals: u64,
    /// Chunks with a stalled update, and the reason; retried in every turn and when a lease is returned.
    pub(super) stalled: BTreeMap<usize, StallReason>,
    /// The trainer whose refused leave, set or rejoin goes ahead of new gradients for a device, and the deadline of
    /// that privilege; see `grouped_update`.
    pub(super) priority: Option<(TrainerId, Now)>,
    /// Chunks with a half-precision answer that lacks a lease; retried with `stalled`.
    pub(super) starved: BTreeSet<usize>,
    /// Pulls of rows that take several turns, in round-robin order.
    pub(super) slow_pulls: VecDeque<RowsPull>,
    /// Chunks with a pending request, each once, by the time of its oldest one.
    pub(super) waits: BTreeSet<(Now, usize)>,
    /// Time of the last search for waits on lost trainers.
    pub(super) lost_checked_at: Now,
    /// Pending requests per connection.
    pub(super) waiting: BTreeMap<PeerId, usize>,
    /// Waits that the log has reported.
    pub(super) watch: StallLog,
    /// Where rows are merged and lost_checked_at up.
    pub(super) rows_room: RowsWorkspace,
    /// Restored chunks with open contributions, by the journal position at which the checkpoint wrote them.
    behind: BTreeSet<(u64, usize)>,
    /// Cached coefficients of the previous update.
    pub(super) numbers: Numbers,
}

/// Classification of one entry of a push.
pub(super) enum PushVerdict {
    /// A duplicate: the value contains it.
    Applied,
    /// A duplicate: the open round contains it.
    Contributed,
    /// A duplicate of a gradient that waits for its round.
    Waits,
    /// Too late: its round is complete without it, and not closed yet.
    Late,
    /// A new gradient.
    New,
}

impl Serving {
    /// Starts serving with `flows`, which were made for this job and this table.
    pub(super) fn new(job: Job, mut table: ChunkTable, flows: Flows) -> Result<Self, Failure> {
        if let Some(rule) = rule_of_mode(job.mode) {
            table.replace_rule(&rule)?;
        }
        for held in table.parameters.values_mut() {
            held.group.chunks.sort_by_key(|slot_index| table.chunks[*slot_index].id);
        }
        let open = |(slot_index, chunk): (usize, &Chunk)| {
            let restored = chunk.restored.as_ref().filter(|restored| !restored.open.is_empty())?;
            Some((restored.position, slot_index))
        };
        let behind = table.chunks.iter().enumerate().filter_map(open).collect();
        let departed = vec![None; job.trainers as usize];
        Ok(Self {
            job,
            table,
            flows,
            departed,
            arrivals: 0,
            stalled: BTreeMap::new(),
            priority: None,
            starved: BTreeSet::new(),
            slow_pulls: VecDeque::new(),
            waits: BTreeSet::new(),
            lost_checked_at: Now(0),
            waiting: BTreeMap::new(),
            watch: StallLog::default(),
            rows_room: RowsWorkspace::default(),
            behind,
            numbers: Numbers::default(),
        })
    }

    /// Checks a push before anything is received or applied, so that no push is half-applied. Appends the slot indices
    /// of its chunks.
    pub(super) fn check_push(&self, frame: &Frame, position: u64, slot_indices: &mut Vec<u32>) -> Result<(), Refusal> {
        self.check_trainer(&frame.head)?;
        if self.is_rejoin(&frame.head) && position == u64::MAX {
            self.check_all_open()?;
        }
        let mut last = None;
        for entry in &frame.entries {
            let slot_index = self.table.check_gradient(last, entry)?;
            last = Some(slot_index);
            self.check_rows_request(slot_index, &frame.head)?;
            self.check_half(slot_index, entry)?;
            if !self.table.chunks[slot_index].is_before_restored(position)
                && matches!(self.verdict(slot_index, &frame.head, entry)?, PushVerdict::New)
                && position == u64::MAX
            {
                self.check_open_to(slot_index, &frame.head)?;
            }
            slot_indices.push(u32::try_from(slot_index).expect("a shard's chunks are counted in 32 bits"));
        }
        Ok(())
    }

    /// Checks a learning rate against the rules of these chunks.
    pub(super) fn check_rate(&self, rate: f64, slot_indices: &[u32]) -> Result<(), Refusal> {
        for chunk in slot_indices.iter().map(|slot_index| &self.table.chunks[*slot_index as usize]) {
            chunk.rule.rule().check_rate(rate, chunk.element_type).map_err(|failure| {
                let name = self.table.held(chunk.id).name();
                Refusal::invalid(format!("parameter \"{name}\": {failure}"))
            })?;
        }
        Ok(())
    }

    /// Closes the rounds that were complete when the checkpoint wrote their chunks, up to this journal position.
    pub(super) fn catch_up(&mut self, cx: &mut Context<'_>) {
        while let Some((_, slot_index)) = self.behind.first().copied().filter(|(position, _)| *position <= cx.position)
        {
            self.behind.pop_first();
            self.note_lost(slot_index);
            self.apply_deferred_set(cx, slot_index);
            self.run(cx, slot_index, None);
            self.apply_deferred_set(cx, slot_index);
        }
    }

    /// Reopens a sealed round whose contributions a truncated journal has lost.
    fn note_lost(&mut self, slot_index: usize) {
        let chunk = &self.table.chunks[slot_index];
        let held = self.table.held(chunk.id);
        let slot_indices = self.group_of(slot_index);
        let found = slot_indices.iter().map(|slot_index| self.table.chunks[*slot_index].sealed_and_found());
        let (sealed, missing) = found.min_by_key(|(sealed, _)| *sealed).expect("there is a chunk");
        if sealed < chunk.sealed {
            let names: Vec<String> = missing.iter().map(TrainerId::to_string).collect();
            tracing::warn!(
                "parameter {:?} chunk {}: round {} was complete, and the journal has lost what trainer {} sent for it",
                held.name(),
                chunk.id.chunk,
                chunk.version.0 + 1 + u64::from(sealed),
                names.join(", ")
            );
            let slot_indices = slot_indices.to_vec();
            slot_indices.into_iter().for_each(|slot_index| self.table.chunks[slot_index].sealed = sealed);
        }
    }

    /// Ends replay: every later frame is new to every chunk.
    pub(super) fn replayed(&mut self) {
        // Sealed rounds are closed by now, or reopened by `note_lost`.
        self.table.chunks.iter_mut().for_each(|chunk| (chunk.restored, chunk.sealed) = (None, 0));
    }

    /// Checks a set.
    pub(super) fn check_set(&self, frame: &Frame, position: u64) -> Result<(), Refusal> {
        self.check_trainer(&frame.head)?;
        for entry in &frame.entries {
            self.table.check_whole(entry)?;
            let slot_index = self.table.slot_index(entry.id).expect("the entry was just checked");
            if position == u64::MAX {
                self.check_open(slot_index)?;
                self.check_no_deferred_set(slot_index, CallId::of(&frame.head), frame.head.trainer)?;
            }
        }
        Ok(())
    }

    /// Checks a leave.
    pub(super) fn check_leave(&self, position: u64) -> Result<(), Refusal> {
        if position == u64::MAX { self.check_all_open() } else { Ok(()) }
    }

    /// Applies a checked push: `slot_indices` are those of its chunks, `body` holds one lease per payload.
    pub(super) fn push(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        rate: Option<f64>,
        slot_indices: &[u32],
        body: impl IntoIterator<Item = Lease>,
    ) {
        assert_eq!(frame.entries.len(), slot_indices.len(), "the frame was checked");
        let (trainer, call) = (frame.head.trainer, CallId::of(&frame.head));
        let (position, arrival) = (cx.position, self.arrivals);
        self.arrivals += 1;
        let sending = Arc::new(PushHeader { call, rate, position, arrival, peer: cx.peer, head: frame.head });
        self.rejoin(cx.position, &frame.head);
        let mut body = body.into_iter();
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            let lease = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let slot_index = *slot_index as usize;
            if self.is_begun_by_earlier_life(&self.table.chunks[slot_index], &frame.head) {
                self.withdraw_push(cx, trainer, entry.id.parameter);
            }
            let contribution = Contribution {
                trainer,
                round: entry.round,
                element_type: entry.element_type,
                bytes: entry.bytes,
                gradient: lease,
                rows: Vec::new(),
                is_early_part: false,
                half: entry.half,
                since: Some(cx.now),
                sending: Arc::clone(&sending),
            };
            if self.table.chunks[slot_index].bucket().is_some() {
                self.push_rows(cx, slot_index, entry, contribution);
            } else {
                self.push_entry(cx, slot_index, entry, contribution);
            }
        }
    }

    /// Applies a set; a duplicate changes nothing.
    pub(super) fn set(&mut self, cx: &mut Context<'_>, frame: &Frame, body: Vec<Lease>) {
        let call = CallId::of(&frame.head);
        self.note_admitted(frame.head.trainer);
        for (entry, lease) in frame.entries.iter().zip(body) {
            let slot_index = self.table.slot_index(entry.id).expect("the entry was checked");
            if self.is_before_restored(cx, slot_index) {
                self.restore_set(cx, slot_index, frame, lease);
            } else if let Some(lease) = self.defer_set(cx, slot_index, frame, lease) {
                self.apply_set(cx, slot_index, call, (cx.peer, &frame.head), lease);
            }
        }
    }

    /// Answers a pull, or queues it until its version exists.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        body: impl IntoIterator<Item = Lease>,
    ) -> Result<(), Refusal> {
        let slot_indices =
            frame.entries.iter().map(|entry| self.table.slot_index(entry.id).ok_or_else(|| unknown(entry.id)));
        let slot_indices = slot_indices.collect::<Result<Vec<_>, _>>()?;
        self.check_requests(frame, &slot_indices)?;
        self.check_waiters(cx.peer, frame.entries.len())?;
        let mut body = body.into_iter();
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            let is_bucket = self.table.chunks[slot_index].bucket().is_some();
            let ids = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let wish = is_bucket.then_some(RowsRequest { ids, bytes: entry.bytes });
            let (version, half) = (Version(entry.round.0), entry.half);
            self.answer_or_wait(
                cx,
                slot_index,
                Waiter { peer: cx.peer, head: frame.head, version, since: cx.now, half, wish },
            );
        }
        Ok(())
    }

    /// Marks a trainer as departed: rounds no longer wait for it.
    pub(super) fn leave(&mut self, cx: &mut Context<'_>, head: &Head) -> Result<(), Refusal> {
        self.check_trainer(head)?;
        self.note_admitted(head.trainer);
        self.departed[head.trainer.0 as usize] = Some(head.incarnation);
        self.forget_gathered(cx.position, head.trainer);
        let unfinished =
            self.table.parameters.iter().filter(|(_, held)| self.unfinished_push(held, head.trainer).is_some());
        for parameter in unfinished.map(|(index, _)| *index).collect::<Vec<_>>() {
            self.withdraw_push(cx, head.trainer, parameter);
        }
        // Gradients that waited for the departed trainer may enter now.
        for slot_index in 0..self.table.chunks.len() {
            self.run(cx, slot_index, None);
        }
        cx.replies.done_whole(cx.peer, head);
        Ok(())
    }

    /// Records a stalled update; it is retried when the reason may be gone.
    pub(super) fn stall(&mut self, slot_index: usize, lack: StallReason) {
        self.stalled.insert(slot_index, lack);
    }

    /// Removes a chunk from the stalled ones after its update.
    #[inline]
    pub(super) fn note_updated(&mut self, slot_index: usize) {
        if !self.stalled.is_empty() {
            self.stalled.remove(&slot_index);
        }
    }

    /// Whether any update is stalled.
    pub(super) fn is_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Whether any update is stalled for this reason.
    pub(super) fn lacks(&self, lack: StallReason) -> bool {
        self.stalled.values().any(|one| *one == lack)
    }

    /// Whether an update or an answer lacks memory.
    pub(super) fn lacks_memory(&self) -> bool {
        !self.starved.is_empty() || self.lacks(StallReason::Memory)
    }

    /// Whether rows replay missed updates, which is work for every turn.
    pub(super) fn is_catching_up(&self) -> bool {
        !self.slow_pulls.is_empty() || self.lacks(StallReason::Time)
    }

    /// Logs the number of stalled updates, if there are any.
    pub(super) fn log_stalled(&self) {
        if let Some((slot_index, lack)) = self.stalled.first_key_value() {
            let id = self.table.chunks[*slot_index].id;
            let (count, name) = (self.stalled.len(), self.table.held(id).name());
            tracing::warn!("{count} updates wait, first {name:?} chunk {} for {}", id.chunk, lack.text());
        }
    }

    /// Retries updates and answers that lacked a lease; true when any succeeded.
    pub(super) fn retry(&mut self, cx: &mut Context<'_>) -> bool {
        let is_any = self.retry_lacking(cx, StallReason::Memory);
        self.answer_starved(cx) || is_any
    }

    /// Continues updates and pulls that take several turns, each with a budget of `replays` bytes of missed row
    /// updates. True when there was any.
    pub(super) fn go_on_catching_up(&mut self, cx: &mut Context<'_>, replays: u64) -> bool {
        cx.replay_left = replays;
        let is_any = self.retry_lacking(cx, StallReason::Time) || cx.replay_left < replays;
        cx.replay_left = replays;
        self.read_on_slow(cx) || is_any
    }

    fn retry_lacking(&mut self, cx: &mut Context<'_>, wanted: StallReason) -> bool {
        let stalled: Vec<usize> =
            self.stalled.extract_if(.., |_, lack| *lack == wanted).map(|(slot_index, _)| slot_index).collect();
        stalled.iter().for_each(|slot_index| self.run(cx, *slot_index, None));
        stalled.iter().any(|slot_index| !self.stalled.contains_key(slot_index))
    }

    fn check_trainer(&self, head: &Head) -> Result<(), Refusal> {
        if head.generation != self.table.generation {
            let text = format!(
                "generation {} is not the one that initialised this job, which is {}",
                head.generation, self.table.generation
            );
            return Err(Refusal::new(ErrorCode::Fenced, text));
        }
        if head.trainer.0 < self.job.trainers {
            return Ok(());
        }
        Err(Refusal::no_such_trainer(head.trainer, self.departed.len()))
    }

    pub(super) fn verdict(&self, slot_index: usize, head: &Head, entry: &Entry) -> Result<PushVerdict, Refusal> {
        let chunk = &self.table.chunks[slot_index];
        if chunk.has_heard(head.trainer, CallId::of(head)) {
            return Ok(PushVerdict::Applied);
        }
        let entered = chunk.round.contribution(head.trainer);
        if entered.is_some_and(|one| one.is_same_call(head)) {
            return Ok(PushVerdict::Contributed);
        }
        match self.flows.of(slot_index).pace {
            AccumulatorPace::Rounds => self.verdict_in_rounds(chunk, head, entry.round, entered.is_some()),
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => self.verdict_alone(chunk, head),
        }
    }

    /// The verdict where a round is a step of all trainers.
    #[inline]
    fn verdict_in_rounds(
        &self,
        chunk: &Chunk,
        head: &Head,
        round: Round,
        has_entered: bool,
    ) -> Result<PushVerdict, Refusal> {
        let open = chunk.version.0 + 1;
        if round.0 == open {
            let other = if 1 <= chunk.sealed { PushVerdict::Late } else { PushVerdict::New };
            return Ok(if has_entered { PushVerdict::Contributed } else { other });
        }
        if round.0 < open {
            return Ok(PushVerdict::Applied);
        }
        if round.0 == open + 1 {
            let waits = chunk.round.ahead(head.trainer).is_some();
            let other = if 2 <= chunk.sealed { PushVerdict::Late } else { PushVerdict::New };
            return Ok(if waits { PushVerdict::Waits } else { other });
        }
        Err(self.too_far_ahead(chunk, head, round))
    }

    #[cold]
    fn too_far_ahead(&self, chunk: &Chunk, head: &Head, round: Round) -> Refusal {
        let open = chunk.version.0 + 1;
        Refusal::invalid(format!(
            "parameter \"{}\" chunk {}: trainer {} sent round {round} while round {open} is open; it may be one \
             round ahead",
            self.table.held(chunk.id).name(),
            chunk.id.chunk,
            head.trainer
        ))
        .while_at_work(self.is_at_work(chunk))
    }

    /// The verdict where each gradient is a round of its own.
    fn verdict_alone(&self, chunk: &Chunk, head: &Head) -> Result<PushVerdict, Refusal> {
        match chunk.round.ahead(head.trainer) {
            Some(one) if one.is_same_call(head) => return Ok(PushVerdict::Waits),
            // `push` withdraws it.
            Some(_) if self.is_begun_by_earlier_life(chunk, head) => return Ok(PushVerdict::New),
            Some(_) => {
                let text = format!(
                    "parameter \"{}\" chunk {}: trainer {} already waits with an earlier gradient",
                    self.table.held(chunk.id).name(),
                    chunk.id.chunk,
                    head.trainer
                );
                return Err(Refusal::new(ErrorCode::Busy, text).while_at_work(self.is_at_work(chunk)));
            }
            None => {}
        }
        let has_left = self.departed[head.trainer.0 as usize].is_some_and(|left| head.incarnation <= left);
        if has_left && !chunk.rule.rule().is_element_wise() {
            // A resend from a departed trainer would block the others with a partial gradient.
            let text = format!(
                "parameter \"{}\" chunk {}: trainer {} has left, and its unfinished gradient was dropped",
                self.table.held(chunk.id).name(),
                chunk.id.chunk,
                head.trainer
            );
            return Err(Refusal::invalid(text));
        }
        Ok(PushVerdict::New)
    }

    #[inline]
    pub(super) fn push_entry(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: usize,
        entry: &Entry,
        contribution: Contribution,
    ) {
        if self.is_before_restored(cx, slot_index) {
            self.restore_contribution(cx, slot_index, contribution);
            return;
        }
        match self.verdict(slot_index, &contribution.sending.head, entry).expect("the entry was checked") {
            PushVerdict::New => self.run(cx, slot_index, Some(contribution)),
            known => self.answer_known(cx, slot_index, &known, &contribution),
        }
    }

    /// Answers a duplicate push, or redirects its pending answer to the sending connection.
    fn answer_known(&mut self, cx: &mut Context<'_>, slot_index: usize, known: &PushVerdict, again: &Contribution) {
        let PushHeader { head, peer, .. } = *again.sending;
        let chunk = &mut self.table.chunks[slot_index];
        match known {
            PushVerdict::Applied => self.answer_applied(cx, slot_index, again.waiter(Version(0), cx.now)),
            // Every part but the last is answered on receipt.
            PushVerdict::Contributed | PushVerdict::Waits if again.is_early_part => {
                cx.replies.done(peer, &head, version_entry(chunk));
            }
            PushVerdict::Contributed => {
                let entry = open_entry(chunk);
                let entered = chunk.round.contribution_mut(head.trainer).expect("it is in the round");
                entered.answer_to(again);
                acknowledge(cx, entered, entry);
            }
            PushVerdict::Waits => {
                let waiting = chunk.round.ahead_mut(head.trainer).expect("it waits");
                waiting.answer_to(again);
                waiting.since = Some(cx.now);
            }
            // The answer follows when the sealed round closes.
            PushVerdict::Late => self.answer_or_wait(cx, slot_index, again.waiter(Version(again.round.0), cx.now)),
            PushVerdict::New => unreachable!("what is new was not pushed before"),
        }
        self.note_waits(slot_index);
    }

    /// Restores a contribution from the journal to its state in the checkpoint. A contribution that the value contains,
    /// or that was dropped, is ignored.
    fn restore_contribution(&mut self, cx: &mut Context<'_>, slot_index: usize, contribution: Contribution) {
        let chunk = &mut self.table.chunks[slot_index];
        let is_it =
            |one: OpenContribution| (one.trainer, one.call) == (contribution.trainer, contribution.sending.call);
        let is_there = chunk.round.open().any(is_it);
        match chunk.open_in_checkpoint(&contribution.sending.head) {
            Some(open) if !is_there && open.stage == ContributionStage::Ahead => chunk.round.add_ahead(contribution),
            Some(_) if !is_there => self.enter(cx, slot_index, contribution),
            _ => {}
        }
    }

    /// Whether this frame is older than the chunk's checkpoint.
    pub(super) fn is_before_restored(&self, cx: &Context<'_>, slot_index: usize) -> bool {
        self.table.chunks[slot_index].is_before_restored(cx.position)
    }

    /// Acknowledges a push that the value contains.
    fn answer_applied(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        if waiter.head.flags.contains(Flags::WANT_VALUE) {
            self.send_value(cx, slot_index, waiter);
        } else {
            cx.replies.done(waiter.peer, &waiter.head, version_entry(&self.table.chunks[slot_index]));
        }
    }

    fn answer_or_wait(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        if waiter.version <= self.table.chunks[slot_index].version {
            self.answer(cx, slot_index, waiter);
            return;
        }
        if waiter.peer == NO_PEER {
            return;
        }
        self.add_waiter(slot_index, waiter);
        self.note_waits(slot_index);
    }

    /// Answers a due request with the value or the requested rows.
    fn answer(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        match &waiter.wish {
            None if waiter.head.kind == Kind::Push => self.answer_applied(cx, slot_index, waiter),
            Some(_) => self.answer_rows(cx, slot_index, waiter),
            None => self.send_value(cx, slot_index, waiter),
        }
    }

    /// Updates the chunk's entry in `waits`.
    #[inline]
    pub(super) fn note_waits(&mut self, slot_index: usize) {
        let chunk = &mut self.table.chunks[slot_index];
        let is_idle = chunk.waiters.is_empty()
            && chunk.round.is_bare()
            && chunk.bucket().is_none()
            && chunk.deferred_set.is_none();
        if chunk.noted.is_none() && is_idle {
            return;
        }
        let (before, after) = (chunk.noted, chunk.waits_since());
        if before == after {
            return;
        }
        chunk.noted = after;
        if let Some(before) = before {
            self.waits.remove(&(before, slot_index));
        }
        if let Some(after) = after {
            self.waits.insert((after, slot_index));
        }
    }

    /// Active trainers: a synchronous round waits for them.
    pub(super) fn active(&self) -> impl Iterator<Item = TrainerId> + '_ {
        (0..self.job.trainers).map(TrainerId).filter(|trainer| self.departed[trainer.0 as usize].is_none())
    }

    pub(super) fn is_active(&self, trainer: TrainerId) -> bool {
        self.departed.get(trainer.0 as usize).is_some_and(Option::is_none)
    }

    pub(super) fn answer_waiters(&mut self, cx: &mut Context<'_>, slot_index: usize) {
        let chunk = &self.table.chunks[slot_index];
        let version = chunk.version;
        if chunk.waiters.is_empty() {
            return;
        }
        let due = self.table.chunks[slot_index].waiters.take_due(version);
        self.note_taken(&due);
        for waiter in due {
            self.answer(cx, slot_index, waiter);
        }
    }

    /// Whether a frame comes from a newer incarnation of a departed trainer.
    pub(super) fn is_rejoin(&self, head: &Head) -> bool {
        self.departed[head.trainer.0 as usize].is_some_and(|left| left < head.incarnation)
    }

    /// Makes a departed trainer active again.
    fn rejoin(&mut self, position: u64, head: &Head) {
        if !self.is_rejoin(head) {
            return;
        }
        self.departed[head.trainer.0 as usize] = None;
        self.note_admitted(head.trainer);
        // The trainer's clock starts at that of the slowest other trainer, so that none waits for steps never taken.
        for slot_index in 0..self.table.chunks.len() {
            let chunk = &self.table.chunks[slot_index];
            let others = self.active().filter(|one| *one != head.trainer).map(|one| chunk.heard(one).clock).min();
            if !chunk.is_before_restored(position) {
                let heard = self.table.chunks[slot_index].heard_mut(head.trainer);
                heard.clock = heard.clock.max(others.unwrap_or(0));
            }
        }
    }

    /// Whether an earlier incarnation of the trainer has a partial push to this chunk's group.
    fn is_begun_by_earlier_life(&self, chunk: &Chunk, head: &Head) -> bool {
        // The parameter is lost_checked_at up for few rules only.
        !chunk.rule.rule().is_element_wise()
            && self
                .unfinished_push(self.table.held(chunk.id), head.trainer)
                .is_some_and(|call| call.incarnation < head.incarnation)
    }

    /// A trainer's partial push to a group of chunks: its call, as long as a chunk of the group lacks it.
    fn unfinished_push(&self, held: &ShardParameter, trainer: TrainerId) -> Option<CallId> {
        let first = held.group.chunks.first()?;
        if held.rule.rule().is_element_wise() || self.flows.of(*first).pace == AccumulatorPace::Rounds {
            return None;
        }
        let sent = |slot_index: &usize| {
            let round = &self.table.chunks[*slot_index].round;
            round.contribution(trainer).or(round.ahead(trainer))
        };
        let call = held.group.chunks.iter().find_map(sent)?.sending.call;
        held.group.chunks.iter().any(|slot_index| sent(slot_index).is_none()).then_some(call)
    }

    /// Withdraws a partial push that its trainer will not finish, so that it no longer blocks others. Chunks restored
    /// from a newer checkpoint stay as they are: they record the later state.
    fn withdraw_push(&mut self, cx: &mut Context<'_>, trainer: TrainerId, parameter: ParameterIndex) {
        let held = self.table.parameters.get_mut(&parameter).expect("the parameter is held");
        let slot_indices = held.group.chunks.clone();
        if self.table.chunks[slot_indices[0]].is_before_restored(cx.position) {
            return;
        }
        held.group.owner = held.group.owner.filter(|owner| *owner != trainer);
        for slot_index in &slot_indices {
            let chunk = &mut self.table.chunks[*slot_index];
            if let Some((one, since)) =
                chunk.round.withdraw(trainer).and_then(|one| one.since.map(|since| (one, since)))
            {
                // The sender, if connected, gets the requested value after the next gradient of another trainer.
                let version = Version(chunk.version.0 + 1);
                let waiter = one.waiter(version, since);
                self.add_waiter(*slot_index, waiter);
            }
            self.note_waits(*slot_index);
        }
        self.run(cx, slot_indices[0], None);
    }
}

pub(super) fn version_entry(chunk: &Chunk) -> Entry {
    Entry::bare(chunk.id, Round(chunk.version.0), chunk.element_type)
}

/// Entry that acknowledges a gradient in the open round.
pub(super) fn open_entry(chunk: &Chunk) -> Entry {
    Entry::bare(chunk.id, Round(chunk.version.0 + 1), chunk.element_type)
}

/// Entry for a value, in half precision if requested.
pub(super) fn value_entry(chunk: &Chunk, half: Option<Half>) -> Entry {
    as_half(Entry { bytes: chunk.bytes, ..version_entry(chunk) }, half)
}

/// The entry of a float32 value, in half precision if requested.
pub(super) fn as_half(entry: Entry, half: Option<Half>) -> Entry {
    half.map_or(entry, |half| Entry { bytes: entry.bytes / 2, element_type: half.element_type(), ..entry })
}

/// Acknowledges a gradient in the open round. A push that asks for the value is answered when the round closes.
#[inline]
pub(super) fn acknowledge(cx: &mut Context<'_>, one: &mut Contribution, entry: Entry) {
    let PushHeader { peer, head, .. } = &*one.sending;
    let wants_value = head.flags.contains(Flags::WANT_VALUE) && *peer != NO_PEER;
    one.since = wants_value.then_some(cx.now);
    if !wants_value {
        cx.replies.done(*peer, head, entry);
    }
}
