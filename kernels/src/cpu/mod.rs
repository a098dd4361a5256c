//! CPU kernels: sums and exact updates as loops that the compiler vectorises, rules as generated code.
//!
//! Not here: the execution of a rule (`crate::native`, `crate::tiles`); its reference bits
//! ([`pserver_core::rule::reference`]).
//!
//! Every byte comes from memory once. A sum is made in tiles that stay in the first-level cache: the gradients of a
//! tile are added in order, so their number is an ordinary run-time number. A rule's gradients are added in registers,
//! in front of the rule itself, in the same pass.
//!
//! Elements are read and written as little-endian byte arrays at any address: there is one path for every alignment,
//! and for every split of a buffer. A product and a sum always round separately: `mul_add` would give other bits where
//! there is no such instruction. NaN stays NaN, but its bit pattern is unspecified, except in half precision.

pub(crate) mod element;
mod half_precision;
mod rules;
pub(crate) mod sum;
#[cfg(test)]
mod tests;

use multiversion::multiversion;
use pserver_core::dtype::{ElementType, Half};
use pserver_core::optim::{Formula, Gradient, assert_gradients_fit};
use pserver_core::port::{Kernels, Update};

use crate::native::Width;
use element::{ElementBytes, KernelElement, KernelReal};
pub use rules::Form;
use rules::{RuleKernels, RuleUpdate};

/// The CPU kernels. They cache the code of rules, so each shard has its own.
#[derive(Debug)]
pub struct Cpu {
    rules: RuleKernels,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// For the best vector instructions that this machine has.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Form::best())
    }

    /// Runs rules in this form, or as tiles where the machine cannot.
    #[must_use]
    pub fn with(form: Form) -> Self {
        Self { rules: RuleKernels::new(form) }
    }
}

impl Kernels for Cpu {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        sum(element_type, into, gradients);
    }

    /// # Panics
    ///
    /// When a length, a type or the number of states does not fit, or when the rule does not go with the type: callers
    /// check them before.
    fn update(&mut self, update: Update<'_>) {
        let Update { formula, element_type, parameter, states, gradients } = update;
        assert_gradients_fit(element_type, parameter, gradients);
        match formula {
            Formula::Add { scale } => add(element_type, parameter, gradients, scale),
            Formula::Sum { scale } => {
                sum(element_type, parameter, gradients);
                self::scale(element_type, parameter, scale);
            }
            Formula::Rule { code, scalars } => {
                assert_eq!(states.len(), code.states().len(), "the rule's states");
                assert!(
                    states.iter().all(|state| state.len() == parameter.len()),
                    "a state is as long as its parameter"
                );
                let width = match element_type {
                    ElementType::Float32 => Width::Single,
                    ElementType::Float64 => Width::Double,
                    other => panic!("a rule was let through for {other}; expected float32 or float64"),
                };
                self.rules.update(RuleUpdate { code, scalars, width, weights: parameter, states, gradients });
            }
        }
    }

    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        narrow_to_half(half, value, into);
    }

    fn name(&self) -> &'static str {
        match self.rules.form() {
            Form::Tiles => "cpu, rules as tiles: no AVX2, or this system runs no generated code",
            Form::Avx2 => "cpu, rules as generated code for AVX2",
            Form::Avx512 => "cpu, rules as generated code for AVX-512",
        }
    }
}

/// `into = g0 + g1 + ...` in this order, in the parameter's type; half precision is widened first.
///
/// # Panics
///
/// When a length or a type does not fit: callers check them before.
pub fn sum(element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
    assert_gradients_fit(element_type, into, gradients);
    if let [alone] = gradients
        && alone.element_type == element_type
    {
        // The system's copy does not read what it is about to overwrite, which the loops below cannot avoid.
        return into.copy_from_slice(alone.bytes);
    }
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

/// Converts a binary32 value to half precision.
///
/// # Panics
///
/// When `into` is not half as long as `value`.
pub fn narrow_to_half(half: Half, value: &[u8], into: &mut [u8]) {
    assert!(value.len().is_multiple_of(4) && value.len() == 2 * into.len(), "two bytes for every element");
    match half {
        Half::Float16 => halve_wide::<true>(value, into),
        Half::Bfloat16 => halve_wide::<false>(value, into),
    }
}

fn add(element_type: ElementType, parameter: &mut [u8], gradients: &[Gradient<'_>], scale: f64) {
    match element_type {
        ElementType::Int32 => add_wide::<i32>(parameter, gradients),
        ElementType::Uint32 => add_wide::<u32>(parameter, gradients),
        ElementType::Int64 => add_wide::<i64>(parameter, gradients),
        ElementType::Uint64 => add_wide::<u64>(parameter, gradients),
        ElementType::Float32 => add_scaled_wide::<f32>(parameter, gradients, scale),
        ElementType::Float64 => add_scaled_wide::<f64>(parameter, gradients, scale),
        ElementType::Float16 | ElementType::Bfloat16 => refuse_half(element_type),
    }
}

/// Integers are never scaled; a scale of one changes no bit.
fn scale(element_type: ElementType, values: &mut [u8], scale: f64) {
    match element_type {
        _ if scale == 1.0 => {}
        ElementType::Float32 => scale_wide::<f32>(values, scale),
        ElementType::Float64 => scale_wide::<f64>(values, scale),
        _ => {}
    }
}

// AVX-512 brings FMA with it; the compiler does not fuse a product and a sum unless asked by `mul_add`, and nothing
// here asks. `multiversion` widens `avx512f` to Ice Lake's set: older processors with AVX-512 run the AVX2 code.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_wide<E: KernelElement>(into: &mut [u8], gradients: &[Gradient<'_>]) {
    sum::into_whole::<E>(into, gradients);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_tile_wide<E: KernelElement>(into: &mut [ElementBytes<E>], gradients: &[Gradient<'_>], start: usize) {
    sum::into_tile::<E>(into, gradients, start);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_wide<E: KernelElement>(parameter: &mut [u8], gradients: &[Gradient<'_>]) {
    sum::onto_whole::<E>(parameter, gradients, |sum| sum);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_scaled_wide<E: KernelReal>(parameter: &mut [u8], gradients: &[Gradient<'_>], scale: f64) {
    let scale = E::nearest(scale);
    sum::onto_whole::<E>(parameter, gradients, |sum| sum * scale);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn scale_wide<E: KernelReal>(values: &mut [u8], scale: f64) {
    let scale = E::nearest(scale);
    for value in E::view_mut(values) {
        *value = (E::load(*value) * scale).store();
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn halve_wide<const IS_BINARY16: bool>(value: &[u8], into: &mut [u8]) {
    if IS_BINARY16 {
        half_precision::into_whole(value, into, half_precision::half);
    } else {
        half_precision::into_whole(value, into, half_precision::brain);
    }
}

fn refuse_half(element_type: ElementType) -> ! {
    panic!("a parameter of type {element_type} was admitted; half precision is for gradients")
}
