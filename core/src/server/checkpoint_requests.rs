//! Requests of trainers for a checkpoint, which the shard's caller takes and answers when the checkpoint is on disk.

use super::admission::not_initialised;
use super::output::{CheckpointRequest, ServerOutput};
use super::reply::{Refusal, Replies};
use super::shard::{Phase, Shard};
use crate::error::Failure;
use crate::ids::{NO_TRAINER, PeerId};
use crate::limits::CHECKPOINT_REQUESTS_MAX;
use crate::wire::answer::{Answer, Checkpointed};
use crate::wire::{ControlAnswer, ErrorCode, Frame, Kind};

impl Shard {
    /// Takes the requests for a checkpoint that came since the last call.
    pub fn take_checkpoint_requests(&mut self) -> Vec<CheckpointRequest> {
        std::mem::take(&mut self.asked)
    }

    /// Answers a request for a checkpoint, unless its connection is closed.
    pub fn answer_checkpoint(
        &mut self,
        request: &CheckpointRequest,
        outcome: Result<Checkpointed, Failure>,
        out: &mut Vec<ServerOutput>,
    ) {
        let (mut replies, CheckpointRequest { peer, head }) = (Replies::default(), request);
        match outcome {
            Ok(done) => {
                let message = ControlAnswer { answer: Some(Answer::Checkpointed(done)), ends_by_itself: false };
                replies.whole(*peer, Frame::with_control(head.answer(Kind::Answer), &message));
            }
            Err(failure) => replies.error(*peer, head, &Refusal::invalid(failure.to_string())),
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    pub(super) fn note_checkpoint_request(&mut self, peer: PeerId, frame: &Frame) -> Result<(), Refusal> {
        if frame.head.trainer == NO_TRAINER {
            return Err(Refusal::invalid("a reader may pull and nothing else"));
        }
        if !matches!(self.phase, Phase::Serving(_)) {
            return Err(not_initialised());
        }
        if self.asked.len() >= CHECKPOINT_REQUESTS_MAX {
            return Err(Refusal::new(ErrorCode::Busy, "too many requests for a checkpoint wait"));
        }
        self.asked.push(CheckpointRequest { peer, head: frame.head });
        Ok(())
    }
}
