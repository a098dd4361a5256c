//! The tasks behind `cargo ci <task>`.
//!
//! Not here: the tests themselves. Each package holds its own; this program runs them, counts them and checks what a
//! compiler cannot. Read [`tasks`] (the table of everything), then [`tidy`] (the rules of `STYLE.md`), then
//! [`workspace`] (how a task runs a program). [`verbs_bindings`] writes a source that is committed, and is for
//! maintainers; [`rdma_sys`] compares it; [`debian`] has the packages that they read. [`install`] and
//! [`installed`] are about what users get, and [`release`] makes all of it.

#[macro_use]
mod console;

mod aarch64;
mod built;
mod coverage;
mod debian;
mod deny;
mod gpu;
mod install;
mod installed;
mod kernels;
mod mutants;
mod python;
mod rdma_sys;
mod release;
mod simulate;
mod soft_roce;
mod tasks;
mod tidy;
mod verbs_bindings;
mod workspace;

use std::process::ExitCode;

use clap::Command;

use crate::tasks::{SUITES, TOOLS};
use crate::workspace::Workspace;

fn main() -> ExitCode {
    if soft_roce::guest::is_first_process() {
        return soft_roce::guest::live();
    }
    let chosen = arguments().get_matches();
    let (name, given) = chosen.subcommand().expect("clap requires a task");
    let workspace = Workspace::of_this_program();
    let tally = match TOOLS.iter().find(|tool| tool.name == name) {
        Some(tool) => tasks::use_tool(&workspace, tool, given),
        None => tasks::run(&workspace, &tasks::named(name)),
    };
    say!("{tally}");
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn arguments() -> Command {
    let tools = TOOLS.iter().map(|tool| (tool.arguments)(Command::new(tool.name).about(tool.about)));
    Command::new("cargo ci")
        .about("Checks and tests of the whole workspace")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(tasks::single().map(|task| Command::new(task.name).about(task.about)))
        .subcommands(SUITES.iter().map(|suite| Command::new(suite.name).about(suite.about)))
        .subcommands(tools)
}
