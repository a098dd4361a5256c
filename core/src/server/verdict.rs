//! The verdict on a gradient: whether it is new, or a duplicate of one that the value, the round or the next round has.

use super::call::CallId;
use super::chunk::Chunk;
use super::group::SlotIndex;
use super::reply::Refusal;
use super::serving::Serving;
use crate::accumulator::AccumulatorPace;
use crate::ids::Round;
use crate::wire::{ErrorCode, Head};

/// Classification of one entry of a push.
pub(super) enum PushVerdict {
    /// A duplicate: the value contains it.
    Applied,
    /// A duplicate: the open round contains it.
    Contributed,
    /// A duplicate of a gradient that waits for its round.
    Waits,
    /// Too late: its round is complete without it, and not closed yet.
    Late,
    /// A new gradient.
    New,
}

impl Serving {
    pub(super) fn verdict(&self, slot_index: SlotIndex, head: &Head, round: Round) -> Result<PushVerdict, Refusal> {
        let chunk = &self.table.chunks[slot_index];
        if chunk.has_heard(head.trainer, CallId::of(head)) {
            return Ok(PushVerdict::Applied);
        }
        let entered = chunk.round.contribution(head.trainer);
        if entered.is_some_and(|one| one.is_same_call(head)) {
            return Ok(PushVerdict::Contributed);
        }
        match self.flows.of(slot_index).pace {
            AccumulatorPace::Rounds => self.verdict_in_rounds(chunk, head, round, entered.is_some()),
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => self.verdict_alone(chunk, head),
        }
    }

    /// The verdict where a round is a step of all trainers.
    #[inline]
    fn verdict_in_rounds(
        &self,
        chunk: &Chunk,
        head: &Head,
        round: Round,
        has_entered: bool,
    ) -> Result<PushVerdict, Refusal> {
        let open = chunk.version.0 + 1;
        if round.0 == open {
            let other = if 1 <= chunk.decided { PushVerdict::Late } else { PushVerdict::New };
            return Ok(if has_entered { PushVerdict::Contributed } else { other });
        }
        if round.0 < open {
            return Ok(PushVerdict::Applied);
        }
        if round.0 == open + 1 {
            let waits = chunk.round.ahead(head.trainer).is_some();
            let other = if 2 <= chunk.decided { PushVerdict::Late } else { PushVerdict::New };
            return Ok(if waits { PushVerdict::Waits } else { other });
        }
        Err(self.too_far_ahead(chunk, head, round))
    }

    #[cold]
    fn too_far_ahead(&self, chunk: &Chunk, head: &Head, round: Round) -> Refusal {
        let open = chunk.version.0 + 1;
        Refusal::invalid(format!(
            "parameter \"{}\" chunk {}: trainer {} sent round {round} while round {open} is open; it may be one \
             round ahead",
            self.table.held(chunk.id).name(),
            chunk.id.chunk,
            head.trainer
        ))
        .while_at_work(self.is_at_work(chunk))
    }

    /// The verdict where each gradient is a round of its own.
    fn verdict_alone(&self, chunk: &Chunk, head: &Head) -> Result<PushVerdict, Refusal> {
        match chunk.round.ahead(head.trainer) {
            Some(one) if one.is_same_call(head) => return Ok(PushVerdict::Waits),
            Some(_) => {
                let text = format!(
                    "parameter \"{}\" chunk {}: trainer {} already waits with an earlier gradient",
                    self.table.held(chunk.id).name(),
                    chunk.id.chunk,
                    head.trainer
                );
                return Err(Refusal::new(ErrorCode::Busy, text).while_at_work(self.is_at_work(chunk)));
            }
            None => {}
        }
        Ok(PushVerdict::New)
    }
}
