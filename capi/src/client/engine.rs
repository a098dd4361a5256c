//! What turns requests into traffic: one transport, driven by whichever thread makes a call.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pserver_core::client::{Client, Finished, Identity, LaneId, Output, Refused, RequestBody};
use pserver_core::error::Failure;
use pserver_core::ids::Ticket;
use pserver_core::port::{Event, Submit, Transport};
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ControlRequest, ErrorCode, Frame, Head, Kind, Role, Scheme};
use pserver_transport::tcp::{Poll, TcpOptions, TcpTransport};

/// The longest that one wait of the transport lasts, so that a missed wake-up costs no more.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// How often the holder of the initialiser's lease is heard.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// How long parcels may take to come back from connections that were ended.
const ABANDON: Duration = Duration::from_secs(5);

/// Requests, a transport and a clock.
pub(crate) struct Engine {
    requests: Client,
    transport: Box<dyn Transport>,
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
    pub(crate) fn new(coordinator: &Address, role: Role, poll: Poll) -> Result<Self, Failure> {
        let identity = Identity::stranger(role, host_name(), std::process::id());
        let mut requests = Client::new(identity);
        let control = requests.add_lane(coordinator.clone(), 0, "the coordinator (server 0)".to_owned());
        Ok(Self {
            requests,
            transport: Box::new(TcpTransport::new(TcpOptions { poll, ..TcpOptions::default() })?),
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
        let mut next = 0;
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
            if left.is_zero() {
                return Err(self.give_up(deadline, what));
            }
            self.turn(left.min(WAIT_LONGEST))?;
        }
        match refused {
            Some(one) => Err(Refused { code: one.code, text: format!("{what}: {}", one.text) }),
            None => Ok(finished),
        }
    }

    /// Sends a heartbeat when one is due, and forgets the answers to earlier ones.
    pub(super) fn beat(&mut self) {
        let now = self.now();
        let requests = &mut self.requests;
        self.beats.retain(|ticket| requests.take(*ticket).is_none());
        if !self.holds_lease || now < self.last_beat + HEARTBEAT || !self.beats.is_empty() {
            return;
        }
        self.last_beat = now;
        let message = ControlRequest { request: Some(Request::Heartbeat(true)) };
        let frame = Frame::with_control(Head::new(Kind::Control), &message);
        let ticket = self.ask(self.control, frame, RequestBody::default());
        self.beats.push(ticket);
    }

    /// One turn: everything that can move moves, then the transport waits for at most `wait`.
    pub(super) fn turn(&mut self, wait: Duration) -> Result<(), Refused> {
        let broken = |failure: Failure| Refused { code: ErrorCode::Invalid, text: failure.to_string() };
        self.beat();
        let now = self.now();
        self.requests.drive(now, &mut self.out);
        self.carry_out(now);
        self.transport.submit(&mut self.queue).map_err(broken)?;
        if !wait.is_zero() {
            let until = self.requests.deadline().map_or(wait, |deadline| now.until(deadline).min(wait));
            self.transport.wait(until);
        }
        self.transport.poll(&mut self.events).map_err(broken)?;
        let now = self.now();
        for event in std::mem::take(&mut self.events) {
            self.requests.handle(now, event, &mut self.out);
        }
        self.carry_out(now);
        self.transport.submit(&mut self.queue).map_err(broken)
    }

    fn carry_out(&mut self, now: Now) {
        while !self.out.is_empty() {
            let mut out = std::mem::take(&mut self.out);
            for output in out.drain(..) {
                match output {
                    Output::Submit(submit) => self.queue.push_back(submit),
                    Output::Close(peer) => self.transport.close(peer),
                    Output::Connect { lane, address } => match self.transport.connect(&address) {
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

    /// The deadline has passed: says who did not answer, and gets every parcel back before the caller's memory is
    /// the caller's again.
    fn give_up(&mut self, deadline: Duration, what: &str) -> Refused {
        let text =
            format!("{what}: no answer within {:.1} s from {}", deadline.as_secs_f64(), self.requests.outstanding());
        self.queue.clear();
        self.requests.abandon(&mut self.out);
        let end = self.now() + ABANDON;
        let mut broken = false;
        while !broken && self.now() < end && !self.requests.forget() {
            broken = self.turn_quietly().is_err();
        }
        assert!(self.requests.forget(), "the transport gives every parcel back when its connection ends");
        Refused { code: ErrorCode::Deadline, text }
    }

    /// A turn that opens no connections.
    fn turn_quietly(&mut self) -> Result<(), Failure> {
        let now = self.now();
        self.carry_out(now);
        self.transport.submit(&mut self.queue)?;
        self.transport.wait(Duration::from_millis(10));
        self.transport.poll(&mut self.events)?;
        for event in std::mem::take(&mut self.events) {
            self.requests.handle(now, event, &mut self.out);
        }
        Ok(())
    }

    fn now(&self) -> Now {
        Now(u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "unknown".to_owned())
}
