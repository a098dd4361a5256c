//! The kernels of the CPU: loops that the compiler turns into vector code.
//!
//! A chunk is walked in tiles that stay in the first-level cache: the gradients of a tile are added in order into a
//! scratch tile, then the tile of the parameter and of its states is updated. So every byte comes from memory once,
//! and the number of gradients is an ordinary run-time number. A lone gradient of the parameter's own type is read
//! where it lies.
//!
//! Elements are read and written as little-endian byte arrays, which the compiler turns into unaligned vector loads
//! and stores: there is one path for every alignment, and for every split of a buffer.
//!
//! Arithmetic is binary32 for f32 and binary64 for f64 (FTRL excepted, see its loop). A product and a sum always
//! round apart: `mul_add` would give other bits where there is no such instruction. What is not a number stays so,
//! but which of its bit patterns comes out is not promised.

pub(crate) mod element;
mod rules;
mod step;
pub(crate) mod sum;
#[cfg(test)]
mod tests;

use multiversion::multiversion;
use pserver_core::dtype::ElementType;
use pserver_core::optim::{Algorithm, Arithmetic, Gradient, assert_gradients_fit};
use pserver_core::port::{Kernels, Update};
use pserver_core::rule::reference;

use element::{Bytes, Element, Real};
pub use rules::Form;

/// The kernels of the CPU, for the best vector instructions this machine has. It has no state: any number of them
/// may work on disjoint chunks at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Kernels for Cpu {
    /// # Panics
    ///
    /// When a length or a type does not fit; whoever calls has checked them.
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        assert_gradients_fit(element_type, into, gradients);
        match element_type {
            ElementType::Int32 => sum_wide::<i32>(into, gradients),
            ElementType::Uint32 => sum_wide::<u32>(into, gradients),
            ElementType::Int64 => sum_wide::<i64>(into, gradients),
            ElementType::Uint64 => sum_wide::<u64>(into, gradients),
            ElementType::Float32 => sum_wide::<f32>(into, gradients),
            ElementType::Float64 => sum_wide::<f64>(into, gradients),
            ElementType::Float16 | ElementType::Bfloat16 => refuse_half(element_type),
        }
    }

    /// # Panics
    ///
    /// When a length, a type or the number of states does not fit, or when the rule does not go with the type;
    /// whoever calls has checked them.
    fn update(&mut self, mut update: Update<'_>) {
        assert_update_fits(&update);
        if let (Arithmetic::Rule { code, scalars }, Algorithm::Written(_)) = (update.arithmetic, &update.rule.algorithm)
        {
            let mut sum = vec![0; update.parameter.len()];
            self.sum(update.element_type, &mut sum, update.gradients);
            let Update { element_type, parameter, states, .. } = update;
            return reference::update(code, scalars, element_type, parameter, states, &sum);
        }
        let is_unscaled = !update.element_type.is_float() || update.coefficients.gradient_scale == 1.0;
        if update.rule.algorithm == Algorithm::Sum && is_unscaled {
            return self.sum(update.element_type, update.parameter, update.gradients);
        }
        match update.element_type {
            ElementType::Int32 => add_wide::<i32>(update.parameter, update.gradients),
            ElementType::Uint32 => add_wide::<u32>(update.parameter, update.gradients),
            ElementType::Int64 => add_wide::<i64>(update.parameter, update.gradients),
            ElementType::Uint64 => add_wide::<u64>(update.parameter, update.gradients),
            ElementType::Float32 => update_wide::<f32>(&mut update),
            ElementType::Float64 => update_wide::<f64>(&mut update),
            ElementType::Float16 | ElementType::Bfloat16 => refuse_half(update.element_type),
        }
    }

    fn name(&self) -> &'static str {
        "cpu"
    }
}

// AVX-512 brings FMA with it; the compiler does not fuse a product and a sum unless asked by `mul_add`, and nothing
// here asks. `multiversion` widens `avx512f` to Ice Lake's set: older processors with AVX-512 run the AVX2 code.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_wide<E: Element>(into: &mut [u8], gradients: &[Gradient<'_>]) {
    sum::into_whole::<E>(into, gradients);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_wide<E: Element>(parameter: &mut [u8], gradients: &[Gradient<'_>]) {
    sum::onto_whole::<E>(parameter, gradients);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn update_wide<E: Real>(update: &mut Update<'_>) {
    step::update_whole::<E>(update);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_tile_wide<E: Element>(into: &mut [Bytes<E>], gradients: &[Gradient<'_>], start: usize) {
    sum::into_tile::<E>(into, gradients, start);
}

fn assert_update_fits(update: &Update<'_>) {
    let (rule, element_type) = (update.rule, update.element_type);
    assert_gradients_fit(element_type, update.parameter, update.gradients);
    let states = rule.states();
    assert_eq!(update.states.len(), states.len(), "{} has these states: {states:?}", rule.algorithm.name());
    for state in update.states.iter() {
        assert_eq!(state.len(), update.parameter.len(), "a state is as long as its parameter");
    }
    assert!(
        element_type.is_float() || rule.algorithm.is_exact(),
        "{} was let through for {element_type}",
        rule.algorithm.name()
    );
}

fn refuse_half(element_type: ElementType) -> ! {
    panic!("a parameter of type {element_type} was let through; halves are for gradients")
}
