//! Casts round once, to nearest, from any type; so do their gradients.

use half::{bf16, f16};

use crate::{
    Block, Builder, Dim, Elements, Graph, Op, OpKind, OpRole, PlainArithmetic, PlainRun, Program, Purpose, Tensor,
    Variable, VariableFacts, append_backward,
};
use pserver_core::dtype::ElementType::{self, Bfloat16, Float16};
use pserver_core::narrowing;
use pserver_core::port::Plain;
use pserver_core::rows::Initializer;

use super::random::F64;

fn power(exponent: i32) -> f64 {
    2.0_f64.powi(exponent)
}

fn cast(elements: Elements, to: ElementType) -> f64 {
    let facts = VariableFacts::fixed(elements.element_type(), &[1]);
    let variables = vec![Variable { name: "x".into(), facts, purpose: Purpose::Data }];
    let op =
        Op { kind: OpKind::Cast { to }, inputs: vec!["x".into()], outputs: vec!["y".into()], role: OpRole::Forward };
    let program = Program { blocks: vec![Block { parent: None, variables, ops: vec![op] }] };
    let graph = Graph::new(program).expect("a cast fits");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("nothing begins");
    run.set("x", Tensor::new([1], elements)).expect("it fits");
    run.step().expect("a cast runs");
    match run.value("y").expect("it was written").tensor().elements() {
        Elements::Float16(values) => values[0].to_f64(),
        Elements::Bfloat16(values) => values[0].to_f64(),
        other => panic!("a half of {}", other.element_type()),
    }
}

#[test]
fn a_cast_to_a_half_rounds_once() {
    let wide = |value: f64| Elements::Float64(vec![value]);
    for (elements, to, expected) in [
        (wide(1.0 + power(-11) + power(-40)), Float16, 1.0 + power(-10)),
        (wide(1.0 + power(-11)), Float16, 1.0),
        (wide(1.0 + power(-10) + power(-11) - power(-30)), Float16, 1.0 + power(-10)),
        (wide(1.0 + power(-10) + power(-11)), Float16, 1.0 + power(-9)),
        (Elements::Float32(vec![1.0 + 2.0_f32.powi(-8) + 2.0_f32.powi(-21)]), Bfloat16, 1.0078125),
        (wide(1.0 + power(-8) + power(-40)), Bfloat16, 1.0078125),
        (wide(1.0 + power(-8)), Bfloat16, 1.0),
        (Elements::Uint64(vec![(1 << 63) + (1 << 55) + 1]), Bfloat16, power(63) + power(56)),
        (Elements::Uint64(vec![(1 << 63) + (1 << 55)]), Bfloat16, power(63)),
        (Elements::Int64(vec![-(1 << 62) - (1 << 54) - 1]), Bfloat16, -power(62) - power(55)),
        (Elements::Int64(vec![2049]), Float16, 2048.0),
        (Elements::Int64(vec![-2051]), Float16, -2052.0),
        (Elements::Uint64(vec![u64::MAX]), Float16, f64::INFINITY),
        (wide(1e300), Bfloat16, f64::INFINITY),
        (wide(-1e300), Float16, f64::NEG_INFINITY),
        (wide(1e-300), Float16, 0.0),
    ] {
        let text = format!("{elements:?} to {to}");
        assert_eq!(cast(elements, to), expected, "{text}");
    }
    assert!(cast(wide(f64::NAN), Float16).is_nan());
}

#[test]
fn half_precision_values_are_narrowed_exactly() {
    for bits in 0..=u16::MAX {
        for value in [f16::from_bits(bits).to_f64(), bf16::from_bits(bits).to_f64()] {
            let narrow = f64::from(narrowing::round_to_odd(value));
            assert!(
                narrow.to_bits() == value.to_bits() || value.is_nan(),
                "{value:e} is exact, and becomes {narrow:e}"
            );
        }
    }
}

/// The slope goes back through both casts: to the half that the second one was given, and to the first one's type.
#[test]
fn the_gradient_of_a_cast_rounds_once() {
    for (to, slope, expected) in [
        (Float16, 1.0 + power(-11) + power(-40), 1.0 + power(-10)),
        (Float16, 1.0 + power(-10) + power(-11) - power(-30), 1.0 + power(-10)),
        (Bfloat16, 1.0 + power(-8) + power(-21), 1.0078125),
    ] {
        let p = Builder::new();
        let x = p.parameter("x", F64, &[1], Initializer::Constant(1.0), 0);
        let slopes = p.data("slopes", F64, [Dim::Fixed(1)]);
        p.named("loss", p.mean(p.mul(p.cast(p.cast(x, to), F64), slopes)));
        let mut program = p.finish().expect("it fits").into_program();
        append_backward(&mut program, "loss").expect("casts between floats have gradients");
        let graph = Graph::new(program).expect("it is a program");
        let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
        let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
        run.set("slopes", Tensor::new([1], Elements::Float64(vec![slope]))).expect("it fits");
        run.step().expect("it runs");
        let found = run.value("x@gradient").expect("it has one").tensor().elements().clone();
        assert_eq!(found, Elements::Float64(vec![expected]), "{slope:e} by way of {to}");
    }
}
