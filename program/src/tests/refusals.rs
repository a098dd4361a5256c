//! A bad program is refused before it runs, by name.

use crate::{
    Block, Destination, Dim, Graph, Op, OpKind, OpRole, Program, ProgramPeer, Purpose, Variable, VariableFacts,
    WindowSteps,
};
use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType::{self, Float32, Int64};

/// The refusal of rows by an op of dense tensors.
const ROWS_ARE_NOT_DENSE: &str = "input 1 \"rows\" is rows(float32, 9, 4); expected a dense tensor, which the sum of a \
                                  dense one and these rows is";

/// Data, parameters and states of many facts, for ops to be tried on.
fn variables() -> Vec<Variable> {
    let fixed = |element_type, shape: &[u64]| VariableFacts::fixed(element_type, shape);
    let batch = |element_type, width: &[u64]| {
        let mut shape = vec![Dim::Batch];
        shape.extend(width.iter().copied().map(Dim::Fixed));
        VariableFacts::dense(element_type, shape)
    };
    let rows = VariableFacts::SelectedRows { element_type: Float32, height: 9, width: 4 };
    let queue = |of, capacity| VariableFacts::Queue { of: Box::new(of), capacity };
    let table = [
        ("x", batch(Float32, &[4]), Purpose::Data),
        ("label", batch(Int64, &[]), Purpose::Data),
        ("labels", batch(Float32, &[4]), Purpose::Data),
        ("loss", batch(Float32, &[]), Purpose::Data),
        ("rows", rows.clone(), Purpose::Data),
        ("sender", VariableFacts::Strings, Purpose::Data),
        ("w", fixed(Float32, &[4, 3]), Purpose::Parameter),
        ("v", fixed(Float32, &[4, 3]), Purpose::Parameter),
        ("table", fixed(Float32, &[9, 4]), Purpose::Parameter),
        ("b", fixed(Float32, &[3]), Purpose::Parameter),
        ("scalar", fixed(Float32, &[]), Purpose::Parameter),
        ("one", fixed(Float32, &[1, 1]), Purpose::Parameter),
        ("wide", fixed(ElementType::Float64, &[4, 3]), Purpose::Parameter),
        ("whole", fixed(Int64, &[4, 3]), Purpose::Parameter),
        ("momentum", fixed(Float32, &[4, 3]), Purpose::State),
        ("count", fixed(Int64, &[]), Purpose::State),
        ("queue", queue(fixed(Float32, &[4, 3]), 2), Purpose::State),
        ("half", fixed(ElementType::Float16, &[4, 3]), Purpose::State),
        ("later", fixed(Float32, &[4, 3]), Purpose::Temporary),
        ("made", batch(Float32, &[3]), Purpose::Temporary),
        ("pulled", rows, Purpose::Temporary),
    ];
    table.into_iter().map(|(name, facts, purpose)| Variable { name: name.into(), facts, purpose }).collect()
}

fn op(kind: OpKind, inputs: &str, outputs: &str) -> Op {
    let names = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    Op { kind, inputs: names(inputs), outputs: names(outputs), role: OpRole::Forward }
}

fn program(ops: Vec<Op>) -> Program {
    Program { blocks: vec![Block { parent: None, variables: variables(), ops }] }
}

/// One op alone, which is refused with this reason.
fn check(kind: OpKind, inputs: &str, outputs: &str, expected: &str) {
    let name = kind.name();
    let failure = Graph::new(program(vec![op(kind, inputs, outputs)])).unwrap_err().to_string();
    assert_eq!(failure, format!("block 0, op 0 {name}: {expected}"));
}

/// One op alone, whose first output has these facts.
fn gives(kind: OpKind, inputs: &str, outputs: &str, expected: &str) {
    let name = kind.name();
    let graph = Graph::new(program(vec![op(kind, inputs, outputs)])).unwrap_or_else(|failure| panic!("{failure}"));
    let first = outputs.split_whitespace().next().unwrap();
    assert_eq!(graph.facts(first).unwrap().to_string(), expected, "{name}");
}

const MATMUL: OpKind = OpKind::Matmul { transpose_left: false, transpose_right: false };

fn mean(axes: &[u32]) -> OpKind {
    OpKind::Mean { axes: axes.to_vec(), keep: false }
}

fn reduce_sum(axes: &[u32], keep: bool) -> OpKind {
    OpKind::ReduceSum { axes: axes.to_vec(), keep }
}

#[test]
fn another_shape_has_as_many_elements() {
    let reshape = |shape: &[u64]| OpKind::Reshape { shape: shape.to_vec() };
    gives(reshape(&[0, 2, 2]), "x", "y", "float32[batch, 2, 2]");
    gives(reshape(&[0]), "label", "y", "int64[batch]");
    gives(reshape(&[4, 1, 0]), "x", "y", "float32[4, 1, batch]");
    gives(reshape(&[0, 2]), "w", "y", "float32[6, 2]");
    gives(reshape(&[12]), "w", "y", "float32[12]");
    gives(reshape(&[]), "one", "y", "float32[]");
    for (shape, name, facts) in [
        (&[0, 2][..], "x", "float32[batch, 4]"),
        (&[4], "x", "float32[batch, 4]"),
        (&[0, 0, 4], "x", "float32[batch, 4]"),
        (&[0, 5], "w", "float32[4, 3]"),
        (&[13], "w", "float32[4, 3]"),
        (&[1 << 63, 2], "w", "float32[4, 3]"),
    ] {
        let expected = format!(
            "input 1 {name:?} is {facts}; expected as many elements as {shape:?} has, where one 0 is what remains, or \
             the batch"
        );
        check(reshape(shape), name, "y", &expected);
    }
    check(reshape(&[9]), "rows", "y", ROWS_ARE_NOT_DENSE);
    let transpose = |axes: &[u32]| OpKind::Transpose { axes: axes.to_vec() };
    gives(transpose(&[1, 0]), "x", "y", "float32[4, batch]");
    for axes in [&[0][..], &[0, 0], &[1, 2], &[0, 1, 2]] {
        let expected = format!(
            "input 1 \"x\" is float32[batch, 4]; expected a dimension for each of the axes {axes:?}, each once"
        );
        check(transpose(axes), "x", "y", &expected);
    }
    for kind in [OpKind::Softmax, OpKind::LogSoftmax] {
        gives(kind.clone(), "x", "y", "float32[batch, 4]");
        let expected = "input 1 \"loss\" is float32[batch]; expected a last dimension that is fixed";
        check(kind.clone(), "loss", "y", expected);
        check(kind, "label", "y", "input 1 \"label\" is int64[batch]; expected float32 or float64");
    }
}

#[test]
fn products_say_what_does_not_fit() {
    gives(MATMUL, "x w", "y", "float32[batch, 3]");
    check(
        MATMUL,
        "w x",
        "y",
        "input 2 \"x\" is float32[batch, 4]; expected float32[3, 4], to be multiplied with float32[4, 3]",
    );
    check(
        MATMUL,
        "x wide",
        "y",
        "input 2 \"wide\" is float64[4, 3]; expected float32[4, 3], to be multiplied with float32[batch, 4]",
    );
    check(MATMUL, "b w", "y", "input 1 \"b\" is float32[3]; expected two dimensions");
    check(MATMUL, "x", "y", "found 1 inputs; expected 2");
    check(MATMUL, "x w", "y z", "found 2 outputs; expected 1");
    let transposed = OpKind::Matmul { transpose_left: true, transpose_right: true };
    check(
        transposed,
        "w v",
        "y",
        "input 2 \"v\" is float32[4, 3]; expected float32[4, 4], to be multiplied with float32[4, 3]",
    );
}

#[test]
fn functions_say_what_does_not_fit() {
    let pairs =
        [OpKind::Add, OpKind::Mul, OpKind::Sub, OpKind::Div, OpKind::Max, OpKind::Min, OpKind::Pow, OpKind::Greater];
    for kind in pairs {
        gives(kind.clone(), "w b", "y", "float32[4, 3]");
        gives(kind.clone(), "b w", "y", "float32[4, 3]");
        gives(kind.clone(), "x scalar", "y", "float32[batch, 4]");
        gives(kind.clone(), "scalar x", "y", "float32[batch, 4]");
        gives(kind.clone(), "one x", "y", "float32[batch, 4]");
        check(
            kind.clone(),
            "x b",
            "y",
            "input 2 \"b\" is float32[3]; expected float32, and the last dimensions of float32[batch, 4], where either \
            may be 1",
        );
        check(
            kind.clone(),
            "x table",
            "y",
            "input 2 \"table\" is float32[9, 4]; expected float32, and the last dimensions of float32[batch, 4], \
            where either may be 1",
        );
        check(
            kind.clone(),
            "w wide",
            "y",
            "input 2 \"wide\" is float64[4, 3]; expected float32, and the last dimensions of float32[4, 3], where \
            either may be 1",
        );
        check(kind.clone(), "whole whole", "y", "input 1 \"whole\" is int64[4, 3]; expected float32 or float64");
        check(kind, "rows b", "y", ROWS_ARE_NOT_DENSE);
    }
    let gradient = OpKind::PowGradient { exponent: true };
    gives(gradient.clone(), "b w v", "y", "float32[4, 3]");
    check(gradient.clone(), "b w b", "y", "input 3 \"b\" is float32[3]; expected float32[4, 3]");
    check(gradient, "b w", "y", "found 2 inputs; expected 3");
    for kind in [OpKind::Sqrt, OpKind::Exp, OpKind::Log, OpKind::Abs, OpKind::Sign] {
        gives(kind.clone(), "x", "y", "float32[batch, 4]");
        check(kind.clone(), "label", "y", "input 1 \"label\" is int64[batch]; expected float32 or float64");
        check(kind, "x x", "y", "found 2 inputs; expected 1");
    }
    for kind in [OpKind::Relu, OpKind::Sigmoid, OpKind::Tanh, mean(&[]), OpKind::Scale { factor: 2.0 }] {
        check(kind.clone(), "label", "y", "input 1 \"label\" is int64[batch]; expected float32 or float64");
        check(kind, "sender", "y", "input 1 \"sender\" is strings; expected a dense tensor");
    }
    check(OpKind::Scale { factor: f64::NAN }, "x", "y", "found factor NaN; expected a finite number");
    gives(mean(&[]), "x", "y", "float32[]");
    gives(OpKind::Scale { factor: 0.5 }, "rows", "y", "rows(float32, 9, 4)");
}

#[test]
fn sum_and_layout_ops_name_the_input_that_does_not_fit() {
    gives(OpKind::Sum, "w v momentum", "y", "float32[4, 3]");
    gives(OpKind::Sum, "rows rows", "y", "rows(float32, 9, 4)");
    gives(OpKind::Sum, "rows table", "y", "float32[9, 4]");
    check(
        OpKind::Sum,
        "w x",
        "y",
        "input 2 \"x\" is float32[batch, 4]; expected facts that can be added to float32[4, 3]",
    );
    check(OpKind::Sum, "", "y", "found 0 inputs; expected at least 1");
    check(OpKind::Sum, "sender", "y", "input 1 \"sender\" is strings; expected dense or rows, of float32 or float64");
    gives(reduce_sum(&[0], false), "x", "y", "float32[4]");
    gives(reduce_sum(&[1], true), "x", "y", "float32[batch, 1]");
    gives(reduce_sum(&[1, 0], false), "x", "y", "float32[]");
    gives(reduce_sum(&[], true), "x", "y", "float32[1, 1]");
    gives(mean(&[0]), "x", "y", "float32[4]");
    check(reduce_sum(&[1, 1], false), "x", "y", "found axes [1, 1]; expected each dimension once");
    check(
        reduce_sum(&[2], false),
        "x",
        "y",
        "input 1 \"x\" is float32[batch, 4]; expected a dimension 2, counted from zero",
    );
    gives(OpKind::Concat { axis: 1 }, "x labels", "y", "float32[batch, 8]");
    check(
        OpKind::Concat { axis: 0 },
        "x labels",
        "y",
        "input 1 \"x\" is float32[batch, 4]; expected dimension 0 to be fixed, because pieces are put together there",
    );
    check(OpKind::Concat { axis: 0 }, "w table", "y", "input 2 \"table\" is float32[9, 4]; expected float32[9, 3]");
    gives(OpKind::Split { axis: 0, lengths: vec![1, 3] }, "w", "y z", "float32[1, 3]");
    gives(OpKind::Split { axis: 0, lengths: vec![5, 4] }, "rows", "y z", "rows(float32, 5, 4)");
    let split = |axis, lengths: &[u64]| OpKind::Split { axis, lengths: lengths.to_vec() };
    check(
        split(0, &[1, 2]),
        "w",
        "y z",
        "input 1 \"w\" is float32[4, 3]; expected dimension 0 to be 3, which the lengths add up to",
    );
    check(split(0, &[4, 0]), "w", "y z", "found lengths [4, 0]; expected one or more, above zero");
    check(split(0, &[1, 3]), "w", "y", "found 1 outputs; expected 2");
    check(
        split(1, &[9]),
        "rows",
        "y",
        "input 1 \"rows\" is rows(float32, 9, 4); expected a height of 9 and dimension 0, but found dimension 1",
    );
    gives(OpKind::Cast { to: Int64 }, "x", "y", "int64[batch, 4]");
    check(OpKind::Cast { to: Int64 }, "rows", "y", ROWS_ARE_NOT_DENSE);
}

#[test]
fn initialising_ops_name_the_output_that_does_not_fit() {
    let uniform = |low, high| OpKind::Uniform { low, high, seed: 1, first: 0 };
    let gaussian = |deviation| OpKind::Gaussian { mean: 0.0, deviation, seed: 1, first: 0 };
    gives(uniform(-1.0, 1.0), "", "w", "float32[4, 3]");
    gives(OpKind::Fill { value: 3.0 }, "", "whole", "int64[4, 3]");
    check(
        OpKind::Fill { value: 0.0 },
        "",
        "y",
        "found no declaration of output \"y\"; expected one, because its facts do not follow from inputs",
    );
    check(
        OpKind::Fill { value: 0.0 },
        "",
        "made",
        "output \"made\" is float32[batch, 3]; expected a dense tensor of fixed dimensions",
    );
    check(
        OpKind::Fill { value: 0.5 },
        "",
        "whole",
        "initializer constant: 0.5; expected a whole number that int64 has",
    );
    check(uniform(0.0, 1.0), "", "whole", "output \"whole\" is int64[4, 3]; expected float32 or float64");
    check(uniform(1.0, 0.0), "", "w", "initializer uniform: from 1 to 0; expected finite numbers in order");
    check(uniform(0.0, 1.0), "x", "w", "found 1 inputs; expected 0");
    check(
        gaussian(-1.0),
        "",
        "w",
        "initializer gaussian: mean 0, deviation -1; expected finite values, the second not negative",
    );
}

#[test]
fn losses_and_tables_say_what_does_not_fit() {
    gives(OpKind::SoftmaxWithCrossEntropy, "x label", "y z", "float32[batch]");
    gives(OpKind::Accuracy, "x label", "y", "float32[]");
    for kind in [OpKind::SoftmaxWithCrossEntropy, OpKind::Accuracy] {
        check(kind.clone(), "x loss", "y", "input 2 \"loss\" is float32[batch]; expected int64[batch]");
        check(kind.clone(), "w label", "y", "input 2 \"label\" is int64[batch]; expected int64[4]");
        check(kind, "b label", "y", "input 1 \"b\" is float32[3]; expected two dimensions");
    }
    let turned = op(OpKind::Transpose { axes: vec![1, 0] }, "x", "y");
    let failure = Graph::new(program(vec![turned, op(OpKind::SoftmaxWithCrossEntropy, "y label", "z s")])).unwrap_err();
    let expected = "input 1 \"y\" is float32[4, batch]; expected a matrix with a fixed number of classes";
    assert!(failure.to_string().contains(expected), "{failure}");
    gives(OpKind::SigmoidCrossEntropy, "x labels", "y", "float32[batch, 4]");
    check(OpKind::SigmoidCrossEntropy, "x label", "y", "input 2 \"label\" is int64[batch]; expected float32[batch, 4]");
    gives(OpKind::LookupTable { padding: None }, "table label", "y", "float32[batch, 4]");
    check(
        OpKind::LookupTable { padding: None },
        "table loss",
        "y",
        "input 2 \"loss\" is float32[batch]; expected int64",
    );
    check(
        OpKind::LookupTable { padding: None },
        "b label",
        "y",
        "input 1 \"b\" is float32[3]; expected two dimensions",
    );
    gives(OpKind::LookupTableGradient { height: 9, padding: None }, "label x", "y", "rows(float32, 9, 4)");
    check(
        OpKind::LookupTableGradient { height: 9, padding: None },
        "label w",
        "y",
        "input 2 \"w\" is float32[4, 3]; expected float32[batch, 3]",
    );
    check(
        OpKind::LookupTableGradient { height: 0, padding: None },
        "label x",
        "y",
        "found a height of 0; expected 1 or more",
    );
    check(
        OpKind::LookupTableGradient { height: 9, padding: None },
        "label scalar",
        "y",
        "input 2 \"scalar\" is float32[]; expected a last dimension that is fixed: the width of the table",
    );
}

#[test]
fn gradient_ops_say_what_does_not_fit() {
    gives(OpKind::SumTo, "w b", "y", "float32[3]");
    check(
        OpKind::SumTo,
        "x b",
        "y",
        "input 2 \"b\" is float32[3]; expected the last dimensions of float32[batch, 4], or 1 where it repeats",
    );
    let repeat = |axis| OpKind::Repeat { axes: vec![axis] };
    gives(repeat(1), "loss x", "y", "float32[batch, 4]");
    gives(OpKind::Repeat { axes: Vec::new() }, "one x", "y", "float32[batch, 4]");
    check(repeat(0), "loss x", "y", "input 1 \"loss\" is float32[batch]; expected float32[4]");
    check(repeat(2), "loss x", "y", "input 2 \"x\" is float32[batch, 4]; expected a dimension 2, counted from zero");
    for kind in [OpKind::ReluGradient, OpKind::SigmoidGradient, OpKind::TanhGradient] {
        check(kind.clone(), "x w", "y", "input 2 \"w\" is float32[4, 3]; expected float32[batch, 4]");
        gives(kind, "x labels", "y", "float32[batch, 4]");
    }
    gives(OpKind::SoftmaxWithCrossEntropyGradient, "x label loss", "y", "float32[batch, 4]");
    check(
        OpKind::SoftmaxWithCrossEntropyGradient,
        "x label b",
        "y",
        "input 3 \"b\" is float32[3]; expected float32[batch]",
    );
    check(
        OpKind::SigmoidCrossEntropyGradient,
        "x labels loss",
        "y",
        "input 3 \"loss\" is float32[batch]; expected float32[batch, 4]",
    );
    check(OpKind::MeanGradient { axes: Vec::new() }, "x b", "y", "input 2 \"b\" is float32[3]; expected float32[]");
}

#[test]
fn updates_say_what_does_not_fit() {
    let update = |config: &str| OpKind::Update { config: config.to_owned() };
    let momentum = || update("sgd { momentum: 0.9 }");
    gives(momentum(), "w v count momentum", "w count momentum", "float32[4, 3]");
    gives(update("const_lr {}"), "table rows count", "table count", "float32[9, 4]");
    gives(update("const_lr {}"), "w half count", "w count", "float32[4, 3]");
    check(
        momentum(),
        "w v count",
        "w count",
        "found 3 inputs; expected 4 to 5: parameter, gradient, count, the states [\"momentum\"] of momentum, and \
         maybe a learning rate",
    );
    check(
        update("const_lr {}"),
        "w b count",
        "w count",
        "input 2 \"b\" is float32[3]; expected a gradient for float32[4, 3]",
    );
    check(
        update("const_lr {}"),
        "w rows count",
        "w count",
        "input 2 \"rows\" is rows(float32, 9, 4); expected a gradient for float32[4, 3]",
    );
    check(update("const_lr {}"), "w v b", "w b", "input 3 \"b\" is float32[3]; expected int64[]");
    check(momentum(), "w v count b", "w count b", "input 4 \"b\" is float32[3]; expected float32[4, 3]");
    check(update("const_lr {}"), "w v count", "v count", "output 1 is \"v\"; expected \"w\", which is read");
    check(
        update("clip_norm: 1"),
        "table rows count",
        "table count",
        "input 2 \"rows\" is rows(float32, 9, 4); expected a dense gradient, because clip_norm, sum or norm needs the \
         whole one",
    );
    check(
        update("mode: Async"),
        "w v count",
        "w count",
        "found a mode or a merge in the config; expected them as attributes of gradient_accumulator",
    );
    check(
        update("sparse { height: 4 lazy: true }"),
        "w v count",
        "w count",
        "found sparse in the config; expected the gradient's rows to make its parameter one of rows",
    );
    check(
        update("const_lr { learning_rate: 1e39 }"),
        "w v count",
        "w count",
        "input 1 \"w\" is float32[4, 3]; expected the learning rate 1e39 times rate_scale 1e0 is 1e39; expected at \
         most 3.4028234663852886e38 for float32",
    );
    let failure = Graph::new(program(vec![op(update("optimizer: Sdg"), "w v count", "w count")])).unwrap_err();
    assert!(failure.to_string().starts_with("block 0, op 0 update: in its config, line 1, column 12"), "{failure}");
}

#[test]
fn pulls_of_rows_say_what_does_not_fit() {
    let pull = |channel: &str| OpKind::PullRows { channel: channel.to_owned(), to: ProgramPeer::Server(0), first: 0 };
    gives(pull("x"), "count label", "pulled", "rows(float32, 9, 4)");
    check(pull(""), "count label", "pulled", "found a channel of 0 bytes; expected 1 to 1024");
    check(pull("x"), "count", "pulled", "found 1 inputs; expected at least 2");
    check(pull("x"), "label label", "pulled", "input 1 \"label\" is int64[batch]; expected int64[]");
    check(pull("x"), "count label x", "pulled", "input 3 \"x\" is float32[batch, 4]; expected int64");
    check(pull("x"), "count label", "later", "output \"later\" is float32[4, 3]; expected rows of float32 or float64");
    check(pull("x"), "count label", "pulled later", "found 2 outputs; expected 1");
    gives(OpKind::LookupTable { padding: None }, "rows label", "y", "float32[batch, 4]");
    // No sum with rows makes ids of them.
    let expected = "input 2 \"rows\" is rows(float32, 9, 4); expected a dense tensor of int64";
    check(OpKind::LookupTable { padding: None }, "table rows", "y", expected);
    let steps = WindowSteps { stride: [1, 1], padding: [0, 0] };
    let expected =
        "input 1 \"rows\" is rows(float32, 9, 4); expected four dimensions, of which the last three are fixed";
    check(OpKind::Conv2d { steps }, "rows w", "y", expected);
    let padding = OpKind::LookupTable { padding: Some(9) };
    check(padding, "rows label", "y", "found padding 9; expected the number of a row, below 9");
    gives(OpKind::Concat { axis: 0 }, "rows rows", "y", "rows(float32, 18, 4)");
    let expected =
        "input 1 \"rows\" is rows(float32, 9, 4); expected a dense tensor with a dimension 1, or dimension 0";
    check(OpKind::Concat { axis: 1 }, "rows rows", "y", expected);
    let expected = "input 2 \"table\" is float32[9, 4]; expected rows of 4 elements of float32";
    check(OpKind::Concat { axis: 0 }, "rows table", "y", expected);
}

#[test]
fn flow_says_what_does_not_fit() {
    let send = |channel: &str, to| OpKind::Send { channel: channel.to_owned(), to };
    let peer = Destination::Peer(ProgramPeer::Server(0));
    check(send("", peer), "x", "", "found a channel of 0 bytes; expected 1 to 1024");
    check(send("x", peer), "x sender", "", "found 2 inputs; expected 1");
    check(send("x", Destination::Senders), "x w", "", "input 2 \"w\" is float32[4, 3]; expected strings");
    let recv = || OpKind::Recv { channel: "x".to_owned() };
    gives(recv(), "", "later from", "float32[4, 3]");
    check(
        recv(),
        "",
        "y",
        "found no declaration of output \"y\"; expected one, because its facts do not follow from inputs",
    );
    check(recv(), "", "", "found 0 outputs; expected 1 to 2");
    check(OpKind::Enqueue, "w w", "", "input 1 \"w\" is float32[4, 3]; expected a queue");
    check(OpKind::Enqueue, "queue b", "", "input 2 \"b\" is float32[3]; expected float32[4, 3]");
    let dequeue = |min_count| OpKind::Dequeue { min_count };
    gives(dequeue(2), "queue", "y z", "float32[4, 3]");
    check(dequeue(3), "queue", "y z a", "found min_count 3; expected 1 to 2, the queue's capacity");
    check(dequeue(2), "queue", "y", "found 1 outputs; expected 2");
    check(dequeue(1), "w", "y", "input 1 \"w\" is float32[4, 3]; expected a queue");
    let of = |count, merge| OpKind::GradientAccumulator { count, merge, staleness: None, late: LateGradients::Drop };
    let gradients = |count| of(count, Merge::Mean);
    gives(gradients(2), "rows sender", "y", "rows(float32, 9, 4)");
    check(gradients(0), "w", "y", "found count 0; expected 1 to 1048576");
    let mean =
        "input 1 \"whole\" is int64[4, 3]; expected floats, which have a mean; integers are added, with merge=sum";
    check(gradients(2), "whole", "y", mean);
    gives(gradients(1), "whole", "y", "int64[4, 3]");
    gives(of(2, Merge::Sum), "whole sender", "y", "int64[4, 3]");
    check(
        gradients(2),
        "sender",
        "y",
        "input 1 \"sender\" is strings; expected dense or rows, of a type that parameters have",
    );
    check(OpKind::StringAccumulator { count: 2 }, "w", "y", "input 1 \"w\" is float32[4, 3]; expected strings");
    check(OpKind::Relu, "queue", "y", "found queue \"queue\"; expected only enqueue and dequeue to touch it");
}

#[test]
fn writes_that_the_purpose_of_a_variable_forbids_are_refused() {
    check(
        OpKind::Relu,
        "x",
        "labels",
        "found data \"labels\" as an output; expected another variable, because data is only fed",
    );
    check(
        OpKind::Relu,
        "later",
        "y",
        "found no value in temporary \"later\"; expected an op before this one that writes it",
    );
    check(
        OpKind::Relu,
        "nobody",
        "y",
        "found no variable \"nobody\"; expected a declared one, or one that an op before writes",
    );
    check(
        OpKind::Relu,
        "w",
        "made",
        "output \"made\" is declared float32[batch, 3]; expected float32[4, 3], which the op gives",
    );
    check(OpKind::Split { axis: 0, lengths: vec![2, 2] }, "w", "y y", "found output \"y\" twice; expected each once");
    let twice = Graph::new(program(vec![op(OpKind::Relu, "x", "y"), op(OpKind::Tanh, "x", "y")])).unwrap_err();
    assert_eq!(twice.to_string(), "block 0, op 1 tanh: found a second op that writes temporary \"y\"; expected one");
}

/// A declaration alone, which is refused with this reason.
fn declares(facts: VariableFacts, purpose: Purpose, expected: &str) {
    let variables = vec![Variable { name: "v".to_owned(), facts, purpose }];
    let program = Program { blocks: vec![Block { parent: None, variables, ops: Vec::new() }] };
    assert_eq!(Graph::new(program).unwrap_err().to_string(), format!("block 0, variable \"v\": {expected}"));
}

#[test]
fn invalid_declarations_are_named() {
    let dense = |shape: &[u64]| VariableFacts::fixed(Float32, shape);
    declares(dense(&[2, 0]), Purpose::Data, "is float32[2, 0]; found a dimension of 0; expected 1 or more");
    declares(
        dense(&[1 << 40, 1 << 40]),
        Purpose::Data,
        "is float32[1099511627776, 1099511627776]; found a shape of more than 281474976710656 bytes; expected at \
        most as many",
    );
    declares(
        VariableFacts::dense(Float32, [Dim::Batch]),
        Purpose::Parameter,
        "parameter is float32[batch]; expected a parameter to be dense, of fixed dimensions",
    );
    declares(
        VariableFacts::fixed(ElementType::Float16, &[2]),
        Purpose::Parameter,
        "parameter is float16[2]; expected a type that parameters have",
    );
    let queue = |of, capacity| VariableFacts::Queue { of: Box::new(of), capacity };
    declares(
        queue(dense(&[2]), 0),
        Purpose::State,
        "is queue(float32[2], 0); found a capacity of 0; expected 1 to 1048576",
    );
    declares(queue(dense(&[2]), 1), Purpose::Data, "data is queue(float32[2], 1); expected a queue to be a state");
    declares(
        queue(queue(dense(&[2]), 1), 1),
        Purpose::State,
        "is queue(queue(float32[2], 1), 1); found a queue of queues; expected dense, rows or strings in it",
    );
    let rows = VariableFacts::SelectedRows { element_type: Float32, height: 0, width: 2 };
    declares(rows, Purpose::Data, "is rows(float32, 0, 2); found a height of 0; expected 1 or more");
}

/// Blocks with these parents, each running the blocks listed.
fn blocks(list: &[(Option<u32>, &[u32])]) -> Result<Graph, String> {
    let blocks = list.iter().map(|(parent, runs)| {
        let ops = runs.iter().map(|block| op(OpKind::LoopForever { block: *block }, "", "")).collect();
        Block { parent: *parent, variables: Vec::new(), ops }
    });
    Graph::new(Program { blocks: blocks.collect() }).map_err(|failure| failure.to_string())
}

/// A block's parent, and the blocks that it runs.
type Tree<'a> = &'a [(Option<u32>, &'a [u32])];

#[test]
fn blocks_form_a_tree() {
    assert_eq!(blocks(&[(None, &[1, 2]), (Some(0), &[]), (Some(0), &[3]), (Some(2), &[])]).unwrap().scopes().len(), 4);
    let table: [(Tree<'_>, &str); 8] = [
        (&[], "the program has 0 blocks; expected 1 to 64"),
        (&[(Some(0), &[])], "block 0: found parent 0; expected none, because the program begins here"),
        (&[(None, &[1]), (None, &[])], "block 1: found parent none; expected a block before it, 0 to 0"),
        (&[(None, &[1]), (Some(1), &[])], "block 1: found parent 1; expected a block before it, 0 to 0"),
        (&[(None, &[]), (Some(0), &[])], "block 1: found no op that runs it; expected one in its parent"),
        (&[(None, &[1, 1]), (Some(0), &[])], "block 0, op 1 loop_forever: found block 1 run by two ops; expected one"),
        (&[(None, &[2])], "block 0, op 0 loop_forever: found block 2; expected one below 1"),
        (
            &[(None, &[0])],
            "block 0, op 0 loop_forever: found block 0, whose parent is none; expected a block with parent 0",
        ),
    ];
    for (list, expected) in table {
        assert_eq!(blocks(list).unwrap_err(), expected);
    }
}

#[test]
fn a_block_sees_its_own_variables_and_those_around_it() {
    let inner = |ops| Block { parent: Some(0), variables: Vec::new(), ops };
    let outer = |mut ops: Vec<Op>| {
        ops.push(op(OpKind::LoopForever { block: 1 }, "", ""));
        ops.push(op(OpKind::Relu, "y", "z"));
        Block { parent: None, variables: variables(), ops }
    };
    let make = || op(OpKind::Relu, "x", "y");
    let seen = vec![outer(vec![make()]), inner(vec![op(OpKind::Relu, "y", "inner"), op(OpKind::Relu, "w", "v")])];
    Graph::new(Program { blocks: seen }).unwrap();
    let unseen = Program { blocks: vec![outer(Vec::new()), inner(vec![make()])] };
    assert_eq!(
        Graph::new(unseen).unwrap_err().to_string(),
        "block 0, op 1 relu: found \"y\" of block 1; expected a variable of this block or one around it"
    );
    let written = Program { blocks: vec![outer(vec![make()]), inner(vec![op(OpKind::Relu, "w", "later")])] };
    assert_eq!(
        Graph::new(written).unwrap_err().to_string(),
        "block 1, op 0 relu: found temporary \"later\" of block 0 written in block 1; expected it in 0"
    );
}
