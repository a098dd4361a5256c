//! Decided rounds, as records of the journal: which gradients each counts. A round that a record names is closed with
//! these gradients, whatever comes after it, so a replay decides nothing again.
//!
//! Not here: when a round is decided (`flow`), and what a restart does with its record (`replay`).

use std::sync::Arc;

use super::group::SlotIndex;
use prost::{Enumeration, Message};
use rustc_hash::FxHashMap;

use super::call::CallId;
use super::contribution::{Contribution, PushHeader};
use crate::error::Failure;
use crate::ids::{Generation, Incarnation, Sequence, TrainerId};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX, TRAINERS_MAX};
use crate::memory::Lease;
use crate::wire::{Entry, Frame, HEADER_BYTES, Head, Kind, Prefix, SettingMessage};

/// Numbers of counted gradients in one record, but for a round of more. With those of [`TRAINERS_MAX`] frames they stay
/// below the limit of a control message.
const COUNTED_MAX: usize = 64 * 1024;

/// The control message of a record of decided rounds. Its entries are the rounds.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RoundsMessage {
    /// The frames that brought the counted gradients.
    #[prost(message, repeated, tag = "1")]
    frames: Vec<CountedFrameMessage>,
    /// Names of settings that the frames brought.
    #[prost(string, repeated, tag = "2")]
    settings: Vec<String>,
    /// Lists of counted gradients, shared by rounds that count the same frames.
    #[prost(message, repeated, tag = "3")]
    lists: Vec<CountedMessage>,
    /// The list of each entry.
    #[prost(uint32, repeated, tag = "4")]
    list_of: Vec<u32>,
    /// The position of the first record of a decision that has several.
    #[prost(uint64, optional, tag = "5")]
    pub(super) first: Option<u64>,
    /// Whether the next record belongs to the same decision.
    #[prost(bool, tag = "6")]
    pub(super) continues: bool,
    /// The sort of record.
    #[prost(enumeration = "RoundsRecordKind", tag = "7")]
    kind: i32,
}

/// The sort of a record of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum RoundsRecordKind {
    /// The rounds are decided.
    Decided = 0,
    /// The round is open: these are its first gradients, of which only the sum is left.
    Open = 1,
    /// The parts of these contributions are dropped: the others have not come.
    Dropped = 2,
    /// The value that the last update made, which a set has replaced.
    OfStep = 3,
}

/// A frame whose gradients rounds count.
#[derive(Clone, PartialEq, Message)]
struct CountedFrameMessage {
    #[prost(uint32, tag = "1")]
    trainer: u32,
    #[prost(uint32, tag = "2")]
    incarnation: u32,
    #[prost(uint64, tag = "3")]
    sequence: u64,
    #[prost(double, optional, tag = "4")]
    rate: Option<f64>,
    /// Indices of the names of its settings.
    #[prost(uint32, repeated, tag = "5")]
    names: Vec<u32>,
    #[prost(double, repeated, tag = "6")]
    values: Vec<f64>,
    #[prost(bool, tag = "7")]
    is_void: bool,
    #[prost(bool, tag = "8")]
    is_pass: bool,
}

/// The gradients that a round counts, in trainer order.
#[derive(Clone, PartialEq, Message)]
struct CountedMessage {
    /// Indices of the frames that brought them.
    #[prost(uint32, repeated, tag = "1")]
    frames: Vec<u32>,
    /// Which of them, counted from zero, are none: their trainer had no gradient.
    #[prost(uint32, repeated, tag = "2")]
    without: Vec<u32>,
}

/// The frame of a record, and its payloads.
///
/// # Errors
/// Says how the record is damaged.
pub(super) fn read_record(record: &[u8]) -> Result<(Frame, &[u8]), String> {
    let (header, rest) = record.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| "no header".to_owned())?;
    let prefix = Prefix::decode(header).map_err(|error| error.to_string())?;
    let (table, payload) = rest.split_at_checked(prefix.rest_bytes()).ok_or("it ends within its entries")?;
    Ok((prefix.finish(table).map_err(|error| error.to_string())?, payload))
}

/// The sort of a record of a shard's journal, in words; none of a damaged one.
#[must_use]
pub fn record_name(record: &[u8]) -> Option<&'static str> {
    let (frame, _) = read_record(record).ok()?;
    Some(match frame.head.kind {
        Kind::Init => "a record of initial values",
        Kind::Finish => "a record of the end of an initialisation",
        Kind::Hello => "a record of a new process of a trainer",
        Kind::Push => "a record of gradients",
        Kind::Set => "a record of a value that is set",
        Kind::Leave => "a record of a trainer that leaves",
        Kind::Rounds => {
            let message = RoundsMessage::decode(frame.control.as_slice()).ok()?;
            match message.kind() {
                RoundsRecordKind::Decided if frame.payload_bytes() > 0 => {
                    "a record of decided rounds with their gradients"
                }
                RoundsRecordKind::Decided => "a record of decided rounds",
                RoundsRecordKind::Open => "a record of the first gradients of an open round",
                RoundsRecordKind::Dropped => "a record of dropped parts of rows",
                RoundsRecordKind::OfStep => "a record of the value of a step, which a set has replaced",
            }
        }
        _ => return None,
    })
}

/// A record under construction.
pub(super) struct RoundsRecord<'a> {
    entries: Vec<Entry>,
    message: RoundsMessage,
    /// Index of each frame, by the address of its header, which the contributions hold.
    frames: FxHashMap<*const PushHeader, u32>,
    /// Numbers in all lists.
    counted: usize,
    payload_bytes: u64,
    /// The contributions of the last entry.
    last: &'a [Contribution],
}

impl<'a> RoundsRecord<'a> {
    pub(super) fn new() -> Self {
        let (message, frames) = (RoundsMessage::default(), FxHashMap::default());
        Self { entries: Vec::new(), message, frames, counted: 0, payload_bytes: 0, last: &[] }
    }

    /// How many rounds it has.
    pub(super) fn rounds(&self) -> usize {
        self.entries.len()
    }

    /// Whether another round with so many contributions fits. One always fits an empty record.
    pub(super) fn fits(&self, entry: &Entry, contributions: usize) -> bool {
        self.entries.is_empty()
            || self.entries.len() < FRAME_ENTRIES_MAX as usize
                && self.payload_bytes + u64::from(entry.bytes) <= FRAME_PAYLOAD_BYTES_MAX.into()
                && self.counted + contributions <= COUNTED_MAX
                && self.frames.len() + contributions <= TRAINERS_MAX as usize
    }

    /// Adds a round that counts these contributions.
    pub(super) fn add(&mut self, entry: Entry, contributions: &'a [Contribution]) {
        // Most rounds of a record count the same frames.
        if self.message.lists.is_empty() || !has_frames_of(self.last, contributions) {
            let frames = contributions.iter().map(|one| self.frame(&one.sending)).collect();
            let without = (0..).zip(contributions).filter(|(_, one)| one.bytes == 0).map(|(at, _)| at).collect();
            self.counted += contributions.len();
            self.message.lists.push(CountedMessage { frames, without });
        }
        self.last = contributions;
        self.payload_bytes += u64::from(entry.bytes);
        self.message.list_of.push(number(self.message.lists.len() - 1));
        self.entries.push(entry);
    }

    fn frame(&mut self, header: &Arc<PushHeader>) -> u32 {
        let next = number(self.message.frames.len());
        let index = *self.frames.entry(Arc::as_ptr(header)).or_insert(next);
        if index == next {
            let PushHeader { call, head, rate, settings, is_void, is_pass, .. } = &**header;
            let message = CountedFrameMessage {
                trainer: head.trainer.0,
                incarnation: call.incarnation.0,
                sequence: call.sequence.0,
                rate: *rate,
                names: settings.iter().map(|setting| self.name(&setting.name)).collect(),
                values: settings.iter().map(|setting| setting.value).collect(),
                is_void: *is_void,
                is_pass: *is_pass,
            };
            self.message.frames.push(message);
        }
        index
    }

    fn name(&mut self, name: &str) -> u32 {
        let names = &mut self.message.settings;
        let at = names.iter().position(|known| known == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        number(at)
    }

    /// The finished record, of a kind that stands alone.
    pub(super) fn finish_as(mut self, kind: RoundsRecordKind, generation: Generation) -> Frame {
        self.message.set_kind(kind);
        self.finish(generation, None, false)
    }

    /// The record of a dropped contribution to a bucket.
    pub(super) fn dropped(entry: Entry, generation: Generation, trainer: TrainerId, call: CallId) -> Frame {
        let CallId { incarnation, sequence } = call;
        let frame = CountedFrameMessage {
            trainer: trainer.0,
            incarnation: incarnation.0,
            sequence: sequence.0,
            ..CountedFrameMessage::default()
        };
        let lists = vec![CountedMessage { frames: vec![0], without: Vec::new() }];
        let mut message = RoundsMessage { frames: vec![frame], lists, list_of: vec![0], ..RoundsMessage::default() };
        message.set_kind(RoundsRecordKind::Dropped);
        let head = Head { generation, ..Head::new(Kind::Rounds) };
        Frame { entries: [entry].into_iter().collect(), ..Frame::with_control(head, &message) }
    }

    /// The finished record: `first` is the position of the decision's first one, and `continues` says that another one
    /// follows.
    pub(super) fn finish(self, generation: Generation, first: Option<u64>, continues: bool) -> Frame {
        let message = RoundsMessage { first, continues, ..self.message };
        let head = Head { generation, ..Head::new(Kind::Rounds) };
        Frame { entries: self.entries.into(), ..Frame::with_control(head, &message) }
    }
}

/// A round that is decided: the open one of a chunk, or the one after it.
#[derive(Clone, Copy)]
pub(super) struct DecidedRound {
    pub(super) slot_index: SlotIndex,
    pub(super) is_next: bool,
}

/// Whether both have gradients of the same frames.
fn has_frames_of(last: &[Contribution], next: &[Contribution]) -> bool {
    let is_same = |(one, other): (&Contribution, &Contribution)| {
        Arc::ptr_eq(&one.sending, &other.sending) && (one.bytes == 0) == (other.bytes == 0)
    };
    last.len() == next.len() && last.iter().zip(next).all(is_same)
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a record is bounded")
}

/// Decided rounds as the journal has them.
#[derive(Default)]
pub(super) struct RecordedRounds {
    /// The position of their first record.
    pub(super) position: u64,
    pub(super) rounds: Vec<RecordedRound>,
    pub(super) kind: RoundsRecordKind,
}

/// A decided round as the journal has it.
pub(super) struct RecordedRound {
    /// The chunk and the round's number.
    pub(super) entry: Entry,
    pub(super) counted: Vec<Counted>,
    /// The merged gradient, where the journal does not have the counted ones.
    pub(super) sum: Option<Lease>,
}

/// A gradient that a decided round counts.
pub(super) struct Counted {
    pub(super) header: PushHeader,
    /// Whether its trainer had a gradient.
    pub(super) has_gradient: bool,
}

impl RoundsMessage {
    /// The gradients that the round of the entry at this place counts.
    ///
    /// # Errors
    /// When the message is damaged.
    pub(super) fn counted(&self, entry: usize) -> Result<Vec<Counted>, Failure> {
        let damaged = || Failure::call("the list of a round's gradients is damaged");
        let list = self.list_of.get(entry).and_then(|list| self.lists.get(*list as usize)).ok_or_else(damaged)?;
        let counted = |(at, frame): (u32, &u32)| {
            let header = self.frames.get(*frame as usize).and_then(|frame| self.header(frame)).ok_or_else(damaged)?;
            Ok(Counted { header, has_gradient: !list.without.contains(&at) })
        };
        (0..).zip(&list.frames).map(counted).collect()
    }

    fn header(&self, frame: &CountedFrameMessage) -> Option<PushHeader> {
        let CountedFrameMessage { trainer, incarnation, sequence, rate, names, values, is_void, is_pass } = frame;
        let (incarnation, sequence) = (Incarnation(*incarnation), Sequence(*sequence));
        let setting = |(name, value): (&u32, &f64)| {
            Some(SettingMessage { name: self.settings.get(*name as usize)?.clone(), value: *value })
        };
        Some(PushHeader {
            call: CallId { incarnation, sequence },
            rate: *rate,
            settings: names.iter().zip(values).map(setting).collect::<Option<_>>()?,
            is_void: *is_void,
            is_pass: *is_pass,
            is_logged: false,
            nanos: 0,
            arrival: 0,
            peer: None,
            head: Head { trainer: TrainerId(*trainer), incarnation, sequence, ..Head::new(Kind::Push) },
        })
    }
}
