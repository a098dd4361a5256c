//! A request: its frame, its receive buffers and its progress.

use smallvec::SmallVec;

use crate::checksum::{checksum, join};
use crate::error::{CallEnd, Failure};
use crate::ids::{Ticket, Version};
use crate::memory::Lease;
use crate::port::{Incoming, Payloads, ReceiveBuffers};
use crate::wire::{Entries, Entry, ErrorCode, Frame};

/// The buffers of a request.
#[derive(Default)]
pub struct RequestBody {
    /// The payloads of the frame's entries, in their order.
    pub payload: Payloads,
    /// Receive buffers of the entries' values, one each, or none at all. A lease may be returned as another one, which
    /// is a view of the server's memory.
    pub into: ReceiveBuffers,
    /// Whether [`Finished::sums`] has the checksums of the values.
    pub sums: bool,
    /// Priority within the lane: the least number goes first, equal ones in order of arrival.
    pub priority: u32,
}

/// The CRC32C of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ValueSum {
    /// The checksum.
    pub sum: u32,
    /// The value's length.
    pub bytes: u64,
}

impl ValueSum {
    /// Of this value and of the one after it, as one.
    #[must_use]
    pub fn followed_by(self, next: Self) -> Self {
        Self { sum: join(self.sum, next.sum, next.bytes), bytes: self.bytes + next.bytes }
    }
}

/// A request that was answered.
#[derive(Debug)]
pub struct Finished {
    /// The control message of an answer without entries.
    pub control: Vec<u8>,
    /// The requested entries.
    pub entries: Entries,
    /// The round or version of each entry.
    pub versions: SmallVec<[Version; 1]>,
    /// The leases that hold values, in the order of the entries.
    pub kept: Vec<Lease>,
    /// Of each entry, where that was wanted.
    pub sums: Vec<ValueSum>,
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
            ErrorCode::Invalid
            | ErrorCode::Fenced
            | ErrorCode::Busy
            | ErrorCode::Unauthenticated
            | ErrorCode::Moved => return Self::Call(text),
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
    pub(super) payload: Option<Payloads>,
    places: ReceivePlaces,
    /// Whether a server of this connection was busy: parts of its answer to the request as it was sent before may come.
    pub(super) was_busy: bool,
    /// Whether it is in flight; a transmitted payload may still be read.
    pub(super) is_in_flight: bool,
    versions: SmallVec<[Option<Version>; 1]>,
    /// Entries without an answer; one for a request without entries.
    missing: usize,
    /// Expected entry of the next answer: answers mostly come in order.
    cursor: usize,
    control: Vec<u8>,
    refused: Option<Refused>,
}

/// The receive buffers of a request, in the order of its entries.
struct ReceivePlaces {
    into: SmallVec<[Option<Incoming>; 1]>,
    /// The sum of each value that has come, if that is wanted.
    sums: Vec<ValueSum>,
    /// How many the transport has.
    borrowed: usize,
}

impl PendingRequest {
    pub(super) fn new(frame: Frame, body: RequestBody) -> Self {
        assert!(
            body.into.is_empty() || body.into.len() == frame.entries.len(),
            "there is a place for every entry's value, or for none"
        );
        let summed = body.into.iter().filter(|_| body.sums);
        let sums = summed.map(|place| ValueSum { sum: 0, bytes: place.len().into() }).collect();
        Self {
            places: ReceivePlaces { sums, into: body.into.into_iter().map(Some).collect(), borrowed: 0 },
            versions: SmallVec::from_elem(None, frame.entries.len()),
            missing: frame.entries.len().max(1),
            priority: body.priority,
            bytes: frame.payload_bytes(),
            payload: Some(body.payload),
            was_busy: false,
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
        self.payload.is_some() && self.places.borrowed == 0
    }

    /// Whether it may be sent.
    pub(super) fn may_leave(&self) -> bool {
        self.payload.is_some() && !self.is_over()
    }

    /// Whether it is finished.
    pub(super) fn is_over(&self) -> bool {
        self.is_returned() && (self.missing == 0 || self.refused.is_some())
    }

    pub(super) fn return_payload(&mut self, body: Payloads) {
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
        let index = self.find(entry, Self::is_open)?;
        let place = self.places.into.get_mut(index)?;
        // Both half-precision types have the same length.
        let is_other = self.frame.entries[index].half.is_some_and(|half| half.element_type() != entry.element_type);
        if is_other || place.as_ref().is_none_or(|place| place.len() != entry.bytes) {
            return None;
        }
        self.places.borrowed += 1;
        place.take().map(|place| (index, place))
    }

    /// The receive buffers of the answer, if the connection takes them with the request. Buffers of answered entries,
    /// which a lost connection has left, are not filled again.
    pub(super) fn post_answer(&mut self, takes_answers: bool) -> Option<ReceiveBuffers> {
        let ReceivePlaces { into, borrowed, .. } = &mut self.places;
        let is_whole = *borrowed == 0 && self.missing == self.frame.entries.len();
        let may = takes_answers && !self.was_busy && !into.is_empty() && is_whole;
        // A call about other memory ends without its connection when it is cancelled.
        let may = may && into.iter().flatten().all(Incoming::is_registered);
        may.then(|| {
            *borrowed = into.len();
            into.iter_mut().filter_map(Option::take).collect()
        })
    }

    /// Returns a buffer that an answer has filled; the entry that it answers. A value of another half-precision type
    /// than the entry's is none.
    pub(super) fn return_answer(&mut self, entry: &Entry, place: Incoming) -> Option<usize> {
        if matches!(place, Incoming::Discard { .. }) {
            return None;
        }
        let index = self.find(entry, |request, at| request.places.into[at].is_none())?;
        self.return_buffer(index, place);
        let half = self.frame.entries[index].half;
        half.is_none_or(|half| half.element_type() == entry.element_type).then_some(index)
    }

    /// Returns the buffers of the answer that no value has filled, in order.
    pub(super) fn return_unused(&mut self, into: ReceiveBuffers) {
        self.places.borrowed -= into.len();
        let posted = self.places.into.iter_mut().filter(|place| place.is_none());
        posted.zip(into).for_each(|(place, buffer)| *place = Some(buffer));
    }

    pub(super) fn return_buffer(&mut self, index: usize, place: Incoming) {
        self.places.into[index] = Some(place);
        self.places.borrowed -= 1;
    }

    pub(super) fn answer_whole(&mut self, frame: &Frame) {
        self.control.clone_from(&frame.control);
        self.missing = 0;
    }

    /// Handles an acknowledgement, or a discarded value. An entry whose value is expected stays open.
    pub(super) fn answer_entry(&mut self, entry: &Entry) {
        if self.places.into.is_empty()
            && let Some(index) = self.find(entry, Self::is_open)
        {
            self.answer_at(index, entry);
        }
    }

    /// Handles a received value.
    pub(super) fn answer_at(&mut self, index: usize, entry: &Entry) {
        if self.versions[index].is_none() {
            self.versions[index] = Some(Version(entry.round.0));
            self.missing -= 1;
            if let Some(summed) = self.places.sums.get_mut(index) {
                summed.sum = self.places.into[index].as_ref().map_or(0, |place| checksum(place.bytes()));
            }
        }
    }

    pub(super) fn finish(self) -> Result<Finished, Refused> {
        match self.refused {
            Some(refused) => Err(refused),
            None => {
                let versions = self.versions.into_iter().flatten().collect();
                let kept = self.places.into.into_iter().flatten().filter_map(|place| match place {
                    Incoming::Chunk { lease, .. } => Some(lease),
                    Incoming::Loan(_) | Incoming::Discard { .. } => None,
                });
                let (control, entries) = (self.control, self.frame.entries);
                Ok(Finished { control, entries, versions, kept: kept.collect(), sums: self.places.sums })
            }
        }
    }

    /// Whether an entry is unanswered, and its receive buffer not borrowed.
    fn is_open(&self, at: usize) -> bool {
        self.versions[at].is_none() && self.places.into.get(at).is_none_or(Option::is_some)
    }

    /// The next matching entry of that chunk.
    fn find(&mut self, entry: &Entry, is_match: impl Fn(&Self, usize) -> bool) -> Option<usize> {
        let count = self.frame.entries.len();
        let found = |at: &usize| self.frame.entries[*at].id == entry.id && is_match(self, *at);
        let index = (self.cursor..count).chain(0..self.cursor).find(found)?;
        self.cursor = index;
        Some(index)
    }
}
