//! Memory that the library allocates for its caller, and frees on the caller's request.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use pserver_core::error::Failure;

/// A cache line: every allocation is aligned to one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "the bytes are reached through the start of all lines")] [u8; LINE_BYTES]);

const LINE_BYTES: usize = 64;

/// Zeroed memory that the library fills before the caller gets it.
pub(super) struct Allocation {
    lines: Vec<Line>,
    bytes: usize,
    /// Further allocations to which pointers in this one point.
    parts: Vec<Allocation>,
}

/// Allocations that callers own, by address.
static GIVEN: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());

impl Allocation {
    pub(super) fn zeroed(bytes: usize) -> Result<Self, Failure> {
        let mut lines = Vec::new();
        let count = bytes.div_ceil(LINE_BYTES);
        lines.try_reserve_exact(count).map_err(|_| Failure::call(format!("there is no memory for {bytes} bytes")))?;
        lines.resize(count, Line([0; LINE_BYTES]));
        Ok(Self { lines, bytes, parts: Vec::new() })
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.lines.as_mut_ptr().cast::<u8>();
        // SAFETY: the lines are initialised, have no padding, hold at least `bytes` bytes by `zeroed`, and are
        // borrowed as long as the slice is.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }

    /// A copy of some elements, at least a line long, so that its address is its own.
    pub(super) fn of<T: Copy>(elements: &[T]) -> Result<Self, Failure> {
        const { assert!(align_of::<T>() <= LINE_BYTES, "a line begins where elements may") };
        let mut made = Self::zeroed(size_of_val(elements).max(1))?;
        let start = made.lines.as_mut_ptr().cast::<T>();
        // SAFETY: the lines are as long as the elements by `zeroed`, aligned for them, and no part of the elements.
        unsafe { start.copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        Ok(made)
    }

    /// Ties the lifetime of `allocation` to that of this one, and returns the address of `allocation`.
    pub(super) fn keep<T>(&mut self, mut part: Self) -> *mut T {
        let start = part.lines.as_mut_ptr().cast();
        self.parts.push(part);
        start
    }

    /// Passes this memory and its parts to the caller, until [`take_back`].
    pub(super) fn give(mut self) -> *mut c_void {
        let start = self.lines.as_mut_ptr().cast::<c_void>();
        let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
        given.insert(start.addr(), self);
        start
    }
}

/// Frees memory that the library allocated for the caller. NULL is ignored.
pub(super) fn take_back(pointer: *mut c_void) -> Result<(), Failure> {
    if pointer.is_null() {
        return Ok(());
    }
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = given.remove(&pointer.addr());
    drop(given);
    found.map(drop).ok_or_else(|| {
        Failure::call(format!("{pointer:p} is not memory that this library gave, or it was freed already"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_freed_once_and_only_if_it_was_allocated_here() {
        let mut allocation = Allocation::zeroed(100).expect("there is memory");
        assert_eq!(allocation.bytes_mut(), [0; 100]);
        let pointer = allocation.give();
        assert_eq!(pointer.addr() % LINE_BYTES, 0);
        take_back(pointer).expect("it was given");
        assert!(take_back(pointer).is_err(), "it was taken back already");
        let mut local = 0_u8;
        assert!(take_back(std::ptr::from_mut(&mut local).cast()).is_err(), "it was never given");
        take_back(std::ptr::null_mut()).expect("NULL is nothing to free");
        assert!(Allocation::zeroed(usize::MAX / 2).is_err(), "no machine has that much");
    }
}
