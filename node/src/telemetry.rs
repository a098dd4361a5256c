//! Counters of a session's thread, and the reports that other threads ask it for.
//!
//! A report is asked for with a flag, which the loop reads once a turn; the doorbell ends a wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::channel::{Receiver, Sender, bounded};
use pserver_core::metrics::{Histogram, MetricCounter};
use pserver_core::port::{Event, Submit};
use pserver_core::server::{CoordinatorReport, ShardReport};
use pserver_core::wire::Kind;
use serde::{Deserialize, Serialize};

/// Questions that wait for one turn, at most.
const ASKED_MAX: usize = 16;

/// The kinds of received frames that are counted apart; all others are `other`.
pub const KINDS: [(&str, Option<Kind>); 6] = [
    ("push", Some(Kind::Push)),
    ("pull", Some(Kind::Pull)),
    ("set", Some(Kind::Set)),
    ("init", Some(Kind::Init)),
    ("control", Some(Kind::Control)),
    ("other", None),
];

/// Frames, bytes and turns of a session's thread, coordinator or shard.
#[derive(Debug, Default)]
pub struct SessionCounters {
    /// Received frames, as [`KINDS`].
    pub received_frames: [MetricCounter; KINDS.len()],
    /// Payload bytes received.
    pub received_bytes: MetricCounter,
    /// Frames sent.
    pub sent_frames: MetricCounter,
    /// Payload bytes sent.
    pub sent_bytes: MetricCounter,
    /// Durations of the turns that had work, with the poll after each.
    pub turns: Histogram,
}

impl SessionCounters {
    /// Counts a received frame; other events count for nothing.
    #[inline]
    pub fn received(&self, event: &Event) {
        let Event::Received { frame, .. } = event else { return };
        let kind = match frame.head.kind {
            Kind::Push => 0,
            Kind::Pull => 1,
            Kind::Set => 2,
            Kind::Init => 3,
            Kind::Control => 4,
            _ => 5,
        };
        self.received_frames[kind].add(1);
        self.received_bytes.add(frame.payload_bytes());
    }

    /// Counts a sent frame; other work counts for nothing.
    #[inline]
    pub fn sent(&self, submit: &Submit) {
        if let Submit::Send { frame, .. } = submit {
            self.sent_frames.add(1);
            self.sent_bytes.add(frame.payload_bytes());
        }
    }
}

/// Report of a session.
pub enum SessionReport {
    /// The members of the job.
    Coordinator(CoordinatorReport),
    /// Contents of a shard, and its checkpoints if it takes any.
    Shard(ShardReport, Option<DiskReport>),
}

/// Checkpoints of a shard since its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskReport {
    /// Completed checkpoints.
    pub checkpoints: u64,
    /// Failed steps of checkpoints.
    pub failures: u64,
    /// Whether one is being written.
    pub is_writing: bool,
    /// Bytes of the last one.
    pub last_bytes: u64,
    /// Duration of the last one.
    pub last_duration_seconds: f64,
    /// End of the last one, since 1970; zero before the first.
    pub last_unix_seconds: f64,
}

/// Questions for a session's report, from any thread.
#[derive(Clone, Default)]
pub struct ReportRequests {
    is_asked: Arc<AtomicBool>,
    waiting: Arc<Mutex<Vec<Sender<SessionReport>>>>,
}

impl ReportRequests {
    /// Asks; the answer comes at the session's next turn. The caller rings the doorbell.
    pub fn ask(&self) -> Receiver<SessionReport> {
        let (answer, answered) = bounded(1);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < ASKED_MAX {
            waiting.push(answer);
        }
        drop(waiting);
        self.is_asked.store(true, Ordering::Release);
        answered
    }

    /// Answers all questions; a turn without one costs the look at a flag.
    #[inline]
    pub fn answer(&self, report: impl Fn() -> SessionReport) {
        if self.is_asked.load(Ordering::Relaxed) && self.is_asked.swap(false, Ordering::Acquire) {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            for answer in waiting {
                // The other end may have given up.
                let _ = answer.send(report());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pserver_core::ids::PeerId;
    use pserver_core::port::ReceiveBuffers;
    use pserver_core::wire::{Frame, Head};

    #[test]
    fn every_kind_is_counted_under_its_name() {
        for kind in (1..=14).filter_map(Kind::from_number) {
            let counters = SessionCounters::default();
            let frame = Frame::bare(Head::new(kind));
            counters.received(&Event::Received { peer: PeerId(1), frame, body: ReceiveBuffers::new() });
            let place = KINDS.iter().position(|(_, known)| *known == Some(kind)).unwrap_or(KINDS.len() - 1);
            let counted: Vec<u64> = counters.received_frames.iter().map(MetricCounter::get).collect();
            assert!(counted[place] == 1 && counted.iter().sum::<u64>() == 1, "{kind:?}: {counted:?}");
        }
    }

    #[test]
    fn a_question_is_answered_once() {
        let requests = ReportRequests::default();
        let report = || SessionReport::Shard(ShardReport::default(), None);
        let first = requests.ask();
        requests.answer(report);
        assert!(matches!(first.try_recv(), Ok(SessionReport::Shard(..))));
        requests.answer(|| panic!("nobody asks"));
        let all: Vec<_> = (0..ASKED_MAX + 5).map(|_| requests.ask()).collect();
        requests.answer(report);
        assert_eq!(all.iter().filter(|one| one.try_recv().is_ok()).count(), ASKED_MAX, "questions are bounded");
    }
}
