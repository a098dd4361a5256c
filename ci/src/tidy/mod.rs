//! The rules of `STYLE.md` that a program can check, as a table of functions over one file.
//!
//! Not here: the findings of rustc and clippy. Read [`source`] (the file that a rule sees), then the rules: [`floors`]
//! (imports), [`reach`] (what the floors may touch), [`shape`] (how code looks), [`sentences`] (how comments and pages
//! are worded), [`census`] (counts that may only fall), [`circles`] (files that name each other), [`manifest`]
//! (`Cargo.toml`), [`mentions`] (names in pages), [`ways`] (lists of functions in pages), [`figures`] (figures in
//! pages), [`links`] (links of pages) and [`doors`] (the same call in each language).

mod calls;
mod census;
mod circles;
mod doors;
mod figures;
mod floors;
mod lexer;
mod links;
mod manifest;
mod mentions;
mod reach;
mod sentences;
mod shape;
mod source;
mod statements;
#[cfg(test)]
mod tests;
mod ways;

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
    standing: Standing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Fails the task.
    Refused,
    /// A comment in the source gives the reason. Counted.
    Excused,
    /// Fails the task when the rule has more of them than its ceiling.
    Counted,
}

/// How many findings of a counted rule there may be. A ceiling is only ever lowered.
const CEILINGS: &[(&str, usize)] =
    &[("sentences", 0), ("old-names", 0), ("type-names", 3), ("fields", 0), ("parameters", 0), ("call-circles", 0)];

/// A rule looks at one file of any kind and passes over those that are not its own.
struct TidyRule {
    name: &'static str,
    look: fn(&SourceFile, &mut Report<'_>),
}

const RULES: &[TidyRule] = &[
    TidyRule { name: "floors", look: floors::imports },
    TidyRule { name: "purity", look: reach::purity },
    TidyRule { name: "environment", look: reach::environment },
    TidyRule { name: "output", look: reach::output },
    TidyRule { name: "unsafe", look: reach::unsafety },
    TidyRule { name: "function-length", look: shape::function_length },
    TidyRule { name: "layout", look: shape::layout },
    TidyRule { name: "prose", look: shape::prose },
    TidyRule { name: "names", look: shape::names },
    TidyRule { name: "ignored-test", look: shape::ignored_tests },
    TidyRule { name: "sleeping-test", look: shape::sleeping_tests },
    TidyRule { name: "manifest", look: manifest::manifest },
    TidyRule { name: "sentences", look: sentences::sentences },
    TidyRule { name: "old-names", look: census::old_names },
    TidyRule { name: "fields", look: census::fields },
    TidyRule { name: "parameters", look: census::parameters },
];

/// Where a rule writes what it found in one file.
struct Report<'a> {
    path: &'a str,
    rule: &'static str,
    findings: &'a mut Vec<Finding>,
}

impl Report<'_> {
    fn refuse(&mut self, line: usize, text: impl Into<String>) {
        self.push(line, text.into(), Standing::Refused);
    }

    fn count(&mut self, line: usize, text: impl Into<String>) {
        self.push(line, text.into(), Standing::Counted);
    }

    fn excuse(&mut self, line: usize, text: impl Into<String>) {
        self.push(line, text.into(), Standing::Excused);
    }

    fn push(&mut self, line: usize, text: String, standing: Standing) {
        self.findings.push(Finding { path: self.path.to_owned(), line, rule: self.rule, text, standing });
    }
}

impl Display for Finding {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}:{}: {}: {}", self.path, self.line, self.rule, self.text)
    }
}

/// Where the counted findings are listed.
const COUNTED_LIST: &str = "target/tidy.txt";

/// The task: prints every finding that is refused, and every count beside its ceiling. The findings that are only
/// counted are in `target/tidy.txt`.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let files = read(workspace.root())?;
    let findings = look(workspace.root(), &files)?;
    let of = |standing| findings.iter().filter(move |finding| finding.standing == standing);
    let excess = excess(&findings);
    for line in of(Standing::Refused).map(ToString::to_string).chain(excess.iter().cloned()) {
        say!("{line}");
    }
    let list: String = of(Standing::Counted).map(|finding| format!("{finding}\n")).collect();
    fs::write(workspace.root().join(COUNTED_LIST), list).with_context(|| format!("cannot write {COUNTED_LIST}"))?;
    for (rule, ceiling) in CEILINGS {
        say!("tidy: {} of at most {ceiling} findings of `{rule}`", counted(&findings, rule));
    }
    let (refused, excused) = (of(Standing::Refused).count(), of(Standing::Excused).count());
    say!("tidy: {} files, {refused} findings, {excused} excused sleeps", files.len());
    Ok(Tally::of_step(refused == 0 && excess.is_empty()))
}

fn counted(findings: &[Finding], rule: &str) -> usize {
    findings.iter().filter(|finding| finding.standing == Standing::Counted && finding.rule == rule).count()
}

/// A line for each rule that has more findings than its ceiling.
fn excess(findings: &[Finding]) -> Vec<String> {
    let above = CEILINGS.iter().filter(|(rule, ceiling)| counted(findings, rule) > *ceiling);
    let line = |(rule, ceiling): &(&str, usize)| {
        let found = counted(findings, rule);
        format!("{rule}: {found} findings, at most {ceiling} may be; {COUNTED_LIST} lists them")
    };
    above.map(line).collect()
}

/// The findings of all rules in these files, and the names in pages that the repository at `root` does not have.
fn look(root: &Path, files: &[SourceFile]) -> Result<Vec<Finding>> {
    let repository = mentions::Repository::read(root)?;
    let mut findings = inspect(files, RULES);
    findings.extend(census::type_names(files));
    findings.extend(circles::circles(files));
    findings.extend(figures::look(files));
    findings.extend(links::look(files, &|path| root.join(path).exists()));
    findings.extend(statements::look(files, &repository));
    findings.extend(doors::look(root, files)?);
    let is_page = |file: &&SourceFile| {
        let is_at_root = matches!(file.path.as_str(), "README.md" | "CONTRIBUTING.md");
        file.is_prose() && (is_at_root || file.path.starts_with("docs/"))
    };
    let pages = files.iter().filter(is_page);
    for page in pages {
        findings.extend(mentions::look(&page.path, &page.text, &repository));
        findings.extend(ways::look(&page.path, &page.text, &repository));
    }
    Ok(findings)
}

fn inspect(files: &[SourceFile], rules: &[TidyRule]) -> Vec<Finding> {
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
    let at_root = ["Cargo.toml", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"];
    let mut files = at_root.iter().map(|name| read_file(root, name)).collect::<Result<Vec<_>>>()?;
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
