//! Planted faults: each must be found by a test.
//!
//! [`table`] lists the faults of what keeps data. All of them are planted in one copy of the sources ([`planting`]),
//! which is built once; a variable of the environment switches one on. A fault that no test notices has survived.

mod planting;
mod table;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::planting::{CHOSEN, PROGRAM, plant};
use self::table::{MUTANTS, Mutant};
use crate::built::Built;
use crate::workspace::{Tally, Workspace};

/// How long the tests that should notice a fault may take, and how long all of them may. One that takes longer hangs,
/// which is noticed.
const NAMED_LIMIT: Duration = Duration::from_secs(240);
const ALL_LIMIT: Duration = Duration::from_secs(900);
/// Random cases of each property.
const CASES: &str = "24";
/// How often a running test program is looked at.
const POLL: Duration = Duration::from_millis(20);

/// Every fault, or those whose names contain `wanted`. The last line is the count; a survivor is a failure.
pub(crate) fn run(workspace: &Workspace, wanted: &str) -> Result<Tally> {
    let mutants: Vec<&Mutant> = MUTANTS.iter().filter(|mutant| mutant.name.contains(wanted)).collect();
    ensure!(!mutants.is_empty(), "no mutant has {wanted:?} in its name; the table is in ci/src/mutants/table.rs");
    hunt(workspace, &mutants)
}

/// Whether the copy with the faults compiles. Nothing is run.
pub(crate) fn check(workspace: &Workspace) -> Result<Tally> {
    let (_, mut cargo) = planted(workspace, "check")?;
    workspace.step(cargo.arg("--quiet"))
}

/// The copy with every fault, and a cargo command for its test program.
fn planted(workspace: &Workspace, what: &str) -> Result<(PathBuf, Command)> {
    let target = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(target) => workspace.root().join(target),
        None => workspace.root().join("target"),
    };
    let folder = target.join("mutants");
    plant(workspace.root(), &folder, MUTANTS)?;
    let mut cargo = workspace.cargo();
    cargo.current_dir(&folder).env("CARGO_TARGET_DIR", &target).env("CARGO_PROFILE_DEV_DEBUG", "0");
    cargo.args([what, "--workspace", "--test", PROGRAM]);
    // A copy that runs a few times is not optimised. For cargo it is also another package than the workspace's own.
    cargo.args(["--config", "profile.dev.package.pserver-core.opt-level=0"]);
    Ok((folder, cargo))
}

fn hunt(workspace: &Workspace, mutants: &[&Mutant]) -> Result<Tally> {
    let program = TestProgram::build(workspace)?;
    program.check_sound(mutants)?;
    let mut survivors = Vec::new();
    for mutant in mutants {
        let begun = Instant::now();
        let mut found = program.run(Some(mutant), mutant.tests, NAMED_LIMIT)?;
        if matches!(found, Found::Nothing { .. }) {
            found = program.run(Some(mutant), &[], ALL_LIMIT)?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        match found {
            Found::Failed(test) => say!("killed    {}: by {test}, {seconds:.1} s", mutant.name),
            Found::Hung => say!("killed    {}: a test hung, {seconds:.1} s", mutant.name),
            Found::Nothing { .. } => {
                say!("SURVIVED  {}: {}, {seconds:.1} s", mutant.name, mutant.file);
                survivors.push(mutant.name);
            }
        }
    }
    let (all, lost) = (mutants.len(), survivors.len());
    let names = if lost > 0 { format!(": {}", survivors.join("; ")) } else { String::new() };
    say!("{all} mutants: {} killed, {lost} survived{names}", all - lost);
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    Ok(Tally { passed: count(all - lost), failed: count(lost), skipped: 0 })
}

/// The unit tests of `core`, with every fault in them.
struct TestProgram {
    program: String,
    folder: PathBuf,
    output: PathBuf,
}

/// The outcome of a test run.
enum Found {
    Nothing { tests: u64 },
    Failed(String),
    Hung,
}

impl TestProgram {
    fn build(workspace: &Workspace) -> Result<Self> {
        let (folder, mut cargo) = planted(workspace, "test")?;
        cargo.arg("--no-run");
        let built = Built::of(&mut cargo).context("the copy with the faults does not build")?;
        let output = folder.join("output");
        Ok(Self { program: built.program(PROGRAM, true)?, folder, output })
    }

    /// With no fault on, the tests that are named for these must pass, or all where these are all.
    fn check_sound(&self, mutants: &[&Mutant]) -> Result<()> {
        for mutant in mutants {
            ensure!(!mutant.tests.is_empty(), "mutant \"{}\" names no test", mutant.name);
        }
        let mut named: Vec<&str> = mutants.iter().flat_map(|mutant| mutant.tests.iter().copied()).collect();
        named.sort_unstable();
        named.dedup();
        for test in &named {
            ensure!(self.count(test)? > 0, "no test has \"{test}\" in its name; a mutant in the table names it");
        }
        let asked: &[&str] = if mutants.len() == MUTANTS.len() { &[] } else { &named };
        match self.run(None, asked, ALL_LIMIT)? {
            Found::Nothing { tests } => say!("without a fault {tests} tests pass"),
            Found::Failed(test) => bail!("{test} fails without a fault: {}", self.output.display()),
            Found::Hung => bail!("the tests hang without a fault: {}", self.output.display()),
        }
        Ok(())
    }

    /// How many tests have this in their names.
    fn count(&self, test: &str) -> Result<usize> {
        let listed = self.command(None).args(["--list", test]).output().context("cannot list the tests")?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        Ok(listed.lines().filter(|line| line.ends_with(": test")).count())
    }

    /// Runs the tests that have one of these in their names, or all.
    fn run(&self, mutant: Option<&Mutant>, tests: &[&str], limit: Duration) -> Result<Found> {
        let output = File::create(&self.output).context("cannot keep what the tests say")?;
        let errors = output.try_clone().context("cannot keep what the tests say")?;
        let mut command = self.command(mutant);
        command.args(tests).stdout(output).stderr(errors);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", self.program))?;
        let is_good = wait(&mut child, limit)?;
        let said = std::fs::read(&self.output).context("cannot read what the tests said")?;
        let said = String::from_utf8_lossy(&said);
        Ok(match is_good {
            None => Found::Hung,
            Some(true) => Found::Nothing { tests: said.lines().map(|line| Tally::of_result_line(line).passed).sum() },
            Some(false) => Found::Failed(failed_test(&said).unwrap_or("the end of the test program").to_owned()),
        })
    }

    fn command(&self, mutant: Option<&Mutant>) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(self.folder.join("core")).stdin(Stdio::null());
        command.env_remove(CHOSEN).env("PROPTEST_CASES", CASES);
        if let Some(mutant) = mutant {
            command.env(CHOSEN, mutant.name);
        }
        command
    }
}

/// Whether a child ended well; nothing where it did not end in time, and was killed.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<bool>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("cannot learn how the tests ended")? {
            return Ok(Some(status.success()));
        }
        if limit < begun.elapsed() {
            child.kill().context("cannot end tests that hang")?;
            child.wait().context("cannot learn how the tests ended")?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

fn failed_test(said: &str) -> Option<&str> {
    said.lines().find_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every text of the sources of `core`.
    fn sources(folder: &std::path::Path, all: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(folder).expect("the folder is there").map_while(Result::ok) {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|one| one == "rs") {
                let text = std::fs::read_to_string(&path).expect("a source is text");
                all.push((path, text));
            }
        }
    }

    #[test]
    fn every_fault_of_the_table_has_its_place_in_the_sources() {
        planting::planted_files(Workspace::of_this_program().root(), MUTANTS).expect("the table follows the sources");
        let names: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), MUTANTS.len(), "each has a name of its own");
        assert!(40 <= MUTANTS.len());
    }

    #[test]
    fn the_test_that_failed_is_named() {
        assert_eq!(failed_test("test a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n"), Some("a::c"));
        assert_eq!(failed_test("test a::b ... ok\n"), None);
    }

    #[test]
    fn every_mutant_names_tests_that_exist() {
        let mut all = Vec::new();
        sources(&Workspace::of_this_program().root().join("core/src"), &mut all);
        for mutant in MUTANTS {
            for test in mutant.tests {
                let last = test.rsplit("::").next().expect("a name has a last part");
                let (function, module) = (format!("fn {last}"), format!("{last}.rs"));
                let is_there = |(path, text): &(PathBuf, String)| text.contains(&function) || path.ends_with(&module);
                let is_folder = |(path, _): &(PathBuf, String)| path.parent().is_some_and(|one| one.ends_with(last));
                assert!(all.iter().any(|one| is_there(one) || is_folder(one)), "{}: no test {test}", mutant.name);
            }
        }
    }
}
