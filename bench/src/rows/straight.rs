//! What memory gives for the same rows: an array that is indexed, with nothing to find, to merge or to reckon.

use pserver_core::memory::prefetch;

/// Rows that are asked for ahead.
const AHEAD: usize = 16;

/// An array of rows.
pub(super) struct Array {
    values: Vec<f32>,
    width: usize,
}

impl Array {
    /// Rows of so many elements. Every page is written, so that none is the system's page of zeros.
    pub(super) fn new(rows: usize, width: usize) -> Self {
        Self { values: vec![1.0; rows * width], width }
    }

    /// Copies the first elements of rows to `into`, one row after another; `asks` says whether rows are asked for ahead.
    pub(super) fn gather(&self, rows: &[usize], into: &mut [f32], width: usize, asks: bool) {
        for (place, (row, into)) in rows.iter().zip(into.chunks_exact_mut(width)).enumerate() {
            if let Some(ahead) = rows.get(place + AHEAD).filter(|_| asks) {
                prefetch(bytemuck::cast_slice(&self.values[ahead * self.width..][..width]));
            }
            into.copy_from_slice(&self.values[row * self.width..][..width]);
        }
    }

    /// Adds a gradient to every part of each row, in place.
    pub(super) fn add(&mut self, rows: &[usize], gradients: &[f32], width: usize, asks: bool) {
        for (place, (row, gradient)) in rows.iter().zip(gradients.chunks_exact(width)).enumerate() {
            if let Some(ahead) = rows.get(place + AHEAD).filter(|_| asks) {
                prefetch(bytemuck::cast_slice(&self.values[ahead * self.width..][..self.width]));
                prefetch(bytemuck::cast_slice(&gradients[(place + AHEAD) * width..][..width]));
            }
            for part in self.values[row * self.width..][..self.width].chunks_exact_mut(width) {
                part.iter_mut().zip(gradient).for_each(|(value, gradient)| *value += gradient);
            }
        }
    }
}
