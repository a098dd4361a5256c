//! Values in half precision: pulls and pushes that ask for bfloat16 or binary16.

use std::sync::Arc;

use super::script::{Script, check};
use super::stage::{Plan, Stage, id};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64, Int32};
use crate::memory::Value;
use crate::port::{Outgoing, Plain, Simulated};

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const ROWS: &str = "optimizer: SGD const_lr { learning_rate: 1 } sparse { height: 8 width: 2 buckets: 1 }";

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Sum, trainers).with("w", Float32, 2, SGD).with("v", Float32, 1027, SGD)
}

#[test]
fn each_trainer_gets_the_value_in_the_type_it_asks_for() {
    // Both are ties of bfloat16, and exact in binary16.
    let script = "
        push+ 0 1 w/b=-1.00390625,-1.01171875 ->
        push+ 1 1 w=0 -> 0 value w@1=1b,1.015625b & 1 value w@1=1.0039063,1.0117188
        pull 0 1 w/h -> 0 value w@1=1.0039063h,1.0117188h
        pull 1 2 w/b ->
        push 0 2 w=-99999 -> 0 done w@2
        push+ 1 2 w/h=0.5b -> 1 value w@2=infh & 1 value w@2=99840b
        push+ 0 3 w/b=-1 ->
        push 1 3 w=0 -> 1 done w@3 & 0 value w@3=99840b
        push+ 0 1 v/h=-0.1 v.1=0 ->
        push+ 1 1 v/b=0 v.1=-2 -> *
        pull 0 1 v/h v.1 -> 0 value v@1=0.099975586h v.1@1=2";
    check(plan(Mode::Sync, 2), script);
}

#[test]
fn a_duplicate_push_is_answered_with_the_same_bits() {
    check(
        plan(Mode::Sync, 2),
        "push+ 0 1 w/b=-1.00390625 ->
         again 0 ->
         push+ 1 1 w/b=0 -> 0 value w@1=1b & 1 value w@1=1b
         again 0 -> 0 value w@1=1b
         redial 0 ->
         again 0 -> 0 value w@1=1b
         push+ 0 2 w/b=-1 ->
         redial 0 ->
         again 0 ->
         push+ 1 2 w/h=0 -> 0 value w@2=2b & 1 value w@2=2.0039063h",
    );
    check(
        plan(Mode::Async, 2),
        "push+ 0 0 w/b=-1.00390625 -> 0 value w@1=1b
         push+ 1 0 w/h=-1 -> 1 value w@2=2.0039063h
         again 0 -> 0 value w@2=2b
         pull 1 0 w/b v/h v.1 -> 1 value w@2=2b v@0=0h v.1@0=0",
    );
}

#[test]
fn a_set_replaces_the_half_precision_copies_too() {
    check(
        plan(Mode::Sync, 1),
        "pull 0 0 w/b -> 0 value w@0=0b
         set 0 w=3.1 -> 0 done w@0
         pull 0 0 w/b w/h w -> 0 value w@0=3.09375b w@0=3.0996094h w@0=3.1
         set 0 w=NaN,-inf -> 0 done w@0
         pull 0 0 w/b w/h -> 0 value w@0=NaNb,-infb w@0=NaNh,-infh",
    );
}

#[test]
fn half_precision_of_other_types_and_of_rows_is_refused_by_name() {
    let plan = Plan::new(Mode::Sync, Merge::Sum, 1)
        .with("d", Float64, 2, SGD)
        .with("n", Int32, 2, "algorithm: \"add\"")
        .with("s", Float32, 2, ROWS);
    check(
        plan,
        "pull 0 0 d/b -> 0 error Invalid: parameter \"d\": its value was asked for as bfloat16, expected float64; *
         push+ 0 1 d/h=1 -> 0 error Invalid: parameter \"d\": its value was asked for as float16, expected float64; *
         show d -> d@0=0
         pull 0 0 n/h -> 0 error Invalid: parameter \"n\": its value was asked for as float16, expected int32; *
         pull 0 0 s/b -> 0 error Invalid: parameter \"s\" is sparse: its rows were asked for as bfloat16, expected *",
    );
}

/// The values that the transport holds.
fn held(stage: &Stage) -> Vec<Arc<Value>> {
    let bodies = stage.held.iter().flat_map(|(_, body)| body);
    let values = bodies.filter_map(|one| match one {
        Outgoing::Value(value) => Some(Arc::clone(value)),
        _ => None,
    });
    values.collect()
}

#[test]
fn readers_of_a_version_share_one_half_precision_copy() {
    let mut script = Script::new(Stage::serving(plan(Mode::Sync, 3)));
    script.run(
        "hold ->
         push+ 0 1 w/b=1 ->
         push+ 1 1 w/b=1 ->
         push+ 2 1 w/h=1 -> *
         pull 0 1 w/b -> *
         pull 1 1 w/h -> *",
    );
    let values = held(&script.stage);
    let is_shared = |first: usize, second: usize| Arc::ptr_eq(&values[first], &values[second]);
    assert!(is_shared(0, 1) && is_shared(0, 3) && is_shared(2, 4) && !is_shared(0, 2), "one of each type");
    assert!(values.iter().all(|value| value.len() == 4), "each has half the bytes");
}

/// The number of free leases, found by taking all of them.
fn free(stage: &mut Stage) -> usize {
    stage.starve();
    let count = stage.taken.len();
    stage.taken.clear();
    count
}

#[test]
fn half_precision_copies_are_freed_once_outdated_and_unread() {
    let mut script = Script::new(Stage::serving(plan(Mode::Sync, 1)));
    // Values that were there before the budget was made lie elsewhere.
    script.run("set 0 w=1 v=1 v.1=1 -> *");
    let before = free(&mut script.stage);
    script.run("push+ 0 1 w=1 v=1 v.1=1 -> *");
    assert_eq!(free(&mut script.stage), before, "who asks for none has none made");
    script.run("push+ 0 2 w/b=1 v/h=1 v.1/b=1 -> *");
    assert_eq!(free(&mut script.stage), before - 3, "they stay for who asks next");
    script.run(
        "pull 0 2 w/b w/h -> *
         push 0 3 w=1 v=1 v.1=1 -> *",
    );
    assert_eq!(free(&mut script.stage), before, "a version that is over has no halves");
    script.run(
        "hold ->
         pull 0 3 w/b -> *
         push 0 4 w=1 -> *",
    );
    assert_eq!(free(&mut script.stage), before - 1, "somebody reads it");
    script.run("release ->");
    assert_eq!(free(&mut script.stage), before, "nobody does");
    script.run(
        "pull 0 4 w/b -> *
         set 0 w=1 -> 0 done w@4",
    );
    assert_eq!(free(&mut script.stage), before, "a value that was replaced has no halves");
}

fn late(mut stage: Stage) -> Stage {
    // Turns in which nothing arrives would retry.
    stage.is_late = true;
    stage
}

#[test]
fn an_answer_without_memory_waits_and_its_deadline_names_the_cause() {
    let script = "
        starve ->
        pull 0 0 w/b ->
        pull 1 0 w/b w -> 1 value w@0=0
        feed -> 0 value w@0=0b & 1 value w@0=0b
        starve ->
        spare w ->
        push+ 0 1 w/b=-1 ->
        spare w ->
        hold ->
        push+ 1 1 w/h=-1 -> 0 value w@1=2b & 1 value w@1=2h
        starve ->
        spare w ->
        push+ 0 2 w/b=-1 ->
        spare w ->
        push+ 1 2 w/b=-1 -> 0 value w@2=4b & 1 value w@2=4b
        starve ->
        pull 0 2 w/h ->
        pull 1 2 w/b -> 1 value w@2=4b
        feed -> 0 value w@2=4h";
    Script::new(late(Stage::serving(plan(Mode::Sync, 2)))).run(script);
    let script = "
        starve ->
        pull 0 0 w/b ->
        wait 60000 -> 0 error Deadline: parameter \"w\" chunk 0: its value as bfloat16 waits for memory that * 60.0 s
        feed -> ";
    Script::new(late(Stage::serving(plan(Mode::Sync, 2)))).run(script);
}

/// A pull that waited for memory or for a version ends with its connection.
#[test]
fn no_half_precision_copy_is_made_for_a_closed_connection() {
    let mut script = Script::new(late(Stage::serving(plan(Mode::Sync, 1))));
    script.run("set 0 w=1 -> *");
    let before = free(&mut script.stage);
    script.run(
        "starve ->
         pull 0 0 w/b ->
         redial 0 ->
         feed ->",
    );
    assert_eq!(free(&mut script.stage), before, "of one that waited for memory");
    script.run(
        "pull 0 1 w/b ->
         redial 0 ->
         push 0 1 w=1 -> 0 done w@1",
    );
    assert_eq!(free(&mut script.stage), before, "of one that waited for a version");
}

/// An allocation reclaims unread half-precision copies of other chunks.
#[test]
fn unread_half_precision_copies_of_other_chunks_are_reclaimed() {
    let landing = "
        pull 0 0 v.1/b v.1/h -> *
        starve ->
        push 0 1 w=-1 -> 0 done w@1
        show w -> w@1=1";
    let update = "
        pull 0 0 v.1/b -> *
        hold ->
        pull 0 0 w -> *
        starve ->
        spare w ->
        push+ 0 1 w=-1 -> 0 value w@1=1
        feed -> ";
    let half = "
        pull 0 0 v.1/b -> *
        hold ->
        starve ->
        pull 0 0 w/h -> 0 value w@0=0h
        pull 0 0 v.1/b ->
        feed -> 0 value v.1@0=0b";
    for script in [landing, update, half] {
        Script::new(late(Stage::serving(plan(Mode::Sync, 1)))).run(script);
    }
}

/// An update that waits for memory gets it before a half-precision copy does.
#[test]
fn no_half_precision_copy_is_made_while_an_update_waits_for_memory() {
    let script = "
        hold ->
        pull 0 0 w -> *
        starve ->
        spare w ->
        push 0 1 w=-1 -> 0 done w@1
        spare w ->
        pull 0 0 v.1/b ->
        turn -> 0 value v.1@0=0b
        show w -> w@1=1";
    Script::new(late(Stage::serving(plan(Mode::Sync, 1)))).run(script);
}

/// Unread half-precision copies do not keep an update from its memory.
#[test]
fn an_update_reclaims_unread_half_precision_copies() {
    let processor = Stage::serving(plan(Mode::Sync, 1));
    let device = Stage::empty(plan(Mode::Sync, 1)).with_accelerator(Simulated::new(Plain, u64::MAX, 1)).initialised();
    for stage in [processor, device] {
        let mut script = Script::new(stage);
        script.run(
            "pull 0 0 v/b v/h -> *
             hold ->
             pull 0 0 v -> *
             starve ->
             spare v ->
             push 0 1 v=-1 -> *
             pull 0 1 v -> 0 value v@1=1
             feed -> *",
        );
        let bytes = script.stage.contents().into_iter().find(|one| one.0 == id(1, 0)).expect("it is there").2;
        assert_eq!(bytes[..4], 1_f32.to_le_bytes());
    }
}
