//! A trainer's buffer that servers read in place.
//!
//! The trainer writes a buffer, a transport lends it, and a server maps it to read. The trainer does not write it while
//! a part is lent: the call borrows it. When a call ends before the server has returned a lent range, the buffer is
//! withdrawn ([`Mapping::withdraw`]): the server keeps the old pages, and the trainer gets private pages with the same
//! bytes at the same address.
//!
//! Memory that the caller allocated belongs to no file, so no other process can map it; a device may access it
//! ([`Mapping::of_caller`]).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;

use memmap2::MmapRaw;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::callers::Callers;
use super::shared::{File, SharedRange, refused};
use crate::error::Failure;

/// A buffer's length is a multiple of this, so that the system maps nothing else with it.
const PAGE_BYTES: usize = 4096;
/// A range that another process reads begins at a multiple of this.
const PLACE_BYTES: usize = 64;

/// Servers may read it in place.
const IN_PLACE: u8 = 0;
/// Shared, and a server may still read a range that it has not returned.
const TORN: u8 = 1;
/// Private to this process.
const WITHDRAWN: u8 = 2;

/// Page-aligned bytes of this process, zero at first. They are freed when the buffer is dropped and no transport reads
/// them any more.
#[derive(Debug)]
pub struct Buffer {
    map: Arc<MmapRaw>,
    mapping: Arc<Mapping>,
    bytes: usize,
}

/// The memory of a [`Buffer`] or of the caller, as transports lend it.
#[derive(Debug)]
pub struct Mapping {
    pages: Pages,
    state: AtomicU8,
}

/// Owner of the pages. Devices that registered them keep either kind mapped, and read only lent ranges.
#[derive(Debug)]
pub(super) enum Pages {
    File { map: Arc<MmapRaw>, file: Arc<File> },
    Callers(Arc<Callers>),
}

impl Buffer {
    /// A buffer of so many bytes.
    ///
    /// # Errors
    /// [`Failure::Call`] when that is none or more than there can be; [`Failure::Node`] with what the system refused.
    pub fn new(bytes: usize) -> Result<Self, Failure> {
        let length = bytes.checked_next_multiple_of(PAGE_BYTES).filter(|length| *length > 0);
        let length =
            length.and_then(|length| u64::try_from(length).ok()).filter(|length| i64::try_from(*length).is_ok());
        let length = length.ok_or_else(|| Failure::call(format!("a buffer of {bytes} bytes; expected 1 or more")))?;
        let (file, map) = File::for_readers(length)?;
        let map = Arc::new(map);
        let pages = Pages::File { map: Arc::clone(&map), file: Arc::new(file) };
        Ok(Self { map, mapping: Arc::new(Mapping { pages, state: AtomicU8::new(IN_PLACE) }), bytes })
    }

    /// The buffer's memory, from which transports lend slices.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The buffer's address. Accesses through it are equivalent to accesses of the slice.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `bytes` bytes, which the system zeroed, and lives as long as `self`. Writers
        // of this process need `&mut self`; other processes can only read.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is the only access of this process to the bytes: a loan of them
        // borrows the buffer until its call ends.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) }
    }
}

impl Mapping {
    /// Memory that the caller allocated; this module accesses it only through loans. Devices may register it until
    /// [`Mapping::let_go`], or until the mapping is dropped and they have noticed. The caller keeps it allocated that
    /// long.
    ///
    /// # Errors
    /// [`Failure::Call`] when `bytes` is zero, or the range exceeds the address space.
    pub fn of_caller(address: usize, bytes: usize) -> Result<Self, Failure> {
        let pages = Pages::Callers(Arc::new(Callers::new(address, bytes)?));
        Ok(Self { pages, state: AtomicU8::new(IN_PLACE) })
    }

    /// The offset of a slice, when all of the slice lies in this mapping.
    #[must_use]
    pub fn offset_of(&self, slice: &[u8]) -> Option<usize> {
        let start = match &self.pages {
            Pages::File { map, .. } => map.as_ptr().addr(),
            Pages::Callers(callers) => callers.address(),
        };
        let offset = slice.as_ptr().addr().checked_sub(start)?;
        (offset <= self.len() && slice.len() <= self.len() - offset).then_some(offset)
    }

    /// Its length in bytes: of a buffer a multiple of a page.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer of no bytes is refused")]
    pub fn len(&self) -> usize {
        match &self.pages {
            Pages::File { map, .. } => map.len(),
            Pages::Callers(callers) => callers.bytes(),
        }
    }

    /// The pages, for owners that keep them mapped and lend nothing.
    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Whether other processes may read it in place.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.state.load(SeqCst) != WITHDRAWN
    }

    /// The shared range from `offset` on, if it is shared.
    pub(super) fn shared_at(&self, offset: usize) -> Option<SharedRange<'_>> {
        let Pages::File { file, .. } = &self.pages else { return None };
        let is_placed = self.is_in_place() && offset.is_multiple_of(PLACE_BYTES);
        is_placed.then_some(SharedRange { file, offset: offset as u64 })
    }

    /// Notes that a connection ended on which a part was lent and not returned.
    pub(super) fn tear(&self) {
        let _ = self.state.compare_exchange(IN_PLACE, TORN, SeqCst, SeqCst);
    }

    /// Stops sharing a buffer whose descriptor the program has closed: from now on its payloads are copied.
    pub fn hide_closed(&self) {
        if let Pages::File { file, .. } = &self.pages
            && !file.is_open()
        {
            let _ = self.state.compare_exchange(IN_PLACE, WITHDRAWN, SeqCst, SeqCst);
        }
    }

    /// Prepares a buffer for writing after a failed call: a server that still reads a lent range does not see later
    /// writes. The bytes stay as they are.
    ///
    /// # Errors
    /// The system's refusal. A reader then sees the new bytes, in this trainer's own gradient. Memory of the caller
    /// cannot be mapped again: devices deregister it, and a refusal is the error of [`Mapping::let_go`].
    pub fn withdraw(&self) -> Result<(), Failure> {
        if self.state.load(SeqCst) != TORN {
            return Ok(());
        }
        let (map, file) = match &self.pages {
            Pages::File { map, file } => (map, file),
            Pages::Callers(_) => {
                let gone = self.let_go();
                self.state.store(if gone.is_ok() { IN_PLACE } else { WITHDRAWN }, SeqCst);
                return gone;
            }
        };
        if !file.is_open() {
            let what = format!("withdrawing a buffer of {} bytes", map.len());
            return Err(refused(&what, &"its descriptor was closed by the program"));
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let (start, length) = (map.as_mut_ptr(), map.len());
        // SAFETY: the pages replaced are this mapping's own, all of it and nothing else, and stay mapped throughout.
        // The new ones map the same file privately, so every byte reads as before and later writes are visible to this
        // process alone. `map` unmaps them as it would have unmapped the old ones.
        let mapped =
            unsafe { mmap(start.cast(), length, ProtFlags::READ | ProtFlags::WRITE, flags, file.descriptor(), 0) };
        mapped.map_err(|error| refused(&format!("withdrawing a buffer of {length} bytes"), &error))?;
        self.state.store(WITHDRAWN, SeqCst);
        Ok(())
    }

    /// Makes every device deregister memory of the caller, of which nothing is lent: afterwards no device accesses it.
    /// A buffer belongs to the library, and stays mapped as long as a device has it registered.
    ///
    /// # Errors
    /// When a device cannot deregister it: that device may access the memory until this process ends.
    pub fn let_go(&self) -> Result<(), Failure> {
        let Pages::Callers(callers) = &self.pages else { return Ok(()) };
        if callers.let_go() { Ok(()) } else { Err(callers.held()) }
    }
}
