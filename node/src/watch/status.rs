//! Status of a job and of its servers: the JSON of `/status`, which `node/status.schema.json` describes.

use std::collections::BTreeMap;
use std::time::Duration;

use pserver_core::config::Mode;
use pserver_core::ids::ShardId;
use pserver_core::metrics::{BUCKETS, Histogram};
use pserver_core::server::{CoordinatorReport, ShardCounters, ShardReport, TrainerReport};
use serde::{Deserialize, Serialize};

use super::{Watch, WatchedSession};
use crate::events::{LogEvent, recent, unix_seconds};
use crate::settings::shown_mode;
use crate::telemetry::{DiskReport, KINDS, SessionCounters, SessionReport};

/// The longest status of another server that is read.
const STATUS_BYTES_MAX: usize = 512 * 1024;

/// A server that server 0 has not heard of for so long is silent.
const SILENT_SECONDS: f64 = 5.0;

/// Status of a job, as one of its servers knows it: server 0 knows all of it, another server itself alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The server that answers.
    pub server: u16,
    /// The time of the answer, since 1970.
    pub unix_seconds: f64,
    /// The job's epoch in hexadecimal; empty where the server does not know it.
    pub epoch: String,
    /// The committed generation; zero before initialisation.
    pub generation: u32,
    /// How trainers share a parameter.
    pub mode: String,
    /// Servers in the job.
    pub servers_expected: u16,
    /// Trainers in the job.
    pub trainers_expected: u32,
    /// Its servers, by index.
    pub servers: Vec<JobServer>,
    /// Its trainers, by rank; none on servers other than 0.
    pub trainers: Vec<JobTrainer>,
}

/// A server of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobServer {
    /// Its index.
    pub index: u16,
    /// Its address; empty before it has registered.
    pub address: String,
    /// Whether it is connected with server 0.
    pub is_connected: bool,
    /// Seconds since server 0 has heard of it; about one where it is well.
    #[serde(default)]
    pub silent_seconds: f64,
    /// Its last status, if it has reported one.
    pub status: Option<ServerStatus>,
}

/// A trainer of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobTrainer {
    /// Its rank and process.
    #[serde(flatten)]
    pub member: TrainerReport,
    /// For how long a round has waited for this trainer; zero when none does.
    pub late_seconds: f64,
    /// The round that waits; empty when none does.
    pub late_text: String,
    /// Seconds that its gradients came after the first of their round, over all rounds.
    pub late_seconds_total: f64,
    /// The transports of its connections, each with its reason.
    pub transports: Vec<String>,
}

/// Status of one server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Version of its program.
    pub version: String,
    /// Number of its process.
    pub process: u32,
    /// `recovering`, `ready` or `stopping`.
    pub state: String,
    /// Its start, since 1970.
    pub start_unix_seconds: f64,
    /// Memory that is resident.
    pub resident_bytes: u64,
    /// Its shards.
    pub shards: Vec<ShardStatusEntry>,
    /// The last lines of its log, the newest last.
    pub events: Vec<LogEvent>,
}

/// Status of a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardStatusEntry {
    /// The server that it was placed at first.
    pub home: u16,
    /// Its index there.
    pub index: u16,
    /// Its counters.
    pub counts: ShardCounts,
    /// Times from the first gradient of a round to its update.
    pub round_time: Durations,
    /// Durations of the turns of its thread.
    pub turn_time: Durations,
    /// By rank, seconds after the first gradient of each round.
    pub late_seconds_total: Vec<f64>,
    /// Its contents and waits; none when it has not answered in time.
    pub report: Option<ShardReport>,
    /// Its checkpoints; none without a checkpoint directory.
    pub disk: Option<DiskReport>,
}

/// Counters of a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardCounts {
    /// Completed rounds.
    pub rounds: u64,
    /// Updates of chunks.
    pub updates: u64,
    /// Received gradients of chunks.
    pub gradients: u64,
    /// Gradients that came again.
    pub duplicate_gradients: u64,
    /// Gradients that were replaced by zeros.
    pub zeroed_gradients: u64,
    /// Refused frames.
    pub refused_frames: u64,
    /// By kind of frame.
    pub received_frames: BTreeMap<String, u64>,
    /// Received payload bytes.
    pub received_bytes: u64,
    /// Sent frames.
    pub sent_frames: u64,
    /// Sent payload bytes.
    pub sent_bytes: u64,
}

/// A histogram.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Durations {
    /// Upper bounds of all buckets but the last, which has none.
    pub bounds_seconds: Vec<f64>,
    /// Counts by bucket, not cumulated.
    pub counts: Vec<u64>,
    /// Sum of all durations.
    pub sum_seconds: f64,
}

impl ShardStatusEntry {
    /// Its name at this server: its index, behind the server that it was placed at first if that is another.
    #[must_use]
    pub fn label(&self, server: u16) -> String {
        if self.home == server { self.index.to_string() } else { format!("{}.{}", self.home, self.index) }
    }
}

impl JobServer {
    /// Whether it is connected and does not answer: its process is stopped, or its host or network hangs.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.is_connected && SILENT_SECONDS <= self.silent_seconds
    }
}

impl Watch {
    /// Collects the status of the job.
    pub(super) fn collect(&self) -> JobStatus {
        let mut shards = Vec::new();
        let mut coordinator = None;
        for (session, report) in self.reports() {
            match (report, &session.shard) {
                (Some(SessionReport::Coordinator(report)), _) => coordinator = Some(report),
                (report, Some((shard, counters))) => shards.push(shard_entry(*shard, &session, counters, report)),
                (_, None) => {}
            }
        }
        let settings = &self.settings;
        let own = JobServer {
            index: settings.index,
            address: self.address.get().cloned().unwrap_or_default(),
            is_connected: true,
            silent_seconds: 0.0,
            status: Some(self.server(shards)),
        };
        // The job in a checkpoint directory, or its initialiser, may have others than the settings.
        let (mode, trainers_expected) = match &coordinator {
            Some(CoordinatorReport { job, .. }) => {
                let mode = Mode::from_numbers(job.mode, job.staleness);
                (mode.unwrap_or(settings.job.mode), job.trainers)
            }
            None => (settings.job.mode, settings.job.trainers),
        };
        let coordinator = coordinator.unwrap_or_default();
        let mut servers: Vec<JobServer> = if coordinator.servers.is_empty() {
            vec![own]
        } else {
            let others = coordinator.servers.iter().zip(0_u16..).map(|(server, index)| JobServer {
                index,
                address: server.address.clone(),
                is_connected: server.is_connected,
                silent_seconds: Duration::from_millis(server.silent_milliseconds).as_secs_f64(),
                status: read(&server.status),
            });
            others.map(|server| if server.index == settings.index { own.clone() } else { server }).collect()
        };
        servers.sort_by_key(|server| server.index);
        JobStatus {
            server: settings.index,
            unix_seconds: unix_seconds(std::time::SystemTime::now()),
            epoch: if coordinator.epoch == 0 { String::new() } else { format!("{:016x}", coordinator.epoch) },
            generation: coordinator.generation,
            mode: shown_mode(mode),
            servers_expected: settings.job.servers,
            trainers_expected,
            trainers: trainers(&coordinator, &servers),
            servers,
        }
    }

    fn server(&self, shards: Vec<ShardStatusEntry>) -> ServerStatus {
        let state = match (self.is_ready(), self.address.get()) {
            (true, _) => "ready",
            (false, None) => "recovering",
            (false, Some(_)) => "stopping",
        };
        ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process: std::process::id(),
            state: state.to_owned(),
            start_unix_seconds: unix_seconds(self.begun),
            resident_bytes: resident_bytes(),
            shards,
            events: recent(),
        }
    }
}

impl Durations {
    fn of(histogram: &Histogram) -> Self {
        Self {
            bounds_seconds: (0..BUCKETS - 1).map(Histogram::bound_seconds).collect(),
            counts: histogram.counts().to_vec(),
            sum_seconds: histogram.sum_seconds(),
        }
    }
}

fn shard_entry(
    shard: ShardId,
    session: &WatchedSession,
    counters: &ShardCounters,
    report: Option<SessionReport>,
) -> ShardStatusEntry {
    let frames: &SessionCounters = session.control.counters();
    let (report, disk) = match report {
        Some(SessionReport::Shard(report, disk)) => (Some(report), disk),
        _ => (None, None),
    };
    let received = KINDS.iter().zip(&frames.received_frames);
    ShardStatusEntry {
        home: shard.server.0,
        index: shard.shard.0,
        counts: ShardCounts {
            rounds: counters.rounds.get(),
            updates: counters.updates.get(),
            gradients: counters.gradients.get(),
            duplicate_gradients: counters.duplicates.get(),
            zeroed_gradients: counters.zeroed.get(),
            refused_frames: counters.refused.get(),
            received_frames: received.map(|((name, _), count)| ((*name).to_owned(), count.get())).collect(),
            received_bytes: frames.received_bytes.get(),
            sent_frames: frames.sent_frames.get(),
            sent_bytes: frames.sent_bytes.get(),
        },
        round_time: Durations::of(&counters.round_time),
        turn_time: Durations::of(&frames.turns),
        late_seconds_total: counters.late_seconds().collect(),
        report,
        disk,
    }
}

/// The trainers of a job: the coordinator's members, with what the shards of all servers say about each.
fn trainers(coordinator: &CoordinatorReport, servers: &[JobServer]) -> Vec<JobTrainer> {
    let shards = || servers.iter().filter_map(|server| server.status.as_ref()).flat_map(|status| &status.shards);
    let of = |member: &TrainerReport| {
        let rank = member.rank;
        let reports = || shards().filter_map(|shard| shard.report.as_ref());
        let waits = reports().filter_map(|report| report.wait.as_ref()).filter(|wait| wait.trainers.contains(&rank));
        let worst = waits.max_by_key(|wait| wait.milliseconds);
        let late = shards().filter_map(|shard| shard.late_seconds_total.get(rank as usize));
        let known = reports().flat_map(|report| &report.trainers).filter(|trainer| trainer.rank == rank);
        let mut transports: Vec<String> = known.map(|trainer| trainer.transport.clone()).collect();
        transports.sort_unstable();
        transports.dedup();
        JobTrainer {
            member: member.clone(),
            late_seconds: worst.map_or(0.0, |wait| std::time::Duration::from_millis(wait.milliseconds).as_secs_f64()),
            late_text: worst.map(|wait| wait.text.clone()).unwrap_or_default(),
            // The shards of a round see the same delay; the largest sum stands for all.
            late_seconds_total: late.copied().fold(0.0, f64::max),
            transports,
        }
    };
    coordinator.trainers.iter().map(of).collect()
}

/// The status that another server sent. One that cannot be read is none: it may be of another version.
fn read(bytes: &[u8]) -> Option<ServerStatus> {
    (bytes.len() <= STATUS_BYTES_MAX).then(|| serde_json::from_slice(bytes).ok()).flatten()
}

/// The process's resident memory; zero where the system does not say it.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}
