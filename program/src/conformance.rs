//! Conformance suite for every implementation of [`Arithmetic`].
//!
//! - A product and a convolution are within [`PRODUCT_ULPS`] of the reference, in units of the sum of their terms'
//!   magnitudes.
//! - Everything else has the reference's bits.
//! - The same inputs give the same bits again.

use crate::{
    Arithmetic, Block, Dim, Elements, Graph, Node, Op, OpKind, OpRole, PlainArithmetic, Program, Purpose, Tensor,
    Variable, VariableFacts, VariableValue, WindowSteps,
};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::prng::Prng;

/// How far an element of a product may be from the oracle's, for each term of its sum, in units of the type's precision
/// times the sum of the terms' magnitudes.
///
/// The oracle adds from first to last with a rounding for each product and each sum; a kernel adds in another order and
/// may round once for both. Either is off by at most one unit a term, so two units hold for any of them.
pub const PRODUCT_ULPS: f64 = 2.0;

const FLOATS: [ElementType; 2] = [ElementType::Float32, ElementType::Float64];

/// Checks `arithmetic`.
///
/// # Panics
/// With the first violated property, its op and inputs, the found and the expected values.
pub fn check(arithmetic: &mut dyn Arithmetic) {
    for element_type in FLOATS {
        for [rows, inner, columns] in [[1, 1, 1], [1, 7, 1], [2, 3, 4], [8, 64, 10], [33, 65, 17], [64, 128, 96]] {
            for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
                check_product(arithmetic, element_type, [rows, inner, columns], left, right);
            }
        }
        check_convolutions(arithmetic, element_type);
        for case in cases() {
            check_exact(arithmetic, element_type, &case);
        }
    }
}

/// An arithmetic whose products are wrong in their last element, to test the suite itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultyArithmetic {
    plain: PlainArithmetic,
}

impl Arithmetic for FaultyArithmetic {
    fn run(
        &mut self,
        node: &Node,
        inputs: &[&VariableValue],
        outputs: &[&VariableFacts],
    ) -> Result<Vec<VariableValue>, Failure> {
        let mut given = self.plain.run(node, inputs, outputs)?;
        if let (OpKind::Matmul { .. }, Some(VariableValue::Dense(tensor))) = (&node.kind, given.first_mut())
            && let Some(last) = tensor.bytes_mut().last_mut()
        {
            *last ^= 1;
        }
        Ok(given)
    }

    fn name(&self) -> &'static str {
        "faulty"
    }
}

/// An op with the shapes of its inputs.
struct OpCase {
    kind: OpKind,
    inputs: &'static [&'static [u64]],
    /// The input that is ids below 5.
    ids: Option<usize>,
    outputs: usize,
}

fn cases() -> Vec<OpCase> {
    let plain = |kind, inputs| OpCase { kind, inputs, ids: None, outputs: 1 };
    let ids = |kind, inputs, place, outputs| OpCase { kind, inputs, ids: Some(place), outputs };
    let mut cases = vec![
        plain(OpKind::Scale { factor: 0.3 }, &[&[3, 7]]),
        plain(OpKind::Sum, &[&[3, 7], &[3, 7], &[3, 7]]),
        plain(OpKind::ReduceSum { axes: vec![1], keep: false }, &[&[3, 7, 2]]),
        plain(OpKind::ReduceSum { axes: vec![2, 0], keep: true }, &[&[3, 7, 2]]),
        plain(OpKind::Mean { axes: vec![1, 0], keep: false }, &[&[3, 7, 2]]),
        plain(OpKind::Reshape { shape: vec![2, 0] }, &[&[3, 4, 5]]),
        plain(OpKind::Transpose { axes: vec![2, 0, 1] }, &[&[3, 4, 5]]),
        plain(OpKind::Softmax, &[&[3, 4, 5]]),
        plain(OpKind::LogSoftmax, &[&[3, 4, 5]]),
        plain(OpKind::Relu, &[&[65]]),
        plain(OpKind::Sigmoid, &[&[65]]),
        plain(OpKind::Tanh, &[&[65]]),
        plain(OpKind::Mean { axes: Vec::new(), keep: false }, &[&[13, 5]]),
        plain(OpKind::SigmoidCrossEntropy, &[&[9], &[9]]),
        plain(OpKind::Concat { axis: 1 }, &[&[3, 2], &[3, 5]]),
        plain(OpKind::Cast { to: ElementType::Bfloat16 }, &[&[65]]),
        plain(OpKind::Cast { to: ElementType::Int32 }, &[&[65]]),
        plain(OpKind::Repeat { axes: vec![0] }, &[&[7], &[3, 7]]),
        plain(OpKind::ReluGradient, &[&[65], &[65]]),
        plain(OpKind::SigmoidGradient, &[&[65], &[65]]),
        plain(OpKind::TanhGradient, &[&[65], &[65]]),
        plain(OpKind::SigmoidCrossEntropyGradient, &[&[9], &[9], &[9]]),
        plain(OpKind::Repeat { axes: vec![0, 2] }, &[&[1, 7, 1], &[3, 7, 2]]),
        plain(OpKind::MeanGradient { axes: Vec::new() }, &[&[3, 7], &[]]),
        plain(OpKind::MeanGradient { axes: vec![1] }, &[&[3, 7], &[3]]),
        OpCase { outputs: 2, ..plain(OpKind::Split { axis: 1, lengths: vec![3, 4] }, &[&[5, 7]]) },
        ids(OpKind::SoftmaxWithCrossEntropy, &[&[9, 5], &[9]], 1, 2),
        ids(OpKind::Accuracy, &[&[9, 5], &[9]], 1, 1),
        ids(OpKind::SoftmaxWithCrossEntropyGradient, &[&[9, 5], &[9], &[9]], 1, 1),
        ids(OpKind::LookupTable { padding: None }, &[&[5, 3], &[4, 2]], 1, 1),
        ids(OpKind::LookupTableGradient { height: 5, padding: None }, &[&[4, 2], &[4, 2, 3]], 0, 1),
    ];
    cases.extend(network_cases());
    cases.extend(element_wise());
    cases
}

/// Functions of one operand, and of two that are broadcast.
fn element_wise() -> Vec<OpCase> {
    let plain = |kind, inputs| OpCase { kind, inputs, ids: None, outputs: 1 };
    let mut cases = Vec::new();
    let functions = [OpKind::Sqrt, OpKind::Exp, OpKind::Log, OpKind::Abs, OpKind::Sign];
    cases.extend(functions.map(|kind| plain(kind, &[&[65]])));
    let repeating: [&[&[u64]]; 6] = [
        &[&[4, 7], &[4, 7]],
        &[&[4, 7], &[7]],
        &[&[4, 7], &[1, 7]],
        &[&[4, 7], &[4, 1]],
        &[&[4, 7], &[]],
        &[&[2, 3, 4], &[3, 4]],
    ];
    cases.extend(repeating.map(|inputs| plain(OpKind::SumTo, inputs)));
    let broadcast: [&[&[u64]]; 5] =
        [&[&[7], &[4, 7]], &[&[], &[4, 7]], &[&[4, 1], &[1, 7]], &[&[2, 1, 4], &[3, 1]], &[&[1], &[1, 1]]];
    for inputs in repeating.into_iter().chain(broadcast) {
        let kinds = [
            OpKind::Add,
            OpKind::Mul,
            OpKind::Sub,
            OpKind::Div,
            OpKind::Max,
            OpKind::Min,
            OpKind::Pow,
            OpKind::Greater,
        ];
        cases.extend(kinds.map(|kind| plain(kind, inputs)));
    }
    for exponent in [false, true] {
        cases.push(plain(OpKind::PowGradient { exponent }, &[&[4, 1], &[7], &[4, 7]]));
    }
    cases
}

/// Layers of networks, and their gradients.
fn network_cases() -> Vec<OpCase> {
    let plain = |kind, inputs| OpCase { kind, inputs, ids: None, outputs: 1 };
    let ids = |kind, inputs, place, outputs| OpCase { kind, inputs, ids: Some(place), outputs };
    let steps = WindowSteps { stride: [2, 1], padding: [1, 0] };
    vec![
        ids(OpKind::LookupTable { padding: Some(2) }, &[&[5, 3], &[4, 2]], 1, 1),
        ids(OpKind::LookupTableGradient { height: 5, padding: Some(2) }, &[&[4, 2], &[4, 2, 3]], 0, 1),
        plain(OpKind::Slice { axis: 1, start: 2, end: 5 }, &[&[3, 7, 2]]),
        plain(OpKind::SliceGradient { axis: 1, start: 2, end: 5 }, &[&[3, 7, 2], &[3, 3, 2]]),
        ids(OpKind::Gather, &[&[5, 3, 2], &[4]], 1, 1),
        ids(OpKind::GatherGradient, &[&[5, 3, 2], &[4], &[4, 3, 2]], 1, 1),
        ids(OpKind::Dropout { rate: 0.3, seed: 7 }, &[&[9, 5], &[]], 1, 1),
        plain(OpKind::Gelu { approximate: false }, &[&[65]]),
        plain(OpKind::Gelu { approximate: true }, &[&[65]]),
        plain(OpKind::GeluGradient { approximate: false }, &[&[65], &[65]]),
        plain(OpKind::GeluGradient { approximate: true }, &[&[65], &[65]]),
        plain(OpKind::LayerNorm { epsilon: 1e-5 }, &[&[2, 3, 7], &[7], &[7]]),
        OpCase { outputs: 2, ..plain(OpKind::LayerNormGradient { epsilon: 1e-5 }, &[&[2, 3, 7], &[7], &[2, 3, 7]]) },
        ids(OpKind::BatchNorm { epsilon: 1e-5 }, &[&[4, 3, 5], &[3], &[3], &[3], &[3], &[]], 5, 3),
        // With this epsilon no root is of a number below zero.
        ids(OpKind::BatchNormGradient { epsilon: 5.0 }, &[&[4, 3, 5], &[3], &[3], &[3], &[], &[4, 3, 5]], 4, 2),
        plain(OpKind::MaxPool2d { size: [2, 3], steps }, &[&[2, 3, 5, 4]]),
        plain(OpKind::AvgPool2d { size: [2, 3], steps }, &[&[2, 3, 5, 4]]),
        plain(OpKind::MaxPool2dGradient { size: [2, 3], steps }, &[&[2, 3, 5, 4], &[2, 3, 3, 2]]),
        plain(OpKind::AvgPool2dGradient { size: [2, 3], steps }, &[&[2, 3, 5, 4], &[2, 3, 3, 2]]),
    ]
}

fn check_exact(arithmetic: &mut dyn Arithmetic, element_type: ElementType, case: &OpCase) {
    let mut prng = Prng(1);
    let inputs = case.inputs.iter().enumerate().map(|(place, shape)| match case.ids {
        Some(ids) if ids == place => ids_tensor(shape, &mut prng),
        _ => tensor(element_type, shape, &mut prng),
    });
    let inputs = inputs.collect::<Vec<_>>();
    let found = run(arithmetic, &case.kind, &inputs, case.outputs);
    let expected = run(&mut PlainArithmetic, &case.kind, &inputs, case.outputs);
    // As texts NaN equals NaN, and the zeros differ.
    let [found, expected] = [found, expected].map(|values| format!("{values:?}"));
    assert_eq!(found, expected, "{} of {:?}, {element_type}", case.kind.name(), case.inputs);
}

fn check_product(
    arithmetic: &mut dyn Arithmetic,
    element_type: ElementType,
    [rows, inner, columns]: [u64; 3],
    transpose_left: bool,
    transpose_right: bool,
) {
    let mut prng = Prng(rows * 1000 + columns);
    let left = if transpose_left { [inner, rows] } else { [rows, inner] };
    let right = if transpose_right { [columns, inner] } else { [inner, columns] };
    let inputs = [tensor(element_type, &left, &mut prng), tensor(element_type, &right, &mut prng)];
    check_near(arithmetic, &OpKind::Matmul { transpose_left, transpose_right }, &inputs, inner);
}

/// Convolutions and their gradients, which are sums of products as well.
fn check_convolutions(arithmetic: &mut dyn Arithmetic, element_type: ElementType) {
    /// The lengths of input and filter, stride and padding.
    type Convolution = ([u64; 4], [u64; 4], [u32; 2], [u32; 2]);
    let table: [Convolution; 6] = [
        ([1, 1, 1, 1], [1, 1, 1, 1], [1, 1], [0, 0]),
        ([2, 3, 5, 7], [4, 3, 3, 2], [1, 1], [0, 0]),
        ([2, 3, 5, 7], [4, 3, 3, 2], [2, 3], [1, 2]),
        ([3, 2, 4, 4], [1, 2, 4, 4], [5, 1], [0, 3]),
        ([1, 2, 3, 3], [2, 2, 1, 1], [1, 2], [4, 4]),
        // More columns than are made at once.
        ([1, 8, 64, 48], [3, 8, 5, 5], [1, 1], [2, 2]),
    ];
    for (x, filter, stride, padding) in table {
        let steps = WindowSteps { stride, padding };
        let mut prng = Prng(x.iter().sum());
        let (x, filter) = (tensor(element_type, &x, &mut prng), tensor(element_type, &filter, &mut prng));
        let y = run(&mut PlainArithmetic, &OpKind::Conv2d { steps }, &[x.clone(), filter.clone()], 1);
        let slope = tensor(element_type, y[0].tensor().shape(), &mut prng);
        let [_, channels, height, width] = filter.shape()[..] else { panic!("a filter of four dimensions") };
        let [images, kernels, rows, columns] = slope.shape()[..] else { panic!("images of four dimensions") };
        let inputs = [x.clone(), filter.clone()];
        check_near(arithmetic, &OpKind::Conv2d { steps }, &inputs, channels * height * width);
        let inputs = [filter.clone(), slope.clone(), x.clone()];
        check_near(arithmetic, &OpKind::Conv2dInputGradient { steps }, &inputs, kernels * height * width);
        let inputs = [x, slope, filter];
        check_near(arithmetic, &OpKind::Conv2dFilterGradient { steps }, &inputs, images * rows * columns);
    }
}

/// An op whose elements are sums of at most `terms` products.
fn check_near(arithmetic: &mut dyn Arithmetic, kind: &OpKind, inputs: &[Tensor], terms: u64) {
    let shapes: Vec<&[u64]> = inputs.iter().map(Tensor::shape).collect();
    let element_type = inputs[0].elements().element_type();
    let found = run(arithmetic, kind, inputs, 1);
    assert_eq!(found, run(arithmetic, kind, inputs, 1), "{kind:?} gives other bits the second time");
    let expected = run(&mut PlainArithmetic, kind, inputs, 1);
    let magnitudes: Vec<Tensor> = inputs.iter().map(magnitude).collect();
    let magnitudes = run(&mut PlainArithmetic, kind, &magnitudes, 1);
    let unit = if element_type == ElementType::Float32 { f64::from(f32::EPSILON) } else { f64::EPSILON };
    let [found, expected, magnitudes] = [found, expected, magnitudes].map(|values| values[0].tensor().clone());
    assert_eq!(found.shape(), expected.shape(), "{kind:?} of {shapes:?}");
    let [found, expected, magnitudes] = [found, expected, magnitudes].map(|tensor| floats(&tensor));
    for (place, ((found, expected), magnitude)) in found.iter().zip(&expected).zip(&magnitudes).enumerate() {
        let allowed = PRODUCT_ULPS * unit * terms as f64 * magnitude;
        assert!(
            (found - expected).abs() <= allowed,
            "{} {kind:?} of {shapes:?}, {element_type}: element {place} is {found}, expected {expected}",
            kind.name()
        );
    }
}

/// Runs one op, checked as a program of its own.
fn run(arithmetic: &mut dyn Arithmetic, kind: &OpKind, inputs: &[Tensor], outputs: usize) -> Vec<VariableValue> {
    let names = |prefix: &str, count: usize| (0..count).map(|place| format!("{prefix}{place}")).collect::<Vec<_>>();
    let (reads, writes) = (names("x", inputs.len()), names("y", outputs));
    let variables = reads.iter().zip(inputs).map(|(name, tensor)| {
        let shape: Vec<Dim> = tensor.shape().iter().copied().map(Dim::Fixed).collect();
        let facts = VariableFacts::dense(tensor.elements().element_type(), shape);
        Variable { name: name.clone(), facts, purpose: Purpose::Data }
    });
    let variables = variables.collect();
    let op = Op { kind: kind.clone(), inputs: reads, outputs: writes, role: OpRole::Forward };
    let program = Program { blocks: vec![Block { parent: None, variables, ops: vec![op] }] };
    let graph = Graph::new(program).unwrap_or_else(|failure| panic!("{failure}"));
    let node = &graph.scopes()[0].nodes[0];
    let values: Vec<VariableValue> = inputs.iter().cloned().map(VariableValue::from).collect();
    let facts: Vec<&VariableFacts> = node.outputs.iter().map(|index| &graph.variable(*index).facts).collect();
    arithmetic.run(node, &values.iter().collect::<Vec<_>>(), &facts).unwrap_or_else(|failure| panic!("{failure}"))
}

/// In [-4, 4), so that sums cancel and sigmoids saturate a little.
fn tensor(element_type: ElementType, shape: &[u64], prng: &mut Prng) -> Tensor {
    let values = (0..shape.iter().product()).map(|_| (prng.next() >> 12) as f64 * 2.0_f64.powi(-49) - 4.0);
    let elements = match element_type {
        ElementType::Float32 => Elements::Float32(values.map(narrow).collect()),
        _ => Elements::Float64(values.collect()),
    };
    Tensor::new(shape, elements)
}

fn ids_tensor(shape: &[u64], prng: &mut Prng) -> Tensor {
    let ids = (0..shape.iter().product()).map(|_| i64::try_from(prng.below(5)).expect("below 5"));
    Tensor::new(shape, Elements::Int64(ids.collect()))
}

fn magnitude(tensor: &Tensor) -> Tensor {
    let elements = match tensor.elements() {
        Elements::Float32(values) => Elements::Float32(values.iter().map(|value| value.abs()).collect()),
        Elements::Float64(values) => Elements::Float64(values.iter().map(|value| value.abs()).collect()),
        other => panic!("a product of {}", other.element_type()),
    };
    Tensor::new(tensor.shape(), elements)
}

fn floats(tensor: &Tensor) -> Vec<f64> {
    match tensor.elements() {
        Elements::Float32(values) => values.iter().map(|value| f64::from(*value)).collect(),
        Elements::Float64(values) => values.clone(),
        other => panic!("a product of {}", other.element_type()),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
fn narrow(value: f64) -> f32 {
    value as f32
}
