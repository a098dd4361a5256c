//! The board of a connection: two rings of bytes, and the counters that say whose they are.
//!
//! Counters of one writer share a cache line with nobody. Every number that the other side writes is compared with
//! what it can be before it is used.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use pserver_core::memory::shared::{Board, Counters, GiveBack};
use rustix::net::{SendFlags, send};

use super::{Ended, RING_BYTES, TOKENS};

/// Counters of 64 bits in a cache line.
const LINE: usize = 8;
/// The first line of each kind of counter; the connecting side's stands first, the other's in the next line.
const TAIL: usize = 0;
const HEAD: usize = 2;
const ASLEEP: usize = 4;
const OVER: usize = 6;
const RETURNED: usize = 8;
const LETTERS: usize = 10;

/// Bytes behind the counters.
pub(super) const BOARD_BYTES: usize = 2 * RING_BYTES;
/// What a wake-up is on the socket.
pub(super) const WAKE: u8 = b'w';

const _: () = assert!(TOKENS as usize == LINE * 64, "a token is a bit of one cache line");
const _: () = assert!(RING_BYTES.is_power_of_two());

/// What a side that sleeps wants to be woken for, in bits.
#[derive(Clone, Copy)]
pub(super) struct Wants(u64);

impl Wants {
    /// Something to read.
    pub(super) const DATA: Self = Self(1);
    /// Room in its ring, or a token.
    pub(super) const SPACE: Self = Self(2);

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which side of a connection this is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one that connected.
    Connecting = 0,
    /// The one that accepted.
    Accepting = 1,
}

/// What any thread may do: wake the other side, and give back what it lent.
pub(super) struct Shore {
    counters: Counters,
    near: usize,
    far: usize,
    socket: OwnedFd,
}

/// Both rings: what this side writes and what it reads.
pub(super) struct Rings {
    board: Board,
    shore: Arc<Shore>,
    near: usize,
    /// Bytes of ours that were written, and the last that the other side was told of.
    written: u64,
    told: u64,
    /// Bytes of ours that the other side had read when it was last looked.
    read_there: u64,
    /// Bytes of theirs that were read, and that were there when it was last looked.
    read: u64,
    there: u64,
}

impl Shore {
    fn counter(&self, kind: usize, side: usize) -> &AtomicU64 {
        self.counters.get((kind + side) * LINE)
    }

    /// Wakes the other side if it sleeps and wants one of these.
    pub(super) fn wake(&self, wanted: Wants) {
        // What was just written for it is seen by it after it said that it sleeps, or its sleep is seen here.
        fence(SeqCst);
        let asleep = self.counter(ASLEEP, self.far);
        if asleep.load(Relaxed) & wanted.0 != 0 && asleep.swap(0, AcqRel) & wanted.0 != 0 {
            // A socket that takes no byte holds others that wake as well; one that is closed wakes nobody.
            let _ = send(&self.socket, &[WAKE], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Says that this side sleeps; whoever calls it looks once more before it does.
    pub(super) fn fall_asleep(&self, wants: Wants) {
        self.counter(ASLEEP, self.near).store(wants.0, Relaxed);
        fence(SeqCst);
    }

    pub(super) fn awake(&self) {
        self.counter(ASLEEP, self.near).store(0, Relaxed);
    }

    /// Says that nothing of this side's memory is to be believed any more: it is about to be used again.
    pub(super) fn end(&self) {
        self.counter(OVER, self.near).store(1, SeqCst);
        // A store is no barrier to what follows it: without one the memory could be written before this is seen.
        fence(SeqCst);
    }

    /// Whether nothing has ended here or there: what was read of the other side's memory was meant for us.
    pub(super) fn is_on(&self) -> bool {
        !self.is_over_there() && self.counter(OVER, self.near).load(Relaxed) == 0
    }

    /// Whether what was just copied from the other side's memory was still meant for us.
    pub(super) fn is_over_there(&self) -> bool {
        fence(Acquire);
        self.counter(OVER, self.far).load(Relaxed) != 0
    }

    /// One more letter for the other side is on the socket.
    pub(super) fn posted(&self) {
        self.counter(LETTERS, self.near).fetch_add(1, Release);
    }

    /// Letters of the other side that it has put on the socket.
    pub(super) fn posted_there(&self) -> u64 {
        self.counter(LETTERS, self.far).load(Acquire)
    }

    /// Gives a token of the other side back.
    pub(super) fn give_back(&self, token: u32) {
        let (word, bit) = place(token);
        self.counters.get((RETURNED + self.far) * LINE + word).fetch_or(bit, Release);
        self.wake(Wants::SPACE);
    }

    /// Our tokens that came back since the last time, as bits.
    pub(super) fn returned(&self) -> impl Iterator<Item = (u32, u64)> {
        let words = (0..LINE).map(|word| (word, self.counters.get((RETURNED + self.near) * LINE + word)));
        let full = words.filter(|(_, bits)| bits.load(Relaxed) != 0);
        full.map(|(word, bits)| (u32::try_from(word * 64).expect("below the tokens"), bits.swap(0, Acquire)))
    }

    pub(super) fn has_returned(&self) -> bool {
        (0..LINE).any(|word| self.counters.get((RETURNED + self.near) * LINE + word).load(Relaxed) != 0)
    }
}

fn place(token: u32) -> (usize, u64) {
    assert!(token < TOKENS, "tokens are checked where they arrive");
    ((token / 64) as usize, 1 << (token % 64))
}

impl Rings {
    pub(super) fn new(board: Board, side: Side, socket: OwnedFd) -> Self {
        let near = side as usize;
        let shore = Arc::new(Shore { counters: board.counters(), near, far: 1 - near, socket });
        Self { board, shore, near, written: 0, told: 0, read_there: 0, read: 0, there: 0 }
    }

    pub(super) fn shore(&self) -> &Arc<Shore> {
        &self.shore
    }

    /// Whether there is something to read that was not seen yet.
    pub(super) fn has_arrived(&self) -> bool {
        self.shore.counter(TAIL, 1 - self.near).load(Relaxed) != self.there
    }

    /// Whether the other side has read on since room was last looked for.
    pub(super) fn has_room(&self) -> bool {
        self.shore.counter(HEAD, self.near).load(Relaxed) != self.read_there
    }

    /// Room for what this side writes; looks again when it is less than `wanted`.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize, Ended> {
        if RING_BYTES - span(self.read_there, self.written)? < wanted {
            self.read_there = self.shore.counter(HEAD, self.near).load(Acquire);
        }
        Ok(RING_BYTES - span(self.read_there, self.written)?)
    }

    /// Writes as much of `bytes` as there is room for; says how much that was. The other side is not told yet.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<usize, Ended> {
        let step = self.room(bytes.len())?.min(bytes.len());
        let (first, second) = self.split(self.near, self.written, step);
        self.board.write(first.0, &bytes[..first.1]);
        self.board.write(second.0, &bytes[first.1..step]);
        self.written += step as u64;
        Ok(step)
    }

    /// Tells the other side of everything that was written; wakes it if it waits for that.
    pub(super) fn tell(&mut self) {
        if self.told != self.written {
            self.told = self.written;
            self.shore.counter(TAIL, self.near).store(self.written, Release);
            self.shore.wake(Wants::DATA);
        }
    }

    /// How much there is to read; looks again when it is less than `wanted`.
    pub(super) fn available(&mut self, wanted: usize) -> Result<usize, Ended> {
        if span(self.read, self.there)? < wanted {
            self.there = self.shore.counter(TAIL, 1 - self.near).load(Acquire);
        }
        span(self.read, self.there)
    }

    /// Reads what is known to be there.
    pub(super) fn take(&mut self, into: &mut [u8]) {
        self.look(into);
        self.read += into.len() as u64;
    }

    /// As [`Rings::take`], and leaves it there.
    pub(super) fn look(&mut self, into: &mut [u8]) {
        assert!(into.len() as u64 <= self.there - self.read, "only what is there is read");
        let (first, second) = self.split(1 - self.near, self.read, into.len());
        let (low, high) = into.split_at_mut(first.1);
        self.board.read(first.0, low);
        self.board.read(second.0, high);
    }

    /// Passes over what is known to be there.
    pub(super) fn skip(&mut self, bytes: usize) {
        assert!(bytes as u64 <= self.there - self.read, "only what is there is passed over");
        self.read += bytes as u64;
    }

    /// Tells the other side how far was read; wakes it if it waits for that.
    pub(super) fn give_room(&mut self) {
        let head = self.shore.counter(HEAD, 1 - self.near);
        if head.load(Relaxed) != self.read {
            head.store(self.read, Release);
            self.shore.wake(Wants::SPACE);
        }
    }

    /// Where `bytes` bytes of a stream from `position` on lie: up to the ring's end, and from its start.
    fn split(&self, side: usize, position: u64, bytes: usize) -> ((usize, usize), (usize, usize)) {
        let ring = side * RING_BYTES;
        let at = usize::try_from(position % RING_BYTES as u64).expect("it is below the ring's length");
        let first = bytes.min(RING_BYTES - at);
        ((ring + at, first), (ring, bytes - first))
    }
}

/// The bytes between two counters of a ring, one of which the other side wrote.
fn span(from: u64, to: u64) -> Result<usize, Ended> {
    let bytes = to.wrapping_sub(from);
    usize::try_from(bytes)
        .ok()
        .filter(|bytes| *bytes <= RING_BYTES)
        .ok_or_else(|| Ended::Broken(format!("the ring's counters are {from} and {to}; a ring has {RING_BYTES} bytes")))
}

/// What one arena of the other side has out on lease to us, and whom to give it back to.
pub(super) struct Borrowed {
    shore: Arc<Shore>,
    /// Bytes of this arena, and references of all.
    bytes: AtomicU64,
    references: Arc<AtomicU64>,
}

impl Borrowed {
    pub(super) fn new(shore: &Arc<Shore>, references: &Arc<AtomicU64>) -> Self {
        Self { shore: Arc::clone(shore), bytes: AtomicU64::new(0), references: Arc::clone(references) }
    }

    /// Whether one more may be held of an arena, of which that is the most. Half of the tokens always come back at
    /// once, so that whoever sends can go on whatever we hold.
    pub(super) fn may_hold(&self, bytes: u32, held_max: u64) -> bool {
        let held = self.bytes.load(Relaxed) + u64::from(bytes);
        held <= held_max && self.references.load(Relaxed) < u64::from(TOKENS / 2)
    }

    pub(super) fn hold(&self, bytes: u32) {
        self.bytes.fetch_add(bytes.into(), Relaxed);
        self.references.fetch_add(1, Relaxed);
    }
}

impl GiveBack for Borrowed {
    fn give_back(&self, token: u32, bytes: u32) {
        self.bytes.fetch_sub(bytes.into(), Relaxed);
        self.references.fetch_sub(1, Relaxed);
        self.shore.give_back(token);
    }

    fn is_kept(&self) -> bool {
        self.shore.is_on()
    }
}
