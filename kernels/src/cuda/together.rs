//! Updates that are submitted together.
//!
//! Updates at the front of the queue whose memory is pinned, and whose gradients fit, share a bank: one call copies all
//! their gradients, one copies all their parameters back, and each event stands for all of them. A call takes 1 to 3 us
//! of the host, and the link pauses between the copies of two calls.

use std::collections::VecDeque;

use pserver_core::error::Failure;
use pserver_core::memory::Lease;
use pserver_core::port::Work;

use super::accelerator::Cuda;
use super::arguments::{ElementKind, GRADIENTS_MAX};
use super::checked::DriverError;
use super::gathering::aligned;
use super::in_flight::{FailedWork, FreeEvents, SubmittedWork};
use super::safe::{StreamId, Ticket, grid};

/// Bytes of gradients that are copied at once: an H100's link has its full rate from 4 MiB on, and with more the copies
/// back would begin later.
const BYTES: u64 = 4 << 20;
/// Updates that are submitted at once.
const MOST: usize = 32;

impl Cuda {
    /// The number of updates at the front of the queue that can be submitted together.
    pub(super) fn together(&mut self, queue: &VecDeque<Work>) -> usize {
        let (mut room, mut count) = (self.summing.banks.room().min(BYTES), 0);
        for work in queue.iter().take(MOST) {
            match self.pinned_bytes(work).and_then(|bytes| room.checked_sub(bytes)) {
                Some(left) => (room, count) = (left, count + 1),
                None => break,
            }
        }
        count
    }

    /// Bytes that an update's gradients take in a bank; none for work that copies other memory than pinned memory, or
    /// whose gradients are of two types or too many for a kernel.
    fn pinned_bytes(&mut self, work: &Work) -> Option<u64> {
        let Work::Update { slot, gradients, is_summed: false, into, .. } = work else { return None };
        let element_type = gradients.first()?.element_type;
        let are_alike = gradients.iter().all(|gradient| gradient.element_type == element_type);
        let is_well = self.chunks.slots[slot.0 as usize].broken.is_none();
        if !is_well || !are_alike || GRADIENTS_MAX < gradients.len() {
            return None;
        }
        let is_pinned = gradients.iter().all(|gradient| self.arenas.lock(&gradient.lease)) && self.arenas.lock(into);
        is_pinned.then(|| gradients.iter().map(|gradient| aligned(gradient.bytes.into())).sum())
    }

    /// Submits this many updates of the queue, as [`Cuda::together`] has counted them. A driver error is the outcome of
    /// each, or makes the device lost; of a kernel that cannot be launched it is that of its update and of those
    /// behind.
    pub(super) fn begin_together(&mut self, queue: &mut VecDeque<Work>, count: usize) -> Result<(), Failure> {
        let FreeEvents { place, end, mut works } = self.events.free.pop().expect("the caller checked has_room");
        works.extend(queue.drain(..count));
        let number = self.summing.banks.turn();
        let bank = self.summing.banks.bank(number);
        self.prepared.launches.clear();
        self.prepared.pinned.clear();
        let mut filled = 0;
        for (at, work) in works.iter().enumerate() {
            let Work::Update { slot, numbers, gradients, .. } = work else { unreachable!("updates were counted") };
            let slot = &mut self.chunks.slots[slot.0 as usize];
            slot.check(work);
            slot.is_busy = true;
            let mut launch = slot.arguments();
            slot.set_numbers(&mut launch, numbers, &mut self.prepared.packed);
            launch.count = u32::try_from(gradients.len()).expect("a kernel takes them");
            launch.gradient_kind = ElementKind::of(gradients[0].element_type).code();
            for (index, gradient) in gradients.iter().enumerate() {
                let bytes = u64::from(gradient.bytes);
                let part = bank.part.part(filled..filled + bytes);
                launch.gradients[index] = part.address();
                self.prepared.pinned.push((at * GRADIENTS_MAX + index, part));
                filled += aligned(bytes);
            }
            self.prepared.launches.push(launch);
        }
        let ticket = self.streams.hold(SubmittedWork { works, place }, end);
        let mut launched = 0;
        match self.submit_together(ticket, number, &mut launched) {
            Ok(None) => Ok(()),
            Ok(Some(refused)) => {
                self.outcomes.failed.push(FailedWork { ticket, refused, complete: launched, written: launched });
                Ok(())
            }
            Err(refused) => self.fail_work(ticket, refused, launched),
        }
    }

    /// Counts the kernels that are launched; returns the error of the first that cannot be, behind which none is.
    fn submit_together(
        &mut self,
        ticket: Ticket,
        bank: usize,
        launched: &mut usize,
    ) -> Result<Option<DriverError>, DriverError> {
        let bank = self.summing.banks.bank(bank);
        self.streams.wait(StreamId::In, &bank.used)?;
        self.streams.copy_all_in(ticket, &mut self.prepared.pinned, gradient)?;
        self.streams.record(StreamId::In, &bank.filled)?;
        self.streams.wait(StreamId::Compute, &bank.filled)?;
        let mut refused = None;
        for (at, launch) in self.prepared.launches.iter().enumerate() {
            let slot = &self.chunks.slots[self.streams.value(ticket).works[at].slot().0 as usize];
            match self.streams.launch(&slot.program.entry, grid(launch.elements), launch) {
                Err(error) if error.is_of_the_call() => {
                    refused = Some(error);
                    break;
                }
                launched => launched?,
            }
            *launched += 1;
            self.prepared.pinned.push((at, slot.parameter.clone()));
        }
        self.streams.record(StreamId::Compute, &bank.used)?;
        self.streams.wait(StreamId::Out, &bank.used)?;
        self.streams.copy_all_out(ticket, &mut self.prepared.pinned, |job, at| into(job, at).bytes_mut())?;
        self.streams.close(StreamId::Out, ticket)?;
        Ok(refused)
    }
}

/// The gradient of this number, which has the number of its update in it.
fn gradient(job: &SubmittedWork, number: usize) -> &[u8] {
    let Work::Update { gradients, .. } = &job.works[number / GRADIENTS_MAX] else {
        unreachable!("updates were counted")
    };
    gradients[number % GRADIENTS_MAX].gradient().bytes
}

fn into(job: &mut SubmittedWork, at: usize) -> &mut Lease {
    let Work::Update { into, .. } = &mut job.works[at] else { unreachable!("updates were counted") };
    into
}
