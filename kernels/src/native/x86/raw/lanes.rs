//! Functions that generated code calls: what has no instruction, for every lane of a vector.

use pserver_core::rule::reference::Real;
use pserver_core::rule::ssa::{Function, power};

use crate::native::{Target, Vectors, Width};

/// The functions in the order of their numbers.
const FUNCTIONS: [Function; 5] = [
    Function::Exponential,
    Function::ExponentialMinusOne,
    Function::Logarithm,
    Function::LogarithmOnePlus,
    Function::HyperbolicTangent,
];

/// The number of the power, which has two operands.
pub(in crate::native::x86) const POWER: u32 = 5;

/// By which number code calls a function.
pub(in crate::native::x86) fn number(function: Function) -> u32 {
    match function {
        Function::Exponential => 0,
        Function::ExponentialMinusOne => 1,
        Function::Logarithm => 2,
        Function::LogarithmOnePlus => 3,
        Function::HyperbolicTangent => 4,
    }
}

/// Where the functions for a target begin. They take the address of the result's vector, of the first operand's, of the
/// second's (any vector's, where there is none), and the number.
pub(in crate::native::x86) fn address(target: Target) -> u64 {
    let function: *const () = match (target.vectors, target.width) {
        (Vectors::Avx2, Width::Single) => vector::<f32, 8> as *const (),
        (Vectors::Avx2, Width::Double) => vector::<f64, 4> as *const (),
        (Vectors::Avx512, Width::Single) => vector::<f32, 16> as *const (),
        (Vectors::Avx512, Width::Double) => vector::<f64, 8> as *const (),
    };
    function as u64
}

extern "sysv64" fn vector<E: Real, const LANES: usize>(
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
