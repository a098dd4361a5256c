//! A server other than 0 reports for duty, and learns which job it serves; and it does so again and again, because
//! a server 0 that starts anew knows nobody, and lets no trainer join before it knows all servers.

use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pserver_core::error::Failure;
use pserver_core::ids::Epoch;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{RegisterRequest, Role};
use pserver_transport::network::{NetworkOptions, Poll};
use pserver_transport::verbs::Devices;

use super::Start;
use crate::client::{Engine, OverVerbs, networks};

/// How long server 0 may take to come up: the servers of a job are started in any order.
const DEADLINE: Duration = Duration::from_secs(120);
/// How often a server reports again, and how long server 0 may then take: as long as a new server 0 keeps trainers
/// waiting that join.
const AGAIN: Duration = Duration::from_secs(1);

/// A registration that is renewed until this is dropped.
pub(super) struct Registered {
    _until: Sender<()>,
}

pub(super) fn register(start: &Start) -> Result<(Epoch, Registered), Failure> {
    let coordinator = start.settings.coordinator.as_ref().ok_or_else(|| {
        Failure::call(format!("server {} needs the address of server 0: --coordinator", start.settings.index))
    })?;
    let devices = Devices::from(&start.settings.rdma_device);
    let token = start.token.clone();
    let options = NetworkOptions { poll: Poll::Block, devices, token, ..NetworkOptions::default() };
    let mut engine = Engine::new(coordinator, Role::Server, networks(options, OverVerbs::default()))?;
    let register = RegisterRequest { server: start.settings.index.into(), entry: Some(start.entry()) };
    let epoch = report(&mut engine, &register, DEADLINE)?;
    let (until, stopped) = bounded(0);
    std::thread::Builder::new()
        .name("pserver-register".to_owned())
        .spawn(move || renew(engine, &register, epoch, &stopped))
        .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
    Ok((epoch, Registered { _until: until }))
}

/// Reports until the server stops. Nobody waits for the end of it: it owns nothing but a connection.
fn renew(mut engine: Engine, register: &RegisterRequest, epoch: Epoch, stopped: &Receiver<()>) {
    while stopped.recv_timeout(AGAIN) == Err(RecvTimeoutError::Timeout) {
        match report(&mut engine, register, AGAIN) {
            Ok(found) if found == epoch => {}
            Ok(found) => tracing::error!("server 0 serves the job of epoch {found}, and this server that of {epoch}"),
            // A running step needs no server 0, so this is for the curious.
            Err(failure) => tracing::debug!("{failure}"),
        }
    }
}

fn report(engine: &mut Engine, register: &RegisterRequest, deadline: Duration) -> Result<Epoch, Failure> {
    let finished = engine.control(Request::Register(register.clone()), deadline, "registering with server 0")?;
    match crate::client::answer(&finished.control)? {
        Answer::Joined(joined) => Ok(Epoch(joined.epoch)),
        other => Err(crate::client::unexpected(&other)),
    }
}
