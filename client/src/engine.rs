//! The request engine of a client: its requests, transport and clock, driven by the holder of the client lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::client::{
    AwaitedAnswer, Client, ClientOutput, ConnectionChange, Finished, Identity, LaneId, Refused, RequestBody,
};
use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Term, Ticket};
use pserver_core::memory::shared::Descriptor;
use pserver_core::port::{Doorbell, Event, Transport};
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ControlRequest, ErrorCode, Frame, Head, Kind, Role, Scheme};

use super::control::answer;

/// Longest wait of the transport, and so the longest delay until a cancellation is seen: a signal handler cannot ring
/// the doorbell.
pub(super) const WAIT_LONGEST: Duration = Duration::from_millis(20);
/// Wait of a turn without a transport.
const PAUSE: Duration = Duration::from_millis(10);
/// Interval, during a call, of looks at the witness. Each call begins with one.
const WITNESS_INTERVAL: Duration = Duration::from_millis(1);
/// Interval of heartbeats of the initialising trainer.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Name of the coordinator in errors.
pub const COORDINATOR: &str = "the coordinator (server 0)";

/// Limit of servers that are asked what a call waits for, and that its error names.
const ASKED_MAX: usize = 4;

/// Error after the program has closed the transport's descriptors.
pub(super) const CLOSED: &str = "the program closed descriptors of this library, as becoming a daemon does; the client \
     makes new connections, and the call may be repeated";

/// Makes a transport, at start and after each failure of one.
pub type MakeTransport = Box<dyn Fn() -> Result<Box<dyn Transport>, Failure> + Send>;

/// Requests, a transport and a clock.
pub struct ClientEngine {
    requests: Client,
    /// None after a failure, until another transport is made.
    transport: Option<Box<dyn Transport>>,
    /// A descriptor opened with the transport. When the program has closed it, it has closed the transport's too.
    witness: Descriptor,
    /// When the witness was last looked at.
    witnessed: Now,
    make: MakeTransport,
    /// The doorbell of the current transport.
    bell: Arc<Mutex<Option<Doorbell>>>,
    clock: EngineClock,
    /// Scheme of the coordinator's address, used for all servers.
    scheme: Scheme,
    control: LaneId,
    /// The actions that `requests` asks for. Every function that adds some carries them out before it waits, so the
    /// work is empty then, except for work that the transport did not accept.
    out: ClientOutput,
    events: Vec<Event>,
    heartbeat: Heartbeat,
}

/// A clock that is read seldom.
struct EngineClock {
    origin: Instant,
    /// The time when it was last read: at the begin of an API call and of a turn, and after each wait.
    read: Now,
}

/// Heartbeats of the initialising trainer.
struct Heartbeat {
    /// Whether this trainer initialises and must send heartbeats.
    is_due: bool,
    last: Now,
    /// Heartbeats that are not answered.
    unanswered: Vec<Ticket>,
}

impl ClientEngine {
    /// A client's connections. `make` gives its transport.
    ///
    /// # Errors
    ///
    /// The transport's, if it cannot be made.
    pub fn new(coordinator: &Address, name: &str, role: Role, make: MakeTransport) -> Result<Self, Failure> {
        let identity = Identity::stranger(role, host_name(), std::process::id());
        let mut requests = Client::new(identity);
        let control = requests.add_lane(coordinator.clone(), 0, name.to_owned());
        let transport = make()?;
        Ok(Self {
            witness: Descriptor::witness()?,
            witnessed: Now::default(),
            requests,
            bell: Arc::new(Mutex::new(Some(transport.doorbell()))),
            transport: Some(transport),
            make,
            clock: EngineClock { origin: Instant::now(), read: Now::default() },
            scheme: coordinator.scheme,
            control,
            out: ClientOutput::default(),
            events: Vec::new(),
            heartbeat: Heartbeat { is_due: false, last: Now(0), unanswered: Vec::new() },
        })
    }

    /// Records whether this trainer initialises: it then sends heartbeats, by which it keeps its lease.
    pub(super) fn hold_lease(&mut self, holds: bool) {
        self.heartbeat.is_due = holds;
    }

    pub(super) fn identity(&self) -> &Identity {
        self.requests.identity()
    }

    pub(super) fn identify(&mut self, change: impl FnOnce(&mut Identity)) {
        self.requests.identify(change);
    }

    pub(super) fn add_lane(&mut self, address: Address, number: u64, name: String) -> LaneId {
        self.requests.add_lane(address.reached_by(self.scheme), number, name)
    }

    /// A doorbell that wakes the current transport, from any thread.
    #[must_use]
    pub fn doorbell(&self) -> Doorbell {
        let bell = Arc::clone(&self.bell);
        Doorbell::new(move || {
            let current = bell.lock().unwrap_or_else(PoisonError::into_inner).clone();
            current.iter().for_each(Doorbell::ring);
        })
    }

    fn answers_to(&self, bell: Option<Doorbell>) {
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = bell;
    }

    pub(super) fn ask(&mut self, lane: LaneId, frame: Frame, body: RequestBody) -> Ticket {
        self.requests.ask(lane, frame, body, &mut self.out)
    }

    /// The frame of a request to the coordinator, and its lane.
    pub(super) fn question(&self, request: Request) -> (LaneId, Frame) {
        let message = ControlRequest { request: Some(request) };
        (self.control, Frame::with_control(Head::new(Kind::Control), &message))
    }

    /// Asks the coordinator and waits for the answer's control message.
    pub fn control(&mut self, request: Request, deadline: Duration, what: &str) -> Result<Finished, Refused> {
        let ticket = self.start(request);
        let mut finished = self.finish(&[ticket], deadline, what)?;
        Ok(finished.pop().expect("one request has one answer"))
    }

    /// Asks the coordinator; [`ClientEngine::take`] has the answer after some turns.
    pub fn start(&mut self, request: Request) -> Ticket {
        let (lane, frame) = self.question(request);
        self.ask(lane, frame, RequestBody::default())
    }

    /// The coordinator's answer, if it has come.
    pub fn take(&mut self, ticket: Ticket) -> Option<Result<Answer, Refused>> {
        let wrong = |failure: Failure| Refused::new(ErrorCode::Invalid, failure.to_string());
        self.requests.take(ticket).map(|result| answer(&result?.control).map_err(wrong))
    }

    /// Takes all finished requests except heartbeats.
    pub(super) fn take_finished(&mut self) -> impl Iterator<Item = (Ticket, Result<Finished, Refused>)> {
        let beats = &mut self.heartbeat.unanswered;
        self.requests.take_finished().filter(|(ticket, _)| {
            let before = beats.len();
            beats.retain(|beat| beat != ticket);
            beats.len() == before
        })
    }

    /// Whether the coordinator is connected.
    pub(super) fn is_with_coordinator(&self) -> bool {
        self.requests.is_connected(self.control)
    }

    /// Describes a server that these requests wait for and that has refused connections for `limit`, also after
    /// `begun`.
    /// `tickets` are ascending, here and below.
    pub(super) fn absent(&self, limit: Duration, begun: Now, tickets: &[Ticket]) -> Option<String> {
        self.requests.absent(self.now(), limit, begun, tickets)
    }

    /// Whether a server has refused connections for `limit`.
    pub(super) fn has_absent(&self, limit: Duration) -> bool {
        self.requests.has_absent(self.now(), limit)
    }

    /// Asks the connected servers that have not answered these requests what the requests wait for.
    pub(super) fn ask_awaited(&mut self, tickets: &[Ticket]) -> Vec<(Ticket, LaneId)> {
        let lanes: Vec<LaneId> = self.requests.connected_lanes(tickets).take(ASKED_MAX).collect();
        let ask = |lane| {
            self.requests.note_awaited(lane, None);
            let (_, frame) = self.question(Request::Waiting(true));
            (self.ask(lane, frame, RequestBody::default()), lane)
        };
        lanes.into_iter().map(ask).collect()
    }

    /// Records a server's answer about what requests wait for.
    pub(super) fn note_awaited(&mut self, lane: LaneId, awaited: AwaitedAnswer) {
        self.requests.note_awaited(lane, Some(awaited).filter(|awaited| !awaited.text.is_empty()));
    }

    /// Describes the wait of these requests, if servers end it themselves.
    pub(super) fn ends_by_itself(&self, tickets: &[Ticket]) -> Option<String> {
        self.requests.ends_by_itself(tickets).map(str::to_owned)
    }

    /// Whether a shard may have another address by now.
    pub(super) fn needs_address(&self) -> bool {
        self.requests.needs_address()
    }

    /// Fails every request.
    pub(super) fn refuse_all(&mut self, refused: &Refused) {
        self.requests.refuse_all(refused, &mut self.out);
    }

    /// Whether a server that was reached does not lead the shard of its lane.
    pub(super) fn has_moved(&self) -> bool {
        self.requests.has_moved()
    }

    /// Changes the address of a lane's next connection, and the term of the shard's leader there.
    pub(super) fn move_lane(&mut self, lane: LaneId, address: Address, term: Term) {
        self.requests.move_lane(lane, address.reached_by(self.scheme), term);
    }

    /// Describes the servers that did not answer these requests.
    pub(super) fn late(&self, tickets: &[Ticket], deadline: Duration) -> String {
        format!("no answer within {:.1} s from {}", deadline.as_secs_f64(), self.requests.outstanding(tickets))
    }

    /// Cancels requests. Each is finished once the transport has returned all its buffers.
    pub(super) fn abandon(&mut self, tickets: &[Ticket], text: String) {
        let refused = Refused::new(ErrorCode::Deadline, text);
        self.requests.cancel(tickets, &refused, &mut self.out);
    }

    /// Drives the transport until all requests are answered or the deadline has passed, and all buffers are returned.
    pub(super) fn finish(
        &mut self,
        tickets: &[Ticket],
        deadline: Duration,
        what: &str,
    ) -> Result<Vec<Finished>, Refused> {
        let end = self.tick() + deadline;
        let mut finished = Vec::with_capacity(tickets.len());
        let mut refused: Option<Refused> = None;
        let (mut next, mut is_late) = (0, false);
        loop {
            while let Some(result) = tickets.get(next).and_then(|ticket| self.requests.take(*ticket)) {
                next += 1;
                match result {
                    Ok(one) => finished.push(one),
                    Err(one) => refused = refused.or(Some(one)),
                }
            }
            if next == tickets.len() {
                break;
            }
            let left = self.now().until(end);
            if left.is_zero() && !is_late {
                is_late = true;
                let text = self.late(tickets, deadline);
                self.abandon(tickets, text);
                continue;
            }
            self.turn(if is_late { WAIT_LONGEST } else { left });
        }
        match refused {
            Some(one) => Err(Refused { text: format!("{what}: {}", one.text), ..one }),
            None => Ok(finished),
        }
    }

    /// Sends a heartbeat when one is due and the previous one was answered.
    fn beat(&mut self) {
        if !self.heartbeat.is_due {
            return;
        }
        let now = self.now();
        if now < self.heartbeat.last + HEARTBEAT || !self.heartbeat.unanswered.is_empty() {
            return;
        }
        self.heartbeat.last = now;
        let ticket = self.start(Request::Heartbeat(true));
        self.heartbeat.unanswered.push(ticket);
    }

    /// One turn: submits all ready work, waits for at most `wait`, and handles events.
    pub(super) fn turn(&mut self, wait: Duration) {
        self.turn_once(wait, WAIT_LONGEST);
    }

    /// A turn of a program without signal handlers that cancel: the doorbell alone ends its wait.
    pub fn turn_until_rung(&mut self, wait: Duration) {
        self.turn_once(wait, wait);
    }

    fn turn_once(&mut self, wait: Duration, longest: Duration) {
        self.beat();
        let now = self.now();
        self.requests.drive(now, &mut self.out);
        self.flush();
        if !wait.is_zero() && (now < self.witnessed + WITNESS_INTERVAL || !self.drop_closed()) {
            let until = self.requests.deadline().map_or(wait, |deadline| now.until(deadline).min(wait));
            match &mut self.transport {
                Some(transport) => transport.wait(until.min(longest)),
                None => std::thread::sleep(until.min(PAUSE)),
            }
        }
        self.take_in();
    }

    /// Whether a finished request is not taken.
    pub(super) fn has_finished(&self) -> bool {
        self.requests.has_finished()
    }

    /// Handles events and submits ready work, without waiting and without new requests.
    pub(super) fn take_in(&mut self) {
        if let Some(transport) = &mut self.transport
            && let Err(failure) = transport.poll(&mut self.events)
        {
            self.break_off(&failure);
        }
        let now = self.tick();
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            self.requests.handle(now, event, &mut self.out);
        }
        self.events = events;
        self.flush();
    }

    /// Changes connections and submits ready work, without waiting.
    pub(super) fn flush(&mut self) {
        if self.out.is_empty() {
            return;
        }
        self.change_connections();
        if let Some(transport) = &mut self.transport
            && let Err(failure) = transport.submit(&mut self.out.work)
        {
            self.break_off(&failure);
        }
    }

    /// Drops the transport with all buffers in flight. The next connection makes another one.
    pub(super) fn break_off(&mut self, failure: &Failure) {
        self.answers_to(None);
        // It is dropped even if no other can be made, as a finished call must have its memory back.
        let broken = self.transport.take();
        // A transport that panicked may panic again when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
        self.out = ClientOutput::default();
        self.events.clear();
        let refused = Refused::new(ErrorCode::Invalid, failure.to_string());
        self.requests.break_off(self.now(), &refused);
    }

    /// Whether the program has closed descriptors of the transport.
    pub(super) fn is_closed(&mut self) -> bool {
        self.witnessed = self.now();
        !self.witness.is_open()
    }

    /// Drops a transport whose descriptors the program has closed, before their numbers are used: requests in progress
    /// fail, and the next one makes another transport. True when the transport was dropped.
    pub(super) fn drop_closed(&mut self) -> bool {
        if self.transport.is_none() || !self.is_closed() {
            return false;
        }
        if !self.requests.is_busy() {
            // It borrows no memory. Dropping it would close descriptor numbers that other files may have by now.
            std::mem::forget(self.transport.take());
        }
        self.break_off(&Failure::call(CLOSED));
        true
    }

    /// Starts a connection, on a new transport after a failure.
    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if self.transport.is_none() {
            let transport = (self.make)()?;
            self.witness = Descriptor::witness()?;
            self.answers_to(Some(transport.doorbell()));
            self.transport = Some(transport);
        }
        self.transport.as_mut().expect("there is one now").connect(address)
    }

    fn change_connections(&mut self) {
        for change in std::mem::take(&mut self.out.connections) {
            match change {
                ConnectionChange::Close(peer) => self.transport.iter_mut().for_each(|transport| transport.close(peer)),
                ConnectionChange::Connect { lane, address } => match self.connect(&address) {
                    Ok(peer) => self.requests.connecting(lane, peer, &mut self.out),
                    Err(failure) => self.requests.unreachable(self.now(), lane, &failure),
                },
            }
        }
    }

    /// The time when the clock was last read. A round asks for it fifteen times.
    pub(super) fn now(&self) -> Now {
        self.clock.read
    }

    /// Reads the clock.
    pub(super) fn tick(&mut self) -> Now {
        self.clock.read = Now(u64::try_from(self.clock.origin.elapsed().as_millis()).unwrap_or(u64::MAX));
        self.clock.read
    }
}

fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "unknown".to_owned())
}
