//! Survey of a job's checkpoint directory: its contents, and what a start of its servers would do.

use super::coordinator::RecalledJob;
use super::needs::Holdings;
use super::snapshot;
use crate::checkpoint::inspect::{InspectCause, InspectReport, InspectVerdict};
use crate::checkpoint::owner::{self, check_directory, server_directory, shard_directory};
use crate::checkpoint::{CoordinatorState, ShardIdentity, Storage, identity_of, load_latest};
use crate::error::Failure;

/// Looks at every server of a job below the root, or at `only` one: a line or two for each shard, and one verdict.
///
/// # Errors
/// When the storage refuses to list, or there is no server below the root.
pub fn survey(storage: &dyn Storage, only: Option<u16>) -> Result<InspectReport, Failure> {
    let mut report = InspectReport::default();
    let mut servers = numbers(storage, "", owner::SERVER)?;
    servers.retain(|server| only.is_none_or(|only| only == *server));
    if servers.is_empty() {
        return Err(Failure::call("no directory of a server is in it; expected one such as server-0"));
    }
    let job = if servers.contains(&0) { coordinator(storage, &mut report) } else { None };
    let placed = job.as_ref().map(|job| job.shards.as_slice()).unwrap_or_default();
    for (server, shards) in (0..).zip(placed).filter(|(server, _)| only.is_none_or(|only| only == *server)) {
        let found = numbers(storage, &server_directory(server), owner::SHARD)?;
        for shard in (0..*shards).filter(|shard| !found.contains(shard)) {
            let lost = format!("{}: {LOST}", shard_directory(server, shard));
            report.fault(InspectVerdict::Refused, InspectCause::Missing, lost);
        }
    }
    let mut shards = 0;
    for server in &servers {
        let server = *server;
        if let Err(failure) = check_directory(storage, server) {
            report.fault(InspectVerdict::Refused, InspectCause::Misplaced, failure.to_string());
        }
        for shard in numbers(storage, &server_directory(server), owner::SHARD)? {
            shards += 1;
            let directory = shard_directory(server, shard);
            let identity = identity_of(storage, &directory).map(|found| ShardIdentity {
                job: job.as_ref().map_or(found.job, |job| job.epoch.0),
                server,
                shard,
            });
            if report.shard(storage, &directory, identity.as_ref()) && !placed.is_empty() {
                report.fault(InspectVerdict::Refused, InspectCause::Missing, format!("{directory}: {LOST}"));
            }
        }
    }
    report.is_about(format!("{} of {}", counted(shards, "shard"), counted(servers.len(), "server")));
    Ok(report)
}

/// A server other than 0 that has parameters below the root. Without a coordinator's file a server 0 would begin
/// another job beside them.
///
/// # Errors
/// When the storage refuses to list.
pub fn server_without_job(storage: &dyn Storage) -> Result<Option<u16>, Failure> {
    let servers = numbers(storage, "", owner::SERVER)?;
    let mut others = servers.into_iter().filter(|server| *server > 0);
    Ok(others.find(|server| identity_of(storage, &shard_directory(*server, 0)).is_some()))
}

/// The holdings of every server and shard of a job below the root, from their newest checkpoints, which are read whole;
/// none of a job that is not initialised.
///
/// # Errors
/// When the storage refuses to list, or a shard has no checkpoint that can be read: it is named.
pub fn survey_holdings(storage: &dyn Storage) -> Result<Vec<Vec<Holdings>>, Failure> {
    let job = CoordinatorState::recall(storage)?.map(|state| RecalledJob::decode(&state.bytes)).transpose()?;
    let placed = job.map(|job| job.shards).unwrap_or_default();
    let lacks = |directory: &str| {
        let servers = placed.len();
        Failure::call(format!("{directory:?} has no checkpoint; expected one of each shard of {servers} servers"))
    };
    let of_shard = |server, shard| {
        let directory = shard_directory(server, shard);
        holdings_of(storage, &directory)?.ok_or_else(|| lacks(&directory))
    };
    (0..).zip(&placed).map(|(server, shards)| (0..*shards).map(|shard| of_shard(server, shard)).collect()).collect()
}

fn holdings_of(storage: &dyn Storage, directory: &str) -> Result<Option<Holdings>, Failure> {
    let (mut held, mut declared) = (Holdings::default(), None);
    let loaded = load_latest(storage, directory, None, &mut |record| {
        let Some(table) = &declared else {
            let (table, trainers) = snapshot::declared(&record)?;
            (held, declared) = (Holdings::new(trainers), Some(table));
            return Ok(());
        };
        let count = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
        let (bytes, states) = (count(record.value.len()), count(record.states.len()));
        if table.parameters.get(&record.id.parameter).is_some_and(|held| held.rows.is_some()) {
            // Behind the states of their rule stand the rows' ids and the numbers of their last updates.
            let rows = record.states.iter().rev().nth(1).map_or(0, |ids| count(ids.len() / size_of::<u64>()));
            held.add_rows(bytes.checked_div(rows).unwrap_or(0), states.saturating_sub(2), rows, 1);
        } else {
            held.add_chunks(u32::try_from(bytes).unwrap_or(u32::MAX), states, 1);
        }
        Ok(())
    })?;
    Ok(loaded.map(|_| held))
}

/// Verdict for an empty shard directory of an initialised job.
pub const LOST: &str = "the shard's files are gone, and the coordinator's file says that the job's parameters were \
     initialised: bring the directory back, or begin a new job in another one";

/// The job that server 0 resumes; a new one where there is no coordinator's file.
fn coordinator(storage: &dyn Storage, report: &mut InspectReport) -> Option<RecalledJob> {
    let recalled = CoordinatorState::recall(storage).and_then(|state| match state {
        Some(state) => {
            let job = RecalledJob::decode(&state.bytes)?;
            let phase = if job.shards.is_empty() { "not initialised" } else { "initialised" };
            report.note(format!("{state}: job {}, {phase}", job.epoch));
            Ok(job)
        }
        None => {
            match server_without_job(storage)? {
                Some(server) => {
                    let text = format!("there is no coordinator's file, and server {server} has parameters");
                    report.fault(InspectVerdict::Refused, InspectCause::Missing, text);
                }
                None => report.note("there is no coordinator's file: server 0 begins another job".to_owned()),
            }
            Ok(RecalledJob::default())
        }
    });
    let refused = |failure: Failure| {
        let cause = report.cause_in(storage, &server_directory(0), None);
        report.fault(InspectVerdict::Refused, cause, failure.to_string());
    };
    recalled.map_err(refused).ok()
}

/// `1 shard`, `2 shards`.
fn counted(count: usize, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
}

/// The numbers behind `prefix` in the names of a directory, rising.
fn numbers(storage: &dyn Storage, directory: &str, prefix: &str) -> Result<Vec<u16>, Failure> {
    let names = storage.list(directory)?;
    let mut numbers: Vec<u16> = names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}
