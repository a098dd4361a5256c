//! The parameter server's own processes, put together as its program and its library put them together.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use pserver_client::environment::{Environment, find};
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice, View, setting_file};
use pserver_core::config::OptimizerSettings;
use pserver_core::memory::Buffer;
use pserver_node::Server;
use pserver_node::settings::{ServeArgs, Settings};

use crate::baseline::turns::Barrier;
use crate::child::{self, Verbs};
use crate::counters;
use crate::job::{BenchJob, Buffers, ModeName, Poll, RuleName, TransportName, word};
use crate::report::announce;
use crate::sizes::length;
use crate::trainer::{Exchange, Runner};

/// The command line of server `index`, as `pserver serve` reads it. With an address it is on a host of its own.
pub(crate) fn server_arguments(
    job: &BenchJob,
    index: u16,
    coordinator: Option<&str>,
    address: Option<Ipv4Addr>,
) -> Vec<String> {
    let mut all = vec![
        ("--index", index.to_string()),
        ("--servers", job.servers.to_string()),
        ("--shards", job.shards.to_string()),
        ("--trainers", job.trainers.to_string()),
        ("--chunk-bytes", job.chunk_bytes.to_string()),
        ("--mode", word(job.mode)),
        ("--merge", "sum".to_owned()),
        ("--optimizer", job.optimizer().to_owned()),
        ("--checks", word(job.checks)),
        ("--rdma-device", job.rdma_device.clone()),
        ("--bind", bind(job.transport, index, address)),
        ("--log-level", "warn".to_owned()),
    ];
    if job.mode == ModeName::Bounded {
        all.push(("--staleness", job.staleness.to_string()));
    }
    if has_option("poll") {
        all.push(("--poll", word(job.poll)));
    } else if job.poll != Poll::Block {
        announce(&format!(
            "the servers of this build cannot be told how to wait; only the baseline ones wait {}",
            word(job.poll)
        ));
    }
    all.extend(coordinator.map(|address| ("--coordinator", address.to_owned())));
    let mut all: Vec<(String, String)> = all.into_iter().map(|(option, value)| (option.to_owned(), value)).collect();
    // A setting that is given later replaces the earlier one, as `--beside` does.
    for (name, value) in job.serve.iter().filter_map(|setting| setting.split_once('=')) {
        let option = format!("--{}", name.replace('_', "-"));
        all.retain(|(earlier, _)| *earlier != option);
        all.push((option, value.to_owned()));
    }
    let insecure = address.map(|_| "--insecure=true".to_owned());
    all.into_iter().flat_map(|(option, value)| [option, value]).chain(insecure).collect()
}

/// Where server `index` listens: on a free port, or in a process under its own name.
fn bind(transport: TransportName, index: u16, address: Option<Ipv4Addr>) -> String {
    let address = address.unwrap_or(Ipv4Addr::LOCALHOST);
    let is_within = transport == TransportName::Loopback;
    at(transport, &if is_within { format!("server-{index}:1") } else { format!("{address}:0") })
}

/// An address, reached by a transport.
pub(crate) fn at(transport: TransportName, address: &str) -> String {
    let (_, place) = address.split_once("://").unwrap_or(("", address));
    format!("{}://{place}", word(transport))
}

/// Whether `pserver serve` has an option.
fn has_option(name: &str) -> bool {
    ServeArgs::augment_args(clap::Command::new("serve")).get_arguments().any(|one| one.get_long() == Some(name))
}

/// The server's process.
pub(crate) fn serve(args: &ServeArgs) -> Result<()> {
    let settings = Settings::load(args, &[])?;
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .init();
    let server = Server::start(settings)?;
    child::serve_usage(&server.address().to_string())?;
    // The parent is gone, and with it everybody who could use what this server holds.
    std::process::exit(0);
}

/// A trainer's process.
pub(crate) fn train(job: &BenchJob, coordinator: &str, trainer: u32, barrier: Barrier) -> Result<()> {
    counters::listen();
    let mut exchange = ClientTrainer::new(Client::new(options(job, coordinator, trainer)?)?, job)?;
    Runner::new(&mut exchange, job, trainer, barrier)?.serve()
}

/// A trainer's options, found as the C library finds them.
pub(crate) fn options(job: &BenchJob, coordinator: &str, trainer: u32) -> Result<ClientOptions> {
    let variable = |name: &str| match name {
        "PSERVER_POLL" => Some(word(job.poll)),
        "PSERVER_CHECKS" => Some(word(job.checks)),
        "PSERVER_RDMA_DEVICE" => Some(job.rdma_device.clone()),
        // Both ends have the token, and encrypt, or neither.
        "PSERVER_TOKEN_FILE" => job.token_file.clone().or_else(|| given(job, "token_file")),
        "PSERVER_ENCRYPT" => given(job, "encrypt"),
        _ => None,
    };
    let surroundings = Environment { variable: &variable, file: &setting_file::open };
    Ok(find(&format!("coordinator={coordinator} trainer={trainer}"), &surroundings)?.options)
}

/// The value that a job's servers are given for a setting.
fn given(job: &BenchJob, name: &str) -> Option<String> {
    let mut settings = job.serve.iter().rev().filter_map(|setting| setting.split_once('='));
    settings.find(|(one, _)| *one == name).map(|(_, value)| value.to_owned())
}

/// A trainer's end, through the library.
pub(crate) struct ClientTrainer {
    client: Client,
    job: BenchJob,
    names: Vec<String>,
    /// Each parameter's place in the gradient and in the value.
    places: Vec<(Range<usize>, Range<usize>)>,
    gradient: GradientMemory,
    value: Vec<u8>,
    /// The last round's value where the servers wrote it.
    view: Option<View>,
}

/// Where gradients are written.
enum GradientMemory {
    Ordinary(Vec<u8>),
    Registered(Buffer),
}

impl GradientMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Ordinary(bytes) => bytes,
            Self::Registered(buffer) => buffer,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Ordinary(bytes) => bytes,
            Self::Registered(buffer) => buffer,
        }
    }
}

impl ClientTrainer {
    /// A trainer whose job is there when this returns.
    pub(crate) fn new(client: Client, job: &BenchJob) -> Result<Self> {
        let (gradient_bytes, value_bytes) = (length(job.dtype.gradient().bytes()), length(job.dtype.value().bytes()));
        let scaled = |cut: &Range<usize>, by: usize| cut.start * by..cut.end * by;
        let cuts = job.cuts();
        let places = cuts.iter().map(|cut| (scaled(cut, gradient_bytes), scaled(cut, value_bytes))).collect();
        let names = (0..cuts.len()).map(|index| format!("layer{index}/weight")).collect();
        let bytes = length(job.gradient_bytes());
        let gradient = match job.buffers {
            Buffers::Ordinary | Buffers::Own => GradientMemory::Ordinary(vec![0; bytes]),
            Buffers::Registered => GradientMemory::Registered(client.buffer(bytes)?),
        };
        let value = vec![0; length(job.bytes)];
        if job.buffers == Buffers::Own {
            // Both stay as long as the client.
            for memory in [gradient.bytes(), &value] {
                client.register(memory.as_ptr().expose_provenance(), memory.len(), None)?;
            }
        }
        let trainer = Self { client, job: job.clone(), names, places, gradient, value, view: None };
        trainer.initialise()?;
        Ok(trainer)
    }

    /// Parameters of zeros, from whichever trainer is chosen.
    fn initialise(&self) -> Result<()> {
        let settings = OptimizerSettings::from_text(self.job.optimizer())?;
        if !self.client.begin_init(&OptimizerSettings::default())? {
            let facts = self.client.describe(&self.names[0])?;
            let expected = self.places[0].1.len();
            ensure!(facts.bytes == u64::try_from(expected)?, "the job there has other parameters than this run");
            return Ok(());
        }
        for (name, (_, place)) in self.names.iter().zip(&self.places) {
            let zeros = &self.value[place.clone()];
            self.client.init_param(name, self.job.dtype.value(), &[], zeros, &settings)?;
        }
        Ok(self.client.finish_init()?)
    }
}

impl Exchange for ClientTrainer {
    fn verbs(&self) -> Verbs {
        let verbs = self.client.verbs();
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let (copies, registrations) = (read(&verbs.copied_bytes), read(&verbs.registrations));
        Verbs { copies, registrations, connections: read(&verbs.connections) }
    }

    fn gradient(&mut self) -> &mut [u8] {
        self.gradient.bytes_mut()
    }

    fn round(&mut self, begin: &mut dyn FnMut() -> Instant) -> Result<Duration> {
        let element_type = self.job.dtype.gradient();
        let given: Vec<_> = self
            .names
            .iter()
            .zip(&self.places)
            .map(|(name, (place, _))| GradientSlice {
                name,
                element_type,
                content: &self.gradient.bytes()[place.clone()],
            })
            .collect();
        if self.job.buffers == Buffers::Registered {
            let start = begin();
            // The view of the round before is given back here and not earlier: that is part of a round.
            self.view.take().map_or(Ok(()), View::release)?;
            self.view = Some(self.client.push_pull_view_as(&given, None, &vec![self.job.half(); given.len()])?);
            return Ok(start.elapsed());
        }
        let mut wanted = Vec::with_capacity(self.names.len());
        let (mut rest, half) = (self.value.as_mut_slice(), self.job.half());
        for (name, (_, place)) in self.names.iter().zip(&self.places) {
            let (content, after) = rest.split_at_mut(if half.is_some() { place.len() / 2 } else { place.len() });
            wanted.push(DestinationSlice { name, content, half });
            rest = after;
        }
        let start = begin();
        if self.job.rule == RuleName::None {
            self.client.set(&given)?;
            self.client.pull(&mut wanted)?;
        } else {
            self.client.push_pull(&given, None, &mut wanted)?;
        }
        Ok(start.elapsed())
    }

    fn value(&mut self) -> &[u8] {
        let view = self.view.iter().flat_map(|view| (0..view.len()).flat_map(|index| view.pieces(index)));
        let mut rest = self.value.as_mut_slice();
        for piece in view {
            let (place, after) = rest.split_at_mut(piece.len());
            place.copy_from_slice(piece);
            rest = after;
        }
        &self.value[..length(self.job.value_bytes())]
    }

    fn settle(&mut self) -> Result<()> {
        ensure!(self.job.mode != ModeName::Sync, "only without rounds there is something to settle");
        let (mut rest, half) = (self.value.as_mut_slice(), self.job.half());
        let mut wanted = Vec::with_capacity(self.names.len());
        for (name, (_, place)) in self.names.iter().zip(&self.places) {
            let (content, after) = rest.split_at_mut(if half.is_some() { place.len() / 2 } else { place.len() });
            wanted.push(DestinationSlice { name, content, half });
            rest = after;
        }
        self.client.pull(&mut wanted).context("fetching what all rounds came to")
    }
}
