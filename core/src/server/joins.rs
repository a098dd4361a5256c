//! Connections that become a trainer's: the welcome, and the incarnations that it ends.

use super::context::Origin;
use super::frames::decode;
use super::membership::PeerOrigin;
use super::output::ServerOutput;
use super::presence::TrainerLife;
use super::reply::{Refusal, Replies};
use super::shard::{Shard, ShardPeer};
use crate::ids::{JobRun, NO_TRAINER, PeerId, RunNumber};
use crate::limits::TRAINERS_MAX;
use crate::time::Now;
use crate::wire::{Frame, Head, HelloMessage, Kind, WelcomeMessage};

impl Shard {
    /// Accepts a connection; a newer incarnation of a trainer closes the connections of older ones.
    pub(super) fn welcome(
        &mut self,
        now: Now,
        peer: PeerId,
        frame: &Frame,
        replies: &mut Replies,
        out: &mut Vec<ServerOutput>,
    ) -> Result<(), Refusal> {
        let head = &frame.head;
        let hello: HelloMessage = decode(&frame.control)?;
        let (life, run) = (TrainerLife::of(head), run_of(&hello));
        if life.trainer != NO_TRAINER {
            self.record_join(life, run, frame)?;
            self.join(life, run, (now, Origin::Unlogged), replies)?;
            let older = |one: &ShardPeer| one.life.is_some_and(|other| other.trainer == life.trainer);
            out.extend(self.peers.iter().filter(|(_, one)| older(one)).map(|(id, _)| ServerOutput::Close(*id)));
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            tracing::debug!(origin = peer.origin, trainer = %life.trainer, "welcome");
            peer.life = Some(life);
            if life.trainer != NO_TRAINER {
                let HelloMessage { host, process, .. } = hello;
                let origin = PeerOrigin { address: peer.origin.clone(), host, process };
                self.trainers.connected(life.trainer, origin, peer.transport.clone());
            }
        }
        let message = WelcomeMessage { generation: self.generation().0 };
        let answer = Head { epoch: self.options.epoch, term: self.options.term, ..head.answer(Kind::Welcome) };
        replies.whole(peer, Frame::with_control(answer, &message));
        Ok(())
    }

    /// Journals a newer incarnation, with its run, before it is acknowledged, so that a restarted server still refuses
    /// the older ones, even when the newer one never pushes.
    fn record_join(&mut self, life: TrainerLife, run: JobRun, hello: &Frame) -> Result<(), Refusal> {
        let is_newer = self.trainers.incarnation(life.trainer) < life.incarnation
            || (self.trainers.incarnation(life.trainer) == life.incarnation && self.trainers.run_of(life) < run);
        if life.trainer.0 < TRAINERS_MAX && is_newer {
            self.journal.append(hello, std::iter::empty())?;
        }
        Ok(())
    }

    /// Records a trainer's incarnation and its run, and drops the partial pushes of older ones, which nobody will
    /// finish.
    pub(super) fn join(
        &mut self,
        life: TrainerLife,
        run: JobRun,
        (now, origin): (Now, Origin),
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        self.trainers.note_incarnation(life.trainer, life.incarnation)?;
        self.trainers.note_run(life.trainer, run);
        self.changes += 1;
        if let Some((serving, mut cx)) = self.serving(now, None, origin, replies) {
            serving.forget_earlier_lives(&mut cx, life);
        }
        Ok(())
    }
}

/// The run that the sender of a hello takes part in.
pub(super) fn run_of(hello: &HelloMessage) -> JobRun {
    JobRun { number: RunNumber(hello.run), trainers: hello.run_trainers }
}
