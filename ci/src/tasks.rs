//! Every task, in the order in which `cargo ci test` runs them.

use anyhow::Result;

use crate::kernels;
use crate::tidy;
use crate::workspace::{Tally, Workspace};

/// One line of `cargo ci`.
pub(crate) struct Task {
    /// What is typed after `cargo ci`.
    pub(crate) name: &'static str,
    /// What `cargo ci --help` says.
    pub(crate) about: &'static str,
    /// Does it, writing to the terminal. An `Err` is a task that could not run, and counts as one failure.
    pub(crate) run: fn(&Workspace) -> Result<Tally>,
}

/// The table. A new task is a new line, and is then part of `cargo ci test`. The quick ones come first.
pub(crate) const TASKS: &[Task] = &[
    Task { name: "fmt", about: "The sources are as rustfmt writes them", run: fmt },
    Task { name: "tidy", about: "The rules of STYLE.md that a program can check", run: tidy::run },
    Task { name: "clippy", about: "No warning in any target", run: clippy },
    Task { name: "gpu", about: "The CUDA side on a device, where there is one", run: gpu },
    Task { name: "kernels", about: "The committed CUDA artifacts are those of the sources", run: kernels::check },
    Task { name: "rust-tests", about: "Unit, property, process and documentation tests", run: rust_tests },
];

/// What `cargo ci kernels` does without `--check`: the one task that writes.
pub(crate) const MAKE_KERNELS: Task =
    Task { name: "kernels", about: "Make the committed CUDA artifacts anew", run: kernels::make };

/// Runs `tasks` one after the other, also when one fails, then names and counts what the tests skipped.
pub(crate) fn run(workspace: &Workspace, tasks: &[&Task]) -> Tally {
    let mut total = Tally::default();
    for task in tasks {
        println!("== {}", task.name);
        total += (task.run)(workspace).unwrap_or_else(|error| {
            println!("{}: {error:#}", task.name);
            Tally::of_step(false)
        });
    }
    for skip in workspace.take_skips() {
        println!("{skip}");
        total.skipped += 1;
    }
    total
}

fn fmt(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["fmt", "--all", "--check"]))
}

fn clippy(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn gpu(workspace: &Workspace) -> Result<Tally> {
    workspace.step_that_may_skip(workspace.command("sh").arg("kernels/cu/check-on-gpu.sh"))
}

fn rust_tests(workspace: &Workspace) -> Result<Tally> {
    workspace.tests(workspace.cargo().args(["test", "--workspace", "--no-fail-fast"]))
}
