//! Values that follow from a seed.

use crate::{Elements, Tensor};
use pserver_core::dtype::ElementType;
use pserver_core::prng::Prng;

/// In [-1, 1).
pub(super) fn signed(prng: &mut Prng) -> f64 {
    (prng.next() >> 12) as f64 * 2.0_f64.powi(-51) - 1.0
}

/// A tensor of f64 in [-1, 1).
pub(super) fn tensor(prng: &mut Prng, shape: &[u64]) -> Tensor {
    let count = shape.iter().product::<u64>();
    Tensor::new(shape, Elements::Float64((0..count).map(|_| signed(prng)).collect()))
}

/// A tensor of int64 below a bound.
pub(super) fn ids(prng: &mut Prng, shape: &[u64], bound: u64) -> Tensor {
    let count = shape.iter().product::<u64>();
    let ids = (0..count).map(|_| i64::try_from(prng.below(bound)).unwrap()).collect();
    Tensor::new(shape, Elements::Int64(ids))
}

pub(super) const F64: ElementType = ElementType::Float64;
