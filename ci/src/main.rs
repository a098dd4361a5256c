//! The tasks behind `cargo ci <task>`.
//!
//! Not here: the tests themselves. Each package holds its own; this program runs them, counts them and checks what a
//! compiler cannot. Read [`tasks`] (the table of everything), then [`tidy`] (the rules of `STYLE.md`), then
//! [`workspace`] (how a task runs a program).

mod kernels;
mod tasks;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Arg, ArgAction, Command};

use crate::tasks::{TASKS, Task};
use crate::workspace::Workspace;

fn main() -> ExitCode {
    let chosen = arguments().get_matches();
    let name = chosen.subcommand_name().expect("clap requires a task");
    let workspace = Workspace::of_this_program();
    let wanted: Vec<_> = TASKS.iter().filter(|task| matches!(name, "test" | "all") || task.name == name).collect();
    let writes = name == "kernels" && !chosen.subcommand_matches(name).is_some_and(|given| given.get_flag("check"));
    let tally = tasks::run(&workspace, if writes { &[&tasks::MAKE_KERNELS] } else { &wanted });
    println!("{tally}");
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn arguments() -> Command {
    Command::new("cargo ci")
        .about("Checks and tests of the whole workspace")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(TASKS.iter().map(subcommand))
        .subcommand(Command::new("test").about("Every task above, and one closing line"))
        .subcommand(Command::new("all").about("The same as test: what robots run is what you run"))
}

fn subcommand(task: &Task) -> Command {
    let command = Command::new(task.name).about(task.about);
    if task.name != tasks::MAKE_KERNELS.name {
        return command;
    }
    let check = Arg::new("check").long("check").action(ArgAction::SetTrue).help("Compare, and write nothing");
    command.about("Make the committed CUDA artifacts anew, or check them").arg(check)
}
