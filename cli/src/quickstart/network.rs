//! The digits network as a program.
//!
//! Not here: the digits ([`super::digits`]); where the parameters live.

use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::error::Failure;
use pserver_core::rows::Initializer;
use pserver_program::{Builder, Dim, Elements, Graph, Tensor, append_backward, append_optimizer};

use super::digits::{CLASSES, Digit, PIXELS};

/// For each layer its inputs and its outputs.
const LAYERS: [(u32, u32); 3] = [(64, 64), (64, 32), (32, 10)];
const _: () = assert!(LAYERS[0].0 as usize == PIXELS && LAYERS[2].1 as usize == CLASSES, "digits in, classes out");

/// The program: data `pixels` (`float32[batch, 64]`) and `label` (`int64[batch]`), three layers with parameters
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
    use pserver_core::port::{Kernels, Plain};
    use pserver_kernels::cpu::Cpu;
    use pserver_program::cpu::CpuArithmetic;
    use pserver_program::{Arithmetic, Elements, PlainArithmetic, PlainRun, Program};

    use super::super::digits::{Digit, Digits};

    fn learned(arithmetic: &mut dyn Arithmetic, kernels: &mut dyn Kernels) -> f32 {
        let (digits, name) = (Digits::load().unwrap(), arithmetic.name());
        let graph = super::program("const_lr { learning_rate: 0.2 }", 7).unwrap();
        let mut run = PlainRun::new(&graph, arithmetic, kernels).unwrap();
        let mut step = |batch: &[&Digit]| {
            for (name, tensor) in super::data(batch) {
                run.set(name, tensor).unwrap();
            }
            run.step().unwrap();
            match run.value("accuracy").unwrap().tensor().elements() {
                Elements::Float32(values) => values[0],
                other => panic!("{name}: accuracy is {}", other.element_type()),
            }
        };
        for batch in digits.part(0, 1).unwrap().chunks(32).cycle().take(400) {
            step(batch);
        }
        step(&digits.held_out())
    }

    #[test]
    fn the_network_learns_with_every_arithmetic() {
        let plain = learned(&mut PlainArithmetic, &mut Plain);
        let fast = learned(&mut CpuArithmetic::default(), &mut Cpu::default());
        assert!(plain > 0.93 && (plain - fast).abs() < 0.01, "plain {plain}, fast {fast}");
    }

    #[test]
    fn the_network_reads_back_as_it_was_printed() {
        let program = super::program("const_lr { learning_rate: 0.2 }", 7).unwrap().into_program();
        assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
        assert_eq!(Program::decode(&program.encode()).unwrap(), program);
    }
}
