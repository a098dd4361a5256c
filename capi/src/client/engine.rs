//! What turns requests into traffic: one transport, driven by whichever thread makes a call.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::client::{Client, Finished, Identity, LaneId, Output, Refused, RequestBody};
use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Doorbell, Event, Submit, Transport};
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ControlRequest, ErrorCode, Frame, Head, Kind, Role, Scheme};

/// The longest that one wait of the transport lasts, so that a missed wake-up costs no more.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// How long a turn without any transport takes.
const PAUSE: Duration = Duration::from_millis(10);
/// How often the holder of the initialiser's lease is heard.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Makes a transport: the first, and another one when that broke.
pub(crate) type MakeTransport = Box<dyn Fn() -> Result<Box<dyn Transport>, Failure> + Send>;

/// Requests, a transport and a clock.
pub(crate) struct Engine {
    requests: Client,
    /// None after it broke and no other could be made, until one can.
    transport: Option<Box<dyn Transport>>,
    make: MakeTransport,
    /// That of the transport there is.
    bell: Arc<Mutex<Option<Doorbell>>>,
    origin: Instant,
    /// How whoever made it wants servers to be reached.
    scheme: Scheme,
    control: LaneId,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    out: Vec<Output>,
    /// Whether heartbeats are due: while this trainer initialises.
    pub(super) holds_lease: bool,
    last_beat: Now,
    beats: Vec<Ticket>,
}

impl Engine {
    pub(crate) fn new(coordinator: &Address, role: Role, make: MakeTransport) -> Result<Self, Failure> {
        let identity = Identity::stranger(role, host_name(), std::process::id());
        let mut requests = Client::new(identity);
        let control = requests.add_lane(coordinator.clone(), 0, "the coordinator (server 0)".to_owned());
        let transport = make()?;
        Ok(Self {
            requests,
            bell: Arc::new(Mutex::new(Some(transport.doorbell()))),
            transport: Some(transport),
            make,
            origin: Instant::now(),
            scheme: coordinator.scheme,
            control,
            queue: VecDeque::new(),
            events: Vec::new(),
            out: Vec::new(),
            holds_lease: false,
            last_beat: Now(0),
            beats: Vec::new(),
        })
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

    /// Wakes a turn that waits, from any thread, whichever transport there is then.
    pub(super) fn doorbell(&self) -> Doorbell {
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

    /// A question to the coordinator, and the lane that it goes over.
    pub(super) fn question(&self, request: Request) -> (LaneId, Frame) {
        let message = ControlRequest { request: Some(request) };
        (self.control, Frame::with_control(Head::new(Kind::Control), &message))
    }

    /// Asks the coordinator and waits for the answer's control message.
    pub(crate) fn control(&mut self, request: Request, deadline: Duration, what: &str) -> Result<Finished, Refused> {
        let (lane, frame) = self.question(request);
        let ticket = self.ask(lane, frame, RequestBody::default());
        let mut finished = self.finish(&[ticket], deadline, what)?;
        Ok(finished.pop().expect("one request has one answer"))
    }

    /// Takes every request that is over, but for heartbeats.
    pub(super) fn take_finished(&mut self) -> impl Iterator<Item = (Ticket, Result<Finished, Refused>)> {
        let beats = &mut self.beats;
        self.requests.take_finished().filter(|(ticket, _)| {
            let before = beats.len();
            beats.retain(|beat| beat != ticket);
            beats.len() == before
        })
    }

    /// Whether some shard may be at another address.
    pub(super) fn is_astray(&self) -> bool {
        self.requests.is_astray()
    }

    /// Changes where a lane connects to next.
    pub(super) fn move_lane(&mut self, lane: LaneId, address: Address) {
        self.requests.move_lane(lane, address.reached_by(self.scheme));
    }

    /// Who did not answer these requests, whose tickets are in order, in words.
    pub(super) fn late(&self, tickets: &[Ticket], deadline: Duration) -> String {
        format!("no answer within {:.1} s from {}", deadline.as_secs_f64(), self.requests.outstanding(tickets))
    }

    /// Ends requests, whose tickets are in order, without an answer; each is finished once everything of it is back.
    pub(super) fn abandon(&mut self, tickets: &[Ticket], text: String) {
        let refused = Refused { code: ErrorCode::Deadline, text };
        self.requests.cancel(tickets, &refused, &mut self.out);
    }

    /// Works until every request is answered or the deadline has passed; no parcel is away when it returns.
    pub(super) fn finish(
        &mut self,
        tickets: &[Ticket],
        deadline: Duration,
        what: &str,
    ) -> Result<Vec<Finished>, Refused> {
        let end = self.now() + deadline;
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
            Some(one) => Err(Refused { code: one.code, text: format!("{what}: {}", one.text) }),
            None => Ok(finished),
        }
    }

    /// Sends a heartbeat when one is due and the one before was answered.
    fn beat(&mut self) {
        if !self.holds_lease {
            return;
        }
        let now = self.now();
        if now < self.last_beat + HEARTBEAT || !self.beats.is_empty() {
            return;
        }
        self.last_beat = now;
        let (lane, frame) = self.question(Request::Heartbeat(true));
        let ticket = self.ask(lane, frame, RequestBody::default());
        self.beats.push(ticket);
    }

    /// One turn: everything that can move moves, then the transport waits for at most `wait`.
    pub(super) fn turn(&mut self, wait: Duration) {
        self.beat();
        let now = self.now();
        self.requests.drive(now, &mut self.out);
        self.flush();
        if !wait.is_zero() {
            let until = self.requests.deadline().map_or(wait, |deadline| now.until(deadline).min(wait));
            match &mut self.transport {
                Some(transport) => transport.wait(until.min(WAIT_LONGEST)),
                None => std::thread::sleep(until.min(PAUSE)),
            }
        }
        self.take_in();
    }

    /// Whether something that was asked is over, and nobody has taken it.
    pub(super) fn has_finished(&self) -> bool {
        self.requests.has_finished()
    }

    /// Takes in what has happened and hands over what may leave now, without waiting and without asking anything.
    pub(super) fn take_in(&mut self) {
        if let Some(transport) = &mut self.transport
            && let Err(failure) = transport.poll(&mut self.events)
        {
            self.break_off(&failure);
        }
        let now = self.now();
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            self.requests.handle(now, event, &mut self.out);
        }
        self.events = events;
        self.flush();
    }

    /// Hands over what was asked, as far as it may leave, without waiting.
    pub(super) fn flush(&mut self) {
        if self.out.is_empty() && self.queue.is_empty() {
            return;
        }
        self.carry_out(self.now());
        if let Some(transport) = &mut self.transport
            && let Err(failure) = transport.submit(&mut self.queue)
        {
            self.break_off(&failure);
        }
    }

    /// The transport is of no use any more: every parcel goes with it, and another takes its place.
    pub(super) fn break_off(&mut self, failure: &Failure) {
        self.answers_to(None);
        // It goes whether there is another or not: a call that is over has its memory back.
        let broken = self.transport.take();
        // What panicked once may do so again while it goes.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
        self.queue.clear();
        self.out.clear();
        self.events.clear();
        let refused = Refused { code: ErrorCode::Invalid, text: failure.to_string() };
        self.requests.break_off(self.now(), &refused);
    }

    /// Begins to connect, with a new transport when the one before broke.
    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if self.transport.is_none() {
            let transport = (self.make)()?;
            self.answers_to(Some(transport.doorbell()));
            self.transport = Some(transport);
        }
        self.transport.as_mut().expect("there is one now").connect(address)
    }

    fn carry_out(&mut self, now: Now) {
        while !self.out.is_empty() {
            let mut out = std::mem::take(&mut self.out);
            for output in out.drain(..) {
                match output {
                    Output::Submit(submit) => self.queue.push_back(submit),
                    Output::Close(peer) => {
                        if let Some(transport) = &mut self.transport {
                            transport.close(peer);
                        }
                    }
                    Output::Connect { lane, address } => match self.connect(&address) {
                        Ok(peer) => self.requests.connecting(lane, peer, &mut self.out),
                        Err(failure) => self.requests.unreachable(now, lane, &failure),
                    },
                }
            }
            if self.out.is_empty() {
                // Nothing followed: the room is kept for the next turn.
                self.out = out;
                return;
            }
        }
    }

    pub(super) fn now(&self) -> Now {
        Now(u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "unknown".to_owned())
}
