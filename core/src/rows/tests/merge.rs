use std::collections::BTreeMap;

use half::{bf16, f16};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof, proptest};
use proptest::{collection, prop_assert_eq};

use crate::dtype::ElementType;
use crate::rows::{RowLayout, RowMerge, RowsView, SelectedRows};

use super::{bytes, floats, layout};

/// The dense form: every contribution is scattered into zeros, and these are added in order.
fn oracle(width: usize, contributions: &[(Vec<u64>, Vec<f32>)]) -> BTreeMap<u64, Vec<f32>> {
    let mut sums: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
    let dense: Vec<BTreeMap<u64, Vec<f32>>> = contributions
        .iter()
        .map(|(ids, values)| {
            let mut own = BTreeMap::new();
            for (id, row) in ids.iter().zip(values.chunks(width)) {
                add(own.entry(*id).or_insert_with(|| vec![0.0; width]), row);
            }
            own
        })
        .collect();
    for id in dense.iter().flat_map(BTreeMap::keys) {
        let zeros = vec![0.0; width];
        let mut rows = dense.iter().map(|own| own.get(id).unwrap_or(&zeros));
        let mut sum = rows.next().expect("there are contributions").clone();
        rows.for_each(|row| add(&mut sum, row));
        sums.insert(*id, sum);
    }
    sums
}

fn add(into: &mut [f32], from: &[f32]) {
    into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
}

fn merged(layout: RowLayout, contributions: &[SelectedRows]) -> SelectedRows {
    let views: Vec<_> = contributions.iter().map(SelectedRows::view).collect();
    RowMerge::default().unite(layout, &views).expect("they fit").to_selected_rows()
}

/// Ids of every size, often alike.
fn ids() -> impl Strategy<Value = Vec<u64>> {
    let id = prop_oneof![0..8_u64, 2040..2060_u64, any::<u64>().prop_map(|id| id >> 1), Just((1 << 63) - 1)];
    collection::vec(id, 0..50)
}

/// Numbers whose sums depend on their order, and zeros of both signs.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![Just(0.0), Just(-0.0), Just(1e30), Just(-1e30), Just(f32::INFINITY), -1.0..1.0_f32, Just(1e-40)]
}

fn contribution(width: usize) -> impl Strategy<Value = (Vec<u64>, Vec<f32>)> {
    ids().prop_flat_map(move |ids| {
        let values = collection::vec(value(), ids.len() * width);
        (Just(ids), values)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_merge_is_the_sum_of_dense_forms_to_the_bit(
        (width, contributions) in prop_oneof![Just(1), Just(3), Just(64), Just(65), Just(130)]
            .prop_flat_map(|width| (Just(width), collection::vec(contribution(width), 1..5)))
    ) {
        let layout = layout(ElementType::Float32, u32::try_from(width).expect("small"));
        let rows: Vec<_> = contributions
            .iter()
            .map(|(ids, values)| SelectedRows::new(layout, ids, &bytes(values)).expect("a row for each id"))
            .collect();
        let expected = oracle(width, &contributions);
        let found = merged(layout, &rows);
        prop_assert_eq!(found.view().len(), expected.len());
        for ((id, row), (expected_id, expected)) in found.view().iter().zip(&expected) {
            prop_assert_eq!(id, *expected_id);
            for (found, expected) in floats(row).iter().zip(expected) {
                // NaN stays NaN; its bit pattern is unspecified.
                let is_same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                proptest::prop_assert!(is_same, "row {id}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn contributions_merged_by_trainers_give_the_same_bits(
        contributions in collection::vec(contribution(3), 1..4)
    ) {
        let layout = layout(ElementType::Float32, 3);
        let finite = |values: &[f32]| values.iter().map(|value| if value.is_finite() { *value } else { 1.0 }).collect();
        let rows = contributions.iter().map(|(ids, values)| {
            let values: Vec<f32> = finite(values);
            SelectedRows::new(layout, ids, &bytes(&values)).expect("a row for each id")
        });
        let rows: Vec<_> = rows.collect();
        let already: Vec<_> = rows.iter().map(|rows| merged(layout, std::slice::from_ref(rows))).collect();
        prop_assert_eq!(merged(layout, &already), merged(layout, &rows));
    }
}

#[test]
fn halves_are_widened_and_integers_wrap() {
    let floats = layout(ElementType::Float32, 2);
    let half = |values: [f32; 2]| values.map(|value| f16::from_f32(value).to_le_bytes()).concat();
    let brain = |values: [f32; 2]| values.map(|value| bf16::from_f32(value).to_le_bytes()).concat();
    let of = |element_type| floats.of(element_type).expect("narrower");
    let halves =
        SelectedRows::new(of(ElementType::Float16), &[3, 1], &[half([0.5, 2.0]), half([65504.0, 0.0])].concat());
    let brains = SelectedRows::new(of(ElementType::Bfloat16), &[3], &brain([1e30, -3.0]));
    let found = merged(floats, &[halves.expect("two rows"), brains.expect("a row")]);
    let large = bf16::from_f32(1e30).to_f32();
    assert_eq!(found, SelectedRows::new(floats, &[1, 3], &bytes(&[65504.0, 0.0, large, -1.0])).expect("two rows"));

    let integers = layout(ElementType::Uint32, 1);
    let rows = SelectedRows::new(integers, &[9, 9], &[u32::MAX.to_le_bytes(), 3_u32.to_le_bytes()].concat());
    let sum = SelectedRows::new(integers, &[9], &2_u32.to_le_bytes());
    assert_eq!(merged(integers, &[rows.expect("two rows")]), sum.expect("a row"));
}

#[test]
fn unlike_contributions_are_refused_by_name() {
    let check = |found: RowLayout, expected: &str| {
        let parameter = layout(ElementType::Float32, 4);
        let rows = SelectedRows::new(found, &[], &[]).expect("no rows");
        let views = [rows.view()];
        let refusal = RowMerge::default().unite(parameter, &views).expect_err("it does not fit").to_string();
        assert_eq!(
            refusal,
            format!("contribution 0 has rows of {expected}; expected 4 float32 with any number of rows")
        );
    };
    check(layout(ElementType::Float32, 3), "3 float32 with any number of rows");
    check(layout(ElementType::Float64, 4), "4 float64 with any number of rows");
    let bounded = RowLayout::new(ElementType::Float16, 4, crate::rows::Height::Rows(7)).expect("small");
    check(bounded, "4 float16 with 7 rows");
}

#[test]
fn a_reused_workspace_does_not_change_the_result() {
    let layout = layout(ElementType::Float32, 1);
    let mut merge = RowMerge::with_capacity(2);
    let mut sums = |ids: &[u64]| {
        let values: Vec<f32> = ids.iter().map(|_| 1.0).collect();
        let values = bytes(&values);
        let rows = [RowsView::new(layout, ids, &values).expect("a row for each id")];
        merge.unite(layout, &rows).expect("they fit").to_selected_rows()
    };
    assert_eq!(sums(&[5, 1 << 40, 5]).view().ids().iter().collect::<Vec<_>>(), [5, 1 << 40]);
    assert_eq!(sums(&[]).view().len(), 0);
    assert_eq!(floats(sums(&[2, 2, 2, 1]).view().values()), [1.0, 3.0]);
    // Rows that need not be sorted, after rows that had to be.
    assert_eq!(sums(&[1, 4, 9]).view().ids().iter().collect::<Vec<_>>(), [1, 4, 9]);
    assert_eq!(floats(sums(&[1, 4, 4]).view().values()), [1.0, 2.0]);
}
