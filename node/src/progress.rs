//! Progress of long work on a terminal: what is done, how fast, and how long the rest takes.
//!
//! A line appears on standard error when the work has taken [`PATIENCE`], if standard error is a terminal, and is taken
//! away when the work ends. The work itself only counts in a [`WorkMeter`]. Programs start a display; libraries do not.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use pserver_core::metrics::WorkMeter;

/// Work that takes less has no line.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How often the line changes: faster than the eye would only cost.
const PERIOD: Duration = Duration::from_millis(100);

/// The bar that is on the terminal. Lines of other text go above it.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// The unit of a meter's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressUnit {
    /// Bytes, in binary units.
    Bytes,
    /// Things of this name, in the plural.
    Things(&'static str),
}

/// A display of progress, until it is dropped.
pub struct TerminalProgress {
    /// None where standard error is no terminal.
    display: Option<(Sender<String>, JoinHandle<()>)>,
}

impl TerminalProgress {
    /// Shows what is counted from now on, under a label such as `restoring`.
    #[must_use]
    pub fn start(label: &str, unit: ProgressUnit, meter: &Arc<WorkMeter>) -> Self {
        if !io::stderr().is_terminal() {
            return Self { display: None };
        }
        let (notes, received) = channel();
        let (meter, label, before) = (Arc::clone(meter), label.to_owned(), meter.counts());
        let begun = Instant::now();
        let show = move || {
            let mut patience = PATIENCE;
            let mut bar: Option<ProgressBar> = None;
            let mut note = String::new();
            loop {
                match received.recv_timeout(patience) {
                    Ok(new) => note = new,
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => patience = PERIOD,
                }
                let (expected, done) = since(before, meter.counts());
                if patience == PERIOD && 0 < expected {
                    let bar = bar.get_or_insert_with(|| shown(&label));
                    bar.update(|state| {
                        state.set_len(expected);
                        state.set_pos(done);
                    });
                    bar.set_message(format!("{} {note}", figures(unit, (expected, done), begun.elapsed())));
                }
            }
            if let Some(bar) = bar {
                *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
                bar.finish_and_clear();
            }
        };
        // Without a thread there is no display, and the work goes on.
        let thread = std::thread::Builder::new().name("pserver-progress".to_owned()).spawn(show);
        Self { display: thread.ok().map(|thread| (notes, thread)) }
    }

    /// A remark behind the figures, such as the loss.
    pub fn note(&self, text: String) {
        if let Some((notes, _)) = &self.display {
            // A display that has ended shows no remark.
            let _ = notes.send(text);
        }
    }
}

impl Drop for TerminalProgress {
    fn drop(&mut self) {
        if let Some((notes, thread)) = self.display.take() {
            drop(notes);
            // A display that has panicked has left its line behind, and nothing depends on it.
            let _ = thread.join();
        }
    }
}

/// The announced work and the done one since the first counts. More cannot be done than was announced.
fn since((expected_before, done_before): (u64, u64), (expected, done): (u64, u64)) -> (u64, u64) {
    let expected = expected.saturating_sub(expected_before);
    (expected, done.saturating_sub(done_before).min(expected))
}

/// `6 of 18 blocks, 3.0/s, 4s left`: the mean rate so far, and the time that the rest takes at it.
fn figures(unit: ProgressUnit, (expected, done): (u64, u64), elapsed: Duration) -> String {
    let amount = match unit {
        ProgressUnit::Bytes => format!("{} of {}", BinaryBytes(done), BinaryBytes(expected)),
        ProgressUnit::Things(name) => format!("{done} of {expected} {name}"),
    };
    if done == 0 {
        return amount;
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate is an estimate")]
    let (expected, done) = (expected as f64, done as f64);
    let rate = done / elapsed.as_secs_f64().max(1e-9);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate is positive and finite")]
    let rate_text = match unit {
        ProgressUnit::Bytes => format!("{}/s", BinaryBytes(rate as u64)),
        ProgressUnit::Things(_) if rate < 10.0 => format!("{rate:.2}/s"),
        ProgressUnit::Things(_) => format!("{rate:.0}/s"),
    };
    let left = Duration::try_from_secs_f64((expected - done) / rate).unwrap_or(Duration::MAX);
    format!("{amount}, {rate_text}, {:#} left", HumanDuration(left))
}

fn shown(label: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {bar:24} {msg}").expect("the template is ours");
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
    let bar = bar.with_style(style).with_prefix(label.to_owned());
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
    bar
}

/// Standard error of a program that may show progress: what is written stands above the line.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgressStderr;

/// [`ProgressStderr`], for writers of logs.
#[must_use]
pub fn stderr() -> ProgressStderr {
    ProgressStderr
}

impl Write for ProgressStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match shown {
            Some(bar) => bar.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_display_shows_what_is_counted_after_its_start() {
        assert_eq!(since((100, 90), (100, 90)), (0, 0), "nothing was announced");
        assert_eq!(since((100, 90), (300, 120)), (200, 30));
        assert_eq!(since((0, 0), (100, 105)), (100, 100), "headers are not announced");
    }

    #[test]
    fn the_remaining_time_follows_from_the_mean_rate() {
        let check = |unit, counts, seconds, expected: &str| {
            assert_eq!(figures(unit, counts, Duration::from_secs(seconds)), expected);
        };
        check(ProgressUnit::Things("blocks"), (18, 0), 2, "0 of 18 blocks");
        check(ProgressUnit::Things("blocks"), (18, 6), 3, "6 of 18 blocks, 2.00/s, 6s left");
        check(ProgressUnit::Things("steps"), (90_000, 30_000), 60, "30000 of 90000 steps, 500/s, 2m left");
        let mebibyte = 1 << 20;
        check(
            ProgressUnit::Bytes,
            (4096 * mebibyte, 1024 * mebibyte),
            4,
            "1.00 GiB of 4.00 GiB, 256.00 MiB/s, 12s left",
        );
    }
}
