//! The mapping that some memory lies in, as a device is told of it.

use std::fmt;
use std::sync::Arc;

use memmap2::MmapRaw;

use super::Mapping;
use super::buffer::Pages;
use super::callers::{Callers, LetGo};
use super::slab::Slab;

/// A mapping of this process, kept while this handle exists. Code that registers memory with a device registers pieces
/// of a mapping and keeps one handle. A [`Buffer`](super::Buffer)'s pages stay mapped with it, which does not count as
/// use of the buffer. Memory of the caller's stays as long as the caller says, and its registrations end on request
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

    /// Where it begins, as a number: a multiple of a page, but for memory of the caller's.
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

    /// Whether nobody else keeps it: no arena, no lease, no buffer and no loan.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match &self.0 {
            MappedKind::Slab(slab) => Arc::strong_count(slab) == 1,
            MappedKind::Buffer(map) => Arc::strong_count(map) == 1,
            MappedKind::Callers(callers) => Arc::strong_count(callers) == 1,
        }
    }

    /// Whether both are one mapping. Memory of the caller's that was let go of may have the address of another.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (MappedKind::Slab(one), MappedKind::Slab(other)) => Arc::ptr_eq(one, other),
            (MappedKind::Buffer(one), MappedKind::Buffer(other)) => Arc::ptr_eq(one, other),
            (MappedKind::Callers(one), MappedKind::Callers(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Whether it is memory of the caller's own making.
    #[must_use]
    pub fn is_callers(&self) -> bool {
        matches!(self.0, MappedKind::Callers(_))
    }

    /// Says how whoever registers memory of the caller's with a device lets go of it; it is asked to as long as it
    /// keeps this. Other memory stays.
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
