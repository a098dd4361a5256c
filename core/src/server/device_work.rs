//! Work of an accelerator that has ended or failed, and chunks that a checkpoint holds until their states are written.
//!
//! Not here: the updates that begin it (`update`).

use super::chunk::Chunk;
use super::chunk_table::ChunkTable;
use super::context::Context;
use super::device::Device;
use super::device_chunk::{DeviceActivity, DeviceSum};
use super::group::SlotIndex;
use super::serving::Serving;
use crate::error::Failure;
use crate::ids::ChunkId;
use crate::port::{Done, Kernels, Work};

impl Serving {
    /// Handles completions and continues their chunks.
    pub(super) fn completed(&mut self, cx: &mut Context<'_>, done: Vec<Done>) -> Result<(), Failure> {
        for Done { work, outcome } in done {
            let slot_index = cx.device().slot_index(work.slot());
            let chunk = &mut self.table.chunks[slot_index];
            let was_awaited = chunk.is_awaited();
            match outcome {
                Ok(()) => chunk.ended(cx.kernels, work),
                Err(failure) => self.failed(cx, slot_index, work, &failure)?,
            }
            if !self.note_over(slot_index, was_awaited) {
                self.continue_unit(cx, slot_index);
            }
        }
        Ok(())
    }

    /// Continues the chunks that a checkpoint released.
    pub(super) fn go_on_released(&mut self, cx: &mut Context<'_>) {
        for slot_index in std::mem::take(&mut cx.device().released) {
            self.continue_unit(cx, slot_index);
        }
    }

    fn continue_unit(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
        self.run(cx, slot_index, None);
        self.store_held(cx.device(), slot_index);
    }

    /// Stores the states of a chunk that a checkpoint holds.
    fn store_held(&mut self, device: &mut Device, slot_index: SlotIndex) {
        let chunk = &mut self.table.chunks[slot_index];
        if chunk.on_device.as_ref().is_some_and(|on_device| on_device.is_held) {
            chunk.store(device);
        }
    }

    /// Handles failed work: the chunk returns to the processor, if its states are available.
    fn failed(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: SlotIndex,
        work: Work,
        failure: &Failure,
    ) -> Result<(), Failure> {
        let id = self.table.chunks[slot_index].id;
        let what = format!(
            "parameter {:?} chunk {}: {} on {}: {failure}",
            self.table.held(id).name(),
            id.chunk,
            work.name(),
            cx.device().name()
        );
        let chunk = &mut self.table.chunks[slot_index];
        let was = chunk
            .on_device
            .as_mut()
            .map(|on_device| std::mem::take(&mut on_device.doing))
            .expect("it lives on a device");
        let kept = chunk.keep_states(work);
        let on_device = chunk.on_device.as_mut().expect("it lives on a device");
        let is_whole = matches!(failure, Failure::Call(_));
        match was {
            _ if on_device.is_fresh => {
                tracing::warn!("{what}; the chunk continues on the processor");
                chunk.return_to_host(cx.kernels, kept);
            }
            DeviceActivity::Storing if is_whole => {
                on_device.not_stored = Some(what);
            }
            DeviceActivity::Loading | DeviceActivity::Summing | DeviceActivity::Updating if is_whole => {
                tracing::warn!("{what}; its states are copied back and the chunk continues on the processor");
                on_device.doing = DeviceActivity::Leaving(kept.map(Box::new));
                let (slot, states) = (on_device.slot, std::mem::take(&mut chunk.states));
                cx.device().push(Work::Store { slot, states });
            }
            _ => return Err(cx.device().lose(format!("{what}: its states are lost"))),
        }
        Ok(())
    }

    /// Prepares about `bytes` of chunks from `first` on for a checkpoint: finishes their work in flight, stores their
    /// states, and holds their next update until they are written. True when the first chunk is ready.
    ///
    /// # Errors
    /// When its states cannot be stored.
    pub(super) fn hold_for_checkpoint(
        &mut self,
        device: &mut Device,
        first: ChunkId,
        bytes: u64,
    ) -> Result<bool, Failure> {
        let slot_index = self.table.slot_index(first).expect("the layout is of these chunks");
        let unit = self.table.unit(slot_index);
        let of_unit = || unit.slot_indices().iter();
        let mut on_device_chunks = of_unit().filter_map(|slot_index| self.table.chunks[*slot_index].on_device.as_ref());
        if on_device_chunks.all(|on_device| on_device.is_writable()) {
            return Ok(true);
        }
        self.hold_from(device, first, bytes);
        let mut on_device_chunks = of_unit().filter_map(|slot_index| self.table.chunks[*slot_index].on_device.as_ref());
        let not_stored = on_device_chunks.find_map(|on_device| on_device.not_stored.clone());
        not_stored.map_or(Ok(false), |text| Err(Failure::Call(text)))
    }

    fn hold_from(&mut self, device: &mut Device, first: ChunkId, bytes: u64) {
        let ChunkTable { parameters, chunks, .. } = &mut self.table;
        let mut held = 0;
        for parameter in parameters.range(first.parameter..).map(|(_, parameter)| parameter) {
            let from = parameter.chunks.partition_point(|slot_index| chunks[*slot_index].id < first);
            // A group is written together.
            let is_whole = parameter.chunks.first().is_some_and(|slot_index| chunks[*slot_index].group.is_some());
            for slot_index in &parameter.chunks[from..] {
                held += chunks[*slot_index].hold(device);
                if bytes <= held && !is_whole {
                    return;
                }
            }
            if bytes <= held {
                return;
            }
        }
    }

    /// Stores the states of every idle chunk.
    pub(super) fn store_all(&mut self, device: &mut Device) {
        self.table.chunks.iter_mut().for_each(|chunk| chunk.store(device));
    }

    /// The first failure to store states, if any.
    pub(super) fn not_stored(&mut self) -> Option<String> {
        self.table.chunks.iter_mut().find_map(|chunk| chunk.on_device.as_mut()?.not_stored.take())
    }

    /// Clears failures to store states, so that they are tried again.
    pub(super) fn forget_not_stored(&mut self) {
        self.table
            .chunks
            .iter_mut()
            .filter_map(|chunk| chunk.on_device.as_mut())
            .for_each(|on_device| on_device.not_stored = None);
    }

    /// Releases every chunk that a checkpoint holds.
    pub(super) fn release_held(&mut self, device: &mut Device) {
        for (slot_index, chunk) in self.table.chunks.placed_mut() {
            if chunk.release() {
                device.released.push(slot_index);
            }
        }
    }
}

impl Chunk {
    /// Stores the states to host memory, if they are stale and the chunk is idle.
    fn store(&mut self, device: &mut Device) {
        let Some(on_device) = &mut self.on_device else { return };
        if on_device.is_fresh || on_device.not_stored.is_some() || !matches!(on_device.doing, DeviceActivity::Nothing) {
            return;
        }
        on_device.doing = DeviceActivity::Storing;
        device.push(Work::Store { slot: on_device.slot, states: std::mem::take(&mut self.states) });
    }

    /// Holds the next update until the chunk is written, and stores the states; returns the bytes to write.
    fn hold(&mut self, device: &mut Device) -> u64 {
        let bytes = u64::from(self.bytes) * (1 + self.state_count() as u64);
        let Some(on_device) = self.on_device.as_mut().filter(|on_device| !on_device.is_writable()) else {
            return bytes;
        };
        if !on_device.is_held {
            on_device.is_held = true;
            on_device.not_stored = None;
        }
        self.store(device);
        bytes
    }

    /// Releases the chunk; true when it was held.
    pub(super) fn release(&mut self) -> bool {
        self.on_device.as_mut().is_some_and(|on_device| std::mem::take(&mut on_device.is_held))
    }

    /// Handles completed work of its device slot.
    fn ended(&mut self, kernels: &mut dyn Kernels, work: Work) {
        let on_device = self.on_device.as_mut().expect("it lives on a device");
        match (std::mem::take(&mut on_device.doing), work) {
            (DeviceActivity::Leaving(kept), Work::Store { states, .. }) => {
                self.states = states;
                self.return_to_host(kernels, kept.map(|work| *work));
            }
            (_, Work::Store { states, .. }) => {
                self.states = states;
                on_device.is_fresh = true;
            }
            (_, Work::Load { states, .. }) => {
                if !states.is_empty() {
                    self.states = states;
                }
            }
            (_, Work::Sum { gradients, squares, .. }) => {
                on_device.doing = DeviceActivity::Summed(Box::new(DeviceSum { gradients, into: squares }));
            }
            (_, Work::Update { into, .. }) => {
                on_device.is_fresh = on_device.code.states() == 0;
                on_device.doing = DeviceActivity::Updated(into);
            }
        }
    }

    /// Recovers the states from failed work; returns a failed sum or update.
    fn keep_states(&mut self, work: Work) -> Option<Work> {
        match work {
            Work::Load { states, .. } | Work::Store { states, .. } => {
                if !states.is_empty() {
                    self.states = states;
                }
                None
            }
            update @ (Work::Sum { .. } | Work::Update { .. }) => Some(update),
        }
    }
}
