//! `psbench compare`: two reports, result by result, with an interval of confidence around each change.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use pserver_core::prng::Prng;
use serde_json::{Value, json};

use crate::report::{Column, Outcome, Report, SCHEMA_VERSION, plain, scaled};
use crate::statistics::{median, percentile};

/// The options of `psbench compare`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The earlier report, written with --json.
    old: PathBuf,
    /// The later report; standard input without it.
    new: Option<PathBuf>,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    scaled("old_latency_us_p50", "old[us]", 1.0, 1),
    scaled("new_latency_us_p50", "new[us]", 1.0, 1),
    scaled("change", "new/old", 1.0, 3),
    scaled("change_low", "low", 1.0, 3),
    scaled("change_high", "high", 1.0, 3),
    plain("verdict", "verdict"),
    scaled("old_ratio_to_ceiling", "old ratio", 1.0, 3),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    plain("wrong", "#wrong"),
];
/// Times that samples are drawn anew for an interval.
const DRAWS: u32 = 2000;

pub(crate) fn run(args: &Args) -> Result<Report> {
    let old = read(&args.old)?;
    let new = match &args.new {
        Some(path) => read(path)?,
        None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("reading standard input")?;
            parse(&text).context("standard input")?
        }
    };
    let parameters = json!({ "old": old["start"], "new": new["start"] });
    let mut report = Report::new("compare", parameters, COLUMNS);
    let (earlier, later) = (results(&old)?, results(&new)?);
    let mut apart = Vec::new();
    for result in later {
        let same = earlier.iter().find(|one| differing((&old, one), (&new, result)).is_none());
        match same.map(|one| compare(one, result)).transpose()? {
            Some(Ok(outcome)) => report.push(outcome),
            Some(Err(why)) => apart.push(left_out(result, why)),
            None => apart.push(left_out(result, &unmatched((&old, earlier), (&new, result)))),
        }
    }
    for result in earlier.iter().filter(|one| later.iter().all(|other| other["name"] != one["name"])) {
        apart.push(left_out(result, "it is in the earlier report only"));
    }
    if report.results().is_empty() {
        let first = apart.first().map(|one| format!(": {:?} is {}", one.name(), one.field("verdict")));
        bail!("the reports have no result with a time in common{}", first.unwrap_or_default());
    }
    apart.into_iter().for_each(|result| report.push(result));
    Ok(report)
}

/// A result that is compared with none.
fn left_out(result: &Value, why: &str) -> Outcome {
    let name = result["name"].as_str().unwrap_or("a result without a name");
    Outcome::new(name).with("verdict", format!("not compared: {why}")).without_ratio(why)
}

/// Why a later result has no counterpart.
fn unmatched((old, earlier): (&Value, &[Value]), (new, later): (&Value, &Value)) -> String {
    let differing = |one: &Value| {
        let field = differing((old, one), (new, later))?;
        Some(format!("it has {field} {}, and then {}", said(old, one, field), said(new, later, field)))
    };
    let mut named = earlier.iter().filter(|one| one["name"] == later["name"]);
    named.find_map(differing).unwrap_or_else(|| "it is in the later report only".to_owned())
}

fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Value> {
    let report: Value = serde_json::from_str(text).context("not JSON; expected what psbench --json writes")?;
    let version = &report["start"]["schema_version"];
    let is_known = version.as_u64().is_some_and(|version| (1..=SCHEMA_VERSION.into()).contains(&version));
    ensure!(is_known, "schema_version {version}; expected 1 to {SCHEMA_VERSION}");
    Ok(report)
}

fn results(report: &Value) -> Result<&[Value]> {
    report["end"]["results"].as_array().map(Vec::as_slice).context("end.results is missing")
}

/// The first field in which two results, each of its report, are not the same measurement.
fn differing(old: (&Value, &Value), new: (&Value, &Value)) -> Option<&'static str> {
    const SAME: [&str; 26] = [
        "name",
        "poll",
        "buffers",
        "rule",
        "mode",
        "dtype",
        "values",
        "transport",
        "trainers",
        "servers",
        "shards",
        "chunk_bytes",
        "pin",
        "elements",
        "axis",
        "checks",
        "staleness",
        "rdma_device",
        "rate_rounds_per_second",
        "local",
        "rows",
        "width",
        "batch",
        "exponent",
        "missed",
        "streams",
    ];
    // A setting that reports of the first version do not have counts as equal.
    const SAME_WHERE_SAID: [&str; 1] = ["carried_by"];
    let differs = |field: &&str| said(old.0, old.1, field) != said(new.0, new.1, field);
    let is_said = |field: &&str| !said(old.0, old.1, field).is_null() && !said(new.0, new.1, field).is_null();
    let known = SAME_WHERE_SAID.into_iter().filter(is_said);
    SAME.into_iter().chain(known).find(differs)
}

/// The settings of a result: its own, or those of its report.
fn said<'a>(report: &'a Value, result: &'a Value, field: &str) -> &'a Value {
    let own = &result[field];
    if own.is_null() { &report["start"]["parameters"][field] } else { own }
}

/// How one measurement changed, or why nobody can say, such as of what a doctor finds.
fn compare(old: &Value, new: &Value) -> Result<Result<Outcome, &'static str>> {
    let name = new["name"].as_str().context("a result without a name")?;
    let samples = |result: &Value| -> Option<Vec<f64>> {
        let blocks = result["block_latency_us"].as_array().map(|all| all.iter().filter_map(Value::as_f64).collect());
        let samples = blocks.or_else(|| result["latency_us_p50"].as_f64().map(|one| vec![one]));
        samples.filter(|all| !all.is_empty())
    };
    let (Some(before), Some(after)) = (samples(old), samples(new)) else { return Ok(Err("it has no time")) };
    let (low, high) = interval(&before, &after);
    let verdict = match (low, high) {
        (_, high) if high < 1.0 => "faster",
        (low, _) if low > 1.0 => "slower",
        _ => "no difference seen",
    };
    let outcome = Outcome::new(name)
        .with("old_latency_us_p50", median(&before))
        .with("new_latency_us_p50", median(&after))
        .with("change", median(&after) / median(&before))
        .with("change_low", low)
        .with("change_high", high)
        .with("verdict", verdict)
        .with("old_ratio_to_ceiling", old["ratio_to_ceiling"].clone())
        .with("wrong", old["wrong"].as_u64().unwrap_or(0) + new["wrong"].as_u64().unwrap_or(0));
    Ok(Ok(match new["ratio_to_ceiling"].as_f64() {
        Some(ratio) => outcome.with("ratio_to_ceiling", ratio),
        None => outcome.without_ratio(new["no_ratio_because"].as_str().unwrap_or("the later report has none")),
    }))
}

/// Where the quotient of the medians lies with a confidence of 95 %: blocks are drawn anew from those that were
/// measured, again and again, and always the same ones, so that a comparison can be repeated.
fn interval(before: &[f64], after: &[f64]) -> (f64, f64) {
    let mut prng = Prng(1);
    let mut draw = |samples: &[f64]| {
        let chosen: Vec<f64> = samples.iter().map(|_| prng.choose(samples)).collect();
        median(&chosen)
    };
    let quotients: Vec<f64> = (0..DRAWS).map(|_| draw(after) / draw(before)).collect();
    (percentile(&quotients, 0.025), percentile(&quotients, 0.975))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_as_fast_is_faster() {
        let before: Vec<f64> = (0..9).map(|index| 10.0 + f64::from(index) * 0.1).collect();
        let after: Vec<f64> = before.iter().map(|one| one / 2.0).collect();
        let (low, high) = interval(&before, &after);
        assert!(0.48 < low && high < 0.52, "{low} to {high}");
    }

    #[test]
    fn noise_is_no_difference() {
        let before = [10.0, 11.0, 9.0, 10.5, 9.5, 10.2, 9.8, 11.2, 8.9];
        let after = [10.1, 10.9, 9.1, 10.4, 9.6, 10.3, 9.7, 11.0, 9.0];
        let (low, high) = interval(&before, &after);
        assert!(low <= 1.0 && 1.0 <= high, "{low} to {high}");
    }
}
