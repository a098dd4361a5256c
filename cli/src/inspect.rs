//! `pserver inspect`: the verdict on a checkpoint directory or a model file, and its contents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use pserver_client::console;
use pserver_core::checkpoint::inspect::{InspectReport, InspectVerdict};
use pserver_core::checkpoint::storage::{Directory, LOCK, Metered};
use pserver_core::checkpoint::{OwnerRecord, inspect, owner};
use pserver_core::metrics::WorkMeter;
use pserver_core::server::survey;
use pserver_node::progress::{ProgressUnit, TerminalProgress};

/// Looks at the files of a server that runs.
const LOOKS: u32 = 3;
/// Exit status where there is no verdict. 1 and 2 are verdicts.
const NOTHING_TO_INSPECT: u8 = 3;

/// Arguments of `pserver inspect`.
#[derive(clap::Args)]
pub(crate) struct InspectArgs {
    /// A checkpoint directory (of a job, a server or a shard) or a model file.
    path: PathBuf,
    /// Print the verdict alone, one line.
    #[arg(long, short)]
    short: bool,
}

/// Prints the verdict and the contents. Returns the exit status.
pub(crate) fn run(args: &InspectArgs) -> u8 {
    let meter = Arc::default();
    let progress = TerminalProgress::start("inspecting", ProgressUnit::Bytes, &meter);
    let report = report(&args.path, &meter);
    drop(progress);
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            console::remark(format_args!("pserver: {error:#}"));
            return NOTHING_TO_INSPECT;
        }
    };
    let text = if args.short { report.summary() + "\n" } else { report.to_string() };
    // Standard output may be closed: then nobody reads the text, and the status says the rest.
    let _ = console::print(text);
    match report.verdict() {
        InspectVerdict::Sound => 0,
        InspectVerdict::Warned => 1,
        InspectVerdict::Refused => 2,
    }
}

/// Looks at a path. While a server runs, its files change: then a few more looks may find them at rest.
fn report(path: &Path, meter: &Arc<WorkMeter>) -> Result<InspectReport> {
    for look in 1.. {
        let before = user_of(path);
        let mut report = files_report(path, meter)?;
        let Some(user) = before.or_else(|| user_of(path)) else { return Ok(report) };
        if report.is_sound() || look == LOOKS {
            report.is_used_by(user);
            return Ok(report);
        }
    }
    unreachable!("the last look returns")
}

/// The server that runs and has the lock of a directory to be inspected, or of one in or above it.
fn user_of(path: &Path) -> Option<String> {
    let absolute = path.canonicalize().ok()?;
    let below = std::fs::read_dir(&absolute).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let servers = absolute.parent().map(Path::to_owned).into_iter().chain([absolute.clone()]).chain(below);
    servers.filter(|one| one.is_dir()).find_map(|folder| {
        let (_, server) = server_of(&folder)?;
        let directory = Directory::open(&folder).ok().filter(|directory| directory.is_locked(""))?;
        let owner = OwnerRecord::read(&directory, LOCK).map_or(String::new(), |owner| format!(" ({owner})"));
        Some(format!("server {server}{owner}"))
    })
}

fn files_report(path: &Path, meter: &Arc<WorkMeter>) -> Result<InspectReport> {
    let open = |root: &Path| {
        let directory = Directory::open(root)?;
        anyhow::Ok(Metered::new(Arc::new(directory), Arc::clone(meter)))
    };
    let absolute = path.canonicalize().with_context(|| path.display().to_string())?;
    let server = server_of(&absolute).filter(|_| holds(&absolute, owner::SHARD));
    let report = if let Some((root, server)) = server {
        survey(&open(root)?, Some(server))
    } else if holds(&absolute, owner::SERVER) {
        survey(&open(&absolute)?, None)
    } else if absolute.is_dir() {
        inspect(&open(&absolute)?, ".")
    } else {
        let parent = absolute.parent().context("a file lies in a folder")?;
        let name = absolute.file_name().and_then(|name| name.to_str());
        inspect(&open(parent)?, name.with_context(|| format!("{}: not a name in UTF-8", path.display()))?)
    };
    report.with_context(|| format!("{}: cannot be inspected", path.display()))
}

/// Whether a path is a directory with names that begin so.
fn holds(path: &Path, prefix: &str) -> bool {
    let entries = std::fs::read_dir(path).into_iter().flatten();
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.any(|name| name.starts_with(prefix))
}

/// The job's directory and the server's index, where a path is called as the directory of a server.
fn server_of(path: &Path) -> Option<(&Path, u16)> {
    let index = path.file_name()?.to_str()?.strip_prefix(owner::SERVER)?.parse().ok()?;
    Some((path.parent()?, index))
}
