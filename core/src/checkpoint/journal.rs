//! The journal of a shard: every accepted frame, in order, before it is applied.
//!
//! A record's position counts the bytes of all records before it, over all segments; it is never given twice. A
//! segment's name is the position of its first record, and that is also where the segment before it ends: bytes
//! that segment holds beyond are the torn tail of a failed write, and were never acknowledged. So a journal never
//! appends to a file that an earlier life wrote, and nothing is ever cut off.

use std::sync::Arc;

use super::source::Source;
use super::storage::{Storage, Writer, join};
use crate::checksum::{append, checksum};
use crate::error::Failure;
use crate::limits::JOURNAL_RECORD_BYTES_MAX;

const PREFIX: &str = "journal-";
/// The first bytes of a segment. The position that its name says follows, in eight bytes.
const MAGIC: [u8; 8] = *b"PSJOURN1";
const SEGMENT_HEADER_BYTES: u64 = 16;
const RECORD_HEADER_BYTES: u64 = 8;

/// A journal, open for appending.
pub struct Journal {
    storage: Arc<dyn Storage>,
    directory: String,
    sync: bool,
    position: u64,
    /// None until the first append, and after one that failed: what is on disk then is not to be added to.
    segment: Option<Segment>,
}

struct Segment {
    start: u64,
    writer: Box<dyn Writer>,
}

/// Takes a record's position and payload. A failure ends the replay and is its outcome.
pub type Visit<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Failure> + 'a;

/// What a replay found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// How many records were visited.
    pub records: u64,
    /// The bytes of their payloads.
    pub bytes: u64,
    /// Whether the journal ended in an unfinished record, or before the position where replay should begin.
    pub torn_tail: bool,
}

impl Journal {
    /// Opens the journal in `directory` at the end of its last whole record, after [`replay`]; nothing is written
    /// until the first append. With `sync`, an append returns only when its record survives the loss of the host.
    pub fn open(storage: Arc<dyn Storage>, directory: &str, sync: bool) -> Result<Self, Failure> {
        let mut position = 0;
        if let Some(start) = segments(&*storage, directory)?.last() {
            let mut scan = Scan::open(&*storage, directory, *start, None)?;
            while scan.next()? {}
            position = scan.position;
        }
        Ok(Self { storage, directory: directory.to_owned(), sync, position, segment: None })
    }

    /// Appends a record of all the parts, in one write, and returns its position. After a failure the journal is as
    /// before: the record is not in it, and the next append may well succeed.
    pub fn append(&mut self, parts: &[&[u8]]) -> Result<u64, Failure> {
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let length = u32::try_from(bytes).ok().filter(|length| *length <= JOURNAL_RECORD_BYTES_MAX);
        let Some(length) = length else {
            let most = JOURNAL_RECORD_BYTES_MAX;
            return Err(Failure::Call(format!("a journal record of {bytes} bytes; at most {most} are allowed")));
        };
        if self.segment.is_none() {
            self.begin_segment()?;
        }
        let checksum = parts.iter().fold(seed(self.position, length), |sum, part| append(sum, part));
        let (length, checksum) = (length.to_le_bytes(), checksum.to_le_bytes());
        let record: Vec<&[u8]> = [&length[..], &checksum[..]].into_iter().chain(parts.iter().copied()).collect();
        let writer = &mut self.segment.as_mut().expect("a segment has begun").writer;
        let written = writer.write(&record).and_then(|()| if self.sync { writer.sync() } else { Ok(()) });
        if let Err(failure) = written {
            self.segment = None;
            return Err(failure);
        }
        let position = self.position;
        self.position += RECORD_HEADER_BYTES + bytes;
        Ok(position)
    }

    /// The position that the next record will have.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Begins a new segment, so that the ones before it can be let go when a checkpoint contains them.
    pub fn rotate(&mut self) -> Result<(), Failure> {
        match &self.segment {
            Some(segment) if segment.start == self.position => Ok(()),
            _ => self.begin_segment(),
        }
    }

    /// Removes the segments that hold nothing at or after `position`. The last segment stays.
    pub fn retain_from(&mut self, position: u64) -> Result<(), Failure> {
        let starts = segments(&*self.storage, &self.directory)?;
        let ends = starts.iter().skip(1);
        for (start, _) in starts.iter().zip(ends).filter(|(_, end)| **end <= position) {
            self.storage.remove(&segment_path(&self.directory, *start))?;
        }
        Ok(())
    }

    fn begin_segment(&mut self) -> Result<(), Failure> {
        // From here on the old segment must not grow: a new one, even a torn one, says where it ends.
        self.segment = None;
        let last = segments(&*self.storage, &self.directory)?.pop();
        if let Some(last) = last.filter(|last| *last < self.position) {
            // A host that lost the end of a segment with another behind it would not know it from damage.
            self.storage.sync(&segment_path(&self.directory, last))?;
        }
        if let Some(last) = last.filter(|last| *last > self.position) {
            let (directory, position) = (&self.directory, self.position);
            return Err(Failure::Node(format!(
                "the journal in {directory:?} goes on at {last}, and was opened at {position} before it was replayed"
            )));
        }
        let mut writer = self.storage.create(&segment_path(&self.directory, self.position))?;
        writer.write(&[&MAGIC, &self.position.to_le_bytes()])?;
        if self.sync {
            writer.sync()?;
            self.storage.sync_directory(&self.directory)?;
        }
        self.segment = Some(Segment { start: self.position, writer });
        Ok(())
    }
}

/// Visits every record at or after `from`, in order, with its position.
///
/// An unfinished record at the journal's very end was never acknowledged; it ends the replay. Anything else that is
/// not as it was written is a failure that names file and offset. A journal that ends before `from` lost its tail
/// with the host; the checkpoint that says `from` contains what was there, so the journal begins anew at `from`.
pub fn replay(storage: &dyn Storage, directory: &str, from: u64, visit: &mut Visit<'_>) -> Result<Replayed, Failure> {
    let starts = segments(storage, directory)?;
    let mut replayed = Replayed::default();
    let mut end = 0;
    let first = starts.iter().rposition(|start| *start <= from).unwrap_or(0);
    if let Some(start) = starts.get(first).filter(|start| **start > from) {
        let path = segment_path(directory, *start);
        return Err(Failure::Node(format!("the journal begins with {path:?}, and records from {from} on are needed")));
    }
    for (index, start) in starts.iter().enumerate().skip(first) {
        let mut scan = Scan::open(storage, directory, *start, starts.get(index + 1).copied())?;
        loop {
            let position = scan.position;
            if !scan.next()? {
                break;
            }
            if position < from && from < scan.position {
                return Err(scan.damaged(&format!("a record spans position {from}, where replay should begin")));
            }
            if position >= from {
                replayed.records += 1;
                replayed.bytes += scan.payload.len() as u64;
                visit(position, &scan.payload)?;
            }
        }
        replayed.torn_tail = scan.torn;
        end = scan.position;
    }
    if end < from {
        begin_anew(storage, directory, from)?;
        replayed.torn_tail = true;
    }
    Ok(replayed)
}

/// Makes every record at or after `position` that was written so far survive the loss of the host.
pub(super) fn sync_from(storage: &dyn Storage, directory: &str, position: u64) -> Result<(), Failure> {
    let starts = segments(storage, directory)?;
    let first = starts.iter().rposition(|start| *start <= position).unwrap_or(0);
    starts[first..].iter().try_for_each(|start| storage.sync(&segment_path(directory, *start)))
}

/// Reads a segment to its end.
pub(super) struct Scan {
    path: String,
    source: Source,
    /// Where the next record is.
    pub(super) position: u64,
    start: u64,
    /// Where the next segment begins, when there is one.
    end: Option<u64>,
    /// The record that was read last.
    pub(super) payload: Vec<u8>,
    /// Whether the segment, the last one, ends in an unfinished record.
    pub(super) torn: bool,
}

/// What stands at a place where a record may begin.
enum Found {
    Record,
    Nothing,
    /// Something else. When its length can be right, the next record would be at `after`.
    Bad {
        what: &'static str,
        after: Option<u64>,
    },
}

impl Scan {
    pub(super) fn open(storage: &dyn Storage, directory: &str, start: u64, end: Option<u64>) -> Result<Self, Failure> {
        let path = segment_path(directory, start);
        let source = Source::new(storage.open(&path)?);
        let mut scan = Self { path, source, position: start, start, end, payload: Vec::new(), torn: false };
        if !scan.header_is_whole()? {
            scan.bad("the segment's header is not as it was written", Some(start))?;
        }
        Ok(scan)
    }

    /// Reads the next record into `payload`; false at the segment's end.
    pub(super) fn next(&mut self) -> Result<bool, Failure> {
        if self.torn || self.end == Some(self.position) {
            return Ok(false);
        }
        match self.read(self.position)? {
            Found::Record => {
                self.position += RECORD_HEADER_BYTES + self.payload.len() as u64;
                if self.end.is_some_and(|end| end < self.position) {
                    return Err(self.damaged("a record reaches into the next segment"));
                }
                Ok(true)
            }
            Found::Nothing if self.end.is_none() => Ok(false),
            Found::Nothing => self.bad("the segment ends before the next one begins", None),
            Found::Bad { what, after } => self.bad(what, after),
        }
    }

    /// Where a record should be there is something else. In the last segment, with nothing whole behind it, that is
    /// a write that was cut off: a record is whole before the next one is written.
    fn bad(&mut self, what: &str, after: Option<u64>) -> Result<bool, Failure> {
        if self.end.is_some() {
            return Err(self.damaged(what));
        }
        if let Some(after) = after
            && matches!(self.read(after)?, Found::Record)
        {
            return Err(self.damaged(&format!("{what}, and a whole record follows")));
        }
        self.torn = true;
        Ok(false)
    }

    fn header_is_whole(&mut self) -> Result<bool, Failure> {
        if self.source.remaining() < SEGMENT_HEADER_BYTES {
            return Ok(false);
        }
        let magic: [u8; 8] = self.source.array()?;
        let start = u64::from_le_bytes(self.source.array()?);
        Ok(magic == MAGIC && start == self.start)
    }

    fn read(&mut self, position: u64) -> Result<Found, Failure> {
        let cut = |what| Ok(Found::Bad { what, after: None });
        self.payload.clear();
        let left = self.source.remaining();
        if left == 0 {
            return Ok(Found::Nothing);
        }
        if left < RECORD_HEADER_BYTES {
            return cut("a record's header is cut off");
        }
        let length = u32::from_le_bytes(self.source.array()?);
        let checksum = u32::from_le_bytes(self.source.array()?);
        if length > JOURNAL_RECORD_BYTES_MAX {
            return cut("a record claims to be longer than any may be");
        }
        if u64::from(length) > left - RECORD_HEADER_BYTES {
            return cut("a record is cut off");
        }
        self.payload.resize(usize::try_from(length).expect("an address has 64 bits"), 0);
        self.source.take(&mut self.payload)?;
        if append(seed(position, length), &self.payload) == checksum {
            return Ok(Found::Record);
        }
        let after = Some(position + RECORD_HEADER_BYTES + u64::from(length));
        Ok(Found::Bad { what: "a record does not agree with its checksum", after })
    }

    fn damaged(&self, what: &str) -> Failure {
        let offset = SEGMENT_HEADER_BYTES + (self.position - self.start);
        Failure::Node(format!("journal {:?} is damaged at offset {offset}: {what}", self.path))
    }
}

/// The positions at which segments begin, rising.
pub(super) fn segments(storage: &dyn Storage, directory: &str) -> Result<Vec<u64>, Failure> {
    let mut starts: Vec<u64> = storage
        .list(directory)?
        .iter()
        .filter_map(|name| {
            let start = name.strip_prefix(PREFIX)?.parse().ok()?;
            (*name == segment_name(start)).then_some(start)
        })
        .collect();
    starts.sort_unstable();
    Ok(starts)
}

fn begin_anew(storage: &dyn Storage, directory: &str, position: u64) -> Result<(), Failure> {
    let mut writer = storage.create(&segment_path(directory, position))?;
    writer.write(&[&MAGIC, &position.to_le_bytes()])
}

/// The checksum covers position and length too, so that neither a page of zeros nor a record of another place is
/// taken for one.
fn seed(position: u64, length: u32) -> u32 {
    append(checksum(&position.to_le_bytes()), &length.to_le_bytes())
}

fn segment_name(start: u64) -> String {
    format!("{PREFIX}{start:020}")
}

pub(super) fn segment_path(directory: &str, start: u64) -> String {
    join(directory, &segment_name(start))
}

#[cfg(test)]
mod tests;
