//! Register conventions of generated code, and the layout of its memory.

use std::mem::offset_of;

use iced_x86::{Code, MemoryOperand, Register};
use pserver_core::limits::STATES_MAX;
use pserver_core::rule::ssa::{Lowered, RuleOp};
use pserver_core::rule::uses::UpdatedTensor;

use super::assembler::Assembler;
use crate::native::CodeTarget;

/// The argument of generated code, which reads the fields by offset.
#[repr(C)]
pub(super) struct CallFrame {
    /// Elements of the wide loop that prefetch ahead: a multiple of its step.
    pub(super) far_end: u64,
    /// Elements that the wide loop takes: a multiple of its turn.
    pub(super) wide_end: u64,
    /// Elements in whole vectors.
    pub(super) end: u64,
    /// As [`crate::native::scalar_room`] lays them out.
    pub(super) scalars: *const u8,
    pub(super) gradients: *const *const u8,
    pub(super) gradient_count: u64,
    /// The weights and the states.
    pub(super) tensors: [*mut u8; TENSORS_MAX],
}

/// The weights and the states of a rule, at most.
pub(super) const TENSORS_MAX: usize = 1 + STATES_MAX;

/// Where the [`CallFrame`] is. A call keeps it.
pub(super) const FRAME: Register = Register::RBX;
/// The element that the loop has come to. A call keeps it.
pub(super) const INDEX: Register = Register::R12;
/// The stack as it was on entry. A call keeps it.
pub(super) const STACK: Register = Register::RBP;
/// Where the scalars are, in code without calls.
pub(super) const SCALARS: Register = Register::RDX;
/// For temporary addresses.
pub(super) const PASSING: Register = Register::RAX;
/// Counts gradients.
pub(super) const COUNTER: Register = Register::RCX;

/// Base registers of tensors, in code without calls: the weight, the states, and the single gradient if one is left.
const BASES: [Register; 9] = [
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::R13,
    Register::R14,
    Register::R15,
];

/// Everything that the code's addresses depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallLayout {
    target: CodeTarget,
    tensors: usize,
    /// Whether it calls functions, which keep only few registers.
    pub(super) has_calls: bool,
}

/// Fields of the frame.
pub(super) mod frame {
    use super::{CallFrame, FRAME, MemoryOperand, displacement, offset_of};

    pub(in crate::native::x86) fn far_end() -> MemoryOperand {
        at(offset_of!(CallFrame, far_end))
    }

    pub(in crate::native::x86) fn wide_end() -> MemoryOperand {
        at(offset_of!(CallFrame, wide_end))
    }

    pub(in crate::native::x86) fn end() -> MemoryOperand {
        at(offset_of!(CallFrame, end))
    }

    pub(in crate::native::x86) fn scalars() -> MemoryOperand {
        at(offset_of!(CallFrame, scalars))
    }

    pub(in crate::native::x86) fn gradients() -> MemoryOperand {
        at(offset_of!(CallFrame, gradients))
    }

    pub(in crate::native::x86) fn gradient_count() -> MemoryOperand {
        at(offset_of!(CallFrame, gradient_count))
    }

    pub(super) fn tensor(number: usize) -> MemoryOperand {
        at(offset_of!(CallFrame, tensors) + number * size_of::<*mut u8>())
    }

    fn at(offset: usize) -> MemoryOperand {
        MemoryOperand::with_base_displ(FRAME, displacement(offset))
    }
}

impl CallLayout {
    pub(super) fn of(code: &Lowered, target: CodeTarget) -> Self {
        let has_calls = code.ops().iter().any(|op| matches!(op, RuleOp::Call(..) | RuleOp::Power(..)));
        Self { target, tensors: 1 + code.states().len(), has_calls }
    }

    /// Loads the general registers that are constant over the loops.
    pub(super) fn enter(self, assembler: &mut Assembler) {
        if self.has_calls {
            return;
        }
        assembler.load(Code::Mov_r64_rm64, SCALARS, frame::scalars());
        for (number, base) in BASES.into_iter().enumerate().take(self.tensors) {
            assembler.load(Code::Mov_r64_rm64, base, frame::tensor(number));
        }
    }

    /// Loads the additional registers of loops over a single gradient.
    pub(super) fn enter_lone(self, assembler: &mut Assembler) {
        if let Some(base) = self.base(self.tensors) {
            load_lone(assembler, base);
        }
    }

    /// Where the lone gradient begins.
    pub(super) fn lone_gradient(self, assembler: &mut Assembler) -> Register {
        self.base(self.tensors).unwrap_or_else(|| {
            load_lone(assembler, PASSING);
            PASSING
        })
    }

    /// The vector of a tensor that is `ahead` elements behind the index.
    pub(super) fn tensor(self, assembler: &mut Assembler, tensor: UpdatedTensor, ahead: usize) -> MemoryOperand {
        let number = match tensor {
            UpdatedTensor::Weight => 0,
            UpdatedTensor::State(state) => 1 + state,
        };
        let base = self.base(number).unwrap_or_else(|| {
            assembler.load(Code::Mov_r64_rm64, PASSING, frame::tensor(number));
            PASSING
        });
        self.element(base, self.target.element_bytes(), ahead)
    }

    /// The element `ahead` of the index, of a tensor with elements of `size` bytes that begins at `base`.
    pub(super) fn element(self, base: Register, size: usize, ahead: usize) -> MemoryOperand {
        let scale = u32::try_from(size).expect("an element is at most eight bytes");
        MemoryOperand::with_base_index_scale_displ_size(base, INDEX, scale, displacement(ahead * size), 1)
    }

    /// A vector on the stack.
    pub(super) fn slot(self, slot: usize) -> MemoryOperand {
        MemoryOperand::with_base_displ(Register::RSP, displacement(slot * self.target.vector_bytes()))
    }

    fn base(self, number: usize) -> Option<Register> {
        if self.has_calls { None } else { BASES.get(number).copied() }
    }
}

fn load_lone(assembler: &mut Assembler, to: Register) {
    assembler.load(Code::Mov_r64_rm64, to, frame::gradients());
    assembler.load(Code::Mov_r64_rm64, to, MemoryOperand::with_base(to));
}

/// A distance within a frame, a stack or a turn as an instruction holds it.
pub(super) fn displacement(bytes: usize) -> i64 {
    i64::try_from(bytes).expect("it is some pages at most")
}
