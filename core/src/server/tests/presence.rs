//! Lost trainers: calls that wait for a lost trainer end after the grace time, and the round stays open.

use super::script::check;
use super::stage::Plan;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Mean, trainers).with("w", Float32, 2, "optimizer: SGD")
}

const LOST: &str = "error Deadline: parameter \"w\" chunk 0: round 1 waits for trainer 2 (host h, pid 2; connection \
                    closed 2.0 s ago), which has not connected again; the round stays open for a trainer that takes \
                    rank 2; a trainer that ends before the others leaves the job at its end (leave)";

#[test]
fn calls_that_wait_for_a_lost_trainer_end_after_the_grace_time() {
    check(
        plan(Mode::Sync, 3),
        &format!(
            "push+ 0 1 w=1 ->
             push 1 1 w=1 -> 1 done w@1
             pull 1 1 w ->
             gone 2 ->
             wait 1999 ->
             wait 1 -> 1 {LOST} & 0 {LOST}"
        ),
    );
}

#[test]
fn a_later_call_for_a_lost_trainer_ends_at_once() {
    check(
        plan(Mode::Sync, 2),
        "gone 1 ->
         wait 60000 ->
         push+ 0 1 w=1 ->
         wait 0 -> 0 error Deadline: * round 1 waits for trainer 1 (host h, pid 1; connection closed 60.0 s ago)*
         again 0 ->
         wait 99 ->
         wait 1 -> 0 error Deadline: * round 1 waits for trainer 1*",
    );
}

#[test]
fn the_round_goes_on_when_the_lost_trainer_reconnects_or_rejoins() {
    for back in ["redial 1", "reborn 1"] {
        check(
            plan(Mode::Sync, 2),
            &format!(
                "push+ 0 1 w=1 ->
                 gone 1 ->
                 wait 1999 ->
                 {back} ->
                 wait 57000 ->
                 push 1 1 w=3 -> 1 done w@1 & 0 value w@1=-2"
            ),
        );
        check(
            plan(Mode::Sync, 2),
            &format!(
                "push+ 0 1 w=1 ->
                 gone 1 ->
                 wait 2000 -> 0 error Deadline: *
                 {back} ->
                 again 0 ->
                 wait 59999 ->
                 push 1 1 w=3 -> 1 done w@1 & 0 value w@1=-2
                 again 0 -> 0 value w@1=-2"
            ),
        );
    }
}

#[test]
fn a_gradient_of_a_lost_trainer_counts() {
    check(
        plan(Mode::Sync, 3),
        "push 2 1 w=1 -> 2 done w@1
         push+ 0 1 w=1 ->
         gone 2 ->
         wait 5000 ->
         push 1 1 w=1 -> 1 done w@1 & 0 value w@1=-1
         push+ 0 2 w=1 ->
         wait 100 -> 0 error Deadline: * round 2 waits for trainer 2*",
    );
}

#[test]
fn a_trainer_that_departed_or_never_connected_is_not_lost() {
    check(plan(Mode::Sync, 2), "leave 1 -> 1 done\n gone 1 ->\n wait 5000 ->\n push+ 0 1 w=1 -> 0 value w@1=-1");
    check(
        plan(Mode::Sync, 2),
        "push+ 0 1 w=1 ->\n wait 59999 ->\n wait 1 -> 0 error Deadline: * waits for trainer 1 (host h, pid 1)",
    );
}

#[test]
fn a_lost_trainer_blocks_trainers_at_the_staleness_bound() {
    check(
        plan(Mode::Staleness { bound: 1 }, 3),
        "gone 2 ->
         push 0 1 w=1 -> 0 done w@1
         push 0 1 w=1 ->
         push 1 1 w=1 -> 1 done w@2
         wait 2000 -> 0 error Deadline: * waits for trainer 2*
         push 1 1 w=1 ->
         reborn 2 ->
         push 2 1 w=1 -> *",
    );
    check(plan(Mode::Async, 2), "gone 1 ->\n wait 2000 ->\n push+ 0 1 w=1 -> 0 value w@1=-1");
}

#[test]
fn a_grouped_round_waits_for_the_chunk_that_a_lost_trainer_did_not_send() {
    let clipped = "optimizer: SGD clip_norm: 1";
    check(
        Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2048, clipped),
        "push 1 1 w=1 -> 1 done w@1
         gone 1 ->
         push+ 0 1 w=1 w.1=1 ->
         wait 2000 -> 0 error Deadline: * round 1 waits for trainer 1* & 0 error Deadline: * waits for trainer 1*",
    );
}

#[test]
fn a_trainer_learns_which_trainers_its_calls_wait_for() {
    check(
        plan(Mode::Sync, 3),
        "push+ 0 1 w=1 ->
         ask 0 -> 0 parameter \"w\" chunk 0: round 1 waits for trainer 1 (host h, pid 1), 2 (host h, pid 2)
         gone 2 ->
         push 1 1 w=1 -> 1 done w@1
         wait 500 ->
         ask 0 -> 0 parameter \"w\" chunk 0: round 1 waits for trainer 2 (host h, pid 2; connection closed 0.5 s ago)
         ask 1 -> 1",
    );
}
