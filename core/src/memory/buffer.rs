//! Memory of a trainer that servers of its machine read where it is.
//!
//! The trainer writes it, a transport lends it, and a server maps it to read. While some of it is lent the trainer does
//! not write it; that is the borrow of the call. Where a call ends without its server having given back what was lent,
//! the memory is taken out of the server's sight instead ([`Mapping::withdraw`]): the server keeps the pages as they
//! were, and the trainer goes on with the same bytes at the same address, but as its own.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;

use memmap2::MmapRaw;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::SharedPlace;
use super::shared::{File, refused};
use crate::error::Failure;

/// A buffer's length is a multiple of this, so that what the system maps is all of it.
const PAGE_BYTES: usize = 4096;
/// A place that another process maps begins at a multiple of this.
const PLACE_BYTES: usize = 64;

/// Others may read it where it is.
const IN_PLACE: u8 = 0;
/// The same, and somebody may read what was not given back.
const TORN: u8 = 1;
/// Nobody else sees it.
const WITHDRAWN: u8 = 2;

/// Bytes of this process, zero at first, which begin at a page. Dropping it frees them once no transport reads them.
#[derive(Debug)]
pub struct Buffer {
    mapping: Arc<Mapping>,
    bytes: usize,
}

/// The memory of a [`Buffer`], as those know it who lend it.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
    file: Arc<File>,
    state: AtomicU8,
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
        let mapping = Mapping { map, file: Arc::new(file), state: AtomicU8::new(IN_PLACE) };
        Ok(Self { mapping: Arc::new(mapping), bytes })
    }

    /// Its memory, for those who lend slices of it.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Where it begins. Reading and writing there is as good as reading and writing the slice.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.mapping.map.as_mut_ptr()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `bytes` bytes, which the system zeroed, and lives as long as `self`. Writers
        // of this process need `&mut self`; other processes can only read.
        unsafe { std::slice::from_raw_parts(self.mapping.map.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only way of this process to the bytes: a loan of them borrows the
        // buffer until its call ends.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.map.as_mut_ptr(), self.bytes) }
    }
}

impl Mapping {
    /// Where in it a slice begins, when all of the slice lies in it.
    #[must_use]
    pub fn offset_of(&self, slice: &[u8]) -> Option<usize> {
        let offset = slice.as_ptr().addr().checked_sub(self.map.as_ptr().addr())?;
        (offset <= self.map.len() && slice.len() <= self.map.len() - offset).then_some(offset)
    }

    /// Its length in bytes, a multiple of a page.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer of no bytes is refused")]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Where it begins.
    pub(super) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Whether others may read it where it is.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.state.load(SeqCst) != WITHDRAWN
    }

    /// Where another process finds what begins at `offset`; nothing when it cannot.
    pub(super) fn place(&self, offset: usize) -> Option<SharedPlace<'_>> {
        let is_placed = self.is_in_place() && offset.is_multiple_of(PLACE_BYTES);
        is_placed.then_some(SharedPlace { file: &self.file, offset: offset as u64 })
    }

    /// A connection ended on which some of it was lent and not given back.
    pub(super) fn tear(&self) {
        let _ = self.state.compare_exchange(IN_PLACE, TORN, SeqCst, SeqCst);
    }

    /// Before the trainer may write again after a call that failed: if somebody may still read what was lent, nobody
    /// sees what is written from here on. The bytes stay as they are.
    ///
    /// # Errors
    /// What the system refused. Whoever reads then sees what is written, in this trainer's own gradient.
    pub fn withdraw(&self) -> Result<(), Failure> {
        if self.state.load(SeqCst) != TORN {
            return Ok(());
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let (start, length) = (self.map.as_mut_ptr(), self.map.len());
        // SAFETY: the pages replaced are this mapping's own, all of it and nothing else, and stay mapped throughout.
        // The new ones show the same file, so every byte reads as before; what is written to them from here on is this
        // process's alone. `map` unmaps them as it would have unmapped the old ones.
        let mapped =
            unsafe { mmap(start.cast(), length, ProtFlags::READ | ProtFlags::WRITE, flags, self.file.descriptor(), 0) };
        mapped.map_err(|error| refused(&format!("withdrawing a buffer of {length} bytes"), &error))?;
        self.state.store(WITHDRAWN, SeqCst);
        Ok(())
    }
}
