//! PyTorch on the same device: a sum, then its fused optimizer, beside our kernels.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::KERNEL;
use crate::commands::kernels::{Args, Kernel};
use crate::report::{Outcome, Report, announce};

const SCRIPT: &str = include_str!("../../../../peers/torch_cuda.py");

/// Which of our rules it has.
const RULES: [Kernel; 2] = [Kernel::Adam, Kernel::Adamw];

/// Runs it, adds its lines, and says of ours how much faster they are; without it one line says why.
pub(super) fn beside(report: &mut Report, python: &Path, args: &Args, gradients: &[u32]) {
    let merged = run(python, args, gradients, |line| merge(report, line));
    if let Err(why) = merged {
        let why = format!("left out: {why:#}");
        report.push(Outcome::new("torch").with("verdict", why.as_str()).without_ratio(&why));
    }
}

/// Hands each line of its output on as soon as it is there.
fn run(python: &Path, args: &Args, gradients: &[u32], mut take: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let rules = RULES.into_iter().filter(|rule| args.rule.contains(rule)).map(crate::job::word).collect::<Vec<_>>();
    if rules.is_empty() {
        bail!("it has none of these rules; expected adam or adamw among them");
    }
    let counts: Vec<String> = gradients.iter().map(u32::to_string).collect();
    announce("torch");
    let mut child = Command::new(python)
        .args(["-c", SCRIPT, "--rule", &rules.join(","), "--gradients", &counts.join(",")])
        .args(["--elements", &args.elements.to_string(), "--iterations", &args.iterations.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} cannot be started", python.display()))?;
    let (lines, mut errors) = (child.stdout.take().expect("it was piped"), child.stderr.take().expect("it was piped"));
    let words = std::thread::spawn(move || {
        let mut words = Vec::new();
        errors.read_to_end(&mut words).map(|_| words).unwrap_or_default()
    });
    let mut refused = Ok(());
    for line in BufReader::new(lines).lines() {
        let line = line.context("it wrote something that is no text")?;
        if refused.is_ok() && !line.trim().is_empty() {
            refused = take(&line);
        }
    }
    let status = child.wait().context("its end")?;
    let words = words.join().unwrap_or_default();
    if !status.success() {
        let words = String::from_utf8_lossy(&words);
        let last = words.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("nothing");
        bail!("it ended with {status}; it last said \"{last}\"");
    }
    refused
}

/// Adds a line of its output, and says of ours how much faster they are.
fn merge(report: &mut Report, line: &str) -> Result<()> {
    let fields: Map<String, Value> = serde_json::from_str(line).with_context(|| format!("it wrote \"{line}\""))?;
    let of = |name: &str| fields.get(name).cloned().unwrap_or_default();
    let is_same = |result: &&Outcome| {
        let has = |name| result.field(name) == &of(name);
        result.field("what") == KERNEL && ["rule", "gradients", "gradient_type"].into_iter().all(has)
    };
    let text = |name: &str| of(name).as_str().unwrap_or_default().to_owned();
    let (how, ratio) = match of("is_compiled") {
        Value::Bool(true) => ("torch.compile", "ratio_to_torch_compiled"),
        _ => ("torch", "ratio_to_torch"),
    };
    let name = format!("{how} {}, {} {}", text("rule"), of("gradients"), text("gradient_type"));
    let mut torch = Outcome::new(&name).with("what", "torch");
    for (field, value) in &fields {
        torch = torch.with(if field == "left_out" { "verdict" } else { field.as_str() }, value.clone());
    }
    if torch.field("ratio_to_ceiling").is_null() {
        let why = torch.field("verdict").as_str().unwrap_or("it says none").to_owned();
        torch = torch.without_ratio(&why);
    }
    if let Some(own) = report.results().iter().find(is_same) {
        let rates = (own.field("elements_per_second").as_f64(), of("elements_per_second").as_f64());
        let is_alike = own.field("elements") == &of("elements");
        if let ((Some(ours), Some(others)), true) = (rates, is_alike) {
            report.replace(own.clone().with(ratio, ours / others));
        }
    }
    report.push(torch);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(rule: &str, elements: u64) -> Outcome {
        let named = Outcome::new(rule).with("what", KERNEL).with("rule", rule).with("gradients", 8);
        named.with("gradient_type", "bfloat16").with("elements", elements).with("elements_per_second", 3e9)
    }

    #[test]
    fn a_torch_result_is_merged_into_the_same_case() {
        let line = |rule: &str| {
            format!(
                "{{\"rule\": \"{rule}\", \"gradients\": 8, \"gradient_type\": \"bfloat16\", \"elements\": 7, \
                 \"elements_per_second\": 1.5e9, \"ratio_to_ceiling\": 0.4}}"
            )
        };
        let mut report = Report::new("kernels", Value::Null, &[]);
        for ours in [ours("sgd", 7), ours("adam", 7), ours("adamw", 6)] {
            report.push(ours);
        }
        for rule in ["adam", "adamw"] {
            merge(&mut report, &line(rule)).expect("it is a line of JSON");
        }
        let results = report.results();
        let ratios: Vec<Option<f64>> = results.iter().map(|one| one.field("ratio_to_torch").as_f64()).collect();
        // Another rule, the same, one of another length; then what torch says of itself.
        assert_eq!(ratios, [None, Some(2.0), None, None, None]);
        assert_eq!(results[3].name(), "torch adam, 8 bfloat16");
        let refused = merge(&mut report, "what is this").expect_err("it is no JSON");
        assert!(format!("{refused:#}").contains("it wrote \"what is this\""), "{refused:#}");
    }
}
