//! A whole cluster of the parameter server in one thread: servers, the coordinator, trainers, network, disks and
//! clocks, over the sessions of `core` and `node`. Everything that happens follows from a seed.
//!
//! A simulation begins with a job that the seed draws (`job`), trains it under faults, ends when every
//! trainer has finished its steps, starts all servers again, and looks at every value once more. An oracle
//! (`oracle`) checks each value that a trainer gets:
//!
//! - every gradient is in it at most once, and none that was never sent;
//! - a gradient that was acknowledged before the value was asked for is in it (mode sync: it is of whole rounds);
//! - versions of a chunk never go back;
//! - after the last fault the job ends within a bounded time.
//!
//! Read in this order: `job`, `faults`, `oracle`, `cluster` (the queue of events), then `server`, `trainer` and
//! `client` (processes), `network`, `disk`, `machine` and `time` (what is around them).
//!
//! Not here: threads, sockets, and the client library's blocking calls; a trainer composes its calls of
//! [`pserver_core::client`].

mod client;
mod cluster;
mod disk;
mod faults;
mod job;
mod machine;
mod network;
mod oracle;
mod server;
mod time;
mod trainer;

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use pserver_core::prng::{Prng, mix};
use serde::{Deserialize, Serialize};

pub use cluster::Sightings;

use cluster::ClusterOutcome;
use faults::PlannedFault;
use job::SimJob;

/// The outcome of one seed.
#[derive(Debug, Default)]
pub struct SeedOutcome {
    /// Events of all its clusters.
    pub events: u64,
    /// How often each thing happened.
    pub seen: Sightings,
    /// A digest of all events in order.
    pub digest: u64,
    /// The first failure.
    pub failure: Option<CaseFailure>,
}

/// One cluster: its job and its faults. As JSON it can be kept, and outlives changes of what seeds draw.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SimCase {
    /// The seed of delays and other choices.
    seed: u64,
    job: SimJob,
    faults: Vec<PlannedFault>,
}

/// A failed cluster, with as few faults as show the failure.
#[derive(Debug)]
pub struct CaseFailure {
    /// The cluster.
    pub case: SimCase,
    /// The failure and its time.
    pub text: String,
}

/// Runs clusters of a seed until there were so many events, or one has failed.
///
/// # Errors
/// When a job cannot be described; failures of a cluster are in the outcome.
pub fn run_seed(seed: u64, events: u64) -> Result<SeedOutcome> {
    let mut outcome = SeedOutcome { digest: seed, ..SeedOutcome::default() };
    let mut number = 0;
    while outcome.events < events && outcome.failure.is_none() {
        let case = SimCase::draw(mix(mix(seed) ^ number));
        number += 1;
        let found = case.outcome()?;
        outcome.events += found.events;
        outcome.digest = mix(outcome.digest ^ found.digest);
        for (what, count) in &found.seen {
            *outcome.seen.entry(what).or_default() += count;
        }
        outcome.failure = found.failure.map(|text| case.shrink(text)).transpose()?;
    }
    Ok(outcome)
}

impl SimCase {
    fn draw(seed: u64) -> Self {
        let mut prng = Prng(seed);
        let job = SimJob::draw(&mut prng);
        let faults = faults::draw(&mut prng, &job);
        Self { seed, job, faults }
    }

    fn outcome(&self) -> Result<ClusterOutcome> {
        // Only the panic's text is used of what the cluster had.
        let run = AssertUnwindSafe(|| cluster::run(self.seed, &self.job, &self.faults));
        catch_unwind(run).unwrap_or_else(|panic| {
            let failure = Some(format!("a panic: {}", pserver_client::reason(panic.as_ref())));
            Ok(ClusterOutcome { failure, ..ClusterOutcome::default() })
        })
    }

    /// Runs it, and says what was wrong.
    ///
    /// # Errors
    /// As [`run_seed`].
    pub fn run(&self) -> Result<Option<String>> {
        Ok(self.outcome()?.failure)
    }

    /// Leaves out one fault after another, as long as the cluster fails without it.
    fn shrink(mut self, mut text: String) -> Result<CaseFailure> {
        let mut at = 0;
        while at < self.faults.len() {
            let mut fewer = self.clone();
            fewer.faults.remove(at);
            match fewer.run()? {
                Some(failure) => (self, text) = (fewer, failure),
                None => at += 1,
            }
        }
        Ok(CaseFailure { case: self, text })
    }
}
