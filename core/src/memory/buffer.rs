//! A trainer's buffer that servers read in place.
//!
//! The trainer writes it, a transport lends it, and a server maps it to read. While some of it is lent the trainer does
//! not write it; that is the borrow of the call. Where a call ends without its server having given back what was lent,
//! the memory is taken out of the server's sight instead ([`Mapping::withdraw`]): the server keeps the pages as they
//! were, and the trainer goes on with the same bytes at the same address, but as its own.
//!
//! Memory of the caller's own making is shown to no process, because no file has it; a device may reach it
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

/// A buffer's length is a multiple of this, so that what the system maps is all of it.
const PAGE_BYTES: usize = 4096;
/// A place that another process maps begins at a multiple of this.
const PLACE_BYTES: usize = 64;

/// Servers may read it in place.
const IN_PLACE: u8 = 0;
/// Shared, and a server may still read a range that it has not returned.
const TORN: u8 = 1;
/// Private to this process.
const WITHDRAWN: u8 = 2;

/// Bytes of this process, zero at first, which begin at a page. Dropping it frees them once no transport reads them.
#[derive(Debug)]
pub struct Buffer {
    map: Arc<MmapRaw>,
    mapping: Arc<Mapping>,
    bytes: usize,
}

/// The memory of a [`Buffer`], or memory of the caller's, as those know it who lend it.
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

    /// Its memory, for those who lend slices of it.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Where it begins. Reading and writing there is as good as reading and writing the slice.
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
        // SAFETY: as above, and `&mut self` is the only way of this process to the bytes: a loan of them borrows the
        // buffer until its call ends.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) }
    }
}

impl Mapping {
    /// Memory of the caller's own: nothing here reads or writes it but through loans. Devices may be told of it until
    /// [`Mapping::let_go`], or until this is dropped and they have noticed; so long it stays where it is, which is the
    /// caller's to see to.
    ///
    /// # Errors
    /// [`Failure::Call`] when that is no bytes, or more than there can be.
    pub fn of_caller(address: usize, bytes: usize) -> Result<Self, Failure> {
        let pages = Pages::Callers(Arc::new(Callers::new(address, bytes)?));
        Ok(Self { pages, state: AtomicU8::new(IN_PLACE) })
    }

    /// Where in it a slice begins, when all of the slice lies in it.
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

    /// Its pages, for those who keep them and lend nothing of them.
    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Whether others may read it where it is.
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

    /// A connection ended on which some of it was lent and not given back.
    pub(super) fn tear(&self) {
        let _ = self.state.compare_exchange(IN_PLACE, TORN, SeqCst, SeqCst);
    }

    /// Shows a buffer to no further server: what is sent from it is copied from here on. For a buffer whose descriptor
    /// the program has closed.
    pub fn hide_closed(&self) {
        if let Pages::File { file, .. } = &self.pages
            && !file.is_open()
        {
            let _ = self.state.compare_exchange(IN_PLACE, WITHDRAWN, SeqCst, SeqCst);
        }
    }

    /// Before the trainer may write again after a call that failed: if somebody may still read what was lent, nobody
    /// sees what is written from here on. The bytes stay as they are.
    ///
    /// # Errors
    /// The system's refusal. A reader then sees the new bytes, in this trainer's own gradient. Memory of the
    /// caller's cannot be mapped again: devices let go of it, or it is an error as for [`Mapping::let_go`].
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
        // The new ones show the same file, so every byte reads as before; what is written to them from here on is this
        // process's alone. `map` unmaps them as it would have unmapped the old ones.
        let mapped =
            unsafe { mmap(start.cast(), length, ProtFlags::READ | ProtFlags::WRITE, flags, file.descriptor(), 0) };
        mapped.map_err(|error| refused(&format!("withdrawing a buffer of {length} bytes"), &error))?;
        self.state.store(WITHDRAWN, SeqCst);
        Ok(())
    }

    /// Has every device let go of memory of the caller's, of which nothing is lent: afterwards none of them reads or
    /// writes it. A buffer is the library's, and stays mapped as long as a device has it.
    ///
    /// # Errors
    /// When one does not let go: it may read and write the memory for as long as this process lives.
    pub fn let_go(&self) -> Result<(), Failure> {
        let Pages::Callers(callers) = &self.pages else { return Ok(()) };
        if callers.let_go() { Ok(()) } else { Err(callers.held()) }
    }
}
