//! One shard of a server: a session that owns chunks and connections, and orders the frames that change them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::bucket::RowsWorkspace;
use super::checkpointing::Checkpointing;
use super::compiled_flows::Flows;
use super::context::{Context, Origin};
use super::counters::ShardCounters;
use super::decided::RecordedRounds;
use super::device::Device;
use super::frames::{DeferredHeads, FrameCheck, Leases, ReceivedFrame, ReceivingFrame, decode};
use super::initialisation::ChunkTable;
use super::job::Job;
use super::journal::ShardJournal;
use super::membership::PeerOrigin;
use super::needs::Holdings;
use super::options::{NoRoom, ProcessMemory, ShardOptions};
use super::output::{CheckpointRequest, ServerOutput};
use super::pool::Pool;
use super::presence::{Presence, TrainerLife};
use super::reply::{Refusal, Replies, RetryReason};
use super::serving::Serving;
use super::totals::check_totals;
use crate::checkpoint::Folder;
use crate::error::Failure;
use crate::ids::{Generation, JobRun, NO_TRAINER, PeerId, RunNumber};
use crate::limits::{ROWS_REPLAYED_BYTES, TRAINERS_MAX};
use crate::memory::Lease;
use crate::optim::{self};
use crate::port::{Accelerator, Event, Incoming, Kernels, ReceiveBuffers, Submit};
use crate::time::Now;
use crate::wire::answer::Answer;
use crate::wire::request::Request;
use crate::wire::{
    ControlAnswer, ControlRequest, Entry, ErrorCode, FinishMessage, Frame, Head, HelloMessage, InitMessage, Kind,
    WelcomeMessage,
};

/// Length of one wait for the accelerator.
const SETTLE_STEP: Duration = Duration::from_millis(1);

/// One shard of a server: a thread's chunks and connections.
// tidy: allow fields: the parts of a session, most of them types with methods of their own
pub struct Shard {
    pub(super) options: ShardOptions,
    pub(super) phase: Phase,
    pub(super) pool: Pool,
    pub(super) journal: ShardJournal,
    /// While the journal of the last process is replayed: the part of a decision that it has read.
    pub(super) replaying: Option<RecordedRounds>,
    /// Where its files are; none before [`Shard::restore`].
    pub(super) folder: Option<Folder>,
    /// Bytes of missed row updates that one turn replays, see [`ROWS_REPLAYED_BYTES`].
    pub(super) replays: u64,
    pub(super) kernels: Box<dyn Kernels>,
    pub(super) counters: Arc<ShardCounters>,
    /// Time of the turn in nanoseconds since the start of the loop; zero before the first one.
    pub(super) nanos: u64,
    /// Gradients replaced by zeros since start.
    pub(super) skipped: u64,
    pub(super) device: Option<Device>,
    pub(super) peers: BTreeMap<PeerId, ShardPeer>,
    pub(super) trainers: Presence,
    deferred: DeferredHeads,
    /// Count of changes to state that checks read.
    pub(super) changes: u64,
    pub(super) checkpointing: Option<Checkpointing>,
    /// Requests for a checkpoint that the caller has not taken.
    pub(super) asked: Vec<CheckpointRequest>,
}

/// Progress of initialisation.
pub(super) enum Phase {
    /// No generation has begun.
    Empty,
    /// A generation is filling the table.
    Filling(ChunkTable),
    /// Initialised.
    Serving(Box<Serving>),
}

/// An accepted connection.
pub(super) struct ShardPeer {
    origin: String,
    /// The transport and the reason for it.
    transport: String,
    pub(super) who: Option<TrainerLife>,
    /// Frames whose payloads are being received, in the order of their heads.
    receiving: VecDeque<ReceivingFrame>,
    /// Reusable allocations for the checks of later frames.
    spare: Vec<FrameCheck>,
}

impl Shard {
    /// A shard without parameters.
    #[must_use]
    pub fn new(options: ShardOptions, kernels: Box<dyn Kernels>) -> Self {
        Self {
            phase: Phase::Empty,
            pool: Pool::new(options.shares_memory, options.memory_limit.clone()),
            trainers: Presence::new(options.grace),
            options,
            journal: ShardJournal::default(),
            replaying: None,
            folder: None,
            replays: ROWS_REPLAYED_BYTES,
            kernels,
            counters: Arc::default(),
            nanos: 0,
            skipped: 0,
            device: None,
            peers: BTreeMap::new(),
            deferred: DeferredHeads::default(),
            changes: 0,
            checkpointing: None,
            asked: Vec::new(),
        }
    }

    /// Adds an accelerator, to which the shard offers its chunks at initialisation or at the end of [`Shard::restore`].
    #[must_use]
    pub fn with_accelerator(mut self, accelerator: Box<dyn Accelerator>, no_room: NoRoom) -> Self {
        self.device = Some(Device::new(accelerator, no_room));
        self
    }

    /// Its counters, for readers on other threads.
    #[must_use]
    pub fn counters(&self) -> &Arc<ShardCounters> {
        &self.counters
    }

    /// Sets the time that rounds are measured with: nanoseconds since the start of the loop, above zero. Call it once
    /// a turn, before its events.
    #[inline]
    pub fn begin_turn(&mut self, nanos: u64) {
        self.nanos = nanos;
    }

    /// Handles one event and appends the resulting actions to `out`.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Vec<ServerOutput>) {
        self.forget_refused(now);
        match event {
            Event::Accepted { peer, origin, transport } => {
                self.peers.insert(peer, ShardPeer::new(origin, transport));
            }
            Event::Moved { peer, transport } => self.moved(peer, transport),
            Event::Head { peer, frame } => self.post_receive(peer, frame, |_| false, out),
            Event::Received { peer, frame, body } => {
                self.received(now, peer, &frame, body, out);
                self.deferred.look_again_at(peer);
            }
            Event::Sent { body, .. } => {
                drop(body);
                self.retry(now, out);
            }
            Event::Gone { peer, unsent, unfilled, .. } => {
                drop((unsent, unfilled));
                self.closed(now, peer);
                self.deferred.heads.remove(&peer);
                if let Phase::Serving(serving) = &mut self.phase {
                    serving.forget_pulls(peer);
                    serving.forget_waiters(peer);
                }
                self.retry(now, out);
            }
            Event::Transmitted { .. }
            | Event::Connected { .. }
            | Event::TakesAnswers { .. }
            | Event::AnswerReturned { .. } => {}
        }
    }

    fn moved(&mut self, peer: PeerId, transport: String) {
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        if let Some(who) = peer.who {
            self.trainers.moved(who.trainer, &transport);
        }
        peer.transport = transport;
    }

    /// Removes a closed connection and starts the grace time of a trainer without another one.
    fn closed(&mut self, now: Now, peer: PeerId) {
        let trainer = self.peers.remove(&peer).and_then(|peer| peer.who).map(|who| who.trainer);
        let is_connected =
            |trainer| self.peers.values().any(|other| other.who.is_some_and(|who| who.trainer == trainer));
        if let Some(trainer) = trainer.filter(|trainer| *trainer != NO_TRAINER && !is_connected(*trainer)) {
            self.trainers.closed(now, trainer);
        }
    }

    fn forget_refused(&mut self, now: Now) {
        if let Phase::Serving(serving) = &mut self.phase {
            serving.forget_refused(now);
        }
    }

    /// Ends expired waits, and tries refused records again. Call when [`Shard::deadline`] has passed.
    pub fn expire(&mut self, now: Now, out: &mut Vec<ServerOutput>) {
        self.log_waits(now);
        let limit = self.options.round_timeout;
        self.turn(now, out, |serving, cx| {
            serving.expire(cx, limit);
            serving.expire_lost(cx);
            if serving.is_record_due(cx.now) {
                serving.record_again(cx);
            }
        });
    }

    /// The next time at which [`Shard::expire`] has work.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        match &self.phase {
            Phase::Serving(serving) => {
                let wait = serving.deadline(self.options.round_timeout, &self.trainers);
                wait.into_iter().chain(serving.stalls.record_due).min()
            }
            Phase::Empty | Phase::Filling(_) => None,
        }
    }

    /// Exchanges work with the accelerator, continues rows that catch up, retries updates that lacked memory, and
    /// checks deferred heads again; true when anything was done. Call it every turn, and again soon while
    /// [`Shard::is_under_way`].
    ///
    /// # Errors
    /// [`Failure::Node`] when states on the accelerator are lost (a restart restores them from checkpoint and journal),
    /// when restored chunks that must live on it find no room, and when another process owns the shard's files.
    pub fn attend(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        self.journal.check_owned()?;
        self.log_waits(now);
        let is_any = self.catch_up_rows(now, out);
        let is_any = self.attend_device(now, out)? || is_any;
        self.forget_refused(now);
        for (peer, frame) in self.deferred.take_changed(self.changes) {
            self.post_receive(peer, frame, |refusal| refusal.may_pass, out);
        }
        Ok(is_any)
    }

    /// Commits the records of a turn. Call it before the answers of the turn leave.
    ///
    /// # Errors
    /// [`Failure::Node`] when the disk does not keep them or another process owns the shard's files: no answer of the
    /// turn may leave.
    pub fn commit(&mut self) -> Result<(), Failure> {
        self.journal.commit()
    }

    fn attend_device(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        let Some(device) = &mut self.device else { return Ok(self.retry(now, out)) };
        device.check_kept()?;
        if let Phase::Serving(serving) = &mut self.phase
            && device.is_new(serving.table.generation)
        {
            device.adopt_chunks(&serving.job, &mut serving.table, &self.pool)?;
        }
        let mut done = Vec::new();
        device.exchange(&mut done)?;
        if done.is_empty() && device.released.is_empty() {
            return Ok(self.retry(now, out));
        }
        self.changes += 1;
        let mut ended = Ok(());
        self.turn(now, out, |serving, cx| {
            ended = serving.completed(cx, done);
            serving.go_on_released(cx);
            serving.retry(cx);
        });
        ended.map(|()| true)
    }

    /// Retries updates and answers that lacked a lease; true when any succeeded.
    fn retry(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> bool {
        let mut is_any = false;
        if matches!(&self.phase, Phase::Serving(serving) if serving.lacks_memory()) {
            self.turn(now, out, |serving, cx| is_any = serving.retry(cx));
        }
        is_any
    }

    /// Continues work that takes several turns; true when there was any.
    fn catch_up_rows(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> bool {
        let (mut is_any, replays) = (false, self.replays);
        if matches!(&self.phase, Phase::Serving(serving) if serving.is_catching_up()) {
            self.turn(now, out, |serving, cx| is_any = serving.go_on_catching_up(cx, replays));
        }
        is_any
    }

    /// Whether the accelerator has work in flight or rows replay missed updates.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        let is_catching_up = matches!(&self.phase, Phase::Serving(serving) if serving.is_catching_up());
        is_catching_up || self.device.as_ref().is_some_and(Device::is_under_way)
    }

    /// Drains the accelerator: completes its work, closes every complete round and stores every state in host memory,
    /// so that a checkpoint needs no device. Fails when nothing completes for `limit`. A round that lacks memory
    /// because readers hold old versions stays open; the checkpoint records it as open, the journal holds its
    /// gradients, and one log line counts such rounds.
    ///
    /// # Errors
    /// The errors of [`Shard::attend`], and a timeout that names the accelerator.
    pub fn settle(&mut self, now: Now, limit: Duration, out: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        if let Phase::Serving(serving) = &mut self.phase {
            serving.forget_not_stored();
        }
        let mut waited = Duration::ZERO;
        loop {
            if self.attend(now, out)? {
                waited = Duration::ZERO;
            }
            let Phase::Serving(serving) = &mut self.phase else { return Ok(()) };
            let Some(device) = &mut self.device else {
                serving.log_stalled();
                return Ok(());
            };
            serving.release_held(device);
            serving.store_all(device);
            if !device.is_under_way() && device.released.is_empty() {
                serving.log_stalled();
                return serving.not_stored().map_or(Ok(()), |text| Err(Failure::Call(text)));
            }
            if limit <= waited {
                let text = format!("{} has not ended its work within {:.1} s", device.name(), limit.as_secs_f64());
                return Err(device.lose(text));
            }
            device.wait(SETTLE_STEP);
            waited += SETTLE_STEP;
        }
    }

    /// The generation that is served; zero before initialisation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match &self.phase {
            Phase::Serving(serving) => serving.table.generation,
            Phase::Empty | Phase::Filling(_) => Generation(0),
        }
    }

    /// Runs `work` on a serving shard and flushes its replies.
    pub(super) fn turn(
        &mut self,
        now: Now,
        out: &mut Vec<ServerOutput>,
        work: impl FnOnce(&mut Serving, &mut Context<'_>),
    ) {
        let mut replies = Replies::default();
        if let Phase::Serving(serving) = &self.phase {
            self.changes += u64::from(serving.is_stalled());
        }
        if let Some((serving, mut cx)) = self.serving(now, None, Origin::Unlogged, &mut replies) {
            work(serving, &mut cx);
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    /// Chooses the receive buffers of a payload: leases, or none for a refused frame, whose payload is discarded. A
    /// frame is refused only after the earlier frames of its connection are applied, because they may make it valid;
    /// until then its head is deferred. A deferred head stays deferred as long as `waits` accepts the refusal.
    fn post_receive(
        &mut self,
        peer: PeerId,
        frame: Frame,
        waits: impl FnOnce(&Refusal) -> bool,
        out: &mut Vec<ServerOutput>,
    ) {
        let mut found = self.spare(peer);
        let checked = self.check(peer, &frame, &mut found).and_then(|()| self.receive_buffers(&frame));
        let sender = self.peers.get_mut(&peer);
        let (refusal, into) = match (checked, sender) {
            (Err(refusal), Some(sender)) if !sender.receiving.is_empty() || waits(&refusal) => {
                sender.spare.push(found.cleared());
                self.deferred.heads.insert(peer, frame);
                return;
            }
            (Ok(into), _) => (None, into),
            (Err(refusal), _) => (Some(refusal), Incoming::discard_all(&frame)),
        };
        if let Some(sender) = self.peers.get_mut(&peer) {
            sender.receiving.push_back(ReceivingFrame { refusal, found });
        }
        out.push(ServerOutput::Submit(Submit::PostReceive { peer, into }));
    }

    /// A reusable allocation for a frame's check.
    fn spare(&mut self, peer: PeerId) -> FrameCheck {
        self.peers.get_mut(&peer).and_then(|peer| peer.spare.pop()).unwrap_or_default()
    }

    fn receive_buffers(&mut self, frame: &Frame) -> Result<ReceiveBuffers, Refusal> {
        // Memory that is missing while values arrive does not come later.
        let code = if matches!(self.phase, Phase::Serving(_)) { ErrorCode::Busy } else { ErrorCode::Invalid };
        let busy = |failure: Failure| Refusal::new(code, failure.to_string());
        let mut buffers = ReceiveBuffers::with_capacity(frame.entries.len());
        let has_rows = matches!(&self.phase, Phase::Serving(serving) if serving.has_rows());
        // Without rows, consecutive entries of one length are allocated together.
        for alike in frame.entries.chunk_by(|one, next| !has_rows && one.bytes == next.bytes) {
            let bytes = alike[0].bytes;
            let mut put = |lease| buffers.push(Incoming::Chunk { lease, bytes });
            match alike {
                _ if bytes == 0 => {}
                [entry] => put(take(&self.phase, &mut self.pool, entry).map_err(busy)?),
                _ => self.pool.take_many(bytes, alike.len(), &mut put).map_err(busy)?,
            }
        }
        Ok(buffers)
    }

    fn received(&mut self, now: Now, peer: PeerId, frame: &Frame, body: ReceiveBuffers, out: &mut Vec<ServerOutput>) {
        let mut replies = Replies::to(frame.entries.len());
        let has_payload = frame.payload_bytes() > 0;
        let receiving = self.peers.get_mut(&peer).filter(|_| has_payload).and_then(|peer| peer.receiving.pop_front());
        let ReceivingFrame { refusal, mut found } =
            receiving.unwrap_or_else(|| ReceivingFrame { refusal: None, found: self.spare(peer) });
        let checked = match refusal {
            Some(refusal) => Err(refusal),
            None => self.check(peer, frame, &mut found),
        };
        let done = match checked {
            Ok(()) if frame.head.kind == Kind::Hello => self.welcome(peer, frame, &mut replies, out),
            Ok(()) => {
                let admitted = &found.admitted;
                let arrived = ReceivedFrame { now, peer: Some(peer), origin: Origin::Unlogged, frame, admitted };
                self.record_and_apply(peer, arrived, body, &mut replies)
            }
            Err(refusal) => Err(refusal),
        };
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.spare.push(found.cleared());
        }
        if let Err(refusal) = done {
            if let (Phase::Serving(serving), Some(RetryReason::Device)) = (&mut self.phase, refusal.behind) {
                serving.note_refused(now, frame.head.trainer);
                self.changes += 1;
            }
            self.refuse(peer, &frame.head, &refusal, &mut replies, out);
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    fn refuse(
        &mut self,
        peer: PeerId,
        head: &Head,
        refusal: &Refusal,
        replies: &mut Replies,
        out: &mut Vec<ServerOutput>,
    ) {
        self.counters.refused.add(1);
        let ends = head.kind == Kind::Hello || self.peers.get(&peer).is_none_or(|peer| peer.who.is_none());
        if refusal.behind.is_some() {
            // The client retries by itself within milliseconds, so this is no warning.
            tracing::debug!(%peer, kind = ?head.kind, trainer = %head.trainer, "refused: {}", refusal.text);
        } else {
            tracing::warn!(%peer, kind = ?head.kind, trainer = %head.trainer, "refused: {}", refusal.text);
        }
        if !ends {
            replies.error(peer, head, refusal);
            return;
        }
        replies.refused(peer, head, refusal);
        replies.flush(|peer| self.peers.contains_key(&peer), out);
        out.push(ServerOutput::Close(peer));
    }

    /// Accepts a connection; a newer incarnation of a trainer closes the connections of older ones.
    fn welcome(
        &mut self,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
        out: &mut Vec<ServerOutput>,
    ) -> Result<(), Refusal> {
        let head = &frame.head;
        let hello: HelloMessage = decode(&frame.control)?;
        let (who, run) = (TrainerLife::of(head), run_of(&hello));
        if who.trainer != NO_TRAINER {
            self.record_join(who, run, frame)?;
            self.join(who, run)?;
            let older = |one: &ShardPeer| one.who.is_some_and(|other| other.trainer == who.trainer);
            out.extend(self.peers.iter().filter(|(_, one)| older(one)).map(|(id, _)| ServerOutput::Close(*id)));
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            tracing::debug!(origin = peer.origin, trainer = %who.trainer, "welcome");
            peer.who = Some(who);
            if who.trainer != NO_TRAINER {
                let HelloMessage { host, process, .. } = hello;
                let origin = PeerOrigin { address: peer.origin.clone(), host, process };
                self.trainers.connected(who.trainer, origin, peer.transport.clone());
            }
        }
        let message = WelcomeMessage { generation: self.generation().0 };
        let answer = Head { epoch: self.options.epoch, term: self.options.term, ..head.answer(Kind::Welcome) };
        replies.whole(peer, Frame::with_control(answer, &message));
        Ok(())
    }

    /// Journals a newer incarnation, with its run, before it is acknowledged, so that a restarted server still refuses
    /// the older ones, even when the newer one never pushes.
    fn record_join(&mut self, who: TrainerLife, run: JobRun, hello: &Frame) -> Result<(), Refusal> {
        let is_newer = self.trainers.incarnation(who.trainer) < who.incarnation
            || (self.trainers.incarnation(who.trainer) == who.incarnation && self.trainers.run_of(who) < run);
        if who.trainer.0 < TRAINERS_MAX && is_newer {
            self.journal.append(hello, std::iter::empty())?;
        }
        Ok(())
    }

    /// Records a trainer's incarnation and its run, and drops the partial pushes of older ones.
    pub(super) fn join(&mut self, who: TrainerLife, run: JobRun) -> Result<(), Refusal> {
        self.trainers.note_incarnation(who.trainer, who.incarnation)?;
        self.trainers.note_run(who.trainer, run);
        if let Phase::Serving(serving) = &mut self.phase {
            serving.forget_earlier_lives(who.trainer, who.incarnation);
        }
        Ok(())
    }

    /// Answers a trainer's question about what its calls wait for, or notes its request for a checkpoint.
    pub(super) fn answer_question(
        &mut self,
        now: Now,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        match decode::<ControlRequest>(&frame.control)?.request {
            Some(Request::Waiting(_)) => {}
            Some(Request::Checkpoint(_)) => return self.note_checkpoint_request(peer, frame),
            _ => return Err(Refusal::invalid("a shard has no answer to a question for the coordinator")),
        }
        let waits_for = match &self.phase {
            Phase::Serving(serving) => serving.describe_wait(now, &self.trainers, peer).unwrap_or_default(),
            Phase::Empty | Phase::Filling(_) => String::new(),
        };
        let ends_by_itself = !waits_for.is_empty();
        let message = ControlAnswer { answer: Some(Answer::Waiting(waits_for)), ends_by_itself };
        replies.whole(peer, Frame::with_control(frame.head.answer(Kind::Answer), &message));
        Ok(())
    }

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
        let mut serving = Serving::new(job, table, flows).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let made = make_states(&mut serving, &mut self.pool);
        self.phase = Phase::Serving(Box::new(serving));
        made.map_err(|failure| Refusal::invalid(failure.to_string()))
    }
}

impl ShardPeer {
    fn new(origin: String, transport: String) -> Self {
        Self { origin, transport, who: None, receiving: VecDeque::new(), spare: Vec::new() }
    }
}

/// The run that the sender of a hello takes part in.
pub(super) fn run_of(hello: &HelloMessage) -> JobRun {
    JobRun { number: RunNumber(hello.run), trainers: hello.run_trainers }
}

/// A lease for a payload. Rows have a pool of their own, because their count is not known in advance.
pub(super) fn take(phase: &Phase, pool: &mut Pool, entry: &Entry) -> Result<Lease, Failure> {
    match phase {
        Phase::Serving(serving) if serving.is_of_rows(entry) => pool.take_for_rows(entry.bytes),
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
    for slot_index in 0..table.chunks.len() {
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
