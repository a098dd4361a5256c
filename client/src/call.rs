//! A call in progress, as data.
//!
//! Not here: the order and the end of calls (`calls`).

use std::ops::Range;
use std::sync::Arc;
use std::thread::Thread;
use std::time::Duration;

use pserver_core::client::{LaneId, ValueSum};
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, Sequence, Ticket, Version};
use pserver_core::memory::{Lease, Mapping};
use pserver_core::time::Now;
use pserver_core::wire::Kind;
use smallvec::SmallVec;

use super::TransferredBytes;
use super::buffers::HeldBuffers;
use super::cancels::CallStart;
use super::packer::PackedFrame;
use super::row_memory::RowMemory;

/// The parameters of a call. Few need no allocation.
pub(super) type ParameterIndexes = SmallVec<[ParameterIndex; 4]>;

/// Longest time before a call's deadline at which servers are asked what it waits for.
const ASK_BEFORE: Duration = Duration::from_secs(1);

/// Number of a call, unique within a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallNumber(pub(super) u64);

/// A call whose result is not taken.
pub(super) struct Call {
    pub(super) number: CallNumber,
    pub(super) began: CallStart,
    pub(super) subject: CallSubject,
    pub(super) requests: CallRequests,
    pub(super) deadline: CallDeadline,
    pub(super) outcome: CallOutcome,
    /// Payload bytes to and from the servers.
    pub(super) moved: TransferredBytes,
    /// Registered buffers of its gradients and destinations, until it is over.
    pub(super) buffers: Vec<Arc<Mapping>>,
    /// All buffers that it reads or writes, until its result is taken.
    pub(super) memory: HeldBuffers,
    /// The memory of its rows, until it is over.
    pub(super) rows: Option<RowMemory>,
    /// Whether the driver thread drives it after the starting thread released the lock.
    pub(super) is_detached: bool,
    /// Parked threads that wait for its end.
    pub(super) waiters: Vec<Thread>,
}

/// The subject of a call: parameters, or for a control call a description.
pub(super) struct CallSubject {
    pub(super) kind: Kind,
    /// Description of a control call, for errors.
    pub(super) what: String,
    pub(super) parameters: ParameterIndexes,
    /// The number by which servers recognise a repetition; zero for pulls.
    pub(super) sequence: Sequence,
    /// Whether a repetition after a failure has the same number.
    pub(super) is_repeated_alike: bool,
}

/// The requests of a call, and the calls before it.
#[derive(Default)]
pub(super) struct CallRequests {
    /// Earlier calls about the same parameters, which must be answered first.
    pub(super) behind: Vec<CallNumber>,
    /// Frames held until those calls are answered. Without such calls no frame is held.
    pub(super) held: Vec<(LaneId, PackedFrame)>,
    /// Frames of the second phase, which leave when those before are answered.
    pub(super) after: Vec<(LaneId, PackedFrame)>,
    /// Tickets of its requests of one phase, which are consecutive.
    pub(super) tickets: Range<u64>,
    /// Requests that are not answered.
    pub(super) open: usize,
    /// Whether all frames are packed.
    pub(super) is_whole: bool,
}

/// The times of a call.
pub(super) struct CallDeadline {
    /// Start of the call.
    pub(super) opened: Now,
    pub(super) end: Now,
    pub(super) limit: Duration,
    /// Whether servers were asked what the call waits for.
    pub(super) has_asked: bool,
}

/// The answers to a call, or its failure.
#[derive(Default)]
pub(super) struct CallOutcome {
    pub(super) failure: Option<Failure>,
    /// Versions of chunks, of which the rounds of parameters follow: of those without a known round, and of pushed ones
    /// whose rounds were complete before.
    pub(super) seen: Vec<(ParameterIndex, ChunkIndex, Round)>,
    /// The highest version among its answers.
    pub(super) latest: Version,
    /// The lowest version among its answers.
    pub(super) earliest: Option<Version>,
    /// Received chunks of a view.
    pub(super) kept: Vec<ViewChunk>,
    /// The checksums of values, where that is wanted.
    pub(super) sums: Vec<(ChunkId, ValueSum)>,
    /// The answer to a control call.
    pub(super) answer: Vec<u8>,
}

/// A received chunk of a view.
pub(super) struct ViewChunk {
    pub(super) parameter: ParameterIndex,
    pub(super) chunk: ChunkIndex,
    pub(super) lease: Lease,
}

impl Call {
    pub(super) fn new(number: CallNumber, subject: CallSubject, deadline: CallDeadline) -> Self {
        Self {
            number,
            began: CallStart::now(),
            subject,
            requests: CallRequests::default(),
            deadline,
            outcome: CallOutcome::default(),
            moved: TransferredBytes::default(),
            buffers: Vec::new(),
            memory: HeldBuffers::default(),
            rows: None,
            is_detached: false,
            waiters: Vec::new(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.requests.is_whole && self.requests.is_answered() && self.requests.after.is_empty()
    }

    /// Whether it is neither over nor about to end with a failure.
    pub(super) fn is_pending(&self) -> bool {
        self.outcome.failure.is_none() && !self.is_over()
    }
}

impl CallRequests {
    /// Records a request, which was asked right after the one before.
    pub(super) fn note_asked(&mut self, Ticket(ticket): Ticket) {
        if self.tickets.is_empty() {
            self.tickets = ticket..ticket;
        }
        assert_eq!(self.tickets.end, ticket, "nothing is asked between the frames of a call");
        self.tickets.end += 1;
        self.open += 1;
    }

    /// Whether every frame of the current phase is answered.
    pub(super) fn is_answered(&self) -> bool {
        self.open == 0 && self.held.is_empty()
    }

    /// Drops the frames that were not sent.
    pub(super) fn drop_held(&mut self) {
        self.held.clear();
        self.after.clear();
        self.behind.clear();
    }

    pub(super) fn tickets(&self) -> Vec<Ticket> {
        self.tickets.clone().map(Ticket).collect()
    }
}

impl CallDeadline {
    /// A call that was opened at a time, ends at another, and was given `limit`.
    pub(super) fn new(opened: Now, (end, limit): (Now, Duration)) -> Self {
        Self { opened, end, limit, has_asked: false }
    }

    /// Time until the next deadline action: first the request that asks servers what the call waits for, early enough
    /// for an answer, then the end of the call.
    pub(super) fn due(&self, now: Now) -> Duration {
        let left = now.until(self.end);
        if self.has_asked { left } else { left.saturating_sub((self.limit / 10).min(ASK_BEFORE)) }
    }
}
