//! Pulls of rows: the requested ids, their order, and the accepted answers.

use std::sync::Arc;

use super::stage::{Post, executor, op};
use crate::executor::{Executor, RunStatus};
use crate::{
    Block, Dim, Elements, Graph, OpKind, Program, ProgramPeer, Purpose, Tensor, Variable, VariableFacts, VariableValue,
};
use pserver_core::dtype::ElementType::{Float32, Int64};

/// The heights of the pieces of a table, which have one server each.
const HEIGHTS: [u64; 2] = [10, 5];

/// Looks up `ids` of a table in two pieces, of which `more` are requested as well.
fn program() -> Arc<Graph> {
    let variable = |name: &str, facts, purpose| Variable { name: name.to_owned(), facts, purpose };
    let rows = |height| VariableFacts::SelectedRows { element_type: Float32, height, width: 2 };
    let ids = || VariableFacts::dense(Int64, [Dim::Batch]);
    let pull = |channel: &str, server, first| OpKind::PullRows {
        channel: channel.to_owned(),
        to: ProgramPeer::Server(server),
        first,
    };
    let variables = vec![
        variable("count", VariableFacts::fixed(Int64, &[]), Purpose::Data),
        variable("ids", ids(), Purpose::Data),
        variable("more", VariableFacts::fixed(Int64, &[2]), Purpose::Data),
        variable("low", rows(HEIGHTS[0]), Purpose::Temporary),
        variable("high", rows(HEIGHTS[1]), Purpose::Temporary),
    ];
    let ops = vec![
        op(pull("low", 0, 0), &["count", "ids", "more"], &["low"]),
        op(pull("high", 1, HEIGHTS[0]), &["count", "ids", "more"], &["high"]),
        op(OpKind::Concat { axis: 0 }, &["low", "high"], &["table"]),
        op(OpKind::LookupTable { padding: Some(4) }, &["table", "ids"], &["found"]),
    ];
    let program = Program { blocks: vec![Block { parent: None, variables, ops }] };
    Arc::new(Graph::new(program).expect("the test's program is valid"))
}

fn fed(ids: &[i64]) -> Executor {
    let mut executor = executor(&program(), &[], 1);
    let int64 = |shape: &[u64], values: &[i64]| Tensor::new(shape, Elements::Int64(values.to_vec()));
    executor.set("count", int64(&[], &[7])).expect("it fits");
    executor.set("ids", int64(&[ids.len() as u64], ids)).expect("it fits");
    executor.set("more", int64(&[2], &[4, 0])).expect("it fits");
    executor
}

/// The ids that the run requests until it needs an answer, by channel.
fn asked(executor: &mut Executor) -> Vec<(ProgramPeer, String, Vec<i64>)> {
    let mut post = Post::new(8);
    assert_eq!(executor.run(&mut post, u64::MAX), Ok(RunStatus::Awaits));
    let letters = post.sent.into_iter().map(|(to, channel, value)| match value.tensor().elements() {
        Elements::Int64(ids) => (to, channel, ids.clone()),
        other => panic!("{:?} are no ids", other.element_type()),
    });
    letters.collect()
}

/// Rows of which the elements are the id and its half.
fn rows(ids: &[i64]) -> VariableValue {
    let values = ids.iter().flat_map(|id| [*id as f32, *id as f32 / 2.0]).collect();
    Tensor::new([ids.len() as u64, 2], Elements::Float32(values)).into()
}

/// Answers with rows, and runs to the end.
fn answered(executor: &mut Executor, low: &[i64], high: &[i64]) -> Result<Tensor, String> {
    for (server, channel, ids) in [(0, "low", low), (1, "high", high)] {
        let back = executor.arrive(channel, ProgramPeer::Server(server), rows(ids)).expect("the facts fit");
        assert_eq!(back, None);
    }
    let status = executor.run(&mut Post::new(8), u64::MAX).map_err(|failure| failure.to_string())?;
    assert_eq!(status, RunStatus::Ended);
    Ok(executor.value("found").expect("it was looked up").tensor().clone())
}

#[test]
fn each_id_is_requested_once_from_the_server_of_its_row() {
    let mut executor = fed(&[12, 3, 3, 4, 10, 9]);
    let ask = |server, channel: &str, ids: &[i64]| (ProgramPeer::Server(server), channel.to_owned(), ids.to_vec());
    assert_eq!(asked(&mut executor), [ask(0, "low", &[0, 3, 4, 9]), ask(1, "high", &[0, 2])]);
    let found = answered(&mut executor, &[0, 3, 4, 9], &[10, 12]).expect("all is there");
    let expected = Elements::Float32(vec![12.0, 6.0, 3.0, 1.5, 3.0, 1.5, 0.0, 0.0, 10.0, 5.0, 9.0, 4.5]);
    assert_eq!(found, Tensor::new([6, 2], expected));
}

#[test]
fn no_ids_get_no_rows() {
    let mut executor = fed(&[]);
    assert_eq!(asked(&mut executor).into_iter().map(|(_, _, ids)| ids).collect::<Vec<_>>(), [vec![0, 4], vec![]]);
    let found = answered(&mut executor, &[0, 4], &[]).expect("none is needed");
    assert_eq!(found, Tensor::new([0, 2], Elements::Float32(Vec::new())));
}

#[test]
fn an_id_of_no_piece_is_refused_by_the_lookup() {
    for (id, text) in [(15, "id 15 at place 1; expected 0 to 14"), (-1, "id -1 at place 1; expected 0 to 14")] {
        let mut executor = fed(&[14, id]);
        assert_eq!(asked(&mut executor)[1].2, [4], "{id}");
        let failure = answered(&mut executor, &[0, 4], &[14]).expect_err("there is no such row");
        assert_eq!(failure, format!("block 0, op 3 lookup_table: {text}"));
    }
}

#[test]
fn an_answer_has_a_row_for_each_id() {
    let mut executor = fed(&[1]);
    let wide = Tensor::new([3, 3], Elements::Float32(vec![0.0; 9]));
    let failure = executor.arrive("low", ProgramPeer::Server(0), wide.into()).expect_err("it is too wide").to_string();
    assert_eq!(failure, "channel \"low\": found float32[3, 3]; expected float32[batch, 2] where batch is 3");
    asked(&mut executor);
    let failure = answered(&mut executor, &[0, 1], &[]).expect_err("a row is missing");
    assert!(failure.contains("op 0 pull_rows: 16 bytes of values for 3 rows; expected 24"), "{failure}");
}

#[test]
fn a_restored_run_requests_its_rows_again() {
    let mut executor = fed(&[1]);
    let before = executor.save();
    let first = asked(&mut executor);
    let back = executor.arrive("low", ProgramPeer::Server(0), rows(&[8, 8, 8])).expect("the facts fit");
    assert_eq!(back, None);
    executor.restore(before);
    assert_eq!(asked(&mut executor), first);
    let found = answered(&mut executor, &[0, 1, 4], &[]).expect("all is there");
    assert_eq!(found, Tensor::new([1, 2], Elements::Float32(vec![1.0, 0.5])));
}
