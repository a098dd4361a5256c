//! Payload of rows: the part of a contribution, then the rows.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::Failure;

/// Part of a push's rows for one bucket. Parts may arrive in any order; the push is applied when all have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsPart {
    /// Index of the part, from zero.
    pub index: u32,
    /// Number of parts; at least one.
    pub count: u32,
}

impl RowsPart {
    /// Bytes before the rows of a payload, a multiple of eight, which keeps the rows aligned.
    pub const BYTES: usize = size_of::<RawPart>();
    /// The only part of a push.
    pub const ONLY: Self = Self { index: 0, count: 1 };

    /// The encoded part, which precedes the rows.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(RawPart { index: self.index.into(), count: self.count.into() }.as_bytes());
        bytes
    }

    /// Decodes the part before the rows, and returns it with the rows.
    ///
    /// # Errors
    /// When the payload is too short, or the index is not below the number of parts.
    pub fn decode(payload: &[u8]) -> Result<(Self, &[u8]), Failure> {
        let Ok((raw, rows)) = RawPart::ref_from_prefix(payload) else {
            let found = payload.len();
            return Err(Failure::call(format!("a payload of {found} bytes; expected {} before the rows", Self::BYTES)));
        };
        let part = Self { index: raw.index.get(), count: raw.count.get() };
        if part.index < part.count {
            return Ok((part, rows));
        }
        Err(Failure::call(format!(
            "part {} of {}; expected an index below the number of parts",
            part.index, part.count
        )))
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPart {
    index: U32,
    count: U32,
}
