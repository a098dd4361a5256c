//! A checked program made ready to run: units, and which of them wait for which.

use std::collections::BTreeMap;
use std::fmt;

use super::flow::Pace;
use crate::config::Merge;
use crate::error::Failure;
use crate::program::{Graph, Node, OpKind, Role, VariableIndex};

/// A unit of a plan, by its place in [`Plan::units`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitIndex(pub u32);

impl UnitIndex {
    /// The place, to index with.
    #[must_use]
    pub const fn place(self) -> usize {
        self.0 as usize
    }

    pub(super) fn of(place: usize) -> Self {
        Self(u32::try_from(place).expect("a program has few ops, see `limits`"))
    }
}

/// What a unit does: an op, or one of the two halves of an op that takes pieces and gives them later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A pure function of its inputs.
    Compute,
    /// Takes a value that was sent, once there is one.
    Recv,
    /// Gives a value to another program.
    Send,
    /// Puts an item in a queue, once that has space.
    Enqueue,
    /// Takes items out of a queue, once they are there.
    Dequeue,
    /// Puts a gradient in its accumulator, unless that is full.
    PutGradient,
    /// Gives the merged gradient, once all its pieces are there.
    TakeGradient,
    /// Puts a string in its accumulator, unless that is full.
    PutString,
    /// Gives the list of strings, once all of them are there.
    TakeString,
    /// Begins the turns of its block.
    Loop,
}

/// The least that runs at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// What it does.
    pub act: Act,
    /// The op, by its place in [`Plan::nodes`].
    pub node: u32,
    /// Its stage.
    pub(super) stage: u32,
    /// How many units come before it in every turn of its stage.
    pub(super) predecessors: u32,
    /// Who waits for it.
    pub(super) followers: Vec<u32>,
}

/// Units that run equally often: each once in every turn. A queue or an accumulator stands between two stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    /// Its units, which lie side by side.
    pub(super) units: (u32, u32),
    /// The loop that begins it; without one it has a single turn in every run.
    pub(super) begun_by: Option<u32>,
    /// Those of its units that no other comes before.
    pub(super) firsts: Vec<u32>,
}

/// A gradient accumulator, which says when the `recv` that feeds it may give a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulator {
    /// The op, by its place in [`Plan::nodes`].
    pub node: u32,
    /// How many pieces make one.
    pub count: u32,
    /// How they become one.
    pub merge: Merge,
    /// Whose turn it is.
    pub pace: Pace,
}

/// Which ops have no unit of their own, because whoever runs the plan does them within a neighbour: what a unit takes
/// from such an op it takes through it.
pub type Fused<'a> = &'a dyn Fn(Act, &Node) -> bool;

/// A program as an executor runs it: only numbers, made once and shared by all instances.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    nodes: Vec<Node>,
    labels: Vec<String>,
    units: Vec<Unit>,
    stages: Vec<Stage>,
    accumulators: Vec<Accumulator>,
    /// For every unit the accumulator that sets its pace.
    paced_by: Vec<Option<u32>>,
}

impl Plan {
    /// What a program runs once before everything else.
    ///
    /// # Errors
    /// As [`Plan::of`].
    pub fn initialisation(graph: &Graph) -> Result<Self, Failure> {
        Self::compile(graph, &|role| role == Role::Initialise, &|_, _| false)
    }

    /// What a program runs after its initialisation.
    ///
    /// # Errors
    /// When a loop stands within a loop, or an op after a loop that never ends waits for what the loop writes.
    pub fn of(graph: &Graph) -> Result<Self, Failure> {
        Self::fused(graph, &|_, _| false)
    }

    /// The same, with fewer units.
    ///
    /// # Errors
    /// As [`Plan::of`].
    pub fn fused(graph: &Graph, fused: Fused<'_>) -> Result<Self, Failure> {
        Self::compile(graph, &|role| role != Role::Initialise, fused)
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

    /// The accumulator that says which piece a `recv` may give, and when a list of senders is whole: the first one that
    /// minds whose turn it is and gets the same address.
    #[must_use]
    pub fn pace_of(&self, unit: UnitIndex) -> Option<&Accumulator> {
        self.paced_by[unit.place()].map(|at| &self.accumulators[at as usize])
    }

    /// How errors name a unit: the block, the op's place in it, its kind.
    pub(super) fn label(&self, unit: &Unit) -> &str {
        &self.labels[unit.node as usize]
    }

    pub(super) fn stages(&self) -> &[Stage] {
        &self.stages
    }

    fn compile(graph: &Graph, runs: &dyn Fn(Role) -> bool, fused: Fused<'_>) -> Result<Self, Failure> {
        let mut drawing = Drawing::default();
        drawing.scope(graph, 0, None, runs)?;
        drawing.join(graph)?;
        Ok(drawing.plan(fused))
    }
}

/// A half of an op, or a whole one, before stages are known.
struct Half {
    act: Act,
    node: usize,
    loop_half: Option<usize>,
    /// Some may be there more than once.
    before: Vec<usize>,
    /// Halves are of one stage when they have one root.
    root: usize,
}

/// A plan while it is made.
#[derive(Default)]
struct Drawing {
    nodes: Vec<Node>,
    labels: Vec<String>,
    halves: Vec<Half>,
}

/// Who touched a variable last, within one block.
#[derive(Default)]
struct Touched {
    writer: Option<usize>,
    readers: Vec<usize>,
}

impl Drawing {
    fn scope(
        &mut self,
        graph: &Graph,
        block: usize,
        loop_half: Option<usize>,
        runs: &dyn Fn(Role) -> bool,
    ) -> Result<(), Failure> {
        for (place, node) in graph.scopes()[block].nodes.iter().enumerate() {
            let OpKind::LoopForever { block: inner } = node.kind else {
                if runs(node.role) {
                    self.add(block, place, node, loop_half);
                }
                continue;
            };
            if loop_half.is_some() {
                return Err(Failure::call(format!(
                    "block {block}, op {place} loop_forever: found a loop within a loop, which would never come \
                     around; expected it in block 0"
                )));
            }
            let half = self.halves.len();
            self.add(block, place, node, None);
            self.scope(graph, inner as usize, Some(half), runs)?;
        }
        Ok(())
    }

    fn add(&mut self, block: usize, place: usize, node: &Node, loop_half: Option<usize>) {
        for act in acts(&node.kind) {
            let root = self.halves.len();
            self.halves.push(Half { act: *act, node: self.nodes.len(), loop_half, before: Vec::new(), root });
        }
        self.labels.push(format!("block {block}, op {place} {}", node.kind.name()));
        self.nodes.push(node.clone());
    }
}

impl Drawing {
    /// Draws who comes before whom, and joins those who do to one stage.
    fn join(&mut self, graph: &Graph) -> Result<(), Failure> {
        let mut touched: BTreeMap<(Option<usize>, VariableIndex), Touched> = BTreeMap::new();
        for half in 0..self.halves.len() {
            let (reads, writes) = self.touches(graph, half);
            let loop_half = self.halves[half].loop_half;
            for variable in reads {
                let known = touched.entry((loop_half, variable)).or_default();
                known.readers.push(half);
                if let Some(writer) = known.writer {
                    self.follow(graph, variable, writer, half)?;
                }
            }
            for variable in writes {
                let known = touched.entry((loop_half, variable)).or_default();
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
        let is_loop = |half: &Half| half.act == Act::Loop;
        match (is_loop(&self.halves[earlier]), is_loop(&self.halves[later])) {
            // Loops run side by side: who reads what another writes finds what is there.
            (true, true) => return Ok(()),
            (true, false) => {
                return Err(Failure::call(format!(
                    "{}: found {:?}, which {} touches too; expected no op to wait for a loop, which never ends",
                    self.labels[self.halves[later].node],
                    graph.variable(variable).name,
                    self.labels[self.halves[earlier].node]
                )));
            }
            (false, _) => {}
        }
        self.halves[later].before.push(earlier);
        let (one, other) = (self.root(earlier), self.root(later));
        self.halves[one.max(other)].root = one.min(other);
        Ok(())
    }

    /// The root of a half; the way there is half as long the next time.
    fn root(&mut self, mut half: usize) -> usize {
        while self.halves[half].root != half {
            let above = self.halves[half].root;
            self.halves[half].root = self.halves[above].root;
            half = self.halves[half].root;
        }
        half
    }

    /// The variables that a half reads, and those that it writes; what a loop's body touches its loop does.
    fn touches(&self, graph: &Graph, half: usize) -> (Vec<VariableIndex>, Vec<VariableIndex>) {
        let Half { act, node, .. } = &self.halves[half];
        let node = &self.nodes[*node];
        if let OpKind::LoopForever { block } = node.kind {
            let inner = &graph.scopes()[block as usize].nodes;
            let reads = inner.iter().flat_map(|node| &node.inputs).copied().collect();
            return (reads, inner.iter().flat_map(|node| &node.outputs).copied().collect());
        }
        let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
        match act {
            Act::PutGradient | Act::PutString => (inputs, Vec::new()),
            Act::TakeGradient | Act::TakeString => (Vec::new(), outputs),
            // A queue stands between its two sides and orders nothing.
            Act::Enqueue => (inputs[1..].to_vec(), outputs),
            Act::Dequeue => (Vec::new(), outputs),
            Act::Compute | Act::Recv | Act::Send | Act::Loop => (inputs, outputs),
        }
    }

    fn plan(mut self, fused: Fused<'_>) -> Plan {
        let is_fused: Vec<bool> = self.halves.iter().map(|half| fused(half.act, &self.nodes[half.node])).collect();
        let before = self.before_units(&is_fused);
        let mut order: Vec<usize> = (0..self.halves.len()).filter(|half| !is_fused[*half]).collect();
        let roots: Vec<usize> = (0..self.halves.len()).map(|half| self.root(half)).collect();
        order.sort_by_key(|half| (roots[*half], *half));
        let mut place_of = vec![usize::MAX; self.halves.len()];
        order.iter().enumerate().for_each(|(place, half)| place_of[*half] = place);

        let mut after: Vec<Vec<u32>> = vec![Vec::new(); self.halves.len()];
        for later in &order {
            before[*later].iter().for_each(|earlier| after[*earlier].push(number(place_of[*later])));
        }
        let (mut units, mut stages) = (Vec::new(), Vec::<Stage>::new());
        let mut last_root = None;
        for half in &order {
            let root = roots[*half];
            let place = number(units.len());
            if last_root.replace(root) != Some(root) {
                let begun_by = self.halves[*half].loop_half.map(|half| number(place_of[half]));
                stages.push(Stage { units: (place, place), begun_by, firsts: Vec::new() });
            }
            let stage = stages.len() - 1;
            stages[stage].units.1 = place + 1;
            if before[*half].is_empty() {
                stages[stage].firsts.push(place);
            }
            let Half { act, node, .. } = self.halves[*half];
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
        Plan { nodes: self.nodes, labels: self.labels, units, stages, accumulators, paced_by }
    }

    /// For every half the halves with units of their own that it waits for.
    fn before_units(&self, is_fused: &[bool]) -> Vec<Vec<usize>> {
        let mut all: Vec<Vec<usize>> = Vec::with_capacity(self.halves.len());
        for half in &self.halves {
            let mut before = Vec::new();
            for earlier in &half.before {
                match is_fused[*earlier] {
                    true => before.extend_from_slice(&all[*earlier]),
                    false => before.push(*earlier),
                }
            }
            before.sort_unstable();
            before.dedup();
            all.push(before);
        }
        all
    }

    /// The accumulator that sets a unit's pace, found by the address that both get.
    fn paced_by(&self, unit: &Unit, by_address: &BTreeMap<VariableIndex, u32>) -> Option<u32> {
        let node = &self.nodes[unit.node as usize];
        let address = match unit.act {
            Act::Recv => node.outputs.get(1),
            Act::PutString | Act::TakeString => node.inputs.first(),
            _ => None,
        };
        by_address.get(address?).copied()
    }

    /// By address, the first accumulator that gets it and minds whose turn it is.
    fn by_address(&self, accumulators: &[Accumulator]) -> BTreeMap<VariableIndex, u32> {
        let mut by_address = BTreeMap::new();
        for (place, one) in (0..).zip(accumulators).filter(|(_, one)| one.pace != Pace::Any) {
            if let Some(address) = self.nodes[one.node as usize].inputs.get(1) {
                by_address.entry(*address).or_insert(place);
            }
        }
        by_address
    }
}

fn acts(kind: &OpKind) -> &'static [Act] {
    match kind {
        OpKind::Send { .. } => &[Act::Send],
        OpKind::Recv { .. } => &[Act::Recv],
        OpKind::Enqueue => &[Act::Enqueue],
        OpKind::Dequeue { .. } => &[Act::Dequeue],
        OpKind::GradientAccumulator { .. } => &[Act::PutGradient, Act::TakeGradient],
        OpKind::StringAccumulator { .. } => &[Act::PutString, Act::TakeString],
        OpKind::LoopForever { .. } => &[Act::Loop],
        _ => &[Act::Compute],
    }
}

fn accumulator((place, node): (u32, &Node)) -> Option<Accumulator> {
    match node.kind {
        OpKind::GradientAccumulator { count, merge, staleness } => {
            Some(Accumulator { node: place, count, merge, pace: Pace::of(staleness) })
        }
        _ => None,
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("a program has few ops, see `limits`")
}

/// One line for each unit: what it is, its stage, and who waits for it.
impl fmt::Display for Plan {
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
