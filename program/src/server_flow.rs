//! The server program of a parameter, as the transpiler would write it, and its compilation.
//!
//! ```text
//! loop_forever {
//!     gradient, sender = recv
//!     merged = gradient_accumulator(gradient, sender)    count, merge and staleness say the mode
//!     senders = string_accumulator(sender)
//!     scaled = scale(merged)                             where differences are averaged
//!     parameter, count, states = update(parameter, scaled, count, states)
//!     send(parameter, senders)                   of a table of rows its count
//! }
//! ```
//!
//! The program is built from the job's settings and the parameter's rule; the modes differ only in the attributes of
//! the ops. A shard carries out the fixed ops, which receive, accumulate and send, in plain code, at the pace that the
//! accumulator's attributes say. The ops between the accumulator and `send` are the stage: an optional `scale`, and an
//! `update` by the parameter's rule.

#[cfg(test)]
mod tests;

use pserver_core::accumulator::{AccumulatorPace, AccumulatorSettings, LateGradients};
use pserver_core::config::{Merge, Mode, ParameterConfig, row_layout};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::{NAME_BYTES_MAX, PARAMETER_BYTES_MAX, RULE_NAME_BYTES_MAX};
use pserver_core::optim::Prepared;
use pserver_core::partition::Declaration;
use pserver_core::port::{Flow, FlowSource, Stage};
use pserver_core::rows::RowLayout;

use super::{
    Block, GradientNames, Graph, Op, OpKind, OpRole, Program, Purpose, Variable, VariableFacts, loop_forever,
    state_name,
};

/// The form of a server's loop, as [`compile`] expects it.
const FORM: &str = "recv, gradient_accumulator, string_accumulator, at most one scale, update, send";

/// Compiles the program of a parameter.
///
/// # Errors
/// When the program is malformed, or its loop has another form.
pub fn compile(source: FlowSource<'_>) -> Result<Flow, Failure> {
    let program = program_of(source)?;
    let (name, text) = (source.declaration.name.as_str(), program.to_string());
    let lines = text.lines().count();
    tracing::info!("parameter {name:?}, and all like it, run a program of {lines} lines");
    tracing::debug!("the program of parameter {name:?}:\n{text}");
    compile_program(program)
}

/// Compiles the endless loop of a server's program.
fn compile_program(program: Program) -> Result<Flow, Failure> {
    let graph = Graph::new(program)?;
    let kinds: Vec<&OpKind> = graph.program().blocks[1].ops.iter().map(|Op { kind, .. }| kind).collect();
    let compiled = match kinds.as_slice() {
        [
            OpKind::Recv { .. },
            OpKind::GradientAccumulator { count, merge, staleness, late: LateGradients::Drop },
            OpKind::StringAccumulator { .. },
            ops @ ..,
            OpKind::Send { .. },
        ] => {
            let (pace, count) = (AccumulatorPace::of(*staleness), *count);
            compile_stage(*merge, ops).map(|stage| Flow { pace, count, stage })
        }
        _ => None,
    };
    compiled.ok_or_else(|| {
        let found: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        Failure::call(format!("a server's loop has the ops {}; expected {FORM}", found.join(", ")))
    })
}

fn compile_stage(merge: Merge, ops: &[&OpKind]) -> Option<Stage> {
    match ops {
        [OpKind::Update { .. }] => Some(Stage { merge, factor: 1.0 }),
        [OpKind::Scale { factor }, OpKind::Update { .. }] => Some(Stage { merge, factor: *factor }),
        _ => None,
    }
}

/// The program that a server runs for a parameter.
fn program_of(source: FlowSource<'_>) -> Result<Program, Failure> {
    let FlowSource { declaration, rule, .. } = source;
    let layout = row_layout(declaration)?;
    let names = ProgramNames::of(declaration.name.as_str(), rule);
    let facts = facts(declaration, layout);
    let variable = |name: &String, facts, purpose| Variable { name: name.clone(), facts, purpose };
    let count = VariableFacts::fixed(ElementType::Int64, &[]);
    let mut outer = vec![
        variable(&names.parameter, facts.clone(), Purpose::Parameter),
        variable(&names.count, count, Purpose::State),
    ];
    outer.extend(names.states.iter().map(|name| variable(name, facts.clone(), Purpose::State)));
    let gradient = variable(&names.gradient, gradient_facts(layout).unwrap_or(facts), Purpose::Temporary);
    let body = Block { parent: Some(0), variables: vec![gradient], ops: ops(source, &names) };
    Ok(Program { blocks: vec![Block { parent: None, variables: outer, ops: vec![loop_forever(1)] }, body] })
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
fn facts(declaration: &Declaration, layout: Option<RowLayout>) -> VariableFacts {
    let Declaration { element_type, bytes, ref shape, .. } = *declaration;
    if let Some(layout) = layout {
        return VariableFacts::fixed(element_type, &matrix(layout));
    }
    let elements = bytes / element_type.bytes();
    let is_whole = shape.iter().try_fold(1_u64, |count, length| count.checked_mul(*length)) == Some(elements);
    VariableFacts::fixed(element_type, if is_whole { shape } else { std::slice::from_ref(&elements) })
}

/// The facts of the gradient of a table.
fn gradient_facts(layout: Option<RowLayout>) -> Option<VariableFacts> {
    let layout = layout?;
    let [height, width] = matrix(layout);
    Some(VariableFacts::SelectedRows { element_type: layout.element_type(), height, width })
}

/// Height and width; where ids go beyond what a matrix may be, the highest one.
fn matrix(layout: RowLayout) -> [u64; 2] {
    let row_bytes = u64::from(layout.width()) * layout.element_type().bytes();
    [layout.height().bound().min(PARAMETER_BYTES_MAX / row_bytes), layout.width().into()]
}

fn ops(source: FlowSource<'_>, names: &ProgramNames) -> Vec<Op> {
    let FlowSource { mode, merge, trainers, backup_trainers, declaration, rule } = source;
    let element_type = declaration.element_type;
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
    let senders = if declaration.sender.is_some() { 1 } else { trainers };
    let accumulators = AccumulatorSettings::of(mode, merge, senders).without(backup_trainers);
    let mut ops = arrival.ops(accumulators, element_type, None);
    // Integer sums are exact and not divided.
    let divides = merge == Merge::Mean && element_type.is_float();
    let scaled = name("scaled");
    let mut gradient = &arrival.merged;
    if mode == Mode::Delta && divides {
        let factor = 1.0 / f64::from(trainers);
        ops.push(op(OpKind::Scale { factor }, OpRole::Optimize, &[gradient], &[&scaled]));
        gradient = &scaled;
    }
    let config = ParameterConfig::of(rule.rule().clone()).to_text();
    let kept = || std::iter::once(&names.count).chain(&names.states);
    let inputs: Vec<&String> = [&names.parameter, gradient].into_iter().chain(kept()).collect();
    let outputs: Vec<&String> = std::iter::once(&names.parameter).chain(kept()).collect();
    ops.push(op(OpKind::Update { config }, OpRole::Optimize, &inputs, &outputs));
    // Trainers pull rows of a table, once they know that their gradients are in it.
    let answer = if declaration.buckets.is_some() { &names.count } else { &names.parameter };
    ops.push(arrival.answer(answer, &names.parameter));
    ops
}
