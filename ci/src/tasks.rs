//! Every task, in the order in which `cargo ci test` runs them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Arg, ArgAction, ArgMatches, value_parser};

use crate::workspace::{Ending, Tally, Workspace};
use crate::{
    aarch64, coverage, deny, gpu, install, installed, kernels, mutants, python, rdma_sys, release, simulate, soft_roce,
    tidy, verbs_bindings,
};

/// One line of `cargo ci`.
pub(crate) struct Task {
    /// The argument of `cargo ci`.
    pub(crate) name: &'static str,
    /// The text of `cargo ci --help`.
    pub(crate) about: &'static str,
    /// Does it, writing to the terminal. An `Err` is a task that could not run, and counts as one failure.
    pub(crate) run: Run,
}

/// How a task is done.
#[derive(Clone, Copy)]
pub(crate) enum Run {
    /// In its place.
    Alone(fn(&Workspace) -> Result<Tally>),
    /// Begun before the task named `before` and judged in its own place, because most of it waits or keeps one
    /// processor. In a run without that task it is begun in its own place.
    Beside { before: &'static str, begin: fn(&Workspace) -> Result<Ending> },
}

/// Several tasks under one name.
pub(crate) struct Suite {
    /// The argument of `cargo ci`.
    pub(crate) name: &'static str,
    /// The text of `cargo ci --help`.
    pub(crate) about: &'static str,
    pub(crate) tasks: &'static [Task],
}

/// The suites, from the shortest to the longest.
pub(crate) const SUITES: &[Suite] = &[
    Suite {
        name: "quick",
        about: "A minute: format, tidy, clippy and unit tests from core to client and trainer",
        tasks: QUICK,
    },
    Suite { name: "test", about: "Every task above, and one closing line: the check of a commit", tasks: TASKS },
    Suite { name: "all", about: "The same as test", tasks: TASKS },
    Suite { name: "long", about: "The long forms of tests, which take hours; no part of test", tasks: LONG },
];

const FMT: Task = Task { name: "fmt", about: "The sources are as rustfmt writes them", run: Run::Alone(fmt) };
const TIDY: Task =
    Task { name: "tidy", about: "The rules of STYLE.md that a program can check", run: Run::Alone(tidy::run) };

/// The check between two edits. On two idle cores it takes at most 60 s after a change of `core/src/lib.rs`.
const QUICK: &[Task] = &[
    FMT,
    TIDY,
    Task {
        name: "quick-clippy",
        about: "No warning in the packages from core to client and trainer",
        run: Run::Alone(quick_clippy),
    },
    Task { name: "unit-tests", about: "Unit tests from core to client and trainer", run: Run::Alone(unit_tests) },
];

/// The table of `cargo ci test`. A new task is a new line. The quick ones come first.
pub(crate) const TASKS: &[Task] = &[
    FMT,
    TIDY,
    Task {
        name: "deny",
        about: "Licences, versions, sources and advisories of the packages of others",
        run: Run::Alone(deny::run),
    },
    Task { name: "clippy", about: "No warning in any target", run: Run::Alone(clippy) },
    Task { name: "doc", about: "No warning in the documentation of any package", run: Run::Alone(doc) },
    Task { name: "aarch64", about: "The sources compile for another processor", run: Run::Alone(aarch64::run) },
    Task { name: "gpu", about: "The CUDA side on a device, where there is one", run: Run::Alone(gpu::run) },
    Task {
        name: "mutants-check",
        about: "The faults that `cargo ci mutants` plants compile",
        run: Run::Alone(mutants::check),
    },
    Task { name: "rust-tests", about: "Unit, property, process and documentation tests", run: Run::Alone(rust_tests) },
    Task {
        name: "simulations",
        about: "A thousand seeds of simulated clusters under faults",
        run: Run::Alone(simulate::run),
    },
    Task {
        name: "installed",
        about: "Examples in C, C++, Fortran and with MPI from an installed prefix; the Debian package",
        run: Run::Alone(installed::run),
    },
    Task {
        name: "python",
        about: "The Python package: its wheel in an empty environment, tests, examples, types",
        run: Run::Alone(python::check),
    },
    Task {
        name: "soft-roce",
        about: "RDMA, in a virtual machine with a device made of software",
        run: Run::Beside { before: "gpu", begin: soft_roce::begin },
    },
    Task {
        name: "rdma-sys",
        about: "The bindings of libibverbs agree with those of the crate rdma-sys",
        run: Run::Beside { before: "deny", begin: rdma_sys::begin },
    },
];

/// The table of `cargo ci long`. A test of many cases has its long form behind `PSERVER_FULL=1`.
const LONG: &[Task] = &[
    Task { name: "long-tests", about: "All tests with PSERVER_FULL=1", run: Run::Alone(long_tests) },
    Task {
        name: "long-properties",
        about: "The properties of core, kernels and transport with 4,096 cases each",
        run: Run::Alone(long_properties),
    },
    Task {
        name: "long-simulations",
        about: "A hundred thousand seeds of simulated clusters",
        run: Run::Alone(simulate::long),
    },
    Task {
        name: "long-gpu",
        about: "All of the script for a device on the stand-in driver",
        run: Run::Alone(gpu::long),
    },
    Task {
        name: "cuda-artifacts",
        about: "The committed CUDA artifacts are those that the pinned compilers make",
        run: Run::Alone(kernels::check),
    },
    Task {
        name: "long-soft-roce",
        about: "RDMA in a virtual machine, with programs built for speed",
        run: Run::Alone(soft_roce::long),
    },
    Task {
        name: "long-mutants",
        about: "Every fault of the table",
        run: Run::Alone(|workspace| mutants::run(workspace, "")),
    },
];

/// A maintainer's tool: a line of `cargo ci` that is no part of `cargo ci test`, and may take arguments.
pub(crate) struct Tool {
    /// The argument of `cargo ci`.
    pub(crate) name: &'static str,
    /// The text of `cargo ci --help`.
    pub(crate) about: &'static str,
    /// Adds what may follow the name.
    pub(crate) arguments: fn(clap::Command) -> clap::Command,
    /// Does it, as [`Task::run`] does.
    pub(crate) run: fn(&Workspace, &ArgMatches) -> Result<Tally>,
}

/// The table of tools.
pub(crate) const TOOLS: &[Tool] = &[
    Tool {
        name: "coverage",
        about: "Lines that the unit tests of quick run, by cargo-llvm-cov; prints the figure",
        arguments: |command| command,
        run: |workspace, _| coverage::run(workspace),
    },
    Tool {
        name: "deb",
        about: "Builds a Debian package of what `install` installs, in target",
        arguments: |command| command.arg(profile_argument()),
        run: |workspace, given| install::deb::run(workspace, profile_of(given)),
    },
    Tool {
        name: "gpu-kit",
        about: "Builds what kernels/cu/check-on-gpu.sh runs, for a machine that has a device and no Rust",
        arguments: |command| command,
        run: |workspace, _| gpu::kit(workspace),
    },
    Tool {
        name: "guest",
        about: "Runs one line of shell in a virtual machine that has an RDMA device",
        arguments: |command| command.arg(Arg::new("line").required(true)),
        run: |workspace, given| {
            soft_roce::by_hand(workspace, given.get_one::<String>("line").map_or("", String::as_str))
        },
    },
    Tool {
        name: "image",
        about: "Builds an image of containers with the pserver program, by buildah; an archive of it is in target",
        arguments: |command| command.arg(profile_argument()),
        run: |workspace, given| install::image::run(workspace, profile_of(given)),
    },
    Tool {
        name: "install",
        about: "Installs the C library, its headers, the pserver program and their documents; DESTDIR is honoured",
        arguments: |command| {
            let prefix = Arg::new("prefix").long("prefix").value_name("DIR").value_parser(value_parser!(PathBuf));
            let prefix = prefix.default_value("/usr/local").help("The folder of bin, include, lib and share");
            command.arg(prefix).arg(profile_argument())
        },
        run: |workspace, given| {
            let prefix = given.get_one::<PathBuf>("prefix").map_or(Path::new("/usr/local"), PathBuf::as_path);
            install::run(workspace, prefix, profile_of(given))
        },
    },
    Tool {
        name: "kernels",
        about: "Makes the committed CUDA artifacts anew with pinned compilers (for maintainers)",
        arguments: |command| command,
        run: |workspace, _| kernels::make(workspace),
    },
    Tool {
        name: "mutants",
        about: "Plants faults in what keeps data, one after the other; each must be found by a test",
        arguments: |command| command.arg(Arg::new("wanted").help("Only those that have this in their names")),
        run: |workspace, given| mutants::run(workspace, given.get_one::<String>("wanted").map_or("", String::as_str)),
    },
    Tool {
        name: "release",
        about: "Builds wheel, Debian package, image, archive, checksums, licences and list of components, twice, and \
                compares",
        arguments: |command| {
            let out = Arg::new("out").long("out").value_name("DIR").value_parser(value_parser!(PathBuf)).required(true);
            command.arg(out.help("The folder of the files, which is empty")).arg(profile_argument())
        },
        run: |workspace, given| {
            let out = given.get_one::<PathBuf>("out").context("clap requires it")?;
            release::run(workspace, out, profile_of(given))
        },
    },
    Tool {
        name: "simulate",
        about: "Simulates clusters under faults: --seed N --seeds K --events M, or --cases FILE...",
        arguments: |command| {
            command.arg(Arg::new("given").num_args(0..).trailing_var_arg(true).allow_hyphen_values(true))
        },
        run: |workspace, given| simulate::with(workspace, given.get_many::<String>("given").unwrap_or_default()),
    },
    Tool {
        name: "wheel",
        about: "Builds the wheel that is published, as maturin builds it, and tests it as python does",
        arguments: |command| command,
        run: |workspace, _| python::check_published(workspace),
    },
    Tool {
        name: "counts",
        about: "Instructions of rounds over verbs, beside those of perftest, on a machine whose clock counts them",
        arguments: |command| command,
        run: |workspace, _| soft_roce::counts(workspace),
    },
    Tool {
        name: "wire",
        about: "Of soft-roce only the two machines that a wire joins",
        arguments: |command| command,
        run: |workspace, _| soft_roce::wire(workspace),
    },
    Tool {
        name: "verbs-bindings",
        about: "Writes transport/src/verbs/sys/bindings.rs from the headers of rdma-core (for maintainers)",
        arguments: |command| {
            let check = Arg::new("check").long("check").action(ArgAction::SetTrue);
            command.arg(check.help("Compare with what is committed, and write nothing"))
        },
        run: |workspace, given| verbs_bindings::run(workspace, given.get_flag("check")),
    },
];

fn profile_argument() -> Arg {
    let help = "The cargo profile of what is built: dist is small, dev is quick to build";
    Arg::new("profile").long("profile").value_name("NAME").default_value(install::PROFILE).help(help)
}

fn profile_of(given: &ArgMatches) -> &str {
    given.get_one::<String>("profile").map_or(install::PROFILE, String::as_str)
}

/// The task of this name, or the tasks of the suite of this name.
pub(crate) fn named(name: &str) -> Vec<&'static Task> {
    match SUITES.iter().find(|suite| suite.name == name) {
        Some(suite) => suite.tasks.iter().collect(),
        None => single().filter(|task| task.name == name).collect(),
    }
}

/// Every task that has a name of its own on the command line.
pub(crate) fn single() -> impl Iterator<Item = &'static Task> {
    let quick = QUICK.iter().filter(|task| TASKS.iter().all(|other| other.name != task.name));
    TASKS.iter().chain(quick).chain(LONG)
}

/// Runs `tasks` one after the other, also when one fails; a task beside others is begun before them and judged in its
/// own place. Then prints and counts the skips of the tests, and repeats what failed.
pub(crate) fn run(workspace: &Workspace, tasks: &[&Task]) -> Tally {
    let mut total = Tally::default();
    let mut failed = Vec::new();
    let mut begun: BTreeMap<usize, Result<Ending>> = BTreeMap::new();
    for (index, task) in tasks.iter().enumerate() {
        for (later, other) in tasks.iter().enumerate().skip(index + 1) {
            if let Run::Beside { before, begin } = other.run
                && before == task.name
            {
                say!("== {} begins", other.name);
                begun.insert(later, begin(workspace));
            }
        }
        say!("== {}", task.name);
        let began = Instant::now();
        let ended = match task.run {
            Run::Alone(run) => run(workspace),
            Run::Beside { begin, .. } => {
                begun.remove(&index).unwrap_or_else(|| begin(workspace)).and_then(|end| end(workspace))
            }
        };
        let tally = ended.unwrap_or_else(|error| {
            say!("{}: {error:#}", task.name);
            Tally::of_step(false)
        });
        if tally.failed > 0 {
            failed.push(task.name);
        }
        total += tally;
        say!("== {} took {} s", task.name, began.elapsed().as_secs());
    }
    for skip in workspace.take_skips() {
        say!("{skip}");
        total.skipped += 1;
    }
    for line in workspace.take_failures() {
        say!("{line}");
    }
    for name in failed {
        say!("FAILED: cargo ci {name}");
    }
    total
}

/// Uses one tool; an error is a failure.
pub(crate) fn use_tool(workspace: &Workspace, tool: &Tool, given: &ArgMatches) -> Tally {
    (tool.run)(workspace, given).unwrap_or_else(|error| {
        say!("{}: {error:#}", tool.name);
        Tally::of_step(false)
    })
}

fn fmt(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["fmt", "--all", "--check"]))
}

fn clippy(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

/// The private items too, because most links of the documentation are among them.
fn doc(workspace: &Workspace) -> Result<Tally> {
    let mut cargo = workspace.cargo();
    cargo.args(["doc", "--workspace", "--no-deps", "--document-private-items"]);
    workspace.step(cargo.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Tests of processes wait for disks and for one another most of the time: twice as many run as there are processors.
fn rust_tests(workspace: &Workspace) -> Result<Tally> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cargo = workspace.cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast"]).env("RUST_TEST_THREADS", (2 * processors).to_string());
    workspace.tests(&mut cargo)
}

fn quick_clippy(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo_of_quick("clippy").args(["--all-targets", "--", "-D", "warnings"]))
}

fn unit_tests(workspace: &Workspace) -> Result<Tally> {
    workspace.tests(workspace.cargo_of_quick("test").args(["--lib", "--no-fail-fast"]))
}

fn long_tests(workspace: &Workspace) -> Result<Tally> {
    workspace.tests(workspace.cargo().args(["test", "--workspace", "--no-fail-fast"]).env("PSERVER_FULL", "1"))
}

/// `PROPTEST_CASES` is the number of cases of every property, also of one that says a number itself.
fn long_properties(workspace: &Workspace) -> Result<Tally> {
    let mut cargo = workspace.cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast", "--lib"]);
    workspace.tests(cargo.env("PROPTEST_CASES", "4096"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    static DONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());

    fn note(step: &'static str) -> Result<Tally> {
        DONE.lock().expect("no thread panics while it holds the lock").push(step);
        Ok(Tally::of_step(step != "fails"))
    }

    fn begin(_: &Workspace) -> Result<Ending> {
        note("begins")?;
        Ok(Box::new(|_| note("ends")))
    }

    fn check(runs: &[Run], expected: &[&str], tally: &str) {
        DONE.lock().expect("no thread panics while it holds the lock").clear();
        let tasks = runs.iter().zip(["0", "1", "2", "3"]).map(|(run, name)| Task { name, about: "", run: *run });
        let tasks: Vec<Task> = tasks.collect();
        let all = run(&Workspace::of_this_program(), &tasks.iter().collect::<Vec<_>>());
        assert_eq!(*DONE.lock().expect("no thread panics while it holds the lock"), expected);
        assert_eq!(all.to_string(), tally);
    }

    #[test]
    fn every_name_of_the_command_line_is_there_once() {
        let mut names: Vec<&str> = single().map(|task| task.name).collect();
        names.extend(SUITES.iter().map(|suite| suite.name).chain(TOOLS.iter().map(|tool| tool.name)));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        // A task that is begun before one that does not exist would be begun last.
        for task in TASKS {
            if let Run::Beside { before, .. } = task.run {
                assert!(TASKS.iter().any(|other| other.name == before), "{} begins before no task", task.name);
            }
        }
        assert_eq!(named("quick").len(), QUICK.len());
        assert_eq!(named("unit-tests").len(), 1);
    }

    #[test]
    fn a_task_beside_another_begins_before_it_and_is_judged_after_it() {
        let (one, fails) = (Run::Alone(|_| note("one")), Run::Alone(|_| note("fails")));
        let beside = |before| Run::Beside { before, begin };
        check(
            &[one, fails, one, beside("1")],
            &["one", "begins", "fails", "one", "ends"],
            "3 passed, 1 failed, 0 skipped",
        );
        check(&[one, beside("absent")], &["one", "begins", "ends"], "2 passed, 0 failed, 0 skipped");
        check(&[beside("1"), one], &["begins", "ends", "one"], "2 passed, 0 failed, 0 skipped");
        let refuses = Run::Beside { before: "1", begin: |_| anyhow::bail!("no kernel") };
        check(&[refuses, one], &["one"], "1 passed, 1 failed, 0 skipped");
    }
}
