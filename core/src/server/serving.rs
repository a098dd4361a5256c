//! Serving state of an initialised shard: takes pushes, pulls, sets and leaves, and answers.
//!
//! A new gradient goes through the [`flow`](super::flow) of its chunk. An early gradient waits unacknowledged, at most
//! one per trainer and chunk.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::admission::{Admitted, PushVerdict, no_answer_to, not_initialised};
use super::bucket::RowsWorkspace;
use super::call::CallId;
use super::chunk::Chunk;
use super::compiled_flows::Flows;
use super::context::Context;
use super::contribution::{Contribution, PushHeader};
use super::group::GroupIndex;
use super::initialisation::{ChunkTable, unknown};
use super::job::{Job, rule_of_mode};
use super::reply::{Refusal, Replies};
use super::rows::RowsPull;
use super::shard::{Phase, ReceivedFrame, Shard, decode};
use super::stalls::Stalls;
use super::waiters::{RowsRequest, Waiter};
use super::waits::WaitIndex;
use crate::accumulator::AccumulatorPace;
use crate::error::Failure;
use crate::ids::{Incarnation, PeerId, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::Numbers;
use crate::time::Now;
use crate::wire::{Flags, Frame, Head, Kind, PushMessage};

/// State of a serving shard.
pub(super) struct Serving {
    pub(super) job: Job,
    pub(super) table: ChunkTable,
    pub(super) flows: Flows,
    /// Departed trainers, with the incarnation that left.
    pub(super) departed: Vec<Option<Incarnation>>,
    /// Count of pushes so far.
    arrivals: u64,
    pub(super) stalls: Stalls,
    /// Pulls of rows that take several turns, in round-robin order.
    pub(super) slow_pulls: VecDeque<RowsPull>,
    pub(super) waits: WaitIndex,
    /// Where rows are merged and looked up.
    pub(super) rows_room: RowsWorkspace,
    /// Restored chunks with open contributions, by the journal position at which the checkpoint wrote them.
    pub(super) behind: BTreeSet<(u64, usize)>,
    /// Cached coefficients of the previous update.
    pub(super) numbers: Numbers,
}

impl Shard {
    /// Applies a checked frame that changes state.
    pub(super) fn apply(
        &mut self,
        arrived: &ReceivedFrame<'_>,
        leases: Vec<Lease>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { now, peer, position, frame, admitted } = *arrived;
        self.changes += 1;
        match frame.head.kind {
            Kind::Init => return self.init(peer, frame, leases, replies),
            Kind::Finish => return self.finish(peer, frame, replies),
            _ => {}
        }
        let Some((serving, mut cx)) = self.serving(now, peer, position, replies) else { return Err(not_initialised()) };
        if peer.is_none() {
            // Replay has no other peers to serve, so one turn may replay everything.
            cx.replay_left = u64::MAX;
        }
        match frame.head.kind {
            Kind::Push => {
                let rate = decode::<PushMessage>(&frame.control)?.rate;
                serving.push(&mut cx, frame, rate, admitted, leases);
            }
            Kind::Set => serving.set(&mut cx, frame, leases),
            Kind::Leave => return serving.leave(&mut cx, &frame.head),
            kind => return Err(no_answer_to(kind)),
        }
        Ok(())
    }

    /// The serving state, and the resources for a frame at this journal position or, without a peer, for the shard's
    /// own work. None before the parameters are initialised.
    pub(super) fn serving<'a>(
        &'a mut self,
        now: Now,
        peer: Option<PeerId>,
        position: u64,
        replies: &'a mut Replies,
    ) -> Option<(&'a mut Serving, Context<'a>)> {
        let Phase::Serving(serving) = &mut self.phase else { return None };
        let (kernels, pool, trainers) = (self.kernels.as_mut(), &mut self.pool, &self.trainers);
        let (device, replay_left) = (self.device.as_mut(), self.replays);
        let cx = Context { now, kernels, pool, device, replies, trainers, peer, position, replay_left };
        Some((serving, cx))
    }

    /// Answers a frame that changes no state: a pull, or a question.
    pub(super) fn answer_request(
        &mut self,
        peer: PeerId,
        arrived: &ReceivedFrame<'_>,
        leases: Vec<Lease>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { now, position, frame, .. } = *arrived;
        match frame.head.kind {
            Kind::Pull => match self.serving(now, Some(peer), position, replies) {
                Some((serving, mut cx)) => serving.pull(&mut cx, peer, frame, leases),
                None => Err(not_initialised()),
            },
            Kind::Control => self.answer_wait_question(now, peer, frame, replies),
            kind => Err(no_answer_to(kind)),
        }
    }
}

impl Serving {
    /// Starts serving with `flows`, which were made for this job and this table.
    pub(super) fn new(job: Job, mut table: ChunkTable, flows: Flows) -> Result<Self, Failure> {
        if let Some(rule) = rule_of_mode(job.mode) {
            table.replace_rule(&rule)?;
        }
        table.make_groups();
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
            stalls: Stalls::default(),
            slow_pulls: VecDeque::new(),
            waits: WaitIndex::default(),
            rows_room: RowsWorkspace::default(),
            behind,
            numbers: Numbers::default(),
        })
    }

    /// Applies a checked push: `admitted` has its entries, `body` one lease per payload.
    pub(super) fn push(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        rate: Option<f64>,
        admitted: &[Admitted],
        body: impl IntoIterator<Item = Lease>,
    ) {
        assert_eq!(frame.entries.len(), admitted.len(), "the frame was checked");
        let (trainer, call) = (frame.head.trainer, CallId::of(&frame.head));
        let (position, arrival) = (cx.position, self.arrivals);
        self.arrivals += 1;
        let sending = Arc::new(PushHeader { call, rate, position, arrival, peer: cx.peer, head: frame.head });
        self.rejoin(cx.position, &frame.head);
        let mut body = body.into_iter();
        for (entry, admitted) in frame.entries.iter().zip(admitted) {
            let lease = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let slot_index = admitted.slot_index();
            if let Some(group) = self.begun_by_earlier_life(&self.table.chunks[slot_index], &frame.head) {
                self.withdraw_push(cx, trainer, group);
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
                since: cx.peer.map(|_| cx.now),
                sending: Arc::clone(&sending),
            };
            if self.table.chunks[slot_index].bucket().is_some() {
                self.push_rows(cx, *admitted, contribution);
            } else {
                self.push_entry(cx, *admitted, contribution);
            }
        }
    }

    /// Answers a pull, or queues it until its version exists.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        peer: PeerId,
        frame: &Frame,
        body: impl IntoIterator<Item = Lease>,
    ) -> Result<(), Refusal> {
        let slot_indices =
            frame.entries.iter().map(|entry| self.table.slot_index(entry.id).ok_or_else(|| unknown(entry.id)));
        let slot_indices = slot_indices.collect::<Result<Vec<_>, _>>()?;
        self.check_requests(frame, &slot_indices)?;
        self.check_waiters(peer, frame.entries.len())?;
        let mut body = body.into_iter();
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            let is_bucket = self.table.chunks[slot_index].bucket().is_some();
            let ids = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let wish = is_bucket.then_some(RowsRequest { ids, bytes: entry.bytes });
            let (version, half) = (Version(entry.round.0), entry.half);
            self.answer_or_wait(cx, slot_index, Waiter { peer, head: frame.head, version, since: cx.now, half, wish });
        }
        Ok(())
    }

    /// Marks a trainer as departed: rounds no longer wait for it.
    pub(super) fn leave(&mut self, cx: &mut Context<'_>, head: &Head) -> Result<(), Refusal> {
        self.check_trainer(head)?;
        self.note_admitted(head.trainer);
        self.departed[head.trainer.0 as usize] = Some(head.incarnation);
        self.forget_gathered(cx.position, head.trainer);
        for group in (0..self.table.groups.len()).map(GroupIndex::new) {
            if self.unfinished_push(group, head.trainer).is_some() {
                self.withdraw_push(cx, head.trainer, group);
            }
        }
        // Gradients that waited for the departed trainer may enter now.
        for slot_index in 0..self.table.chunks.len() {
            self.run(cx, slot_index, None);
        }
        cx.replies.done_whole(cx.peer, head);
        Ok(())
    }

    /// Takes a new gradient into its flow, and answers a duplicate.
    #[inline]
    pub(super) fn push_entry(&mut self, cx: &mut Context<'_>, admitted: Admitted, contribution: Contribution) {
        let slot_index = admitted.slot_index();
        if self.is_before_restored(cx, slot_index) {
            self.restore_contribution(cx, slot_index, contribution);
        } else if admitted.is_new {
            self.run(cx, slot_index, Some(contribution));
        } else {
            self.push_again(cx, slot_index, contribution);
        }
    }

    /// Answers a duplicate push, or redirects its pending answer to the sending connection.
    fn push_again(&mut self, cx: &mut Context<'_>, slot_index: usize, again: Contribution) {
        let PushHeader { head, peer, .. } = *again.sending;
        let known = self.verdict(slot_index, &head, again.round).expect("the entry was checked");
        let chunk = &mut self.table.chunks[slot_index];
        match known {
            PushVerdict::New => return self.run(cx, slot_index, Some(again)),
            PushVerdict::Applied => self.answer_applied(cx, slot_index, &again),
            // Every part but the last is answered on receipt.
            PushVerdict::Contributed | PushVerdict::Waits if again.is_early_part => {
                cx.replies.done(peer, &head, chunk.version_entry());
            }
            PushVerdict::Contributed => {
                let entry = chunk.open_entry();
                let entered = chunk.round.contribution_mut(head.trainer).expect("it is in the round");
                entered.answer_to(&again);
                cx.acknowledge(entered, entry);
            }
            PushVerdict::Waits => {
                let waiting = chunk.round.ahead_mut(head.trainer).expect("it waits");
                waiting.answer_to(&again);
                waiting.since = peer.map(|_| cx.now);
            }
            // The answer follows when the sealed round closes.
            PushVerdict::Late => {
                if let Some(waiter) = again.waiter(Version(again.round.0), cx.now) {
                    self.answer_or_wait(cx, slot_index, waiter);
                }
            }
        }
        self.note_waits(slot_index);
    }

    /// Acknowledges a push that the value contains.
    fn answer_applied(&mut self, cx: &mut Context<'_>, slot_index: usize, again: &Contribution) {
        if let Some(waiter) = again.waiter(Version(0), cx.now) {
            self.answer(cx, slot_index, waiter);
        }
    }

    fn answer_or_wait(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        if waiter.version <= self.table.chunks[slot_index].version {
            self.answer(cx, slot_index, waiter);
            return;
        }
        self.add_waiter(slot_index, waiter);
        self.note_waits(slot_index);
    }

    /// Answers a due request: with rows, with the value, or with an acknowledgement for a push that wants none.
    fn answer(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        let wants_value = waiter.head.kind != Kind::Push || waiter.head.flags.contains(Flags::WANT_VALUE);
        match &waiter.wish {
            Some(_) => self.answer_rows(cx, slot_index, waiter),
            None if wants_value => self.send_value(cx, slot_index, waiter),
            None => cx.replies.done(waiter.peer, &waiter.head, self.table.chunks[slot_index].version_entry()),
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
            self.waits.by_time.remove(&(before, slot_index));
        }
        if let Some(after) = after {
            self.waits.by_time.insert((after, slot_index));
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

    /// The chunk's group, if an earlier incarnation of the trainer has a partial push to it.
    #[inline]
    pub(super) fn begun_by_earlier_life(&self, chunk: &Chunk, head: &Head) -> Option<GroupIndex> {
        let is_earlier =
            |group| self.unfinished_push(group, head.trainer).is_some_and(|call| call.incarnation < head.incarnation);
        chunk.group.filter(|group| is_earlier(*group))
    }

    /// A trainer's partial push to a group of chunks: its call, as long as a chunk of the group lacks it.
    fn unfinished_push(&self, group: GroupIndex, trainer: TrainerId) -> Option<CallId> {
        let slot_indices = &self.table.groups[group.place()].chunks;
        if self.flows.of(slot_indices[0]).pace == AccumulatorPace::Rounds {
            return None;
        }
        let sent = |slot_index: &usize| {
            let round = &self.table.chunks[*slot_index].round;
            round.contribution(trainer).or(round.ahead(trainer))
        };
        let call = slot_indices.iter().find_map(sent)?.sending.call;
        slot_indices.iter().any(|slot_index| sent(slot_index).is_none()).then_some(call)
    }

    /// Withdraws a partial push that its trainer will not finish, so that it no longer blocks others. Chunks restored
    /// from a newer checkpoint stay as they are: they record the later state.
    fn withdraw_push(&mut self, cx: &mut Context<'_>, trainer: TrainerId, group: GroupIndex) {
        let held = &mut self.table.groups[group.place()];
        let slot_indices = Arc::clone(&held.chunks);
        if self.table.chunks[slot_indices[0]].is_before_restored(cx.position) {
            return;
        }
        held.owner = held.owner.filter(|owner| *owner != trainer);
        for slot_index in slot_indices.iter() {
            let chunk = &mut self.table.chunks[*slot_index];
            // The sender, if connected, gets the requested value after the next gradient of another trainer.
            let version = Version(chunk.version.0 + 1);
            let withdrawn = chunk.round.withdraw(trainer);
            if let Some(waiter) = withdrawn.and_then(|one| one.waiter(version, one.since?)) {
                self.add_waiter(*slot_index, waiter);
            }
            self.note_waits(*slot_index);
        }
        self.run(cx, slot_indices[0], None);
    }
}
