//! Ways in which servers run the parts of a program, for people.

use pserver_core::config::Mode;
use pserver_core::error::Failure;
use pserver_program::transpile::ProgramPart;

use super::server_contents::ServerContents;
use super::server_parameters::ServerParameter;

/// A part of a server's sub-program that runs by itself, and the way in which the server runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedPart {
    /// Index of the server.
    pub server: u32,
    /// The parameter, the queue or the program.
    pub name: String,
    /// The way, and why.
    pub way: PartWay,
}

/// The way in which a server runs a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartWay {
    /// A flow in code, around a compiled rule: what it does.
    Flow(String),
    /// The executor: why no flow does.
    Executor(String),
}

/// The ways in which the servers of these parts run them, for items of this batch where any have one.
///
/// # Errors
/// When a server's part has a component that it cannot run.
pub fn explain(parts: &[ProgramPart], batch: Option<u64>) -> Result<Vec<ServedPart>, Failure> {
    let ServerContents { parameters, queues, programs, .. } = ServerContents::of(parts, batch)?;
    let flow = |server, name: &String, what| ServedPart { server, name: name.clone(), way: PartWay::Flow(what) };
    let mut all: Vec<ServedPart> = parameters.iter().map(|one| flow(one.server, &one.name, flow_of(one))).collect();
    all.extend(queues.iter().map(|one| flow(one.server, &one.channel, "queue of one item".to_owned())));
    all.extend(programs.into_iter().map(|one| ServedPart {
        server: one.server,
        name: one.name,
        way: PartWay::Executor(one.reason),
    }));
    all.sort_by_key(|one| one.server);
    Ok(all)
}

fn flow_of(one: &ServerParameter) -> String {
    let table = if one.layout.is_some() { "rows of a table, " } else { "" };
    let rounds = match one.sharing.mode() {
        Mode::Sync if one.backup_trainers > 0 => format!("rounds without the {} slowest", one.backup_trainers),
        Mode::Sync => "rounds".to_owned(),
        Mode::Async | Mode::Delta => "each gradient alone".to_owned(),
        Mode::Staleness { bound } => format!("each gradient alone, at most {bound} ahead"),
    };
    let total = if one.total.is_some() { ", a number of several parameters" } else { "" };
    format!("{table}{rounds}{total}")
}
