//! Ends and components of programs that servers host.

use pserver_core::ids::TrainerId;
use pserver_core::port::EndKind;

use super::{components, hosted_program, program_ends};
use crate::{Graph, Program};

fn graph(text: &str) -> Graph {
    Graph::new(text.parse::<Program>().expect("the test's text is right")).expect("the test's program is right")
}

/// Two updates that share a constant, and a queue with a state that both its loops touch.
const PART: &str = "block 0 {
        parameter v: float32[2]
        parameter w: float32[2]
        state half: float32[2]
        state q: queue(float32[2], 2)
        initialise v = fill(value=1.0)
        initialise half = fill(value=0.5)
        initialise w = add(half, half)
        communication send(w, channel=\"w\", to=trainer:1)
        communication loop_forever(block=1)
        communication loop_forever(block=2)
        communication loop_forever(block=3)
    }
    block 1 in 0 {
        temporary a: float32[2]
        communication a = recv(channel=\"a\")
        optimize a_half = mul(a, half)
        optimize v = add(v, a_half)
    }
    block 2 in 0 {
        temporary b: float32[2]
        communication b = recv(channel=\"b\")
        communication enqueue(q, b)
    }
    block 3 in 0 {
        communication c = dequeue(q, min_count=1)
        optimize c_half = mul(c, half)
        optimize w = add(w, c_half)
    }";

#[test]
fn ops_without_a_common_variable_are_components_and_constants_join_none() {
    let found = components(&graph(PART)).expect("they are programs");
    let [first, second] = &found[..] else { panic!("found {} components; expected 2", found.len()) };
    let expected = "block 0 {
        parameter w: float32[2]
        state half: float32[2]
        state q: queue(float32[2], 2)
        initialise half = fill(value=0.5)
        initialise w = add(half, half)
        communication send(w, channel=\"w\", to=trainer:1)
        communication loop_forever(block=1)
        communication loop_forever(block=2)
    }
    block 1 in 0 {
        temporary b: float32[2]
        communication b = recv(channel=\"b\")
        communication enqueue(q, b)
    }
    block 2 in 0 {
        communication c = dequeue(q, min_count=1)
        optimize c_half = mul(c, half)
        optimize w = add(w, c_half)
    }";
    assert_eq!(first.program(), graph(expected).program(), "{}", first.program());
    let expected = "block 0 {
        parameter v: float32[2]
        state half: float32[2]
        initialise v = fill(value=1.0)
        initialise half = fill(value=0.5)
        communication loop_forever(block=1)
    }
    block 1 in 0 {
        temporary a: float32[2]
        communication a = recv(channel=\"a\")
        optimize a_half = mul(a, half)
        optimize v = add(v, a_half)
    }";
    assert_eq!(second.program(), graph(expected).program(), "{}", second.program());
}

#[test]
fn the_ends_are_kept_variables_and_both_sides_of_channels() {
    let found = components(&graph(PART)).expect("they are programs");
    let hosted = hosted_program(&found[0], None).expect("it has no batch");
    let ends = program_ends(&Graph::new(hosted).expect("it is a program"), 2).expect("it can be hosted");
    let ends: Vec<(&str, EndKind)> = ends.iter().map(|one| (one.end.name.as_str(), one.end.kind)).collect();
    let [zero, one] = [TrainerId(0), TrainerId(1)];
    let expected = [
        ("w", EndKind::Kept),
        ("half", EndKind::Kept),
        ("w@to.1", EndKind::Output(one)),
        ("b@from.0", EndKind::Input(zero)),
        ("b@from.1", EndKind::Input(one)),
        ("w@steps.0", EndKind::Steps(zero)),
        ("w@steps.1", EndKind::Steps(one)),
    ];
    assert_eq!(ends, expected);
}

fn refused(variables: &str, ops: &str, expected: &str) {
    let text = format!("block 0 {{ {variables} communication loop_forever(block=1) }} block 1 in 0 {{ {ops} }}");
    let found = hosted_program(&graph(&text), None).and_then(|program| program_ends(&Graph::new(program)?, 2));
    let found = found.expect_err("a server cannot host it").to_string();
    assert!(found.contains(expected), "{found}");
}

#[test]
fn a_program_that_a_server_cannot_host_is_refused_by_name() {
    refused(
        "",
        "temporary x: rows(float32, 9, 2) communication x = recv(channel=\"x\")",
        "variable \"x\": found rows(float32, 9, 2); expected dense values",
    );
    refused(
        "",
        "temporary x: float32[batch, 2] communication x = recv(channel=\"x\")",
        "variable \"x\": found float32[batch, 2] of a batch not given; expected initialise_for_batch",
    );
    refused(
        "",
        "temporary x: bfloat16[2] communication x = recv(channel=\"x\")",
        "channel \"x\": found bfloat16[2]; expected a dense value of 32 or 64 bits",
    );
    refused(
        "data y: float32[2]",
        "temporary x: float32[2] communication x = recv(channel=\"x\") communication z = add(x, y)",
        "variable \"y\": found float32[2]; expected no data, because nothing is fed to a server",
    );
    refused(
        "",
        "temporary x: float32[2] communication x = recv(channel=\"x\")
         communication send(x, channel=\"y\", to=server:1)",
        "channel \"y\": found server:1 as its destination; expected a trainer below 2",
    );
    refused(
        "state many: queue(float32[1024, 1024], 1024)",
        "temporary x: float32[1024, 1024] communication x = recv(channel=\"x\") communication enqueue(many, x)",
        "found queues, accumulators, values and items of up to 4",
    );
    let channels: String = (0..17).map(|at| format!("communication x{at} = recv(channel=\"{at}\")\n")).collect();
    let declared: String = (0..17).map(|at| format!("temporary x{at}: float32[2]\n")).collect();
    let text = format!("block 0 {{ communication loop_forever(block=1) }} block 1 in 0 {{ {declared} {channels} }}");
    let found = program_ends(&graph(&text), 4096).expect_err("there are too many").to_string();
    assert!(found.contains("found more than 65536 ends of its channels at 4096 trainers"), "{found}");
}
