//! Rows: what an embedding's gradient is made of, and the table that holds only the rows somebody has touched.
//!
//! Not here: which server has a row, frames and sessions ([`crate::server`], [`crate::client`]); arithmetic, which a
//! [`Kernels`](crate::port::Kernels) does; the file a table is saved to ([`crate::checkpoint`]).
//!
//! Read in this order: [`RowLayout`] (what a row is), [`RowsView`] and [`SelectedRows`] (rows that travel, some perhaps
//! more than once), [`Merge`] (contributions become unique rows), [`Initializer`] (what a row is before anybody
//! touches it), [`RowTable`] (rows that somebody has touched).

mod initializer;
mod layout;
mod merge;
mod selected;
mod table;
#[cfg(test)]
mod tests;

pub use initializer::Initializer;
pub use layout::{Height, ROW_IDS_MAX, RowLayout};
pub use merge::{Merge, Merged, Unique};
pub use selected::{Ids, RowsView, SelectedRows};
pub use table::{
    CatchUp, Pieces, Rates, Reading, Record, RowTable, Sorted, TableCopy, TableSettings, TableUsage, Workspace,
};
