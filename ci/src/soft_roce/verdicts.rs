//! Models that must be equal to the bit: trained over verbs, over TCP, and with a disturbed wire.
//! And what must not happen at all: a copy of what the card can read and write where it lies.
//!
//! Not here: what each program says of itself ([`super::report`]).

use crate::soft_roce::report::Report;
use crate::soft_roce::{figures, plan};
use crate::workspace::Tally;

/// Whether every job that the server's machine served came to the same model.
pub(super) fn models_agree(server: &Report) -> Tally {
    let models: Vec<_> = plan::SERVER.programs().map(|program| model(server, program.name)).collect();
    equal("the two machines", &models)
}

/// Whether the digits came to the same model over verbs and over TCP.
pub(super) fn digits_agree(report: &Report) -> Tally {
    equal("digits over verbs and over TCP", &["verbs", "tcp"].map(|way| model(report, &format!("digits-{way}"))))
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

/// One check: all are there, and are the same.
fn equal(what: &str, models: &[Option<String>]) -> Tally {
    say!("soft-roce: models of {what}: {models:?}");
    Tally::of_step(models.first().is_some_and(Option::is_some) && models.iter().all(|model| *model == models[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_equal_when_all_are_present_and_identical() {
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
    fn a_copy_and_a_missing_report_both_fail_the_zero_copy_check() {
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
    fn the_last_model_that_a_program_prints_is_taken() {
        let mut report = Report::default();
        let text = "@@ pserver-guest begin serve-tcp\nmodel a  -\n@@ pserver-guest end serve-tcp 5 0";
        text.lines().for_each(|line| report.take(line));
        assert_eq!(model(&report, "serve-tcp").as_deref(), Some("a  -"));
        assert_eq!(models_agree(&report), Tally::of_step(false), "the others are missing");
    }
}
