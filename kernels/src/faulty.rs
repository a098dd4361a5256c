//! Kernels that misbehave, for tests of error detection.

use pserver_core::dtype::{ElementType, Half};
use pserver_core::optim::Gradient;
use pserver_core::port::{Kernels, Update};

/// Kernels that flip one bit of one element in every n-th update or half-precision value, and are correct otherwise.
#[derive(Clone, Copy, Debug)]
pub struct FaultyKernels<K> {
    inner: K,
    every: u64,
    results: u64,
}

impl<K: Kernels> FaultyKernels<K> {
    /// Corrupts every `every`-th result of `inner`, counted from one.
    ///
    /// # Panics
    ///
    /// When `every` is zero.
    #[must_use]
    pub fn new(inner: K, every: u64) -> Self {
        assert!(1 <= every, "every result is the most that can be spoiled");
        Self { inner, every, results: 0 }
    }

    fn spoil(&mut self, result: &mut [u8]) {
        self.results += 1;
        // The byte before an element's last holds the top of a float's fraction, so no tolerance forgives the flip.
        if self.results.is_multiple_of(self.every)
            && let [.., spoiled, _] = result
        {
            *spoiled ^= 0x40;
        }
    }
}

impl<K: Kernels> Kernels for FaultyKernels<K> {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        self.inner.sum(element_type, into, gradients);
    }

    fn update(&mut self, update: Update<'_>) {
        let Update { formula, element_type, parameter, states, gradients } = update;
        // Reborrowed, because the originals are borrowed for as long as the parameter, which is needed again below.
        let mut states: Vec<&mut [u8]> = states.iter_mut().map(|state| &mut **state).collect();
        let states = states.as_mut_slice();
        self.inner.update(Update { formula, element_type, parameter: &mut *parameter, states, gradients });
        self.spoil(parameter);
    }

    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        self.inner.narrow_to_half(half, value, into);
        self.spoil(into);
    }

    fn name(&self) -> &'static str {
        "faulty"
    }
}
