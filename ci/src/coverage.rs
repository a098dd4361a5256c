//! `cargo ci coverage`: the share of lines that unit tests run, measured by cargo-llvm-cov.

use anyhow::{Context, Result, ensure};

use crate::workspace::{Tally, Workspace};

/// Prints lines, functions and regions of each file, and last the share of all lines. No figure fails.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    if !workspace.has_cargo_tool("llvm-cov") {
        workspace
            .skip("coverage", "cargo-llvm-cov is not installed; `cargo install --locked cargo-llvm-cov` installs it")?;
        return Ok(Tally::default());
    }
    let output =
        workspace.cargo_of_quick("llvm-cov").args(["--lib"]).output().context("cannot start cargo llvm-cov")?;
    let text = String::from_utf8_lossy(&output.stdout);
    say!("{text}");
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let share = line_share(&text).context("cargo llvm-cov printed no line TOTAL")?;
    say!("coverage: unit tests run {share} of the lines");
    Ok(Tally::of_step(true))
}

/// The tenth column of the last line: `TOTAL`, then count, missed and share of regions, functions, lines and branches.
fn line_share(text: &str) -> Option<&str> {
    let total = text.lines().rev().find(|line| line.starts_with("TOTAL"))?;
    total.split_whitespace().nth(9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_lines_is_read_from_the_last_line() {
        let text = "Filename Regions\nTOTAL  10  1  90.00%  20  2  90.01%  30  3  90.02%  0  0  -\n";
        assert_eq!(line_share(text), Some("90.02%"));
        assert_eq!(line_share("error: no such command"), None);
    }
}
