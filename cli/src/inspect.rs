//! `pserver inspect`: the verdict on a checkpoint directory or a model file, and its contents.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use pserver_core::checkpoint::inspect::{InspectReport, InspectVerdict};
use pserver_core::checkpoint::storage::{Directory, Metered};
use pserver_core::checkpoint::{inspect, owner};
use pserver_core::metrics::WorkMeter;
use pserver_core::server::survey;
use pserver_node::progress::{ProgressUnit, TerminalProgress};

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
            eprintln!("pserver: {error:#}");
            return NOTHING_TO_INSPECT;
        }
    };
    let text = if args.short { report.summary() + "\n" } else { report.to_string() };
    // Standard output may be closed: then nobody reads the text, and the status says the rest.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    match report.verdict() {
        InspectVerdict::Sound => 0,
        InspectVerdict::Warned => 1,
        InspectVerdict::Refused => 2,
    }
}

fn report(path: &Path, meter: &Arc<WorkMeter>) -> Result<InspectReport> {
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
