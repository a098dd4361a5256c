//! Values that trainers have as halves: each element rounded once, in half the bytes.
//!
//! A half of a value is made when somebody is to be sent it, and everybody who asks for that version and type from
//! then on gets the same one. The pool keeps it as long as the value is the chunk's: the first write to the value, or
//! its successor, gives it up. It lies in a lease of the pool like a version that is still being read, and those that
//! nobody reads are memory to spare: whatever finds no lease, be it an update, a gradient that lands, a sum or another
//! half, has the pool give all of them up, of every chunk, and tries once more. One that was given up so is made again,
//! with the same bits, when somebody asks for it.
//!
//! An answer that finds no lease waits, as one that waits for a version does, and as long as an update waits for memory
//! no half is made: what comes back is the update's first.
//!
//! The budget has one version for each trainer to read. Who has a frame's value whole and as both halves, or pulls
//! again before it has let go, holds more than that, as does a reader that keeps views: then updates, and those who
//! ask for halves, wait for what it holds, and end with their time if it holds on.
//!
//! Nothing of it is in the journal, in a checkpoint or on an accelerator: they know the value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::chunk::Waiter;
use super::reply::{NOBODY, Refusal};
use super::serving::{Context, Lack, Serving, value_entry};
use crate::dtype::Half;
use crate::ids::{ChunkId, PeerId};
use crate::memory::Value;
use crate::wire::Entry;

/// The halves that were made of the values at hand, by chunk.
#[derive(Default)]
pub(super) struct Halves(BTreeMap<ChunkId, Both>);

/// Those of one value, in the order of [`Half::ALL`].
type Both = [Option<Arc<Value>>; Half::ALL.len()];

fn index(half: Half) -> usize {
    usize::from(half == Half::ALL[1])
}

/// The halves of one value that somebody is about to be sent.
#[derive(Default)]
pub(super) struct MadeHalves(Both);

impl MadeHalves {
    pub(super) fn get(&self, half: Half) -> Option<Arc<Value>> {
        self.0[index(half)].clone()
    }
}

impl Halves {
    fn get(&self, chunk: ChunkId, half: Half) -> Option<Arc<Value>> {
        self.0.get(&chunk)?[index(half)].clone()
    }

    fn keep(&mut self, chunk: ChunkId, half: Half, made: &Arc<Value>) {
        self.0.entry(chunk).or_default()[index(half)] = Some(Arc::clone(made));
    }

    /// The value of a chunk is another one from here on.
    pub(super) fn forget(&mut self, chunk: ChunkId) {
        self.0.remove(&chunk);
    }

    /// Gives up those that nobody reads; whether there were any.
    pub(super) fn give_up_unread(&mut self) -> bool {
        let mut is_any = false;
        self.0.retain(|_, both| {
            for one in &mut *both {
                // Who reads it holds a count; a count of one is ours.
                is_any |= one.take_if(|made| Arc::strong_count(made) == 1).is_some();
            }
            both.iter().any(Option::is_some)
        });
        is_any
    }
}

impl Serving {
    /// Only the value of a dense parameter of float32 is had as halves.
    #[inline]
    pub(super) fn check_half(&self, place: usize, entry: &Entry) -> Result<(), Refusal> {
        match entry.half {
            None => Ok(()),
            Some(half) => self.check_has_halves(place, half),
        }
    }

    #[cold]
    fn check_has_halves(&self, place: usize, half: Half) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[place];
        let name = self.table.held(chunk.id).name();
        let element_type = chunk.element_type;
        if chunk.bucket().is_some() {
            return Err(Refusal::invalid(format!(
                "parameter \"{name}\" is sparse: its rows were asked for as {half}, expected {element_type}"
            )));
        }
        if element_type.has_halves() {
            return Ok(());
        }
        Err(Refusal::invalid(format!(
            "parameter \"{name}\": its value was asked for as {half}, expected {element_type}; only values of float32 \
             are had as halves"
        )))
    }

    /// The value as somebody wants it. A half that is not there is made, if there is a lease that no update waits for.
    fn value_as(&self, cx: &mut Context<'_>, place: usize, half: Option<Half>) -> Option<Arc<Value>> {
        let chunk = &self.table.chunks[place];
        let Some(half) = half else { return Some(chunk.value()) };
        if let Some(made) = cx.pool.halves.get(chunk.id, half) {
            return Some(made);
        }
        if self.lacks(Lack::Memory) {
            return None;
        }
        let bytes = chunk.bytes / 2;
        let mut made = Value::new(cx.pool.take(bytes).ok()?, bytes);
        cx.kernels.halve(half, chunk.value_bytes(), made.bytes_mut());
        let made = Arc::new(made);
        cx.pool.halves.keep(chunk.id, half, &made);
        Some(made)
    }

    /// The halves that those in a round wait for, as far as they can be made.
    pub(super) fn halves_of_round(&self, cx: &mut Context<'_>, place: usize) -> MadeHalves {
        let waiting = self.table.chunks[place].round.contributions().iter().filter(|one| one.since.is_some());
        let mut made = MadeHalves::default();
        for half in waiting.filter_map(|one| one.half) {
            if made.get(half).is_none() {
                made.0[index(half)] = self.value_as(cx, place, Some(half));
            }
        }
        made
    }

    /// Sends the value to who wants it, as it is wanted. Without a lease for a half it waits for one.
    pub(super) fn send_value(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        if waiter.peer == NOBODY {
            return;
        }
        match self.value_as(cx, place, waiter.half) {
            Some(value) => {
                let entry = value_entry(&self.table.chunks[place], waiter.half);
                cx.replies.value(waiter.peer, &waiter.head, entry, value);
            }
            None => self.wait_for_memory(place, waiter),
        }
    }

    /// Has an answer wait until a lease comes back.
    pub(super) fn wait_for_memory(&mut self, place: usize, waiter: Waiter) {
        self.table.chunks[place].waiters.push(waiter);
        self.starved.insert(place);
        self.note_waits(place);
    }

    /// Gives up the waits for halves of somebody who is gone, so that none is made for nobody.
    pub(super) fn forget_wanted_halves(&mut self, peer: PeerId) {
        for place in 0..self.table.chunks.len() {
            let waiters = &mut self.table.chunks[place].waiters;
            let before = waiters.len();
            waiters.retain(|waiter| waiter.peer != peer || waiter.half.is_none());
            if waiters.len() < before {
                self.note_waits(place);
            }
        }
    }

    /// Tries again to send what there was no lease for; whether something was sent.
    pub(super) fn answer_starved(&mut self, cx: &mut Context<'_>) -> bool {
        let starved: BTreeSet<usize> = std::mem::take(&mut self.starved);
        for place in &starved {
            self.answer_waiters(cx, *place);
            self.note_waits(*place);
        }
        starved.iter().any(|place| !self.starved.contains(place))
    }

    /// What an answer has waited for that is due and has no memory.
    pub(super) fn starved_text(&self, place: usize, waiter: &Waiter) -> Option<String> {
        let chunk = &self.table.chunks[place];
        let half = waiter.half.filter(|_| waiter.version <= chunk.version)?;
        Some(format!(
            "parameter \"{}\" chunk {}: its value as {half} waits for memory that readers hold",
            self.table.held(chunk.id).name(),
            chunk.id.chunk
        ))
    }
}
