//! Given values of a program: accepted and refused values, in `PlainRun` and in the executor.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::executor::{Executor, ExecutorParts};
use crate::transpile::{Cluster, CostModel, ParameterServer, ProcessRates, Transpiler};
use crate::{Elements, GivenValues, Graph, PlainArithmetic, PlainRun, Tensor, append_backward, append_optimizer};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::port::Plain;

const PROGRAM: &str = "block 0 {
    data x: float32[batch, 4]
    parameter w: float32[4, 2]
    parameter b: float32[]
    state seen: int64[2]
    initialise w = given(name=\"weights\")
    initialise b = given(name=\"bias\")
    initialise seen = given(name=\"seen\", first=1)
    forward y = matmul(x, w)
    forward z = add(y, b)
    forward loss = mean(z)
}";

/// Values that can be described but not read.
struct Unreadable(BTreeMap<String, Tensor>);

impl GivenValues for Unreadable {
    fn facts(&self, name: &str) -> Result<(ElementType, Vec<u64>), Failure> {
        self.0.facts(name)
    }

    fn read(&self, name: &str, _: u64, _: &mut [u8]) -> Result<(), Failure> {
        Err(Failure::call(format!("the disk with {name:?} is gone")))
    }
}

fn weights() -> Tensor {
    Tensor::new([4, 2], Elements::Float32((0..8).map(|place| place as f32).collect()))
}

fn values() -> BTreeMap<String, Tensor> {
    BTreeMap::from([
        ("weights".to_owned(), weights()),
        ("bias".to_owned(), Tensor::new([], Elements::Float32(vec![0.5]))),
        ("seen".to_owned(), Tensor::new([3], Elements::Int64(vec![7, 8, 9]))),
        ("unread".to_owned(), Tensor::new([1], Elements::Float64(vec![0.0]))),
    ])
}

fn graph() -> Graph {
    Graph::new(PROGRAM.parse().expect("it is a program")).expect("it fits")
}

fn executor(graph: Graph) -> Result<Executor, Failure> {
    let parts = ExecutorParts {
        arithmetic: Box::new(PlainArithmetic),
        kernels: Box::new(Plain),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    };
    Executor::new(Arc::new(graph), parts)
}

#[test]
fn variables_begin_from_given_values() {
    let graph = graph().with_values(Arc::new(values())).expect("the values fit");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
    let executor = executor(graph.clone()).expect("it begins");
    let seen = Tensor::new([2], Elements::Int64(vec![8, 9]));
    for (name, expected) in [("w", weights()), ("b", values()["bias"].clone()), ("seen", seen)] {
        assert_eq!(run.value(name).expect("a value").tensor(), &expected, "{name}");
        assert_eq!(executor.value(name).expect("a value").tensor(), &expected, "{name}");
    }
}

#[test]
fn values_that_do_not_fit_are_refused_by_name() {
    let check = |name: &str, tensor: Option<Tensor>, expected: &str| {
        let mut values = values();
        match tensor {
            Some(tensor) => drop(values.insert(name.to_owned(), tensor)),
            None => drop(values.remove(name)),
        }
        let refusal = graph().with_values(Arc::new(values)).expect_err("it does not fit").to_string();
        assert_eq!(refusal, expected);
    };
    let of = |shape: &[u64]| Some(Tensor::zeros(ElementType::Float32, shape));
    check("weights", None, "block 0, op 0 given: found no value \"weights\"; expected one of this name");
    for (shape, found) in [(&[2, 4][..], "[2, 4]"), (&[5, 2], "[5, 2]"), (&[8], "[8]"), (&[], "[]")] {
        let expected = format!("block 0, op 0 given: value \"weights\" is float32{found}; expected float32[4, 2]");
        check("weights", of(shape), &expected);
    }
    check("bias", of(&[1]), "block 0, op 1 given: value \"bias\" is float32[1]; expected float32[]");
    let wide = Some(Tensor::zeros(ElementType::Float64, &[4, 2]));
    check("weights", wide, "block 0, op 0 given: value \"weights\" is float64[4, 2]; expected float32[4, 2]");
    let short = Some(Tensor::zeros(ElementType::Int64, &[2]));
    check("seen", short, "block 0, op 2 given: value \"seen\" is int64[2]; expected int64[2] from row 1 on");
}

#[test]
fn a_graph_without_values_does_not_begin() {
    let expected = "block 0, op 0 given: found no values for given(name=\"weights\"); expected a file with them \
                    (pserver train --values) or a call of Graph::with_values";
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let graph = graph();
    let refusal = PlainRun::new(&graph, &mut arithmetic, &mut kernels).map(drop).expect_err("it has no values");
    assert_eq!(refusal.to_string(), expected);
    assert_eq!(executor(graph).map(drop).expect_err("it has no values").to_string(), expected);
    assert_eq!(self::graph().given_names().collect::<Vec<_>>(), ["weights", "bias", "seen"]);
}

#[test]
fn values_that_cannot_be_read_are_refused_when_the_program_begins() {
    let graph = graph().with_values(Arc::new(Unreadable(values()))).expect("the facts fit");
    let refusal = executor(graph).map(drop).expect_err("it cannot be read").to_string();
    assert_eq!(refusal, "block 0, op 0 given: the disk with \"weights\" is gone");
}

/// A piece of a table takes its rows of the value.
#[test]
fn pieces_cut_by_rows_begin_as_the_whole() {
    let mut program = graph().into_program();
    let gradients = append_backward(&mut program, "loss").expect("it has gradients");
    append_optimizer(&mut program, "const_lr { learning_rate: 0.1 }", &gradients).expect("it has updates");
    let graph = Graph::new(program).and_then(|graph| graph.with_values(Arc::new(values()))).expect("the values fit");
    let mut costs = CostModel { chunk_bytes: 8, ..CostModel::default() };
    // With free messages, ops and trainer work, the placement cuts every parameter that may be cut.
    (costs.server.message_seconds, costs.server.op_seconds) = (0.0, 0.0);
    costs.trainer = ProcessRates { flops_per_second: 1e30, memory_bytes_per_second: 1e30, ..costs.server };
    let cluster = Cluster { trainers: 2, servers: 2 };
    let parts = ParameterServer::default().transpile(&graph, cluster, &costs).expect("it can be divided");
    let mut rows = Vec::new();
    for part in &parts[1..] {
        let names = part.graph.variables().iter().map(|known| known.name.clone());
        let pieces: Vec<String> =
            names.filter(|name| name.starts_with("w@piece") && !name[1..].contains("@s")).collect();
        let executor = executor(part.graph.clone()).expect("it begins");
        for piece in pieces.iter().filter(|name| executor.value(name).is_some()) {
            let Elements::Float32(found) = executor.value(piece).expect("a value").tensor().elements() else {
                panic!("{piece} has other elements")
            };
            rows.push((piece.clone(), found.clone()));
        }
    }
    rows.sort_by(|one, other| one.0.cmp(&other.0));
    assert!(rows.len() > 1, "found {rows:?}; expected several pieces");
    let all: Vec<f32> = rows.into_iter().flat_map(|(_, found)| found).collect();
    assert_eq!(Elements::Float32(all), *weights().elements());
}
