//! Rounds that are complete and have no memory for their next value, because readers hold versions: what happens
//! meanwhile changes nothing of what an update would have done at once.

use super::script::Script;
use super::stage::{Plan, Stage};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const CLIPPED: &str = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";

fn check(mode: Mode, trainers: u32, script: &str) {
    let plan = Plan::new(mode, Merge::Sum, trainers);
    let plan = plan.with("w", Float32, 2, SGD).with("b", Float32, 2, SGD).with("g", Float32, 1025, CLIPPED);
    let mut stage = Stage::serving(plan);
    // Turns in which nothing arrives would try again.
    stage.is_late = true;
    Script::new(stage).run(script);
}

#[test]
fn a_value_waits_for_the_updates_that_came_before_it() {
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
fn who_comes_back_is_not_in_a_round_that_was_complete_without_it() {
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
fn gradients_of_no_round_go_in_the_order_of_arrival() {
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
