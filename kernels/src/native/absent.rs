//! Where no code is generated.

use pserver_core::rule::ssa::Lowered;

use super::{Source, Target, Tensors, Vectors};

/// There is none.
#[derive(Debug)]
pub(crate) enum Function {}

impl Vectors {
    /// They are another processor's.
    pub(crate) const fn are_there(self) -> bool {
        false
    }
}

impl Function {
    /// None, for every rule.
    pub(crate) const fn new(_: &Lowered, _: Target, _: Source) -> Option<Self> {
        None
    }

    /// Cannot be called.
    pub(crate) fn run(&self, _: Tensors<'_, '_>) {
        match *self {}
    }
}

/// Whether this system lets a program run what it wrote: nobody has tried.
pub(crate) const fn is_allowed() -> bool {
    false
}
