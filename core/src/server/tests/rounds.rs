//! Synchronous rounds: one gradient of every trainer, one update, one version.

use std::time::Duration;

use proptest::prelude::*;

use super::script::{Script, check};
use super::stage::{Plan, Stage, id};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Bfloat16, Float32, Float64, Int64};
use crate::ids::{Generation, Incarnation, PeerId};

const SGD: &str = "optimizer: SGD";

fn mean(trainers: u32) -> Plan {
    Plan::new(Mode::Sync, Merge::Mean, trainers).with("w", Float32, 2, SGD)
}

fn sum(trainers: u32) -> Plan {
    Plan { merge: Merge::Sum, ..mean(trainers) }
}

#[test]
fn a_round_closes_with_the_last_gradient() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         show w -> w@0=0
         push 1 1 w=3,5 -> 1 done w@1
         show w -> w@1=-2,-3",
    );
    check(
        sum(3),
        "push 2 1 w=1 -> 2 done w@1
         push 0 1 w=1 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         show w -> w@1=-3",
    );
}

const MOMENTUM: &str = "rule: 'state m = 0; m = 0.5 * m + g + n; w -= m' const_lr { learning_rate: 1 }";

#[test]
fn a_round_without_any_gradient_is_no_update() {
    let plan = || Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2, MOMENTUM).with("x", Float32, 1, MOMENTUM);
    // A trainer without a gradient counts in the mean.
    check(
        plan(),
        "push 0 1 w=2 x=none -> 0 done w@1 x@1
         push+ 1 1 w=none x=none -> *
         show w x -> w@1=-2 & x@1=0
         push+ 1 2 w=none x=none ->
         push 0 2 w=none x=4 -> *
         show w x -> w@2=-2 & x@2=-3
         push 0 3 w=2 x=2 -> 0 done w@3 x@3
         push 1 3 w=2 x=none -> *
         show w x -> w@3=-7 & x@3=-7.5",
    );
    // A push one round ahead may have no gradient either.
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push 0 2 w=none ->
         push 1 1 w=1 -> *
         again 1 -> 1 done w@1
         push+ 1 2 w=none -> 1 value w@2=-1",
    );
}

#[test]
fn a_void_push_makes_its_round_no_update() {
    let grouped = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 1025, "sgd { } clip_norm: 1e6");
    check(
        grouped,
        "push 0 1 w=1 w.1=1 -> *
         void 1 1 w=none w.1=none -> *
         show w w.1 -> w@1=0 & w.1@1=0
         push 0 2 w=1 w.1=1 -> *
         push+ 1 2 w=3 w.1=3 -> *
         show w w.1 -> w@2=-2 & w.1@2=-2",
    );
    check(
        Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 1, MOMENTUM),
        "void 0 1 w=none -> 0 done w@1
         push+ 1 1 w=7 -> 1 value w@1=0
         push 0 2 w=1 -> 0 done w@2
         push+ 1 2 w=1 -> 1 value w@2=-2",
    );
}

#[test]
fn a_push_without_a_gradient_is_refused_outside_of_mode_sync() {
    let rows = "const_lr { learning_rate: 1 } sparse { height: 9 width: 1 buckets: 1 }";
    check(
        Plan::new(Mode::Async, Merge::Mean, 1).with("w", Float32, 1, SGD),
        "push 0 0 w=none -> 0 error Invalid: parameter \"w\": a push without a gradient; expected one, or *",
    );
    check(
        Plan::new(Mode::Async, Merge::Mean, 1).with("w", Float32, 1, rows),
        "void 0 0 w=none -> 0 error Invalid: parameter \"w\": a push without a gradient; expected one, or *",
    );
}

#[test]
fn a_single_trainer_completes_its_rounds_alone() {
    check(mean(1), "push+ 0 1 w=1 -> 0 value w@1=-1\n push+ 0 2 w=1 -> 0 value w@2=-2");
}

#[test]
fn an_aggregator_returns_the_merged_gradient_of_the_last_round() {
    let aggregator = |merge, element_type, trainers| Plan {
        merge,
        ..Plan::new(Mode::Sync, Merge::Mean, trainers).with("w", element_type, 2, "algorithm: 'sum'")
    };
    check(
        aggregator(Merge::Sum, Float32, 1),
        "push+ 0 1 w=3,5 -> 0 value w@1=3,5
         push+ 0 2 w=1,-2 -> 0 value w@2=1,-2
         show w -> w@2=1,-2",
    );
    check(
        aggregator(Merge::Sum, Int64, 2),
        "push+ 1 1 w=3,5 ->
         push+ 0 1 w=1,-9 -> 0 value w@1=4,-4 & 1 value w@1=4,-4
         push 0 2 w=7 -> 0 done w@2
         leave 1 -> 1 done
         show w -> w@2=7",
    );
    check(
        aggregator(Merge::Mean, Float32, 2),
        "push 0 1 w=3,5 -> 0 done w@1
         push 1 1 w=1,-9 -> 1 done w@1
         show w -> w@1=2,-2",
    );
}

#[test]
fn a_trainer_one_round_ahead_waits_for_its_acknowledgement() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push 0 2 w=5 ->
         push 1 1 w=1 -> 1 done w@1 & 0 done w@2
         show w -> w@1=-1
         push 1 2 w=1 -> 1 done w@2
         show w -> w@2=-4",
    );
}

#[test]
fn a_gradient_of_the_next_round_waits_also_without_one_in_the_open_round() {
    check(
        mean(2),
        "push 0 2 w=100 ->
         push 1 1 w=1 -> 1 done w@1
         show w -> w@0=0
         push 0 1 w=3 -> 0 done w@1 & 0 done w@2
         show w -> w@1=-2
         push 1 2 w=2 -> 1 done w@2
         show w -> w@2=-53",
    );
}

#[test]
fn a_gradient_of_a_closed_round_is_acknowledged_and_not_applied() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         reborn 0
         push 0 1 w=5 -> 0 done w@1
         show w -> w@1=-1",
    );
}

#[test]
fn two_rounds_ahead_is_refused_by_name() {
    let text = "0 error Invalid: parameter \"w\" chunk 0: trainer 0 sent round 3 while round 1 is open; *";
    check(mean(2), &format!("push 0 3 w=1 -> {text}\n push 0 1 w=1 -> 0 done w@1\n show w -> w@0=0"));
}

#[test]
fn a_duplicate_is_acknowledged_and_not_applied() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         again 0 -> 0 done w@1
         redial 0
         again 0 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         again 0 -> 0 done w@1
         again 1 -> 1 done w@1
         redial 1
         again 1 -> 1 done w@1
         show w -> w@1=-1",
    );
}

#[test]
fn a_duplicate_that_waits_is_acknowledged_once_on_the_newest_connection() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push 0 2 w=1 ->
         redial 0
         again 0 ->
         again 0 ->
         push 1 1 w=1 -> 1 done w@1 & 0 done w@2",
    );
}

#[test]
fn a_push_that_wants_the_value_gets_the_value_of_its_round() {
    check(
        mean(2),
        "push+ 0 1 w=1 ->
         push+ 0 2 w=1 ->
         push+ 1 1 w=3 -> 0 value w@1=-2 & 1 value w@1=-2
         again 1 -> 1 value w@1=-2
         push 1 2 w=1 -> 1 done w@2 & 0 value w@2=-3",
    );
}

#[test]
fn a_pull_waits_for_its_version() {
    check(
        mean(2),
        "pull 0 0 w -> 0 value w@0=0
         pull 0 1 w ->
         push 0 1 w=1 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1 & 0 value w@1=-1
         pull 1 1 w -> 1 value w@1=-1",
    );
}

#[test]
fn an_expired_wait_names_the_missing_trainers() {
    check(
        mean(3),
        "push 1 1 w=1 -> 1 done w@1
         pull 1 1 w ->
         wait 59999 ->
         pull 0 1 w ->
         wait 1 -> 1 error Deadline: parameter \"w\" chunk 0: version 1 was not reached \
within 60.0 s (--round-timeout-seconds of the servers); it is at version 0 \
and round 1 waits for trainer 0 (host h, pid 0), 2 (host h, pid 2)
         wait 59998 ->
         wait 1 -> 0 error Deadline: * waits for trainer 0 (host h, pid 0), 2 (host h, pid 2)
         push 0 1 w=1 -> 0 done w@1
         push 2 1 w=1 -> 2 done w@1",
    );
}

#[test]
fn each_wait_expires_at_its_own_deadline() {
    let plan = mean(2).with("x", Float32, 1, SGD);
    check(
        plan,
        "pull 0 1 w ->
         wait 1000 ->
         pull 0 1 x ->
         pull 1 1 w ->
         wait 1000 ->
         pull 1 2 w ->
         wait 58000 -> 0 error Deadline: *\"w\"*
         wait 999 ->
         wait 1 -> 1 error Deadline: *\"w\"* & 0 error Deadline: *\"x\"*
         wait 1000 -> 1 error Deadline: *version 2*",
    );
}

#[test]
fn a_trainer_that_leaves_is_not_waited_for() {
    check(
        mean(3),
        "push 0 1 w=1 -> 0 done w@1
         push 1 1 w=3 -> 1 done w@1
         leave 2 -> 2 done
         show w -> w@1=-2
         again 2 -> 2 done
         push 0 2 w=1 -> 0 done w@2
         push 1 2 w=1 -> 1 done w@2
         show w -> w@2=-3",
    );
}

#[test]
fn gradients_of_a_departed_trainer_count() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push 0 2 w=5 ->
         leave 0 -> 0 done
         push 1 1 w=1 -> 1 done w@1 & 0 done w@2
         push 1 2 w=1 -> 1 done w@2
         show w -> w@2=-4
         push 1 3 w=1 -> 1 done w@3
         show w -> w@3=-5",
    );
    // Also in two rounds that the departure of another trainer closes.
    check(
        mean(3),
        "push 0 1 w=1 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         push 0 2 w=1 ->
         push 1 2 w=5 ->
         leave 1 -> 1 done
         leave 2 -> *
         show w -> w@2=-4",
    );
}

#[test]
fn a_new_incarnation_of_a_departed_trainer_counts_again() {
    check(
        mean(2),
        "leave 1 -> 1 done
         push 0 1 w=1 -> 0 done w@1
         reborn 1
         push 1 2 w=1 -> 1 done w@2
         show w -> w@1=-1
         push 0 2 w=1 -> 0 done w@2
         show w -> w@2=-2
         push 0 3 w=1 -> 0 done w@3
         show w -> w@2=-2",
    );
}

#[test]
fn a_new_incarnation_does_not_count_twice_in_a_round() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         reborn 0
         push 0 1 w=9 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         show w -> w@1=-1
         push 0 2 w=1 -> 0 done w@2
         push 1 2 w=1 -> 1 done w@2
         show w -> w@2=-2",
    );
}

#[test]
fn an_older_incarnation_is_fenced() {
    let mut script = Script::new(Stage::serving(mean(2)));
    let old = script.stage.actors[&0];
    script.run("push 0 1 w=1 -> 0 done w@1\n reborn 0");
    script.stage.actors.insert(0, old);
    script.run("push 0 2 w=1 -> ");
    assert_eq!(script.stage.closed.last(), Some(&old.peer), "the old connection was ended");
    script.stage.answers.clear();
    script.stage.connect(0, Incarnation(1));
    let errors = script.stage.errors();
    assert!(errors[0].contains("trainer 0 incarnation 1 was superseded by incarnation 2"), "{errors:?}");
}

#[test]
fn a_frame_on_another_trainers_connection_is_refused() {
    let mut stage = Stage::serving(mean(2));
    let parcel = stage.push(0, vec![(id(0, 0), 1, vec![0; 8])], false);
    let other = stage.actors[&1].peer;
    stage.deliver_from(other, &parcel);
    assert!(stage.errors()[0].contains("a frame of trainer 0 incarnation 1 on the connection of trainer 1"));
    stage.answers.clear();
    stage.event(crate::port::Event::Accepted { peer: PeerId(99), origin: "somebody".into(), transport: String::new() });
    stage.deliver_from(PeerId(99), &parcel);
    assert!(stage.errors()[0].contains("the first frame of a connection is a hello"));
    assert_eq!(stage.closed, [PeerId(99)]);
}

#[test]
fn another_generation_or_epoch_is_fenced() {
    let mut script = Script::new(Stage::serving(mean(1)));
    script.stage.generation = Generation(2);
    script.run("push 0 1 w=1 -> 0 error Fenced: generation 2 is not the one that initialised this job, which is 1");
    script.stage.generation = Generation(1);
    let mut parcel = script.stage.push(0, vec![(id(0, 0), 1, vec![0; 8])], false);
    parcel.frame.head.epoch.0 += 1;
    script.stage.answers.clear();
    script.stage.deliver(0, &parcel);
    let [text] = script.stage.errors().try_into().expect("there is one");
    assert!(text.starts_with("epoch 8 is not this job's, which is 7: ") && text.contains("a new client"), "{text}");
}

#[test]
fn a_refused_frame_is_not_applied_in_part() {
    let plan = mean(1).with("x", Float64, 1, SGD).with("n", Int64, 1, "algorithm: \"add\"");
    let nothing = "show w x n -> w@0=0 & x@0=0 & n@0=0";
    for (bad, text) in [
        ("push 0 1 w=1 y=1 n=1", "Invalid: this shard holds no chunk 0 of parameter 99"),
        ("push 0 1 w=1 w.1=1 n=1", "Invalid: this shard holds no chunk 1 of parameter 0"),
        ("push 0 1 w=1 x=1,2", "Invalid: parameter \"x\" chunk 0: 16 bytes were sent, expected 8"),
        ("push 0 1 w=1 x=1,2h", "Invalid: parameter \"x\" chunk 0: 4 bytes were sent, expected 2"),
        ("push 0 1 w=1 n=1h", "Invalid: parameter \"n\": a gradient of float16 was sent for a parameter of int64"),
        ("push 0 1 x=1 w=1d", "Invalid: parameter \"w\": a gradient of float64 was sent for a parameter of float32"),
        ("push*-1 0 1 w=1", "Invalid: the learning rate sent with a gradient is -1; expected *"),
        ("push*NaN 0 1 w=1", "Invalid: the learning rate sent with a gradient is NaN; expected *"),
        ("set 0 w=1 y=1", "Invalid: this shard holds no chunk 0 of parameter 99"),
        ("set 0 w=1 w.1=1", "Invalid: this shard holds no chunk 1 of parameter 0"),
        ("set 0 x=1 w=1h", "Invalid: parameter \"w\": element type float16 was sent, expected float32"),
        ("pull 0 0 w y", "Invalid: this shard holds no chunk 0 of parameter 99"),
    ] {
        check(plan.clone(), &format!("{bad} -> 0 error {text}\n {nothing}\n push+ 0 1 w=1 -> 0 value w@1=-1"));
    }
}

#[test]
fn a_chunk_of_another_shard_is_refused() {
    // The parameter has two chunks and this shard holds the first.
    let mut stage = Stage::empty(Plan::new(Mode::Sync, Merge::Mean, 1).with("w", Float32, 1025, SGD));
    stage.connect(0, Incarnation(1));
    let parcel = stage.init(0, Some(&[0]));
    stage.deliver(0, &parcel);
    let parcel = stage.finish(1);
    stage.deliver(0, &parcel);
    let refused = "0 error Invalid: this shard holds no chunk 1 of parameter 0";
    Script::new(stage)
        .run(&format!("set 0 w.1=1 -> {refused}\n push 0 1 w.1=1 -> {refused}\n pull 0 0 w.1 -> {refused}"));
}

#[test]
fn a_set_replaces_the_value_once_and_leaves_the_round_open() {
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         set 1 w=10 -> 1 done w@0
         show w -> w@0=10
         push 1 1 w=1 -> 1 done w@1
         show w -> w@1=9
         set 0 w=20 -> 0 done w@1
         push 0 2 w=1 -> 0 done w@2
         push 1 2 w=1 -> 1 done w@2
         show w -> w@2=19",
    );
    check(mean(1), "set 0 w=5 -> 0 done w@0\n push 0 1 w=1 -> 0 done w@1");
    check(
        mean(2),
        "set 0 w=5 -> 0 done w@0
         set 1 w=6 -> 1 done w@0
         again 0 -> 0 done w@0
         show w -> w@0=6
         reborn 0
         set 0 w=7 -> 0 done w@0
         show w -> w@0=7",
    );
}

#[test]
fn a_late_fetch_gets_the_value_of_its_step_despite_later_sets() {
    let step = "push 0 1 w=1 -> 0 done w@1
         push 1 1 w=1 -> 1 done w@1
         set 0 w=10 -> 0 done w@1
         set 0 w=20 -> 0 done w@1
         pull 1 1 w w/b -> 1 value w@1=20 w@1=20b
         pull+ 1 1 w w/b w/h -> 1 value w@1=-1 w@1=-1b w@1=-1h
         pull 1 1 w/b -> 1 value w@1=20b
         push 0 2 w=1 -> 0 done w@2
         pull+ 0 2 w ->
         push+ 1 2 w=1 -> 1 value w@2=19 & 0 value w@2=19
         pull+ 1 2 w -> 1 value w@2=19";
    check(mean(2), step);
    // Also for a trainer that sends its gradient again.
    check(
        mean(2),
        "push 0 1 w=1 -> 0 done w@1
         push+ 1 1 w=1 -> 1 value w@1=-1
         set 0 w=10 -> 0 done w@1
         again 0 -> 0 done w@1
         redial 1 ->
         again 1 -> 1 value w@1=-1",
    );
    // A single trainer has set the value itself. Without rounds a step has no value of its own.
    check(mean(1), "push 0 1 w=1 -> 0 done w@1\n set 0 w=10 -> 0 done w@1\n pull+ 0 1 w -> 0 value w@1=10");
    let any = Plan::new(Mode::Async, Merge::Sum, 2).with("w", Float32, 2, SGD);
    check(any, "push 0 0 w=1 -> 0 done w@1\n set 1 w=10 -> 1 done w@1\n pull+ 0 0 w -> 0 value w@1=10");
}

#[test]
fn a_reader_keeps_the_version_it_began_with() {
    let mut script = Script::new(Stage::serving(mean(1)));
    script.run("push 0 1 w=1 -> 0 done w@1\n hold\n pull 0 0 w -> 0 value w@1=-1\n push+ 0 2 w=1 -> 0 value w@2=-2");
    script.run("set 0 w=9 -> 0 done w@2\n push 0 3 w=1 -> 0 done w@3");
    let values: Vec<f32> = script.stage.held.iter().flat_map(|(_, body)| body).map(first_of).collect();
    assert_eq!(values, [-1.0, -2.0], "each holds what it was sent");
    script.stage.release();
    script.run("show w -> w@3=8");
}

fn first_of(outgoing: &crate::port::Outgoing) -> f32 {
    f32::from_le_bytes(outgoing.bytes()[..4].try_into().expect("4 bytes"))
}

#[test]
fn rates_sent_with_gradients_replace_the_schedule() {
    check(
        mean(2),
        "push*0.5 0 1 w=2 -> 0 done w@1
         push*0.25 1 1 w=2 -> 1 done w@1
         show w -> w@1=-0.75
         push*0 0 2 w=2 -> 0 done w@2
         push 1 2 w=2 -> 1 done w@2
         show w -> w@2=-0.75",
    );
}

#[test]
fn half_gradients_are_widened_before_they_are_summed() {
    let plan = mean(2).with("x", Float64, 1, SGD);
    check(
        plan,
        "push 0 1 w=1.5h x=0.1b -> 0 done w@1 x@1
         push 1 1 w=2.5b x=0 -> 1 done w@1 x@1
         show w x -> w@1=-2 & x@1=-0.050048828125",
    );
    assert!(Bfloat16.is_gradient_for(Float64));
}

#[test]
fn integers_are_summed_exactly_and_never_scaled() {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("n", Int64, 2, "algorithm: \"add\"");
    check(
        plan,
        "push 0 1 n=9007199254740993,-1 -> 0 done n@1
         push 1 1 n=2,1 -> 1 done n@1
         show n -> n@1=9007199254740995,0",
    );
}

/// Numbers whose sum depends on the order of adding.
const UNEVEN: [f32; 6] = [1.0e8, 3.3, -1.0e8, 7.7e-3, 0.25, -5.5];

fn bits_after(trainers: u32, order: &[u32]) -> Vec<u8> {
    let mut stage = Stage::serving(sum(trainers));
    for round in 1..=2 {
        for trainer in order {
            let number = UNEVEN[*trainer as usize] * round as f32;
            let bytes = [number.to_le_bytes(), (-number).to_le_bytes()].concat();
            let parcel = stage.push(*trainer, vec![(id(0, 0), round, bytes)], false);
            stage.deliver(*trainer, &parcel);
        }
    }
    assert_eq!(stage.errors(), Vec::<String>::new());
    let (_, version, value, _) = stage.contents().remove(0);
    assert_eq!(version.0, 2);
    value
}

fn permutations(items: &[u32]) -> Vec<Vec<u32>> {
    let Some((first, rest)) = items.split_first() else { return vec![Vec::new()] };
    let insert =
        |shorter: Vec<u32>| (0..=shorter.len()).map(move |at| [&shorter[..at], &[*first], &shorter[at..]].concat());
    permutations(rest).into_iter().flat_map(insert).collect()
}

#[test]
fn the_order_of_arrival_does_not_change_a_bit() {
    for trainers in 4..=6 {
        let ranks: Vec<u32> = (0..trainers).collect();
        let sum = ranks.iter().fold(0.0, |sum, rank| sum + UNEVEN[*rank as usize]);
        let reversed = ranks.iter().rev().fold(0.0, |sum, rank| sum + UNEVEN[*rank as usize]);
        assert_ne!(sum, reversed, "the numbers are chosen so that order shows");
        let expected = bits_after(trainers, &ranks);
        for order in permutations(&ranks) {
            assert_eq!(bits_after(trainers, &order), expected, "{order:?}");
        }
    }
}

#[test]
fn a_rejoined_trainer_is_summed_in_rank_order_in_a_partly_summed_round() {
    let bits = |script: &str| {
        let mut stage = Script::new(Stage::serving(sum(6)));
        stage.run(script);
        stage.stage.contents().remove(0).2
    };
    let push = |rank: usize| format!("push {rank} 1 w={} -> {rank} done w@1\n", UNEVEN[rank]);
    let straight: String = (0..6).map(push).collect();
    let folded: String = [1, 2, 3, 4].into_iter().map(push).collect();
    let late = format!("leave 0 -> 0 done\n{folded} reborn 0\n {}{}", push(0), push(5));
    assert_eq!(bits(&late), bits(&straight));
}

proptest! {
    #[test]
    fn every_round_is_one_version_in_any_order_of_pushes(moves in proptest::collection::vec(0u32..3, 0..60)) {
        let mut stage = Stage::serving(mean(3));
        let mut rounds = [0u64; 3];
        for trainer in moves {
            let open = stage.contents()[0].1.0 + 1;
            let next = rounds[trainer as usize] + 1;
            let parcel = stage.push(trainer, vec![(id(0, 0), next, vec![0; 8])], true);
            stage.answers.clear();
            stage.deliver(trainer, &parcel);
            if next <= open + 1 {
                rounds[trainer as usize] = next;
                prop_assert!(stage.errors().is_empty());
            } else {
                prop_assert_eq!(stage.errors().len(), 1);
            }
            prop_assert_eq!(stage.contents()[0].1.0, *rounds.iter().min().expect("three"));
        }
        stage.wait(Duration::from_secs(120));
        prop_assert_eq!(stage.shard.deadline(), None);
    }
}
