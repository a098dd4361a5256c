//! Names in pages: paths, functions, limits, options, variables and tasks that must exist in the repository.
//!
//! A page is checked where it marks something as code. Not here: whether what a page says of it is true.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::tasks::{SUITES, TOOLS, single};
use crate::tidy::lexer::is_word;
use crate::tidy::{Finding, Standing};

const RULE: &str = "mentions";
/// Files whose words count as there.
const SOURCES: [&str; 11] = ["rs", "c", "h", "cpp", "cu", "sh", "py", "toml", "md", "rule", "program"];
/// Extensions of file names: a word of a page with one of them is a path.
const ENDINGS: [&str; 8] = [".rs", ".md", ".sh", ".cu", ".cpp", ".c", ".h", ".toml"];
/// Options of other programs that pages tell about.
const FOREIGN_OPTIONS: [&str; 1] = ["--toggle-collect"];

/// Everything that a page can name.
#[derive(Default)]
pub(super) struct Repository {
    /// Files and folders, from the root, with `/`.
    paths: BTreeSet<String>,
    /// Sources that are no pages: path and text.
    sources: Vec<(String, String)>,
    /// The words of those.
    words: BTreeSet<String>,
}

impl Repository {
    /// Reads the repository at `root`, but for what builds leave in it.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut repository = Self::default();
        repository.read_folder(root, "")?;
        Ok(repository)
    }

    /// Adds a file, and the folders it lies in.
    pub(super) fn add(&mut self, path: &str, text: &str) {
        self.paths.extend(path.match_indices('/').map(|(end, _)| path[..end].to_owned()));
        self.paths.insert(path.to_owned());
        if !path.ends_with(".md") {
            let words = text.split(|letter| !is_word(letter)).filter(|word| !word.is_empty());
            self.words.extend(words.map(str::to_owned));
            self.sources.push((path.to_owned(), text.to_owned()));
        }
    }

    /// The text of a source, by its path from the root.
    pub(super) fn source(&self, path: &str) -> Option<&str> {
        self.sources.iter().find(|(one, _)| one == path).map(|(_, text)| text.as_str())
    }

    fn read_folder(&mut self, root: &Path, folder: &str) -> Result<()> {
        let entries = fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder:?}"))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {folder:?}"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            let kind = entry.file_type().with_context(|| format!("cannot look at {path}"))?;
            if kind.is_dir() && !matches!(name.as_str(), "target" | "models" | ".git") {
                self.read_folder(root, &path)?;
            } else if kind.is_file() {
                let is_source = Path::new(&name).extension().is_some_and(|one| SOURCES.iter().any(|end| one == *end));
                let text = if is_source { fs::read_to_string(entry.path()) } else { Ok(String::new()) };
                self.add(&path, &text.with_context(|| format!("cannot read {path}"))?);
            }
        }
        Ok(())
    }

    /// The paths that a page's words may mean: from the root, or the end of one.
    fn meant<'a>(&'a self, claim: &str) -> Vec<&'a String> {
        let claim = claim.trim_end_matches('/');
        let is_meant =
            |path: &&String| path.strip_suffix(claim).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'));
        self.paths.iter().filter(is_meant).collect()
    }

    fn is_top(&self, folder: &str) -> bool {
        !folder.is_empty() && self.paths.contains(folder) && self.paths.contains(&format!("{folder}/Cargo.toml"))
    }

    fn has_option(&self, option: &str) -> bool {
        let field = option.trim_start_matches('-').replace('-', "_");
        self.words.contains(&field) || self.sources.iter().any(|(_, text)| text.contains(option))
    }

    fn has_variable(&self, variable: &str) -> bool {
        let setting = variable.strip_prefix("PSERVER_").unwrap_or_default().to_lowercase();
        let is_setting = |(path, text): &(String, String)| {
            let is_list = path.ends_with("settings/args.rs") || path.ends_with("environment.rs");
            is_list && text.contains(&format!("\"{setting}\""))
        };
        self.words.contains(variable) || self.sources.iter().any(is_setting)
    }
}

/// A name in a page that the repository does not have.
pub(super) fn look(page: &str, text: &str, repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        findings.extend(refusals(line, repository).into_iter().map(|text| Finding {
            path: page.to_owned(),
            line: index + 1,
            rule: RULE,
            text,
            standing: Standing::Refused,
        }));
    }
    findings
}

fn refusals(line: &str, repository: &Repository) -> Vec<String> {
    let mut refusals = tasks(line);
    let variables = words(line).filter(|word| word.strip_prefix("PSERVER_").is_some_and(|rest| !rest.is_empty()));
    refusals
        .extend(variables.filter(|word| !repository.has_variable(word)).map(|word| format!("no source reads {word}")));
    let limits = words(line).filter(|word| is_limit(word) && !repository.words.contains(*word));
    refusals.extend(limits.map(|word| format!("there is no {word}")));
    // Every second part stands between backticks.
    let parts: Vec<&str> = line.split('`').collect();
    let mut file: Option<&str> = None;
    for (between, code) in parts.chunks(2).filter_map(|pair| Some((pair[0], *pair.get(1)?))) {
        let belongs = matches!(between, ": " | ", " | " and ");
        file = file.filter(|_| belongs);
        if is_path(code, repository) {
            refusals.extend(
                expanded(code)
                    .into_iter()
                    .filter(|one| repository.meant(one).is_empty())
                    .map(|one| format!("there is no {one}")),
            );
            file = code.ends_with(".rs").then_some(code);
        } else if let Some(file) = file.filter(|_| is_item(code)) {
            refusals.extend(missing_item(file, code, repository));
        }
        refusals.extend(missing_name(code, repository));
    }
    refusals
}

/// An option, or a name of `limits`, that is nowhere.
fn missing_name(code: &str, repository: &Repository) -> Option<String> {
    let first = code.split([' ', '=']).next().unwrap_or_default();
    let is_option = first.len() > 2 && first.starts_with("--") && !first.contains("...");
    if is_option && !FOREIGN_OPTIONS.contains(&first) && !repository.has_option(first) {
        return Some(format!("nothing has an option {first}"));
    }
    let name = code.strip_prefix("limits::").filter(|name| !is_limit(name) && name.chars().all(is_word))?;
    (!repository.words.contains(name)).then(|| format!("there is no {name}"))
}

/// Names behind a file's name that the file does not have.
fn missing_item(file: &str, code: &str, repository: &Repository) -> Option<String> {
    let item = code.rsplit("::").next().unwrap_or_default().trim_end_matches("()");
    let meant: BTreeSet<String> = expanded(file).iter().flat_map(|one| repository.meant(one)).cloned().collect();
    let mut texts = repository.sources.iter().filter(|(path, _)| meant.contains(path));
    let is_there = texts.any(|(_, text)| text.split(|letter| !is_word(letter)).any(|word| word == item));
    (!is_there && !meant.is_empty()).then(|| format!("{file} has no {item}"))
}

/// Tasks that `cargo ci` does not have.
fn tasks(line: &str) -> Vec<String> {
    let known = |name: &str| {
        name == "help"
            || SUITES.iter().any(|suite| suite.name == name)
            || single().any(|task| task.name == name)
            || TOOLS.iter().any(|tool| tool.name == name)
    };
    let is_block = line.starts_with("    ");
    let code = if is_block { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
    let named = code.iter().flat_map(|code| code.split("cargo ci ").skip(1)).map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_lowercase() && letter != '-' && !letter.is_ascii_digit());
        &rest[..end.unwrap_or(rest.len())]
    });
    let unknown = named.filter(|name| !name.is_empty() && !name.starts_with('-') && !known(name));
    unknown.map(|name| format!("cargo ci has no task {name}")).collect()
}

fn is_limit(word: &str) -> bool {
    let is_capital = word.chars().all(|one| one == '_' || one.is_ascii_uppercase() || one.is_ascii_digit());
    is_capital && (word.ends_with("_MAX") || word.ends_with("_MIN"))
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|letter| !is_word(letter)).filter(|word| !word.is_empty())
}

/// Whether it is a function, a type or a field: a word, or several joined by `::`.
fn is_item(code: &str) -> bool {
    let name = code.trim_end_matches("()");
    !name.is_empty() && name.split("::").all(|part| !part.is_empty() && part.chars().all(is_word))
}

/// Whether it is a path of this repository: it begins with a package's folder, or ends as a file does.
fn is_path(code: &str, repository: &Repository) -> bool {
    let is_plain = code.chars().all(|one| is_word(one) || matches!(one, '/' | '.' | '-' | '{' | '}' | ','));
    let (top, rest) = code.split_once('/').unwrap_or(("", code));
    let is_file = ENDINGS.iter().any(|end| code.ends_with(end) && code.len() > end.len());
    is_plain && !code.starts_with('/') && (is_file || (repository.is_top(top) && !rest.is_empty()))
}

/// `a/{b,c}.rs` is `a/b.rs` and `a/c.rs`.
fn expanded(code: &str) -> Vec<String> {
    match code.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?))) {
        Some((before, (list, after))) => list.split(',').map(|one| format!("{before}{}{after}", one.trim())).collect(),
        None => vec![code.to_owned()],
    }
}
