//! Pulls, and the answers to all requests that wait for a version.

use super::context::Context;
use super::contribution::Contribution;
use super::initialisation::unknown;
use super::reply::Refusal;
use super::serving::Serving;
use super::states::state_of;
use super::waiters::{RowsRequest, Waiter};
use crate::accumulator::AccumulatorPace;
use crate::ids::{PeerId, Version};
use crate::memory::Lease;
use crate::wire::{Entry, Flags, Frame, Kind};

impl Serving {
    /// Answers a pull, or queues it until its version exists.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        peer: PeerId,
        frame: &Frame,
        body: impl IntoIterator<Item = Lease>,
    ) -> Result<(), Refusal> {
        let slot_indices =
            frame.entries.iter().map(|entry| self.table.slot_index(entry.id).ok_or_else(|| unknown(entry.id)));
        let slot_indices = slot_indices.collect::<Result<Vec<_>, _>>()?;
        if let Some(about) = state_of(frame)? {
            return self.pull_state(cx, peer, frame, (about, body));
        }
        self.check_requests(frame, &slot_indices)?;
        self.check_waiters(peer, frame.entries.len())?;
        let mut body = body.into_iter();
        for (entry, slot_index) in frame.entries.iter().zip(slot_indices) {
            let is_bucket = self.table.chunks[slot_index].bucket().is_some();
            let ids = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let wish = is_bucket.then_some(RowsRequest { ids, bytes: entry.bytes });
            let (version, half) = (self.awaited_version(slot_index, frame, entry), entry.half);
            self.answer_or_wait(cx, slot_index, Waiter { peer, head: frame.head, version, since: cx.now, half, wish });
        }
        Ok(())
    }

    /// The version that an entry of a pull waits for. Without rounds, a pull of the step waits for the trainer's own
    /// gradients that are not in the value yet, such as those on their way to an accelerator.
    fn awaited_version(&self, slot_index: usize, frame: &Frame, entry: &Entry) -> Version {
        let (chunk, trainer) = (&self.table.chunks[slot_index], frame.head.trainer);
        let is_of_step = frame.head.flags.contains(Flags::OF_STEP);
        if !is_of_step || self.flows.of(slot_index).pace == AccumulatorPace::Rounds {
            return Version(entry.round.0);
        }
        let entered = chunk.round.contributors();
        let before = |one: &Contribution| {
            let earlier = chunk.round.all_ahead().iter().filter(|other| other.sending.arrival <= one.sending.arrival);
            entered + earlier.count()
        };
        let open = match chunk.round.contribution(trainer) {
            Some(_) => entered,
            None => chunk.round.ahead(trainer).map_or(0, before),
        };
        Version(entry.round.0.max(chunk.version.0 + open as u64))
    }

    pub(super) fn answer_or_wait(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        if waiter.version <= self.table.chunks[slot_index].version {
            self.answer(cx, slot_index, waiter);
            return;
        }
        self.add_waiter(slot_index, waiter);
        self.note_waits(slot_index);
    }

    pub(super) fn answer_waiters(&mut self, cx: &mut Context<'_>, slot_index: usize) {
        let chunk = &self.table.chunks[slot_index];
        let version = chunk.version;
        if chunk.waiters.is_empty() {
            return;
        }
        let due = self.table.chunks[slot_index].waiters.take_due(version);
        self.note_taken(&due);
        for waiter in due {
            self.answer(cx, slot_index, waiter);
        }
    }

    /// Answers a due request: with rows, with the value, or with an acknowledgement for a push that wants none.
    pub(super) fn answer(&mut self, cx: &mut Context<'_>, slot_index: usize, waiter: Waiter) {
        let wants_value = waiter.head.kind != Kind::Push || waiter.head.flags.contains(Flags::WANT_VALUE);
        match &waiter.wish {
            Some(_) => self.answer_rows(cx, slot_index, waiter, None),
            None if wants_value => self.send_value(cx, slot_index, waiter),
            None => cx.replies.done(waiter.peer, &waiter.head, self.table.chunks[slot_index].version_entry()),
        }
    }
}
