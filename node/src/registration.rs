//! Registration of a server other than 0 with server 0.
//!
//! The answer names the job. The server renews its registration every second, because a restarted server 0 knows no
//! servers and admits trainers only when all servers are registered. Server 0 regards a server with an open connection
//! as alive, until the server says that it leaves. A server whose index another server has does not start; a server
//! whose index was taken while its connection was lost stops.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded};
use pserver_core::client::Refused;
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation, Ticket};
use pserver_core::port::Doorbell;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{ErrorCode, Joined, RegisterRequest, Role, ShardMapMessage};
use pserver_transport::network::{NetworkOptions, PollPolicy};

use super::places::ShardPlaces;
use super::watch::Watch;
use super::{ServedJob, ServerStart};
use pserver_client::{COORDINATOR, ClientEngine};

/// Longest wait for server 0, as the servers of a job start in any order.
const DEADLINE: Duration = Duration::from_secs(120);
/// Time until the first log line about waiting for server 0, and the longest time between such lines.
const LOG_FIRST: Duration = Duration::from_millis(800);
const LOG_LONGEST: Duration = Duration::from_secs(30);
/// Interval of renewals: as long as a restarted server 0 delays joining trainers.
const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait of an ending server for server 0, which may have ended before.
const LEAVE_LIMIT: Duration = Duration::from_millis(250);

/// A registration, renewed until this value is dropped.
pub(super) struct Registration {
    is_over: Arc<AtomicBool>,
    doorbell: Doorbell,
    /// Disconnected when the thread is at its end.
    left: Receiver<()>,
    thread: JoinHandle<Result<(), Failure>>,
}

impl Registration {
    /// Whether another server has taken this server's index.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the renewals, and tells server 0 that this server leaves; the failure names the server that took the index.
    /// A server 0 that is silent is not waited for, as the thread owns only a connection.
    pub(super) fn end(self) -> Result<(), Failure> {
        self.is_over.store(true, Ordering::Release);
        self.doorbell.ring();
        match self.left.recv_timeout(LEAVE_LIMIT) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            _ => super::session_loop::join(self.thread),
        }
    }
}

pub(super) fn register(start: &ServerStart) -> Result<(ServedJob, Registration), Failure> {
    let coordinator = start.settings.addresses.coordinator.as_ref().ok_or_else(|| {
        Failure::call(format!("server {} needs the address of server 0: --coordinator", start.settings.index))
    })?;
    let token = start.token.clone();
    let options = NetworkOptions { poll: PollPolicy::Block, token, ..start.network_options() };
    let mut engine = ClientEngine::new(coordinator, COORDINATOR, Role::Server, start.reach.transports(options))?;
    let servers = Some(start.settings.job.servers.into());
    let entry = Some(start.entry());
    let register =
        RegisterRequest { server: start.settings.index.into(), entry, servers, ..RegisterRequest::default() };
    // In containers a restarted process has the host and the number of the one before.
    let number = RandomState::new().hash_one(std::process::id());
    let register = RegisterRequest { start: number, ..register };
    let joined = report_first(&mut engine, &register)?;
    start.settings.overruled(&joined).iter().for_each(|warning| tracing::warn!("{warning}"));
    let job = ServedJob { epoch: Epoch(joined.epoch), committed: Generation(joined.generation) };
    let (places, doorbell) = (Arc::clone(&start.places), engine.doorbell());
    places.report_to(doorbell.clone());
    joined.map.iter().filter_map(ShardMapMessage::map).for_each(|map| places.publish(&map));
    let is_over = Arc::<AtomicBool>::default();
    let renewals = Renewals {
        engine,
        register: RegisterRequest { renews: true, ..register },
        watch: Arc::clone(&start.watch),
        is_watched: joined.watches,
        places,
        epoch: job.epoch,
        reported: None,
    };
    let (leaves, left) = bounded::<()>(0);
    let ends = Arc::clone(&is_over);
    let renew = move || {
        let _leaves = leaves;
        renewals.run(&ends)
    };
    let thread = std::thread::Builder::new()
        .name("pserver-register".to_owned())
        .spawn(renew)
        .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
    Ok((job, Registration { is_over, doorbell, left, thread }))
}

/// The renewals of a registration, and the map of shards that server 0 tells.
struct Renewals {
    engine: ClientEngine,
    register: RegisterRequest,
    /// The status that this server adds to its renewals while server 0 shows it.
    watch: Arc<Watch>,
    is_watched: bool,
    places: Arc<ShardPlaces>,
    epoch: Epoch,
    /// The number of the last report of what this server holds.
    reported: Option<u64>,
}

impl Renewals {
    /// Renews the registration until the server stops, or another server takes its index.
    fn run(mut self, is_over: &AtomicBool) -> Result<(), Failure> {
        let (mut renewal, mut map, mut due) = (None, None, Instant::now() + RENEW_INTERVAL);
        while !is_over.load(Ordering::Acquire) {
            let has_news = self.reported != Some(self.places.report_number());
            if renewal.is_none() && (has_news || due <= Instant::now()) {
                due = Instant::now() + RENEW_INTERVAL;
                renewal = Some(self.renew());
            }
            let version = self.places.version();
            let asked = *map.get_or_insert_with(|| self.engine.start(Request::Watch(version.0)));
            // A renewal that is not answered ends with the connection, after which it is sent again.
            let pause = if renewal.is_some() { RENEW_INTERVAL } else { due.saturating_duration_since(Instant::now()) };
            self.engine.turn_until_rung(pause);
            if let Some(renewed) = renewal.and_then(|ticket| self.engine.take(ticket)) {
                renewal = None;
                self.renewed(renewed)?;
            }
            if let Some(answered) = self.engine.take(asked) {
                map = None;
                if let Ok(Answer::Map(map)) = answered {
                    map.map().iter().for_each(|map| self.places.publish(map));
                }
            }
        }
        if let Err(refused) = self.engine.control(Request::Leave(true), LEAVE_LIMIT, "leaving the job") {
            tracing::debug!("{}", refused.text);
        }
        Ok(())
    }

    fn renew(&mut self) -> Ticket {
        let report = self.places.report();
        self.reported = Some(report.number);
        self.register.status = if self.is_watched { self.watch.encoded() } else { Vec::new() };
        (self.register.holds, self.register.map_version) = (report.held, Some(report.version.0));
        self.engine.start(Request::Register(self.register.clone()))
    }

    fn renewed(&mut self, renewed: Result<Answer, Refused>) -> Result<(), Failure> {
        let epoch = self.epoch;
        match renewed {
            Ok(Answer::Joined(joined)) => {
                self.is_watched = joined.watches;
                let found = Epoch(joined.epoch);
                if found != epoch {
                    tracing::error!("server 0 serves the job of epoch {found}, and this server that of {epoch}");
                }
            }
            Ok(other) => tracing::error!("{}", pserver_client::unexpected(&other)),
            Err(refused) if refused.code == ErrorCode::Fenced => return Err(Failure::Node(refused.text)),
            // Running steps do not need server 0, so the level is debug.
            Err(refused) => tracing::debug!("{}", refused.text),
        }
        Ok(())
    }
}

/// Registers for the first time. A log line within a second, and then ever more rarely, tells what the server waits
/// for.
fn report_first(engine: &mut ClientEngine, register: &RegisterRequest) -> Result<Joined, Refused> {
    let (mut waited, mut pause) = (Duration::ZERO, LOG_FIRST);
    loop {
        let reported = report(engine, register, pause);
        let Err(Refused { code: ErrorCode::Deadline, text, .. }) = reported else { return reported };
        waited += pause;
        let text = format!("server {} has waited {:.1} s for server 0: {text}", register.server, waited.as_secs_f64());
        if waited >= DEADLINE {
            return Err(Refused::new(ErrorCode::Deadline, text));
        }
        tracing::info!("{text}");
        pause = (pause * 2).min(LOG_LONGEST).min(DEADLINE.saturating_sub(waited));
    }
}

fn report(engine: &mut ClientEngine, register: &RegisterRequest, deadline: Duration) -> Result<Joined, Refused> {
    let wrong = |failure: Failure| Refused::new(ErrorCode::Invalid, failure.to_string());
    let finished = engine.control(Request::Register(register.clone()), deadline, "registering with server 0")?;
    match pserver_client::answer(&finished.control).map_err(wrong)? {
        Answer::Joined(joined) => Ok(joined),
        other => Err(wrong(pserver_client::unexpected(&other))),
    }
}
