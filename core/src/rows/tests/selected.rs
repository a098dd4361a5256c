use proptest::prelude::{Strategy, any, proptest};
use proptest::{collection, prop_assert, prop_assert_eq};

use crate::dtype::ElementType;
use crate::limits::ROW_BYTES_MAX;
use crate::rows::{Height, Ids, ROW_IDS_MAX, RowLayout, RowsView, SelectedRows};

use super::layout;

#[test]
fn an_invalid_layout_is_refused_by_name() {
    let check = |width, height, expected: &str| {
        let refusal = RowLayout::new(ElementType::Float32, width, height).expect_err("it cannot be");
        assert_eq!(refusal.to_string(), expected);
    };
    check(0, Height::Unbounded, "a row of 0 elements of float32 has 0 bytes; expected 1 to 65536");
    check(16385, Height::Unbounded, "a row of 16385 elements of float32 has 65540 bytes; expected 1 to 65536");
    let high = Height::Rows(ROW_IDS_MAX + 1);
    check(1, high, "a height of 9223372036854775809 rows; expected at most 9223372036854775808");
    assert!(RowLayout::new(ElementType::Float16, ROW_BYTES_MAX / 2, Height::Unbounded).is_ok());
}

#[test]
fn a_payload_that_is_not_rows_is_refused_by_name() {
    let layout = RowLayout::new(ElementType::Float32, 2, Height::Rows(5)).expect("small");
    let check = |payload: &[u8], expected: &str| {
        assert_eq!(RowsView::parse(layout, payload).expect_err("no rows").to_string(), expected);
        assert_eq!(SelectedRows::parse(layout, payload.to_vec()).expect_err("no rows").to_string(), expected);
    };
    let each = "expected a multiple of 16: an id of 8 bytes and 2 elements of float32 each";
    check(&[0; 15], &format!("15 bytes of rows; {each}"));
    check(&[0; 17], &format!("17 bytes of rows; {each}"));
    let mut payload = SelectedRows::new(layout, &[4, 4], &[1; 16]).expect("row 4 exists").into_payload();
    payload[8] = 5;
    check(&payload, "row 5 at place 1 of 2; expected ids below 5");
    let refusal = RowsView::new(layout, &[1, 2], &[0; 15]).expect_err("half an element");
    assert_eq!(refusal.to_string(), "15 bytes of values for 2 rows; expected 16: 2 elements of float32 each");
    let refusal = Ids::parse(layout, &[0; 12]).expect_err("half an id");
    assert_eq!(refusal.to_string(), "12 bytes of row ids; expected a multiple of 8, an id each");
}

#[test]
fn every_number_of_64_bits_is_an_id_of_a_table_that_grows() {
    let layout = layout(ElementType::Float64, 1);
    assert!(RowsView::new(layout, &[0, ROW_IDS_MAX, u64::MAX], &[0; 24]).is_ok());
    let bounded = RowLayout::new(ElementType::Float64, 1, Height::Rows(5)).expect("small");
    let refusal = RowsView::new(bounded, &[u64::MAX], &[0; 8]).expect_err("it is no row").to_string();
    assert!(
        refusal.starts_with("row 18446744073709551615 (-1 as a signed number) at place 0 of 1; expected"),
        "{refusal}"
    );
    assert!(refusal.ends_with("ids below 5; a table without a height takes hashes of 64 bits as ids"), "{refusal}");
}

fn some_rows() -> impl Strategy<Value = (RowLayout, Vec<u64>, Vec<u8>)> {
    (1..9_u32, collection::vec(any::<u64>(), 0..40), any::<u8>()).prop_map(|(width, ids, first)| {
        let layout = layout(ElementType::Bfloat16, width);
        let bytes = ids.len() * layout.row_bytes();
        let values = (0..bytes).map(|place| first.wrapping_add(u8::try_from(place % 251).expect("small"))).collect();
        (layout, ids, values)
    })
}

proptest! {
    #[test]
    fn rows_come_back_as_they_were_from_any_address((layout, ids, values) in some_rows(), shift in 0..8_usize) {
        let view = RowsView::new(layout, &ids, &values).expect("a row for each id");
        let mut shifted = vec![0; shift];
        view.encode(&mut shifted);
        prop_assert_eq!(shifted.len() - shift, view.payload_bytes());
        let found = RowsView::parse(layout, &shifted[shift..]).expect("it was encoded");
        prop_assert_eq!(found, view);
        prop_assert!(found.iter().map(|(id, _)| id).eq(ids.iter().copied()));
        for (place, id) in ids.iter().enumerate() {
            prop_assert_eq!(found.ids().get(place), *id);
            prop_assert_eq!(found.row(place), &values[place * layout.row_bytes()..][..layout.row_bytes()]);
        }
        let owned = SelectedRows::from(found);
        prop_assert_eq!(owned.payload(), &shifted[shift..]);
    }
}
