//! Updates that are not done at once: one begins on an accelerator, other things happen, and it is over; or it has no
//! lease, and is tried again.
//!
//! `update` is ready when its round is complete and the chunk's slot has nothing to do. It takes the gradients out of
//! the round, and the program stays where it is; the round stays open, and nothing enters it any more. When the work
//! comes back, `update` is ready again, takes the value that is there, and the program goes on to `send`. So there is
//! one program for both, and what waits meanwhile waits as it does when it is early, on the processor too:
//!
//! - gradients for the next round, or the next gradient of a mode without rounds, are ahead;
//! - pulls read the value that is published;
//! - a value that replaces the chunk's is kept, and put in its place after the updates that had arrived before it;
//! - a checkpoint holds the chunk before its next update, takes its states, writes it, and lets it go.

use super::chunk::{Chunk, LateSet, Mark, Open, Stage};
use super::device::{Device, Doing, Summed};
use super::gate::Table;
use super::reply::{Behind, NOBODY, Refusal};
use super::serving::{Context, Lack, Serving, version_entry};
use crate::error::Failure;
use crate::ids::{ChunkId, PeerId, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::{Formula, Step, square_sums};
use crate::port::{Done, GradientLease, Kernels, Update, Work};
use crate::program::executor::Pace;
use crate::wire::{ErrorCode, Frame, Head};

impl Serving {
    /// Whether `update` is ready: its update is over, or its sum is there, where it steps together with others, or its
    /// round is complete and its slot has nothing to do.
    #[inline]
    pub(super) fn may_update(&self, pace: Pace, place: usize) -> bool {
        match &self.table.chunks[place].seat {
            None => self.is_complete(pace, place),
            Some(seat) => match seat.doing {
                Doing::Summed(_) | Doing::Updated(_) => true,
                Doing::Nothing => !seat.is_held && self.is_complete(pace, place),
                _ => false,
            },
        }
    }

    /// Begins an update, or takes the value of one that is over; whether there is a new value.
    pub(super) fn apply_on_device(&mut self, cx: &mut Context<'_>, place: usize, step: &Step) -> bool {
        let chunk = &mut self.table.chunks[place];
        let seat = chunk.seat.as_mut().expect("the chunk lives on a device");
        if let Doing::Updated(value) = std::mem::take(&mut seat.doing) {
            chunk.set_value(cx.pool, value);
            chunk.version.0 += 1;
            return true;
        }
        let Ok(into) = cx.pool.take(chunk.bytes) else {
            self.stall(place, Lack::Memory);
            return false;
        };
        let seat = chunk.seat.as_mut().expect("the chunk lives on a device");
        seat.doing = Doing::Updating;
        let slot = seat.slot;
        let step = Step { version: Version(chunk.version.0 + 1), ..*step };
        let mut numbers = Vec::new();
        match chunk.rule.formula(&step, &mut numbers) {
            Formula::Add { scale } | Formula::Sum { scale } => numbers = vec![scale],
            Formula::Rule { .. } => {}
        }
        let gradients = chunk.round.lend(chunk.element_type, chunk.bytes);
        cx.device().push(Work::Update { slot, numbers, gradients, is_summed: false, into });
        false
    }

    /// What is over: goes on with each chunk that it concerns.
    pub(super) fn completed(&mut self, cx: &mut Context<'_>, done: Vec<Done>) -> Result<(), Failure> {
        for Done { work, outcome } in done {
            let place = cx.device().place(work.slot());
            let chunk = &mut self.table.chunks[place];
            let was_awaited = chunk.is_awaited();
            match outcome {
                Ok(()) => chunk.ended(cx.kernels, work),
                Err(failure) => self.failed(cx, place, work, &failure)?,
            }
            if !self.note_over(place, was_awaited) {
                self.go_on(cx, place);
            }
        }
        Ok(())
    }

    /// What was held up by a checkpoint that has written it.
    pub(super) fn go_on_released(&mut self, cx: &mut Context<'_>) {
        for place in std::mem::take(&mut cx.device().released) {
            self.go_on(cx, place);
        }
    }

    fn go_on(&mut self, cx: &mut Context<'_>, place: usize) {
        let chunk = &mut self.table.chunks[place];
        if chunk.seat.as_ref().is_some_and(|seat| seat.leaves && matches!(seat.doing, Doing::Nothing)) {
            self.leave_device(place);
        }
        self.set_late(cx, place);
        self.run(cx, place, None);
        self.set_late(cx, place);
        self.store_held(cx.device(), place);
    }

    /// What follows an update that is published.
    pub(super) fn after_update(&mut self, cx: &mut Context<'_>, place: usize) {
        if self.table.chunks[place].seat.as_ref().is_some_and(|seat| seat.leaves) {
            self.leave_device(place);
        }
        self.set_late(cx, place);
    }

    /// Notes which rounds of chunks that step together are complete by now.
    pub(super) fn seal(&mut self, pace: Pace, places: &[usize]) {
        if pace != Pace::Rounds {
            self.note_awaited(pace, places);
            return;
        }
        if self.table.chunks[places[0]].sealed == 0 && places.iter().all(|place| self.is_complete(pace, *place)) {
            places.iter().for_each(|place| self.table.chunks[*place].sealed = 1);
        }
        if self.table.chunks[places[0]].sealed == 1 && places.iter().all(|place| self.is_next_complete(*place)) {
            places.iter().for_each(|place| self.table.chunks[*place].sealed = 2);
        }
    }

    /// The chunk is the processor's from now on. What waits for its turn goes on waiting.
    fn leave_device(&mut self, place: usize) {
        self.table.chunks[place].seat = None;
    }

    /// How many updates would be over by now if updates took no time.
    fn pending(&self, place: usize) -> u64 {
        let chunk = &self.table.chunks[place];
        match self.programs.of(place).pace {
            Pace::Rounds => u64::from(chunk.sealed),
            Pace::Any if chunk.rule.rule().is_element_wise() => {
                (chunk.round.contributors() + chunk.round.all_ahead().len()) as u64
            }
            // A contribution may wait for others; when a whole one waits, for whatever, no value is taken in.
            Pace::Any | Pace::Bounded(_) => 0,
        }
    }

    /// What an update lacks behind which what arrives for a chunk has to wait outside: who may go next is not known
    /// before it is over.
    pub(super) fn is_shut(&self, place: usize) -> Option<Lack> {
        if !self.is_stalled() {
            return None;
        }
        let chunk = &self.table.chunks[place];
        let is_element_wise = chunk.rule.rule().is_element_wise();
        let decides = match self.programs.of(place).pace {
            Pace::Rounds => false,
            Pace::Any => !is_element_wise,
            Pace::Bounded(_) => true,
        };
        let first = if is_element_wise { place } else { self.table.held(chunk.id).group.chunks[0] };
        self.stalled.get(&first).copied().filter(|_| decides)
    }

    /// Whether a device does something for a chunk, or for one that it steps together with.
    pub(super) fn is_at_work(&self, chunk: &Chunk) -> bool {
        let is_of_group = || {
            let group = &self.table.held(chunk.id).group.chunks;
            self.stalled.get(&group[0]) == Some(&Lack::Device)
                || group.iter().any(|place| self.table.chunks[*place].is_at_work())
        };
        chunk.is_at_work() || !chunk.rule.rule().is_element_wise() && is_of_group()
    }

    /// Refuses a gradient for a chunk that is shut. While a device does the update it may wait for its turn, but for
    /// one of a newer life: whether that drops what waits of the one before is not known yet.
    pub(super) fn check_open_to(&self, place: usize, head: &Head) -> Result<(), Refusal> {
        self.check_first(place, head)?;
        match self.is_shut(place) {
            Some(Lack::Device) if !self.is_earlier_life_ahead(place, head) => Ok(()),
            _ => self.check_open(place).map_err(|refusal| {
                let behind = refusal.behind.map(|_| Behind::Others);
                refusal.behind(behind)
            }),
        }
    }

    /// Refuses what arrives for a chunk that is shut.
    pub(super) fn check_open(&self, place: usize) -> Result<(), Refusal> {
        let Some(lack) = self.is_shut(place) else { return Ok(()) };
        let id = self.table.chunks[place].id;
        let name = self.table.held(id).name();
        let text = format!("parameter \"{name}\" chunk {}: its update waits for {}", id.chunk, lack.text());
        Err(Refusal::new(ErrorCode::Busy, text).behind((lack == Lack::Device).then_some(Behind::Work)))
    }

    /// Refuses a change of who takes part while it could change what goes next.
    pub(super) fn check_all_open(&self) -> Result<(), Refusal> {
        self.stalled.keys().try_for_each(|place| self.check_open(*place))
    }

    /// Refuses a value that would have to wait behind another.
    pub(super) fn check_no_late(&self, place: usize, call: Mark, trainer: TrainerId) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[place];
        let is_other = |late: &LateSet| (late.head.trainer, late.call) != (trainer, call);
        if chunk.heard(trainer).set.covers(call) || chunk.late.as_ref().is_none_or(|late| !is_other(late)) {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        let text = format!("parameter \"{name}\" chunk {}: another value waits for its turn", chunk.id.chunk);
        Err(Refusal::new(ErrorCode::Busy, text).while_at_work(self.is_at_work(chunk)))
    }

    /// Keeps a value that arrives while the chunk's slot is busy, or before updates whose turn it is; gives it back
    /// otherwise.
    pub(super) fn keep_set(&mut self, cx: &Context<'_>, place: usize, frame: &Frame, lease: Lease) -> Option<Lease> {
        let call = Mark::of(&frame.head);
        let pending = self.pending(place);
        let chunk = &mut self.table.chunks[place];
        let is_busy = chunk.seat.as_ref().is_some_and(|seat| seat.is_busy());
        let waits = 0 < pending || is_busy || chunk.late.is_some();
        if !waits || chunk.heard(frame.head.trainer).set.covers(call) {
            return Some(lease);
        }
        let since = (cx.peer != NOBODY).then_some(cx.now);
        match &mut chunk.late {
            // The same came again: whoever sent it now is answered.
            Some(late) => (late.peer, late.head, late.since) = (cx.peer, frame.head, since),
            none => {
                let after = Version(chunk.version.0 + pending);
                let (peer, head, position) = (cx.peer, frame.head, cx.position);
                *none = Some(Box::new(LateSet { lease, call, peer, head, after, position, since }));
            }
        }
        self.note_waits(place);
        None
    }

    /// Puts a value from the journal where it was when the checkpoint wrote its chunk: among what waits, or nowhere.
    pub(super) fn keep_set_again(&mut self, cx: &Context<'_>, place: usize, frame: &Frame, lease: Lease) {
        let chunk = &mut self.table.chunks[place];
        if let Some(Open { stage: Stage::Set(after), call, .. }) = chunk.open_in_checkpoint(&frame.head) {
            let (peer, head, position) = (cx.peer, frame.head, cx.position);
            chunk.late = Some(Box::new(LateSet { lease, call, peer, head, after, position, since: None }));
        }
    }

    /// Puts the value in place that was kept, if it is its turn.
    pub(super) fn set_late(&mut self, cx: &mut Context<'_>, place: usize) {
        let chunk = &self.table.chunks[place];
        let Some(late) = &chunk.late else { return };
        let is_due = late.after <= chunk.version || self.pending(place) == 0;
        if !is_due || chunk.seat.as_ref().is_some_and(|seat| seat.is_busy()) {
            return;
        }
        let late = self.table.chunks[place].late.take().expect("it was just looked at");
        self.put_set(cx, place, late.call, (late.peer, &late.head), late.lease);
        self.note_waits(place);
    }

    /// Replaces a value, if it was not replaced by this call before, and answers.
    pub(super) fn put_set(
        &mut self,
        cx: &mut Context<'_>,
        place: usize,
        call: Mark,
        (peer, head): (PeerId, &Head),
        lease: Lease,
    ) {
        let chunk = &mut self.table.chunks[place];
        let heard = chunk.heard_mut(head.trainer);
        let is_new = !heard.set.covers(call);
        if is_new {
            heard.set = call;
            chunk.set_value(cx.pool, lease);
        }
        cx.replies.done(peer, head, version_entry(chunk));
        if is_new {
            self.load_value(cx, place);
        }
    }

    /// The chunk's value was replaced: the device is told, if it lives on one.
    fn load_value(&mut self, cx: &mut Context<'_>, place: usize) {
        let chunk = &mut self.table.chunks[place];
        let parameter = chunk.seat.is_some().then(|| chunk.value());
        if let (Some(seat), Some(parameter)) = (&mut chunk.seat, parameter) {
            seat.doing = Doing::Loading;
            cx.device().push(Work::Load { slot: seat.slot, parameter, states: Vec::new() });
        }
    }

    /// Takes the states of a chunk that a checkpoint holds.
    fn store_held(&mut self, device: &mut Device, place: usize) {
        let chunk = &mut self.table.chunks[place];
        if chunk.seat.as_ref().is_some_and(|seat| seat.is_held) {
            chunk.store(device);
        }
    }

    /// Work that did not happen: the chunk goes on on the processor, if the processor has what it needs.
    fn failed(&mut self, cx: &mut Context<'_>, place: usize, work: Work, failure: &Failure) -> Result<(), Failure> {
        let id = self.table.chunks[place].id;
        let what = format!(
            "parameter {:?} chunk {}: {} on {}: {failure}",
            self.table.held(id).name(),
            id.chunk,
            work.name(),
            cx.device().name()
        );
        let chunk = &mut self.table.chunks[place];
        let was = chunk.seat.as_mut().map(|seat| std::mem::take(&mut seat.doing)).expect("it lives on a device");
        let kept = chunk.keep_states(work);
        let seat = chunk.seat.as_mut().expect("it lives on a device");
        let is_whole = matches!(failure, Failure::Call(_));
        match was {
            _ if seat.is_fresh => {
                tracing::warn!("{what}; it goes on on the processor");
                chunk.come_home(cx.kernels, kept);
            }
            Doing::Storing if is_whole => {
                seat.not_stored = Some(what);
            }
            Doing::Loading | Doing::Summing | Doing::Updating if is_whole => {
                tracing::warn!("{what}; its states are taken back and it goes on on the processor");
                seat.doing = Doing::Leaving(kept.map(Box::new));
                let (slot, states) = (seat.slot, std::mem::take(&mut chunk.states));
                cx.device().push(Work::Store { slot, states });
            }
            _ => return Err(cx.device().lose(format!("{what}: its states are lost"))),
        }
        Ok(())
    }

    /// Makes the chunks ready that a checkpoint writes next, from `first` on, about `bytes` of them: an update or a
    /// value that is under way comes to its end, the states are taken, and until it is written no update begins.
    /// Whether the first is ready.
    ///
    /// # Errors
    /// When its states cannot be taken.
    pub(super) fn hold_for_checkpoint(
        &mut self,
        device: &mut Device,
        first: ChunkId,
        bytes: u64,
    ) -> Result<bool, Failure> {
        let place = self.table.place(first).expect("the layout is of these chunks");
        let mut seats = self.together(place).iter().filter_map(|place| self.table.chunks[*place].seat.as_ref());
        if seats.all(|seat| seat.is_writable()) {
            return Ok(true);
        }
        self.hold(device, first, bytes);
        let mut seats = self.together(place).iter().filter_map(|place| self.table.chunks[*place].seat.as_ref());
        let not_stored = seats.find_map(|seat| seat.not_stored.clone());
        not_stored.map_or(Ok(false), |text| Err(Failure::Call(text)))
    }

    fn hold(&mut self, device: &mut Device, first: ChunkId, bytes: u64) {
        let Table { parameters, chunks, .. } = &mut self.table;
        let mut held = 0;
        for parameter in parameters.range(first.parameter..).map(|(_, parameter)| parameter) {
            let from = parameter.group.chunks.partition_point(|place| chunks[*place].id < first);
            // Those that step together are written together.
            let is_whole = !parameter.rule.rule().is_element_wise();
            for place in &parameter.group.chunks[from..] {
                held += chunks[*place].hold(device);
                if bytes <= held && !is_whole {
                    return;
                }
            }
            if bytes <= held {
                return;
            }
        }
    }

    /// Takes the states of every chunk that has none under way.
    pub(super) fn store_all(&mut self, device: &mut Device) {
        self.table.chunks.iter_mut().for_each(|chunk| chunk.store(device));
    }

    /// Why states could not be taken, if there are such.
    pub(super) fn not_stored(&mut self) -> Option<String> {
        self.table.chunks.iter_mut().find_map(|chunk| chunk.seat.as_mut()?.not_stored.take())
    }

    /// What an earlier checkpoint could not take is asked for anew.
    pub(super) fn forget_not_stored(&mut self) {
        self.table.chunks.iter_mut().filter_map(|chunk| chunk.seat.as_mut()).for_each(|seat| seat.not_stored = None);
    }

    /// Lets every chunk go that a checkpoint holds.
    pub(super) fn release_held(&mut self, device: &mut Device) {
        for (place, chunk) in self.table.chunks.iter_mut().enumerate() {
            if chunk.release() {
                device.released.push(place);
            }
        }
    }
}

impl Chunk {
    /// Takes the states to the host's memory, if they are not there and nothing else is under way.
    fn store(&mut self, device: &mut Device) {
        let Some(seat) = &mut self.seat else { return };
        if seat.is_fresh || seat.not_stored.is_some() || !matches!(seat.doing, Doing::Nothing) {
            return;
        }
        seat.doing = Doing::Storing;
        device.push(Work::Store { slot: seat.slot, states: std::mem::take(&mut self.states) });
    }

    /// Lets no update begin until it is written, and takes the states; how many bytes it will write.
    fn hold(&mut self, device: &mut Device) -> u64 {
        let bytes = u64::from(self.bytes) * (1 + self.state_count() as u64);
        let Some(seat) = self.seat.as_mut().filter(|seat| !seat.is_writable()) else { return bytes };
        if !seat.is_held {
            seat.is_held = true;
            seat.not_stored = None;
        }
        self.store(device);
        bytes
    }

    /// Lets the next update begin; whether it was held up.
    pub(super) fn release(&mut self) -> bool {
        self.seat.as_mut().is_some_and(|seat| std::mem::take(&mut seat.is_held))
    }

    /// Whether a device does something for it.
    pub(super) fn is_at_work(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.is_busy())
    }

    /// Whether a device does a part of its update.
    pub(super) fn is_awaited(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.is_awaited())
    }

    /// How many states it has, wherever they are.
    pub(super) fn state_count(&self) -> usize {
        self.seat.as_ref().map_or(self.states.len(), |seat| seat.code.states())
    }

    /// Work of its slot has happened.
    fn ended(&mut self, kernels: &mut dyn Kernels, work: Work) {
        let seat = self.seat.as_mut().expect("it lives on a device");
        match (std::mem::take(&mut seat.doing), work) {
            (Doing::Leaving(kept), Work::Store { states, .. }) => {
                self.states = states;
                self.come_home(kernels, kept.map(|work| *work));
            }
            (_, Work::Store { states, .. }) => {
                self.states = states;
                seat.is_fresh = true;
            }
            (_, Work::Load { states, .. }) => {
                if !states.is_empty() {
                    self.states = states;
                }
            }
            (_, Work::Sum { gradients, squares, .. }) => {
                seat.doing = Doing::Summed(Box::new(Summed { gradients, into: squares }));
            }
            (_, Work::Update { into, .. }) => {
                seat.is_fresh = seat.code.states() == 0;
                seat.doing = Doing::Updated(into);
            }
        }
    }

    /// Takes the states out of work that failed; a sum or an update is given back.
    fn keep_states(&mut self, work: Work) -> Option<Work> {
        match work {
            Work::Load { states, .. } | Work::Store { states, .. } => {
                if !states.is_empty() {
                    self.states = states;
                }
                None
            }
            update @ (Work::Sum { .. } | Work::Update { .. }) => Some(update),
        }
    }

    /// Its states are in the host's memory: it is the processor's as soon as the update that the device could not do,
    /// or could not do all of, is done and published.
    pub(super) fn come_home(&mut self, kernels: &mut dyn Kernels, failed: Option<Work>) {
        let seat = self.seat.as_mut().expect("it lives on a device");
        (seat.leaves, seat.is_fresh) = (true, true);
        match failed {
            Some(Work::Sum { gradients, squares, .. }) => self.sum_at_home(kernels, gradients, squares),
            Some(Work::Update { numbers, gradients, into, .. }) => {
                self.update_at_home(kernels, &numbers, &gradients, into);
            }
            _ => {}
        }
    }

    fn sum_at_home(&mut self, kernels: &mut dyn Kernels, lent: Vec<GradientLease>, mut into: Lease) {
        let (element_type, bytes) = (self.element_type, self.bytes as usize);
        let gradients: Vec<_> = lent.iter().map(GradientLease::gradient).collect();
        let sum = &mut into.bytes_mut()[..bytes];
        kernels.sum(element_type, sum, &gradients);
        let mut squares = Vec::new();
        square_sums(element_type, sum, &mut |block| squares.push(block));
        let places = into.bytes_mut().as_chunks_mut().0.iter_mut();
        places.zip(squares).for_each(|(place, block)| *place = block.to_le_bytes());
        let seat = self.seat.as_mut().expect("it lives on a device");
        seat.doing = Doing::Summed(Box::new(Summed { gradients: lent, into }));
    }

    fn update_at_home(
        &mut self,
        kernels: &mut dyn Kernels,
        numbers: &[f64],
        gradients: &[GradientLease],
        mut into: Lease,
    ) {
        let bytes = self.bytes as usize;
        let seat = self.seat.as_mut().expect("it lives on a device");
        into.bytes_mut()[..bytes].copy_from_slice(self.content.dense().bytes());
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(|lease| &mut lease.bytes_mut()[..bytes]).collect();
        let gradients: Vec<_> = gradients.iter().map(GradientLease::gradient).collect();
        kernels.update(Update {
            formula: seat.code.formula(numbers),
            element_type: self.element_type,
            parameter: &mut into.bytes_mut()[..bytes],
            states: &mut states,
            gradients: &gradients,
        });
        seat.doing = Doing::Updated(into);
    }
}
