//! Sets: a trainer replaces values, or the optimizer's state, also of rows. A set that arrives behind updates in
//! progress is deferred, and applied after the updates that arrived before it: a step of its unit that is no update, as
//! is the return of a chunk from a device that has failed.

use super::bucket::rates_of;
use super::call::CallId;
use super::context::Context;
use super::contribution::{DeferredSet, Replacement, RowsLease};
use super::device_chunk::DeviceActivity;
use super::frames::Leases;
use super::group::SlotIndex;
use super::serving::Serving;
use super::states::state_of;
use crate::accumulator::AccumulatorPace;
use crate::ids::{PeerId, Version};
use crate::port::Work;
use crate::wire::{Entry, Frame, Head, StateMessage};

impl Serving {
    /// Applies a set; a duplicate changes nothing.
    pub(super) fn set(&mut self, cx: &mut Context<'_>, frame: &Frame, body: Leases) {
        let call = CallId::of(&frame.head);
        self.stalls.note_admitted(frame.head.trainer);
        for (entry, replacement) in frame.entries.iter().zip(self.replacements(frame, body)) {
            let slot_index = self.table.slot_index(entry.id).expect("the entry was checked");
            if cx.is_before_restored(&self.table.chunks[slot_index]) {
                continue;
            }
            if let Some(replacement) = self.defer_set(cx, (slot_index, entry), frame, replacement) {
                self.apply_set(cx, slot_index, call, (cx.peer, &frame.head), replacement);
            }
        }
    }

    /// Count of updates that would be complete if updates took no time.
    fn pending(&self, slot_index: SlotIndex) -> u64 {
        let chunk = &self.table.chunks[slot_index];
        match self.flows.of(slot_index).pace {
            AccumulatorPace::Rounds => u64::from(chunk.decided),
            AccumulatorPace::Any if chunk.group.is_none() => {
                (chunk.round.contributors() + chunk.round.all_ahead().len()) as u64
            }
            // A contribution may wait for others; while a complete one waits, no set is accepted.
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => 0,
        }
    }

    /// Defers a set while the chunk's device slot is busy or earlier updates are pending; returns it otherwise.
    pub(super) fn defer_set(
        &mut self,
        cx: &Context<'_>,
        (slot_index, entry): (SlotIndex, &Entry),
        frame: &Frame,
        replacement: Replacement,
    ) -> Option<Replacement> {
        let call = CallId::of(&frame.head);
        let pending = self.pending(slot_index);
        let chunk = &mut self.table.chunks[slot_index];
        let is_busy = chunk.on_device.as_ref().is_some_and(|on_device| on_device.is_busy());
        let waits = 0 < pending || is_busy || chunk.deferred_set.is_some();
        if !waits || chunk.heard(frame.head.trainer).set.covers(call) {
            return Some(replacement);
        }
        let since = cx.peer.map(|_| cx.now);
        match &mut chunk.deferred_set {
            // A resend: the answer goes to its connection.
            Some(deferred_set) => {
                (deferred_set.peer, deferred_set.head, deferred_set.since) = (cx.peer, frame.head, since)
            }
            none => {
                let after = Version(chunk.version.0 + pending);
                let (peer, head, entry, control) = (cx.peer, frame.head, *entry, frame.control.clone());
                let set = DeferredSet { replacement, call, peer, head, after, entry, control, since };
                *none = Some(Box::new(set));
            }
        }
        self.waits.note(slot_index, &mut self.table.chunks[slot_index]);
        None
    }

    /// Applies a set unless it is a duplicate, and answers.
    pub(super) fn apply_set(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: SlotIndex,
        call: CallId,
        (peer, head): (Option<PeerId>, &Head),
        replacement: Replacement,
    ) {
        let has_rounds = self.flows.of(slot_index).pace == AccumulatorPace::Rounds && 1 < self.job.trainers;
        let chunk = &mut self.table.chunks[slot_index];
        // A chunk without an update, such as a buffer's, has no value of a step.
        let keeps = has_rounds && 0 < chunk.version.0;
        let heard = chunk.heard_mut(head.trainer);
        let is_new = !heard.set.covers(call);
        let replaces_value = is_new && matches!(replacement, Replacement::Value(_));
        if is_new {
            heard.set = call;
            match replacement {
                Replacement::Value(lease) => {
                    if keeps {
                        chunk.keep_of_step();
                    }
                    chunk.set_value(cx.pool, lease);
                }
                Replacement::State(state, lease) => chunk.states[state] = lease,
                // The check keeps both below 2^62.
                Replacement::Updates(updates) => chunk.set_updates(updates),
                Replacement::Rows(tensor, rows) => {
                    let bucket = chunk.bucket_mut().expect("rows are of a bucket");
                    if let Err(failure) = bucket.replace(&mut self.rows_room, cx.kernels, &rows, tensor) {
                        // Room is reserved before a set is journalled.
                        tracing::error!("rows that were set are lost: {failure}");
                    }
                }
                Replacement::Progress(updates, rates) => {
                    chunk.set_updates(updates);
                    let bucket = chunk.bucket_mut().expect("it is a bucket's");
                    bucket.renumber(&mut self.rows_room, cx.kernels, updates, rates);
                }
            }
        }
        cx.replies.done(peer, head, chunk.version_entry());
        if replaces_value {
            self.load_value(cx, slot_index);
        }
    }

    /// Loads a replaced value to the device, if the chunk lives on one.
    fn load_value(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
        let chunk = &mut self.table.chunks[slot_index];
        let parameter = chunk.on_device.is_some().then(|| chunk.value());
        if let (Some(on_device), Some(parameter)) = (&mut chunk.on_device, parameter) {
            on_device.doing = DeviceActivity::Loading;
            cx.device().push(Work::Load { slot: on_device.slot, parameter, states: Vec::new() });
        }
    }

    /// The replacements of a set, one for each entry.
    fn replacements(&self, frame: &Frame, body: Leases) -> Vec<Replacement> {
        let about = state_of(frame).expect("the message was checked");
        let mut body = body.into_iter();
        let replacement = |entry: &Entry| {
            let lease = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let (bytes, element_type) = (entry.bytes, entry.element_type);
            match (about, lease) {
                (Some(StateMessage { state: None, updates }), lease) if self.table.is_of_rows(entry) => {
                    let rates = lease.map(|lease| rates_of(&lease.bytes()[..bytes as usize]));
                    Replacement::Progress(updates, rates.unwrap_or_default())
                }
                (Some(StateMessage { state: None, updates }), _) => Replacement::Updates(updates),
                (about, Some(lease)) if self.table.is_of_rows(entry) => {
                    let tensor = about.and_then(|about| about.state).map_or(0, |state| state as usize + 1);
                    Replacement::Rows(tensor, RowsLease { lease, bytes, element_type })
                }
                (Some(StateMessage { state: Some(state), .. }), Some(lease)) => {
                    Replacement::State(state as usize, lease)
                }
                (None, Some(lease)) => Replacement::Value(lease),
                (_, None) => unreachable!("a set of a value or of a state was checked for its payload"),
            }
        };
        frame.entries.iter().map(replacement).collect()
    }

    /// Makes the steps of a unit that are no updates: a chunk whose device has failed returns to the processor, with
    /// its pending requests, and a deferred set that is due is applied. True where a set was.
    #[inline]
    pub(super) fn step_aside(&mut self, cx: &mut Context<'_>, slot_indices: &[SlotIndex]) -> bool {
        let may = slot_indices.iter().any(|slot_index| self.table.chunks[*slot_index].may_step_aside());
        may && self.step_aside_now(cx, slot_indices)
    }

    fn step_aside_now(&mut self, cx: &mut Context<'_>, slot_indices: &[SlotIndex]) -> bool {
        let mut is_any = false;
        for slot_index in slot_indices.iter().copied() {
            let chunk = &mut self.table.chunks[slot_index];
            chunk.on_device.take_if(|on_device| on_device.has_left());
            if self.is_set_due(slot_index)
                && let Some(deferred_set) = self.table.chunks[slot_index].deferred_set.take()
            {
                let DeferredSet { replacement, call, peer, head, .. } = *deferred_set;
                self.apply_set(cx, slot_index, call, (peer, &head), replacement);
                is_any = true;
            }
        }
        is_any
    }

    /// Whether every update before a chunk's deferred set is made, and its device idle.
    fn is_set_due(&self, slot_index: SlotIndex) -> bool {
        let chunk = &self.table.chunks[slot_index];
        let is_over = |deferred_set: &DeferredSet| deferred_set.after <= chunk.version || self.pending(slot_index) == 0;
        chunk.deferred_set.as_deref().is_some_and(is_over) && !chunk.is_at_work()
    }
}
