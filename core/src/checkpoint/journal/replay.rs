//! Replay of a journal, and the distinction between its end and damage.
//!
//! A record's position follows from its offset, so after damage a reader looks for the next header whose checksum is
//! right for its position. Valid records behind damage mean that acknowledged data was destroyed: the replay refuses,
//! unless the operator accepts the loss. Without a valid record behind it the end is torn; the mark tells whether the
//! missing part was acknowledged.

use std::fmt;

use super::mark;
use super::{
    FORMAT, RECORD_HEADER_BYTES, RECORD_MAGIC, RecordHeader, SEGMENT_HEADER_BYTES, SegmentHeader, SegmentName, segments,
};
use crate::checkpoint::cursor::FileCursor;
use crate::checkpoint::owner::{OwnerNumber, ShardIdentity, earlier_format};
use crate::checkpoint::storage::{Storage, join};
use crate::checksum::checksum;
use crate::error::Failure;

/// The command-line option that accepts the loss of a damaged journal.
pub(in crate::checkpoint) const ACCEPT: &str = "--accept-torn-tail";
/// A search behind damage looks at so much of a file at a time.
const SEARCH_BYTES: usize = 1024 * 1024;

/// Takes a record's position and payload. A failure ends the replay and is its outcome.
pub type RecordVisitor<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Failure> + 'a;

/// The journal to replay, and the options.
#[derive(Clone, Copy)]
pub struct ReplayOptions<'a> {
    /// Where it is.
    pub storage: &'a dyn Storage,
    /// The shard's directory.
    pub directory: &'a str,
    /// The shard's identity; none reads the journal of any shard.
    pub identity: Option<&'a ShardIdentity>,
    /// The position of the first record that is visited.
    pub from: u64,
    /// Whether damage ends the journal, with whole records behind it, instead of being refused.
    pub accepts_torn_tail: bool,
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// How many records were visited.
    pub records: u64,
    /// The bytes of their payloads.
    pub bytes: u64,
    /// The position behind the last record that counts.
    pub end: u64,
    /// How many records the journal had got up to there in all its life.
    pub ordinal: u64,
    /// Where remains of a write lie behind the end, which was cut off and not acknowledged.
    pub torn: Option<String>,
    /// The acknowledged part that is missing at the end.
    pub missing: Option<Missing>,
    /// The reason why it is unknown whether the end is complete.
    pub unsure: Option<String>,
    /// The valid records that were skipped, because the operator accepted the loss.
    pub dropped: Option<Dropped>,
    /// How far the journal was acknowledged, as its mark says.
    pub(super) marked: u64,
    /// The owner that wrote the last record.
    owner: OwnerNumber,
}

/// Records that were acknowledged and are missing at a journal's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// How many, at most.
    pub records: u64,
    /// Their bytes with their headers.
    pub bytes: u64,
}

/// Records that are left out of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// File, offset and kind of the damage.
    pub damage: String,
    /// Whole records behind it.
    pub records: u64,
    /// The bytes of their payloads.
    pub bytes: u64,
}

impl Replayed {
    /// Warnings for the operator, one per line.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let torn = self.torn.as_ref().map(|torn| format!("the end of the journal is torn: {torn}"));
        let missing = self.missing.as_ref().map(|Missing { records, bytes }| {
            format!("{records} acknowledged records ({bytes} bytes) are missing at the end of the journal")
        });
        let dropped = self.dropped.as_ref().map(|Dropped { damage, records, bytes }| {
            format!("{ACCEPT} drops {records} whole records ({bytes} bytes) behind damage: {damage}")
        });
        [torn, missing, self.unsure.clone(), dropped].into_iter().flatten().collect()
    }
}

/// Visits every record at or after `from`, in order, with its position.
///
/// # Errors
/// When the storage refuses, a visit fails, or the journal is damaged (naming file and offset) anywhere but at its end.
/// A journal that ends before `from` lost records with its host; the checkpoint that requires `from` contains the
/// missing part.
pub fn replay(reading: &ReplayOptions<'_>, visit: &mut RecordVisitor<'_>) -> Result<Replayed, Failure> {
    let mut replayed = Replayed::default();
    let live = live_segments(reading, &mut replayed)?;
    let first = live.iter().rposition(|segment| segment.name.start <= reading.from).unwrap_or(0);
    if let Some(begin) = live.get(first).filter(|begin| begin.follows > reading.from) {
        let (path, from) = (&begin.path, reading.from);
        return Err(Failure::Node(format!("the journal begins with {path:?}, and records from {from} on are needed")));
    }
    reading.storage.expect(live.iter().skip(first).map(|segment| segment.source.length()).sum());
    let mut segments = live.into_iter().skip(first).peekable();
    while let Some(mut segment) = segments.next() {
        match segment.read(reading.from, &mut replayed, visit)? {
            SegmentEnd::Whole => {}
            SegmentEnd::Torn(what) => replayed.torn = Some(what),
            SegmentEnd::Damaged { damage, mut records, mut bytes } => {
                for mut later in segments.by_ref() {
                    let (more, longer) = later.count_whole(later.name.start)?;
                    (records, bytes) = (records + more, bytes + longer);
                }
                let dropped = Dropped { damage, records, bytes };
                if !reading.accepts_torn_tail {
                    return Err(dropped.refusal());
                }
                replayed.dropped = Some(dropped);
            }
        }
    }
    look_at_mark(reading, &mut replayed)?;
    Ok(replayed)
}

impl Dropped {
    fn refusal(&self) -> Failure {
        let Self { damage, records, bytes } = self;
        Failure::Node(format!(
            "{damage}; {records} whole records ({bytes} bytes) follow. Restore the file, or start with {ACCEPT} to \
             continue without everything from there on"
        ))
    }
}

/// Compares the end of the journal with the acknowledged end in the mark.
fn look_at_mark(reading: &ReplayOptions<'_>, replayed: &mut Replayed) -> Result<(), Failure> {
    let found = mark::find(reading.storage, reading.directory)?;
    let has_more = found.as_ref().map(|found| found.owner).unwrap_or_default() < replayed.owner;
    match found {
        Some(found) if found.mark.is_none() => {
            let path = &found.path;
            replayed.unsure =
                Some(format!("the mark {path:?} is damaged; a loss at the journal's end would not be detected"));
        }
        _ if has_more => {
            let directory = reading.directory;
            let text =
                format!("the mark of the journal in {directory:?} is missing; a loss at its end would not be detected");
            replayed.unsure = Some(text);
        }
        Some(found) => {
            let mark = found.mark.unwrap_or_default();
            replayed.marked = mark.position;
            let have = replayed.end.max(reading.from);
            if mark.position > have && replayed.dropped.is_none() {
                let records = mark.records.saturating_sub(replayed.ordinal).max(1);
                replayed.missing = Some(Missing { records, bytes: mark.position - have });
            }
        }
        None => {}
    }
    Ok(())
}

/// A segment that is part of the journal, and its end.
struct LiveSegment {
    path: String,
    name: SegmentName,
    source: FileCursor,
    /// None when it is damaged.
    header: Option<SegmentHeader>,
    /// Where the segments before it end.
    follows: u64,
    /// Where this one ends, when others follow.
    end: Option<u64>,
}

/// How the reading of a segment ended.
enum SegmentEnd {
    Whole,
    Torn(String),
    Damaged { damage: String, records: u64, bytes: u64 },
}

/// The content of an offset where a record may begin.
enum At {
    Record(RecordHeader),
    Nothing,
    Bad(&'static str),
}

/// The segments of a journal, each up to the position where the next one begins. A segment that begins beyond was
/// written by a replaced owner.
fn live_segments(reading: &ReplayOptions<'_>, replayed: &mut Replayed) -> Result<Vec<LiveSegment>, Failure> {
    let names = segments(reading.storage, reading.directory)?;
    let mut live: Vec<LiveSegment> = Vec::with_capacity(names.len());
    let mut end: Option<u64> = None;
    let first_of_several = names.first().copied().filter(|_| names.len() > 1);
    for name in names.into_iter().rev() {
        let mut segment = LiveSegment::open(reading, name)?;
        if end.is_some_and(|end| end < name.start) {
            continue;
        }
        if segment.holds_nothing(end, first_of_several == Some(name))? {
            if end.is_none() {
                replayed.torn = Some(format!("{:?} has no whole header and no record", segment.path));
            }
            continue;
        }
        segment.end = end;
        end = Some(end.map_or(segment.follows, |end| end.min(segment.follows)));
        live.push(segment);
    }
    live.reverse();
    Ok(live)
}

impl LiveSegment {
    fn open(reading: &ReplayOptions<'_>, name: SegmentName) -> Result<Self, Failure> {
        let path = join(reading.directory, &name.to_string());
        let mut source = FileCursor::new(reading.storage.open(&path)?);
        let header = if source.remaining() < SEGMENT_HEADER_BYTES {
            None
        } else {
            let header = source.array()?;
            if SegmentHeader::is_of_frames(&header) {
                return Err(Failure::Node(format!("{path:?} is a journal {}", earlier_format(2, FORMAT))));
            }
            SegmentHeader::decode(&header, name)
        };
        if let (Some(header), Some(identity)) = (&header, reading.identity) {
            header.identity.check(identity, &path)?;
        }
        let follows = header.map_or(name.start, |header| header.follows);
        Ok(Self { path, name, source, header, follows, end: None })
    }

    /// Whether a file without a valid header can be ignored: its creation was cut off, or the next segment begins at
    /// the same position, or it has no record. If records were destroyed with it, the segment before ends too early for
    /// the next; the first segment has none before it.
    fn holds_nothing(&mut self, end: Option<u64>, is_first_of_several: bool) -> Result<bool, Failure> {
        if self.header.is_some() {
            return Ok(false);
        }
        if self.source.length() < SEGMENT_HEADER_BYTES || end.is_some_and(|end| end <= self.name.start) {
            return Ok(true);
        }
        Ok(!is_first_of_several && self.count_whole(self.name.start)?.0 == 0)
    }

    /// Visits the records at or after `from`, as far as they are whole.
    fn read(
        &mut self,
        from: u64,
        replayed: &mut Replayed,
        visit: &mut RecordVisitor<'_>,
    ) -> Result<SegmentEnd, Failure> {
        let mut position = from.max(self.name.start);
        if self.source.length() < self.offset(position) {
            // The journal ends before this segment: the valid part decides where.
            position = self.name.start;
        }
        if let Some(header) = &self.header {
            replayed.ordinal = replayed.ordinal.max(header.records);
        }
        replayed.end = replayed.end.max(position);
        if self.header.is_none() {
            let damage = format!("journal {:?} is damaged at offset 0: its header is damaged", self.path);
            let (records, bytes) = self.count_whole(position)?;
            return Ok(SegmentEnd::Damaged { damage, records, bytes });
        }
        let mut payload = Vec::new();
        while self.end.is_none_or(|end| position < end) {
            match self.at(position, &mut payload)? {
                At::Record(header) => {
                    if position >= from {
                        visit(position, &payload)?;
                        replayed.records += 1;
                        replayed.bytes += payload.len() as u64;
                    }
                    replayed.owner = self.name.owner;
                    replayed.ordinal = header.ordinal + 1;
                    position += RECORD_HEADER_BYTES + payload.len() as u64;
                    replayed.end = position;
                }
                At::Nothing if self.end.is_none() => break,
                At::Nothing => return self.ended(position, "the segment ends before the next one begins"),
                At::Bad(what) => return self.ended(position, what),
            }
        }
        Ok(SegmentEnd::Whole)
    }

    /// Handles the absence of a valid record at `position`.
    fn ended(&mut self, position: u64, what: &str) -> Result<SegmentEnd, Failure> {
        let offset = self.offset(position);
        let at = format!("journal {:?} is damaged at offset {offset}: {what}", self.path);
        let (records, bytes) = self.count_whole(position)?;
        if records == 0 && self.end.is_none() {
            let left = self.source.length().saturating_sub(offset);
            return Ok(SegmentEnd::Torn(format!(
                "{:?} has {left} bytes at offset {offset} of which {what}",
                self.path
            )));
        }
        Ok(SegmentEnd::Damaged { damage: at, records, bytes })
    }

    fn offset(&self, position: u64) -> u64 {
        SEGMENT_HEADER_BYTES + (position - self.name.start)
    }

    fn at(&mut self, position: u64, payload: &mut Vec<u8>) -> Result<At, Failure> {
        let offset = self.offset(position);
        let left = self.source.length().saturating_sub(offset);
        if left == 0 {
            return Ok(At::Nothing);
        }
        if left < RECORD_HEADER_BYTES {
            return Ok(At::Bad("a record's header is cut off"));
        }
        self.source.seek(offset);
        let Some(header) = RecordHeader::decode(&self.source.array()?, self.name.owner, position) else {
            return Ok(At::Bad("a record's header does not agree with its checksum"));
        };
        let length = u64::from(header.length);
        if length > left - RECORD_HEADER_BYTES {
            return Ok(At::Bad("a record is cut off"));
        }
        if self.end.is_some_and(|end| end < position + RECORD_HEADER_BYTES + length) {
            return Ok(At::Bad("a record reaches into the next segment"));
        }
        payload.resize(usize::try_from(length).expect("an address has 64 bits"), 0);
        self.source.take(payload)?;
        if checksum(payload) == header.payload {
            return Ok(At::Record(header));
        }
        Ok(At::Bad("a record does not agree with its checksum"))
    }

    /// Counts the valid records at or after `position`, and the bytes of their payloads, skipping anything between
    /// them.
    fn count_whole(&mut self, mut position: u64) -> Result<(u64, u64), Failure> {
        let (mut records, mut bytes, mut payload) = (0, 0, Vec::new());
        while let Some(candidate) = self.find_magic(position)? {
            position = candidate + 1;
            if self.end.is_some_and(|end| end <= candidate) {
                break;
            }
            if let At::Record(_) = self.at(candidate, &mut payload)? {
                records += 1;
                bytes += payload.len() as u64;
                position = candidate + RECORD_HEADER_BYTES + payload.len() as u64;
            }
        }
        Ok((records, bytes))
    }

    /// The next position at or after `position` where the first bytes of a record stand.
    fn find_magic(&mut self, position: u64) -> Result<Option<u64>, Failure> {
        let mut offset = self.offset(position);
        let mut window = Vec::new();
        loop {
            let left = self.source.length().saturating_sub(offset);
            if left < RECORD_HEADER_BYTES {
                return Ok(None);
            }
            window.resize(usize::try_from(left).unwrap_or(SEARCH_BYTES).min(SEARCH_BYTES), 0);
            self.source.seek(offset);
            self.source.take(&mut window)?;
            if let Some(at) = window.windows(RECORD_MAGIC.len()).position(|bytes| bytes == RECORD_MAGIC) {
                return Ok(Some(offset + at as u64 - SEGMENT_HEADER_BYTES + self.name.start));
            }
            // The first bytes of a record may lie on both sides of the window's end.
            offset += (window.len() - RECORD_MAGIC.len() + 1) as u64;
        }
    }
}

impl fmt::Display for Replayed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} records ({} bytes) to position {}", self.records, self.bytes, self.end)
    }
}
