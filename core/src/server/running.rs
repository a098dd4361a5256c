//! Execution of a server's program on chunks. An instance is a chunk, or a group of chunks that update together; the
//! executor runs it until no unit is ready.
//!
//! Chunks addressed by one frame run in step: one marking advances for all, and a unit works on each instance that is
//! ready, which shares the executor's cost. Each instance runs whole iterations or none, so the result equals a
//! separate run.

use std::convert::Infallible;

use super::round::Contribution;
use super::serving::{Context, Serving};
use crate::ids::TrainerId;
use crate::program::executor::{AccumulatorPace, ExecutionPlan, UnitIndex, UnitKind, UnitRunner, Wait};

/// Chunks that run in step: enough to share the executor's cost, few enough that small chunks stay in the first-level
/// cache between units.
const IN_STEP_MAX: usize = 16;

/// The gradient that `recv` admits next.
#[derive(Clone, Copy)]
enum NextGradient {
    /// The gradient of the current frame.
    Arrived,
    /// A gradient that waited, in this slot and of this trainer.
    Ahead(u32, TrainerId),
}

/// A running instance of a program.
pub(super) struct ProgramInstance {
    /// The chunk of the current frame's gradient.
    slot_index: usize,
    arrived: Option<Contribution>,
    next: Option<NextGradient>,
    /// Whether its round is complete.
    is_complete: bool,
    /// Whether it is updated and not published.
    is_updated: bool,
    /// Whether its update lacks a lease or runs on a device.
    is_stalled: bool,
}

const _: () = assert!(size_of::<ProgramInstance>() <= 128, "a member is moved by a few instructions");

impl ProgramInstance {
    #[inline]
    fn new(slot_index: usize, arrived: Option<Contribution>) -> Self {
        Self { slot_index, arrived, next: None, is_complete: false, is_updated: false, is_stalled: false }
    }
}

/// The instances on which the program's ops work.
struct Instances<'a, 'b> {
    serving: &'a mut Serving,
    cx: &'a mut Context<'b>,
    members: &'a mut [ProgramInstance],
    /// The admission rule of the mode.
    pace: AccumulatorPace,
    /// The group of the only instance, when its rule needs the whole gradient.
    group: Option<&'a [usize]>,
}

impl Serving {
    /// Runs a chunk's program, with a new gradient if there is one, until no unit is ready. A gradient that may not
    /// enter its round waits.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, slot_index: usize, arrived: Option<Contribution>) {
        if self.is_before_restored(cx, slot_index) {
            return;
        }
        let chunk = &self.table.chunks[slot_index];
        let members = &mut [ProgramInstance::new(slot_index, arrived)];
        if chunk.rule.rule().is_element_wise() {
            self.run_in_step(cx, members, None);
        } else {
            let group = self.table.held(chunk.id).group.chunks.clone();
            self.run_in_step(cx, members, Some(&group));
        }
    }

    /// As [`Serving::run`], deferred to [`Serving::run_joined`], which runs the chunks of one program in step.
    #[inline]
    pub(super) fn join(&mut self, cx: &mut Context<'_>, slot_index: usize, arrived: Contribution) {
        if !self.table.chunks[slot_index].rule.rule().is_element_wise() {
            self.run(cx, slot_index, Some(arrived));
            return;
        }
        let differs = self.joined.first().is_some_and(|first| !self.programs.are_one(first.slot_index, slot_index));
        if differs || self.joined.len() == IN_STEP_MAX {
            self.run_joined(cx);
        }
        self.table.chunks[slot_index].is_joined = true;
        self.joined.push(ProgramInstance::new(slot_index, Some(arrived)));
    }

    /// Runs the joined chunks.
    pub(super) fn run_joined(&mut self, cx: &mut Context<'_>) {
        if self.joined.is_empty() {
            return;
        }
        let mut members = std::mem::take(&mut self.joined);
        self.run_in_step(cx, &mut members, None);
        members.clear();
        self.joined = members;
    }

    fn run_in_step(&mut self, cx: &mut Context<'_>, members: &mut [ProgramInstance], group: Option<&[usize]>) {
        let first = members[0].slot_index;
        let mut running = self.programs.take(first);
        let pace = self.programs.of(first).pace;
        let mut instances = Instances { serving: self, cx, members, pace, group };
        while let Ok(Some(_)) = running.marking.step(&running.plan, &mut instances) {}
        debug_assert!(running.marking.is_at_rest(&running.plan), "an event leaves no unit running");
        for member in members {
            let chunk = &mut self.table.chunks[member.slot_index];
            chunk.is_joined = false;
            if let Some(early) = member.arrived.take() {
                chunk.round.add_ahead(early);
            }
            let slot_indices = member.slot_indices(group);
            // Every other complete round is closed.
            if member.is_stalled
                || slot_indices.iter().any(|slot_index| self.table.chunks[*slot_index].on_device.is_some())
            {
                self.seal(pace, slot_indices);
            }
            self.note_waits(member.slot_index);
        }
        self.programs.bring_back(first, running);
        for slot_index in group.unwrap_or_default() {
            self.note_waits(*slot_index);
        }
    }
}

impl ProgramInstance {
    /// The slot indices of the instance.
    fn slot_indices<'a>(&'a self, group: Option<&'a [usize]>) -> &'a [usize] {
        group.unwrap_or(std::slice::from_ref(&self.slot_index))
    }

    /// Chooses the gradient that `recv` admits: in rounds the new one if it may enter, else the first waiting one by
    /// chunk and trainer; in other modes the earliest by arrival.
    #[inline]
    fn next(&self, serving: &Serving, pace: AccumulatorPace, group: Option<&[usize]>) -> Option<NextGradient> {
        let arrived = || self.arrived.as_ref().filter(|one| serving.may_enter(pace, self.slot_index, one));
        if group.is_none() && serving.table.chunks[self.slot_index].round.all_ahead().is_empty() {
            // The common case: no other candidate.
            return arrived().map(|_| NextGradient::Arrived);
        }
        if pace == AccumulatorPace::Rounds && arrived().is_some() {
            return Some(NextGradient::Arrived);
        }
        let waiting = self.slot_indices(group).iter().flat_map(|slot_index| {
            let ahead = serving.table.chunks[*slot_index].round.all_ahead().iter();
            ahead.filter(|one| serving.may_enter(pace, *slot_index, one)).map(|one| (*slot_index, one))
        });
        let mut waiting = waiting;
        let first = match pace {
            AccumulatorPace::Rounds => waiting.next(),
            // The new gradient is the latest.
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => waiting.min_by_key(|(_, one)| one.sending.arrival),
        };
        let next = |(slot_index, one): (usize, &Contribution)| {
            NextGradient::Ahead(
                u32::try_from(slot_index).expect("a shard's chunks are counted in 32 bits"),
                one.trainer,
            )
        };
        first.map(next).or_else(|| arrived().map(|_| NextGradient::Arrived))
    }
}

impl Instances<'_, '_> {
    /// Chooses the next gradient of each instance; true when there is one.
    fn receive(&mut self) -> bool {
        let mut is_any = false;
        for member in &mut *self.members {
            // A gradient admitted now would be closed with the finished round.
            let may_receive = !member.is_updated;
            member.next = may_receive.then(|| member.next(self.serving, self.pace, self.group)).flatten();
            is_any |= member.next.is_some();
        }
        is_any
    }

    /// Finds the instances with a complete round; true when there is one.
    fn complete(&mut self) -> bool {
        let mut is_any = false;
        for member in &mut *self.members {
            let may_update = |slot_index: &usize| self.serving.may_update(self.pace, *slot_index);
            member.is_complete = !member.is_stalled && member.slot_indices(self.group).iter().all(may_update);
            is_any |= member.is_complete;
        }
        is_any
    }

    /// Adds the admitted gradients to their rounds.
    fn put(&mut self) {
        for member in &mut *self.members {
            let (slot_index, contribution) = match member.next.take() {
                Some(NextGradient::Arrived) => (member.slot_index, member.arrived.take()),
                Some(NextGradient::Ahead(slot_index, trainer)) => {
                    let slot_index = slot_index as usize;
                    (slot_index, self.serving.table.chunks[slot_index].round.take_ahead(trainer))
                }
                None => continue,
            };
            self.serving.enter(self.cx, slot_index, contribution.expect("the gradient was received"));
            self.serving.fold_early(self.cx, slot_index);
        }
    }

    /// Updates the instances with a complete round. An instance without a lease, or whose update runs on a device,
    /// stalls and is retried.
    fn update(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.is_complete) {
            member.is_complete = false;
            member.is_updated = match self.group {
                None => self.serving.apply(self.cx, member.slot_index, None),
                Some(group) => self.serving.apply_group(self.cx, group),
            };
            member.is_stalled = !member.is_updated;
            if member.is_updated {
                self.serving.note_updated(member.slot_indices(self.group)[0]);
            }
        }
    }

    fn send(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.is_updated) {
            member.is_updated = false;
            for slot_index in member.slot_indices(self.group) {
                self.serving.publish(self.cx, *slot_index);
            }
        }
    }

    /// The missing pieces of the first instance.
    fn pieces(&self, plan: &ExecutionPlan) -> Wait {
        let held = self.serving.table.chunks[self.members[0].slot_index].round.contributors();
        Wait::Pieces { held, needed: plan.accumulators()[0].count as usize }
    }
}

impl UnitRunner for Instances<'_, '_> {
    type Error = Infallible;

    #[inline]
    fn waits(&mut self, plan: &ExecutionPlan, unit: UnitIndex) -> Option<Wait> {
        match plan.units()[unit.place()].act {
            UnitKind::Recv => (!self.receive()).then_some(Wait::Arrival),
            UnitKind::Compute => (!self.complete()).then(|| self.pieces(plan)),
            _ => None,
        }
    }

    #[inline]
    fn run(&mut self, plan: &ExecutionPlan, unit: UnitIndex) -> Result<(), Infallible> {
        match plan.units()[unit.place()].act {
            // A gradient moves only in `put`.
            UnitKind::Recv | UnitKind::Loop => {}
            UnitKind::PutGradient => self.put(),
            UnitKind::Compute => self.update(),
            UnitKind::Send => self.send(),
            act => unreachable!("a server's program has no unit of its own that does {act:?}"),
        }
        Ok(())
    }
}
