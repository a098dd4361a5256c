//! Watching a server: its metrics, its status, and the page of the job, over HTTP.
//!
//! Read in this order: [`status`] (what is collected), [`metrics`] (the same as series), [`http`] (the listener).
//! `docs/WATCH.md` has the addresses and the series.

mod http;
mod metrics;
mod status;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use pserver_core::ids::ShardId;
use pserver_core::server::ShardCounters;

use super::session::SessionControl;
use super::telemetry::SessionReport;
use crate::settings::Settings;

pub(super) use http::HttpServer;
pub use metrics::{SERIES, Series, SeriesKind};
pub use status::{Durations, JobServer, JobStatus, JobTrainer, ServerStatus, ShardCounts, ShardStatusEntry};

/// How long a session may take to answer: a turn that is longer is shown as one without an answer.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);
/// Answers as old as this are given again, so that readers cannot keep a shard at work.
const FRESH: Duration = Duration::from_millis(200);

/// A server that is watched.
pub(super) struct Watch {
    settings: Settings,
    begun: SystemTime,
    /// The advertised address.
    address: OnceLock<String>,
    /// The sessions that have started and restored what an earlier process left: the coordinator's, then the shards'.
    sessions: Mutex<Vec<Arc<WatchedSession>>>,
    is_stopping: AtomicBool,
    latest: Mutex<Option<(Instant, Arc<JobStatus>)>>,
}

/// A session, as the thread of HTTP sees it.
pub(super) struct WatchedSession {
    pub(super) control: SessionControl,
    /// The name and the counters of a shard; none for the coordinator.
    pub(super) shard: Option<(ShardId, Arc<ShardCounters>)>,
}

impl Watch {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            settings: settings.clone(),
            begun: SystemTime::now(),
            address: OnceLock::new(),
            sessions: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            latest: Mutex::new(None),
        }
    }

    /// Records a session.
    pub(super) fn add(&self, session: WatchedSession) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.push(Arc::new(session));
        sessions.sort_by_key(|session| session.shard.as_ref().map(|(shard, _)| *shard));
    }

    /// Forgets the session of a shard that has ended.
    pub(super) fn remove(&self, shard: ShardId) {
        let is_of_shard = |session: &WatchedSession| session.shard.as_ref().is_some_and(|(other, _)| *other == shard);
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).retain(|session| !is_of_shard(session));
    }

    /// Records the address of a server that has restored its state and serves from now on.
    pub(super) fn serves(&self, address: String) {
        // A server starts once.
        let _ = self.address.set(address);
    }

    pub(super) fn stops(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }

    /// Whether the server serves: it has restored its state, and does not stop.
    fn is_ready(&self) -> bool {
        self.address.get().is_some() && !self.is_stopping.load(Ordering::Acquire)
    }

    /// The status of this server in JSON, for server 0; empty when it is none yet.
    pub(super) fn encoded(&self) -> Vec<u8> {
        let status = self.job();
        status.servers.iter().find_map(|server| serde_json::to_vec(server.status.as_ref()?).ok()).unwrap_or_default()
    }

    /// The status of the job as this server knows it. Waits for its sessions, each with a limit.
    fn job(&self) -> Arc<JobStatus> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, status)) = latest.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return Arc::clone(status);
        }
        let status = Arc::new(self.collect());
        *latest = Some((Instant::now(), Arc::clone(&status)));
        status
    }

    /// The answers of all sessions, in their order; none of one that is late.
    fn reports(&self) -> Vec<(Arc<WatchedSession>, Option<SessionReport>)> {
        if self.address.get().is_none() {
            return Vec::new();
        }
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let asked: Vec<_> = sessions.into_iter().map(|session| (Arc::clone(&session), session.control.ask())).collect();
        let deadline = Instant::now() + ANSWER_LIMIT;
        asked.into_iter().map(|(session, answered)| (session, answered.recv_deadline(deadline).ok())).collect()
    }
}
