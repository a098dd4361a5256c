//! Replay of the journal after a restart: each record goes through the check and the flow of a live frame, without
//! answers. A chunk restored from a checkpoint takes of the records before its position only the contributions that the
//! checkpoint records as open.

use prost::Message;

use super::call::CallId;
use super::chunk::Chunk;
use super::context::{Context, Origin};
use super::contribution::{Contribution, ContributionStage, DeferredSet, OpenContribution, Replacement};
use super::decided::{RecordedRound, RecordedRounds, RoundsMessage};
use super::frames::{Leases, ReceivedFrame};
use super::group::{GroupIndex, SlotIndices};
use super::presence::TrainerLife;
use super::reply::Replies;
use super::serving::Serving;
use super::shard::{Phase, Shard, run_of, take};
use crate::error::Failure;
use crate::ids::Round;
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
        let (table, payload) = rest.split_at(prefix.rest_bytes());
        let frame = prefix.finish(table).map_err(|error| damaged(error.to_string()))?;
        if frame.head.kind == Kind::Rounds {
            self.catch_up(position);
            return self.replay_rounds(position, frame, payload).map_err(|failure| damaged(failure.to_string()));
        }
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
        let leases = self.leases_of(&frame, payload).map_err(|failure| damaged(failure.to_string()))?;
        if let Phase::Serving(serving) = &mut self.phase {
            // The check passed before the frame was journalled; this call reserves room for new rows.
            let _ = serving.check_rows(&frame, leases.iter().map(Lease::bytes), origin);
        }
        let arrived = ReceivedFrame { now: Now(0), peer: None, position, frame: &frame, admitted: &admitted };
        let _ = self.apply(&arrived, leases, &mut Replies::default());
        Ok(())
    }

    /// The payloads of a record.
    fn leases_of(&mut self, frame: &Frame, mut payload: &[u8]) -> Result<Leases, Failure> {
        let mut leases = Leases::new();
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let (bytes, after) = payload
                .split_at_checked(entry.bytes as usize)
                .ok_or_else(|| Failure::call("it ends within its payload"))?;
            let mut lease = take(&self.phase, &mut self.pool, entry)?;
            lease.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            leases.push(lease);
            payload = after;
        }
        Ok(leases)
    }

    /// Closes the decided rounds of a record, once the decision is whole.
    fn replay_rounds(&mut self, position: u64, frame: Frame, payload: &[u8]) -> Result<(), Failure> {
        // An earlier initialisation's rounds are in no value.
        if self.generation() != frame.head.generation {
            return Ok(());
        }
        let message =
            RoundsMessage::decode(frame.control.as_slice()).map_err(|error| Failure::call(error.to_string()))?;
        let mut leases = self.leases_of(&frame, payload)?.into_iter();
        let earlier = std::mem::take(&mut self.replaying).unwrap_or_default();
        let mut recorded = match message.first {
            None => RecordedRounds { position, rounds: Vec::new() },
            Some(first) if first == earlier.position && !earlier.rounds.is_empty() => earlier,
            Some(first) => {
                return Err(Failure::call(format!("it continues a decision at {first}, which is not there")));
            }
        };
        for (at, entry) in frame.entries.iter().enumerate() {
            let sum = (entry.bytes > 0).then(|| leases.next().expect("there is a lease for every payload"));
            recorded.rounds.push(RecordedRound { entry: *entry, counted: message.counted(at)?, sum });
        }
        if message.continues {
            self.replaying = Some(recorded);
            return Ok(());
        }
        self.replaying = Some(RecordedRounds::default());
        let mut replies = Replies::default();
        match self.serving(Now(0), None, recorded.position, &mut replies) {
            Some((serving, mut cx)) => {
                cx.replay_left = u64::MAX;
                serving.close_recorded(&mut cx, recorded)
            }
            None => Ok(()),
        }
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
        self.replaying = None;
        if let Phase::Serving(serving) = &mut self.phase {
            serving.replayed();
        }
    }

    /// Decides the rounds that were complete when the last process ended.
    pub(super) fn decide_complete(&mut self) {
        self.turn(Now(0), &mut Vec::new(), Serving::decide_complete);
    }
}

impl Serving {
    /// Continues the chunks that the checkpoint wrote with open contributions, up to this journal position.
    pub(super) fn catch_up(&mut self, cx: &mut Context<'_>) {
        while let Some((_, slot_index)) = self.behind.first().copied().filter(|(position, _)| *position <= cx.position)
        {
            self.behind.pop_first();
            self.apply_deferred_set(cx, slot_index);
            self.run(cx, slot_index, None);
            self.apply_deferred_set(cx, slot_index);
        }
    }

    /// Closes decided rounds with the gradients that their record counts.
    fn close_recorded(&mut self, cx: &mut Context<'_>, recorded: RecordedRounds) -> Result<(), Failure> {
        let mut slot_indices = SlotIndices::new();
        for round in recorded.rounds {
            let (id, number) = (round.entry.id, round.entry.round);
            let damaged = |what: String| Failure::Node(format!("round {number} of chunk {id:?}: {what}"));
            let slot_index = self.table.slot_index(id).ok_or_else(|| damaged("there is no such chunk".to_owned()))?;
            if !self.table.chunks[slot_index].take_decided(recorded.position) {
                continue;
            }
            self.take_in(cx, slot_index, None);
            let chunk = &mut self.table.chunks[slot_index];
            let open = Round(chunk.version.0 + 1);
            if number != open || 0 < chunk.decided {
                return Err(damaged(format!("it was decided where round {open} is open")));
            }
            chunk.round.recall(round).map_err(damaged)?;
            chunk.round.set_record(false, recorded.position, |_| {});
            chunk.decided = 1;
            slot_indices.push(slot_index);
        }
        self.advance(cx, &mut slot_indices);
        Ok(())
    }

    /// Ends replay: every later frame is new to every chunk.
    pub(super) fn replayed(&mut self) {
        for chunk in &mut self.table.chunks {
            let restored = chunk.restored.take();
            if restored.is_some_and(|restored| !restored.decided.is_empty()) {
                let (name, number) = (self.table.parameters[&chunk.id.parameter].name(), chunk.id.chunk);
                let round = chunk.version.0 + 1;
                tracing::warn!("parameter {name:?} chunk {number}: round {round} was decided, and the journal lost it");
            }
        }
        // A share whose round the journal does not have is computed anew.
        for group in (0..self.table.groups.len()).map(GroupIndex::new) {
            let first = self.table.groups[group.place()].chunks[0];
            if self.table.chunks[first].decided == 0 {
                self.forget_share(group);
            }
        }
    }

    /// Decides the rounds that were complete when the last process ended.
    pub(super) fn decide_complete(&mut self, cx: &mut Context<'_>) {
        self.run_all(cx, 0..self.table.chunks.len());
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

    /// Restores a set from the journal to its state in the checkpoint: deferred, or dropped. One that waited for a
    /// decided round alone is applied behind it.
    pub(super) fn restore_set(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: usize,
        frame: &Frame,
        replacement: Replacement,
    ) {
        let chunk = &mut self.table.chunks[slot_index];
        if let Some(OpenContribution { stage: ContributionStage::Set(after), call, .. }) =
            chunk.open_in_checkpoint(&frame.head)
        {
            let (peer, head, position) = (cx.peer, frame.head, cx.position);
            let set = DeferredSet { replacement, call, peer, head, after, position, since: None };
            chunk.deferred_set = Some(Box::new(set));
            if after <= chunk.version {
                self.apply_deferred_set(cx, slot_index);
            }
        }
    }
}

impl Chunk {
    /// Whether a frame at this journal position is older than the restored state of this chunk.
    pub(super) fn is_before_restored(&self, position: u64) -> bool {
        self.restored.as_ref().is_some_and(|restored| position < restored.position)
    }

    /// Whether the record of a decided round at this journal position is to be applied: it is newer than the restored
    /// state, or the checkpoint names it as decided and not closed.
    fn take_decided(&mut self, position: u64) -> bool {
        let Some(restored) = self.restored.as_mut().filter(|restored| position < restored.position) else {
            return true;
        };
        restored.decided.extract_if(.., |decided| *decided == position).count() > 0
    }

    /// The checkpoint's record of a frame's contribution, while the chunk is restored.
    pub(super) fn open_in_checkpoint(&self, head: &Head) -> Option<OpenContribution> {
        let call = CallId::of(head);
        let open = self.restored.iter().flat_map(|restored| &restored.open);
        open.copied().find(|one| one.trainer == head.trainer && one.call == call)
    }
}
