//! The programs that a server makes of a job's settings.

use super::stage::{Plan, Stage};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{self, Float32, Int64};
use crate::limits::{NAME_BYTES_MAX, RULE_NAME_BYTES_MAX};
use crate::program::{Graph, Program};
use crate::server::program::program_of;
use crate::server::shard::Phase;

/// The ops of the loop, one a line, without their roles.
fn check(mode: Mode, merge: Merge, element_type: ElementType, config: &'static str, expected: &str) {
    let stage = Stage::serving(Plan::new(mode, merge, 3).with("w", element_type, 8, config));
    let Phase::Serving(serving) = &stage.shard.phase else { panic!("the shard serves") };
    let held = serving.table.parameters.values().next().expect("there is one");
    let program = program_of(&serving.job, held);
    let text = program.to_string();
    assert_eq!(text.parse::<Program>().expect("it reads back"), program);
    Graph::new(program).expect("it is a program that can run");
    let body = text.split_once("block 1 in 0").expect("there is a loop").1;
    let ops: Vec<&str> = body.lines().map(str::trim).filter(|line| line.contains('(')).collect();
    let ops: Vec<&str> = ops.iter().filter_map(|line| line.split_once(' ').map(|(_, op)| op)).collect();
    let expected: Vec<&str> = expected.lines().map(str::trim).collect();
    assert_eq!(ops, expected, "{text}");
}

/// What every rule of these tests has in its text.
const RATE: &str = "lr_policy: Const const_lr { learning_rate: 1.0 }";
const USUAL: &str = "l1: 0.0 l2: 0.0 regularizer: Proximal rate_scale: 1.0";

#[test]
fn the_modes_are_what_the_ops_are_told() {
    let sgd = format!("optimizer: SGD {RATE} {USUAL}");
    let program = |accumulator: &str, count: u32| {
        format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, {accumulator})
             w@senders = string_accumulator(w@sender, count={count})
             w, w@count = update(w, w@merged, w@count, config=\"{sgd}\")
             send(w, w@senders, channel=\"w\", to=senders)"
        )
    };
    let rounds = Mode::Sync;
    for (mode, merge, accumulator, count) in [
        (rounds, Merge::Mean, "count=3, staleness=0", 3),
        (rounds, Merge::Sum, "count=3, merge=sum, staleness=0", 3),
        (Mode::Async, Merge::Mean, "count=1, merge=sum", 1),
        (Mode::Staleness { bound: 2 }, Merge::Mean, "count=1, merge=sum, staleness=2", 1),
    ] {
        check(mode, merge, Float32, "optimizer: SGD", &program(accumulator, count));
    }
}

#[test]
fn differences_are_scaled_and_added() {
    let add = format!("{RATE} {USUAL} algorithm: \\\"add\\\"");
    let program = |gradient: &str, scale: &str| {
        format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, count=1, merge=sum)
             w@senders = string_accumulator(w@sender, count=1){scale}
             w, w@count = update(w, {gradient}, w@count, config=\"{add}\")
             send(w, w@senders, channel=\"w\", to=senders)"
        )
    };
    let scale = "\nw@scaled = scale(w@merged, factor=0.3333333333333333)";
    let adam = "optimizer: Adam adam {}";
    check(Mode::Delta, Merge::Mean, Float32, adam, &program("w@scaled", scale));
    check(Mode::Delta, Merge::Sum, Float32, adam, &program("w@merged", ""));
    check(Mode::Delta, Merge::Mean, Int64, "algorithm: \"add\"", &program("w@merged", ""));
}

#[test]
fn a_state_may_be_called_what_a_program_calls_its_own_variables() {
    for state in ["count", "gradient", "sender", "merged", "senders", "scaled"] {
        let config = format!("rule: \"state {state} = 0; {state} = {state} + g; w = w - lr*{state}\" {RATE}").leak();
        let update = format!(
            "w, w@count, w@state.{state} = update(w, w@merged, w@count, w@state.{state}, config=\"{RATE} {USUAL} rule: \
             \\\"state {state} = 0; {state} = {state} + g; w = w - lr*{state}\\\"\")"
        );
        let expected = format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, count=1, merge=sum)
             w@senders = string_accumulator(w@sender, count=1)
             {update}
             send(w, w@senders, channel=\"w\", to=senders)"
        );
        check(Mode::Async, Merge::Mean, Float32, config, &expected);
    }
}

#[test]
fn every_name_that_a_parameter_may_have_leaves_room_for_those_of_its_program() {
    let state = "s".repeat(RULE_NAME_BYTES_MAX);
    let config = format!("rule: \"state {state} = 0; {state} = g; w = w - lr*{state}\" {RATE}").leak();
    for length in [1, NAME_BYTES_MAX - 72, NAME_BYTES_MAX - 71, NAME_BYTES_MAX - 70, NAME_BYTES_MAX - 9, NAME_BYTES_MAX]
    {
        let name = &*"n".repeat(length).leak();
        let stage = Stage::serving(Plan::new(Mode::Sync, Merge::Mean, 3).with(name, Float32, 8, config));
        let Phase::Serving(serving) = &stage.shard.phase else { panic!("the shard serves") };
        let held = serving.table.parameters.values().next().expect("there is one");
        let graph = Graph::new(program_of(&serving.job, held)).unwrap_or_else(|failure| panic!("{length}: {failure}"));
        assert!(graph.find(name).is_some(), "{length}");
    }
}
