//! Half-precision copies of float32 values, by chunk.
//!
//! A copy is made at the first request and shared by all later ones for that version and type. The pool keeps it until
//! the value changes. It occupies a lease like a version that is still read; a copy without readers is reclaimable: a
//! failed allocation drops all of them, in every chunk, and tries again. A dropped copy is made again on request, with
//! the same bits.
//!
//! Copies are in no journal, checkpoint or accelerator: these hold the value.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::dtype::Half;
use crate::ids::ChunkId;
use crate::memory::Value;

/// The half-precision copies of current values, by chunk.
#[derive(Default)]
pub(super) struct HalfValues(BTreeMap<ChunkId, Both>);

/// The copies that the answers of a round need.
#[derive(Default)]
pub(super) struct RoundHalves(Both);

/// The copies of one value, in the order of [`Half::ALL`].
type Both = [Option<Arc<Value>>; Half::ALL.len()];

impl RoundHalves {
    pub(super) fn get(&self, half: Half) -> Option<Arc<Value>> {
        self.0[index(half)].clone()
    }

    pub(super) fn put(&mut self, half: Half, made: Option<Arc<Value>>) {
        self.0[index(half)] = made;
    }
}

impl HalfValues {
    pub(super) fn get(&self, chunk: ChunkId, half: Half) -> Option<Arc<Value>> {
        self.0.get(&chunk)?[index(half)].clone()
    }

    pub(super) fn keep(&mut self, chunk: ChunkId, half: Half, made: &Arc<Value>) {
        self.0.entry(chunk).or_default()[index(half)] = Some(Arc::clone(made));
    }

    /// Drops the copies of a chunk whose value changes.
    pub(super) fn forget(&mut self, chunk: ChunkId) {
        self.0.remove(&chunk);
    }

    /// Drops copies without readers; true when there were any.
    pub(super) fn give_up_unread(&mut self) -> bool {
        let mut is_any = false;
        self.0.retain(|_, both| {
            for one in &mut *both {
                // Readers hold counts; a count of one is ours.
                is_any |= one.take_if(|made| Arc::strong_count(made) == 1).is_some();
            }
            both.iter().any(Option::is_some)
        });
        is_any
    }
}

fn index(half: Half) -> usize {
    usize::from(half == Half::ALL[1])
}
