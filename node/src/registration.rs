//! Registration of a server other than 0 with server 0.
//!
//! The answer names the job. The server renews its registration every second, because a restarted server 0 knows no
//! servers and admits trainers only when all servers are registered. Server 0 regards a server with an open connection
//! as alive, until the server says that it leaves. A server whose index another server has does not start; a server
//! whose index was taken while its connection was lost stops.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pserver_core::client::Refused;
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation};
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{ErrorCode, Joined, RegisterRequest, Role};
use pserver_transport::network::{NetworkOptions, PollPolicy};
use pserver_transport::verbs::VerbsDevices;

use super::watch::Watch;
use super::{ServedJob, ServerStart};
use pserver_client::{COORDINATOR, ClientEngine};

/// Longest wait for server 0, as the servers of a job start in any order.
const DEADLINE: Duration = Duration::from_secs(120);
/// Time until the first log line about waiting for server 0, and the longest time between such lines.
const LOG_FIRST: Duration = Duration::from_millis(800);
const LOG_LONGEST: Duration = Duration::from_secs(30);
/// Interval and deadline of renewals: as long as a restarted server 0 delays joining trainers.
const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait of an ending server for server 0, which may have ended before.
const LEAVE_LIMIT: Duration = Duration::from_millis(250);

/// A registration, renewed until this value is dropped.
pub(super) struct Registration {
    until: Sender<()>,
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
        drop(self.until);
        match self.left.recv_timeout(LEAVE_LIMIT) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            _ => super::session::join(self.thread),
        }
    }
}

/// Adds this server's status to its renewals while server 0 shows it.
struct StatusReporter {
    watch: Arc<Watch>,
    is_asked: bool,
}

pub(super) fn register(start: &ServerStart) -> Result<(ServedJob, Registration), Failure> {
    let coordinator = start.settings.addresses.coordinator.as_ref().ok_or_else(|| {
        Failure::call(format!("server {} needs the address of server 0: --coordinator", start.settings.index))
    })?;
    let devices = VerbsDevices::from(&start.settings.addresses.rdma_device);
    let (token, encryption) = (start.token.clone(), start.encryption.clone());
    let fabric = start.settings.addresses.fabric.clone();
    let poll = PollPolicy::Block;
    let options = NetworkOptions { poll, devices, fabric, token, encryption, ..NetworkOptions::default() };
    let mut engine = ClientEngine::new(coordinator, COORDINATOR, Role::Server, start.reach.transports(options))?;
    let server = start.settings.index.into();
    let servers = Some(start.settings.job.servers.into());
    let register = RegisterRequest { server, entry: Some(start.entry()), renews: false, status: Vec::new(), servers };
    let joined = report_first(&mut engine, &register)?;
    start.settings.overruled(&joined).iter().for_each(|warning| tracing::warn!("{warning}"));
    let job = ServedJob { epoch: Epoch(joined.epoch), committed: Generation(joined.generation) };
    let register = RegisterRequest { renews: true, ..register };
    let reporter = StatusReporter { watch: Arc::clone(&start.watch), is_asked: joined.watches };
    let (until, stopped) = bounded(0);
    let (leaves, left) = bounded::<()>(0);
    let renewals = move || {
        let _leaves = leaves;
        renew(&mut engine, register, reporter, (job.epoch, &stopped))?;
        if let Err(refused) = engine.control(Request::Leave(true), LEAVE_LIMIT, "leaving the job") {
            tracing::debug!("{}", refused.text);
        }
        Ok(())
    };
    let thread = std::thread::Builder::new()
        .name("pserver-register".to_owned())
        .spawn(renewals)
        .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
    Ok((job, Registration { until, left, thread }))
}

/// Renews the registration until the server stops, or another server takes its index.
fn renew(
    engine: &mut ClientEngine,
    mut register: RegisterRequest,
    mut reporter: StatusReporter,
    (epoch, stopped): (Epoch, &Receiver<()>),
) -> Result<(), Failure> {
    while stopped.recv_timeout(RENEW_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        register.status = if reporter.is_asked { reporter.watch.encoded() } else { Vec::new() };
        let renewed = report(engine, &register, RENEW_INTERVAL);
        if let Ok(joined) = &renewed {
            reporter.is_asked = joined.watches;
        }
        match renewed.map(|joined| Epoch(joined.epoch)) {
            Ok(found) if found == epoch => {}
            Ok(found) => tracing::error!("server 0 serves the job of epoch {found}, and this server that of {epoch}"),
            Err(refused) if refused.code == ErrorCode::Fenced => return Err(Failure::Node(refused.text)),
            // Running steps do not need server 0, so the level is debug.
            Err(refused) => tracing::debug!("{}", refused.text),
        }
    }
    Ok(())
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
