//! The memory bandwidth for the same rows: an array that is indexed, without lookup, merge or update rule. The baseline
//! server keeps its rows in one.

use anyhow::{Context, Result};
use memmap2::MmapMut;
use pserver_core::memory::prefetch;

/// Rows that are asked for ahead.
const AHEAD: usize = 16;

/// An array of rows, with pages as large as the system has them.
pub(super) struct Array {
    memory: MmapMut,
    width: usize,
}

impl Array {
    /// Rows of so many elements, zeros. Every page is written, so that none is the system's page of zeros.
    pub(super) fn new(rows: usize, width: usize) -> Result<Self> {
        let mut memory = MmapMut::map_anon(rows * width * 4).context("mapping the array")?;
        // Where there are none it is walked as well as it can be.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        memory.fill(0);
        Ok(Self { memory, width })
    }

    /// Copies the first elements of rows to `into`, one row after another. Rows are asked for ahead.
    pub(super) fn gather(&self, rows: &[usize], into: &mut [f32], width: usize) {
        let values: &[f32] = bytemuck::cast_slice(&self.memory);
        for (place, (row, into)) in rows.iter().zip(into.chunks_exact_mut(width)).enumerate() {
            if let Some(ahead) = rows.get(place + AHEAD) {
                prefetch(bytemuck::cast_slice(&values[ahead * self.width..][..width]));
            }
            into.copy_from_slice(&values[row * self.width..][..width]);
        }
    }

    /// Adds a gradient to every part of each row, in place. Rows are asked for ahead.
    pub(super) fn add(&mut self, rows: &[usize], gradients: &[f32], width: usize) {
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut self.memory);
        for (place, (row, gradient)) in rows.iter().zip(gradients.chunks_exact(width)).enumerate() {
            if let Some(ahead) = rows.get(place + AHEAD) {
                prefetch(bytemuck::cast_slice(&values[ahead * self.width..][..self.width]));
            }
            for part in values[row * self.width..][..self.width].chunks_exact_mut(width) {
                part.iter_mut().zip(gradient).for_each(|(value, gradient)| *value += gradient);
            }
        }
    }
}
