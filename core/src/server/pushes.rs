//! Pushes: a new gradient goes through the [`flow`](super::flow) of its chunk, and a duplicate is answered. An early
//! gradient waits unacknowledged, at most one per trainer and chunk.

use std::sync::Arc;

use super::call::CallId;
use super::compiled_flows::Sender;
use super::context::{Context, Origin};
use super::contribution::{Contribution, PushHeader};
use super::frames::Admitted;
use super::group::SlotIndex;
use super::serving::Serving;
use super::verdict::PushVerdict;
use crate::accumulator::AccumulatorPace;
use crate::ids::{Round, Version};
use crate::memory::Lease;
use crate::wire::{Flags, Frame, PushMessage};

impl Serving {
    /// Applies a checked push: `admitted` has its entries, `body` one lease per payload.
    pub(super) fn push(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        message: &PushMessage,
        admitted: &[Admitted],
        body: impl IntoIterator<Item = Lease>,
    ) {
        assert_eq!(frame.entries.len(), admitted.len(), "the frame was checked");
        let (trainer, call) = (frame.head.trainer, CallId::of(&frame.head));
        let (is_logged, arrival) = (cx.origin != Origin::Unlogged, self.pushes.count);
        self.pushes.count += 1;
        cx.counters.gradients.add(frame.entries.len() as u64);
        let PushMessage { rate, is_void, settings, is_pass } = message.clone();
        let (nanos, peer, head) = (cx.nanos, cx.peer, frame.head);
        let header = PushHeader { call, rate, settings, is_void, is_pass, is_logged, arrival, nanos, peer, head };
        let sending = self.pushes.share(header, self.job.trainers as usize);
        self.rejoin(cx, &frame.head);
        let mut body = body.into_iter();
        for (entry, admitted) in frame.entries.iter().zip(admitted) {
            let lease = (entry.bytes > 0).then(|| body.next().expect("there is a lease for every payload"));
            let slot_index = admitted.slot_index;
            let contribution = Contribution {
                trainer,
                round: entry.round,
                element_type: entry.element_type,
                bytes: entry.bytes,
                gradient: lease,
                rows: Vec::new(),
                is_early_part: false,
                half: entry.half,
                since: cx.peer.map(|_| cx.now),
                sending: Arc::clone(&sending),
            };
            if self.table.chunks[slot_index].bucket().is_some() {
                self.push_rows(cx, *admitted, contribution);
            } else {
                self.push_entry(cx, *admitted, contribution);
            }
        }
        self.advance_received(cx);
    }

    /// Whether the gradients of a push come to the journal with their rounds alone: each round counts them in memory of
    /// this process, and its record is written before the push is answered.
    pub(super) fn is_recorded_with_rounds(&self, frame: &Frame, admitted: &[Admitted]) -> bool {
        let wants_value = frame.head.flags.contains(Flags::WANT_VALUE);
        frame.entries.iter().zip(admitted).all(|(entry, admitted)| {
            let slot_index = admitted.slot_index;
            let chunk = &self.table.chunks[slot_index];
            let is_merged = chunk.bucket().is_none()
                && chunk.on_device.is_none()
                && self.flows.sender(slot_index) != Sender::First
                && self.flows.of(slot_index).pace == AccumulatorPace::Rounds;
            let is_last = || {
                let is_open = chunk.decided == 0 && entry.round.0 == chunk.version.0 + 1;
                let has_come = |trainer| trainer == frame.head.trainer || chunk.round.contribution(trainer).is_some();
                let is_enough = || self.flows.of(slot_index).count as usize <= chunk.round.contributors() + 1;
                let completes = || is_enough() || self.awaited(slot_index).all(has_come);
                chunk.group.is_none() && admitted.is_new && is_open && completes()
            };
            is_merged && (wants_value || is_last())
        })
    }

    /// Takes a new gradient in, and answers a duplicate.
    #[inline]
    pub(super) fn push_entry(&mut self, cx: &mut Context<'_>, admitted: Admitted, contribution: Contribution) {
        let slot_index = admitted.slot_index;
        if !admitted.is_new && self.pushes.received.contains(&slot_index) {
            // The frame names the chunk twice.
            self.advance_received(cx);
        }
        if cx.is_before_restored(&self.table.chunks[slot_index]) {
            // The checkpoint has it, or carries it over.
        } else if admitted.is_new && !self.is_closed(slot_index, contribution.round) {
            self.pushes.received.push(slot_index);
            self.take_in(cx, slot_index, Some(contribution));
        } else {
            self.push_again(cx, slot_index, contribution);
        }
    }

    /// Whether a round is over, or decided with its update stalled. An earlier entry of the same frame may have ended
    /// it: when every trainer has left, the first gradient of one that still pushes completes a group; and the last
    /// gradient completes a round for which another trainer has sent the total.
    fn is_closed(&self, slot_index: SlotIndex, round: Round) -> bool {
        let chunk = &self.table.chunks[slot_index];
        let is_past = round.0 <= chunk.version.0 + u64::from(chunk.decided);
        is_past && self.flows.of(slot_index).pace == AccumulatorPace::Rounds
    }

    /// Answers a duplicate push, or redirects its pending answer to the sending connection.
    fn push_again(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, again: Contribution) {
        cx.counters.duplicates.add(1);
        let PushHeader { head, peer, .. } = *again.sending;
        let known = self.verdict(slot_index, &head, again.round).expect("the entry was checked");
        let chunk = &mut self.table.chunks[slot_index];
        match known {
            PushVerdict::New => {
                self.pushes.received.push(slot_index);
                return self.take_in(cx, slot_index, Some(again));
            }
            PushVerdict::Applied => self.answer_applied(cx, slot_index, &again),
            // Every part but the last is answered on receipt.
            PushVerdict::Contributed | PushVerdict::Waits if again.is_early_part => {
                cx.replies.done(peer, &head, chunk.version_entry());
            }
            PushVerdict::Contributed => {
                let entry = chunk.open_entry();
                let entered = chunk.round.contribution_mut(head.trainer).expect("it is in the round");
                entered.answer_to(&again);
                cx.acknowledge(entered, entry);
            }
            PushVerdict::Waits => {
                let waiting = chunk.round.ahead_mut(head.trainer).expect("it waits");
                waiting.answer_to(&again);
                waiting.since = peer.map(|_| cx.now);
            }
            // The answer follows when the decided round closes.
            PushVerdict::Late => {
                if let Some(waiter) = again.waiter(Version(again.round.0), cx.now) {
                    self.answer_or_wait(cx, slot_index, waiter);
                }
            }
        }
        self.waits.note(slot_index, &mut self.table.chunks[slot_index]);
    }

    /// Acknowledges a push that the value contains.
    fn answer_applied(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, again: &Contribution) {
        if let Some(waiter) = again.waiter(Version(0), cx.now) {
            self.answer(cx, slot_index, waiter);
        }
    }
}
