//! Properties of each flow op.

use std::sync::Arc;

use super::stage::{
    Post, accumulate, answer, as_number, dequeue, enqueue, executor, loops, number, one, op, queue, recv, send,
    strings, variable,
};
use crate::executor::{ExecutionPlan, Executor, RunStatus};
use crate::{Block, Graph, Op, OpKind, Program, ProgramPeer, Purpose, Variable, VariableValue};
use pserver_core::config::Merge;

const SINK: ProgramPeer = ProgramPeer::Server(9);

fn trainer(number: u32) -> ProgramPeer {
    ProgramPeer::Trainer(number)
}

fn x() -> Variable {
    variable("x", number(), Purpose::Temporary)
}

/// Runs until nothing is ready; returns the sent values as numbers.
fn run(executor: &mut Executor, post: &mut Post) -> Vec<f64> {
    let status = executor.run(post, 1000).expect("the program runs");
    assert_eq!(status, RunStatus::Awaits);
    post.sent.drain(..).map(|(_, _, value)| as_number(&value)).collect()
}

fn arrive(executor: &mut Executor, from: u32, value: i32) -> bool {
    executor.arrive("in", trainer(from), one(value)).expect("the value fits").is_none()
}

#[test]
fn a_recv_runs_once_a_send_has_run_and_gives_data_and_address() {
    let body = vec![recv("in", &["x", "from"]), answer("out", "x", "from")];
    let mut executor = executor(&Arc::new(loops(vec![], vec![(vec![x()], body)])), &[], 2);
    let mut post = Post::new(9);
    assert_eq!(run(&mut executor, &mut post), Vec::<f64>::new(), "nothing was sent yet");
    assert!(arrive(&mut executor, 3, 7));
    executor.run(&mut post, 1000).expect("the program runs");
    assert_eq!(post.sent.pop_front(), Some((trainer(3), "out".to_owned(), one(7))));
    assert_eq!(executor.value("from"), Some(&VariableValue::Strings(vec!["trainer:3".into()])));
    assert_eq!(executor.value("x"), Some(&one(7)));
    assert_eq!(run(&mut executor, &mut post), Vec::<f64>::new(), "each value is received once");
}

#[test]
fn a_send_to_a_full_channel_blocks_its_own_senders() {
    let body = vec![recv("in", &["x"]), send("out", SINK, "x")];
    let mut executor = executor(&Arc::new(loops(vec![], vec![(vec![x()], body)])), &[], 2);
    let mut post = Post::new(1);
    let taken: Vec<bool> = (0..3).map(|value| arrive(&mut executor, 0, value)).collect();
    assert_eq!(taken, [true, true, false], "two of one sender wait, and no more");
    executor.run(&mut post, 1000).expect("the program runs");
    assert_eq!(post.sent.len(), 1);
    let taken: Vec<bool> = (2..5).map(|value| arrive(&mut executor, 0, value)).collect();
    assert_eq!(taken, [true, true, false], "one was sent, and one received that waits to be");
    let mut all = Vec::new();
    for _ in 0..4 {
        all.extend(run(&mut executor, &mut post));
    }
    assert_eq!(all, [0.0, 1.0, 2.0, 3.0], "nothing is lost, and the order is kept");
}

/// A loop that fills a queue from received values, and one that empties it.
fn queued(capacity: u64, outputs: &[&str], sent: &str) -> Graph {
    let outer = vec![variable("q", queue(capacity), Purpose::State)];
    let fill = (vec![x()], vec![recv("in", &["x"]), enqueue("q", "x")]);
    let empty = (vec![], vec![dequeue("q", outputs), send("out", SINK, sent)]);
    loops(outer, vec![fill, empty])
}

#[test]
fn an_enqueue_waits_for_space_and_drops_nothing() {
    let mut executor = executor(&Arc::new(queued(2, &["a"], "a")), &[], 1);
    let mut post = Post::new(0);
    let mut taken = 0;
    for value in 0..9 {
        taken += usize::from(arrive(&mut executor, 0, value));
        executor.run(&mut post, 1000).expect("the program runs");
    }
    // One waits to be sent, two in the queue, one to be enqueued, one to be received.
    assert_eq!(taken, 5);
    post.room = 9;
    assert_eq!(run(&mut executor, &mut post), [0.0, 1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_dequeue_waits_for_all_items_of_its_outputs() {
    for (outputs, sent, expected) in
        [(&["a"][..], "a", vec![0.0, 1.0, 2.0, 3.0, 4.0]), (&["a", "b"], "b", vec![1.0, 3.0])]
    {
        let mut executor = executor(&Arc::new(queued(3, outputs, sent)), &[], 1);
        let mut post = Post::new(9);
        let mut found = Vec::new();
        for value in 0..5 {
            assert!(arrive(&mut executor, 0, value));
            found.extend(run(&mut executor, &mut post));
        }
        assert_eq!(found, expected, "{} at once", outputs.len());
    }
}

/// Pieces and their senders, accumulated; the merged piece goes to the sink and to the senders.
fn accumulated(count: u32, merge: Merge, staleness: Option<u32>) -> Graph {
    let body = vec![
        recv("in", &["x", "from"]),
        accumulate(count, merge, staleness, &["x", "from"], "merged"),
        strings(count, "from", "senders"),
        answer("out", "merged", "senders"),
    ];
    loops(vec![], vec![(vec![x()], body)])
}

#[test]
fn an_accumulator_gives_once_all_pieces_are_there() {
    for (count, expected) in
        [(1, vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), (2, vec![3.0, 12.0, 48.0]), (3, vec![7.0, 56.0])]
    {
        let mut executor = executor(&Arc::new(accumulated(count, Merge::Sum, None)), &[], 9);
        let (mut post, mut found) = (Post::new(9), Vec::new());
        for value in 0..6 {
            assert!(arrive(&mut executor, 0, 1 << value));
            found.extend(run(&mut executor, &mut post));
        }
        // Each goes to as many senders as it has pieces.
        found.dedup();
        assert_eq!(found, expected, "of {count}");
    }
}

#[test]
fn a_string_accumulator_lists_the_senders_in_their_order() {
    let mut executor = executor(&Arc::new(accumulated(3, Merge::Sum, None)), &[], 9);
    let mut post = Post::new(9);
    for from in [10, 2, 0] {
        assert!(arrive(&mut executor, from, i32::try_from(from).expect("few")));
    }
    executor.run(&mut post, 1000).expect("the program runs");
    let to: Vec<ProgramPeer> = post.sent.iter().map(|(to, ..)| *to).collect();
    assert_eq!(to, [trainer(0), trainer(2), trainer(10)]);
    let listed = ["trainer:0", "trainer:2", "trainer:10"].map(String::from).to_vec();
    assert_eq!(executor.value("senders"), Some(&VariableValue::Strings(listed)));
}

#[test]
fn a_round_counts_a_trainer_once_and_an_early_piece_waits() {
    let senders = [trainer(0), trainer(1)];
    let mut executor = executor(&Arc::new(accumulated(2, Merge::Sum, Some(0))), &senders, 2);
    let mut post = Post::new(9);
    assert!(arrive(&mut executor, 0, 1) && arrive(&mut executor, 0, 10));
    assert_eq!(run(&mut executor, &mut post), Vec::<f64>::new());
    assert!(arrive(&mut executor, 1, 100));
    assert_eq!(run(&mut executor, &mut post), [101.0, 101.0]);
    assert!(arrive(&mut executor, 1, 1000));
    assert_eq!(run(&mut executor, &mut post), [1010.0, 1010.0]);
}

#[test]
fn a_round_does_not_wait_for_a_departed_trainer() {
    let senders = [trainer(0), trainer(1), trainer(2)];
    let mut executor = executor(&Arc::new(accumulated(3, Merge::Sum, Some(0))), &senders, 2);
    let mut post = Post::new(9);
    assert!(arrive(&mut executor, 0, 1) && arrive(&mut executor, 2, 2));
    assert_eq!(run(&mut executor, &mut post), Vec::<f64>::new());
    executor.leave(trainer(1));
    assert_eq!(run(&mut executor, &mut post), [3.0, 3.0]);
}

#[test]
fn a_list_of_senders_is_released_with_the_gradient_of_those_senders() {
    let two = |first: Option<u32>, second: Option<u32>| {
        let way = |channel: &str, staleness: Option<u32>| {
            let name = |what: &str| format!("{channel}.{what}");
            let (piece, from, merged, senders) = (name("piece"), name("from"), name("merged"), name("senders"));
            let ops = vec![
                recv(channel, &[&piece, &from]),
                accumulate(2, Merge::Sum, staleness, &[&piece, &from], &merged),
                strings(2, &from, &senders),
                answer("out", &merged, &senders),
            ];
            (vec![variable(&piece, number(), Purpose::Temporary)], ops)
        };
        Arc::new(loops(vec![], vec![way("first", first), way("second", second)]))
    };
    for (first, second, expected) in [(None, Some(0), vec![7.0]), (Some(0), None, vec![])] {
        let mut executor = executor(&two(first, second), &[trainer(0), trainer(1)], 2);
        executor.leave(trainer(1));
        assert!(executor.arrive("second", trainer(0), one(7)).expect("the value fits").is_none());
        assert_eq!(run(&mut executor, &mut Post::new(9)), expected, "{first:?}, {second:?}");
    }
}

#[test]
fn a_sender_of_two_pieces_of_a_sum_is_answered_once() {
    let body = vec![
        recv("in", &["x", "from"]),
        accumulate(3, Merge::Sum, None, &["x", "from"], "merged"),
        strings(3, "from", "senders"),
        answer("out", "merged", "senders"),
    ];
    let mut executor = executor(&Arc::new(loops(vec![], vec![(vec![x()], body)])), &[], 2);
    let mut post = Post::new(9);
    for (from, value) in [(1, 1), (0, 2), (1, 4)] {
        assert!(arrive(&mut executor, from, value));
    }
    executor.run(&mut post, 1000).expect("the program runs");
    let sent: Vec<_> = post.sent.into_iter().map(|(to, _, value)| (to, as_number(&value))).collect();
    assert_eq!(sent, [(trainer(0), 7.0), (trainer(1), 7.0)]);
}

#[test]
fn the_fastest_trainer_is_ahead_by_at_most_the_staleness_bound() {
    let senders = [trainer(0), trainer(1)];
    let mut executor = executor(&Arc::new(accumulated(1, Merge::Sum, Some(2))), &senders, 9);
    let mut post = Post::new(9);
    (0..5).for_each(|value| assert!(arrive(&mut executor, 0, value)));
    assert_eq!(run(&mut executor, &mut post), [0.0, 1.0]);
    assert!(arrive(&mut executor, 1, 100));
    assert_eq!(run(&mut executor, &mut post), [100.0, 2.0]);
    executor.leave(trainer(1));
    assert_eq!(run(&mut executor, &mut post), [3.0, 4.0]);
}

#[test]
fn a_loop_runs_as_many_turns_as_its_caller_lets_it() {
    let ops = vec![op(OpKind::Fill { value: 1.0 }, &[], &["one"]), op(OpKind::Sum, &["total", "one"], &["total"])];
    let outer = vec![variable("total", number(), Purpose::State)];
    let mut executor =
        executor(&Arc::new(loops(outer, vec![(vec![variable("one", number(), Purpose::Temporary)], ops)])), &[], 1);
    executor.set("total", one(0)).expect("it is a number");
    // The loop begins in a unit of its own, and a turn has two.
    for (units, total) in [(1 + 2 * 3, 3), (2 * 4, 7), (1, 7), (1, 8)] {
        assert_eq!(executor.run(&mut Post::new(0), units).expect("the program runs"), RunStatus::Runs);
        assert_eq!(executor.value("total"), Some(&one(total)));
    }
}

#[test]
fn loops_take_turns() {
    let body = |name: &str, total: &str| {
        let ops = vec![op(OpKind::Fill { value: 1.0 }, &[], &[name]), op(OpKind::Sum, &[total, name], &[total])];
        (vec![variable(name, number(), Purpose::Temporary)], ops)
    };
    let outer = ["s", "t"].map(|name| variable(name, number(), Purpose::State)).to_vec();
    let mut executor = executor(&Arc::new(loops(outer, vec![body("one", "s"), body("uno", "t")])), &[], 1);
    for name in ["s", "t"] {
        executor.set(name, one(0)).expect("it is a number");
    }
    executor.run(&mut Post::new(0), 2 + 4 * 10).expect("the program runs");
    assert_eq!((executor.value("s"), executor.value("t")), (Some(&one(10)), Some(&one(10))));
}

fn deadlock(graph: Graph, expected: &str) {
    let mut executor = executor(&Arc::new(graph), &[], 1);
    let error = executor.run(&mut Post::new(9), 1000).expect_err("it is a deadlock").to_string();
    assert_eq!(error, format!("deadlock: no op is ready and nothing is awaited from outside: {expected}"));
}

#[test]
fn a_deadlock_names_each_waiting_op_and_its_reason() {
    let outer = || vec![variable("q", queue(2), Purpose::State), variable("x", number(), Purpose::State)];
    let fill = || op(OpKind::Fill { value: 1.0 }, &[], &["x"]);
    deadlock(
        loops(outer(), vec![(vec![], vec![fill(), enqueue("q", "x")])]),
        "block 1, op 1 enqueue waits for space in its queue, which holds 2, all it can",
    );
    deadlock(
        loops(outer(), vec![(vec![], vec![dequeue("q", &["a", "b"])])]),
        "block 1, op 0 dequeue waits for items in its queue, which holds 0 of 2",
    );
    let once =
        Block { parent: None, variables: outer(), ops: vec![fill(), accumulate(2, Merge::Sum, None, &["x"], "sum")] };
    deadlock(
        Graph::new(Program { blocks: vec![once] }).expect("the program is valid"),
        "block 0, op 1 gradient_accumulator waits for pieces, of which it holds 1 of 2",
    );
}

fn refused(graph: &Graph, expected: &str) {
    assert_eq!(ExecutionPlan::of(graph).expect_err("it is refused").to_string(), expected);
}

#[test]
fn an_op_that_depends_on_an_endless_loop_is_refused() {
    let body = Block { parent: Some(0), variables: vec![], ops: vec![op(OpKind::Fill { value: 1.0 }, &[], &["x"])] };
    let program = |after: Op, body: Block| {
        let ops = vec![op(OpKind::LoopForever { block: 1 }, &[], &[]), after];
        let variables = vec![variable("x", number(), Purpose::State)];
        Graph::new(Program { blocks: vec![Block { parent: None, variables, ops }, body] }).expect("it is valid")
    };
    refused(
        &program(send("out", SINK, "x"), body.clone()),
        "block 0, op 1 send: found \"x\", which block 0, op 0 loop_forever touches too; expected no op to wait for a \
         loop, which never ends",
    );
    let nested = Graph::new(Program {
        blocks: vec![
            Block { parent: None, variables: vec![], ops: vec![op(OpKind::LoopForever { block: 1 }, &[], &[])] },
            Block { parent: Some(0), variables: vec![], ops: vec![op(OpKind::LoopForever { block: 2 }, &[], &[])] },
            Block { parent: Some(1), variables: vec![], ops: vec![] },
        ],
    });
    refused(
        &nested.expect("it is valid"),
        "block 1, op 0 loop_forever: found a nested loop, which never ends; expected it in block 0",
    );
}

#[test]
fn a_value_that_does_not_fit_its_channel_is_refused() {
    let graph = Arc::new(loops(vec![], vec![(vec![x()], vec![recv("in", &["x"]), send("out", SINK, "x")])]));
    let mut executor = executor(&graph, &[], 1);
    let error = executor.arrive("in", SINK, VariableValue::Strings(vec![])).expect_err("it is refused").to_string();
    assert_eq!(error, "channel \"in\": found 0 strings; expected float64[1]");
    let error = executor.arrive("on", SINK, one(1)).expect_err("it is refused").to_string();
    assert_eq!(error, "found no recv of channel \"on\" in this program");
}
