//! Answers, gathered while one event is handled and sent together: entries of one request share frames.

use std::sync::Arc;

use super::shard::Output;
use crate::ids::{Epoch, Incarnation, PeerId, Ticket, TrainerId};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX};
use crate::memory::Value;
use crate::port::{Outgoing, Submit};
use crate::wire::{Entry, ErrorCode, ErrorMessage, Frame, Head, Kind};

/// The peer that stands for nobody: a frame that is replayed from the journal has no one to answer.
pub(super) const NOBODY: PeerId = PeerId(u64::MAX);

/// The answers of one event.
#[derive(Default)]
pub(super) struct Replies {
    frames: Vec<Reply>,
    /// Entries that a new frame probably gets.
    expected: usize,
}

/// A frame that may still take entries.
struct Reply {
    peer: PeerId,
    frame: Frame,
    body: Vec<Outgoing>,
    /// The payloads' bytes so far.
    payload_bytes: u32,
}

impl Replies {
    /// For the answers to a frame of so many entries.
    pub(super) fn to(entries: usize) -> Self {
        Self { frames: Vec::new(), expected: entries }
    }

    /// Acknowledges one entry.
    pub(super) fn done(&mut self, peer: PeerId, head: &Head, entry: Entry) {
        self.push(peer, head.answer(Kind::Done), entry, None);
    }

    /// Acknowledges a request without entries.
    pub(super) fn done_whole(&mut self, peer: PeerId, head: &Head) {
        self.whole(peer, Frame::bare(head.answer(Kind::Done)));
    }

    /// Answers one entry with a value.
    pub(super) fn value(&mut self, peer: PeerId, head: &Head, entry: Entry, value: Arc<Value>) {
        self.push(peer, head.answer(Kind::Value), entry, Some(Outgoing::Value(value)));
    }

    /// Answers one entry with a value of no bytes.
    pub(super) fn nothing(&mut self, peer: PeerId, head: &Head, entry: Entry) {
        self.push(peer, head.answer(Kind::Value), entry, None);
    }

    /// Refuses a request: all of it, or what is not answered yet.
    pub(super) fn error(&mut self, peer: PeerId, head: &Head, refusal: &Refusal) {
        self.whole(peer, refusal.frame(head.answer(Kind::Error)));
    }

    /// Refuses a connection; whoever refuses it ends it when this has left.
    pub(super) fn refused(&mut self, peer: PeerId, head: &Head, refusal: &Refusal) {
        self.whole(peer, refusal.frame(head.answer(Kind::Refused)));
    }

    /// Sends a frame of one's own.
    pub(super) fn whole(&mut self, peer: PeerId, frame: Frame) {
        if peer != NOBODY {
            self.frames.push(Reply { peer, frame, body: Vec::new(), payload_bytes: 0 });
        }
    }

    /// Hands everything to the transport, but for peers that are gone.
    pub(super) fn flush(&mut self, is_known: impl Fn(PeerId) -> bool, out: &mut Vec<Output>) {
        for Reply { peer, frame, body, .. } in self.frames.drain(..).filter(|reply| is_known(reply.peer)) {
            out.push(Output::Submit(Submit::Send { peer, ticket: Ticket(0), frame, body }));
        }
    }

    fn push(&mut self, peer: PeerId, head: Head, entry: Entry, payload: Option<Outgoing>) {
        if peer == NOBODY {
            return;
        }
        let fits = self.frames.last().is_some_and(|last| {
            last.peer == peer
                && last.frame.head == head
                && last.frame.entries.len() < FRAME_ENTRIES_MAX as usize
                && last.payload_bytes.saturating_add(entry.bytes) <= FRAME_PAYLOAD_BYTES_MAX
        });
        if !fits {
            let entries = Vec::with_capacity(self.expected);
            let body = Vec::with_capacity(if payload.is_some() { self.expected } else { 0 });
            self.frames.push(Reply { peer, frame: Frame { entries, ..Frame::bare(head) }, body, payload_bytes: 0 });
        }
        let reply = self.frames.last_mut().expect("a frame was just added");
        reply.payload_bytes += entry.bytes;
        reply.frame.entries.push(entry);
        if let Some(payload) = payload {
            reply.body.push(payload);
        }
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    pub(super) text: String,
    /// Whether what an accelerator does now may change it.
    pub(super) may_pass: bool,
    /// What a device's work on a whole gradient has to do with it: it passes when it comes again.
    pub(super) behind: Option<Behind>,
}

/// Why something has to come again that a whole gradient on a device keeps out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// The gradients that are there come before it, and new ones after it.
    Work,
    /// Others come before it.
    Others,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), may_pass: false, behind: None }
    }

    /// The same, of a chunk that may be at work.
    pub(super) fn while_at_work(self, is_at_work: bool) -> Self {
        Self { may_pass: is_at_work, ..self }
    }

    /// The same, of what a whole gradient on a device keeps out.
    pub(super) fn behind(self, behind: Option<Behind>) -> Self {
        Self { behind, ..self }
    }

    pub(super) fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorCode::Invalid, text)
    }

    /// A frame or a hello of another life of the job.
    pub(super) fn other_epoch(found: Epoch, ours: Epoch) -> Self {
        Self::new(ErrorCode::Fenced, format!("epoch {found} is not this job's, which is {ours}"))
    }

    /// A life of a trainer after which there was a newer one.
    pub(super) fn superseded(trainer: TrainerId, found: Incarnation, known: Incarnation) -> Self {
        let text = format!("trainer {trainer} incarnation {found} was superseded by incarnation {known}");
        Self::new(ErrorCode::Fenced, text)
    }

    /// A rank that the job does not have.
    pub(super) fn no_such_trainer(trainer: TrainerId, trainers: usize) -> Self {
        Self::invalid(format!("trainer {trainer}: this job has {trainers} trainers, numbered from 0"))
    }

    fn frame(&self, head: Head) -> Frame {
        Frame::with_control(head, &ErrorMessage { code: self.code.into(), text: self.text.clone() })
    }
}
