//! Packs chunks into frames. Small chunks of one lane share a frame.

use std::collections::BTreeMap;

use pserver_core::client::{LaneId, RequestBody};
use pserver_core::ids::{ParameterIndex, Sequence};
use pserver_core::port::{Incoming, Outgoing, Payloads, ReceiveBuffers};
use pserver_core::wire::{Entries, Entry, Flags, Frame, Head, Kind};
use smallvec::SmallVec;

/// Bytes up to which chunks share a frame. A server reads, applies and answers it as a whole, so longer frames would
/// delay those behind it.
const SHARED_BYTES_MAX: u32 = 256 * 1024;

/// Chunks that the open frames of all lanes have before they leave: servers work on them while the rest is packed.
const OPEN_ENTRIES_MAX: usize = 2048;
/// Chunks that a frame has at least before it leaves for that reason: frames have costs of their own.
const LEAVING_ENTRIES_MIN: usize = 256;

/// Makes the frames of one call.
pub(super) struct Packer {
    kind: Kind,
    flags: Flags,
    control: Vec<u8>,
    /// Control messages of parameters that have their own.
    controls: BTreeMap<ParameterIndex, Vec<u8>>,
    /// Whether values come back.
    fetches: bool,
    /// Whether values are summed.
    sums: bool,
    bytes_max: u32,
    entries_max: usize,
    /// Chunks that are still to come.
    expected: usize,
    /// The frames that are not full, of each lane at most one.
    open: SmallVec<[(LaneId, PackedFrame); 1]>,
}

/// A frame with its parcels.
pub(super) struct PackedFrame {
    pub(super) frame: Frame,
    pub(super) body: RequestBody,
    /// Bytes on their way in either direction.
    bytes: u32,
}

/// One chunk of a call: an entry, what leaves with it, and where its value goes.
pub(super) struct ChunkPiece {
    pub(super) entry: Entry,
    pub(super) payload: Option<Outgoing>,
    pub(super) into: Option<Incoming>,
    /// The call's number for servers.
    pub(super) sequence: Sequence,
}

impl Packer {
    /// A packer for chunks of at most `chunk_bytes` on so many lanes; about so many chunks are expected.
    pub(super) fn new(kind: Kind, chunk_bytes: u32, lanes: usize, expected: usize) -> Self {
        let bytes_max = Self::shared_bytes_max(chunk_bytes);
        let (flags, fetches) = (Flags::default(), kind == Kind::Pull);
        Self {
            kind,
            flags,
            control: Vec::new(),
            controls: BTreeMap::new(),
            fetches,
            sums: false,
            bytes_max,
            entries_max: (OPEN_ENTRIES_MAX / lanes.max(1)).max(LEAVING_ENTRIES_MIN),
            expected,
            open: SmallVec::new(),
        }
    }

    /// The bytes up to which chunks share a frame.
    pub(super) fn shared_bytes_max(chunk_bytes: u32) -> u32 {
        chunk_bytes.min(SHARED_BYTES_MAX)
    }

    /// Frames that ask for the value back, and that bring this control message.
    pub(super) fn with(mut self, flags: Flags, control: Vec<u8>) -> Self {
        (self.flags, self.control) = (flags, control);
        self.fetches |= flags.contains(Flags::WANT_VALUE);
        self
    }

    /// Frames whose chunks of these parameters bring control messages of their own.
    pub(super) fn with_controls(self, controls: BTreeMap<ParameterIndex, Vec<u8>>) -> Self {
        Self { controls, ..self }
    }

    /// Frames of which the values are summed, if so.
    pub(super) fn summed(self, sums: bool) -> Self {
        Self { sums, ..self }
    }

    /// Frames that request no values.
    pub(super) fn without_values(mut self) -> Self {
        self.fetches = false;
        self
    }

    /// Adds a chunk to its lane's frame. When it does not fit, that frame is full and is given out.
    #[inline]
    pub(super) fn add(&mut self, lane: LaneId, piece: ChunkPiece) -> Option<PackedFrame> {
        let bytes = piece.entry.bytes.max(piece.into.as_ref().map_or(0, Incoming::len));
        let mut full = None;
        let parameter = piece.entry.id.parameter;
        let at = self.open.binary_search_by_key(&lane, |(one, _)| *one).unwrap_or_else(|at| {
            self.open.insert(at, (lane, self.begin(bytes, parameter, piece.sequence)));
            at
        });
        let open = &self.open[at].1;
        let is_full = open.bytes.saturating_add(bytes) > self.bytes_max
            || open.frame.entries.len() >= self.entries_max
            || open.frame.head.sequence != piece.sequence
            || (!self.controls.is_empty() && open.frame.control != *self.control_of(parameter));
        if is_full && !open.frame.entries.is_empty() {
            let next = self.begin(bytes, parameter, piece.sequence);
            full = Some(std::mem::replace(&mut self.open[at].1, next));
        }
        self.expected = self.expected.saturating_sub(1);
        let PackedFrame { frame, body, bytes: total } = &mut self.open[at].1;
        *total = total.saturating_add(bytes);
        // Parameters are declared in the order in which a forward pass needs them.
        body.priority = body.priority.min(piece.entry.id.parameter.0);
        frame.entries.push(piece.entry);
        body.payload.extend(piece.payload);
        body.into.extend(piece.into);
        full
    }

    /// The frames that are left.
    pub(super) fn rest(self) -> impl Iterator<Item = (LaneId, PackedFrame)> {
        self.open.into_iter()
    }

    fn control_of(&self, parameter: ParameterIndex) -> &Vec<u8> {
        self.controls.get(&parameter).unwrap_or(&self.control)
    }

    /// A frame for chunks of about so many bytes.
    fn begin(&self, bytes: u32, parameter: ParameterIndex, sequence: Sequence) -> PackedFrame {
        let fitting = (self.bytes_max / bytes.max(1)).max(1) as usize;
        let room = fitting.min(self.entries_max).min(self.expected.max(1));
        let head = Head { flags: self.flags, sequence, ..Head::new(self.kind) };
        let brings = if self.kind == Kind::Pull { 0 } else { room };
        let fetches = if self.fetches { room } else { 0 };
        let (payload, into) = (Payloads::with_capacity(brings), ReceiveBuffers::with_capacity(fetches));
        let body = RequestBody { payload, into, sums: self.sums, priority: u32::MAX };
        let frame = Frame { head, entries: Entries::with_capacity(room), control: self.control_of(parameter).clone() };
        PackedFrame { frame, body, bytes: 0 }
    }
}

impl PackedFrame {
    /// A frame that is complete.
    pub(super) fn new(frame: Frame, body: RequestBody) -> Self {
        Self { frame, body, bytes: 0 }
    }
}
