//! Prefetch hints.

/// The bytes of a cache line on the processors that matter here; where lines are longer some are asked for twice.
const LINE_BYTES: usize = 64;

/// Asks the processor to bring these bytes into its cache, and goes on. It changes nothing that a program can see, and
/// where there is no such instruction it does nothing.
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
