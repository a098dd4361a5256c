//! Descriptors of this process: the soft limit is 1,024 where nobody has set it, and a job of some hundred trainers
//! needs more.

use anyhow::{Result, ensure};
use pserver_core::wire::Scheme;
use pserver_node::settings::Settings;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors of a server besides those of trainers: standard streams, threads, journals, checkpoints, other servers.
const SERVER_DESCRIPTORS: u64 = 64;
/// Descriptors of each shard besides those of trainers.
const SHARD_DESCRIPTORS: u64 = 16;
/// Descriptors of a connection over TCP.
const TCP_CONNECTION_DESCRIPTORS: u64 = 1;
/// Descriptors of a connection through shared memory: its socket, its rings and the peer's memory.
const SHARED_CONNECTION_DESCRIPTORS: u64 = 4;

/// The descriptors that server 0 needs, which has the most connections: over TCP, and through shared memory.
pub(crate) fn needs(trainers: u64, shards: u64) -> [u64; 2] {
    let of = |each| need(trainers, shards, shards + 1, each);
    [TCP_CONNECTION_DESCRIPTORS, SHARED_CONNECTION_DESCRIPTORS].map(of)
}

fn need(trainers: u64, shards: u64, lanes: u64, each: u64) -> u64 {
    SERVER_DESCRIPTORS + shards * SHARD_DESCRIPTORS + trainers * lanes * each
}

/// Raises the soft limit to the hard one. Returns the soft limit as it was, for programs that this process starts: some
/// can use no descriptor from 1,024 on. No number is no limit.
pub(crate) fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    // Where the system refuses, the limit stays, and what needs more says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    limit.current
}

/// Sets the soft limit back, for the program that this process becomes.
pub(crate) fn restore(soft: Option<u64>) {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: soft, ..limit });
}

/// Refuses a server whose trainers alone need more descriptors than there are. Returns a warning where they are enough
/// for connections over TCP and not for those through shared memory.
///
/// # Errors
/// Names the need, the limit and how to raise it.
pub(crate) fn check(settings: &Settings) -> Result<Option<String>> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(None) };
    let (trainers, shards) = (u64::from(settings.job.trainers), u64::from(settings.shards));
    let lanes = shards + u64::from(settings.index == 0);
    let need = |each| need(trainers, shards, lanes, each);
    let text = |need| {
        format!(
            "{trainers} trainers with {lanes} connections each need {need} descriptors of this server; found a limit \
             of {limit}, expected a higher one (ulimit -Hn, LimitNOFILE of systemd), fewer trainers or fewer shards"
        )
    };
    let least = need(TCP_CONNECTION_DESCRIPTORS);
    ensure!(least <= limit, "{}", text(least));
    let shares_memory = matches!(settings.addresses.bind.scheme, Scheme::Auto | Scheme::Shm);
    let most = need(SHARED_CONNECTION_DESCRIPTORS);
    Ok((shares_memory && limit < most).then(|| format!("if all trainers run on this machine, {}", text(most))))
}
