//! Execution plan of a checked program: its units and their order.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::{Graph, Node, OpKind, OpRole, VariableIndex};
use pserver_core::accumulator::AccumulatorPace;
use pserver_core::config::Merge;
use pserver_core::error::Failure;

/// Index of a unit in [`ExecutionPlan::units`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitIndex(pub u32);

impl UnitIndex {
    /// The index as a number.
    #[must_use]
    pub const fn place(self) -> usize {
        self.0 as usize
    }

    pub(super) fn of(place: usize) -> Self {
        Self(u32::try_from(place).expect("a program has few ops, see `limits`"))
    }
}

/// The action of a unit: an op, or one of the two sides of an accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    /// A pure function of its inputs.
    Compute,
    /// Takes a received value.
    Recv,
    /// Gives a value to another program.
    Send,
    /// Asks another program for rows.
    AskRows,
    /// Takes the rows that were asked for.
    TakeRows,
    /// Puts an item in a queue, once that has space.
    Enqueue,
    /// Takes items out of a queue.
    Dequeue,
    /// Puts a gradient in its accumulator, unless that is full.
    PutGradient,
    /// Gives the merged gradient of all pieces.
    TakeGradient,
    /// Puts a string in its accumulator, unless that is full.
    PutString,
    /// Gives the list of all strings.
    TakeString,
    /// Begins the turns of its block.
    Loop,
}

/// The smallest step of an executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The action.
    pub act: UnitKind,
    /// The op, by its place in [`ExecutionPlan::nodes`].
    pub node: u32,
    /// Its stage.
    pub(super) stage: u32,
    /// Number of units that precede it in every turn of its stage.
    pub(super) predecessors: u32,
    /// The units that wait for this one.
    pub(super) followers: Vec<u32>,
}

/// Units that run equally often, each once in every turn. Stages are separated by queues and accumulators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlanStage {
    /// Its units, which lie side by side.
    pub(super) units: (u32, u32),
    /// The loop that begins it; without one it has a single turn in every run.
    pub(super) begun_by: Option<u32>,
    /// Its units without a predecessor.
    pub(super) firsts: Vec<u32>,
}

/// A gradient accumulator, which says when the `recv` that feeds it may give a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulator {
    /// The op, by its place in [`ExecutionPlan::nodes`].
    pub node: u32,
    /// Number of pieces in a merged gradient.
    pub count: u32,
    /// How pieces are merged.
    pub merge: Merge,
    /// The order in which senders' pieces are accepted.
    pub pace: AccumulatorPace,
}

/// A program as an executor runs it: only numbers, made once and shared by all instances.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutionPlan {
    nodes: Vec<Node>,
    labels: Vec<String>,
    units: Vec<Unit>,
    stages: Vec<PlanStage>,
    accumulators: Vec<Accumulator>,
    /// For every unit the accumulator that sets its pace.
    paced_by: Vec<Option<u32>>,
}

impl ExecutionPlan {
    /// The plan of the initialisation, which runs once before everything else.
    ///
    /// # Errors
    /// As [`ExecutionPlan::of`].
    pub fn initialisation(graph: &Graph) -> Result<Self, Failure> {
        Self::compile(graph, &|role| role == OpRole::Initialise)
    }

    /// The plan of everything after the initialisation.
    ///
    /// # Errors
    /// When a loop is nested in a loop, or an op after an endless loop waits for a variable that the loop writes.
    pub fn of(graph: &Graph) -> Result<Self, Failure> {
        Self::compile(graph, &|role| role != OpRole::Initialise)
    }

    /// All units, stage by stage; within a stage in the program's order.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The ops, in the program's order, a loop's before its body's.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The op that a unit is of.
    #[must_use]
    pub fn node(&self, unit: &Unit) -> &Node {
        &self.nodes[unit.node as usize]
    }

    /// The gradient accumulators, in the program's order.
    #[must_use]
    pub fn accumulators(&self) -> &[Accumulator] {
        &self.accumulators
    }

    /// The accumulator that is this op.
    #[must_use]
    pub fn accumulator(&self, node: u32) -> Option<&Accumulator> {
        let place = self.accumulators.binary_search_by_key(&node, |one| one.node);
        place.ok().map(|place| &self.accumulators[place])
    }

    /// The accumulator that decides which piece a `recv` may give, and when a list of senders is complete: the first
    /// one with a pace that gets the same address.
    #[must_use]
    pub fn pace_of(&self, unit: UnitIndex) -> Option<&Accumulator> {
        self.paced_by[unit.place()].map(|at| &self.accumulators[at as usize])
    }

    /// How errors name a unit: the block, the op's place in it, its kind.
    pub(super) fn label(&self, unit: &Unit) -> &str {
        &self.labels[unit.node as usize]
    }

    pub(super) fn stages(&self) -> &[PlanStage] {
        &self.stages
    }

    fn compile(graph: &Graph, runs: &dyn Fn(OpRole) -> bool) -> Result<Self, Failure> {
        let mut drawing = PlanBuilder::default();
        drawing.scope(graph, 0, None, runs)?;
        drawing.join(graph)?;
        Ok(drawing.plan())
    }
}

/// A unit before its stage is known.
struct DraftUnit {
    act: UnitKind,
    node: usize,
    loop_draft: Option<usize>,
    /// Some may be there more than once.
    before: Vec<usize>,
    /// Drafts with the same root belong to one stage.
    root: usize,
}

/// A plan under construction.
#[derive(Default)]
struct PlanBuilder {
    nodes: Vec<Node>,
    labels: Vec<String>,
    drafts: Vec<DraftUnit>,
}

/// The last units that touched a variable, within one block.
#[derive(Default)]
struct Touched {
    writer: Option<usize>,
    readers: Vec<usize>,
}

impl PlanBuilder {
    fn scope(
        &mut self,
        graph: &Graph,
        block: usize,
        loop_draft: Option<usize>,
        runs: &dyn Fn(OpRole) -> bool,
    ) -> Result<(), Failure> {
        for (place, node) in graph.scopes()[block].nodes.iter().enumerate() {
            let OpKind::LoopForever { block: inner } = node.kind else {
                if runs(node.role) {
                    self.add(graph.label(block, place), node, loop_draft);
                }
                continue;
            };
            if loop_draft.is_some() {
                return Err(Failure::call(format!(
                    "{}: found a nested loop, which never ends; expected it in block 0",
                    graph.label(block, place)
                )));
            }
            let half = self.drafts.len();
            self.add(graph.label(block, place), node, None);
            self.scope(graph, inner as usize, Some(half), runs)?;
        }
        Ok(())
    }

    fn add(&mut self, label: String, node: &Node, loop_draft: Option<usize>) {
        for act in acts(&node.kind) {
            let root = self.drafts.len();
            self.drafts.push(DraftUnit { act: *act, node: self.nodes.len(), loop_draft, before: Vec::new(), root });
        }
        self.labels.push(label);
        self.nodes.push(node.clone());
    }
}

impl PlanBuilder {
    /// Orders units that touch one variable, and joins them to one stage.
    fn join(&mut self, graph: &Graph) -> Result<(), Failure> {
        let mut touched: BTreeMap<(Option<usize>, VariableIndex), Touched> = BTreeMap::new();
        for half in 0..self.drafts.len() {
            if self.drafts[half].act == UnitKind::TakeRows {
                self.order(half - 1, half);
            }
            let (reads, writes) = self.touches(graph, half);
            let loop_draft = self.drafts[half].loop_draft;
            for variable in reads {
                let known = touched.entry((loop_draft, variable)).or_default();
                known.readers.push(half);
                if let Some(writer) = known.writer {
                    self.follow(graph, variable, writer, half)?;
                }
            }
            for variable in writes {
                let known = touched.entry((loop_draft, variable)).or_default();
                let before = known.writer.replace(half).into_iter().chain(std::mem::take(&mut known.readers));
                for earlier in before.filter(|earlier| *earlier != half).collect::<Vec<_>>() {
                    self.follow(graph, variable, earlier, half)?;
                }
            }
        }
        Ok(())
    }

    /// `later` waits for `earlier`, because both touch a variable and one of them writes it.
    fn follow(&mut self, graph: &Graph, variable: VariableIndex, earlier: usize, later: usize) -> Result<(), Failure> {
        let is_loop = |half: &DraftUnit| half.act == UnitKind::Loop;
        match (is_loop(&self.drafts[earlier]), is_loop(&self.drafts[later])) {
            // Loops run concurrently: a reader sees the current value.
            (true, true) => return Ok(()),
            (true, false) => {
                return Err(Failure::call(format!(
                    "{}: found {:?}, which {} touches too; expected no op to wait for a loop, which never ends",
                    self.labels[self.drafts[later].node],
                    graph.variable(variable).name,
                    self.labels[self.drafts[earlier].node]
                )));
            }
            (false, _) => {}
        }
        self.order(earlier, later);
        Ok(())
    }

    fn order(&mut self, earlier: usize, later: usize) {
        self.drafts[later].before.push(earlier);
        let (one, other) = (self.root(earlier), self.root(later));
        self.drafts[one.max(other)].root = one.min(other);
    }

    /// The root of a draft, with path halving.
    fn root(&mut self, mut half: usize) -> usize {
        while self.drafts[half].root != half {
            let above = self.drafts[half].root;
            self.drafts[half].root = self.drafts[above].root;
            half = self.drafts[half].root;
        }
        half
    }

    /// The variables that a draft reads, and those that it writes; a loop touches what its body touches.
    fn touches(&self, graph: &Graph, half: usize) -> (Vec<VariableIndex>, Vec<VariableIndex>) {
        let DraftUnit { act, node, .. } = &self.drafts[half];
        let node = &self.nodes[*node];
        if let OpKind::LoopForever { block } = node.kind {
            let inner = &graph.scopes()[block as usize].nodes;
            let reads = inner.iter().flat_map(|node| &node.inputs).copied().collect();
            return (reads, inner.iter().flat_map(|node| &node.outputs).copied().collect());
        }
        let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
        match act {
            UnitKind::PutGradient | UnitKind::PutString | UnitKind::AskRows => (inputs, Vec::new()),
            UnitKind::TakeGradient | UnitKind::TakeString | UnitKind::TakeRows => (Vec::new(), outputs),
            // The two sides of a queue are not ordered.
            UnitKind::Enqueue => (inputs[1..].to_vec(), outputs),
            UnitKind::Dequeue => (Vec::new(), outputs),
            UnitKind::Compute | UnitKind::Recv | UnitKind::Send | UnitKind::Loop => (inputs, outputs),
        }
    }

    fn plan(mut self) -> ExecutionPlan {
        let before: Vec<BTreeSet<usize>> =
            self.drafts.iter().map(|half| half.before.iter().copied().collect()).collect();
        let mut order: Vec<usize> = (0..self.drafts.len()).collect();
        let roots: Vec<usize> = (0..self.drafts.len()).map(|half| self.root(half)).collect();
        order.sort_by_key(|half| (roots[*half], *half));
        let mut place_of = vec![usize::MAX; self.drafts.len()];
        order.iter().enumerate().for_each(|(place, half)| place_of[*half] = place);

        let mut after: Vec<Vec<u32>> = vec![Vec::new(); self.drafts.len()];
        for later in &order {
            before[*later].iter().for_each(|earlier| after[*earlier].push(number(place_of[*later])));
        }
        let (mut units, mut stages) = (Vec::new(), Vec::<PlanStage>::new());
        let mut last_root = None;
        for half in &order {
            let root = roots[*half];
            let place = number(units.len());
            if last_root.replace(root) != Some(root) {
                let begun_by = self.drafts[*half].loop_draft.map(|half| number(place_of[half]));
                stages.push(PlanStage { units: (place, place), begun_by, firsts: Vec::new() });
            }
            let stage = stages.len() - 1;
            stages[stage].units.1 = place + 1;
            if before[*half].is_empty() {
                stages[stage].firsts.push(place);
            }
            let DraftUnit { act, node, .. } = self.drafts[*half];
            units.push(Unit {
                act,
                node: number(node),
                stage: number(stage),
                predecessors: number(before[*half].len()),
                followers: std::mem::take(&mut after[*half]),
            });
        }
        let accumulators: Vec<Accumulator> = (0..).zip(&self.nodes).filter_map(accumulator).collect();
        let by_address = self.by_address(&accumulators);
        let paced_by = units.iter().map(|unit| self.paced_by(unit, &by_address)).collect();
        ExecutionPlan { nodes: self.nodes, labels: self.labels, units, stages, accumulators, paced_by }
    }

    /// The accumulator that sets a unit's pace, found by the address that both get.
    fn paced_by(&self, unit: &Unit, by_address: &BTreeMap<VariableIndex, u32>) -> Option<u32> {
        let node = &self.nodes[unit.node as usize];
        let address = match unit.act {
            UnitKind::Recv => node.outputs.get(1),
            UnitKind::PutString | UnitKind::TakeString => node.inputs.first(),
            _ => None,
        };
        by_address.get(address?).copied()
    }

    /// By address, the first accumulator with a pace that gets it.
    fn by_address(&self, accumulators: &[Accumulator]) -> BTreeMap<VariableIndex, u32> {
        let mut by_address = BTreeMap::new();
        for (place, one) in (0..).zip(accumulators).filter(|(_, one)| one.pace != AccumulatorPace::Any) {
            if let Some(address) = self.nodes[one.node as usize].inputs.get(1) {
                by_address.entry(*address).or_insert(place);
            }
        }
        by_address
    }
}

fn acts(kind: &OpKind) -> &'static [UnitKind] {
    match kind {
        OpKind::Send { .. } => &[UnitKind::Send],
        OpKind::Recv { .. } => &[UnitKind::Recv],
        OpKind::PullRows { .. } => &[UnitKind::AskRows, UnitKind::TakeRows],
        OpKind::Enqueue => &[UnitKind::Enqueue],
        OpKind::Dequeue { .. } => &[UnitKind::Dequeue],
        OpKind::GradientAccumulator { .. } => &[UnitKind::PutGradient, UnitKind::TakeGradient],
        OpKind::StringAccumulator { .. } => &[UnitKind::PutString, UnitKind::TakeString],
        OpKind::LoopForever { .. } => &[UnitKind::Loop],
        _ => &[UnitKind::Compute],
    }
}

fn accumulator((place, node): (u32, &Node)) -> Option<Accumulator> {
    match node.kind {
        OpKind::GradientAccumulator { count, merge, staleness, .. } => {
            Some(Accumulator { node: place, count, merge, pace: AccumulatorPace::of(staleness) })
        }
        _ => None,
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("a program has few ops, see `limits`")
}

/// One line per unit: its action, its stage, and the units that wait for it.
impl fmt::Display for ExecutionPlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, unit) in self.units.iter().enumerate() {
            write!(formatter, "{place}: stage {} {} {:?}", unit.stage, self.label(unit), unit.act)?;
            for follower in &unit.followers {
                write!(formatter, " ->{follower}")?;
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}
