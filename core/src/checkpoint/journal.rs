//! Write-ahead journal of a shard: records in order, each before what it holds is applied.
//!
//! A record's position counts the bytes of all records before it, over all segments; no position is ever used twice. A
//! segment's name has the owner that writes it and the position of its first record. A segment ends at the position
//! where the next one begins: bytes beyond were left by a failed write or a replaced owner, and were never
//! acknowledged. So a journal never appends to a file that an earlier owner wrote, and never truncates one.
//!
//! Beside the segments lies the *mark*: the end of the acknowledged journal. It is overwritten with each commit, and
//! distinguishes a complete journal from one that lost its tail.
//!
//! Not here: reading it back (`replay`).

mod mark;
mod replay;

use std::fmt;

use self::mark::{JournalMark, MarkWriter};
use super::cursor::newer_format;
use super::owner::{Folder, IDENTITY_BYTES, OwnerNumber, ShardIdentity, is_numbered_as_format_1, of_format_1};
use super::room::{LOOK_BYTES, RESERVE_BYTES};
use super::storage::{Storage, StorageWriter, join};
use crate::checksum::{append, checksum};
use crate::error::Failure;
use crate::limits::JOURNAL_RECORD_BYTES_MAX;

pub use replay::{Dropped, Missing, RecordVisitor, ReplayOptions, Replayed, replay};

const PREFIX: &str = "journal-";
/// The first bytes of a segment, with the format's digit at the end.
const MAGIC: [u8; 8] = *b"PSJOURN3";
const FORMAT: u32 = 3;
/// The same of the format in which each accepted frame was a record.
const MAGIC_OF_FRAMES: [u8; 8] = *b"PSJOURN2";
const SEGMENT_HEADER: usize = 64;
const SEGMENT_HEADER_BYTES: u64 = SEGMENT_HEADER as u64;
/// The first bytes of a record, which a reader searches for behind damage.
const RECORD_MAGIC: [u8; 4] = *b"PSRC";
const RECORD_HEADER: usize = 24;
const RECORD_HEADER_BYTES: u64 = RECORD_HEADER as u64;

/// A journal, open for appending.
pub struct Journal {
    folder: Folder,
    sync: bool,
    position: u64,
    /// Number of all records of the journal, removed segments included.
    records: u64,
    /// The position at which this owner's records begin, after those of earlier owners.
    first: First,
    /// None after a failed append: nothing may be added to the file then.
    segment: Option<Segment>,
    /// The file of the last appended record.
    path: String,
    /// Whether records were appended since the last commit.
    is_ahead: bool,
    mark: MarkWriter,
    room: JournalRoom,
}

/// The part of the disk that the journal leaves free.
#[derive(Default)]
struct JournalRoom {
    /// Bytes that stay free.
    kept: u64,
    /// Bytes to be appended before the disk is looked at again.
    allowed: u64,
    /// Whether an append was refused for want of room.
    is_short: bool,
}

#[derive(Clone, Copy)]
struct First {
    start: u64,
    follows: u64,
}

struct Segment {
    start: u64,
    name: String,
    writer: Box<dyn StorageWriter>,
}

impl Journal {
    /// Begins the journal of a new owner behind the end that [`replay()`] found, at `least` or later. Bytes beyond are
    /// invalid from here on. With `sync`, an append returns only when its record survives the loss of the host.
    ///
    /// # Errors
    /// When the storage refuses, or the owner was replaced already.
    pub fn begin(folder: &Folder, sync: bool, found: &Replayed, least: u64) -> Result<Self, Failure> {
        let first = First { start: found.end.max(found.marked).max(least), follows: found.end };
        let start = JournalMark { position: first.start, records: found.ordinal };
        let segment = begin_segment(folder, sync, first, start)?;
        let mark = MarkWriter::begin(folder, sync, start)?;
        let folder = folder.clone();
        let room = JournalRoom { kept: RESERVE_BYTES, ..JournalRoom::default() };
        let (position, records) = (start.position, start.records);
        let (path, is_ahead) = (String::new(), false);
        Ok(Self { folder, sync, position, records, first, segment: Some(segment), path, is_ahead, mark, room })
    }

    /// Appends a record of all the parts, in one write, and returns its position. It may be acknowledged after the next
    /// [`commit`](Self::commit). After a failure the journal is unchanged: the record is not in it, and the next append
    /// may succeed.
    ///
    /// # Errors
    /// [`Failure::Node`] when the owner was replaced: nothing may be written any more. Else the storage's error.
    pub fn append(&mut self, parts: &[&[u8]]) -> Result<u64, Failure> {
        let (bytes, _) = length_of(parts)?;
        self.take_room(RECORD_HEADER_BYTES + bytes)?;
        self.append_reserved(parts)
    }

    /// As [`append`](Self::append), in the part of the disk that is left free for checkpoints.
    ///
    /// # Errors
    /// As of [`append`](Self::append).
    pub fn append_reserved(&mut self, parts: &[&[u8]]) -> Result<u64, Failure> {
        let (bytes, length) = length_of(parts)?;
        if self.segment.is_none() {
            self.begin_segment()?;
        }
        let payload = parts.iter().fold(0, |sum, part| append(sum, part));
        let header = RecordHeader { length, payload, ordinal: self.records };
        let header = header.encode(self.folder.owner.number(), self.position);
        let record: Vec<&[u8]> = [&header[..]].into_iter().chain(parts.iter().copied()).collect();
        let segment = self.segment.as_mut().expect("a segment has begun");
        if let Err(failure) = segment.writer.write(&record) {
            self.segment = None;
            return Err(failure);
        }
        if self.sync && !self.path.ends_with(&segment.name) {
            self.path = self.folder.path(&segment.name);
        }
        let position = self.position;
        self.position += RECORD_HEADER_BYTES + bytes;
        self.records += 1;
        self.is_ahead = true;
        Ok(position)
    }

    /// Allows the acknowledgement of every record that was appended: this process still owned the directory after they
    /// were written, and with `sync` they survive the loss of the host. One commit serves all records of a turn.
    ///
    /// # Errors
    /// [`Failure::Node`]: nothing that was appended since the last commit may be acknowledged, and nothing after it.
    pub fn commit(&mut self) -> Result<(), Failure> {
        if !self.is_ahead {
            return Ok(());
        }
        let synced = match &mut self.segment {
            _ if !self.sync => Ok(()),
            Some(segment) => segment.writer.sync(),
            // After a failed append, or rotation.
            None => self.folder.storage.sync(&self.path),
        };
        let refused = |failure: Failure| match failure {
            replaced @ Failure::Node(_) => replaced,
            failure => {
                Failure::Node(format!("the journal cannot be kept, so nothing of it is acknowledged: {failure}"))
            }
        };
        synced.and_then(|()| self.folder.owner.check()).map_err(refused)?;
        self.is_ahead = false;
        if let Err(failure) = self.mark.write(JournalMark { position: self.position, records: self.records }) {
            // The mark is not synced either: without it a loss at the journal's end is not detected.
            tracing::warn!("{}: the journal's mark cannot be written: {failure}", self.folder.directory);
        }
        Ok(())
    }

    /// Leaves so many bytes of this shard's part of the disk free: an append that needs them is refused.
    pub fn keep_free(&mut self, bytes: u64) {
        self.room = JournalRoom { kept: bytes, allowed: 0, is_short: false };
    }

    /// Whether an append was refused because it would have left too little free, and none has succeeded since, nor was
    /// the room changed.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.room.is_short
    }

    fn take_room(&mut self, bytes: u64) -> Result<(), Failure> {
        let JournalRoom { kept, allowed, is_short } = &mut self.room;
        *is_short = false;
        if bytes <= *allowed {
            *allowed -= bytes;
            return Ok(());
        }
        let Some(free) = self.folder.free() else { return Ok(()) };
        match free.checked_sub(*kept).and_then(|room| room.checked_sub(bytes)) {
            Some(room) => {
                *allowed = room.min(LOOK_BYTES);
                Ok(())
            }
            None => {
                *is_short = true;
                Err(Failure::Call(format!(
                    "{}: {free} bytes of the disk are free for this shard, of which {kept} are kept for its next \
                     checkpoints, after which the journal is cut",
                    self.folder.directory
                )))
            }
        }
    }

    /// The position that the next record will have.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Begins a new segment, so that the earlier ones can be removed when a checkpoint contains them.
    pub fn rotate(&mut self) -> Result<(), Failure> {
        match &self.segment {
            Some(segment) if segment.start == self.position => Ok(()),
            _ => self.begin_segment(),
        }
    }

    /// Removes the segments that hold nothing at or after `position`. The last segment stays.
    pub fn retain_from(&mut self, position: u64) -> Result<(), Failure> {
        self.folder.owner.check()?;
        let names = segments(&*self.folder.storage, &self.folder.directory)?;
        let behind = names.iter().skip(1).map(|next| next.start);
        // A later segment that begins at or before the position holds everything from there on, or those after it do.
        for (name, _) in names.iter().zip(behind).filter(|(_, next)| *next <= position) {
            self.folder.storage.remove(&self.folder.path(&name.to_string()))?;
        }
        Ok(())
    }

    fn begin_segment(&mut self) -> Result<(), Failure> {
        // The old segment must not grow any more: the new one, even if torn, determines its end.
        self.segment = None;
        let first = if self.position == self.first.start {
            self.first
        } else {
            First { start: self.position, follows: self.position }
        };
        let start = JournalMark { position: self.position, records: self.records };
        self.segment = Some(begin_segment(&self.folder, self.sync, first, start)?);
        Ok(())
    }
}

/// The length of a record of these parts.
fn length_of(parts: &[&[u8]]) -> Result<(u64, u32), Failure> {
    let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
    match u32::try_from(bytes).ok().filter(|length| *length <= JOURNAL_RECORD_BYTES_MAX) {
        Some(length) => Ok((bytes, length)),
        None => {
            let most = JOURNAL_RECORD_BYTES_MAX;
            Err(Failure::Call(format!("a journal record of {bytes} bytes; at most {most} are allowed")))
        }
    }
}

fn begin_segment(folder: &Folder, sync: bool, first: First, start: JournalMark) -> Result<Segment, Failure> {
    folder.owner.check()?;
    let name = SegmentName { owner: folder.owner.number(), start: first.start };
    let before = segments(&*folder.storage, &folder.directory)?.into_iter().rfind(|other| *other < name);
    if let Some(before) = before {
        // If the host lost the end of a segment that has a successor, the loss would look like damage.
        folder.storage.sync(&folder.path(&before.to_string()))?;
    }
    let header = SegmentHeader { name, follows: first.follows, records: start.records, identity: folder.identity };
    let mut writer = folder.storage.create_anew(&folder.path(&name.to_string()))?;
    writer.write(&[&header.encode()])?;
    if sync {
        writer.sync()?;
        folder.storage.sync_directory(&folder.directory)?;
    }
    Ok(Segment { start: first.start, name: name.to_string(), writer })
}

/// Syncs every record at or after `position` that was written so far, so that it survives the loss of the host.
pub(super) fn sync_from(storage: &dyn Storage, directory: &str, position: u64) -> Result<(), Failure> {
    let names = segments(storage, directory)?;
    let first = names.iter().rposition(|name| name.start <= position).unwrap_or(0);
    names[first..].iter().try_for_each(|name| storage.sync(&join(directory, &name.to_string())))
}

/// The identity of the shard in the newest whole segment.
pub(super) fn identity_of(storage: &dyn Storage, directory: &str) -> Option<ShardIdentity> {
    let of = |name: &SegmentName| {
        let mut bytes = [0; SEGMENT_HEADER];
        storage.open(&join(directory, &name.to_string())).ok()?.read_at(0, &mut bytes).ok()?;
        Some(SegmentHeader::decode(&bytes, *name)?.identity)
    };
    segments(storage, directory).ok()?.iter().rev().find_map(of)
}

/// A segment with the format of a newer program, in words. A damaged number is none: with the number of this program
/// its header is right.
pub(super) fn newer_file(storage: &dyn Storage, directory: &str) -> Option<String> {
    segments(storage, directory).unwrap_or_default().into_iter().find_map(|name| {
        let (path, mut bytes) = (join(directory, &name.to_string()), [0; SEGMENT_HEADER]);
        storage.open(&path).ok()?.read_at(0, &mut bytes).ok()?;
        let newer = newer_format(&path, &bytes, MAGIC)?;
        bytes[..8].copy_from_slice(&MAGIC);
        SegmentHeader::decode(&bytes, name).is_none().then_some(newer)
    })
}

/// The name of a segment: ordered by owner, then by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentName {
    pub(super) owner: OwnerNumber,
    pub(super) start: u64,
}

impl fmt::Display for SegmentName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}{}-{:020}", self.owner, self.start)
    }
}

impl SegmentName {
    fn parse(name: &str) -> Option<Self> {
        let (owner, rest) = OwnerNumber::split(name.strip_prefix(PREFIX)?)?;
        let parsed = Self { owner, start: rest.strip_prefix('-')?.parse().ok()? };
        (parsed.to_string() == name).then_some(parsed)
    }
}

/// The segments in a directory, in ascending order.
///
/// # Errors
/// When the storage refuses, or a segment is of the format before owners, which this program does not read.
pub(super) fn segments(storage: &dyn Storage, directory: &str) -> Result<Vec<SegmentName>, Failure> {
    let names = storage.list(directory)?;
    if let Some(name) = names.iter().find(|name| is_numbered_as_format_1(name.strip_prefix(PREFIX))) {
        return Err(of_format_1(&join(directory, name), "a journal", FORMAT));
    }
    let mut found: Vec<SegmentName> = names.iter().filter_map(|name| SegmentName::parse(name)).collect();
    found.sort_unstable();
    Ok(found)
}

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SegmentHeader {
    name: SegmentName,
    /// The position at which the previous segment ends.
    follows: u64,
    /// Number of records in all previous segments.
    records: u64,
    identity: ShardIdentity,
}

impl SegmentHeader {
    fn encode(&self) -> [u8; SEGMENT_HEADER] {
        let mut bytes = [0; SEGMENT_HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        let numbers = [self.name.owner.0, self.name.start, self.follows, self.records];
        for (into, number) in bytes[8..40].chunks_exact_mut(8).zip(numbers) {
            into.copy_from_slice(&number.to_le_bytes());
        }
        bytes[40..40 + IDENTITY_BYTES].copy_from_slice(&self.identity.encode());
        let sum = checksum(&bytes[..60]);
        bytes[60..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Whether these are the first bytes of a segment of the format before.
    fn is_of_frames(bytes: &[u8; SEGMENT_HEADER]) -> bool {
        bytes.starts_with(&MAGIC_OF_FRAMES) && bytes[60..] == checksum(&bytes[..60]).to_le_bytes()
    }

    /// Reads the output of [`SegmentHeader::encode`], for the file of this name; none for anything else.
    fn decode(bytes: &[u8; SEGMENT_HEADER], name: SegmentName) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let identity = ShardIdentity::decode(bytes[40..40 + IDENTITY_BYTES].try_into().expect("an identity's bytes"));
        let header = Self { name, follows: number(24), records: number(32), identity };
        // The header is compared with its encoding, so that every bit is checked.
        (header.encode() == *bytes).then_some(header)
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordHeader {
    length: u32,
    /// The checksum of the payload.
    payload: u32,
    /// Number of records before this one, over all segments.
    ordinal: u64,
}

impl RecordHeader {
    /// The header's own checksum covers the owner and the position too, so that a record of another position or of a
    /// replaced owner is not accepted.
    fn encode(&self, owner: OwnerNumber, position: u64) -> [u8; RECORD_HEADER] {
        let mut bytes = [0; RECORD_HEADER];
        bytes[..4].copy_from_slice(&RECORD_MAGIC);
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.ordinal.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.payload.to_le_bytes());
        let sum = append(append(checksum(&bytes[..20]), &owner.0.to_le_bytes()), &position.to_le_bytes());
        bytes[20..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; RECORD_HEADER], owner: OwnerNumber, position: u64) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let ordinal = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        let header = Self { length: number(4), payload: number(16), ordinal };
        let is_whole = header.length <= JOURNAL_RECORD_BYTES_MAX && header.encode(owner, position) == *bytes;
        is_whole.then_some(header)
    }
}

#[cfg(test)]
mod tests;
