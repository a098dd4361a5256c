//! Progress of long work on a terminal: what is done, how fast, and how long the rest takes.
//!
//! A line appears on standard error when the work has taken [`PATIENCE`], if standard error is a terminal, and is taken
//! away when the work ends. The work itself only counts in a [`WorkMeter`]. Programs start a display; libraries do not.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
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
                    bar.set_style(style(unit, 0 < done));
                    bar.set_message(note.clone());
                    bar.set_length(expected);
                    bar.set_position(done);
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

/// The form of the line. Before anything is done neither rate nor time left is known.
fn style(unit: ProgressUnit, has_rate: bool) -> ProgressStyle {
    let (amount, rate) = match unit {
        ProgressUnit::Bytes => ("{binary_bytes} of {binary_total_bytes}".to_owned(), "{binary_bytes_per_sec}"),
        ProgressUnit::Things(name) => (format!("{{pos}} of {{len}} {name}"), "{per_sec}"),
    };
    let rate = if has_rate { format!(", {rate}, {{eta}} left") } else { String::new() };
    let template = format!("{{prefix}} {{bar:24}} {amount}{rate} {{msg}}");
    ProgressStyle::with_template(&template).expect("the template is ours")
}

fn shown(label: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr()).with_prefix(label.to_owned());
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
}
