//! The `pserver` program: a server, the quickstart, and a look at what is on disk.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use paddle_pserver::node::Server;
use paddle_pserver::quickstart;
use paddle_pserver::settings::{LogFormat, ServeArgs, Settings};
use pserver_core::checkpoint::storage::Directory;
use tracing_subscriber::EnvFilter;

/// A high-performance parameter server.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a server until SIGTERM or SIGINT; then drain, take a last checkpoint and stop.
    Serve(Box<ServeArgs>),
    /// Train a small network on handwritten digits through real servers, all on this machine.
    Quickstart(quickstart::Args),
    /// One trainer of the quickstart.
    #[command(hide = true)]
    QuickstartTrainer(quickstart::trainer::TrainerArgs),
    /// Say what a checkpoint directory or a model file holds, and whether it is sound.
    Inspect {
        /// A checkpoint directory or a model file.
        path: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve(&args),
        Command::Quickstart(args) => quickstart::run(&args),
        Command::QuickstartTrainer(args) => quickstart::train(&args),
        Command::Inspect { path } => inspect(&path),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pserver: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &ServeArgs) -> Result<()> {
    let environment: Vec<(String, String)> = std::env::vars().collect();
    if args.print_config {
        print!("{}", Settings::print(args, &environment)?);
        return Ok(());
    }
    let settings = Settings::load(args, &environment)?;
    log_to_stderr(&settings);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("waiting for signals")?;
    }
    if args.until_stdin_closes {
        let stop = Arc::clone(&stop);
        quickstart::lifeline::watch(move || stop.store(true, Ordering::Release)).context("watching standard input")?;
    }
    let ready_fd = settings.ready_fd;
    let server = Server::start(settings)?;
    announce(&server, ready_fd)?;
    while !stop.load(Ordering::Acquire) {
        if server.has_failed() {
            server.stop()?;
            bail!("the server has failed");
        }
        // A signal sets a flag and nothing else, so the flag is looked at.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(server.stop()?)
}

/// Says where the server is, to whoever started it.
fn announce(server: &Server, ready_fd: Option<i32>) -> Result<()> {
    let line = format!("ready {}\n", server.address());
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).context("writing to standard output")?;
    if let Some(number) = ready_fd {
        // SAFETY: whoever started this process opened the descriptor for it and named it; nothing else here
        // uses it, and it is closed when the file goes out of scope.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        std::fs::File::from(descriptor)
            .write_all(line.as_bytes())
            .with_context(|| format!("writing to descriptor {number} of --ready-fd"))?;
    }
    Ok(())
}

fn log_to_stderr(settings: &Settings) {
    let level = format!("{:?}", settings.log_level).to_lowercase();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .with_ansi(false);
    match settings.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

fn inspect(path: &std::path::Path) -> Result<()> {
    let absolute = path.canonicalize().with_context(|| format!("{}", path.display()))?;
    let (root, name) = match absolute.parent() {
        Some(parent) if absolute.is_file() => (parent, absolute.file_name().and_then(|name| name.to_str())),
        _ => (absolute.as_path(), Some(".")),
    };
    let name = name.with_context(|| format!("{}: not a name in UTF-8", path.display()))?;
    let storage = Directory::open(root)?;
    let report = pserver_core::checkpoint::inspect(&storage, name)?;
    print!("{report}");
    if !report.is_sound() {
        bail!("{}: not sound", path.display());
    }
    Ok(())
}
