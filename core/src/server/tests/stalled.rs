//! Stalled updates: complete rounds without memory for their next value, because readers hold versions. The result
//! equals that of an update at once, whatever arrives during the stall.

use std::sync::Arc;

use super::script::Script;
use super::stage::{Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const CLIPPED: &str = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";

fn plan(mode: Mode, trainers: u32) -> Plan {
    let plan = Plan::new(mode, Merge::Sum, trainers);
    plan.with("w", Float32, 2, SGD).with("b", Float32, 2, SGD).with("g", Float32, 1025, CLIPPED)
}

fn check(mode: Mode, trainers: u32, script: &str) {
    let mut stage = Stage::serving(plan(mode, trainers));
    // Turns in which nothing arrives would retry the update.
    stage.is_late = true;
    Script::new(stage).run(script);
}

#[test]
fn a_set_waits_for_the_stalled_updates_before_it() {
    check(
        Mode::Sync,
        1,
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 0 1 w=1 -> 0 done w@1
         spare w ->
         set 0 w=10 ->
         show w -> w@0=0
         spare w ->
         push 0 2 w=2 ->
         feed -> 0 done w@1 & 0 done w@2
         show w -> w@2=8",
    );
    check(
        Mode::Async,
        2,
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 1 0 w=1 -> 1 done w@1
         spare w ->
         push 0 0 w=2 ->
         spare w ->
         set 0 w=10 ->
         spare w ->
         push 1 0 w=4 ->
         feed -> 0 done w@2 & 0 done w@2 & 1 done w@3
         show w -> w@3=6",
    );
}

#[test]
fn a_rejoined_trainer_is_not_in_a_round_that_was_complete_without_it() {
    check(
        Mode::Sync,
        2,
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 0 1 w=1 -> 0 done w@1
         leave 1 -> 1 done
         reborn 1 ->
         spare b ->
         push 1 1 b=1 -> 1 done b@1
         spare w ->
         push 1 1 w=5 ->
         feed -> 1 done w@1
         show w -> w@1=-1",
    );
    check(
        Mode::Sync,
        2,
        "hold ->
         pull 0 0 g g.1 -> 0 value g@0=0 g.1@0=0
         starve ->
         spare g g.1 ->
         push 0 1 g=1 g.1=1 -> 0 done g@1 g.1@1
         leave 1 -> 1 done
         reborn 1 ->
         spare b ->
         push 1 1 b=1 -> 1 done b@1
         spare g g.1 ->
         push 1 1 g=5 g.1=5 ->
         feed -> *
         show g g.1 -> g@1=-1 & g.1@1=-1",
    );
}

#[test]
fn stalled_async_gradients_are_applied_in_order_of_arrival() {
    check(
        Mode::Async,
        3,
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 2 0 w=1 -> 2 done w@1
         spare w ->
         push 1 0 w=1 ->
         spare w ->
         push 0 0 w=1 ->
         feed -> 1 done w@2 & 0 done w@3",
    );
}

/// A shard with a journal.
fn kept(plan: Plan, disk: &Arc<dyn Storage>) -> Script {
    let mut stage = Stage::empty(plan);
    stage.restore(disk, false);
    stage.initialise();
    stage.is_late = true;
    Script::new(stage)
}

/// Stops a shard as a stopping server does, and restores a shard from its files.
fn stopped(script: &mut Script, disk: &Arc<dyn Storage>) -> Stage {
    script.stage.settle();
    script.stage.checkpoint(1);
    script.stage.shard.commit().expect("the disk is well");
    let mut again = Stage::empty(script.stage.plan.clone());
    again.restore(disk, false);
    again.actors = script.stage.actors.clone();
    for (trainer, actor) in script.stage.actors.clone() {
        again.connect(trainer, actor.incarnation);
    }
    again
}

#[test]
fn a_last_checkpoint_has_the_updates_that_wait_for_memory() {
    for mode in [Mode::Sync, Mode::Async] {
        let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
        let mut script = kept(plan(mode, 1), &disk);
        script.run(
            "hold ->
             pull 0 0 w -> 0 value w@0=0
             starve ->
             spare w ->
             push 0 1 w=1 -> 0 done w@1
             spare w ->
             set 0 w=10 ->
             spare w ->
             push 0 2 w=2 ->",
        );
        let again = stopped(&mut script, &disk);
        script.run("feed -> *\n show w -> w@2=8");
        assert_eq!(again.contents(), script.stage.contents(), "{mode:?}");
    }
}

#[test]
fn a_round_of_which_the_journal_lost_a_gradient_is_not_closed_without_it() {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let mut script = kept(plan(Mode::Sync, 2), &disk);
    script.run(
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 0 1 w=1 -> 0 done w@1",
    );
    // Later frames are not journalled, and the checkpoint carries nothing over.
    let journal = script.stage.shard.journal.open.take().expect("the shard keeps a journal");
    script.stage.shard.journal.end = journal.position();
    script.run("spare w ->\n push 1 1 w=2 -> 1 done w@1");
    let again = stopped(&mut script, &disk);
    Script::new(again).run("show w -> w@0=0\n push 1 1 w=2 -> 1 done w@1\n show w -> w@0=0");
}

/// With bounded staleness the next admission depends on running updates, so new frames are deferred.
#[test]
fn with_bounded_staleness_frames_are_busy_during_a_stalled_update() {
    check(
        Mode::Staleness { bound: 1 },
        2,
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push 0 0 w=1 -> 0 done w@1
         spare w ->
         again 0 -> 0 done w@1
         push 1 0 w=1 -> 1 error Busy: *its update waits for memory that readers hold
         leave 1 -> 1 error Busy: *its update waits for memory that readers hold
         set 1 w=1 -> 1 error Busy: *its update waits for memory that readers hold
         feed ->
         push 1 0 w=1 -> 1 done w@2
         show w -> w@2=-2",
    );
}
