mod initializer;
mod merge;
mod selected;
mod table;

use crate::dtype::ElementType;

use super::{Height, RowLayout};

fn layout(element_type: ElementType, width: u32) -> RowLayout {
    RowLayout::new(element_type, width, Height::Unbounded).expect("a row of few elements")
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
