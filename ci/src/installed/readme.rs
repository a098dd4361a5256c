//! The README's program in C and its commands, run with the installed prefix.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::Site;

/// Commands that others run: beginnings, and where.
const ELSEWHERE: [(&str, &str); 7] = [
    ("cargo build --release", "every task"),
    ("cargo ci test", "this is it"),
    ("cargo ci install --prefix", "the prefix of this task"),
    ("export PATH", "the environment below"),
    ("pip install ./python", "`cargo ci python`, with the same build backend"),
    ("pserver launch --servers 2 --trainers 4 --hosts", "`cli/tests/two_hosts.rs`"),
    ("cargo run --release -- quickstart", "below, with the installed program"),
];

pub(super) fn check(site: &Site<'_>) -> Result<()> {
    let text = fs::read_to_string(site.workspace.root().join("README.md")).context("the README")?;
    let folder = site.folder.join("readme");
    fs::create_dir(&folder).context("a folder")?;
    let program = block(&text, "```c\n").context("the README has no program in C")?;
    fs::write(folder.join("trainer.c"), program).context("the program")?;
    let shell = |command: &str| -> Result<String> {
        let mut sh = Command::new("sh");
        sh.args(["-euc", command]).current_dir(&folder).env("PKG_CONFIG_PATH", site.prefix.join("lib/pkgconfig"));
        sh.env("LD_LIBRARY_PATH", site.prefix.join("lib"));
        sh.env("PATH", format!("{}:{}", site.prefix.join("bin").display(), std::env::var("PATH")?));
        let output = sh.output().context("start sh")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command}: {}\n{said}{errors}", output.status);
        Ok(said)
    };
    let quickstart = shell("pserver quickstart")?;
    for shown in text.lines().filter(|line| line.starts_with("    accuracy") || line.starts_with("    model")) {
        // The words are the same; a figure may differ.
        let words: Vec<&str> = shown.split_whitespace().filter(|word| !word.contains('.')).collect();
        let is_said = quickstart.lines().any(|line| words.iter().all(|word| line.contains(word)));
        ensure!(is_said, "the README shows \"{shown}\", and quickstart says\n{quickstart}");
    }
    let promised = program.split("/* ").nth(2).and_then(|rest| rest.split(" */").next());
    let promised = promised.context("the program's second comment is what it prints")?;
    let commands = text.lines().filter_map(|line| line.strip_prefix("    ")).filter(|line| is_command(line));
    for command in commands {
        if ELSEWHERE.iter().any(|(begin, _)| command.starts_with(begin)) {
            continue;
        }
        if !command.starts_with("cc ") && !command.starts_with("pserver launch") {
            bail!("no check runs \"{command}\" of the README; expected one, or a line of ELSEWHERE");
        }
        let said = shell(command)?;
        ensure!(!command.starts_with("pserver") || said.contains(promised), "{command} printed\n{said}not {promised}");
    }
    Ok(())
}

/// Whether an indented line is a command: others are what a command prints.
fn is_command(line: &str) -> bool {
    ["cargo ", "pserver ", "cc ", "export ", "pip ", "./", "python", "torchrun "]
        .iter()
        .any(|begin| line.starts_with(begin))
}

/// The first block of a page that begins so.
fn block<'a>(text: &'a str, begin: &str) -> Option<&'a str> {
    text.split(begin).nth(1)?.split("```").next()
}
