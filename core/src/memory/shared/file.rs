//! Files in memory: made and sealed by one process, checked and mapped by others.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::{Descriptor, ForeignBytes, refused};
use crate::error::Failure;

/// The file's size is fixed, so an access to a mapping of it never faults.
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Files made by this process so far; the count numbers the next file.
static MADE: AtomicU64 = AtomicU64::new(0);
/// Files of this process that were dropped.
static GONE: AtomicU64 = AtomicU64::new(0);

/// The memory of a shared arena or of a buffer, to be handed to other processes.
#[derive(Debug)]
pub struct File {
    descriptor: Descriptor,
    number: u64,
}

impl File {
    /// A file of `bytes` bytes that only the mapping made here can write.
    pub(in crate::memory) fn for_readers(bytes: u64) -> Result<(Self, MmapRaw), Failure> {
        let (descriptor, map) = make("pserver-arena", bytes, FIXED | SealFlags::FUTURE_WRITE)?;
        // Large pages where the system grants them; without them everything works.
        let _ = map.advise(Advice::HugePage);
        let descriptor = Descriptor::new(descriptor)?;
        Ok((Self { descriptor, number: MADE.fetch_add(1, Relaxed) }, map))
    }

    /// The number of files of this process that were dropped. A transport that has shared files checks them when this
    /// number has grown.
    #[must_use]
    pub fn gone() -> u64 {
        GONE.load(Relaxed)
    }

    /// The file's number, which no other file of this process has or had.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The descriptor to hand over.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Whether the program has left the descriptor open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.descriptor.is_open()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        GONE.fetch_add(1, Relaxed);
    }
}

/// The range of a lease or of a buffer in a file that another process maps.
#[derive(Clone, Copy, Debug)]
pub struct SharedRange<'a> {
    /// The arena's memory, or the buffer's.
    pub file: &'a Arc<File>,
    /// Where in it the bytes begin.
    pub offset: u64,
}

/// Another process's arena, mapped to read. Its owner promises not to write a range between sending it and getting it
/// back; an owner that breaks this promise corrupts only its own values.
#[derive(Debug)]
pub struct ReadOnly {
    map: MmapRaw,
}

impl ReadOnly {
    /// Maps a file that another process sent, after checking that its size is sealed.
    ///
    /// # Errors
    /// When the descriptor is no sealed file in memory, or the system refuses the mapping.
    pub fn open(descriptor: &OwnedFd) -> Result<Self, Failure> {
        let bytes = checked(descriptor, FIXED)?;
        let length = usize::try_from(bytes).map_err(|error| refused("mapping", &error))?;
        let map = MmapOptions::new().len(length).map_raw_read_only(descriptor);
        Ok(Self { map: map.map_err(|error| refused(&format!("mapping {bytes} bytes"), &error))? })
    }

    /// All of it, for a device that locks it in memory and reads it.
    #[must_use]
    pub fn mapping(&self) -> NonNull<[u8]> {
        let start = NonNull::new(self.map.as_mut_ptr()).expect("a mapping does not begin at address zero");
        NonNull::slice_from_raw_parts(start, self.map.len())
    }

    /// How many bytes it has.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a file of no bytes is refused")]
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// `bytes` bytes from `offset` on, unless some of them lie outside.
    #[must_use]
    pub fn bytes(&self, offset: u64, bytes: u32) -> Option<ForeignBytes<'_>> {
        let end = offset.checked_add(bytes.into())?;
        (end <= self.len()).then(|| self.range(usize::try_from(offset).expect("it is below a length"), bytes as usize))
    }

    pub(in crate::memory) fn range(&self, offset: usize, bytes: usize) -> ForeignBytes<'_> {
        ForeignBytes::new(&self.map, offset, bytes)
    }
}

/// Makes a file in memory, maps it to be written, and seals it.
pub(super) fn make(name: &str, bytes: u64, seals: SealFlags) -> Result<(OwnedFd, MmapRaw), Failure> {
    let failed = |error: &dyn std::fmt::Display| refused(&format!("making {bytes} bytes"), error);
    // A file that grows beyond the limit would end the process by SIGXFSZ, which is not this library's to handle.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes) {
        return Err(failed(&format!("{}, as the limit of file sizes is lower (ulimit -f)", Errno::FBIG)));
    }
    let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|e| failed(&e))?;
    ftruncate(&descriptor, bytes).map_err(|error| failed(&error))?;
    let map = map_writable(&descriptor, bytes)?;
    fcntl_add_seals(&descriptor, seals).map_err(|error| failed(&error))?;
    Ok((descriptor, map))
}

pub(super) fn map_writable(descriptor: &OwnedFd, bytes: u64) -> Result<MmapRaw, Failure> {
    let failed = |error: &dyn std::fmt::Display| refused(&format!("mapping {bytes} bytes"), error);
    let length = usize::try_from(bytes).map_err(|error| failed(&error))?;
    MmapOptions::new().len(length).map_raw(descriptor).map_err(|error| failed(&error))
}

/// The size of a file that another process sent, after checking that the size is sealed.
pub(super) fn checked(descriptor: &OwnedFd, expected: SealFlags) -> Result<u64, Failure> {
    let seals = fcntl_get_seals(descriptor).map_err(|error| refused("not a file in memory", &error))?;
    if !seals.contains(expected) {
        return Err(refused("not sealed", &format!("found {seals:?}, expected {expected:?}")));
    }
    let found = fstat(descriptor).map_err(|error| refused("its size", &error))?.st_size;
    u64::try_from(found).ok().filter(|bytes| *bytes > 0).ok_or_else(|| refused("its size", &format!("{found} bytes")))
}

/// As [`checked`], for memory that both sides write.
pub(super) const BOARD_SEALS: SealFlags = FIXED;
