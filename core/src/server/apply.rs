//! Application of checked frames: those that change state, live or replayed, and requests.

use super::admission::{no_answer_to, not_initialised};
use super::context::{Context, Origin};
use super::frames::{Leases, ReceivedFrame, decode};
use super::reply::{Refusal, Replies};
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::ids::PeerId;
use crate::time::Now;
use crate::wire::{Kind, PushMessage};

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

    /// The serving state, and the resources for a frame of this origin or, without a peer, for the shard's
    /// own work. None before the parameters are initialised.
    pub(super) fn serving<'a>(
        &'a mut self,
        now: Now,
        peer: Option<PeerId>,
        origin: Origin,
        replies: &'a mut Replies,
    ) -> Option<(&'a mut Serving, Context<'a>)> {
        let Phase::Serving(serving) = &mut self.phase else { return None };
        let (kernels, pool, trainers) = (self.kernels.as_mut(), &mut self.pool, &self.trainers);
        let (device, replay_left) = (self.device.as_mut(), self.replays);
        let (nanos, counters) = (self.nanos, self.counters.as_ref());
        let journal = &mut self.journal;
        Some((
            serving,
            Context {
                now,
                nanos,
                counters,
                kernels,
                pool,
                device,
                replies,
                trainers,
                peer,
                origin,
                journal,
                replay_left,
            },
        ))
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
}
