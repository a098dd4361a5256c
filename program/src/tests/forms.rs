//! The text form and the binary form represent every program, and no input makes them panic.

use proptest::collection::vec;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_assert_eq, prop_oneof, proptest};

use crate::attributes::{self, KINDS};
use crate::{
    Block, Destination, Dim, Graph, Op, OpKind, OpRole, Program, ProgramPeer, Purpose, Variable, VariableFacts,
    WindowSteps,
};
use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;
use pserver_core::limits::{PROGRAM_BLOCKS_MAX, PROGRAM_OPS_MAX, PROGRAM_VARIABLES_MAX};

fn names() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z_][a-zA-Z0-9_./@-]{0,8}", any::<String>(), Just("batch".to_owned()), Just("block".to_owned())]
}

fn reals() -> impl Strategy<Value = f64> {
    prop_oneof![any::<f64>(), Just(f64::INFINITY), Just(-0.0), Just(5e-324)]
        .prop_filter("equal to itself", |x| !x.is_nan())
}

fn types() -> impl Strategy<Value = ElementType> {
    (0..ElementType::ALL.len()).prop_map(|place| ElementType::ALL[place])
}

fn items() -> impl Strategy<Value = VariableFacts> {
    let dims = vec(prop_oneof![any::<u64>().prop_map(Dim::Fixed), Just(Dim::Batch)], 0..4);
    prop_oneof![
        (types(), dims).prop_map(|(element_type, shape)| VariableFacts::Dense { element_type, shape }),
        (types(), any::<u64>(), any::<u64>()).prop_map(|(element_type, height, width)| VariableFacts::SelectedRows {
            element_type,
            height,
            width
        }),
        Just(VariableFacts::Strings),
    ]
}

fn facts() -> impl Strategy<Value = VariableFacts> {
    let queue = (items(), any::<u64>()).prop_map(|(of, capacity)| VariableFacts::Queue { of: Box::new(of), capacity });
    prop_oneof![3 => items(), 1 => queue]
}

fn kinds() -> impl Strategy<Value = OpKind> {
    let numbers = (any::<u32>(), any::<u64>(), any::<u64>(), vec(any::<u64>(), 0..4), types());
    (0..KINDS.len(), reals(), reals(), names(), any::<(bool, bool)>(), numbers).prop_map(made)
}

type Parts = (usize, f64, f64, String, (bool, bool), (u32, u64, u64, Vec<u64>, ElementType));

/// A kind by its index in the list, with arbitrary attributes.
fn made((place, real, other, text, (yes, also), (small, whole, first, lengths, to)): Parts) -> OpKind {
    let few = |lengths: &[u64]| lengths.iter().map(|length| (length >> 32) as u32).collect::<Vec<_>>();
    let peer = if also { ProgramPeer::Trainer(small) } else { ProgramPeer::Server(small) };
    let size = [small, u32::try_from(whole % 5).unwrap()];
    // Usual steps, which are not written, are among them.
    let steps = WindowSteps { stride: [small % 2 + 1, 1], padding: if yes { [0, 0] } else { [small, 3] } };
    match KINDS[place] {
        "matmul" => OpKind::Matmul { transpose_left: yes, transpose_right: also },
        "pow_gradient" => OpKind::PowGradient { exponent: yes },
        "scale" => OpKind::Scale { factor: real },
        "reduce_sum" => OpKind::ReduceSum { axes: few(&lengths), keep: yes },
        "mean" => OpKind::Mean { axes: few(&lengths), keep: yes },
        "mean_gradient" => OpKind::MeanGradient { axes: few(&lengths) },
        "reshape" => OpKind::Reshape { shape: lengths },
        "transpose" => OpKind::Transpose { axes: few(&lengths) },
        "concat" => OpKind::Concat { axis: small },
        "split" => OpKind::Split { axis: small, lengths },
        "cast" => OpKind::Cast { to },
        "fill" => OpKind::Fill { value: real },
        "uniform" => OpKind::Uniform { low: real, high: other, seed: whole, first },
        "gaussian" => OpKind::Gaussian { mean: real, deviation: other, seed: whole, first },
        "given" => OpKind::Given { name: text, first },
        "repeat" => OpKind::Repeat { axes: few(&lengths) },
        "lookup_table" => OpKind::LookupTable { padding: yes.then_some(whole) },
        "lookup_table_gradient" => OpKind::LookupTableGradient { height: whole, padding: yes.then_some(first) },
        "slice" => OpKind::Slice { axis: small, start: first, end: whole },
        "slice_gradient" => OpKind::SliceGradient { axis: small, start: first, end: whole },
        "dropout" => OpKind::Dropout { rate: real, seed: whole },
        "gelu" => OpKind::Gelu { approximate: yes },
        "gelu_gradient" => OpKind::GeluGradient { approximate: yes },
        "layer_norm" => OpKind::LayerNorm { epsilon: real },
        "layer_norm_gradient" => OpKind::LayerNormGradient { epsilon: real },
        "batch_norm" => OpKind::BatchNorm { epsilon: real },
        "batch_norm_gradient" => OpKind::BatchNormGradient { epsilon: real },
        "conv2d" => OpKind::Conv2d { steps },
        "max_pool2d" => OpKind::MaxPool2d { size, steps },
        "avg_pool2d" => OpKind::AvgPool2d { size, steps },
        "conv2d_input_gradient" => OpKind::Conv2dInputGradient { steps },
        "conv2d_filter_gradient" => OpKind::Conv2dFilterGradient { steps },
        "max_pool2d_gradient" => OpKind::MaxPool2dGradient { size, steps },
        "avg_pool2d_gradient" => OpKind::AvgPool2dGradient { size, steps },
        "update" => OpKind::Update { config: text },
        "send" => OpKind::Send { channel: text, to: if yes { Destination::Senders } else { Destination::Peer(peer) } },
        "recv" => OpKind::Recv { channel: text },
        "pull_rows" => OpKind::PullRows { channel: text, to: peer, first: if yes { 0 } else { first } },
        "dequeue" => OpKind::Dequeue { min_count: small },
        "gradient_accumulator" => {
            let merge = if yes { Merge::Mean } else { Merge::Sum };
            let late = if also { LateGradients::Drop } else { LateGradients::NextRound };
            OpKind::GradientAccumulator { count: small, merge, staleness: also.then_some(small), late }
        }
        "string_accumulator" => OpKind::StringAccumulator { count: small },
        "loop_forever" => OpKind::LoopForever { block: small },
        plain => attributes::kind(plain, Vec::new()).unwrap(),
    }
}

fn programs() -> impl Strategy<Value = Program> {
    let variable = (names(), facts(), 0..Purpose::ALL.len()).prop_map(|(name, facts, purpose)| Variable {
        name,
        facts,
        purpose: Purpose::ALL[purpose],
    });
    let op = (kinds(), vec(names(), 0..4), vec(names(), 0..3), 0..OpRole::ALL.len())
        .prop_map(|(kind, inputs, outputs, role)| Op { kind, inputs, outputs, role: OpRole::ALL[role] });
    let block = (any::<Option<u32>>(), vec(variable, 0..4), vec(op, 0..6)).prop_map(|(parent, variables, ops)| Block {
        parent,
        variables,
        ops,
    });
    vec(block, 0..4).prop_map(|blocks| Program { blocks })
}

/// Words of the language in any order: closer to a program than characters are.
fn almost_programs() -> impl Strategy<Value = String> {
    let words = "block 0 1 in { } data parameter state temporary forward backward optimize communication \
                 initialise x w \"a b\" : = , ( ) [ ] float32 int64 rows queue strings batch 2 64 -1.5 1e3 inf NaN \
                 true senders server trainer matmul add fill value axis update config \"sgd {}\" loop_forever recv \
                 channel dequeue # \n \\ \" é";
    let words: Vec<&str> = words.split(' ').collect();
    vec(0..words.len(), 0..60)
        .prop_map(move |places| places.iter().map(|place| words[*place]).collect::<Vec<_>>().join(" "))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_program_reads_back_as_it_was_printed(program in programs()) {
        let text = program.to_string();
        prop_assert_eq!(text.parse::<Program>().unwrap_or_else(|failure| panic!("{failure}\n{text}")), program);
    }

    #[test]
    fn every_program_decodes_as_it_was_encoded(program in programs()) {
        prop_assert_eq!(Program::decode(&program.encode()).unwrap(), program);
    }

    #[test]
    fn no_program_makes_the_check_panic(program in programs()) {
        drop(Graph::new(program));
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in any::<String>(), almost in almost_programs()) {
        for text in [text, almost.clone(), format!("block 0 {{ {almost} }}")] {
            if let Ok(program) = text.parse::<Program>() {
                let again = program.to_string().parse::<Program>().map_err(|failure| failure.to_string());
                prop_assert_eq!(again, Ok(program.clone()));
                drop(Graph::new(program));
            }
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(
        bytes in vec(any::<u8>(), 0..200),
        program in programs(),
        spoiled in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut almost = program.encode();
        for (place, byte) in spoiled {
            if !almost.is_empty() {
                let place = place.index(almost.len());
                almost[place] = byte;
            }
        }
        for bytes in [bytes, almost] {
            if let Ok(program) = Program::decode(&bytes) {
                drop(Graph::new(program));
            }
        }
    }
}

#[test]
fn every_kind_is_written_by_its_own_name() {
    for (place, name) in KINDS.iter().copied().enumerate() {
        let kind = made((place, 1.0, 2.0, "t".to_owned(), (true, true), (1, 2, 3, vec![4], ElementType::Int64)));
        assert_eq!(kind.name(), name);
    }
}

fn check(text: &str, expected: &str) {
    assert_eq!(text.parse::<Program>().unwrap_err().to_string(), expected, "{text}");
}

#[test]
fn a_bad_text_is_refused_with_line_and_column() {
    let op = |op: &str| format!("block 0 {{\n    data x: float32[batch, 4]\n    forward {op}\n}}\n");
    check("blocks", "line 1, column 1: found \"blocks\"; expected \"block\" or the end");
    check("block 1 {}", "line 1, column 7: found block 1; expected block 0, in order");
    check("block 0 in -1 {}", "line 1, column 12: found \"-1\"; expected a whole number below 2^32");
    check("block 0 {\n  data x float32[]\n}", "line 2, column 10: found \"float32\"; expected ':'");
    check(
        "block 0 {\n  data x: float31[]\n}",
        "line 2, column 11: found \"float31\"; expected a type, \"rows\", \"queue\" or \"strings\"",
    );
    check(
        "block 0 {\n  data x: float32[bach]\n}",
        "line 2, column 19: found \"bach\"; expected a dimension, a whole number or \"batch\"",
    );
    check("block 0 { data x: float32[2 3] }", "line 1, column 29: found \"3\"; expected ',' or ']'");
    check("block 0 { data \"é", "line 1, column 16: found a text without a closing quote; expected one on its line");
    check(
        "block 0 {",
        "line 1, column 10: found the end; expected one of data, parameter, state, temporary, initialise, forward, \
        backward, optimize, communication or '}'",
    );
    check(&op("y = relu(x"), "line 4, column 1: found '}'; expected ',', '=' or ')'");
    check(&op("y, z relu(x)"), "line 3, column 18: found \"relu\"; expected '=' after an op's outputs");
    check(&op("y = scale(x)"), "line 3, column 17: found no attribute \"factor\"; expected a number");
    check(
        &op("y = scale(x, factor=\"2\")"),
        "line 3, column 26: attribute \"factor\" is the text \"2\"; expected a number",
    );
    check(&op("y = relu(x, slope=2)"), "line 3, column 25: found attribute \"slope\"; expected none of this name");
    check(
        &op("y = scale(x, factor=1, factor=2)"),
        "line 3, column 36: found attribute \"factor\" twice; expected it once",
    );
    check(
        &op("y = concat(x, axis=-1)"),
        "line 3, column 27: attribute \"axis\" is -1.0; expected a whole number below 2^32",
    );
    check(&op("y = cast(x, to=float31)"), "line 3, column 25: attribute \"to\" is float31; expected an element type");
    check(
        &op("y = scale(factor=1, x)"),
        "line 3, column 33: found input \"x\" after an attribute; expected inputs first",
    );
    check(
        &op("send(x, channel=\"c\", to=nobody)"),
        "line 3, column 34: attribute \"to\" is nobody; expected trainer:N, server:N or senders",
    );
    let unknown = op("y = rely(x)").parse::<Program>().unwrap_err().to_string();
    assert!(unknown.starts_with("line 3, column 17: found op \"rely\"; expected one of matmul, add, "), "{unknown}");
}

#[test]
fn the_documentations_example_is_a_program() {
    let page = include_str!("../../../docs/PROGRAMS.md");
    let (_, example) = page.split_once("```text\n").unwrap();
    let text = example.split("```").next().unwrap();
    let graph = Graph::new(text.parse().unwrap_or_else(|failure| panic!("{failure}")));
    assert_eq!(graph.unwrap_or_else(|failure| panic!("{failure}")).program().to_string(), text);
}

#[test]
fn one_dimension_may_be_given_alone() {
    let read = |attributes: &str| {
        let text = format!("block 0 {{ forward y = reduce_sum(x{attributes}) forward z = repeat(y, x{attributes}) }}");
        text.parse::<Program>().map(|program| program.to_string()).map_err(|failure| failure.to_string())
    };
    assert_eq!(read(", axis=1"), read(", axes=[1]"));
    assert!(read(", axis=1").unwrap().contains("reduce_sum(x, axes=[1])"));
    assert!(read(", axes=[1, 0]").unwrap().contains("repeat(y, x, axes=[1, 0])"));
    assert!(read(", axes=[4294967296]").unwrap_err().contains("expected whole numbers below 2^32 in brackets"));
    assert!(read(", axis=1, axes=[0]").unwrap_err().contains("found attribute \"axes\"; expected none of this name"));
}

#[test]
fn a_program_reads_as_it_is_shown() {
    let text = "\
block 0 {
    data x: float32[batch, 4]
    parameter \"a table\": float32[4, 3]
    state items: queue(rows(float32, 9, 4), 2)
    temporary g: float32[4, 3]

    initialise \"a table\" = uniform(low=-0.5, high=0.5, seed=7)
    forward y = matmul(x, \"a table\", transpose_right=true)
    communication send(g, channel=\"g\", to=server:1)
    communication loop_forever(block=1)
}

block 1 in 0 {
    communication g = recv(channel=\"g\")
}
";
    assert_eq!(text.parse::<Program>().unwrap().to_string(), text);
}

/// Items of two bytes each, so that a program of the largest size has millions of them.
#[test]
fn oversized_programs_are_refused_before_memory_is_allocated() {
    fn message(number: u8, inner: &[u8]) -> Vec<u8> {
        let mut bytes = vec![number << 3 | 2];
        prost::encoding::encode_varint(inner.len() as u64, &mut bytes);
        bytes.extend(inner);
        bytes
    }
    let check = |bytes: &[u8], expected: &str| {
        let failure = Program::decode(bytes).expect_err(expected).to_string();
        assert!(failure.contains(expected), "{failure}");
    };
    check(&[1 << 3 | 2, 0].repeat(PROGRAM_BLOCKS_MAX + 1), "more than 64 blocks");
    let variables = message(1, &[2 << 3 | 2, 0].repeat(PROGRAM_VARIABLES_MAX / 2 + 1)).repeat(2);
    check(&variables, "more than 1048576 variables");
    let ops = message(1, &[3 << 3 | 2, 0].repeat(PROGRAM_OPS_MAX / 2 + 1)).repeat(2);
    check(&ops, "more than 1048576 ops");
    let attributes = message(1, &message(3, &[4 << 3 | 2, 0].repeat(17)));
    check(&attributes, "more than 16 attributes of one op");
    // Another field of any kind in between hides nothing.
    let hidden = [[15 << 3, 1, 15 << 3 | 5, 1, 2, 3, 4, 1 << 3 | 2, 0].as_slice(); PROGRAM_BLOCKS_MAX + 1].concat();
    check(&hidden, "more than 64 blocks");
}
