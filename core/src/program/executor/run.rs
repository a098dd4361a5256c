//! A program that runs.

use std::sync::Arc;

use super::machine::{Link, Linked, Machine, Parts};
use super::marking::Marking;
use super::plan::{Act, Plan, Unit, UnitIndex};
use super::wait::{Standing, standing};
use crate::error::Failure;
use crate::program::{Facts, Graph, OpKind, Peer, Purpose, Value, VariableIndex};

/// A checked program with its values, run one unit at a time.
pub struct Executor {
    plan: Plan,
    marking: Marking,
    machine: Machine,
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
        Ok(Self { marking: Marking::new(&plan), plan, machine })
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
        self.machine.values[index.place()] = Some(value);
        Ok(())
    }

    /// A variable's value, if it has one; a temporary's is the last one written.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.machine.graph().find(name).and_then(|index| self.machine.values[index.place()].as_ref())
    }

    /// Takes a variable's value away, so that its memory may hold the next one.
    pub fn take(&mut self, variable: VariableIndex) -> Option<Value> {
        self.machine.values[variable.place()].take()
    }

    /// Begins another run of block 0, once the last one has ended. Loops go on where they are.
    ///
    /// # Errors
    /// When what is fed has different batches.
    pub fn begin(&mut self) -> Result<(), Failure> {
        let mut batch = None;
        for (variable, value) in self.machine.graph().variables().iter().zip(&self.machine.values) {
            if let (Purpose::Data, Some(value)) = (variable.purpose, value) {
                let refuse = |failure| Failure::call(format!("variable {:?}: {failure}", variable.name));
                value.check(&variable.facts, &mut batch).map_err(refuse)?;
            }
        }
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
        let is_it = |kind: &OpKind| matches!(kind, OpKind::Recv { channel: own } if own == channel);
        let place = self.plan.nodes().iter().position(|node| is_it(&node.kind));
        place.ok_or_else(|| Failure::call(format!("found no recv of channel {channel:?} in this program")))
    }

    fn receives(&self, node: usize) -> &Facts {
        &self.machine.graph().variable(self.plan.nodes()[node].outputs[0]).facts
    }
}

fn named(plan: &Plan, unit: &Unit, failure: &Failure) -> Failure {
    Failure::call(format!("{}: {failure}", plan.label(unit)))
}
