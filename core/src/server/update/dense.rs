//! Updates of dense chunks by the processor: in place when no reader holds the value, otherwise into a new lease.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::Failure;
use crate::limits::STATES_MAX;
use crate::memory::{Lease, Value};
use crate::optim::{Algorithm, Numbers, ReducedPiece, Step};
use crate::port::{Kernels, Update};
use crate::server::chunk::{Chunk, Content};
use crate::server::pool::Pool;

impl Chunk {
    /// Makes the value writable: copy-on-write when readers hold it (without the copy for a rule that overwrites every
    /// byte), and in place otherwise. Drops the half-precision copies.
    pub(in crate::server) fn make_writable(&mut self, pool: &mut Pool) -> Result<(), Failure> {
        let (bytes, copies) = (self.bytes, self.rule.rule().algorithm != Algorithm::Sum);
        let Content::Dense(value) = &mut self.content else { panic!("a bucket is updated by rows") };
        // Readers hold counts of the `Arc`; a count of one is ours, and no other thread can raise it.
        if 1 < Arc::strong_count(value) {
            let mut fresh = Value::new(pool.take(bytes)?, bytes);
            if copies {
                fresh.bytes_mut().copy_from_slice(value.bytes());
            }
            *value = Arc::new(fresh);
        }
        pool.halves.forget(self.id);
        Ok(())
    }

    /// Installs a gradient as the next version without a copy.
    pub(in crate::server) fn adopt_gradient(&mut self, pool: &mut Pool, gradient: Lease) {
        self.set_value(pool, gradient);
        self.version.0 += 1;
    }

    /// Applies the gradients of the round: in place when no reader holds the value, otherwise into a new lease.
    /// `numbers` caches the coefficients of the previous update; `reduced` has the values of the rule's reductions.
    pub(in crate::server) fn update(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        numbers: &mut Numbers,
        step: &Step,
        reduced: &[f64],
    ) -> Result<(), Failure> {
        self.make_writable(pool)?;
        let bytes = self.bytes as usize;
        let Content::Dense(value) = &mut self.content else { panic!("a bucket is updated by rows") };
        let value = Arc::get_mut(value).expect("nobody else holds it");
        let count = self.states.len();
        let mut states: [&mut [u8]; STATES_MAX] = Default::default();
        for (state, lease) in states.iter_mut().zip(&mut self.states) {
            *state = &mut lease.bytes_mut()[..bytes];
        }
        kernels.update(Update {
            formula: numbers.formula(&self.rule, step, reduced),
            element_type: self.element_type,
            parameter: value.bytes_mut(),
            states: &mut states[..count],
            gradients: &self.round.gradients(self.element_type, self.bytes),
        });
        self.version.0 += 1;
        Ok(())
    }

    /// Passes the chunk, with the sum of its round's gradients, to a reduction.
    pub(in crate::server) fn reduce(&mut self, reduce: &mut dyn FnMut(ReducedPiece<'_, '_>)) {
        let bytes = self.bytes as usize;
        let Content::Dense(value) = &self.content else { panic!("a bucket is updated by rows") };
        let mut states: SmallVec<[&mut [u8]; STATES_MAX]> =
            self.states.iter_mut().map(|lease| &mut lease.bytes_mut()[..bytes]).collect();
        let gradients = self.round.gradients(self.element_type, self.bytes);
        let [gradient] = gradients.as_slice() else { panic!("the round is folded before a reduction") };
        let (element_type, parameter) = (self.element_type, value.bytes());
        reduce(ReducedPiece { element_type, parameter, states: &mut states, gradient: gradient.bytes });
    }
}
