//! Mark of a journal: the end of its acknowledged records, in a file of its own.

use crate::checkpoint::owner::{Folder, OwnerNumber};
use crate::checkpoint::storage::{Storage, StorageWriter, join};
use crate::checksum::{append, checksum};
use crate::error::Failure;

const PREFIX: &str = "acknowledged-";
const MAGIC: [u8; 8] = *b"PSACKED1";
const MARK_BYTES: usize = 32;

/// The end of a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JournalMark {
    /// The position behind the last record.
    pub(super) position: u64,
    /// Number of records, over all segments.
    pub(super) records: u64,
}

impl JournalMark {
    /// The checksum covers the owner too, so that the mark of another owner is not accepted.
    pub(super) fn encode(&self, owner: OwnerNumber) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.position.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.records.to_le_bytes());
        let sum = append(checksum(&bytes[..24]), &owner.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; MARK_BYTES], owner: OwnerNumber) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let mark = Self { position: number(8), records: number(16) };
        (mark.encode(owner) == *bytes).then_some(mark)
    }
}

/// The mark of the owner that writes the journal.
pub(super) struct MarkWriter {
    owner: OwnerNumber,
    writer: Box<dyn StorageWriter>,
}

impl MarkWriter {
    /// Creates the owner's mark, and removes those of earlier owners. With `sync`, its file survives the loss of the
    /// host, with this mark or a later one.
    pub(super) fn begin(folder: &Folder, sync: bool, mark: JournalMark) -> Result<Self, Failure> {
        let owner = folder.owner.number();
        let mut writer = folder.storage.create_anew(&folder.path(&name(owner)))?;
        writer.write(&[&mark.encode(owner)])?;
        if sync {
            writer.sync()?;
            folder.storage.sync_directory(&folder.directory)?;
        }
        for (lower, path) in marks(&*folder.storage, &folder.directory)? {
            if lower < owner {
                folder.storage.remove(&path)?;
            }
        }
        Ok(Self { owner, writer })
    }

    pub(super) fn write(&mut self, mark: JournalMark) -> Result<(), Failure> {
        self.writer.overwrite(0, &mark.encode(self.owner))
    }
}

/// The newest mark of a directory.
pub(super) struct FoundMark {
    pub(super) owner: OwnerNumber,
    pub(super) path: String,
    /// None when it is damaged.
    pub(super) mark: Option<JournalMark>,
}

pub(super) fn find(storage: &dyn Storage, directory: &str) -> Result<Option<FoundMark>, Failure> {
    let Some((owner, path)) = marks(storage, directory)?.pop() else { return Ok(None) };
    let mut reader = storage.open(&path)?;
    let mut bytes = [0; MARK_BYTES];
    let is_whole = reader.len() == MARK_BYTES as u64;
    if is_whole {
        reader.read_at(0, &mut bytes)?;
    }
    let mark = JournalMark::decode(&bytes, owner).filter(|_| is_whole);
    Ok(Some(FoundMark { owner, path, mark }))
}

/// The marks of a directory, in ascending order of their owners.
fn marks(storage: &dyn Storage, directory: &str) -> Result<Vec<(OwnerNumber, String)>, Failure> {
    let owner = |name: &str| match OwnerNumber::split(name.strip_prefix(PREFIX)?)? {
        (owner, "") => Some((owner, join(directory, name))),
        _ => None,
    };
    let mut found: Vec<_> = storage.list(directory)?.iter().filter_map(|name| owner(name)).collect();
    found.sort_unstable();
    Ok(found)
}

fn name(owner: OwnerNumber) -> String {
    format!("{PREFIX}{owner}")
}
