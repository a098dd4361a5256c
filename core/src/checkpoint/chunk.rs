//! Chunks of a checkpoint: their names, their lengths and their content.

use std::ops::Range;
use std::sync::Arc;

use crate::dtype::ElementType;
use crate::ids::{ChunkId, Version};

/// The first bytes of a chunk table.
pub(super) const CHUNKS_MAGIC: [u8; 8] = *b"PSCHUNK1";
/// The prefix of the name of every state tensor.
pub(super) const STATE_PREFIX: &str = "state/";

/// The lengths of a chunk in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    /// The chunk.
    pub id: ChunkId,
    /// The type of its value's elements.
    pub element_type: ElementType,
    /// The bytes of its value, a multiple of its element type's.
    pub value_bytes: u64,
    /// Its optimizer's state, in the order in which [`ChunkRecord::states`] will hold it.
    pub states: Vec<StateLayout>,
    /// Whether its lengths are known only when it is pushed, because it may grow before. Such a chunk has a data file
    /// of its own.
    pub(super) grows: bool,
}

impl ChunkLayout {
    /// A chunk of known lengths.
    #[must_use]
    pub fn fixed(id: ChunkId, element_type: ElementType, value_bytes: u64, states: Vec<StateLayout>) -> Self {
        Self { id, element_type, value_bytes, states, grows: false }
    }

    /// A chunk whose lengths are known when it is pushed; those of `states` are ignored.
    #[must_use]
    pub fn growing(id: ChunkId, element_type: ElementType, states: Vec<StateLayout>) -> Self {
        Self { id, element_type, value_bytes: 0, states, grows: true }
    }

    pub(super) fn grow_to(&mut self, chunk: &ChunkRecord<'_>) {
        assert_eq!(chunk.states.len(), self.states.len(), "states are as many as the layout says");
        self.value_bytes = chunk.value.len() as u64;
        for (layout, state) in self.states.iter_mut().zip(chunk.states) {
            layout.bytes = state.len() as u64;
        }
    }
}

/// One state tensor of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Its name in the update rule, such as `momentum`.
    pub name: Arc<str>,
    /// The type of its elements.
    pub element_type: ElementType,
    /// Its bytes, a multiple of its element type's.
    pub bytes: u64,
}

/// Content of a chunk in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRecord<'a> {
    /// The chunk.
    pub id: ChunkId,
    /// Number of its updates.
    pub version: Version,
    /// The server's marks of gradients that the value already contains; opaque here.
    pub marks: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
    /// Its optimizer's state tensors, in the layout's order.
    pub states: &'a [&'a [u8]],
}

impl ChunkRecord<'_> {
    fn tensors(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.value).chain(self.states.iter().copied())
    }

    /// Bytes of the value and the states.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.len() as u64).sum()
    }

    /// A range of the bytes of the value and the states, in sequence.
    pub(super) fn part(&self, part: &Range<u64>) -> Vec<&[u8]> {
        let mut start = 0;
        let within = |at: u64, start: u64, tensor: &[u8]| {
            usize::try_from(at.saturating_sub(start)).map_or(tensor.len(), |at| at.min(tensor.len()))
        };
        let tensors = self.tensors().map(|tensor| {
            let cut = &tensor[within(part.start, start, tensor)..within(part.end, start, tensor)];
            start += tensor.len() as u64;
            cut
        });
        tensors.filter(|cut| !cut.is_empty()).collect()
    }
}

/// The name of a chunk's value.
pub(super) fn value_name(id: ChunkId) -> String {
    format!("value/{}/{}", id.parameter, id.chunk)
}
