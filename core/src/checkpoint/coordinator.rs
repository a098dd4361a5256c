//! Coordinator state on disk: a store of coordination that is one file, replaced as a whole at each change.
//!
//! Its name has the owner that wrote it and a revision, the store's version, so that a replaced process never
//! overwrites the state of its successor, and an old file under a new name is detected.

use std::fmt;
use std::sync::Arc;

use super::cursor::newer_format;
use super::owner::{DirectoryOwner, OwnerNumber, of_format_1, server_directory};
use super::partial::Partial;
use super::storage::{Storage, StorageReader, join};
use crate::checksum::checksum;
use crate::error::Failure;
use crate::limits::COORDINATOR_STATE_BYTES_MAX;
use crate::port::{CoordinationStore, StoreFailure, StoreVersion, StoredValue};

const PREFIX: &str = "coordinator-";
/// The coordinator's file of the format before owners.
const FORMAT_1: &str = "coordinator";
const MAGIC: [u8; 8] = *b"PSCOORD1";
const HEADER_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 4;

/// The coordinator's last stored state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorState {
    name: Revision,
    /// The state, opaque to this module.
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Revision {
    owner: OwnerNumber,
    revision: u64,
}

impl fmt::Display for Revision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}{}-{:020}", self.owner, self.revision)
    }
}

impl fmt::Display for CoordinatorState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({} bytes)", self.name, self.bytes.len())
    }
}

impl Revision {
    fn parse(name: &str) -> Option<Self> {
        let (owner, rest) = OwnerNumber::split(name.strip_prefix(PREFIX)?)?;
        let parsed = Self { owner, revision: rest.strip_prefix('-')?.parse().ok()? };
        (parsed.to_string() == name).then_some(parsed)
    }

    fn encode(self, state: &[u8]) -> Vec<u8> {
        let numbers = [self.owner.0, self.revision, state.len() as u64].map(u64::to_le_bytes);
        let mut bytes = [&MAGIC[..], &numbers[0], &numbers[1], &numbers[2], state].concat();
        bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
        bytes
    }
}

impl CoordinatorState {
    /// Reads the newest state; none where no coordinator has written any. It never falls back to an older one, which
    /// would give trainers incarnations that are in use.
    ///
    /// # Errors
    /// When the storage refuses, or the file is damaged, naming it.
    pub fn recall(storage: &dyn Storage) -> Result<Option<Self>, Failure> {
        let directory = server_directory(0);
        let names = storage.list(&directory)?;
        if names.iter().any(|name| name == FORMAT_1) {
            return Err(of_format_1(&join(&directory, FORMAT_1), "a coordinator's file", 2));
        }
        let Some(name) = revisions(&names).max() else { return Ok(None) };
        let path = join(&directory, &name.to_string());
        let file = read_state(&mut *storage.open(&path)?, &path)?;
        let bytes = file[HEADER_BYTES..file.len() - CHECKSUM_BYTES].to_vec();
        if name.encode(&bytes) != file {
            return Err(damaged(&path, "it does not agree with its checksum or its name"));
        }
        Ok(Some(Self { name, bytes }))
    }
}

/// The newest state in a server's directory if it has the format of a newer program, in words. A damaged number is
/// none: with the number of this program the checksum is right.
pub(super) fn newer_file(storage: &dyn Storage, directory: &str) -> Option<String> {
    let name = revisions(&storage.list(directory).ok()?).max()?;
    let path = join(directory, &name.to_string());
    let mut file = read_state(&mut *storage.open(&path).ok()?, &path).ok()?;
    let newer = newer_format(&path, &file, MAGIC)?;
    file[..8].copy_from_slice(&MAGIC);
    (name.encode(&file[HEADER_BYTES..file.len() - CHECKSUM_BYTES]) != file).then_some(newer)
}

/// The bytes of a state's file, which has the length of one.
fn read_state(reader: &mut dyn StorageReader, path: &str) -> Result<Vec<u8>, Failure> {
    let length = usize::try_from(reader.len()).unwrap_or(usize::MAX);
    if !(HEADER_BYTES + CHECKSUM_BYTES..=COORDINATOR_STATE_BYTES_MAX).contains(&length) {
        return Err(damaged(path, &format!("it has {length} bytes")));
    }
    let mut file = vec![0; length];
    reader.read_at(0, &mut file)?;
    Ok(file)
}

fn damaged(path: &str, what: &str) -> Failure {
    Failure::Node(format!(
        "the coordinator's file {path:?} is damaged: {what}. Restore it from a copy, or begin a new job in another \
         directory; the values are in the checkpoints of the shards"
    ))
}

/// The store of a job whose servers keep checkpoints: the file in the directory of server 0. Its owner alone changes
/// it.
pub struct CoordinatorFile {
    storage: Arc<dyn Storage>,
    owner: DirectoryOwner,
}

impl CoordinatorFile {
    /// The file in the directory of this owner.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, owner: DirectoryOwner) -> Self {
        Self { storage, owner }
    }

    /// Writes the file of a revision, and removes those before it.
    fn replace(&self, name: Revision, state: &[u8]) -> Result<(), Failure> {
        let directory = server_directory(0);
        let mut file = Partial::create(&self.storage, join(&directory, &name.to_string()))?;
        let placed = file.write(&[&name.encode(state)]).and_then(|()| file.place());
        if let Err(failure) = placed {
            file.abandon();
            return Err(failure);
        }
        self.storage.sync_directory(&directory)?;
        self.owner.check()?;
        let names = self.storage.list(&directory)?;
        let older = revisions(&names).filter(|older| *older < name);
        older.into_iter().try_for_each(|older| self.storage.remove(&join(&directory, &older.to_string())))
    }
}

impl CoordinationStore for CoordinatorFile {
    fn read(&mut self) -> Result<StoredValue, StoreFailure> {
        let found = CoordinatorState::recall(&*self.storage).map_err(StoreFailure::Unavailable)?;
        let value = |CoordinatorState { name, bytes }| StoredValue { version: StoreVersion(name.revision), bytes };
        Ok(found.map(value).unwrap_or_default())
    }

    fn compare_and_set(&mut self, expected: StoreVersion, bytes: &[u8]) -> Result<StoreVersion, StoreFailure> {
        self.watch(expected)?;
        // Of the same revision there may be a file of a change without an answer, which this one replaces. One that a
        // former owner places late has its number, and is older.
        let revision = expected.0 + 1;
        self.replace(Revision { owner: self.owner.number(), revision }, bytes).map_err(of_store)?;
        Ok(StoreVersion(revision))
    }

    /// Only the owner of the directory changes the file, so that this looks whether this process still is.
    fn watch(&mut self, _: StoreVersion) -> Result<(), StoreFailure> {
        self.owner.check().map_err(of_store)
    }
}

/// The revisions among these names.
fn revisions(names: &[String]) -> impl Iterator<Item = Revision> {
    names.iter().filter_map(|name| Revision::parse(name))
}

/// A failure of the disk, or the news that another process owns the directory.
fn of_store(failure: Failure) -> StoreFailure {
    match failure {
        Failure::Node(replaced) => StoreFailure::Superseded(replaced),
        failure => StoreFailure::Unavailable(failure),
    }
}

#[cfg(test)]
mod tests;
