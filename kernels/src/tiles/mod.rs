//! Rules without generated code: operation after operation, each over a tile that stays in the first-level cache.
//!
//! Not here: code for whole rules (`crate::native`), which is faster, because a value need not leave its register.
//!
//! This form runs on every processor and on every system, and it is the second opinion on generated code: both give the
//! bits of [`pserver_core::rule::reference`]. Each operation is one loop that the compiler makes vector code of. A
//! value lives in a slot, which is a tile; slots are given out by the values' lives, as registers are.

mod loops;

use multiversion::multiversion;
use pserver_core::optim::Gradient;
use pserver_core::rule::ssa::{Lowered, RuleOp};
use pserver_core::rule::uses::{UpdatedElement, UpdatedTensor, Uses, outputs};

use crate::cpu::element::{ElementBytes, KernelReal};
use crate::cpu::sum;

/// The elements of a tile: every value of a long rule fits the first-level cache.
const TILE: usize = 512;

/// A rule with a place for every value.
#[derive(Clone, Debug)]
pub(crate) struct TileProgram {
    ops: Vec<TileOp>,
    outputs: Vec<UpdatedElement>,
    slot_of: Vec<usize>,
    slots: usize,
}

#[derive(Clone, Copy, Debug)]
struct TileOp {
    op: RuleOp,
    slot: usize,
}

/// Slots, kept from update to update.
#[derive(Clone, Debug, Default)]
pub(crate) struct TileSlots<E: KernelReal> {
    values: Vec<Vec<E>>,
    /// Where several gradients are added.
    sum: Vec<ElementBytes<E>>,
}

/// The operands of one update.
pub(crate) struct TileTensors<'a, 'b> {
    pub(crate) weights: &'a mut [u8],
    pub(crate) states: &'a mut [&'b mut [u8]],
    pub(crate) gradients: &'a [Gradient<'a>],
    /// All of the rule's, in binary64.
    pub(crate) scalars: &'a [f64],
}

impl TileProgram {
    /// Gives every value of the code a slot.
    pub(crate) fn new(code: &Lowered) -> Self {
        let uses = Uses::of(code);
        let mut program = Self { ops: vec![], outputs: outputs(code).collect(), slot_of: vec![], slots: 0 };
        let mut free: Vec<usize> = Vec::new();
        for (place, op) in code.ops().iter().enumerate() {
            if uses.is_unused(place) {
                program.slot_of.push(usize::MAX);
                continue;
            }
            // A scalar fills its slot before the first tile, so no other value shares that slot.
            let shared = if matches!(op, RuleOp::Scalar(_)) { None } else { free.pop() };
            let slot = shared.unwrap_or(program.slots);
            program.slots = program.slots.max(slot + 1);
            program.slot_of.push(slot);
            program.ops.push(TileOp { op: *op, slot });
            let mut ended: Vec<usize> = op.operands().map(|operand| operand.index()).collect();
            ended.sort_unstable();
            ended.dedup();
            ended.retain(|&value| uses.next(value, place).is_none() && !matches!(code.ops()[value], RuleOp::Scalar(_)));
            free.extend(ended.iter().map(|&value| program.slot_of[value]));
        }
        program
    }

    /// Updates weights and states by the sum of the gradients.
    ///
    /// # Panics
    ///
    /// When the tensors are not those of the rule.
    pub(crate) fn run<E: KernelReal>(&self, slots: &mut TileSlots<E>, mut tensors: TileTensors<'_, '_>) {
        slots.values.resize_with(self.slots.max(slots.values.len()), || vec![E::ZERO; TILE]);
        slots.sum.resize(TILE, E::ZERO.store());
        run_wide::<E>(self, slots, &mut tensors);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn run_wide<E: KernelReal>(program: &TileProgram, slots: &mut TileSlots<E>, tensors: &mut TileTensors<'_, '_>) {
    let elements = E::view(tensors.weights).len();
    for step in &program.ops {
        if let RuleOp::Scalar(scalar) = step.op {
            let value = E::of_scalar(tensors.scalars[scalar.index()]);
            slots.values[step.slot][..elements.min(TILE)].fill(value);
        }
    }
    for start in (0..elements).step_by(TILE) {
        let length = TILE.min(elements - start);
        for step in &program.ops {
            // Its place is taken by an empty one while the operation writes it and reads others.
            let mut to = std::mem::take(&mut slots.values[step.slot]);
            load::<E>(step.op, &mut to[..length], &mut slots.sum[..length], tensors, start);
            loops::operation::<E>(step.op, &mut to[..length], |value| {
                &slots.values[program.slot_of[value.index()]][..length]
            });
            slots.values[step.slot] = to;
        }
        for result in &program.outputs {
            let tensor = match result.tensor {
                UpdatedTensor::Weight => &mut *tensors.weights,
                UpdatedTensor::State(state) => &mut *tensors.states[state],
            };
            let into = &mut E::view_mut(tensor)[start..][..length];
            let from = &slots.values[program.slot_of[result.value.index()]];
            into.iter_mut().zip(from).for_each(|(into, from)| *into = from.store());
        }
    }
}

#[inline(always)]
fn load<E: KernelReal>(
    op: RuleOp,
    to: &mut [E],
    sum: &mut [ElementBytes<E>],
    tensors: &TileTensors<'_, '_>,
    start: usize,
) {
    match op {
        RuleOp::Weight => copy::<E>(to, E::view(tensors.weights), start),
        RuleOp::State(state) => copy::<E>(to, E::view(tensors.states[state.index()]), start),
        RuleOp::Gradient => match tensors.gradients {
            [lone] if E::is_type_of(lone) => copy::<E>(to, E::view(lone.bytes), start),
            gradients => {
                sum::into_tile::<E>(sum, gradients, start);
                copy::<E>(to, sum, 0);
            }
        },
        _ => {}
    }
}

#[inline(always)]
fn copy<E: KernelReal>(to: &mut [E], from: &[ElementBytes<E>], start: usize) {
    let from = &from[start..][..to.len()];
    to.iter_mut().zip(from).for_each(|(to, from)| *to = E::load(*from));
}
