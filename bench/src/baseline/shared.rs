//! Memory that processes share. This is the one file of the benchmarks with raw memory in it.
//!
//! A region has words, which are only used as atomics, and content. Content has one writer at a time: the words name
//! the writer, and [`super::shm`] keeps to it. Within a process the borrow checker ensures it: a region is written
//! through `&mut`.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU32;

use anyhow::{Context, Result, ensure};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Words of a region.
pub(crate) const WORDS: usize = 64;
/// Bytes from a word to the next: two cache lines, as neighbours are fetched together.
const WORD_BYTES: usize = 128;
const HEAD_BYTES: usize = WORDS * WORD_BYTES;

/// Memory behind a file that has no name; the region's owner keeps it open.
pub(crate) struct Region {
    map: MmapRaw,
    _file: File,
}

impl Region {
    /// Makes a region of zeros. Others of this user open it by the path, as long as this process holds it.
    pub(crate) fn create(bytes: usize) -> Result<(Self, String)> {
        let file = File::from(memfd_create("psbench", MemfdFlags::CLOEXEC).context("no shared memory")?);
        let whole = u64::try_from(HEAD_BYTES + bytes)?;
        ftruncate(&file, whole).with_context(|| format!("no shared memory of {whole} bytes"))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok((Self::map(file)?, path))
    }

    /// Opens another process's region.
    pub(crate) fn open(path: &str) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        Self::map(file.with_context(|| format!("shared memory {path} cannot be opened"))?)
    }

    fn map(file: File) -> Result<Self> {
        let map = MmapOptions::new().populate().map_raw(&file).context("shared memory cannot be mapped")?;
        ensure!(HEAD_BYTES <= map.len(), "shared memory of {} bytes; expected {HEAD_BYTES} or more", map.len());
        Ok(Self { map, _file: file })
    }

    /// A word.
    pub(crate) fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < WORDS, "a region has {WORDS} words");
        let word = self.map.as_mut_ptr().wrapping_add(index * WORD_BYTES).cast::<u32>();
        // SAFETY: it is within the map, which lives as long as `self`; a page's start and 128 bytes keep it aligned;
        // and every process uses these bytes as an atomic only.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// Content that nobody writes now.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        let (start, length) = self.place(&range);
        // SAFETY: it is within the map, which lives as long as `self`; no reference of this process writes it, as that
        // takes `&mut self`, and by the turns in the words no other process does.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    /// Content that is ours to write now.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let (start, length) = self.place(&range);
        // SAFETY: as above, and nobody reads it either: `&mut self` in this process, the turns in all others.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }

    fn place(&self, range: &Range<usize>) -> (*mut u8, usize) {
        let content = self.map.len() - HEAD_BYTES;
        assert!(range.start <= range.end && range.end <= content, "{range:?} of {content} bytes");
        (self.map.as_mut_ptr().wrapping_add(HEAD_BYTES + range.start), range.len())
    }
}
