//! Admission of frames: every check before a frame changes state.
//!
//! A frame is accepted or refused as a whole. The verdict on a new gradient is reached once and holds until the frame
//! is applied, as long as no other frame or completion has changed the shard; the shard checks again where one has. A
//! duplicate is looked up again when it is answered: earlier entries of its frame may have closed its round.

use super::call::CallId;
use super::chunk_table::ChunkTable;
use super::compiled_flows::Sender;
use super::context::Origin;
use super::contribution::DeferredSet;
use super::frames::{Admitted, FrameCheck, decode};
use super::group::SlotIndex;
use super::job::Job;
use super::needs::{Holdings, Needs};
use super::presence::TrainerLife;
use super::reply::{Refusal, RetryReason};
use super::serving::Serving;
use super::shard::{Phase, Shard};
use super::stalls::StallReason;
use super::states::state_of;
use super::verdict::PushVerdict;
use crate::accumulator::AccumulatorPace;
use crate::checkpoint::RESERVE_BYTES;
use crate::error::Failure;
use crate::ids::{Epoch, Generation, JobRun, NO_TRAINER, PeerId, TrainerId};
use crate::optim::Range;
use crate::rows::check_step_settings;
use crate::wire::{Entry, ErrorCode, FinishMessage, Flags, Frame, Head, Kind, PushMessage};

/// Marks the later entries of a chunk that a frame names more than once: the first one decides what they are.
#[cold]
fn look_up_repeated(admitted: &mut [Admitted]) {
    let mut order: Vec<(SlotIndex, usize)> =
        admitted.iter().enumerate().map(|(at, one)| (one.slot_index, at)).collect();
    order.sort_unstable();
    let pairs = order.iter().zip(order.iter().skip(1));
    pairs.filter(|(one, next)| one.0 == next.0).for_each(|(_, next)| admitted[next.1].is_new = false);
}

impl Shard {
    /// Checks a frame completely before any state changes. A check that passed when the head arrived is reused if no
    /// state has changed since.
    pub(super) fn check(&mut self, peer: PeerId, frame: &Frame, found: &mut FrameCheck) -> Result<(), Refusal> {
        let head = &frame.head;
        if head.kind == Kind::Hello {
            self.check_epoch(head, true)?;
            return self.check_term(head);
        }
        let life = self.peers.get(&peer).and_then(|peer| peer.life);
        let life = life.ok_or_else(|| Refusal::invalid("the first frame of a connection is a hello"))?;
        if (life.trainer, life.incarnation) != (head.trainer, head.incarnation) {
            return Err(Refusal::invalid(format!(
                "a frame of trainer {} incarnation {} on the connection of trainer {} incarnation {}",
                head.trainer, head.incarnation, life.trainer, life.incarnation
            )));
        }
        self.check_epoch(head, false)?;
        if head.term != self.options.term {
            let (found, ours) = (head.term, self.options.term);
            return Err(Refusal::invalid(format!("a frame of term {found}; expected {ours}, that of the welcome")));
        }
        if life.trainer != NO_TRAINER {
            self.trainers.note_incarnation(life.trainer, life.incarnation)?;
        } else if head.kind.is_mutating() {
            return Err(Refusal::invalid("a reader may pull and nothing else"));
        }
        if found.right_at.take() != Some(self.changes) {
            self.check_state(frame, Origin::Live, &mut found.admitted)?;
        }
        found.right_at = Some(self.changes);
        Ok(())
    }

    pub(super) fn check_epoch(&self, head: &Head, is_hello: bool) -> Result<(), Refusal> {
        if head.epoch == self.options.epoch || (is_hello && head.epoch == Epoch(0)) {
            return Ok(());
        }
        Err(Refusal::other_epoch(head.epoch, self.options.epoch))
    }

    /// Refuses a client that knows a later leader of the shard.
    fn check_term(&self, head: &Head) -> Result<(), Refusal> {
        let (known, ours) = (head.term, self.options.term);
        if known <= ours {
            return Ok(());
        }
        let text = format!("this server led the shard under term {ours}, and the client knows one of term {known}");
        Err(Refusal::new(ErrorCode::Moved, text))
    }

    /// The part of the check that replayed frames undergo too. It does not check the sender: an incarnation superseded
    /// later was current when its frame was journalled. Fills `admitted` with the entries of a push.
    pub(super) fn check_state(
        &self,
        frame: &Frame,
        origin: Origin,
        admitted: &mut Vec<Admitted>,
    ) -> Result<(), Refusal> {
        let head = &frame.head;
        let run = self.trainers.run_of(TrainerLife::of(head));
        admitted.clear();
        match (head.kind, &self.phase) {
            (Kind::Init | Kind::Finish, _) => self.check_generation(head),
            (Kind::Push, Phase::Serving(serving)) => {
                let message = check_message(frame)?;
                serving.check_push(frame, &message, origin, run, admitted)?;
                message.rate.map_or(Ok(()), |rate| serving.check_rate(rate, admitted))?;
                serving.check_settings(&message, admitted)
            }
            (Kind::Set, Phase::Serving(serving)) => serving.check_set(frame, origin, run),
            (Kind::Leave, Phase::Serving(serving)) => serving.check_leave(head, origin, run),
            (Kind::Pull, Phase::Serving(_)) | (Kind::Control, _) => Ok(()),
            (Kind::Push | Kind::Set | Kind::Pull | Kind::Leave, _) => Err(not_initialised()),
            (kind, _) => Err(no_answer_to(kind)),
        }
    }

    /// Looks for room on the disk for the parameters' files, and reserves room on the accelerator for those that must
    /// live there; refuses the finish frame where it is short.
    pub(super) fn check_room(&mut self, frame: &Frame) -> Result<(), Refusal> {
        let Phase::Filling(table) = &self.phase else { return Ok(()) };
        if table.generation != frame.head.generation {
            return Ok(());
        }
        let job = Job::from_message(&decode::<FinishMessage>(&frame.control)?)?;
        let refused = |failure: Failure| Refusal::invalid(failure.to_string());
        let receives = u64::try_from(self.options.receives).unwrap_or(u64::MAX);
        // A server without a directory says what one would need.
        let has_journal = self.has_journal() || !self.has_folder();
        tracing::info!("parameters need {}", Holdings::declared(table, &job).needs_of(receives, has_journal));
        self.check_disk(table, &job).map_err(refused)?;
        match &mut self.device {
            Some(device) if device.must_hold_all() => device.reserve(&job, table).map_err(refused),
            _ => Ok(()),
        }
    }

    /// The generation fence: refuses an older generation; a newer one starts from an empty table.
    fn check_generation(&self, head: &Head) -> Result<(), Refusal> {
        let current = match &self.phase {
            Phase::Empty => Generation(0),
            Phase::Filling(table) => table.generation,
            Phase::Serving(serving) => serving.table.generation,
        };
        if head.generation >= current && head.generation > Generation(0) {
            return Ok(());
        }
        let text = format!("generation {} of the initialisation was superseded by {current}", head.generation);
        Err(Refusal::new(ErrorCode::Fenced, text))
    }

    /// Refuses parameters for which the disk has no room.
    fn check_disk(&self, table: &ChunkTable, job: &Job) -> Result<(), Failure> {
        let Needs { checkpoint, journal, disk, .. } = Holdings::initial(table, job).needs(self.has_journal());
        let room = self.folder.as_ref().and_then(|folder| folder.room_for(disk));
        let Some(room) = room else { return Ok(()) };
        if disk <= room {
            return Ok(());
        }
        Err(Failure::call(format!(
            "parameters need {disk} bytes of the disk on this shard (three checkpoints of {checkpoint}, three times \
             {journal} of journal, {RESERVE_BYTES} in reserve); found {room} for it in the checkpoint directory, \
             which the other shards leave or in files of this one; expected a larger disk, or more servers"
        )))
    }
}

impl Serving {
    /// Checks a push before anything is received or applied, so that no push is half-applied. Appends its entries.
    fn check_push(
        &self,
        frame: &Frame,
        message: &PushMessage,
        origin: Origin,
        run: JobRun,
        admitted: &mut Vec<Admitted>,
    ) -> Result<(), Refusal> {
        self.check_trainer(&frame.head, run)?;
        if (self.is_rejoin(&frame.head) || self.is_new(run)) && origin == Origin::Live {
            self.check_all_open()?;
        }
        let (mut last, mut is_rising) = (None, true);
        for entry in &frame.entries {
            let slot_index = self.table.check_gradient(last, entry)?;
            if message.is_void || message.is_pass || entry.bytes == 0 {
                self.check_pass(slot_index, message, entry)?;
            }
            is_rising &= last < Some(slot_index);
            last = Some(slot_index);
            match self.flows.sender(slot_index) {
                Sender::First => self.check_number("a total", slot_index, message, entry)?,
                sender => self.check_sender(sender, slot_index, &frame.head)?,
            }
            if self.programs.of(slot_index).is_some() {
                // A replay has what arrived before the program stopped.
                if origin == Origin::Live {
                    self.programs.check_running(slot_index)?;
                }
                self.check_number("an item", slot_index, message, entry)?;
            }
            self.check_rows_request(slot_index, &frame.head)?;
            self.check_half(slot_index, entry)?;
            let is_new = !origin.is_before_restored(&self.table.chunks[slot_index])
                && matches!(self.verdict(slot_index, &frame.head, entry.round)?, PushVerdict::New);
            if is_new && origin == Origin::Live {
                self.check_stays(slot_index, &frame.head)?;
                self.check_open_to(slot_index, &frame.head)?;
            }
            admitted.push(Admitted { slot_index, is_new });
        }
        if !is_rising {
            look_up_repeated(admitted);
        }
        Ok(())
    }

    /// Refuses an entry without a gradient, or one that ends its round without an update, where no round waits for all.
    fn check_pass(&self, slot_index: SlotIndex, message: &PushMessage, entry: &Entry) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        let (is_bucket, bytes) = (chunk.bucket().is_some(), entry.bytes);
        let is_of_zeros = is_bucket && !message.is_void && !message.is_pass;
        let text = if message.is_pass && bytes > 0 {
            format!("{bytes} bytes of a gradient in a push that has none; expected no payload")
        } else if is_of_zeros || self.flows.of(slot_index).pace == AccumulatorPace::Rounds {
            return Ok(());
        } else {
            "a push without a gradient; expected one, or a job in mode sync".to_owned()
        };
        let name = self.table.held(chunk.id).name();
        Err(Refusal::invalid(format!("parameter \"{name}\": {text}")))
    }

    /// Refuses a total, or an item of a hosted program, that is none or of another type: the server computes with it.
    fn check_number(
        &self,
        what: &str,
        slot_index: SlotIndex,
        message: &PushMessage,
        entry: &Entry,
    ) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        let found = match (entry.bytes, entry.element_type) {
            (0, _) => "no number".to_owned(),
            _ if message.is_void => "a void push".to_owned(),
            (bytes, found) if (bytes, found) != (chunk.bytes, chunk.element_type) => {
                format!("{bytes} bytes of {found}")
            }
            _ => return Ok(()),
        };
        let (name, bytes, expected) = (self.table.held(chunk.id).name(), chunk.bytes, chunk.element_type);
        let text = format!("parameter \"{name}\", {what}: {found}; expected {bytes} bytes of {expected}");
        Err(Refusal::invalid(text))
    }

    /// Refuses a gradient of another trainer than the parameter's only sender.
    #[inline]
    fn check_sender(&self, sender: Sender, slot_index: SlotIndex, head: &Head) -> Result<(), Refusal> {
        match sender {
            Sender::Everybody | Sender::First => Ok(()),
            Sender::Trainer(sender) if sender == head.trainer => Ok(()),
            other => Err(self.other_sender(slot_index, head, other)),
        }
    }

    #[cold]
    fn other_sender(&self, slot_index: SlotIndex, head: &Head, sender: Sender) -> Refusal {
        let name = self.table.held(self.table.chunks[slot_index].id).name();
        let expected = match sender {
            Sender::Trainer(sender) => sender.to_string(),
            Sender::First => "a push of its round's number".to_owned(),
            Sender::Everybody | Sender::Nobody => "none, because its server computes it".to_owned(),
        };
        Refusal::invalid(format!("parameter \"{name}\": trainer {} sent to it; expected {expected}", head.trainer))
    }

    /// Checks a learning rate against the rules of these chunks.
    fn check_rate(&self, rate: f64, admitted: &[Admitted]) -> Result<(), Refusal> {
        for chunk in admitted.iter().map(|one| &self.table.chunks[one.slot_index]) {
            chunk.rule.rule().check_rate(rate, chunk.element_type).map_err(|failure| {
                let name = self.table.held(chunk.id).name();
                Refusal::invalid(format!("parameter \"{name}\": {failure}"))
            })?;
        }
        Ok(())
    }

    /// Checks the settings of a push against the rules of these chunks.
    fn check_settings(&self, message: &PushMessage, admitted: &[Admitted]) -> Result<(), Refusal> {
        if message.settings.is_empty() {
            return Ok(());
        }
        let mut last = None;
        for chunk in admitted.iter().map(|one| &self.table.chunks[one.slot_index]) {
            if last.replace(chunk.id.parameter) == Some(chunk.id.parameter) {
                continue;
            }
            let parameter = self.table.held(chunk.id);
            let catch_up = parameter.rows.as_ref().map(|plan| plan.sparse.catch_up());
            check_step_settings(&chunk.rule, chunk.element_type, catch_up, message.named())
                .map_err(|failure| Refusal::invalid(format!("parameter \"{}\": {failure}", parameter.name())))?;
        }
        Ok(())
    }

    /// Checks a set.
    fn check_set(&self, frame: &Frame, origin: Origin, run: JobRun) -> Result<(), Refusal> {
        self.check_trainer(&frame.head, run)?;
        if self.is_new(run) && origin == Origin::Live {
            self.check_all_open()?;
        }
        let about = state_of(frame)?;
        for entry in &frame.entries {
            match about {
                None => self.table.check_whole(entry)?,
                Some(about) => self.check_state_entry(entry, about, true)?,
            }
            let slot_index = self.table.slot_index(entry.id).expect("the entry was just checked");
            let sender = self.flows.sender(slot_index);
            if matches!(sender, Sender::First | Sender::Nobody) || self.programs.of(slot_index).is_some() {
                return Err(self.other_sender(slot_index, &frame.head, sender));
            }
            if origin == Origin::Live {
                self.check_open(slot_index)?;
                self.check_no_deferred_set(slot_index, CallId::of(&frame.head), frame.head.trainer)?;
            }
        }
        Ok(())
    }

    /// Checks a leave.
    fn check_leave(&self, head: &Head, origin: Origin, run: JobRun) -> Result<(), Refusal> {
        self.check_trainer(head, run)?;
        if origin == Origin::Live { self.check_all_open() } else { Ok(()) }
    }

    /// Refuses a frame of another generation, or of a rank that neither this run nor `run`, the sender's, has.
    fn check_trainer(&self, head: &Head, run: JobRun) -> Result<(), Refusal> {
        if head.generation != self.table.generation {
            let text = format!(
                "generation {} is not the one that initialised this job, which is {}",
                head.generation, self.table.generation
            );
            return Err(Refusal::new(ErrorCode::Fenced, text));
        }
        let trainers = if self.is_new(run) { self.trainers_of(run) } else { self.job.trainers };
        if head.trainer.0 < trainers {
            return Ok(());
        }
        Err(Refusal::no_such_trainer(head.trainer, trainers as usize))
    }

    /// Refuses a resend from a departed trainer that would block the others with a partial gradient.
    fn check_stays(&self, slot_index: SlotIndex, head: &Head) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        let has_left = self.participants.of(head.trainer).left().is_some_and(|left| head.incarnation <= left);
        if !has_left || chunk.group.is_none() || self.flows.of(slot_index).pace == AccumulatorPace::Rounds {
            return Ok(());
        }
        Err(Refusal::invalid(format!(
            "parameter \"{}\" chunk {}: trainer {} has left, and its unfinished gradient was dropped",
            self.table.held(chunk.id).name(),
            chunk.id.chunk,
            head.trainer
        )))
    }

    /// The stall reason behind which new frames for a chunk are refused: the next admission depends on its result.
    pub(super) fn is_shut(&self, slot_index: SlotIndex) -> Option<StallReason> {
        if !self.stalls.is_any() {
            return None;
        }
        let decides = match self.flows.of(slot_index).pace {
            AccumulatorPace::Rounds => false,
            AccumulatorPace::Any => self.table.chunks[slot_index].group.is_some(),
            AccumulatorPace::Bounded(_) => true,
        };
        self.stalls.of(self.table.first_of_unit(slot_index)).filter(|_| decides)
    }

    /// Refuses a gradient for a stalled chunk. During a device update it may wait for its turn.
    pub(super) fn check_open_to(&self, slot_index: SlotIndex, head: &Head) -> Result<(), Refusal> {
        self.check_priority(slot_index, head)?;
        match self.is_shut(slot_index) {
            Some(StallReason::Device) => Ok(()),
            _ => self.check_open(slot_index).map_err(|refusal| {
                let behind = refusal.behind.map(|_| RetryReason::DeviceOfOthers);
                refusal.behind(behind)
            }),
        }
    }

    /// Refuses a frame for a stalled chunk.
    pub(super) fn check_open(&self, slot_index: SlotIndex) -> Result<(), Refusal> {
        let Some(lack) = self.is_shut(slot_index) else { return Ok(()) };
        let id = self.table.chunks[slot_index].id;
        let name = self.table.held(id).name();
        let text = format!("parameter \"{name}\" chunk {}: its update waits for {}", id.chunk, lack.text());
        Err(Refusal::new(ErrorCode::Busy, text).behind((lack == StallReason::Device).then_some(RetryReason::Device)))
    }

    /// Refuses a change of membership while it could change the next admission.
    pub(super) fn check_all_open(&self) -> Result<(), Refusal> {
        self.stalls.updates.keys().try_for_each(|slot_index| self.check_open(*slot_index))
    }

    /// Refuses a set while another one is deferred.
    pub(super) fn check_no_deferred_set(
        &self,
        slot_index: SlotIndex,
        call: CallId,
        trainer: TrainerId,
    ) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        let is_other = |deferred_set: &DeferredSet| (deferred_set.head.trainer, deferred_set.call) != (trainer, call);
        if chunk.heard(trainer).set.covers(call)
            || chunk.deferred_set.as_ref().is_none_or(|deferred_set| !is_other(deferred_set))
        {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        let text = format!("parameter \"{name}\" chunk {}: another set waits", chunk.id.chunk);
        Err(Refusal::new(ErrorCode::Busy, text).while_at_work(self.is_at_work(chunk)))
    }

    /// Refuses a gradient for a device while another trainer has priority: with new gradients always admitted first,
    /// the device would never be idle.
    pub(super) fn check_priority(&self, slot_index: SlotIndex, head: &Head) -> Result<(), Refusal> {
        let Some((first, _)) = self.stalls.priority.filter(|_| !self.is_rejoin(head)) else { return Ok(()) };
        let chunk = &self.table.chunks[slot_index];
        let group = self.table.group(chunk).filter(|_| self.flows.of(slot_index).pace == AccumulatorPace::Any);
        let is_on_device = |slot_index: &SlotIndex| self.table.chunks[*slot_index].on_device.is_some();
        if !group.is_some_and(|group| group.chunks.iter().any(is_on_device)) {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        let text = format!(
            "parameter \"{name}\" chunk {}: the refused request of trainer {first} comes first",
            chunk.id.chunk
        );
        Err(Refusal::new(ErrorCode::Busy, text).behind(Some(RetryReason::DeviceOfOthers)))
    }

    /// Refuses a push of rows that asks for the value: the set of rows to return is undefined.
    pub(super) fn check_rows_request(&self, slot_index: SlotIndex, head: &Head) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        if chunk.bucket().is_none() || !head.flags.contains(Flags::WANT_VALUE) {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        Err(Refusal::invalid(format!("parameter \"{name}\" is sparse: a push of rows cannot ask for the value")))
    }
}

/// The message of a push. A learning rate that is no number would corrupt every parameter.
fn check_message(frame: &Frame) -> Result<PushMessage, Refusal> {
    let message = decode::<PushMessage>(&frame.control)?;
    let check = |rate| Range::NotNegative.check("the learning rate sent with a gradient", rate);
    let checked = message.rate.map_or(Ok(()), check);
    checked.map(|()| message).map_err(|failure| Refusal::invalid(failure.to_string()))
}

/// The refusal of a frame that a shard does not take.
pub(super) fn no_answer_to(kind: Kind) -> Refusal {
    Refusal::invalid(format!("a shard has no answer to a frame of kind {kind:?}"))
}

pub(super) fn not_initialised() -> Refusal {
    Refusal::new(ErrorCode::NotInitialised, "the parameters are not initialised yet")
}
