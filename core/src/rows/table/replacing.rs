//! Rows of weights and states that are set, and the count of updates.

use crate::error::Failure;
use crate::ids::Version;
use crate::port::Kernels;

use super::rest::IdleRows;
use super::tile::TileRow;
use super::{Ids, RateChanges, RowTable, RowWorkspace, RowsView};

impl RowTable {
    /// Replaces a tensor of rows: 0 is the weights, then each state. The other tensors have the updates that the rows
    /// had missed. Of a repeated row the last value counts.
    ///
    /// # Errors
    /// When memory runs out; then no value has changed.
    ///
    /// # Panics
    /// When the rows are not of the table's layout, or there is no such tensor.
    pub fn set(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        rows: &RowsView<'_>,
        tensor: usize,
    ) -> Result<(), Failure> {
        assert_eq!(rows.layout(), self.settings.layout, "rows of this table");
        assert!(tensor <= self.shape.states, "one of the tensors");
        self.claim(&mut work.slots, rows.ids().iter())?;
        work.tile.begin(self.shape);
        for place in 0..rows.len() {
            let slot = work.slots[place];
            let last = self.last(slot);
            if last < self.version {
                work.tile.rows.push(TileRow { id: rows.ids().get(place), slot: Some(slot), last, place });
                self.settle_whole(&mut work.tile, kernels);
                self.store(&mut work.tile);
                work.tile.rows.clear();
            }
            self.keep(rows.ids().get(place), slot);
            let start = self.head_bytes() + tensor * self.shape.row_bytes;
            self.records.get_mut(slot)[start..][..self.shape.row_bytes].copy_from_slice(rows.row(place));
        }
        Ok(())
    }

    /// [`catch_up`](Self::catch_up) of every row, from a page of the index on.
    pub fn catch_up_all(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        page: &mut u32,
        left: &mut u64,
    ) -> bool {
        while self.rest != IdleRows::Always && *page < self.index.pages() {
            let ids: Vec<u64> = self.index.entries_in(*page).map(|(id, _)| id).collect();
            let ids = Ids::new(self.settings.layout, &ids).expect("they are ids of the table");
            if !self.catch_up(work, kernels, ids, &mut 0, left) {
                return false;
            }
            *page += 1;
        }
        true
    }

    /// Counts updates from `version` on, as if those before had had these rates. Existing rows first get the updates
    /// that they missed, and have then missed none; an absent row begins with the updates of the new count.
    pub fn renumber(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        version: Version,
        rates: RateChanges,
    ) {
        if (self.version, &self.rates) == (version, &rates) {
            return;
        }
        let is_whole = self.catch_up_all(work, kernels, &mut 0, &mut { u64::MAX });
        assert!(is_whole, "no table is so long");
        (self.version, self.rates) = (version, rates);
        if self.rest == IdleRows::Always {
            return;
        }
        for page in 0..self.index.pages() {
            let rows: Vec<(u64, u32)> = self.index.entries_in(page).collect();
            for (id, slot) in rows {
                self.keep(id, slot);
                self.set_last(slot, version);
            }
        }
    }

    /// The rates of [`rates`](Self::rates) as far as absent rows need them: none where one update is as good as all.
    #[must_use]
    pub fn rates_of_absent(&self) -> &[(Version, Option<f64>)] {
        if self.rest == IdleRows::Never { self.rates.changes() } else { &[] }
    }
}
