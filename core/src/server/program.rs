//! The server program of a parameter, compiled for execution.
//!
//! ```text
//! loop_forever {
//!     gradient, sender = recv
//!     merged = gradient_accumulator(gradient, sender)    count, merge and staleness say the mode
//!     senders = string_accumulator(sender)
//!     scaled = scale(merged)                             where differences are averaged
//!     parameter, count, states = update(parameter, scaled, count, states)
//!     send(parameter, senders)
//! }
//! ```
//!
//! The program is built from the job's settings and the parameter's rule. Later code never tests the mode: the modes
//! differ only in the attributes of the ops.

use std::sync::Arc;

use super::initialisation::{ChunkTable, ShardParameter};
use super::serving::Job;
use crate::config::{Merge, Mode, ParameterConfig};
use crate::error::Failure;
use crate::limits::{NAME_BYTES_MAX, PARAMETER_BYTES_MAX, RULE_NAME_BYTES_MAX};
use crate::optim::{Algorithm, Prepared, Rule};
use crate::program::executor::{AccumulatorPace, ExecutionPlan, Marking, UnitKind};
use crate::program::{
    AccumulatorSettings, Block, GradientNames, Graph, Node, Op, OpKind, OpRole, Program, Purpose, Variable,
    VariableFacts, loop_forever, state_name,
};
use crate::rows::RowLayout;

/// The units after fusion: accumulation, scaling and the list of senders are part of their neighbours.
const UNITS: [UnitKind; 4] = [UnitKind::Recv, UnitKind::PutGradient, UnitKind::Compute, UnitKind::Send];

/// The rule of delta mode, which adds differences, in place of every configured rule.
pub(super) fn rule_of_mode(mode: Mode) -> Option<Arc<Prepared>> {
    let add = || Prepared::new(Rule { algorithm: Algorithm::Add, ..Rule::default() }).expect("adding is a rule");
    (mode == Mode::Delta).then(|| Arc::new(add()))
}

/// The rule by which a parameter is updated.
pub(super) fn rule_of(job: &Job, rule: &Arc<Prepared>) -> Arc<Prepared> {
    rule_of_mode(job.mode).unwrap_or_else(|| Arc::clone(rule))
}

/// The program that a server runs for a parameter.
pub(super) fn program_of(job: &Job, held: &ShardParameter) -> Program {
    let (name, rule) = (held.name(), rule_of(job, &held.rule));
    let names = ProgramNames::of(name, &rule);
    let facts = facts(held);
    let state = |name: &String, facts: VariableFacts| Variable { name: name.clone(), facts, purpose: Purpose::State };
    let mut outer = vec![
        Variable { name: names.parameter.clone(), facts: facts.clone(), purpose: Purpose::Parameter },
        state(&names.count, VariableFacts::fixed(crate::dtype::ElementType::Int64, &[])),
    ];
    outer.extend(names.states.iter().map(|name| state(name, facts.clone())));
    let gradient = Variable { name: names.gradient.clone(), facts: gradient_facts(held), purpose: Purpose::Temporary };
    let body = Block { parent: Some(0), variables: vec![gradient], ops: ops(job, held, &rule, &names) };
    Program { blocks: vec![Block { parent: None, variables: outer, ops: vec![loop_forever(1)] }, body] }
}

/// The longest name of a parameter that leaves room for what its program's other names have after it, at most a rule's
/// state. Other variables are not called after longer ones.
const OWNER_BYTES_MAX: usize = NAME_BYTES_MAX - "@state.".len() - RULE_NAME_BYTES_MAX;

/// The names of a program's variables.
struct ProgramNames {
    parameter: String,
    /// Prefix of the other names.
    owner: String,
    gradient: String,
    count: String,
    states: Vec<String>,
}

impl ProgramNames {
    fn of(name: &str, rule: &Prepared) -> Self {
        let owner = if name.len() <= OWNER_BYTES_MAX { name } else { "parameter" };
        Self {
            parameter: name.to_owned(),
            owner: owner.to_owned(),
            gradient: format!("{owner}@gradient"),
            count: format!("{owner}@count"),
            states: rule.states().iter().map(|state| state_name(owner, &state.name)).collect(),
        }
    }
}

/// A table of rows is a matrix of all that there may be.
fn facts(held: &ShardParameter) -> VariableFacts {
    if let Some(plan) = &held.rows {
        return VariableFacts::fixed(held.element_type(), &matrix(plan.layout));
    }
    let (element_type, shape) = (held.element_type(), &held.declaration.shape);
    let elements = held.declaration.bytes / element_type.bytes();
    let is_whole = shape.iter().try_fold(1_u64, |count, length| count.checked_mul(*length)) == Some(elements);
    VariableFacts::fixed(element_type, if is_whole { shape } else { std::slice::from_ref(&elements) })
}

fn gradient_facts(held: &ShardParameter) -> VariableFacts {
    let Some(plan) = &held.rows else { return facts(held) };
    let [height, width] = matrix(plan.layout);
    VariableFacts::SelectedRows { element_type: held.element_type(), height, width }
}

/// Height and width; where ids go beyond what a matrix may be, the highest one.
fn matrix(layout: RowLayout) -> [u64; 2] {
    let row_bytes = u64::from(layout.width()) * layout.element_type().bytes();
    [layout.height().bound().min(PARAMETER_BYTES_MAX / row_bytes), layout.width().into()]
}

fn ops(job: &Job, held: &ShardParameter, rule: &Prepared, names: &ProgramNames) -> Vec<Op> {
    let op = |kind, role, inputs: &[&String], outputs: &[&String]| {
        let owned = |names: &[&String]| names.iter().map(|name| (*name).clone()).collect();
        Op { kind, role, inputs: owned(inputs), outputs: owned(outputs) }
    };
    let name = |what: &str| format!("{}@{what}", names.owner);
    let arrival = GradientNames {
        channel: names.parameter.clone(),
        piece: names.gradient.clone(),
        // A half is widened while it is added.
        wide: String::new(),
        sender: name("sender"),
        merged: name("merged"),
        senders: name("senders"),
    };
    let mut ops = arrival.ops(AccumulatorSettings::of(job.mode, job.merge, job.trainers), held.element_type(), None);
    // Integer sums are exact and not divided.
    let divides = job.merge == Merge::Mean && held.element_type().is_float();
    let scaled = name("scaled");
    let mut gradient = &arrival.merged;
    if job.mode == Mode::Delta && divides {
        let factor = 1.0 / f64::from(job.trainers);
        ops.push(op(OpKind::Scale { factor }, OpRole::Optimize, &[gradient], &[&scaled]));
        gradient = &scaled;
    }
    let config = ParameterConfig { rule: rule.rule().clone(), sparse: None }.to_text();
    let kept = || std::iter::once(&names.count).chain(&names.states);
    let inputs: Vec<&String> = [&names.parameter, gradient].into_iter().chain(kept()).collect();
    let outputs: Vec<&String> = std::iter::once(&names.parameter).chain(kept()).collect();
    ops.push(op(OpKind::Update { config }, OpRole::Optimize, &inputs, &outputs));
    ops.push(arrival.answer(&names.parameter));
    ops
}

/// A compiled program of a shard. Between two events no unit runs, so one marking serves all chunks: their state is in
/// their accumulators.
pub(super) struct Running {
    pub(super) plan: ExecutionPlan,
    pub(super) marking: Marking,
}

/// Parameters whose programs differ in names, shapes and numbers of the rule only.
#[derive(PartialEq)]
struct ProgramKind {
    states: usize,
    is_float: bool,
}

/// A program of a shard.
pub(super) struct ServedProgram {
    kind: ProgramKind,
    /// The admission rule of the mode.
    pub(super) pace: AccumulatorPace,
    merge: Merge,
    factor: f64,
    /// Taken while it runs.
    running: Option<Box<Running>>,
}

impl ServedProgram {
    fn new(kind: ProgramKind, program: Program) -> Result<Self, Failure> {
        let graph = Graph::new(program)?;
        let plan = ExecutionPlan::fused(&graph, &is_fused)?;
        let acts: Vec<UnitKind> =
            plan.units().iter().map(|unit| unit.act).filter(|act| *act != UnitKind::Loop).collect();
        assert_eq!(acts, UNITS, "the units of a server's program:\n{plan}");
        let accumulator = *plan.accumulators().first().expect("a server's program accumulates");
        let factor = |node: &Node| if let OpKind::Scale { factor } = node.kind { Some(factor) } else { None };
        let factor = plan.nodes().iter().find_map(factor).unwrap_or(1.0);
        let marking = Marking::new(&plan);
        let running = Some(Box::new(Running { plan, marking }));
        Ok(Self { kind, pace: accumulator.pace, merge: accumulator.merge, factor, running })
    }

    /// The factor on the sum of this many pieces.
    pub(super) fn scale(&self, pieces: usize) -> f64 {
        let mean_over = match self.merge {
            Merge::Mean => u32::try_from(pieces).unwrap_or(u32::MAX),
            Merge::Sum => 1,
        };
        1.0 / f64::from(mean_over) * self.factor
    }
}

fn is_fused(act: UnitKind, node: &Node) -> bool {
    let scales = act == UnitKind::Compute && matches!(node.kind, OpKind::Scale { .. });
    scales || matches!(act, UnitKind::TakeGradient | UnitKind::PutString | UnitKind::TakeString)
}

/// The programs of a shard, and which chunk runs which.
pub(super) struct Programs {
    served: Vec<ServedProgram>,
    by_slot_index: Vec<u32>,
}

impl Programs {
    /// Makes the program of every parameter in a table.
    pub(super) fn new(job: &Job, table: &ChunkTable) -> Result<Self, Failure> {
        let mut new = Self { served: Vec::new(), by_slot_index: vec![0; table.chunks.len()] };
        for held in table.parameters.values() {
            let kind = ProgramKind {
                states: rule_of(job, &held.rule).states().len(),
                is_float: held.element_type().is_float(),
            };
            let number = match new.served.iter().position(|one| one.kind == kind) {
                Some(number) => number,
                None => {
                    let program = program_of(job, held);
                    let (name, text) = (held.name(), program.to_string());
                    tracing::info!(
                        "parameter {name:?}, and all like it, run a program of {} lines",
                        text.lines().count()
                    );
                    tracing::debug!("the program of parameter {name:?}:\n{text}");
                    new.served.push(ServedProgram::new(kind, program)?);
                    new.served.len() - 1
                }
            };
            let number = u32::try_from(number).expect("there are few kinds");
            held.group.chunks.iter().for_each(|slot_index| new.by_slot_index[*slot_index] = number);
        }
        Ok(new)
    }

    /// The program of a chunk.
    pub(super) fn of(&self, slot_index: usize) -> &ServedProgram {
        &self.served[self.by_slot_index[slot_index] as usize]
    }

    /// Whether two chunks run the same program.
    pub(super) fn are_one(&self, slot_index: usize, other: usize) -> bool {
        self.by_slot_index[slot_index] == self.by_slot_index[other]
    }

    /// Takes the program of a chunk to run it.
    pub(super) fn take(&mut self, slot_index: usize) -> Box<Running> {
        self.served[self.by_slot_index[slot_index] as usize].running.take().expect("one event is handled at a time")
    }

    /// Brings it back.
    pub(super) fn bring_back(&mut self, slot_index: usize, running: Box<Running>) {
        self.served[self.by_slot_index[slot_index] as usize].running = Some(running);
    }
}
