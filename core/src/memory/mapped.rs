//! The mapping that some memory lies in, as a device is told of it.

use std::fmt;
use std::sync::Arc;

use super::Mapping;
use super::arena::Slab;

/// A whole mapping of this process, which stays as long as this does. Who registers memory with a device registers
/// pieces of a mapping, and keeps one of these.
#[derive(Clone)]
pub struct Mapped(Kind);

#[derive(Clone)]
enum Kind {
    Slab(Arc<Slab>),
    Buffer(Arc<Mapping>),
}

impl Mapped {
    pub(super) fn slab(slab: &Arc<Slab>) -> Self {
        Self(Kind::Slab(Arc::clone(slab)))
    }

    pub(super) fn buffer(mapping: &Arc<Mapping>) -> Self {
        Self(Kind::Buffer(Arc::clone(mapping)))
    }

    /// Where it begins, as a number: a multiple of a page.
    #[must_use]
    pub fn address(&self) -> usize {
        match &self.0 {
            Kind::Slab(slab) => slab.map().as_mut_ptr().expose_provenance(),
            Kind::Buffer(mapping) => mapping.start().expose_provenance(),
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is no mapping of no bytes")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Slab(slab) => slab.map().len(),
            Kind::Buffer(mapping) => mapping.len(),
        }
    }

    /// Whether nobody else keeps it: no arena, no lease, no buffer and no loan.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match &self.0 {
            Kind::Slab(slab) => Arc::strong_count(slab) == 1,
            Kind::Buffer(mapping) => Arc::strong_count(mapping) == 1,
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mapped({} bytes at {:#x})", self.len(), self.address())
    }
}
