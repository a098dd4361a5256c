//! Optimizer state, fetched and replaced part by part: each state tensor, or rows of it, and the number of updates that
//! the state has seen.

use super::chunk_table::unknown;
use super::frames::decode;
use super::reply::Refusal;
use super::serving::Serving;
use crate::limits::STATE_UPDATES_MAX;
use crate::wire::{Entry, Flags, Frame, StateMessage};

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
}
