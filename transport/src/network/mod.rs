//! Transport to other processes: TCP everywhere, shared memory within a machine, and verbs between machines with RDMA
//! devices.
//!
//! A [`Network`] owns a runtime that runs only inside [`Transport::poll`] and [`Transport::wait`], on the caller's
//! thread, so no frame changes threads. Each peer has its own waker, and a turn visits ready peers only. A [`Listener`]
//! accepts for all lanes of a server, reads each hello, and hands the connection to its lane.

mod blocking_pool;
mod checks;
mod failures;
mod handoff;
mod listener;
mod listening_user;
mod local_token;
mod peer;
mod policy;
mod reader;
mod setup;
mod socket;
mod tcp;
mod token;
mod upgrade;
mod wakeups;
mod writer;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::limits::{RECEIVES_MAX, UNREAD_BYTES_MAX};
use pserver_core::port::{Capabilities, Doorbell, Event, ReceiveBuffers, Submit, Transport};
use pserver_core::wire::{Address, Flags, Scheme};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Sleep;

pub use checks::{CHECKS_EXPECTED, ChecksumPolicy};
pub use handoff::ConnectionSender;
pub use listener::{Lanes, Listener, Stop};
pub use local_token::{share_token, shared_token};
pub use policy::{POLL_EXPECTED, PollPolicy};
pub use socket::SocketOptions;
pub use token::JobToken;

use handoff::AcceptedConnection;
use peer::{NetworkPeer, TurnOutcome};
use policy::SpinHistory;
use setup::ConnectionSetup;
use wakeups::Wakeups;

use crate::connection::UnreadLimit;
use crate::payload::{assert_body, gone_event};
use crate::tls::Encryption;
use crate::verbs::{DeviceContext, DeviceWatcher, FabricSettings, VerbsCounters, VerbsDevices};

/// Linux accepts no more slices in one vectored call.
const SLICES_MAX: usize = 1024;
/// Under load, one poll of so many asks the system for readiness.
const POLLS_PER_IO: u64 = 8;
/// Polls without work that are not followed by a wait: one of so many asks the system.
const IDLE_POLLS_PER_IO: u64 = 2;
/// While every connection uses shared memory, the system only has wake-ups and closed sockets to report.
const POLLS_PER_IO_SHM: u64 = 256;
/// Reading the clock costs as much as so many reads of memory.
const SPINS_PER_CLOCK: u64 = 16;
/// The longest sleep; a wait may return early.
const SLEEP_LONGEST: Duration = Duration::from_hours(1);
/// A wait may be longer by this: the runtime's clock is no finer, and moving its timer costs a system call.
const LATE: Duration = Duration::from_millis(1);
/// Returned payload references cause no wake-up. While some are borrowed, a wait lasts at most this long at first, and
/// twice as long after each wait without an event.
const BORROWED_POLL: Duration = Duration::from_millis(1);
/// Connections are asked so often whether a device has lost their work.
const STALLS_LOOKED_AT: Duration = Duration::from_secs(1);
/// The longest of these waits: the reader keeps a view, and the references are not urgent.
const BORROWED_POLL_LONGEST: Duration = Duration::from_millis(128);

/// Options of a transport: sockets, timeouts, limits and policies.
// tidy: allow fields: each has a default, and a caller names the few that differ
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Options of TCP sockets.
    pub socket: SocketOptions,
    /// Time to connect to each of the addresses of a name.
    pub connect_timeout: Duration,
    /// Time for a closing connection to send its queue.
    pub linger: Duration,
    /// Time for a new connection to send its hello.
    pub hello_timeout: Duration,
    /// Frames queued for one peer; further ones stay with the caller.
    pub sends_queued_max: usize,
    /// Bytes of answers that a connected client may leave unread before nothing more is read from it.
    pub unread_bytes_max: u64,
    /// The policy for payload checksums.
    pub checks: ChecksumPolicy,
    /// The policy of waits.
    pub poll: PollPolicy,
    /// The devices for connections over verbs.
    pub devices: VerbsDevices,
    /// Which of several equal devices the first connection uses: each process and each shard has another number.
    pub device_turn: usize,
    /// Settings of their queue pairs.
    pub fabric: FabricSettings,
    /// The job's token, by which both ends authenticate. Without one a client asks a loopback server of its user.
    pub token: Option<JobToken>,
    /// Encryption of connections over TCP; none of them is encrypted without it.
    pub encryption: Option<Encryption>,
    /// Whether a loopback listener without a token makes one for clients of its user. A listener without any token
    /// accepts every client.
    pub local_token: bool,
    /// Whether a client without a token refuses another user's server on loopback: nobody named the address.
    pub own_user_alone: bool,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            socket: SocketOptions::default(),
            connect_timeout: Duration::from_secs(5),
            linger: Duration::from_secs(1),
            hello_timeout: Duration::from_secs(2),
            sends_queued_max: 64,
            unread_bytes_max: UNREAD_BYTES_MAX,
            checks: ChecksumPolicy::BetweenHosts,
            poll: PollPolicy::Adaptive,
            devices: VerbsDevices::Best,
            device_turn: 0,
            fabric: FabricSettings::default(),
            token: None,
            encryption: None,
            local_token: false,
            own_user_alone: false,
        }
    }
}

/// A transport over TCP, shared memory and verbs, owned by one thread.
pub struct Network {
    options: NetworkOptions,
    peers: BTreeMap<PeerId, NetworkPeer>,
    peers_created: u64,
    /// Peers with work, in order of arrival; each once.
    ready: VecDeque<PeerId>,
    /// Closing peers with their deadlines, in that order.
    ending: VecDeque<(Instant, PeerId)>,
    /// Events that occurred outside of a poll.
    events: Vec<Event>,
    /// Kept for its allocation.
    touched: Vec<PeerId>,
    polling: PollState,
    device_context: DeviceContext,
    incoming: IncomingConnections,
    io: NetworkIo,
}

/// The runtime, and what ends its waits.
struct NetworkIo {
    wakeups: Arc<Wakeups>,
    doorbell: Doorbell,
    /// The timer of a sleep. It is reused: moving it back costs nothing, a new one two system calls.
    alarm: Pin<Box<Sleep>>,
    runtime: IoRuntime,
}

/// Decides how often the system is asked for readiness, and how a wait passes.
struct PollState {
    polls: u64,
    /// Consecutive polls without work.
    idle_polls: u64,
    /// Peers whose shared memory is polled.
    polled: Vec<PeerId>,
    /// Peers of which the system need not be asked often.
    quiet: usize,
    /// Woken peers. Kept for its allocation.
    woken: Vec<PeerId>,
    spin: SpinHistory,
    /// The longest wait while payload references are borrowed.
    borrowed: Duration,
    /// When connections were last asked whether a device has lost their work.
    stalls_looked_at: Instant,
}

/// Connections that a listener accepted for this transport.
struct IncomingConnections {
    sender: ConnectionSender,
    accepted: Receiver<AcceptedConnection>,
}

/// The reason why one direction of a connection stopped in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IoProgress {
    /// Nothing to do until more is submitted.
    Idle,
    /// The socket is empty, or full.
    Blocked,
    /// The turn's budget is spent.
    BudgetSpent,
}

/// The runtime. Dropping it does not wait for name resolution in progress.
struct IoRuntime(Option<Runtime>);

impl Network {
    /// A transport without connections.
    ///
    /// # Errors
    /// [`Failure::Node`] when the system has no descriptors for it.
    pub fn new(options: NetworkOptions) -> Result<Self, Failure> {
        let (wakeups, runtime) = (Arc::new(Wakeups::default()), IoRuntime::new()?);
        let doorbell = Doorbell::new({
            let wakeups = Arc::clone(&wakeups);
            move || wakeups.notify_wait()
        });
        let watcher = DeviceWatcher { runtime: runtime.tokio().handle().clone(), doorbell: doorbell.clone() };
        let device_context = DeviceContext::new(
            (options.devices.clone(), options.device_turn),
            options.fabric.clone(),
            options.checks == ChecksumPolicy::Always,
            watcher,
        );
        let (sender, accepted) = ConnectionSender::new(&wakeups, device_context.clone());
        let alarm = runtime.alarm();
        Ok(Self {
            options,
            device_context,
            peers: BTreeMap::new(),
            peers_created: 0,
            ready: VecDeque::new(),
            ending: VecDeque::new(),
            events: Vec::new(),
            touched: Vec::new(),
            polling: PollState {
                polls: 0,
                idle_polls: 0,
                polled: Vec::new(),
                quiet: 0,
                woken: Vec::new(),
                spin: SpinHistory::new(),
                borrowed: BORROWED_POLL,
                stalls_looked_at: Instant::now(),
            },
            incoming: IncomingConnections { sender, accepted },
            io: NetworkIo { wakeups, doorbell, alarm, runtime },
        })
    }

    /// A sender of accepted connections to this transport; for [`Listener::run`].
    #[must_use]
    pub fn connection_sender(&self) -> ConnectionSender {
        self.incoming.sender.clone()
    }

    /// The counters of verbs traffic.
    #[must_use]
    pub fn verbs(&self) -> Arc<VerbsCounters> {
        Arc::clone(self.device_context.counters())
    }

    fn next_peer(&mut self) -> PeerId {
        self.peers_created += 1;
        PeerId(self.peers_created)
    }

    fn add(&mut self, id: PeerId, mut peer: NetworkPeer) {
        peer.mark_ready();
        self.peers.insert(id, peer);
        self.ready.push_back(id);
    }

    fn mark_ready(&mut self, id: PeerId) {
        if self.peers.get_mut(&id).is_some_and(NetworkPeer::mark_ready) {
            self.ready.push_back(id);
        }
    }

    fn accept(&mut self) {
        while let Ok(AcceptedConnection { stream, mut hello, origin, scheme }) = self.incoming.accepted.try_recv() {
            // The client repeats it in its next frame.
            hello.head.flags = hello.head.flags.without(Flags::WANT_CHECKS);
            let peer = self.next_peer();
            let transport = stream.transport(scheme, self.options.encryption.is_some());
            self.events.push(Event::Accepted { peer, origin, transport });
            let accepted = {
                let _inside = self.io.runtime.tokio().enter();
                setup::accepted(stream, scheme, self.options.checks)
            };
            match accepted {
                Ok(connection) => {
                    self.events.push(Event::Received { peer, frame: hello, body: ReceiveBuffers::new() });
                    let unread =
                        UnreadLimit { frames: self.options.sends_queued_max, bytes: self.options.unread_bytes_max };
                    self.add(peer, NetworkPeer::accepted(peer, connection, (unread, scheme), &self.io.wakeups));
                }
                Err(error) => self.events.push(gone_event(peer, format!("accepting: {error}"))),
            }
        }
    }

    fn collect_woken(&mut self) {
        let mut woken = std::mem::take(&mut self.polling.woken);
        self.io.wakeups.take(&mut woken);
        for id in woken.drain(..) {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.socket_woken();
                self.mark_ready(id);
            }
        }
        self.polling.woken = woken;
    }

    /// Marks the polled peers with work as ready.
    fn collect_polled(&mut self) {
        for index in 0..self.polling.polled.len() {
            let id = self.polling.polled[index];
            if self.peers.get_mut(&id).is_some_and(NetworkPeer::has_work) {
                self.mark_ready(id);
            }
        }
    }

    /// Calls `act` for each polled peer.
    fn each_polled(&mut self, mut act: impl FnMut(&mut NetworkPeer)) {
        for id in &self.polling.polled {
            self.peers.get_mut(id).into_iter().for_each(&mut act);
        }
    }

    fn has_work(&mut self) -> bool {
        let Self { polling, peers, device_context, .. } = self;
        device_context.collect() || polling.polled.iter().any(|id| peers.get_mut(id).is_some_and(NetworkPeer::has_work))
    }

    /// Polls between two requests for readiness.
    fn polls_per_io(&self) -> u64 {
        if self.needs_io() { POLLS_PER_IO } else { POLLS_PER_IO_SHM }
    }

    /// Whether some connection needs the system to report readiness.
    fn needs_io(&self) -> bool {
        self.polling.quiet < self.peers.len() || self.peers.is_empty()
    }

    /// Polls memory without sleeping, for at most `limit`; whether there is work.
    fn spin_for_work(&mut self, limit: Duration) -> bool {
        let spins_per_io = if self.needs_io() { 1 } else { POLLS_PER_IO_SHM };
        let mut began = None;
        for turn in 1_u64.. {
            if self.has_work() || self.io.wakeups.take_notification() || !self.incoming.accepted.is_empty() {
                return true;
            }
            if turn.is_multiple_of(spins_per_io) {
                self.io.runtime.poll_io();
                if self.io.wakeups.has_woken() {
                    return true;
                }
            }
            if turn.is_multiple_of(SPINS_PER_CLOCK) && began.get_or_insert_with(Instant::now).elapsed() >= limit {
                break;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Sleeps until a wake-up, a ring of the doorbell, or `limit`.
    fn wait_in_kernel(&mut self, limit: Duration) {
        self.each_polled(NetworkPeer::request_wakeup);
        // Work that arrived before the wake-up was requested causes no wake-up.
        if self.device_context.arm() && !self.has_work() {
            let NetworkIo { wakeups, alarm, runtime, .. } = &mut self.io;
            let (until, set) = (tokio::time::Instant::now() + limit.min(SLEEP_LONGEST), alarm.deadline());
            if alarm.is_elapsed() || set < until || until + LATE < set {
                alarm.as_mut().reset(until);
            }
            runtime.tokio().block_on(async {
                tokio::select! {
                    biased;
                    () = wakeups.wait() => {}
                    () = alarm.as_mut() => {}
                }
            });
        }
        self.each_polled(NetworkPeer::cancel_wakeup);
    }

    fn remove_overdue(&mut self) {
        while let Some((until, id)) = self.ending.front().copied() {
            if until > Instant::now() {
                return;
            }
            self.ending.pop_front();
            if let Some(peer) = self.peers.get(&id) {
                let reason = peer.reason();
                self.remove(id, reason);
            }
        }
    }

    /// Ends connections whose device has lost a request, once a second: a device that works completes it, or gives it
    /// up, within its patience.
    fn remove_stalled(&mut self) {
        let now = Instant::now();
        if now < self.polling.stalls_looked_at + STALLS_LOOKED_AT {
            return;
        }
        self.polling.stalls_looked_at = now;
        let limit = self.options.fabric.patience() * 2;
        let stalled = self.peers.iter_mut().filter_map(|(id, peer)| peer.is_stalled(now, limit).then_some(*id));
        for id in stalled.collect::<Vec<_>>() {
            let reason = format!("verbs: the device has not completed a request for {:.1} s", limit.as_secs_f64());
            tracing::warn!(peer = id.0, reason, "connection closed");
            self.remove(id, reason);
        }
    }

    fn remove(&mut self, id: PeerId, reason: String) {
        if let Some(peer) = self.peers.remove(&id) {
            if peer.is_listed() {
                self.polling.polled.retain(|polled| *polled != id);
            }
            self.polling.quiet -= usize::from(peer.is_quiet());
            peer.into_gone(reason, &mut self.events);
        }
    }

    /// One turn of every ready peer.
    fn turn(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else {
                return;
            };
            let Some(peer) = self.peers.get_mut(&id) else {
                continue;
            };
            peer.clear_ready();
            let was_closing = peer.is_closing();
            let turn = peer.turn(&self.device_context, &mut self.events);
            if peer.becomes_listed() {
                self.polling.polled.push(id);
            }
            self.polling.quiet += usize::from(peer.becomes_quiet());
            if peer.is_closing() && !was_closing {
                self.ending.push_back((Instant::now() + self.options.linger, id));
            }
            match turn {
                TurnOutcome::Rest => {}
                TurnOutcome::Again => self.mark_ready(id),
                TurnOutcome::Over(reason) => self.remove(id, reason),
            }
        }
    }
}

impl Transport for Network {
    fn capabilities(&self) -> Capabilities {
        // Only verbs overlap receives; a stream has one payload after the other.
        let receives = if matches!(self.options.devices, VerbsDevices::None) { 1 } else { RECEIVES_MAX };
        Capabilities { name: "network", checks_payload: self.options.checks == ChecksumPolicy::Always, receives }
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if address.scheme == Scheme::Loopback {
            return Err(Failure::call(format!("address \"{address}\": this transport connects to other processes")));
        }
        let id = self.next_peer();
        let task = self.io.runtime.tokio().spawn(socket::connect(
            address.clone(),
            self.options.clone(),
            self.device_context.clone(),
        ));
        self.add(id, NetworkPeer::connecting(id, ConnectionSetup::new(task, self.options.checks), &self.io.wakeups));
        Ok(id)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        if queue.is_empty() {
            return Ok(());
        }
        let mut touched = std::mem::take(&mut self.touched);
        for _ in 0..queue.len() {
            let Some(work) = queue.pop_front() else { break };
            let id = work.peer();
            let Some(peer) = self.peers.get_mut(&id) else {
                self.events.push(work.into_returned());
                continue;
            };
            match work {
                // A peer without room gets none within this call, so its sends stay in order.
                Submit::Send { .. } if !peer.has_room(self.options.sends_queued_max) => queue.push_back(work),
                Submit::Send { ticket, frame, body, .. } => {
                    assert_body(&frame, &body);
                    peer.send(ticket, frame, body);
                }
                // Receive buffers are always accepted, because the peer may depend on this side reading.
                Submit::PostReceive { into, .. } => {
                    peer.post_receive(into);
                    self.mark_ready(id);
                }
                Submit::PostAnswer { request, into, .. } => peer.post_answer(request, into),
            }
            if touched.last() != Some(&id) {
                touched.push(id);
            }
        }
        for id in touched.drain(..) {
            let turn = self.peers.get_mut(&id).map(|peer| peer.flush(&mut self.events));
            if matches!(turn, Some(TurnOutcome::Again)) {
                self.mark_ready(id);
            }
        }
        self.touched = touched;
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        if self.device_context.is_used() {
            self.device_context.collect();
            if self.device_context.take_failure() {
                self.peers.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| self.mark_ready(id));
            }
        }
        self.collect_woken();
        self.collect_polled();
        let is_idle = self.ready.is_empty() && self.events.is_empty();
        self.polling.idle_polls = if is_idle { self.polling.idle_polls + 1 } else { 0 };
        let asks = is_idle && self.needs_io() && self.polling.idle_polls.is_multiple_of(IDLE_POLLS_PER_IO);
        if asks || self.polling.polls.is_multiple_of(self.polls_per_io()) {
            self.io.runtime.poll_io();
            self.collect_woken();
        }
        self.polling.polls += 1;
        self.accept();
        self.remove_overdue();
        self.turn();
        // After completions were handled: this thread may itself have been stopped for longer.
        if self.device_context.is_used() {
            self.remove_stalled();
        }
        if !self.events.is_empty() {
            self.polling.borrowed = BORROWED_POLL;
        }
        events.append(&mut self.events);
        Ok(())
    }

    fn close(&mut self, id: PeerId) {
        if self.peers.get_mut(&id).is_some_and(|peer| peer.close("closed by this side")) {
            self.ending.push_back((Instant::now() + self.options.linger, id));
            self.mark_ready(id);
        }
    }

    fn wait(&mut self, limit: Duration) {
        if !self.events.is_empty() || !self.ready.is_empty() || !self.incoming.accepted.is_empty() || self.has_work() {
            return;
        }
        let until = self.ending.front().map(|(until, _)| until.saturating_duration_since(Instant::now()));
        let has_borrowed =
            self.polling.polled.iter().any(|id| self.peers.get(id).is_some_and(NetworkPeer::has_borrowed));
        let borrowed_poll_due = has_borrowed.then_some(self.polling.borrowed);
        self.polling.borrowed = (self.polling.borrowed * 2).min(BORROWED_POLL_LONGEST);
        let limit = [Some(limit), until, borrowed_poll_due].into_iter().flatten().min().unwrap_or(limit);
        let Some(permit) = self.polling.spin.begin(self.options.poll) else {
            return self.wait_in_kernel(limit);
        };
        let looked = permit.limit().min(limit);
        let has_found = self.spin_for_work(looked);
        drop(permit);
        self.polling.spin.learn(has_found);
        if !has_found && looked < limit {
            self.wait_in_kernel(limit - looked);
        }
    }

    fn doorbell(&self) -> Doorbell {
        self.io.doorbell.clone()
    }
}

impl IoRuntime {
    fn new() -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread().enable_all().thread_name("pserver-names").build();
        let failed = |error: io::Error| Failure::Node(format!("making the network runtime: {error}"));
        Ok(Self(Some(runtime.map_err(failed)?)))
    }

    fn tokio(&self) -> &Runtime {
        self.0.as_ref().expect("it goes only when it is dropped")
    }

    /// A timer that is not set.
    fn alarm(&self) -> Pin<Box<Sleep>> {
        let _inside = self.tokio().enter();
        Box::pin(tokio::time::sleep(Duration::ZERO))
    }

    /// Asks the system for readiness, without waiting.
    fn poll_io(&self) {
        self.tokio().block_on(tokio::task::yield_now());
    }
}

impl Drop for IoRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
