//! Register allocation and instruction selection for one vector of elements through a rule.
//!
//! Values get registers in the order of the code, which is the order in which they are computed. When none is free, the
//! value with the farthest next use is evicted. Values that are in memory anyway (weight, states, a single gradient,
//! scalars) are reloaded when needed; others are spilled to a stack slot. The most used scalars stay in registers over
//! the whole loop, as far as registers allow.

use iced_x86::{Code, Instruction, MemoryOperand, Register};
use pserver_core::rule::ssa::{Binary, Comparison, Lowered, RuleOp, ScalarId, Unary};
use pserver_core::rule::uses::{UpdatedElement, UpdatedTensor, Uses, outputs};

use super::assembler::Assembler;
use super::layout::{CallLayout, PASSING, SCALARS, displacement, frame};
use super::raw::lanes;
use super::target;
use crate::native::{CodeTarget, GradientFormat, Vectors, used_scalars};

/// A value of the code, or a constant that instructions need.
pub(super) type ItemIndex = usize;

/// The allocator's view of the code.
pub(super) struct RegisterPlan<'a> {
    pub(super) code: &'a Lowered,
    pub(super) target: CodeTarget,
    pub(super) layout: CallLayout,
    uses: Uses,
    outputs: Vec<UpdatedElement>,
    scalars: Vec<ScalarId>,
    /// Constants in the order in which they deserve a register.
    favourites: Vec<ItemIndex>,
    /// How many of them have one, from the highest register down.
    pub(super) pinned: usize,
}

/// Where the gradient of a vector is.
#[derive(Clone, Copy, Debug)]
pub(super) enum GradientAt {
    /// In the only gradient's memory.
    Memory(GradientFormat),
    /// Summed, in this slot.
    Slot(usize),
}

/// Registers that no allocation touches: enough for an operation's operands, its result and its passing values.
const FREE_MIN: usize = 6;

impl<'a> RegisterPlan<'a> {
    /// For this code on this target.
    pub(super) fn new(code: &'a Lowered, target: CodeTarget) -> Self {
        let layout = CallLayout::of(code, target);
        let uses = Uses::of(code);
        let mut plan = Self {
            code,
            target,
            layout,
            uses,
            outputs: outputs(code).collect(),
            scalars: used_scalars(code),
            favourites: vec![],
            pinned: 0,
        };
        let mut favourites: Vec<ItemIndex> = (0..plan.one() + 1).filter(|&item| plan.is_constant(item)).collect();
        favourites.retain(|&item| 0 < plan.count(item));
        favourites.sort_by_key(|&item| std::cmp::Reverse(plan.count(item)));
        plan.favourites = favourites;
        plan.pinned = plan.best_pinned();
        plan
    }

    /// As many as make the shortest code: each saves a load until values have no room.
    fn best_pinned(&mut self) -> usize {
        if self.layout.has_calls {
            return 0; // a call keeps no vector register
        }
        let most = self.favourites.len().min(usize::from(self.target.registers()) - FREE_MIN);
        let length = |pinned: usize, plan: &mut Self| {
            plan.pinned = pinned;
            let mut assembler = Assembler::default();
            Body::new(plan, &mut assembler, 0).emit(GradientAt::Memory(GradientFormat::Own), 0);
            assembler.len()
        };
        (0..=most).rev().min_by_key(|&pinned| length(pinned, self)).unwrap_or(0)
    }

    /// The constants that stay in registers, and which.
    pub(super) fn pins(&self) -> impl Iterator<Item = (ItemIndex, u8)> {
        let top = self.target.registers() - 1;
        self.favourites[..self.pinned].iter().copied().zip((0..=top).rev())
    }

    fn sign(&self) -> ItemIndex {
        self.code.ops().len()
    }

    fn one(&self) -> ItemIndex {
        self.code.ops().len() + 1
    }

    fn is_constant(&self, item: ItemIndex) -> bool {
        self.code.ops().get(item).is_none_or(|op| matches!(op, RuleOp::Scalar(_)))
    }

    /// Whether it can be loaded again from where it came.
    fn is_in_memory(&self, item: ItemIndex) -> bool {
        self.is_constant(item) || matches!(self.code.ops()[item], RuleOp::Weight | RuleOp::Gradient | RuleOp::State(_))
    }

    /// Where a constant lies among the scalars.
    pub(super) fn scalar_offset(&self, item: ItemIndex) -> usize {
        let index = match self.code.ops().get(item) {
            Some(RuleOp::Scalar(scalar)) => {
                self.scalars.iter().position(|used| used == scalar).expect("an operation uses it")
            }
            _ => self.scalars.len() + item - self.sign(),
        };
        index * self.target.element_bytes()
    }

    /// The constants that an operation needs beside its operands.
    fn constants_of(&self, op: RuleOp) -> impl Iterator<Item = ItemIndex> {
        let (sign, one) = match op {
            RuleOp::Unary(Unary::Negate | Unary::Absolute, _) | RuleOp::Binary(Binary::CopySign, ..) => (true, false),
            RuleOp::Unary(Unary::Sign, _) => (true, true),
            _ => (false, false),
        };
        [sign.then_some(self.sign()), one.then_some(self.one())].into_iter().flatten()
    }

    fn places_of_constant(&self, item: ItemIndex) -> impl Iterator<Item = usize> {
        let ops = self.code.ops().iter().enumerate().filter(|(place, _)| !self.uses.is_unused(*place));
        ops.filter(move |(_, op)| self.constants_of(**op).any(|constant| constant == item)).map(|(place, _)| place)
    }

    fn count(&self, item: ItemIndex) -> usize {
        if item < self.sign() { self.uses.count(item) } else { self.places_of_constant(item).count() }
    }

    fn next_use(&self, item: ItemIndex, behind: usize) -> Option<usize> {
        if item < self.sign() {
            self.uses.next(item, behind)
        } else {
            self.places_of_constant(item).find(|&place| behind < place)
        }
    }
}

/// The code of one vector while it is put together.
pub(super) struct Body<'a, 'p> {
    plan: &'a RegisterPlan<'p>,
    assembler: &'a mut Assembler,
    /// The value in each register, except pinned ones.
    held: Vec<Option<ItemIndex>>,
    register_of: Vec<Option<u8>>,
    slot_of: Vec<Option<usize>>,
    slots_free: Vec<usize>,
    slots: usize,
    /// Registers that the operation at hand needs, as bits.
    locked: u32,
    place: usize,
    gradient: GradientAt,
    /// How many elements behind the index this vector stands.
    ahead: usize,
}

impl<'a, 'p> Body<'a, 'p> {
    /// Only pinned registers are occupied. The first `slots_taken` slots are in use.
    pub(super) fn new(plan: &'a RegisterPlan<'p>, assembler: &'a mut Assembler, slots_taken: usize) -> Self {
        let items = plan.one() + 1;
        let mut register_of = vec![None; items];
        plan.pins().for_each(|(item, register)| register_of[item] = Some(register));
        Self {
            plan,
            assembler,
            held: vec![None; usize::from(plan.target.registers()) - plan.pinned],
            register_of,
            slot_of: vec![None; items],
            slots_free: Vec::new(),
            slots: slots_taken,
            locked: 0,
            place: 0,
            gradient: GradientAt::Memory(GradientFormat::Own),
            ahead: 0,
        }
    }

    /// Writes the code for the vector `ahead` elements behind the index; returns the number of slots in use.
    pub(super) fn emit(mut self, gradient: GradientAt, ahead: usize) -> usize {
        self.gradient = gradient;
        self.ahead = ahead;
        for (place, op) in self.plan.code.ops().iter().enumerate() {
            self.place = place;
            if !self.plan.uses.is_unused(place) && !self.plan.is_in_memory(place) {
                self.operation(*op);
            }
        }
        self.save_what_stores_overwrite();
        for result in &self.plan.outputs {
            self.place = result.place;
            let from = self.fetch(result.value.index());
            let to = self.tensor(result.tensor);
            self.assembler.store(self.code(&target::STORE), to, self.register(from));
            self.release();
        }
        self.slots
    }

    fn operation(&mut self, op: RuleOp) {
        match op {
            RuleOp::Weight | RuleOp::Gradient | RuleOp::State(_) | RuleOp::Scalar(_) => {}
            RuleOp::Unary(Unary::SquareRoot, operand) => self.square_root(operand.index()),
            RuleOp::Unary(Unary::Floor, operand) => self.floor(operand.index()),
            RuleOp::Unary(Unary::Negate, operand) => {
                self.three(&target::EXCLUSIVE_OR, self.plan.sign(), operand.index());
            }
            RuleOp::Unary(Unary::Absolute, operand) => self.three(&target::AND_NOT, self.plan.sign(), operand.index()),
            RuleOp::Unary(Unary::Sign, operand) => self.sign(operand.index()),
            RuleOp::Binary(binary, left, right) => self.binary(binary, left.index(), right.index()),
            RuleOp::Compare(comparison, left, right) => self.compare(comparison, left.index(), right.index()),
            RuleOp::Not(operand) => self.not(operand.index()),
            RuleOp::And(left, right) => self.three(&target::AND, left.index(), right.index()),
            RuleOp::Or(left, right) => self.three(&target::OR, left.index(), right.index()),
            RuleOp::Select { mask, then, otherwise } => self.select(mask.index(), then.index(), otherwise.index()),
            RuleOp::Call(function, operand) => self.call(lanes::number(function), &[operand.index()]),
            RuleOp::Power(base, exponent) => self.call(lanes::POWER, &[base.index(), exponent.index()]),
        }
        self.release();
    }

    fn binary(&mut self, binary: Binary, left: ItemIndex, right: ItemIndex) {
        match binary {
            Binary::Add => self.three(&target::ADD, left, right),
            Binary::Subtract => self.three(&target::SUBTRACT, left, right),
            Binary::Multiply => self.three(&target::MULTIPLY, left, right),
            Binary::Divide => self.three(&target::DIVIDE, left, right),
            // The instruction gives its second operand when neither is smaller, the operation its first.
            Binary::Minimum => self.three(&target::MINIMUM, right, left),
            Binary::Maximum => self.three(&target::MAXIMUM, right, left),
            Binary::CopySign => self.copy_sign(left, right),
        }
    }

    /// One instruction: its result may reuse the register of an operand with no further use.
    fn three(&mut self, encodings: &target::Encodings, left: ItemIndex, right: ItemIndex) {
        let (left, right) = (self.fetch(left), self.fetch(right));
        self.release();
        let to = self.result();
        let (to, left, right) = (self.register(to), self.register(left), self.register(right));
        self.assembler.three(self.code(encodings), to, left, right);
    }

    fn square_root(&mut self, operand: ItemIndex) {
        let from = self.fetch(operand);
        self.release();
        let to = self.result();
        self.assembler.two(self.code(&target::SQUARE_ROOT), self.register(to), self.register(from));
    }

    fn floor(&mut self, operand: ItemIndex) {
        /// Towards minus infinity, without a word about inexact results.
        const DOWN: i32 = 9;
        let from = self.fetch(operand);
        self.release();
        let to = self.result();
        let (to, from) = (self.register(to), self.register(from));
        self.assembler.put(Instruction::with3(self.code(&target::ROUND), to, from, DOWN));
    }

    /// The magnitude of the one and the sign bit of the other.
    fn copy_sign(&mut self, magnitude: ItemIndex, sign: ItemIndex) {
        let (bit, magnitude, sign) = (self.fetch(self.plan.sign()), self.fetch(magnitude), self.fetch(sign));
        let (to, passing) = (self.result(), self.passing());
        let [bit, magnitude, sign, to, passing] =
            [bit, magnitude, sign, to, passing].map(|number| self.register(number));
        self.assembler.three(self.code(&target::AND), passing, bit, sign);
        self.assembler.three(self.code(&target::AND_NOT), to, bit, magnitude);
        self.assembler.three(self.code(&target::OR), to, to, passing);
    }

    /// One with the operand's sign where it is nonzero and no NaN, else the operand.
    fn sign(&mut self, operand: ItemIndex) {
        /// Not equal, and both are numbers.
        const UNLIKE: i32 = 0x0c;
        let (bit, one, from) = (self.fetch(self.plan.sign()), self.fetch(self.plan.one()), self.fetch(operand));
        let (to, passing) = (self.result(), self.passing());
        let [bit, one, from, to, passing] = [bit, one, from, to, passing].map(|number| self.register(number));
        self.assembler.three(self.code(&target::EXCLUSIVE_OR), passing, passing, passing);
        let mask = if self.is_wide() { Register::K1 } else { to };
        self.assembler.three_with(self.code(&target::COMPARE), mask, from, passing, UNLIKE);
        self.assembler.three(self.code(&target::AND), passing, bit, from);
        self.assembler.three(self.code(&target::OR), passing, passing, one);
        self.blend(to, from, passing, mask);
    }

    /// `to` is `then` where the mask is set, else `otherwise`.
    fn blend(&mut self, to: Register, otherwise: Register, then: Register, mask: Register) {
        let code = self.code(&target::BLEND);
        if self.is_wide() {
            let mut blend = Instruction::with3(code, to, otherwise, then);
            blend.iter_mut().for_each(|blend| blend.set_op_mask(mask));
            self.assembler.put(blend);
        } else {
            self.assembler.put(Instruction::with4(code, to, otherwise, then, mask));
        }
    }

    fn compare(&mut self, comparison: Comparison, left: ItemIndex, right: ItemIndex) {
        // Ordered and quiet: false when one is not a number.
        let predicate = match comparison {
            Comparison::Less => 0x11,
            Comparison::LessOrEqual => 0x12,
            Comparison::Equal => 0x00,
        };
        let (left, right) = (self.fetch(left), self.fetch(right));
        self.release();
        let to = self.result();
        let [left, right, to] = [left, right, to].map(|number| self.register(number));
        if self.is_wide() {
            self.assembler.three_with(self.code(&target::COMPARE), Register::K1, left, right, predicate);
            self.assembler.two(self.code(&target::SPREAD_MASK), to, Register::K1);
        } else {
            self.assembler.three_with(self.code(&target::COMPARE), to, left, right, predicate);
        }
    }

    fn not(&mut self, operand: ItemIndex) {
        /// Of three bits the opposite of the last.
        const NOT_THIRD: i32 = 0x55;
        let from = self.fetch(operand);
        let to = self.result();
        let (to, from) = (self.register(to), self.register(from));
        if self.is_wide() {
            self.assembler.three_with(self.code(&target::TERNARY), to, from, from, NOT_THIRD);
        } else {
            self.assembler.three(Code::VEX_Vpcmpeqd_ymm_ymm_ymmm256, to, to, to);
            self.assembler.three(self.code(&target::EXCLUSIVE_OR), to, to, from);
        }
    }

    fn select(&mut self, mask: ItemIndex, then: ItemIndex, otherwise: ItemIndex) {
        /// The second bit where the first is set, else the third.
        const SECOND_WHERE_FIRST: i32 = 0xca;
        let (mask, then, otherwise) = (self.fetch(mask), self.fetch(then), self.fetch(otherwise));
        if !self.is_wide() {
            self.release();
        }
        let to = self.result();
        let [mask, then, otherwise, to] = [mask, then, otherwise, to].map(|number| self.register(number));
        if self.is_wide() {
            self.assembler.two(self.code(&target::LOAD), to, mask);
            self.assembler.three_with(self.code(&target::TERNARY), to, then, otherwise, SECOND_WHERE_FIRST);
        } else {
            self.blend(to, otherwise, then, mask);
        }
    }

    /// Calls a function of this program: operands and result go through slots, and no register survives.
    fn call(&mut self, function: u32, operands: &[ItemIndex]) {
        for &operand in operands {
            self.put_in_slot(operand);
        }
        for register in 0..self.held.len() {
            if let Some(item) = self.held[register] {
                if !self.plan.is_in_memory(item) && self.plan.next_use(item, self.place).is_some() {
                    self.put_in_slot(item);
                }
                self.forget(item);
            }
        }
        let to = self.take_slot();
        self.slot_of[self.place] = Some(to);
        let at = |item: &ItemIndex| self.slot_of[*item].expect("operands of a call are in slots");
        let slots = [to, at(&operands[0]), operands.get(1).map_or(at(&operands[0]), at)];
        for (register, slot) in [Register::RDI, Register::RSI, Register::RDX].into_iter().zip(slots) {
            let from = self.plan.layout.slot(slot);
            self.assembler.load(Code::Lea_r64_m, register, from);
        }
        self.assembler.put(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, function));
        self.assembler.put(Ok(Instruction::with(Code::VEX_Vzeroupper)));
        let address = lanes::address(self.plan.target);
        self.assembler.put(Instruction::with2(Code::Mov_r64_imm64, Register::RAX, address));
        self.assembler.put(Instruction::with1(Code::Call_rm64, Register::RAX));
        self.end_slots(operands);
    }

    fn put_in_slot(&mut self, item: ItemIndex) {
        if self.slot_of[item].is_none() {
            let from = self.fetch(item);
            self.spill(item, from);
            self.locked &= !(1 << from);
        }
    }

    /// A value that lies in a tensor must leave it before another result is stored there.
    fn save_what_stores_overwrite(&mut self) {
        self.place = self.plan.code.ops().len() - 1;
        for result in &self.plan.outputs {
            if matches!(self.plan.code.ops()[result.value.index()], RuleOp::Weight | RuleOp::State(_)) {
                self.put_in_slot(result.value.index());
            }
        }
    }

    /// The register that holds an item, loaded if it was not there, and locked.
    fn fetch(&mut self, item: ItemIndex) -> u8 {
        let register = self.register_of[item].unwrap_or_else(|| {
            let register = self.vacate();
            self.load(item, register);
            self.hold(item, register);
            register
        });
        self.locked |= 1 << register;
        register
    }

    /// A locked register for the value of the operation at hand.
    fn result(&mut self) -> u8 {
        let register = self.vacate();
        self.hold(self.place, register);
        self.locked |= 1 << register;
        register
    }

    /// A locked register for the length of an operation.
    fn passing(&mut self) -> u8 {
        let register = self.vacate();
        self.locked |= 1 << register;
        register
    }

    fn hold(&mut self, item: ItemIndex, register: u8) {
        self.held[usize::from(register)] = Some(item);
        self.register_of[item] = Some(register);
    }

    /// Frees a register: an unused one, or the one whose value has the farthest next use.
    fn vacate(&mut self) -> u8 {
        let numbers = (0_u8..).zip(&self.held).filter(|(number, _)| self.locked & (1 << number) == 0);
        let need = |held: &Option<ItemIndex>| {
            held.map_or(usize::MAX, |item| self.plan.next_use(item, self.place).unwrap_or(usize::MAX))
        };
        let (register, held) = numbers
            .max_by_key(|(number, held)| (held.is_none(), need(held), std::cmp::Reverse(*number)))
            .map(|(number, held)| (number, *held))
            .expect("an operation locks few registers");
        if let Some(item) = held {
            if self.slot_of[item].is_none() && !self.plan.is_in_memory(item) {
                self.spill(item, register);
            }
            self.forget(item);
        }
        register
    }

    fn forget(&mut self, item: ItemIndex) {
        if let Some(register) = self.register_of[item].take_if(|register| usize::from(*register) < self.held.len()) {
            self.held[usize::from(register)] = None;
        }
    }

    fn spill(&mut self, item: ItemIndex, from: u8) {
        let slot = self.take_slot();
        self.slot_of[item] = Some(slot);
        let to = self.plan.layout.slot(slot);
        self.assembler.store(self.code(&target::STORE), to, self.register(from));
    }

    fn take_slot(&mut self) -> usize {
        self.slots_free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        })
    }

    /// Unlocks all registers, and frees values without later uses.
    fn release(&mut self) {
        for register in 0..self.held.len() {
            if self.locked & (1 << register) != 0
                && let Some(item) = self.held[register]
                && self.plan.next_use(item, self.place).is_none()
            {
                self.forget(item);
                self.end_slots(&[item]);
            }
        }
        self.locked = 0;
    }

    fn end_slots(&mut self, items: &[ItemIndex]) {
        for &item in items {
            if self.plan.next_use(item, self.place).is_none()
                && let Some(slot) = self.slot_of[item].take()
            {
                self.slots_free.push(slot);
            }
        }
    }

    fn load(&mut self, item: ItemIndex, to: u8) {
        let register = self.register(to);
        if let Some(slot) = self.slot_of[item] {
            let from = self.plan.layout.slot(slot);
            return self.assembler.load(self.code(&target::LOAD), register, from);
        }
        match self.plan.code.ops().get(item) {
            Some(RuleOp::Weight) => self.load_tensor(UpdatedTensor::Weight, register),
            Some(RuleOp::State(state)) => self.load_tensor(UpdatedTensor::State(state.index()), register),
            Some(RuleOp::Gradient) => self.load_gradient(to),
            _ => load_constant(self.plan, self.assembler, item, to),
        }
    }

    fn load_tensor(&mut self, tensor: UpdatedTensor, to: Register) {
        let from = self.tensor(tensor);
        self.assembler.load(self.code(&target::LOAD), to, from);
    }

    fn load_gradient(&mut self, to: u8) {
        match self.gradient {
            GradientAt::Slot(slot) => {
                let from = self.plan.layout.slot(slot);
                self.assembler.load(self.code(&target::LOAD), self.register(to), from);
            }
            GradientAt::Memory(source) => {
                let base = self.plan.layout.lone_gradient(self.assembler);
                load_source(self.plan, self.assembler, source, (base, self.ahead), to);
            }
        }
    }

    fn tensor(&mut self, tensor: UpdatedTensor) -> MemoryOperand {
        self.plan.layout.tensor(self.assembler, tensor, self.ahead)
    }

    fn code(&self, encodings: &target::Encodings) -> Code {
        self.plan.target.pick(encodings)
    }

    fn register(&self, number: u8) -> Register {
        self.plan.target.register(number)
    }

    fn is_wide(&self) -> bool {
        self.plan.target.vectors == Vectors::Avx512
    }
}

/// Loads a constant into all lanes of a register.
pub(super) fn load_constant(plan: &RegisterPlan<'_>, assembler: &mut Assembler, item: ItemIndex, to: u8) {
    let mut base = SCALARS;
    if plan.layout.has_calls {
        base = PASSING;
        assembler.load(Code::Mov_r64_rm64, base, frame::scalars());
    }
    let offset = displacement(plan.scalar_offset(item));
    let from = MemoryOperand::with_base_displ(base, offset);
    assembler.load(plan.target.pick(&target::BROADCAST), plan.target.register(to), from);
}

/// Loads a vector of a gradient whose elements begin at a base register, widened to the parameter's type.
pub(super) fn load_source(
    plan: &RegisterPlan<'_>,
    assembler: &mut Assembler,
    source: GradientFormat,
    (base, ahead): (Register, usize),
    to: u8,
) {
    /// A bfloat16 is the upper half of a binary32.
    const UPPER_HALF: i32 = 16;
    let target = plan.target;
    let from = plan.layout.element(base, target.source_bytes(source), ahead);
    let register = target.register(to);
    let is_double = target.element_bytes() == 8;
    let narrow = if is_double { target.lower_half(to) } else { register };
    match source {
        GradientFormat::Own => return assembler.load(target.pick(&target::LOAD), register, from),
        GradientFormat::Half => assembler.load(target.pick(&target::WIDEN_HALF), narrow, from),
        GradientFormat::Brain => {
            assembler.load(target.pick(&target::WIDEN_WORD), narrow, from);
            let code = target.pick(&target::SHIFT_LEFT);
            assembler.put(Instruction::with3(code, narrow, narrow, UPPER_HALF));
        }
    }
    if is_double {
        assembler.two(target.pick(&target::WIDEN_SINGLE), register, narrow);
    }
}
