//! The value of a chunk: shared bytes with a cached checksum.

use std::sync::OnceLock;

use super::Lease;
use crate::checksum::checksum;

/// The content of a chunk: the first bytes of a lease, and their checksum once it was computed.
///
/// Readers share a value in an `Arc`, which allows no writes.
#[derive(Debug)]
pub struct Value {
    lease: Lease,
    bytes: u32,
    checksum: OnceLock<u32>,
}

impl Value {
    /// The first `bytes` of `lease`.
    ///
    /// # Panics
    /// When the lease is shorter.
    #[must_use]
    pub fn new(lease: Lease, bytes: u32) -> Self {
        assert!(bytes <= lease.len(), "a value of {bytes} bytes in a lease of {}", lease.len());
        Self { lease, bytes, checksum: OnceLock::new() }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a chunk of no bytes is refused")]
    pub fn len(&self) -> u32 {
        self.bytes
    }

    /// The bytes, to read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.lease.bytes()[..self.bytes as usize]
    }

    /// The bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.checksum.take();
        &mut self.lease.bytes_mut()[..self.bytes as usize]
    }

    /// The checksum of the bytes, computed once.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        *self.checksum.get_or_init(|| checksum(self.bytes()))
    }

    /// The lease of the bytes.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }
}
