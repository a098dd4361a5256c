//! Which kernel runs for a chunk.

use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::Code;
use pserver_core::rule::ssa::Lowered;

use super::arguments::{Merge, sum_entry};
use super::checked::{Context, Entry, Module, Refused};

/// What is launched for a chunk's update, and how its numbers are handed over.
#[derive(Clone)]
pub(super) struct Program {
    pub(super) entry: Entry,
    pub(super) numbers: Numbers,
}

/// What the numbers of an update become in the device's memory.
#[derive(Clone)]
pub(super) enum Numbers {
    /// Nothing.
    None(Merge),
    /// A scale, in the parameter's type.
    Scale(Merge),
}

/// The kernels of a device, loaded when they are first needed.
pub(super) struct Kernels {
    context: Arc<Context>,
    shipped: Arc<Module>,
    /// What chunks of one rule share.
    known: Vec<(Arc<Lowered>, ElementType, Program)>,
}

impl Numbers {
    /// What the sum becomes; a rule says that itself.
    pub(super) fn merge(&self) -> Merge {
        match self {
            Self::None(merge) | Self::Scale(merge) => *merge,
        }
    }

    /// Writes one update's numbers as the kernel takes them; how many bytes.
    #[expect(clippy::cast_possible_truncation, reason = "the scale is rounded to the parameter's type")]
    pub(super) fn pack(&self, element_type: ElementType, numbers: &[f64], into: &mut Vec<u8>) {
        into.clear();
        match (self, element_type) {
            (Self::None(_), _) => {}
            (Self::Scale(_), ElementType::Float32) => into.extend((numbers[0] as f32).to_le_bytes()),
            (Self::Scale(_), _) => into.extend(numbers[0].to_le_bytes()),
        }
    }
}

impl Kernels {
    /// Loads what is shipped.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, Refused> {
        let shipped = Module::load(context, b".version 8.4")?;
        Ok(Self { context: Arc::clone(context), shipped, known: Vec::new() })
    }

    /// The kernel that adds gradients of this parameter's type.
    pub(super) fn sum(&self, element_type: ElementType) -> Result<Entry, Failure> {
        let name = sum_entry(element_type)
            .ok_or_else(|| Failure::call(format!("a parameter of {element_type}; it can be a gradient only")))?;
        self.shipped.entry(name).map_err(|error| Failure::call(format!("kernel {name}: {error}")))
    }

    /// What runs for a chunk.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no kernel for it, and none can be made; says why.
    pub(super) fn program(&mut self, code: &Code, element_type: ElementType) -> Result<Program, Failure> {
        let merge = match code {
            Code::Add => Merge::Add,
            Code::Sum => Merge::Scale,
            Code::Rule(rule) => return self.rule(rule, element_type),
        };
        let numbers = if element_type.is_float() { Numbers::Scale(merge) } else { Numbers::None(merge) };
        Ok(Program { entry: self.sum(element_type)?, numbers })
    }

    fn rule(&mut self, rule: &Arc<Lowered>, element_type: ElementType) -> Result<Program, Failure> {
        let known = |(other, other_type, _): &&(Arc<Lowered>, ElementType, Program)| {
            Arc::ptr_eq(other, rule) && *other_type == element_type
        };
        if let Some((_, _, program)) = self.known.iter().find(known) {
            return Ok(program.clone());
        }
        let _ = &self.context;
        Err(Failure::call("no kernel"))
    }
}
