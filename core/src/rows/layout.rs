//! Layout of a row: element type, width and range of ids, equal for all rows of a parameter.

use std::fmt;

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::limits::ROW_BYTES_MAX;

/// The largest height: 2^63, so that an id below one fits a signed integer.
pub const ROW_IDS_MAX: u64 = 1 << 63;

/// The bound of a parameter's row ids, which are counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Height {
    /// Ids are below this number: the parameter is a matrix with this many rows.
    Rows(u64),
    /// Every number of 64 bits is an id, such as a hash: rows exist after their first update.
    Unbounded,
}

impl Height {
    /// Whether a row has this id.
    #[must_use]
    pub const fn contains(self, id: u64) -> bool {
        match self {
            Self::Rows(rows) => id < rows,
            Self::Unbounded => true,
        }
    }

    /// The refusal of an id that no row has. One from 2^63 on is likely a negative number or a hash.
    pub(super) fn refusal(self, id: u64, place: &str) -> Failure {
        let signed =
            if id < ROW_IDS_MAX { String::new() } else { format!(" ({} as a signed number)", id.cast_signed()) };
        let hashes = if id < ROW_IDS_MAX { "" } else { "; a table without a height takes hashes of 64 bits as ids" };
        Failure::call(format!("row {id}{signed}{place}; expected ids below {}{hashes}", self.bound()))
    }

    /// The rows of a matrix; of a table without a height the most that a matrix may have.
    #[must_use]
    pub const fn bound(self) -> u64 {
        match self {
            Self::Rows(rows) => rows,
            Self::Unbounded => ROW_IDS_MAX,
        }
    }
}

impl fmt::Display for Height {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(rows) => write!(formatter, "{rows} rows"),
            Self::Unbounded => formatter.write_str("any number of rows"),
        }
    }
}

/// Checked layout of rows: the element type, the elements per row and the range of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    element_type: ElementType,
    width: u32,
    height: Height,
}

impl RowLayout {
    /// Rows of `width` elements of any element type; [`ElementType`] and the rule restrict parameters and gradients.
    ///
    /// # Errors
    /// When a row has no elements or more than [`ROW_BYTES_MAX`] bytes, and when the height is beyond [`ROW_IDS_MAX`].
    pub fn new(element_type: ElementType, width: u32, height: Height) -> Result<Self, Failure> {
        let bytes = u64::from(width) * element_type.bytes();
        if bytes == 0 || u64::from(ROW_BYTES_MAX) < bytes {
            return Err(Failure::call(format!(
                "a row of {width} elements of {element_type} has {bytes} bytes; expected 1 to {ROW_BYTES_MAX}"
            )));
        }
        if ROW_IDS_MAX < height.bound() {
            return Err(Failure::call(format!("a height of {height}; expected at most {ROW_IDS_MAX}")));
        }
        Ok(Self { element_type, width, height })
    }

    /// The same rows with elements of another type: the layout of a gradient.
    ///
    /// # Errors
    /// When a row of that type has more than [`ROW_BYTES_MAX`] bytes.
    pub fn of(self, element_type: ElementType) -> Result<Self, Failure> {
        Self::new(element_type, self.width, self.height)
    }

    /// The type of the elements.
    #[must_use]
    pub const fn element_type(self) -> ElementType {
        self.element_type
    }

    /// Elements in a row; at least one.
    #[must_use]
    pub const fn width(self) -> u32 {
        self.width
    }

    /// The range of ids.
    #[must_use]
    pub const fn height(self) -> Height {
        self.height
    }

    /// Bytes of a row's values.
    #[must_use]
    pub fn row_bytes(self) -> usize {
        self.width as usize * element_bytes(self.element_type)
    }

    /// Refuses an id out of range.
    ///
    /// # Errors
    /// When the id is not below the height; names it.
    pub fn check(self, id: u64) -> Result<(), Failure> {
        if self.height.contains(id) { Ok(()) } else { Err(self.height.refusal(id, "")) }
    }
}

/// Bytes of an element, as a length in memory.
pub(super) fn element_bytes(element_type: ElementType) -> usize {
    usize::try_from(element_type.bytes()).expect("an element has at most 8 bytes")
}
