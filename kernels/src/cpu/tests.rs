//! Sums whose bits do not depend on the split of the work.

use proptest::collection::vec;
use proptest::prelude::*;
use pserver_core::dtype::ElementType;
use pserver_core::optim::Gradient;

use super::sum;

const MAGNITUDES: [f32; 6] = [1.0, 1e-3, 1e-30, 1e-42, 1e20, 1e30];

fn tensor(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    vec((-1.0_f32..1.0, 0..MAGNITUDES.len()), length)
        .prop_map(|drawn| drawn.iter().map(|(value, which)| value * MAGNITUDES[*which]).collect())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn a_sum_made_in_parts_has_the_bits_of_the_whole(
        gradient in tensor(1..70),
        count in 2_usize..20,
        cut in 1_usize..19,
    ) {
        let turned = |by: usize| {
            let mut values = gradient.clone();
            values.rotate_left(by % gradient.len());
            bytes_of(&values)
        };
        let held: Vec<Vec<u8>> = (0..count).map(turned).collect();
        let view = |bytes| Gradient { bytes, element_type: ElementType::Float32 };
        let all: Vec<Gradient<'_>> = held.iter().map(|bytes| view(bytes)).collect();
        let mut whole = vec![0; held[0].len()];
        sum(ElementType::Float32, &mut whole, &all);
        let cut = cut.min(count - 1);
        let mut head = vec![0; held[0].len()];
        sum(ElementType::Float32, &mut head, &all[..cut]);
        let parts: Vec<Gradient<'_>> = std::iter::once(view(&head)).chain(all[cut..].iter().copied()).collect();
        let mut joined = vec![0; held[0].len()];
        sum(ElementType::Float32, &mut joined, &parts);
        prop_assert_eq!(whole, joined);
    }
}
