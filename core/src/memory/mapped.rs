//! Mapping of a lease or a loan, for registration with a device.

use std::fmt;
use std::sync::Arc;

use memmap2::MmapRaw;

use super::Mapping;
use super::buffer::Pages;
use super::callers::{Callers, LetGo};
use super::slab::Slab;

/// A mapping of this process, which stays mapped while this handle exists. Code that registers memory with a device
/// registers parts of a mapping and keeps one handle. A handle keeps the pages of a [`Buffer`](super::Buffer) mapped
/// without counting as use of the buffer. The caller may free its own memory, and its registrations end on request
/// ([`Mapped::until`]).
#[derive(Clone)]
pub struct Mapped(MappedKind);

#[derive(Clone)]
enum MappedKind {
    Slab(Arc<Slab>),
    Buffer(Arc<MmapRaw>),
    Callers(Arc<Callers>),
}

impl Mapped {
    pub(super) fn slab(slab: &Arc<Slab>) -> Self {
        Self(MappedKind::Slab(Arc::clone(slab)))
    }

    pub(super) fn buffer(mapping: &Arc<Mapping>) -> Self {
        Self(match mapping.pages() {
            Pages::File { map, .. } => MappedKind::Buffer(Arc::clone(map)),
            Pages::Callers(callers) => MappedKind::Callers(Arc::clone(callers)),
        })
    }

    /// The address as a number. It is a multiple of a page, except for memory of the caller.
    #[must_use]
    pub fn address(&self) -> usize {
        match &self.0 {
            MappedKind::Slab(slab) => slab.map().as_mut_ptr().expose_provenance(),
            MappedKind::Buffer(map) => map.as_mut_ptr().expose_provenance(),
            MappedKind::Callers(callers) => callers.address(),
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is no mapping of no bytes")]
    pub fn len(&self) -> usize {
        match &self.0 {
            MappedKind::Slab(slab) => slab.map().len(),
            MappedKind::Buffer(map) => map.len(),
            MappedKind::Callers(callers) => callers.bytes(),
        }
    }

    /// Whether this is the last handle: no arena, lease, buffer or loan uses the mapping.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match &self.0 {
            MappedKind::Slab(slab) => Arc::strong_count(slab) == 1,
            MappedKind::Buffer(map) => Arc::strong_count(map) == 1,
            MappedKind::Callers(callers) => Arc::strong_count(callers) == 1,
        }
    }

    /// Whether both are the same mapping. Their addresses do not tell: memory that the caller freed may be allocated
    /// again.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (MappedKind::Slab(one), MappedKind::Slab(other)) => Arc::ptr_eq(one, other),
            (MappedKind::Buffer(one), MappedKind::Buffer(other)) => Arc::ptr_eq(one, other),
            (MappedKind::Callers(one), MappedKind::Callers(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Whether the caller allocated the memory.
    #[must_use]
    pub fn is_callers(&self) -> bool {
        matches!(self.0, MappedKind::Callers(_))
    }

    /// Sets the callback that deregisters memory of the caller from a device; it may be called as long as it exists.
    /// For other memory this does nothing.
    pub fn until(&self, let_go: &Arc<LetGo>) {
        if let MappedKind::Callers(callers) = &self.0 {
            callers.has_device(let_go);
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mapped({} bytes at {:#x})", self.len(), self.address())
    }
}
