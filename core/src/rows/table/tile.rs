//! Tile: rows copied out of their records in the layout of a chunk, so that a kernel can process them: the weights one
//! after another, then each state. A tile stays in the first-level cache; the cost of copying is hidden behind the
//! memory accesses to the records.

use crate::ids::Version;
use crate::limits::{RULE_REDUCTIONS_MAX, STATES_MAX};
use crate::optim::{self, Gradient, Step};
use crate::port::{Kernels, Update};

use super::rest::Past;

/// Bytes of a tile's weights, states and gradients together, or one row when that is more: a third of a first-level
/// cache, which also holds the records of this tile and the next.
const TILE_BYTES: usize = 16 * 1024;
/// Alignment of a tile's tensors: a cache line, so that no vector crosses one.
const ALIGNMENT: usize = 64;
/// The values of reductions of gradients of zero.
const OF_NOTHING: [f64; RULE_REDUCTIONS_MAX] = [0.0; RULE_REDUCTIONS_MAX];

/// Memory for tiles of any table.
#[derive(Debug, Default)]
pub(super) struct Tile {
    /// The rows in it.
    pub(super) rows: Vec<TileRow>,
    shape: TileShape,
    memory: Vec<u8>,
    /// Offset of the first tensor, and distance from one tensor to the next.
    start: usize,
    tensor_bytes: usize,
    /// The content of a steady row before a replay.
    before: Vec<u8>,
    /// Buffer for the scalars of one update.
    scalars: Vec<f64>,
}

/// A row of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileRow {
    pub(super) id: u64,
    /// The slot of its record; none for an absent row.
    pub(super) slot: Option<u32>,
    /// The last update that the row has seen.
    pub(super) last: Version,
    /// Its index among the caller's rows.
    pub(super) place: usize,
}

/// Dimensions of a table's tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TileShape {
    pub(super) row_bytes: usize,
    pub(super) states: usize,
}

impl TileShape {
    /// The most rows in a tile.
    pub(super) fn rows(self) -> usize {
        (TILE_BYTES / (self.row_bytes * (self.states + 2))).max(1)
    }

    /// Distance from one of a tile's tensors to the next.
    fn tensor_bytes(self) -> usize {
        (self.rows() * self.row_bytes).next_multiple_of(ALIGNMENT)
    }
}

impl Tile {
    /// Empties the tile and sets the dimensions of a table.
    pub(super) fn begin(&mut self, shape: TileShape) {
        self.rows.clear();
        if self.shape != shape {
            self.shape = shape;
            self.memory.resize(shape.tensor_bytes() * (shape.states + 2) + ALIGNMENT, 0);
            self.start = self.memory.as_ptr().align_offset(ALIGNMENT);
            self.tensor_bytes = shape.tensor_bytes();
        }
    }

    /// The weights of all rows in the tile, then each state, then the gradients.
    fn tensors(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let TileShape { states, .. } = self.shape;
        self.memory[self.start..].chunks_exact_mut(self.shape.tensor_bytes()).take(states + 2)
    }

    /// Copies a record's weight and states into a place.
    pub(super) fn load(&mut self, place: usize, record: &[u8]) {
        let row_bytes = self.shape.row_bytes;
        for tensor in 0..=self.shape.states {
            self.row(tensor, place).copy_from_slice(&record[tensor * row_bytes..][..row_bytes]);
        }
    }

    /// Copies a place's weight and states into a record.
    pub(super) fn store(&mut self, place: usize, record: &mut [u8]) {
        let row_bytes = self.shape.row_bytes;
        for tensor in 0..=self.shape.states {
            record[tensor * row_bytes..][..row_bytes].copy_from_slice(self.row(tensor, place));
        }
    }

    /// The weight at a place.
    pub(super) fn weight(&mut self, place: usize) -> &mut [u8] {
        self.row(0, place)
    }

    /// Fills the states at an index with those of a new row.
    pub(super) fn begin_states(&mut self, place: usize, past: Past<'_>) {
        for (tensor, declared) in (1..).zip(past.rule.states()) {
            optim::fill(past.element_type, self.row(tensor, place), declared.initial);
        }
    }

    /// The gradient of a place.
    pub(super) fn gradient(&mut self, place: usize) -> &mut [u8] {
        self.row(self.shape.states + 1, place)
    }

    /// A place's part of one of the tensors.
    #[inline]
    pub(super) fn row(&mut self, tensor: usize, place: usize) -> &mut [u8] {
        let row_bytes = self.shape.row_bytes;
        let start = self.start + tensor * self.tensor_bytes + place * row_bytes;
        &mut self.memory[start..start + row_bytes]
    }

    /// Updates all rows by their gradients, with the values of the rule's reductions.
    pub(super) fn update(&mut self, kernels: &mut dyn Kernels, past: Past<'_>, step: &Step, reduced: &[f64]) {
        let rows = self.rows.len();
        self.update_rows(kernels, past, step, rows, Some(reduced));
    }

    /// Replays the rows' missed updates up to version `to`, or fewer when `left` is used up; the bytes of updated
    /// weights are subtracted from it. The rows are sorted by their last updates, so that each replayed update covers a
    /// prefix; each row gets its new last version.
    pub(super) fn catch_up(&mut self, kernels: &mut dyn Kernels, past: Past<'_>, to: Version, left: &mut u64) {
        let is_steady = past.is_steady();
        let mut version = self.rows.first().map_or(to.0, |row| row.last.0) + 1;
        let (mut active, mut replayed) = (0, 0_u64);
        while version <= to.0 && *left > 0 {
            let behind = self.rows[active..].iter().take_while(|row| row.last.0 < version).count();
            if behind > 0 {
                active += behind;
                replayed = 0;
            }
            replayed += 1;
            // A comparison costs as much as a replay, so rows are compared after 1, 2, 4, ... replays.
            let compares = is_steady && replayed.is_power_of_two();
            if compares {
                self.remember(active);
            }
            self.update_rows(kernels, past, &past.step(Version(version)), active, None);
            *left = left.saturating_sub((active * self.shape.row_bytes) as u64);
            version += 1;
            if compares && self.is_as_remembered(active) {
                version = self.rows.get(active).map_or(to.0 + 1, |next| version.max(next.last.0 + 1));
            }
        }
        self.rows[..active].iter_mut().for_each(|row| row.last = Version(version - 1));
    }

    /// Whether every row has seen the update that made a version.
    pub(super) fn has_seen(&self, version: Version) -> bool {
        self.rows.iter().all(|row| version <= row.last)
    }

    /// The index of the first of the caller's rows in the tile.
    pub(super) fn first_place(&self) -> Option<usize> {
        self.rows.iter().map(|row| row.place).min()
    }

    /// A row's weight and states, one after the other, as a record has them.
    pub(super) fn content(&mut self, place: usize, content: &mut Vec<u8>) {
        for tensor in 0..=self.shape.states {
            content.extend_from_slice(self.row(tensor, place));
        }
    }

    /// Updates the first rows: by their gradients, with the values of reductions, or by a gradient of zero, which none
    /// of these changes.
    fn update_rows(
        &mut self,
        kernels: &mut dyn Kernels,
        past: Past<'_>,
        step: &Step,
        rows: usize,
        reduced: Option<&[f64]>,
    ) {
        let TileShape { row_bytes, states: count } = self.shape;
        let mut scalars = std::mem::take(&mut self.scalars);
        let mut tensors = self.tensors().map(|tensor| &mut tensor[..rows * row_bytes]);
        let parameter = tensors.next().expect("a tile has weights");
        let mut states: [&mut [u8]; STATES_MAX] = Default::default();
        states[..count].iter_mut().zip(&mut tensors).for_each(|(state, tensor)| *state = tensor);
        let bytes = tensors.next().expect("a tile has gradients");
        let gradient = [Gradient { bytes, element_type: past.element_type }];
        kernels.update(Update {
            formula: past.rule.formula_reduced(step, reduced.unwrap_or(&OF_NOTHING), &mut scalars),
            element_type: past.element_type,
            parameter,
            states: &mut states[..count],
            gradients: if reduced.is_some() { &gradient } else { &[] },
        });
        drop(tensors);
        self.scalars = scalars;
    }

    /// Copies the first rows, to compare them after a replay.
    fn remember(&mut self, rows: usize) {
        let TileShape { row_bytes, states } = self.shape;
        let mut before = std::mem::take(&mut self.before);
        before.clear();
        self.tensors().take(states + 1).for_each(|tensor| before.extend_from_slice(&tensor[..rows * row_bytes]));
        self.before = before;
    }

    fn is_as_remembered(&mut self, rows: usize) -> bool {
        let TileShape { row_bytes, states } = self.shape;
        let before = std::mem::take(&mut self.before);
        let tensors = self.tensors().take(states + 1).zip(before.chunks_exact(rows * row_bytes));
        let is_same = tensors.into_iter().all(|(tensor, before)| &tensor[..rows * row_bytes] == before);
        self.before = before;
        is_same
    }
}
