//! A shard that serves: what arrives is received by the parameter's program, and whoever waits is answered.
//!
//! The program ([`super::program`]) says what becomes of a gradient; here is what its ops do to chunks. `recv` gives a
//! gradient when it may enter the open round; what may not yet waits, unacknowledged, one for each trainer and chunk.
//! The accumulator is the round; it gives when the round is complete.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::bucket::{RowsRoom, Wish};
use super::chunk::{Chunk, Mark, Open, Stage, Waiter};
use super::device::Device;
use super::gate::{Held, Table, unknown};
use super::pool::Pool;
use super::program::{Programs, rule_of_mode};
use super::reply::{NOBODY, Refusal, Replies};
use super::round::{Contribution, FOLD_AT, Sending};
use super::rows::RowsPull;
use super::running::Member;
use crate::config::{Merge, Mode};
use crate::dtype::Half;
use crate::error::Failure;
use crate::ids::{Incarnation, ParameterIndex, PeerId, Round, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::{Algorithm, Numbers, Step};
use crate::port::Kernels;
use crate::program::executor::Pace;
use crate::time::Now;
use crate::wire::{Entry, ErrorCode, Flags, Frame, Head, Kind};

/// What holds for the job, as the finish frame said.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) mode: Mode,
    pub(super) merge: Merge,
    pub(super) trainers: u32,
}

/// What handling a frame needs beside the state.
pub(super) struct Context<'a> {
    pub(super) now: Now,
    pub(super) kernels: &'a mut dyn Kernels,
    pub(super) pool: &'a mut Pool,
    pub(super) device: Option<&'a mut Device>,
    pub(super) replies: &'a mut Replies,
    /// Who sent the frame.
    pub(super) peer: PeerId,
    /// Where in the journal the frame is.
    pub(super) position: u64,
    /// How much may still be replayed of what rows have missed, in bytes of weights that an update goes over.
    pub(super) left: u64,
}

/// What a complete round waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// A lease for the next value.
    Memory,
    /// Another turn: its rows have missed so much.
    Time,
    /// A device that works on some of the chunks that step together.
    Device,
}

impl Lack {
    /// What it waits for, for people.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Memory => "memory that readers hold",
            Self::Time => "rows that catch up with what they have missed",
            Self::Device => "a device",
        }
    }
}

impl Context<'_> {
    /// The accelerator on which chunks live.
    pub(super) fn device(&mut self) -> &mut Device {
        self.device.as_deref_mut().expect("a chunk lives on it")
    }
}

/// The state of a shard that serves.
pub(super) struct Serving {
    pub(super) job: Job,
    pub(super) table: Table,
    pub(super) programs: Programs,
    /// The trainers that are finished, with the incarnation that said so.
    pub(super) left: Vec<Option<Incarnation>>,
    /// How many pushes have arrived.
    arrivals: u64,
    /// Chunks whose complete round could not be applied, and for want of what; tried again when a lease comes back, and
    /// in every turn.
    pub(super) stalled: BTreeMap<usize, Lack>,
    /// Whose departure, value or return comes before new gradients for a device, and until when, see `whole`.
    pub(super) first: Option<(TrainerId, Now)>,
    /// Chunks whose value somebody waits for as halves, for which there was no lease; tried again with those.
    pub(super) starved: BTreeSet<usize>,
    /// Pulls of rows that take more than a turn, in the order of their turns.
    pub(super) slow_pulls: VecDeque<RowsPull>,
    /// Chunks that are about to run in step; empty between two frames.
    pub(super) joined: Vec<Member>,
    /// Chunks that somebody waits for, each once, by when its first waiter asked.
    waits: BTreeSet<(Now, usize)>,
    /// Where rows are merged and looked up.
    pub(super) rows_room: RowsRoom,
    /// Chunks that come from a checkpoint with contributions that are not in their values, by the journal's position at
    /// which they were written.
    behind: BTreeSet<(u64, usize)>,
    /// Those of the update before.
    numbers: Numbers,
}

/// What is to be done with one entry of a push.
pub(super) enum Verdict {
    /// It is in the value already.
    Applied,
    /// It is in the open round already.
    Contributed,
    /// It waits already.
    Waits,
    /// Its round was complete without it, and is not closed yet.
    Late,
    /// It is new.
    New,
}

impl Serving {
    /// Runs `programs`, which were made for this job and this table.
    pub(super) fn new(job: Job, mut table: Table, programs: Programs) -> Result<Self, Failure> {
        if let Some(rule) = rule_of_mode(job.mode) {
            table.follow(&rule)?;
        }
        for held in table.parameters.values_mut() {
            held.group.chunks.sort_by_key(|place| table.chunks[*place].id);
        }
        let open = |(place, chunk): (usize, &Chunk)| {
            let restored = chunk.restored.as_ref().filter(|restored| !restored.open.is_empty())?;
            Some((restored.position, place))
        };
        let behind = table.chunks.iter().enumerate().filter_map(open).collect();
        let left = vec![None; job.trainers as usize];
        Ok(Self {
            job,
            table,
            programs,
            left,
            arrivals: 0,
            stalled: BTreeMap::new(),
            first: None,
            starved: BTreeSet::new(),
            slow_pulls: VecDeque::new(),
            joined: Vec::new(),
            waits: BTreeSet::new(),
            rows_room: RowsRoom::default(),
            behind,
            numbers: Numbers::default(),
        })
    }

    /// Checks a push before anything is landed or applied, so that nothing is half-applied. Adds the places of its
    /// entries' chunks to `places`.
    pub(super) fn check_push(&self, frame: &Frame, position: u64, places: &mut Vec<u32>) -> Result<(), Refusal> {
        self.check_trainer(&frame.head)?;
        if self.comes_back(&frame.head) && position == u64::MAX {
            self.check_all_open()?;
        }
        let mut last = None;
        for entry in &frame.entries {
            let place = self.table.check_gradient(last, entry)?;
            last = Some(place);
            self.check_rows_wish(place, &frame.head)?;
            self.check_half(place, entry)?;
            if !self.table.chunks[place].is_before_restored(position)
                && matches!(self.verdict(place, &frame.head, entry)?, Verdict::New)
                && position == u64::MAX
            {
                self.check_open_to(place, &frame.head)?;
            }
            places.push(u32::try_from(place).expect("a shard's chunks are counted in 32 bits"));
        }
        Ok(())
    }

    /// Checks a rate with the rules of the chunks that it is for.
    pub(super) fn check_rate(&self, rate: f64, places: &[u32]) -> Result<(), Refusal> {
        for chunk in places.iter().map(|place| &self.table.chunks[*place as usize]) {
            chunk.rule.rule().check_rate(rate, chunk.element_type).map_err(|failure| {
                let name = self.table.held(chunk.id).name();
                Refusal::invalid(format!("parameter \"{name}\": {failure}"))
            })?;
        }
        Ok(())
    }

    /// Closes the rounds that were complete when a checkpoint wrote their chunks, of those that were written before
    /// this position of the journal.
    pub(super) fn catch_up(&mut self, cx: &mut Context<'_>) {
        while let Some((_, place)) = self.behind.first().copied().filter(|(position, _)| *position <= cx.position) {
            self.behind.pop_first();
            self.note_lost(place);
            self.set_late(cx, place);
            self.run(cx, place, None);
            self.set_late(cx, place);
        }
    }

    /// A round whose contributions were lost with the end of a journal is not closed without them.
    fn note_lost(&mut self, place: usize) {
        let chunk = &self.table.chunks[place];
        let held = self.table.held(chunk.id);
        let own = [place];
        let places = if chunk.rule.rule().is_element_wise() { &own[..] } else { &held.group.chunks[..] };
        let found = places.iter().map(|place| self.table.chunks[*place].sealed_and_found());
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
            let places = places.to_vec();
            places.into_iter().for_each(|place| self.table.chunks[place].sealed = sealed);
        }
    }

    /// The replay of the journal is over: what comes now is new to every chunk.
    pub(super) fn replayed(&mut self) {
        // What was complete is closed by now, or was lost with a journal.
        self.table.chunks.iter_mut().for_each(|chunk| (chunk.restored, chunk.sealed) = (None, 0));
    }

    /// Checks a frame that replaces values.
    pub(super) fn check_set(&self, frame: &Frame, position: u64) -> Result<(), Refusal> {
        self.check_trainer(&frame.head)?;
        for entry in &frame.entries {
            self.table.check_whole(entry)?;
            let place = self.table.place(entry.id).expect("the entry was just checked");
            if position == u64::MAX {
                self.check_open(place)?;
                self.check_no_late(place, Mark::of(&frame.head), frame.head.trainer)?;
            }
        }
        Ok(())
    }

    /// Checks a frame that says that a trainer is finished.
    pub(super) fn check_leave(&self, position: u64) -> Result<(), Refusal> {
        if position == u64::MAX { self.check_all_open() } else { Ok(()) }
    }

    /// Applies a push that was checked: `places` are those of its entries' chunks, `body` holds one lease for each.
    pub(super) fn push(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        rate: Option<f64>,
        places: &[u32],
        body: impl IntoIterator<Item = Lease>,
    ) {
        assert_eq!(frame.entries.len(), places.len(), "the frame was checked");
        let (trainer, call) = (frame.head.trainer, Mark::of(&frame.head));
        let (position, arrival) = (cx.position, self.arrivals);
        self.arrivals += 1;
        let sending = Arc::new(Sending { call, rate, position, arrival, peer: cx.peer, head: frame.head });
        self.take_back(cx.position, &frame.head);
        let mut body = body.into_iter();
        for (entry, place) in frame.entries.iter().zip(places) {
            let lease = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let place = *place as usize;
            let chunk = &self.table.chunks[place];
            if chunk.is_joined || !chunk.rule.rule().is_element_wise() {
                self.run_joined(cx);
            }
            if self.is_begun_by_earlier_life(&self.table.chunks[place], &frame.head) {
                self.disown(cx, trainer, entry.id.parameter);
            }
            let contribution = Contribution {
                trainer,
                round: entry.round,
                element_type: entry.element_type,
                bytes: entry.bytes,
                gradient: lease,
                rows: Vec::new(),
                is_early_part: false,
                half: entry.half,
                since: Some(cx.now),
                sending: Arc::clone(&sending),
            };
            if self.table.chunks[place].bucket().is_some() {
                self.push_rows(cx, place, entry, contribution);
            } else {
                self.push_entry(cx, place, entry, contribution);
            }
        }
        self.run_joined(cx);
    }

    /// Replaces values; a value that was already set is left alone.
    pub(super) fn set(&mut self, cx: &mut Context<'_>, frame: &Frame, body: Vec<Lease>) {
        let call = Mark::of(&frame.head);
        self.note_let_in(frame.head.trainer);
        for (entry, lease) in frame.entries.iter().zip(body) {
            let place = self.table.place(entry.id).expect("the entry was checked");
            if self.is_before_restored(cx, place) {
                self.keep_set_again(cx, place, frame, lease);
            } else if let Some(lease) = self.keep_set(cx, place, frame, lease) {
                self.put_set(cx, place, call, (cx.peer, &frame.head), lease);
            }
        }
    }

    /// Answers a pull with what is there, and remembers what is not there yet.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        body: impl IntoIterator<Item = Lease>,
    ) -> Result<(), Refusal> {
        let places = frame.entries.iter().map(|entry| self.table.place(entry.id).ok_or_else(|| unknown(entry.id)));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        self.check_wishes(frame, &places)?;
        let mut body = body.into_iter();
        for (entry, place) in frame.entries.iter().zip(places) {
            let is_bucket = self.table.chunks[place].bucket().is_some();
            let ids = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let wish = is_bucket.then_some(Wish { ids, bytes: entry.bytes });
            let (version, half) = (Version(entry.round.0), entry.half);
            self.want(cx, place, Waiter { peer: cx.peer, head: frame.head, version, since: cx.now, half, wish });
        }
        Ok(())
    }

    /// A trainer is finished: nobody waits for it any more.
    pub(super) fn leave(&mut self, cx: &mut Context<'_>, head: &Head) -> Result<(), Refusal> {
        self.check_trainer(head)?;
        self.note_let_in(head.trainer);
        self.left[head.trainer.0 as usize] = Some(head.incarnation);
        self.forget_gathered(cx.position, head.trainer);
        let begun = self.table.parameters.iter().filter(|(_, held)| self.begun(held, head.trainer).is_some());
        for parameter in begun.map(|(index, _)| *index).collect::<Vec<_>>() {
            self.disown(cx, head.trainer, parameter);
        }
        // Who waited behind the trainer that left, or for it to catch up, waits no more.
        for place in 0..self.table.chunks.len() {
            self.run(cx, place, None);
        }
        cx.replies.done_whole(cx.peer, head);
        Ok(())
    }

    /// Tries again when there is what it lacks.
    pub(super) fn stall(&mut self, place: usize, lack: Lack) {
        self.stalled.insert(place, lack);
    }

    /// An update was done: nothing has to be tried again.
    #[inline]
    pub(super) fn stirred(&mut self, place: usize) {
        if !self.stalled.is_empty() {
            self.stalled.remove(&place);
        }
    }

    /// Whether an update waits for something.
    pub(super) fn is_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Whether an update waits for this.
    pub(super) fn lacks(&self, lack: Lack) -> bool {
        self.stalled.values().any(|one| *one == lack)
    }

    /// Whether something is to be tried again when a lease comes back.
    pub(super) fn lacks_memory(&self) -> bool {
        !self.starved.is_empty() || self.stalled.values().any(|lack| *lack == Lack::Memory)
    }

    /// Whether rows catch up with what they have missed: there is work in every turn.
    pub(super) fn is_catching_up(&self) -> bool {
        !self.slow_pulls.is_empty() || self.lacks(Lack::Time)
    }

    /// Says how many updates wait, if some do.
    pub(super) fn tell_stalled(&self) {
        if let Some((place, lack)) = self.stalled.first_key_value() {
            let id = self.table.chunks[*place].id;
            let (count, name) = (self.stalled.len(), self.table.held(id).name());
            tracing::warn!("{count} updates wait, first {name:?} chunk {} for {}", id.chunk, lack.text());
        }
    }

    /// Tries again what could not be applied or answered for want of a lease; whether something was.
    pub(super) fn retry(&mut self, cx: &mut Context<'_>) -> bool {
        let is_any = self.retry_lacking(cx, Lack::Memory);
        self.answer_starved(cx) || is_any
    }

    /// Goes on with what takes more than a turn: updates and pulls replay up to `replays` bytes each of what rows have
    /// missed. Whether there was any.
    pub(super) fn go_on_catching_up(&mut self, cx: &mut Context<'_>, replays: u64) -> bool {
        cx.left = replays;
        let is_any = self.retry_lacking(cx, Lack::Time) || cx.left < replays;
        cx.left = replays;
        self.read_on_slow(cx) || is_any
    }

    fn retry_lacking(&mut self, cx: &mut Context<'_>, wanted: Lack) -> bool {
        let stalled: Vec<usize> =
            self.stalled.extract_if(.., |_, lack| *lack == wanted).map(|(place, _)| place).collect();
        stalled.iter().for_each(|place| self.run(cx, *place, None));
        stalled.iter().any(|place| !self.stalled.contains_key(place))
    }

    /// When the next wait comes to its end.
    pub(super) fn deadline(&self, limit: std::time::Duration) -> Option<Now> {
        self.waits.first().map(|(since, _)| *since + limit)
    }

    /// Ends the waits that are older than `limit`, naming who is missing.
    pub(super) fn expire(&mut self, cx: &mut Context<'_>, limit: std::time::Duration) {
        while let Some((_, place)) = self.waits.first().copied().filter(|(since, _)| *since + limit <= cx.now) {
            let mut expired = self.take_waiters(place, |waiter| waiter.since + limit <= cx.now);
            let chunk = &mut self.table.chunks[place];
            let version = Version(chunk.version.0 + 1);
            let overdue = chunk.round.take_overdue(cx.pool, |since| since + limit <= cx.now).into_iter();
            expired.extend(overdue.map(|(peer, head)| Waiter::new(peer, head, version, cx.now)));
            if let Some(late) = &mut chunk.late
                && late.since.is_some_and(|since| since + limit <= cx.now)
            {
                late.since = None;
                let (peer, head, version) = (late.peer, late.head, late.after);
                expired.push(Waiter::new(peer, head, version, cx.now));
            }
            self.give_up_gathered(cx, place, limit);
            self.note_waits(place);
            for waiter in expired {
                let text = self.missing_text(place, &waiter, limit);
                cx.replies.error(waiter.peer, &waiter.head, &Refusal::new(ErrorCode::Deadline, text));
            }
        }
    }

    fn missing_text(&self, place: usize, waiter: &Waiter, limit: std::time::Duration) -> String {
        if let Some(text) = self.starved_text(place, waiter) {
            return format!("{text}, and had none within {:.1} s", limit.as_secs_f64());
        }
        let chunk = &self.table.chunks[place];
        let missing = || {
            let missing = self.missing(chunk, self.programs.of(place).pace);
            let missing: Vec<String> = missing.iter().map(TrainerId::to_string).collect();
            format!("trainer {}", missing.join(", "))
        };
        let together = self.together(place);
        let device = together.iter().find_map(|place| self.table.chunks[*place].seat.as_ref()?.waits_for());
        let waits_for = device.or_else(|| self.stalled.get(&together[0]).map(|lack| lack.text().to_owned()));
        format!(
            "parameter \"{}\" chunk {}: version {} was not reached within {:.1} s; it is at version {} and round {} \
             waits for {}",
            self.table.held(chunk.id).name(),
            chunk.id.chunk,
            waiter.version,
            limit.as_secs_f64(),
            chunk.version,
            chunk.version.0 + 1,
            waits_for.unwrap_or_else(missing)
        )
    }

    /// For whom the chunk's round waits.
    fn missing(&self, chunk: &Chunk, pace: Pace) -> Vec<TrainerId> {
        let clock = |trainer: &TrainerId| chunk.heard(*trainer).clock;
        match pace {
            Pace::Rounds => self.active().filter(|trainer| chunk.round.contribution(*trainer).is_none()).collect(),
            Pace::Bounded(_) => {
                let slowest = self.active().map(|trainer| clock(&trainer)).min();
                self.active().filter(|trainer| Some(clock(trainer)) == slowest).collect()
            }
            Pace::Any => self.table.held(chunk.id).group.owner.into_iter().collect(),
        }
    }

    fn check_trainer(&self, head: &Head) -> Result<(), Refusal> {
        if head.generation != self.table.generation {
            let text = format!(
                "generation {} is not the one that initialised this job, which is {}",
                head.generation, self.table.generation
            );
            return Err(Refusal::new(ErrorCode::Fenced, text));
        }
        if head.trainer.0 < self.job.trainers {
            return Ok(());
        }
        Err(Refusal::no_such_trainer(head.trainer, self.left.len()))
    }

    pub(super) fn verdict(&self, place: usize, head: &Head, entry: &Entry) -> Result<Verdict, Refusal> {
        let chunk = &self.table.chunks[place];
        if chunk.has_heard(head.trainer, Mark::of(head)) {
            return Ok(Verdict::Applied);
        }
        let entered = chunk.round.contribution(head.trainer);
        if entered.is_some_and(|one| one.is_same_call(head)) {
            return Ok(Verdict::Contributed);
        }
        match self.programs.of(place).pace {
            Pace::Rounds => self.verdict_in_rounds(chunk, head, entry.round, entered.is_some()),
            Pace::Any | Pace::Bounded(_) => self.verdict_alone(chunk, head),
        }
    }

    /// Where a round is a step of all trainers.
    #[inline]
    fn verdict_in_rounds(
        &self,
        chunk: &Chunk,
        head: &Head,
        round: Round,
        has_entered: bool,
    ) -> Result<Verdict, Refusal> {
        let open = chunk.version.0 + 1;
        if round.0 == open {
            let other = if 1 <= chunk.sealed { Verdict::Late } else { Verdict::New };
            return Ok(if has_entered { Verdict::Contributed } else { other });
        }
        if round.0 < open {
            return Ok(Verdict::Applied);
        }
        if round.0 == open + 1 {
            let waits = chunk.round.ahead(head.trainer).is_some();
            let other = if 2 <= chunk.sealed { Verdict::Late } else { Verdict::New };
            return Ok(if waits { Verdict::Waits } else { other });
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

    /// Where each gradient is a round of its own.
    fn verdict_alone(&self, chunk: &Chunk, head: &Head) -> Result<Verdict, Refusal> {
        match chunk.round.ahead(head.trainer) {
            Some(one) if one.is_same_call(head) => return Ok(Verdict::Waits),
            // It gives way, see `push`.
            Some(_) if self.is_begun_by_earlier_life(chunk, head) => return Ok(Verdict::New),
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
        let has_left = self.left[head.trainer.0 as usize].is_some_and(|left| head.incarnation <= left);
        if has_left && !chunk.rule.rule().is_element_wise() {
            // What is sent again by who has left would keep the others out with a half that nobody completes.
            let text = format!(
                "parameter \"{}\" chunk {}: trainer {} has left, and its unfinished gradient was dropped",
                self.table.held(chunk.id).name(),
                chunk.id.chunk,
                head.trainer
            );
            return Err(Refusal::invalid(text));
        }
        Ok(Verdict::New)
    }

    /// Whether `recv` gives a contribution to the open round of its chunk.
    #[inline]
    pub(super) fn may_enter(&self, pace: Pace, place: usize, one: &Contribution) -> bool {
        let chunk = &self.table.chunks[place];
        if pace == Pace::Rounds {
            let has_piece = chunk.round.contribution(one.trainer).is_some();
            return one.round.0 == chunk.version.0 + 1 && pace.admits(has_piece, 0, || 0);
        }
        let clock = |trainer| chunk.heard(trainer).clock;
        // Where everybody has left nobody is waited for, neither now nor by who comes back.
        let fewest = || self.active().map(clock).min().unwrap_or(u64::MAX);
        if !pace.admits(false, clock(one.trainer), fewest) {
            return false;
        }
        let may_own = || self.table.held(chunk.id).group.owner.is_none_or(|owner| owner == one.trainer);
        chunk.round.is_empty() && (chunk.rule.rule().is_element_wise() || may_own())
    }

    #[inline]
    pub(super) fn push_entry(&mut self, cx: &mut Context<'_>, place: usize, entry: &Entry, contribution: Contribution) {
        if self.is_before_restored(cx, place) {
            self.put_again(cx, place, contribution);
            return;
        }
        match self.verdict(place, &contribution.sending.head, entry).expect("the entry was checked") {
            Verdict::New => self.join(cx, place, contribution),
            known => self.answer_known(cx, place, &known, &contribution),
        }
    }

    /// Answers a push that came before, or says later answers whom to go to.
    fn answer_known(&mut self, cx: &mut Context<'_>, place: usize, known: &Verdict, again: &Contribution) {
        let Sending { head, peer, .. } = *again.sending;
        let chunk = &mut self.table.chunks[place];
        match known {
            Verdict::Applied => self.answer_applied(cx, place, again.waiter(Version(0), cx.now)),
            // The parts before the last are answered as they come.
            Verdict::Contributed | Verdict::Waits if again.is_early_part => {
                cx.replies.done(peer, &head, version_entry(chunk));
            }
            Verdict::Contributed => {
                let entry = open_entry(chunk);
                let entered = chunk.round.contribution_mut(head.trainer).expect("it is in the round");
                entered.answer_to(again);
                acknowledge(cx, entered, entry);
            }
            Verdict::Waits => {
                let waiting = chunk.round.ahead_mut(head.trainer).expect("it waits");
                waiting.answer_to(again);
                waiting.since = Some(cx.now);
            }
            // It is answered once the round is closed that is about to be closed without it.
            Verdict::Late => self.want(cx, place, again.waiter(Version(again.round.0), cx.now)),
            Verdict::New => unreachable!("what is new was not pushed before"),
        }
        self.note_waits(place);
    }

    /// Puts a contribution from the journal where it was when the checkpoint wrote its chunk. One that was in the
    /// value by then, or had come to nothing, is dropped.
    fn put_again(&mut self, cx: &mut Context<'_>, place: usize, contribution: Contribution) {
        let chunk = &mut self.table.chunks[place];
        let is_it = |one: Open| (one.trainer, one.call) == (contribution.trainer, contribution.sending.call);
        let is_there = chunk.round.open().any(is_it);
        match chunk.open_in_checkpoint(&contribution.sending.head) {
            Some(open) if !is_there && open.stage == Stage::Ahead => chunk.round.add_ahead(contribution),
            Some(_) if !is_there => self.enter(cx, place, contribution),
            _ => {}
        }
    }

    /// Whether the frame at hand is older than a chunk that came from a checkpoint.
    pub(super) fn is_before_restored(&self, cx: &Context<'_>, place: usize) -> bool {
        self.table.chunks[place].is_before_restored(cx.position)
    }

    #[inline]
    pub(super) fn enter(&mut self, cx: &mut Context<'_>, place: usize, contribution: Contribution) {
        let chunk = &mut self.table.chunks[place];
        if !chunk.rule.rule().is_element_wise() && self.programs.of(place).pace != Pace::Rounds {
            let held = self.table.parameters.get_mut(&chunk.id.parameter).expect("the chunk's parameter is held");
            held.group.owner = Some(contribution.trainer);
        }
        let entry = open_entry(chunk);
        acknowledge(cx, chunk.round.add(contribution), entry);
    }

    /// Answers a push whose gradient is in the value.
    fn answer_applied(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        if waiter.head.flags.contains(Flags::WANT_VALUE) {
            self.send_value(cx, place, waiter);
        } else {
            cx.replies.done(waiter.peer, &waiter.head, version_entry(&self.table.chunks[place]));
        }
    }

    fn want(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        if waiter.version <= self.table.chunks[place].version {
            self.answer(cx, place, waiter);
            return;
        }
        if waiter.peer == NOBODY {
            return;
        }
        self.table.chunks[place].waiters.push(waiter);
        self.note_waits(place);
    }

    /// Answers somebody with the value, or with the rows that were asked for.
    fn answer(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        match &waiter.wish {
            None if waiter.head.kind == Kind::Push => self.answer_applied(cx, place, waiter),
            Some(_) => self.answer_rows(cx, place, waiter),
            None => self.send_value(cx, place, waiter),
        }
    }

    /// Keeps the list of waits true to a chunk that may have changed.
    #[inline]
    pub(super) fn note_waits(&mut self, place: usize) {
        let chunk = &mut self.table.chunks[place];
        let is_idle =
            chunk.waiters.is_empty() && chunk.round.is_bare() && chunk.bucket().is_none() && chunk.late.is_none();
        if chunk.noted.is_none() && is_idle {
            return;
        }
        let (before, after) = (chunk.noted, chunk.waits_since());
        if before == after {
            return;
        }
        chunk.noted = after;
        if let Some(before) = before {
            self.waits.remove(&(before, place));
        }
        if let Some(after) = after {
            self.waits.insert((after, place));
        }
    }

    /// Whether the accumulator of a chunk gives: it has a piece of everybody who takes part, or the one it counts to.
    #[inline]
    pub(super) fn is_complete(&self, pace: Pace, place: usize) -> bool {
        let chunk = &self.table.chunks[place];
        let round = &chunk.round;
        match pace {
            // What was ahead is in it first, also of those who are not waited for any more.
            Pace::Rounds if round.all_ahead().iter().any(|one| one.round.0 == chunk.version.0 + 1) => false,
            Pace::Rounds if 0 < chunk.sealed => !round.is_empty(),
            Pace::Rounds => round.is_complete(self.active()),
            Pace::Any | Pace::Bounded(_) => !round.is_empty(),
        }
    }

    /// Whether everybody has sent a gradient for the round after the open one.
    pub(super) fn is_next_complete(&self, place: usize) -> bool {
        let round = &self.table.chunks[place].round;
        !round.all_ahead().is_empty() && self.active().all(|trainer| round.ahead(trainer).is_some())
    }

    /// The trainers that a synchronous round waits for.
    fn active(&self) -> impl Iterator<Item = TrainerId> + '_ {
        (0..self.job.trainers).map(TrainerId).filter(|trainer| self.left[trainer.0 as usize].is_none())
    }

    /// Sums the first pieces of a round that waits for the rest.
    #[inline]
    pub(super) fn fold_early(&mut self, cx: &mut Context<'_>, place: usize) {
        let chunk = &self.table.chunks[place];
        if chunk.round.contributors() < FOLD_AT || !chunk.rule.rule().is_element_wise() {
            return;
        }
        if !self.is_complete(self.programs.of(place).pace, place) {
            self.fold(cx, place);
        }
    }

    fn fold(&mut self, cx: &mut Context<'_>, place: usize) {
        // One that left may come back while the round is open, and then its place in the sum is still its own.
        let everybody = (0..self.job.trainers).map(TrainerId);
        let chunk = &mut self.table.chunks[place];
        // A device sums them all at once.
        if chunk.bucket().is_some() || chunk.seat.is_some() {
            return;
        }
        chunk.round.fold(cx.kernels, cx.pool, chunk.element_type, chunk.bytes, everybody);
    }

    pub(super) fn scale(&self, place: usize) -> f64 {
        self.programs.of(place).scale(self.table.chunks[place].round.contributors())
    }

    /// One update of one chunk; false when there was no lease for it, and it will be tried again.
    pub(super) fn apply(&mut self, cx: &mut Context<'_>, place: usize, norm: Option<f64>) -> bool {
        let scale = self.scale(place);
        let chunk = &mut self.table.chunks[place];
        let step = Step { version: Version(0), rate: chunk.round.rate(), norm, scale };
        let is_sum = chunk.rule.rule().algorithm == Algorithm::Sum && scale == 1.0;
        let only = if is_sum { chunk.round.take_only(chunk.element_type) } else { None };
        let updated = match only {
            Some(gradient) => {
                chunk.take_over(cx.pool, gradient);
                Ok(true)
            }
            None if chunk.seat.is_some() => return self.apply_on_device(cx, place, &step),
            None if chunk.bucket().is_some() => chunk.update_rows(&mut self.rows_room, cx.kernels, &step, &mut cx.left),
            None => chunk.update(cx.kernels, cx.pool, &mut self.numbers, &step).map(|()| true),
        };
        let lack = match updated {
            Ok(true) => return true,
            Ok(false) => Lack::Time,
            Err(_) => Lack::Memory,
        };
        self.stall(place, lack);
        false
    }

    /// Closes the round of a chunk whose pieces are in the value: notes that they are, and sends it to who wants it.
    pub(super) fn publish(&mut self, cx: &mut Context<'_>, place: usize) {
        let halves = self.halves_of_round(cx, place);
        let chunk = &mut self.table.chunks[place];
        let (entry, version) = (value_entry(chunk, None), chunk.version);
        let mut starved = Vec::new();
        chunk.close_round(&halves, |one, since, value| match value {
            Some(value) => cx.replies.value(one.sending.peer, &one.sending.head, as_half(entry, one.half), value),
            None => starved.push(one.waiter(version, since)),
        });
        starved.into_iter().for_each(|waiter| self.wait_for_memory(place, waiter));
        self.answer_waiters(cx, place);
        let chunk = &self.table.chunks[place];
        if chunk.seat.is_some() || chunk.late.is_some() {
            self.after_update(cx, place);
        }
    }

    pub(super) fn answer_waiters(&mut self, cx: &mut Context<'_>, place: usize) {
        let chunk = &self.table.chunks[place];
        let version = chunk.version;
        if chunk.waiters.is_empty() {
            return;
        }
        for waiter in self.take_waiters(place, |waiter| waiter.version <= version) {
            self.answer(cx, place, waiter);
        }
    }

    /// Takes the waiters of a chunk that `is_over` names, in the order of asking.
    fn take_waiters(&mut self, place: usize, is_over: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let chunk = &mut self.table.chunks[place];
        let (over, rest) = chunk.waiters.drain(..).partition(is_over);
        chunk.waiters = rest;
        over
    }

    /// Whether a frame is of a newer life of a trainer that had left.
    pub(super) fn comes_back(&self, head: &Head) -> bool {
        self.left[head.trainer.0 as usize].is_some_and(|left| left < head.incarnation)
    }

    /// A newer life of a trainer that had left takes part again.
    fn take_back(&mut self, position: u64, head: &Head) {
        if !self.comes_back(head) {
            return;
        }
        self.left[head.trainer.0 as usize] = None;
        self.note_let_in(head.trainer);
        // It takes up where the slowest of the others is: nobody waits for steps that it never took.
        for place in 0..self.table.chunks.len() {
            let chunk = &self.table.chunks[place];
            let others = self.active().filter(|one| *one != head.trainer).map(|one| chunk.heard(one).clock).min();
            if !chunk.is_before_restored(position) {
                let heard = self.table.chunks[place].heard_mut(head.trainer);
                heard.clock = heard.clock.max(others.unwrap_or(0));
            }
        }
    }

    /// Whether an earlier life of the trainer, which will not send the rest, has begun a push to the chunks that step
    /// together with this one.
    fn is_begun_by_earlier_life(&self, chunk: &Chunk, head: &Head) -> bool {
        // The parameter is looked up for few rules only.
        !chunk.rule.rule().is_element_wise()
            && self
                .begun(self.table.held(chunk.id), head.trainer)
                .is_some_and(|call| call.incarnation < head.incarnation)
    }

    /// The push of a trainer to chunks that step together, entered or waiting, as long as some of it is missing.
    fn begun(&self, held: &Held, trainer: TrainerId) -> Option<Mark> {
        let first = held.group.chunks.first()?;
        if held.rule.rule().is_element_wise() || self.programs.of(*first).pace == Pace::Rounds {
            return None;
        }
        let sent = |place: &usize| {
            let round = &self.table.chunks[*place].round;
            round.contribution(trainer).or(round.ahead(trainer))
        };
        let call = held.group.chunks.iter().find_map(sent)?.sending.call;
        held.group.chunks.iter().any(|place| sent(place).is_none()).then_some(call)
    }

    /// Takes what a trainer has sent of a push that it will not finish out of the others' way. Chunks that come from
    /// a checkpoint which is newer than the frame at hand are left alone: they tell what was there afterwards.
    fn disown(&mut self, cx: &mut Context<'_>, trainer: TrainerId, parameter: ParameterIndex) {
        let held = self.table.parameters.get_mut(&parameter).expect("the parameter is held");
        let places = held.group.chunks.clone();
        if self.table.chunks[places[0]].is_before_restored(cx.position) {
            return;
        }
        held.group.owner = held.group.owner.filter(|owner| *owner != trainer);
        for place in &places {
            let chunk = &mut self.table.chunks[*place];
            if let Some((one, since)) =
                chunk.round.withdraw(trainer).and_then(|one| one.since.map(|since| (one, since)))
            {
                // Its sender, if it is still there, gets the value that it asked for, with somebody else's gradient.
                let version = Version(chunk.version.0 + 1);
                chunk.waiters.push(one.waiter(version, since));
            }
            self.note_waits(*place);
        }
        self.run(cx, places[0], None);
    }
}

pub(super) fn version_entry(chunk: &Chunk) -> Entry {
    Entry::bare(chunk.id, Round(chunk.version.0), chunk.element_type)
}

/// What acknowledges a gradient that is in the open round.
fn open_entry(chunk: &Chunk) -> Entry {
    Entry::bare(chunk.id, Round(chunk.version.0 + 1), chunk.element_type)
}

/// What brings the value as it is wanted.
pub(super) fn value_entry(chunk: &Chunk, half: Option<Half>) -> Entry {
    as_half(Entry { bytes: chunk.bytes, ..version_entry(chunk) }, half)
}

/// What brings a value in binary32, as it is wanted.
fn as_half(entry: Entry, half: Option<Half>) -> Entry {
    half.map_or(entry, |half| Entry { bytes: entry.bytes / 2, element_type: half.element_type(), ..entry })
}

/// Tells a trainer that its gradient is in the open round; one that wants the value is told by the round's end.
#[inline]
fn acknowledge(cx: &mut Context<'_>, one: &mut Contribution, entry: Entry) {
    let Sending { peer, head, .. } = &*one.sending;
    let wants_value = head.flags.contains(Flags::WANT_VALUE) && *peer != NOBODY;
    one.since = wants_value.then_some(cx.now);
    if !wants_value {
        cx.replies.done(*peer, head, entry);
    }
}
