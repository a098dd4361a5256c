//! Pulls: of values and rows, answered now or when their version is there, and of the optimizer's state as it is.
//!
//! Not here: the answers (`answers`, `rows_answers`, `half_precision`).

use std::sync::Arc;

use super::chunk_table::unknown;
use super::context::Context;
use super::contribution::Contribution;
use super::group::SlotIndex;
use super::reply::Refusal;
use super::serving::Serving;
use super::states::state_of;
use super::waiters::{RowsRequest, Waiter};
use crate::accumulator::AccumulatorPace;
use crate::ids::{PeerId, Round, Version};
use crate::memory::{Lease, Value};
use crate::wire::{Entry, ErrorCode, Flags, Frame, StateMessage};

impl Serving {
    /// Answers a pull, or queues it until its version exists.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        peer: PeerId,
        frame: &Frame,
        body: impl IntoIterator<Item = Lease>,
    ) -> Result<(), Refusal> {
        let slot_indices =
            frame.entries.iter().map(|entry| self.table.slot_index(entry.id).ok_or_else(|| unknown(entry.id)));
        let slot_indices = slot_indices.collect::<Result<Vec<_>, _>>()?;
        if let Some(about) = state_of(frame)? {
            return self.pull_state(cx, peer, frame, (about, body));
        }
        self.check_requests(frame, &slot_indices)?;
        self.waits.check(self.table.chunks.len(), peer, frame.entries.len())?;
        let mut body = body.into_iter();
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            let is_bucket = self.table.chunks[slot_index].bucket().is_some();
            let ids = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let wish = is_bucket.then_some(RowsRequest { ids, bytes: entry.bytes });
            let (version, half) = (self.awaited_version(slot_index, frame, entry), entry.half);
            self.answer_or_wait(cx, slot_index, Waiter { peer, head: frame.head, version, since: cx.now, half, wish });
        }
        Ok(())
    }

    /// The version that an entry of a pull waits for. Without rounds, a pull of the step waits for the trainer's own
    /// gradients that are not in the value yet, such as those on their way to an accelerator.
    fn awaited_version(&self, slot_index: SlotIndex, frame: &Frame, entry: &Entry) -> Version {
        let (chunk, trainer) = (&self.table.chunks[slot_index], frame.head.trainer);
        let is_of_step = frame.head.flags.contains(Flags::OF_STEP);
        if !is_of_step || self.flows.of(slot_index).pace == AccumulatorPace::Rounds {
            return Version(entry.round.0);
        }
        let entered = chunk.round.contributors();
        let before = |one: &Contribution| {
            let earlier = chunk.round.all_ahead().iter().filter(|other| other.sending.arrival <= one.sending.arrival);
            entered + earlier.count()
        };
        let open = match chunk.round.contribution(trainer) {
            Some(_) => entered,
            None => chunk.round.ahead(trainer).map_or(0, before),
        };
        Version(entry.round.0.max(chunk.version.0 + open as u64))
    }

    /// Answers a pull of the optimizer's state as it is now: with copies of a state tensor, or without payload. The
    /// entries have the number of updates that the state has seen. Of a bucket it asks for rows by their ids, or for
    /// learning rates as a list.
    pub(super) fn pull_state(
        &mut self,
        cx: &mut Context<'_>,
        peer: PeerId,
        frame: &Frame,
        (about, body): (StateMessage, impl IntoIterator<Item = Lease>),
    ) -> Result<(), Refusal> {
        let mut answers = Vec::with_capacity(frame.entries.len());
        let (mut rows, mut body) = (Vec::new(), body.into_iter());
        for entry in &frame.entries {
            self.check_state_entry(entry, about, false)?;
            let payload = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let slot_index = self.table.slot_index(entry.id).expect("the entry was just checked");
            let chunk = &self.table.chunks[slot_index];
            let bare = Entry { round: Round(chunk.updates()), ..chunk.version_entry() };
            if let Some(ids) = payload {
                let wish = Some(RowsRequest { ids: Some(ids), bytes: entry.bytes });
                let version = chunk.version;
                rows.push((slot_index, Waiter { wish, ..Waiter::new(peer, frame.head, version, cx.now) }));
                continue;
            }
            let Some(state) = about.state.filter(|_| chunk.bucket().is_none()) else {
                answers.push((bare, None));
                continue;
            };
            let lease = cx.pool.take(chunk.bytes);
            let lease = lease.map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
            let (mut value, length) = (Value::new(lease, chunk.bytes), chunk.bytes as usize);
            value.bytes_mut().copy_from_slice(&chunk.states[state as usize].bytes()[..length]);
            answers.push((Entry { bytes: chunk.bytes, ..bare }, Some(Arc::new(value))));
        }
        for (entry, value) in answers {
            match value {
                Some(value) => cx.replies.value(peer, &frame.head, entry, value),
                None => cx.replies.done(peer, &frame.head, entry),
            }
        }
        for (slot_index, waiter) in rows {
            self.answer_rows(cx, slot_index, waiter, Some(about));
        }
        Ok(())
    }

    /// Refuses requests for rows of a dense chunk, and for half precision of a bucket.
    fn check_requests(&self, frame: &Frame, slot_indices: &[SlotIndex]) -> Result<(), Refusal> {
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            self.programs.check_running(*slot_index)?;
            self.check_half(*slot_index, entry)?;
            if entry.bytes > 0 && self.table.chunks[*slot_index].bucket().is_none() {
                let name = self.table.held(entry.id).name();
                return Err(Refusal::invalid(format!("parameter \"{name}\" is not sparse: it has no rows to ask for")));
            }
        }
        Ok(())
    }
}
