//! The bytes that the two sides of a connection exchange, apart from frames: `docs/WIRE.md` draws them.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::provider::{End, FarPlace};
use super::{BULK_SLOTS, Ended, NOTE_SLOTS, SLOT_BYTES};

/// An offer or an answer.
pub(super) const LETTER_BYTES: usize = size_of::<RawLetter>();
/// What stands before a message.
pub(super) const PREFIX_BYTES: usize = size_of::<RawPrefix>();
/// A place in memory.
pub(super) const PLACE_BYTES: usize = size_of::<RawPlace>();
/// Where a reason begins in a letter that says no.
const REASON: usize = 8;

const MAGIC: [u8; 4] = *b"PRDM";
const VERSION: u8 = 2;
/// A letter has room for any of the reasons.
const UNUSED: usize = 980;
const NO: u8 = 0;
const YES: u8 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLetter {
    magic: [u8; 4],
    version: u8,
    answer: u8,
    mtu: u8,
    reads_in: u8,
    number: U32,
    packet: U32,
    gid: [u8; 16],
    lid: U16,
    bulk: U16,
    note: U16,
    reserved: U16,
    slot_bytes: U32,
    unused: [u8; UNUSED],
}

/// What a side says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    /// This is its end of the pair.
    Yes(End),
    /// Why it has none.
    No(String),
}

impl Letter {
    pub(super) fn encode(&self) -> [u8; LETTER_BYTES] {
        let mut raw = RawLetter {
            magic: MAGIC,
            version: VERSION,
            answer: NO,
            mtu: 0,
            reads_in: 0,
            number: 0.into(),
            packet: 0.into(),
            gid: [0; 16],
            lid: 0.into(),
            bulk: 0.into(),
            note: 0.into(),
            reserved: 0.into(),
            slot_bytes: 0.into(),
            unused: [0; UNUSED],
        };
        match self {
            Self::Yes(end) => {
                let End { number, packet, gid, lid, mtu, reads_in } = *end;
                (raw.answer, raw.mtu, raw.reads_in) = (YES, mtu, reads_in);
                (raw.number, raw.packet, raw.gid, raw.lid) = (number.into(), packet.into(), gid, lid.into());
                (raw.bulk, raw.note, raw.slot_bytes) = (BULK_SLOTS.into(), NOTE_SLOTS.into(), SLOT_BYTES.into());
                raw.as_bytes().try_into().expect("a letter is as long as a letter")
            }
            Self::No(reason) => {
                let mut bytes: [u8; LETTER_BYTES] = raw.as_bytes().try_into().expect("a letter is as long as a letter");
                let room = &mut bytes[REASON..];
                let cut = (0..=reason.len().min(room.len())).rev().find(|end| reason.is_char_boundary(*end));
                let text = &reason.as_bytes()[..cut.unwrap_or(0)];
                room[..text.len()].copy_from_slice(text);
                bytes
            }
        }
    }

    /// What a letter says, or what is wrong with it.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let wrong = |what: &str| format!("the letter about verbs {what}");
        let raw = RawLetter::ref_from_bytes(bytes)
            .map_err(|_| wrong(&format!("has {} bytes, expected {LETTER_BYTES}", bytes.len())))?;
        if raw.magic != MAGIC || raw.version != VERSION {
            let (magic, version) = (raw.magic, raw.version);
            return Err(wrong(&format!("begins with {magic:02x?}, version {version}; expected version {VERSION}")));
        }
        if raw.answer == NO {
            let text = &bytes[REASON..];
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            return Ok(Self::No(String::from_utf8_lossy(&text[..end]).into_owned()));
        }
        let found = (raw.bulk.get(), raw.note.get(), raw.slot_bytes.get());
        if raw.answer != YES || found != (BULK_SLOTS, NOTE_SLOTS, SLOT_BYTES) {
            let expected = (BULK_SLOTS, NOTE_SLOTS, SLOT_BYTES);
            return Err(wrong(&format!("is for slots {found:?}, expected {expected:?} (bulk, notes, bytes)")));
        }
        let (number, packet) = (raw.number.get(), raw.packet.get());
        if number >> 24 != 0 || packet >> 24 != 0 || !(1..=5).contains(&raw.mtu) {
            return Err(wrong(&format!("names pair {number:#x}, packet {packet:#x}, packet length {}", raw.mtu)));
        }
        let (gid, lid, mtu, reads_in) = (raw.gid, raw.lid.get(), raw.mtu, raw.reads_in);
        Ok(Self::Yes(End { number, packet, gid, lid, mtu, reads_in }))
    }

    /// Whether these bytes can be the beginning of a letter.
    pub(super) fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())])
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPrefix {
    kind: u8,
    reserved: u8,
    taken: U16,
    number: U32,
    bulk: U16,
    note: U16,
    reserved_too: U32,
}

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matter {
    /// The next bytes of frames.
    Bulk = 1,
    /// Where payloads go, in the order of the frames that wait for it.
    Grant = 2,
    /// Nothing but its prefix.
    Bare = 3,
}

/// What stands before a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    pub(super) matter: Matter,
    /// Frames whose payloads were read since the message before.
    pub(super) taken: u16,
    /// The message's place in the order of all of its side.
    pub(super) number: u32,
    /// Slots that were made free since the message before.
    pub(super) bulk: u16,
    pub(super) note: u16,
}

impl Prefix {
    pub(super) fn encode(&self, into: &mut [u8]) {
        let raw = RawPrefix {
            kind: self.matter as u8,
            reserved: 0,
            taken: self.taken.into(),
            number: self.number.into(),
            bulk: self.bulk.into(),
            note: self.note.into(),
            reserved_too: 0.into(),
        };
        into[..PREFIX_BYTES].copy_from_slice(raw.as_bytes());
    }

    pub(super) fn decode(bytes: &[u8], number: u32) -> Result<Self, Ended> {
        let broken = |text: String| Ended::Broken(format!("a message {text}"));
        let (raw, _) = RawPrefix::ref_from_prefix(bytes)
            .map_err(|_| broken(format!("of {} bytes, expected {PREFIX_BYTES} or more", bytes.len())))?;
        let matter = match raw.kind {
            1 => Matter::Bulk,
            2 => Matter::Grant,
            3 => Matter::Bare,
            other => return Err(broken(format!("of kind {other}, expected 1, 2 or 3"))),
        };
        if raw.number.get() != number || raw.reserved != 0 || raw.reserved_too.get() != 0 {
            return Err(broken(format!("with number {}, expected {number}", raw.number.get())));
        }
        Ok(Self { matter, taken: raw.taken.get(), number, bulk: raw.bulk.get(), note: raw.note.get() })
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPlace {
    address: U64,
    key: U32,
    bytes: U32,
}

/// Memory of the side that connects, which the other is asked to read or to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) far: FarPlace,
    /// Zero when the payload is not wanted.
    pub(super) bytes: u32,
}

impl Place {
    pub(super) const NOWHERE: Self = Self { far: FarPlace { address: 0, key: 0 }, bytes: 0 };

    pub(super) fn encode(&self) -> [u8; PLACE_BYTES] {
        let FarPlace { address, key } = self.far;
        let raw = RawPlace { address: address.into(), key: key.into(), bytes: self.bytes.into() };
        raw.as_bytes().try_into().expect("a place is as long as a place")
    }

    pub(super) fn decode(bytes: &[u8; PLACE_BYTES]) -> Self {
        let raw = RawPlace::ref_from_bytes(bytes).expect("the array has the place's size and no alignment");
        Self { far: FarPlace { address: raw.address.get(), key: raw.key.get() }, bytes: raw.bytes.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reasons::{self, Cause};
    use super::*;

    fn end() -> End {
        End { number: 0x0001_0203, packet: 0x00aa_bbcc, gid: [7; 16], lid: 3, mtu: 3, reads_in: 16 }
    }

    #[test]
    fn letters_are_read_as_they_were_written() {
        let long = "é".repeat(LETTER_BYTES / 2);
        let memory = Cause::Memory { bytes: u64::MAX, errno: Some(12), said: "Cannot allocate memory".to_owned() };
        let longest = format!("the server: verbs did not do: {}", reasons::text(&memory, Some(u64::MAX - 1)));
        for letter in [Letter::Yes(end()), Letter::No(longest), Letter::No(String::new())] {
            assert_eq!(Letter::decode(&letter.encode()), Ok(letter));
        }
        let Ok(Letter::No(cut)) = Letter::decode(&Letter::No(long.clone()).encode()) else { panic!("it says no") };
        assert!(long.starts_with(&cut) && cut.len() > 200, "a long reason is cut between letters");
    }

    #[test]
    fn a_letter_that_is_wrong_is_refused_by_name() {
        let check = |at: usize, byte: u8, expected: &str| {
            let mut bytes = Letter::Yes(end()).encode();
            bytes[at] = byte;
            let error = Letter::decode(&bytes).expect_err("it is wrong");
            assert!(error.contains(expected), "{error}");
        };
        check(0, b'X', "begins with");
        check(4, 9, "version 9; expected version 2");
        check(6, 6, "packet length 6");
        check(11, 1, "names pair 0x1010203");
        check(34, 9, "is for slots");
        assert!(Letter::decode(&[0; 9]).expect_err("short").contains("has 9 bytes, expected 1024"));
    }

    #[test]
    fn a_message_out_of_order_is_refused_by_name() {
        let prefix = Prefix { matter: Matter::Grant, taken: 1, number: 9, bulk: 2, note: 3 };
        let mut bytes = [0; PREFIX_BYTES];
        prefix.encode(&mut bytes);
        assert_eq!(Prefix::decode(&bytes, 9).ok(), Some(prefix));
        let error = |bytes: &[u8], number| Prefix::decode(bytes, number).expect_err("it is wrong").to_string();
        assert_eq!(error(&bytes, 8), "a message with number 9, expected 8");
        assert_eq!(error(&bytes[..5], 9), "a message of 5 bytes, expected 16 or more");
        bytes[0] = 7;
        assert_eq!(error(&bytes, 9), "a message of kind 7, expected 1, 2 or 3");
    }
}
