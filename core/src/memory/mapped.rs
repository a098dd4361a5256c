//! The mapping that some memory lies in, as a device is told of it.

use std::fmt;
use std::sync::Arc;

use memmap2::MmapRaw;

use super::Mapping;
use super::arena::Slab;

/// A whole mapping of this process, which stays as long as this does. Who registers memory with a device registers
/// pieces of a mapping, and keeps one of these. A [`Buffer`](super::Buffer)'s pages stay mapped with it, and nobody is
/// said to use the buffer for that.
#[derive(Clone)]
pub struct Mapped(Kind);

#[derive(Clone)]
enum Kind {
    Slab(Arc<Slab>),
    Buffer(Arc<MmapRaw>),
}

impl Mapped {
    pub(super) fn slab(slab: &Arc<Slab>) -> Self {
        Self(Kind::Slab(Arc::clone(slab)))
    }

    pub(super) fn buffer(mapping: &Arc<Mapping>) -> Self {
        Self(Kind::Buffer(Arc::clone(mapping.map())))
    }

    /// Where it begins, as a number: a multiple of a page.
    #[must_use]
    pub fn address(&self) -> usize {
        match &self.0 {
            Kind::Slab(slab) => slab.map().as_mut_ptr().expose_provenance(),
            Kind::Buffer(map) => map.as_mut_ptr().expose_provenance(),
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is no mapping of no bytes")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Slab(slab) => slab.map().len(),
            Kind::Buffer(map) => map.len(),
        }
    }

    /// Whether nobody else keeps it: no arena, no lease, no buffer and no loan.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match &self.0 {
            Kind::Slab(slab) => Arc::strong_count(slab) == 1,
            Kind::Buffer(map) => Arc::strong_count(map) == 1,
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mapped({} bytes at {:#x})", self.len(), self.address())
    }
}
