//! Board: memory that two processes write, a page of counters with bytes behind it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memmap2::MmapRaw;

use super::file::{BOARD_SEALS, checked, make, map_writable};
use super::refused;
use crate::error::Failure;

/// The bytes at the start that are counters.
pub const COUNTERS_BYTES: usize = 4096;
/// How many counters there are.
pub const COUNTERS: usize = COUNTERS_BYTES / size_of::<u64>();

/// One side's access to the memory. The counters have handles of their own.
pub struct Board {
    map: Arc<MmapRaw>,
}

/// The counters of a [`Board`], for any thread. They keep the mapping alive.
#[derive(Clone)]
pub struct Counters {
    map: Arc<MmapRaw>,
}

impl Board {
    /// A board with `bytes` bytes behind its counters, all zero, and the descriptor to hand to the other side.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn create(bytes: usize) -> Result<(Self, OwnedFd), Failure> {
        let (descriptor, map) = make("pserver-rings", (COUNTERS_BYTES + bytes) as u64, BOARD_SEALS)?;
        Ok((Self { map: Arc::new(map) }, descriptor))
    }

    /// The board that the other side sent.
    ///
    /// # Errors
    /// When the descriptor is no sealed file in memory of that size, or the system refuses the mapping.
    pub fn open(descriptor: &OwnedFd, bytes: usize) -> Result<Self, Failure> {
        let (found, expected) = (checked(descriptor, BOARD_SEALS)?, (COUNTERS_BYTES + bytes) as u64);
        if found != expected {
            return Err(refused("its size", &format!("found {found} bytes, expected {expected}")));
        }
        Ok(Self { map: Arc::new(map_writable(descriptor, found)?) })
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters { map: Arc::clone(&self.map) }
    }

    /// Copies what stands at `offset` behind the counters.
    ///
    /// # Panics
    /// When some of it lies outside.
    #[inline]
    pub fn read(&mut self, offset: usize, into: &mut [u8]) {
        let from = self.start(offset, into.len());
        // SAFETY: `start` has compared the range with the mapping. If the other side breaks the protocol and writes
        // meanwhile, the copy is garbage; its readers check it in any case.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Writes `from` at `offset` behind the counters.
    ///
    /// # Panics
    /// When some of it lies outside.
    #[inline]
    pub fn write(&mut self, offset: usize, from: &[u8]) {
        let into = self.start(offset, from.len());
        // SAFETY: `start` has compared the range with the mapping, which is writable; `&mut self` is the only access of
        // this process to it, and no slice of this process lies in it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }

    #[inline]
    fn start(&self, offset: usize, bytes: usize) -> *mut u8 {
        let room = self.map.len() - COUNTERS_BYTES;
        assert!(offset <= room && bytes <= room - offset, "{bytes} bytes at {offset} of a board of {room}");
        // SAFETY: the offset was just compared with the mapping's length.
        unsafe { self.map.as_mut_ptr().add(COUNTERS_BYTES + offset) }
    }
}

impl Counters {
    /// The counter of this number.
    ///
    /// # Panics
    /// When there is no such counter.
    #[must_use]
    #[inline]
    pub fn get(&self, number: usize) -> &AtomicU64 {
        assert!(number < COUNTERS, "counter {number} of {COUNTERS}");
        // SAFETY: the counters lie at the start of the mapping, which is larger.
        let counter = unsafe { self.map.as_mut_ptr().add(number * size_of::<u64>()) };
        // SAFETY: it is aligned, as the mapping begins at a page; it is valid while `self` keeps the mapping; and every
        // access of this process to these bytes is atomic, because a board's bytes begin behind them.
        unsafe { AtomicU64::from_ptr(counter.cast()) }
    }
}
