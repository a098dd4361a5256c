//! Initialisation, its fencing by generations, and the pool that it seals.

use std::sync::Arc;

use super::script::Script;
use super::stage::{Plan, Stage, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::error::Failure;
use crate::ids::{Generation, Incarnation};
use crate::memory::Lease;
use crate::port::Event;
use crate::wire::Kind;

fn plan() -> Plan {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 1).with("w", Float32, 1025, "optimizer: SGD");
    plan.with("x", Float32, 1, "optimizer: SGD")
}

/// Runs `init P`, `init P C` (one chunk), `finish N`, `generation G` and `push`, each with the expected answer.
fn check(script: &[(&str, &str)]) {
    let mut stage = Stage::empty(plan());
    stage.connect(0, Incarnation(1));
    for (step, expected) in script {
        stage.answers.clear();
        let words: Vec<&str> = step.split(' ').collect();
        let number = |at: usize| words[at].parse::<u32>().expect("a number");
        let parcel = match words[0] {
            "generation" => {
                stage.generation = Generation(number(1));
                continue;
            }
            "init" if words.len() == 3 => stage.init(number(1), Some(&[number(2).into()])),
            "init" => stage.init(number(1), None),
            "finish" => stage.finish(number(1).into()),
            _ => stage.push(0, vec![(id(1, 0), 1, vec![0; 4])], false),
        };
        stage.deliver(0, &parcel);
        let found = stage.errors().first().cloned().unwrap_or_else(|| "done".to_owned());
        assert!(stage.answers.iter().all(|one| one.frame.head.kind != Kind::Refused));
        assert!(found.contains(expected), "{step}: found {found:?}, expected {expected:?}");
    }
}

#[test]
fn a_shard_serves_once_all_chunks_are_initialised() {
    check(&[
        ("push", "not initialised"),
        ("init 0", "done"),
        ("push", "not initialised"),
        ("init 1", "done"),
        ("init 1", "done"),
        ("finish 3", "done"),
        ("push", "done"),
    ]);
}

#[test]
fn parameters_beyond_the_memory_limit_are_refused_with_their_need() {
    // 1,026 values of 4 bytes, and a gradient of each.
    let check = |limit, expected: &str| {
        let mut stage = Stage::empty(plan()).with_memory_limit(limit);
        stage.connect(0, Incarnation(1));
        for parcel in [stage.init(0, None), stage.init(1, None), stage.finish(3)] {
            stage.deliver(0, &parcel);
        }
        let found = stage.errors().join(" ");
        assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{limit}: {found}");
    };
    check(2 * 4104, "");
    check(2 * 4104 - 1, "parameters need 8208 bytes or more on this shard (values 4104, states and a gradient of each");
    check(
        2 * 4104 - 1,
        "found 8207 bytes for it, which the other shards leave of a memory limit of 8207 bytes (cgroup)",
    );
}

#[test]
fn parameters_beyond_the_disk_are_refused_and_a_replay_does_not_refuse_them() {
    let storage = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(storage.clone());
    let mut stage = Stage::empty(plan());
    stage.restore(&disk, false);
    stage.connect(0, Incarnation(1));
    for parcel in [stage.init(0, None), stage.init(1, None)] {
        stage.deliver(0, &parcel);
    }
    storage.set_room(10 << 20);
    let finish = stage.finish(3);
    stage.deliver(0, &finish);
    let found = stage.errors().join(" ");
    // Three chunks of 4,104 bytes together, with 128 bytes for each and 64 for its trainers.
    assert!(found.contains("of the disk on this shard (three checkpoints of 4680, three times 4194304"), "{found}");
    assert_eq!(stage.shard.generation(), Generation(0), "it does not serve");
    storage.set_room(1 << 30);
    stage.answers.clear();
    stage.deliver(0, &finish);
    assert_eq!(stage.shard.generation(), Generation(1), "{:?}", stage.errors());
    storage.set_room(1);
    let mut again = Stage::empty(plan());
    again.restore(&disk, false);
    assert_eq!(again.shard.generation(), Generation(1), "a job that was initialised goes on");
}

#[test]
fn an_incomplete_finish_restarts_the_initialisation() {
    check(&[
        ("init 0 1", "done"),
        ("finish 3", "this shard holds 1 chunks, the initialiser sent 3: begin the initialisation anew"),
        ("init 0 0", "done"),
        ("init 1", "done"),
        ("finish 3", "done"),
    ]);
    check(&[("finish 3", "this shard holds 0 chunks, the initialiser sent 3"), ("finish 0", "done")]);
}

#[test]
fn resends_after_the_initialisation_are_acknowledged() {
    check(&[
        ("init 0", "done"),
        ("init 1", "done"),
        ("finish 3", "done"),
        ("push", "done"),
        ("init 0", "done"),
        ("finish 3", "done"),
        ("push", "done"),
    ]);
}

#[test]
fn a_newer_generation_starts_from_nothing_and_the_older_is_fenced() {
    check(&[
        ("init 0", "done"),
        ("generation 3", ""),
        ("init 1", "done"),
        ("generation 1", ""),
        ("init 1", "generation 1 of the initialisation was superseded by 3"),
        ("finish 3", "generation 1 of the initialisation was superseded by 3"),
        ("generation 3", ""),
        ("finish 3", "this shard holds 1 chunks"),
        ("init 0", "done"),
        ("finish 3", "done"),
        ("generation 1", ""),
        ("push", "generation 1 is not the one that initialised this job, which is 3"),
        ("generation 4", ""),
        ("init 1", "done"),
        ("push", "not initialised"),
    ]);
}

#[test]
fn a_refused_declaration_leaves_nothing_behind() {
    let mut stage = Stage::empty(plan());
    stage.connect(0, Incarnation(1));
    let mut bad = stage.init(1, None);
    bad.frame.entries[0].id.chunk.0 = 1;
    stage.deliver(0, &bad);
    assert!(stage.errors()[0].contains("this shard holds no chunk 1 of parameter 1"), "{:?}", stage.errors());
    stage.plan.parameters[1].name = "renamed";
    stage.answers.clear();
    let good = stage.init(1, None);
    stage.deliver(0, &good);
    assert_eq!(stage.errors(), Vec::<String>::new());
    stage.plan.parameters[1].name = "again";
    let other = stage.init(1, None);
    stage.deliver(0, &other);
    assert!(stage.errors()[0].contains("parameter 1 was declared as \"renamed\" before"), "{:?}", stage.errors());
}

#[test]
fn an_exhausted_pool_answers_busy_and_recovers() {
    let mut script = Script::new(Stage::serving(plan()));
    let mut taken: Vec<Lease> = Vec::new();
    while let Ok(lease) = script.stage.shard.pool.take(4) {
        taken.push(lease);
    }
    script.run("push 0 1 x=1 -> 0 error Busy: no free chunk of 4 bytes*");
    script.run("show x -> x@0=0");
    drop(taken);
    script.run("push 0 1 x=1 -> 0 done x@1\n show x -> x@1=-1");
}

#[test]
fn a_round_without_memory_for_its_version_closes_when_some_is_free() {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("x", Float32, 1, "optimizer: SGD");
    let mut script = Script::new(Stage::serving(plan));
    script.run("hold\n pull 0 0 x -> 0 value x@0=0\n push 0 1 x=1 -> 0 done x@1");
    let parcel = script.stage.push(1, vec![(id(0, 0), 1, 1f32.to_le_bytes().to_vec())], true);
    let peer = script.stage.actors[&1].peer;
    let body = script.stage.post_receive(peer, &parcel);
    let mut taken: Vec<Lease> = Vec::new();
    while let Ok(lease) = script.stage.shard.pool.take(4) {
        taken.push(lease);
    }
    script.stage.event(Event::Received { peer, frame: parcel.frame, body });
    script.run("show x -> x@0=0\n release -> 1 value x@1=-1\n show x -> x@1=-1");
}

#[test]
fn a_program_that_does_not_compile_refuses_the_initialisation() {
    let mut stage = Stage::empty(plan());
    stage.shard.options.compile = |source| {
        let name = source.declaration.name.as_str();
        Err(Failure::call(format!("parameter {name:?}: found no program")))
    };
    stage.begin();
    let errors = stage.errors();
    assert!(errors.iter().any(|text| text.contains("found no program")), "{errors:?}");
    assert_eq!(stage.shard.generation(), Generation(0));
}
