//! Fixed header of a frame: its kinds and flags, its layout on the wire and the checks of every field.

use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::checksum;
use crate::ids::{Epoch, Generation, Incarnation, Sequence, Term, Ticket, TrainerId};
use crate::limits::{FRAME_CONTROL_BYTES_MAX, FRAME_ENTRIES_MAX, HELLO_CONTROL_BYTES_MAX};

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 64;
/// The version this code speaks, and the only one it accepts.
pub const WIRE_VERSION: u8 = 2;
const MAGIC: u32 = u32::from_le_bytes(*b"PSRV");
/// The bytes that the header's own checksum covers.
pub(super) const CHECKED_BYTES: usize = HEADER_BYTES - 4;

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES, "the header is drawn with 64 bytes");

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The first frame of a connection; its sequence field holds the lane (0 coordinator, k + 1 shard k).
    Hello = 1,
    /// The answer to a hello that was accepted.
    Welcome = 2,
    /// The answer to a hello or a frame that ends the connection; the control message is an `ErrorMessage`.
    Refused = 3,
    /// A question to the coordinator.
    Control = 4,
    /// The coordinator's answer.
    Answer = 5,
    /// Chunks of one parameter at initialisation, with its declaration.
    Init = 6,
    /// The initialiser has sent everything.
    Finish = 7,
    /// Gradients or deltas.
    Push = 8,
    /// A request for values.
    Pull = 9,
    /// Values that replace the server's.
    Set = 10,
    /// An acknowledgement; entries carry the round or version reached.
    Done = 11,
    /// Values: entries carry the version of each.
    Value = 12,
    /// One request was refused; the connection stays usable.
    Error = 13,
    /// A trainer departs: no round waits for it.
    Leave = 14,
    /// A transport's offer of verbs on a connection over TCP, the answer, or the switch. No session sees one.
    Offer = 15,
    /// Rounds that a shard has decided, in its journal. No connection carries one.
    Rounds = 16,
}

impl Kind {
    const ALL: [Self; 16] = [
        Self::Hello,
        Self::Welcome,
        Self::Refused,
        Self::Control,
        Self::Answer,
        Self::Init,
        Self::Finish,
        Self::Push,
        Self::Pull,
        Self::Set,
        Self::Done,
        Self::Value,
        Self::Error,
        Self::Leave,
        Self::Offer,
        Self::Rounds,
    ];

    /// The kind with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether a frame of this kind may have entries, and payloads with them.
    #[must_use]
    pub fn has_entries(self) -> bool {
        matches!(self, Self::Init | Self::Push | Self::Pull | Self::Set | Self::Done | Self::Value | Self::Rounds)
    }

    /// Whether a frame of this kind changes a shard, and so is journalled before it is applied.
    #[must_use]
    pub fn is_mutating(self) -> bool {
        matches!(self, Self::Init | Self::Finish | Self::Push | Self::Set | Self::Leave)
    }
}

/// Flags of a header, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// On a push: answer with the value once the gradient is in it (`push_pull`).
    pub const WANT_VALUE: Self = Self(1);
    /// The payloads have no checksums, because both ends are on one host. Set by transports.
    pub const UNCHECKED: Self = Self(2);
    /// On a pull of buckets: answer with the ids of existing rows instead of values.
    pub const LIST: Self = Self(4);
    /// On a pull and a set: of the optimizer's states, as the [`StateMessage`](super::StateMessage) says.
    pub const STATE: Self = Self(8);
    /// The sender wants checksums in payloads of this connection, whether or not both ends are on one host. Set by
    /// transports.
    pub const WANT_CHECKS: Self = Self(16);
    /// On a pull: the value that the updates of the trainer's gradients made, which a push with
    /// [`WANT_VALUE`](Self::WANT_VALUE) would have brought: with all of them in it, and in rounds of several trainers
    /// without what was set since, unless the server has come back since then without a journal.
    pub const OF_STEP: Self = Self(32);
    /// Destinations of the answer's values follow the control message: 16 bytes for each entry. Set by transports, over
    /// verbs only.
    pub const NAMED: Self = Self(64);
    /// On a push: no element of its payloads is NaN or infinite, if they are floats. The receiving transport sets the
    /// flag when it has read the payloads anyway. [`Frame::encode`](super::Frame::encode) never sends it.
    pub const FINITE: Self = Self(1 << 15);
    const KNOWN: u16 = 127;

    /// Whether every bit of `other` is set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These bits and those of `other`.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These bits but for those of `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The fields of a header that a session reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Kind of the frame.
    pub kind: Kind,
    /// Bits.
    pub flags: Flags,
    /// The job's epoch; zero in a hello of a process that does not know it yet.
    pub epoch: Epoch,
    /// The trainer that sends the frame, or receives the answer.
    pub trainer: TrainerId,
    /// The incarnation of that trainer.
    pub incarnation: Incarnation,
    /// The number of a mutating call; in a hello the lane.
    pub sequence: Sequence,
    /// The request's number, returned in its answers.
    pub request: Ticket,
    /// The initialisation that the sender believes in.
    pub generation: Generation,
    /// The term of the shard's leader; in a hello as the sender knows it. Zero to and from the coordinator.
    pub term: Term,
}

impl Head {
    /// A header of `kind` with all other fields zero.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: Flags::default(),
            epoch: Epoch(0),
            trainer: TrainerId(0),
            incarnation: Incarnation(0),
            sequence: Sequence(0),
            request: Ticket(0),
            generation: Generation(0),
            term: Term(0),
        }
    }

    /// The header of an answer of `kind` to this frame: the same job, trainer, sequence and request.
    #[must_use]
    pub fn answer(&self, kind: Kind) -> Self {
        Self { kind, flags: Flags::default(), ..*self }
    }
}

/// The first four bytes as text, if they are printable: the peer then speaks another program's protocol.
fn as_text(found: u32) -> String {
    let bytes = found.to_le_bytes();
    match bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        true => format!(" (\"{}\", another program's protocol)", bytes.escape_ascii()),
        false => String::new(),
    }
}

/// Fault of a frame. Every fault ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The first four bytes are not the protocol's.
    #[error("not a pserver frame: it begins with {found:#010x}{}, expected {MAGIC:#010x} (\"PSRV\")", as_text(*found))]
    Magic {
        /// The number found.
        found: u32,
    },
    /// Another protocol version.
    #[error("protocol version {found} is not supported; this side speaks version {WIRE_VERSION}")]
    Version {
        /// The version found.
        found: u8,
    },
    /// A kind, flag or reserved field without a meaning.
    #[error("{field} {found} has no meaning in protocol version {WIRE_VERSION}")]
    Unknown {
        /// The field.
        field: &'static str,
        /// The number found.
        found: u64,
    },
    /// A length over its bound.
    #[error("{what} {found} is over the limit of {limit}")]
    TooLong {
        /// The field.
        what: &'static str,
        /// The length claimed.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Payloads without checksums, where the receiver requires them.
    #[error("payloads without checksums; this side checks always and expects one in every entry")]
    Unchecked,
    /// A checksum that differs from the bytes'.
    #[error("checksum of the {part} is {found:#010x}, expected {expected:#010x}: the bytes were changed on the way")]
    Checksum {
        /// Which part.
        part: &'static str,
        /// As computed.
        found: u32,
        /// As sent.
        expected: u32,
    },
}

/// Writes the header of `head` followed by `rest`, which holds `entries` entries and `control` bytes after them.
pub(super) fn encode(head: &Head, entries: u32, control: u32, rest: &[u8]) -> [u8; HEADER_BYTES] {
    let mut raw = RawHeader {
        magic: MAGIC.into(),
        version: WIRE_VERSION,
        kind: head.kind as u8,
        flags: (head.flags.0 & Flags::KNOWN).into(),
        epoch: head.epoch.0.into(),
        trainer: head.trainer.0.into(),
        incarnation: head.incarnation.0.into(),
        sequence: head.sequence.0.into(),
        request: head.request.0.into(),
        generation: head.generation.0.into(),
        entries: entries.into(),
        control: control.into(),
        term: head.term.0.into(),
        rest_checksum: checksum(rest).into(),
        header_checksum: 0.into(),
    };
    raw.header_checksum = checksum(&raw.as_bytes()[..CHECKED_BYTES]).into();
    let mut bytes = [0; HEADER_BYTES];
    bytes.copy_from_slice(raw.as_bytes());
    bytes
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
// tidy: allow fields: the layout on the wire.
pub(super) struct RawHeader {
    magic: U32,
    version: u8,
    kind: u8,
    flags: U16,
    epoch: U64,
    trainer: U32,
    incarnation: U32,
    sequence: U64,
    request: U64,
    generation: U32,
    pub(super) entries: U32,
    pub(super) control: U32,
    term: U32,
    pub(super) rest_checksum: U32,
    pub(super) header_checksum: U32,
}

impl RawHeader {
    pub(super) fn check_origin(&self) -> Result<(), WireError> {
        if self.magic.get() != MAGIC {
            return Err(WireError::Magic { found: self.magic.get() });
        }
        if self.version != WIRE_VERSION {
            return Err(WireError::Version { found: self.version });
        }
        Ok(())
    }

    pub(super) fn head(&self) -> Result<Head, WireError> {
        let unknown = |field, found| WireError::Unknown { field, found };
        let kind = Kind::from_number(self.kind).ok_or_else(|| unknown("kind", self.kind.into()))?;
        let flags = self.flags.get();
        if flags & !Flags::KNOWN != 0 {
            return Err(unknown("flags", flags.into()));
        }
        Ok(Head {
            kind,
            flags: Flags(flags),
            epoch: Epoch(self.epoch.get()),
            trainer: TrainerId(self.trainer.get()),
            incarnation: Incarnation(self.incarnation.get()),
            sequence: Sequence(self.sequence.get()),
            request: Ticket(self.request.get()),
            generation: Generation(self.generation.get()),
            term: Term(self.term.get()),
        })
    }

    pub(super) fn check_bounds(&self, kind: Kind) -> Result<(), WireError> {
        let entries_max = if kind.has_entries() { FRAME_ENTRIES_MAX } else { 0 };
        bound("the number of entries", self.entries.get(), entries_max)?;
        let control_max = if kind == Kind::Hello { HELLO_CONTROL_BYTES_MAX } else { FRAME_CONTROL_BYTES_MAX };
        bound("the control message's length", self.control.get(), control_max)
    }
}

fn bound(what: &'static str, found: u32, limit: u32) -> Result<(), WireError> {
    if found <= limit {
        return Ok(());
    }
    Err(WireError::TooLong { what, found: found.into(), limit: limit.into() })
}
