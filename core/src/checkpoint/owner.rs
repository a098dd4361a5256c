//! Ownership of a directory, a server's or a shard's: one process at a time, by a number that each start increments. A
//! shard's has its own, so that a server to which the shard moves claims it alone.
//!
//! A start claims the next number by creating `owner-<number>`, which succeeds in one process only, removes the files
//! of lower numbers, and only then reads the directory. After each append and before the acknowledgement, the owner
//! checks that its file still exists. So an acknowledged record was written before the next claim, and the next owner
//! reads it. The number is part of every file's name: a process that was replaced without noticing writes no file that
//! the new owner reads.
//!
//! A lock (`Directory::lock`) keeps a second process from starting while the first one lives. It is a convenience:
//! network file systems may have none, and nothing here relies on it.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::storage::{Storage, join};
use crate::checksum::checksum;
use crate::error::Failure;
use crate::ids::Epoch;
use crate::limits::{OWNER_CLAIMS_MAX, OWNER_RECORD_BYTES_MAX};
use crate::shares::ShardNeed;

/// The directory of a server below the root.
#[must_use]
pub fn server_directory(server: u16) -> String {
    format!("{SERVER}{server}")
}

/// The directory of a shard below the root.
#[must_use]
pub fn shard_directory(server: u16, shard: u16) -> String {
    format!("{SERVER}{server}/{SHARD}{shard}")
}

/// The prefix of a server's directory; its index follows.
pub const SERVER: &str = "server-";
/// The prefix of a shard's directory; its index follows.
pub const SHARD: &str = "shard-";
const PREFIX: &str = "owner-";

/// Number of a directory's owner: 1 for the first process that claims it, and one more for each later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnerNumber(pub u64);

impl fmt::Display for OwnerNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:010}", self.0)
    }
}

impl OwnerNumber {
    /// Takes ten or more digits at the front of a file's name, and returns the rest.
    pub(super) fn split(text: &str) -> Option<(Self, &str)> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let number = Self(text[..digits].parse().ok()?);
        (number.to_string() == text[..digits]).then_some((number, &text[digits..]))
    }
}

/// The process that owns a directory, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// The index of the server that the process is.
    pub server: u16,
    /// The process's number on its host.
    pub process: u32,
    /// The host's name.
    pub host: String,
    /// The time of its start, as text in UTC.
    pub since: String,
}

impl fmt::Display for OwnerRecord {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, process, host, since } = self;
        write!(formatter, "server {server}, process {process} on host {host:?}, started {since}")
    }
}

impl OwnerRecord {
    /// The text of an owner's file, which is also that of the lock: JSON, a space and its checksum.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_string(self).expect("a record is plain data");
        format!("{text} {:08x}\n", checksum(text.as_bytes())).into_bytes()
    }

    /// Reads the output of [`OwnerRecord::encode`]; none for any other content.
    #[must_use]
    pub fn read(storage: &dyn Storage, path: &str) -> Option<Self> {
        let mut reader = storage.open(path).ok()?;
        let length = usize::try_from(reader.len()).ok().filter(|length| *length <= OWNER_RECORD_BYTES_MAX)?;
        let mut text = vec![0; length];
        reader.read_at(0, &mut text).ok()?;
        let (record, _) = std::str::from_utf8(&text).ok()?.rsplit_once(' ')?;
        let record: Self = serde_json::from_str(record).ok()?;
        (record.encode() == text).then_some(record)
    }
}

/// Ownership of a directory, held by the owner. A clone is the same owner.
#[derive(Clone)]
pub struct DirectoryOwner {
    storage: Arc<dyn Storage>,
    directory: String,
    number: OwnerNumber,
    /// The path of the owner's file.
    path: String,
}

impl DirectoryOwner {
    /// Claims the directory of the server that `record` names, for this process.
    ///
    /// # Errors
    /// As [`DirectoryOwner::claim`], or the directory is another server's.
    pub fn claim_server(storage: Arc<dyn Storage>, record: &OwnerRecord) -> Result<Self, Failure> {
        check_directory(&*storage, record.server)?;
        Self::claim(storage, server_directory(record.server), record)
    }

    /// Claims a directory for the process that `record` describes. Earlier owners acknowledge no record after this.
    ///
    /// # Errors
    /// When the storage refuses, or others claim the directory all the time.
    pub fn claim(storage: Arc<dyn Storage>, directory: String, record: &OwnerRecord) -> Result<Self, Failure> {
        let mut refused = None;
        for _ in 0..OWNER_CLAIMS_MAX {
            let names = storage.list(&directory)?;
            // Files name their owners too, so that a number is not used twice after the loss of an owner's file.
            let number = OwnerNumber(names.iter().filter_map(|name| owner_of(name)).max().unwrap_or_default().0 + 1);
            let owner = Self::numbered(&storage, &directory, number);
            match owner.create(record) {
                Err(failure) => refused = Some(failure),
                // A number that was claimed and released between the two listings could be claimed again.
                Ok(()) if owners(&storage.list(&directory)?).last() != Some(&number) => {}
                Ok(()) => {
                    owner.remove_lower()?;
                    return Ok(owner);
                }
            }
        }
        Err(refused.unwrap_or_else(|| {
            let text =
                format!("{directory:?} was claimed {OWNER_CLAIMS_MAX} times by other processes while this one tried");
            Failure::Node(text)
        }))
    }

    /// The owner's number.
    #[must_use]
    pub fn number(&self) -> OwnerNumber {
        self.number
    }

    /// Checks that this process still owns the directory.
    ///
    /// # Errors
    /// [`Failure::Node`] when it was replaced, naming the new owner; nothing written since may be acknowledged.
    pub fn check(&self) -> Result<(), Failure> {
        if self.storage.exists(&self.path)? {
            return Ok(());
        }
        let last = owners(&self.storage.list(&self.directory)?).last().copied();
        let by = last.and_then(|last| {
            let record = OwnerRecord::read(&*self.storage, &path(&self.directory, last));
            Some(format!("owner {} ({})", last.0, record?))
        });
        let by = by.unwrap_or_else(|| "an unnamed process".to_owned());
        let (directory, number) = (&self.directory, self.number.0);
        Err(Failure::Node(format!(
            "this process was owner {number} of {directory:?} and was replaced by {by}: it acknowledges nothing more \
             and stops"
        )))
    }

    fn numbered(storage: &Arc<dyn Storage>, directory: &str, number: OwnerNumber) -> Self {
        let path = path(directory, number);
        Self { storage: Arc::clone(storage), directory: directory.to_owned(), number, path }
    }

    fn create(&self, record: &OwnerRecord) -> Result<(), Failure> {
        let mut writer = self.storage.create(&self.path)?;
        writer.write(&[&record.encode()])?;
        writer.sync()?;
        self.storage.sync_directory(&self.directory)
    }

    fn remove_lower(&self) -> Result<(), Failure> {
        let names = self.storage.list(&self.directory)?;
        for lower in owners(&names).into_iter().filter(|number| *number < self.number) {
            let path = path(&self.directory, lower);
            // A process with a higher number may have removed the file first.
            if self.storage.exists(&path)? {
                self.storage.remove(&path)?;
            }
        }
        self.storage.sync_directory(&self.directory)
    }
}

/// The path of an owner's file.
fn path(directory: &str, number: OwnerNumber) -> String {
    join(directory, &format!("{PREFIX}{number}"))
}

/// The numbers of the owners' files among these names, in ascending order.
fn owners(names: &[String]) -> Vec<OwnerNumber> {
    let number = |name: &String| match OwnerNumber::split(name.strip_prefix(PREFIX)?)? {
        (number, "") => Some(number),
        _ => None,
    };
    let mut numbers: Vec<OwnerNumber> = names.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// The owner in a file's name: `<kind>-<owner>`, and a suffix.
fn owner_of(name: &str) -> Option<OwnerNumber> {
    OwnerNumber::split(name.split_once('-')?.1).map(|(number, _)| number)
}

/// Refuses the directory of another server, as its last owner's file names it.
///
/// # Errors
/// When the storage refuses, or the directory is another server's.
pub fn check_directory(storage: &dyn Storage, server: u16) -> Result<(), Failure> {
    let directory = server_directory(server);
    let Some(last) = owners(&storage.list(&directory)?).pop() else { return Ok(()) };
    let path = path(&directory, last);
    match OwnerRecord::read(storage, &path) {
        Some(record) if record.server != server => Err(Failure::Node(format!(
            "directory {directory:?} is that of server {}, and this is server {server}: directories were swapped or \
             renamed; give each server its own again ({path:?} names its last owner: {record})",
            record.server
        ))),
        _ => Ok(()),
    }
}

/// The last revision that wrote files of each format before this program's, from format 1 on.
const LAST_REVISIONS: [&str; 2] = ["b033444", "ca6eb58"];

/// The refusal of a file of an earlier format, in words.
pub(super) fn earlier_format(format: u32, ours: u32) -> String {
    let revision = LAST_REVISIONS[format as usize - 1];
    format!(
        "of format {format}, which servers up to revision {revision} wrote, and this program reads format {ours}: let \
         that revision save the model, and begin a new job with it in another directory"
    )
}

/// The refusal of a file of the format before owners.
pub(super) fn of_format_1(path: &str, what: &str, ours: u32) -> Failure {
    Failure::Node(format!("{path:?} is {what} {}", earlier_format(1, ours)))
}

/// Whether this is how the format before owners numbered its files: by twenty digits.
pub(super) fn is_numbered_as_format_1(digits: Option<&str>) -> bool {
    digits.is_some_and(|digits| digits.len() == 20 && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

/// The shard that a file belongs to. Every manifest and every segment of a journal contains it, so that swapped
/// directories, or those of another job, are detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardIdentity {
    /// The job, by its epoch.
    pub job: u64,
    /// The server that the shard was placed at first.
    pub server: u16,
    /// Its index there.
    pub shard: u16,
}

/// The bytes of an identity in a segment's header.
pub(super) const IDENTITY_BYTES: usize = 12;

impl fmt::Display for ShardIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { job, server, shard } = self;
        write!(formatter, "shard {shard} of server {server}, job {job}")
    }
}

impl ShardIdentity {
    pub(super) fn encode(&self) -> [u8; IDENTITY_BYTES] {
        let mut bytes = [0; IDENTITY_BYTES];
        bytes[..8].copy_from_slice(&self.job.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.server.to_le_bytes());
        bytes[10..].copy_from_slice(&self.shard.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; IDENTITY_BYTES]) -> Self {
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let job = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        Self { job, server: number(8), shard: number(10) }
    }

    /// Refuses a file of another shard.
    pub(super) fn check(&self, expected: &Self, path: &str) -> Result<(), Failure> {
        if self == expected {
            return Ok(());
        }
        let remedy = if self.job != expected.job {
            "give each job a directory of its own, and bring the coordinator's file back if it was lost"
        } else {
            "directories were swapped or renamed; give each shard its own again"
        };
        Err(Failure::Node(format!("{path:?} is of {self}; expected {expected}: {remedy}")))
    }
}

/// The directory of a shard's files, their identity, and their owner.
#[derive(Clone)]
pub struct Folder {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) directory: String,
    pub(super) identity: ShardIdentity,
    pub(super) owner: DirectoryOwner,
    /// The bytes that the shard needs to be free on the disk.
    pub(super) need: ShardNeed,
}

impl Folder {
    /// Claims the directory of the shard that `identity` names, for the process that `record` describes; `need` is its
    /// need of the disk.
    ///
    /// # Errors
    /// As [`DirectoryOwner::claim`].
    pub fn claim(
        storage: Arc<dyn Storage>,
        identity: ShardIdentity,
        record: &OwnerRecord,
        need: ShardNeed,
    ) -> Result<Self, Failure> {
        let directory = shard_directory(identity.server, identity.shard);
        let owner = DirectoryOwner::claim(Arc::clone(&storage), directory.clone(), record)?;
        Ok(Self { storage, directory, identity, owner, need })
    }

    /// Claims the directory of a job's only shard, for tests and tools.
    ///
    /// # Errors
    /// As [`DirectoryOwner::claim`].
    pub fn claim_alone(storage: Arc<dyn Storage>, job: Epoch) -> Result<Self, Failure> {
        let record = OwnerRecord { server: 0, process: 0, host: String::new(), since: String::new() };
        Self::claim(storage, ShardIdentity { job: job.0, server: 0, shard: 0 }, &record, ShardNeed::default())
    }

    /// The folder of the first owner, whose file `tests::put_first` wrote.
    #[cfg(test)]
    pub(super) fn first(storage: Arc<dyn Storage>, identity: ShardIdentity) -> Self {
        let directory = shard_directory(identity.server, identity.shard);
        let number = OwnerNumber(1);
        let owner = DirectoryOwner::numbered(&storage, &directory, number);
        Self { storage, directory, identity, owner, need: ShardNeed::default() }
    }

    /// The process's ownership of the directory.
    #[must_use]
    pub fn owner(&self) -> &DirectoryOwner {
        &self.owner
    }

    /// The storage that the directory is on.
    #[must_use]
    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// The shard of the files.
    #[must_use]
    pub fn identity(&self) -> &ShardIdentity {
        &self.identity
    }

    /// The directory, below the root.
    #[must_use]
    pub fn directory(&self) -> &str {
        &self.directory
    }

    pub(super) fn path(&self, name: &str) -> String {
        join(&self.directory, name)
    }
}

#[cfg(test)]
pub(super) mod tests;
