//! Rules as generated vector code: the values of an element stay in registers from the first load to the last store.
//!
//! Not here: what a rule is and what its bits are ([`pserver_core::rule`]); when code is generated and how long it is
//! kept (`crate::cpu`); the same arithmetic without generated code (`crate::tiles`).
//!
//! A rule is assembled for one set of vector instructions, one element type and one kind of gradient. The function adds
//! the gradients in trainer order and runs the rule on the sum, one vector after another, in one pass over memory.
//! Every operation of the rule is one instruction with one rounding, or a few that only move bits.
//!
//! `x86` writes the code. On other processors `absent` stands in its place and has none.

#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(target_arch = "x86_64")]
mod x86;

use pserver_core::rule::reference::Real;
use pserver_core::rule::ssa::{Lowered, Op, ScalarId};

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::{Function, is_allowed};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Function, is_allowed};

/// A set of vector instructions. Which one a machine has is found when the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    /// 16 registers of 32 bytes, with F16C for halves.
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
pub(crate) enum Source {
    /// The parameter's own type.
    Own,
    /// IEEE binary16.
    Half,
    /// bfloat16.
    Brain,
}

/// Instructions and element type together: what decides how an operation is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) vectors: Vectors,
    pub(crate) width: Width,
}

/// The gradients that one call adds: as many streams as a core reads ahead of. Whoever has more adds them beforehand.
pub(crate) const GRADIENTS_MAX: usize = 16;

/// What one call works on. Tensors begin anywhere.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only generated code reads them"))]
pub(crate) struct Tensors<'a, 'b> {
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
        if let Op::Scalar(scalar) = op
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
