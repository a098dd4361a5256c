//! Simulated accelerator: runs the host's kernels and delays completions.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Accelerator, DeviceCode, DeviceFacts, DeviceSlot, Done, GradientLease, NotAdopted, Resident, Work};
use crate::error::Failure;
use crate::limits::STATES_MAX;
use crate::memory::{Arena, Lease};
use crate::optim::{Gradient, square_sums};
use crate::port::{Kernels, Update};

/// Computes when polled, with any kernels, in memory of its own. Completion times differ between slots, so completions
/// are late and out of order.
pub struct Simulated<K> {
    kernels: K,
    /// Most polls until a completion.
    polls_max: u64,
    /// Most work in flight; the rest stays in the queue.
    depth: usize,
    bytes_free: u64,
    slots: Vec<Slot>,
    under_way: Vec<(u64, Work)>,
    polls: u64,
}

/// A chunk on the device.
struct Slot {
    resident: Resident,
    parameter: Vec<u8>,
    states: Vec<Vec<u8>>,
    /// The sum that is kept for the next update.
    sum: Option<Vec<u8>>,
    is_loaded: bool,
}

/// Default bound of work in flight.
const DEPTH: usize = 64;

impl<K: Kernels> Simulated<K> {
    /// A device with room for `bytes`, whose work is over after one to `polls_max` polls.
    ///
    /// # Panics
    /// When `polls_max` is zero.
    #[must_use]
    pub fn new(kernels: K, bytes: u64, polls_max: u64) -> Self {
        assert!(1 <= polls_max, "work takes a poll at least");
        let (slots, under_way) = (Vec::new(), Vec::new());
        Self { kernels, polls_max, depth: DEPTH, bytes_free: bytes, slots, under_way, polls: 0 }
    }

    /// The same, with another bound of work in flight.
    ///
    /// # Panics
    /// When `depth` is zero.
    #[must_use]
    pub fn of_depth(self, depth: usize) -> Self {
        assert!(1 <= depth, "a device that takes no work never ends any");
        Self { depth, ..self }
    }

    /// Adjacent slots take different times.
    fn polls(&self, slot: DeviceSlot) -> u64 {
        let mixed = (u64::from(slot.0) + self.polls).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        1 + mixed % self.polls_max
    }

    fn work(&mut self, work: &mut Work) {
        let place = work.slot().0 as usize;
        let (kernels, slot) = (&mut self.kernels, &mut self.slots[place]);
        assert!(slot.is_loaded || matches!(work, Work::Load { .. }), "slot {place} was not loaded");
        match work {
            Work::Load { parameter, states, .. } => slot.load(parameter.bytes(), states),
            Work::Sum { gradients, squares, .. } => slot.add(kernels, gradients, squares),
            Work::Update { numbers, gradients, is_summed, into, .. } => {
                let sum = slot.sum.take().filter(|_| *is_summed);
                assert!(sum.is_some() || !*is_summed, "slot {place} has no sum");
                slot.update(kernels, numbers, gradients, sum.as_deref());
                into.bytes_mut()[..slot.parameter.len()].copy_from_slice(&slot.parameter);
            }
            Work::Store { states, .. } => {
                assert_eq!(states.len(), slot.states.len(), "a place for every state of slot {place}");
                for (lease, state) in states.iter_mut().zip(&slot.states) {
                    lease.bytes_mut()[..state.len()].copy_from_slice(state);
                }
            }
        }
    }
}

impl Slot {
    fn load(&mut self, parameter: &[u8], states: &[Lease]) {
        self.parameter.copy_from_slice(parameter);
        assert!(
            states.len() == self.states.len() || (states.is_empty() && self.is_loaded),
            "{} states were loaded, the rule has {}",
            states.len(),
            self.states.len()
        );
        for (state, lease) in self.states.iter_mut().zip(states) {
            state.copy_from_slice(&lease.bytes()[..parameter.len()]);
        }
        (self.is_loaded, self.sum) = (true, None);
    }

    /// Sums gradients, and keeps the sum.
    fn add(&mut self, kernels: &mut impl Kernels, gradients: &[GradientLease], squares: &mut Lease) {
        assert!(self.resident.keeps_sum, "a chunk was adopted without a place for a sum");
        let mut sum = vec![0; self.parameter.len()];
        let gradients: Vec<_> = gradients.iter().map(GradientLease::gradient).collect();
        kernels.sum(self.resident.element_type, &mut sum, &gradients);
        let mut places = squares.bytes_mut().as_chunks_mut::<8>().0.iter_mut();
        square_sums(self.resident.element_type, &sum, &mut |block| {
            *places.next().expect("there is a place for every block") = block.to_le_bytes();
        });
        self.sum = Some(sum);
    }

    /// Runs the code on the sum that was kept, or on gradients.
    fn update(&mut self, kernels: &mut impl Kernels, numbers: &[f64], gradients: &[GradientLease], sum: Option<&[u8]>) {
        let Self { resident, parameter, states, .. } = self;
        let element_type = resident.element_type;
        let count = states.len();
        let mut lent: [&mut [u8]; STATES_MAX] = Default::default();
        lent.iter_mut().zip(states.iter_mut()).for_each(|(lent, state)| *lent = state);
        let gradients: Vec<_> = match sum {
            Some(bytes) => vec![Gradient { bytes, element_type }],
            None => gradients.iter().map(GradientLease::gradient).collect(),
        };
        kernels.update(Update {
            formula: resident.code.formula(numbers),
            element_type,
            parameter,
            states: &mut lent[..count],
            gradients: &gradients,
        });
    }
}

impl<K: Kernels> Accelerator for Simulated<K> {
    fn capabilities(&self) -> DeviceFacts {
        let name = format!("simulated ({})", self.kernels.name());
        DeviceFacts { name, bytes_free: self.bytes_free, bytes_least: 0 }
    }

    fn pin(&mut self, _arena: &Arena) -> Result<(), Failure> {
        Ok(())
    }

    fn adopt(&mut self, resident: &Resident) -> Result<DeviceSlot, NotAdopted> {
        let (found, is_rule) = (resident.element_type, matches!(resident.code, DeviceCode::Rule(_)));
        if !found.is_parameter_type() || (is_rule && !found.is_float()) {
            let expected = if is_rule { "float32 or float64 for a rule" } else { "the type of a parameter" };
            return Err(NotAdopted::Unfit(format!("a chunk of {found}; expected {expected}")));
        }
        if resident.keeps_sum && !found.is_float() {
            return Err(NotAdopted::Unfit(format!("a sum of {found} to keep; expected float32 or float64")));
        }
        let (asked, free) = (resident.bytes_total(), self.bytes_free);
        if free < asked {
            return Err(NotAdopted::Full(format!("{asked} bytes were asked for and {free} are free")));
        }
        self.bytes_free -= asked;
        let empty = || vec![0; resident.bytes as usize];
        let states = (0..resident.code.states()).map(|_| empty()).collect();
        let slot = DeviceSlot(u32::try_from(self.slots.len()).expect("there are fewer chunks than that"));
        let (parameter, sum, is_loaded) = (empty(), None, false);
        self.slots.push(Slot { resident: resident.clone(), parameter, states, sum, is_loaded });
        Ok(slot)
    }

    fn clear(&mut self) {
        self.under_way.clear();
        self.bytes_free += self.slots.drain(..).map(|slot| slot.resident.bytes_total()).sum::<u64>();
    }

    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure> {
        while self.under_way.len() < self.depth
            && let Some(work) = queue.pop_front()
        {
            let slot = work.slot();
            assert!((slot.0 as usize) < self.slots.len(), "slot {slot} was not given out");
            assert!(self.under_way.iter().all(|(_, other)| other.slot() != slot), "slot {slot} has work under way");
            self.under_way.push((self.polls + self.polls(slot), work));
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        self.polls += 1;
        let mut place = 0;
        while place < self.under_way.len() {
            if self.polls < self.under_way[place].0 {
                place += 1;
                continue;
            }
            let (_, mut work) = self.under_way.remove(place);
            self.work(&mut work);
            done.push(Done { work, outcome: Ok(()) });
        }
        Ok(())
    }

    fn wait(&mut self, _limit: Duration) {}
}
