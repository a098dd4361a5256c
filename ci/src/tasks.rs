//! Every task, in the order in which `cargo ci test` runs them.

use std::time::Instant;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::workspace::{Tally, Workspace};
use crate::{aarch64, gpu, kernels, soft_roce, tidy, verbs_bindings};

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
    Task { name: "aarch64", about: "The sources compile for another processor", run: aarch64::run },
    Task { name: "gpu", about: "The CUDA side on a device, where there is one", run: gpu::run },
    Task {
        name: "cuda-artifacts",
        about: "The committed CUDA artifacts are those of the sources",
        run: kernels::check,
    },
    Task { name: "rust-tests", about: "Unit, property, process and documentation tests", run: rust_tests },
    Task { name: "soft-roce", about: "RDMA, in a virtual machine with a device made of software", run: soft_roce::run },
];

/// What maintainers use: a line of `cargo ci` that is no part of `cargo ci test`, and may take arguments.
pub(crate) struct Tool {
    /// What is typed after `cargo ci`.
    pub(crate) name: &'static str,
    /// What `cargo ci --help` says.
    pub(crate) about: &'static str,
    /// Adds what may follow the name.
    pub(crate) arguments: fn(Command) -> Command,
    /// Does it, as [`Task::run`] does.
    pub(crate) run: fn(&Workspace, &ArgMatches) -> Result<Tally>,
}

/// The table of tools.
pub(crate) const TOOLS: &[Tool] = &[
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
        name: "kernels",
        about: "Makes the committed CUDA artifacts anew with pinned compilers (for maintainers)",
        arguments: |command| command,
        run: |workspace, _| kernels::make(workspace),
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

/// Runs `tasks` one after the other, also when one fails, then names and counts what the tests skipped.
pub(crate) fn run(workspace: &Workspace, tasks: &[&Task]) -> Tally {
    let mut total = Tally::default();
    for task in tasks {
        println!("== {}", task.name);
        let begun = Instant::now();
        total += (task.run)(workspace).unwrap_or_else(|error| {
            println!("{}: {error:#}", task.name);
            Tally::of_step(false)
        });
        println!("== {} took {} s", task.name, begun.elapsed().as_secs());
    }
    for skip in workspace.take_skips() {
        println!("{skip}");
        total.skipped += 1;
    }
    total
}

/// Uses one tool; an error is a failure.
pub(crate) fn use_tool(workspace: &Workspace, tool: &Tool, given: &ArgMatches) -> Tally {
    (tool.run)(workspace, given).unwrap_or_else(|error| {
        println!("{}: {error:#}", tool.name);
        Tally::of_step(false)
    })
}

fn fmt(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["fmt", "--all", "--check"]))
}

fn clippy(workspace: &Workspace) -> Result<Tally> {
    workspace.step(workspace.cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn rust_tests(workspace: &Workspace) -> Result<Tally> {
    workspace.tests(workspace.cargo().args(["test", "--workspace", "--no-fail-fast"]))
}
