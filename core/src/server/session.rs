//! The session of a shard: its entry points, which take events and the time. Frames are checked, received, recorded and
//! applied; each turn goes on with what waits.
//!
//! Not here: the checks (`admission`), the journal (`record`), the changes (`apply`).

use std::time::Duration;

use super::context::Origin;
use super::device::Device;
use super::frames::{FrameCheck, ReceivedFrame, ReceivingFrame};
use super::initialisation::take;
use super::output::ServerOutput;
use super::reply::{Refusal, Replies, RetryReason};
use super::shard::{Phase, Shard, ShardPeer};
use crate::error::Failure;
use crate::ids::{NO_TRAINER, PeerId};
use crate::port::{Event, Incoming, ReceiveBuffers, Submit};
use crate::time::Now;
use crate::wire::{ErrorCode, Frame, Head, Kind};

/// Length of one wait for the accelerator.
const SETTLE_STEP: Duration = Duration::from_millis(1);

impl Shard {
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
                    serving.waits.forget(&mut serving.table.chunks, peer);
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
        if let Some(life) = peer.life {
            self.trainers.moved(life.trainer, &transport);
        }
        peer.transport = transport;
    }

    /// Removes a closed connection and starts the grace time of a trainer without another one.
    fn closed(&mut self, now: Now, peer: PeerId) {
        let trainer = self.peers.remove(&peer).and_then(|peer| peer.life).map(|life| life.trainer);
        let is_connected =
            |trainer| self.peers.values().any(|other| other.life.is_some_and(|life| life.trainer == trainer));
        if let Some(trainer) = trainer.filter(|trainer| *trainer != NO_TRAINER && !is_connected(*trainer)) {
            self.trainers.closed(now, trainer);
        }
    }

    fn forget_refused(&mut self, now: Now) {
        if let Phase::Serving(serving) = &mut self.phase {
            serving.stalls.forget_refused(now);
        }
    }

    /// Ends expired waits, and tries refused records again. Call when [`Shard::deadline`] has passed.
    pub fn expire(&mut self, now: Now, out: &mut Vec<ServerOutput>) {
        self.log_waits(now);
        let limit = self.options.round_timeout;
        self.turn(now, out, |serving, cx| {
            serving.expire(cx, limit);
            serving.expire_lost(cx);
            if serving.stalls.is_record_due(cx.now) {
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
        if matches!(&self.phase, Phase::Serving(serving) if serving.stalls.lacks_memory()) {
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
        let has_rows = matches!(&self.phase, Phase::Serving(serving) if serving.table.has_rows);
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
            Ok(()) if frame.head.kind == Kind::Hello => self.welcome(now, peer, frame, &mut replies, out),
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
                serving.stalls.note_refused(now, frame.head.trainer);
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
        let ends = head.kind == Kind::Hello || self.peers.get(&peer).is_none_or(|peer| peer.life.is_none());
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
}
