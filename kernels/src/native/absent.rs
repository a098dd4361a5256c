//! Where no code is generated.

use pserver_core::rule::ssa::Lowered;

use super::{CallTensors, CodeTarget, GRADIENTS_MAX, GradientFormat, Vectors};

/// No function exists on this processor.
#[derive(Debug)]
pub(crate) enum GeneratedFunction {}

impl Vectors {
    /// False: these vectors belong to another processor.
    pub(crate) const fn are_there(self) -> bool {
        false
    }
}

impl GeneratedFunction {
    /// None, for every rule.
    pub(crate) const fn new(_: &Lowered, _: CodeTarget, _: GradientFormat) -> Option<Self> {
        None
    }

    /// Cannot be called.
    pub(crate) fn run(&self, _: CallTensors<'_, '_>) {
        match *self {}
    }
}

/// Whether the system allows executing generated code: not tried here.
pub(crate) const fn is_allowed() -> bool {
    false
}

pub(crate) const fn gradients_at_once() -> usize {
    GRADIENTS_MAX
}
