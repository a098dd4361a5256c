//! The digits network once more, as a program, held to the hand-written one.

use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::port::{Arithmetic, Kernels};
use pserver_core::program::{
    Builder, Dim, Elements, Graph, PlainArithmetic, PlainRun, Program, Tensor, append_backward, append_optimizer,
};
use pserver_core::rows::Initializer;

use super::digits::{CLASSES, Digit, Digits, PIXELS};
use super::luck::Luck;
use super::model::Model;

const RATE: f32 = 0.2;

/// How far a weight of the program may be from the model's after [`STEPS`] steps. The model adds a layer's bias first
/// and the program last, and their losses divide by the batch at different places; such roundings, of about 1e-7 each,
/// are what the steps carry on. Measured: 1.5e-7 with the plain arithmetic and 1.8e-7 with the fast one.
const TOLERANCE: f32 = 2e-6;
const STEPS: usize = 50;

/// The model's layers, and a step of gradient descent.
fn network() -> Program {
    let p = Builder::new();
    let pixels = u64::try_from(PIXELS).unwrap();
    let classes = u64::try_from(CLASSES).unwrap();
    let pixels_of_a_batch = p.data("pixels", Float32, [Dim::Batch, Dim::Fixed(pixels)]);
    let label = p.data("label", Int64, [Dim::Batch]);
    let layer = |x, number: u64, inputs: u64, outputs: u64| {
        let bound = (6.0 / inputs as f64).sqrt();
        let uniform = Initializer::Uniform { low: -bound, high: bound };
        let weight = p.parameter(&format!("layer{number}/weight"), Float32, &[inputs, outputs], uniform, number);
        let bias = p.parameter(&format!("layer{number}/bias"), Float32, &[outputs], Initializer::Zeros, 0);
        p.add(p.matmul(x, weight), bias)
    };
    let first = p.relu(layer(pixels_of_a_batch, 1, pixels, 64));
    let second = p.relu(layer(first, 2, 64, 32));
    let scores = layer(second, 3, 32, classes);
    let (losses, _) = p.softmax_with_cross_entropy(scores, label);
    p.named("loss", p.mean(losses));
    p.named("accuracy", p.accuracy(scores, label));
    let mut program = p.finish().unwrap().into_program();
    let gradients = append_backward(&mut program, "loss").unwrap();
    append_optimizer(&mut program, &format!("const_lr {{ learning_rate: {RATE} }}"), &gradients).unwrap();
    program
}

fn feed(run: &mut PlainRun<'_>, batch: &[&Digit]) {
    let length = batch.len() as u64;
    let pixels = batch.iter().flat_map(|digit| digit.pixels).collect();
    let labels = batch.iter().map(|digit| i64::try_from(digit.label).unwrap()).collect();
    run.set("pixels", Tensor::new([length, PIXELS as u64], Elements::Float32(pixels))).unwrap();
    run.set("label", Tensor::new([length], Elements::Int64(labels))).unwrap();
}

fn floats<'a>(run: &'a PlainRun<'_>, name: &str) -> &'a [f32] {
    match run.value(name).unwrap().tensor().elements() {
        Elements::Float32(values) => values,
        other => panic!("{name} is {}", other.element_type()),
    }
}

/// Trains both from the model's initial values on the same batches.
fn check(arithmetic: &mut dyn Arithmetic, kernels: &mut dyn Kernels) {
    let digits = Digits::load().unwrap();
    let (mut share, mut model, mut luck) = (digits.part(0, 1).unwrap(), Model::new(7), Luck::new(7));
    let name = arithmetic.name();
    let graph = Graph::new(network()).unwrap();
    let mut run = PlainRun::new(&graph, arithmetic, kernels).unwrap();
    for parameter in model.parameters() {
        let values = Elements::Float32(parameter.values.clone());
        run.set(&parameter.name, Tensor::new(parameter.shape.clone(), values)).unwrap();
    }
    luck.shuffle(&mut share);
    for batch in share.chunks(32).cycle().take(STEPS) {
        feed(&mut run, batch);
        run.step().unwrap();
        let gradients = model.gradients(batch);
        let (expected, found) = (gradients.loss, floats(&run, "loss")[0]);
        assert!((found - expected).abs() <= TOLERANCE * expected.max(1.0), "{name}: loss {found}, expected {expected}");
        model.descend(&gradients, RATE);
    }
    let mut farthest = 0.0_f32;
    for parameter in model.parameters() {
        for (found, expected) in floats(&run, &parameter.name).iter().zip(&parameter.values) {
            farthest = farthest.max((found - expected).abs());
        }
    }
    println!("{name}: weights are at most {farthest:e} apart");
    assert!(farthest <= TOLERANCE, "{name}: weights are {farthest:e} apart, at most {TOLERANCE:e} are allowed");
    feed(&mut run, &digits.held_out());
    run.step().unwrap();
    let (expected, found) = (model.accuracy(&digits.held_out()), f64::from(floats(&run, "accuracy")[0]));
    // One digit whose best two scores are a rounding apart.
    assert!((found - expected).abs() < 1.5 / 360.0, "{name}: accuracy {found}, expected {expected}");
    assert!(found > 0.7, "{name}: accuracy {found}");
}

#[test]
fn the_network_as_a_program_trains_as_the_model_does() {
    check(&mut PlainArithmetic, &mut pserver_core::port::Plain);
    check(&mut pserver_kernels::graph::CpuArithmetic::default(), &mut pserver_kernels::cpu::Cpu::default());
}

#[test]
fn the_network_reads_back_as_it_was_printed() {
    let program = network();
    assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
    assert_eq!(Program::decode(&program.encode()).unwrap(), program);
}
