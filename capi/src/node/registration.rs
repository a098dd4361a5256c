//! A server other than 0 reports for duty, and learns which job it serves.

use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::Epoch;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{RegisterRequest, Role};

use super::Start;
use crate::client::Engine;

/// How long server 0 may take to come up: the servers of a job are started in any order.
const DEADLINE: Duration = Duration::from_secs(120);

pub(super) fn register(start: &Start) -> Result<Epoch, Failure> {
    let coordinator = start.settings.coordinator.as_ref().ok_or_else(|| {
        Failure::call(format!("server {} needs the address of server 0: --coordinator", start.settings.index))
    })?;
    let mut engine = Engine::new(coordinator, Role::Server)?;
    let register = RegisterRequest { server: start.settings.index.into(), entry: Some(start.entry()) };
    let finished = engine.control(Request::Register(register), DEADLINE, "registering with server 0")?;
    match crate::client::answer(&finished.control)? {
        Answer::Joined(joined) => Ok(Epoch(joined.epoch)),
        other => Err(crate::client::unexpected(&other)),
    }
}
