//! A list of instructions that becomes bytes.

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, IcedError, Instruction, InstructionBlock, MemoryOperand, Register,
};

/// A place in the code that a branch may lead to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label(usize);

/// Instructions in order.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    instructions: Vec<Instruction>,
    /// Before which instruction each label stands.
    labels: Vec<Option<usize>>,
    branches: Vec<(usize, Label)>,
}

/// Instructions are known by their number until they have an address; none may be zero.
const FIRST_NUMBER: u64 = 1;

impl Assembler {
    /// How many instructions there are.
    pub(super) fn len(&self) -> usize {
        self.instructions.len()
    }

    /// Appends an instruction from iced.
    ///
    /// # Panics
    ///
    /// When operands do not go with the encoding: a bug here, independent of any input.
    pub(super) fn put(&mut self, instruction: Result<Instruction, IcedError>) {
        let mut instruction = instruction.expect("these operands go with this encoding");
        instruction.set_ip(FIRST_NUMBER + self.instructions.len() as u64);
        self.instructions.push(instruction);
    }

    /// `code to, from`
    pub(super) fn two(&mut self, code: Code, to: Register, from: Register) {
        self.put(Instruction::with2(code, to, from));
    }

    /// `code to, left, right`
    pub(super) fn three(&mut self, code: Code, to: Register, left: Register, right: Register) {
        self.put(Instruction::with3(code, to, left, right));
    }

    /// `code to, left, right, immediate`
    pub(super) fn three_with(&mut self, code: Code, to: Register, left: Register, right: Register, immediate: i32) {
        self.put(Instruction::with4(code, to, left, right, immediate));
    }

    /// `code to, [from]`
    pub(super) fn load(&mut self, code: Code, to: Register, from: MemoryOperand) {
        self.put(Instruction::with2(code, to, from));
    }

    /// `code [to], from`
    pub(super) fn store(&mut self, code: Code, to: MemoryOperand, from: Register) {
        self.put(Instruction::with2(code, to, from));
    }

    /// Replaces the last operand of an earlier instruction, which is an immediate that was not known yet.
    pub(super) fn set_immediate(&mut self, instruction: usize, immediate: i32) {
        self.instructions[instruction].set_immediate_i32(1, immediate);
    }

    /// A label that stands nowhere yet.
    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Puts a label before the next instruction.
    pub(super) fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.instructions.len());
    }

    /// A branch.
    pub(super) fn branch(&mut self, code: Code, to: Label) {
        self.branches.push((self.instructions.len(), to));
        self.put(Instruction::with_branch(code, 0));
    }

    /// The machine code. It is position-independent.
    ///
    /// # Panics
    ///
    /// When a label was never bound or an instruction cannot be encoded.
    pub(super) fn finish(mut self) -> Vec<u8> {
        for (branch, label) in &self.branches {
            let target = self.labels[label.0].expect("every label is bound");
            self.instructions[*branch].set_near_branch64(FIRST_NUMBER + target as u64);
        }
        let block = InstructionBlock::new(&self.instructions, 0);
        BlockEncoder::encode(64, block, BlockEncoderOptions::NONE)
            .expect("every instruction has an encoding")
            .code_buffer
    }
}
