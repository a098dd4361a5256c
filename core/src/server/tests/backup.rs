//! Backup trainers: rounds in mode sync that are complete without the gradients of the slowest trainers.

use std::sync::Arc;

use super::script::{Script, check};
use super::stage::{Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::Incarnation;

const ONE: &str = "optimizer: SGD backup_trainers: 1";

fn plan(trainers: u32) -> Plan {
    Plan::new(Mode::Sync, Merge::Mean, trainers).with("w", Float32, 2, ONE)
}

#[test]
fn a_round_is_complete_without_the_slowest_trainer() {
    check(
        plan(4),
        "push 0 1 w=3 -> 0 done w@1
         push 1 1 w=3 -> 1 done w@1
         push 2 1 w=6 -> 2 done w@1
         show w -> w@1=-4
         push 3 1 w=100 -> 3 done w@1
         show w -> w@1=-4
         again 3 -> 3 done w@1
         show w -> w@1=-4
         push+ 3 2 w=3 ->
         push+ 1 2 w=3 ->
         push 0 2 w=3 -> *
         show w -> w@2=-7
         push+ 2 2 w=100 -> 2 value w@2=-7",
    );
}

#[test]
fn early_gradients_count_in_their_round() {
    check(
        plan(3),
        "push 0 1 w=1 -> 0 done w@1
         push 0 2 w=5 ->
         push 1 1 w=1 -> *
         show w -> w@1=-1
         push+ 2 1 w=100 -> 2 value w@1=-1
         push+ 2 2 w=7 -> *
         show w -> w@2=-7
         push 1 2 w=100 -> 1 done w@2
         show w -> w@2=-7",
    );
}

#[test]
fn a_round_of_fewer_trainers_waits_for_all_of_them() {
    check(
        plan(2),
        "push 0 1 w=1 -> 0 done w@1
         show w -> w@1=-1
         push 1 1 w=100 -> 1 done w@1
         show w -> w@1=-1",
    );
    check(
        plan(4),
        "leave 2 -> *
         leave 3 -> *
         push 0 1 w=1 -> 0 done w@1
         show w -> w@0=0
         push 1 1 w=3 -> *
         show w -> w@1=-2",
    );
}

#[test]
fn a_call_does_not_end_for_a_lost_trainer_that_its_round_can_do_without() {
    check(
        plan(3),
        "push+ 0 1 w=1 ->
         gone 2 ->
         wait 3000 ->
         wait 57000 -> 0 error Deadline: * version 1 was not reached within 60.0 s *
         push+ 1 1 w=3 -> 1 value w@1=-2
         again 0 -> 0 value w@1=-2
         push+ 0 2 w=1 ->
         gone 1 ->
         wait 2100 -> 0 error Deadline: *round 2 waits for trainer * which has not connected again; *",
    );
}

#[test]
fn a_gradient_of_a_trainer_that_has_left_counts_for_a_lost_one() {
    check(
        plan(4),
        "push 3 1 w=1 -> 3 done w@1
         leave 3 -> *
         push+ 0 1 w=1 ->
         gone 2 ->
         wait 3000 ->
         push 1 1 w=1 -> *
         show w -> w@1=-1",
    );
}

#[test]
fn a_restart_has_the_counted_gradients_and_no_other() {
    let memory = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut stage = Stage::empty(plan(4));
    stage.restore(&disk, false);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run(
        "push 0 1 w=3 -> *
         push+ 1 1 w=3 ->
         push+ 2 1 w=6 -> *
         push 3 1 w=100 -> *
         push 3 2 w=6 -> *
         push+ 0 2 w=6 ->
         show w -> w@1=-4",
    );
    let copied: Arc<dyn Storage> = Arc::new(memory.copy());
    let mut again = Stage::empty(plan(4));
    again.restore(&copied, false);
    (0..4).for_each(|trainer| again.connect(trainer, Incarnation(2)));
    let mut again = Script::new(again);
    // The gradient that was acknowledged is in the open round; the trainer of the other one repeats it.
    again.run(
        "show w -> w@1=-4
         push 3 1 w=100 -> *
         push+ 1 2 w=6 ->
         push+ 2 2 w=6 -> *
         show w -> w@2=-10
         push 0 2 w=100 -> 0 done w@2
         show w -> w@2=-10",
    );
}

#[test]
fn backup_trainers_need_rounds_of_more_trainers() {
    let refused = |plan: Plan, expected: &str| {
        let mut stage = Stage::empty(plan);
        stage.begin();
        let errors = stage.errors().join("; ");
        assert!(errors.contains(expected), "{errors:?}; expected {expected}");
    };
    let of = |mode, trainers, config| Plan::new(mode, Merge::Mean, trainers).with("w", Float32, 2, config);
    refused(plan(1), "parameter \"w\" has backup_trainers: found 1 of 1 trainers; expected fewer");
    refused(of(Mode::Async, 2, ONE), "found a job in Async; expected mode sync, which has rounds");
    refused(
        of(Mode::Sync, 2, "sgd { } clip_norm: 1 const_lr { learning_rate: 1 } backup_trainers: 1"),
        "found a rule that needs the whole gradient; expected a rule that updates each chunk by itself",
    );
    refused(
        of(Mode::Sync, 2, "algorithm: 'sum' sender: 0 backup_trainers: 1"),
        "found rounds that one trainer ends; expected rounds of all",
    );
}
