//! Prefetch hints.

/// Bytes of a cache line on common processors. On processors with longer lines some are prefetched twice.
const LINE_BYTES: usize = 64;

/// Asks the processor to load these bytes into its cache, without waiting. Without such an instruction the function
/// does nothing.
#[inline]
pub fn prefetch(bytes: &[u8]) {
    let mut rest = bytes;
    while let Some(first) = rest.first() {
        prefetch_line(first);
        // From the start of one line to the start of the next.
        let to_next = LINE_BYTES - std::ptr::from_ref(first).addr() % LINE_BYTES;
        rest = rest.get(to_next..).unwrap_or_default();
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch_line(byte: &u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction comes with every processor of this architecture, and loads nothing that a program sees:
    // it is a hint, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn prefetch_line(_: &u8) {}
