//! Peer of a network transport: a connection, its waker, and its closing.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, ReceiveBuffers};
use pserver_core::wire::{Address, ErrorCode, Frame, Scheme};

use super::setup::{ConnectionSetup, SetupProgress};
use super::upgrade::{Upgrade, UpgradeProgress};
use super::wakeups::{PeerWaker, Wakeups};
use crate::connection::{Connection, ConnectionError, ReturnedBuffers, TicketedBody, UnreadLimit};
use crate::refusal::refusal;
use crate::verbs::DeviceContext;

/// A peer.
pub(super) struct NetworkPeer {
    id: PeerId,
    stage: PeerStage,
    /// The address to which verbs are denied for a while if they fail, because TCP is allowed there too.
    offered: Option<Address>,
    /// The way from TCP to verbs, while the connection goes over TCP and both sides may choose.
    upgrade: Option<Box<Upgrade>>,
    /// The reason for closing. A closing connection sends its queue, shuts the socket down, and discards input until
    /// the peer closes: closing over unread bytes would discard what the peer has not read.
    closing: Option<String>,
    /// Frames that were dropped from the queue when the closing began.
    unsent: Vec<TicketedBody>,
    /// The unread answers that end reading. None on the side that connected, which always reads, so that the two sides
    /// cannot block each other.
    unread: Option<UnreadLimit>,
    wake: Arc<PeerWaker>,
    waker: Waker,
    /// Whether the peer is in the transport's ready list.
    is_ready: bool,
    /// Whether the transport polls its memory, and whether it counts it as quiet.
    is_listed: bool,
    is_quiet: bool,
}

enum PeerStage {
    Setup(ConnectionSetup),
    Established(Box<dyn Connection>),
}

/// The outcome of a turn.
pub(super) enum TurnOutcome {
    /// Nothing to do until the peer's waker is called.
    Rest,
    /// More can be done at once.
    Again,
    /// The connection has ended.
    Over(String),
}

impl NetworkPeer {
    /// A peer whose connection is being made.
    pub(super) fn connecting(id: PeerId, setup: ConnectionSetup, wakeups: &Arc<Wakeups>) -> Self {
        Self::new(id, PeerStage::Setup(setup), wakeups)
    }

    /// A peer that a listener of `scheme` accepted, with its limit of unread answers.
    pub(super) fn accepted(
        id: PeerId,
        connection: Box<dyn Connection>,
        (unread, scheme): (UnreadLimit, Scheme),
        wakeups: &Arc<Wakeups>,
    ) -> Self {
        let upgrade = connection.tcp_stream().map(|_| Box::new(Upgrade::of_server(scheme)));
        Self { unread: Some(unread), upgrade, ..Self::new(id, PeerStage::Established(connection), wakeups) }
    }

    fn new(id: PeerId, stage: PeerStage, wakeups: &Arc<Wakeups>) -> Self {
        let wake = PeerWaker::new(id, wakeups);
        let (offered, upgrade, closing, unsent, unread) = (None, None, None, Vec::new(), None);
        Self {
            id,
            stage,
            offered,
            upgrade,
            closing,
            unsent,
            unread,
            waker: wake.waker(),
            wake,
            is_ready: false,
            is_listed: false,
            is_quiet: false,
        }
    }

    fn connection(&self) -> Option<&dyn Connection> {
        match &self.stage {
            PeerStage::Setup(_) => None,
            PeerStage::Established(connection) => Some(connection.as_ref()),
        }
    }

    fn connection_mut(&mut self) -> Option<&mut Box<dyn Connection>> {
        match &mut self.stage {
            PeerStage::Setup(_) => None,
            PeerStage::Established(connection) => Some(connection),
        }
    }

    /// Marks the peer as ready; false when it was already.
    pub(super) fn mark_ready(&mut self) -> bool {
        !std::mem::replace(&mut self.is_ready, true)
    }

    /// Clears the ready mark.
    pub(super) fn clear_ready(&mut self) {
        self.is_ready = false;
    }

    /// Records that the waker was called.
    pub(super) fn socket_woken(&mut self) {
        self.wake.taken();
        match &mut self.stage {
            PeerStage::Setup(setup) => setup.socket_woken(),
            PeerStage::Established(connection) => connection.socket_woken(),
        }
    }

    /// Whether the peer's memory must be polled, because the system does not report its changes, and is not yet.
    pub(super) fn becomes_listed(&mut self) -> bool {
        let is_polled = self.connection().is_some_and(Connection::is_polled);
        is_polled && !std::mem::replace(&mut self.is_listed, true)
    }

    /// Whether the peer's memory is polled.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Whether the system need not be asked often for news of the peer, from now on.
    pub(super) fn becomes_quiet(&mut self) -> bool {
        let is_quiet = self.connection().is_some_and(|connection| !connection.needs_readiness());
        is_quiet && !std::mem::replace(&mut self.is_quiet, true)
    }

    /// Whether the system need not be asked often.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// Whether polling finds work.
    pub(super) fn has_work(&mut self) -> bool {
        self.connection_mut().is_some_and(|connection| connection.has_work())
    }

    /// Requests a wake-up for later changes of polled memory, before this side sleeps.
    pub(super) fn request_wakeup(&mut self) {
        if let Some(connection) = self.connection_mut() {
            connection.request_wakeup();
        }
    }

    /// Cancels the request for a wake-up.
    pub(super) fn cancel_wakeup(&mut self) {
        if let Some(connection) = self.connection_mut() {
            connection.cancel_wakeup();
        }
    }

    /// Whether a device has not completed the peer's work for longer than `limit`.
    pub(super) fn is_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        self.connection_mut().is_some_and(|connection| connection.is_stalled(now, limit))
    }

    /// Whether the peer reads payloads in place, whose return causes no wake-up.
    pub(super) fn has_borrowed(&self) -> bool {
        self.connection().is_some_and(Connection::has_borrowed)
    }

    /// Whether the queue holds fewer than `queued_max` frames.
    pub(super) fn has_room(&self, queued_max: usize) -> bool {
        let queued = match &self.stage {
            PeerStage::Setup(setup) => setup.len(),
            PeerStage::Established(connection) => connection.len(),
        };
        queued + self.upgrade.as_ref().map_or(0, |upgrade| upgrade.len()) < queued_max
    }

    /// Queues a frame. A frame for a closing connection comes back with its end.
    pub(super) fn send(&mut self, ticket: Ticket, frame: Frame, body: Payloads) {
        match (&mut self.stage, &mut self.upgrade) {
            _ if self.closing.is_some() => self.unsent.push((ticket, body)),
            (PeerStage::Setup(setup), _) => setup.send(ticket, frame, body),
            (PeerStage::Established(_), Some(upgrade)) if upgrade.is_holding() => upgrade.hold(ticket, frame, body),
            (PeerStage::Established(connection), _) => connection.send(Some(ticket), frame, body),
        }
    }

    /// Posts the receive buffers for the reported head.
    ///
    /// # Panics
    /// Before the connection is made, because no head was reported.
    pub(super) fn post_receive(&mut self, buffers: ReceiveBuffers) {
        let connection = self.connection_mut().expect("receive buffers were posted, but no head waits for them");
        connection.post_receive(buffers);
    }

    /// Posts the receive buffers of the answer to the request that is sent next.
    ///
    /// # Panics
    /// Before the connection has reported that it takes them.
    pub(super) fn post_answer(&mut self, request: Ticket, into: ReceiveBuffers) {
        let connection =
            self.connection_mut().expect("buffers for an answer were posted before the connection is made");
        connection.post_answer(request, into);
    }

    /// Begins to close the connection; false when it is closing already.
    pub(super) fn close(&mut self, reason: impl Into<String>) -> bool {
        let begins = self.closing.is_none();
        self.closing.get_or_insert_with(|| reason.into());
        if let Some(mut upgrade) = self.upgrade.take() {
            self.unsent.extend(upgrade.take_held());
        }
        begins
    }

    /// The last events, with all buffers that the peer holds.
    pub(super) fn into_gone(self, reason: String, events: &mut Vec<Event>) {
        let Self { id: peer, stage, unsent: mut dropped, mut upgrade, .. } = self;
        let ReturnedBuffers { frames: mut unsent, unfilled, answers } = match stage {
            PeerStage::Setup(setup) => ReturnedBuffers { frames: setup.into_frames(), ..ReturnedBuffers::default() },
            PeerStage::Established(connection) => connection.into_buffers(),
        };
        events.extend(answers.into_iter().map(|(request, into)| Event::AnswerReturned { peer, request, into }));
        unsent.append(&mut dropped);
        unsent.extend(upgrade.iter_mut().flat_map(|upgrade| upgrade.take_held()));
        events.push(Event::Gone { peer, reason, unsent, unfilled });
    }

    /// Whether the connection is closing.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// The reason for closing.
    pub(super) fn reason(&self) -> String {
        self.closing.clone().unwrap_or_default()
    }

    /// Makes progress without blocking, within the budget of a turn.
    pub(super) fn turn(&mut self, device_context: &DeviceContext, events: &mut Vec<Event>) -> TurnOutcome {
        if let PeerStage::Setup(setup) = &mut self.stage {
            match setup.poll(self.id, device_context, &self.waker, events) {
                SetupProgress::Pending => return TurnOutcome::Rest,
                SetupProgress::Failed(reason) => return TurnOutcome::Over(reason),
                SetupProgress::Established(connection, offered) => {
                    if let Some(address) = offered.clone().filter(|_| connection.tcp_stream().is_some()) {
                        let upgrade = Upgrade::of_client(address, connection.as_ref(), device_context);
                        self.upgrade = Some(Box::new(upgrade));
                    }
                    if connection.takes_answers() {
                        events.push(Event::TakesAnswers { peer: self.id });
                    }
                    (self.stage, self.offered) = (PeerStage::Established(connection), offered);
                }
            }
        }
        if self.closing.is_some() { self.turn_closing(events) } else { self.turn_open(device_context, events) }
    }

    /// Sends a frame right after its submission, without reading.
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) -> TurnOutcome {
        let PeerStage::Established(connection) = &mut self.stage else { return TurnOutcome::Again };
        if self.closing.is_some() {
            return TurnOutcome::Again;
        }
        // A next turn registers the waker, meets an error again after reading, and checks whether the peer may be
        // read again.
        let is_flushed = matches!(connection.flush(self.id, events), Ok(false));
        if is_flushed && !connection.is_paused() { TurnOutcome::Rest } else { TurnOutcome::Again }
    }

    fn turn_open(&mut self, device_context: &DeviceContext, events: &mut Vec<Event>) -> TurnOutcome {
        let PeerStage::Established(connection) = &mut self.stage else { return TurnOutcome::Rest };
        let is_accepted = self.unread.is_some();
        let turn = connection.turn(self.id, &self.waker, self.unread, events);
        let upgrade = self.upgrade.as_mut().map(|upgrade| upgrade.turn(connection, device_context, &self.waker));
        let error = match (turn, upgrade) {
            (Err(error), _) | (_, Some(Err(error))) => error,
            (Ok(_), Some(Ok(UpgradeProgress::Queued))) | (Ok(true), Some(Ok(UpgradeProgress::Pending)) | None) => {
                return TurnOutcome::Again;
            }
            (Ok(false), Some(Ok(UpgradeProgress::Pending)) | None) => return TurnOutcome::Rest,
            (Ok(_), Some(Ok(UpgradeProgress::Switched))) => {
                self.upgrade = None;
                tracing::info!(peer = self.id.0, carried_by = "verbs", "a connection over TCP goes on over verbs");
                if is_accepted {
                    let transport = "verbs: the peer offers them again".to_owned();
                    events.push(Event::Moved { peer: self.id, transport });
                } else {
                    events.push(Event::TakesAnswers { peer: self.id });
                }
                return TurnOutcome::Again;
            }
        };
        deny(device_context, (self.offered.as_ref(), is_accepted), connection.has_received(), &error);
        // The server is the last that can report a failure of its device to the client.
        let is_told = error.is_peers_fault() || is_accepted && error.is_devices_fault();
        if is_told { self.refuse(&error.to_string()) } else { TurnOutcome::Over(error.to_string()) }
    }

    /// Tells the peer the reason, and closes the connection.
    fn refuse(&mut self, reason: &str) -> TurnOutcome {
        tracing::warn!(peer = self.id.0, reason, "connection refused");
        if let PeerStage::Established(connection) = &mut self.stage {
            self.unsent = connection.take_unbegun();
            connection.send(None, refusal(ErrorCode::Invalid, reason), Payloads::new());
        }
        self.close(reason);
        TurnOutcome::Again
    }

    fn turn_closing(&mut self, events: &mut Vec<Event>) -> TurnOutcome {
        let reason = self.reason();
        let PeerStage::Established(connection) = &mut self.stage else { return TurnOutcome::Rest };
        match connection.turn_closing(self.id, &self.waker, events) {
            Ok((true, _)) => TurnOutcome::Over(reason),
            Ok((false, true)) => TurnOutcome::Again,
            Ok((false, false)) => TurnOutcome::Rest,
            Err(error) => TurnOutcome::Over(format!("{reason}: {error}")),
        }
    }
}

/// Denies verbs for a while after a device failed, or after a queue pair never received anything. `offered` is the
/// address of a connection that had a choice.
fn deny(
    device_context: &DeviceContext,
    (offered, is_accepted): (Option<&Address>, bool),
    has_received: bool,
    error: &ConnectionError,
) {
    match offered {
        Some(_) if error.is_devices_fault() || !has_received => device_context.deny(offered, &error.to_string()),
        None if error.is_devices_fault() && is_accepted => device_context.deny(None, &error.to_string()),
        _ => {}
    }
}
