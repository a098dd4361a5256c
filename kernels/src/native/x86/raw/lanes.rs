//! Functions that generated code calls for each lane of a vector, where there is no instruction.

use pserver_core::rule::reference::RuleReal;
use pserver_core::rule::ssa::{RuleFunction, power};

use crate::native::{CodeTarget, Vectors, Width};

/// The functions in the order of their numbers.
const FUNCTIONS: [RuleFunction; 5] = [
    RuleFunction::Exponential,
    RuleFunction::ExponentialMinusOne,
    RuleFunction::Logarithm,
    RuleFunction::LogarithmOnePlus,
    RuleFunction::HyperbolicTangent,
];

/// The number of the power, which has two operands.
pub(in crate::native::x86) const POWER: u32 = 5;

/// By which number code calls a function.
pub(in crate::native::x86) fn number(function: RuleFunction) -> u32 {
    match function {
        RuleFunction::Exponential => 0,
        RuleFunction::ExponentialMinusOne => 1,
        RuleFunction::Logarithm => 2,
        RuleFunction::LogarithmOnePlus => 3,
        RuleFunction::HyperbolicTangent => 4,
    }
}

/// The entry addresses of the functions for a target. They take the address of the result's vector, of the first
/// operand's, of the second's (any vector's, where there is none), and the number of lanes.
pub(in crate::native::x86) fn address(target: CodeTarget) -> u64 {
    let function: *const () = match (target.vectors, target.width) {
        (Vectors::Avx2, Width::Single) => vector::<f32, 8> as *const (),
        (Vectors::Avx2, Width::Double) => vector::<f64, 4> as *const (),
        (Vectors::Avx512, Width::Single) => vector::<f32, 16> as *const (),
        (Vectors::Avx512, Width::Double) => vector::<f64, 8> as *const (),
    };
    function as u64
}

extern "sysv64" fn vector<E: RuleReal, const LANES: usize>(
    result: &mut [E; LANES],
    first: &[E; LANES],
    second: &[E; LANES],
    number: u32,
) {
    let function = FUNCTIONS.get(number as usize);
    for ((result, first), second) in result.iter_mut().zip(first).zip(second) {
        *result = E::nearest(match function {
            Some(function) => function.of(first.widen()),
            None => power(first.widen(), second.widen()),
        });
    }
}
