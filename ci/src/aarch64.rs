//! Whether the sources compile for aarch64, where no code is generated for rules: the tiles run them.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::workspace::{Tally, Workspace};

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// The task: checked and not linked, so no compiler of another machine's C is needed. It skips where the standard
/// library for that machine is not installed.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    if !is_installed(workspace)? {
        workspace.skip("aarch64", &format!("no standard library for it; `rustup target add {TARGET}` installs it"))?;
        return Ok(Tally::default());
    }
    let mut check = workspace.cargo();
    check.args(["check", "--workspace", "--exclude", "pserver-bench", "--exclude", "pserver-ci", "--target", TARGET]);
    // blake3 would compile C; what it has in Rust is the same.
    workspace.step(check.env("CARGO_FEATURE_PURE", "1").env("CARGO_FEATURE_NO_NEON", "1"))
}

fn is_installed(workspace: &Workspace) -> Result<bool> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = workspace.command(rustc);
    let output = command.args(["--print", "target-libdir", "--target", TARGET]).output();
    let output = output.context("rustc cannot be started")?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(output.status.success() && folder.is_dir())
}
