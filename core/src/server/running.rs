//! The ops of a server's program on chunks: an instance is a chunk, or all chunks of a parameter whose rule needs the
//! whole gradient, and the executor runs it as far as what is there allows.
//!
//! Chunks that a frame brings something for run in step: one marking moves for all of them, and a unit does its work
//! for those that it is ready for. Each has whole turns of a stage or none, so that it does what it would do alone, and
//! what the executor costs is shared by as many as there are.

use std::convert::Infallible;

use super::round::Contribution;
use super::serving::{Context, Serving};
use crate::ids::TrainerId;
use crate::program::executor::{Act, Pace, Plan, Port, UnitIndex, Wait};

/// How many chunks run in step: enough to share what the executor costs, and few enough that they, their values and
/// their gradients stay in the first-level cache from one unit to the next when they are small.
const IN_STEP_MAX: usize = 16;

/// The gradient that `recv` gives next.
#[derive(Clone, Copy)]
enum Given {
    /// The one that has just arrived.
    Arrived,
    /// One that waited for its turn, at this place.
    Ahead(u32, TrainerId),
}

/// An instance of a program that runs.
pub(super) struct Member {
    /// The chunk that something has arrived for.
    place: usize,
    arrived: Option<Contribution>,
    given: Option<Given>,
    /// Whether its accumulator gives.
    is_complete: bool,
    /// Whether it is updated and not sent.
    is_updated: bool,
    /// Whether there was no lease for its update, or a device does it.
    is_stalled: bool,
}

const _: () = assert!(size_of::<Member>() <= 128, "a member is moved by a few instructions");

impl Member {
    #[inline]
    fn new(place: usize, arrived: Option<Contribution>) -> Self {
        Self { place, arrived, given: None, is_complete: false, is_updated: false, is_stalled: false }
    }
}

/// Chunks, as the ops of their program see them.
struct Instances<'a, 'b> {
    serving: &'a mut Serving,
    cx: &'a mut Context<'b>,
    members: &'a mut [Member],
    /// Whose turn it is in each of them.
    pace: Pace,
    /// The chunks of the only member, when its rule needs the whole gradient.
    group: Option<&'a [usize]>,
}

impl Serving {
    /// Lets a chunk's program run, with what has arrived, if anything, until no op is ready. What may not enter its
    /// round yet waits.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, place: usize, arrived: Option<Contribution>) {
        if self.is_before_restored(cx, place) {
            return;
        }
        let chunk = &self.table.chunks[place];
        let members = &mut [Member::new(place, arrived)];
        if chunk.rule.rule().is_element_wise() {
            self.run_in_step(cx, members, None);
        } else {
            let group = self.table.held(chunk.id).group.chunks.clone();
            self.run_in_step(cx, members, Some(&group));
        }
    }

    /// As [`Serving::run`] for something that has arrived, but not before [`Serving::run_joined`] is called: together
    /// with other chunks that run the same program.
    #[inline]
    pub(super) fn join(&mut self, cx: &mut Context<'_>, place: usize, arrived: Contribution) {
        if !self.table.chunks[place].rule.rule().is_element_wise() {
            self.run(cx, place, Some(arrived));
            return;
        }
        let differs = self.joined.first().is_some_and(|first| !self.programs.are_one(first.place, place));
        if differs || self.joined.len() == IN_STEP_MAX {
            self.run_joined(cx);
        }
        self.table.chunks[place].is_joined = true;
        self.joined.push(Member::new(place, Some(arrived)));
    }

    /// Runs the chunks that have joined.
    pub(super) fn run_joined(&mut self, cx: &mut Context<'_>) {
        if self.joined.is_empty() {
            return;
        }
        let mut members = std::mem::take(&mut self.joined);
        self.run_in_step(cx, &mut members, None);
        members.clear();
        self.joined = members;
    }

    fn run_in_step(&mut self, cx: &mut Context<'_>, members: &mut [Member], group: Option<&[usize]>) {
        let first = members[0].place;
        let mut running = self.programs.take(first);
        let pace = self.programs.of(first).pace;
        let mut instances = Instances { serving: self, cx, members, pace, group };
        while let Ok(Some(_)) = running.marking.step(&running.plan, &mut instances) {}
        debug_assert!(running.marking.is_at_rest(&running.plan), "an event leaves nothing under way");
        for member in members {
            let chunk = &mut self.table.chunks[member.place];
            chunk.is_joined = false;
            if let Some(early) = member.arrived.take() {
                chunk.round.add_ahead(early);
            }
            let places = member.places(group);
            // Any other round that is complete was closed.
            if member.is_stalled || places.iter().any(|place| self.table.chunks[*place].seat.is_some()) {
                self.seal(pace, places);
            }
            self.note_waits(member.place);
        }
        self.programs.bring_back(first, running);
        for place in group.unwrap_or_default() {
            self.note_waits(*place);
        }
    }
}

impl Member {
    /// The chunks that step together.
    fn places<'a>(&'a self, group: Option<&'a [usize]>) -> &'a [usize] {
        group.unwrap_or(std::slice::from_ref(&self.place))
    }

    /// What `recv` gives: in rounds what has arrived if it may enter, else the first that waits and may, by chunk and
    /// trainer; otherwise the first that may, in the order of arrival.
    #[inline]
    fn next(&self, serving: &Serving, pace: Pace, group: Option<&[usize]>) -> Option<Given> {
        let arrived = || self.arrived.as_ref().filter(|one| serving.may_enter(pace, self.place, one));
        if group.is_none() && serving.table.chunks[self.place].round.all_ahead().is_empty() {
            // Nothing else can be next, as nearly always.
            return arrived().map(|_| Given::Arrived);
        }
        if pace == Pace::Rounds && arrived().is_some() {
            return Some(Given::Arrived);
        }
        let waiting = self.places(group).iter().flat_map(|place| {
            let ahead = serving.table.chunks[*place].round.all_ahead().iter();
            ahead.filter(|one| serving.may_enter(pace, *place, one)).map(|one| (*place, one))
        });
        let mut waiting = waiting;
        let first = match pace {
            Pace::Rounds => waiting.next(),
            // What has arrived is the last to arrive.
            Pace::Any | Pace::Bounded(_) => waiting.min_by_key(|(_, one)| one.sending.arrival),
        };
        let given = |(place, one): (usize, &Contribution)| {
            Given::Ahead(u32::try_from(place).expect("a shard's chunks are counted in 32 bits"), one.trainer)
        };
        first.map(given).or_else(|| arrived().map(|_| Given::Arrived))
    }
}

impl Instances<'_, '_> {
    /// Finds the gradient that each receives next; true when there is one.
    fn receive(&mut self) -> bool {
        let mut is_any = false;
        for member in &mut *self.members {
            // What enters before the round is closed would be closed with it.
            let may_receive = !member.is_updated;
            member.given = may_receive.then(|| member.next(self.serving, self.pace, self.group)).flatten();
            is_any |= member.given.is_some();
        }
        is_any
    }

    /// Finds whose accumulator gives; true when there is one.
    fn complete(&mut self) -> bool {
        let mut is_any = false;
        for member in &mut *self.members {
            let may_update = |place: &usize| self.serving.may_update(self.pace, *place);
            member.is_complete = !member.is_stalled && member.places(self.group).iter().all(may_update);
            is_any |= member.is_complete;
        }
        is_any
    }

    /// Puts the gradients that were received in their accumulators.
    fn put(&mut self) {
        for member in &mut *self.members {
            let (place, contribution) = match member.given.take() {
                Some(Given::Arrived) => (member.place, member.arrived.take()),
                Some(Given::Ahead(place, trainer)) => {
                    let place = place as usize;
                    (place, self.serving.table.chunks[place].round.take_ahead(trainer))
                }
                None => continue,
            };
            self.serving.enter(self.cx, place, contribution.expect("the gradient was received"));
            self.serving.fold_early(self.cx, place);
        }
    }

    /// Updates who has all pieces. For whom there is no lease, or whose update a device begins, the turn is empty: it
    /// is tried again when a lease comes back, or the device is done.
    fn update(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.is_complete) {
            member.is_complete = false;
            member.is_updated = match self.group {
                None => self.serving.apply(self.cx, member.place, None),
                Some(group) => self.serving.apply_group(self.cx, group),
            };
            member.is_stalled = !member.is_updated;
            if member.is_updated {
                self.serving.stirred(member.places(self.group)[0]);
            }
        }
    }

    fn send(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.is_updated) {
            member.is_updated = false;
            for place in member.places(self.group) {
                self.serving.publish(self.cx, *place);
            }
        }
    }

    /// What the first accumulator waits for.
    fn pieces(&self, plan: &Plan) -> Wait {
        let held = self.serving.table.chunks[self.members[0].place].round.contributors();
        Wait::Pieces { held, needed: plan.accumulators()[0].count as usize }
    }
}

impl Port for Instances<'_, '_> {
    type Error = Infallible;

    #[inline]
    fn waits(&mut self, plan: &Plan, unit: UnitIndex) -> Option<Wait> {
        match plan.units()[unit.place()].act {
            Act::Recv => (!self.receive()).then_some(Wait::Arrival),
            Act::Compute => (!self.complete()).then(|| self.pieces(plan)),
            _ => None,
        }
    }

    #[inline]
    fn run(&mut self, plan: &Plan, unit: UnitIndex) -> Result<(), Infallible> {
        match plan.units()[unit.place()].act {
            // The gradients stay where they are until they are put.
            Act::Recv | Act::Loop => {}
            Act::PutGradient => self.put(),
            Act::Compute => self.update(),
            Act::Send => self.send(),
            act => unreachable!("a server's program has no unit of its own that does {act:?}"),
        }
        Ok(())
    }
}
