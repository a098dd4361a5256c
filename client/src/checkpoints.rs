//! Checkpoints that a trainer asks for.

use std::time::Duration;

use pserver_core::client::{LaneId, RequestBody};
use pserver_core::error::Failure;
use pserver_core::ids::{ShardId, Version};
use pserver_core::time::Now;
use pserver_core::wire::answer::{Answer, Checkpointed};
use pserver_core::wire::request::Request;
use pserver_core::wire::{ControlRequest, Frame, Head, Kind};

use super::control::{answer, unexpected};
use super::{Client, ClientState};

/// A call that waits for disks may take as many times the deadline of others: all parameters are written.
const DEADLINES: u32 = 10;

/// A checkpoint of a job: one of every shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCheckpoint {
    /// The fewest updates that a part of a parameter had when the checkpoint began.
    pub version: Version,
    /// Its bytes.
    pub bytes: u64,
    /// The checkpoint of each shard, in the order of servers and shards.
    pub shards: Vec<Checkpointed>,
}

impl ClientState {
    /// When a call that begins now and waits for disks ends at the latest, and after how long.
    pub(super) fn disk_times(&self) -> (Now, Duration) {
        let limit = self.options.deadline * DEADLINES;
        (self.engine.now() + limit, limit)
    }
}

impl Client {
    /// Takes a checkpoint now, and returns when it is on the disks of all servers. It has everything in it that was
    /// acknowledged to this trainer before the call. Training may go on meanwhile. It may take ten times the deadline
    /// of a call.
    ///
    /// # Errors
    /// When a server has no checkpoint directory, its disk refuses, or it does not answer.
    pub fn checkpoint(&self) -> Result<JobCheckpoint, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        let times = state.disk_times();
        let message = ControlRequest { request: Some(Request::Checkpoint(true)) };
        let lanes: Vec<(ShardId, LaneId)> = state.ready_job().lanes().collect();
        let mut calls = Vec::with_capacity(lanes.len());
        for (place, lane) in lanes {
            let what = format!("taking a checkpoint of server {} shard {}", place.server, place.shard);
            let frame = Frame::with_control(Head::new(Kind::Control), &message);
            calls.push(state.question(&what, times, vec![(lane, frame, RequestBody::default())]));
        }
        // Every result is taken, also behind a failure.
        let answers: Vec<Result<Vec<u8>, Failure>> = calls.into_iter().map(|call| state.finish_answer(call)).collect();
        let mut shards = Vec::with_capacity(answers.len());
        for given in answers {
            match answer(&given?)? {
                Answer::Checkpointed(one) => shards.push(one),
                other => return Err(unexpected(&other)),
            }
        }
        let version = Version(shards.iter().filter_map(|one| one.version).min().unwrap_or_default());
        Ok(JobCheckpoint { version, bytes: shards.iter().map(|one| one.bytes).sum(), shards })
    }
}
