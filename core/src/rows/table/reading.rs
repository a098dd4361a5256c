//! Progress of a read of rows that takes more than one turn.

use crate::ids::Version;

use super::tile::Tile;

/// Progress of a read. The default is the beginning of one of weights.
///
/// Replayed updates of existing rows are stored in the table. For absent rows this holds the weights and states so far:
/// of as many rows as are replayed together.
#[derive(Clone, Debug, Default)]
pub struct PartialRead {
    /// The tensor that is read: 0 for the weights, then each state.
    pub(super) tensor: usize,
    /// The first of the caller's rows that is not known to be written.
    pub(super) next: usize,
    /// Absent rows, by id, and the last update that each has seen.
    rows: Vec<(u64, Version)>,
    /// The weight and the states of each.
    contents: Vec<u8>,
    content_bytes: usize,
}

impl PartialRead {
    /// The beginning of a read of a state, by its index in the rule's order.
    #[must_use]
    pub fn of_state(state: usize) -> Self {
        Self { tensor: state + 1, ..Self::default() }
    }

    /// The last update that an absent row has seen, if the row is in the middle of its replay.
    pub(super) fn seen(&self, id: u64) -> Option<Version> {
        self.find(id).map(|index| self.rows[index].1)
    }

    /// The weight and the states of such a row.
    pub(super) fn content(&self, id: u64) -> Option<&[u8]> {
        self.find(id).map(|index| &self.contents[index * self.content_bytes..][..self.content_bytes])
    }

    fn find(&self, id: u64) -> Option<usize> {
        self.rows.binary_search_by_key(&id, |(id, _)| *id).ok()
    }

    /// Stops at the rows of a tile, whose replay is incomplete.
    pub(super) fn stop_at(&mut self, tile: &mut Tile) {
        self.next = tile.first_place().unwrap_or(self.next);
        self.rows.clear();
        self.contents.clear();
        let absent = tile.rows.iter().enumerate().filter(|(_, row)| row.slot.is_none());
        let mut absent: Vec<(u64, Version, usize)> = absent.map(|(place, row)| (row.id, row.last, place)).collect();
        absent.sort_unstable();
        absent.dedup_by_key(|(id, ..)| *id);
        for (id, last, place) in absent {
            self.rows.push((id, last));
            tile.content(place, &mut self.contents);
            self.content_bytes = self.contents.len() / self.rows.len();
        }
    }
}
