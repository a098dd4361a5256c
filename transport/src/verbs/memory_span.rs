//! Memory that a work request names.

/// A local address range with the key of its region: a scatter-gather entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemorySpan {
    address: u64,
    bytes: u32,
    key: u32,
}

impl MemorySpan {
    /// No memory, for a request that moves none.
    pub(super) const EMPTY: Self = Self { address: 0, bytes: 0, key: 0 };

    pub(super) fn of(bytes: &[u8], key: u32) -> Self {
        let length = u32::try_from(bytes.len()).expect("a chunk or a slot");
        Self { address: bytes.as_ptr().expose_provenance() as u64, bytes: length, key }
    }

    pub(super) fn of_mut(bytes: &mut [u8], key: u32) -> Self {
        let length = u32::try_from(bytes.len()).expect("a chunk or a slot");
        Self { address: bytes.as_mut_ptr().expose_provenance() as u64, bytes: length, key }
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(self) -> u32 {
        self.bytes
    }

    pub(crate) fn key(self) -> u32 {
        self.key
    }
}
