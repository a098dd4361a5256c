//! Executor: a program with its values, its runs, and snapshots of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::machine::{ExecutorParts, LinkedState, ProgramLink, ProgramState, StateBefore};
use super::marking::Marking;
use super::plan::{ExecutionPlan, Unit, UnitIndex, UnitKind};
use super::status::{RunStatus, run_status};
use super::wait::Wait;
use crate::{Dim, Graph, Node, OpKind, ProgramPeer, VariableFacts, VariableIndex, VariableValue};
use pserver_core::error::Failure;

/// A checked program with its values, run one unit at a time.
pub struct Executor {
    plan: ExecutionPlan,
    pub(super) marking: Marking,
    pub(super) machine: ProgramState,
    /// The `recv` of each channel, by its place in the plan's nodes.
    receivers: BTreeMap<String, usize>,
}

/// A snapshot of everything that a run can change, from [`Executor::save`].
pub struct ExecutorSnapshot {
    marking: Marking,
    before: StateBefore,
}

impl Executor {
    /// Prepares a program and runs its initialisation. The first run of block 0 has begun.
    ///
    /// # Errors
    /// As [`ExecutionPlan::of`], and of an op of the initialisation.
    pub fn new(graph: Arc<Graph>, parts: ExecutorParts) -> Result<Self, Failure> {
        let (first, plan) = (ExecutionPlan::initialisation(&graph)?, ExecutionPlan::of(&graph)?);
        let mut machine = ProgramState::new(graph, &plan, parts);
        for unit in first.units().iter().filter(|unit| unit.act == UnitKind::Compute) {
            machine.compute(first.node(unit)).map_err(|failure| named(&first, unit, &failure))?;
        }
        let mut receivers = BTreeMap::new();
        for (place, node) in plan.nodes().iter().enumerate() {
            if let OpKind::Recv { channel } | OpKind::PullRows { channel, .. } = &node.kind {
                receivers.entry(channel.clone()).or_insert(place);
            }
        }
        Ok(Self { marking: Marking::new(&plan), plan, machine, receivers })
    }

    /// Copies everything that a run can change: progress, received values, queues and accumulators, and the parameters
    /// and states that ops write.
    #[must_use]
    pub fn save(&self) -> ExecutorSnapshot {
        ExecutorSnapshot { marking: self.marking.clone(), before: self.machine.save() }
    }

    /// Undoes a run: everything that a run can change is restored. A failed run cannot continue otherwise. Variables
    /// that were set stay set, and a temporary keeps the last written value.
    pub fn restore(&mut self, saved: ExecutorSnapshot) {
        self.marking = saved.marking;
        self.machine.restore(saved.before);
    }

    /// Sets a variable: data for the next run, a parameter or a state.
    ///
    /// # Errors
    /// When there is no such variable, or it cannot hold the value; names the variable, the found and the expected
    /// facts.
    pub fn set(&mut self, name: &str, value: impl Into<VariableValue>) -> Result<(), Failure> {
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
    pub fn value(&self, name: &str) -> Option<&VariableValue> {
        self.machine.graph().find(name).and_then(|index| self.machine.values.get(index))
    }

    /// Removes and returns a variable's value, so that its memory may be reused.
    pub fn take(&mut self, variable: VariableIndex) -> Option<VariableValue> {
        self.machine.values.take(variable)
    }

    /// Begins another run of block 0, after the last one has ended. Loops continue.
    ///
    /// # Errors
    /// When the data have different batch sizes; when the last run is incomplete, as after a failed op.
    pub fn begin(&mut self) -> Result<(), Failure> {
        if self.marking.is_under_way(&self.plan) {
            return Err(Failure::call("found an incomplete run; expected its end, or restore"));
        }
        self.machine.check_batch()?;
        self.marking.begin(&self.plan);
        Ok(())
    }

    /// Runs the next ready unit; returns none when no unit is ready.
    ///
    /// # Errors
    /// The op's error, with its block and index.
    pub fn step(&mut self, link: &mut dyn ProgramLink) -> Result<Option<UnitIndex>, Failure> {
        let mut linked = LinkedState { machine: &mut self.machine, link };
        let stepped = self.marking.step(&self.plan, &mut linked);
        stepped.map_err(|(unit, failure)| named(&self.plan, &self.plan.units()[unit.place()], &failure))
    }

    /// Runs at most this many units, and returns the status of the program.
    ///
    /// # Errors
    /// As [`step`](Self::step), and a deadlock: no op is ready and no value from outside can arrive, with every
    /// waiting op and its reason.
    pub fn run(&mut self, link: &mut dyn ProgramLink, units_max: u64) -> Result<RunStatus, Failure> {
        for _ in 0..units_max {
            if self.step(link)?.is_none() {
                return run_status(&self.plan, &self.marking, &mut LinkedState { machine: &mut self.machine, link });
            }
        }
        Ok(RunStatus::Runs)
    }

    /// Passes a received value to the `recv` or `pull_rows` of its channel, which may then be ready. Returns the value
    /// when the sender's share of the receive queue is full: the sender keeps it.
    ///
    /// # Errors
    /// When no such op has this channel, or the value does not have the declared facts.
    pub fn arrive(
        &mut self,
        channel: &str,
        from: ProgramPeer,
        value: VariableValue,
    ) -> Result<Option<VariableValue>, Failure> {
        let node = self.receiver(channel)?;
        let facts = self.receives(node);
        value.check(&facts, &mut None).map_err(|failure| Failure::call(format!("channel {channel:?}: {failure}")))?;
        Ok(self.machine.arrive(node, from, value))
    }

    /// The first `recv` in the program's order that waits for a value: its channel, and the variable that it writes.
    pub fn awaited(&mut self, link: &mut dyn ProgramLink) -> Option<(String, VariableIndex)> {
        let mut linked = LinkedState { machine: &mut self.machine, link };
        let waiting = self.marking.waiting(&self.plan, &mut linked).into_iter();
        let arrivals = waiting.filter(|(_, wait)| *wait == Wait::Arrival);
        let first = arrivals.map(|(unit, _)| self.plan.units()[unit.place()].node).min()?;
        match &self.plan.nodes()[first as usize] {
            Node { kind: OpKind::Recv { channel }, outputs, .. } => Some((channel.clone(), outputs[0])),
            _ => None,
        }
    }

    /// Whether a value of this sender on this channel would be accepted.
    ///
    /// # Errors
    /// When no `recv` has this channel.
    pub fn has_room(&self, channel: &str, from: ProgramPeer) -> Result<bool, Failure> {
        Ok(self.machine.has_room(self.receiver(channel)?, from))
    }

    /// The senders that accumulators with a pace wait for.
    #[must_use]
    pub fn senders(&self) -> &[ProgramPeer] {
        self.machine.senders()
    }

    /// Removes a departed sender: no round waits for it any more.
    pub fn leave(&mut self, sender: ProgramPeer) {
        let others = self.senders().iter().copied().filter(|one| *one != sender).collect();
        self.machine.set_senders(others);
    }

    /// Adds a sender: rounds wait for it, too.
    pub fn join(&mut self, sender: ProgramPeer) {
        if !self.senders().contains(&sender) {
            let all = self.senders().iter().copied().chain([sender]).collect();
            self.machine.set_senders(all);
        }
    }

    /// The wait of each op that could be next.
    pub fn waits(&mut self, link: &mut dyn ProgramLink) -> Vec<String> {
        let mut linked = LinkedState { machine: &mut self.machine, link };
        let waiting = self.marking.waiting(&self.plan, &mut linked).into_iter();
        waiting.map(|(unit, wait)| format!("{} {wait}", self.plan.label(&self.plan.units()[unit.place()]))).collect()
    }

    /// The variables that a unit writes.
    #[must_use]
    pub fn writes(&self, unit: UnitIndex) -> &[VariableIndex] {
        &self.plan.node(&self.plan.units()[unit.place()]).outputs
    }

    /// Number of completed turns of a unit's stage.
    #[must_use]
    pub fn turns(&self, unit: UnitIndex) -> u64 {
        self.marking.turns(&self.plan, unit)
    }

    /// The plan that runs.
    #[must_use]
    pub const fn plan(&self) -> &ExecutionPlan {
        &self.plan
    }

    fn receiver(&self, channel: &str) -> Result<usize, Failure> {
        let place = self.receivers.get(channel).copied();
        place.ok_or_else(|| Failure::call(format!("found no recv of channel {channel:?} in this program")))
    }

    /// The facts of what arrives for an op: of pulled rows a matrix of their values.
    fn receives(&self, node: usize) -> VariableFacts {
        let node = &self.plan.nodes()[node];
        let facts = &self.machine.graph().variable(node.outputs[0]).facts;
        match (&node.kind, facts) {
            (OpKind::PullRows { .. }, VariableFacts::SelectedRows { element_type, width, .. }) => {
                VariableFacts::dense(*element_type, [Dim::Batch, Dim::Fixed(*width)])
            }
            _ => facts.clone(),
        }
    }
}

fn named(plan: &ExecutionPlan, unit: &Unit, failure: &Failure) -> Failure {
    Failure::call(format!("{}: {failure}", plan.label(unit)))
}
