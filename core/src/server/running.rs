//! The ops of a server's program on chunks: an instance is a chunk, or all chunks of a parameter whose rule needs the
//! whole gradient, and the executor runs it as far as what is there allows.

use super::completing::Readiness;
use super::round::Contribution;
use super::serving::{Context, Serving};
use crate::ids::TrainerId;
use crate::program::executor::{Act, Plan, Port, UnitIndex, Wait};

/// There was no lease for an update, or a device does it: it has not run, and runs when one comes back, or when the
/// device is done.
struct Stalled;

/// The gradient that `recv` gives next.
#[derive(Clone, Copy)]
enum Given {
    /// The one that has just arrived.
    Arrived,
    /// One that waited for its turn.
    Ahead(usize, TrainerId),
}

/// Chunks, as the ops of their program see them.
struct Instance<'a, 'b> {
    serving: &'a mut Serving,
    cx: &'a mut Context<'b>,
    /// Chunks that step together, most often one.
    places: &'a [usize],
    /// The chunk that something has arrived for.
    place: usize,
    arrived: &'a mut Option<Contribution>,
    given: Option<Given>,
}

impl Serving {
    /// Lets a chunk's program run with what has arrived, if anything, until no op is ready. What may not enter its
    /// round yet waits.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, place: usize, mut arrived: Option<Contribution>) {
        if self.is_before_restored(cx, place) {
            return;
        }
        let chunk = &self.table.chunks[place];
        let (alone, group);
        let places: &[usize] = if chunk.rule.rule().is_element_wise() {
            alone = [place];
            &alone
        } else {
            group = self.table.held(chunk.id).group.chunks.clone();
            &group
        };
        let mut running = self.programs.take(place);
        let mut instance = Instance { serving: self, cx, places, place, arrived: &mut arrived, given: None };
        while let Ok(Some(_)) = running.marking.step(&running.plan, &mut instance) {}
        debug_assert!(running.marking.is_at_rest(&running.plan), "an event leaves nothing under way");
        if let Some(early) = arrived {
            self.table.chunks[place].round.add_ahead(early);
        }
        self.programs.bring_back(place, running);
        for place in places {
            self.note_waits(*place);
        }
    }
}

impl Instance<'_, '_> {
    /// What `recv` gives: what has arrived if it may enter, else the first that waits and may, by chunk and trainer, or by
    /// arrival for a chunk on a device.
    fn next(&self) -> Option<Given> {
        if self.arrived.as_ref().is_some_and(|one| self.serving.may_enter(self.place, one)) {
            return Some(Given::Arrived);
        }
        self.places.iter().find_map(|place| {
            let chunk = &self.serving.table.chunks[*place];
            let mut waiting = chunk.round.all_ahead().iter().filter(|one| self.serving.may_enter(*place, one));
            // What waits for nothing but a device goes in the order of arrival, as it would without one.
            let is_seated = chunk.seat.is_some();
            let first = if is_seated { waiting.min_by_key(|one| one.position) } else { waiting.next() }?;
            Some(Given::Ahead(*place, first.trainer))
        })
    }

    /// Puts the gradient that was received in its accumulator.
    fn put(&mut self) {
        let (place, contribution) = match self.given.take() {
            Some(Given::Arrived) => (self.place, self.arrived.take()),
            Some(Given::Ahead(place, trainer)) => (place, self.serving.table.chunks[place].round.take_ahead(trainer)),
            None => (self.place, None),
        };
        let contribution = contribution.expect("the gradient was received");
        self.serving.enter(self.cx, place, contribution);
        self.serving.fold_early(self.cx, place);
    }

    fn update(&mut self) -> Result<(), Stalled> {
        let is_done = match self.places {
            [place] if self.serving.table.chunks[*place].rule.rule().is_element_wise() => {
                self.serving.apply(self.cx, *place, None)
            }
            places => self.serving.apply_group(self.cx, places),
        };
        if is_done { Ok(()) } else { Err(Stalled) }
    }
}

impl Port for Instance<'_, '_> {
    type Error = Stalled;

    #[inline]
    fn waits(&mut self, plan: &Plan, unit: UnitIndex) -> Option<Wait> {
        match plan.units()[unit.place()].act {
            Act::Recv => {
                self.given = self.next();
                self.given.is_none().then_some(Wait::Arrival)
            }
            Act::Compute => {
                match self.serving.readiness(self.places[0]) {
                    Readiness::Free => {}
                    Readiness::Over => return None,
                    Readiness::Waits(wait) => return Some(wait),
                }
                let open = self.places.iter().find(|place| !self.serving.is_complete(**place))?;
                let held = self.serving.table.chunks[*open].round.contributors();
                Some(Wait::Pieces { held, needed: plan.accumulators()[0].count as usize })
            }
            _ => None,
        }
    }

    #[inline]
    fn run(&mut self, plan: &Plan, unit: UnitIndex) -> Result<(), Stalled> {
        match plan.units()[unit.place()].act {
            // The gradient stays where it is until it is put.
            Act::Recv | Act::Loop => {}
            Act::PutGradient => self.put(),
            Act::Compute => return self.update(),
            Act::Send => self.places.iter().for_each(|place| self.serving.publish(self.cx, *place)),
            act => unreachable!("a server's program has no unit of its own that does {act:?}"),
        }
        Ok(())
    }
}
