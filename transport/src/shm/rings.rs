//! The board of a connection: two byte rings and their counters.
//!
//! Counters of one writer share no cache line with others. Every number that the peer writes is checked before use.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use pserver_core::memory::shared::{Board, Counters, GiveBack};
use rustix::net::{SendFlags, send};

use super::{ConnectionError, ConnectionSide, RING_BYTES, TOKENS};

/// 64-bit counters in a cache line.
const COUNTERS_PER_LINE: usize = 8;
/// The first cache line of each kind of counter: the connecting side's, followed by the accepting side's.
const TAIL: usize = 0;
const HEAD: usize = 2;
const WAITING: usize = 4;
const ENDED: usize = 6;
const RETURNED: usize = 8;
const MESSAGES: usize = 10;

/// Bytes after the counters.
pub(super) const BOARD_BYTES: usize = 2 * RING_BYTES;
/// A wake-up on the socket.
pub(super) const WAKE: u8 = b'w';

const _: () = assert!(TOKENS as usize == COUNTERS_PER_LINE * 64, "a token is a bit of one cache line");
const _: () = assert!(RING_BYTES.is_power_of_two());

/// Events that a sleeping side wants to be woken for, as bits.
#[derive(Clone, Copy)]
pub(super) struct WakeFor(u64);

impl WakeFor {
    /// Bytes to read.
    pub(super) const DATA: Self = Self(1);
    /// Room in the ring, or a returned token.
    pub(super) const SPACE: Self = Self(2);

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Signals that any thread may send: wake-ups, and returned tokens.
pub(super) struct ShmSignals {
    counters: Counters,
    local: usize,
    remote: usize,
    socket: OwnedFd,
}

/// Both rings of a connection.
pub(super) struct ShmRings {
    board: Board,
    signals: Arc<ShmSignals>,
    local: usize,
    /// Bytes written to the send ring, and the count that was published.
    written: u64,
    published: u64,
    /// The peer's count of bytes read, when it was last loaded.
    peer_read: u64,
    /// Bytes read from the receive ring, and the peer's published count when it was last loaded.
    read: u64,
    arrived: u64,
}

impl ShmSignals {
    fn counter(&self, kind: usize, side: usize) -> &AtomicU64 {
        self.counters.get((kind + side) * COUNTERS_PER_LINE)
    }

    /// Wakes the peer if it sleeps and wants one of these events.
    pub(super) fn wake(&self, wanted: WakeFor) {
        // Pairs with the fence in `request_wakeup`: either the peer sees what was just written, or this side sees its
        // request.
        fence(SeqCst);
        let asleep = self.counter(WAITING, self.remote);
        // Between load and swap the peer may have woken and requested another event. The request is cleared, so a
        // wake-up must follow, whatever it was for.
        if asleep.load(Relaxed) & wanted.0 != 0 && asleep.swap(0, AcqRel) != 0 {
            // The socket has room, because wake-ups are read before they fill it. A closed socket needs no wake-up.
            let _ = send(&self.socket, &[WAKE], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Requests a wake-up; the caller checks for work once more before it sleeps.
    pub(super) fn request_wakeup(&self, wants: WakeFor) {
        self.counter(WAITING, self.local).store(wants.0, Relaxed);
        fence(SeqCst);
    }

    pub(super) fn cancel_wakeup(&self) {
        self.counter(WAITING, self.local).store(0, Relaxed);
    }

    /// Tells the peer that this side's memory is invalid from now on, because it will be reused.
    pub(super) fn end(&self) {
        self.counter(ENDED, self.local).store(1, SeqCst);
        // A store does not order later writes: without the fence the memory could change before the peer sees the end.
        fence(SeqCst);
    }

    /// Whether neither side has ended, so that what was read of the peer's memory was valid.
    pub(super) fn is_active(&self) -> bool {
        !self.has_peer_ended() && self.counter(ENDED, self.local).load(Relaxed) == 0
    }

    /// Whether the peer has ended, so that a copy of its memory may be invalid.
    pub(super) fn has_peer_ended(&self) -> bool {
        fence(Acquire);
        self.counter(ENDED, self.remote).load(Relaxed) != 0
    }

    /// Counts one more message on the socket.
    pub(super) fn count_message(&self) {
        self.counter(MESSAGES, self.local).fetch_add(1, Release);
    }

    /// Messages that the peer has sent on the socket.
    pub(super) fn peer_messages(&self) -> u64 {
        self.counter(MESSAGES, self.remote).load(Acquire)
    }

    /// Returns a token of the peer.
    pub(super) fn give_back(&self, token: u32) {
        let (word, bit) = bit_of(token);
        self.counters.get((RETURNED + self.remote) * COUNTERS_PER_LINE + word).fetch_or(bit, Release);
        self.wake(WakeFor::SPACE);
    }

    /// This side's tokens that were returned since the last call, as bits.
    pub(super) fn returned(&self) -> impl Iterator<Item = (u32, u64)> {
        let words = (0..COUNTERS_PER_LINE)
            .map(|word| (word, self.counters.get((RETURNED + self.local) * COUNTERS_PER_LINE + word)));
        let full = words.filter(|(_, bits)| bits.load(Relaxed) != 0);
        full.map(|(word, bits)| (u32::try_from(word * 64).expect("below the tokens"), bits.swap(0, Acquire)))
    }

    pub(super) fn has_returned(&self) -> bool {
        (0..COUNTERS_PER_LINE)
            .any(|word| self.counters.get((RETURNED + self.local) * COUNTERS_PER_LINE + word).load(Relaxed) != 0)
    }
}

fn bit_of(token: u32) -> (usize, u64) {
    assert!(token < TOKENS, "tokens are checked where they arrive");
    ((token / 64) as usize, 1 << (token % 64))
}

impl ShmRings {
    pub(super) fn new(board: Board, side: ConnectionSide, socket: OwnedFd) -> Self {
        let local = side as usize;
        let signals = Arc::new(ShmSignals { counters: board.counters(), local, remote: 1 - local, socket });
        Self { board, signals, local, written: 0, published: 0, peer_read: 0, read: 0, arrived: 0 }
    }

    pub(super) fn signals(&self) -> &Arc<ShmSignals> {
        &self.signals
    }

    /// Whether the peer has published bytes that were not loaded.
    pub(super) fn has_arrived(&self) -> bool {
        self.signals.counter(TAIL, 1 - self.local).load(Relaxed) != self.arrived
    }

    /// Whether the peer has read bytes since the last load.
    pub(super) fn has_room(&self) -> bool {
        self.signals.counter(HEAD, self.local).load(Relaxed) != self.peer_read
    }

    /// Room in the send ring; loads the peer's count when it is less than `wanted`.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize, ConnectionError> {
        if RING_BYTES - span(self.peer_read, self.written)? < wanted {
            self.peer_read = self.signals.counter(HEAD, self.local).load(Acquire);
        }
        Ok(RING_BYTES - span(self.peer_read, self.written)?)
    }

    /// Copies as much of `bytes` into the send ring as fits, unpublished; that length.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<usize, ConnectionError> {
        let step = self.room(bytes.len())?.min(bytes.len());
        let (first, second) = self.split(self.local, self.written, step);
        self.board.write(first.0, &bytes[..first.1]);
        self.board.write(second.0, &bytes[first.1..step]);
        self.written += step as u64;
        Ok(step)
    }

    /// Publishes the written bytes; wakes the peer if it waits for data.
    pub(super) fn publish(&mut self) {
        if self.published != self.written {
            self.published = self.written;
            self.signals.counter(TAIL, self.local).store(self.written, Release);
            self.signals.wake(WakeFor::DATA);
        }
    }

    /// Bytes to read; loads the peer's count when they are fewer than `wanted`.
    pub(super) fn available(&mut self, wanted: usize) -> Result<usize, ConnectionError> {
        if span(self.read, self.arrived)? < wanted {
            self.arrived = self.signals.counter(TAIL, 1 - self.local).load(Acquire);
        }
        span(self.read, self.arrived)
    }

    /// Reads available bytes.
    pub(super) fn read_into(&mut self, into: &mut [u8]) {
        self.peek(into);
        self.read += into.len() as u64;
    }

    /// Like [`ShmRings::read_into`], without consuming the bytes.
    pub(super) fn peek(&mut self, into: &mut [u8]) {
        assert!(into.len() as u64 <= self.arrived - self.read, "only what is there is read");
        let (first, second) = self.split(1 - self.local, self.read, into.len());
        let (low, high) = into.split_at_mut(first.1);
        self.board.read(first.0, low);
        self.board.read(second.0, high);
    }

    /// Skips available bytes.
    pub(super) fn skip(&mut self, bytes: usize) {
        assert!(bytes as u64 <= self.arrived - self.read, "only what is there is passed over");
        self.read += bytes as u64;
    }

    /// Publishes the count of bytes read; wakes the peer if it waits for room.
    pub(super) fn publish_read(&mut self) {
        let head = self.signals.counter(HEAD, 1 - self.local);
        if head.load(Relaxed) != self.read {
            head.store(self.read, Release);
            self.signals.wake(WakeFor::SPACE);
        }
    }

    /// The two parts of a range of the stream: up to the ring's end, and from its start.
    fn split(&self, side: usize, position: u64, bytes: usize) -> ((usize, usize), (usize, usize)) {
        let ring = side * RING_BYTES;
        let at = usize::try_from(position % RING_BYTES as u64).expect("it is below the ring's length");
        let first = bytes.min(RING_BYTES - at);
        ((ring + at, first), (ring, bytes - first))
    }
}

/// The distance of two counters of a ring, one of which the peer wrote.
fn span(from: u64, to: u64) -> Result<usize, ConnectionError> {
    let bytes = to.wrapping_sub(from);
    usize::try_from(bytes).ok().filter(|bytes| *bytes <= RING_BYTES).ok_or_else(|| {
        ConnectionError::Broken(format!("the ring's counters are {from} and {to}; a ring has {RING_BYTES} bytes"))
    })
}

/// Views of one arena of the peer, and the way to return their tokens.
pub(super) struct ArenaBorrows {
    signals: Arc<ShmSignals>,
    /// Bytes of this arena, and references of all arenas.
    bytes: AtomicU64,
    references: Arc<AtomicU64>,
}

impl ArenaBorrows {
    pub(super) fn new(signals: &Arc<ShmSignals>, references: &Arc<AtomicU64>) -> Self {
        Self { signals: Arc::clone(signals), bytes: AtomicU64::new(0), references: Arc::clone(references) }
    }

    /// Whether another view may be held. Half of the tokens always return at once, so that the sender can go on.
    pub(super) fn may_hold(&self, bytes: u32, held_max: u64) -> bool {
        let held = self.bytes.load(Relaxed) + u64::from(bytes);
        held <= held_max && self.references.load(Relaxed) < u64::from(TOKENS / 2)
    }

    pub(super) fn hold(&self, bytes: u32) {
        self.bytes.fetch_add(bytes.into(), Relaxed);
        self.references.fetch_add(1, Relaxed);
    }
}

impl GiveBack for ArenaBorrows {
    fn give_back(&self, token: u32, bytes: u32) {
        self.bytes.fetch_sub(bytes.into(), Relaxed);
        self.references.fetch_sub(1, Relaxed);
        self.signals.give_back(token);
    }

    fn is_kept(&self) -> bool {
        self.signals.is_active()
    }
}
