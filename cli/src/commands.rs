//! The `pserver` program: a server, the quickstart, programs divided, trained and run, and a look at what is on disk.

use std::ffi::OsString;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{CommandFactory, Parser, Subcommand};
use pserver_client::console::OutputError;
use pserver_client::{console, environment};
use pserver_node::Server;
use pserver_node::progress::{ProgressUnit, TerminalProgress};
use pserver_node::settings::{ServeArgs, Settings};
use pserver_processes::{parent_death, ready};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::logging::Log;
use crate::notification::{self, ManagedWork};
use crate::{
    descriptors, env, import_paddle, inspect, launch, needs, own_program, pages, predict, program_file, quickstart,
    top, train, transpile,
};

#[cfg(test)]
mod tests;

/// How often a server is asked whether it has failed. Signals wake it up at once.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// A high-performance parameter server.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a server until SIGTERM, SIGINT or SIGHUP; then drain, take a last checkpoint and stop.
    Serve(Box<ServeArgs>),
    /// Start a whole job: servers, and trainers that run a command, on this machine, on hosts, or within an allocation.
    /// When one fails all end, and the exit status is that of the first that failed.
    Launch(Box<launch::LaunchArgs>),
    /// Run parts of a job for a launcher.
    #[command(hide = true)]
    LaunchAgent,
    /// Become a trainer's program.
    #[command(hide = true)]
    LaunchExec(launch::LaunchExecArgs),
    /// Print the rank, the number of trainers and the address of server 0 that a trainer finds here, and from where:
    /// options, variables of launchers, file or default.
    Env(env::EnvArgs),
    /// Train a small network on handwritten digits through real servers, all on this machine.
    Quickstart(quickstart::Args),
    /// One trainer of the quickstart.
    #[command(hide = true)]
    QuickstartTrainer(quickstart::trainer::DigitTrainerArgs),
    /// Divide a program into parts for trainers and servers, and print or draw the parts.
    Transpile(Box<transpile::Args>),
    /// Print a training program of PaddlePaddle 2 (main and startup program) as a program, and to standard error what
    /// was mapped, dropped or chosen.
    ImportPaddle(import_paddle::ImportPaddleArgs),
    /// Convert a program between the text form and protobuf (.pb).
    Convert(program_file::ConvertArgs),
    /// Train a program on data in files, with servers and trainers on this machine or as a trainer of a running job.
    Train(Box<train::Args>),
    /// Show what a running job does: its trainers, servers, shards and their events.
    Top(top::TopArgs),
    /// Compute variables of a program from saved parameters and data.
    Predict(Box<predict::Args>),
    /// Print the memory, disk and descriptors that each server needs, from sizes or from a checkpoint directory.
    Needs(needs::NeedsArgs),
    /// Print whether a checkpoint directory or a model file is sound, and its contents. The first line is the verdict,
    /// with the reaction of a server, the reason and the remedy; the exit status is 0 for sound, 1 where a server
    /// starts with warnings, 2 where it refuses, 3 where nothing can be inspected.
    Inspect(inspect::InspectArgs),
    /// Write manual pages and completions for shells to a folder.
    #[command(hide = true)]
    Pages(pages::PagesArgs),
}

/// Runs the program with the arguments of a command line, its own name first. `program` is what it starts as processes
/// of its own, where that is not the executable of this process. Returns the exit status.
pub fn run(args: impl IntoIterator<Item = OsString>, program: Option<PathBuf>) -> u8 {
    if let Some(program) = program {
        own_program::set(program);
    }
    // A file that would grow beyond the limit of file sizes (ulimit -f) fails as on a full disk, in place of ending
    // this process. A trainer's program, which it may become, has the signal as before. Where no handler can be had, it
    // is the system's.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Standard output may be closed: then nobody reads the text.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let done = match cli.command {
        Command::Serve(args) => serve(&args),
        Command::Launch(args) => return ended(launch::run(&args)),
        Command::LaunchAgent => launch::run_agent(),
        Command::LaunchExec(args) => return ended(launch::run_part(&args)),
        Command::Env(args) => env::run(&args),
        Command::Quickstart(args) => quickstart::run(&args),
        Command::QuickstartTrainer(args) => quickstart::trainer::run(&args),
        Command::Transpile(args) => transpile::run(&args),
        Command::ImportPaddle(args) => import_paddle::run(&args),
        Command::Convert(args) => program_file::convert(&args),
        Command::Train(args) => train::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Pages(args) => pages::run(&args, Cli::command()),
        Command::Needs(args) => needs::run(&args),
        Command::Inspect(args) => return inspect::run(&args),
    };
    ended(done.map(|()| 0))
}

fn ended(done: Result<u8>) -> u8 {
    done.unwrap_or_else(|error| {
        if !error.downcast_ref::<OutputError>().is_some_and(OutputError::is_closed) {
            console::remark(format_args!("pserver: {error:#}"));
        }
        1
    })
}

fn serve(args: &ServeArgs) -> Result<()> {
    let environment = environment::of_process();
    let settings = Settings::load(args, &environment)?;
    let warnings = settings.warnings(&environment);
    if args.print_config {
        warnings.iter().for_each(|warning| console::remark(format_args!("pserver: warning: {warning}")));
        return Ok(console::print(Settings::print(args, &environment)?)?);
    }
    descriptors::raise();
    let few_descriptors = descriptors::check(&settings)?;
    let log = Log::start(&settings);
    warnings.iter().chain(&few_descriptors).for_each(|warning| tracing::warn!("{warning}"));
    let mut asked = StopRequests::listen(args.until_stdin_closes)?;
    let ready_fd = settings.output.ready_fd;
    let meter = Arc::default();
    let restoring = TerminalProgress::start("restoring", ProgressUnit::Bytes, &meter);
    let managed = ManagedWork::start("restoring", &meter);
    let server = Server::start_metered(settings, &meter);
    drop((restoring, managed));
    let server = server?;
    asked.starting.store(false, Ordering::Release);
    announce(&server, ready_fd)?;
    let status = format!("serving at {}", server.address());
    notification::tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    while !asked.wait(LOOK_AGAIN)? {
        log.report(false);
        if server.has_failed() {
            server.stop()?;
            bail!("the server has failed");
        }
    }
    notification::tell(&[NotifyState::Stopping]);
    let managed = ManagedWork::start("saving", &meter);
    let saving = TerminalProgress::start("saving", ProgressUnit::Bytes, &meter);
    let stopped = server.stop();
    drop((saving, managed));
    log.report(true);
    Ok(stopped?)
}

/// Stop requests: SIGTERM, SIGINT, SIGHUP (a closed terminal), and with `--until-stdin-closes` the parent's death.
struct StopRequests {
    /// Receives a byte when the server is to stop.
    stop: UnixStream,
    /// While the server starts there is nothing to drain, and it may wait long for server 0: then it ends at once.
    starting: Arc<AtomicBool>,
}

impl StopRequests {
    fn listen(until_stdin_closes: bool) -> Result<Self> {
        let (stop, asks) = UnixStream::pair().context("a socket for signals")?;
        let starting = Arc::new(AtomicBool::new(true));
        let hangup = Some(SIGHUP).filter(|_| !ignores_hangup());
        for signal in [SIGTERM, SIGINT].into_iter().chain(hangup) {
            let asks = asks.try_clone().context("a socket for signals")?;
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&starting))
                .and_then(|_| signal_hook::low_level::pipe::register(signal, asks))
                .context("waiting for signals")?;
        }
        if until_stdin_closes {
            let starting = Arc::clone(&starting);
            let closed = move || {
                if starting.load(Ordering::Acquire) {
                    std::process::exit(0);
                }
                // The other end is open for as long as this process serves.
                let _ = (&asks).write_all(b"x");
            };
            parent_death::watch(closed).context("watching standard input")?;
        }
        Ok(Self { stop, starting })
    }

    /// Waits at most so long; whether the server is to stop.
    fn wait(&mut self, limit: Duration) -> Result<bool> {
        self.stop.set_read_timeout(Some(limit)).context("waiting for signals")?;
        match self.stop.read(&mut [0]) {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error).context("waiting for signals"),
        }
    }
}

/// Whether this process was started with SIGHUP ignored, as by `nohup`.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let signals = ignored.and_then(|signals| u64::from_str_radix(signals.trim(), 16).ok());
    signals.is_some_and(|signals| signals & (1 << (SIGHUP - 1)) != 0)
}

/// Says where the server is, to whoever started it.
fn announce(server: &Server, ready_fd: Option<i32>) -> Result<()> {
    let line = ready::line(server.address());
    console::print(&line)?;
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
