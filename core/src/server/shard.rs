//! One core's worth of server: its chunks, its connections, and the order in which frames change them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::bucket::RowsRoom;
use super::device::{Device, NoRoom};
use super::gate::Table;
use super::pool::Pool;
use super::program::{Programs, rule_of};
use super::reply::{Behind, NOBODY, Refusal, Replies};
use super::serving::{Context, Job, Serving};
use super::snapshot::{Checkpointing, ShardStatus};
use crate::checkpoint::Journal;
use crate::config::{Merge, Mode};
use crate::error::Failure;
use crate::ids::{Epoch, Generation, Incarnation, NO_TRAINER, PeerId, TrainerId};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX, ROWS_REPLAYED_BYTES, TRAINERS_MAX};
use crate::memory::{Budget, Lease};
use crate::optim::{self, Range};
use crate::port::{Accelerator, Event, Incoming, Kernels, Submit};
use crate::time::Now;
use crate::wire::{
    Entry, ErrorCode, FinishMessage, Frame, HEADER_BYTES, Head, InitMessage, Kind, Prefix, PushMessage, WelcomeMessage,
};

/// How long one wait for an accelerator is.
const SETTLE_STEP: Duration = Duration::from_millis(1);

/// What a shard is told at start.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// The job's life; frames of another are refused.
    pub epoch: Epoch,
    /// How long a pull or a push-pull waits for its version before it is answered with who is missing.
    pub round_timeout: Duration,
    /// Whether its memory is such that trainers of this machine can read values where they are.
    pub shares_memory: bool,
    /// Frames of one connection that its transport lands at once, at most.
    pub landings: usize,
}

/// What a session wants done.
pub enum Output {
    /// Hand this to the transport.
    Submit(Submit),
    /// End this connection.
    Close(PeerId),
}

/// One core's worth of server.
pub struct Shard {
    pub(super) options: ShardOptions,
    pub(super) phase: Phase,
    pub(super) pool: Pool,
    pub(super) known: Vec<Incarnation>,
    pub(super) journal: Option<Journal>,
    /// Where the journal ended when it was stopped: the position of everything that is not in it.
    pub(super) unwritten: u64,
    /// How much it replays in one turn of what rows have missed, see [`ROWS_REPLAYED_BYTES`].
    pub(super) replays: u64,
    kernels: Box<dyn Kernels>,
    pub(super) device: Option<Device>,
    peers: BTreeMap<PeerId, Peer>,
    /// Heads without an answer: what was under way when they came may change what they would be refused for.
    held: BTreeMap<PeerId, Frame>,
    /// How often something changed that a check looks at.
    changes: u64,
    /// At which count of changes those heads were looked at last. Nothing when a frame before one has landed since.
    looked_at: Option<u64>,
    pub(super) checkpointing: Option<Checkpointing>,
}

/// How far initialisation is.
pub(super) enum Phase {
    /// Nobody has begun.
    Empty,
    /// A generation is filling the table.
    Filling(Table),
    /// Initialised.
    Serving(Box<Serving>),
}

/// A connection.
struct Peer {
    origin: String,
    who: Option<Who>,
    /// Frames whose payloads are on their way in, in the order of their heads.
    landing: VecDeque<Landing>,
    /// Room for what will be found of frames to come.
    spare: Vec<Found>,
}

/// A frame whose payload has places.
struct Landing {
    /// Why it will be refused, once it is here.
    refusal: Option<Refusal>,
    found: Found,
}

/// What a check of a frame found.
#[derive(Default)]
struct Found {
    /// The count of changes at which the frame was right.
    right_at: Option<u64>,
    /// Of a push, the places of its entries' chunks in the table.
    places: Vec<u32>,
}

/// A frame that was checked and is here.
#[derive(Clone, Copy)]
struct Arrived<'a> {
    now: Now,
    peer: PeerId,
    /// Where in the journal it is.
    position: u64,
    frame: &'a Frame,
    /// Of a push, the places of its entries' chunks in the table.
    places: &'a [u32],
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Who {
    trainer: TrainerId,
    incarnation: Incarnation,
}

impl Shard {
    /// A shard that holds nothing yet.
    #[must_use]
    pub fn new(options: ShardOptions, kernels: Box<dyn Kernels>) -> Self {
        Self {
            phase: Phase::Empty,
            pool: Pool::new(options.shares_memory),
            options,
            known: Vec::new(),
            journal: None,
            unwritten: 0,
            replays: ROWS_REPLAYED_BYTES,
            kernels,
            device: None,
            peers: BTreeMap::new(),
            held: BTreeMap::new(),
            changes: 0,
            looked_at: None,
            checkpointing: None,
        }
    }

    /// A shard whose chunks live on an accelerator, as far as they can: from initialisation on, or from the end of
    /// [`Shard::restore`] on.
    #[must_use]
    pub fn with_accelerator(mut self, accelerator: Box<dyn Accelerator>, no_room: NoRoom) -> Self {
        self.device = Some(Device::new(accelerator, no_room));
        self
    }

    /// Takes an event in, and gives everything out that follows from it.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Vec<Output>) {
        self.forget_refused(now);
        match event {
            Event::Accepted { peer, origin } => {
                self.peers.insert(peer, Peer::new(origin));
            }
            Event::Head { peer, frame } => self.land(peer, frame, |_| false, out),
            Event::Landed { peer, frame, body } => {
                self.landed(now, peer, &frame, body, out);
                self.looked_at = self.looked_at.filter(|_| !self.held.contains_key(&peer));
            }
            Event::Sent { body, .. } => {
                drop(body);
                self.retry(now, out);
            }
            Event::Gone { peer, unsent, unfilled, .. } => {
                drop((unsent, unfilled));
                self.peers.remove(&peer);
                self.held.remove(&peer);
                if let Phase::Serving(serving) = &mut self.phase {
                    serving.forget_pulls(peer);
                    serving.forget_wanted_halves(peer);
                }
                self.retry(now, out);
            }
            Event::Left { .. } | Event::Connected { .. } => {}
        }
    }

    fn forget_refused(&mut self, now: Now) {
        if let Phase::Serving(serving) = &mut self.phase {
            serving.forget_refused(now);
        }
    }

    /// Ends the waits that are over. Call when [`Shard::deadline`] has passed.
    pub fn expire(&mut self, now: Now, out: &mut Vec<Output>) {
        let limit = self.options.round_timeout;
        self.turn(now, out, |serving, cx| serving.expire(cx, limit));
    }

    /// When [`Shard::expire`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        match &self.phase {
            Phase::Serving(serving) => serving.deadline(self.options.round_timeout),
            Phase::Empty | Phase::Filling(_) => None,
        }
    }

    /// Gives the accelerator its work and goes on with what it has done, with rows that catch up, tries again what had
    /// no memory, and looks again at heads without an answer; true when something was done. Call it every turn, and
    /// soon again while [`Shard::is_under_way`].
    ///
    /// # Errors
    /// [`Failure::Node`] when what lived on the accelerator is lost: a process that starts anew has it from the
    /// checkpoint and the journal; and when what was restored finds no room there and must.
    pub fn attend(&mut self, now: Now, out: &mut Vec<Output>) -> Result<bool, Failure> {
        let is_any = self.catch_up_rows(now, out);
        let is_any = self.attend_device(now, out)? || is_any;
        self.forget_refused(now);
        if self.looked_at != Some(self.changes) {
            self.looked_at = Some(self.changes);
            for (peer, frame) in std::mem::take(&mut self.held) {
                self.land(peer, frame, |refusal| refusal.may_pass, out);
            }
        }
        Ok(is_any)
    }

    fn attend_device(&mut self, now: Now, out: &mut Vec<Output>) -> Result<bool, Failure> {
        let Some(device) = &mut self.device else { return Ok(self.retry(now, out)) };
        device.check_kept()?;
        if let Phase::Serving(serving) = &mut self.phase
            && device.is_new(serving.table.generation)
        {
            device.take_in(serving, &self.pool)?;
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

    /// Tries again what could not be applied or answered for want of a lease; whether something was.
    fn retry(&mut self, now: Now, out: &mut Vec<Output>) -> bool {
        let mut is_any = false;
        if matches!(&self.phase, Phase::Serving(serving) if serving.lacks_memory()) {
            self.turn(now, out, |serving, cx| is_any = serving.retry(cx));
        }
        is_any
    }

    /// Goes on with what takes more than a turn; whether there was any.
    fn catch_up_rows(&mut self, now: Now, out: &mut Vec<Output>) -> bool {
        let (mut is_any, replays) = (false, self.replays);
        if matches!(&self.phase, Phase::Serving(serving) if serving.is_catching_up()) {
            self.turn(now, out, |serving, cx| is_any = serving.go_on_catching_up(cx, replays));
        }
        is_any
    }

    /// Whether the accelerator has work, or rows catch up with what they have missed.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        let is_catching_up = matches!(&self.phase, Phase::Serving(serving) if serving.is_catching_up());
        is_catching_up || self.device.as_ref().is_some_and(Device::is_under_way)
    }

    /// Waits until the accelerator has nothing to do, every round that is complete is closed, and every state is in the
    /// host's memory, so that a checkpoint is taken without it. It is given up when nothing has happened for `limit`.
    /// A round without memory for its next value, because readers hold versions, stays open: waiting here brings none
    /// back. A checkpoint holds it as open, and the journal what is in it; a line of the log says how many there are.
    ///
    /// # Errors
    /// As [`Shard::attend`]; and when it was given up, naming the accelerator.
    pub fn settle(&mut self, now: Now, limit: Duration, out: &mut Vec<Output>) -> Result<(), Failure> {
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
                serving.tell_stalled();
                return Ok(());
            };
            serving.release_held(device);
            serving.store_all(device);
            if !device.is_under_way() && device.released.is_empty() {
                serving.tell_stalled();
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

    /// Runs `work` on a shard that serves, and sends what it answers.
    fn turn(&mut self, now: Now, out: &mut Vec<Output>, work: impl FnOnce(&mut Serving, &mut Context<'_>)) {
        let mut replies = Replies::default();
        if let Phase::Serving(serving) = &mut self.phase {
            self.changes += u64::from(serving.is_stalled());
            let (kernels, pool) = (self.kernels.as_mut(), &mut self.pool);
            let device = self.device.as_mut();
            let (replies, left) = (&mut replies, self.replays);
            let mut cx = Context { now, kernels, pool, device, replies, peer: NOBODY, position: 0, left };
            work(serving, &mut cx);
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    /// Decides where a payload goes before it is read: into leases, or nowhere when the frame is refused. A frame is
    /// refused only when those of its connection before it are here: until then they may make it right, and it waits.
    /// One that has waited is not refused, either, for what `waits` says.
    fn land(&mut self, peer: PeerId, frame: Frame, waits: impl FnOnce(&Refusal) -> bool, out: &mut Vec<Output>) {
        let mut found = self.spare(peer);
        let checked = self.check(peer, &frame, &mut found).and_then(|()| self.places(&frame));
        let sender = self.peers.get_mut(&peer);
        let (refusal, into) = match (checked, sender) {
            (Err(refusal), Some(sender)) if !sender.landing.is_empty() || waits(&refusal) => {
                sender.spare.push(found.cleared());
                self.held.insert(peer, frame);
                return;
            }
            (Ok(into), _) => (None, into),
            (Err(refusal), _) => (Some(refusal), Incoming::nowhere(&frame)),
        };
        if let Some(sender) = self.peers.get_mut(&peer) {
            sender.landing.push_back(Landing { refusal, found });
        }
        out.push(Output::Submit(Submit::Land { peer, into }));
    }

    /// Room for what is found of a frame.
    fn spare(&mut self, peer: PeerId) -> Found {
        self.peers.get_mut(&peer).and_then(|peer| peer.spare.pop()).unwrap_or_default()
    }

    fn places(&mut self, frame: &Frame) -> Result<Vec<Incoming>, Refusal> {
        let busy = |failure: Failure| Refusal::new(ErrorCode::Busy, failure.to_string());
        let mut places = Vec::with_capacity(frame.entries.len());
        let has_rows = matches!(&self.phase, Phase::Serving(serving) if serving.has_rows());
        // Without rows, entries of one length in a row are as good as one.
        for alike in frame.entries.chunk_by(|one, next| !has_rows && one.bytes == next.bytes) {
            let bytes = alike[0].bytes;
            let mut put = |lease| places.push(Incoming::Chunk { lease, bytes });
            match alike {
                _ if bytes == 0 => {}
                [entry] => put(take(&self.phase, &mut self.pool, entry).map_err(busy)?),
                _ => self.pool.take_many(bytes, alike.len(), &mut put).map_err(busy)?,
            }
        }
        Ok(places)
    }

    fn landed(&mut self, now: Now, peer: PeerId, frame: &Frame, body: Vec<Incoming>, out: &mut Vec<Output>) {
        let mut replies = Replies::to(frame.entries.len());
        let has_places = frame.payload_bytes() > 0;
        let landing = self.peers.get_mut(&peer).filter(|_| has_places).and_then(|peer| peer.landing.pop_front());
        let Landing { refusal, mut found } =
            landing.unwrap_or_else(|| Landing { refusal: None, found: self.spare(peer) });
        let checked = match refusal {
            Some(refusal) => Err(refusal),
            None => self.check(peer, frame, &mut found),
        };
        let done = match checked {
            Ok(()) if frame.head.kind == Kind::Hello => self.welcome(peer, frame, &mut replies, out),
            Ok(()) => self.record_and_apply(now, peer, frame, &found.places, body, &mut replies),
            Err(refusal) => Err(refusal),
        };
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.spare.push(found.cleared());
        }
        if let Err(refusal) = done {
            if let (Phase::Serving(serving), Some(Behind::Work)) = (&mut self.phase, refusal.behind) {
                serving.note_refused(now, frame.head.trainer);
                self.changes += 1;
            }
            self.refuse(peer, &frame.head, &refusal, &mut replies, out);
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    fn refuse(&mut self, peer: PeerId, head: &Head, refusal: &Refusal, replies: &mut Replies, out: &mut Vec<Output>) {
        let ends = head.kind == Kind::Hello || self.peers.get(&peer).is_none_or(|peer| peer.who.is_none());
        if refusal.behind.is_some() {
            // It comes again by itself, soon, and gets in.
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
        out.push(Output::Close(peer));
    }

    /// Accepts a connection: a newer life of a trainer closes the door to its older ones.
    fn welcome(
        &mut self,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
        out: &mut Vec<Output>,
    ) -> Result<(), Refusal> {
        let head = &frame.head;
        let who = Who { trainer: head.trainer, incarnation: head.incarnation };
        if who.trainer != NO_TRAINER {
            self.meet(who)?;
            if let Phase::Serving(serving) = &mut self.phase {
                serving.forget_earlier_lives(who.trainer, who.incarnation);
            }
            let older = |one: &Peer| one.who.is_some_and(|other| other.trainer == who.trainer);
            out.extend(self.peers.iter().filter(|(_, one)| older(one)).map(|(id, _)| Output::Close(*id)));
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            tracing::debug!(origin = peer.origin, trainer = %who.trainer, "welcome");
            peer.who = Some(who);
        }
        let message = WelcomeMessage { generation: self.generation().0 };
        let answer = Head { epoch: self.options.epoch, ..head.answer(Kind::Welcome) };
        replies.whole(peer, Frame::with_control(answer, &message));
        Ok(())
    }

    /// Notes a trainer's incarnation, and refuses one that was superseded.
    fn meet(&mut self, who: Who) -> Result<(), Refusal> {
        if who.trainer.0 >= TRAINERS_MAX {
            return Err(Refusal::invalid(format!("trainer {} is over the limit of {TRAINERS_MAX}", who.trainer)));
        }
        let index = who.trainer.0 as usize;
        if self.known.len() <= index {
            self.known.resize(index + 1, Incarnation(0));
        }
        let known = &mut self.known[index];
        if who.incarnation < *known {
            return Err(Refusal::superseded(who.trainer, who.incarnation, *known));
        }
        *known = who.incarnation;
        Ok(())
    }

    /// Everything that can be wrong with a frame, found before anything changes. What was right when the frame began
    /// to arrive still is if nothing has changed since.
    fn check(&mut self, peer: PeerId, frame: &Frame, found: &mut Found) -> Result<(), Refusal> {
        let head = &frame.head;
        if head.kind == Kind::Hello {
            return self.check_epoch(head, true);
        }
        let who = self.peers.get(&peer).and_then(|peer| peer.who);
        let who = who.ok_or_else(|| Refusal::invalid("the first frame of a connection is a hello"))?;
        if (who.trainer, who.incarnation) != (head.trainer, head.incarnation) {
            return Err(Refusal::invalid(format!(
                "a frame of trainer {} incarnation {} on the connection of trainer {} incarnation {}",
                head.trainer, head.incarnation, who.trainer, who.incarnation
            )));
        }
        self.check_epoch(head, false)?;
        if who.trainer != NO_TRAINER {
            self.meet(who)?;
        } else if head.kind.is_mutating() {
            return Err(Refusal::invalid("a reader may pull and nothing else"));
        }
        if found.right_at.take() != Some(self.changes) {
            self.check_state(frame, u64::MAX, &mut found.places)?;
        }
        found.right_at = Some(self.changes);
        Ok(())
    }

    fn check_epoch(&self, head: &Head, is_hello: bool) -> Result<(), Refusal> {
        if head.epoch == self.options.epoch || (is_hello && head.epoch == Epoch(0)) {
            return Ok(());
        }
        Err(Refusal::other_epoch(head.epoch, self.options.epoch))
    }

    /// The part of the check that a replayed frame undergoes too. Who sent it is not asked again: a life that was
    /// superseded since was not when its frame was accepted. `places` is filled with those of a push's chunks.
    fn check_state(&self, frame: &Frame, position: u64, places: &mut Vec<u32>) -> Result<(), Refusal> {
        let head = &frame.head;
        places.clear();
        match (head.kind, &self.phase) {
            (Kind::Init | Kind::Finish, _) => self.check_generation(head),
            (Kind::Push, Phase::Serving(serving)) => {
                let rate = check_rate(frame)?;
                serving.check_push(frame, position, places)?;
                rate.map_or(Ok(()), |rate| serving.check_rate(rate, places))
            }
            (Kind::Set, Phase::Serving(serving)) => serving.check_set(frame, position),
            (Kind::Leave, Phase::Serving(serving)) => serving.check_leave(position),
            (Kind::Pull, Phase::Serving(_)) => Ok(()),
            (Kind::Push | Kind::Set | Kind::Pull | Kind::Leave, _) => {
                Err(Refusal::new(ErrorCode::NotInitialised, "the parameters are not initialised yet"))
            }
            (kind, _) => Err(Refusal::invalid(format!("a shard has no answer to a frame of kind {kind:?}"))),
        }
    }

    /// The fence: an older generation is refused, a newer one starts from nothing.
    fn check_generation(&self, head: &Head) -> Result<(), Refusal> {
        let current = match &self.phase {
            Phase::Empty => Generation(0),
            Phase::Filling(table) => table.generation,
            Phase::Serving(serving) => serving.table.generation,
        };
        if head.generation >= current && head.generation > Generation(0) {
            return Ok(());
        }
        let text = format!("generation {} of the initialisation was superseded by {current}", head.generation);
        Err(Refusal::new(ErrorCode::Fenced, text))
    }

    /// Writes a frame that changes something to the journal, then lets it.
    fn record_and_apply(
        &mut self,
        now: Now,
        peer: PeerId,
        frame: &Frame,
        places: &[u32],
        mut body: Vec<Incoming>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let mut position = self.unwritten;
        self.own_rows(frame, &mut body)?;
        if let Phase::Serving(serving) = &mut self.phase {
            serving.check_rows(frame, body.iter().map(Incoming::bytes), u64::MAX)?;
        }
        if frame.head.kind == Kind::Finish {
            self.check_room(frame)?;
        }
        if let Some(journal) = self.journal.as_mut().filter(|_| frame.head.kind.is_mutating()) {
            let head = frame.encode();
            let mut parts: Vec<&[u8]> = vec![&head];
            parts.extend(body.iter().map(Incoming::bytes));
            position = journal.append(&parts).map_err(|failure| {
                Refusal::new(ErrorCode::Busy, format!("the journal cannot be written: {failure}"))
            })?;
        }
        let leases = body.into_iter().filter_map(|place| match place {
            Incoming::Chunk { lease, .. } => Some(lease),
            Incoming::Loan(_) | Incoming::Discard { .. } => None,
        });
        self.apply(&Arrived { now, peer, position, frame, places }, leases.collect(), replies)
    }

    /// Whether parameters that must live on the accelerator find room there. They keep it.
    fn check_room(&mut self, frame: &Frame) -> Result<(), Refusal> {
        let (Phase::Filling(table), Some(device)) = (&self.phase, &mut self.device) else { return Ok(()) };
        if !device.must_hold_all() || table.generation != frame.head.generation {
            return Ok(());
        }
        let job = Job::from_message(&decode::<FinishMessage>(&frame.control)?)?;
        device.reserve(&job, table).map_err(|failure| Refusal::invalid(failure.to_string()))
    }

    /// Copies rows and ids that lie in their sender's memory: what was checked must be what is applied, and a sender
    /// may write there meanwhile.
    fn own_rows(&mut self, frame: &Frame, body: &mut [Incoming]) -> Result<(), Refusal> {
        let Phase::Serving(serving) = &self.phase else { return Ok(()) };
        if !serving.has_rows() {
            return Ok(());
        }
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (_, place) in entries.zip(body).filter(|(entry, _)| serving.is_of_rows(entry)) {
            if let Incoming::Chunk { lease, bytes } = place
                && lease.is_foreign()
            {
                let own = self.pool.take_for_rows(*bytes);
                let mut own = own.map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
                own.bytes_mut()[..*bytes as usize].copy_from_slice(&lease.bytes()[..*bytes as usize]);
                *lease = own;
            }
        }
        Ok(())
    }

    fn apply(&mut self, arrived: &Arrived<'_>, leases: Vec<Lease>, replies: &mut Replies) -> Result<(), Refusal> {
        let Arrived { now, peer, position, frame, places } = *arrived;
        self.changes += u64::from(frame.head.kind.is_mutating());
        match frame.head.kind {
            Kind::Init => return self.init(peer, frame, leases, replies),
            Kind::Finish => return self.finish(peer, frame, replies),
            _ => {}
        }
        let Phase::Serving(serving) = &mut self.phase else {
            return Err(Refusal::new(ErrorCode::NotInitialised, "the parameters are not initialised yet"));
        };
        let (kernels, pool) = (self.kernels.as_mut(), &mut self.pool);
        let device = self.device.as_mut();
        // While the journal is replayed nobody waits.
        let left = if peer == NOBODY { u64::MAX } else { self.replays };
        let mut cx = Context { now, kernels, pool, device, replies, peer, position, left };
        match frame.head.kind {
            Kind::Push => {
                let message = decode::<PushMessage>(&frame.control)?;
                serving.push(&mut cx, frame, message.rate, places, leases);
            }
            Kind::Set => serving.set(&mut cx, frame, leases),
            Kind::Pull => serving.pull(&mut cx, frame, leases)?,
            Kind::Leave => serving.leave(&mut cx, &frame.head)?,
            _ => unreachable!("every other kind was refused"),
        }
        Ok(())
    }

    fn init(&mut self, peer: PeerId, frame: &Frame, leases: Vec<Lease>, replies: &mut Replies) -> Result<(), Refusal> {
        let generation = frame.head.generation;
        let bare = |entry: &Entry| Entry::bare(entry.id, entry.round, entry.element_type);
        let table = match &mut self.phase {
            // What was finished under this generation is finished: the frame was sent twice.
            Phase::Serving(serving) if serving.table.generation == generation => {
                frame.entries.iter().for_each(|entry| replies.done(peer, &frame.head, bare(entry)));
                return Ok(());
            }
            Phase::Filling(table) if table.generation == generation => table,
            _ => self.begin(generation),
        };
        table.declare(decode::<InitMessage>(&frame.control)?, &frame.entries)?;
        let (mut leases, mut room) = (leases.into_iter(), RowsRoom::default());
        for entry in &frame.entries {
            let lease = (entry.bytes > 0).then(|| leases.next().expect("there is a lease for every payload"));
            table.begin(&mut room, entry, lease)?;
            replies.done(peer, &frame.head, bare(entry));
        }
        Ok(())
    }

    fn begin(&mut self, generation: Generation) -> &mut Table {
        self.pool = Pool::new(self.options.shares_memory);
        self.device.iter_mut().for_each(Device::forget);
        self.phase = Phase::Filling(Table::new(generation));
        match &mut self.phase {
            Phase::Filling(table) => table,
            Phase::Empty | Phase::Serving(_) => unreachable!("the phase was just set"),
        }
    }

    fn finish(&mut self, peer: PeerId, frame: &Frame, replies: &mut Replies) -> Result<(), Refusal> {
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

    /// Initialised: the budget is reckoned, the state tensors are made, and from here on nothing is mapped.
    pub(super) fn serve(&mut self, message: &FinishMessage) -> Result<(), Refusal> {
        let Phase::Filling(table) = &self.phase else {
            return Err(lost(message.chunks, 0));
        };
        let found = u64::try_from(table.chunks.len()).unwrap_or(u64::MAX);
        if found != message.chunks {
            return Err(lost(message.chunks, found));
        }
        let job = Job::from_message(message)?;
        let programs = Programs::new(&job, table).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let trainers = u64::from(job.trainers);
        let plans = table.chunks.iter().filter_map(|chunk| table.held(chunk.id).rows.as_ref());
        let landings = u64::try_from(self.options.landings).unwrap_or(u64::MAX);
        let rows = plans.map(|plan| plan.bytes_on_their_way(trainers, landings)).fold(0, u64::saturating_add);
        let budget = budget(table, &job, landings);
        self.pool.seal(&budget, rows).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let Phase::Filling(table) = std::mem::replace(&mut self.phase, Phase::Empty) else {
            unreachable!("the phase was just looked at");
        };
        let mut serving =
            Serving::new(job, table, programs).map_err(|failure| Refusal::invalid(failure.to_string()))?;
        let made = make_states(&mut serving, &mut self.pool);
        self.phase = Phase::Serving(Box::new(serving));
        made.map_err(|failure| Refusal::invalid(failure.to_string()))
    }

    /// Feeds one journal record through the same door that frames come through; nobody is answered.
    pub(super) fn replay(&mut self, position: u64, record: &[u8]) -> Result<(), Failure> {
        let damaged = |what: String| Failure::Node(format!("journal record at {position}: {what}"));
        let (header, rest) = record.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| damaged("no header".into()))?;
        let prefix = Prefix::decode(header).map_err(|error| damaged(error.to_string()))?;
        if rest.len() < prefix.rest_bytes() {
            return Err(damaged("it ends within its entries".into()));
        }
        let (table, mut payload) = rest.split_at(prefix.rest_bytes());
        let frame = prefix.finish(table).map_err(|error| damaged(error.to_string()))?;
        // The journal knows the lives that it has frames of; a checkpoint may know newer ones.
        let _ = self.meet(Who { trainer: frame.head.trainer, incarnation: frame.head.incarnation });
        self.catch_up(position);
        // A frame that was refused when it was written is refused again, for the same reason.
        let mut places = Vec::new();
        if self.check_state(&frame, position, &mut places).is_err() {
            return Ok(());
        }
        let mut leases = Vec::new();
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let (bytes, after) = payload
                .split_at_checked(entry.bytes as usize)
                .ok_or_else(|| damaged("it ends within its payload".into()))?;
            let mut lease = take(&self.phase, &mut self.pool, entry)?;
            lease.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            leases.push(lease);
            payload = after;
        }
        if let Phase::Serving(serving) = &mut self.phase {
            // It was found to be right before it was written; this counts the rows that are coming.
            let _ = serving.check_rows(&frame, leases.iter().map(Lease::bytes), position);
        }
        let arrived = Arrived { now: Now(0), peer: NOBODY, position, frame: &frame, places: &places };
        let _ = self.apply(&arrived, leases, &mut Replies::default());
        Ok(())
    }

    fn catch_up(&mut self, position: u64) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        let (kernels, pool, replies) = (self.kernels.as_mut(), &mut self.pool, &mut Replies::default());
        let (device, peer, left) = (None, NOBODY, u64::MAX);
        serving.catch_up(&mut Context { now: Now(0), kernels, pool, device, replies, peer, position, left });
    }

    /// The replay of the journal is over.
    pub(super) fn replayed(&mut self) {
        self.catch_up(u64::MAX);
        if let Phase::Serving(serving) = &mut self.phase {
            serving.replayed();
        }
    }

    /// What this shard holds, for people.
    #[must_use]
    pub fn status(&self) -> ShardStatus {
        ShardStatus::of(self)
    }
}

impl Found {
    /// Room for what is found of another frame.
    fn cleared(self) -> Self {
        Self { right_at: None, ..self }
    }
}

impl Peer {
    fn new(origin: String) -> Self {
        Self { origin, who: None, landing: VecDeque::new(), spare: Vec::new() }
    }
}

impl Job {
    /// Checks what a finish frame says.
    pub(super) fn from_message(message: &FinishMessage) -> Result<Self, Refusal> {
        let job = message.job.ok_or_else(|| Refusal::invalid("a finish frame without the job's settings"))?;
        let mode = Mode::from_numbers(job.mode, job.staleness)
            .ok_or_else(|| Refusal::invalid(format!("mode {} has no meaning", job.mode)))?;
        let merge = Merge::from_number(job.merge)
            .ok_or_else(|| Refusal::invalid(format!("merge {} has no meaning", job.merge)))?;
        if !(1..=TRAINERS_MAX).contains(&job.trainers) {
            return Err(Refusal::invalid(format!("{} trainers; expected 1 to {TRAINERS_MAX}", job.trainers)));
        }
        if mode == (Mode::Staleness { bound: 0 }) {
            return Err(Refusal::invalid(
                "a staleness bound of 0 steps lets nobody begin; expected 1 or more, or mode sync",
            ));
        }
        Ok(Self { mode, merge, trainers: job.trainers })
    }
}

/// Room for a payload: rows have theirs, because nobody knows beforehand how many come.
fn take(phase: &Phase, pool: &mut Pool, entry: &Entry) -> Result<Lease, Failure> {
    match phase {
        Phase::Serving(serving) if serving.is_of_rows(entry) => pool.take_for_rows(entry.bytes),
        _ => pool.take(entry.bytes),
    }
}

fn decode<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, Refusal> {
    M::decode(bytes).map_err(|error| Refusal::invalid(format!("the control message does not parse: {error}")))
}

/// The rate of a push. One that is not a number would end in every parameter.
fn check_rate(frame: &Frame) -> Result<Option<f64>, Refusal> {
    let rate = decode::<PushMessage>(&frame.control)?.rate;
    let checked = rate.map_or(Ok(()), |rate| Range::NotNegative.check("the learning rate sent with a gradient", rate));
    checked.map(|()| rate).map_err(|failure| Refusal::invalid(failure.to_string()))
}

fn lost(expected: u64, found: u64) -> Refusal {
    let text =
        format!("this shard holds {found} chunks, the initialiser sent {expected}: begin the initialisation anew");
    Refusal::new(ErrorCode::InitialisationLost, text)
}

/// The sum of reasons for chunk memory, beyond the values, which have theirs already.
fn budget(table: &Table, job: &Job, landings: u64) -> Budget {
    let mut counts: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for chunk in table.chunks.iter().filter(|chunk| chunk.bucket().is_none()) {
        let class = chunk.bytes.max(64).next_power_of_two();
        let states = rule_of(job, &table.held(chunk.id).rule).states().len();
        let count = counts.entry(class).or_default();
        count.0 += 1;
        count.1 += u64::try_from(states).unwrap_or(u64::MAX);
    }
    let trainers = u64::from(job.trainers);
    let mut budget = Budget::new();
    for (class, (chunks, states)) in counts {
        // Each trainer has one connection.
        let frame = chunks.min(u64::from(FRAME_ENTRIES_MAX)).min(u64::from(FRAME_PAYLOAD_BYTES_MAX / class));
        let landing = trainers * landings * frame;
        budget.line("optimizer state", class, states);
        budget.line("gradients that land", class, landing);
        budget.line("gradients that wait for their round, or are one ahead of it", class, chunks * trainers * 2);
        budget.line("the sum of a round's first gradients", class, chunks * 2);
        budget.line("a value that is set and waits for updates", class, chunks);
        budget.line("a new version beside the ones that are still being read", class, chunks * (trainers + 1));
    }
    budget
}

fn make_states(serving: &mut Serving, pool: &mut Pool) -> Result<(), Failure> {
    let table = &mut serving.table;
    for place in 0..table.chunks.len() {
        if table.chunks[place].bucket().is_some() {
            continue;
        }
        let chunk = &mut table.chunks[place];
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
