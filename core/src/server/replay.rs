//! Replay of the journal after a restart: each record goes through the check and the flow of a live frame, without
//! answers. A chunk restored from a checkpoint takes no record before its position.

use prost::Message;

use super::context::{Context, Origin};
use super::decided::{RecordedRound, RecordedRounds, RoundsMessage, RoundsRecordKind, read_record};
use super::frames::{Leases, ReceivedFrame};
use super::group::{GroupIndex, SlotIndices};
use super::initialisation::take;
use super::joins::run_of;
use super::presence::TrainerLife;
use super::reply::Replies;
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::error::Failure;
use crate::ids::Round;
use crate::memory::Lease;
use crate::time::Now;
use crate::wire::{Frame, HelloMessage, Kind};

impl Shard {
    /// Applies one journal record through the check and apply path of live frames, without replies.
    pub(super) fn replay(&mut self, position: u64, record: &[u8]) -> Result<(), Failure> {
        let damaged = |what: String| Failure::Node(format!("journal record at {position}: {what}"));
        let (frame, payload) = read_record(record).map_err(damaged)?;
        if frame.head.kind == Kind::Rounds {
            return self.replay_rounds(position, frame, payload).map_err(|failure| damaged(failure.to_string()));
        }
        let life = TrainerLife::of(&frame.head);
        if frame.head.kind == Kind::Hello {
            let hello = HelloMessage::decode(frame.control.as_slice()).map_err(|error| damaged(error.to_string()))?;
            // The checkpoint may know a newer incarnation.
            let _ = self.join(life, run_of(&hello), (Now(0), Origin::Journal(position)), &mut Replies::default());
            return Ok(());
        }
        let _ = self.trainers.note_incarnation(life.trainer, life.incarnation);
        // A frame that was refused live is refused again for the same reason.
        let (origin, mut admitted) = (Origin::Journal(position), Vec::new());
        if self.check_state(&frame, origin, &mut admitted).is_err() {
            return Ok(());
        }
        if self.begin_run(&frame.head, origin).is_err() {
            return Ok(());
        }
        let leases = self.leases_of(&frame, payload).map_err(|failure| damaged(failure.to_string()))?;
        if let Phase::Serving(serving) = &mut self.phase {
            // The check passed before the frame was journalled; this call reserves room for new rows.
            let _ = serving.check_rows(&frame, leases.iter().map(Lease::bytes), origin);
        }
        let arrived = ReceivedFrame { now: Now(0), peer: None, origin, frame: &frame, admitted: &admitted };
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
            None => RecordedRounds { position, rounds: Vec::new(), kind: message.kind() },
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
        match self.serving(Now(0), None, Origin::Journal(recorded.position), &mut replies) {
            Some((serving, mut cx)) => {
                cx.replay_left = u64::MAX;
                serving.close_recorded(&mut cx, recorded)
            }
            None => Ok(()),
        }
    }

    /// Ends the replay of the journal: every restored chunk counts as past it.
    pub(super) fn replayed(&mut self) {
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
    /// Closes decided rounds with the gradients that their record counts.
    fn close_recorded(&mut self, cx: &mut Context<'_>, recorded: RecordedRounds) -> Result<(), Failure> {
        let mut slot_indices = SlotIndices::new();
        let is_open = recorded.kind == RoundsRecordKind::Open;
        for round in recorded.rounds {
            let (id, number) = (round.entry.id, round.entry.round);
            let damaged = |what: String| Failure::Node(format!("round {number} of chunk {id:?}: {what}"));
            let slot_index = self.table.slot_index(id).ok_or_else(|| damaged("there is no such chunk".to_owned()))?;
            if cx.is_before_restored(&self.table.chunks[slot_index]) {
                continue;
            }
            if recorded.kind == RoundsRecordKind::Dropped {
                let bucket = self.table.chunks[slot_index].bucket_mut();
                let bucket = bucket.ok_or_else(|| damaged("it is not of rows".to_owned()))?;
                let dropped = round.counted.iter().map(|one| &one.header);
                dropped.for_each(|one| bucket.forget(one.head.trainer, |call| call == one.call));
                continue;
            }
            if recorded.kind == RoundsRecordKind::OfStep {
                let sum = round.sum.ok_or_else(|| damaged("the value of its step is missing".to_owned()))?;
                self.table.chunks[slot_index].recall_of_step(number, sum);
                continue;
            }
            self.take_in(cx, slot_index, None);
            let chunk = &mut self.table.chunks[slot_index];
            let open = Round(chunk.version.0 + 1);
            // A checkpoint carries over what an older one has records of already.
            let is_known = number < open || number == open && (0 < chunk.decided || is_open && !chunk.round.is_empty());
            if is_known {
                continue;
            }
            if number != open {
                return Err(damaged(format!("its record comes where round {open} is open")));
            }
            chunk.round.recall(round).map_err(damaged)?;
            if !is_open {
                chunk.round.set_recorded(false, |_| {});
                chunk.decided = 1;
                self.programs.note_arrival(slot_index);
            }
            slot_indices.push(slot_index);
        }
        self.advance(cx, &mut slot_indices);
        Ok(())
    }

    /// Ends replay: every later frame is new to every chunk.
    pub(super) fn replayed(&mut self) {
        self.table.chunks.iter_mut().for_each(|chunk| chunk.restored = None);
        self.programs.forget_lost(&self.table);
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
        self.run_all(cx, self.table.chunks.slot_indices());
    }
}
