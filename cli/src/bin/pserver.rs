//! The `pserver` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    pserver_cli::commands::run(std::env::args_os(), None).into()
}
