//! Sums of gradients, in the order given.

use pserver_core::optim::Gradient;

use super::element::{ElementBytes, KernelElement, Scratch, StoredAs, TILE};

/// `into = g0 + g1 + ...`; no gradients sum to zero.
#[inline(always)]
pub(super) fn into_whole<E: KernelElement>(into: &mut [u8], gradients: &[Gradient<'_>]) {
    for (tile, into) in E::view_mut(into).chunks_mut(TILE).enumerate() {
        into_tile::<E>(into, gradients, tile * TILE);
    }
}

/// `onto += scaled(g0 + g1 + ...)`
#[inline(always)]
pub(super) fn onto_whole<E: KernelElement>(onto: &mut [u8], gradients: &[Gradient<'_>], scaled: impl Fn(E) -> E) {
    // A lone gradient is its own sum, and a small chunk should not pay for clearing a tile.
    if let [lone] = gradients
        && E::is_type_of(lone)
    {
        return onto_tile(E::view_mut(onto), E::view(lone.bytes), scaled);
    }
    let mut scratch = Scratch::<E>::zero();
    for (tile, onto) in E::view_mut(onto).chunks_mut(TILE).enumerate() {
        let merged = &mut scratch.0[..onto.len()];
        into_tile::<E>(merged, gradients, tile * TILE);
        onto_tile(onto, merged, &scaled);
    }
}

#[inline(always)]
fn onto_tile<E: KernelElement>(onto: &mut [ElementBytes<E>], merged: &[ElementBytes<E>], scaled: impl Fn(E) -> E) {
    for (onto, &merged) in onto.iter_mut().zip(merged) {
        *onto = E::load(*onto).plus(scaled(E::load(merged))).store();
    }
}

/// The sum of the gradients' elements from `start` on, as many as `into` holds. It starts from the first gradient and
/// not from zero, so that a single negative zero is kept.
#[inline(always)]
pub(crate) fn into_tile<E: KernelElement>(
    into: &mut [<E as StoredAs<E>>::Bytes],
    gradients: &[Gradient<'_>],
    start: usize,
) {
    let Some((first, mut others)) = gradients.split_first() else {
        into.fill(E::default().store());
        return;
    };
    if let [a, b, c, rest @ ..] = others
        && [first, a, b, c].into_iter().all(E::is_type_of)
    {
        merge_four::<E, true>(into, [first, a, b, c], start);
        others = rest;
    } else {
        E::merge::<true>(into, first, start);
    }
    while let [a, b, c, d, rest @ ..] = others
        && [a, b, c, d].into_iter().all(E::is_type_of)
    {
        merge_four::<E, false>(into, [a, b, c, d], start);
        others = rest;
    }
    for gradient in others {
        E::merge::<false>(into, gradient, start);
    }
}

/// Adds four gradients of the parameter's own type in one pass, in order, so that memory streams from several places
/// at once and the partial sum is stored once; `FIRST` starts from them instead of adding to `into`.
#[inline(always)]
fn merge_four<E: KernelElement, const FIRST: bool>(
    into: &mut [<E as StoredAs<E>>::Bytes],
    gradients: [&Gradient<'_>; 4],
    start: usize,
) {
    let [a, b, c, d] = gradients.map(|gradient| &E::view(gradient.bytes)[start..][..into.len()]);
    for ((((into, &a), &b), &c), &d) in into.iter_mut().zip(a).zip(b).zip(c).zip(d) {
        let begun = if FIRST { E::load(a) } else { E::load(*into).plus(E::load(a)) };
        *into = begun.plus(E::load(b)).plus(E::load(c)).plus(E::load(d)).store();
    }
}
