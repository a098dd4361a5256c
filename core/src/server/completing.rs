//! Chunks on an accelerator: an update begins, other things happen, and the update is over.
//!
//! `update` is ready when its round is complete and the chunk's slot has nothing to do. It takes the gradients out of
//! the round, and the program stays where it is; the round stays open, and nothing enters it any more. When the work
//! comes back, `update` is ready again, takes the value that is there, and the program goes on to `send`. So there is
//! one program for both, and what waits meanwhile waits as it does when it is early:
//!
//! - gradients for the next round, or the next gradient of a mode without rounds, are ahead;
//! - pulls read the value that is published;
//! - a value that replaces the chunk's is kept, and put in its place after the updates that had arrived before it;
//! - a checkpoint holds the chunk before its next update, takes its states, writes it, and lets it go.

use super::chunk::{Chunk, Mark};
use super::device::{Device, Doing, LateSet};
use super::gate::Table;
use super::serving::{Context, Serving, version_entry};
use crate::error::Failure;
use crate::ids::{ChunkId, Version};
use crate::memory::Lease;
use crate::optim::{Formula, Step};
use crate::port::{Done, Kernels, Update, Work};
use crate::program::executor::Pace;
use crate::wire::Frame;

impl Serving {
    /// Whether `update` is ready: its update is over, or its round is complete and its slot has nothing to do.
    #[inline]
    pub(super) fn may_update(&self, pace: Pace, place: usize) -> bool {
        match &self.table.chunks[place].seat {
            None => self.is_complete(pace, place),
            Some(seat) => match seat.doing {
                Doing::Updated(_) => true,
                // A value that waits for this update keeps the chunk from being written; one that came before it goes
                // first.
                Doing::Nothing => {
                    let waits = seat.sets.first().is_some_and(|set| self.table.chunks[place].version < set.after);
                    (waits || !seat.is_held && seat.sets.is_empty()) && self.is_complete(pace, place)
                }
                _ => false,
            },
        }
    }

    /// Begins an update, or takes the value of one that is over; whether there is a new value.
    pub(super) fn apply_on_device(&mut self, cx: &mut Context<'_>, place: usize, step: &Step) -> bool {
        let chunk = &mut self.table.chunks[place];
        let seat = chunk.seat.as_mut().expect("the chunk lives on a device");
        if let Doing::Updated(value) = std::mem::take(&mut seat.doing) {
            chunk.set_value(value);
            chunk.version.0 += 1;
            return true;
        }
        let Ok(into) = cx.pool.take(chunk.bytes) else {
            self.stall(place);
            return false;
        };
        seat.doing = Doing::Updating;
        let slot = seat.slot;
        let step = Step { version: Version(chunk.version.0 + 1), ..*step };
        let mut numbers = Vec::new();
        match chunk.rule.formula(&step, &mut numbers) {
            Formula::Add { scale } | Formula::Sum { scale } => numbers = vec![scale],
            Formula::Rule { .. } => {}
        }
        let gradients = chunk.round.lend(chunk.element_type, chunk.bytes);
        cx.device().push(Work::Update { slot, numbers, gradients, into });
        false
    }

    /// What is over: goes on with each chunk that it concerns.
    pub(super) fn completed(&mut self, cx: &mut Context<'_>, done: Vec<Done>) -> Result<(), Failure> {
        for Done { work, outcome } in done {
            let place = cx.device().place(work.slot());
            let chunk = &mut self.table.chunks[place];
            match outcome {
                Ok(()) => chunk.ended(cx.kernels, work),
                Err(failure) => self.failed(cx, place, work, &failure)?,
            }
            self.go_on(cx, place);
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
            self.leave_device(cx, place);
        }
        self.set_late(cx, place);
        self.run(cx, place, None);
        self.set_late(cx, place);
        self.store_held(cx.device(), place);
    }

    /// What follows an update that is published.
    pub(super) fn after_update(&mut self, cx: &mut Context<'_>, place: usize) {
        if self.table.chunks[place].seat.as_ref().is_some_and(|seat| seat.leaves) {
            self.leave_device(cx, place);
        } else {
            self.set_late(cx, place);
        }
    }

    /// Notes which rounds of a chunk on a device are complete by now.
    #[inline]
    pub(super) fn seal(&mut self, place: usize) {
        let chunk = &self.table.chunks[place];
        if chunk.seat.is_none() || self.programs.of(place).pace != Pace::Rounds {
            return;
        }
        if chunk.sealed == 0 && self.is_complete(Pace::Rounds, place) {
            self.table.chunks[place].sealed = 1;
        }
        if self.table.chunks[place].sealed == 1 && self.is_next_complete(place) {
            self.table.chunks[place].sealed = 2;
        }
    }

    /// The chunk is the processor's from now on.
    fn leave_device(&mut self, cx: &mut Context<'_>, place: usize) {
        let Some(seat) = self.table.chunks[place].seat.take() else { return };
        for set in seat.sets {
            self.put_set(cx, place, set);
        }
    }

    /// Keeps a value that arrives while the chunk's slot is busy, or before updates whose turn it is; gives it back
    /// otherwise.
    pub(super) fn keep_set(&mut self, cx: &Context<'_>, place: usize, frame: &Frame, lease: Lease) -> Option<Lease> {
        let chunk = &mut self.table.chunks[place];
        let Some(seat) = &mut chunk.seat else { return Some(lease) };
        // So many updates would be over by now if updates took no time: they go first.
        let pending = match self.programs.of(place).pace {
            Pace::Rounds => u64::from(chunk.sealed),
            _ => (chunk.round.contributors() + chunk.round.all_ahead().len()) as u64,
        };
        if pending == 0 && !seat.is_busy() {
            return Some(lease);
        }
        let after = Version(chunk.version.0 + pending);
        seat.sets.push(LateSet { lease, mark: Mark::of(&frame.head), peer: cx.peer, head: frame.head, after });
        None
    }

    /// Puts the values in place that were kept and whose turn it is.
    fn set_late(&mut self, cx: &mut Context<'_>, place: usize) {
        let mut is_set = false;
        loop {
            let chunk = &mut self.table.chunks[place];
            let Some(seat) = &mut chunk.seat else { return };
            if seat.is_busy() || seat.sets.first().is_none_or(|set| chunk.version < set.after) {
                break;
            }
            let set = seat.sets.remove(0);
            is_set |= self.put_set(cx, place, set);
        }
        if is_set {
            self.load_value(cx, place);
        }
    }

    fn put_set(&mut self, cx: &mut Context<'_>, place: usize, set: LateSet) -> bool {
        let chunk = &mut self.table.chunks[place];
        let heard = chunk.heard_mut(set.head.trainer);
        let is_new = !heard.set.covers(set.mark);
        if is_new {
            heard.set = set.mark;
            chunk.set_value(set.lease);
        }
        cx.replies.done(set.peer, &set.head, version_entry(chunk));
        is_new
    }

    /// The chunk's value was replaced: the device is told, if it lives on one.
    pub(super) fn load_value(&mut self, cx: &mut Context<'_>, place: usize) {
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
            Doing::Loading | Doing::Updating if is_whole => {
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
        match &self.table.chunks[place].seat {
            None => return Ok(true),
            Some(seat) if seat.is_writable() => return Ok(true),
            Some(_) => self.hold(device, first, bytes),
        }
        let not_stored = self.table.chunks[place].seat.as_ref().and_then(|seat| seat.not_stored.clone());
        not_stored.map_or(Ok(false), |text| Err(Failure::Call(text)))
    }

    fn hold(&mut self, device: &mut Device, first: ChunkId, bytes: u64) {
        let Table { parameters, chunks, .. } = &mut self.table;
        let mut held = 0;
        for parameter in parameters.range(first.parameter..).map(|(_, parameter)| parameter) {
            let from = parameter.group.chunks.partition_point(|place| chunks[*place].id < first);
            for place in &parameter.group.chunks[from..] {
                held += chunks[*place].hold(device);
                if bytes <= held {
                    return;
                }
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
            (_, Work::Update { into, .. }) => {
                seat.is_fresh = seat.code.states() == 0;
                seat.doing = Doing::Updated(into);
            }
        }
    }

    /// Takes the states out of work that failed; an update is given back.
    fn keep_states(&mut self, work: Work) -> Option<Work> {
        match work {
            Work::Load { states, .. } | Work::Store { states, .. } => {
                if !states.is_empty() {
                    self.states = states;
                }
                None
            }
            update @ Work::Update { .. } => Some(update),
        }
    }

    /// Its states are in the host's memory: it is the processor's as soon as the update that the device could not do is
    /// done and published.
    fn come_home(&mut self, kernels: &mut dyn Kernels, failed: Option<Work>) {
        let bytes = self.bytes as usize;
        let seat = self.seat.as_mut().expect("it lives on a device");
        (seat.leaves, seat.is_fresh) = (true, true);
        let Some(Work::Update { numbers, gradients, mut into, .. }) = failed else { return };
        into.bytes_mut()[..bytes].copy_from_slice(self.content.dense().bytes());
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(|lease| &mut lease.bytes_mut()[..bytes]).collect();
        let gradients: Vec<_> = gradients.iter().map(crate::port::GradientLease::gradient).collect();
        kernels.update(Update {
            formula: seat.code.formula(&numbers),
            element_type: self.element_type,
            parameter: &mut into.bytes_mut()[..bytes],
            states: &mut states,
            gradients: &gradients,
        });
        seat.doing = Doing::Updated(into);
    }
}
