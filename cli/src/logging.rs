//! Rate-limited log on standard error: peers can cause lines, and no peer may fill a disk.
//!
//! A kind of line is its place in the sources. In each window a bounded number of lines of a kind is written; the rest
//! is counted, and [`Log::report`] writes the count. The levels `debug` and `trace` are not limited.
//!
//! Not here: which level and format (`settings`).

use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::{Context, Filter, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use pserver_core::text::escaped;
use pserver_node::settings::{LogFormat, LogLevel, Settings};
use pserver_node::{events, progress};

/// Lines of one kind in [`WINDOW`]: a job of a hundred trainers joins without a gap, and a hundred lines are a page.
const LINES_MAX: u32 = 100;
/// For so long lines are counted together.
const WINDOW: Duration = Duration::from_secs(10);
/// So much of a line stands for its kind in a report.
const SAMPLE_CHARACTERS: usize = 80;

/// The program's log. Clones are the same one.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<BTreeMap<Place, LineKind>>>);

/// A place in the sources.
type Place = (&'static str, u32);

/// The lines from one place.
struct LineKind {
    /// Its first line, shortened.
    sample: String,
    level: Level,
    /// Since when lines are counted.
    since: Instant,
    written: u32,
    left_out: u64,
}

/// Lines of one kind that were not written.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    sample: String,
    is_info: bool,
    count: u64,
    within: Duration,
}

impl Log {
    /// Begins to log on standard error, for the whole process.
    #[must_use]
    pub fn start(settings: &Settings) -> Self {
        let log = Self::default();
        let shown = match settings.output.log_level {
            LogLevel::Off => LevelFilter::OFF,
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        };
        let lines = tracing_subscriber::fmt::layer().with_writer(progress::stderr).with_ansi(has_colours());
        // A line that standard error does not take is left out; to say so there would end the process.
        let lines = lines.log_internal_errors(false);
        // The status has the job's events also where the log does not show them.
        let registry = tracing_subscriber::registry().with(shown.max(LevelFilter::INFO));
        let filter = LogFilter { log: log.clone(), shown };
        match settings.output.log_format {
            LogFormat::Text => registry.with(lines.fmt_fields(line_fields()).with_filter(filter)).init(),
            LogFormat::Json => registry.with(lines.json().with_filter(filter)).init(),
        }
        log
    }

    /// Says how many lines of each kind were left out, once their time is over, or at the end at once. To be called
    /// from time to time.
    pub fn report(&self, is_end: bool) {
        for LeftOut { sample, is_info, count, within } in self.take_left_out(Instant::now(), is_end) {
            let seconds = within.as_secs_f64();
            if is_info {
                tracing::info!("{count} more lines like \"{sample}\" were left out within {seconds:.0} s");
            } else {
                tracing::warn!("{count} more lines like \"{sample}\" were left out within {seconds:.0} s");
            }
        }
    }

    /// Whether a line from this place is written; `sample` gives what stands for its kind.
    fn may_write(&self, place: Place, level: Level, now: Instant, sample: impl FnOnce() -> String) -> bool {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = kinds.entry(place).or_insert_with(|| LineKind {
            sample: sample(),
            level,
            since: now,
            written: 0,
            left_out: 0,
        });
        // The count of a past window is reported before its kind gets new lines.
        if kind.left_out == 0 && kind.since + WINDOW <= now {
            (kind.since, kind.written) = (now, 0);
        }
        if kind.written < LINES_MAX {
            kind.written += 1;
            return true;
        }
        kind.left_out += 1;
        false
    }

    fn take_left_out(&self, now: Instant, is_end: bool) -> Vec<LeftOut> {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = kinds.values_mut().filter(|kind| 0 < kind.left_out && (is_end || kind.since + WINDOW <= now));
        over.map(|kind| {
            let (count, within) = (std::mem::take(&mut kind.left_out), now.saturating_duration_since(kind.since));
            (kind.since, kind.written) = (now, 0);
            LeftOut { sample: kind.sample.clone(), is_info: kind.level == Level::INFO, count, within }
        })
        .collect()
    }
}

/// Whether lines have colours: in a terminal, unless the variable `NO_COLOR` says otherwise.
fn has_colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|said| said.is_empty())
}

/// The fields of a line, as one line: texts of peers, such as the name of a host, may have control characters.
fn line_fields() -> impl for<'w> FormatFields<'w> + 'static {
    let write = |to: &mut Writer<'_>, field: &Field, value: &dyn Debug| {
        let text = format!("{value:?}");
        match field.name() {
            "message" => write!(to, "{}", escaped(&text)),
            name => write!(to, "{name}={}", escaped(&text)),
        }
    };
    debug_fn(write).delimited(" ")
}

/// The part of a [`Log`] that is shown.
struct LogFilter {
    log: Log,
    shown: LevelFilter,
}

impl<S: Subscriber> Filter<S> for LogFilter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let about = event.metadata();
        let place = about.file().zip(about.line());
        let is_shown = *about.level() <= self.shown;
        let Some(place) = place.filter(|_| *about.level() <= Level::INFO) else { return is_shown };
        let mut sample = Sample(String::new());
        event.record(&mut sample);
        let shortened = || sample.0.chars().take(SAMPLE_CHARACTERS).collect();
        let may_write = self.log.may_write(place, *about.level(), Instant::now(), shortened);
        if may_write {
            events::note(about.level().as_str(), &sample.0);
        }
        may_write && is_shown
    }
}

/// Takes the message out of a line.
struct Sample(String);

impl Visit for Sample {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // Writing to a text does not fail.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_kind_are_limited_and_what_was_left_out_is_counted() {
        let (log, begin) = (Log::default(), Instant::now());
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let write = |line: u32, seconds| log.may_write(("a.rs", line), Level::WARN, at(seconds), || "refused".into());
        let written = (0..1000).filter(|_| write(1, 0)).count();
        assert_eq!(written, 100);
        assert!(write(2, 0), "another kind has lines of its own");
        assert_eq!(log.take_left_out(at(9), false), []);
        let within = Duration::from_secs(11);
        let left_out = LeftOut { sample: "refused".to_owned(), is_info: false, count: 900, within };
        assert_eq!(log.take_left_out(at(11), false), [left_out]);
        assert!(write(1, 11), "another while has lines again");
        assert_eq!(log.take_left_out(at(11), true), []);
        assert_eq!((0..1000).filter(|_| write(1, 12)).count(), 99);
        assert_eq!(log.take_left_out(at(12), true)[0].count, 901, "at the end nobody waits");
        assert_eq!((0..1000).filter(|_| write(2, 40)).count(), 100, "a while without lines is over by itself");
    }
}
