//! A program that runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::machine::{Before, Link, Linked, Machine, Parts};
use super::marking::Marking;
use super::plan::{Act, Plan, Unit, UnitIndex};
use super::wait::{Standing, standing};
use crate::error::Failure;
use crate::program::{Facts, Graph, OpKind, Peer, Value, VariableIndex};

/// A checked program with its values, run one unit at a time.
pub struct Executor {
    plan: Plan,
    marking: Marking,
    machine: Machine,
    /// The `recv` of each channel, by its place in the plan's nodes.
    receivers: BTreeMap<String, usize>,
}

/// What a run can change, as it was: [`Executor::save`].
pub struct Saved {
    marking: Marking,
    before: Before,
}

impl Executor {
    /// Makes a program ready, and runs its initialisation. The first run of block 0 has begun.
    ///
    /// # Errors
    /// Those of [`Plan::of`], and what an op of the initialisation says.
    pub fn new(graph: Arc<Graph>, parts: Parts) -> Result<Self, Failure> {
        let (first, plan) = (Plan::initialisation(&graph)?, Plan::of(&graph)?);
        let mut machine = Machine::new(graph, &plan, parts);
        for unit in first.units().iter().filter(|unit| unit.act == Act::Compute) {
            machine.compute(first.node(unit)).map_err(|failure| named(&first, unit, &failure))?;
        }
        let mut receivers = BTreeMap::new();
        for (place, node) in plan.nodes().iter().enumerate() {
            if let OpKind::Recv { channel } = &node.kind {
                receivers.entry(channel.clone()).or_insert(place);
            }
        }
        Ok(Self { marking: Marking::new(&plan), plan, machine, receivers })
    }

    /// What a run can change: how far it is, what has arrived and what is held back, and the parameters and states that
    /// ops write, of which it is a copy.
    #[must_use]
    pub fn save(&self) -> Saved {
        Saved { marking: self.marking.clone(), before: self.machine.save() }
    }

    /// Takes a run back: everything that a run can change is as it was. A run that failed goes on in no other way.
    /// What was set stays, and a temporary is what was written last.
    pub fn restore(&mut self, saved: Saved) {
        self.marking = saved.marking;
        self.machine.restore(saved.before);
    }

    /// Sets a variable: data for the next run, a parameter or a state.
    ///
    /// # Errors
    /// When there is no such variable, or it cannot hold the value; names it, what was found and expected.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) -> Result<(), Failure> {
        let graph = self.machine.graph();
        let index = graph.find(name).ok_or_else(|| Failure::call(format!("found no variable {name:?}")))?;
        let value = value.into();
        let refuse = |failure| Failure::call(format!("variable {name:?}: {failure}"));
        value.check(&graph.variable(index).facts, &mut None).map_err(refuse)?;
        self.machine.values.set(index, value);
        Ok(())
    }

    /// A variable's value, if it has one; a temporary's is the last one written.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.machine.graph().find(name).and_then(|index| self.machine.values.get(index))
    }

    /// Takes a variable's value away, so that its memory may hold the next one.
    pub fn take(&mut self, variable: VariableIndex) -> Option<Value> {
        self.machine.values.take(variable)
    }

    /// Begins another run of block 0, once the last one has ended. Loops go on where they are.
    ///
    /// # Errors
    /// When what is fed has different batches; when the last run is half over, as one is in which an op failed.
    pub fn begin(&mut self) -> Result<(), Failure> {
        if self.marking.is_under_way(&self.plan) {
            return Err(Failure::call("found a run that is half over; expected its end, or that it is taken back"));
        }
        self.machine.check_batch()?;
        self.marking.begin(&self.plan);
        Ok(())
    }

    /// Runs the next unit that is ready; none when none is.
    ///
    /// # Errors
    /// What the op says, with its block and place.
    pub fn step(&mut self, link: &mut dyn Link) -> Result<Option<UnitIndex>, Failure> {
        let mut linked = Linked { machine: &mut self.machine, link };
        let stepped = self.marking.step(&self.plan, &mut linked);
        stepped.map_err(|(unit, failure)| named(&self.plan, &self.plan.units()[unit.place()], &failure))
    }

    /// Runs at most so many units, and says how the program stands then.
    ///
    /// # Errors
    /// Those of [`step`](Self::step), and a deadlock: no op is ready and nothing is awaited from outside, with every op
    /// that waits and what for.
    pub fn run(&mut self, link: &mut dyn Link, units_max: u64) -> Result<Standing, Failure> {
        for _ in 0..units_max {
            if self.step(link)?.is_none() {
                return standing(&self.plan, &self.marking, &mut Linked { machine: &mut self.machine, link });
            }
        }
        Ok(Standing::Runs)
    }

    /// Gives a value that somebody sent on a channel to the `recv` of that channel, which may then be ready. Gives it
    /// back when as many of the sender's wait there as may: the sender keeps it.
    ///
    /// # Errors
    /// When no `recv` has this channel, or the value is not what it gives.
    pub fn arrive(&mut self, channel: &str, from: Peer, value: Value) -> Result<Option<Value>, Failure> {
        let node = self.receiver(channel)?;
        let facts = self.receives(node);
        value.check(facts, &mut None).map_err(|failure| Failure::call(format!("channel {channel:?}: {failure}")))?;
        Ok(self.machine.arrive(node, from, value))
    }

    /// Whether a value of this sender on this channel would be taken.
    ///
    /// # Errors
    /// When no `recv` has this channel.
    pub fn has_room(&self, channel: &str, from: Peer) -> Result<bool, Failure> {
        Ok(self.machine.has_room(self.receiver(channel)?, from))
    }

    /// A sender is finished: no round waits for it any more.
    pub fn leave(&mut self, sender: Peer) {
        self.machine.leave(sender);
    }

    /// How often a unit's stage has run to its end.
    #[must_use]
    pub fn turns(&self, unit: UnitIndex) -> u64 {
        self.marking.turns(&self.plan, unit)
    }

    /// What is run.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    fn receiver(&self, channel: &str) -> Result<usize, Failure> {
        let place = self.receivers.get(channel).copied();
        place.ok_or_else(|| Failure::call(format!("found no recv of channel {channel:?} in this program")))
    }

    fn receives(&self, node: usize) -> &Facts {
        &self.machine.graph().variable(self.plan.nodes()[node].outputs[0]).facts
    }
}

fn named(plan: &Plan, unit: &Unit, failure: &Failure) -> Failure {
    Failure::call(format!("{}: {failure}", plan.label(unit)))
}
