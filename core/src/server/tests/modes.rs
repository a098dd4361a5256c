//! The modes without rounds, and rules that need the whole gradient.

use proptest::prelude::*;

use super::script::{Script, check};
use super::stage::{Plan, Stage, id};
use crate::config::{Merge, Mode, OptimizerSettings};
use crate::dtype::ElementType::{Float32, Int64};
use crate::ids::TrainerId;
use crate::optim::{Gradient, Prepared, Step, square_sum};
use crate::port::{Kernels, Plain, Update};
use crate::server::group::SlotIndex;
use crate::server::shard::Phase;

const SGD: &str = "optimizer: SGD";
const CLIPPED: &str = "sgd { momentum: 0.5 } clip_norm: 3";

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Mean, trainers).with("w", Float32, 1, SGD)
}

#[test]
fn each_gradient_is_applied_on_arrival() {
    check(
        plan(Mode::Async, 2),
        "push+ 1 0 w=1 -> 1 value w@1=-1
         push+ 1 0 w=1 -> 1 value w@2=-2
         again 1 -> 1 value w@2=-2
         push 0 0 w=4 -> 0 done w@3
         redial 0
         again 0 -> 0 done w@3
         reborn 0
         push 0 0 w=4 -> 0 done w@4
         show w -> w@4=-10",
    );
}

#[test]
fn mode_delta_adds_differences_without_an_optimizer() {
    let adam = "optimizer: Adam adam {}";
    let delta =
        |merge| Plan::new(Mode::Delta, merge, 2).with("w", Float32, 1, adam).with("n", Int64, 1, "algorithm: \"add\"");
    check(delta(Merge::Mean), "push+ 0 0 w=3 n=3 -> 0 value w@1=1.5 n@1=3\n push+ 1 0 w=-1 n=1 -> 1 value w@2=1 n@2=4");
    check(delta(Merge::Sum), "push+ 0 0 w=3 n=3 -> 0 value w@1=3 n@1=3");
}

#[test]
fn the_fastest_waits_for_the_slowest() {
    check(
        plan(Mode::Staleness { bound: 2 }, 2),
        "push 0 0 w=1 -> 0 done w@1
         push 0 0 w=1 -> 0 done w@2
         push 0 0 w=1 ->
         again 0 ->
         push 0 0 w=1 -> 0 error Busy: parameter \"w\" chunk 0: trainer 0 already waits with an earlier gradient
         push 1 0 w=1 -> 1 done w@3 & 0 done w@4
         show w -> w@4=-4",
    );
}

#[test]
fn a_departure_ends_staleness_waits_for_that_trainer() {
    check(
        plan(Mode::Staleness { bound: 1 }, 2),
        "push 0 0 w=1 -> 0 done w@1
         push 0 0 w=1 ->
         leave 1 -> 0 done w@2 & 1 done
         push 0 0 w=1 -> 0 done w@3
         push 0 0 w=1 -> 0 done w@4
         reborn 1
         push 1 0 w=1 -> 1 done w@5
         push 0 0 w=1 -> 0 done w@6
         push 0 0 w=1 -> 0 done w@7
         push 0 0 w=1 ->",
    );
}

#[test]
fn staleness_is_unbounded_after_all_trainers_have_departed() {
    check(
        plan(Mode::Staleness { bound: 1 }, 2),
        "push 0 0 w=1 -> 0 done w@1
         push 0 0 w=1 ->
         leave 0 -> 0 done
         leave 1 -> 0 done w@2 & 1 done
         show w -> w@2=-2",
    );
}

#[test]
fn a_staleness_bound_of_zero_is_refused() {
    let mut stage = Stage::empty(plan(Mode::Staleness { bound: 0 }, 1));
    stage.connect(0, crate::ids::Incarnation(1));
    let (init, finish) = (stage.init(0, None), stage.finish(1));
    stage.deliver(0, &init);
    stage.deliver(0, &finish);
    assert!(stage.errors()[0].starts_with("a staleness bound of 0 steps"), "{:?}", stage.errors());
}

fn clock(stage: &Stage, trainer: u32) -> u64 {
    match &stage.shard.phase {
        Phase::Serving(serving) => serving.table.chunks[SlotIndex::FIRST].heard(TrainerId(trainer)).clock,
        Phase::Empty | Phase::Filling(_) => panic!("the shard serves"),
    }
}

proptest! {
    #[test]
    fn clocks_differ_by_at_most_the_bound(bound in 1u32..5, pushes in proptest::collection::vec(0u32..4, 0..120)) {
        let mut stage = Stage::serving(plan(Mode::Staleness { bound }, 4));
        let mut accepted = 0;
        for trainer in pushes {
            let parcel = stage.push(trainer, vec![(id(0, 0), 0, vec![0; 4])], false);
            stage.answers.clear();
            stage.deliver(trainer, &parcel);
            accepted += u64::from(stage.errors().is_empty());
            let clocks: Vec<u64> = (0..4).map(|one| clock(&stage, one)).collect();
            let (least, most) = (clocks.iter().min().expect("four"), clocks.iter().max().expect("four"));
            prop_assert!(most - least <= u64::from(bound), "{:?}", clocks);
            prop_assert_eq!(clocks.iter().sum::<u64>(), stage.contents()[0].1.0);
            prop_assert!(accepted - stage.contents()[0].1.0 <= 3, "at most one of each waits");
        }
    }
}

/// Reference update of a parameter of more than two chunks as a whole.
fn whole(trainers: &[Vec<f32>], rounds: usize, scale: f64) -> Vec<u8> {
    let rule = OptimizerSettings::from_text(CLIPPED).expect("valid").rule.expect("there");
    let prepared = Prepared::new(rule).expect("it is a rule");
    let bytes = trainers[0].len() * 4;
    let (mut value, mut state, mut sum) = (vec![0; bytes], vec![0; bytes], vec![0; bytes]);
    let payloads: Vec<Vec<u8>> =
        trainers.iter().map(|one| one.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let gradients: Vec<Gradient<'_>> = payloads.iter().map(|bytes| Gradient { bytes, element_type: Float32 }).collect();
    for version in 1..=rounds as u64 {
        crate::optim::sum(Float32, &mut sum, &gradients);
        let norm = Some(square_sum(Float32, &sum).sqrt() * scale);
        let step = Step { version: crate::ids::Version(version), norm, scale, ..Step::FIRST };
        Plain.update(Update {
            formula: prepared.formula(&step, &mut Vec::new()),
            element_type: Float32,
            parameter: &mut value,
            states: &mut [&mut state],
            gradients: &gradients,
        });
    }
    value
}

fn uneven(seed: u32) -> Vec<f32> {
    (0..2050u32).map(|at| ((at * 37 + seed * 101) % 199) as f32 / 97.0 - 1.0).collect()
}

fn pieces(gradient: &[f32]) -> Vec<Vec<u8>> {
    gradient.chunks(1024).map(|piece| piece.iter().flat_map(|x| x.to_le_bytes()).collect()).collect()
}

#[test]
fn a_gradient_is_clipped_over_all_chunks_in_rounds() {
    let gradients: Vec<Vec<f32>> = (0..3).map(uneven).collect();
    let mut stage = Stage::serving(Plan::new(Mode::Sync, Merge::Mean, 3).with("g", Float32, 2050, CLIPPED));
    for round in 1..=2 {
        for (chunk, trainer) in [(2, 1), (0, 0), (1, 2), (0, 1), (1, 1), (2, 2), (2, 0), (0, 2), (1, 0)] {
            assert!(stage.contents().iter().all(|(_, version, ..)| version.0 == round - 1), "none closes before all");
            let payload = pieces(&gradients[trainer as usize]).remove(chunk);
            let parcel = stage.push(trainer, vec![(id(0, chunk as u64), round, payload)], false);
            stage.deliver(trainer, &parcel);
        }
    }
    assert_eq!(stage.errors(), Vec::<String>::new());
    let found: Vec<u8> = stage.contents().into_iter().flat_map(|(_, _, value, _)| value).collect();
    assert_eq!(found, whole(&gradients, 2, 1.0 / 3.0));
}

#[test]
fn a_closed_grouped_round_leaves_no_wait_behind() {
    check(
        Plan::new(Mode::Sync, Merge::Mean, 1).with("g", Float32, 2050, CLIPPED),
        "push+ 0 1 g=0 g.1=0 g.2=0 -> 0 value g@1=0 g.1@1=0 g.2@1=0
         wait 60000 ->
         push+ 0 2 g=0 g.1=0 g.2=0 -> 0 value g@2=0 g.1@2=0 g.2@2=0
         wait 60000 ->",
    );
}

#[test]
fn async_gradients_are_clipped_over_all_chunks() {
    let gradient = uneven(5);
    let mut stage = Stage::serving(Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 2050, CLIPPED));
    for (trainer, chunk) in [(0, 0), (1, 2), (1, 0), (0, 2), (1, 1), (0, 1)] {
        let payload = pieces(&gradient).remove(chunk);
        let parcel = stage.push(trainer, vec![(id(0, chunk as u64), 0, payload)], true);
        stage.deliver(trainer, &parcel);
    }
    assert_eq!(stage.errors(), Vec::<String>::new());
    assert_eq!(stage.answers.iter().map(|one| one.body.len()).sum::<usize>(), 6, "everybody got every value");
    let found: Vec<u8> = stage.contents().into_iter().flat_map(|(_, _, value, _)| value).collect();
    assert_eq!(found, whole(&[gradient], 2, 1.0));
}

#[test]
fn a_partial_gradient_of_an_older_incarnation_is_not_mixed_with_the_next() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    check(
        plan.clone(),
        "push 0 0 g=9 -> 0 done g@1
         push 1 0 g=1 g.1=1 ->
         reborn 0
         show g g.1 -> g@1=-1 & g.1@1=-1
         push 0 0 g=2 g.1=2 -> 0 done g@2 g.1@2
         show g g.1 -> g@2=-3 & g.1@2=-3",
    );
    check(
        plan,
        "push 0 0 g=9 -> 0 done g@1
         push 1 0 g=1 g.1=1 ->
         leave 0 -> 1 done g@1 g.1@1 & 0 done
         show g g.1 -> g@1=-1 & g.1@1=-1",
    );
}

#[test]
fn a_partial_gradient_that_waits_is_dropped_when_its_trainer_departs_or_rejoins() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    check(
        plan.clone(),
        "push 0 0 g=1 -> 0 done g@1
         push 1 0 g=9 ->
         leave 1 -> 1 done
         push 0 0 g.1=1 -> 0 done g.1@1
         push 0 0 g=1 g.1=1 -> 0 done g@2 g.1@2
         show g g.1 -> g@2=-2 & g.1@2=-2",
    );
    check(
        plan.clone(),
        "push 0 0 g=1 -> 0 done g@1
         push 1 0 g=9 ->
         reborn 1
         push 1 0 g.1=2 ->
         push 0 0 g.1=1 -> 0 done g.1@1 & 1 done g.1@2
         push 1 0 g=2 -> 1 done g@2
         show g g.1 -> g@2=-3 & g.1@2=-3",
    );
    check(
        plan,
        "push 0 0 g=1 -> 0 done g@1
         push 1 0 g=9 ->
         reborn 1
         push 1 0 g=2 g.1=2 ->
         push 0 0 g.1=1 -> *
         show g g.1 -> g@2=-3 & g.1@2=-3",
    );
}

#[test]
fn a_partial_gradient_resent_after_its_trainer_departed_is_refused() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    check(
        plan,
        "leave 1 -> 1 done
         push 1 0 g=9 -> 1 error Invalid: parameter \"g\" chunk 0: trainer 1 has left*
         push 0 0 g=1 g.1=1 -> 0 done g@1 g.1@1
         reborn 1
         push 1 0 g=1 g.1=1 -> 1 done g@2 g.1@2",
    );
}

#[test]
fn a_complete_gradient_that_waits_outlives_its_trainer() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    for end in ["leave 1 -> 1 done", "reborn 1\n push 1 0 g=9 g.1=9 -> 1 error Busy*"] {
        let script = format!(
            "push 0 0 g=1 -> 0 done g@1
             push 1 0 g=2 g.1=2 ->
             {end}
             push 0 0 g.1=1 -> *
             show g g.1 -> g@2=-3 & g.1@2=-3"
        );
        check(plan.clone(), &script);
    }
}

#[test]
fn readers_do_not_delay_a_grouped_update() {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 1).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    let mut script = Script::new(Stage::serving(plan));
    script.run("hold\n pull 0 0 g g.1 -> 0 value g@0=0 g.1@0=0\n push 0 1 g=1 g.1=1 -> 0 done g@1 g.1@1\n release");
    script.run("show g g.1 -> g@1=-1 & g.1@1=-1");
}
