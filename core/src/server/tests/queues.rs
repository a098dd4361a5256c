//! Parameters with one sender: its gradient alone is a round, beside rounds of all trainers.

use super::script::check;
use super::stage::{Plan, Stage};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

const QUEUE: &str = "algorithm: 'sum' sender: 1";

/// A queue from trainer 1, beside a parameter of all trainers.
fn plan() -> Plan {
    Plan::new(Mode::Sync, Merge::Mean, 3).with("q", Float32, 2, QUEUE).with("w", Float32, 2, "optimizer: SGD")
}

#[test]
fn every_item_is_a_version_and_readers_wait_for_theirs() {
    check(
        plan(),
        "pull 0 1 q ->
         push 1 1 q=3,5 -> 1 done q@1 & 0 value q@1=3,5
         pull 2 1 q -> 2 value q@1=3,5
         pull 0 2 q ->
         pull 2 2 q ->
         push 1 2 q=-1,0 -> 1 done q@2 & 0 value q@2=-1,0 & 2 value q@2=-1,0
         show q -> q@2=-1,0",
    );
}

#[test]
fn a_repeated_item_counts_once_also_from_the_next_incarnation() {
    check(
        plan(),
        "push 1 1 q=3,5 -> 1 done q@1
         again 1 -> 1 done q@1
         reborn 1
         push 1 1 q=9 -> 1 done q@1
         show q -> q@1=3,5
         push 1 3 q=9 ->
         push 1 2 q=4 -> 1 done q@2 & 1 done q@3
         show q -> q@3=9",
    );
}

#[test]
fn rounds_of_all_trainers_go_on_beside_a_queue() {
    check(
        plan(),
        "push 0 1 w=3 -> 0 done w@1
         push 1 1 q=7 w=3 -> 1 done q@1 w@1
         push 2 1 w=3 -> 2 done w@1
         show w -> w@1=-3
         leave 1 -> 1 done
         push 0 2 w=1 -> 0 done w@2
         push 2 2 w=1 -> 2 done w@2
         show w -> w@2=-4
         show q -> q@1=7",
    );
}

#[test]
fn another_sender_is_refused_by_name() {
    check(
        plan(),
        "push 0 1 w=3 q=1 -> 0 error Invalid: parameter \"q\": trainer 0 sent to it; expected 1
         show w -> w@0=0
         show q -> q@0=0
         push 1 1 q=7 -> 1 done q@1",
    );
}

#[test]
fn a_wait_for_a_lost_sender_ends_by_name_and_other_losses_do_not_end_it() {
    check(
        plan(),
        "pull 0 1 q ->
         gone 2 ->
         wait 3000 ->
         gone 1 ->
         wait 1999 ->
         wait 100 -> 0 error Deadline: parameter \"q\" chunk 0: round 1 waits for trainer 1 (host h, pid 1; *",
    );
    check(plan(), "pull 0 1 q ->\n wait 60000 -> 0 error Deadline: * round 1 waits for trainer 1 (host h, pid 1)");
}

fn refused(mode: Mode, config: &'static str, expected: &str) {
    let mut stage = Stage::empty(Plan::new(mode, Merge::Mean, 2).with("q", Float32, 2, config));
    stage.begin();
    let found = stage.errors().join("; ");
    assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
}

#[test]
fn an_invalid_sender_is_refused_by_name() {
    let high = "algorithm: 'sum' sender: 2";
    refused(Mode::Sync, high, "parameter \"q\" has a sender: found trainer 2; expected one below 2");
    refused(Mode::Async, QUEUE, "parameter \"q\" has a sender: found a job in Async; expected mode sync");
}
