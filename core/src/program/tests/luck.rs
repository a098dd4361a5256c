//! Random numbers that follow from a seed.

use crate::dtype::ElementType;
use crate::program::{Elements, Tensor};

/// SplitMix64.
pub(super) struct Luck(u64);

impl Luck {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    }

    /// Below a bound.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    /// In [-1, 1).
    pub(super) fn signed(&mut self) -> f64 {
        (self.next() >> 12) as f64 * 2.0_f64.powi(-51) - 1.0
    }

    /// A tensor of f64 in [-1, 1).
    pub(super) fn tensor(&mut self, shape: &[u64]) -> Tensor {
        let count = shape.iter().product::<u64>();
        Tensor::new(shape, Elements::Float64((0..count).map(|_| self.signed()).collect()))
    }

    /// A tensor of int64 below a bound.
    pub(super) fn ids(&mut self, shape: &[u64], bound: usize) -> Tensor {
        let count = shape.iter().product::<u64>();
        let ids = (0..count).map(|_| i64::try_from(self.below(bound)).unwrap()).collect();
        Tensor::new(shape, Elements::Int64(ids))
    }
}

pub(super) const F64: ElementType = ElementType::Float64;
