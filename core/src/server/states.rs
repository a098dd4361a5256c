//! Optimizer state, fetched and replaced part by part: each state tensor, or rows of it, and the number of updates that
//! the state has seen.

use std::sync::Arc;

use super::context::Context;
use super::frames::decode;
use super::initialisation::unknown;
use super::reply::Refusal;
use super::serving::Serving;
use super::waiters::{RowsRequest, Waiter};
use crate::ids::{PeerId, Round};
use crate::limits::STATE_UPDATES_MAX;
use crate::memory::{Lease, Value};
use crate::wire::{Entry, ErrorCode, Flags, Frame, StateMessage};

/// The part of the optimizer's state that a frame is about; none for a frame about values.
pub(super) fn state_of(frame: &Frame) -> Result<Option<StateMessage>, Refusal> {
    frame.head.flags.contains(Flags::STATE).then(|| decode(&frame.control)).transpose()
}

impl Serving {
    /// Checks an entry about the optimizer's state. In a set it brings what its message says.
    pub(super) fn check_state_entry(&self, entry: &Entry, about: StateMessage, is_set: bool) -> Result<(), Refusal> {
        let slot_index = self.table.slot_index(entry.id).ok_or_else(|| unknown(entry.id))?;
        let (chunk, held) = (&self.table.chunks[slot_index], self.table.held(entry.id));
        let refuse = |text: String| Err(Refusal::invalid(format!("parameter \"{}\": {text}", held.name())));
        if chunk.on_device.is_some() {
            return refuse("its optimizer state is on a device; expected a parameter on a processor".to_owned());
        }
        let states = if chunk.bucket().is_some() { chunk.rule.states().len() } else { chunk.states.len() };
        if let Some(state) = about.state.filter(|state| states <= *state as usize) {
            return refuse(format!("optimizer state {state}; expected one of {states}, from 0"));
        }
        if about.updates > STATE_UPDATES_MAX {
            return refuse(format!("a state after {} updates; expected at most {STATE_UPDATES_MAX}", about.updates));
        }
        if let Some(plan) = &held.rows {
            return match (is_set, about.state) {
                (true, Some(_)) => plan.check_set(held.name(), entry),
                // The payload is checked when it is there.
                _ => Ok(()),
            };
        }
        let expected = if is_set && about.state.is_some() { chunk.bytes } else { 0 };
        if entry.bytes != expected || entry.element_type != chunk.element_type {
            let (found, bytes, declared) = (entry.element_type, entry.bytes, chunk.element_type);
            return refuse(format!("{bytes} bytes of {found} for its state; expected {expected} of {declared}"));
        }
        Ok(())
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
}
