//! What turns requests into traffic: one transport, driven by whichever thread makes a call.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pserver_core::client::{Client, Finished, Identity, LaneId, Output, Refused, RequestBody};
use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Doorbell, Event, Submit, Transport};
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ControlRequest, ErrorCode, Frame, Head, Kind, Role, Scheme};
use pserver_transport::network::{Network, NetworkOptions};
use pserver_transport::verbs::Counters;

/// The longest that one wait of the transport lasts, so that a missed wake-up costs no more.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// How long a turn without any transport takes.
const PAUSE: Duration = Duration::from_millis(10);
/// How often the holder of the initialiser's lease is heard.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Requests, a transport and a clock.
pub(crate) struct Engine {
    requests: Client,
    /// None after it broke and no other could be made, until one can.
    transport: Option<Box<dyn Transport>>,
    /// What goes over verbs through it.
    verbs: Arc<Counters>,
    /// How it was made, and is made anew when it breaks.
    options: NetworkOptions,
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
    pub(crate) fn new(coordinator: &Address, role: Role, options: NetworkOptions) -> Result<Self, Failure> {
        let identity = Identity::stranger(role, host_name(), std::process::id());
        let mut requests = Client::new(identity);
        let control = requests.add_lane(coordinator.clone(), 0, "the coordinator (server 0)".to_owned());
        let network = Network::new(options.clone())?;
        Ok(Self {
            requests,
            verbs: network.verbs(),
            transport: Some(Box::new(network)),
            options,
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

    pub(super) fn verbs(&self) -> Arc<Counters> {
        Arc::clone(&self.verbs)
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

    /// Wakes a turn that waits, from any thread.
    pub(super) fn doorbell(&self) -> Doorbell {
        self.transport.as_ref().map_or_else(|| Doorbell::new(|| ()), |transport| transport.doorbell())
    }

    pub(super) fn ask(&mut self, lane: LaneId, frame: Frame, body: RequestBody) -> Ticket {
        self.requests.ask(lane, frame, body, &mut self.out)
    }

    /// Asks the coordinator and waits for the answer's control message.
    pub(crate) fn control(&mut self, request: Request, deadline: Duration, what: &str) -> Result<Finished, Refused> {
        let message = ControlRequest { request: Some(request) };
        let frame = Frame::with_control(Head::new(Kind::Control), &message);
        let ticket = self.ask(self.control, frame, RequestBody::default());
        let mut finished = self.finish(&[ticket], deadline, what)?;
        Ok(finished.pop().expect("one request has one answer"))
    }

    /// Takes every request that is over.
    pub(super) fn take_finished(&mut self) -> impl Iterator<Item = (Ticket, Result<Finished, Refused>)> {
        self.requests.take_finished()
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

    /// Sends a heartbeat when one is due, and forgets the answers to earlier ones.
    fn beat(&mut self) {
        if !self.holds_lease {
            return;
        }
        let now = self.now();
        let requests = &mut self.requests;
        self.beats.retain(|ticket| requests.take(*ticket).is_none());
        if now < self.last_beat + HEARTBEAT || !self.beats.is_empty() {
            return;
        }
        self.last_beat = now;
        let message = ControlRequest { request: Some(Request::Heartbeat(true)) };
        let frame = Frame::with_control(Head::new(Kind::Control), &message);
        let ticket = self.ask(self.control, frame, RequestBody::default());
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
    fn break_off(&mut self, failure: &Failure) {
        // It goes whether there is another or not: a call that is over has its memory back.
        self.transport = None;
        self.queue.clear();
        self.out.clear();
        self.events.clear();
        let refused = Refused { code: ErrorCode::Invalid, text: failure.to_string() };
        self.requests.break_off(self.now(), &refused);
    }

    /// Begins to connect, with a new transport when the one before broke.
    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        let transport = match self.transport.take() {
            Some(transport) => transport,
            None => {
                let network = Network::new(self.options.clone())?;
                self.verbs = network.verbs();
                Box::new(network)
            }
        };
        self.transport.insert(transport).connect(address)
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
