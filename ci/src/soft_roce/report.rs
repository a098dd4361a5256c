//! The protocol between guest and host: lines about programs that no program writes itself.
//!
//! Not here: what the programs write, but for the counts of Rust's test harness.

use std::fmt::{Display, Formatter};
use std::time::Duration;

use crate::workspace::Tally;

const MARK: &str = "@@ pserver-guest ";

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReportLine {
    /// The following lines are written by this program.
    Begin(String),
    /// It ended: its exit status (`signal 9`, `out of time`, …) and how long it took.
    End { name: String, status: String, millis: u64 },
    /// A line of a skip report.
    Skipped(String),
    /// Everything was run. Without it the guest died.
    Done,
}

/// The results of a guest that has ended.
#[derive(Default)]
pub(super) struct Report {
    pub(super) programs: Vec<ProgramRun>,
    pub(super) skipped: Vec<String>,
    pub(super) is_done: bool,
    /// The processor time that QEMU used on the host.
    pub(super) processor: Duration,
}

/// One program of a guest.
#[derive(Default)]
pub(super) struct ProgramRun {
    pub(super) name: String,
    /// None when it began and the guest did not say how it ended.
    pub(super) status: Option<String>,
    pub(super) millis: u64,
    pub(super) output: Vec<String>,
}

impl Report {
    /// Takes the next line of the console.
    pub(super) fn take(&mut self, line: &str) {
        match ReportLine::parse(line) {
            Some(ReportLine::Begin(name)) => self.programs.push(ProgramRun { name, ..ProgramRun::default() }),
            Some(ReportLine::End { name, status, millis }) => {
                if let Some(run) = self.programs.iter_mut().rfind(|run| run.name == name) {
                    (run.status, run.millis) = (Some(status), millis);
                }
            }
            Some(ReportLine::Skipped(why)) => self.skipped.push(why),
            Some(ReportLine::Done) => self.is_done = true,
            None => {
                if let Some(run) = self.programs.last_mut().filter(|run| run.status.is_none()) {
                    run.output.push(line.to_owned());
                }
            }
        }
    }

    /// The tests that passed, by their names within their programs.
    pub(super) fn tests_passed(&self) -> impl Iterator<Item = String> {
        let lines = self.programs.iter().flat_map(|run| &run.output);
        lines.filter_map(|line| Some(line.strip_prefix("test ")?.strip_suffix(" ... ok")?.to_owned()))
    }

    /// The results of the program of this name, if it ran.
    pub(super) fn run(&self, name: &str) -> Option<&ProgramRun> {
        self.programs.iter().find(|run| run.name == name)
    }

    /// Judges what ran against what should have run.
    pub(super) fn tally(&self, wanted: &[&str]) -> Tally {
        let mut total = Tally::default();
        for name in wanted {
            total += match self.run(name) {
                Some(run) => run.tally(),
                None => Tally::of_step(false),
            };
        }
        // Every program succeeded, and then the guest died.
        if !self.is_done && total.failed == 0 {
            total.failed = 1;
        }
        total
    }
}

impl ProgramRun {
    /// The rest of each line that begins with `word`.
    pub(super) fn said<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.output.iter().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(' '))
    }

    pub(super) fn succeeded(&self) -> bool {
        self.status.as_deref() == Some("0")
    }

    /// Its tests when it counts them, and then there must be one; else one check.
    fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for line in &self.output {
            tally += Tally::of_result_line(line);
        }
        if tally == Tally::default() {
            let counts = self.output.iter().any(|line| line.starts_with("test result: "));
            return Tally::of_step(self.succeeded() && !counts);
        }
        if !self.succeeded() && tally.failed == 0 {
            tally.failed = 1;
        }
        tally
    }
}

impl ReportLine {
    pub(super) fn parse(line: &str) -> Option<Self> {
        // The kernel may have written to the same line before.
        let (_, said) = line.trim_end().split_once(MARK)?;
        let (what, rest) = said.split_once(' ').unwrap_or((said, ""));
        match what {
            "begin" => Some(Self::Begin(rest.to_owned())),
            "end" => {
                let (name, rest) = rest.split_once(' ')?;
                let (millis, status) = rest.split_once(' ')?;
                Some(Self::End { name: name.to_owned(), status: status.to_owned(), millis: millis.parse().ok()? })
            }
            "skipped" => Some(Self::Skipped(rest.to_owned())),
            "done" => Some(Self::Done),
            _ => None,
        }
    }
}

impl Display for ReportLine {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Begin(name) => write!(out, "{MARK}begin {name}"),
            Self::End { name, status, millis } => write!(out, "{MARK}end {name} {millis} {status}"),
            Self::Skipped(why) => write!(out, "{MARK}skipped {why}"),
            Self::Done => write!(out, "{MARK}done"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(console: &str, expected: &str) {
        let mut report = Report::default();
        let marked = console.replace('@', MARK);
        marked.lines().for_each(|line| report.take(line));
        assert_eq!(report.tally(&["one", "two"]).to_string(), expected, "for {console}");
    }

    #[test]
    fn a_guest_passes_only_with_an_explicit_verdict() {
        check("", "0 passed, 2 failed, 0 skipped");
        check("@begin one\n@end one 5 0\n@begin two\n@end two 5 0\n@done", "2 passed, 0 failed, 0 skipped");
        // It died after the last program, within it, or before it.
        check("@begin one\n@end one 5 0\n@begin two\n@end two 5 0", "2 passed, 1 failed, 0 skipped");
        check("@begin one\n@end one 5 0\n@begin two\nKernel panic", "1 passed, 1 failed, 0 skipped");
        check("@begin one\n@end one 5 0\n@done", "1 passed, 1 failed, 0 skipped");
        check("@begin one\n@end one 5 0\n@begin two\n@end two 5 out of time\n@done", "1 passed, 1 failed, 0 skipped");
        check("@begin one\n@end one 5 signal 9\n@begin two\n@end two 5 1\n@done", "0 passed, 2 failed, 0 skipped");
    }

    #[test]
    fn tests_within_a_program_are_counted() {
        let ok = "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured";
        let bad = "test result: FAILED. 6 passed; 1 failed; 0 ignored; 0 measured";
        let two = "@begin two\n@end two 5 0\n@done";
        check(&format!("@begin one\n{ok}\n@end one 5 0\n{two}"), "8 passed, 0 failed, 0 skipped");
        check(&format!("@begin one\n{bad}\n@end one 5 101\n{two}"), "7 passed, 1 failed, 0 skipped");
        check(&format!("@begin one\n{ok}\n@end one 5 101\n{two}"), "8 passed, 1 failed, 0 skipped");
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured";
        check(&format!("@begin one\n{none}\n@end one 5 0\n{two}"), "1 passed, 1 failed, 0 skipped");
        check(&format!("@begin one\n[  1.5] eth0: up @end one 5 0\n{two}"), "2 passed, 0 failed, 0 skipped");
    }

    #[test]
    fn a_test_has_passed_when_its_program_says_so() {
        let mut report = Report::default();
        let text = "@@ pserver-guest begin one\nrunning 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\n\
                    test a::d ... \r\nsaid 5\ntest result: ok. 1 passed; 0 failed";
        text.lines().for_each(|line| report.take(line));
        assert_eq!(report.tests_passed().collect::<Vec<_>>(), ["a::b"]);
        assert_eq!(report.programs[0].said("said").collect::<Vec<_>>(), ["5"]);
        assert!(report.run("two").is_none());
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let end = ReportLine::End { name: "a".to_owned(), status: "out of time".to_owned(), millis: 17 };
        for line in
            [ReportLine::Begin("a".to_owned()), end, ReportLine::Skipped("rdma: why".to_owned()), ReportLine::Done]
        {
            assert_eq!(ReportLine::parse(&format!("{line}\r\n")), Some(line));
        }
        assert_eq!(ReportLine::parse("@@ pserver-guest end a b c"), None);
    }
}
