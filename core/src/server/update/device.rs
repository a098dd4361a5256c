//! Asynchronous updates: work on an accelerator.
//!
//! `update` is ready when the round is complete and the chunk's device slot is idle. It takes the gradients out of the
//! round; the program pauses and the round stays open to no further gradient. On completion `update` is ready again,
//! installs the value, and the program continues with `send`. Processor and device run the same program, and other
//! events wait the same way:
//!
//! - gradients for the next round, or the next gradient of a mode without rounds, are ahead;
//! - pulls read the value that is published;
//! - a value that replaces the chunk's is kept, and put in its place after the updates that had arrived before it;
//! - a checkpoint holds the chunk before its next update, takes its states, writes it, and lets it go.
//!
//! Not here: work that has ended, and chunks that a checkpoint holds (`device_work`).

use crate::memory::Lease;
use crate::optim::{Formula, Step, square_sums};
use crate::port::{GradientLease, Kernels, Update, Work};
use crate::server::chunk::Chunk;
use crate::server::context::Context;
use crate::server::device_chunk::{DeviceActivity, DeviceSum};
use crate::server::group::SlotIndex;
use crate::server::serving::Serving;
use crate::server::stalls::StallReason;

impl Serving {
    /// Starts an update, or installs the value of a completed one; true when there is a new value.
    pub(in crate::server) fn apply_on_device(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: SlotIndex,
        step: &Step,
    ) -> bool {
        let chunk = &mut self.table.chunks[slot_index];
        let on_device = chunk.on_device.as_mut().expect("the chunk lives on a device");
        if let DeviceActivity::Updated(value) = std::mem::take(&mut on_device.doing) {
            chunk.set_value(cx.pool, value);
            chunk.version.0 += 1;
            return true;
        }
        let Ok(into) = cx.pool.take(chunk.bytes) else {
            self.stalls.add(slot_index, StallReason::Memory);
            return false;
        };
        let on_device = chunk.on_device.as_mut().expect("the chunk lives on a device");
        on_device.doing = DeviceActivity::Updating;
        let slot = on_device.slot;
        let mut numbers = Vec::new();
        match chunk.rule.formula(step, &mut numbers) {
            Formula::Add { scale } | Formula::Sum { scale } => numbers = vec![scale],
            Formula::Rule { .. } => {}
        }
        let gradients = chunk.round.take_gradients(chunk.element_type, chunk.bytes);
        cx.device().push(Work::Update { slot, numbers, gradients, is_summed: false, into });
        false
    }

    /// Whether a device has work in flight for a chunk or its group.
    pub(in crate::server) fn is_at_work(&self, chunk: &Chunk) -> bool {
        let Some(group) = self.table.group(chunk) else { return chunk.is_at_work() };
        self.stalls.of(group.chunks[0]) == Some(StallReason::Device)
            || group.chunks.iter().any(|slot_index| self.table.chunks[*slot_index].is_at_work())
    }
}

impl Chunk {
    /// Whether a device has work in flight for the chunk.
    pub(in crate::server) fn is_at_work(&self) -> bool {
        self.on_device.as_ref().is_some_and(|on_device| on_device.is_busy())
    }

    /// Whether a device has a part of its update in flight.
    pub(in crate::server) fn is_awaited(&self) -> bool {
        self.on_device.as_ref().is_some_and(|on_device| on_device.is_awaited())
    }

    /// Number of states, on the host or the device.
    pub(in crate::server) fn state_count(&self) -> usize {
        self.on_device.as_ref().map_or(self.states.len(), |on_device| on_device.code.states())
    }

    /// Returns a chunk whose states are in host memory to the processor, after the processor has done the failed sum or
    /// update and it is published.
    pub(in crate::server) fn return_to_host(&mut self, kernels: &mut dyn Kernels, failed: Option<Work>) {
        let on_device = self.on_device.as_mut().expect("it lives on a device");
        (on_device.is_leaving, on_device.is_fresh) = (true, true);
        match failed {
            Some(Work::Sum { gradients, squares, .. }) => self.sum_on_host(kernels, gradients, squares),
            Some(Work::Update { numbers, gradients, into, .. }) => {
                self.update_on_host(kernels, &numbers, &gradients, into);
            }
            _ => {}
        }
    }

    fn sum_on_host(&mut self, kernels: &mut dyn Kernels, lent: Vec<GradientLease>, mut into: Lease) {
        let (element_type, bytes) = (self.element_type, self.bytes as usize);
        let gradients: Vec<_> = lent.iter().map(GradientLease::gradient).collect();
        let sum = &mut into.bytes_mut()[..bytes];
        kernels.sum(element_type, sum, &gradients);
        let mut squares = Vec::new();
        square_sums(element_type, sum, &mut |block| squares.push(block));
        let blocks = into.bytes_mut().as_chunks_mut().0.iter_mut();
        blocks.zip(squares).for_each(|(sum, block)| *sum = block.to_le_bytes());
        let on_device = self.on_device.as_mut().expect("it lives on a device");
        on_device.doing = DeviceActivity::Summed(Box::new(DeviceSum { gradients: lent, into }));
    }

    fn update_on_host(
        &mut self,
        kernels: &mut dyn Kernels,
        numbers: &[f64],
        gradients: &[GradientLease],
        mut into: Lease,
    ) {
        let bytes = self.bytes as usize;
        let on_device = self.on_device.as_mut().expect("it lives on a device");
        into.bytes_mut()[..bytes].copy_from_slice(self.content.dense().bytes());
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(|lease| &mut lease.bytes_mut()[..bytes]).collect();
        let gradients: Vec<_> = gradients.iter().map(GradientLease::gradient).collect();
        kernels.update(Update {
            formula: on_device.code.formula(numbers),
            element_type: self.element_type,
            parameter: &mut into.bytes_mut()[..bytes],
            states: &mut states,
            gradients: &gradients,
        });
        on_device.doing = DeviceActivity::Updated(into);
    }
}
