//! Rows of embeddings: sparse gradients, and the table that holds only touched rows.
//!
//! Not here: placement of rows on servers, frames and sessions ([`crate::server`], [`crate::client`]); arithmetic,
//! which a [`Kernels`](crate::port::Kernels) does; the file a table is saved to ([`crate::checkpoint`]).
//!
//! Read in this order: [`RowLayout`], [`RowsView`] and [`SelectedRows`] (rows on the wire, repeated ones included),
//! [`RowMerge`] (contributions become unique rows), [`Initializer`] (initial values), [`RowTable`] (touched rows).

mod initializer;
mod layout;
mod merge;
mod selected;
mod table;
#[cfg(test)]
mod tests;

pub use initializer::{Initializer, seed_of};
pub use layout::{Height, ROW_IDS_MAX, RowLayout};
pub use merge::{Merged, RowMerge, Unique};
pub use selected::{Ids, RowsView, SelectedRows};
pub use table::{
    CatchUp, PartialRead, RateChanges, Record, RowTable, RowWorkspace, Sorted, TableCopy, TablePieces, TableSettings,
    TableUsage, check_step_settings,
};
