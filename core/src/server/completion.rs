//! Completion of rounds: whether a chunk's open round, or the one after it, has every gradient that it waits for, and
//! whether its update may be made.

use super::device_chunk::DeviceActivity;
use super::group::SlotIndex;
use super::serving::Serving;
use crate::accumulator::AccumulatorPace;

impl Serving {
    /// Whether the open round of a chunk is complete.
    #[inline]
    pub(super) fn is_complete(&self, pace: AccumulatorPace, slot_index: SlotIndex) -> bool {
        let chunk = &self.table.chunks[slot_index];
        let round = &chunk.round;
        match pace {
            // Early contributions enter first, those of departed trainers too.
            AccumulatorPace::Rounds if round.all_ahead().iter().any(|one| one.round.0 == chunk.version.0 + 1) => false,
            AccumulatorPace::Rounds if 0 < chunk.decided => !round.is_empty(),
            AccumulatorPace::Rounds => round.is_complete(self.awaited(slot_index)),
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => !round.is_empty(),
        }
    }

    /// Whether the open round of a chunk is decided: where each gradient is a round of its own, once one has entered.
    #[inline]
    pub(super) fn is_decided(&self, pace: AccumulatorPace, slot_index: SlotIndex) -> bool {
        let chunk = &self.table.chunks[slot_index];
        match pace {
            AccumulatorPace::Rounds => 0 < chunk.decided,
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => !chunk.round.is_empty(),
        }
    }

    /// Whether every awaited trainer has sent a gradient for the round after the open one.
    pub(super) fn is_next_complete(&self, slot_index: SlotIndex) -> bool {
        let round = &self.table.chunks[slot_index].round;
        !round.all_ahead().is_empty() && self.awaited(slot_index).all(|trainer| round.ahead(trainer).is_some())
    }

    /// Whether `update` is ready: its device work is complete, its sum is there (grouped update), or its round is
    /// complete and its device slot idle.
    #[inline]
    pub(super) fn may_update(&self, pace: AccumulatorPace, slot_index: SlotIndex) -> bool {
        match &self.table.chunks[slot_index].on_device {
            None => self.is_decided(pace, slot_index),
            Some(on_device) => match on_device.doing {
                DeviceActivity::Summed(_) | DeviceActivity::Updated(_) => true,
                DeviceActivity::Nothing => !on_device.is_held && self.is_decided(pace, slot_index),
                _ => false,
            },
        }
    }
}
