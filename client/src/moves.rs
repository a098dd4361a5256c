//! Moves of shards that an operator asks for.

use pserver_core::client::RequestBody;
use pserver_core::error::Failure;
use pserver_core::ids::{ServerIndex, ShardId};
use pserver_core::wire::MoveRequest;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;

use super::Client;
use super::control::{answer, unexpected};

impl Client {
    /// Moves a shard to another server, and returns when that server serves it. Training goes on: calls that need the
    /// shard wait meanwhile. Both servers need the same checkpoint directory. It may take ten times the deadline of a
    /// call.
    ///
    /// # Errors
    /// When there is no such shard or server, one of the servers keeps no journal, the parameters are not initialised,
    /// the server cannot take the shard up, which then goes back, or another move of the shard comes in between.
    pub fn move_shard(&self, shard: ShardId, to: ServerIndex) -> Result<(), Failure> {
        let mut state = self.lock()?;
        let times = state.disk_times();
        let what = format!("moving {shard} to server {to}");
        let mut ask = |request| {
            let (lane, frame) = state.engine.question(request);
            let call = state.question(&what, times, vec![(lane, frame, RequestBody::default())]);
            answer(&state.finish_answer(call)?)
        };
        let seen = match ask(Request::Observe(true))? {
            Answer::Joined(joined) => joined.map.map_or(0, |map| map.version),
            other => return Err(unexpected(&other)),
        };
        match ask(Request::Move(MoveRequest { shard: Some(shard.into()), to: to.0.into(), seen }))? {
            Answer::Done(_) => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}
