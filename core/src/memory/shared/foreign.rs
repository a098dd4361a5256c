//! Bytes in the memory of another process.

use std::fmt;
use std::marker::PhantomData;

use memmap2::MmapRaw;

/// A range of another process's memory. The other process may break the protocol and write it at any moment, so two
/// reads of one byte may differ: bytes that a decision depends on are copied once, and the copy is used.
#[derive(Clone, Copy)]
pub struct ForeignBytes<'a> {
    start: *const u8,
    length: usize,
    mapping: PhantomData<&'a MmapRaw>,
}

impl<'a> ForeignBytes<'a> {
    /// # Panics
    /// When some of the range lies outside the mapping.
    pub(super) fn new(map: &'a MmapRaw, offset: usize, length: usize) -> Self {
        assert!(offset <= map.len() && length <= map.len() - offset, "a view lies in its mapping");
        // SAFETY: the offset was just compared with the mapping's length.
        let start = unsafe { map.as_ptr().add(offset) };
        Self { start, length, mapping: PhantomData }
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies all of it into private memory. If the other process writes meanwhile, each byte of the copy is an old or
    /// a new one; the copy itself does not change afterwards.
    ///
    /// # Panics
    /// When `into` has another length.
    pub fn copy_to(&self, into: &mut [u8]) {
        assert_eq!(into.len(), self.length, "a copy is as long as what is copied");
        // SAFETY: the range was compared with the mapping, whose size is sealed and which outlives `self`; `into` is
        // memory of this process alone, so the two do not overlap. The source is accessed through a raw pointer, which
        // claims nothing about its content: no reference to it exists while it is copied, and any byte is a valid one.
        unsafe { std::ptr::copy_nonoverlapping(self.start, into.as_mut_ptr(), self.length) };
    }

    /// The same copy with stores past the caches, where the processor has such: the lines of `into` are not read first,
    /// and displace nothing. For more bytes than the caches hold until they are used.
    ///
    /// # Panics
    /// When `into` has another length.
    pub fn copy_past_caches_to(&self, into: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the processor has the instructions.
            return unsafe { self.stream_to(into) };
        }
        self.copy_to(into);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx")]
    fn stream_to(&self, into: &mut [u8]) {
        use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

        #[repr(C, align(64))]
        struct CacheLine([__m256i; 2]);

        assert_eq!(into.len(), self.length, "a copy is as long as what is copied");
        // SAFETY: a line is any 64 bytes.
        let (head, lines, tail) = unsafe { into.align_to_mut::<CacheLine>() };
        self.part(0, head.len()).copy_to(head);
        let begin = head.len();
        let bytes = size_of_val(lines);
        let source = self.part(begin, bytes).start.cast::<__m256i>();
        for (index, CacheLine([low, high])) in lines.iter_mut().enumerate() {
            // SAFETY: the part has as many lines of two vectors, at any address. It is accessed as in `copy_to`.
            let first = unsafe { _mm256_loadu_si256(source.wrapping_add(2 * index)) };
            // SAFETY: as above.
            let second = unsafe { _mm256_loadu_si256(source.wrapping_add(2 * index + 1)) };
            // SAFETY: the vector is aligned, and this function's alone.
            unsafe { _mm256_stream_si256(low, first) };
            // SAFETY: as above.
            unsafe { _mm256_stream_si256(high, second) };
        }
        self.part(begin + bytes, tail.len()).copy_to(tail);
        // Such stores are not ordered with others.
        _mm_sfence();
    }

    #[cfg(target_arch = "x86_64")]
    fn part(&self, begin: usize, length: usize) -> Self {
        assert!(begin <= self.length && length <= self.length - begin, "a part lies within the whole");
        // SAFETY: the beginning was just compared with the length.
        let start = unsafe { self.start.add(begin) };
        Self { start, length, mapping: PhantomData }
    }

    /// The bytes where they are, for arithmetic alone: sums of gradients, and values in views of a trainer.
    ///
    /// Rust lets a compiler assume that bytes behind a reference do not change. A process that breaks the protocol
    /// violates the assumption, so the slice is only for code in which the consequence is a wrong number and nothing
    /// else: straight-line arithmetic, in which every pattern of bits is a number and no address, length or branch
    /// depends on one. Kernels are such code, compiled and generated; their loops run over lengths that are known
    /// beforehand. Bytes that are checked, parsed or stored are copied first ([`ForeignBytes::copy_to`]).
    pub(in crate::memory) fn in_place(self) -> &'a [u8] {
        // SAFETY: the range was compared with the mapping, whose size is sealed and which outlives `'a`; this process
        // never writes it. The other process promised not to write it while it is read; if it does, see above.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

impl fmt::Debug for ForeignBytes<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ForeignBytes({} bytes)", self.length)
    }
}
