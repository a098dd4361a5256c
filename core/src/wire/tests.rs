//! The wire: golden bytes, a table of every refusal, and properties.

use proptest::prelude::*;

use super::*;
use crate::checksum::checksum;
use crate::dtype::{ElementType, Half};
use crate::ids::{
    ChunkId, ChunkIndex, Epoch, Generation, Incarnation, ParameterIndex, Round, Sequence, Term, Ticket, TrainerId,
};

/// The frame that `docs/WIRE.md` shows.
fn example() -> Frame {
    let head = Head {
        kind: Kind::Push,
        flags: Flags::WANT_VALUE,
        epoch: Epoch(0x0102_0304_0506_0708),
        trainer: TrainerId(3),
        incarnation: Incarnation(2),
        sequence: Sequence(17),
        request: Ticket(99),
        generation: Generation(1),
        term: Term(4),
    };
    let id = ChunkId { parameter: ParameterIndex(5), chunk: ChunkIndex(6) };
    let payload = 1.0_f32.to_le_bytes();
    let bare = Entry::with_payload(id, Round(7), ElementType::Float32, &payload);
    let entry = Entry { checksum: checksum(&payload), ..bare };
    Frame { head, entries: vec![entry].into(), control: vec![0xaa, 0xbb] }
}

/// Decodes header and rest as a transport does.
fn decode(bytes: &[u8]) -> Result<Frame, WireError> {
    let (header, rest) = bytes.split_first_chunk().expect("tests give a whole header");
    Prefix::decode(header)?.finish(rest)
}

/// Makes the checksums hold again after a change.
fn reseal(bytes: &mut [u8]) {
    let rest = checksum(&bytes[64..]);
    bytes[56..60].copy_from_slice(&rest.to_le_bytes());
    let header = checksum(&bytes[..60]);
    bytes[60..64].copy_from_slice(&header.to_le_bytes());
}

#[test]
fn the_bytes_of_a_frame_never_change() {
    let golden = [
        "50535256 02 08 0100 0807060504030201 03000000 02000000 1100000000000000 6300000000000000",
        "01000000 01000000 02000000 04000000 eabffe26 70d09905",
        "0600000000000000 0700000000000000 05000000 04000000 abc454dd 04 00 0000 aabb",
    ];
    let bytes = example().encode();
    let found: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = golden.concat().replace(' ', "");
    assert_eq!(found, expected);
}

#[test]
fn a_frame_is_read_as_it_was_written() {
    assert_eq!(decode(&example().encode()), Ok(example()));
    let bare = Frame::bare(Head::new(Kind::Leave));
    assert_eq!(bare.encode().len(), HEADER_BYTES);
    assert_eq!(decode(&bare.encode()), Ok(bare));
}

#[test]
fn every_refusal_names_what_was_wrong() {
    let check = |at: usize, change: &[u8], sealed: bool, expected: &str| {
        let mut bytes = example().encode();
        bytes[at..at + change.len()].copy_from_slice(change);
        if sealed {
            reseal(&mut bytes);
        }
        let text = decode(&bytes).expect_err(expected).to_string();
        assert!(text.contains(expected), "found \"{text}\", expected \"{expected}\"");
    };
    check(0, b"GET ", true, "not a pserver frame: it begins with 0x20544547");
    check(4, &[1], true, "protocol version 1 is not supported; this side speaks version 2");
    check(4, &[0], false, "protocol version 0 is not supported");
    check(8, &[9], false, "checksum of the header");
    check(60, &[0, 0, 0, 0], false, "checksum of the header");
    check(40, &[0xff; 4], false, "checksum of the header");
    check(5, &[0], true, "kind 0 has no meaning in protocol version 2");
    check(5, &[17], true, "kind 17 has no meaning");
    check(6, &[128], true, "flags 128 has no meaning");
    check(44, &4097_u32.to_le_bytes(), true, "the number of entries 4097 is over the limit of 4096");
    check(48, &1_048_577_u32.to_le_bytes(), true, "the control message's length 1048577 is over the limit of 1048576");
    for kind in
        [Kind::Hello, Kind::Welcome, Kind::Refused, Kind::Control, Kind::Answer, Kind::Finish, Kind::Error, Kind::Offer]
    {
        check(5, &[kind as u8], true, "the number of entries 1 is over the limit of 0");
    }
    check(64, &[9], false, "checksum of the entries");
    check(97, &[9], false, "checksum of the entries");
    check(92, &[8], true, "element type 8 has no meaning");
    for number in [1, 4, 5, 8, 0xff] {
        check(93, &[number], true, &format!("the type of an entry's value {number} has no meaning"));
    }
    check(94, &[1], true, "an entry's reserved field 1 has no meaning");
    check(95, &[1], true, "an entry's reserved field 256 has no meaning");
    check(84, &16_777_217_u32.to_le_bytes(), true, "an entry's payload 16777217 is over the limit of 16777216");
}

#[test]
fn half_precision_is_valid_only_where_values_are_requested() {
    let check = |kind: Kind, flags: Flags, is_right: bool| {
        let mut frame = example();
        (frame.head.kind, frame.head.flags, frame.entries[0].half) = (kind, flags, Some(Half::Bfloat16));
        let bytes = frame.encode();
        assert_eq!(bytes[93], 7, "it is the type's number");
        let text = "the type of an entry's value 7 has no meaning in protocol version 2";
        let found = decode(&bytes).map_err(|error| error.to_string());
        assert_eq!(found, if is_right { Ok(frame) } else { Err(text.to_owned()) }, "{kind:?} {flags:?}");
    };
    check(Kind::Push, Flags::WANT_VALUE, true);
    check(Kind::Push, Flags::WANT_VALUE.with(Flags::UNCHECKED), true);
    check(Kind::Pull, Flags::default(), true);
    check(Kind::Push, Flags::default(), false);
    check(Kind::Pull, Flags::LIST, false);
    for kind in [Kind::Init, Kind::Set, Kind::Done, Kind::Value] {
        check(kind, Flags::WANT_VALUE, false);
    }
}

/// A transport sets the flag after its own check. A frame is sent without the flag, and refused if it arrives with it.
#[test]
fn the_flag_of_a_finite_gradient_is_local_to_its_process() {
    let plain = example();
    let mut found = plain.clone();
    found.head.flags = found.head.flags.with(Flags::FINITE);
    assert_eq!(found.encode(), plain.encode());
    let mut bytes = plain.encode();
    bytes[7] |= 0x80;
    assert!(decode(&bytes).is_err(), "the flag has no meaning from outside");
}

#[test]
fn the_length_of_a_hello_is_bounded_before_authentication() {
    let hello = |control: usize| Frame { control: vec![0; control], ..Frame::bare(Head::new(Kind::Hello)) };
    assert_eq!(decode(&hello(4096).encode()), Ok(hello(4096)));
    let refusal = decode(&hello(4097).encode()).expect_err("too long");
    assert_eq!(refusal.to_string(), "the control message's length 4097 is over the limit of 4096");
}

#[test]
fn payloads_together_are_bounded() {
    let mut frame = example();
    frame.entries = vec![frame.entries[0]; 2].into();
    let mut bytes = frame.encode();
    for entry in [64, 96] {
        bytes[entry + 20..entry + 24].copy_from_slice(&8_388_609_u32.to_le_bytes());
    }
    reseal(&mut bytes);
    let refusal = decode(&bytes).expect_err("too long");
    assert_eq!(refusal.to_string(), "the payload 16777218 is over the limit of 16777216");
}

#[test]
fn a_changed_payload_is_refused() {
    let frame = example();
    assert_eq!(frame.check_payload(0, checksum(&1.0_f32.to_le_bytes())), Ok(()));
    let refusal = frame.check_payload(0, checksum(&2.0_f32.to_le_bytes())).expect_err("changed");
    assert!(refusal.to_string().starts_with("checksum of the payload is 0x"), "{refusal}");
}

#[test]
fn an_answer_has_the_head_of_its_request() {
    let head = example().head;
    let answer = head.answer(Kind::Value);
    assert_eq!(answer, Head { kind: Kind::Value, flags: Flags::default(), ..head });
}

#[test]
fn the_kinds_that_change_a_shard_are_listed() {
    let mutating: Vec<_> = (0..=u8::MAX).filter_map(Kind::from_number).filter(|kind| kind.is_mutating()).collect();
    assert_eq!(mutating, [Kind::Init, Kind::Finish, Kind::Push, Kind::Set, Kind::Leave]);
}

#[test]
fn addresses_are_read_or_refused_by_name() {
    let good = |text: &str, expected: &str, loopback: bool| {
        let address = Address::parse(text).expect(text);
        assert_eq!(address.to_string(), expected);
        assert_eq!(Address::parse(expected).as_ref(), Ok(&address), "what is printed is read as the same");
        assert_eq!(address.is_loopback(), loopback, "{text}");
    };
    good("tcp://127.0.0.1:7164", "tcp://127.0.0.1:7164", true);
    good("node7:7164", "node7:7164", false);
    good("shm://node7:7164", "shm://node7:7164", true);
    good("tcp://node7.cluster.example:0", "tcp://node7.cluster.example:0", false);
    good("localhost:65535", "localhost:65535", true);
    good("[::1]:7164", "[::1]:7164", true);
    good("tcp://[fe80::1%eth0]:1", "tcp://[fe80::1%eth0]:1", false);
    good("10.0.0.1:80", "10.0.0.1:80", false);
    good("verbs://node7:1", "verbs://node7:1", false);
    good("loopback://server:3", "loopback://server:3", true);
    let bad = |text: &str, expected: &str| {
        let error = Address::parse(text).expect_err(text).to_string();
        assert!(error.starts_with(&format!("address \"{text}\": {expected}; expected host:port")), "{error}");
    };
    bad("", "no port");
    bad("node7", "no port");
    bad("tcp://node7", "no port");
    bad("tcp://node7:", "port \"\" is not a number from 0 to 65535");
    bad("node7:http", "port \"http\" is not a number from 0 to 65535");
    bad("node7:65536", "port \"65536\" is not a number from 0 to 65535");
    bad("node7:-1", "port \"-1\" is not a number from 0 to 65535");
    bad("roce://node7:1", "unknown transport \"roce\"");
    bad("://node7:1", "unknown transport \"\"");
    bad("::1:7164", "an IPv6 address stands in brackets");
    bad("[::1:7164", "an IPv6 address stands in brackets");
    bad("tcp://:7164", "the host is missing or not a name");
    bad("[]:7164", "the host is missing or not a name");
    bad("two words:1", "the host is missing or not a name");
}

fn heads() -> impl Strategy<Value = Head> {
    let kinds: Vec<_> = (2..=u8::MAX).filter_map(Kind::from_number).collect();
    (proptest::sample::select(kinds), 0..8_u16, any::<[u64; 3]>(), any::<[u32; 4]>()).prop_map(
        |(kind, flags, [epoch, sequence, request], [trainer, incarnation, generation, term])| Head {
            kind,
            flags: Flags(flags),
            epoch: Epoch(epoch),
            trainer: TrainerId(trainer),
            incarnation: Incarnation(incarnation),
            sequence: Sequence(sequence),
            request: Ticket(request),
            generation: Generation(generation),
            term: Term(term),
        },
    )
}

fn entries() -> impl Strategy<Value = Entry> {
    let types = proptest::sample::select(&ElementType::ALL[..]);
    let halves = proptest::sample::select(&[None, Some(Half::Float16), Some(Half::Bfloat16)][..]);
    (any::<u32>(), any::<[u64; 2]>(), 0..4096_u32, any::<u32>(), types, halves).prop_map(
        |(parameter, [chunk, round], bytes, checksum, element_type, half)| Entry {
            id: ChunkId { parameter: ParameterIndex(parameter), chunk: ChunkIndex(chunk) },
            round: Round(round),
            bytes,
            checksum,
            element_type,
            half,
        },
    )
}

fn frames() -> impl Strategy<Value = Frame> {
    let control = proptest::collection::vec(any::<u8>(), 0..200);
    (heads(), proptest::collection::vec(entries(), 0..50), control).prop_map(|(head, mut entries, control)| {
        entries.truncate(if head.kind.has_entries() { 50 } else { 0 });
        let asks = match head.kind {
            Kind::Push => head.flags.contains(Flags::WANT_VALUE),
            kind => kind == Kind::Pull && !head.flags.contains(Flags::LIST),
        };
        entries.iter_mut().filter(|_| !asks).for_each(|entry| entry.half = None);
        Frame { head, entries: entries.into(), control }
    })
}

proptest! {
    #[test]
    fn every_frame_is_read_as_it_was_written(frame in frames()) {
        prop_assert_eq!(decode(&frame.encode()), Ok(frame));
    }

    #[test]
    fn one_changed_bit_is_refused(frame in frames(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let mut bytes = frame.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let header = bytes.first_chunk().expect("a header");
        // A changed length cannot be asked for its rest, so the header must refuse by itself.
        let refused = Prefix::decode(header).and_then(|prefix| prefix.finish(&bytes[HEADER_BYTES..])).is_err();
        prop_assert!(refused);
    }

    #[test]
    fn arbitrary_headers_never_panic(mut bytes in any::<[[u8; 32]; 2]>(), ours in any::<bool>()) {
        let bytes = bytes.as_flattened_mut();
        if ours {
            bytes[..5].copy_from_slice(b"PSRV\x01");
            let sum = checksum(&bytes[..60]);
            bytes[60..].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(prefix) = Prefix::decode(bytes.first_chunk().expect("64 bytes")) {
            prop_assert!(prefix.rest_bytes() <= 4096 * 32 + 1024 * 1024);
        }
    }

    #[test]
    fn arbitrary_rests_never_panic(entries in 0..4_u32, rest in proptest::collection::vec(any::<u8>(), 96..200)) {
        let frame = Frame { control: rest, ..Frame::bare(Head::new(Kind::Push)) };
        let mut bytes = frame.encode();
        let control = u32::try_from(frame.control.len()).expect("small") - entries * 32;
        bytes[44..48].copy_from_slice(&entries.to_le_bytes());
        bytes[48..52].copy_from_slice(&control.to_le_bytes());
        reseal(&mut bytes);
        if let Ok(frame) = decode(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }

    #[test]
    fn arbitrary_addresses_never_panic(text in "\\PC{0,40}") {
        if let Ok(address) = Address::parse(&text) {
            prop_assert_eq!(Address::parse(&address.to_string()), Ok(address));
        }
    }
}

#[test]
fn the_bytes_of_a_part_header_before_rows_never_change() {
    let part = RowsPart { index: 2, count: 0x0102_0304 };
    assert_eq!(part.encode(), [2, 0, 0, 0, 4, 3, 2, 1]);
    let payload = [&part.encode()[..], b"rows"].concat();
    assert_eq!(RowsPart::decode(&payload), Ok((part, &b"rows"[..])));
    let refused = |payload: &[u8]| RowsPart::decode(payload).expect_err("it is no part").to_string();
    assert!(refused(&payload[..7]).contains("a payload of 7 bytes; expected 8 before the rows"));
    assert!(refused(&[1, 0, 0, 0, 1, 0, 0, 0]).contains("part 1 of 1"));
    assert!(refused(&[0; 8]).contains("part 0 of 0"));
}
