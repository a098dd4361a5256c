//! Long work on rows: rows that have missed many updates, and a checkpoint of many rows. The work is done in pieces,
//! and other requests are answered between them. The result equals that of the work in one piece.

use std::sync::Arc;

use prost::Message;

use super::stage::{Answer, Parcel, Plan, Stage, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::{ChunkId, PeerId};
use crate::port::{Event, ReceiveBuffers};
use crate::wire::{Flags, Kind, RowsPart, StateMessage};

/// Rows with weight decay and momentum: an update changes also the rows that it does not contain.
const RESTLESS: &str = "sgd { momentum: 0.9 } l2: 0.01 const_lr { learning_rate: 0.5 } \
                        sparse { height: 2000 width: 2 buckets: 1 uniform { } }";
/// An update goes over eight bytes of a row: in a turn four rows see five updates.
const REPLAYS: u64 = 160;

fn plan(mode: Mode) -> Plan {
    Plan::new(mode, Merge::Sum, 1).with("s", Float32, 2, RESTLESS).with("d", Float32, 2, "optimizer: SGD")
}

/// A shard whose turns are short, and one whose turns are not limited.
fn stages(mode: Mode) -> [Stage; 2] {
    let mut short = Stage::serving(plan(mode));
    short.shard.replays = REPLAYS;
    short.is_late = true;
    [short, Stage::serving(plan(mode))]
}

fn bucket() -> ChunkId {
    id(0, 0)
}

fn rows(ids: &[u64]) -> Vec<u8> {
    let values = ids.iter().flat_map(|id| [*id as f32, 0.5]).flat_map(f32::to_le_bytes);
    let ids = ids.iter().flat_map(|id| id.to_le_bytes());
    RowsPart { index: 0, count: 1 }.encode().into_iter().chain(ids).chain(values).collect()
}

fn deliver(stage: &mut Stage, parcel: &Parcel) -> Vec<Answer> {
    stage.answers.clear();
    stage.deliver(0, parcel);
    std::mem::take(&mut stage.answers)
}

/// Pushes rows, or an empty gradient, which is a step too.
fn push(stage: &mut Stage, ids: &[u64]) -> Vec<Answer> {
    let round = version(stage) + 1;
    let payload = if ids.is_empty() { Vec::new() } else { rows(ids) };
    let parcel = stage.push(0, vec![(bucket(), round, payload)], false);
    deliver(stage, &parcel)
}

fn pull(stage: &mut Stage, version: u64, ids: &[u64]) -> Vec<Answer> {
    let head = stage.head(Kind::Pull, 0);
    let payload: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let parcel = Parcel::new(head, vec![(bucket(), version, Float32, payload)]);
    deliver(stage, &parcel)
}

/// Whether a pull of the dense parameter is answered at once.
fn is_answered_at_once(stage: &mut Stage) -> bool {
    let head = stage.head(Kind::Pull, 0);
    let answers = deliver(stage, &Parcel::new(head, vec![(id(1, 0), 0, Float32, Vec::new())]));
    answers.iter().map(|answer| answer.frame.head.kind).eq([Kind::Value])
}

fn version(stage: &Stage) -> u64 {
    stage.contents()[0].1.0
}

#[test]
fn rows_that_missed_many_updates_are_read_in_several_turns() {
    let [mut short, mut long] = stages(Mode::Async);
    for stage in [&mut short, &mut long] {
        push(stage, &[1, 2, 3]);
        (0..100).for_each(|_| assert_eq!(push(stage, &[]).len(), 1, "a step"));
    }
    // Rows that exist, and rows that do not.
    for ids in [[1, 2, 1, 3], [5, 2, 1000, 5]] {
        let [expected] = pull(&mut long, 101, &ids).try_into().ok().expect("it is answered at once");
        assert!(pull(&mut short, 101, &ids).is_empty(), "it takes more than a turn");
        short.answers.clear();
        let mut found = Vec::new();
        let mut count = 0;
        while found.is_empty() {
            count += 1;
            assert!(is_answered_at_once(&mut short), "others are not kept waiting");
            assert!(short.turn(), "there is something to do");
            found = std::mem::take(&mut short.answers);
        }
        // A hundred updates of at most four rows, with those that were read before done.
        assert!((8..=20).contains(&count), "{count} turns");
        assert_eq!(found[0].body, expected.body);
        assert_eq!(found[0].frame.entries, expected.frame.entries);
        assert!(!short.shard.is_under_way());
    }
}

#[test]
fn an_update_of_rows_that_missed_many_updates_takes_several_turns() {
    for mode in [Mode::Async, Mode::Sync, Mode::Staleness { bound: 3 }] {
        let [mut short, mut long] = stages(mode);
        for stage in [&mut short, &mut long] {
            push(stage, &[1, 2, 3]);
            (0..100).for_each(|_| assert_eq!(push(stage, &[]).len(), 1, "a step"));
            assert_eq!(push(stage, &[3, 2, 700, 1]).len(), 1, "it is in the journal");
        }
        assert_eq!((version(&short), version(&long)), (101, 102), "{mode:?}");
        assert!(pull(&mut short, 102, &[1, 2, 3, 700]).is_empty(), "{mode:?}: who wants what comes of it waits");
        let expected = pull(&mut long, 102, &[1, 2, 3, 700]);
        let mut count = 0;
        while version(&short) < 102 {
            count += 1;
            assert!(is_answered_at_once(&mut short), "{mode:?}: others are not kept waiting");
            short.answers.clear();
            assert!(short.turn(), "{mode:?}: there is something to do");
        }
        assert!((15..=30).contains(&count), "{mode:?}: {count} turns");
        let found: Vec<_> = short.answers.iter().filter(|answer| answer.frame.head.kind == Kind::Value).collect();
        assert_eq!(found[0].body, expected[0].body, "{mode:?}");
        assert_eq!(short.contents(), long.contents(), "{mode:?}");
        assert!(!short.shard.is_under_way(), "{mode:?}");
    }
}

#[test]
fn a_read_of_rows_ends_with_its_connection() {
    let [mut short, _] = stages(Mode::Async);
    push(&mut short, &[1]);
    (0..100).for_each(|_| drop(push(&mut short, &[])));
    assert!(pull(&mut short, 0, &[1, 2, 3]).is_empty());
    assert!(short.shard.is_under_way());
    let peer: PeerId = short.actors[&0].peer;
    short.event(Event::Gone { peer, reason: "closed".into(), unsent: Vec::new(), unfilled: ReceiveBuffers::new() });
    assert!(!short.shard.is_under_way());
}

/// A shard that serves, and its disk.
fn kept() -> (Arc<dyn Storage>, Stage) {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let mut stage = Stage::empty(plan(Mode::Async));
    stage.restore(&disk, false);
    stage.initialise();
    (disk, stage)
}

/// A shard that is restored from the files of another.
fn again(stage: &Stage, disk: &Arc<dyn Storage>) -> Stage {
    let mut again = Stage::empty(stage.plan.clone());
    let restored = again.restore(disk, false);
    assert_eq!(restored.loaded.map(|loaded| loaded.name.number), Some(1));
    again
}

#[test]
fn a_checkpoint_of_many_rows_is_taken_in_pieces_while_they_are_updated() {
    let (disk, mut stage) = kept();
    let some = |step: u64| (0..50).map(|row| (row * 37 + step * 11) % 1900).collect::<Vec<u64>>();
    (0..30).for_each(|step| drop(push(&mut stage, &some(step))));
    assert!(stage.begin_checkpoint(1).expect("the disk is well"), "the shard serves");
    let mut pieces = 0;
    let writer = loop {
        pieces += 1;
        if let Some(writer) = stage.shard.continue_checkpoint(2000).expect("the disk is well") {
            break writer;
        }
        push(&mut stage, &some(1000 + pieces));
        pull(&mut stage, 0, &some(2000 + pieces));
    };
    // Some 1,200 rows of 32 bytes with their ids and versions, copied and then written.
    assert!(20 < pieces, "{pieces} pieces");
    writer.finish().expect("the disk is well");
    let mut found = again(&stage, &disk);
    found.connect(0, stage.actors[&0].incarnation);
    // A read that replayed updates leaves the same rows.
    let all: Vec<u64> = (0..2000).collect();
    let [expected, found] = [&mut stage, &mut found].map(|stage| pull(stage, 0, &all));
    assert_eq!(found[0].body, expected[0].body);
    assert_eq!(found[0].frame.entries[0].round, expected[0].frame.entries[0].round);
}

#[test]
fn an_abandoned_checkpoint_leaves_nothing_behind() {
    let (disk, mut stage) = kept();
    push(&mut stage, &(0..1500).collect::<Vec<u64>>());
    assert!(stage.begin_checkpoint(1).expect("the disk is well"));
    assert!(stage.shard.continue_checkpoint(1).expect("the disk is well").is_none());
    push(&mut stage, &[1, 2, 3]);
    // Another checkpoint begins before this one is whole.
    stage.checkpoint(1);
    assert_eq!(again(&stage, &disk).contents(), stage.contents());
}

/// Replaces a state of rows, or with none the count of updates.
fn set_state(stage: &mut Stage, state: Option<u32>, payload: Vec<u8>) -> Vec<Answer> {
    let mut head = stage.call(Kind::Set, 0);
    head.flags = Flags::STATE;
    let mut parcel = Parcel::new(head, vec![(bucket(), 0, Float32, payload)]);
    parcel.frame.control = StateMessage { state, updates: 7 }.encode_to_vec();
    deliver(stage, &parcel)
}

#[test]
fn a_set_of_rows_that_missed_many_updates_is_busy_for_some_turns() {
    let [mut short, mut long] = stages(Mode::Async);
    for stage in [&mut short, &mut long] {
        push(stage, &[1, 2, 3]);
        (0..100).for_each(|_| assert_eq!(push(stage, &[]).len(), 1, "a step"));
    }
    for (state, payload) in [(Some(0), rows(&[3, 1])), (None, Vec::new())] {
        let is_done = |answers: &[Answer]| answers.iter().map(|one| one.frame.head.kind).eq([Kind::Done]);
        assert!(is_done(&set_state(&mut long, state, payload.clone())), "{state:?}");
        let mut count = 0;
        while !is_done(&set_state(&mut short, state, payload.clone())) {
            count += 1;
            assert!(short.errors().iter().all(|error| error.contains("the updates that they missed")), "{state:?}");
            assert!(is_answered_at_once(&mut short), "{state:?}: others are not kept waiting");
        }
        assert!((3..=30).contains(&count), "{state:?}: {count} turns");
    }
    let expected = pull(&mut long, 101, &[1, 2, 3]);
    assert_eq!(pull(&mut short, 101, &[1, 2, 3])[0].body, expected[0].body);
}
