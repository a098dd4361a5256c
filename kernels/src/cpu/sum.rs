//! Sums of gradients, in the order given.

use pserver_core::optim::Gradient;

use super::element::{Element, Scratch, Source, TILE};

/// `into = g0 + g1 + ...`; no gradients sum to zero.
#[inline(always)]
pub(super) fn into_whole<E: Element>(into: &mut [u8], gradients: &[Gradient<'_>]) {
    for (tile, into) in E::view_mut(into).chunks_mut(TILE).enumerate() {
        into_tile::<E>(into, gradients, tile * TILE);
    }
}

/// `onto += g0 + g1 + ...`
#[inline(always)]
pub(super) fn onto_whole<E: Element>(onto: &mut [u8], gradients: &[Gradient<'_>]) {
    let mut scratch = Scratch::<E>::zero();
    for (tile, onto) in E::view_mut(onto).chunks_mut(TILE).enumerate() {
        let merged = &mut scratch.0[..onto.len()];
        into_tile::<E>(merged, gradients, tile * TILE);
        for (onto, &merged) in onto.iter_mut().zip(merged.iter()) {
            *onto = E::load(*onto).plus(E::load(merged)).store();
        }
    }
}

/// The sum of the gradients' elements from `start` on, as many as `into` holds. It starts from the first gradient
/// and not from zero, so that a lone negative zero stays one.
#[inline(always)]
pub(super) fn into_tile<E: Element>(
    into: &mut [<E as Source<E>>::Bytes],
    gradients: &[Gradient<'_>],
    start: usize,
) {
    let Some((first, others)) = gradients.split_first() else {
        into.fill(E::default().store());
        return;
    };
    E::merge::<true>(into, first, start);
    for gradient in others {
        E::merge::<false>(into, gradient, start);
    }
}
