//! Encoding of a rule's scalars for `pserver_scalars`.

use pserver_core::rule::ssa::{Binary, Comparison, Lowered, RuleFunction, ScalarInput, ScalarOp, Unary};

use super::arguments::ScalarCode;

/// The scalars' list, one operation after the other, as it lies in device memory; numbers are little endian.
///
/// # Panics
/// For code with reductions, which a shard keeps on the processor, and with `single`, whose scalars the host computes.
#[must_use]
pub fn scalar_code(code: &Lowered) -> Vec<ScalarCode> {
    code.scalars().iter().map(|scalar| operation(*scalar)).collect()
}

fn operation(scalar: ScalarOp) -> ScalarCode {
    let mut operands = [0; 3];
    operands.iter_mut().zip(scalar.operands()).for_each(|(into, id)| *into = id.0.into());
    // `kernels/cu/scalars.cu` has the same numbers.
    let (operation, value) = match scalar {
        // A device computes the scalars of steps that carry no other value.
        ScalarOp::Constant(value) | ScalarOp::Tunable(_, value) => (0, value),
        ScalarOp::Input(ScalarInput::Rate) => (1, 0.0),
        ScalarOp::Input(ScalarInput::Count) => (2, 0.0),
        ScalarOp::Input(ScalarInput::GradientScale) => (3, 0.0),
        ScalarOp::Reduced(_) => panic!("a rule with reductions is computed by the processor"),
        ScalarOp::Single(_) => panic!("a rule with single has its scalars computed by the host"),
        ScalarOp::Unary(unary, _) => (unary_number(unary), 0.0),
        ScalarOp::Binary(binary, ..) => (binary_number(binary), 0.0),
        ScalarOp::Compare(Comparison::Less, ..) => (16, 0.0),
        ScalarOp::Compare(Comparison::LessOrEqual, ..) => (17, 0.0),
        ScalarOp::Compare(Comparison::Equal, ..) => (18, 0.0),
        ScalarOp::Select { .. } => (19, 0.0),
        ScalarOp::Call(function, _) => (function_number(function), 0.0),
        ScalarOp::Power(..) => (25, 0.0),
    };
    ScalarCode { operation, operands, value }
}

const fn unary_number(unary: Unary) -> u32 {
    match unary {
        Unary::Negate => 4,
        Unary::Absolute => 5,
        Unary::SquareRoot => 6,
        Unary::Sign => 7,
        Unary::Floor => 8,
    }
}

const fn binary_number(binary: Binary) -> u32 {
    match binary {
        Binary::Add => 9,
        Binary::Subtract => 10,
        Binary::Multiply => 11,
        Binary::Divide => 12,
        Binary::Minimum => 13,
        Binary::Maximum => 14,
        Binary::CopySign => 15,
    }
}

const fn function_number(function: RuleFunction) -> u32 {
    match function {
        RuleFunction::Exponential => 20,
        RuleFunction::ExponentialMinusOne => 21,
        RuleFunction::Logarithm => 22,
        RuleFunction::LogarithmOnePlus => 23,
        RuleFunction::HyperbolicTangent => 24,
    }
}
