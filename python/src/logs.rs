//! The client's own log lines, on their way to Python's `logging`.
//!
//! A library thread may write a line while it holds a lock, so it never waits for the interpreter: it leaves the line
//! in a queue, from which a thread of Python's takes it. A forked process has a queue of its own.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Condvar, Mutex};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::session::locked;

/// Lines that wait; later ones are counted, and left out.
const LINES_MAX: usize = 10_000;

/// The level of `logging`, the module of the library, and the text.
type LogLine = (u8, String, String);

/// Python's level from which lines are kept.
static LEVEL: AtomicU8 = AtomicU8::new(u8::MAX);
/// The queue of this process; the one of the parent is left behind, as its lock may be taken for good.
static QUEUE: AtomicPtr<LogQueue> = AtomicPtr::new(std::ptr::null_mut());

struct LogQueue {
    process: u32,
    waiting: Mutex<WaitingLines>,
    changed: Condvar,
}

#[derive(Default)]
struct WaitingLines {
    lines: VecDeque<LogLine>,
    left_out: u64,
    is_over: bool,
}

/// Keeps lines of the library from a level of `logging` on.
#[pyfunction]
pub(crate) fn begin_log(level: i64) {
    LEVEL.store(u8::try_from(level.max(0)).unwrap_or(u8::MAX), Ordering::Relaxed);
    // A process has one subscriber: that of an earlier call, or of the program.
    let _ = set_global_default(LogLines);
}

/// Waits for lines; none after [`end_log`].
#[pyfunction]
pub(crate) fn log_lines(py: Python<'_>) -> Option<Vec<LogLine>> {
    py.detach(|| {
        let queue = queue();
        let waiting = locked(&queue.waiting);
        let is_idle = |waiting: &mut WaitingLines| waiting.lines.is_empty() && !waiting.is_over;
        let waiting = queue.changed.wait_while(waiting, is_idle);
        let mut waiting = waiting.unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut lines: Vec<LogLine> = std::mem::take(&mut waiting.lines).into();
        let left_out = std::mem::take(&mut waiting.left_out);
        if left_out > 0 {
            lines.push((
                python_level(Level::WARN),
                module_path!().to_owned(),
                format!("{left_out} lines were left out"),
            ));
        }
        (!lines.is_empty()).then_some(lines)
    })
}

/// Ends [`log_lines`] behind the lines that wait.
#[pyfunction]
pub(crate) fn end_log() {
    let queue = queue();
    locked(&queue.waiting).is_over = true;
    queue.changed.notify_all();
}

fn queue() -> &'static LogQueue {
    let process = std::process::id();
    loop {
        let found = QUEUE.load(Ordering::Acquire);
        // SAFETY: a queue is never freed.
        if let Some(queue) = unsafe { found.as_ref() }.filter(|queue| queue.process == process) {
            return queue;
        }
        let made = Box::new(LogQueue { process, waiting: Mutex::default(), changed: Condvar::new() });
        let made = Box::into_raw(made);
        if QUEUE.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}

fn python_level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// The subscriber: lines without spans.
struct LogLines;

impl Subscriber for LogLines {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        LEVEL.load(Ordering::Relaxed) <= python_level(*metadata.level())
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = LineText::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let module = metadata.target();
        let queue = queue();
        let mut waiting = locked(&queue.waiting);
        if waiting.lines.len() < LINES_MAX {
            waiting.lines.push_back((python_level(*metadata.level()), module.to_owned(), text.message + &text.fields));
        } else {
            waiting.left_out += 1;
        }
        queue.changed.notify_all();
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of a line, and its fields.
#[derive(Default)]
struct LineText {
    message: String,
    fields: String,
}

impl Visit for LineText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Texts in memory always fit.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
