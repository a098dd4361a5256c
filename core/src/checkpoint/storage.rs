//! Interface to the disk, the only one in `core`. Every path is relative to a root.

mod directory;
mod failing;
mod in_memory;
mod metered;

pub use directory::{Directory, LOCK, Lock, LockOutcome};
pub use failing::{Failing, StorageFault};
pub use in_memory::InMemory;
pub(super) use metered::CHECKPOINT_PREFIX;
pub use metered::Metered;

use crate::error::Failure;

/// A file store.
///
/// Written bytes survive the process when the call returns. They survive the host only after a sync: a file's bytes by
/// [`StorageWriter::sync`] or [`Storage::sync`], and its name by [`Storage::sync_directory`] after it was created,
/// renamed or removed. Every failure names the operation, the path and the system's error.
pub trait Storage: Send + Sync {
    /// Creates an empty file for writing, and the directories above it. Fails if a file of that name exists: of several
    /// processes that create it, on any host, one succeeds.
    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure>;

    /// Creates a file that belongs to its writer until the writer is dropped:
    /// [`remove_abandoned`](Self::remove_abandoned) does not remove it. Fails if a file of that name exists.
    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure>;

    /// Removes a file unless a writer in any process owns it. Returns whether the file was removed.
    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure>;

    /// Opens a file for reading; none when it does not exist.
    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure>;

    /// Whether the file can be found.
    fn exists(&self, path: &str) -> Result<bool, Failure> {
        Ok(self.find(path)?.is_some())
    }

    /// Renames a file, replacing an existing one of the new name.
    fn rename(&self, from: &str, to: &str) -> Result<(), Failure>;

    /// Removes a file.
    fn remove(&self, path: &str) -> Result<(), Failure>;

    /// The names in a directory, sorted. A directory that does not exist is empty; `""` is the root.
    fn list(&self, directory: &str) -> Result<Vec<String>, Failure>;

    /// Syncs a file, so that every byte that any process has written so far survives the loss of the host.
    fn sync(&self, path: &str) -> Result<(), Failure>;

    /// Syncs the names in a directory, the directory's own name and those above it.
    fn sync_directory(&self, directory: &str) -> Result<(), Failure>;

    /// The bytes that are free, where that is known.
    fn free(&self) -> Option<u64> {
        None
    }

    /// Takes note that so many bytes of a restoration will be read, or of a checkpoint written.
    fn expect(&self, _bytes: u64) {}
}

impl dyn Storage + '_ {
    /// Opens a file for reading, and fails when it does not exist.
    pub fn open(&self, path: &str) -> Result<Box<dyn StorageReader>, Failure> {
        self.find(path)?.ok_or_else(|| Failure::Call(format!("open {path:?}: there is no such file")))
    }

    /// Creates an empty file for writing, replacing an existing one.
    pub(super) fn create_anew(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        if self.find(path)?.is_some() {
            self.remove(path)?;
        }
        self.create(path)
    }
}

/// A file that grows at its end.
pub trait StorageWriter: Send {
    /// Appends all the parts, in order, in as few system calls as they fit.
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure>;

    /// Overwrites bytes at this offset, which were written before.
    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure>;

    /// Syncs every byte written so far, so that it survives the loss of the host.
    fn sync(&mut self) -> Result<(), Failure>;

    /// How many bytes were written.
    fn position(&self) -> u64;
}

/// A file that is read. Its length is the one it had when it was opened.
pub trait StorageReader: Send {
    /// The file's length in bytes.
    fn len(&self) -> u64;

    /// Whether the file is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `into` with the bytes at `offset`. Fails if the file ends before.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure>;
}

/// The directory that holds `path`; `""` is the root.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// A name inside a directory, as a path.
pub(super) fn join(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

/// The bytes of all parts together.
pub(super) fn total(parts: &[&[u8]]) -> u64 {
    parts.iter().map(|part| part.len() as u64).sum()
}

#[cfg(test)]
pub(super) mod tests;
