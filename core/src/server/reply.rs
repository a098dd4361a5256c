//! Replies of one event, batched: the entries of one request share frames, also where those of several take turns.

use std::sync::Arc;

use smallvec::SmallVec;

use super::output::ServerOutput;
use crate::ids::{Epoch, Incarnation, PeerId, Ticket, TrainerId};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX};
use crate::memory::Value;
use crate::port::{Outgoing, Payloads, Submit};
use crate::wire::answer::Answer;
use crate::wire::{ControlAnswer, Entries, Entry, ErrorCode, ErrorMessage, Frame, Head, Kind};

/// The replies of one event.
#[derive(Default)]
pub(super) struct Replies {
    frames: SmallVec<[Reply; 1]>,
    /// The last frame of each peer, by peer: an update answers the waiting requests of all trainers, chunk by chunk.
    latest: SmallVec<[(PeerId, usize); 4]>,
    /// Expected entries of a frame.
    expected: usize,
}

/// A reply frame under construction.
struct Reply {
    peer: PeerId,
    frame: Frame,
    body: Payloads,
    /// Payload bytes so far.
    payload_bytes: u32,
}

impl Replies {
    /// Replies to a frame with this many entries.
    pub(super) fn to(entries: usize) -> Self {
        Self { expected: entries, ..Self::default() }
    }

    /// Acknowledges one entry; a replayed frame has no peer to answer.
    pub(super) fn done(&mut self, peer: impl Into<Option<PeerId>>, head: &Head, entry: Entry) {
        if let Some(peer) = peer.into() {
            self.push(peer, head.answer(Kind::Done), entry, None);
        }
    }

    /// Acknowledges a request without entries.
    pub(super) fn done_whole(&mut self, peer: Option<PeerId>, head: &Head) {
        if let Some(peer) = peer {
            self.whole(peer, Frame::bare(head.answer(Kind::Done)));
        }
    }

    /// Answers one entry with a value.
    pub(super) fn value(&mut self, peer: impl Into<Option<PeerId>>, head: &Head, entry: Entry, value: Arc<Value>) {
        if let Some(peer) = peer.into() {
            self.push(peer, head.answer(Kind::Value), entry, Some(Outgoing::Value(value)));
        }
    }

    /// Answers one entry with an empty value.
    pub(super) fn nothing(&mut self, peer: PeerId, head: &Head, entry: Entry) {
        self.push(peer, head.answer(Kind::Value), entry, None);
    }

    /// Refuses a request, or the part of it that is unanswered.
    pub(super) fn error(&mut self, peer: PeerId, head: &Head, refusal: &Refusal) {
        self.whole(peer, refusal.frame(head.answer(Kind::Error)));
    }

    /// Refuses a connection; the caller closes it after this frame.
    pub(super) fn refused(&mut self, peer: PeerId, head: &Head, refusal: &Refusal) {
        self.whole(peer, refusal.frame(head.answer(Kind::Refused)));
    }

    /// Sends a complete frame of its own.
    pub(super) fn whole(&mut self, peer: PeerId, frame: Frame) {
        self.begin(peer, frame, Payloads::new());
    }

    /// Submits every frame whose peer is still connected.
    pub(super) fn flush(&mut self, is_known: impl Fn(PeerId) -> bool, out: &mut Vec<ServerOutput>) {
        self.latest.clear();
        for Reply { peer, frame, body, .. } in self.frames.drain(..).filter(|reply| is_known(reply.peer)) {
            out.push(ServerOutput::Submit(Submit::Send { peer, ticket: Ticket(0), frame, body }));
        }
    }

    /// Adds a frame, behind those of its peer.
    fn begin(&mut self, peer: PeerId, frame: Frame, body: Payloads) -> usize {
        let at = self.frames.len();
        self.frames.push(Reply { peer, frame, body, payload_bytes: 0 });
        match self.latest.binary_search_by_key(&peer, |(peer, _)| *peer) {
            Ok(known) => self.latest[known].1 = at,
            Err(place) => self.latest.insert(place, (peer, at)),
        }
        at
    }

    fn push(&mut self, peer: PeerId, head: Head, entry: Entry, payload: Option<Outgoing>) {
        let last = self.latest.binary_search_by_key(&peer, |(peer, _)| *peer).ok().map(|at| self.latest[at].1);
        let open = last.filter(|last| {
            let last = &self.frames[*last];
            last.frame.head == head
                && last.frame.entries.len() < FRAME_ENTRIES_MAX as usize
                && last.payload_bytes.saturating_add(entry.bytes) <= FRAME_PAYLOAD_BYTES_MAX
        });
        let at = open.unwrap_or_else(|| {
            let entries = Entries::with_capacity(self.expected);
            let body = Payloads::with_capacity(if payload.is_some() { self.expected } else { 0 });
            self.begin(peer, Frame { entries, ..Frame::bare(head) }, body)
        });
        let reply = &mut self.frames[at];
        reply.payload_bytes += entry.bytes;
        reply.frame.entries.push(entry);
        if let Some(payload) = payload {
            reply.body.push(payload);
        }
    }
}

/// Answers a control request.
pub(super) fn answer(replies: &mut Replies, peer: PeerId, head: &Head, answer: Answer) {
    let message = ControlAnswer { answer: Some(answer), ends_by_itself: false };
    replies.whole(peer, Frame::with_control(head.answer(Kind::Answer), &message));
}

/// The refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    pub(super) text: String,
    /// Trainers that the request waited for.
    pub(super) trainers: Vec<TrainerId>,
    /// Whether work in flight on an accelerator may remove the reason.
    pub(super) may_pass: bool,
    /// Set where the request waits for work of this server and succeeds when retried.
    pub(super) behind: Option<RetryReason>,
}

/// Why a request must be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryReason {
    /// A grouped update runs on a device: the request comes after the gradients that are queued, and before new ones.
    Device,
    /// A grouped update runs on a device, and other requests go first.
    DeviceOfOthers,
    /// The next checkpoint needs the disk's room, and cuts the journal.
    Disk,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), trainers: Vec::new(), may_pass: false, behind: None }
    }

    /// The end of a wait for these trainers.
    pub(super) fn awaiting(trainers: Vec<TrainerId>, text: impl Into<String>) -> Self {
        Self { trainers, ..Self::new(ErrorCode::Deadline, text) }
    }

    /// Marks the refusal of a chunk with work in flight.
    pub(super) fn while_at_work(self, is_at_work: bool) -> Self {
        Self { may_pass: is_at_work, ..self }
    }

    /// Marks a refusal that ends with work of this server.
    pub(super) fn behind(self, behind: Option<RetryReason>) -> Self {
        Self { behind, ..self }
    }

    pub(super) fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorCode::Invalid, text)
    }

    /// A frame or hello from another epoch.
    pub(super) fn other_epoch(found: Epoch, ours: Epoch) -> Self {
        let text = format!(
            "epoch {found} is not this job's, which is {ours}: server 0 was started anew without a checkpoint_dir of \
             the job before, whose clients it refuses; expected a new client, which joins this job and initialises it"
        );
        Self::new(ErrorCode::Fenced, text)
    }

    /// A superseded incarnation of a trainer.
    pub(super) fn superseded(trainer: TrainerId, found: Incarnation, known: Incarnation) -> Self {
        let text = format!("trainer {trainer} incarnation {found} was superseded by incarnation {known}");
        Self::new(ErrorCode::Fenced, text)
    }

    /// A rank beyond the job's.
    pub(super) fn no_such_trainer(trainer: TrainerId, trainers: usize) -> Self {
        Self::invalid(format!("trainer {trainer}: this job has {trainers} trainers, numbered from 0"))
    }

    fn frame(&self, head: Head) -> Frame {
        let trainers = self.trainers.iter().map(|trainer| trainer.0).collect();
        let message = ErrorMessage { code: self.code.into(), text: self.text.clone(), trainers };
        Frame::with_control(head, &message)
    }
}
