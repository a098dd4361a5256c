//! Layers of networks: values that were computed by hand, and refusals.

use std::slice::from_ref;

use crate::{
    Block, Builder, Dim, Elements, Graph, Op, OpKind, OpRole, PlainArithmetic, PlainRun, Program, Purpose, Tensor,
};
use crate::{Variable, VariableFacts, VariableValue, WindowSteps};
use pserver_core::dtype::ElementType::{Float32, Float64, Int64};
use pserver_core::error::Failure;
use pserver_core::port::Plain;

fn reals(shape: &[u64], values: &[f64]) -> Tensor {
    Tensor::new(shape, Elements::Float64(values.to_vec()))
}

/// One op of these inputs in the plain form: its only output.
fn plain(kind: OpKind, inputs: &[Tensor]) -> Result<VariableValue, Failure> {
    Ok(plain_outputs(kind, inputs, 1)?.remove(0))
}

/// One op of these inputs in the plain form: its outputs.
fn plain_outputs(kind: OpKind, inputs: &[Tensor], outputs: usize) -> Result<Vec<VariableValue>, Failure> {
    let names: Vec<String> = (0..inputs.len()).map(|place| format!("x{place}")).collect();
    let variables = names.iter().zip(inputs).map(|(name, input)| {
        let facts = VariableFacts::fixed(input.elements().element_type(), input.shape());
        Variable { name: name.clone(), facts, purpose: Purpose::Data }
    });
    let variables = variables.collect();
    let outputs: Vec<String> = (0..outputs).map(|place| format!("y{place}")).collect();
    let op = Op { kind, inputs: names.clone(), outputs: outputs.clone(), role: OpRole::Forward };
    let graph = Graph::new(Program { blocks: vec![Block { parent: None, variables, ops: vec![op] }] })?;
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels)?;
    names.iter().zip(inputs).try_for_each(|(name, input)| run.set(name, input.clone()))?;
    run.step()?;
    Ok(outputs.iter().map(|name| run.value(name).unwrap().clone()).collect())
}

fn gives(kind: OpKind, inputs: &[Tensor], shape: &[u64], expected: &[f64]) {
    let name = kind.name();
    let found = plain(kind, inputs).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(found, reals(shape, expected).into(), "{name}");
}

fn refuses(kind: OpKind, inputs: &[Tensor], expected: &str) {
    let name = kind.name();
    let failure = plain(kind, inputs).unwrap_err().to_string();
    assert_eq!(failure, format!("block 0, op 0 {name}: {expected}"));
}

fn steps(stride: [u32; 2], padding: [u32; 2]) -> WindowSteps {
    WindowSteps { stride, padding }
}

fn counted(shape: &[u64]) -> Tensor {
    reals(shape, &(1..=shape.iter().product()).map(|number| number as f64).collect::<Vec<_>>())
}

#[test]
fn windows_give_what_was_computed_by_hand() {
    let x = counted(&[1, 1, 3, 3]);
    let filter = reals(&[1, 1, 2, 2], &[1.0, 10.0, 100.0, 1000.0]);
    let conv2d = |stride, padding| OpKind::Conv2d { steps: steps(stride, padding) };
    let both = [x.clone(), filter.clone()];
    gives(conv2d([1, 1], [0, 0]), &both, &[1, 1, 2, 2], &[5421.0, 6532.0, 8754.0, 9865.0]);
    gives(conv2d([2, 2], [1, 1]), &both, &[1, 1, 2, 2], &[1000.0, 3200.0, 7040.0, 9865.0]);
    // Two channels are added; two filters are two channels of the output.
    let filters = reals(&[2, 2, 1, 1], &[1.0, 10.0, 2.0, 20.0]);
    let images = reals(&[1, 2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    gives(conv2d([1, 1], [0, 0]), &[images, filters], &[1, 2, 1, 2], &[31.0, 42.0, 62.0, 84.0]);
    let size = [2, 2];
    let at = steps([2, 2], [1, 1]);
    gives(OpKind::MaxPool2d { size, steps: at }, from_ref(&x), &[1, 1, 2, 2], &[1.0, 3.0, 7.0, 9.0]);
    let below = reals(&[1, 1, 1, 1], &[-3.0]);
    let one = steps([1, 1], [1, 1]);
    gives(OpKind::MaxPool2d { size, steps: one }, from_ref(&below), &[1, 1, 2, 2], &[-3.0; 4]);
    // Padding does not count.
    gives(OpKind::AvgPool2d { size, steps: at }, from_ref(&x), &[1, 1, 2, 2], &[1.0, 2.5, 5.5, 7.0]);
    gives(OpKind::AvgPool2d { size, steps: one }, &[below], &[1, 1, 2, 2], &[-3.0; 4]);
    // The first of equals gets the slope.
    let equal = reals(&[1, 1, 2, 2], &[1.0, 7.0, 7.0, 7.0]);
    let gradient = OpKind::MaxPool2dGradient { size, steps: WindowSteps::default() };
    gives(gradient, &[equal, reals(&[1, 1, 1, 1], &[5.0])], &[1, 1, 2, 2], &[0.0, 5.0, 0.0, 0.0]);
}

#[test]
fn windows_say_what_does_not_fit() {
    let (x, filter) = (counted(&[2, 3, 4, 5]), counted(&[1, 3, 2, 2]));
    let conv2d = |stride, padding| OpKind::Conv2d { steps: steps(stride, padding) };
    let usual = || conv2d([1, 1], [0, 0]);
    refuses(conv2d([0, 1], [0, 0]), &[x.clone(), filter.clone()], "found stride [0, 1]; expected numbers above zero");
    refuses(
        usual(),
        &[counted(&[3, 4, 5]), filter.clone()],
        "input 1 \"x0\" is float64[3, 4, 5]; expected four dimensions, of which the last three are fixed",
    );
    for bad in [counted(&[1, 2, 2, 2]), Tensor::zeros(Float32, &[1, 3, 2, 2]), Tensor::zeros(Int64, &[1, 3, 2, 2])] {
        let expected = format!(
            "input 2 \"x1\" is {}; expected a filter float64[o, 3, kh, kw] for float64[2, 3, 4, 5]",
            VariableValue::from(bad.clone())
        );
        refuses(usual(), &[x.clone(), bad], &expected);
    }
    refuses(
        conv2d([1, 1], [0, 1]),
        &[x.clone(), counted(&[1, 3, 5, 7])],
        "input 1 \"x0\" is float64[2, 3, 4, 5]; expected a height and a width that with padding [0, 1] hold 5 by 7",
    );
    let pool = |size, padding| OpKind::MaxPool2d { size, steps: steps([1, 1], padding) };
    refuses(
        pool([2, 2], [0, 2]),
        from_ref(&x),
        "found size [2, 2] and padding [0, 2]; expected a padding below the size",
    );
    // A window of the largest size ends at once, because only the image's elements are visited.
    let most = u32::MAX;
    let widest = OpKind::AvgPool2d { size: [most; 2], steps: steps([most; 2], [most - 1; 2]) };
    gives(widest, &[counted(&[1, 1, 1, 1])], &[1, 1, 1, 1], &[1.0]);
    let gradient = OpKind::Conv2dFilterGradient { steps: WindowSteps::default() };
    refuses(gradient, &[x.clone(), x, filter], "input 2 \"x1\" is float64[2, 3, 4, 5]; expected float64[2, 1, 3, 4]");
}

#[test]
fn layers_give_what_was_computed_by_hand() {
    // The rounding of an exponential's argument, 87 in a tail, is as many times as large in the result.
    let near = |kind: OpKind, inputs: &[Tensor], expected: &[f64]| {
        let name = kind.name();
        let found = plain(kind, inputs).unwrap_or_else(|failure| panic!("{failure}"));
        let Elements::Float64(found) = found.tensor().elements() else { panic!("float64") };
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-13 * expected.abs();
        assert!(found.len() == expected.len() && found.iter().zip(expected).all(is_near), "{name}: {found:?}");
    };
    // By 120 digits of another program.
    let x = reals(&[5], &[-10.0, -1.0, 0.0, 0.5, 3.0]);
    let exact = [-7.619853024160526e-23, -0.15865525393145705, 0.0, 0.34573123063700656, 2.99595030590511];
    near(OpKind::Gelu { approximate: false }, from_ref(&x), &exact);
    let about = [-1.204092348209806e-37, -0.1588080093917233, 0.0, 0.34571400982514394, 2.996362607918227];
    near(OpKind::Gelu { approximate: true }, &[x], &about);
    // Far away, where squares and cubes are infinite, the slope is zero or one.
    let far = Tensor::new([4], Elements::Float32(vec![-3e38, -1e20, 1e20, 3e38]));
    let slope = Tensor::new([4], Elements::Float32(vec![1.0; 4]));
    for approximate in [false, true] {
        let found = plain(OpKind::GeluGradient { approximate }, &[far.clone(), slope.clone()]).unwrap();
        let expected = Tensor::new([4], Elements::Float32(vec![0.0, 0.0, 1.0, 1.0]));
        assert_eq!(found.tensor().elements(), expected.elements(), "{approximate}");
    }
    let rows = reals(&[2, 2], &[1.0, 5.0, 7.0, 7.0]);
    let (scale, bias) = (reals(&[2], &[10.0, 100.0]), reals(&[2], &[1.0, 2.0]));
    let expected = [-9.0, 102.0, 1.0, 2.0].map(|y: f64| y);
    gives(OpKind::LayerNorm { epsilon: 1e-300 }, &[rows, scale, bias], &[2, 2], &expected);
}

/// The outputs of `batch_norm` with this step.
fn normalised(x: Tensor, by_channel: [&[f64]; 4], step: i64) -> Vec<Vec<f64>> {
    let p = Builder::new();
    let fixed = |tensor: &Tensor| tensor.shape().iter().map(|length| Dim::Fixed(*length)).collect::<Vec<_>>();
    let names = ["scale", "bias", "mean", "variance"];
    let channels = names.map(|name| p.data(name, Float64, [Dim::Fixed(x.shape()[1])]));
    let outputs = p.batch_norm(p.data("x", Float64, fixed(&x)), channels, p.data("step", Int64, []), 1e-300);
    let outputs = outputs.map(|output| p.name(output));
    let graph = p.finish().unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    for (name, values) in names.iter().zip(by_channel) {
        run.set(name, reals(&[values.len() as u64], values)).unwrap();
    }
    run.set("x", x).unwrap();
    run.set("step", number(step)).unwrap();
    run.step().unwrap();
    let outputs = outputs.iter().map(|name| match run.value(name).unwrap().tensor().elements() {
        Elements::Float64(values) => values.clone(),
        other => panic!("{}", other.element_type()),
    });
    outputs.collect()
}

#[test]
fn channels_are_normalised_by_the_batch_and_in_predictions_by_what_is_given() {
    // Channel 0 is 1, 5, 1, 5, of mean 3 and variance 4; channel 1 is 7, 7, 9, 9.
    let x = reals(&[2, 2, 2], &[1.0, 5.0, 7.0, 7.0, 1.0, 5.0, 9.0, 9.0]);
    let by_channel: [&[f64]; 4] = [&[10.0, 100.0], &[1.0, 2.0], &[1.0, 3.0], &[16.0, 4.0]];
    let y = vec![-9.0, 11.0, -98.0, -98.0, -9.0, 11.0, 102.0, 102.0];
    assert_eq!(normalised(x.clone(), by_channel, 0), [y, vec![3.0, 8.0], vec![4.0, 1.0]]);
    let y = vec![1.0, 11.0, 202.0, 202.0, 1.0, 11.0, 302.0, 302.0];
    assert_eq!(normalised(x.clone(), by_channel, -1), [y, vec![1.0, 3.0], vec![16.0, 4.0]]);
    // Each row has its channels alone.
    let matrix = reals(&[2, 2], &[1.0, 7.0, 5.0, 9.0]);
    assert_eq!(normalised(matrix, by_channel, 3)[0], [-9.0, -98.0, 11.0, 102.0]);
}

#[test]
fn a_channel_of_many_elements_keeps_its_digits() {
    let many = 1 << 20;
    let x = Tensor::new([many, 1], Elements::Float32((0..many).map(|place| 100.0 + (place % 2) as f32).collect()));
    let one = |value| Tensor::new([1], Elements::Float32(vec![value]));
    let (ones, zeros) = (one(1.0), one(0.0));
    let found = plain_outputs(
        OpKind::BatchNorm { epsilon: 1e-30 },
        &[x, ones.clone(), zeros.clone(), zeros, ones, number(0)],
        3,
    );
    let numbers = found.unwrap()[1..].iter().map(|value| value.tensor().elements().clone()).collect::<Vec<_>>();
    assert_eq!(numbers, [Elements::Float32(vec![100.5]), Elements::Float32(vec![0.25])]);
}

#[test]
fn batch_norm_says_what_does_not_fit() {
    let (x, channel, wide) = (counted(&[2, 3, 4]), counted(&[3]), counted(&[4]));
    let refuse = |epsilon, place: usize, given: Tensor, expected: &str| {
        let mut inputs = [x.clone(), channel.clone(), channel.clone(), channel.clone(), channel.clone(), number(0)];
        inputs[place] = given;
        let failure = plain_outputs(OpKind::BatchNorm { epsilon }, &inputs, 3).unwrap_err().to_string();
        assert_eq!(failure, format!("block 0, op 0 batch_norm: {expected}"));
    };
    refuse(0.0, 0, x.clone(), "found epsilon 0; expected a finite number above zero");
    for (place, name) in [(1, "x1"), (2, "x2"), (3, "x3"), (4, "x4")] {
        let expected = format!("input {} \"{name}\" is float64[4]; expected float64[3]", place + 1);
        refuse(0.1, place, wide.clone(), &expected);
    }
    refuse(0.1, 5, wide.clone(), "input 6 \"x5\" is float64[4]; expected int64[]");
    refuse(
        0.1,
        0,
        wide.clone(),
        "input 1 \"x0\" is float64[4]; expected two dimensions or more, of which the second is fixed",
    );
}

#[test]
fn layers_say_what_does_not_fit() {
    let (x, row) = (counted(&[2, 3]), counted(&[3]));
    let norm = |epsilon| OpKind::LayerNorm { epsilon };
    let same = |epsilon, expected: &str| refuses(norm(epsilon), &[x.clone(), row.clone(), row.clone()], expected);
    same(0.0, "found epsilon 0; expected a finite number above zero");
    same(f64::NAN, "found epsilon NaN; expected a finite number above zero");
    let wide = counted(&[2]);
    refuses(norm(0.1), &[x.clone(), row.clone(), wide.clone()], "input 3 \"x2\" is float64[2]; expected float64[3]");
    refuses(norm(0.1), &[x.clone(), wide, row.clone()], "input 2 \"x1\" is float64[2]; expected float64[3]");
    refuses(
        norm(0.1),
        &[counted(&[]), row.clone(), row.clone()],
        "input 1 \"x0\" is float64[]; expected a last dimension that is fixed",
    );
    refuses(
        OpKind::GeluGradient { approximate: false },
        &[x.clone(), row],
        "input 2 \"x1\" is float64[3]; expected float64[2, 3]",
    );
    let ids = Tensor::new([1], Elements::Int64(vec![0]));
    let expected = "found padding 2; expected the number of a row, below 2";
    refuses(OpKind::LookupTable { padding: Some(2) }, &[x.clone(), ids.clone()], expected);
    refuses(OpKind::LookupTableGradient { height: 2, padding: Some(2) }, &[ids, counted(&[1, 3])], expected);
}

#[test]
fn padding_reads_as_zeros_and_gives_no_rows() {
    let ids = Tensor::new([4], Elements::Int64(vec![1, 0, 1, 2]));
    let lookup = OpKind::LookupTable { padding: Some(1) };
    gives(lookup, &[counted(&[3, 2]), ids.clone()], &[4, 2], &[0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 5.0, 6.0]);
    let gradient = OpKind::LookupTableGradient { height: 3, padding: Some(1) };
    let found = plain(gradient, &[ids, counted(&[4, 2])]).unwrap();
    let rows = found.rows().view();
    assert_eq!(rows.ids().iter().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(rows.values(), reals(&[4], &[3.0, 4.0, 7.0, 8.0]).bytes());
}

fn number(number: i64) -> Tensor {
    Tensor::new([], Elements::Int64(vec![number]))
}

#[test]
fn selected_elements_are_those_that_were_asked_for() {
    let x = counted(&[2, 3]);
    gives(OpKind::Slice { axis: 1, start: 1, end: 3 }, from_ref(&x), &[2, 2], &[2.0, 3.0, 5.0, 6.0]);
    let ids = |ids: &[i64]| Tensor::new([ids.len() as u64], Elements::Int64(ids.to_vec()));
    gives(OpKind::Gather, &[x.clone(), ids(&[1, 1])], &[2, 3], &[4.0, 5.0, 6.0, 4.0, 5.0, 6.0]);
    gives(OpKind::GatherGradient, &[x.clone(), ids(&[1, 1]), x.clone()], &[2, 3], &[0.0, 0.0, 0.0, 5.0, 7.0, 9.0]);
    let whole = plain(OpKind::Gather, &[ids(&[7, 8, 9]), ids(&[2, 0])]).unwrap();
    assert_eq!(whole, ids(&[9, 7]).into());
    for bad in [-1, 2] {
        let expected = format!("index {bad} at place 1; expected a number from 0, below 2");
        refuses(OpKind::Gather, &[x.clone(), ids(&[0, bad])], &expected);
    }
    let slice = |axis, start, end| OpKind::Slice { axis, start, end };
    refuses(slice(1, 2, 2), from_ref(&x), "found start 2 and end 2; expected the start before the end");
    refuses(
        slice(1, 2, 4),
        from_ref(&x),
        "input 1 \"x0\" is float64[2, 3]; expected dimension 1 to be fixed, and at least 4, the end",
    );
    refuses(slice(2, 0, 1), from_ref(&x), "input 1 \"x0\" is float64[2, 3]; expected a dimension 2, counted from zero");
    refuses(
        OpKind::GatherGradient,
        &[x.clone(), ids(&[0]), x.clone()],
        "input 3 \"x2\" is float64[2, 3]; expected float64[1, 3]",
    );
    refuses(OpKind::Gather, &[number(0), ids(&[0])], "input 1 \"x0\" is int64[]; expected one dimension or more");
}

#[test]
fn dropout_depends_on_seed_step_and_row_alone() {
    let ones = |rows: u64| reals(&[rows, 50], &vec![1.0; 50 * usize::try_from(rows).unwrap()]);
    let dropped = |rows, seed, step, first| {
        let found = plain(OpKind::Dropout { rate: 0.2, seed }, &[ones(rows), number(step), number(first)]).unwrap();
        let Elements::Float64(found) = found.tensor().elements() else { panic!("float64") };
        found.clone()
    };
    let whole = dropped(40, 7, 3, 0);
    let zeros = whole.iter().filter(|value| **value == 0.0).count();
    assert!((340..460).contains(&zeros), "{zeros} of 2000");
    assert!(whole.iter().all(|value| *value == 0.0 || *value == 1.25));
    // Two halves of a batch have the mask of the whole.
    assert_eq!([dropped(15, 7, 3, 0), dropped(25, 7, 3, 15)].concat(), whole);
    assert_eq!(
        plain(OpKind::Dropout { rate: 0.2, seed: 7 }, &[ones(40), number(3)]).unwrap(),
        reals(&[40, 50], &whole).into()
    );
    for (seed, step, first) in [(8, 3, 0), (7, 4, 0), (7, 3, 1)] {
        let same = dropped(40, seed, step, first).iter().zip(&whole).filter(|(one, other)| one == other).count();
        // 0.8 x 0.8 + 0.2 x 0.2 of 2000 on average.
        assert!((1260..1460).contains(&same), "{same} of 2000 with seed {seed}, step {step}, first {first}");
    }
    // A prediction.
    assert!(dropped(40, 7, -1, 0).iter().all(|value| *value == 1.0));
    for rate in [1.0, -0.1, f64::NAN] {
        let expected = format!("found rate {rate}; expected a number from zero, below one");
        refuses(OpKind::Dropout { rate, seed: 0 }, &[ones(1), number(0)], &expected);
    }
    let wrong = "input 2 \"x1\" is float64[1, 50]; expected int64[]";
    refuses(OpKind::Dropout { rate: 0.5, seed: 0 }, &[ones(1), ones(1)], wrong);
}

#[test]
fn a_batch_of_images_is_a_batch() {
    let shape = [Dim::Batch, Dim::Fixed(1), Dim::Fixed(8), Dim::Fixed(8)];
    let p = crate::Builder::new();
    let x = p.data("x", Float64, shape);
    let filter = p.parameter("filter", Float64, &[4, 1, 3, 3], pserver_core::rows::Initializer::Zeros, 0);
    let y = p.conv2d(x, filter, steps([1, 1], [1, 1]));
    let name = p.name(p.max_pool2d(y, [2, 2], steps([2, 2], [0, 0])));
    let graph = p.finish().unwrap();
    assert_eq!(graph.facts(&name).unwrap().to_string(), "float64[batch, 4, 4, 4]");
}
