//! Completion queue of many queue pairs: one poll serves all of them, and a pair without completions costs nothing.
//!
//! A completion names its queue pair by number. It goes to that pair's inbox, and the waker of the pair's connection is
//! called. Entries are reserved for each pair, so that a queue cannot overflow.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::checked::{self, leave};
use super::provider::{CompletionKind, WorkCompletion};
use super::reasons::VerbsError;
use super::status::CompletionStatus;
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// Completions per poll.
const POLLED: usize = 32;
/// Queue pairs for which a queue has entries, where the device has so many.
const PAIRS: u32 = 64;

/// A completion queue.
pub(super) struct CompletionQueue {
    queue: NonNull<ibv_cq>,
    state: Mutex<CompletionQueueState>,
    verbs: &'static Verbs,
    /// The channel, declared last: the queue is destroyed before it.
    _owner: Arc<dyn Any + Send + Sync>,
}

struct CompletionQueueState {
    /// Entries that are not reserved.
    free: u32,
    /// By the number of the queue pair.
    inboxes: BTreeMap<u32, PairInbox>,
    polled: [ibv_wc; POLLED],
    /// The error after which nothing completes.
    lost: Option<VerbsError>,
}

#[derive(Default)]
struct PairInbox {
    entries: u32,
    done: Vec<WorkCompletion>,
    waker: Option<Waker>,
}

// SAFETY: a completion queue may be polled and armed from any thread; it is destroyed once, by its last owner.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Entries of a queue for pairs that need so many, on a device with at most `entries_max`.
    pub(super) fn entries(of_pair: u32, entries_max: u32) -> u32 {
        of_pair.saturating_mul(PAIRS).min(entries_max).max(of_pair)
    }

    /// A queue of so many entries, which is destroyed when it is dropped, before its owner.
    pub(super) fn new(
        queue: NonNull<ibv_cq>,
        entries: u32,
        (verbs, owner): (&'static Verbs, Arc<dyn Any + Send + Sync>),
    ) -> Self {
        let inboxes = BTreeMap::new();
        let state = CompletionQueueState { free: entries, inboxes, polled: [ibv_wc::default(); POLLED], lost: None };
        Self { queue, state: Mutex::new(state), verbs, _owner: owner }
    }

    pub(super) fn pointer(&self) -> NonNull<ibv_cq> {
        self.queue
    }

    /// Reserves entries; whether there are so many.
    pub(super) fn reserve(&self, entries: u32) -> bool {
        let mut state = self.lock();
        let left = state.free.checked_sub(entries);
        state.free = left.unwrap_or(state.free);
        left.is_some()
    }

    /// Gives reserved entries back, of a pair that was not made.
    pub(super) fn release(&self, entries: u32) {
        self.lock().free += entries;
    }

    /// Adds a pair, for which these entries were reserved.
    pub(super) fn add(&self, pair: u32, entries: u32) {
        self.lock().inboxes.insert(pair, PairInbox { entries, ..PairInbox::default() });
    }

    /// Removes a pair that was destroyed, with its completions: its number may be another's by and by.
    pub(super) fn remove(&self, pair: u32) {
        // Some providers leave the completions of a destroyed pair in the queue.
        leave(self.collect().map(drop));
        let mut state = self.lock();
        if let Some(inbox) = state.inboxes.remove(&pair) {
            state.free += inbox.entries;
        }
    }

    /// Sets the waker that is called when a pair has completions.
    pub(super) fn set_waker(&self, pair: u32, waker: &Waker) {
        if let Some(inbox) = self.lock().inboxes.get_mut(&pair) {
            inbox.waker = Some(waker.clone());
        }
    }

    /// Moves completions from the device to the inboxes; whether there were some.
    pub(super) fn collect(&self) -> Result<bool, VerbsError> {
        self.lock().collect(self.queue)
    }

    /// Appends the completions of a pair that were moved to its inbox.
    pub(super) fn take(&self, pair: u32, done: &mut Vec<WorkCompletion>) -> Result<(), VerbsError> {
        let mut state = self.lock();
        if let Some(inbox) = state.inboxes.get_mut(&pair) {
            done.append(&mut inbox.done);
        }
        state.lost.clone().map_or(Ok(()), Err)
    }

    /// The next completion notifies the channel.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        checked::arm(self.queue)
    }

    fn lock(&self) -> MutexGuard<'_, CompletionQueueState> {
        // Every operation leaves the state consistent, so a panic elsewhere does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CompletionQueueState {
    fn collect(&mut self, queue: NonNull<ibv_cq>) -> Result<bool, VerbsError> {
        let mut has_some = false;
        loop {
            let polled = match &self.lost {
                None => checked::poll(queue, &mut self.polled),
                Some(lost) => Err(lost.clone()),
            };
            let count = match polled {
                Ok(count) => count,
                Err(fault) => {
                    if self.lost.replace(fault.clone()).is_none() {
                        self.inboxes.values().filter_map(|inbox| inbox.waker.as_ref()).for_each(Waker::wake_by_ref);
                    }
                    return Err(fault);
                }
            };
            for done in &self.polled[..count] {
                // A pair that was destroyed has no inbox.
                let Some(inbox) = self.inboxes.get_mut(&done.qp_num) else { continue };
                inbox.done.push(WorkCompletion::of(done));
                inbox.waker.iter().for_each(Waker::wake_by_ref);
            }
            has_some |= count > 0;
            if count < POLLED {
                return Ok(has_some);
            }
        }
    }
}

impl WorkCompletion {
    /// A completion as libibverbs tells it.
    fn of(done: &ibv_wc) -> Self {
        let id = done.wr_id;
        if done.status != IBV_WC_SUCCESS {
            return Self { id, result: Err(CompletionStatus(done.status)) };
        }
        let result = match done.opcode {
            IBV_WC_RECV => CompletionKind::Message(done.byte_len),
            IBV_WC_RECV_RDMA_WITH_IMM => {
                // SAFETY: a completion of this kind has immediate data, and either form of it is 32 bits.
                CompletionKind::Immediate(u32::from_be(unsafe { done.__bindgen_anon_1.imm_data }))
            }
            _ => CompletionKind::Posted,
        };
        Self { id, result: Ok(result) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        leave(checked::close_queue(self.verbs, self.queue));
    }
}
