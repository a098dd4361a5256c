//! Which units are ready: the state of a plan that runs.

use super::plan::{Act, Plan, UnitIndex};
use super::wait::Wait;

/// What runs units: it has the values, and knows what is there.
pub trait Port {
    /// What can go wrong in a unit.
    type Error;

    /// What a unit waits for beyond the units before it; nothing when it is ready. Asked as often as the executor
    /// likes, also of units that then do not run.
    fn waits(&mut self, plan: &Plan, unit: UnitIndex) -> Option<Wait>;

    /// Runs a unit that is ready.
    fn run(&mut self, plan: &Plan, unit: UnitIndex) -> Result<(), Self::Error>;
}

/// How far a stage is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Turn {
    /// Units that have not run in this turn; none between runs, and before its loop has begun.
    left: u32,
    /// Turns that are over.
    over: u64,
}

/// The tokens of a plan: which units have run in the turn of their stage, and which are next.
///
/// A unit is *marked* when all units before it have run in this turn. It is *ready* when it is marked and its port says
/// that what it waits for is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marking {
    /// For every unit, how many of those before it have not run in this turn.
    missing: Vec<u32>,
    /// A bit for every marked unit.
    marked: Vec<u64>,
    turns: Vec<Turn>,
    /// Where the search for a ready unit begins.
    from: usize,
}

impl Marking {
    /// Every stage that no loop begins is at the start of its turn.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let units = plan.units().len();
        let mut new = Self {
            missing: vec![0; units],
            marked: vec![0; units.div_ceil(64)],
            turns: vec![Turn::default(); plan.stages().len()],
            from: 0,
        };
        new.begin(plan);
        new
    }

    /// Begins another run, after the last one has ended; loops go on where they are.
    pub fn begin(&mut self, plan: &Plan) {
        for stage in (0..plan.stages().len()).filter(|stage| plan.stages()[*stage].begun_by.is_none()) {
            if self.turns[stage].left == 0 {
                self.begin_turn(plan, stage);
            }
        }
    }

    /// Runs the first unit that is ready: the lowest, counted from the end of the stage whose turn ended last and
    /// around. So the order depends on nothing but what is there, and no stage keeps the others from their turn.
    ///
    /// # Errors
    /// What the unit said, and which it was; it has then not run.
    #[inline]
    pub fn step<P: Port>(&mut self, plan: &Plan, port: &mut P) -> Result<Option<UnitIndex>, (UnitIndex, P::Error)> {
        let Some(unit) = self.first_ready(plan, port) else { return Ok(None) };
        port.run(plan, unit).map_err(|error| (unit, error))?;
        self.ran(plan, unit);
        Ok(Some(unit))
    }

    /// Whether every stage has ended its turn, and none is a loop's.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.turns.iter().all(|turn| turn.left == 0)
    }

    /// Whether every loop is at the start of its turn: then nothing is under way.
    #[must_use]
    pub fn is_at_rest(&self, plan: &Plan) -> bool {
        let is_whole = |stage: usize| {
            let (first, end) = plan.stages()[stage].units;
            self.turns[stage].left == 0 || self.turns[stage].left == end - first
        };
        (0..self.turns.len()).all(is_whole)
    }

    /// How many turns of a unit's stage are over.
    #[must_use]
    pub fn turns(&self, plan: &Plan, unit: UnitIndex) -> u64 {
        self.turns[plan.units()[unit.place()].stage as usize].over
    }

    /// The units that wait, with what for; none for those that wait for another unit of their turn.
    pub(super) fn waiting<P: Port>(&self, plan: &Plan, port: &mut P) -> Vec<(UnitIndex, Option<Wait>)> {
        let all = plan.units().iter().enumerate();
        let open = all.filter(|(place, unit)| self.turns[unit.stage as usize].left > 0 && !self.has_run(*place));
        let index = open.map(|(place, _)| UnitIndex::of(place)).collect::<Vec<_>>();
        let wait = |unit: UnitIndex| if self.is_marked(unit.place()) { port.waits(plan, unit) } else { None };
        let waits: Vec<_> = index.iter().copied().map(wait).collect();
        index.into_iter().zip(waits).collect()
    }

    /// Whether a unit has run in the turn of its stage.
    fn has_run(&self, place: usize) -> bool {
        !self.is_marked(place) && self.missing[place] == 0
    }

    fn is_marked(&self, place: usize) -> bool {
        self.marked[place / 64] & (1 << (place % 64)) != 0
    }

    #[inline]
    fn first_ready<P: Port>(&self, plan: &Plan, port: &mut P) -> Option<UnitIndex> {
        self.ready_in(plan, port, self.from, plan.units().len()).or_else(|| self.ready_in(plan, port, 0, self.from))
    }

    #[inline]
    fn ready_in<P: Port>(&self, plan: &Plan, port: &mut P, from: usize, end: usize) -> Option<UnitIndex> {
        let mut place = from;
        while place < end {
            let rest = self.marked[place / 64] >> (place % 64);
            if rest == 0 {
                place = (place / 64 + 1) * 64;
                continue;
            }
            place += rest.trailing_zeros() as usize;
            if place >= end {
                return None;
            }
            let unit = UnitIndex::of(place);
            if port.waits(plan, unit).is_none() {
                return Some(unit);
            }
            place += 1;
        }
        None
    }

    #[inline]
    fn ran(&mut self, plan: &Plan, index: UnitIndex) {
        let unit = &plan.units()[index.place()];
        self.marked[index.place() / 64] &= !(1 << (index.place() % 64));
        for follower in plan.followers(unit) {
            let missing = &mut self.missing[*follower as usize];
            *missing -= 1;
            if *missing == 0 {
                self.mark(*follower as usize);
            }
        }
        if unit.act == Act::Loop {
            self.begin_loop(plan, index);
        }
        let stage = unit.stage as usize;
        self.turns[stage].left -= 1;
        if self.turns[stage].left == 0 {
            self.end_turn(plan, stage);
        }
    }

    fn begin_loop(&mut self, plan: &Plan, index: UnitIndex) {
        let stages = plan.stages().iter().enumerate();
        for (stage, _) in stages.filter(|(_, stage)| stage.begun_by == Some(index.0)) {
            // In a later run it goes on where it is.
            if self.turns[stage].left == 0 {
                self.begin_turn(plan, stage);
            }
        }
    }

    fn end_turn(&mut self, plan: &Plan, stage: usize) {
        self.turns[stage].over += 1;
        self.from = plan.stages()[stage].units.1 as usize;
        if plan.stages()[stage].begun_by.is_some() {
            self.begin_turn(plan, stage);
        }
    }

    fn begin_turn(&mut self, plan: &Plan, stage: usize) {
        let (first, end) = plan.stages()[stage].units;
        self.turns[stage].left = end - first;
        for place in first as usize..end as usize {
            self.missing[place] = plan.units()[place].predecessors;
            if self.missing[place] == 0 {
                self.mark(place);
            }
        }
    }

    #[inline]
    fn mark(&mut self, place: usize) {
        self.marked[place / 64] |= 1 << (place % 64);
    }
}
