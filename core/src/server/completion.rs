//! Completion of rounds: whether a chunk's open round, or the one after it, has every gradient that it waits for, and
//! whether its update may be made.

use super::chunk::Chunk;
use super::contribution::Contribution;
use super::device_chunk::DeviceActivity;
use super::group::SlotIndex;
use super::serving::Serving;
use crate::accumulator::AccumulatorPace;
use crate::ids::TrainerId;

impl Serving {
    /// Whether the open round of a chunk is decided: where each gradient is a round of its own, once one has entered.
    #[inline]
    pub(super) fn is_decided(&self, pace: AccumulatorPace, slot_index: SlotIndex) -> bool {
        let chunk = &self.table.chunks[slot_index];
        match pace {
            AccumulatorPace::Rounds => 0 < chunk.decided,
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => !chunk.round.is_empty(),
        }
    }

    /// Whether a chunk's open round can be complete without gradients of these trainers.
    pub(super) fn can_do_without(&self, slot_index: SlotIndex, lost: &[TrainerId]) -> bool {
        let round = &self.table.chunks[slot_index].round;
        let missing = || self.awaited(slot_index).filter(|trainer| round.contribution(*trainer).is_none());
        let coming = missing().filter(|trainer| !lost.contains(trainer)).count();
        coming == missing().count() || self.flows.of(slot_index).count as usize <= round.contributors() + coming
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

    /// Whether the open round of a chunk, or the one after it, has a gradient of every awaited trainer, or as many as
    /// complete it.
    #[inline]
    pub(super) fn is_round_complete(&self, slot_index: SlotIndex, is_next: bool) -> bool {
        let Chunk { round, version, .. } = &self.table.chunks[slot_index];
        let count = self.flows.of(slot_index).count;
        // Early contributions enter first, those of departed trainers too.
        let enters = |one: &Contribution| !is_next && one.round.0 == version.0 + 1;
        round.is_complete(is_next, count, self.awaited(slot_index)) && !round.all_ahead().iter().any(enters)
    }
}
