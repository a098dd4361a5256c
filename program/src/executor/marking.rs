//! Scheduling state of a running plan: which units are ready.

use prost::Message;

use super::plan::{ExecutionPlan, PlanStage, UnitIndex, UnitKind};
use super::wait::Wait;

/// Executes units: owns the values, and knows whether a unit's inputs are available.
pub trait UnitRunner {
    /// The error of a unit.
    type Error;

    /// The reason why a unit cannot run beyond its predecessors; none when it is ready. The executor may call this any
    /// number of times, also for units that then do not run.
    fn waits(&mut self, plan: &ExecutionPlan, unit: UnitIndex) -> Option<Wait>;

    /// Runs a unit that is ready.
    fn run(&mut self, plan: &ExecutionPlan, unit: UnitIndex) -> Result<(), Self::Error>;
}

/// Progress of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StageProgress {
    /// Units that have not run in this turn; zero between runs, and before the loop has begun.
    remaining: u32,
    /// Turns that are over.
    finished: u64,
}

/// Scheduling state: which units have run in the turn of their stage, and which are next.
///
/// A unit is *marked* when all units before it have run in this turn. It is *ready* when it is marked and its runner
/// reports nothing to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marking {
    /// For every unit that has not run in this turn, how many of those before it have not; for one that has, how many
    /// it will wait for in the next.
    missing: Vec<u32>,
    /// A bit for every marked unit.
    marked: Vec<u64>,
    turns: Vec<StageProgress>,
    from: From,
}

/// A [`Marking`] in a checkpoint: protobuf, see `saved`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MarkingMessage {
    #[prost(uint32, repeated, tag = "1")]
    pub(super) missing: Vec<u32>,
    #[prost(fixed64, repeated, tag = "2")]
    pub(super) marked: Vec<u64>,
    #[prost(uint32, repeated, tag = "3")]
    pub(super) remaining: Vec<u32>,
    #[prost(uint64, repeated, tag = "4")]
    pub(super) finished: Vec<u64>,
    #[prost(uint32, tag = "5")]
    pub(super) from_word: u32,
    #[prost(fixed64, tag = "6")]
    pub(super) from_bits: u64,
}

/// Position at which the search for a ready unit begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct From {
    /// The word of marks.
    word: u32,
    /// The bits of that word from there on.
    bits: u64,
}

impl From {
    const fn place(place: u32) -> Self {
        Self { word: place / 64, bits: u64::MAX << (place % 64) }
    }
}

impl Marking {
    /// Every stage that no loop begins is at the start of its turn.
    #[must_use]
    pub fn new(plan: &ExecutionPlan) -> Self {
        let units = plan.units().len();
        let mut new = Self {
            missing: plan.units().iter().map(|unit| unit.predecessors).collect(),
            marked: vec![0; units.div_ceil(64)],
            turns: vec![StageProgress::default(); plan.stages().len()],
            from: From::place(0),
        };
        new.begin(plan);
        new
    }

    /// Begins another run, after the last one has ended; loops continue.
    pub fn begin(&mut self, plan: &ExecutionPlan) {
        for stage in (0..plan.stages().len()).filter(|stage| plan.stages()[*stage].begun_by.is_none()) {
            if self.turns[stage].remaining == 0 {
                self.begin_turn(plan, stage);
            }
        }
    }

    /// Runs the first ready unit: the lowest index, counted from the end of the stage whose turn ended last,
    /// cyclically. So the order depends on the available values only, and no stage starves another.
    ///
    /// # Errors
    /// The unit's error and its index; the unit counts as not run.
    #[inline]
    pub fn step<P: UnitRunner>(
        &mut self,
        plan: &ExecutionPlan,
        port: &mut P,
    ) -> Result<Option<UnitIndex>, (UnitIndex, P::Error)> {
        let Some(unit) = self.first_ready(plan, port) else { return Ok(None) };
        port.run(plan, unit).map_err(|error| (unit, error))?;
        self.ran(plan, unit);
        Ok(Some(unit))
    }

    /// Whether every stage has ended its turn, and none is a loop's.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.turns.iter().all(|turn| turn.remaining == 0)
    }

    /// Whether the stages without a loop are in the middle of a run.
    #[must_use]
    pub fn is_under_way(&self, plan: &ExecutionPlan) -> bool {
        let outer = || plan.stages().iter().zip(&self.turns).filter(|(stage, _)| stage.begun_by.is_none());
        let is_whole = |(stage, turn): (&PlanStage, &StageProgress)| turn.remaining == stage.units.1 - stage.units.0;
        outer().any(|(_, turn)| turn.remaining > 0) && !outer().all(is_whole)
    }

    /// Number of completed turns of a unit's stage.
    #[must_use]
    pub fn turns(&self, plan: &ExecutionPlan, unit: UnitIndex) -> u64 {
        self.turns[plan.units()[unit.place()].stage as usize].finished
    }

    /// The marked units that are not ready, and the reasons.
    pub(super) fn waiting<P: UnitRunner>(&self, plan: &ExecutionPlan, port: &mut P) -> Vec<(UnitIndex, Wait)> {
        let marked = (0..plan.units().len()).filter(|place| self.is_marked(*place)).map(UnitIndex::of);
        marked.filter_map(|unit| port.waits(plan, unit).map(|wait| (unit, wait))).collect()
    }

    pub(super) fn message(&self) -> MarkingMessage {
        MarkingMessage {
            missing: self.missing.clone(),
            marked: self.marked.clone(),
            remaining: self.turns.iter().map(|turn| turn.remaining).collect(),
            finished: self.turns.iter().map(|turn| turn.finished).collect(),
            from_word: self.from.word,
            from_bits: self.from.bits,
        }
    }

    /// The scheduling state of a message; none of another plan's.
    pub(super) fn restored(&self, message: MarkingMessage) -> Option<Self> {
        let MarkingMessage { missing, marked, remaining, finished, from_word, from_bits } = message;
        let lengths = (missing.len(), marked.len(), remaining.len(), finished.len());
        let expected = (self.missing.len(), self.marked.len(), self.turns.len(), self.turns.len());
        let turns = remaining.into_iter().zip(finished);
        let turns = turns.map(|(remaining, finished)| StageProgress { remaining, finished }).collect();
        let from = From { word: from_word, bits: from_bits };
        (lengths == expected && (from_word as usize) < marked.len().max(1)).then_some(Self {
            missing,
            marked,
            turns,
            from,
        })
    }

    fn is_marked(&self, place: usize) -> bool {
        self.marked[place / 64] & (1 << (place % 64)) != 0
    }

    /// Tests each marked unit once.
    #[inline]
    fn first_ready<P: UnitRunner>(&self, plan: &ExecutionPlan, port: &mut P) -> Option<UnitIndex> {
        let From { mut word, bits } = self.from;
        let mut marked = *self.marked.get(word as usize)? & bits;
        for remaining in (0..self.marked.len()).rev() {
            if let Some(unit) = ready_of(plan, port, word, marked) {
                return Some(unit);
            }
            word = if (word as usize) + 1 < self.marked.len() { word + 1 } else { 0 };
            marked = self.marked[word as usize] & if remaining == 0 { !bits } else { u64::MAX };
        }
        ready_of(plan, port, word, marked)
    }

    #[inline]
    fn ran(&mut self, plan: &ExecutionPlan, index: UnitIndex) {
        let (place, unit) = (index.place(), &plan.units()[index.place()]);
        self.marked[place / 64] &= !(1 << (place % 64));
        // The count is not lowered again in this turn, so the next turn need not set it.
        self.missing[place] = unit.predecessors;
        for follower in &unit.followers {
            let missing = &mut self.missing[*follower as usize];
            *missing -= 1;
            if *missing == 0 {
                self.mark(*follower);
            }
        }
        if unit.act == UnitKind::Loop {
            self.begin_loop(plan, index);
        }
        let turn = &mut self.turns[unit.stage as usize];
        turn.remaining -= 1;
        if turn.remaining == 0 {
            self.end_turn(plan, unit.stage as usize);
        }
    }

    fn begin_loop(&mut self, plan: &ExecutionPlan, index: UnitIndex) {
        let stages = plan.stages().iter().enumerate();
        for (stage, _) in stages.filter(|(_, stage)| stage.begun_by == Some(index.0)) {
            // A loop continues in later runs.
            if self.turns[stage].remaining == 0 {
                self.begin_turn(plan, stage);
            }
        }
    }

    #[inline]
    fn end_turn(&mut self, plan: &ExecutionPlan, number: usize) {
        let stage = &plan.stages()[number];
        self.turns[number].finished += 1;
        let end = stage.units.1;
        self.from = From::place(if (end as usize) < self.missing.len() { end } else { 0 });
        if stage.begun_by.is_some() {
            self.begin_turn(plan, number);
        }
    }

    #[inline]
    fn begin_turn(&mut self, plan: &ExecutionPlan, number: usize) {
        let stage = &plan.stages()[number];
        self.turns[number].remaining = stage.units.1 - stage.units.0;
        for first in &stage.firsts {
            self.mark(*first);
        }
    }

    #[inline]
    fn mark(&mut self, place: u32) {
        self.marked[place as usize / 64] |= 1 << (place % 64);
    }
}

/// The first ready one of some marked units, which lie in one word of marks.
#[inline]
fn ready_of<P: UnitRunner>(plan: &ExecutionPlan, port: &mut P, word: u32, mut marked: u64) -> Option<UnitIndex> {
    while marked != 0 {
        let unit = UnitIndex(word * 64 + marked.trailing_zeros());
        if port.waits(plan, unit).is_none() {
            return Some(unit);
        }
        marked &= marked - 1;
    }
    None
}
