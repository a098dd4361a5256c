//! Buffered reader of a file from front to back.

use super::storage::StorageReader;
use crate::error::Failure;

/// The size of a read: large enough that a system call costs little, small enough to stay in the cache.
const BUFFER_BYTES: usize = 256 * 1024;

/// A file and the position in it.
pub(super) struct FileCursor {
    reader: Box<dyn StorageReader>,
    /// The offset of the first byte after the buffered ones.
    offset: u64,
    buffer: Vec<u8>,
    /// Number of buffered bytes that were taken.
    taken: usize,
}

impl FileCursor {
    pub(super) fn new(reader: Box<dyn StorageReader>) -> Self {
        Self { reader, offset: 0, buffer: Vec::new(), taken: 0 }
    }

    /// Bytes of the file that were not taken yet.
    pub(super) fn remaining(&self) -> u64 {
        self.reader.len().saturating_sub(self.offset) + (self.buffer.len() - self.taken) as u64
    }

    /// The file's length in bytes.
    pub(super) fn length(&self) -> u64 {
        self.reader.len()
    }

    /// Continues at this offset.
    pub(super) fn seek(&mut self, offset: u64) {
        let begin = self.offset - self.buffer.len() as u64;
        match usize::try_from(offset.wrapping_sub(begin)) {
            // Bytes in the buffer are not read again.
            Ok(within) if offset >= begin && within <= self.buffer.len() => self.taken = within,
            _ => {
                self.buffer.clear();
                (self.taken, self.offset) = (0, offset);
            }
        }
    }

    /// Takes the next bytes. Fails when fewer remain.
    pub(super) fn take(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < into.len() {
            if self.taken == self.buffer.len() {
                self.refill()?;
            }
            let bytes = (into.len() - filled).min(self.buffer.len() - self.taken);
            into[filled..filled + bytes].copy_from_slice(&self.buffer[self.taken..self.taken + bytes]);
            self.taken += bytes;
            filled += bytes;
        }
        Ok(())
    }

    /// Takes the next `N` bytes as an array.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        self.take(&mut bytes)?;
        Ok(bytes)
    }

    fn refill(&mut self) -> Result<(), Failure> {
        let left = self.reader.len().saturating_sub(self.offset);
        // The reader's own error for a read past the end has the file's name.
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).clamp(1, BUFFER_BYTES);
        self.buffer.resize(bytes, 0);
        self.taken = bytes;
        self.reader.read_at(self.offset, &mut self.buffer)?;
        self.taken = 0;
        self.offset += bytes as u64;
        Ok(())
    }
}

/// The BLAKE3 digest of a whole file.
pub(super) fn digest(reader: Box<dyn StorageReader>) -> Result<blake3::Hash, Failure> {
    let mut source = FileCursor::new(reader);
    let mut hasher = blake3::Hasher::new();
    while source.remaining() > 0 {
        source.refill()?;
        hasher.update(&source.buffer);
        source.taken = source.buffer.len();
    }
    Ok(hasher.finalize())
}

/// In words that a file begins like one of ours with a higher digit at the end of its first eight bytes; else none.
pub(super) fn newer_format(path: &str, file: &[u8], ours: [u8; 8]) -> Option<String> {
    let found = *file.get(7)?;
    let is_newer = file.starts_with(&ours[..7]) && (ours[7] + 1..=b'9').contains(&found);
    let (found, ours) = (char::from(found), char::from(ours[7]));
    is_newer.then(|| format!("{path:?} is of format {found}; this program reads format {ours}"))
}
