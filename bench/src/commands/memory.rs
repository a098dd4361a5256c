//! `psbench memory`: what servers hold in memory, beside what they must.

use anyhow::{Result, ensure};
use serde_json::json;

use super::pushpull::RunArgs;
use crate::alternation::{RoundPace, Team, TeamServers};
use crate::job::{BenchJob, TransportName, word};
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::sizes;

/// The options of `psbench memory`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of all parameters together; several sizes with commas between them.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = "64MiB")]
    bytes: Vec<u64>,
    #[command(flatten)]
    work: RunArgs,
}

/// Rounds after which memory no longer grows.
const ROUNDS: u32 = 20;

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    scaled("empty_bytes", "empty[MB]", 1e6, 1),
    scaled("kept_bytes", "kept[MB]", 1e6, 1),
    scaled("gradient_bytes", "gradients[MB]", 1e6, 1),
    scaled("initialised_bytes", "initialised[MB]", 1e6, 1),
    scaled("resident_bytes", "resident[MB]", 1e6, 1),
    scaled("share", "resident/due", 1.0, 3),
    scaled("overhead_bytes_per_parameter", "B/param", 1.0, 0),
    plain("wrong", "#wrong"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    ensure!(args.work.connect.is_none(), "--connect: the memory of that server is not seen from here; expected none");
    ensure!(
        args.work.transport != TransportName::Loopback,
        "--transport loopback: the servers' memory is the trainers' too; expected tcp or shm"
    );
    let jobs = args.work.jobs(&args.bytes)?;
    let parameters = json!({ "bytes": args.bytes, "rounds": ROUNDS, "job": jobs.first() });
    let mut report = Report::new("memory", parameters, COLUMNS);
    report.expect(jobs.len(), "jobs");
    for job in &jobs {
        announce(&format!("memory {} of {}", word(job.transport), job.title()));
        let result = measure(job, args.work.spoil, &mut report)?;
        report.push(result);
        report.measured(1);
    }
    Ok(report)
}

fn measure(job: &BenchJob, spoil: bool, report: &mut Report) -> Result<Outcome> {
    let mut team = Team::ours(job, TeamServers::Own)?;
    let empty = team.empty().resident_bytes;
    let initialised = team.server_usage()?.resident_bytes;
    let block = team.block(ROUNDS, RoundPace { rate: None, spoil })?;
    report.travelled(&team.route(job)?);
    let resident = block.server.unwrap_or_default().resident_bytes;
    let states = job.rule()?.map_or(0, |rule| rule.states().len());
    let kept = job.bytes * (1 + u64::try_from(states)?);
    // Every trainer's gradient may have to wait for the others' until its round is complete.
    let gradients = job.gradient_bytes() * u64::from(job.trainers);
    let due = empty + kept + gradients;
    let overhead = initialised.saturating_sub(empty + kept) as f64 / f64::from(job.parameters);
    Ok(Outcome::new(&format!("{} {}", team.name, job.title()))
        .with("parameters", job.parameters)
        .with("trainers", job.trainers)
        .with("rule", word(job.rule))
        .with("empty_bytes", empty)
        .with("kept_bytes", kept)
        .with("gradient_bytes", gradients)
        .with("initialised_bytes", initialised)
        .with("resident_bytes", resident)
        .with("share", resident as f64 / due as f64)
        .with("ratio_to_ceiling", due as f64 / resident as f64)
        .with("overhead_bytes_per_parameter", overhead)
        .with("wrong", block.wrong))
}
