//! Buckets: rows that arrive in parts, twice, or not at all, full tables, and malformed rows.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use prost::Message;

use super::records::saved;
use super::script::Script;
use super::stage::{Answer, Parcel, Plan, Stage, TIMEOUT, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64, Int64};
use crate::ids::{ChunkId, Incarnation};
use crate::server::group::SlotIndex;
use crate::server::shard::Phase;
use crate::wire::{Flags, Kind, PushMessage, RowsPart, StateMessage};

const SGD: &str = "const_lr { learning_rate: 1 } sparse { height: 100 width: 2 buckets: 1 constant { value: 10 } }";

/// One sparse parameter `s` with one bucket, and a dense one.
fn stage(mode: Mode, trainers: u32, config: &'static str) -> Stage {
    let plan =
        Plan::new(mode, Merge::Sum, trainers).with("s", Float32, 2, config).with("d", Float32, 2, "optimizer: SGD");
    Stage::serving(plan)
}

fn bucket() -> ChunkId {
    id(0, 0)
}

/// The part of a payload with these rows, all of whose elements are alike.
fn part(index: u32, count: u32, rows: &[(u64, f32)]) -> Vec<u8> {
    let ids = rows.iter().flat_map(|(id, _)| id.to_le_bytes());
    let values = rows.iter().flat_map(|(_, value)| [*value; 2]).flat_map(f32::to_le_bytes);
    RowsPart { index, count }.encode().into_iter().chain(ids).chain(values).collect()
}

fn push(stage: &mut Stage, trainer: u32, round: u64, payload: Vec<u8>) -> Parcel {
    stage.push(trainer, vec![(bucket(), round, payload)], false)
}

/// Delivers a frame, and returns the answers.
fn deliver(stage: &mut Stage, trainer: u32, parcel: &Parcel) -> Vec<Answer> {
    stage.answers.clear();
    stage.deliver(trainer, parcel);
    std::mem::take(&mut stage.answers)
}

fn kinds(answers: &[Answer]) -> Vec<Kind> {
    answers.iter().map(|answer| answer.frame.head.kind).collect()
}

/// The first elements of these rows, as a pull of the version finds them.
fn pull(stage: &mut Stage, trainer: u32, version: u64, ids: &[u64]) -> Vec<f32> {
    let head = stage.head(Kind::Pull, trainer);
    let payload: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let parcel = Parcel::new(head, vec![(bucket(), version, Float32, payload)]);
    let answers = deliver(stage, trainer, &parcel);
    assert_eq!(kinds(&answers), [Kind::Value], "{:?}", stage.errors());
    let rows = answers[0].body.concat();
    rows.as_chunks::<8>().0.iter().map(|row| f32::from_le_bytes([row[0], row[1], row[2], row[3]])).collect()
}

fn check_refused(stage: &mut Stage, parcel: &Parcel, part: &str) {
    let before = stage.contents();
    stage.answers.clear();
    stage.deliver(0, parcel);
    let errors = stage.errors();
    assert!(errors.iter().any(|text| text.contains(part)), "{errors:?}; expected {part}");
    assert_eq!(stage.contents(), before, "{part}: nothing is half-applied");
}

#[test]
fn a_round_counts_a_contribution_in_parts_once_and_whole() {
    let mut stage = stage(Mode::Sync, 2, SGD);
    let first = push(&mut stage, 0, 1, part(0, 3, &[(7, 1.0)]));
    let mut second = first.clone();
    second.body = vec![part(1, 3, &[(8, 1.0), (7, 2.0)])];
    second.frame.entries[0].bytes = u32::try_from(second.body[0].len()).expect("it is short");
    let mut third = second.clone();
    third.body = vec![part(2, 3, &[(9, 5.0)])];
    third.frame.entries[0].bytes = u32::try_from(third.body[0].len()).expect("it is short");
    let other = push(&mut stage, 1, 1, part(0, 1, &[(7, 4.0)]));
    // The last part first: it is answered when the contribution is whole, the others on arrival, also twice.
    assert_eq!(kinds(&deliver(&mut stage, 0, &third)), []);
    assert_eq!(kinds(&deliver(&mut stage, 1, &other)), [Kind::Done]);
    assert_eq!(kinds(&deliver(&mut stage, 0, &first)), [Kind::Done]);
    assert_eq!(kinds(&deliver(&mut stage, 0, &first)), [Kind::Done]);
    assert_eq!(pull(&mut stage, 1, 0, &[7]), [10.0], "a part is no contribution");
    let answers = deliver(&mut stage, 0, &second);
    assert_eq!(kinds(&answers), [Kind::Done], "the two requests have one head");
    for again in [&third, &first, &second] {
        assert_eq!(kinds(&deliver(&mut stage, 0, again)), [Kind::Done]);
    }
    assert_eq!(pull(&mut stage, 0, 1, &[9, 7, 7, 1, 8]), [5.0, 3.0, 3.0, 10.0, 9.0]);
    assert_eq!(stage.contents()[0].1.0, 1, "one version");
}

#[test]
fn resent_parts_with_other_boundaries_replace_the_first_parts() {
    let mut stage = stage(Mode::Async, 1, SGD);
    let first = push(&mut stage, 0, 0, part(0, 3, &[(1, 1.0), (2, 1.0)]));
    let mut deliver_part = |index: u32, rows: &[(u64, f32)]| {
        let mut parcel = first.clone();
        parcel.body = vec![part(index, 3, rows)];
        parcel.frame.entries[0].bytes = u32::try_from(parcel.body[0].len()).expect("it is short");
        deliver(&mut stage, 0, &parcel);
    };
    deliver_part(0, &[(1, 1.0), (2, 1.0)]);
    deliver_part(1, &[(3, 1.0), (4, 1.0)]);
    for (index, id) in [(0, 4), (1, 2), (2, 5)] {
        deliver_part(index, &[(id, 1.0), (id + 10, 1.0)]);
    }
    let found = pull(&mut stage, 0, 1, &[1, 2, 3, 4, 5, 12, 14, 15]);
    assert_eq!(found, [10.0, 9.0, 10.0, 9.0, 9.0, 9.0, 9.0, 9.0], "each row once, and none of the first ones");
}

#[test]
fn a_checkpoint_carries_over_a_call_in_parts_before_a_later_incomplete_one() {
    let memory = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut kept = Stage::empty(stage(Mode::Sync, 2, SGD).plan);
    kept.restore(&disk, false);
    kept.initialise();
    for (round, parts) in [(1, 2), (2, 1)] {
        let mut parcel = push(&mut kept, 0, round, part(0, 2, &[(7, 1.0)]));
        for index in 0..parts {
            parcel.body = vec![part(index, 2, &[(7 + u64::from(index), 1.0)])];
            deliver(&mut kept, 0, &parcel);
        }
    }
    let mut kept = Script::new(kept);
    let mut again = saved(&mut kept, &memory);
    for stage in [&mut kept.stage, &mut again] {
        assert_eq!(gathered(stage), 1);
        let other = push(stage, 1, 1, part(0, 1, &[(7, 4.0)]));
        assert_eq!(kinds(&deliver(stage, 1, &other)), [Kind::Done]);
    }
    assert_eq!(again.contents(), kept.stage.contents());
    assert_eq!(again.contents()[0].1.0, 1, "the round is over");
}

/// The number of incomplete contributions.
fn gathered(stage: &Stage) -> usize {
    let Phase::Serving(serving) = &stage.shard.phase else { panic!("it serves") };
    let bucket = serving.table.chunks[SlotIndex::FIRST].bucket().expect("it is sparse");
    bucket.gathered().map(|(trainer, call, ..)| (trainer, call)).collect::<BTreeSet<_>>().len()
}

#[test]
fn incomplete_parts_are_dropped_after_a_later_call_or_incarnation() {
    let begun = || {
        let mut stage = stage(Mode::Async, 2, SGD);
        let half = push(&mut stage, 0, 0, part(0, 2, &[(1, 100.0)]));
        deliver(&mut stage, 0, &half);
        assert_eq!(gathered(&stage), 1);
        stage
    };
    for payload in [Vec::new(), part(0, 1, &[(2, 1.0)])] {
        let mut stage = begun();
        let other = push(&mut stage, 1, 0, payload.clone());
        deliver(&mut stage, 1, &other);
        assert_eq!(gathered(&stage), 1, "another's");
        let whole = push(&mut stage, 0, 0, payload);
        deliver(&mut stage, 0, &whole);
        assert_eq!(gathered(&stage), 0, "a later call is whole");
    }
    let mut stage = begun();
    stage.connect(0, Incarnation(1));
    assert_eq!(gathered(&stage), 1, "the same life");
    stage.connect(0, Incarnation(2));
    assert_eq!(gathered(&stage), 0, "a newer life");
}

#[test]
fn incomplete_parts_are_dropped_after_the_round_timeout_and_their_trainer_is_named() {
    let mut stage = stage(Mode::Sync, 2, SGD);
    let parts: Vec<Parcel> = {
        let first = push(&mut stage, 0, 1, part(0, 3, &[(1, 1.0)]));
        let later = [part(1, 3, &[(2, 1.0)]), part(2, 3, &[(3, 1.0)])].map(|payload| {
            let mut parcel = first.clone();
            parcel.frame.entries[0].bytes = u32::try_from(payload.len()).expect("it is short");
            parcel.body = vec![payload];
            parcel
        });
        std::iter::once(first).chain(later).collect()
    };
    let [first, second, third] = parts.as_slice() else { panic!("three") };
    deliver(&mut stage, 0, first);
    stage.wait(TIMEOUT / 2);
    assert_eq!(kinds(&deliver(&mut stage, 0, third)), [], "it waits for the second");
    stage.wait(TIMEOUT / 2);
    assert_eq!(gathered(&stage), 1, "a part came since");
    stage.answers.clear();
    stage.wait(TIMEOUT / 2);
    assert_eq!(gathered(&stage), 0);
    let dropped = "parameter \"s\" bucket 0: 2 of 3 parts of the rows of trainer 0 arrived, and no other for 60.0 s";
    assert!(stage.errors()[0].contains(dropped), "{:?}", stage.errors());
    // Later parts are refused until the whole contribution is sent again.
    assert_eq!(kinds(&deliver(&mut stage, 0, second)), [Kind::Error]);
    assert_eq!(gathered(&stage), 0, "no contribution is left half-applied");
    for one in &parts {
        assert_eq!(kinds(&deliver(&mut stage, 0, one)), [Kind::Done]);
    }
    let other = push(&mut stage, 1, 1, Vec::new());
    deliver(&mut stage, 1, &other);
    assert_eq!(pull(&mut stage, 0, 1, &[1, 2, 3, 4]), [9.0, 9.0, 9.0, 10.0]);
}

#[test]
fn a_contribution_without_rows_counts() {
    let mut stage = stage(Mode::Sync, 2, SGD);
    let (empty, rows) = (push(&mut stage, 0, 1, Vec::new()), push(&mut stage, 1, 1, part(0, 1, &[(3, 1.0)])));
    assert_eq!(kinds(&deliver(&mut stage, 0, &empty)), [Kind::Done]);
    assert_eq!(kinds(&deliver(&mut stage, 1, &rows)), [Kind::Done]);
    assert_eq!(pull(&mut stage, 0, 1, &[3]), [9.0]);
    for trainer in [0, 1] {
        let empty = push(&mut stage, trainer, 2, Vec::new());
        deliver(&mut stage, trainer, &empty);
        deliver(&mut stage, trainer, &empty);
    }
    assert_eq!(stage.contents()[0].1.0, 2, "empty rounds are rounds");
    // A part without rows is valid.
    let none = push(&mut stage, 0, 3, part(0, 1, &[]));
    assert_eq!(kinds(&deliver(&mut stage, 0, &none)), [Kind::Done]);
}

/// Marks a push as one without a gradient, or as one that ends its round without an update.
fn without(mut parcel: Parcel, is_void: bool) -> Parcel {
    parcel.frame.control = PushMessage { is_void, is_pass: !is_void, ..PushMessage::default() }.encode_to_vec();
    parcel
}

#[test]
fn a_round_for_which_no_trainer_has_a_gradient_is_no_update_of_a_table() {
    const MOMENTUM: &str = "sgd { momentum: 0.5 } const_lr { learning_rate: 1 } \
                            sparse { height: 100 width: 2 buckets: 1 constant { value: 10 } }";
    let mut stage = stage(Mode::Sync, 2, MOMENTUM);
    let round = |stage: &mut Stage, number, parts: [Option<Vec<u8>>; 2]| {
        for (trainer, payload) in (0..).zip(parts) {
            let is_pass = payload.is_none();
            let parcel = push(stage, trainer, number, payload.unwrap_or_default());
            let parcel = if is_pass { without(parcel, false) } else { parcel };
            assert_eq!(kinds(&deliver(stage, trainer, &parcel)), [Kind::Done], "{:?}", stage.errors());
        }
        pull(stage, 0, number, &[3])[0]
    };
    assert_eq!(round(&mut stage, 1, [Some(part(0, 1, &[(3, 1.0)])), None]), 9.0);
    assert_eq!(round(&mut stage, 2, [None, None]), 9.0, "nobody has a gradient");
    assert_eq!(round(&mut stage, 3, [None, Some(Vec::new())]), 8.5, "one has a gradient of zeros");
    let mut last = |is_void| {
        let parcel = push(&mut stage, 0, 4, part(0, 1, &[(3, 1.0)]));
        without(parcel, is_void)
    };
    let (refused, void) = (last(false), last(true));
    check_refused(&mut stage, &refused, "bytes of a gradient in a push that has none; expected no payload");
    let other = push(&mut stage, 1, 4, part(0, 1, &[(3, 5.0)]));
    for (trainer, parcel) in [(0, void), (1, other)] {
        assert_eq!(kinds(&deliver(&mut stage, trainer, &parcel)), [Kind::Done]);
    }
    assert_eq!(pull(&mut stage, 0, 4, &[3]), [8.5], "it is void");
    assert_eq!(round(&mut stage, 5, [Some(part(0, 1, &[(3, 1.0)])), None]), 7.25, "momentum is as before");

    let mut stage = self::stage(Mode::Async, 1, MOMENTUM);
    let parcel = without(push(&mut stage, 0, 0, Vec::new()), false);
    check_refused(&mut stage, &parcel, "a push without a gradient; expected one, or a job in mode sync");
}

#[test]
fn a_trainer_one_round_ahead_waits_also_with_rows() {
    let mut stage = stage(Mode::Sync, 2, SGD);
    let first = push(&mut stage, 0, 1, part(0, 1, &[(1, 1.0)]));
    let ahead = push(&mut stage, 0, 2, part(1, 2, &[(2, 1.0)]));
    let mut early = ahead.clone();
    early.body = vec![part(0, 2, &[(3, 1.0)])];
    deliver(&mut stage, 0, &first);
    assert_eq!(kinds(&deliver(&mut stage, 0, &early)), [Kind::Done], "it is in the journal");
    assert_eq!(kinds(&deliver(&mut stage, 0, &ahead)), [], "it waits");
    assert_eq!(kinds(&deliver(&mut stage, 0, &early)), [Kind::Done], "that it waits is not its business");
    let other = push(&mut stage, 1, 1, Vec::new());
    let answers = deliver(&mut stage, 1, &other);
    assert_eq!(kinds(&answers), [Kind::Done, Kind::Done], "both are in a round now");
    let other = push(&mut stage, 1, 2, part(0, 1, &[(2, 1.0)]));
    deliver(&mut stage, 1, &other);
    assert_eq!(pull(&mut stage, 0, 2, &[1, 2, 3]), [9.0, 8.0, 9.0]);
}

#[test]
fn a_newer_incarnation_does_not_complete_the_parts_of_an_older_one() {
    let mut stage = stage(Mode::Async, 2, SGD);
    let half = push(&mut stage, 0, 0, part(0, 2, &[(1, 100.0)]));
    deliver(&mut stage, 0, &half);
    stage.connect(0, Incarnation(2));
    let whole = push(&mut stage, 0, 0, part(1, 2, &[(1, 1.0)]));
    let mut rest = whole.clone();
    rest.body = vec![part(0, 2, &[(2, 1.0)])];
    deliver(&mut stage, 0, &whole);
    assert_eq!(pull(&mut stage, 0, 0, &[1]), [10.0]);
    deliver(&mut stage, 0, &rest);
    assert_eq!(pull(&mut stage, 0, 1, &[1, 2]), [9.0, 9.0]);
}

#[test]
fn rows_of_integers_add_up_exactly() {
    let config = "algorithm: 'add' sparse { height: 100 width: 1 buckets: 1 }";
    let check = |mode: Mode, merge: Merge| {
        let mut stage = Stage::serving(Plan::new(mode, merge, 1).with("s", Int64, 1, config));
        let large = (1_i64 << 53) + 1;
        for version in 1..=2 {
            let ids = [7_u64, 9].into_iter().flat_map(u64::to_le_bytes);
            let values = [large, -3].into_iter().flat_map(i64::to_le_bytes);
            let payload = RowsPart { index: 0, count: 1 }.encode().into_iter().chain(ids).chain(values).collect();
            let parcel = push(&mut stage, 0, version, payload);
            assert_eq!(kinds(&deliver(&mut stage, 0, &parcel)), [Kind::Done], "{mode:?}: {:?}", stage.errors());
        }
        assert_eq!(stage.contents()[0].2, [2 * large, -6].map(i64::to_le_bytes).concat(), "{mode:?} {merge:?}");
    };
    for mode in [Mode::Sync, Mode::Async, Mode::Delta] {
        check(mode, Merge::Sum);
        check(mode, Merge::Mean);
    }
}

#[test]
fn differences_of_rows_are_averaged() {
    let plan = Plan::new(Mode::Delta, Merge::Mean, 2).with("s", Float32, 2, SGD);
    let mut stage = Stage::serving(plan);
    let parcel = push(&mut stage, 0, 0, part(0, 1, &[(3, 4.0)]));
    assert_eq!(kinds(&deliver(&mut stage, 0, &parcel)), [Kind::Done], "{:?}", stage.errors());
    assert_eq!(pull(&mut stage, 1, 1, &[3, 4]), [12.0, 10.0]);
}

#[test]
fn a_full_table_refuses_new_rows_and_updates_existing_ones() {
    let config = "const_lr { learning_rate: 1 } sparse { width: 2 rows: 1000 buckets: 1 }";
    let mut stage = stage(Mode::Async, 1, config);
    let rows = |from: u64, count: u64| (from..from + count).map(|id| (id, -1.0)).collect::<Vec<_>>();
    let first = push(&mut stage, 0, 0, part(0, 1, &rows(0, 1000)));
    assert_eq!(kinds(&deliver(&mut stage, 0, &first)), [Kind::Done], "{:?}", stage.errors());
    let more = push(&mut stage, 0, 0, part(0, 1, &rows(5000, 1000)));
    stage.answers.clear();
    stage.deliver(0, &more);
    let errors = stage.errors();
    assert!(
        errors[0].contains("parameter \"s\"")
            && errors[0].contains("1000 new rows for bucket 0, which has 1000; expected at most 1000"),
        "{errors:?}"
    );
    assert_eq!(pull(&mut stage, 0, 0, &[0, 5000]), [1.0, 0.0], "nothing of it is applied");
    let known = push(&mut stage, 0, 0, part(0, 1, &rows(0, 1000)));
    assert_eq!(kinds(&deliver(&mut stage, 0, &known)), [Kind::Done]);
    assert_eq!(pull(&mut stage, 0, 2, &[0, 999]), [2.0, 2.0]);
}

#[test]
fn a_row_that_is_pushed_twice_is_one_new_row() {
    let config = "const_lr { learning_rate: 1 } sparse { width: 2 rows: 10 buckets: 1 }";
    let mut stage = stage(Mode::Async, 1, config);
    let nine: Vec<_> = (0..9).map(|id| (id, -1.0)).collect();
    for rows in [nine.as_slice(), &[(9, -1.0), (9, -1.0)]] {
        let parcel = push(&mut stage, 0, 0, part(0, 1, rows));
        assert_eq!(kinds(&deliver(&mut stage, 0, &parcel)), [Kind::Done], "{:?}", stage.errors());
    }
    let parcel = push(&mut stage, 0, 0, part(0, 1, &[(10, 1.0), (11, 1.0)]));
    check_refused(&mut stage, &parcel, "2 new rows for bucket 0, which has 10");
}

#[test]
fn superfluous_parts_are_refused() {
    let config = "const_lr { learning_rate: 1 } sparse { width: 2 rows: 10 buckets: 1 }";
    let mut stage = stage(Mode::Sync, 1, config);
    let many = push(&mut stage, 0, 1, part(3, 12, &[(1, 1.0)]));
    check_refused(&mut stage, &many, "12 parts; expected at most 11");
    let empty = push(&mut stage, 0, 1, part(0, 2, &[]));
    check_refused(&mut stage, &empty, "part 0 of 2 without a row; only the last may have none");
}

/// Up to `count` ids of existing rows, from an id on.
fn list(stage: &mut Stage, from: u64, count: u64) -> Vec<u64> {
    let mut head = stage.head(Kind::Pull, 0);
    head.flags = Flags::LIST;
    let payload = [from.to_le_bytes(), count.to_le_bytes()].concat();
    let answers = deliver(stage, 0, &Parcel::new(head, vec![(bucket(), 0, Float32, payload)]));
    let found: Vec<u64> = answers[0].body[0].as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
    assert_eq!(found.len() as u64, count, "the rest is all ones");
    found.into_iter().filter(|id| *id != u64::MAX).collect()
}

#[test]
fn a_paged_list_of_rows_has_every_row_that_existed_before() {
    let mut stage = stage(Mode::Async, 1, SGD.replace("height: 100", "height: 9000").leak());
    let add = |stage: &mut Stage, ids: std::ops::Range<u64>| {
        let rows: Vec<_> = ids.map(|id| (id, 1.0)).collect();
        let rows = push(stage, 0, 0, part(0, 1, &rows));
        assert_eq!(kinds(&deliver(stage, 0, &rows)), [Kind::Done], "{:?}", stage.errors());
    };
    assert!(list(&mut stage, 0, 3).is_empty());
    add(&mut stage, 0..1000);
    assert_eq!(list(&mut stage, 0, 2000).len(), 1000);
    // Pages split between the requests: no row is listed twice, and no row that existed before is missing.
    let (mut found, mut from, mut next) = (Vec::new(), 0, 1000);
    loop {
        let some = list(&mut stage, from, 37);
        found.extend_from_slice(&some);
        if some.len() < 37 {
            break;
        }
        from = some[36] + 1;
        add(&mut stage, next..next + 20);
        next += 20;
    }
    found.sort_unstable();
    let all = found.len();
    found.dedup();
    assert_eq!(found.len(), all, "nothing twice");
    assert!((0..1000).all(|id| found.binary_search(&id).is_ok()), "{} rows", found.len());
}

#[test]
fn malformed_requests_for_rows_are_refused_by_name() {
    let mut stage = stage(Mode::Sync, 2, SGD);
    let mut check = |payload: Vec<u8>, expected: &str| {
        let parcel = push(&mut stage, 0, 1, payload);
        check_refused(&mut stage, &parcel, "parameter \"s\"");
        check_refused(&mut stage, &parcel, expected);
    };
    check(vec![1; 7], "7 bytes were sent, expected 8 and a multiple of 16");
    check(vec![1; 23], "expected 8 and a multiple of 16");
    check(part(3, 3, &[(1, 1.0)]), "part 3 of 3");
    check(part(0, 0, &[(1, 1.0)]), "part 0 of 0");
    check(part(0, u32::MAX, &[(1, 1.0)]), "4294967295 parts");
    check(part(0, 1, &[(1, 1.0), (100, 1.0)]), "row 100 at place 1");
    check(part(0, 1, &[(u64::MAX, 1.0)]), "expected ids below 100");
    let parcel = stage.push(0, vec![(bucket(), 1, part(0, 1, &[(1, 1.0)]))], true);
    check_refused(&mut stage, &parcel, "cannot ask for the value");
    let head = stage.call(Kind::Set, 0);
    check_refused(
        &mut stage,
        &Parcel::new(head, vec![(bucket(), 0, Float32, vec![0; 7])]),
        "expected 8 and a multiple",
    );
    let head = stage.call(Kind::Set, 0);
    check_refused(&mut stage, &Parcel::new(head, vec![(bucket(), 0, Float32, Vec::new())]), "0 bytes of rows");
    let head = stage.call(Kind::Push, 0);
    check_refused(&mut stage, &Parcel::new(head, vec![(bucket(), 1, Float64, vec![0; 32])]), "rows of float64");
    let head = stage.head(Kind::Pull, 0);
    let dense = Parcel::new(head, vec![(id(1, 0), 0, Float32, vec![0; 8])]);
    check_refused(&mut stage, &dense, "\"d\" is not sparse");
    let head = stage.head(Kind::Pull, 0);
    check_refused(&mut stage, &Parcel::new(head, vec![(bucket(), 0, Float32, vec![0; 9])]), "row ids");
    let mut head = stage.head(Kind::Pull, 0);
    head.flags = Flags::LIST;
    check_refused(&mut stage, &Parcel::new(head, vec![(bucket(), 0, Float32, vec![0xff; 16])]), "list request");
}

#[test]
fn a_row_of_another_bucket_is_refused() {
    let config = "optimizer: SGD sparse { height: 100 width: 2 buckets: 4 }";
    let mut stage = stage(Mode::Sync, 1, config);
    let buckets = stage.plan.parameters[0].buckets.expect("it is sparse");
    let foreign = (0..100).find(|id| buckets.of(*id) != 0).expect("not all are in one");
    let parcel = push(&mut stage, 0, 1, part(0, 1, &[(foreign, 1.0)]));
    check_refused(&mut stage, &parcel, "came to bucket 0");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Arbitrary bytes as pushes, pulls, lists and initial rows are accepted or refused, and nothing panics.
    #[test]
    fn garbage_is_accepted_or_refused(
        frames in prop::collection::vec(
            (0_u8..7, 0_u64..3, prop::collection::vec(any::<u8>(), 0..80), any::<[bool; 3]>(), 0_u64..120), 1..20)
    ) {
        let mut stage = stage(Mode::Sync, 2, SGD);
        for (kind, round, mut payload, [is_headed, is_small, wants], row) in frames {
            if is_headed && payload.len() >= 24 {
                payload.truncate(24);
                payload[..8].copy_from_slice(&RowsPart { index: 0, count: 1 + u32::from(wants) }.encode());
            }
            if is_small && payload.len() >= 16 {
                payload[8..16].copy_from_slice(&row.to_le_bytes());
            }
            let mut head = match kind {
                0 => stage.call(Kind::Push, 0),
                1 | 4 => stage.call(Kind::Set, 0),
                _ => stage.head(Kind::Pull, 0),
            };
            head.flags = match kind {
                3 => Flags::LIST,
                4 | 5 => Flags::STATE,
                6 => Flags::STATE.with(Flags::LIST),
                _ => Flags::default(),
            };
            let mut parcel = Parcel::new(head, vec![(bucket(), round, Float32, payload)]);
            if kind >= 4 {
                let state = (row % 4).checked_sub(1).and_then(|state| u32::try_from(state).ok());
                parcel.frame.control = StateMessage { state, updates: row }.encode_to_vec();
            }
            stage.deliver(0, &parcel);
        }
        let rows: u64 = stage.contents()[0].2.len() as u64 / 8;
        prop_assert!(rows <= 100, "no row beyond the height: {rows}");
    }
}
