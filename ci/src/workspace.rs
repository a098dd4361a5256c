//! How a task runs a program in the workspace, and how results are counted.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::{Display, Formatter};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

/// A test that skips appends one line, `SKIPPED: <what>: <why>`, to the file that this variable names. A file and not
/// the output, because the test harness swallows what a passing test prints.
pub(crate) const SKIP_REPORT: &str = "PSERVER_SKIP_REPORT";

/// Counts of passed, failed and skipped tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

/// The end of a task that was begun: waits for its programs and judges them.
pub(crate) type Ending = Box<dyn FnOnce(&Workspace) -> Result<Tally>>;

/// The packages that `quick` checks; one that the workspace does not have is left out.
const QUICK_PACKAGES: &[(&str, &str)] = &[
    ("core", "pserver-core"),
    ("program", "pserver-program"),
    ("transport", "pserver-transport"),
    ("client", "pserver-client"),
    ("trainer", "pserver-trainer"),
];

/// The sources this program was built from, and the file in which the tests of this run report their skips.
#[derive(Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
    skip_report: PathBuf,
    failures: Arc<Mutex<Vec<String>>>,
    /// Variables of its programs beside those of this process.
    variables: Vec<(&'static str, OsString)>,
}

impl Workspace {
    /// The workspace that holds this package.
    pub(crate) fn of_this_program() -> Self {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = package.parent().expect("the package is a folder of the workspace").to_path_buf();
        let skip_report = std::env::temp_dir().join(format!("pserver-skips-{}", std::process::id()));
        Self { root, skip_report, failures: Arc::default(), variables: Vec::new() }
    }

    /// The same, where each program has a variable.
    pub(crate) fn with(&self, name: &'static str, value: impl Into<OsString>) -> Self {
        let mut with = self.clone();
        with.variables.push((name, value.into()));
        with
    }

    /// The folder of the root `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The cargo that runs us, ready for arguments.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = self.command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // `.ci/run` installs commands of cargo there.
        let own = self.root.join("target/python/bin");
        let path = std::env::var_os("PATH").unwrap_or_default();
        if let Ok(path) = std::env::join_paths(std::env::split_paths(&path).chain([own])) {
            cargo.env("PATH", path);
        }
        cargo
    }

    /// `command`, and `--package` for each package of `quick`. Its commands select the same packages: another selection
    /// has other features of third-party packages, and everything would be built again.
    pub(crate) fn cargo_of_quick(&self, command: &str) -> Command {
        let mut cargo = self.cargo();
        cargo.arg(command);
        for (folder, package) in QUICK_PACKAGES {
            if self.root.join(folder).join("Cargo.toml").exists() {
                cargo.args(["--package", package]);
            }
        }
        cargo
    }

    /// Whether cargo has a command of this name.
    pub(crate) fn has_cargo_tool(&self, name: &str) -> bool {
        let mut version = self.cargo();
        version.args([name, "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        version.status().is_ok_and(|status| status.success())
    }

    /// A program that starts at the root and knows where to report skips; `PSERVER_REQUIRE` is inherited.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root).env(SKIP_REPORT, &self.skip_report);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a check that either holds or does not: one passed or one failed.
    pub(crate) fn step(&self, command: &mut Command) -> Result<Tally> {
        let status = command.status().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Tally::of_step(status.success()))
    }

    /// As [`Workspace::step`], of a check that says so in the skip report when it has nothing to check.
    pub(crate) fn step_that_may_skip(&self, command: &mut Command) -> Result<Tally> {
        let skips_before = self.skips().len();
        let tally = self.step(command)?;
        Ok(tally.without(self.skips().len() - skips_before))
    }

    /// Runs `cargo test`, shows its output as it comes, and counts what its result lines say. The harness calls a test
    /// that skipped passed, because it returned; here it is not.
    pub(crate) fn tests(&self, command: &mut Command) -> Result<Tally> {
        let skips_before = self.skips().len();
        let program = command.get_program().to_os_string();
        let mut child =
            command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let output = child.stdout.take().expect("stdout was piped above");
        let mut tally = Tally::default();
        let mut failures = FailureLines::default();
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("cannot read the output of the tests")?;
            let line = String::from_utf8_lossy(&line);
            say!("{line}");
            tally += Tally::of_result_line(&line);
            failures.read(&line);
        }
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).append(&mut failures.lines);
        let status = child.wait().context("cannot learn how the tests ended")?;
        Ok(tally.judged(status).without(self.skips().len() - skips_before))
    }

    /// Reports, as a test would, that something was not looked at.
    pub(crate) fn skip(&self, what: &str, why: &str) -> Result<()> {
        let report = fs::OpenOptions::new().append(true).create(true).open(&self.skip_report);
        let written = report.and_then(|mut report| writeln!(report, "SKIPPED: {what}: {why}"));
        written.context("cannot report a skip")
    }

    /// Takes back what tests skipped for want of `what`, when they are among those that have passed elsewhere since;
    /// how many lines.
    pub(crate) fn make_up_for(&self, what: &str, passed: &BTreeSet<String>) -> Result<usize> {
        let (made_up, left) = parted(self.skips(), what, passed);
        fs::write(&self.skip_report, left).context("cannot write the skip report")?;
        Ok(made_up)
    }

    /// The lines that tests wrote to the skip report, which is then gone.
    pub(crate) fn take_skips(&self) -> Vec<String> {
        let skips = self.skips();
        // Left behind it harms nobody: the next run has another name.
        let _ = fs::remove_file(&self.skip_report);
        skips
    }

    /// The tests that failed, with the first lines of what each said.
    pub(crate) fn take_failures(&self) -> Vec<String> {
        std::mem::take(&mut self.failures.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn skips(&self) -> Vec<String> {
        // No file means that nothing was skipped.
        skip_lines(&fs::read_to_string(&self.skip_report).unwrap_or_default())
    }
}

/// Output of the failed tests in the output of `cargo test`: `---- NAME stdout ----` and the lines below. The end of a
/// long run repeats these lines, because they are hard to find in the middle of its output.
#[derive(Default)]
struct FailureLines {
    lines: Vec<String>,
    left: usize,
}

impl FailureLines {
    /// The number of lines kept per test.
    const LINES: usize = 24;

    fn read(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.lines.push(format!("FAILED: {name}"));
            self.left = Self::LINES;
        } else if line == "failures:" {
            self.left = 0;
        } else if self.left > 0 && !line.is_empty() {
            self.lines.push(format!("    {line}"));
            self.left -= 1;
        }
    }
}

impl Tally {
    /// One check that holds or does not.
    pub(crate) fn of_step(holds: bool) -> Self {
        Self { passed: u64::from(holds), failed: u64::from(!holds), skipped: 0 }
    }

    /// The counts of a line `test result: ok. 3 passed; 0 failed; 1 ignored; ...`; zeros for any other line.
    pub(crate) fn of_result_line(line: &str) -> Self {
        let Some(counts) = line.trim_start().strip_prefix("test result: ") else {
            return Self::default();
        };
        let count = |what: &str| -> u64 {
            let mut parts = counts.split([';', '.']).map(str::trim);
            parts.find_map(|part| part.strip_suffix(what)?.trim().parse().ok()).unwrap_or(0)
        };
        Self { passed: count("passed"), failed: count("failed"), skipped: count("ignored") }
    }

    /// A run that ended badly without a failed test (it did not compile, or a test took the process down) failed once.
    fn judged(mut self, status: ExitStatus) -> Self {
        if !status.success() && self.failed == 0 {
            self.failed = 1;
        }
        self
    }

    /// The same run, when so many of those that passed did so by skipping.
    fn without(mut self, skips: usize) -> Self {
        self.passed = self.passed.saturating_sub(u64::try_from(skips).unwrap_or(u64::MAX));
        self
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl Display for Tally {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// How many lines `SKIPPED: <what>: <test>: <why>` are of tests that have passed, and the text of the others.
fn parted(lines: Vec<String>, what: &str, passed: &BTreeSet<String>) -> (usize, String) {
    let start = format!("SKIPPED: {what}: ");
    let test = |line: &String| line.strip_prefix(&start)?.split_once(": ").map(|(test, _)| test.to_owned());
    let (made_up, left): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| test(line).is_some_and(|test| passed.contains(&test)));
    (made_up.len(), left.into_iter().map(|line| line + "\n").collect())
}

fn skip_lines(report: &str) -> Vec<String> {
    let lines = report.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| format!("SKIPPED: {}", line.strip_prefix("SKIPPED:").unwrap_or(line).trim_start())).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn check(output: &str, exit: i32, expected: &str) {
        let mut tally = Tally::default();
        for line in output.lines() {
            tally += Tally::of_result_line(line);
        }
        assert_eq!(tally.judged(ExitStatus::from_raw(exit << 8)).to_string(), expected, "for {output:?}");
    }

    #[test]
    fn the_closing_line_sums_every_test_program() {
        check("", 0, "0 passed, 0 failed, 0 skipped");
        check("running 2 tests\ntest a ... ok\n", 0, "0 passed, 0 failed, 0 skipped");
        let one = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.31s\n";
        let two = "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        check(one, 0, "12 passed, 0 failed, 1 skipped");
        check(&format!("{one}noise\n{two}"), 101, "15 passed, 2 failed, 1 skipped");
        check(
            "test result: \u{1b}[32mok\u{1b}[0m. 4 passed; 0 failed; 0 ignored\n",
            0,
            "4 passed, 0 failed, 0 skipped",
        );
    }

    #[test]
    fn a_run_that_dies_without_a_failed_test_is_a_failure() {
        check("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n", 101, "3 passed, 1 failed, 0 skipped");
        check("error: could not compile\n", 101, "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn the_output_of_failed_tests_is_found() {
        let output = "running 2 tests\ntest a ... FAILED\ntest b ... ok\n\nfailures:\n\n---- a stdout ----\n\n\
                      thread 'a' panicked at src/a.rs:3:5:\nno\n\n\nfailures:\n    a\n\n\
                      test result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        let mut failures = FailureLines::default();
        output.lines().for_each(|line| failures.read(line));
        assert_eq!(failures.lines, ["FAILED: a", "    thread 'a' panicked at src/a.rs:3:5:", "    no"]);
    }

    #[test]
    fn a_test_that_skipped_did_not_pass() {
        let tally = Tally { passed: 5, failed: 1, skipped: 0 };
        assert_eq!(tally.without(2).to_string(), "3 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_skip_is_dropped_only_if_the_test_passed_elsewhere() {
        let report = "SKIPPED: rdma: a::b: none\nSKIPPED: rdma-core: a::b: old\nSKIPPED: rdma: a::b: none\n\
                      SKIPPED: cuda: a::b: no\nSKIPPED: rdma: a::c: none\nSKIPPED: rdma: no guest\n";
        let left = "SKIPPED: rdma-core: a::b: old\nSKIPPED: cuda: a::b: no\nSKIPPED: rdma: a::c: none\n\
                    SKIPPED: rdma: no guest\n";
        let passed = ["a::b", "no guest"].map(str::to_owned).into();
        assert_eq!(parted(skip_lines(report), "rdma", &passed), (2, left.to_owned()));
        assert_eq!(parted(Vec::new(), "rdma", &passed), (0, String::new()));
    }

    #[test]
    fn every_line_of_the_skip_report_is_one_skip() {
        assert_eq!(
            skip_lines("SKIPPED: rdma: there is no device\n\ncuda: no driver\n"),
            ["SKIPPED: rdma: there is no device", "SKIPPED: cuda: no driver"],
        );
    }
}
