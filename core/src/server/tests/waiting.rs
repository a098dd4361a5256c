//! Requests that wait for versions: their limit per connection, their deadline, and the end of their connection.

use super::script::Script;
use super::stage::{Parcel, Plan, Stage, TIMEOUT, id};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::Round;
use crate::limits::{FRAME_ENTRIES_MAX, WAITS_PER_PEER_MAX};
use crate::server::shard::Phase;
use crate::wire::{Entry, Frame, Kind};

const NEVER: u64 = 1 << 40;

fn stage() -> Stage {
    Stage::serving(Plan::new(Mode::Sync, Merge::Sum, 2).with("w", Float32, 1, "optimizer: SGD"))
}

/// A frame with as many entries as fit, each a pull of the same chunk.
fn pull(stage: &mut Stage, trainer: u32) {
    let entry = Entry::bare(id(0, 0), Round(NEVER), Float32);
    let entries = vec![entry; FRAME_ENTRIES_MAX as usize];
    let frame = Frame { entries: entries.into(), ..Frame::bare(stage.head(Kind::Pull, trainer)) };
    stage.deliver(trainer, &Parcel { frame, body: Vec::new() });
}

fn waiting(stage: &Stage) -> usize {
    let Phase::Serving(serving) = &stage.shard.phase else { panic!("it serves") };
    serving.waits.per_peer.values().sum()
}

#[test]
fn waiting_requests_of_a_connection_are_limited() {
    let mut stage = stage();
    for _ in 0..WAITS_PER_PEER_MAX / FRAME_ENTRIES_MAX as usize {
        pull(&mut stage, 0);
    }
    assert_eq!((waiting(&stage), stage.errors()), (WAITS_PER_PEER_MAX, Vec::new()));
    pull(&mut stage, 0);
    let expected = "65536 pulls of this connection wait for versions that are not there yet; expected at most 65538";
    assert!(stage.errors()[0].starts_with(expected), "{:?}", stage.errors());
    stage.answers.clear();
    // Another connection has a limit of its own, and pushes go on.
    let mut script = Script::new(stage);
    script.run(
        "push 0 1 w=1 -> 0 done w@1
         pull 1 1 w ->
         push 1 1 w=1 -> 1 done w@1 & 1 value w@1=-2",
    );
    assert_eq!(waiting(&script.stage), WAITS_PER_PEER_MAX);
}

#[test]
fn waiting_requests_end_with_their_connection() {
    let mut stage = stage();
    pull(&mut stage, 0);
    pull(&mut stage, 1);
    let gone = stage.actors[&0].peer;
    let event = crate::port::Event::Gone { peer: gone, reason: "lost".into(), unsent: vec![], unfilled: vec![].into() };
    stage.event(event);
    assert_eq!(waiting(&stage), FRAME_ENTRIES_MAX as usize);
}

#[test]
fn expired_waits_end_in_batches_of_at_most_1024() {
    let mut stage = stage();
    pull(&mut stage, 1);
    stage.now = stage.now + TIMEOUT;
    let mut turns = 0;
    while stage.shard.deadline().is_some_and(|deadline| deadline <= stage.now) {
        let mut out = Vec::new();
        stage.shard.expire(stage.now, &mut out);
        assert!(out.len() <= 1024, "one turn ends {} waits", out.len());
        turns += 1;
    }
    assert_eq!((turns, waiting(&stage)), (4, 0));
}
