//! Checked header of a frame that is still arriving.

use zerocopy::FromBytes;

use super::frame::{Entry, Frame};
use super::header::{CHECKED_BYTES, Flags, HEADER_BYTES, Head, RawHeader, WireError};
use crate::checksum::checksum;

/// A header whose own checksum and bounds hold. The length of the rest is known, its content is not checked yet.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    head: Head,
    entries: u32,
    control: u32,
    rest_checksum: u32,
}

impl Prefix {
    /// Checks a header: its checksum before any field is used.
    ///
    /// # Errors
    /// The first fault, in the order magic, version, checksum, meaning, bounds.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let raw = RawHeader::ref_from_bytes(bytes).expect("the array has the header's size and no alignment");
        raw.check_origin()?;
        let found = checksum(&bytes[..CHECKED_BYTES]);
        let expected = raw.header_checksum.get();
        if found != expected {
            return Err(WireError::Checksum { part: "header", found, expected });
        }
        let head = raw.head()?;
        raw.check_bounds(head.kind)?;
        Ok(Self {
            head,
            entries: raw.entries.get(),
            control: raw.control.get(),
            rest_checksum: raw.rest_checksum.get(),
        })
    }

    /// [`decode`](Self::decode) of a transport over which no destinations are named.
    ///
    /// # Errors
    /// As `decode`, and [`Flags::NAMED`].
    pub fn decode_plain(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let prefix = Self::decode(bytes)?;
        match prefix.head.flags.contains(Flags::NAMED) {
            true => Err(WireError::Unknown { field: "flags", found: prefix.head.flags.0.into() }),
            false => Ok(prefix),
        }
    }

    /// The header's fields.
    #[must_use]
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Entries that follow the header.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries as usize
    }

    /// Bytes of entries and control message that follow the header.
    #[must_use]
    pub fn rest_bytes(&self) -> usize {
        self.entries as usize * Entry::BYTES + self.control as usize
    }

    /// Checks the entries and the control message, which followed the header.
    ///
    /// # Errors
    /// A checksum that does not hold, an entry without a meaning, or payloads over their bound.
    ///
    /// # Panics
    /// When `rest` is not [`Prefix::rest_bytes`] long: the transport reads exactly as much.
    pub fn finish(&self, rest: &[u8]) -> Result<Frame, WireError> {
        assert_eq!(rest.len(), self.rest_bytes(), "the transport reads as much as the header says");
        let found = checksum(rest);
        if found != self.rest_checksum {
            return Err(WireError::Checksum { part: "entries", found, expected: self.rest_checksum });
        }
        Frame::from_parts(self.head, self.entries, rest)
    }
}
