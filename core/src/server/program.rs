//! The server program of a parameter, as the transpiler would write it.
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
//! differ only in the attributes of the ops. [`stage`](super::stage) compiles the program.

use std::sync::Arc;

use super::initialisation::ShardParameter;
use super::job::Job;
use crate::accumulator::AccumulatorSettings;
use crate::config::{Merge, Mode, ParameterConfig};
use crate::limits::{NAME_BYTES_MAX, PARAMETER_BYTES_MAX, RULE_NAME_BYTES_MAX};
use crate::optim::{Algorithm, Prepared, Rule};
use crate::program::{
    Block, GradientNames, Op, OpKind, OpRole, Program, Purpose, Variable, VariableFacts, loop_forever, state_name,
};
use crate::rows::RowLayout;

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
