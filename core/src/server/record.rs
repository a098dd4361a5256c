//! Recording of received frames: the last checks of their payloads, their journal record, and then their application.

use super::context::Origin;
use super::frames::ReceivedFrame;
use super::reply::{Refusal, Replies, RetryReason};
use super::shard::{Phase, Shard};
use crate::ids::PeerId;
use crate::port::{Incoming, ReceiveBuffers};
use crate::wire::{ErrorCode, Frame, Kind};

impl Shard {
    /// Journals a frame that changes state, then applies it.
    pub(super) fn record_and_apply(
        &mut self,
        peer: PeerId,
        mut arrived: ReceivedFrame<'_>,
        mut body: ReceiveBuffers,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { frame, admitted, .. } = arrived;
        self.copy_foreign_rows(frame, &mut body)?;
        self.screen(frame, admitted, &mut body)?;
        if let Phase::Serving(serving) = &mut self.phase {
            serving.check_rows(frame, body.iter().map(Incoming::bytes), Origin::Live)?;
            serving.settle_set(frame, body.iter().map(Incoming::bytes), self.kernels.as_mut(), self.replays)?;
        }
        if frame.head.kind == Kind::Finish {
            self.check_room(frame)?;
        }
        let is_mutating = frame.head.kind.is_mutating();
        if is_mutating {
            self.begin_run(&frame.head, self.journal_position())?;
            arrived.position = self.journal.append(frame, &body).map_err(|refusal| self.without_end(refusal))?;
        }
        let leases = body.into_iter().filter_map(|incoming| match incoming {
            Incoming::Chunk { lease, .. } => Some(lease),
            Incoming::Loan(_) | Incoming::Discard { .. } => None,
        });
        match is_mutating {
            true => self.apply(&arrived, leases.collect(), replies),
            false => self.answer_request(peer, &arrived, leases.collect(), replies),
        }
    }

    /// The refusal of a frame for which the disk has no room, where no checkpoint will make some: before the parameters
    /// are initialised.
    fn without_end(&self, refusal: Refusal) -> Refusal {
        if refusal.behind != Some(RetryReason::Disk) || matches!(self.phase, Phase::Serving(_)) {
            return refusal;
        }
        let text = format!("{}; it is not before the parameters are initialised: expected a larger disk", refusal.text);
        Refusal::invalid(text)
    }

    /// Copies rows and ids out of their sender's memory: the sender may write there between the check and the update.
    fn copy_foreign_rows(&mut self, frame: &Frame, body: &mut [Incoming]) -> Result<(), Refusal> {
        let Phase::Serving(serving) = &self.phase else { return Ok(()) };
        if !serving.has_rows() {
            return Ok(());
        }
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (_, incoming) in entries.zip(body).filter(|(entry, _)| serving.is_of_rows(entry)) {
            if let Incoming::Chunk { lease, bytes } = incoming
                && lease.is_foreign()
            {
                let own = self.pool.take_for_rows(*bytes);
                let mut own = own.map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
                lease.copy_to(&mut own.bytes_mut()[..*bytes as usize]);
                *lease = own;
            }
        }
        Ok(())
    }
}
