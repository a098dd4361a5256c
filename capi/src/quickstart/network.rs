//! The digits network as a program.
//!
//! Not here: the digits ([`super::digits`]); where the parameters live.

use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::error::Failure;
use pserver_core::program::{Builder, Dim, Elements, Graph, Tensor, append_backward, append_optimizer};
use pserver_core::rows::Initializer;

use super::digits::{CLASSES, Digit, PIXELS};

/// For each layer its inputs and its outputs.
const LAYERS: [(u32, u32); 3] = [(64, 64), (64, 32), (32, 10)];
const _: () = assert!(LAYERS[0].0 as usize == PIXELS && LAYERS[2].1 as usize == CLASSES, "digits in, classes out");

/// The program: data `pixels` (float32[batch, 64]) and `label` (int64[batch]), three layers with parameters
/// `layer<number>/weight` and `layer<number>/bias`, the scalars `loss` in nats and `accuracy`, gradients and their
/// updates by `optimizer`, which is configuration in protobuf's text form.
///
/// # Errors
/// When the configuration is none.
pub fn program(optimizer: &str, seed: u64) -> Result<Graph, Failure> {
    let p = Builder::new();
    let pixels = p.data("pixels", Float32, [Dim::Batch, Dim::Fixed(LAYERS[0].0.into())]);
    let label = p.data("label", Int64, [Dim::Batch]);
    let mut x = pixels;
    for (number, (inputs, outputs)) in (1..).zip(LAYERS) {
        let bound = (6.0 / f64::from(inputs)).sqrt();
        let uniform = Initializer::Uniform { low: -bound, high: bound };
        let shape = [inputs.into(), outputs.into()];
        let weight = p.parameter(&format!("layer{number}/weight"), Float32, &shape, uniform, seed + number);
        let bias = p.parameter(&format!("layer{number}/bias"), Float32, &shape[1..], Initializer::Zeros, 0);
        let scores = p.add(p.matmul(x, weight), bias);
        x = if number < 3 { p.relu(scores) } else { scores };
    }
    let (losses, _) = p.softmax_with_cross_entropy(x, label);
    p.named("loss", p.mean(losses));
    p.named("accuracy", p.accuracy(x, label));
    let mut program = p.finish()?.into_program();
    let gradients = append_backward(&mut program, "loss")?;
    append_optimizer(&mut program, optimizer, &gradients)?;
    Graph::new(program)
}

/// The data of a step.
#[must_use]
pub fn data(batch: &[&Digit]) -> [(&'static str, Tensor); 2] {
    let length = batch.len() as u64;
    let pixels = batch.iter().flat_map(|digit| digit.pixels).collect();
    let label = |digit: &&Digit| i64::try_from(digit.label).expect("classes are few");
    let labels = batch.iter().map(label).collect();
    [
        ("pixels", Tensor::new([length, PIXELS as u64], Elements::Float32(pixels))),
        ("label", Tensor::new([length], Elements::Int64(labels))),
    ]
}

#[cfg(test)]
mod tests {
    //! Held to the hand-written model.

    use pserver_core::port::{Arithmetic, Kernels};
    use pserver_core::program::{Elements, Graph, PlainArithmetic, PlainRun, Program, Tensor};

    use super::super::digits::{Digit, Digits};
    use super::super::luck::Luck;
    use super::super::model::Model;

    const RATE: f32 = 0.2;

    /// How far a weight of the program may be from the model's after [`STEPS`] steps. The model adds a layer's bias first
    /// and the program last, and their losses divide by the batch at different places; such roundings, of about 1e-7 each,
    /// are what the steps carry on. Measured: 1.5e-7 with the plain arithmetic and 1.8e-7 with the fast one.
    const TOLERANCE: f32 = 2e-6;
    const STEPS: usize = 50;

    fn network() -> Graph {
        super::program(&format!("const_lr {{ learning_rate: {RATE} }}"), 0).unwrap()
    }

    fn feed(run: &mut PlainRun<'_>, batch: &[&Digit]) {
        for (name, tensor) in super::data(batch) {
            run.set(name, tensor).unwrap();
        }
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
        let graph = network();
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
            assert!(
                (found - expected).abs() <= TOLERANCE * expected.max(1.0),
                "{name}: loss {found}, expected {expected}"
            );
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
        let program = network().into_program();
        assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
        assert_eq!(Program::decode(&program.encode()).unwrap(), program);
    }
}
