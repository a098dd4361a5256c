//! Values that trainers have as halves: each element rounded once, in half the bytes.
//!
//! A half of a value is made when somebody is to be sent it, at most once for each version and type, and everybody who
//! asks for that gets the same one. It stays beside the value as long as that is the chunk's, and so long as somebody
//! reads it; the first write to the value, or its successor, gives it up. It lies in a lease of the pool like a
//! version that is still being read, which is what the budget has room for: who asks reads it, and nothing else. An
//! update that finds no lease takes those that nobody reads. An answer that finds none waits, as one that waits for a
//! version does.
//!
//! Nothing of it is in the journal, in a checkpoint or on an accelerator: they know the value.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::chunk::{Chunk, Waiter};
use super::pool::Pool;
use super::reply::{NOBODY, Refusal};
use super::serving::{Context, Serving, value_entry};
use crate::dtype::Half;
use crate::error::Failure;
use crate::memory::{Lease, Value};
use crate::port::Kernels;
use crate::wire::Entry;

/// The halves of one version that were made.
#[derive(Default)]
pub(super) struct Halves([Option<Arc<Value>>; 2]);

impl Halves {
    fn place(&mut self, half: Half) -> &mut Option<Arc<Value>> {
        &mut self.0[usize::from(half == Half::Bfloat16)]
    }

    /// The one of this type, if it was made.
    pub(super) fn get(&self, half: Half) -> Option<Arc<Value>> {
        self.0[usize::from(half == Half::Bfloat16)].clone()
    }
}

impl Chunk {
    /// The value as somebody wants it; a half that is not there is made, and needs a lease.
    fn value_as(
        &mut self,
        half: Option<Half>,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
    ) -> Result<Arc<Value>, Failure> {
        let Some(half) = half else { return Ok(self.value()) };
        if let Some(made) = self.halves.as_ref().and_then(|halves| halves.get(half)) {
            return Ok(made);
        }
        let bytes = self.bytes / 2;
        let mut made = Value::new(pool.take(bytes)?, bytes);
        kernels.halve(half, self.value_bytes(), made.bytes_mut());
        let made = Arc::new(made);
        *self.halves.get_or_insert_default().place(half) = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Makes the halves that those in the round wait for, as far as there are leases.
    pub(super) fn make_halves(&mut self, kernels: &mut dyn Kernels, pool: &mut Pool) {
        let waiting = self.round.contributions().iter().filter(|one| one.since.is_some());
        let mut wanted = [false; 2];
        for half in waiting.filter_map(|one| one.half) {
            wanted[usize::from(half == Half::Bfloat16)] = true;
        }
        for (half, is_wanted) in Half::ALL.into_iter().zip(wanted) {
            if is_wanted {
                // Who gets none waits for it, and makes it then.
                let _ = self.value_as(Some(half), kernels, pool);
            }
        }
    }

    /// A lease for the next value, if need be one of the halves that nobody reads.
    pub(super) fn take_next(&mut self, pool: &mut Pool) -> Result<Lease, Failure> {
        pool.take(self.bytes).or_else(|refused| {
            let halves = self.halves.take().ok_or(refused)?;
            drop(halves);
            pool.take(self.bytes)
        })
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

    /// Sends the value to who wants it, as it is wanted. Without a lease for a half it waits for one.
    pub(super) fn send_value(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        if waiter.peer == NOBODY {
            return;
        }
        let chunk = &mut self.table.chunks[place];
        match chunk.value_as(waiter.half, cx.kernels, cx.pool) {
            Ok(value) => cx.replies.value(waiter.peer, &waiter.head, value_entry(chunk, waiter.half), value),
            Err(_) => self.wait_for_memory(place, waiter),
        }
    }

    /// Has an answer wait until a lease comes back.
    pub(super) fn wait_for_memory(&mut self, place: usize, waiter: Waiter) {
        self.table.chunks[place].waiters.push(waiter);
        self.starved.insert(place);
        self.note_waits(place);
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
