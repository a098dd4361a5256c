//! Faults of a simulation: what goes wrong, and when. A plan is drawn from the seed.

use std::time::Duration;

use pserver_core::prng::Prng;
use serde::{Deserialize, Serialize};

use crate::job::{SimJob, SimReturn};
use crate::network::UNNOTICED_MAX;

/// Nanoseconds in which most initialisations end.
const EARLY: u64 = 100_000_000;

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
    /// The next changes of the store of coordination fail: they do not happen, or their answers are lost.
    FailStore {
        is_done: bool,
        #[serde(default = "once")]
        times: u32,
    },
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
    /// A trainer computes its next step for a time.
    SlowStep { trainer: u32, time: Duration },
    /// An operator orders a shard to a server.
    MoveShard { server: u16, shard: u16, to: u16 },
    /// Another process takes a trainer's rank, while the one that had it stands still for a time and then goes on.
    ReplaceTrainer { trainer: u32, time: Duration },
}

impl SimFault {
    /// How long it keeps processes from each other.
    pub(crate) fn apart(self) -> Duration {
        match self {
            Self::Block { time, .. }
            | Self::KillTrainer { time, .. }
            | Self::KillServer { time, .. }
            | Self::KillAtDisk { time, .. }
            | Self::SlowDisk { time, .. }
            | Self::PauseServer { time, .. }
            | Self::ReplaceServer { time, .. }
            | Self::JumpClock { time, .. }
            | Self::ReplaceTrainer { time, .. } => time,
            Self::LoseHost { time, .. } | Self::LoseHostAtDisk { time, .. } => time.max(UNNOTICED_MAX),
            Self::FailDisk { .. } => Duration::from_millis(500),
            // No process joins meanwhile.
            Self::FailStore { times, .. } => Duration::from_secs(times.into()),
            Self::Cut { .. } | Self::Cancel { .. } | Self::SlowStep { .. } | Self::MoveShard { .. } => Duration::ZERO,
        }
    }
}

/// A fault and its time after the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlannedFault {
    pub(crate) at: Duration,
    pub(crate) fault: SimFault,
}

fn once() -> u32 {
    1
}

/// Draws the faults of a simulation.
pub(crate) fn draw(prng: &mut Prng, job: &SimJob) -> Vec<PlannedFault> {
    // A seed in eight is without faults, and shows that nothing else goes wrong.
    let count = if prng.below(8) == 0 { 0 } else { 1 + prng.below(12) };
    let pause = match job.returns {
        SimReturn::SecondRun { after, .. } => u64::try_from(after.as_nanos()).expect("it is short"),
        _ => 0,
    };
    let span = u64::from(job.trainers) * job.steps * 15_000_000 + 500_000_000 + pause;
    let mut plan = Vec::new();
    for _ in 0..count {
        // Some hit the initialisation.
        let within = if prng.below(8) == 0 { span.min(EARLY) } else { span };
        let at = Duration::from_nanos(prng.below(within));
        plan.push(PlannedFault { at, fault: draw_one(prng, job) });
        if prng.below(3) == 0 {
            // The recovery from the first one is disturbed.
            plan.push(PlannedFault { at: soon_after(prng, at), fault: draw_one(prng, job) });
        }
    }
    if job.shares_disk {
        draw_moves(prng, job, span, &mut plan);
    }
    if job.stores_apart && 0 < count && prng.below(2) == 0 {
        draw_refusals(prng, job, Duration::from_nanos(prng.clone().below(span)), &mut plan);
    }
    plan.sort_by_key(|planned| planned.at);
    plan
}

fn soon_after(prng: &mut Prng, at: Duration) -> Duration {
    let limit = prng.choose(&[5_000_000, 50_000_000, 500_000_000]);
    at + Duration::from_nanos(prng.below(limit))
}

/// Draws moves of shards, which are beside the faults and not in their place. Some shards are sent on at once.
fn draw_moves(prng: &mut Prng, job: &SimJob, span: u64, plan: &mut Vec<PlannedFault>) {
    let server = |prng: &mut Prng| u16::try_from(prng.below(job.servers.into())).expect("it is small");
    for _ in 0..1 + prng.below(8) {
        let shard = u16::try_from(prng.below(job.shards.into())).expect("it is small");
        let (home, at) = (server(prng), Duration::from_nanos(prng.below(span)));
        plan.push(PlannedFault { at, fault: SimFault::MoveShard { server: home, shard, to: server(prng) } });
        if prng.below(2) == 0 {
            let fault = SimFault::MoveShard { server: home, shard, to: server(prng) };
            plan.push(PlannedFault { at: soon_after(prng, at), fault });
        }
    }
}

/// Draws a time in which the coordinator's store refuses changes while trainers are replaced, the coordinator's restart
/// after it, and trainers that are replaced again.
fn draw_refusals(prng: &mut Prng, job: &SimJob, at: Duration, plan: &mut Vec<PlannedFault>) {
    let times = prng.choose(&[1, 3, 200]);
    plan.push(PlannedFault { at, fault: SimFault::FailStore { is_done: false, times } });
    let (killed, time) = (soon_after(prng, at), Duration::from_millis(1 + prng.below(100)));
    for (trainer, begins) in (0..job.trainers).flat_map(|trainer| [(trainer, at), (trainer, killed + time)]) {
        let time = Duration::from_millis(1 + prng.below(20));
        let choices = [SimFault::KillTrainer { trainer, time }, SimFault::ReplaceTrainer { trainer, time }];
        plan.push(PlannedFault { at: soon_after(prng, begins), fault: prng.choose(&choices) });
    }
    plan.push(PlannedFault { at: killed, fault: SimFault::KillServer { server: 0, time } });
}

fn draw_one(prng: &mut Prng, job: &SimJob) -> SimFault {
    let server = u16::try_from(prng.below(job.servers.into())).expect("it is small");
    let trainer = u32::try_from(prng.below(job.trainers.into())).expect("it is small");
    let time = Duration::from_millis(1 + prng.below(prng.clone().choose(&[20, 400, 4000, 4000])));
    let operations = 1 + prng.below(40);
    let hosts = u64::from(job.servers) + u64::from(job.trainers);
    let host = |prng: &mut Prng| u16::try_from(prng.below(hosts)).expect("it is small");
    match prng.below(16) {
        0..3 => SimFault::Cut { choice: prng.next() },
        3 => SimFault::Block { from: host(prng), to: host(prng), time },
        4..6 => SimFault::KillTrainer { trainer, time },
        6..8 => SimFault::KillServer { server, time },
        8 if job.is_synced => SimFault::LoseHost { server, time },
        9 if job.is_synced => SimFault::LoseHostAtDisk { server, operations, time },
        8..10 => SimFault::KillAtDisk { server, operations, time },
        10 if job.stores_apart && prng.below(2) == 0 => SimFault::FailStore { is_done: prng.below(2) == 0, times: 1 },
        10 => SimFault::FailDisk { server, operations },
        11 => SimFault::SlowDisk { server, slowness: 1 + prng.below(300), time },
        12 => match prng.below(4) {
            0 | 1 => SimFault::ReplaceServer { server, time },
            2 => SimFault::PauseServer { server, time },
            _ => SimFault::JumpClock { server, time },
        },
        13 => SimFault::ReplaceTrainer { trainer, time },
        14 => SimFault::SlowStep { trainer, time },
        _ => SimFault::Cancel { trainer },
    }
}
