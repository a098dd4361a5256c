//! Models that must be equal to the bit: trained over verbs, over TCP, with a disturbed wire, and on this machine.
//! And what must not happen at all: a copy of what the card can read and write where it lies.
//!
//! Not here: what each program says of itself ([`super::report`]).

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::soft_roce::furnish::folder;
use crate::soft_roce::report::Report;
use crate::soft_roce::{figures, plan};
use crate::workspace::{Tally, Workspace};

/// The optimizer with which the digits are learned everywhere; two machines learn them by gradient descent.
const OPTIMIZER: &str = "adam";

/// Whether every job that the server's machine served came to the same model.
pub(super) fn models_agree(server: &Report) -> Tally {
    let models: Vec<_> = plan::SERVER.programs().map(|program| model(server, program.name)).collect();
    equal("the two machines", &models)
}

/// Whether the digits came to the same model over verbs, over TCP, and here, where another processor reckons.
pub(super) fn digits_agree(workspace: &Workspace, pserver: &Path, report: &Report) -> Result<Tally> {
    let there = ["verbs", "tcp"].map(|way| model(report, &format!("digits-{way}")));
    let here = learned_here(workspace, pserver)?;
    Ok(equal("digits over verbs, over TCP and here", &[&there[..], &[Some(here)]].concat()))
}

/// Whether the card moved all that trainers had registered.
pub(super) fn nothing_is_copied(report: &Report) -> Tally {
    let copied = figures::copied(report);
    say!("soft-roce: bytes of registered memory that were copied: {copied:?}");
    Tally::of_step(copied == Some(0.0))
}

/// The digest that a program says its model has.
fn model(report: &Report, program: &str) -> Option<String> {
    report.run(program)?.said("model").last().map(str::to_owned)
}

/// The training of the guest (`bin/digits`), on this machine and over TCP.
fn learned_here(workspace: &Workspace, pserver: &Path) -> Result<String> {
    let models = folder(workspace)?.join("digits");
    let mut quickstart = Command::new(pserver);
    quickstart.args(["quickstart", "--transport", "tcp", "--optimizer", OPTIMIZER, "--trainers", "2", "--epochs", "1"]);
    let status = quickstart.args(["--json", "--model-dir"]).arg(&models).status().context("cannot start pserver")?;
    ensure!(status.success(), "the digits on this machine: {status}");
    let model = File::open(models.join("digits.safetensors")).context("the digits were not saved")?;
    let sum = Command::new("sha256sum").stdin(Stdio::from(model)).output().context("cannot start sha256sum")?;
    Ok(String::from_utf8_lossy(&sum.stdout).trim().to_owned())
}

/// One check: all are there, and are the same.
fn equal(what: &str, models: &[Option<String>]) -> Tally {
    say!("soft-roce: models of {what}: {models:?}");
    Tally::of_step(models.first().is_some_and(Option::is_some) && models.iter().all(|model| *model == models[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_equal_when_all_are_there_and_are_the_same() {
        let one = |text: &str| Some(text.to_owned());
        let check = |models: &[Option<String>], expected| {
            assert_eq!(equal("a test", models), Tally::of_step(expected), "{models:?}");
        };
        check(&[one("a"), one("a"), one("a")], true);
        check(&[one("a"), one("b"), one("a")], false);
        check(&[one("a"), None], false);
        check(&[None, None], false);
        check(&[], false);
    }

    #[test]
    fn a_copy_is_found_and_so_is_a_silence() {
        let check = |json: &str, expected: bool| {
            let mut report = Report::default();
            let text =
                format!("@@ pserver-guest begin pushpull-verbs\n{json}\n@@ pserver-guest end pushpull-verbs 5 0");
            text.lines().for_each(|line| report.take(line));
            assert_eq!(nothing_is_copied(&report), Tally::of_step(expected), "{json}");
        };
        check("\"results\":[{\"copies\": 0,\"wrong\": 0}]", true);
        check("\"results\":[{\"copies\": 1048576,\"wrong\": 0}]", false);
        check("killed", false);
    }

    #[test]
    fn a_model_is_the_last_that_its_program_speaks_of() {
        let mut report = Report::default();
        let text = "@@ pserver-guest begin serve-tcp\nmodel a  -\n@@ pserver-guest end serve-tcp 5 0";
        text.lines().for_each(|line| report.take(line));
        assert_eq!(model(&report, "serve-tcp").as_deref(), Some("a  -"));
        assert_eq!(models_agree(&report), Tally::of_step(false), "the others are missing");
    }
}
