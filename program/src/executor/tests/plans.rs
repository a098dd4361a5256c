//! Plans: stages, and the order of units.

use super::stage::{accumulate, answer, enqueue, loops, number, op, queue, recv, strings, variable};
use crate::executor::ExecutionPlan;
use crate::{Block, Graph, OpKind, Program, Purpose};
use pserver_core::config::Merge;

fn check(graph: &Graph, expected: &str) {
    let plan = ExecutionPlan::of(graph).expect("the program has a plan").to_string();
    let expected: String = expected.lines().map(|line| format!("{}\n", line.trim())).collect();
    assert_eq!(plan, expected);
}

/// A server's program, with an op that reads the parameter before it is written.
fn server() -> Graph {
    let outer = ["w", "norm"].map(|name| variable(name, number(), Purpose::State)).to_vec();
    let body = vec![
        recv("g", &["x", "from"]),
        accumulate(2, Merge::Sum, Some(0), &["x", "from"], "merged"),
        strings(2, "from", "senders"),
        op(OpKind::Mul, &["w", "w"], &["norm"]),
        op(OpKind::Sum, &["w", "merged"], &["w"]),
        answer("w", "w", "senders"),
    ];
    loops(outer, vec![(vec![variable("x", number(), Purpose::Temporary)], body)])
}

#[test]
fn an_accumulator_stands_between_two_stages() {
    check(
        &server(),
        "0: stage 0 block 0, op 0 loop_forever Loop
         1: stage 1 block 1, op 0 recv Recv ->2 ->3
         2: stage 1 block 1, op 1 gradient_accumulator PutGradient
         3: stage 1 block 1, op 2 string_accumulator PutString
         4: stage 2 block 1, op 1 gradient_accumulator TakeGradient ->7
         5: stage 2 block 1, op 2 string_accumulator TakeString ->8
         6: stage 2 block 1, op 3 mul Compute ->7
         7: stage 2 block 1, op 4 sum Compute ->8
         8: stage 2 block 1, op 5 send Send",
    );
}

#[test]
fn a_queue_stands_between_two_stages_also_of_one_loop() {
    let outer = vec![variable("q", queue(2), Purpose::State)];
    let body = vec![
        recv("in", &["x"]),
        enqueue("q", "x"),
        super::stage::dequeue("q", &["y"]),
        op(OpKind::Scale { factor: 2.0 }, &["y"], &["z"]),
    ];
    check(
        &loops(outer, vec![(vec![variable("x", number(), Purpose::Temporary)], body)]),
        "0: stage 0 block 0, op 0 loop_forever Loop
         1: stage 1 block 1, op 0 recv Recv ->2
         2: stage 1 block 1, op 1 enqueue Enqueue
         3: stage 2 block 1, op 2 dequeue Dequeue ->4
         4: stage 2 block 1, op 3 scale Compute",
    );
}

/// Long chains, and one variable that very many ops read before it is written: neither takes quadratic time.
#[test]
fn a_program_of_a_hundred_thousand_ops_has_a_plan() {
    const OPS: usize = 50_000;
    let name = |prefix: &str, place: usize| format!("{prefix}{place}");
    let scale = |from: &str, to: &str| op(OpKind::Scale { factor: 2.0 }, &[from], &[to]);
    let chain = (0..OPS).map(|place| scale(&name("c", place), &name("c", place + 1)));
    let readers = (0..OPS).map(|place| scale("c0", &name("r", place)));
    let last = op(OpKind::Fill { value: 1.0 }, &[], &["c0"]);
    let variables = vec![variable("c0", number(), Purpose::State)];
    let ops = chain.chain(readers).chain([last]).collect();
    let graph = Graph::new(Program { blocks: vec![Block { parent: None, variables, ops }] }).expect("it is valid");
    let plan = ExecutionPlan::of(&graph).expect("the program has a plan");
    assert_eq!(plan.units().len(), 2 * OPS + 1);
    assert_eq!(plan.stages().len(), 1);
    let followers = |place: usize| plan.units()[place].followers.as_slice();
    let last = u32::try_from(2 * OPS).expect("few");
    assert_eq!(followers(0), [1, last]);
    assert_eq!(followers(1), [2]);
    assert_eq!(followers(OPS), [last]);
    assert_eq!(plan.units()[2 * OPS].predecessors as usize, OPS + 1);
}
