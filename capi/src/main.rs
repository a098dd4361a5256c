//! The `pserver` program: a server, the quickstart, programs divided, and a look at what is on disk.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use paddle_pserver::node::Server;
use paddle_pserver::quickstart;
use paddle_pserver::settings::{LogFormat, ServeArgs, Settings};
use paddle_pserver::transpile;
use pserver_core::checkpoint::storage::Directory;
use tracing_subscriber::EnvFilter;

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
    /// Run a server until SIGTERM or SIGINT; then drain, take a last checkpoint and stop.
    Serve(Box<ServeArgs>),
    /// Train a small network on handwritten digits through real servers, all on this machine.
    Quickstart(Quickstart),
    /// One trainer of the quickstart.
    #[command(hide = true)]
    QuickstartTrainer(quickstart::trainer::TrainerArgs),
    /// One trainer of the quickstart with words.
    #[command(hide = true)]
    QuickstartWordTrainer(quickstart::word_trainer::WordTrainerArgs),
    /// Divide a program into what trainers and servers run, and print or draw the parts.
    Transpile(Box<transpile::Args>),
    /// Say what a checkpoint directory or a model file holds, and whether it is sound.
    Inspect {
        /// A checkpoint directory or a model file.
        path: PathBuf,
    },
}

/// The digits, or another example.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
struct Quickstart {
    #[command(subcommand)]
    example: Option<Example>,
    #[command(flatten)]
    digits: quickstart::Args,
}

#[derive(Subcommand)]
enum Example {
    /// Learn which words of the King James Bible are alike: a program with two tables, over trainers and servers.
    Words(quickstart::WordArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve(&args),
        Command::Quickstart(Quickstart { example: Some(Example::Words(args)), .. }) => quickstart::run_words(&args),
        Command::Quickstart(Quickstart { example: None, digits }) => quickstart::run(&digits),
        Command::QuickstartTrainer(args) => quickstart::trainer::run(&args),
        Command::QuickstartWordTrainer(args) => quickstart::word_trainer::run(&args),
        Command::Transpile(args) => transpile::run(&args),
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
    let mut asked = Asked::listen(args.until_stdin_closes)?;
    let ready_fd = settings.ready_fd;
    let server = Server::start(settings)?;
    asked.starting.store(false, Ordering::Release);
    announce(&server, ready_fd)?;
    while !asked.wait(LOOK_AGAIN)? {
        if server.has_failed() {
            server.stop()?;
            bail!("the server has failed");
        }
    }
    Ok(server.stop()?)
}

/// What signals, and with `--until-stdin-closes` the parent's end, ask of a server.
struct Asked {
    /// A byte comes when the server is to stop.
    stop: UnixStream,
    /// While the server starts there is nothing to drain, and it may wait long for server 0: then it ends at once.
    starting: Arc<AtomicBool>,
}

impl Asked {
    fn listen(until_stdin_closes: bool) -> Result<Self> {
        let (stop, asks) = UnixStream::pair().context("a socket for signals")?;
        let starting = Arc::new(AtomicBool::new(true));
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
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
            quickstart::lifeline::watch(closed).context("watching standard input")?;
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
    let builder =
        tracing_subscriber::fmt().with_env_filter(EnvFilter::new(level)).with_writer(std::io::stderr).with_ansi(false);
    match settings.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

fn inspect(path: &Path) -> Result<()> {
    let absolute = path.canonicalize().with_context(|| path.display().to_string())?;
    if absolute.is_file() {
        let parent = absolute.parent().context("a file lies in a folder")?;
        let name = absolute.file_name().and_then(|name| name.to_str());
        let name = name.with_context(|| format!("{}: not a name in UTF-8", path.display()))?;
        return inspect_one(parent, name, path);
    }
    let shards = shard_folders(&absolute)?;
    if shards.is_empty() {
        return inspect_one(&absolute, ".", path);
    }
    // Every shard is reported on, also after one that is not sound.
    let mut outcome = Ok(());
    for shard in shards {
        println!("{}:", shard.display());
        outcome = outcome.and(inspect_one(&shard, ".", &shard));
    }
    outcome
}

fn inspect_one(root: &Path, name: &str, shown: &Path) -> Result<()> {
    let storage = Directory::open(root)?;
    let report = pserver_core::checkpoint::inspect(&storage, name)
        .with_context(|| format!("{}: cannot be inspected", shown.display()))?;
    print!("{report}");
    if !report.is_sound() {
        bail!("{}: not sound", shown.display());
    }
    Ok(())
}

/// The folders of all shards below a job's or a server's checkpoint directory, in order; none when it is neither.
fn shard_folders(path: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| path.display().to_string())? {
        let entry = entry.with_context(|| path.display().to_string())?;
        match entry.file_name().to_str() {
            Some(name) if name.starts_with("server-") => found.extend(shard_folders(&entry.path())?),
            Some(name) if name.starts_with("shard-") => found.push(entry.path()),
            _ => {}
        }
    }
    found.sort();
    Ok(found)
}
