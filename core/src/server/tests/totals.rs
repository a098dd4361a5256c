//! Totals: what a round does between its last gradient and the number that trainers make of its share.

use std::sync::Arc;

use super::script::{Script, check};
use super::stage::{Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64};

const CLIPPED: &str = "optimizer: SGD const_lr { learning_rate: 1 } stage: 'g = g * total(sum(g * g)); update'";
const SHARE: &str = "algorithm: 'sum' total_part: Share";
const TOTAL: &str = "algorithm: 'sum' total_part: Total";

/// A parameter of two chunks, `w`, the second of one element, whose share is `s` and total `t`, beside one without.
fn plan(trainers: u32) -> Plan {
    Plan::new(Mode::Sync, Merge::Sum, trainers)
        .with("w", Float32, 1025, CLIPPED)
        .with("s", Float64, 1, SHARE)
        .with("t", Float64, 1, TOTAL)
        .with("v", Float32, 2, "optimizer: SGD const_lr { learning_rate: 1 }")
}

#[test]
fn a_round_gives_its_share_and_is_updated_by_the_total() {
    check(
        plan(2),
        "pull 0 1 s ->
         pull 1 1 w ->
         push 0 1 w=1 w.1=1 v=1 -> 0 done w@1 w.1@1 v@1
         push 1 1 w=2 w.1=1 v=1 -> 1 done w@1 w.1@1 & 0 value s@1=9220 & 1 done v@1
         show w v t -> w@0=0 & v@1=-2 & t@0=0
         push 0 1 t=0.5 -> 0 done t@1 & 1 value w@1=-1.5
         push 1 1 t=0.5 -> 1 done t@1
         show w w.1 t s -> w@1=-1.5 & w.1@1=-1 & t@1=0.5 & s@1=9220
         pull 1 1 s -> 1 value s@1=9220
         push 1 2 w=1 w.1=0 -> 1 done w@2 w.1@2
         pull 1 2 s ->
         push 0 2 w=1 w.1=0 -> 0 done w@2 w.1@2 & 1 value s@2=4096
         push 1 2 t=2 -> 1 done t@2
         push 0 2 t=2 -> 0 done t@2
         show w w.1 -> w@2=-5.5 & w.1@2=-1",
    );
}

#[test]
fn a_round_without_any_gradient_has_a_share_of_zero_and_is_no_update() {
    check(
        plan(2),
        "push 0 1 w=none w.1=none -> 0 done w@1 w.1@1
         push 1 1 w=none w.1=none -> 1 done w@1 w.1@1
         pull 0 1 s -> 0 value s@1=0
         push 0 1 t=3 -> 0 done t@1
         push 1 1 t=3 -> 1 done t@1
         push 0 2 w=1 w.1=0 -> 0 done w@2 w.1@2
         push 1 2 w=none w.1=none -> 1 done w@2 w.1@2
         pull 0 2 s -> 0 value s@2=1024
         push 0 2 t=1 -> 0 done t@2
         push 1 2 t=1 -> 1 done t@2
         show w w.1 -> w@2=-1 & w.1@2=0",
    );
}

#[test]
fn the_share_is_of_the_round_that_was_complete_whoever_comes_back() {
    check(
        plan(2),
        "leave 1 -> 1 done
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         show s -> s@1=1025
         reborn 1
         push 1 1 w=5 w.1=5 ->
         push 1 1 t=1 -> 1 done t@1 & 1 done w@1 w.1@1
         show w -> w@1=-1
         push 0 1 t=1 -> 0 done t@1",
    );
}

#[test]
fn a_set_comes_after_the_update_whose_share_is_out() {
    check(
        plan(1),
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         set 0 w=7 ->
         show w -> w@0=0
         push 0 1 t=1 -> 0 done t@1 & 0 done w@1
         show w w.1 -> w@1=7 & w.1@1=-1",
    );
}

#[test]
fn a_total_before_its_share_waits_and_the_first_trainers_number_counts() {
    check(
        plan(2),
        "push 1 1 t=3 -> 1 done t@1
         push 0 1 t=0.5 -> 0 done t@1
         push 1 2 t=4 ->
         show t s -> t@0=0 & s@0=0
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1 & 1 done t@2
         show w t s -> w@1=-1 & t@1=0.5 & s@1=4100",
    );
}

#[test]
fn a_total_that_cannot_be_is_refused_and_changes_nothing() {
    check(
        plan(2),
        "push 0 1 s=1 -> 0 error Invalid: parameter \"s\": trainer 0 sent to it; expected none, because*
         set 0 s=1 -> 0 error Invalid: parameter \"s\": trainer 0 sent to it; expected none, because*
         set 0 t=1 -> 0 error Invalid: parameter \"t\": trainer 0 sent to it; expected a push of its round's number
         push 0 1 t=nan -> 0 error Invalid: the gradient of trainer 0 for parameter \"t\" has NaN*
         push 0 1 t=inf -> 0 error Invalid: the gradient of trainer 0 for parameter \"t\" has inf*
         push 0 3 t=1 -> 0 error Invalid: parameter \"t\" chunk 0: trainer 0 sent round 3 while round 1 is open*
         push 0 0 t=1 -> 0 done t@0
         push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         push 1 1 t=1 -> 1 done t@1
         show w t -> w@1=-2 & t@1=1",
    );
}

#[test]
fn a_wait_names_what_is_missing() {
    check(
        plan(2),
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         pull 0 1 s ->
         ask 0 -> 0 parameter \"s\" chunk 0: round 1 waits for trainer 1*
         gone 1 ->
         wait 1999 ->
         wait 1 -> 0 error Deadline: parameter \"s\" chunk 0: round 1 waits for trainer 1 (host h, pid 1; connection *
         reborn 1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         pull 0 1 w ->
         gone 1 ->
         wait 3000 ->
         wait 57000 -> 0 error Deadline: * round 1 waits for its total, which a trainer sends
         push 0 1 t=1 -> 0 done t@1
         show w -> w@1=-2",
    );
}

#[test]
fn a_share_without_memory_is_computed_when_there_is_some() {
    let mut script = Script::new(Stage::serving(plan(2)));
    script.run(
        "push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
         pull 0 1 s ->
         starve
         spare w w.1
         push 1 1 w=1 w.1=1 -> 1 done w@1 w.1@1
         show s w -> s@0=0 & w@0=0
         feed -> 0 value s@1=4100
         show s w -> s@1=4100 & w@0=0
         push 0 1 t=1 -> 0 done t@1
         show w -> w@1=-2",
    );
}

fn refused(plan: Plan, expected: &str) {
    let mut stage = Stage::empty(plan);
    stage.begin();
    let found = stage.errors().join("; ");
    assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
}

#[test]
fn parts_that_make_no_total_are_refused_by_name() {
    let new = |mode| Plan::new(mode, Merge::Mean, 2).with("w", Float32, 2, CLIPPED);
    for mode in [Mode::Async, Mode::Staleness { bound: 2 }] {
        let plan = new(mode).with("s", Float64, 1, SHARE).with("t", Float64, 1, TOTAL);
        refused(plan, &format!("parameter \"w\": its stage has total in a job in {mode:?}; expected mode sync"));
    }
    refused(new(Mode::Sync), "parameter \"w\": its stage has total; expected its share and its total after it");
    let exchanged = new(Mode::Sync).with("t", Float64, 1, TOTAL).with("s", Float64, 1, SHARE);
    refused(exchanged, "parameter \"w\": its stage has total; expected its share and its total after it");
    let alone = Plan::new(Mode::Sync, Merge::Mean, 2).with("s", Float64, 1, SHARE);
    refused(alone, "parameter \"s\": a part of a total (Share) of no parameter here; expected one before it");
    let wide = new(Mode::Sync).with("s", Float64, 1, SHARE).with("t", Float64, 2, TOTAL);
    refused(wide, "parameter \"t\": a part of a total; expected one float64 with the algorithm sum");
    let other = new(Mode::Sync).with("s", Float64, 1, "optimizer: SGD total_part: Share").with("t", Float64, 1, TOTAL);
    refused(other, "parameter \"s\": a part of a total; expected one float64 with the algorithm sum");
}

/// Runs `before` on a shard that is then killed, and `after` on what comes back from checkpoint and journal.
fn check_restart(before: &str, has_checkpoint: bool, after: &str) {
    let storage = InMemory::new();
    let on_disk: Arc<dyn Storage> = Arc::new(storage.clone());
    let mut stage = Stage::empty(plan(2));
    stage.restore(&on_disk, false);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run(before);
    if has_checkpoint {
        assert!(script.stage.begin_checkpoint(1).expect("the disk is well"), "the shard serves");
        let writer = script.stage.shard.continue_checkpoint(u64::MAX).expect("the disk is well");
        writer.expect("all of it was written").finish().expect("the disk is well");
    }
    let mut stage = Stage::empty(plan(2));
    let on_disk: Arc<dyn Storage> = Arc::new(storage.copy());
    stage.restore(&on_disk, false);
    stage.actors = script.stage.actors.clone();
    for (trainer, actor) in script.stage.actors.clone() {
        stage.connect(trainer, actor.incarnation);
    }
    Script::new(stage).run(after);
}

#[test]
fn a_restart_keeps_the_share_and_the_round_that_waits() {
    let before = "leave 1 -> 1 done
                  push 0 1 w=1 w.1=1 -> 0 done w@1 w.1@1
                  show s w t -> s@1=1025 & w@0=0 & t@0=0";
    let after = "pull 0 1 s -> 0 value s@1=1025
                 reborn 1
                 push 1 1 w=5 w.1=5 ->
                 push 0 1 t=2 -> 0 done t@1 & 1 done w@1 w.1@1
                 show s w t -> s@1=1025 & w@1=-2 & t@1=2";
    check_restart(before, false, after);
    check_restart(before, true, after);
    let updated = format!("{before}\n push 0 1 t=2 -> 0 done t@1");
    let after = "push 0 1 t=3 -> 0 done t@1
                 pull 0 1 s -> 0 value s@1=1025
                 show w t -> w@1=-2 & t@1=2";
    check_restart(&updated, false, after);
    check_restart(&updated, true, after);
}
