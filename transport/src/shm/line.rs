//! One connection through shared memory.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::task::Waker;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::shared::Board;
use pserver_core::port::{Event, Incoming, Outgoing};
use pserver_core::wire::Frame;
use socket2::SockRef;
use tokio::net::UnixStream;

use super::Ended;
use super::inward::{Inward, Read};
use super::outward::{Outward, Written};
use super::post::{Letter, Post};
use super::rings::{Rings, Side, Wants};
use crate::share::Share;

/// Wake-ups are left on the socket, whose reading is a call of the system, and wakes the sender in vain. Before so many
/// fill it they are read: the system counts about a kilobyte for each, and gives a socket a hundred and more.
const NAPS_PER_READ: u32 = 64;

/// A connection through shared memory.
pub(crate) struct Line {
    stream: UnixStream,
    rings: Rings,
    post: Post,
    outward: Outward,
    inward: Inward,
    /// Whether the runtime may have something to say about the socket.
    must_look: bool,
    /// How often this side has slept, and so may have been sent a wake-up, since it read the socket.
    naps: u32,
    letters: Vec<Letter>,
}

impl Line {
    /// A connection whose two sides have met.
    pub(crate) fn new(stream: UnixStream, board: Board, side: Side) -> io::Result<Self> {
        let rings = Rings::new(board, side, stream.as_fd().try_clone_to_owned()?);
        Ok(Self {
            stream,
            rings,
            post: Post::default(),
            outward: Outward::new(side == Side::Connecting),
            inward: Inward::new(),
            must_look: true,
            naps: 0,
            letters: Vec::new(),
        })
    }

    /// Frames that the caller has not got back.
    pub(crate) fn len(&self) -> usize {
        self.outward.len()
    }

    /// Queues a frame.
    pub(crate) fn send(&mut self, ticket: Option<Ticket>, frame: &Frame, body: Vec<Outgoing>) {
        self.outward.push(ticket, frame, body);
    }

    /// The places for the head that was reported.
    pub(crate) fn land(&mut self, places: Vec<Incoming>) {
        self.inward.land(places);
    }

    /// Gives back the frames that have not begun to leave.
    pub(crate) fn take_unbegun(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.outward.take_unbegun()
    }

    /// What it still holds: frames that may not have left, and places that were not filled. From here on nothing that
    /// the other side reads of ours is to be believed.
    pub(crate) fn into_parcels(mut self) -> (Vec<(Ticket, Vec<Outgoing>)>, Vec<Incoming>) {
        self.rings.shore().end();
        (self.outward.take_all(), self.inward.take_unfilled())
    }

    /// The socket may have something to say.
    pub(crate) fn woken(&mut self) {
        self.must_look = true;
    }

    /// Whether a turn may do something.
    pub(crate) fn has_news(&self) -> bool {
        self.must_look
            || self.rings.has_arrived()
            || self.rings.shore().has_returned()
            || self.outward.must_sweep()
            || !self.outward.is_empty() && self.rings.has_room()
    }

    /// Says that this side is about to sleep.
    pub(crate) fn fall_asleep(&mut self) {
        self.naps += 1;
        let wants = if self.outward.is_empty() { Wants::DATA } else { Wants::DATA.and(Wants::SPACE) };
        self.rings.shore().fall_asleep(wants);
    }

    /// Says that this side is awake.
    pub(crate) fn awake(&self) {
        self.rings.shore().awake();
    }

    /// Whether parcels come back without a wake-up.
    pub(crate) fn lends(&self) -> bool {
        self.outward.lends()
    }

    /// Writes only: for a frame that was just submitted. Whether there is more to write at once.
    pub(crate) fn flush(&mut self, peer: PeerId, share: Share, events: &mut Vec<Event>) -> Result<bool, Ended> {
        let Self { rings, stream, outward, .. } = self;
        Ok(outward.turn(peer, rings, stream, share.bytes, events)? == Written::Turn)
    }

    /// Writes and reads what can be without waiting; whether there is more at once.
    pub(crate) fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        share: Share,
        events: &mut Vec<Event>,
    ) -> Result<bool, Ended> {
        self.look(peer, waker, events)?;
        self.outward.collect(peer, &self.rings, events)?;
        let more = self.flush(peer, share, events)?;
        let read = self.read(peer, share, events)?;
        if self.post.is_over && read == Read::Empty {
            return Err(self.inward.end(&mut self.rings));
        }
        Ok(more || read == Read::Turn)
    }

    /// The same for a connection that is ending: what is queued leaves, the socket says so, and the rest is the other
    /// side's to read until it closes too. True when it has.
    pub(crate) fn turn_ending(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        share: Share,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), Ended> {
        self.look(peer, waker, events)?;
        self.outward.collect(peer, &self.rings, events)?;
        let written = self.outward.turn(peer, &mut self.rings, &self.stream, share.bytes, events)?;
        if written == Written::All {
            // It may be closed already, by either side.
            let _ = SockRef::from(&self.stream).shutdown(Shutdown::Write);
        }
        Ok((self.post.is_over, written == Written::Turn))
    }

    fn read(&mut self, peer: PeerId, share: Share, events: &mut Vec<Event>) -> Result<Read, Ended> {
        let share = (share.bytes, share.frames);
        let read = self.inward.turn(peer, &mut self.rings, share, events)?;
        if read != Read::Arena {
            return Ok(read);
        }
        // Its descriptor was sent before the reference was written, so it is there.
        self.post.look_at_once(&self.stream, &mut self.letters)?;
        self.open_letters(peer, events)?;
        match self.inward.turn(peer, &mut self.rings, share, events)? {
            Read::Arena => Err(Ended::Broken("a reference to an arena that was not handed over".to_owned())),
            read => Ok(read),
        }
    }

    fn look(&mut self, peer: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<(), Ended> {
        if !std::mem::take(&mut self.must_look) {
            return Ok(());
        }
        let (reads, posted) = (self.naps >= NAPS_PER_READ, self.rings.shore().posted_there());
        self.post.look(&self.stream, waker, (reads, posted), &mut self.letters)?;
        if reads {
            self.naps = 0;
        }
        self.open_letters(peer, events)
    }

    fn open_letters(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<(), Ended> {
        for letter in self.letters.drain(..) {
            match letter {
                Letter::Arena { descriptor, is_home } => self.inward.add_arena(&descriptor, is_home, &self.rings)?,
                Letter::Gone(number) => self.inward.drop_arena(number),
                Letter::Refused(frame) => events.push(Event::Landed { peer, frame, body: Vec::new() }),
            }
        }
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.rings.shore().end();
        // Leases that outlive the connection hold the socket too, and must not keep it open.
        let _ = SockRef::from(&self.stream).shutdown(Shutdown::Both);
    }
}
