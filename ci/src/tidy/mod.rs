//! The rules of `STYLE.md` that a program can check, as a table of functions over one file.
//!
//! Not here: what rustc and clippy already refuse. Read [`source`] (what a rule sees), then the rules: [`floors`] (who
//! imports whom), [`reach`] (what the floors may touch), [`shape`] (how code looks) and [`manifest`] (`Cargo.toml`).

mod floors;
mod lexer;
mod manifest;
mod reach;
mod shape;
mod source;
#[cfg(test)]
mod tests;

use std::fmt::{Display, Formatter};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::tidy::source::SourceFile;
use crate::workspace::{Tally, Workspace};

/// Something a rule refuses.
#[derive(Debug)]
struct Finding {
    path: String,
    /// Counted from 1.
    line: usize,
    rule: &'static str,
    text: String,
    /// A comment in the source says why it stays. Counted, not refused.
    excused: bool,
}

/// A rule looks at one file of any kind and passes over those that are not its own.
struct Rule {
    name: &'static str,
    look: fn(&SourceFile, &mut Report<'_>),
}

const RULES: &[Rule] = &[
    Rule { name: "floors", look: floors::imports },
    Rule { name: "purity", look: reach::purity },
    Rule { name: "environment", look: reach::environment },
    Rule { name: "unsafe", look: reach::unsafety },
    Rule { name: "function-length", look: shape::function_length },
    Rule { name: "layout", look: shape::layout },
    Rule { name: "prose", look: shape::prose },
    Rule { name: "names", look: shape::names },
    Rule { name: "ignored-test", look: shape::ignored_tests },
    Rule { name: "unfinished", look: shape::unfinished },
    Rule { name: "sleeping-test", look: shape::sleeping_tests },
    Rule { name: "manifest", look: manifest::manifest },
];

/// Where a rule writes what it found in one file.
struct Report<'a> {
    path: &'a str,
    rule: &'static str,
    findings: &'a mut Vec<Finding>,
}

impl Report<'_> {
    fn refuse(&mut self, line: usize, text: impl Into<String>) {
        self.push(line, text.into(), false);
    }

    fn excuse(&mut self, line: usize, text: impl Into<String>) {
        self.push(line, text.into(), true);
    }

    fn push(&mut self, line: usize, text: String, excused: bool) {
        self.findings.push(Finding { path: self.path.to_owned(), line, rule: self.rule, text, excused });
    }
}

impl Display for Finding {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}:{}: {}: {}", self.path, self.line, self.rule, self.text)
    }
}

/// The task: prints every finding, and holds if there is none.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let files = read(workspace.root())?;
    let (excused, refused): (Vec<_>, Vec<_>) = inspect(&files, RULES).into_iter().partition(|finding| finding.excused);
    for finding in &refused {
        println!("{finding}");
    }
    println!("tidy: {} files, {} findings, {} excused sleeps", files.len(), refused.len(), excused.len());
    Ok(Tally::of_step(refused.is_empty()))
}

fn inspect(files: &[SourceFile], rules: &[Rule]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        for rule in rules {
            (rule.look)(file, &mut Report { path: &file.path, rule: rule.name, findings: &mut findings });
        }
    }
    findings
}

/// The manifests and Rust sources of the root and of every package, and what is written about them, ordered by path.
fn read(root: &Path) -> Result<Vec<SourceFile>> {
    let mut files = vec![read_file(root, "Cargo.toml")?, read_file(root, "README.md")?];
    for member in manifest::members(&files[0].text) {
        read_folder(root, &member, &mut files)?;
    }
    read_folder(root, "docs", &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn read_folder(root: &Path, folder: &str, files: &mut Vec<SourceFile>) -> Result<()> {
    let entries = fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder}"))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {folder}"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{folder}/{name}");
        if entry.file_type().with_context(|| format!("cannot look at {path}"))?.is_dir() {
            if name != "target" && !name.starts_with('.') {
                read_folder(root, &path, files)?;
            }
        } else if name == "Cargo.toml"
            || Path::new(&name).extension().is_some_and(|extension| extension == "rs" || extension == "md")
        {
            files.push(read_file(root, &path)?);
        }
    }
    Ok(())
}

fn read_file(root: &Path, path: &str) -> Result<SourceFile> {
    let text = fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))?;
    Ok(SourceFile::new(path, &text))
}
