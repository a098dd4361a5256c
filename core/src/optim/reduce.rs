//! Values of a rule's reductions, such as `norm(w)`, of a whole parameter before its update.

use super::coefficients::Step;
use super::element::Gradient;
use super::norm::{SQUARE_BLOCK_BYTES, block_sums};
use super::prepared::{Formula, Prepared};
use crate::dtype::ElementType;
use crate::port::{Kernels, Update};

/// A piece of a parameter: a chunk, or the whole. Nothing of it is changed.
pub struct ReducedPiece<'a, 'b> {
    /// The type of parameter and states: f32 or f64.
    pub element_type: ElementType,
    /// The parameter's elements.
    pub parameter: &'a [u8],
    /// As many elements of each state, in the order of the rule's states. Code of a reduction writes none of them.
    pub states: &'a mut [&'b mut [u8]],
    /// The merged gradient of these elements, in the parameter's type.
    pub gradient: &'a [u8],
}

/// Bytes of a parameter that are computed at a time: whole blocks, of which several arrays fit the second-level cache.
const PIECE_BYTES: usize = 16 * SQUARE_BLOCK_BYTES as usize;

/// The values of all reductions of a rule, in their order; empty for a rule without. `total` is the number that
/// trainers made of the parameter's [`share`] and of others, if the rule reads one.
///
/// `visit` passes every piece of the parameter, in order, to the function that it is given; it is called once for each
/// sum, as a later one may need the values of those before it. A sum is over blocks of [`SQUARE_BLOCK_BYTES`] in
/// binary64, as in [`square_sums`](super::square_sums), so it has the same bits for every chunk size. A sum that the
/// share alone needs is not computed again: its value is zero.
///
/// # Panics
/// As [`Prepared::formula_reduced`], when the lengths of a piece's tensors differ, and when a total is missing.
pub fn reduce(
    kernels: &mut dyn Kernels,
    rule: &Prepared,
    step: &Step,
    total: Option<f64>,
    mut visit: impl FnMut(&mut dyn FnMut(ReducedPiece<'_, '_>)),
) -> Vec<f64> {
    let mut room = ReductionRoom::new(rule.reductions().len());
    for place in 0..rule.reductions().len() {
        match rule.total() {
            Some(at) if place == at => room.reduced.push(total.expect("the trainers' total comes first")),
            Some(at) if place < at && !rule.reads_beside_total(place) => room.reduced.push(0.0),
            _ => room.add(kernels, rule, step, &mut visit),
        }
    }
    room.reduced
}

/// The share of a parameter in the total that its rule reads, from its merged gradient, as in [`reduce`]: a number that
/// its server gives trainers once a round is complete.
///
/// # Panics
/// As [`reduce`], and when the rule reads no total.
pub fn share(
    kernels: &mut dyn Kernels,
    rule: &Prepared,
    step: &Step,
    mut visit: impl FnMut(&mut dyn FnMut(ReducedPiece<'_, '_>)),
) -> f64 {
    let place = rule.total().expect("the rule reads a total");
    let mut room = ReductionRoom::new(place);
    for _ in 0..place {
        room.add(kernels, rule, step, &mut visit);
    }
    let code = &rule.reductions()[place].code;
    code.evaluate(&rule.rule().inputs(step), &room.reduced, &mut room.scalars);
    room.scalars[code.scalar().index()]
}

/// The values of reductions so far, and memory for the next one.
struct ReductionRoom {
    reduced: Vec<f64>,
    scalars: Vec<f64>,
    scratch: Vec<u8>,
}

impl ReductionRoom {
    fn new(count: usize) -> Self {
        let scratch = vec![0; if count == 0 { 0 } else { PIECE_BYTES }];
        Self { reduced: Vec::with_capacity(count), scalars: Vec::new(), scratch }
    }

    /// Computes the next sum.
    fn add(
        &mut self,
        kernels: &mut dyn Kernels,
        rule: &Prepared,
        step: &Step,
        visit: &mut impl FnMut(&mut dyn FnMut(ReducedPiece<'_, '_>)),
    ) {
        let Self { reduced, scalars, scratch } = self;
        let reduction = &rule.reductions()[reduced.len()];
        reduction.code.evaluate(&rule.rule().inputs(step), reduced, scalars);
        let mut total = 0.0;
        visit(&mut |piece| {
            let ReducedPiece { element_type, parameter, states, gradient } = piece;
            for (place, weights) in parameter.chunks(PIECE_BYTES).enumerate() {
                let begin = place * PIECE_BYTES;
                let range = begin..begin + weights.len();
                let mut parts: Vec<&mut [u8]> = states.iter_mut().map(|state| &mut state[range.clone()]).collect();
                let values = &mut scratch[..weights.len()];
                values.copy_from_slice(weights);
                kernels.update(Update {
                    formula: Formula::Rule { code: &reduction.code, scalars },
                    element_type,
                    parameter: values,
                    states: &mut parts,
                    gradients: &[Gradient { bytes: &gradient[range], element_type }],
                });
                block_sums(reduction.kind, element_type, values, &mut |block| total += block);
            }
        });
        reduced.push(total);
    }
}
