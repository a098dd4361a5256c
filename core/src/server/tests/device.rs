//! Chunks on an accelerator: events during an update, and failures of the accelerator.
//!
//! The scripts of the other tests run with an accelerator too, and `restart` kills shards with a slow accelerator again
//! and again.

use std::sync::Arc;
use std::time::Duration;

use super::script::Script;
use super::stage::{Plan, Stage, contents};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::error::Failure;
use crate::port::{Fault, FaultyAccelerator, Plain, Simulated};

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const MOMENTUM: &str = "sgd { momentum: 0.5 } const_lr { learning_rate: 1 }";

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Sum, trainers).with("w", Float32, 2, SGD).with("m", Float32, 3, MOMENTUM)
}

fn device() -> Simulated<Plain> {
    Simulated::new(Plain, u64::MAX, 1)
}

fn late(plan: Plan) -> Stage {
    let mut stage = Stage::empty(plan).with_accelerator(device()).initialised();
    stage.is_late = true;
    stage
}

fn check(plan: Plan, script: &str) {
    Script::new(late(plan)).run(script);
}

fn with_fault(plan: Plan, fault: Fault) -> Stage {
    let mut stage = Stage::empty(plan).with_accelerator(FaultyAccelerator::new(device(), fault)).initialised();
    stage.is_late = true;
    stage
}

#[test]
fn pulls_read_the_version_before_and_the_next_round_waits() {
    check(
        plan(Mode::Sync, 2),
        "push+ 0 1 w=1 ->
         push 1 1 w=1 -> 1 done w@1
         pull 0 0 w -> 0 value w@0=0
         push 1 2 w=3 ->
         push 1 3 w=3 -> 1 error Invalid: *it may be one round ahead
         pull 1 1 w ->
         finish -> 0 value w@1=-2 & 1 value w@1=-2 & 1 done w@2
         push 0 2 w=1 -> 0 done w@2
         turn
         turn
         show w -> w@2=-6",
    );
}

#[test]
fn a_pull_of_a_steps_value_waits_for_the_steps_gradients_on_the_device() {
    check(
        plan(Mode::Async, 2),
        "push 0 0 w=1 -> 0 done w@1
         pull 0 0 w -> 0 value w@0=0
         pull+ 0 0 w ->
         pull+ 1 0 w -> 1 value w@0=0
         finish -> 0 value w@1=-1",
    );
    // Later gradients of other trainers are not waited for.
    check(
        plan(Mode::Async, 3),
        "push 0 0 m=1 -> 0 done m@1
         push 1 0 m=1 ->
         push 2 0 m=1 ->
         pull+ 1 0 m ->
         pull+ 0 0 m ->
         turn -> 0 value m@1=-1 & 1 done m@2
         turn -> 1 value m@2=-2.5 & 2 done m@3
         turn -> ",
    );
}

#[test]
fn an_async_gradient_waits_for_the_one_before_it() {
    check(
        plan(Mode::Async, 2),
        "push 0 0 m=1 -> 0 done m@1
         push 1 0 m=1 ->
         push 1 0 m=1 -> 1 error Busy: *already waits with an earlier gradient
         again 0 -> 0 done m@1
         finish -> 1 done m@2
         again 0 -> 0 done m@2
         show m -> m@2=-2.5",
    );
}

#[test]
fn a_set_during_an_update_replaces_the_updated_value() {
    check(
        plan(Mode::Sync, 1),
        "push 0 1 m=1 -> 0 done m@1
         set 0 m=10 ->
         pull 0 0 m -> 0 value m@0=0
         finish -> 0 done m@1
         show m -> m@1=10
         again 0 -> 0 done m@1
         push 0 2 m=2 -> 0 done m@2
         set 0 m=20 ->
         again 0 ->
         set 0 m=30 -> 0 error Busy: *another set waits
         finish -> 0 done m@2
         show m -> m@2=20
         again 0 -> 0 done m@2
         push 0 3 m=1 -> 0 done m@3
         finish ->
         show m -> m@3=27.75",
    );
}

#[test]
fn a_trainer_that_rejoins_while_a_round_closes_without_it_is_acknowledged() {
    check(
        plan(Mode::Sync, 2),
        "leave 1 -> 1 done
         push 0 1 w=1 -> 0 done w@1
         reborn 1
         push 1 1 w=5 ->
         push+ 1 1 w=5 ->
         finish -> 1 done w@1 & 1 value w@1=-1
         push 0 2 w=1 -> 0 done w@2
         finish ->
         show w -> w@1=-1
         push 1 2 w=1 -> 1 done w@2
         finish ->
         show w -> w@2=-3",
    );
}

#[test]
fn an_expired_wait_for_a_hung_device_names_the_device() {
    let mut stage = with_fault(plan(Mode::Sync, 1), Fault::Hangs(3));
    stage.turn();
    stage.turn();
    Script::new(stage).run(
        "push+ 0 1 w=1 ->
         turn ->
         wait 60000 -> 0 error Deadline: *round 1 waits for faulty simulated (plain)
         pull 0 1 w ->
         set 0 w=4 ->
         wait 60000 -> 0 error Deadline: *round 1 waits for faulty simulated (plain) & 0 error Deadline: *version 1 *",
    );
}

#[test]
fn work_that_a_device_refuses_is_done_on_the_processor() {
    // Two loads, and then the update of w, which has no states, or of m, whose states are taken back.
    for fault in [Fault::Refuses(1), Fault::Refuses(2), Fault::Refuses(3), Fault::Refuses(4), Fault::Breaks(3)] {
        let mut stage = with_fault(plan(Mode::Sync, 1), fault);
        stage.finish_work();
        let mut script = Script::new(stage);
        script.run(
            "push 0 1 w=1 -> 0 done w@1
             finish ->
             push 0 1 m=1 -> 0 done m@1
             finish ->
             push 0 2 m=1 w=1 -> 0 done m@2 w@2
             finish ->
             push 0 3 m=1 w=1 -> 0 done m@3 w@3
             finish ->
             show m w -> m@3=-4.25 & w@3=-3",
        );
        script.stage.settle();
        let states: Vec<_> = contents(&script.stage.shard).into_iter().flat_map(|(.., states)| states).collect();
        assert_eq!(states, [(-1.75_f32).to_le_bytes().repeat(3)], "{fault:?}");
    }
}

#[test]
fn a_chunk_that_leaves_its_device_keeps_its_waiting_gradient_and_set_in_order() {
    // Two loads, then the update of m, before whose end a gradient and a set arrive.
    let stage = |mode, trainers, fault| {
        let mut stage = with_fault(plan(mode, trainers), fault);
        stage.finish_work();
        stage
    };
    Script::new(stage(Mode::Sync, 1, Fault::Refuses(3))).run(
        "push 0 1 m=1 -> 0 done m@1
         push 0 2 m=1 ->
         set 0 m=10 ->
         finish -> 0 done m@2 & 0 done m@2
         show m -> m@2=10",
    );
    Script::new(stage(Mode::Async, 2, Fault::Refuses(3))).run(
        "push 0 0 m=1 -> 0 done m@1
         push 1 0 m=1 ->
         set 0 m=10 ->
         finish -> 1 done m@2 & 0 done m@2
         show m -> m@2=10",
    );
    // The load of a value is refused while a round is complete and another set waits for the load.
    Script::new(stage(Mode::Sync, 1, Fault::Refuses(3))).run(
        "set 0 m=5 -> 0 done m@0
         push 0 1 m=1 -> 0 done m@1
         set 0 m=10 ->
         finish -> 0 done m@1
         show m -> m@1=10",
    );
}

#[test]
fn a_device_that_loses_states_stops_the_shard_by_name() {
    // Two loads and two updates, and then one of m, whose states are on the device alone.
    for fault in [Fault::Breaks(5), Fault::Dies(4)] {
        let storage = InMemory::new();
        let disk: Arc<dyn Storage> = Arc::new(storage.clone());
        let bare = Stage::empty(plan(Mode::Sync, 1)).with_accelerator(FaultyAccelerator::new(device(), fault));
        let mut stage = bare;
        stage.restore(&disk, false);
        stage.is_late = true;
        let mut script = Script::new(stage.initialised());
        script.run("turn ->\n turn ->\n push 0 1 w=1 m=1 -> *\n turn ->\n push 0 2 m=1 -> 0 done m@2");
        let mut attend = |_| script.stage.shard.attend(script.stage.now, &mut Vec::new()).err();
        let failure = (0..10).find_map(&mut attend).expect("it breaks");
        let Failure::Node(text) = &failure else { panic!("{failure}") };
        assert!(text.contains("faulty simulated (plain)") && text.contains("lost"), "{text}");
        let begun = script.stage.begin_checkpoint(1);
        assert_eq!(begun.err(), Some(failure.clone()), "nothing is written down of what was lost");

        // Another process restores all of it from the journal, on the processor.
        let mut again = Stage::empty(plan(Mode::Sync, 1));
        again.restore(&disk, false);
        Script::new(again).run("show m w -> m@2=-2.5 & w@1=-1");
    }
}

#[test]
fn a_device_without_memory_or_locked_pages_holds_the_chunks_that_fit() {
    let script = "push 0 1 w=1 m=1 -> 0 done w@1 m@1\n finish ->\n show w m -> w@1=-1 & m@1=-1";
    for fault in [Fault::IsFull(1), Fault::IsFull(2), Fault::CannotPin] {
        Script::new(with_fault(plan(Mode::Sync, 1), fault)).run(script);
    }
    let small = Stage::empty(plan(Mode::Sync, 1)).with_accelerator(Simulated::new(Plain, 8, 2).of_depth(1));
    Script::new(small.initialised()).run(script);
}

#[test]
fn a_required_device_refuses_a_job_that_does_not_fit_with_the_bytes() {
    // 8 bytes of w, 12 of m, and as many of its state.
    let script = "push 0 1 w=1 m=1 -> 0 done w@1 m@1\n push 0 2 m=1 -> 0 done m@2\n show w m -> w@1=-1 & m@2=-2.5";
    let named =
        |bytes| Stage::empty(plan(Mode::Sync, 1)).with_named_accelerator(Simulated::new(Plain, bytes, 1).of_depth(1));
    Script::new(named(32).initialised()).run(script);
    for (bytes, parameter, needed) in [(0, "w", 8), (7, "w", 8), (8, "m", 24), (31, "m", 24)] {
        let storage = InMemory::new();
        let disk: Arc<dyn Storage> = Arc::new(storage.clone());
        let mut stage = named(bytes);
        stage.restore(&disk, false);
        stage.begin();
        let left = bytes - if parameter == "m" { 8 } else { 0 };
        let expected = format!(
            "simulated (plain): 32 bytes were asked for, for parameters, states and kept sums, and {bytes} were free; \
             parameter \"{parameter}\": 1 of 1 chunks found no room: {needed} bytes were asked for and {left} are free"
        );
        assert_eq!(stage.errors(), [expected]);
        assert!(!stage.turn() && stage.shard.generation().0 == 0, "nothing is served");

        // The refusal left no trace: a restart with enough device memory initialises the job.
        let mut again = named(32);
        again.restore(&disk, false);
        assert_eq!(again.shard.generation().0, 0, "what was refused is not in the journal");
        again.generation.0 += 1;
        Script::new(again.initialised()).run(script);
    }
}

#[test]
fn a_required_device_stops_a_restored_shard_that_does_not_fit() {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let mut stage = Stage::empty(plan(Mode::Sync, 1));
    stage.restore(&disk, false);
    Script::new(stage.initialised()).run("push 0 1 w=1 m=1 -> 0 done w@1 m@1");
    let named = |bytes| {
        let mut stage = Stage::empty(plan(Mode::Sync, 1)).with_named_accelerator(Simulated::new(Plain, bytes, 1));
        stage.restore(&disk, false);
        stage
    };
    let mut small = named(31);
    let failure = small.shard.attend(small.now, &mut Vec::new()).expect_err("there is no room");
    let Failure::Node(text) = &failure else { panic!("{failure:?}") };
    assert!(text.contains("32 bytes were asked for") && text.contains("31 were free"), "{text}");
    assert_eq!(small.begin_checkpoint(1).err(), Some(failure), "nothing is written down");
    Script::new(named(32)).run("show m w -> m@1=-1 & w@1=-1");
}

#[test]
fn a_checkpoint_waits_for_device_states_and_then_releases_the_chunks() {
    let storage = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(storage.clone());
    let mut script = Script::new(late(plan(Mode::Sync, 1)));
    script.stage.claim(&disk);
    script.run("finish ->\n push 0 1 m=1 w=1 -> 0 done m@1 w@1");
    assert!(script.stage.begin_checkpoint(1).expect("the disk is well"));
    let mut waits = 0;
    let writer = loop {
        match script.stage.shard.continue_checkpoint(u64::MAX).expect("the disk is well") {
            Some(writer) => break writer,
            None => waits += 1,
        }
        script.run("turn ->");
        if waits == 2 {
            script.run("push 0 2 m=1 w=1 -> 0 done m@2 w@2");
        }
    };
    assert!(1 < waits, "states do not come at once");
    writer.finish().expect("the disk is well");
    script.run("finish ->\n show m -> m@2=-2.5");
    let mut again = Stage::empty(plan(Mode::Sync, 1));
    again.restore(&disk, false);
    let expected = (-1.0_f32).to_le_bytes().repeat(3);
    let found = again.contents().into_iter().find(|(.., states)| !states.is_empty()).expect("one has states");
    assert_eq!((found.1.0, &found.2, &found.3[0]), (1, &expected, &expected));
}

#[test]
fn settling_waits_for_device_work_and_names_a_hung_device() {
    let mut script = Script::new(late(plan(Mode::Sync, 1)));
    script.run("push 0 1 m=1 w=1 -> 0 done m@1 w@1");
    script.stage.settle();
    assert_eq!(script.stage.contents()[1].3, [(-1.0_f32).to_le_bytes().repeat(3)]);

    let mut stage = with_fault(plan(Mode::Sync, 1), Fault::Hangs(2));
    let settled = stage.shard.settle(stage.now, Duration::from_millis(20), &mut Vec::new());
    let text = settled.expect_err("it hangs").to_string();
    assert_eq!(text, "faulty simulated (plain) has not ended its work within 0.0 s");
}

#[test]
fn a_newer_initialisation_starts_with_an_empty_device() {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let mut stage = late(plan(Mode::Sync, 1));
    stage.claim(&disk);
    stage.finish_work();
    // The checkpoint has released its chunks, and nothing has continued it.
    assert!(stage.begin_checkpoint(1).expect("the disk is well"));
    while stage.shard.continue_checkpoint(u64::MAX).expect("the disk is well").is_none() {
        stage.turn();
    }
    let mut script = Script::new(stage);
    script.run("push 0 1 m=1 -> 0 done m@1");
    script.stage.generation.0 += 1;
    let first = script.stage.init(0, None);
    script.stage.deliver(0, &first);
    script.stage.finish_work();
    assert!(!script.stage.turn(), "nothing is left of the chunks that were");
    script.stage.is_late = false;
    script.stage.initialise();
    script.run("push 0 1 m=1 w=2 -> 0 done m@1 w@1\n show m w -> m@1=-1 & w@1=-2");
}
