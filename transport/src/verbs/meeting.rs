//! How a TCP connection becomes one over verbs.
//!
//! Who connects adds an offer, its end of a pair, to its hello. Who accepts answers with its own end, or with why it
//! has none, before anything else; then the connection stays what it was.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::task::Waker;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Arena;
use pserver_core::port::{Doorbell, Event, Outgoing};
use pserver_core::wire::{ErrorCode, Frame, Kind, OfferMessage, Scheme};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use super::flights::Flights;
use super::letters::{LETTER_BYTES, Letter};
use super::line::{Line, Parts, Socket};
use super::mail::{Mail, slots};
use super::provider::{Access, Domain, End, Fault, Station};
use super::registry::{Counters, Registry};
use super::staging::Staging;
use super::{Device, Devices, Ended, Side, device};
use crate::network::Checks;
use crate::refusal::refusal;

/// What the connections of one transport share: the device, and where its completions are announced.
pub(crate) struct Hall {
    devices: Devices,
    is_checked: bool,
    counters: Arc<Counters>,
    room: Option<Room>,
}

struct Room {
    station: Arc<dyn Station>,
    /// For connections that were accepted: their memory is opened to nobody, so one domain is enough.
    domain: Arc<dyn Domain>,
    near: Registry,
}

/// A connection that stays what it was, and why.
pub(crate) type Refused = (TcpStream, String);

/// Who watches the device's announcements, and whom it tells.
pub(crate) struct Watcher<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) bell: &'a Doorbell,
}

/// A descriptor that the runtime watches.
struct Watched(Arc<dyn Station>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.descriptor().as_raw_fd()
    }
}

/// One side of a pair that waits for the other.
struct Half {
    parts: Parts,
    end: End,
}

impl Hall {
    pub(crate) fn new(devices: Devices, is_checked: bool) -> Self {
        Self { devices, is_checked, counters: Arc::default(), room: None }
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Opens what is not open yet.
    fn room(&mut self, watcher: &Watcher<'_>) -> Result<&Room, Fault> {
        if self.room.is_none() {
            let station = find(&self.devices)?.0.station()?;
            let domain = station.domain()?;
            let near = Registry::new(&domain, Access::Near, &self.counters);
            watch(Arc::clone(&station), watcher)
                .map_err(|error| Fault::new(format!("watching the device's completions: {error}")))?;
            self.room = Some(Room { station, domain, near });
        }
        Ok(self.room.as_ref().expect("it was just made"))
    }

    fn half(&mut self, side: Side, watcher: &Watcher<'_>) -> Result<Half, Ended> {
        let (is_checked, counters) = (self.is_checked, Arc::clone(&self.counters));
        let room = self.room(watcher)?;
        let own = match side {
            Side::Accepting => None,
            Side::Connecting => Some(room.station.domain()?),
        };
        let domain = own.as_ref().unwrap_or(&room.domain);
        let registry = |access| match &own {
            None => room.near.clone(),
            Some(domain) => Registry::new(domain, access, &counters),
        };
        let pair = domain.pair(&Flights::plan(side == Side::Connecting))?;
        let arena = Arena::new(&slots()).map_err(|failure| Ended::Device(failure.to_string()))?;
        let near = registry(Access::Near);
        let first = arena.take(1).map_err(|failure| Ended::Device(failure.to_string()))?;
        let key = near.key_of(&first)?.expect("slots are memory of ours");
        drop(first);
        let end = pair.here();
        let mail = Mail::new(Flights::new(pair, key), &arena)?;
        let (outward, inward) = (registry(Access::FarReads), registry(Access::FarWrites));
        let (outward, inward) = (Staging::new(outward), Staging::new(inward));
        Ok(Half { end, parts: Parts { mail, near, side, outward, inward, counters, is_checked } })
    }
}

/// The device that connections use, or why there is none.
///
/// # Errors
/// Which of the reasons it is, and what can be done about it.
pub(crate) fn find(devices: &Devices) -> Result<Device, Fault> {
    match devices {
        Devices::None => Err(Fault::new("verbs are switched off")),
        Devices::This(device) => Ok(device.clone()),
        Devices::Best => device::best(),
        Devices::Named(name) => device::named(name),
    }
}

fn watch(station: Arc<dyn Station>, watcher: &Watcher<'_>) -> io::Result<()> {
    let (_inside, bell) = (watcher.runtime.enter(), watcher.bell.clone());
    // SAFETY: `Watched` keeps the station, and with it the descriptor, which is the same for as long as it lives.
    let watched = unsafe { AsyncFd::register_with_interest(Watched(station), Interest::READABLE) };
    let watched = watched.map_err(io::Error::from)?;
    watcher.runtime.spawn(async move {
        while let Ok(mut ready) = watched.readable().await {
            if watched.get_ref().0.drain().is_err() {
                return;
            }
            ready.clear_ready();
            bell.ring();
        }
    });
    Ok(())
}

impl Half {
    fn meet(mut self, socket: Socket, there: &End) -> Result<Line, Ended> {
        let Parts { mail, side, counters, .. } = &mut self.parts;
        mail.flights.pair().connect(there)?;
        if *side == Side::Connecting {
            mail.greet()?;
        }
        counters.connected();
        Ok(Line::new(socket, self.parts))
    }
}

/// A connection that was made, and offers more.
pub(crate) struct Meeting {
    /// None once it has ended.
    stage: Option<(Socket, Half)>,
    /// Whether nothing but verbs will do.
    must: bool,
    checks: Checks,
    has_greeted: bool,
    /// The hello, once it has left.
    sent: Option<(Ticket, Vec<Outgoing>)>,
    waiting: Waiting,
    broken: Option<io::Error>,
}

/// Frames that wait for a connection.
pub(crate) type Waiting = Vec<(Ticket, Frame, Vec<Outgoing>)>;

/// What became of a meeting.
pub(crate) enum Became {
    /// A connection over verbs.
    Line(Box<Line>),
    /// What it was before, what came over it, and why.
    Tcp(TcpStream, Vec<u8>, String),
}

impl Meeting {
    /// Offers verbs over `stream`, when there is a device here. Gives the stream back, with the reason, when not.
    pub(crate) fn new(
        stream: TcpStream,
        (scheme, checks): (Scheme, Checks),
        hall: &mut Hall,
        watcher: &Watcher<'_>,
    ) -> Result<Self, Refused> {
        match hall.half(Side::Connecting, watcher) {
            Ok(half) => Ok(Self {
                stage: Some((Socket::new(stream), half)),
                must: scheme == Scheme::Verbs,
                checks,
                has_greeted: false,
                sent: None,
                waiting: Vec::new(),
                broken: None,
            }),
            Err(ended) => Err((stream, ended.to_string())),
        }
    }

    /// The hello leaves at once, with the offer; what follows waits.
    pub(crate) fn send(&mut self, ticket: Option<Ticket>, mut frame: Frame, body: Vec<Outgoing>) {
        let Some((socket, half)) = &self.stage else { return };
        let Some(ticket) = ticket else { return drop(socket.send(&frame.encode())) };
        if self.has_greeted || frame.head.kind != Kind::Hello {
            self.waiting.push((ticket, frame, body));
            return;
        }
        self.has_greeted = true;
        OfferMessage::add(&mut frame.control, Letter::Yes(half.end).encode().to_vec());
        self.sent = Some((ticket, body));
        self.broken = socket.send(&frame.encode()).err();
    }

    /// How payloads are checked if it stays on TCP.
    pub(crate) fn checks(&self) -> Checks {
        self.checks
    }

    /// Frames that have not left.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn take_waiting(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.waiting.drain(..).map(|(ticket, _, body)| (ticket, body)).collect()
    }

    /// What it still holds.
    pub(crate) fn into_parcels(mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.sent.take().into_iter().chain(self.take_waiting()).collect()
    }

    /// The socket may have something to say.
    pub(crate) fn woken(&mut self) {
        if let Some((socket, _)) = &mut self.stage {
            socket.woken();
        }
    }

    /// Looks for the answer; whether it is there.
    pub(crate) fn turn(&mut self, peer: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<bool, Ended> {
        if let Some(error) = self.broken.take() {
            return Err(Ended::Device(format!("saying hello: {error}")));
        }
        if let Some((ticket, body)) = self.sent.take() {
            events.push(Event::Sent { peer, ticket, body });
        }
        let Some((socket, _)) = &mut self.stage else { return Ok(false) };
        socket.look_for(waker, LETTER_BYTES).map_err(|error| Ended::Device(format!("reading: {error}")))?;
        let bytes = socket.bytes();
        // Of a frame, the kind must be there.
        let is_there = bytes.len() == LETTER_BYTES || !Letter::begins(bytes) && bytes.len() > KIND_AT;
        if !is_there && socket.is_over() {
            return Err(Ended::Closed);
        }
        Ok(is_there)
    }

    /// What becomes of it, once the answer is there, and the frames that wait for it.
    ///
    /// # Errors
    /// What is wrong with the answer, or with the device; and why there are no verbs, when nothing else will do.
    pub(crate) fn finish(&mut self) -> Result<(Became, Waiting), Ended> {
        let (mut socket, half) = self.stage.take().ok_or(Ended::Closed)?;
        let bytes = std::mem::take(socket.bytes());
        // There may be more than was looked for, or the end.
        socket.woken();
        let became = if Letter::begins(&bytes) {
            match Letter::decode(&bytes).map_err(Ended::Broken)? {
                Letter::Yes(there) => Became::Line(Box::new(half.meet(socket, &there)?)),
                Letter::No(reason) if self.must => return Err(Ended::Device(reason)),
                Letter::No(reason) => Became::Tcp(socket.into_stream(), Vec::new(), reason),
            }
        } else {
            let is_refused = bytes.get(KIND_AT) == Some(&(Kind::Refused as u8));
            let reason = "the server answers with frames only".to_owned();
            if self.must && !is_refused {
                return Err(Ended::Device(reason));
            }
            Became::Tcp(socket.into_stream(), bytes, reason)
        };
        Ok((became, std::mem::take(&mut self.waiting)))
    }
}

/// Where a frame's header has its kind.
const KIND_AT: usize = 5;

/// What becomes of a connection that was accepted.
pub(crate) enum Welcomed {
    /// A connection over verbs.
    Line(Box<Line>),
    /// A TCP connection, to which nothing else was offered, or which cannot have it.
    Tcp(TcpStream),
}

/// Answers the offer in a hello, if there is one, and takes it out of there. `scheme` is what the server listens by.
///
/// # Errors
/// What is wrong with the socket; that there are no verbs where nothing else will do, which the other side is told.
pub(crate) fn welcome(
    stream: TcpStream,
    hello: &mut Frame,
    scheme: Scheme,
    hall: &mut Hall,
    watcher: &Watcher<'_>,
) -> io::Result<Welcomed> {
    let socket = Socket::new(stream);
    let Some(offer) = OfferMessage::take(&mut hello.control) else {
        return match scheme {
            Scheme::Verbs => Err(refuse(&socket, "this server takes connections over verbs only")),
            _ => Ok(Welcomed::Tcp(socket.into_stream())),
        };
    };
    let met = (|| {
        if !matches!(scheme, Scheme::Verbs | Scheme::Auto) {
            return Err(format!("the server listens by {scheme:?} only"));
        }
        let there = match Letter::decode(&offer)? {
            Letter::Yes(there) => there,
            Letter::No(reason) => return Err(reason),
        };
        let mut half = hall.half(Side::Accepting, watcher).map_err(|ended| format!("the server: {ended}"))?;
        half.parts.mail.flights.pair().connect(&there).map_err(|fault| format!("the server: {fault}"))?;
        Ok(half)
    })();
    match met {
        Ok(half) => {
            socket.send(&Letter::Yes(half.end).encode())?;
            half.parts.counters.connected();
            Ok(Welcomed::Line(Box::new(Line::new(socket, half.parts))))
        }
        Err(reason) => {
            socket.send(&Letter::No(reason.clone()).encode())?;
            if scheme == Scheme::Verbs {
                return Err(io::Error::other(reason));
            }
            tracing::info!(reason, "a connection stays on TCP");
            Ok(Welcomed::Tcp(socket.into_stream()))
        }
    }
}

/// Tells the other side why it goes no further.
fn refuse(socket: &Socket, reason: &str) -> io::Error {
    // Nothing depends on whether it listens.
    drop(socket.send(&refusal(ErrorCode::Invalid, reason).encode()));
    io::Error::other(reason)
}
