//! Frames and their entries.

use smallvec::SmallVec;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{self, Flags, HEADER_BYTES, Head, Kind, WireError};
use crate::dtype::{ElementType, Half};
use crate::ids::{ChunkId, ChunkIndex, ParameterIndex, Round};
use crate::limits::{CHUNK_BYTES_MAX, FRAME_CONTROL_BYTES_MAX, FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX};

/// One chunk in a frame: its identifier, its round or version, and the length of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The chunk.
    pub id: ChunkId,
    /// On a push: the gradient's round. On a pull: the least version wanted. In an answer: the version reached.
    pub round: Round,
    /// Payload bytes of this entry; zero where the frame has none for it.
    pub bytes: u32,
    /// CRC32C of the payload bytes. Sessions leave it zero; a transport that checks payloads computes it on sending.
    pub checksum: u32,
    /// The type of the payload's elements.
    pub element_type: ElementType,
    /// On a frame that requests values: the half-precision type of the answer, if it is not the parameter's own type.
    pub half: Option<Half>,
}

impl Entry {
    /// Bytes of an entry on the wire.
    pub const BYTES: usize = size_of::<RawEntry>();

    /// An entry without a payload.
    #[must_use]
    pub fn bare(id: ChunkId, round: Round, element_type: ElementType) -> Self {
        Self { id, round, bytes: 0, checksum: 0, element_type, half: None }
    }

    /// An entry with a payload.
    ///
    /// # Panics
    /// When the payload is longer than a chunk may be: the partition of parameters keeps that limit.
    #[must_use]
    pub fn with_payload(id: ChunkId, round: Round, element_type: ElementType, payload: &[u8]) -> Self {
        let bytes = u32::try_from(payload.len()).expect("a chunk's length is 32 bits");
        Self { id, round, bytes, checksum: 0, element_type, half: None }
    }

    fn encode(&self, into: &mut Vec<u8>) {
        let raw = RawEntry {
            chunk: self.id.chunk.0.into(),
            round: self.round.0.into(),
            parameter: self.id.parameter.0.into(),
            bytes: self.bytes.into(),
            checksum: self.checksum.into(),
            element_type: self.element_type.number(),
            half: self.half.map_or(0, Half::number),
            reserved: 0.into(),
        };
        into.extend_from_slice(raw.as_bytes());
    }

    fn decode(head: &Head, raw: &RawEntry) -> Result<Self, WireError> {
        let element_type = ElementType::from_number(raw.element_type.into())
            .ok_or(WireError::Unknown { field: "element type", found: raw.element_type.into() })?;
        let half = half_of(head, raw.half)?;
        if raw.reserved.get() != 0 {
            return Err(WireError::Unknown { field: "an entry's reserved field", found: raw.reserved.get().into() });
        }
        if raw.bytes.get() > CHUNK_BYTES_MAX {
            return Err(WireError::TooLong {
                what: "an entry's payload",
                found: raw.bytes.get().into(),
                limit: CHUNK_BYTES_MAX.into(),
            });
        }
        Ok(Self {
            id: ChunkId { parameter: ParameterIndex(raw.parameter.get()), chunk: ChunkIndex(raw.chunk.get()) },
            round: Round(raw.round.get()),
            bytes: raw.bytes.get(),
            checksum: raw.checksum.get(),
            element_type,
            half,
        })
    }
}

/// The entries of a frame. Most frames have one, which needs no allocation.
pub type Entries = SmallVec<[Entry; 1]>;

/// A checked frame without its payloads, which travel beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The header's fields.
    pub head: Head,
    /// The chunks, in the order of their payloads.
    pub entries: Entries,
    /// The control message, encoded.
    pub control: Vec<u8>,
}

impl Frame {
    /// A frame with neither entries nor control message.
    #[must_use]
    pub fn bare(head: Head) -> Self {
        Self { head, entries: Entries::new(), control: Vec::new() }
    }

    /// A frame with a control message only.
    #[must_use]
    pub fn with_control(head: Head, message: &impl prost::Message) -> Self {
        Self { head, entries: Entries::new(), control: message.encode_to_vec() }
    }

    /// Payload bytes of all entries together.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.bytes)).sum()
    }

    /// Header, entries and control message as they go on the wire; the payloads follow in the entries' order.
    ///
    /// # Panics
    /// When the frame exceeds a bound of `limits`: its builders check them.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.entries.len() * Entry::BYTES + self.control.len());
        self.encode_into(&mut bytes);
        bytes
    }

    /// As [`Frame::encode`], into `bytes`, whose content is replaced and whose memory is reused.
    ///
    /// # Panics
    /// As [`Frame::encode`].
    pub fn encode_into(&self, bytes: &mut Vec<u8>) {
        let entries = u32::try_from(self.entries.len()).expect("entries are bounded");
        let control = u32::try_from(self.control.len()).expect("the control message is bounded");
        assert!(entries <= FRAME_ENTRIES_MAX, "{entries} entries in one frame");
        assert!(control <= FRAME_CONTROL_BYTES_MAX, "{control} bytes of control message in one frame");
        assert!(self.payload_bytes() <= FRAME_PAYLOAD_BYTES_MAX.into(), "payload over the bound");
        bytes.clear();
        bytes.resize(HEADER_BYTES, 0);
        for entry in &self.entries {
            entry.encode(bytes);
        }
        bytes.extend_from_slice(&self.control);
        let (header, rest) = bytes.split_at_mut(HEADER_BYTES);
        header.copy_from_slice(&header::encode(&self.head, entries, control, rest));
    }

    pub(super) fn from_parts(head: Head, entries: u32, rest: &[u8]) -> Result<Self, WireError> {
        let (table, control) = rest.split_at(entries as usize * Entry::BYTES);
        let raw = <[RawEntry]>::ref_from_bytes(table).expect("the table is a whole number of unaligned entries");
        let mut entries = Entries::with_capacity(raw.len());
        for raw in raw {
            entries.push(Entry::decode(&head, raw)?);
        }
        let frame = Self { head, entries, control: control.to_vec() };
        let (found, limit) = (frame.payload_bytes(), u64::from(FRAME_PAYLOAD_BYTES_MAX));
        if found > limit {
            return Err(WireError::TooLong { what: "the payload", found, limit });
        }
        Ok(frame)
    }

    /// Compares `found`, the checksum of the payload of entry `index` as it arrived, with the one that was sent.
    ///
    /// # Errors
    /// When the bytes were changed on the way.
    pub fn check_payload(&self, index: usize, found: u32) -> Result<(), WireError> {
        let expected = self.entries[index].checksum;
        if found == expected {
            return Ok(());
        }
        Err(WireError::Checksum { part: "payload", found, expected })
    }
}

/// The half-precision type that an entry requests, which only a frame that requests values may.
fn half_of(head: &Head, number: u8) -> Result<Option<Half>, WireError> {
    if number == 0 {
        return Ok(None);
    }
    let asks = match head.kind {
        Kind::Push => head.flags.contains(Flags::WANT_VALUE),
        Kind::Pull => !head.flags.contains(Flags::LIST),
        _ => false,
    };
    let half = ElementType::from_number(number.into()).and_then(Half::of).filter(|_| asks);
    half.map(Some).ok_or(WireError::Unknown { field: "the type of an entry's value", found: number.into() })
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    chunk: U64,
    round: U64,
    parameter: U32,
    bytes: U32,
    checksum: U32,
    element_type: u8,
    half: u8,
    reserved: U16,
}

const _: () = assert!(size_of::<RawEntry>() == 32, "the entry is drawn with 32 bytes");
