//! Application of checked frames: those that change state, live or replayed, and requests.

use super::admission::{no_answer_to, not_initialised};
use super::frames::{Leases, ReceivedFrame, decode};
use super::reply::{Refusal, Replies};
use super::shard::{Phase, Shard};
use crate::ids::PeerId;
use crate::time::Now;
use crate::wire::answer::Answer;
use crate::wire::request::Request;
use crate::wire::{ControlAnswer, ControlRequest, Frame, Kind, PushMessage};

impl Shard {
    /// Applies a checked frame that changes state.
    pub(super) fn apply(
        &mut self,
        arrived: &ReceivedFrame<'_>,
        leases: Leases,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { now, peer, origin, frame, admitted } = *arrived;
        self.changes += 1;
        match frame.head.kind {
            Kind::Init => return self.init(peer, frame, leases, replies),
            Kind::Finish => return self.finish(peer, frame, replies),
            _ => {}
        }
        let Some((serving, mut cx)) = self.serving(now, peer, origin, replies) else { return Err(not_initialised()) };
        if peer.is_none() {
            // Replay has no other peers to serve, so one turn may replay everything.
            cx.replay_left = u64::MAX;
        }
        match frame.head.kind {
            Kind::Push => {
                let message = decode::<PushMessage>(&frame.control)?;
                serving.push(&mut cx, frame, &message, admitted, leases);
            }
            Kind::Set => serving.set(&mut cx, frame, leases),
            Kind::Leave => return serving.leave(&mut cx, &frame.head),
            kind => return Err(no_answer_to(kind)),
        }
        Ok(())
    }

    /// Answers a frame that changes no state: a pull, or a question.
    pub(super) fn answer_request(
        &mut self,
        peer: PeerId,
        arrived: &ReceivedFrame<'_>,
        leases: Leases,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { now, origin, frame, .. } = *arrived;
        match frame.head.kind {
            Kind::Pull => match self.serving(now, Some(peer), origin, replies) {
                Some((serving, mut cx)) => serving.pull(&mut cx, peer, frame, leases),
                None => Err(not_initialised()),
            },
            Kind::Control => self.answer_question(now, peer, frame, replies),
            kind => Err(no_answer_to(kind)),
        }
    }

    /// Answers a trainer's question about what its calls wait for, or notes its request for a checkpoint.
    fn answer_question(&mut self, now: Now, peer: PeerId, frame: &Frame, replies: &mut Replies) -> Result<(), Refusal> {
        match decode::<ControlRequest>(&frame.control)?.request {
            Some(Request::Waiting(_)) => {}
            Some(Request::Checkpoint(_)) => return self.note_checkpoint_request(peer, frame),
            _ => return Err(Refusal::invalid("a shard has no answer to a question for the coordinator")),
        }
        let waits_for = match &self.phase {
            Phase::Serving(serving) => serving.describe_wait(now, &self.trainers, peer).unwrap_or_default(),
            Phase::Empty | Phase::Filling(_) => String::new(),
        };
        let ends_by_itself = !waits_for.is_empty();
        let message = ControlAnswer { answer: Some(Answer::Waiting(waits_for)), ends_by_itself };
        replies.whole(peer, Frame::with_control(frame.head.answer(Kind::Answer), &message));
        Ok(())
    }
}
