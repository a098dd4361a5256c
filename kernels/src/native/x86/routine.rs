//! A rule as one function: its loops, and the sum of several gradients.
//!
//! A lone gradient is read where it lies, several are added in order in registers, four vectors of each at once so that
//! a line of a gradient is read whole before the next gradient's. Then the rule runs on the sum while it is in
//! registers or on the first lines of the stack. So every byte comes from memory once and goes there at most once.

use iced_x86::{Code, Instruction, MemoryOperand, Register};
use pserver_core::rule::ssa::Lowered;
use pserver_core::rule::uses::UpdatedTensor;

use super::assembler::Assembler;
use super::body::{Body, GradientAt, RegisterPlan, load_constant, load_source};
use super::layout::{COUNTER, FRAME, INDEX, PASSING, STACK, frame};
use super::target;
use crate::native::{CodeTarget, GradientFormat};

/// Vectors in one turn of the wide loop: four cache lines of every tensor with AVX-512.
const UNROLLED: usize = 4;
/// Longer rules are their own excuse: a turn of one vector is long enough, and the code stays small.
const UNROLLED_OPS_MAX: usize = 64;
/// Prefetch distance in bytes of the parameter. The hardware prefetcher is not far enough ahead for the length of a
/// rule's loop, and stops at the end of a page. Measured with 10^8 elements: 2 KiB gives a tenth more than nothing, 512
/// bytes half of that, 4 KiB no more.
pub(super) const PREFETCHED: usize = 2048;
const LINE: usize = 64;
/// The stack that a function may take stays below a page, so that no guard page is stepped over.
const STACK_MAX: usize = 3 << 10;

/// A function's machine code, and the properties its caller needs.
pub(super) struct Routine {
    pub(super) bytes: Vec<u8>,
    /// Elements in one turn of the wide loop.
    pub(super) wide_lanes: usize,
}

/// Callee-saved registers, in the order in which they are saved.
const SAVED: [Register; 6] = [Register::RBP, Register::RBX, Register::R12, Register::R13, Register::R14, Register::R15];

/// Writes the function for one rule, one type and one kind of gradient; none when it would need too much stack.
pub(super) fn assemble(code: &Lowered, target: CodeTarget, source: GradientFormat) -> Option<Routine> {
    let plan = RegisterPlan::new(code, target);
    let is_long = plan.layout.has_calls || UNROLLED_OPS_MAX < code.ops().len();
    let unrolled = if is_long { 1 } else { UNROLLED };
    let mut writer = RoutineWriter { plan: &plan, assembler: Assembler::default(), source, slots: 0 };
    let stack = writer.enter();
    let (several, leave) = (writer.assembler.label(), writer.assembler.label());
    writer.assembler.put(Instruction::with2(Code::Cmp_rm64_imm8, frame::gradient_count(), 1));
    writer.assembler.branch(Code::Jne_rel32_64, several);
    plan.layout.enter_lone(&mut writer.assembler);
    writer.walks(unrolled, false);
    writer.assembler.branch(Code::Jmp_rel32_64, leave);
    writer.assembler.bind(several);
    writer.walks(unrolled, true);
    writer.assembler.bind(leave);
    writer.leave();
    // Room to align it.
    let bytes = (writer.slots + 1) * target.vector_bytes();
    writer.assembler.set_immediate(stack, i32::try_from(bytes).ok()?);
    let bytes = (bytes <= STACK_MAX).then(|| writer.assembler.finish())?;
    Some(Routine { bytes, wide_lanes: unrolled * target.lanes() })
}

struct RoutineWriter<'a, 'p> {
    plan: &'a RegisterPlan<'p>,
    assembler: Assembler,
    source: GradientFormat,
    slots: usize,
}

impl RoutineWriter<'_, '_> {
    /// Returns the instruction that allocates the stack frame: its size is known at the end.
    fn enter(&mut self) -> usize {
        let assembler = &mut self.assembler;
        SAVED.into_iter().for_each(|register| assembler.put(Instruction::with1(Code::Push_r64, register)));
        assembler.two(Code::Mov_r64_rm64, STACK, Register::RSP);
        let stack = assembler.len();
        assembler.put(Instruction::with2(Code::Sub_rm64_imm32, Register::RSP, 0));
        assembler.put(Instruction::with2(Code::And_rm64_imm8, Register::RSP, -64));
        assembler.two(Code::Mov_r64_rm64, FRAME, Register::RDI);
        assembler.two(Code::Xor_r32_rm32, Register::R12D, Register::R12D);
        self.plan.layout.enter(assembler);
        for (item, register) in self.plan.pins() {
            load_constant(self.plan, assembler, item, register);
        }
        stack
    }

    fn leave(&mut self) {
        let assembler = &mut self.assembler;
        assembler.put(Ok(Instruction::with(Code::VEX_Vzeroupper)));
        assembler.two(Code::Mov_r64_rm64, Register::RSP, STACK);
        SAVED.into_iter().rev().for_each(|register| assembler.put(Instruction::with1(Code::Pop_r64, register)));
        assembler.put(Ok(Instruction::with(Code::Retnq)));
    }

    /// Loops over all elements: with prefetching far from the end, and single vectors at the end.
    fn walks(&mut self, unrolled: usize, has_several: bool) {
        self.walk(frame::far_end(), unrolled, (true, has_several));
        self.walk(frame::wide_end(), unrolled, (false, has_several));
        if 1 < unrolled {
            self.walk(frame::end(), 1, (false, has_several));
        }
    }

    /// A loop from the index to `end` in turns of `vectors` vectors.
    fn walk(&mut self, end: MemoryOperand, vectors: usize, (is_far, has_several): (bool, bool)) {
        let (turn, out) = (self.assembler.label(), self.assembler.label());
        self.assembler.load(Code::Cmp_r64_rm64, INDEX, end);
        self.assembler.branch(Code::Jae_rel32_64, out);
        self.assembler.bind(turn);
        if is_far {
            self.prefetch(vectors, has_several);
        }
        if has_several {
            self.sum(vectors, is_far);
        }
        for vector in 0..vectors {
            let gradient = if has_several { GradientAt::Slot(vector) } else { GradientAt::Memory(self.source) };
            let slots_taken = if has_several { vectors } else { 0 };
            let body = Body::new(self.plan, &mut self.assembler, slots_taken);
            self.slots = self.slots.max(body.emit(gradient, vector * self.plan.target.lanes()));
        }
        let step = i32::try_from(vectors * self.plan.target.lanes()).expect("a turn is few elements");
        self.assembler.put(Instruction::with2(Code::Add_rm64_imm32, INDEX, step));
        self.assembler.load(Code::Cmp_r64_rm64, INDEX, end);
        self.assembler.branch(Code::Jb_rel32_64, turn);
        self.assembler.bind(out);
    }

    /// Prefetches the cache lines of a later step.
    fn prefetch(&mut self, vectors: usize, has_several: bool) {
        let (target, layout) = (self.plan.target, self.plan.layout);
        let elements = LINE / target.element_bytes();
        let turn = vectors * target.lanes();
        for ahead in (0..turn).step_by(elements).map(|line| PREFETCHED / target.element_bytes() + line) {
            for tensor in (0..self.plan.code.states().len()).map(UpdatedTensor::State).chain([UpdatedTensor::Weight]) {
                let line = layout.tensor(&mut self.assembler, tensor, ahead);
                self.assembler.put(Instruction::with1(Code::Prefetcht0_m8, line));
            }
        }
        if !has_several {
            let base = layout.lone_gradient(&mut self.assembler);
            self.prefetch_gradient(vectors, base);
        }
    }

    fn prefetch_gradient(&mut self, vectors: usize, base: Register) {
        let (target, layout) = (self.plan.target, self.plan.layout);
        let size = target.source_bytes(self.source);
        for line in (0..vectors * target.lanes()).step_by(LINE / size) {
            let from = layout.element(base, size, PREFETCHED / target.element_bytes() + line);
            self.assembler.put(Instruction::with1(Code::Prefetcht0_m8, from));
        }
    }

    /// Adds two or more gradients, in order, and leaves the sums in the first slots.
    fn sum(&mut self, vectors: usize, is_far: bool) {
        let more = self.assembler.label();
        self.assembler.two(Code::Xor_r32_rm32, Register::ECX, Register::ECX);
        self.gradient_address();
        if is_far {
            self.prefetch_gradient(vectors, PASSING);
        }
        self.each(vectors, |writer, number, ahead| {
            load_source(writer.plan, &mut writer.assembler, writer.source, (PASSING, ahead), number);
        });
        self.assembler.put(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, 1));
        self.assembler.bind(more);
        self.gradient_address();
        if is_far {
            self.prefetch_gradient(vectors, PASSING);
        }
        self.each(vectors, |writer, number, ahead| writer.add_gradient(number, ahead, vectors));
        self.assembler.put(Instruction::with2(Code::Add_rm64_imm32, COUNTER, 1));
        self.assembler.load(Code::Cmp_r64_rm64, COUNTER, frame::gradient_count());
        self.assembler.branch(Code::Jb_rel32_64, more);
        self.each(vectors, |writer, number, _| {
            let plan = writer.plan;
            let from = plan.target.register(number);
            writer.assembler.store(plan.target.pick(&target::STORE), plan.layout.slot(usize::from(number)), from);
        });
        self.slots = self.slots.max(vectors);
    }

    fn each(&mut self, vectors: usize, mut work: impl FnMut(&mut Self, u8, usize)) {
        for (number, vector) in (0_u8..).zip(0..vectors) {
            work(self, number, vector * self.plan.target.lanes());
        }
    }

    /// The address of the gradient that the counter has come to.
    fn gradient_address(&mut self) {
        self.assembler.load(Code::Mov_r64_rm64, PASSING, frame::gradients());
        let pointer = MemoryOperand::with_base_index_scale(PASSING, COUNTER, 8);
        self.assembler.load(Code::Mov_r64_rm64, PASSING, pointer);
    }

    fn add_gradient(&mut self, number: u8, ahead: usize, vectors: usize) {
        let target = self.plan.target;
        let (sum, add) = (target.register(number), target.pick(&target::ADD));
        if self.source == GradientFormat::Own {
            let from = self.plan.layout.element(PASSING, target.element_bytes(), ahead);
            return self.assembler.put(Instruction::with3(add, sum, sum, from));
        }
        let passing = u8::try_from(vectors).expect("a turn is few vectors");
        load_source(self.plan, &mut self.assembler, self.source, (PASSING, ahead), passing);
        self.assembler.three(add, sum, sum, target.register(passing));
    }
}
