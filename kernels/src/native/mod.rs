//! Rules as generated vector code: the values of an element stay in registers from the first load to the last store.
//!
//! Not here: rules and their reference bits ([`pserver_core::rule`]); the cache of generated code (`crate::cpu`); the
//! same arithmetic without generated code (`crate::tiles`).
//!
//! A rule is assembled for one set of vector instructions, one element type and one kind of gradient. The function adds
//! the gradients in trainer order and runs the rule on the sum, one vector after another, in one pass over memory.
//! Every operation of the rule is one instruction with one rounding, or a few that only move bits.
//!
//! `x86` generates the code. On other processors `absent` takes its place and has none.

#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(target_arch = "x86_64")]
mod x86;

use pserver_core::rule::reference::RuleReal;
use pserver_core::rule::ssa::{Lowered, RuleOp, ScalarId};

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::{GeneratedFunction, gradients_at_once, is_allowed};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{GeneratedFunction, gradients_at_once, is_allowed};

/// A set of vector instructions, detected at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    /// 16 registers of 32 bytes, with F16C for half precision.
    Avx2,
    /// 32 registers of 64 bytes: the foundation, DQ and VL.
    Avx512,
}

/// The type of parameter and states, which is the type of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Width {
    /// binary32
    Single,
    /// binary64
    Double,
}

/// The elements of a gradient in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GradientFormat {
    /// The parameter's own type.
    Own,
    /// IEEE binary16.
    Half,
    /// bfloat16.
    Brain,
}

/// Instruction set and element type, which together select the encoding of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeTarget {
    pub(crate) vectors: Vectors,
    pub(crate) width: Width,
}

/// The most gradients that one call adds. A caller with more, or with more than [`gradients_at_once`], adds them in
/// tiles beforehand.
pub(crate) const GRADIENTS_MAX: usize = 16;

/// The tensors of one call, at any alignment.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only generated code reads them"))]
pub(crate) struct CallTensors<'a, 'b> {
    pub(crate) weights: &'a mut [u8],
    pub(crate) states: &'a mut [&'b mut [u8]],
    /// One to [`GRADIENTS_MAX`], in trainer order.
    pub(crate) gradients: &'a [&'a [u8]],
    /// As [`scalar_room`] lays them out.
    pub(crate) scalars: &'a [u8],
}

/// The scalars that operations on elements use, once each, in the order in which code finds them.
pub(crate) fn used_scalars(code: &Lowered) -> Vec<ScalarId> {
    let mut used = Vec::new();
    for op in code.ops() {
        if let RuleOp::Scalar(scalar) = op
            && !used.contains(scalar)
        {
            used.push(*scalar);
        }
    }
    used
}

/// Elements behind the used scalars.
const CONSTANTS: usize = 2;

/// Room for the scalars of an update as code finds them: used ones, then the sign bit and one, which instructions need
/// to change signs.
pub(crate) fn scalar_room(width: Width, used: &[ScalarId]) -> Vec<u8> {
    let zeros = used.iter().map(|_| 0.0);
    let constants: [f64; CONSTANTS] = [-0.0, 1.0];
    let all = zeros.chain(constants);
    match width {
        Width::Single => all.flat_map(|value| f32::of_scalar(value).to_le_bytes()).collect(),
        Width::Double => all.flat_map(f64::to_le_bytes).collect(),
    }
}

/// Writes the used scalars of one update where code finds them, rounded to the element's type.
pub(crate) fn write_scalars(width: Width, used: &[ScalarId], values: &[f64], room: &mut [u8]) {
    match width {
        Width::Single => {
            for (room, scalar) in room.as_chunks_mut().0.iter_mut().zip(used) {
                *room = f32::of_scalar(values[scalar.index()]).to_le_bytes();
            }
        }
        Width::Double => {
            for (room, scalar) in room.as_chunks_mut().0.iter_mut().zip(used) {
                *room = values[scalar.index()].to_le_bytes();
            }
        }
    }
}
