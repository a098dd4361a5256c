//! Slab: the mapping of an arena and its free slots, in classes of one slot size each.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::MmapRaw;

use super::budget::{CLASSES, slot_bytes};
use super::free::FreeSlots;
use super::shared::File;

/// The mapping and the free slots of each class.
pub(super) struct Slab {
    map: MmapRaw,
    /// The file that other processes map, when the arena is shared.
    file: Option<Arc<File>>,
    /// By class, smallest slots first. In the mapping the largest come first, so that each slot lies at a multiple
    /// of its own size.
    classes: [Class; CLASSES],
}

/// The slots of one size.
pub(super) struct Class {
    /// Where its first slot begins in the mapping.
    offset: usize,
    pub(super) free: FreeSlots,
    pub(super) in_use: AtomicU64,
}

impl Slab {
    /// Lays `counts[class]` slots of each class out in a mapping of `bytes` bytes.
    pub(super) fn over(map: MmapRaw, file: Option<File>, counts: &[u32; CLASSES], bytes: u64) -> Self {
        let mut offset = 0;
        let mut classes: [Option<Class>; CLASSES] = std::array::from_fn(|_| None);
        for class in (0..CLASSES).rev() {
            let free = FreeSlots::full(counts[class]);
            classes[class] = Some(Class { offset, free, in_use: AtomicU64::new(0) });
            offset += slot_bytes(class) as usize * counts[class] as usize;
        }
        assert_eq!(offset as u64, bytes, "the slots fill the mapping");
        let classes = classes.map(|class| class.expect("the loop above visits every class"));
        Self { map, file: file.map(Arc::new), classes }
    }

    #[inline]
    pub(super) fn map(&self) -> &MmapRaw {
        &self.map
    }

    #[inline]
    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    #[inline]
    pub(super) fn classes(&self) -> &[Class; CLASSES] {
        &self.classes
    }

    /// The address of a slot.
    #[inline]
    pub(super) fn start(&self, class: u8, slot: u32) -> *mut u8 {
        let offset = self.offset(class, slot);
        // SAFETY: `Slab::over` laid the slot out within the mapping, so the offset stays inside it.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Where a slot begins in the mapping.
    #[inline]
    pub(super) fn offset(&self, class: u8, slot: u32) -> usize {
        let class = usize::from(class);
        self.classes[class].offset + slot as usize * slot_bytes(class) as usize
    }

    /// A free slot of this class: the class and the slot.
    #[inline]
    pub(super) fn take(&self, class: usize) -> Option<(usize, u32)> {
        let entry = &self.classes[class];
        let slot = entry.free.take()?;
        entry.in_use.fetch_add(1, Relaxed);
        Some((class, slot))
    }

    /// Makes a slot of this class free again.
    #[inline]
    pub(super) fn give_back(&self, class: u8, slot: u32) {
        let class = &self.classes[usize::from(class)];
        // Before the slot is free, so that the count never exceeds the slots there are.
        class.in_use.fetch_sub(1, Relaxed);
        class.free.give_back(slot);
    }
}
