//! Layers of networks: values that were computed by hand, and refusals.

use crate::{Block, Dim, Elements, Graph, Op, OpKind, OpRole, PlainArithmetic, PlainRun, Program, Purpose, Tensor};
use crate::{Variable, VariableFacts, VariableValue, WindowSteps};
use pserver_core::dtype::ElementType::{Float32, Float64, Int64};
use pserver_core::error::Failure;
use pserver_core::port::Plain;

fn reals(shape: &[u64], values: &[f64]) -> Tensor {
    Tensor::new(shape, Elements::Float64(values.to_vec()))
}

/// One op of these inputs in the plain form: its first output.
fn plain(kind: OpKind, inputs: &[Tensor]) -> Result<VariableValue, Failure> {
    let names: Vec<String> = (0..inputs.len()).map(|place| format!("x{place}")).collect();
    let variables = names.iter().zip(inputs).map(|(name, input)| {
        let facts = VariableFacts::fixed(input.elements().element_type(), input.shape());
        Variable { name: name.clone(), facts, purpose: Purpose::Data }
    });
    let variables = variables.collect();
    let op = Op { kind, inputs: names.clone(), outputs: vec!["y".to_owned()], role: OpRole::Forward };
    let graph = Graph::new(Program { blocks: vec![Block { parent: None, variables, ops: vec![op] }] })?;
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels)?;
    names.iter().zip(inputs).try_for_each(|(name, input)| run.set(name, input.clone()))?;
    run.step()?;
    Ok(run.value("y").unwrap().clone())
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
    gives(OpKind::MaxPool2d { size, steps: at }, &[x.clone()], &[1, 1, 2, 2], &[1.0, 3.0, 7.0, 9.0]);
    let below = reals(&[1, 1, 1, 1], &[-3.0]);
    let one = steps([1, 1], [1, 1]);
    gives(OpKind::MaxPool2d { size, steps: one }, &[below.clone()], &[1, 1, 2, 2], &[-3.0; 4]);
    // Padding does not count.
    gives(OpKind::AvgPool2d { size, steps: at }, &[x.clone()], &[1, 1, 2, 2], &[1.0, 2.5, 5.5, 7.0]);
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
        &[x.clone()],
        "found size [2, 2] and padding [0, 2]; expected a padding below the size",
    );
    // A window as large as numbers go ends at once: only the image's elements are visited.
    let most = u32::MAX;
    let widest = OpKind::AvgPool2d { size: [most; 2], steps: steps([most; 2], [most - 1; 2]) };
    gives(widest, &[counted(&[1, 1, 1, 1])], &[1, 1, 1, 1], &[1.0]);
    let gradient = OpKind::Conv2dFilterGradient { steps: WindowSteps::default() };
    refuses(gradient, &[x.clone(), x, filter], "input 2 \"x1\" is float64[2, 3, 4, 5]; expected float64[2, 1, 3, 4]");
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
