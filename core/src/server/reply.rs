//! Answers, gathered while one event is handled and sent together: entries of one request share frames.

use std::sync::Arc;

use super::shard::Output;
use crate::ids::{PeerId, Ticket};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX};
use crate::memory::Lease;
use crate::port::{Outgoing, Submit};
use crate::wire::{Entry, ErrorCode, ErrorMessage, Frame, Head, Kind};

/// The peer that stands for nobody: a frame that is replayed from the journal has no one to answer.
pub(super) const NOBODY: PeerId = PeerId(u64::MAX);

/// The answers of one event.
#[derive(Default)]
pub(super) struct Replies {
    frames: Vec<(PeerId, Frame, Vec<Outgoing>)>,
}

impl Replies {
    /// Acknowledges one entry.
    pub(super) fn done(&mut self, peer: PeerId, head: &Head, entry: Entry) {
        self.push(peer, head.answer(Kind::Done), entry, None);
    }

    /// Acknowledges a request without entries.
    pub(super) fn done_whole(&mut self, peer: PeerId, head: &Head) {
        self.whole(peer, Frame::bare(head.answer(Kind::Done)));
    }

    /// Answers one entry with a value.
    pub(super) fn value(&mut self, peer: PeerId, head: &Head, entry: Entry, chunk: Arc<Lease>) {
        let bytes = entry.bytes;
        self.push(peer, head.answer(Kind::Value), entry, Some(Outgoing::Chunk { chunk, bytes }));
    }

    /// Refuses a request: all of it, or what is not answered yet.
    pub(super) fn error(&mut self, peer: PeerId, head: &Head, refusal: &Refusal) {
        let message = ErrorMessage { code: refusal.code.into(), text: refusal.text.clone() };
        self.whole(peer, Frame::with_control(head.answer(Kind::Error), &message));
    }

    /// Sends a frame of one's own.
    pub(super) fn whole(&mut self, peer: PeerId, frame: Frame) {
        if peer != NOBODY {
            self.frames.push((peer, frame, Vec::new()));
        }
    }

    /// Hands everything to the transport, but for peers that are gone.
    pub(super) fn flush(&mut self, is_known: impl Fn(PeerId) -> bool, out: &mut Vec<Output>) {
        for (peer, frame, body) in self.frames.drain(..).filter(|(peer, ..)| is_known(*peer)) {
            out.push(Output::Submit(Submit::Send { peer, ticket: Ticket(0), frame, body }));
        }
    }

    fn push(&mut self, peer: PeerId, head: Head, entry: Entry, payload: Option<Outgoing>) {
        if peer == NOBODY {
            return;
        }
        let fits = self.frames.last().is_some_and(|(last, frame, _)| {
            *last == peer
                && frame.head == head
                && frame.entries.len() < FRAME_ENTRIES_MAX as usize
                && frame.payload_bytes() + u64::from(entry.bytes) <= FRAME_PAYLOAD_BYTES_MAX.into()
        });
        if !fits {
            self.frames.push((peer, Frame::bare(head), Vec::new()));
        }
        let (_, frame, body) = self.frames.last_mut().expect("a frame was just added");
        frame.entries.push(entry);
        body.extend(payload);
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    pub(super) text: String,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(super) fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorCode::Invalid, text)
    }
}
