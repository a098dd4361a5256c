//! Grouped updates on an accelerator: the sums, the norm and the updates of the chunks take several turns. The result
//! equals that of an update in one turn.
//!
//! `restart` covers grouped updates too, on faulty accelerators with little memory, while shards are killed.

use std::sync::Arc;

use super::script::Script;
use super::stage::{Answer, Contents, Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64};
use crate::error::Failure;
use crate::port::{Accelerator, Fault, FaultyAccelerator, Plain, Simulated};
use crate::wire::Kind;

/// A bound that clips nothing, so that numbers can be read, and one that clips.
const LOOSE: &str = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";
const TIGHT: &str = "sgd { momentum: 0.5 } clip_norm: 0.7 const_lr { learning_rate: 0.1 }";

fn device() -> Simulated<Plain> {
    Simulated::new(Plain, u64::MAX, 1)
}

/// Two chunks, the second of one element.
fn loose(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Sum, trainers).with("g", Float32, 1025, LOOSE)
}

/// Three chunks of a rule with a state, and two of another type.
fn tight(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Mean, trainers).with("g", Float32, 2050, TIGHT).with("t", Float64, 513, TIGHT)
}

/// A shard whose chunks are on an accelerator that works only in turns of the test.
fn late(plan: Plan, accelerator: impl Accelerator + 'static) -> Stage {
    let mut stage = Stage::empty(plan).with_accelerator(accelerator).initialised();
    stage.finish_work();
    stage.is_late = true;
    stage
}

fn check(mode: Mode, trainers: u32, script: &str) {
    Script::new(late(loose(mode, trainers), device())).run(script);
}

/// Gradients of every trainer for every chunk, other ones in each round.
fn rounds(trainers: u32, rounds: std::ops::RangeInclusive<u64>) -> String {
    let line = |round: u64, trainer: u32| {
        let value = |chunk: f64| 0.25 + f64::from(trainer) * 1.5 - chunk / 3.0 + round as f64 / 7.0;
        format!(
            "push {trainer} {round} g={} g.1={} g.2={} t={} t.1={} -> *\n turn ->*\n",
            value(0.0),
            value(1.0),
            value(2.0),
            value(3.0),
            value(4.0)
        )
    };
    rounds.flat_map(|round| (0..trainers).map(move |trainer| line(round, trainer))).collect()
}

#[test]
fn a_grouped_update_takes_three_turns_and_readers_see_the_old_version() {
    check(
        Mode::Sync,
        2,
        "push+ 0 1 g=1 g.1=1 ->
         push 1 1 g=2 -> 1 done g@1
         turn ->
         push 1 1 g.1=2 -> 1 done g.1@1
         pull 1 0 g -> 1 value g@0=0
         turn ->
         push 1 2 g=4 ->
         pull 1 0 g g.1 -> 1 value g@0=0 g.1@0=0
         show g g.1 -> g@0=0 & g.1@0=0
         turn -> 0 value g@1=-3 g.1@1=-3 & 1 done g@2
         finish ->
         show g g.1 -> g@1=-3 & g.1@1=-3",
    );
}

#[test]
fn membership_changes_and_sets_during_a_device_round_apply_after_it() {
    check(
        Mode::Sync,
        2,
        "leave 1 -> 1 done
         push 0 1 g=1 g.1=1 -> 0 done g@1 g.1@1
         turn ->
         reborn 1
         push 1 1 g=5 g.1=5 ->
         set 0 g=10 ->
         turn -> *
         show g g.1 -> g@1=10 & g.1@1=-1
         finish ->
         push 0 2 g=1 g.1=1 -> 0 done g@2 g.1@2
         push 1 2 g=1 g.1=1 -> 1 done g@2 g.1@2
         finish ->
         show g g.1 -> g@2=8 & g.1@2=-3",
    );
}

#[test]
fn async_gradients_wait_for_the_grouped_update_before_them() {
    check(
        Mode::Async,
        3,
        "push 0 0 g=1 -> 0 done g@1
         push 1 0 g=2 g.1=2 ->
         push 0 0 g.1=1 -> 0 done g.1@1
         push 2 0 g.1=4 ->
         turn ->
         push 2 0 g=4 ->
         turn -> 1 done g@2 g.1@2
         show g g.1 -> g@1=-1 & g.1@1=-1
         finish -> *
         show g g.1 -> g@3=-7 & g.1@3=-7",
    );
}

/// The admission of the next gradient may depend on the running update.
#[test]
fn departures_and_sets_are_busy_during_an_async_grouped_update() {
    check(
        Mode::Async,
        2,
        "push 0 0 g=1 g.1=1 -> 0 done g@1 g.1@1
         push 1 0 g=9 ->
         reborn 1
         push 1 0 g=2 g.1=2 ->
         leave 1 -> 1 error Busy: *its update waits for a device
         set 0 g=3 -> 0 error Busy: *its update waits for a device
         finish -> 1 done g@2 g.1@2
         set 0 g=3 -> 0 done g@2
         leave 1 -> 1 done
         show g g.1 -> g@2=3 & g.1@2=-3",
    );
}

#[test]
fn a_whole_push_of_two_calls_stays_when_a_newer_process_joins_during_its_device_update() {
    check(
        Mode::Async,
        2,
        "push 0 0 g=1 -> 0 done g@1
         push 0 0 g.1=1 -> 0 done g.1@1
         turn ->
         reborn 0
         finish ->
         show g g.1 -> g@1=-1 & g.1@1=-1",
    );
}

#[test]
fn a_partial_push_of_an_older_incarnation_is_dropped_during_its_device_update() {
    check(
        Mode::Async,
        2,
        "push 0 0 g=1 g.1=1 -> 0 done g@1 g.1@1
         turn ->
         push 0 0 g=9 ->
         reborn 0
         push 0 0 g=2 g.1=2 ->
         finish -> 0 done g@2 g.1@2
         push 1 0 g=4 g.1=4 -> 1 done g@3 g.1@3
         finish ->
         show g g.1 -> g@3=-7 & g.1@3=-7",
    );
}

/// Milliseconds until a command of trainer 2, retried every 20 ms, is done. Trainers 0 and 1 push again once their
/// gradients are applied, so a gradient is always ahead of the command. `None` after two seconds.
fn milliseconds_until_done(before: &str, command: &str) -> Option<u64> {
    let mut script = Script::new(late(loose(Mode::Async, 3), device()));
    script.run(before);
    let (mut may_push, mut refused) = ([Some(0), Some(0)], 0);
    for now in 0..2000 {
        let push = |trainer: usize| format!("push {trainer} 0 g=1 g.1=1");
        let pushes = (0..2).filter(|trainer| may_push[*trainer].is_some_and(|at| at <= now)).collect::<Vec<_>>();
        let mut lines = vec!["wait 1".to_owned()];
        lines.extend(pushes.iter().map(|trainer| push(*trainer)));
        lines.extend((now % 20 == 10).then(|| command.to_owned()));
        lines.extend((now % 5 == 0).then(|| "turn".to_owned()));
        pushes.iter().for_each(|trainer| may_push[*trainer] = None);
        for line in lines {
            script.run(&format!("{line} -> *"));
            for Answer { frame, .. } in &script.stage.answers {
                let is_done = frame.head.kind == Kind::Done;
                match frame.head.trainer.0 as usize {
                    2 if is_done => {
                        assert!(0 < refused, "{command}: the device was at work when it was tried first");
                        return Some(now);
                    }
                    2 => refused += 1,
                    trainer => may_push[trainer] = Some(if is_done { now } else { now + 20 }),
                }
            }
        }
    }
    None
}

#[test]
fn departures_sets_and_rejoins_are_admitted_under_a_steady_load_of_gradients() {
    for (before, command) in [
        ("", "leave 2"),
        ("", "set 2 g=3"),
        ("", "set 2 g=3 g.1=4"),
        ("leave 2 -> 2 done\n reborn 2", "push 2 0 g=1 g.1=1"),
    ] {
        let after = milliseconds_until_done(before, command);
        assert!(after.is_some_and(|after| after <= 100), "{command}: {after:?} ms");
    }
}

#[test]
fn a_refused_leave_that_is_not_retried_delays_gradients_for_250_ms() {
    check(
        Mode::Async,
        3,
        "push 0 0 g=1 g.1=1 -> 0 done g@1 g.1@1
         leave 2 -> 2 error Busy: *its update waits for a device
         push 1 0 g=2 g.1=2 -> 1 error Busy: *the refused request of trainer 2 comes first
         finish ->
         wait 249 ->
         push 1 0 g=2 g.1=2 -> 1 error Busy: *the refused request of trainer 2 comes first
         wait 1 ->
         push 1 0 g=2 g.1=2 -> 1 done g@2 g.1@2
         push 0 0 g=4 g.1=4 ->
         finish -> *
         show g g.1 -> g@3=-7 & g.1@3=-7",
    );
}

/// Values and states of a shard on the processor after the same script.
fn plain(plan: Plan, script: &str) -> Contents {
    let mut script_of = Script::new(Stage::serving(plan));
    script_of.run(script);
    script_of.stage.contents()
}

#[test]
fn device_results_equal_the_processors_for_any_duration_and_device_memory() {
    for (mode, trainers) in [(Mode::Sync, 1), (Mode::Sync, 3), (Mode::Async, 2)] {
        let script = rounds(trainers, 1..=4);
        let expected = plain(tight(mode, trainers), &script);
        // A large chunk takes 12,296 bytes with state and sum, a small one 32: three of the one and two of the other.
        for (bytes, polls) in [(u64::MAX, 1), (u64::MAX, 7), (13_000, 3), (24_600, 2), (36_930, 5), (0, 1)] {
            let stage = late(tight(mode, trainers), Simulated::new(Plain, bytes, polls).of_depth(2));
            let mut found = Script::new(stage);
            for (nth, line) in (0..).zip(script.lines().filter(|line| line.contains("push"))) {
                found.run(&format!("{line}\n turn -> *"));
                // A trainer may be one round ahead, and no more; in async mode it waits for its gradient.
                if mode == Mode::Async || nth / trainers % 2 == 1 {
                    found.stage.finish_work();
                }
            }
            found.stage.settle();
            assert_eq!(found.stage.contents(), expected, "{mode:?}, {trainers} trainers, {bytes} bytes, {polls} polls");
        }
    }
}

#[test]
fn a_refused_sum_or_update_of_one_chunk_does_not_change_the_result() {
    let script = rounds(2, 1..=3);
    let expected = plain(tight(Mode::Sync, 2), &script);
    // Five loads, then five sums and five updates a round.
    for nth in 1..=35 {
        let mut found = Script::new(late(tight(Mode::Sync, 2), FaultyAccelerator::new(device(), Fault::Refuses(nth))));
        found.run(&script);
        found.stage.settle();
        assert_eq!(found.stage.contents(), expected, "the piece of work {nth} was refused");
    }
}

#[test]
fn a_device_failure_in_a_grouped_update_stops_the_shard_only_if_states_are_lost() {
    let script = "push 0 1 g=1 g.1=1 -> *\n finish -> *\n push 0 2 g=2 g.1=2 -> *\n finish -> *\n \
                  show g g.1 -> g@2=-3 & g.1@2=-3";
    // Two loads, two sums, two updates, and once more.
    for nth in 1..=10 {
        let broken = FaultyAccelerator::new(device(), Fault::Breaks(nth));
        Script::new(late(loose(Mode::Sync, 1), broken)).run(script);
    }
    // Five loads, sums and updates, then a sum whose outcome is unknown.
    let storage = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(storage.clone());
    let accelerator = FaultyAccelerator::new(device(), Fault::Breaks(17));
    let mut stage = Stage::empty(tight(Mode::Sync, 1)).with_accelerator(accelerator);
    stage.restore(&disk, false);
    let mut found = Script::new(stage.initialised());
    found.stage.is_late = true;
    let script = rounds(1, 1..=2);
    found.run("finish ->");
    for line in script.lines().filter(|line| line.contains("push")) {
        found.run(line);
        let mut attend = |_| found.stage.shard.attend(found.stage.now, &mut Vec::new()).err();
        if let Some(failure) = (0..10).find_map(&mut attend) {
            let Failure::Node(text) = &failure else { panic!("{failure}") };
            assert!(text.contains("parameter \"g\" chunk 1: sum on faulty simulated (plain)"), "{text}");
            let mut again = Stage::empty(tight(Mode::Sync, 1));
            again.restore(&disk, false);
            assert_eq!(again.contents(), plain(tight(Mode::Sync, 1), &script), "nothing is lost");
            return;
        }
    }
    panic!("it breaks");
}

#[test]
fn a_checkpoint_during_a_grouped_update_has_all_chunks_of_one_round() {
    // Also without device memory for the last chunk, and with a refusal of the first.
    let homes = [(u64::MAX, u64::MAX), (24_600, u64::MAX), (u64::MAX, 1)];
    for ((bytes, refused), turns) in homes.into_iter().flat_map(|home| (0..4).map(move |turns| (home, turns))) {
        let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
        let plan = tight(Mode::Sync, 2);
        let mut stage = Stage::empty(plan.clone())
            .with_accelerator(FaultyAccelerator::new(Simulated::new(Plain, bytes, 1), Fault::Refuses(refused)));
        stage.restore(&disk, false);
        let mut script = Script::new(stage.initialised());
        script.stage.is_late = true;
        script.run(&rounds(2, 1..=2));
        (0..turns).for_each(|_| script.run("turn -> *"));
        assert!(script.stage.begin_checkpoint(1).expect("the disk is well"));
        let mut pushes = rounds(2, 3..=4);
        let writer = loop {
            match script.stage.shard.continue_checkpoint(1).expect("the disk is well") {
                Some(writer) => break writer,
                None => script.run(&format!("turn -> *\n {}", std::mem::take(&mut pushes))),
            }
        };
        writer.finish().expect("the disk is well");
        script.stage.settle();
        let mut again = Stage::empty(plan.clone());
        let restored = again.restore(&disk, false);
        assert_eq!(restored.loaded.map(|loaded| loaded.name.number), Some(1));
        assert_eq!(again.contents(), script.stage.contents(), "{bytes} bytes, {refused} refused, {turns} turns");
        assert_eq!(again.contents(), plain(plan, &rounds(2, 1..=4)), "{bytes} bytes, {refused} refused, {turns} turns");
    }
}

/// The three chunks are updated with the norms of all, on the processor also where there is a device.
#[test]
fn norms_of_a_rule_are_over_all_chunks() {
    const LARS: &str = "algorithm: 'lars' rule_set { key: 'mu' value: 0 } rule_set { key: 'share' value: 0.5 } \
                        const_lr { learning_rate: 1 }";
    let plan = || Plan::new(Mode::Sync, Merge::Sum, 2).with("g", Float32, 2050, LARS);
    // All 2,050 elements are 2, the gradient is 4 and half as many in the first chunk: 1,024 of 8, 1,026 of 4.
    let script = "set 0 g=2 g.1=2 g.2=2 -> *
                  push 0 1 g=5 g.1=1 g.2=1 -> *
                  push 1 1 g=3 g.1=3 g.2=3 -> *
                  finish -> *";
    let expected = |gradient: f64| {
        let (length, of_gradient) = ((2050.0 * 4.0_f64).sqrt(), (1024.0 * 64.0 + 1026.0 * 16.0_f64).sqrt());
        2.0 - 0.5 * length / of_gradient * gradient
    };
    let on_device = late(plan(), device());
    let mut found = Vec::new();
    for mut script_of in [Script::new(Stage::serving(plan())), Script::new(on_device)] {
        script_of.run(script);
        let contents = script_of.stage.contents();
        for (chunk, (_, version, value, _)) in contents.iter().enumerate() {
            assert_eq!(version.0, 1);
            let expected = expected(if chunk == 0 { 8.0 } else { 4.0 });
            for element in value.as_chunks().0 {
                let element = f64::from(f32::from_le_bytes(*element));
                assert!((element - expected).abs() < 1e-6, "chunk {chunk}: {element}, expected {expected}");
            }
        }
        found.push(contents);
    }
    assert_eq!(found[0].len(), 3);
    assert_eq!(found[0], found[1], "a device changes nothing");
}

#[test]
fn device_memory_for_sums_is_reserved_with_that_for_parameters_and_states() {
    // 4,100 bytes and as many of a sum, and 16 of its squares.
    let named = |bytes| Stage::empty(loose(Mode::Sync, 1)).with_named_accelerator(Simulated::new(Plain, bytes, 1));
    let script = "push 0 1 g=1 g.1=1 -> *\n show g g.1 -> g@1=-1 & g.1@1=-1";
    Script::new(named(8216).initialised()).run(script);
    let mut stage = named(8215);
    stage.begin();
    let expected = "simulated (plain): 8216 bytes were asked for, for parameters, states and kept sums, and 8215 were \
                    free; parameter \"g\": 1 of 2 chunks found no room: 16 bytes were asked for and 15 are free";
    assert_eq!(stage.errors(), [expected]);
}

#[test]
fn a_grouped_update_without_memory_for_its_values_starts_when_some_is_free() {
    for bytes in [u64::MAX, 9000] {
        let stage = late(loose(Mode::Sync, 1), Simulated::new(Plain, bytes, 1));
        Script::new(stage).run(
            "starve ->
             spare g g.1 ->
             push 0 1 g=1 g.1=1 -> 0 done g@1 g.1@1
             turn ->
             turn ->
             turn ->
             show g g.1 -> g@0=0 & g.1@0=0
             feed -> *
             finish -> *
             show g g.1 -> g@1=-1 & g.1@1=-1",
        );
    }
}

#[test]
fn a_checkpoint_carries_a_half_gradient_that_is_widened_for_an_update_without_memory() {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let plan = Plan::new(Mode::Async, Merge::Sum, 1).with("g", Float32, 2048, LOOSE);
    let mut stage = Stage::empty(plan.clone());
    stage.restore(&disk, false);
    let mut script = Script::new(stage.initialised());
    // Both gradients are received, the first one is widened, and the second value, which is read, is copied.
    script.run(
        "hold ->
         pull 0 0 g.1 -> 0 value g.1@0=0
         starve ->
         spare g g g ->
         push 0 0 g=1h g.1=2h -> 0 done g@1 g.1@1
         show g g.1 -> g@0=0 & g.1@0=0",
    );
    script.stage.checkpoint(1);
    script.stage.settle();
    let mut again = Stage::empty(plan);
    again.restore(&disk, false);
    Script::new(again).run("show g g.1 -> g@1=-1 & g.1@1=-2");
}
