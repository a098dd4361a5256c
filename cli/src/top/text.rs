//! The status of a job as lines of text, each with a tone.

use pserver_core::server::TrainerState;
use pserver_core::text::escaped;
use pserver_node::{Durations, JobServer, JobStatus, ShardStatusEntry};

/// A trainer is shown as late from here on, in seconds.
const LATE_SECONDS: f64 = 1.0;
/// Events that are shown.
const EVENTS_MAX: usize = 10;

/// How a line stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineTone {
    /// As text.
    Plain,
    /// As the head of a table.
    Head,
    /// As something wrong.
    Alert,
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StatusLine {
    pub(super) text: String,
    pub(super) tone: LineTone,
}

/// The last status of a job, and the one before for rates.
#[derive(Default)]
pub(super) struct StatusView {
    before: Option<JobStatus>,
    now: Option<JobStatus>,
}

impl StatusView {
    pub(super) fn take(&mut self, status: JobStatus) {
        self.before = self.now.replace(status);
    }

    /// All lines, without control characters: hosts and events have texts of other processes.
    pub(super) fn lines(&self) -> Vec<StatusLine> {
        let escape = |line: StatusLine| StatusLine { text: escaped(&line.text).into_owned(), ..line };
        self.status_lines().into_iter().map(escape).collect()
    }

    fn status_lines(&self) -> Vec<StatusLine> {
        let Some(now) = &self.now else { return vec![line("no status yet")] };
        let mut lines = self.summary(now);
        lines.push(line(""));
        lines
            .push(head(format!("{:>4}  {:<10} {:>9} {:>12}  {}", "RANK", "TRAINER", "LATE", "LATE IN ALL", "PROCESS")));
        for trainer in &now.trainers {
            let is_late = LATE_SECONDS <= trainer.late_seconds;
            let late = if is_late { seconds(trainer.late_seconds) } else { "-".to_owned() };
            let member = &trainer.member;
            let state = format!("{:?}", member.state).to_lowercase();
            let ways: Vec<&str> = trainer.transports.iter().filter_map(|way| way.split(':').next()).collect();
            let process = match member.state {
                TrainerState::Absent => String::new(),
                _ => format!("{}, pid {} {}", member.host, member.process, ways.join(" ")),
            };
            let total = seconds(trainer.late_seconds_total);
            let text = format!("{:>4}  {state:<10} {late:>9} {total:>12}  {process}", member.rank);
            lines.push(StatusLine { text, tone: if is_late { LineTone::Alert } else { LineTone::Plain } });
        }
        lines.push(line(""));
        lines.extend(shard_lines(now));
        lines.extend(memory_lines(now));
        lines.extend(event_lines(now));
        lines
    }

    fn summary(&self, now: &JobStatus) -> Vec<StatusLine> {
        let connected = now.trainers.iter().filter(|one| one.member.state == TrainerState::Connected).count();
        let servers = now.servers.iter().filter(|server| server.is_connected && !server.is_silent()).count();
        let mut lines = vec![
            line(format!(
                "pserver: {}, {connected} of {} trainers, {servers} of {} servers",
                now.mode, now.trainers_expected, now.servers_expected
            )),
            line(format!(
                "rounds {} ({} a second), updates {} a second, received {} a second, sent {} a second",
                rounds(now),
                self.rate(rounds).map_or("-".to_owned(), |rate| format!("{rate:.1}")),
                self.rate(|status| sum(status, |shard| shard.counts.updates))
                    .map_or("-".to_owned(), |n| format!("{n:.1}")),
                self.rate(|status| sum(status, |shard| shard.counts.received_bytes)).map_or("-".to_owned(), bytes),
                self.rate(|status| sum(status, |shard| shard.counts.sent_bytes)).map_or("-".to_owned(), bytes),
            )),
        ];
        for trainer in now.trainers.iter().filter(|trainer| LATE_SECONDS <= trainer.late_seconds) {
            let (rank, late) = (trainer.member.rank, seconds(trainer.late_seconds));
            lines.push(alert(format!("trainer {rank} is late by {late}: {}", trainer.late_text)));
        }
        let lost = now.servers.iter().filter(|server| !server.is_connected);
        lines.extend(lost.map(|server| alert(format!("server {} is not connected", server.index))));
        let silent = now.servers.iter().filter(|server| server.is_silent());
        lines.extend(silent.map(|server| {
            let (index, silence) = (server.index, seconds(server.silent_seconds));
            alert(format!("server {index} has been silent for {silence}: calls that need it wait"))
        }));
        lines
    }

    /// The growth of a count, a second; none before the second status, and after a restart.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    fn rate(&self, count: impl Fn(&JobStatus) -> u64) -> Option<f64> {
        let (before, now) = (self.before.as_ref()?, self.now.as_ref()?);
        let seconds = now.unix_seconds - before.unix_seconds;
        let more = count(now).checked_sub(count(before))?;
        (0.0 < seconds).then(|| more as f64 / seconds)
    }
}

fn shards(status: &JobStatus) -> impl Iterator<Item = (&JobServer, &ShardStatusEntry)> {
    let reported = status.servers.iter().filter_map(|server| Some((server, server.status.as_ref()?)));
    reported.flat_map(|(server, status)| status.shards.iter().map(move |shard| (server, shard)))
}

fn sum(status: &JobStatus, count: impl Fn(&ShardStatusEntry) -> u64) -> u64 {
    shards(status).map(|(_, shard)| count(shard)).sum()
}

fn rounds(status: &JobStatus) -> u64 {
    shards(status).map(|(_, shard)| shard.counts.rounds).max().unwrap_or(0)
}

fn shard_lines(status: &JobStatus) -> Vec<StatusLine> {
    let mut lines = vec![head(format!(
        "{:>7} {:<12} {:>10} {:>8} {:>10} {:>8} {:>9} {:>9} {:>10} {:>11}",
        "SHARD", "PHASE", "ROUNDS", "CHUNKS", "VALUES", "WAITING", "ROUND", "TURN", "JOURNAL", "CHECKPOINTS"
    ))];
    for (server, shard) in shards(status) {
        let report = shard.report.as_ref();
        let phase = report.map_or("busy".to_owned(), |report| format!("{:?}", report.phase).to_lowercase());
        lines.push(line(format!(
            "{:>7} {phase:<12} {:>10} {:>8} {:>10} {:>8} {:>9} {:>9} {:>10} {:>11}",
            format!("{}.{}", server.index, shard.label(server.index)),
            shard.counts.rounds,
            report.map_or(0, |report| report.chunks),
            real_bytes(report.map_or(0, |report| report.value_bytes)),
            report.map_or(0, |report| report.waiting_requests),
            mean(&shard.round_time),
            mean(&shard.turn_time),
            real_bytes(report.map_or(0, |report| report.journal_position)),
            shard.disk.as_ref().map_or("-".to_owned(), |disk| disk.checkpoints.to_string()),
        )));
    }
    lines
}

fn memory_lines(status: &JobStatus) -> Vec<StatusLine> {
    let mut mapped = std::collections::BTreeMap::new();
    for line in shards(status).filter_map(|(_, shard)| shard.report.as_ref()).flat_map(|report| &report.memory) {
        *mapped.entry(line.reason.as_str()).or_insert(0) += line.bytes;
    }
    let mut lines = vec![line(""), head("    MAPPED  USE")];
    lines.extend(mapped.into_iter().map(|(reason, count)| line(format!("{:>10}  {reason}", real_bytes(count)))));
    lines
}

fn event_lines(status: &JobStatus) -> Vec<StatusLine> {
    let of = |server: &JobServer| {
        let events = server.status.as_ref().map(|status| status.events.clone()).unwrap_or_default();
        events.into_iter().map(|event| (server.index, event)).collect::<Vec<_>>()
    };
    let mut events: Vec<_> = status.servers.iter().flat_map(of).collect();
    events.sort_by(|one, next| next.1.unix_seconds.total_cmp(&one.1.unix_seconds));
    let mut lines = vec![line(""), head("    AGO  EVENT")];
    for (server, event) in events.into_iter().take(EVENTS_MAX) {
        let ago = seconds((status.unix_seconds - event.unix_seconds).max(0.0));
        let text = format!("{ago:>7}  server {server} {}: {}", event.level, event.text);
        let tone = if event.level == "ERROR" { LineTone::Alert } else { LineTone::Plain };
        lines.push(StatusLine { text: text.replace(char::is_control, " "), tone });
    }
    lines
}

#[expect(clippy::cast_precision_loss, reason = "a mean for people")]
fn mean(times: &Durations) -> String {
    let count: u64 = times.counts.iter().sum();
    if count == 0 { "-".to_owned() } else { seconds(times.sum_seconds / count as f64) }
}

fn line(text: impl Into<String>) -> StatusLine {
    StatusLine { text: text.into().replace(char::is_control, " "), tone: LineTone::Plain }
}

fn head(text: impl Into<String>) -> StatusLine {
    StatusLine { tone: LineTone::Head, ..line(text) }
}

fn alert(text: impl Into<String>) -> StatusLine {
    StatusLine { tone: LineTone::Alert, ..line(text) }
}

fn seconds(time: f64) -> String {
    match time {
        0.0 => "0 s".to_owned(),
        _ if time < 1e-3 => format!("{:.0} us", time * 1e6),
        _ if time < 1.0 => format!("{:.1} ms", time * 1e3),
        _ if time < 100.0 => format!("{time:.1} s"),
        _ => format!("{:.0} min", time / 60.0),
    }
}

/// A size for people.
#[expect(clippy::cast_precision_loss, reason = "a size for people")]
pub(crate) fn real_bytes(count: u64) -> String {
    bytes(count as f64)
}

fn bytes(count: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut count, mut unit) = (count, 0);
    while 1024.0 <= count && unit + 1 < units.len() {
        (count, unit) = (count / 1024.0, unit + 1);
    }
    format!("{count:.*} {}", usize::from(0 < unit), units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_with_units() {
        let check = |time, text| assert_eq!(seconds(time), text);
        check(0.0, "0 s");
        check(12e-6, "12 us");
        check(0.0123, "12.3 ms");
        check(99.94, "99.9 s");
        check(600.0, "10 min");
        let check = |count, text| assert_eq!(real_bytes(count), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(4096, "4.0 KiB");
        check(3 << 30, "3.0 GiB");
    }
}
