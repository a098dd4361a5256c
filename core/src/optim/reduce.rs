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

/// The values of all reductions of a rule, in their order; empty for a rule without.
///
/// `visit` passes every piece of the parameter, in order, to the function that it is given; it is called once for each
/// reduction, as a later one may need the values of those before it. A total is over blocks of [`SQUARE_BLOCK_BYTES`]
/// in binary64, as in [`square_sums`](super::square_sums), so it has the same bits for every chunk size.
///
/// # Panics
/// As [`Prepared::formula_reduced`], and when the lengths of a piece's tensors differ.
pub fn reduce(
    kernels: &mut dyn Kernels,
    rule: &Prepared,
    step: &Step,
    mut visit: impl FnMut(&mut dyn FnMut(ReducedPiece<'_, '_>)),
) -> Vec<f64> {
    let mut reduced = Vec::with_capacity(rule.reductions().len());
    let mut scratch = vec![0; if rule.reductions().is_empty() { 0 } else { PIECE_BYTES }];
    let inputs = rule.rule().inputs(step);
    let mut scalars = Vec::new();
    for reduction in rule.reductions() {
        reduction.code.evaluate(&inputs, &reduced, &mut scalars);
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
                    formula: Formula::Rule { code: &reduction.code, scalars: &scalars },
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
    reduced
}
