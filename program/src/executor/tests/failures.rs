//! Failures have no effects: a failed op leaves its inputs, a failed run is rolled back, and an op without memory is
//! refused before it allocates.

use std::sync::Arc;

use super::stage::{
    Post, accumulate, answer, as_number, dequeue, enqueue, executor, loops, number, one, op, recv, send, strings,
    variable,
};
use crate::executor::{Executor, ExecutorParts, RunStatus};
use crate::{
    Arithmetic, Block, Builder, Dim, Elements, Graph, Node, OpKind, OpRole, PlainArithmetic, PlainRun, Program,
    ProgramPeer, Purpose, Tensor, VariableFacts, VariableValue,
};
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType::{Float32, Float64, Int64};
use pserver_core::error::Failure;
use pserver_core::limits::{PROGRAM_MEMORY_BYTES_MAX, PROGRAM_STRING_BYTES_MAX};
use pserver_core::port::Plain;
use pserver_core::rows::Initializer;

const SINK: ProgramPeer = ProgramPeer::Server(9);

fn id(value: i64) -> VariableValue {
    Tensor::new([1], Elements::Int64(vec![value])).into()
}

/// Received row numbers that are looked up, queued, summed in pairs, and counted.
fn lookups() -> Arc<Graph> {
    let p = Builder::new();
    p.parameter("table", Float64, &[4, 1], Initializer::Uniform { low: 1.0, high: 2.0 }, 3);
    let mut program = p.finish().expect("it fits").into_program();
    let body = vec![
        recv("in", &["id", "from"]),
        op(OpKind::LookupTable { padding: None }, &["table", "id"], &["row"]),
        op(OpKind::Add, &["total", "row"], &["more"]),
        op(OpKind::Scale { factor: 1.0 }, &["more"], &["total"]),
        accumulate(2, Merge::Sum, None, &["row", "from"], "merged"),
        strings(2, "from", "senders"),
        answer("out", "merged", "senders"),
    ];
    let block = &mut program.blocks[0];
    block.variables.push(variable("total", VariableFacts::fixed(Float64, &[1, 1]), Purpose::State));
    let fill = op(OpKind::Fill { value: 0.0 }, &[], &["total"]);
    block.ops.push(crate::Op { role: OpRole::Initialise, ..fill });
    block.ops.push(op(OpKind::LoopForever { block: 1 }, &[], &[]));
    let ids = variable("id", VariableFacts::fixed(Int64, &[1]), Purpose::Temporary);
    program.blocks.push(Block { parent: Some(0), variables: vec![ids], ops: body });
    Arc::new(Graph::new(program).expect("the test's program is valid"))
}

/// Delivers a row number and runs. A number beyond the table fails, and is removed again.
fn look_up(executor: &mut Executor, post: &mut Post, row: i64) -> Result<(), Failure> {
    let before = executor.save();
    assert_eq!(executor.arrive("in", ProgramPeer::Trainer(0), id(row)).expect("it fits"), None);
    let ran = executor.run(post, 1000);
    if ran.is_err() {
        executor.restore(before);
    }
    ran.map(|status| assert_eq!(status, RunStatus::Awaits))
}

#[test]
fn a_failed_run_is_rolled_back() {
    let (mut found, mut expected) = (executor(&lookups(), &[], 1), executor(&lookups(), &[], 1));
    let (mut given, mut wanted) = (Post::new(99), Post::new(99));
    for row in [1, 7, 2, -1, 9, 3, 3, 4, 0, 1] {
        let is_there = (0..4).contains(&row);
        let outcome = look_up(&mut found, &mut given, row);
        assert_eq!(outcome.is_ok(), is_there, "row {row}");
        if let Err(failure) = outcome {
            let text = failure.to_string();
            assert_eq!(text, format!("block 1, op 1 lookup_table: id {row} at place 0; expected 0 to 3"));
        } else {
            look_up(&mut expected, &mut wanted, row).expect("it never fails");
        }
        assert_eq!(found.value("total"), expected.value("total"), "after row {row}");
    }
    assert_eq!(given.sent, wanted.sent);
    assert_eq!(given.sent.len(), 3);
}

#[test]
fn a_partly_finished_run_does_not_start_again() {
    let p = Builder::new();
    let table = p.parameter("table", Float64, &[4, 1], Initializer::Zeros, 0);
    let ids = p.data("ids", Int64, [Dim::Batch]);
    p.named("loss", p.mean(p.lookup_table(table, p.cast(ids, Int64))));
    let graph = Arc::new(p.finish().expect("it fits"));
    let (mut executor, mut post) = (executor(&graph, &[], 1), Post::new(1));
    let ids = |row| Tensor::new([1], Elements::Int64(vec![row]));
    executor.set("ids", ids(5)).expect("it fits");
    let before = executor.save();
    executor.begin().expect("nothing has run");
    executor.run(&mut post, 1000).expect_err("there is no row 5");
    let text = executor.begin().expect_err("the run is not over").to_string();
    assert!(text.contains("found an incomplete run"), "{text}");
    executor.restore(before);
    for row in [1, 2] {
        executor.set("ids", ids(row)).expect("it fits");
        executor.begin().expect("the last run is over, or taken back");
        assert_eq!(executor.run(&mut post, 1000), Ok(RunStatus::Ended));
    }
}

/// Fails once in every op of this kind.
struct Once(Option<&'static str>);

impl Arithmetic for Once {
    fn run(
        &mut self,
        node: &Node,
        inputs: &[&VariableValue],
        outputs: &[&VariableFacts],
    ) -> Result<Vec<VariableValue>, Failure> {
        match self.0.take_if(|name| *name == node.kind.name()) {
            Some(name) => Err(Failure::call(format!("{name} fails once"))),
            None => PlainArithmetic.run(node, inputs, outputs),
        }
    }

    fn name(&self) -> &'static str {
        "once"
    }
}

#[test]
fn pieces_are_kept_when_their_merge_fails() {
    let x = variable("x", number(), Purpose::Temporary);
    let body = vec![
        recv("in", &["x", "from"]),
        accumulate(3, Merge::Mean, None, &["x", "from"], "merged"),
        send("out", SINK, "merged"),
    ];
    let parts = ExecutorParts {
        arithmetic: Box::new(Once(Some("scale"))),
        kernels: Box::new(Plain),
        senders: Vec::new(),
        arrivals_max: 3,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    };
    let graph = Arc::new(loops(vec![], vec![(vec![x], body)]));
    let (mut executor, mut post) = (Executor::new(graph, parts).expect("it can run"), Post::new(9));
    for (from, value) in [(2, 4), (0, 1), (1, 7)] {
        assert_eq!(executor.arrive("in", ProgramPeer::Trainer(from), one(value)).expect("it fits"), None);
    }
    let text = executor.run(&mut post, 1000).expect_err("the mean fails once").to_string();
    assert!(text.contains("gradient_accumulator: scale fails once"), "{text}");
    assert_eq!(executor.run(&mut post, 1000), Ok(RunStatus::Awaits));
    assert_eq!(post.sent.drain(..).map(|(_, _, value)| as_number(&value)).collect::<Vec<_>>(), [4.0]);
}

/// An update that lacks a state takes nothing away.
#[test]
fn an_update_without_its_state_changes_nothing() {
    let p = Builder::new();
    p.parameter("w", Float32, &[1], Initializer::Constant(3.0), 0);
    p.data("slope", Float32, [Dim::Fixed(1)]);
    p.declare("count", VariableFacts::fixed(Int64, &[]), Purpose::State);
    p.declare("momentum", VariableFacts::fixed(Float32, &[1]), Purpose::State);
    let config = "sgd { momentum: 0.5 } const_lr { learning_rate: 1 }".to_owned();
    let mut program = p.finish().expect("it fits").into_program();
    let kind = OpKind::Update { config };
    program.blocks[0].ops.push(op(kind, &["w", "slope", "count", "momentum"], &["w", "count", "momentum"]));
    let graph = Graph::new(program).expect("it fits");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
    let single = |value: f32| Tensor::new([1], Elements::Float32(vec![value]));
    run.set("slope", single(1.0)).expect("it fits");
    run.set("count", Tensor::new([], Elements::Int64(vec![0]))).expect("it fits");
    let text = run.step().expect_err("there is no momentum").to_string();
    assert_eq!(text, "block 0, op 1 update: found no value in state \"momentum\"");
    run.set("momentum", single(0.0)).expect("it fits");
    run.step().expect("all is there");
    assert_eq!(run.value("w"), Some(&single(2.0).into()));
}

fn lines(texts: &[&str]) -> VariableValue {
    VariableValue::Strings(texts.iter().map(|text| (*text).to_owned()).collect())
}

/// A loop that makes lists of this many strings, with any content.
fn listing(count: u32) -> Executor {
    let line = variable("line", VariableFacts::Strings, Purpose::Temporary);
    let body = vec![recv("in", &["line"]), strings(count, "line", "all"), send("out", SINK, "all")];
    executor(&Arc::new(loops(vec![], vec![(vec![line], body)])), &[], 99)
}

#[test]
fn a_list_of_strings_does_not_depend_on_the_order_of_arrival() {
    let given = ["zebra", "trainer:10", "server:0", "trainer:x", "", "trainer:2", "host:7164", "apple"];
    let expected = ["trainer:2", "trainer:10", "server:0", "", "apple", "host:7164", "trainer:x", "zebra"];
    let mut orders = vec![given.to_vec(), expected.to_vec()];
    orders.push(given.iter().rev().copied().collect());
    for order in orders {
        let (mut executor, mut post) = (listing(8), Post::new(9));
        for text in &order {
            assert_eq!(executor.arrive("in", ProgramPeer::Trainer(0), lines(&[text])).expect("it is a string"), None);
        }
        assert_eq!(executor.run(&mut post, 1000), Ok(RunStatus::Awaits));
        assert_eq!(post.sent.pop_front().map(|(_, _, value)| value), Some(lines(&expected)), "{order:?}");
    }
}

#[test]
fn a_string_that_is_too_long_leaves_nothing_of_its_value() {
    let (mut executor, mut post) = (listing(2), Post::new(9));
    let long = "x".repeat(PROGRAM_STRING_BYTES_MAX + 1);
    let before = executor.save();
    assert_eq!(executor.arrive("in", ProgramPeer::Trainer(0), lines(&["short", &long])).expect("it is strings"), None);
    let text = executor.run(&mut post, 1000).expect_err("it is too long").to_string();
    assert!(text.contains("string_accumulator: found a string of 1025 bytes; expected at most 1024"), "{text}");
    executor.restore(before);
    for text in ["b", "a"] {
        assert_eq!(executor.arrive("in", ProgramPeer::Trainer(0), lines(&[text])).expect("it is a string"), None);
    }
    assert_eq!(executor.run(&mut post, 1000), Ok(RunStatus::Awaits));
    assert_eq!(post.sent.pop_front().map(|(_, _, value)| value), Some(lines(&["a", "b"])));
}

#[test]
fn a_queue_holds_strings() {
    let line = variable("line", VariableFacts::Strings, Purpose::Temporary);
    let outer =
        vec![variable("q", VariableFacts::Queue { of: Box::new(VariableFacts::Strings), capacity: 2 }, Purpose::State)];
    let fill = (vec![line], vec![recv("in", &["line"]), enqueue("q", "line")]);
    let empty = (vec![], vec![dequeue("q", &["a", "b"]), send("out", SINK, "b")]);
    let (mut executor, mut post) = (executor(&Arc::new(loops(outer, vec![fill, empty])), &[], 9), Post::new(9));
    for text in ["one", "two"] {
        assert_eq!(executor.arrive("in", ProgramPeer::Trainer(0), lines(&[text])).expect("it is a string"), None);
    }
    assert_eq!(executor.run(&mut post, 1000), Ok(RunStatus::Awaits));
    assert_eq!(post.sent.pop_front().map(|(_, _, value)| value), Some(lines(&["two"])));
}

/// The program of one op on data `x`.
fn alone(kind: OpKind, inputs: &[&str], shape: &[u64]) -> Graph {
    let variables = vec![variable("x", VariableFacts::fixed(Float32, shape), Purpose::Data)];
    let program = Program { blocks: vec![Block { parent: None, variables, ops: vec![op(kind, inputs, &["y"])] }] };
    Graph::new(program).expect("it fits")
}

#[test]
fn outputs_beyond_the_memory_bound_are_refused_by_name() {
    let kind = OpKind::Matmul { transpose_left: true, transpose_right: false };
    let graph = alone(kind, &["x", "x"], &[1, 1 << 20]);
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("nothing begins");
    run.set("x", Tensor::zeros(Float32, &[1, 1 << 20])).expect("it fits");
    assert_eq!(
        run.step().expect_err("4 TiB are too much").to_string(),
        "block 0, op 0 matmul: found 4398046511104 bytes of outputs beside 4194304 bytes of values; expected at most \
         274877906944 together"
    );
    let huge = Builder::new();
    huge.parameter("w", Float32, &[1 << 20, 1 << 20], Initializer::Zeros, 0);
    let graph = Arc::new(huge.finish().expect("it fits"));
    let parts = |memory_bytes_max| ExecutorParts {
        arithmetic: Box::new(PlainArithmetic),
        kernels: Box::new(Plain),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max,
    };
    let refused = |graph: &Arc<Graph>, most| {
        let text = Executor::new(Arc::clone(graph), parts(most)).err().expect("it is too much").to_string();
        assert!(text.starts_with("block 0, op 0 fill: found "), "{text}");
        text
    };
    assert!(refused(&graph, PROGRAM_MEMORY_BYTES_MAX).contains("expected at most 274877906944 together"));
    // Within the bound the allocation itself fails: no machine has this many bytes.
    let beyond = Builder::new();
    beyond.parameter("w", Float32, &[1 << 23, 1 << 23], Initializer::Zeros, 0);
    let text = refused(&Arc::new(beyond.finish().expect("it fits")), u64::MAX);
    assert!(text.ends_with("found no memory for 281474976710656 bytes; expected as many"), "{text}");
}

/// The bound applies to the sum of all existing values.
#[test]
fn the_memory_bound_is_on_the_sum_of_all_values() {
    let p = Builder::new();
    let x = p.data("x", Float64, [Dim::Batch]);
    p.named("three", p.scale(p.scale(p.scale(x, 2.0), 2.0), 2.0));
    let graph = Arc::new(p.finish().expect("it fits"));
    let run = |batch: u64, memory_bytes_max| {
        let parts = ExecutorParts {
            arithmetic: Box::new(PlainArithmetic),
            kernels: Box::new(Plain),
            senders: Vec::new(),
            arrivals_max: 1,
            memory_bytes_max,
        };
        let mut executor = Executor::new(Arc::clone(&graph), parts).expect("nothing begins");
        executor.set("x", Tensor::zeros(Float64, &[batch])).expect("it fits");
        executor.begin().and_then(|()| executor.run(&mut Post::new(1), 1000))
    };
    assert_eq!(run(10, 320), Ok(RunStatus::Ended));
    let text = run(10, 319).expect_err("the third is too much").to_string();
    assert_eq!(
        text,
        "block 0, op 2 scale: found 80 bytes of outputs beside 240 bytes of values; expected at most 319 together"
    );
    assert!(run(11, 320).is_err());
}
