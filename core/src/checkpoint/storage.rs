//! The one door to the disk. Every path is relative to a root that was chosen once.

mod directory;
mod failing;
mod in_memory;

pub use directory::Directory;
pub use failing::{Failing, Fault};
pub use in_memory::InMemory;

use crate::error::Failure;

/// A place that keeps files.
///
/// A write that returned survives the process; what survives the host is only what was synced: a file's bytes by
/// [`Writer::sync`] or [`Storage::sync`], and its name by [`Storage::sync_directory`] after it was created, renamed or
/// removed.
/// Every failure names the operation, the path and what the system said.
pub trait Storage: Send + Sync {
    /// Opens an empty file for writing, in place of any that was there, and creates the directories above it.
    fn create(&self, path: &str) -> Result<Box<dyn Writer>, Failure>;

    /// Opens a file for reading.
    fn open(&self, path: &str) -> Result<Box<dyn Reader>, Failure>;

    /// Gives a file another name, in place of any that was there.
    fn rename(&self, from: &str, to: &str) -> Result<(), Failure>;

    /// Removes a file.
    fn remove(&self, path: &str) -> Result<(), Failure>;

    /// The names in a directory, sorted. A directory that does not exist is empty; `""` is the root.
    fn list(&self, directory: &str) -> Result<Vec<String>, Failure>;

    /// Makes every byte of a file that was written so far survive the loss of the host, whoever writes it.
    fn sync(&self, path: &str) -> Result<(), Failure>;

    /// Makes the names in a directory last, and the directory's own name and those above it.
    fn sync_directory(&self, directory: &str) -> Result<(), Failure>;
}

/// A file that grows at its end.
pub trait Writer: Send {
    /// Appends all the parts, in order, in as few system calls as they fit.
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure>;

    /// Makes every byte written so far survive the loss of the host.
    fn sync(&mut self) -> Result<(), Failure>;

    /// How many bytes were written.
    fn position(&self) -> u64;
}

/// A file that is read. Its length is the one it had when it was opened.
pub trait Reader: Send {
    /// The file's length in bytes.
    fn len(&self) -> u64;

    /// Whether the file holds nothing.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `into` with the bytes at `offset`. A file that ends before is a failure.
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
