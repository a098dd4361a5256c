//! A request: its frame, its receive buffers and its progress.

use crate::error::{CallEnd, Failure};
use crate::ids::{Ticket, Version};
use crate::memory::Lease;
use crate::port::{Incoming, Outgoing};
use crate::wire::{Entry, ErrorCode, Frame};

/// The buffers of a request.
#[derive(Default)]
pub struct RequestBody {
    /// The payloads of the frame's entries, in their order.
    pub payload: Vec<Outgoing>,
    /// Receive buffers of the entries' values, one each, or none at all. A lease may be returned as another one, which
    /// is a view of the server's memory.
    pub into: Vec<Incoming>,
    /// Priority within the lane: the least number goes first, equal ones in order of arrival.
    pub priority: u32,
}

/// A request that was answered.
#[derive(Debug)]
pub struct Finished {
    /// The control message of an answer without entries.
    pub control: Vec<u8>,
    /// The requested entries.
    pub entries: Vec<Entry>,
    /// The round or version of each entry.
    pub versions: Vec<Version>,
    /// The leases that hold values, in the order of the entries.
    pub kept: Vec<Lease>,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Error code, for programs.
    pub code: ErrorCode,
    /// Error text, for people.
    pub text: String,
    /// Ranks that the request waited for.
    pub trainers: Vec<u32>,
}

impl Refused {
    /// A refusal that names no trainers.
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), trainers: Vec::new() }
    }
}

impl From<Refused> for Failure {
    fn from(Refused { code, text, trainers }: Refused) -> Self {
        let end = match code {
            ErrorCode::Deadline if trainers.is_empty() => CallEnd::Timeout,
            ErrorCode::Deadline => CallEnd::MissingTrainers(trainers),
            ErrorCode::NotInitialised | ErrorCode::InitialisationLost => CallEnd::NotInitialised,
            ErrorCode::Invalid | ErrorCode::Fenced | ErrorCode::Busy | ErrorCode::Unauthenticated => {
                return Self::Call(text);
            }
        };
        Self::Ended { end, text }
    }
}

pub(super) struct PendingRequest {
    pub(super) frame: Frame,
    pub(super) priority: u32,
    /// Bytes of its payloads together.
    pub(super) bytes: u64,
    /// The payloads; `None` while the transport has them.
    pub(super) payload: Option<Vec<Outgoing>>,
    into: Vec<Option<Incoming>>,
    /// Receive buffers that the transport has.
    borrowed: usize,
    /// Whether it is in flight; a transmitted payload may still be read.
    pub(super) is_in_flight: bool,
    versions: Vec<Option<Version>>,
    /// Entries without an answer; one for a request without entries.
    missing: usize,
    /// Expected entry of the next answer: answers mostly come in order.
    cursor: usize,
    control: Vec<u8>,
    refused: Option<Refused>,
}

impl PendingRequest {
    pub(super) fn new(frame: Frame, body: RequestBody) -> Self {
        assert!(
            body.into.is_empty() || body.into.len() == frame.entries.len(),
            "there is a place for every entry's value, or for none"
        );
        Self {
            versions: vec![None; frame.entries.len()],
            missing: frame.entries.len().max(1),
            priority: body.priority,
            bytes: frame.payload_bytes(),
            payload: Some(body.payload),
            into: body.into.into_iter().map(Some).collect(),
            borrowed: 0,
            is_in_flight: false,
            frame,
            cursor: 0,
            control: Vec::new(),
            refused: None,
        }
    }

    pub(super) fn ticket(&self) -> Ticket {
        self.frame.head.request
    }

    /// Whether the transport holds no buffer of it.
    pub(super) fn is_returned(&self) -> bool {
        self.payload.is_some() && self.borrowed == 0
    }

    /// Whether it may be sent.
    pub(super) fn may_leave(&self) -> bool {
        self.payload.is_some() && !self.is_over()
    }

    /// Whether it is finished.
    pub(super) fn is_over(&self) -> bool {
        self.is_returned() && (self.missing == 0 || self.refused.is_some())
    }

    pub(super) fn return_payload(&mut self, body: Vec<Outgoing>) {
        self.payload = Some(body);
    }

    /// Records the transmission; true the first time.
    pub(super) fn note_transmitted(&mut self) -> bool {
        std::mem::replace(&mut self.is_in_flight, false)
    }

    pub(super) fn refuse(&mut self, refused: Refused) {
        self.refused.get_or_insert(refused);
    }

    /// Borrows the receive buffer of an entry's value, if it is expected and fits.
    pub(super) fn borrow_buffer(&mut self, entry: &Entry) -> Option<(usize, Incoming)> {
        let index = self.find(entry)?;
        let place = self.into.get_mut(index)?;
        // Both half-precision types have the same length.
        let is_other = self.frame.entries[index].half.is_some_and(|half| half.element_type() != entry.element_type);
        if is_other || place.as_ref().is_none_or(|place| place.len() != entry.bytes) {
            return None;
        }
        self.borrowed += 1;
        place.take().map(|place| (index, place))
    }

    pub(super) fn return_buffer(&mut self, index: usize, place: Incoming) {
        self.into[index] = Some(place);
        self.borrowed -= 1;
    }

    pub(super) fn answer_whole(&mut self, frame: &Frame) {
        self.control.clone_from(&frame.control);
        self.missing = 0;
    }

    /// Handles an acknowledgement, or a discarded value. An entry whose value is expected stays open.
    pub(super) fn answer_entry(&mut self, entry: &Entry) {
        if self.into.is_empty()
            && let Some(index) = self.find(entry)
        {
            self.answer_at(index, entry);
        }
    }

    /// Handles a received value.
    pub(super) fn answer_at(&mut self, index: usize, entry: &Entry) {
        if self.versions[index].is_none() {
            self.versions[index] = Some(Version(entry.round.0));
            self.missing -= 1;
        }
    }

    pub(super) fn finish(self) -> Result<Finished, Refused> {
        match self.refused {
            Some(refused) => Err(refused),
            None => {
                let versions = self.versions.into_iter().flatten().collect();
                let kept = self.into.into_iter().flatten().filter_map(|place| match place {
                    Incoming::Chunk { lease, .. } => Some(lease),
                    Incoming::Loan(_) | Incoming::Discard { .. } => None,
                });
                Ok(Finished { control: self.control, entries: self.frame.entries, versions, kept: kept.collect() })
            }
        }
    }

    /// The unanswered entry of that chunk whose receive buffer is not borrowed.
    fn find(&mut self, entry: &Entry) -> Option<usize> {
        let count = self.frame.entries.len();
        let is_open = |at: &usize| {
            self.frame.entries[*at].id == entry.id
                && self.versions[*at].is_none()
                && self.into.get(*at).is_none_or(Option::is_some)
        };
        let index = (self.cursor..count).chain(0..self.cursor).find(is_open)?;
        self.cursor = index;
        Some(index)
    }
}
