//! Recording of received frames: the last checks of their payloads, their journal record, and then their application.

use super::context::Origin;
use super::frames::{Admitted, ReceivedFrame};
use super::initialisation::take;
use super::presence::TrainerLife;
use super::reply::{Refusal, Replies, RetryReason};
use super::shard::{Phase, Shard};
use crate::ids::PeerId;
use crate::port::{Incoming, ReceiveBuffers};
use crate::time::Now;
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
        let is_mutating = frame.head.kind.is_mutating();
        if is_mutating {
            self.check_recorded(arrived.now, replies)?;
        }
        let is_logged = is_mutating && !self.is_recorded_with_rounds(frame, admitted);
        self.copy_foreign(frame, &mut body, is_logged)?;
        self.screen(frame, admitted, &mut body)?;
        if let Phase::Serving(serving) = &mut self.phase {
            serving.check_rows(frame, body.iter().map(Incoming::bytes), Origin::Live)?;
            serving.settle_set(frame, body.iter().map(Incoming::bytes), self.kernels.as_mut(), self.replays)?;
        }
        if frame.head.kind == Kind::Finish {
            self.check_room(frame)?;
        }
        if is_mutating {
            self.begin_run(&frame.head, Origin::Live)?;
        }
        if is_logged {
            let appended = self.journal.append(frame, body.iter().map(Incoming::bytes));
            appended.map_err(|refusal| self.without_end(refusal))?;
            arrived.origin = Origin::Live;
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

    /// Refuses a frame that changes state while rounds that were decided before it wait for their record.
    fn check_recorded(&mut self, now: Now, replies: &mut Replies) -> Result<(), Refusal> {
        let lacks = |phase: &Phase| matches!(phase, Phase::Serving(serving) if serving.lacks_records());
        if !self.has_journal() || !lacks(&self.phase) {
            return Ok(());
        }
        if let Some((serving, mut cx)) = self.serving(now, None, Origin::Unlogged, replies) {
            serving.record_again(&mut cx);
        }
        if !lacks(&self.phase) {
            return Ok(());
        }
        let text = "the journal cannot be written: rounds that were decided before wait for their record";
        Err(Refusal::new(ErrorCode::Busy, text).behind(Some(RetryReason::Disk)))
    }

    /// Whether the gradients of a push come to the journal with the records of their rounds alone. Their trainer waits
    /// for its answer until then, and repeats the push after a restart.
    fn is_recorded_with_rounds(&self, frame: &Frame, admitted: &[Admitted]) -> bool {
        let Phase::Serving(serving) = &self.phase else { return false };
        frame.head.kind == Kind::Push
            && self.has_journal()
            && !serving.is_rejoin(&frame.head)
            && !serving.is_new(self.trainers.run_of(TrainerLife::of(&frame.head)))
            && serving.is_recorded_with_rounds(frame, admitted)
    }

    /// Copies payloads out of their sender's memory, where it may write: rows and ids, which are checked before they
    /// are used, and all of a frame that is journalled before it is applied.
    fn copy_foreign(&mut self, frame: &Frame, body: &mut [Incoming], is_logged: bool) -> Result<(), Refusal> {
        let is_all = is_logged && self.has_journal();
        let has_rows = matches!(&self.phase, Phase::Serving(serving) if serving.table.has_rows);
        if !is_all && !has_rows {
            return Ok(());
        }
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (entry, incoming) in entries.zip(body) {
            let is_of_rows = matches!(&self.phase, Phase::Serving(serving) if serving.table.is_of_rows(entry));
            if let Incoming::Chunk { lease, bytes } = incoming
                && lease.is_foreign()
                && (is_all || is_of_rows)
            {
                let own = take(&self.phase, &mut self.pool, entry);
                let mut own = own.map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
                lease.copy_to(&mut own.bytes_mut()[..*bytes as usize]);
                *lease = own;
            }
        }
        Ok(())
    }
}
