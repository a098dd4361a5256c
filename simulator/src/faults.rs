//! Faults of a simulation: what goes wrong, and when. A plan is drawn from the seed.

use std::time::Duration;

use pserver_core::prng::Prng;
use serde::{Deserialize, Serialize};

use crate::job::SimJob;

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SimFault {
    /// A connection ends; the two sides notice at different times.
    Cut { choice: u64 },
    /// Frames from one host do not reach another; numbers beyond the servers' are hosts of trainers.
    Block { from: u16, to: u16, time: Duration },
    /// A trainer's process is killed, and started again after a time.
    KillTrainer { trainer: u32, time: Duration },
    /// A server's process is killed, and started again after a time.
    KillServer { server: u16, time: Duration },
    /// A server's process is killed during one of its next operations of the disk.
    KillAtDisk { server: u16, operations: u64, time: Duration },
    /// A server's host is lost with everything that was not synced, and comes back after a time.
    LoseHost { server: u16, time: Duration },
    /// The same, during one of the next operations of the disk.
    LoseHostAtDisk { server: u16, operations: u64, time: Duration },
    /// One of the next operations of a server's disk fails.
    FailDisk { server: u16, operations: u64 },
    /// The next change of the store of coordination fails: it does not happen, or its answer is lost.
    FailStore { is_done: bool },
    /// Syncs of a server's disk take longer for a time.
    SlowDisk { server: u16, slowness: u64, time: Duration },
    /// A process stands still for a time; its clock does not.
    PauseServer { server: u16, time: Duration },
    /// Another process takes a server's place and directory, while the one that had it stands still for a time.
    ReplaceServer { server: u16, time: Duration },
    /// A server's clock jumps ahead.
    JumpClock { server: u16, time: Duration },
    /// A trainer cancels its call.
    Cancel { trainer: u32 },
    /// An operator orders a shard to a server.
    MoveShard { server: u16, shard: u16, to: u16 },
    /// Another process takes a trainer's rank, while the one that had it stands still for a time and then goes on.
    ReplaceTrainer { trainer: u32, time: Duration },
}

/// A fault and its time after the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlannedFault {
    pub(crate) at: Duration,
    pub(crate) fault: SimFault,
}

/// Draws the faults of a simulation.
pub(crate) fn draw(prng: &mut Prng, job: &SimJob) -> Vec<PlannedFault> {
    // A seed in eight is without faults, and shows that nothing else goes wrong.
    let count = if prng.below(8) == 0 { 0 } else { 1 + prng.below(12) };
    let span = u64::from(job.trainers) * job.steps * 15_000_000 + 500_000_000;
    let mut plan: Vec<_> = (0..count)
        .map(|_| PlannedFault { at: Duration::from_nanos(prng.below(span)), fault: draw_one(prng, job) })
        .collect();
    if job.shares_disk {
        // Beside the faults, not in their place.
        let server = |prng: &mut Prng| u16::try_from(prng.below(job.servers.into())).expect("it is small");
        let moves = 1 + prng.below(8);
        plan.extend((0..moves).map(|_| {
            let shard = u16::try_from(prng.below(job.shards.into())).expect("it is small");
            let fault = SimFault::MoveShard { server: server(prng), shard, to: server(prng) };
            PlannedFault { at: Duration::from_nanos(prng.below(span)), fault }
        }));
    }
    plan.sort_by_key(|planned| planned.at);
    plan
}

fn draw_one(prng: &mut Prng, job: &SimJob) -> SimFault {
    let server = u16::try_from(prng.below(job.servers.into())).expect("it is small");
    let trainer = u32::try_from(prng.below(job.trainers.into())).expect("it is small");
    let time = Duration::from_millis(1 + prng.below(prng.clone().choose(&[20, 400, 4000])));
    let operations = 1 + prng.below(40);
    let hosts = u64::from(job.servers) + u64::from(job.trainers);
    let host = |prng: &mut Prng| u16::try_from(prng.below(hosts)).expect("it is small");
    match prng.below(15) {
        0..3 => SimFault::Cut { choice: prng.next() },
        3 => SimFault::Block { from: host(prng), to: host(prng), time },
        4..6 => SimFault::KillTrainer { trainer, time },
        6..8 => SimFault::KillServer { server, time },
        8 if job.is_synced => SimFault::LoseHost { server, time },
        9 if job.is_synced => SimFault::LoseHostAtDisk { server, operations, time },
        8..10 => SimFault::KillAtDisk { server, operations, time },
        10 if job.stores_apart && prng.below(2) == 0 => SimFault::FailStore { is_done: prng.below(2) == 0 },
        10 => SimFault::FailDisk { server, operations },
        11 => SimFault::SlowDisk { server, slowness: 1 + prng.below(300), time },
        12 => match prng.below(4) {
            0 | 1 => SimFault::ReplaceServer { server, time },
            2 => SimFault::PauseServer { server, time },
            _ => SimFault::JumpClock { server, time },
        },
        13 => SimFault::ReplaceTrainer { trainer, time },
        _ => SimFault::Cancel { trainer },
    }
}
