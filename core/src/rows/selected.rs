//! Selected rows of a parameter: ids, which may repeat, and a row of values for each.
//!
//! A payload, on the wire and in the journal, is little endian: the ids, 8 bytes each, then the values, row after row
//! in the ids' order. The number of rows follows from its length, because the catalogue has the layout. When a payload
//! begins at a multiple of eight, so do its ids and its values.

use crate::dtype::ElementType;
use crate::error::Failure;

use super::layout::RowLayout;

/// Bytes of an id in a payload.
const ID_BYTES: usize = size_of::<u64>();

// A caller's ids are sent in their form in memory.
const _: () = assert!(cfg!(target_endian = "little"), "a payload's numbers are those of the machine");

/// Row ids that were checked against a height. They may repeat and have any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids<'a> {
    bytes: &'a [[u8; ID_BYTES]],
}

/// Checked selected rows, borrowed: the ids, which may repeat, and a row of values for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsView<'a> {
    layout: RowLayout,
    ids: Ids<'a>,
    values: &'a [u8],
}

/// Checked selected rows, owned, in the form of a payload. [`view`](Self::view) reads them.
///
/// ```
/// use pserver_core::dtype::ElementType;
/// use pserver_core::rows::{Height, RowLayout, SelectedRows};
///
/// let layout = RowLayout::new(ElementType::Float32, 1, Height::Rows(10)).unwrap();
/// let values: Vec<u8> = [1.0_f32, 2.0, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let rows = SelectedRows::new(layout, &[7, 2, 7], &values).unwrap();
/// assert_eq!(rows.view().ids().iter().collect::<Vec<_>>(), [7, 2, 7]);
/// assert_eq!(rows.view().row(1), 2.0_f32.to_le_bytes());
/// assert!(SelectedRows::new(layout, &[10, 2, 7], &values).is_err(), "there is no row 10");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedRows {
    layout: RowLayout,
    rows: usize,
    payload: Vec<u8>,
}

impl<'a> Ids<'a> {
    /// Checks the ids of a payload: 8 bytes each, little endian.
    ///
    /// # Errors
    /// When the bytes are not whole ids, and when an id is not below the layout's height; names which.
    pub fn parse(layout: RowLayout, bytes: &'a [u8]) -> Result<Self, Failure> {
        let (ids, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            return Err(Failure::call(format!(
                "{} bytes of row ids; expected a multiple of {ID_BYTES}, an id each",
                bytes.len()
            )));
        }
        Self { bytes: ids }.checked(layout)
    }

    /// Checks ids in memory.
    ///
    /// # Errors
    /// When an id is not below the layout's height; names it and its place.
    pub fn new(layout: RowLayout, ids: &'a [u64]) -> Result<Self, Failure> {
        Self { bytes: bytemuck::cast_slice(ids) }.checked(layout)
    }

    fn checked(self, layout: RowLayout) -> Result<Self, Failure> {
        let height = layout.height();
        match self.iter().position(|id| !height.contains(id)) {
            None => Ok(self),
            Some(place) => Err(height.refusal(self.get(place), &format!(" at place {place} of {}", self.len()))),
        }
    }

    /// How many there are.
    #[must_use]
    pub const fn len(self) -> usize {
        self.bytes.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.bytes.is_empty()
    }

    /// The id at an index.
    ///
    /// # Panics
    /// When the index is out of bounds.
    #[must_use]
    pub fn get(self, place: usize) -> u64 {
        u64::from_le_bytes(self.bytes[place])
    }

    /// All ids, in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u64> + Clone + use<'a> {
        self.bytes.iter().map(|id| u64::from_le_bytes(*id))
    }

    /// The ids in the form of a payload.
    #[must_use]
    pub const fn bytes(self) -> &'a [u8] {
        self.bytes.as_flattened()
    }
}

impl<'a> RowsView<'a> {
    /// Checks a payload.
    ///
    /// # Errors
    /// When it is not whole rows with their ids, and when an id is not below the layout's height; names the id, or the
    /// bytes found and expected.
    pub fn parse(layout: RowLayout, payload: &'a [u8]) -> Result<Self, Failure> {
        let each = ID_BYTES + layout.row_bytes();
        if !payload.len().is_multiple_of(each) {
            return Err(Failure::call(format!(
                "{} bytes of rows; expected a multiple of {each}: an id of {ID_BYTES} bytes and {} elements of {} each",
                payload.len(),
                layout.width(),
                layout.element_type()
            )));
        }
        let (ids, values) = payload.split_at(payload.len() / each * ID_BYTES);
        Ok(Self { layout, ids: Ids::parse(layout, ids)?, values })
    }

    /// Checks ids and values in memory; the values are little endian, row after row in the ids' order.
    ///
    /// # Errors
    /// When the number of rows and ids differ, and when an id is not below the layout's height; names the found value.
    pub fn new(layout: RowLayout, ids: &'a [u64], values: &'a [u8]) -> Result<Self, Failure> {
        let expected = (ids.len() as u64).saturating_mul(layout.row_bytes() as u64);
        if values.len() as u64 != expected {
            return Err(Failure::call(format!(
                "{} bytes of values for {} rows; expected {expected}: {} elements of {} each",
                values.len(),
                ids.len(),
                layout.width(),
                layout.element_type()
            )));
        }
        Ok(Self { layout, ids: Ids::new(layout, ids)?, values })
    }

    /// The layout of the rows.
    #[must_use]
    pub const fn layout(&self) -> RowLayout {
        self.layout
    }

    /// The type of the values.
    #[must_use]
    pub const fn element_type(&self) -> ElementType {
        self.layout.element_type()
    }

    /// The number of rows, repeated ones included.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The ids, in order.
    #[must_use]
    pub const fn ids(&self) -> Ids<'a> {
        self.ids
    }

    /// The values, row after row.
    #[must_use]
    pub const fn values(&self) -> &'a [u8] {
        self.values
    }

    /// The values at one index.
    ///
    /// # Panics
    /// When the index is out of bounds.
    #[must_use]
    pub fn row(&self, place: usize) -> &'a [u8] {
        let bytes = self.layout.row_bytes();
        &self.values[place * bytes..][..bytes]
    }

    /// Ids with their values, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, &'a [u8])> + use<'a> {
        self.ids.iter().zip(self.values.chunks_exact(self.layout.row_bytes()))
    }

    /// Bytes of the payload.
    #[must_use]
    pub const fn payload_bytes(&self) -> usize {
        self.ids.bytes().len() + self.values.len()
    }

    /// Appends the payload to `into`. A vectored write needs no copy: [`Ids::bytes`] and then [`values`](Self::values)
    /// are the payload.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.reserve(self.payload_bytes());
        into.extend_from_slice(self.ids.bytes());
        into.extend_from_slice(self.values);
    }
}

impl SelectedRows {
    /// Copies ids and values, checked as [`RowsView::new`] does.
    ///
    /// # Errors
    /// As [`RowsView::new`].
    pub fn new(layout: RowLayout, ids: &[u64], values: &[u8]) -> Result<Self, Failure> {
        RowsView::new(layout, ids, values).map(Self::from)
    }

    /// Takes ownership of a payload, checked as [`RowsView::parse`] does.
    ///
    /// # Errors
    /// As [`RowsView::parse`].
    pub fn parse(layout: RowLayout, payload: Vec<u8>) -> Result<Self, Failure> {
        let rows = RowsView::parse(layout, &payload)?.len();
        Ok(Self { layout, rows, payload })
    }

    /// The rows, to read.
    #[must_use]
    pub fn view(&self) -> RowsView<'_> {
        let (ids, values) = self.payload.split_at(self.rows * ID_BYTES);
        RowsView { layout: self.layout, ids: Ids { bytes: ids.as_chunks().0 }, values }
    }

    /// The payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Returns the payload.
    #[must_use]
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }
}

impl From<RowsView<'_>> for SelectedRows {
    fn from(view: RowsView<'_>) -> Self {
        let mut payload = Vec::new();
        view.encode(&mut payload);
        Self { layout: view.layout, rows: view.len(), payload }
    }
}
