use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::shared::{Board, COUNTERS, GiveBack, ReadOnly};
use super::{Arena, ArenaUsage, Budget, BudgetLine, Lease, LetGo, Mapped, Mapping, Stretch, StretchMut, lend};
use crate::error::Failure;
use crate::limits::CHUNK_BYTES_MAX;

/// Runs a script over an arena of these lines, and compares its output.
///
/// `take n` takes a lease of n bytes and prints the usage of the arena; `drop i` drops the i-th lease taken.
fn check(lines: &[(u32, u64)], script: &str, expected: &str) {
    let arena = arena(lines);
    let mut leases: Vec<Option<Lease>> = Vec::new();
    let mut output = Vec::new();
    for step in script.split("; ") {
        match step.split_once(' ').expect("a step is a verb and a number") {
            ("take", bytes) => match arena.take(bytes.parse().expect("bytes")) {
                Ok(lease) => leases.push(Some(lease)),
                Err(failure) => output.push(failure.to_string()),
            },
            ("drop", index) => drop(leases[index.parse::<usize>().expect("an index")].take()),
            other => panic!("no step {other:?}"),
        }
        let ArenaUsage { slots_in_use, bytes_in_use, .. } = arena.usage();
        output.push(format!("{slots_in_use}:{bytes_in_use}"));
    }
    assert_eq!(output.join(" "), expected, "{script}");
    drop(leases);
    assert_eq!(arena.usage().slots_in_use, 0, "every slot came back");
}

fn arena(lines: &[(u32, u64)]) -> Arena {
    let mut budget = Budget::new();
    for (bytes, count) in lines {
        budget.line("test", *bytes, *count);
    }
    Arena::new(&budget).expect("the arena is small")
}

fn refusal(lines: &[(u32, u64)]) -> String {
    let mut budget = Budget::new();
    for (bytes, count) in lines {
        budget.line("the test's sends", *bytes, *count);
    }
    match Arena::new(&budget) {
        Err(Failure::Node(reason)) => reason,
        other => panic!("expected a refusal, found {other:?}"),
    }
}

#[test]
fn a_lease_takes_the_smallest_slot_that_holds_it() {
    check(&[(64, 1), (128, 1), (4096, 1)], "take 1; take 65; take 129", "1:64 2:192 3:4288");
    check(&[(64, 1), (128, 1)], "take 64; drop 0; take 64", "1:64 0:0 1:64");
    check(&[(100, 2)], "take 100; take 128", "1:128 2:256");
}

#[test]
fn a_larger_class_serves_when_the_right_one_is_empty() {
    check(&[(64, 1), (4096, 1)], "take 10; take 10", "1:64 2:4160");
    check(&[(64, 1), (256, 1), (4096, 1)], "take 9; take 9; drop 1; take 200", "1:64 2:320 1:64 2:320");
}

#[test]
fn an_exhausted_arena_names_the_requested_and_the_available_memory() {
    let none = "no memory for 10 bytes: all 1 slots of 64 bytes are in use, and no larger slot is free";
    check(&[(64, 1)], "take 10; take 10; drop 0; take 10", &format!("1:64 {none} 1:64 0:0 1:64"));
    let none = "no memory for 65 bytes: all 0 slots of 128 bytes are in use, and no larger slot is free";
    check(&[(64, 1)], "take 65", &format!("{none} 0:0"));
}

#[test]
fn a_lease_of_no_bytes_or_too_many_is_refused() {
    check(&[(64, 1)], "take 0", "lease of 0 bytes; expected 1 to 16777216 0:0");
    check(&[(64, 1)], "take 16777217", "lease of 16777217 bytes; expected 1 to 16777216 0:0");
}

#[test]
fn an_arena_without_slots_is_legal() {
    assert_eq!(arena(&[]).usage(), ArenaUsage::default());
    check(
        &[(64, 0)],
        "take 1",
        "no memory for 1 bytes: all 0 slots of 64 bytes are in use, and no larger slot is free 0:0",
    );
}

#[test]
fn a_budget_adds_up_its_lines_at_the_size_of_their_class() {
    let mut budget = Budget::new();
    budget.line("sends", 100, 3);
    budget.line("chunks", CHUNK_BYTES_MAX, 2);
    assert_eq!(budget.bytes(), 3 * 128 + 2 * u64::from(CHUNK_BYTES_MAX));
    let first = BudgetLine { reason: "sends", bytes: 100, count: 3 };
    assert_eq!(budget.lines().next(), Some(&first));
    let arena = Arena::new(&budget).expect("32 MiB");
    assert_eq!(arena.usage().bytes_total, budget.bytes());
    assert_eq!(arena.usage().slots_total, 5);
}

#[test]
fn an_invalid_budget_is_refused_with_its_bytes() {
    assert_eq!(refusal(&[(0, 1)]), "memory for the test's sends: slots of 0 bytes; expected 1 to 16777216");
    assert_eq!(
        refusal(&[(16_777_217, 1)]),
        "memory for the test's sends: slots of 16777217 bytes; expected 1 to 16777216"
    );
    let many = refusal(&[(64, 1 << 27), (64, 1 << 27)]);
    assert_eq!(
        many,
        "memory for the test's sends: 268435456 slots of 64 bytes; expected at most 268435455 \
         (budget: 17179869184 bytes)"
    );
    // 2^51 bytes are more than a process can address, so the system refuses.
    let large = refusal(&[(CHUNK_BYTES_MAX, 1 << 27)]);
    assert!(large.starts_with("mapping 2251799813685248 bytes of memory: "), "{large}");
}

#[test]
fn a_slot_begins_at_a_multiple_of_its_size() {
    let arena = arena(&[(64, 3), (4096, 3), (256, 3)]);
    for bytes in [64, 4096, 256, 60, 4000, 200] {
        let lease = arena.take(bytes).expect("there are three of each");
        assert_eq!(lease.bytes().len(), bytes as usize);
        let slot = bytes.next_power_of_two() as usize;
        assert_eq!(lease.bytes().as_ptr().addr() % slot, 0, "{bytes}");
    }
}

#[test]
fn a_zeroed_lease_holds_no_old_bytes() {
    let arena = arena(&[(64, 1)]);
    let mut lease = arena.take(64).expect("there is one");
    lease.bytes_mut().fill(7);
    drop(lease);
    assert_eq!(arena.take(64).expect("it came back").bytes(), [7; 64], "the slot is the same");
    assert_eq!(arena.take_zeroed(64).expect("it came back").bytes(), [0; 64]);
}

#[test]
fn the_slot_that_was_returned_last_is_taken_first() {
    let arena = arena(&[(64, 8)]);
    let leases: Vec<Lease> = (0..4).map(|_| arena.take(64).expect("there are eight")).collect();
    let last = leases[3].bytes().as_ptr().addr();
    drop(leases);
    assert_eq!(arena.take(64).expect("there are eight").bytes().as_ptr().addr(), last);
}

fn take_many(arena: &Arena, bytes: u32, count: usize) -> Vec<Lease> {
    let mut leases = Vec::new();
    let found = arena.take_many(bytes, count, &mut |lease| leases.push(lease)).expect("the length is legal");
    assert_eq!(found, leases.len());
    assert!(leases.iter().all(|lease| lease.len() == bytes));
    leases
}

fn address(lease: &Lease) -> usize {
    lease.bytes().as_ptr().addr()
}

#[test]
fn slots_that_were_returned_together_are_taken_together_and_adjacent() {
    let arena = arena(&[(64, 300), (128, 1)]);
    for (asked, found) in [(300, 300), (100, 100), (1000, 300), (0, 0), (1, 1), (128, 128)] {
        let leases = take_many(&arena, 60, asked);
        assert_eq!((leases.len(), arena.usage().slots_in_use), (found, found as u64), "{asked}");
        let mut all: Vec<usize> = leases.iter().map(address).collect();
        let behind = all.windows(2).filter(|pair| pair[1] != pair[0] + 64).count();
        assert!(behind <= 2, "{behind} of {found} do not lie behind the one before");
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), found, "no slot was doubled");
    }
    assert_eq!(arena.usage().slots_in_use, 0, "every slot came back");
    for bytes in [0, CHUNK_BYTES_MAX + 1] {
        assert!(arena.take_many(bytes, 1, &mut |_| panic!("there is no such lease")).is_err(), "{bytes}");
    }
}

#[test]
fn a_stretch_covers_adjacent_leases_and_no_others() {
    let (arena, other) = (arena(&[(64, 4)]), arena(&[(64, 1)]));
    let mut leases = take_many(&arena, 64, 4);
    for (number, lease) in (1..).zip(&mut leases) {
        lease.bytes_mut().fill(number);
    }
    let [one, two, three, four] = &mut leases[..] else { panic!("there are four") };
    let mut stretch = StretchMut::of(one, 64).expect("it is a slot");
    assert!(stretch.is_followed_by(two) && !stretch.is_followed_by(three));
    stretch.extend_by(two, 40);
    assert!(!stretch.is_followed_by(three), "24 bytes lie between");
    stretch.into_bytes().iter_mut().for_each(|byte| *byte += 10);
    let apart = other.take(64).expect("there is one");
    let mut stretch = Stretch::of(one, 64).expect("it is a slot");
    assert!(!stretch.goes_on(three, 64) && !stretch.goes_on(&apart, 64) && !stretch.goes_on(one, 64));
    assert!(stretch.goes_on(two, 64) && stretch.goes_on(three, 8) && !stretch.goes_on(four, 64));
    let expected = [[11; 64].as_slice(), &[12; 40], &[2; 24], &[3; 8]].concat();
    assert_eq!(stretch.bytes(), expected);
}

#[test]
fn a_lease_outlives_the_arena_it_came_from() {
    let mut lease = arena(&[(64, 1)]).take(64).expect("there is one");
    lease.bytes_mut().fill(9);
    assert_eq!(lease.bytes(), [9; 64]);
}

#[test]
fn the_last_reader_may_write_again() {
    let mut lease = Arc::new(arena(&[(64, 1)]).take_zeroed(64).expect("there is one"));
    let reader = Arc::clone(&lease);
    assert!(Arc::get_mut(&mut lease).is_none());
    drop(reader);
    Arc::get_mut(&mut lease).expect("the only one").bytes_mut()[0] = 1;
    assert_eq!(lease.bytes()[0], 1);
}

#[test]
fn a_lease_dropped_on_another_thread_returns_its_slot() {
    let arena = arena(&[(64, 1)]);
    let lease = arena.take(64).expect("there is one");
    std::thread::spawn(move || drop(lease)).join().expect("a drop does not panic");
    assert!(arena.take(64).is_ok());
}

/// Threads take, fill, compare and pass on leases. Two leases of one slot would see each other's bytes.
#[test]
fn no_two_threads_ever_hold_the_same_slot() {
    let arena = arena(&[(64, 5)]);
    let passed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let (arena, passed) = (&arena, &passed);
            scope.spawn(move || {
                for turn in 0..100_000_u32 {
                    let Ok(mut lease) = arena.take(64) else {
                        drop(passed.lock().expect("no thread panics").pop());
                        continue;
                    };
                    let mark = thread.wrapping_mul(64).wrapping_add(u8::try_from(turn % 64).expect("less than 64"));
                    lease.bytes_mut().fill(mark);
                    // A second lease, returned after the first or before it, changes the order beneath the top.
                    let second =
                        if turn % 2 == 0 { take_many(arena, 64, 2) } else { arena.take(64).into_iter().collect() };
                    assert_eq!(lease.bytes(), [mark; 64]);
                    if turn % 3 == 0 {
                        passed.lock().expect("no thread panics").push(lease);
                    } else if turn % 3 == 1 {
                        drop(lease);
                    }
                    drop(second);
                }
            });
        }
    });
    passed.lock().expect("no thread panics").clear();
    assert_eq!(arena.usage().slots_in_use, 0);
    let all: Vec<_> = (0..5).map(|_| arena.take(64)).collect();
    assert!(all.iter().all(Result::is_ok), "no slot was lost");
    assert!(arena.take(64).is_err(), "no slot was doubled");
}

#[test]
fn a_loan_reads_and_writes_the_callers_own_memory_from_another_thread() {
    let source: Vec<u8> = (0..200).collect();
    let mut target = vec![0; 200];
    let (low, high) = target.split_at_mut(100);
    let copied = lend(|book| {
        let pairs = [(book.read(&source[..100]), book.write(low)), (book.read(&source[100..]), book.write(high))];
        let copies = pairs.map(|(from, mut to)| {
            std::thread::spawn(move || {
                to.bytes_mut().copy_from_slice(from.bytes());
                assert_eq!(to.bytes(), from.bytes());
                to.len() + from.len()
            })
        });
        copies.into_iter().map(|copy| copy.join().expect("a copy does not panic")).sum::<u32>()
    });
    assert_eq!(copied, 400);
    assert_eq!(target, source);
}

#[test]
fn a_panic_after_all_loans_are_returned_unwinds_through_lend() {
    let source = [1; 8];
    let unwound = std::panic::catch_unwind(|| {
        lend(|book| {
            drop(book.read(&source));
            panic!("the body's own");
        })
    });
    assert!(unwound.is_err());
}

#[test]
fn a_callers_memory_is_released_by_every_transport_that_holds_it() {
    let check = |lets_go: bool, is_torn: bool| {
        let bytes = [7; 100];
        let mapping = Arc::new(Mapping::of_caller(bytes.as_ptr().addr(), 50).expect("it is some bytes"));
        let known = lend(|book| {
            let (loan, beside) = (book.read(&bytes[10..50]), book.read(&bytes[10..51]));
            assert!(beside.within(&mapping).mapped().is_none(), "not all of it is known");
            let loan = loan.within(&mapping);
            let (known, offset) = loan.mapped().expect("it lies there");
            assert!(loan.shared().is_none(), "no other process can be shown it");
            assert_eq!((known.address(), known.len(), offset), (bytes.as_ptr().addr(), 50, 10));
            if is_torn {
                loan.tear();
            }
            known
        });
        let (holder, former_holder): (Arc<LetGo>, Arc<LetGo>) = (Arc::new(move || lets_go), Arc::new(|| false));
        known.until(&holder);
        known.until(&former_holder);
        drop(former_holder);
        for _ in 0..2 {
            let refused = mapping.let_go().err().map(|failure| failure.to_string());
            assert_eq!(refused.is_none_or(|text| !text.contains("does not release 50 bytes")), lets_go);
        }
        assert_eq!(mapping.withdraw().is_err(), is_torn && !lets_go);
        assert_eq!(mapping.is_in_place(), lets_go || !is_torn, "what a device keeps is given to none any more");
        let again = Arc::new(Mapping::of_caller(bytes.as_ptr().addr(), 50).expect("it is some bytes"));
        assert!(!known.is(&Mapped::buffer(&again)), "it is another's, though it lies there");
        drop(mapping);
        assert!(known.is_last() && known.is_callers());
    };
    for (lets_go, is_torn) in [(true, false), (false, false), (true, true), (false, true)] {
        check(lets_go, is_torn);
    }
    for (address, bytes) in [(64, 0), (0, 64), (usize::MAX, 2)] {
        assert!(Mapping::of_caller(address, bytes).is_err(), "{bytes} bytes at {address}");
    }
}

/// Records the views that are returned.
#[derive(Default)]
struct Owner(Mutex<Vec<(u32, u32)>>);

impl GiveBack for Owner {
    fn give_back(&self, token: u32, bytes: u32) {
        self.0.lock().expect("no test panics with it").push((token, bytes));
    }

    fn is_kept(&self) -> bool {
        true
    }
}

fn shared_arena() -> Arena {
    let mut budget = Budget::new();
    budget.line("test", 4096, 2);
    Arena::shared(&budget).expect("this system shares memory")
}

/// Opens a lease as another process does.
fn opened(lease: &Lease) -> Arc<ReadOnly> {
    let file = lease.shared().expect("the arena is shared").file;
    let descriptor = file.descriptor().try_clone_to_owned().expect("descriptors are left");
    Arc::new(ReadOnly::open(&descriptor).expect("it is sealed"))
}

#[test]
fn a_copy_past_the_caches_has_every_byte_and_touches_no_other() {
    let arena = shared_arena();
    let mut lease = arena.take(4096).expect("there are two");
    (0_u32..).zip(lease.bytes_mut()).for_each(|(index, byte)| *byte = (index * 7 + 1).to_le_bytes()[0]);
    let (memory, offset) = (opened(&lease), lease.shared().expect("the arena is shared").offset);
    for (from, to, length) in (0..40)
        .flat_map(|from| [0, 1, 31, 63, 64, 95, 96, 127, 1000].map(|length| (from, length)))
        .flat_map(|(from, length)| [0, 1, 32, 33].map(|to| (from, to, length)))
    {
        let mut into = [0_u8; 1200];
        let source = memory.bytes(offset + from, length).expect("it is inside");
        lend(|book| {
            let length = usize::try_from(length).expect("it is short");
            book.write(&mut into[to..to + length]).of(usize::MAX).fill(source);
        });
        let mut expected = [0_u8; 1200];
        source.copy_to(&mut expected[to..to + source.len()]);
        assert!(into == expected, "{length} bytes from {from} to {to}");
    }
}

#[test]
fn a_view_reads_what_its_owner_wrote_and_is_given_back_once() {
    let arena = shared_arena();
    let (_, mut lease) = (arena.take(4096).expect("there are two"), arena.take(1000).expect("there are two"));
    lease.bytes_mut().fill(5);
    let (owner, memory) = (Arc::new(Owner::default()), opened(&lease));
    let offset = lease.shared().expect("the arena is shared").offset;
    let view = Lease::view(&memory, offset, 1000, owner.clone(), 7).expect("it is inside");
    assert_eq!((view.bytes(), view.len()), (lease.bytes(), 1000));
    assert!(view.is_foreign() && !lease.is_foreign() && view.shared().is_none());
    drop((memory, arena, lease));
    assert_eq!(view.bytes(), [5; 1000], "a view keeps its mapping");
    assert!(owner.0.lock().expect("no test panics with it").is_empty());
    drop(view);
    assert_eq!(*owner.0.lock().expect("no test panics with it"), [(7, 1000)]);
}

#[test]
fn a_view_beyond_the_memory_is_none() {
    let lease = shared_arena().take(100).expect("there are two");
    let (owner, memory) = (Arc::new(Owner::default()), opened(&lease));
    assert_eq!(memory.len(), 8192);
    let check = |offset: u64, bytes: u32, is_there: bool| {
        let view = Lease::view(&memory, offset, bytes, owner.clone(), 0);
        assert_eq!(view.is_some(), is_there, "{bytes} bytes at {offset}");
    };
    check(0, 8192, true);
    check(8128, 64, true);
    check(8128, 65, false);
    check(8192, 1, false);
    check(u64::MAX - 63, 64, false);
    check(4, 100, false);
}

#[test]
#[should_panic(expected = "another process's memory is read, not written")]
fn a_write_to_a_view_panics() {
    let lease = shared_arena().take(100).expect("there are two");
    let mut view = Lease::view(&opened(&lease), 0, 100, Arc::new(Owner::default()), 0).expect("it is inside");
    view.bytes_mut()[0] = 1;
}

#[test]
fn a_shared_arena_can_be_written_by_its_owner_alone() {
    let lease = shared_arena().take(100).expect("there are two");
    let file = lease.shared().expect("the arena is shared").file;
    assert!(memmap2::MmapRaw::map_raw(&file.descriptor()).is_err(), "nobody maps it to write");
    assert!(rustix::io::write(file.descriptor(), &[1]).is_err(), "nobody writes it");
    assert!(rustix::fs::ftruncate(file.descriptor(), 64).is_err(), "nobody cuts it");
}

#[test]
fn both_sides_of_a_board_see_the_same_bytes_and_counters() {
    let (mut near, descriptor) = Board::create(128).expect("this system shares memory");
    let mut far = Board::open(&descriptor, 128).expect("it is sealed");
    let mut bytes = [0; 3];
    near.write(125, &[1, 2, 3]);
    far.read(125, &mut bytes);
    assert_eq!(bytes, [1, 2, 3]);
    near.counters().get(COUNTERS - 1).store(9, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(far.counters().get(COUNTERS - 1).load(std::sync::atomic::Ordering::SeqCst), 9);
    far.read(0, &mut bytes);
    assert_eq!(bytes, [0; 3], "counters and bytes are apart");
    let refused = Board::open(&descriptor, 64).err().map(|failure| failure.to_string());
    assert_eq!(refused.as_deref(), Some("shared memory: its size: found 4224 bytes, expected 4160"));
}

#[derive(Clone, Debug)]
enum Step {
    Take(u32),
    Drop(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![3 => (1..=600_u32).prop_map(Step::Take), 2 => any::<prop::sample::Index>().prop_map(Step::Drop)]
}

proptest! {
    #[test]
    fn leases_never_overlap_and_keep_what_was_written(
        counts in prop::collection::vec(0..6_u64, 4),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let lines: Vec<(u32, u64)> = [64, 128, 256, 512].into_iter().zip(counts.iter().copied()).collect();
        let arena = arena(&lines);
        let mut held: Vec<(Lease, u8)> = Vec::new();
        for (mark, step) in (0..=u8::MAX).cycle().zip(steps) {
            match step {
                Step::Take(bytes) => match arena.take(bytes) {
                    Ok(mut lease) => {
                        lease.bytes_mut().fill(mark);
                        held.push((lease, mark));
                    }
                    Err(_) => prop_assert!(fitting_slots(&lines, bytes) <= held.len() as u64, "refused too early"),
                },
                Step::Drop(index) if !held.is_empty() => drop(held.swap_remove(index.index(held.len()))),
                Step::Drop(_) => {}
            }
            for (lease, mark) in &held {
                prop_assert!(lease.bytes().iter().all(|byte| byte == mark));
            }
            prop_assert_eq!(arena.usage().slots_in_use, held.len() as u64);
        }
    }
}

/// How many slots could serve a lease of this many bytes.
fn fitting_slots(lines: &[(u32, u64)], bytes: u32) -> u64 {
    lines.iter().filter(|(slot, _)| *slot >= bytes).map(|(_, count)| count).sum()
}
