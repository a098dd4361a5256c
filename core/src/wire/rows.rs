//! Rows in a payload: which part of a contribution they are, then the rows themselves.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::Failure;

/// Which part of what one push brings to one bucket. Parts may arrive in any order and count when all are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsPart {
    /// Its place, from zero.
    pub index: u32,
    /// How many there are; at least one.
    pub count: u32,
}

impl RowsPart {
    /// Bytes before the rows of a payload; what follows begins at a multiple of eight if the payload does.
    pub const BYTES: usize = size_of::<RawPart>();
    /// Of everything in one payload.
    pub const ONLY: Self = Self { index: 0, count: 1 };

    /// As it stands before the rows.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(RawPart { index: self.index.into(), count: self.count.into() }.as_bytes());
        bytes
    }

    /// Reads what stands before the rows, and gives back the rows.
    ///
    /// # Errors
    /// When the payload is too short for it, and when there is no such part.
    pub fn decode(payload: &[u8]) -> Result<(Self, &[u8]), Failure> {
        let Ok((raw, rows)) = RawPart::ref_from_prefix(payload) else {
            let found = payload.len();
            return Err(Failure::call(format!("a payload of {found} bytes; expected {} before the rows", Self::BYTES)));
        };
        let part = Self { index: raw.index.get(), count: raw.count.get() };
        if part.index < part.count {
            return Ok((part, rows));
        }
        Err(Failure::call(format!("part {} of {}; expected a part that there is", part.index, part.count)))
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPart {
    index: U32,
    count: U32,
}
