//! Programs that a server hosts: a part of its sub-program that no [flow](super::server_flow) carries out, and that the
//! executor runs on a shard.
//!
//! Trainers send to it and receive from it by channels; each end of a channel is a parameter of the job, and so is each
//! variable that the program keeps. [`program_ends`] lists them of a program, in the order in which the initialising
//! trainer declares them, so that server and trainers agree. [`load`] makes what a shard runs.
//!
//! Not here: arrivals, journal and checkpoint ([`pserver_core::server`]); which parts are hosted ([`components()`]).

mod components;
mod program;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::TrainerId;
use pserver_core::limits::TRAINERS_MAX;
use pserver_core::port::{EndKind, HostedProgram, ProgramEnd};

use super::executor::ExecutorParts;
use super::{Destination, Dim, Graph, Node, OpKind, OpRole, Program, ProgramPeer, Purpose, Variable, VariableFacts};

pub use components::components;

/// Bounds the units that one arrival makes a program run, for each of its units: a program that runs longer has no op
/// that waits.
const RUNS_MAX: u64 = 1000;
/// Bound of a program's ends at trainers.
const ENDS_MAX: usize = 64 * 1024;
/// Bound of what a program may hold beside its kept variables: a checkpoint has it in one record, of less than 4 GiB.
const STATE_BYTES_MAX: u64 = 2 << 30;

/// An end of a program, and the channel or the variable that it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostedEnd {
    /// The parameter of the job.
    pub end: ProgramEnd,
    /// The name of the channel or of the variable; none of the steps.
    pub of: Option<String>,
}

/// A program as a server gets it: for one batch, and without the initialisation of kept variables, whose values the
/// initialising trainer sends.
///
/// # Errors
/// When the program has a batch, and `batch` is none.
pub fn hosted_program(component: &Graph, batch: Option<u64>) -> Result<Program, Failure> {
    let mut program = component.program().clone();
    let is_kept = |name: &String| {
        let variable = component.find(name).map(|index| component.variable(index));
        variable.is_some_and(|variable| variable.purpose.is_persistable())
    };
    for block in &mut program.blocks {
        block.ops.retain(|op| op.role != OpRole::Initialise || !op.outputs.iter().any(is_kept));
        block.variables.iter_mut().try_for_each(|one| fix_batch(one, batch))?;
    }
    let used: BTreeSet<String> = program.blocks.iter().flat_map(|block| &block.ops).flat_map(names).collect();
    program.blocks.iter_mut().for_each(|block| block.variables.retain(|one| used.contains(&one.name)));
    Ok(program)
}

fn names(op: &super::Op) -> impl Iterator<Item = String> + '_ {
    op.inputs.iter().chain(&op.outputs).cloned()
}

fn fix_batch(variable: &mut Variable, batch: Option<u64>) -> Result<(), Failure> {
    fn fix(facts: &mut VariableFacts, batch: Option<u64>) -> bool {
        match facts {
            VariableFacts::Queue { of, .. } => fix(of, batch),
            VariableFacts::Dense { shape, .. } => shape.iter_mut().all(|dim| match (&dim, batch) {
                (Dim::Fixed(_), _) => true,
                (Dim::Batch, Some(batch)) => {
                    *dim = Dim::Fixed(batch);
                    true
                }
                (Dim::Batch, None) => false,
            }),
            VariableFacts::SelectedRows { .. } | VariableFacts::Strings => true,
        }
    }
    if fix(&mut variable.facts, batch) {
        return Ok(());
    }
    let (name, found) = (&variable.name, &variable.facts);
    Err(Failure::call(format!(
        "variable {name:?}: found {found} of a batch not given; expected initialise_for_batch, which gives it"
    )))
}

/// The ends of a hosted program in a job of so many trainers, in the order of their declaration.
///
/// # Errors
/// Names what a server cannot host: rows, data, a batch, halves on channels, channels between servers, and more items
/// at a time than a checkpoint has room for.
pub fn program_ends(graph: &Graph, trainers: u32) -> Result<Vec<HostedEnd>, Failure> {
    let mut ends = Vec::new();
    for variable in graph.variables() {
        check(variable)?;
        if let (true, Some((element_type, shape))) = (variable.purpose.is_persistable(), variable.facts.fixed_dense()) {
            let (name, of) = (variable.name.clone(), Some(variable.name.clone()));
            ends.push(HostedEnd { end: ProgramEnd { name, kind: EndKind::Kept, element_type, shape }, of });
        }
    }
    let mut known = BTreeSet::new();
    for node in nodes(graph) {
        for (channel, kind) in channel_ends(node, trainers)? {
            let value = match kind {
                EndKind::Input(_) => node.outputs[0],
                _ => node.inputs[0],
            };
            if ends.len() == ENDS_MAX {
                return Err(Failure::call(format!(
                    "found more than {ENDS_MAX} ends of its channels at {trainers} trainers; expected fewer"
                )));
            }
            if known.insert((channel.clone(), kind)) {
                ends.push(channel_end(&channel, kind, &graph.variable(value).facts)?);
            }
        }
    }
    let first = graph.variables().first().map_or("", |variable| variable.name.as_str());
    ends.extend((0..trainers).map(|trainer| {
        let (name, kind) = (format!("{first}@steps.{trainer}"), EndKind::Steps(TrainerId(trainer)));
        HostedEnd { end: ProgramEnd { name, kind, element_type: ElementType::Int64, shape: Vec::new() }, of: None }
    }));
    check_state(graph, &ends)?;
    Ok(ends)
}

/// Refuses a program whose queues, accumulators, values and items may be larger than a checkpoint has room for.
fn check_state(graph: &Graph, ends: &[HostedEnd]) -> Result<(), Failure> {
    let bytes = |facts: &VariableFacts| {
        let (element_type, shape) = facts.fixed_dense()?;
        shape.iter().try_fold(element_type.bytes(), |bytes, length| bytes.checked_mul(*length))
    };
    let of_variable = |one: &Variable| match &one.facts {
        VariableFacts::Queue { of, capacity } => bytes(of).unwrap_or(0).saturating_mul(*capacity),
        facts if !one.purpose.is_persistable() => bytes(facts).unwrap_or(0),
        _ => 0,
    };
    let of_node = |node: &Node| match node.kind {
        OpKind::GradientAccumulator { count, .. } => {
            bytes(&graph.variable(node.inputs[0]).facts).unwrap_or(0).saturating_mul(count.into())
        }
        _ => 0,
    };
    // One item has arrived, or is published, and another one waits.
    let of_end = |one: &HostedEnd| match one.end.kind {
        EndKind::Kept => 0,
        _ => {
            let length = one.end.shape.iter().try_fold(1_u64, |product, length| product.checked_mul(*length));
            length.unwrap_or(u64::MAX).saturating_mul(2 * one.end.element_type.bytes())
        }
    };
    let all = graph.variables().iter().map(of_variable).chain(nodes(graph).map(of_node)).chain(ends.iter().map(of_end));
    let most = all.fold(0_u64, u64::saturating_add);
    if most <= STATE_BYTES_MAX {
        return Ok(());
    }
    Err(Failure::call(format!(
        "found queues, accumulators, values and items of up to {most} bytes; expected at most {STATE_BYTES_MAX}, which \
         a checkpoint has room for"
    )))
}

/// Refuses a variable that a server cannot host.
fn check(variable: &Variable) -> Result<(), Failure> {
    let (name, facts) = (&variable.name, &variable.facts);
    let refused = |expected: &str| Err(Failure::call(format!("variable {name:?}: found {facts}; expected {expected}")));
    let has_rows = |facts: &VariableFacts| matches!(facts, VariableFacts::SelectedRows { .. });
    let inner = match facts {
        VariableFacts::Queue { of, .. } => of,
        facts => facts,
    };
    if has_rows(inner) {
        return refused("dense values, which are all that a hosted program has");
    }
    if let VariableFacts::Dense { shape, .. } = inner
        && shape.contains(&Dim::Batch)
    {
        return refused("a fixed size");
    }
    if variable.purpose == Purpose::Data {
        return refused("no data, because nothing is fed to a server");
    }
    let is_kept = variable.purpose.is_persistable();
    let is_half = |facts: &VariableFacts| facts.fixed_dense().is_some_and(|(kind, _)| !kind.is_parameter_type());
    if is_kept && (is_half(facts) || matches!(facts, VariableFacts::Strings)) {
        return refused("a type of 32 or 64 bits, because the variable is kept");
    }
    Ok(())
}

/// The channel of a flow op, and its ends at trainers.
fn channel_ends(node: &Node, trainers: u32) -> Result<Vec<(String, EndKind)>, Failure> {
    let all = || (0..trainers).map(TrainerId);
    match &node.kind {
        OpKind::Recv { channel } => Ok(all().map(|one| (channel.clone(), EndKind::Input(one))).collect()),
        OpKind::Send { channel, to: Destination::Senders } => {
            Ok(all().map(|one| (channel.clone(), EndKind::Output(one))).collect())
        }
        OpKind::Send { channel, to: Destination::Peer(ProgramPeer::Trainer(one)) } if *one < trainers => {
            Ok(vec![(channel.clone(), EndKind::Output(TrainerId(*one)))])
        }
        OpKind::Send { channel, to: Destination::Peer(peer) } => Err(Failure::call(format!(
            "channel {channel:?}: found {peer} as its destination; expected a trainer below {trainers}"
        ))),
        OpKind::PullRows { channel, .. } => Err(Failure::call(format!(
            "channel {channel:?}: found pull_rows; expected recv and send, which are all that a hosted program has"
        ))),
        _ => Ok(Vec::new()),
    }
}

fn channel_end(channel: &str, kind: EndKind, facts: &VariableFacts) -> Result<HostedEnd, Failure> {
    let known = facts.fixed_dense().filter(|(element_type, _)| element_type.is_parameter_type());
    let (element_type, shape) = known.ok_or_else(|| {
        Failure::call(format!("channel {channel:?}: found {facts}; expected a dense value of 32 or 64 bits"))
    })?;
    let name = match kind {
        EndKind::Input(trainer) => format!("{channel}@from.{trainer}"),
        EndKind::Output(trainer) | EndKind::Steps(trainer) => format!("{channel}@to.{trainer}"),
        EndKind::Kept => channel.to_owned(),
    };
    Ok(HostedEnd { end: ProgramEnd { name, kind, element_type, shape }, of: Some(channel.to_owned()) })
}

/// Loads a program that a shard is to host.
///
/// # Errors
/// When the program is malformed, or a server cannot host it.
pub fn load(program: &[u8], trainers: u32, parts: ExecutorParts) -> Result<Box<dyn HostedProgram>, Failure> {
    if trainers == 0 || TRAINERS_MAX < trainers {
        return Err(Failure::call(format!("found {trainers} trainers; expected 1 to {TRAINERS_MAX}")));
    }
    let graph = Graph::new(Program::decode(program)?)?;
    tracing::debug!("the executor runs:\n{}", graph.program());
    Ok(Box::new(program::ExecutorProgram::new(graph, trainers, parts)?))
}

fn nodes(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.scopes().iter().flat_map(|scope| &scope.nodes)
}
