//! The contents of servers for a program: parameters and queues, which flows carry out, and programs of their
//! own, which the executor runs.
//!
//! A server's part that flows carry out whole is not looked at further. Of any other part each component is taken
//! apart, and the first reason why no flow carries it out is kept.

use std::collections::{BTreeMap, BTreeSet};

use pserver_client::Client;
use pserver_core::error::Failure;
use pserver_program::hosted::components;
use pserver_program::server_stage::with_update;
use pserver_program::transpile::ProgramPart;
use pserver_program::{Graph, OpKind, OpRole, ProgramPeer, VariableIndex};

use super::hosted_programs::ServerProgram;
use super::queues::{ServerQueue, queues_of};
use super::server_parameters::{ServerParameter, nodes, parameters_of, trainer_count};
use super::sharing::ProgramSharing;

/// Names of a job in an error, at most.
const NAMED_MAX: usize = 8;

/// The parameters, queues and programs that servers hold.
#[derive(Default)]
pub(super) struct ServerContents {
    pub(super) parameters: Vec<ServerParameter>,
    pub(super) queues: Vec<ServerQueue>,
    pub(super) programs: Vec<ServerProgram>,
    /// The batch of the queues' items.
    pub(super) batch: Option<u64>,
}

impl ServerContents {
    /// # Errors
    /// When a server's part has a component that neither a flow nor the executor runs there.
    pub(super) fn of(parts: &[ProgramPart], batch: Option<u64>) -> Result<Self, Failure> {
        let mut all = Self { batch, ..Self::default() };
        for part in parts {
            for peer in &part.peers {
                if let ProgramPeer::Server(server) = peer {
                    all.add(parts, &part.graph, *server)?;
                }
            }
        }
        Ok(all)
    }

    fn add(&mut self, parts: &[ProgramPart], graph: &Graph, server: u32) -> Result<(), Failure> {
        if self.add_flows(parts, graph, server).is_ok() {
            return Ok(());
        }
        for component in components(graph)? {
            if let Err(reason) = self.add_component(parts, &component, server) {
                let mut program = ServerProgram::of(component, (server, trainer_count(parts)), self.batch, &reason)?;
                program.rename_after(&self.programs);
                self.programs.push(program);
            }
        }
        Ok(())
    }

    /// Adds a component that flows carry out, as it is or with optimizer ops as an update; or nothing and the reason.
    fn add_component(&mut self, parts: &[ProgramPart], component: &Graph, server: u32) -> Result<(), Failure> {
        let Err(reason) = self.add_flows(parts, component, server) else { return Ok(()) };
        // A component that has an update, or has none to be made of its ops, keeps its own reason.
        let Ok(with_update) = with_update(component) else { return Err(reason) };
        self.add_flows(parts, &with_update, server)
    }

    /// Adds what flows carry out, or nothing and the reason.
    fn add_flows(&mut self, parts: &[ProgramPart], graph: &Graph, server: u32) -> Result<(), Failure> {
        let parameters = parameters_of(graph, server, trainer_count(parts))?;
        let queues = queues_of(parts, graph, server)?;
        check_explained(graph, &parameters, &queues)?;
        self.parameters.extend(parameters);
        self.queues.extend(queues);
        Ok(())
    }

    /// Refuses a job that lacks a parameter, a queue or a program.
    pub(super) fn check_names(&self, names: &[String]) -> Result<(), Failure> {
        let parameters = self.parameters.iter().map(|one| ("parameter", &one.name));
        let queues = self.queues.iter().map(|one| ("queue", &one.channel));
        let programs = self.programs.iter().map(|one| ("program", &one.name));
        match parameters.chain(queues).chain(programs).find(|(_, name)| !names.contains(name)) {
            None => Ok(()),
            Some((kind, name)) => Err(Failure::call(format!(
                "found the {kind} {name:?} of this program and strategy, and in the job {} others ({}); expected the \
                 program and the strategy with which the job was initialised",
                names.len(),
                names.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    /// Refuses a job whose servers share the parameters in another way.
    pub(super) fn check_servers(&self, client: &Client) -> Result<(), Failure> {
        let parameters = self.parameters.iter().map(|one| (&one.name, one.server));
        let mut all = parameters.chain(self.programs.iter().map(|one| (&one.name, one.server)));
        all.try_for_each(|(name, server)| {
            let found = client.servers_of(name)?;
            if found.iter().map(|server| u32::from(*server)).eq([server]) {
                return Ok(());
            }
            Err(Failure::call(format!(
                "parameter {name:?}: found it on the servers {found:?} of the job; expected server {server}, to which \
                 the program's division gives it, as with the placement and the limit of bytes with which the job was \
                 initialised"
            )))
        })
    }

    pub(super) fn sharing(&self, parts: &[ProgramPart]) -> Result<ProgramSharing, Failure> {
        let trainers = trainer_count(parts);
        let parameters: Vec<_> = self.parameters.iter().map(|one| (one.name.as_str(), one.sharing)).collect();
        let queues = self.queues.iter().map(|one| (one.channel.as_str(), ProgramSharing::of_queue(trainers)));
        let mut all: Vec<_> = parameters.into_iter().chain(queues).collect();
        if let (true, Some(first)) = (all.is_empty(), self.programs.first()) {
            all.push((first.name.as_str(), ProgramSharing::of_program(first.staleness(), trainers)));
        }
        let common = ProgramSharing::common(&all)?;
        // An end of a channel is of one trainer.
        Ok(if self.programs.is_empty() { common } else { common.of_trainers(trainers) })
    }
}

/// Refuses an op that no flow of these parameters and queues carries out.
fn check_explained(graph: &Graph, parameters: &[ServerParameter], queues: &[ServerQueue]) -> Result<(), Failure> {
    let of_totals = |channel: &str| {
        let totals = parameters.iter().filter_map(|one| one.total.as_ref());
        totals.clone().any(|total| total.share == channel || total.total == channel)
    };
    let of_queues = |channel: &str| queues.iter().any(|queue| queue.channel == channel);
    let of_rows = |channel: &String| parameters.iter().any(|one| one.row_channels.contains(channel));
    let mut received = BTreeSet::new();
    for node in nodes(graph) {
        let (op, channel, is_of_flow) = match &node.kind {
            OpKind::Recv { channel } => {
                let is_gradient = parameters.iter().any(|one| one.gradient == *channel);
                ("recv", channel, is_gradient && received.insert(channel))
            }
            OpKind::Send { channel, .. } => {
                let sent = &graph.variable(node.inputs[0]).name;
                // Of a table the count of its updates is sent.
                let is_answer =
                    |one: &ServerParameter| one.name == *channel && (one.name == *sent || one.layout.is_some());
                ("send", channel, parameters.iter().any(is_answer))
            }
            OpKind::StringAccumulator { count } => {
                let beside = nodes(graph).filter(|other| other.inputs.get(1) == node.inputs.first());
                let counts: BTreeSet<u32> = beside.filter_map(|other| accumulated(&other.kind)).collect();
                if counts.iter().eq([count]) {
                    continue;
                }
                let text =
                    format!("found a string_accumulator of {count} beside gradients of {counts:?}; expected equal");
                return Err(Failure::call(text));
            }
            _ => continue,
        };
        if !is_of_flow && !of_rows(channel) && !of_totals(channel) && !of_queues(channel) {
            return Err(Failure::call(format!("found {op} of the channel {channel:?}, which no parameter's flow has")));
        }
    }
    check_order(graph)?;
    if parameters.is_empty() && queues.is_empty() && nodes(graph).next().is_some() {
        return Err(Failure::call("found no update by a rule, and no queue between trainers"));
    }
    Ok(())
}

/// Refuses a value that a loop sends before its update, and an update outside of a loop: a flow updates whenever there
/// are gradients, and answers with the new value.
fn check_order(graph: &Graph) -> Result<(), Failure> {
    for (number, scope) in graph.scopes().iter().enumerate() {
        let mut last: BTreeMap<VariableIndex, usize> = BTreeMap::new();
        for (place, node) in scope.nodes.iter().enumerate().filter(|(_, node)| node.role == OpRole::Optimize) {
            last.extend(node.outputs.iter().map(|output| (*output, place)));
        }
        for (place, node) in scope.nodes.iter().enumerate() {
            let found = match node.kind {
                OpKind::Send { .. } if number > 0 && last.get(&node.inputs[0]).is_some_and(|last| place < *last) => {
                    "a send before the update of what it sends"
                }
                OpKind::Recv { .. } | OpKind::GradientAccumulator { .. } if number == 0 => "an op of flow in no loop",
                OpKind::Update { .. } if number == 0 => "an update in no loop",
                _ => continue,
            };
            let name = node.kind.name();
            return Err(Failure::call(format!("{name}: found {found}, which no parameter's flow has")));
        }
    }
    Ok(())
}

fn accumulated(kind: &OpKind) -> Option<u32> {
    if let OpKind::GradientAccumulator { count, .. } = kind { Some(*count) } else { None }
}
