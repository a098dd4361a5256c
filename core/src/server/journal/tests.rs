//! The journal writes the private copy, whatever the sender does afterwards.

use std::sync::Arc;

use super::PrivateCopy;
use crate::memory::shared::{GiveBack, ReadOnly};
use crate::memory::{Arena, Budget, Lease};
use crate::port::Incoming;

struct Nobody;

impl GiveBack for Nobody {
    fn give_back(&self, _: u32, _: u32) {}

    fn is_kept(&self) -> bool {
        true
    }
}

fn arena() -> Arena {
    let mut budget = Budget::new();
    budget.line("test", 4096, 4);
    Arena::shared(&budget).expect("this system shares memory")
}

/// A lease as its owner's peer reads it.
fn view(lease: &Lease) -> Incoming {
    let slot_index = lease.shared().expect("the arena is shared");
    let descriptor = slot_index.file.descriptor().try_clone_to_owned().expect("descriptors are left");
    let memory = Arc::new(ReadOnly::open(&descriptor).expect("it is sealed"));
    let lease = Lease::view(&memory, slot_index.offset, lease.len(), Arc::new(Nobody), 0).expect("it is inside");
    Incoming::Chunk { bytes: lease.len(), lease }
}

fn filled(arena: &Arena, byte: u8, bytes: u32) -> Lease {
    let mut lease = arena.take(bytes).expect("there are four");
    lease.bytes_mut().fill(byte);
    lease
}

#[test]
fn a_record_holds_what_the_payload_was_when_it_was_copied() {
    let (theirs, ours) = (arena(), arena());
    let (mut first, mut last) = (filled(&theirs, 1, 1000), filled(&theirs, 3, 70));
    let own = Incoming::Chunk { lease: filled(&ours, 2, 9), bytes: 5 };
    let body = [view(&first), own, Incoming::Discard { bytes: 8 }, view(&last)];
    let mut copied = PrivateCopy::default();
    let parts = copied.parts(b"head", &body);
    first.bytes_mut().fill(0xaa);
    last.bytes_mut().fill(0xbb);
    assert_eq!(body[0].bytes(), [0xaa; 1000], "the sender writes what the server sees");
    let expected: [&[u8]; 5] = [b"head", &[1; 1000], &[2; 5], &[], &[3; 70]];
    assert_eq!(parts, expected);
}

#[test]
fn the_room_of_a_long_record_serves_a_short_one() {
    let theirs = arena();
    let mut copied = PrivateCopy::default();
    for (byte, bytes) in [(1, 4096), (2, 64), (3, 100)] {
        let lease = filled(&theirs, byte, bytes);
        let body = [view(&lease)];
        let expected = vec![byte; bytes as usize];
        assert_eq!(copied.parts(&[], &body), [&[], expected.as_slice()]);
    }
    assert_eq!(copied.parts(b"head", &[]), [b"head"]);
}
