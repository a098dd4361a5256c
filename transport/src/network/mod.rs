//! Connections to other processes: TCP, which is always there; within a machine shared memory, which a socket goes
//! with; and between machines that have devices for it verbs, which a TCP connection goes with.
//!
//! A [`Network`] owns a runtime that lives only inside [`Transport::poll`] and [`Transport::wait`], on the
//! caller's thread; no frame changes threads. Each peer has a waker of its own, so a turn costs what the peers
//! that may go on cost, not what all of them would. A [`Listener`] accepts for all lanes of a server, reads
//! each hello, and hands the connection to its lane.

mod adopter;
mod checks;
mod listener;
mod makers;
mod peer;
mod policy;
mod reader;
mod socket;
mod token;
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
use pserver_core::limits::LANDINGS_MAX;
use pserver_core::port::{Capabilities, Doorbell, Event, Submit, Transport};
use pserver_core::wire::{Address, Scheme};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Sleep;

pub use adopter::Adopter;
pub use checks::{CHECKS_EXPECTED, Checks};
pub use listener::{Listener, Stop};
pub use policy::{POLL_EXPECTED, Poll};
pub use token::Token;

use adopter::{Adopted, Caller};
use peer::{Line, Peer, Turn};
use policy::Spin;
use wakeups::Wakeups;

use crate::payload::{assert_body, gone, returned};
use crate::shm::{self, Side};
use crate::verbs::{self, Counters, Devices, Hall, Watcher, Welcomed};

/// Slices in one vectored call: Linux takes no more.
const SLICES_MAX: usize = 1024;
/// A peer that has moved this much lets the others go on.
const TURN_BYTES: usize = 1024 * 1024;
/// A peer that has delivered this many events lets the others go on.
const TURN_FRAMES: usize = 16;
/// While there is always something to do, the system is asked for more once in so many polls.
const POLLS_PER_LOOK: u64 = 8;
/// One that found nothing is followed by a wait, which asks the system anyway. Where none follows, every so many of
/// them ask.
const IDLE_POLLS_PER_LOOK: u64 = 2;
/// While every connection goes through shared memory, the system has wake-ups to tell of, and the ends of peers.
const POLLS_PER_GLANCE: u64 = 256;
/// A look at the clock costs as much as so many at memory.
const SPINS_PER_CLOCK: u64 = 16;
/// A wait may be this much too long: the runtime's clock has no finer marks, and moving its alarm ahead is a call.
const LATE: Duration = Duration::from_millis(1);
/// What is lent to another process comes back without a wake-up; while some is, a wait is no longer than this at first,
/// and twice as long each time that nothing has happened.
const LENT_LOOK: Duration = Duration::from_millis(1);
/// The longest of these waits: somebody holds a view, and nobody waits for what is lent.
const LENT_LOOK_LONGEST: Duration = Duration::from_millis(128);

/// How sockets are made and how long things may take.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// The socket's send buffer in bytes; the system's own choice, which grows with need, when absent.
    pub send_buffer_bytes: Option<u32>,
    /// The socket's receive buffer in bytes; the system's own choice, which grows with need, when absent.
    pub receive_buffer_bytes: Option<u32>,
    /// How long each of the addresses behind a name may take to answer.
    pub connect_timeout: Duration,
    /// A connection that is silent this long is probed; three probes without an answer end it.
    pub keepalive_idle: Duration,
    /// How long a connection that is being closed may take to send what is queued.
    pub linger: Duration,
    /// How long somebody who connects may take to say hello.
    pub hello_timeout: Duration,
    /// Frames queued for one peer; more are left to the caller.
    pub sends_queued_max: usize,
    /// Where payloads carry checksums.
    pub checks: Checks,
    /// How a wait waits.
    pub poll: Poll,
    /// Which device connections over verbs use.
    pub devices: Devices,
    /// The job's token, which both ends must show; without one anybody may connect.
    pub token: Option<Token>,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            connect_timeout: Duration::from_secs(5),
            keepalive_idle: Duration::from_secs(10),
            linger: Duration::from_secs(1),
            hello_timeout: Duration::from_secs(2),
            sends_queued_max: 64,
            checks: Checks::BetweenHosts,
            poll: Poll::Adaptive,
            devices: Devices::Best,
            token: None,
        }
    }
}

/// Connections, owned by one thread.
pub struct Network {
    options: NetworkOptions,
    peers: BTreeMap<PeerId, Peer>,
    peers_made: u64,
    /// Peers that may go on, in the order in which they were woken; each once.
    ready: VecDeque<PeerId>,
    /// Peers that end, and when at the latest, in that order.
    ending: VecDeque<(Instant, PeerId)>,
    /// What happened outside of a poll.
    events: Vec<Event>,
    /// Kept between polls for its memory.
    woken: Vec<PeerId>,
    /// Kept between submissions for their memory.
    full: Vec<PeerId>,
    touched: Vec<PeerId>,
    polls: u64,
    /// Polls without anything to do since there was something.
    idle_polls: u64,
    /// Peers whose memory is looked at.
    shared: Vec<PeerId>,
    hall: Hall,
    spin: Spin,
    lent_look: Duration,
    adopter: Adopter,
    adopted: Receiver<Adopted>,
    wakeups: Arc<Wakeups>,
    bell: Doorbell,
    /// Ends a sleep. It is kept, because one that is moved back costs nothing, and a new one two calls of the system.
    alarm: Pin<Box<Sleep>>,
    engine: Engine,
}

/// How far one direction of a connection came in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    /// There is nothing to do before somebody submits more.
    Idle,
    /// The socket has no more, or takes no more.
    Blocked,
    /// There is more, but others wait.
    Turn,
}

/// The runtime. Dropping it does not wait for a name that is being resolved.
struct Engine(Option<Runtime>);

impl Network {
    /// A transport without connections.
    ///
    /// # Errors
    /// [`Failure::Node`] when the system has no descriptors for it.
    pub fn new(options: NetworkOptions) -> Result<Self, Failure> {
        let (wakeups, engine) = (Arc::new(Wakeups::default()), Engine::new()?);
        let bell = Doorbell::new({
            let wakeups = Arc::clone(&wakeups);
            move || wakeups.ring()
        });
        let watcher = Watcher { runtime: engine.runtime().handle().clone(), bell: bell.clone() };
        let hall = Hall::new(options.devices.clone(), options.checks == Checks::Always, watcher);
        let (adopter, adopted) = Adopter::new(&wakeups, hall.clone());
        let alarm = engine.alarm();
        Ok(Self {
            alarm,
            options,
            hall,
            peers: BTreeMap::new(),
            peers_made: 0,
            ready: VecDeque::new(),
            ending: VecDeque::new(),
            events: Vec::new(),
            woken: Vec::new(),
            full: Vec::new(),
            touched: Vec::new(),
            polls: 0,
            idle_polls: 0,
            shared: Vec::new(),
            lent_look: LENT_LOOK,
            spin: Spin::new(),
            adopter,
            adopted,
            bell,
            wakeups,
            engine,
        })
    }

    /// Hands accepted connections to this transport; for [`Listener::run`].
    #[must_use]
    pub fn adopter(&self) -> Adopter {
        self.adopter.clone()
    }

    /// What went over verbs.
    #[must_use]
    pub fn verbs(&self) -> Arc<Counters> {
        Arc::clone(self.hall.counters())
    }

    fn next_peer(&mut self) -> PeerId {
        self.peers_made += 1;
        PeerId(self.peers_made)
    }

    fn add(&mut self, id: PeerId, mut peer: Peer) {
        peer.list();
        self.peers.insert(id, peer);
        self.ready.push_back(id);
    }

    fn list(&mut self, id: PeerId) {
        if self.peers.get_mut(&id).is_some_and(Peer::list) {
            self.ready.push_back(id);
        }
    }

    fn adopt(&mut self) {
        while let Ok(Adopted { caller, hello, origin, scheme }) = self.adopted.try_recv() {
            let peer = self.next_peer();
            self.events.push(Event::Accepted { peer, origin });
            match adopt(caller, scheme, self.options.checks, &self.engine) {
                Ok(line) => {
                    self.events.push(Event::Landed { peer, frame: hello, body: Vec::new() });
                    self.add(peer, Peer::new(peer, line, &self.wakeups));
                }
                Err(error) => self.events.push(gone(peer, format!("adopting: {error}"))),
            }
        }
    }

    fn collect_woken(&mut self) {
        let mut woken = std::mem::take(&mut self.woken);
        self.wakeups.take(&mut woken);
        for id in woken.drain(..) {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.woken();
                self.list(id);
            }
        }
        self.woken = woken;
    }

    /// Lists the peers whose memory has news.
    fn collect_shared(&mut self) {
        for index in 0..self.shared.len() {
            let id = self.shared[index];
            if self.peers.get_mut(&id).is_some_and(Peer::has_news) {
                self.list(id);
            }
        }
    }

    /// Does something with each peer whose memory is looked at.
    fn each_shared(&mut self, mut act: impl FnMut(&mut Peer)) {
        for id in &self.shared {
            self.peers.get_mut(id).into_iter().for_each(&mut act);
        }
    }

    fn has_news(&mut self) -> bool {
        let Self { shared, peers, .. } = self;
        shared.iter().any(|id| peers.get_mut(id).is_some_and(Peer::has_news))
    }

    /// How many polls may go by without asking the system.
    fn polls_per_look(&self) -> u64 {
        if self.has_sockets() { POLLS_PER_LOOK } else { POLLS_PER_GLANCE }
    }

    /// Whether the system has more to tell than wake-ups.
    fn has_sockets(&self) -> bool {
        self.shared.len() < self.peers.len() || self.peers.is_empty()
    }

    /// Looks again and again, without the system's sleep, for at most `limit`; whether there is something now.
    fn look_on(&mut self, limit: Duration) -> bool {
        let glance = if self.has_sockets() { 1 } else { POLLS_PER_GLANCE };
        let mut began = None;
        for turn in 1_u64.. {
            if self.has_news() || self.wakeups.has_rung() || !self.adopted.is_empty() {
                return true;
            }
            if turn.is_multiple_of(glance) {
                self.engine.look();
                if self.wakeups.has_woken() {
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

    /// Sleeps until something comes, somebody rings, or `limit` has passed.
    fn sleep(&mut self, limit: Duration) {
        self.each_shared(Peer::fall_asleep);
        // What came before the others knew that this side sleeps brings no wake-up.
        if !self.has_news() {
            let Self { wakeups, alarm, engine, .. } = self;
            let (until, set) = (tokio::time::Instant::now() + limit, alarm.deadline());
            if alarm.is_elapsed() || set < until || until + LATE < set {
                alarm.as_mut().reset(until);
            }
            engine.runtime().block_on(async {
                tokio::select! {
                    biased;
                    () = wakeups.wait() => {}
                    () = alarm.as_mut() => {}
                }
            });
        }
        self.each_shared(Peer::awake);
    }

    fn expire(&mut self) {
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

    fn remove(&mut self, id: PeerId, reason: String) {
        if let Some(peer) = self.peers.remove(&id) {
            self.shared.retain(|shared| *shared != id);
            self.events.push(peer.into_gone(reason));
        }
    }

    /// One turn of every peer on the list.
    fn turn(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else {
                return;
            };
            let Some(peer) = self.peers.get_mut(&id) else {
                continue;
            };
            peer.unlist();
            let was_ending = peer.is_ending();
            let turn = peer.turn(&self.hall, &mut self.events);
            if peer.is_looked_at() && !self.shared.contains(&id) {
                self.shared.push(id);
            }
            if peer.is_ending() && !was_ending {
                self.ending.push_back((Instant::now() + self.options.linger, id));
            }
            match turn {
                Turn::Rest => {}
                Turn::Again => self.list(id),
                Turn::Over(reason) => self.remove(id, reason),
            }
        }
    }

    /// Takes one piece of work, or gives it back when the peer's queue is full.
    fn take(&mut self, work: Submit) -> Option<Submit> {
        let id = work.peer();
        let Some(peer) = self.peers.get_mut(&id) else {
            self.events.push(returned(work));
            return None;
        };
        match work {
            Submit::Send { peer: id, ticket, frame, body } => {
                if !peer.has_room(self.options.sends_queued_max) {
                    return Some(Submit::Send { peer: id, ticket, frame, body });
                }
                assert_body(&frame, &body);
                peer.send(ticket, frame, body);
            }
            Submit::Land { into, .. } => {
                peer.land(into);
                self.list(id);
            }
        }
        None
    }
}

impl Transport for Network {
    fn capabilities(&self) -> Capabilities {
        // Over verbs; over a stream there is one payload after the other.
        let landings = if matches!(self.options.devices, Devices::None) { 1 } else { LANDINGS_MAX };
        Capabilities { name: "network", checks_payload: self.options.checks == Checks::Always, landings }
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if address.scheme == Scheme::Loopback {
            return Err(Failure::call(format!("address \"{address}\": this transport connects to other processes")));
        }
        let id = self.next_peer();
        let task =
            self.engine.runtime().spawn(socket::connect(address.clone(), self.options.clone(), self.hall.clone()));
        self.add(id, Peer::connecting(id, task, self.options.checks, &self.wakeups));
        Ok(id)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let (mut full, mut touched) = (std::mem::take(&mut self.full), std::mem::take(&mut self.touched));
        for _ in 0..queue.len() {
            let Some(work) = queue.pop_front() else { break };
            let id = work.peer();
            // Frames stay in order; places are taken always, because the peer may wait for us to read.
            let left = match work {
                Submit::Send { .. } if full.contains(&id) => Some(work),
                work => self.take(work),
            };
            if let Some(work) = left {
                queue.push_back(work);
                if !full.contains(&id) {
                    full.push(id);
                }
            }
            if touched.last() != Some(&id) {
                touched.push(id);
            }
        }
        for id in touched.drain(..) {
            let turn = self.peers.get_mut(&id).map(|peer| peer.flush(&mut self.events));
            if matches!(turn, Some(Turn::Again)) {
                self.list(id);
            }
        }
        full.clear();
        (self.full, self.touched) = (full, touched);
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        self.collect_woken();
        self.collect_shared();
        let is_idle = self.ready.is_empty() && self.events.is_empty();
        self.idle_polls = if is_idle { self.idle_polls + 1 } else { 0 };
        let asks = is_idle && self.has_sockets() && self.idle_polls.is_multiple_of(IDLE_POLLS_PER_LOOK);
        if asks || self.polls.is_multiple_of(self.polls_per_look()) {
            self.engine.look();
            self.collect_woken();
        }
        self.polls += 1;
        self.adopt();
        self.expire();
        self.turn();
        if !self.events.is_empty() {
            self.lent_look = LENT_LOOK;
        }
        events.append(&mut self.events);
        Ok(())
    }

    fn close(&mut self, id: PeerId) {
        if self.peers.get_mut(&id).is_some_and(|peer| peer.end("closed by this side")) {
            self.ending.push_back((Instant::now() + self.options.linger, id));
            self.list(id);
        }
    }

    fn wait(&mut self, limit: Duration) {
        if !self.events.is_empty() || !self.ready.is_empty() || !self.adopted.is_empty() || self.has_news() {
            return;
        }
        let until = self.ending.front().map(|(until, _)| until.saturating_duration_since(Instant::now()));
        let lends = self.shared.iter().any(|id| self.peers.get(id).is_some_and(Peer::lends));
        let lent = lends.then_some(self.lent_look);
        self.lent_look = (self.lent_look * 2).min(LENT_LOOK_LONGEST);
        let limit = [Some(limit), until, lent].into_iter().flatten().min().unwrap_or(limit);
        let Some(permit) = self.spin.begin(self.options.poll) else {
            return self.sleep(limit);
        };
        let looked = permit.limit().min(limit);
        let has_found = self.look_on(looked);
        drop(permit);
        self.spin.learn(has_found);
        if !has_found && looked < limit {
            self.sleep(limit - looked);
        }
    }

    fn doorbell(&self) -> Doorbell {
        self.bell.clone()
    }
}

fn adopt(caller: Caller, scheme: Scheme, checks: Checks, engine: &Engine) -> io::Result<Line> {
    let _runtime = engine.runtime().enter();
    match caller {
        Caller::Tcp(stream, answer) => match verbs::welcome(TcpStream::from_std(stream)?, answer, scheme)? {
            Welcomed::Line(line) => Ok(Line::Verbs(line)),
            Welcomed::Tcp(stream) => Ok(Line::tcp(stream, checks)),
        },
        Caller::Shm(stream, board) => {
            let line = shm::Line::new(UnixStream::from_std(stream)?, board, Side::Accepting)?;
            Ok(Line::Shm(Box::new(line)))
        }
    }
}

impl Engine {
    fn new() -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread().enable_all().thread_name("pserver-names").build();
        let failed = |error: io::Error| Failure::Node(format!("making the network runtime: {error}"));
        Ok(Self(Some(runtime.map_err(failed)?)))
    }

    fn runtime(&self) -> &Runtime {
        self.0.as_ref().expect("it goes only when it is dropped")
    }

    /// An alarm that is not set.
    fn alarm(&self) -> Pin<Box<Sleep>> {
        let _inside = self.runtime().enter();
        Box::pin(tokio::time::sleep(Duration::ZERO))
    }

    /// Learns from the system which sockets may go on, without waiting.
    fn look(&self) {
        self.runtime().block_on(tokio::task::yield_now());
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
