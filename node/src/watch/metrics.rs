//! The series of `/metrics`, in the text format 0.0.4 of Prometheus.

use std::fmt::Write;

use pserver_core::server::TrainerState;

use super::status::{Durations, JobStatus, ServerStatus, ShardStatusEntry};

/// A series: its name, kind and meaning.
#[derive(Clone, Copy, Debug)]
pub struct Series {
    /// Its name, which ends with its unit.
    pub name: &'static str,
    /// Its kind.
    pub kind: SeriesKind,
    /// Its meaning.
    pub help: &'static str,
}

/// Kind of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesKind {
    /// A count since the start of the server.
    Counter,
    /// A value that rises and falls.
    Gauge,
    /// Counts by size, their sum and their number.
    Histogram,
}

use SeriesKind::{Counter, Gauge, Histogram};

const fn series(name: &'static str, kind: SeriesKind, help: &'static str) -> Series {
    Series { name, kind, help }
}

/// Every series, in the order of `/metrics`. Those of shards have the label `shard`.
pub const SERIES: [Series; 36] = [
    series("pserver_build_info", Gauge, "Always 1; the label version is that of the program, mode that of the job."),
    series("pserver_ready", Gauge, "Whether the server serves: 0 while it recovers or stops."),
    series("pserver_start_time_seconds", Gauge, "Start of the server, since 1970."),
    series("pserver_resident_memory_bytes", Gauge, "Resident memory of the server."),
    series("pserver_job_servers", Gauge, "Servers that the job has."),
    series("pserver_job_trainers", Gauge, "Trainers that the job has."),
    series("pserver_job_generation", Gauge, "Committed generation; 0 before initialisation. Server 0 alone knows it."),
    series("pserver_servers_connected", Gauge, "Servers that are connected with server 0, itself among them."),
    series("pserver_server_silent_seconds", Gauge, "Seconds since server 0 has heard of a connected server."),
    series("pserver_trainers", Gauge, "Trainers by state: absent, connected, lost, departed. Of server 0 alone."),
    series(
        "pserver_trainer_wait_seconds",
        Gauge,
        "For how long a round has waited for the trainer. Of server 0 alone.",
    ),
    series("pserver_rounds_total", Counter, "Completed rounds; updates of the most updated chunk in other modes."),
    series("pserver_updates_total", Counter, "Updates of chunks."),
    series("pserver_gradients_total", Counter, "Received gradients of chunks."),
    series("pserver_duplicate_gradients_total", Counter, "Gradients that came again and were not applied again."),
    series("pserver_zeroed_gradients_total", Counter, "Gradients with NaN or infinity that were replaced by zeros."),
    series("pserver_refused_frames_total", Counter, "Refused frames."),
    series("pserver_received_frames_total", Counter, "Received frames, by kind."),
    series("pserver_received_bytes_total", Counter, "Received payload bytes."),
    series("pserver_sent_frames_total", Counter, "Sent frames."),
    series("pserver_sent_bytes_total", Counter, "Sent payload bytes."),
    series("pserver_turn_seconds", Histogram, "Durations of turns with work: received frames, updates, answers."),
    series("pserver_round_seconds", Histogram, "Time from a round's first gradient to its first updated chunk."),
    series("pserver_trainer_late_seconds_total", Counter, "Time from a round's first gradient to that of the trainer."),
    series("pserver_chunks", Gauge, "Chunks that the shard holds."),
    series("pserver_value_bytes", Gauge, "Bytes of the values that the shard holds."),
    series("pserver_memory_bytes", Gauge, "Mapped memory by line of the budget; resident from its first use."),
    series("pserver_waiting_requests", Gauge, "Requests that wait for a version."),
    series("pserver_oldest_wait_seconds", Gauge, "For how long the oldest of these requests has waited."),
    series("pserver_connected_trainers", Gauge, "Trainers that are connected with the shard, by transport."),
    series("pserver_journal_bytes_total", Counter, "Bytes of the journal over its life."),
    series("pserver_checkpoints_total", Counter, "Completed checkpoints."),
    series("pserver_checkpoint_failures_total", Counter, "Failed steps of checkpoints."),
    series("pserver_checkpoint_size_bytes", Gauge, "Bytes of the last checkpoint."),
    series("pserver_checkpoint_duration_seconds", Gauge, "Duration of the last checkpoint."),
    series("pserver_checkpoint_end_time_seconds", Gauge, "End of the last checkpoint, since 1970; 0 before the first."),
];

/// Text of `/metrics`: of this server alone, as each server is scraped.
pub(super) fn encode(job: &JobStatus) -> String {
    let own = job.servers.iter().find(|server| server.index == job.server);
    let Some(status) = own.and_then(|server| server.status.as_ref()) else { return String::new() };
    let mut text = String::with_capacity(16 * 1024);
    for one in SERIES {
        let mut samples = Samples { name: one.name, server: job.server, text: String::new() };
        if one.kind == Histogram {
            status.shards.iter().for_each(|shard| samples.histogram(shard));
        } else {
            samples.of_server(job, status);
            samples.of_job(job);
            status.shards.iter().for_each(|shard| samples.of_shard(shard));
        }
        let kind = match one.kind {
            Counter => "counter",
            Gauge => "gauge",
            Histogram => "histogram",
        };
        if !samples.text.is_empty() {
            // Writing to a text does not fail.
            let _ = write!(text, "# HELP {0} {1}\n# TYPE {0} {kind}\n{2}", one.name, one.help, samples.text);
        }
    }
    text
}

/// The samples of one series.
struct Samples {
    name: &'static str,
    /// The index of this server.
    server: u16,
    text: String,
}

impl Samples {
    fn put(&mut self, labels: &[(&str, &str)], number: f64) {
        self.put_as("", labels, number);
    }

    fn put_as(&mut self, suffix: &str, labels: &[(&str, &str)], number: f64) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        // Writing to a text does not fail.
        let _ = writeln!(self.text, "{}{suffix}{labels} {number}", self.name);
    }

    fn of_server(&mut self, job: &JobStatus, status: &ServerStatus) {
        let number = match self.name {
            "pserver_build_info" => {
                return self.put(&[("version", &status.version), ("mode", &job.mode)], 1.0);
            }
            "pserver_ready" => f64::from(u8::from(status.state == "ready")),
            "pserver_start_time_seconds" => status.start_unix_seconds,
            "pserver_resident_memory_bytes" => real(status.resident_bytes),
            "pserver_job_servers" => f64::from(job.servers_expected),
            "pserver_job_trainers" => f64::from(job.trainers_expected),
            _ => return,
        };
        self.put(&[], number);
    }

    /// The series of server 0 alone: other servers know no epoch.
    fn of_job(&mut self, job: &JobStatus) {
        if job.epoch.is_empty() {
            return;
        }
        match self.name {
            "pserver_job_generation" => self.put(&[], f64::from(job.generation)),
            "pserver_servers_connected" => {
                self.put(&[], real(job.servers.iter().filter(|server| server.is_connected).count() as u64));
            }
            "pserver_server_silent_seconds" => {
                for server in job.servers.iter().filter(|server| server.is_connected) {
                    self.put(&[("server", &server.index.to_string())], server.silent_seconds);
                }
            }
            "pserver_trainers" => {
                let states = [
                    ("absent", TrainerState::Absent),
                    ("connected", TrainerState::Connected),
                    ("lost", TrainerState::Lost),
                    ("departed", TrainerState::Departed),
                ];
                for (word, state) in states {
                    let count = job.trainers.iter().filter(|trainer| trainer.member.state == state).count();
                    self.put(&[("state", word)], real(count as u64));
                }
            }
            "pserver_trainer_wait_seconds" => {
                for trainer in &job.trainers {
                    self.put(&[("trainer", &trainer.member.rank.to_string())], trainer.late_seconds);
                }
            }
            _ => {}
        }
    }

    fn of_shard(&mut self, shard: &ShardStatusEntry) {
        let number = shard.label(self.server);
        let label = ("shard", number.as_str());
        if self.of_parts(shard, label) {
            return;
        }
        let counts = &shard.counts;
        let report = shard.report.as_ref();
        let disk = shard.disk.as_ref();
        let found = match self.name {
            "pserver_rounds_total" => Some(real(counts.rounds)),
            "pserver_updates_total" => Some(real(counts.updates)),
            "pserver_gradients_total" => Some(real(counts.gradients)),
            "pserver_duplicate_gradients_total" => Some(real(counts.duplicate_gradients)),
            "pserver_zeroed_gradients_total" => Some(real(counts.zeroed_gradients)),
            "pserver_refused_frames_total" => Some(real(counts.refused_frames)),
            "pserver_received_bytes_total" => Some(real(counts.received_bytes)),
            "pserver_sent_frames_total" => Some(real(counts.sent_frames)),
            "pserver_sent_bytes_total" => Some(real(counts.sent_bytes)),
            "pserver_chunks" => report.map(|report| real(report.chunks)),
            "pserver_value_bytes" => report.map(|report| real(report.value_bytes)),
            "pserver_waiting_requests" => report.map(|report| real(report.waiting_requests)),
            "pserver_oldest_wait_seconds" => {
                report.map(|report| report.wait.as_ref().map_or(0.0, |wait| real(wait.milliseconds) / 1e3))
            }
            "pserver_journal_bytes_total" => report.map(|report| real(report.journal_position)),
            "pserver_checkpoints_total" => disk.map(|disk| real(disk.checkpoints)),
            "pserver_checkpoint_failures_total" => disk.map(|disk| real(disk.failures)),
            "pserver_checkpoint_size_bytes" => disk.map(|disk| real(disk.last_bytes)),
            "pserver_checkpoint_duration_seconds" => disk.map(|disk| disk.last_duration_seconds),
            "pserver_checkpoint_end_time_seconds" => disk.map(|disk| disk.last_unix_seconds),
            _ => None,
        };
        if let Some(number) = found {
            self.put(&[label], number);
        }
    }

    /// The series with a further label; whether this is one of them.
    fn of_parts(&mut self, shard: &ShardStatusEntry, label: (&str, &str)) -> bool {
        match self.name {
            "pserver_received_frames_total" => {
                for (kind, count) in &shard.counts.received_frames {
                    self.put(&[label, ("kind", kind)], real(*count));
                }
            }
            "pserver_trainer_late_seconds_total" => {
                for (rank, seconds) in shard.late_seconds_total.iter().enumerate() {
                    self.put(&[label, ("trainer", &rank.to_string())], *seconds);
                }
            }
            "pserver_memory_bytes" => {
                for line in shard.report.iter().flat_map(|report| &report.memory) {
                    self.put(&[label, ("reason", &line.reason)], real(line.bytes));
                }
            }
            "pserver_connected_trainers" => {
                let Some(report) = &shard.report else { return true };
                for transport in ["shm", "tcp", "tls", "verbs", "loopback"] {
                    let is_by = |text: &str| text.split(':').next() == Some(transport);
                    let trainers = report.trainers.iter().filter(|one| one.is_connected && is_by(&one.transport));
                    self.put(&[label, ("transport", transport)], real(trainers.count() as u64));
                }
            }
            _ => return false,
        }
        true
    }

    fn histogram(&mut self, shard: &ShardStatusEntry) {
        let times: &Durations = match self.name {
            "pserver_turn_seconds" => &shard.turn_time,
            _ => &shard.round_time,
        };
        let number = shard.label(self.server);
        let label = ("shard", number.as_str());
        let mut sum = 0;
        let bounds = times.bounds_seconds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (count, bound) in times.counts.iter().zip(bounds) {
            sum += count;
            self.put_as("_bucket", &[label, ("le", &bound)], real(sum));
        }
        self.put_as("_sum", &[label], times.sum_seconds);
        self.put_as("_count", &[label], real(sum));
    }
}

/// A number of the text format, which has 53 bits.
#[expect(clippy::cast_precision_loss, reason = "Prometheus keeps every sample as a float")]
fn real(number: u64) -> f64 {
    number as f64
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_cannot_end_its_line() {
        let mut samples = Samples { name: "pserver_x", server: 0, text: String::new() };
        samples.put(&[("reason", "a \"b\\\n# TYPE")], 1.5);
        assert_eq!(samples.text, "pserver_x{reason=\"a \\\"b\\\\\\n# TYPE\"} 1.5\n");
    }

    #[test]
    fn names_follow_the_conventions_of_prometheus() {
        for one in SERIES {
            assert!(one.name.starts_with("pserver_") && one.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
            assert_eq!(one.name.ends_with("_total"), one.kind == Counter, "{}", one.name);
            assert!(one.help.ends_with('.') && !one.help.contains(['\n', '\\']), "{}", one.name);
        }
    }
}
