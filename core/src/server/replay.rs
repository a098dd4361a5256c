//! Replay of the journal after a restart: each record goes through the check and the flow of a live frame, without
//! answers. A chunk restored from a checkpoint takes of the records before its position only the contributions that the
//! checkpoint records as open.

use prost::Message;

use super::call::CallId;
use super::chunk::Chunk;
use super::context::{Context, Origin};
use super::contribution::{Contribution, ContributionStage, DeferredSet, OpenContribution, Replacement};
use super::frames::{Leases, ReceivedFrame};
use super::group::UpdateUnit;
use super::presence::TrainerLife;
use super::reply::Replies;
use super::serving::Serving;
use super::shard::{Phase, Shard, run_of, take};
use crate::error::Failure;
use crate::ids::TrainerId;
use crate::memory::Lease;
use crate::time::Now;
use crate::wire::{Frame, HEADER_BYTES, Head, HelloMessage, Kind, Prefix};

impl Origin {
    /// Whether a frame is older than the restored state of a chunk.
    #[inline]
    pub(super) fn is_before_restored(self, chunk: &Chunk) -> bool {
        matches!(self, Self::Journal(position) if chunk.is_before_restored(position))
    }
}

impl Shard {
    /// Applies one journal record through the check and apply path of live frames, without replies.
    pub(super) fn replay(&mut self, position: u64, record: &[u8]) -> Result<(), Failure> {
        let damaged = |what: String| Failure::Node(format!("journal record at {position}: {what}"));
        let (header, rest) = record.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| damaged("no header".into()))?;
        let prefix = Prefix::decode(header).map_err(|error| damaged(error.to_string()))?;
        if rest.len() < prefix.rest_bytes() {
            return Err(damaged("it ends within its entries".into()));
        }
        let (table, mut payload) = rest.split_at(prefix.rest_bytes());
        let frame = prefix.finish(table).map_err(|error| damaged(error.to_string()))?;
        let who = TrainerLife::of(&frame.head);
        if frame.head.kind == Kind::Hello {
            let hello = HelloMessage::decode(frame.control.as_slice()).map_err(|error| damaged(error.to_string()))?;
            // The checkpoint may know a newer incarnation.
            let _ = self.join(who, run_of(&hello));
            return Ok(());
        }
        let _ = self.trainers.note_incarnation(who.trainer, who.incarnation);
        self.catch_up(position);
        // A frame that was refused live is refused again for the same reason.
        let (origin, mut admitted) = (Origin::Journal(position), Vec::new());
        if self.check_state(&frame, origin, &mut admitted).is_err() {
            return Ok(());
        }
        if self.begin_run(&frame.head, position).is_err() {
            return Ok(());
        }
        let mut leases = Leases::new();
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let (bytes, after) = payload
                .split_at_checked(entry.bytes as usize)
                .ok_or_else(|| damaged("it ends within its payload".into()))?;
            let mut lease = take(&self.phase, &mut self.pool, entry)?;
            lease.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            leases.push(lease);
            payload = after;
        }
        if let Phase::Serving(serving) = &mut self.phase {
            // The check passed before the frame was journalled; this call reserves room for new rows.
            let _ = serving.check_rows(&frame, leases.iter().map(Lease::bytes), origin);
        }
        let arrived = ReceivedFrame { now: Now(0), peer: None, position, frame: &frame, admitted: &admitted };
        let _ = self.apply(&arrived, leases, &mut Replies::default());
        Ok(())
    }

    fn catch_up(&mut self, position: u64) {
        let mut replies = Replies::default();
        if let Some((serving, mut cx)) = self.serving(Now(0), None, position, &mut replies) {
            cx.replay_left = u64::MAX;
            serving.catch_up(&mut cx);
        }
    }

    /// Ends the replay of the journal: every restored chunk counts as past it.
    pub(super) fn replayed(&mut self) {
        self.catch_up(u64::MAX);
        if let Phase::Serving(serving) = &mut self.phase {
            serving.replayed();
        }
    }
}

impl Serving {
    /// Closes the rounds that were complete when the checkpoint wrote their chunks, up to this journal position.
    pub(super) fn catch_up(&mut self, cx: &mut Context<'_>) {
        while let Some((_, slot_index)) = self.behind.first().copied().filter(|(position, _)| *position <= cx.position)
        {
            self.behind.pop_first();
            self.note_lost(slot_index);
            self.apply_deferred_set(cx, slot_index);
            self.run(cx, slot_index, None);
            self.apply_deferred_set(cx, slot_index);
        }
    }

    /// Reopens a sealed round whose contributions a truncated journal has lost.
    fn note_lost(&mut self, slot_index: usize) {
        let chunk = &self.table.chunks[slot_index];
        let held = self.table.held(chunk.id);
        let unit = self.table.unit(slot_index);
        // A total that has not come is sealed by nothing.
        let sealed = unit.slot_indices().iter().filter(|slot_index| self.table.chunks[**slot_index].sealed > 0);
        let sealed = sealed.chain([&slot_index]);
        let found = sealed.map(|slot_index| self.table.chunks[*slot_index].sealed_and_found());
        let (sealed, missing) = found.min_by_key(|(sealed, _)| *sealed).expect("there is a chunk");
        if sealed < chunk.sealed {
            let names: Vec<String> = missing.iter().map(TrainerId::to_string).collect();
            tracing::warn!(
                "parameter {:?} chunk {}: round {} was complete, and the journal has lost what trainer {} sent for it",
                held.name(),
                chunk.id.chunk,
                chunk.version.0 + 1 + u64::from(sealed),
                names.join(", ")
            );
            unit.slot_indices().iter().for_each(|slot_index| self.table.chunks[*slot_index].sealed = sealed);
            if let (UpdateUnit::Group(group, _), 0) = (unit, sealed) {
                self.forget_share(group);
            }
        }
    }

    /// Ends replay: every later frame is new to every chunk.
    pub(super) fn replayed(&mut self) {
        // Sealed rounds are closed by now, or reopened by `note_lost`, but for those that wait for a total.
        for slot_index in 0..self.table.chunks.len() {
            let sealed = if self.awaits_total(slot_index) { self.table.chunks[slot_index].sealed } else { 0 };
            let chunk = &mut self.table.chunks[slot_index];
            (chunk.restored, chunk.sealed) = (None, sealed);
        }
    }

    /// Restores a contribution from the journal to its state in the checkpoint. A contribution that the value contains,
    /// or that was dropped, is ignored.
    pub(super) fn restore_contribution(&mut self, cx: &mut Context<'_>, slot_index: usize, contribution: Contribution) {
        let chunk = &mut self.table.chunks[slot_index];
        let is_it =
            |one: OpenContribution| (one.trainer, one.call) == (contribution.trainer, contribution.sending.call);
        let is_there = chunk.round.open().any(is_it);
        match chunk.open_in_checkpoint(&contribution.sending.head) {
            Some(open) if !is_there && open.stage == ContributionStage::Ahead => chunk.round.add_ahead(contribution),
            Some(_) if !is_there => self.enter(cx, slot_index, contribution),
            _ => {}
        }
    }

    /// Whether this frame is older than the chunk's checkpoint.
    pub(super) fn is_before_restored(&self, cx: &Context<'_>, slot_index: usize) -> bool {
        self.table.chunks[slot_index].is_before_restored(cx.position)
    }

    /// Restores a set from the journal to its state in the checkpoint: deferred, or dropped.
    pub(super) fn restore_set(&mut self, cx: &Context<'_>, slot_index: usize, frame: &Frame, replacement: Replacement) {
        let chunk = &mut self.table.chunks[slot_index];
        if let Some(OpenContribution { stage: ContributionStage::Set(after), call, .. }) =
            chunk.open_in_checkpoint(&frame.head)
        {
            let (peer, head, position) = (cx.peer, frame.head, cx.position);
            let set = DeferredSet { replacement, call, peer, head, after, position, since: None };
            chunk.deferred_set = Some(Box::new(set));
        }
    }
}

impl Chunk {
    /// Whether a frame at this journal position is older than the restored state of this chunk.
    pub(super) fn is_before_restored(&self, position: u64) -> bool {
        self.restored.as_ref().is_some_and(|restored| position < restored.position)
    }

    /// Sealed rounds in the checkpoint whose contributions the journal still has, and the trainers whose contributions
    /// are missing. A round with a missing contribution is not closed.
    pub(super) fn sealed_and_found(&self) -> (u8, Vec<TrainerId>) {
        let Some(restored) = &self.restored else { return (self.sealed, Vec::new()) };
        let missing = |stage| {
            let of_stage = restored.open.iter().filter(move |one| one.stage == stage);
            of_stage.filter(|one| !self.round.open().any(|found| found == **one)).map(|one| one.trainer)
        };
        let entered: Vec<TrainerId> = missing(ContributionStage::Entered).collect();
        let ahead: Vec<TrainerId> = missing(ContributionStage::Ahead).collect();
        match self.sealed {
            0 => (0, Vec::new()),
            _ if !entered.is_empty() => (0, entered),
            2 if !ahead.is_empty() => (1, ahead),
            sealed => (sealed, Vec::new()),
        }
    }

    /// The checkpoint's record of a frame's contribution, while the chunk is restored.
    pub(super) fn open_in_checkpoint(&self, head: &Head) -> Option<OpenContribution> {
        let call = CallId::of(head);
        let open = self.restored.iter().flat_map(|restored| &restored.open);
        open.copied().find(|one| one.trainer == head.trainer && one.call == call)
    }
}
