//! Wire format of verbs messages other than frames; `docs/WIRE.md` draws it.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::provider::{LinkLayer, PairAddress, RemoteAddress};
use super::{BULK_SLOTS, CONTROL_SLOTS, ConnectionError, SLOT_BYTES};

/// Bytes of an offer or an answer.
pub(super) const HANDSHAKE_BYTES: usize = size_of::<RawHandshake>();
/// Bytes of a message's prefix.
pub(super) const PREFIX_BYTES: usize = size_of::<RawMessagePrefix>();
/// Bytes of a remote buffer's address.
pub(super) const REMOTE_BUFFER_BYTES: usize = size_of::<RawRemoteBuffer>();
/// The offset of the reason in a negative answer.
const REASON: usize = 8;

/// The offset of the version.
const VERSION_AT: usize = 4;

const MAGIC: [u8; 4] = *b"PRDM";
const VERSION: u8 = 3;
/// Makes a handshake message long enough for any reason.
const UNUSED: usize = 980;
const NO: u8 = 0;
const YES: u8 = 1;

// tidy: allow fields: the layout of a message on the wire.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHandshake {
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
    layer: u8,
    reserved: u8,
    slot_bytes: U32,
    unused: [u8; UNUSED],
}

/// An offer or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeMessage {
    /// The address of this side's queue pair.
    Yes(PairAddress),
    /// The reason why this side has none.
    No(String),
}

impl HandshakeMessage {
    pub(crate) fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let mut raw = RawHandshake {
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
            layer: LinkLayer::Unknown as u8,
            reserved: 0,
            slot_bytes: 0.into(),
            unused: [0; UNUSED],
        };
        match self {
            Self::Yes(end) => {
                let PairAddress { number, packet, gid, lid, mtu, reads_in, layer } = *end;
                (raw.answer, raw.mtu, raw.reads_in, raw.layer) = (YES, mtu, reads_in, layer as u8);
                (raw.number, raw.packet, raw.gid, raw.lid) = (number.into(), packet.into(), gid, lid.into());
                (raw.bulk, raw.note, raw.slot_bytes) = (BULK_SLOTS.into(), CONTROL_SLOTS.into(), SLOT_BYTES.into());
                raw.as_bytes().try_into().expect("the message has its fixed length")
            }
            Self::No(reason) => {
                let mut bytes: [u8; HANDSHAKE_BYTES] =
                    raw.as_bytes().try_into().expect("the message has its fixed length");
                let room = &mut bytes[REASON..];
                let cut = (0..=reason.len().min(room.len())).rev().find(|end| reason.is_char_boundary(*end));
                let text = &reason.as_bytes()[..cut.unwrap_or(0)];
                room[..text.len()].copy_from_slice(text);
                bytes
            }
        }
    }

    /// Decodes a handshake message, or says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let wrong = |result: &str| format!("the verbs handshake {result}");
        // Another version's message may have another length, so the version is checked first.
        if let [magic @ .., version] = &bytes[..bytes.len().min(VERSION_AT + 1)]
            && (*magic != MAGIC[..magic.len()] || magic.len() == VERSION_AT && *version != VERSION)
        {
            return Err(wrong(&format!("begins with {magic:02x?}, version {version}; expected version {VERSION}")));
        }
        let raw = RawHandshake::ref_from_bytes(bytes)
            .map_err(|_| wrong(&format!("has {} bytes, expected {HANDSHAKE_BYTES}", bytes.len())))?;
        if raw.answer == NO {
            let text = &bytes[REASON..];
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            return Ok(Self::No(String::from_utf8_lossy(&text[..end]).into_owned()));
        }
        let found = (raw.bulk.get(), raw.note.get(), raw.slot_bytes.get());
        if raw.answer != YES || found != (BULK_SLOTS, CONTROL_SLOTS, SLOT_BYTES) {
            let expected = (BULK_SLOTS, CONTROL_SLOTS, SLOT_BYTES);
            return Err(wrong(&format!("is for slots {found:?}, expected {expected:?} (bulk, notes, bytes)")));
        }
        let (number, packet) = (raw.number.get(), raw.packet.get());
        if number >> 24 != 0 || packet >> 24 != 0 || !(1..=5).contains(&raw.mtu) {
            return Err(wrong(&format!("names pair {number:#x}, packet {packet:#x}, packet length {}", raw.mtu)));
        }
        let (gid, lid, mtu, reads_in) = (raw.gid, raw.lid.get(), raw.mtu, raw.reads_in);
        let layer = match raw.layer {
            0 => LinkLayer::Unknown,
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            other => return Err(wrong(&format!("names link layer {other}; expected 0, 1 or 2"))),
        };
        Ok(Self::Yes(PairAddress { number, packet, gid, lid, mtu, reads_in, layer }))
    }

    /// Whether the bytes suffice to decode the message, or to refuse it.
    pub(super) fn is_there(bytes: &[u8]) -> bool {
        bytes.len() == HANDSHAKE_BYTES || bytes.get(VERSION_AT).is_some_and(|version| *version != VERSION)
    }

    /// Whether the bytes may be the beginning of a handshake message.
    pub(super) fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())])
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawMessagePrefix {
    kind: u8,
    reserved: u8,
    taken: U16,
    number: U32,
    bulk: U16,
    note: U16,
    reserved_too: U32,
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// The next bytes of frames.
    Bulk = 1,
    /// Addresses for payloads, in the order of the frames that wait for them.
    Destinations = 2,
    /// The prefix alone.
    CreditsOnly = 3,
}

/// The prefix of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessagePrefix {
    pub(super) kind: MessageKind,
    /// Frames whose payloads were read since the message before.
    pub(super) taken: u16,
    /// The sequence number among all messages of its side.
    pub(super) number: u32,
    /// Credits that were freed since the message before.
    pub(super) bulk: u16,
    pub(super) note: u16,
}

impl MessagePrefix {
    pub(super) fn encode(&self, into: &mut [u8]) {
        let raw = RawMessagePrefix {
            kind: self.kind as u8,
            reserved: 0,
            taken: self.taken.into(),
            number: self.number.into(),
            bulk: self.bulk.into(),
            note: self.note.into(),
            reserved_too: 0.into(),
        };
        into[..PREFIX_BYTES].copy_from_slice(raw.as_bytes());
    }

    pub(super) fn decode(bytes: &[u8], number: u32) -> Result<Self, ConnectionError> {
        let broken = |text: String| ConnectionError::Broken(format!("a message {text}"));
        let (raw, _) = RawMessagePrefix::ref_from_prefix(bytes)
            .map_err(|_| broken(format!("of {} bytes, expected {PREFIX_BYTES} or more", bytes.len())))?;
        let kind = match raw.kind {
            1 => MessageKind::Bulk,
            2 => MessageKind::Destinations,
            3 => MessageKind::CreditsOnly,
            other => return Err(broken(format!("of kind {other}, expected 1, 2 or 3"))),
        };
        if raw.number.get() != number || raw.reserved != 0 || raw.reserved_too.get() != 0 {
            return Err(broken(format!("with number {}, expected {number}", raw.number.get())));
        }
        Ok(Self { kind, taken: raw.taken.get(), number, bulk: raw.bulk.get(), note: raw.note.get() })
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRemoteBuffer {
    address: U64,
    key: U32,
    bytes: U32,
}

/// Memory of the connecting side that the accepting side reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteBuffer {
    pub(super) remote: RemoteAddress,
    /// Zero when the payload is to be discarded.
    pub(super) bytes: u32,
}

impl RemoteBuffer {
    pub(super) const DISCARDED: Self = Self { remote: RemoteAddress { address: 0, key: 0 }, bytes: 0 };

    /// Memory that the peer writes with this key.
    pub(super) fn of(bytes: &mut [u8], key: u32) -> Self {
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        let length = u32::try_from(bytes.len()).expect("a payload's length is 32 bits");
        Self { remote: RemoteAddress { address, key }, bytes: length }
    }

    pub(super) fn encode(&self) -> [u8; REMOTE_BUFFER_BYTES] {
        let RemoteAddress { address, key } = self.remote;
        let raw = RawRemoteBuffer { address: address.into(), key: key.into(), bytes: self.bytes.into() };
        raw.as_bytes().try_into().expect("a place is as long as a place")
    }

    pub(super) fn decode(bytes: &[u8; REMOTE_BUFFER_BYTES]) -> Self {
        let raw = RawRemoteBuffer::ref_from_bytes(bytes).expect("the array has the place's size and no alignment");
        Self { remote: RemoteAddress { address: raw.address.get(), key: raw.key.get() }, bytes: raw.bytes.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reasons::{self, UnavailableCause};
    use super::*;

    fn end() -> PairAddress {
        PairAddress {
            number: 0x0001_0203,
            packet: 0x00aa_bbcc,
            gid: [7; 16],
            lid: 3,
            mtu: 3,
            reads_in: 16,
            layer: LinkLayer::Ethernet,
        }
    }

    #[test]
    fn handshake_messages_are_decoded_as_they_were_encoded() {
        let long = "é".repeat(HANDSHAKE_BYTES / 2);
        let memory =
            UnavailableCause::Memory { bytes: u64::MAX, errno: Some(12), said: "Cannot allocate memory".to_owned() };
        let longest = format!("the server: verbs cannot be used: {}", reasons::text(&memory, Some(u64::MAX - 1)));
        for message in
            [HandshakeMessage::Yes(end()), HandshakeMessage::No(longest), HandshakeMessage::No(String::new())]
        {
            assert_eq!(HandshakeMessage::decode(&message.encode()), Ok(message));
        }
        let Ok(HandshakeMessage::No(cut)) = HandshakeMessage::decode(&HandshakeMessage::No(long.clone()).encode())
        else {
            panic!("it says no")
        };
        assert!(long.starts_with(&cut) && cut.len() > 200, "a long reason is cut between characters");
    }

    #[test]
    fn a_wrong_handshake_message_is_refused_by_name() {
        let check = |at: usize, byte: u8, expected: &str| {
            let mut bytes = HandshakeMessage::Yes(end()).encode();
            bytes[at] = byte;
            let error = HandshakeMessage::decode(&bytes).expect_err("it is wrong");
            assert!(error.contains(expected), "{error}");
        };
        check(0, b'X', "begins with");
        check(4, 9, "version 9; expected version 3");
        check(6, 6, "packet length 6");
        check(11, 1, "names pair 0x1010203");
        check(34, 9, "is for slots");
        check(38, 3, "names link layer 3");
        let bytes = HandshakeMessage::Yes(end()).encode();
        assert!(HandshakeMessage::decode(&bytes[..9]).expect_err("short").contains("has 9 bytes, expected 1024"));
        assert!(HandshakeMessage::decode(&[]).expect_err("short").contains("has 0 bytes, expected 1024"));
        assert!(!HandshakeMessage::is_there(&bytes[..1023]) && HandshakeMessage::is_there(&bytes));
        // A message of another version need not be as long.
        let other = [b'P', b'R', b'D', b'M', 1, 0];
        assert!(HandshakeMessage::begins(&other) && HandshakeMessage::is_there(&other));
        assert!(
            HandshakeMessage::decode(&other).expect_err("another version").contains("version 1; expected version 3")
        );
    }

    #[test]
    fn a_message_out_of_order_is_refused_by_name() {
        let prefix = MessagePrefix { kind: MessageKind::Destinations, taken: 1, number: 9, bulk: 2, note: 3 };
        let mut bytes = [0; PREFIX_BYTES];
        prefix.encode(&mut bytes);
        assert_eq!(MessagePrefix::decode(&bytes, 9).ok(), Some(prefix));
        let error = |bytes: &[u8], number| MessagePrefix::decode(bytes, number).expect_err("it is wrong").to_string();
        assert_eq!(error(&bytes, 8), "a message with number 9, expected 8");
        assert_eq!(error(&bytes[..5], 9), "a message of 5 bytes, expected 16 or more");
        bytes[0] = 7;
        assert_eq!(error(&bytes, 9), "a message of kind 7, expected 1, 2 or 3");
    }
}
