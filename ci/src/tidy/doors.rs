//! The client's calls in each language, from one list (`doors.txt`): every name is there, every call of a client is in
//! the list, and the pages have the tables that the list makes.

use std::path::Path;

use anyhow::{Context, Result};

use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Standing};

const RULE: &str = "doors";
const LIST: &str = include_str!("doors.txt");
const LIST_PATH: &str = "ci/src/tidy/doors.txt";
const LANGUAGES: [&str; 5] = ["Rust", "C", "C++", "Fortran", "Python"];
const RUST: usize = 0;
const C: usize = 1;
const CPP: usize = 2;
const FORTRAN: usize = 3;
const PYTHON: usize = 4;
/// Each page with a table, and the languages of its columns.
const PAGES: [(&str, &[usize]); 2] = [("docs/CAPI.md", &[RUST, C, CPP, FORTRAN]), ("docs/PYTHON.md", &[C, PYTHON])];
/// Symbols of other editions, which the C page describes.
const EDITIONS: [&str; 3] = ["_e1", "_e2", "_go"];

/// A line of the list.
struct CallRow {
    line: usize,
    /// None of a line that lists names of one language.
    purpose: Option<&'static str>,
    cells: Vec<&'static str>,
}

impl CallRow {
    /// The names in a language.
    fn names(&self, language: usize) -> impl Iterator<Item = &'static str> {
        let cell = match self.cells[language] {
            "=" => self.cells[C],
            cell => cell,
        };
        cell.split_whitespace().filter(move |_| !cell.starts_with("- "))
    }

    /// A cell of a page's table.
    fn shown(&self, language: usize) -> String {
        if self.cells[language] == "=" {
            return "as in C".to_owned();
        }
        if let Some(reason) = self.cells[language].strip_prefix("- ") {
            return format!("none: {reason}");
        }
        self.names(language).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }
}

fn rows() -> Vec<CallRow> {
    let lines = (1..).zip(LIST.lines()).filter(|(_, line)| !line.starts_with('#'));
    let row = |(line, text): (usize, &'static str)| {
        let mut cells: Vec<&str> = text.split('|').map(str::trim).collect();
        let purpose = cells.remove(0);
        CallRow { line, purpose: (purpose != "-").then_some(purpose), cells }
    };
    lines.map(row).collect()
}

/// The names that each language has now.
fn there(root: &Path, files: &[SourceFile]) -> Result<[Vec<String>; 5]> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).with_context(|| format!("reading {path}"));
    let client = files.iter().filter(|file| file.path.starts_with("client/src/"));
    let rust = client.flat_map(|file| methods(&file.text, "impl Client {", "    pub fn "));
    let symbols = read("capi/symbols.txt")?;
    let is_own = |symbol: &&str| !EDITIONS.iter().any(|end| symbol.ends_with(end));
    let of_edition_1 = |symbol: &str| matches!(symbol, "paddle_declare_param") || EDITION_1.contains(&symbol);
    let c = symbols.lines().filter(is_own).filter(|symbol| !of_edition_1(symbol)).map(str::to_owned);
    let cpp = words(&read("capi/include/paddle_pserver.hpp")?);
    let fortran = words(&read("capi/include/paddle_pserver.f90")?);
    let python = read("python/pserver/_client.py")?;
    let calls = methods(&python, "class Client:", "    def ").into_iter().chain(methods(&python, "", "def "));
    let python = calls.filter(|name| !name.starts_with('_') && name != "last_client");
    Ok([rust.collect(), c.collect(), cpp, fortran, python.collect()])
}

/// Calls of edition 1 whose symbols have no ending.
const EDITION_1: [&str; 6] = [
    "paddle_begin_init_param",
    "paddle_finish_init_param",
    "paddle_get_param",
    "paddle_send_grad",
    "paddle_set_param",
    "paddle_begin_init_param_n",
];

fn words(text: &str) -> Vec<String> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').map(str::to_owned).collect()
}

/// The names behind `prefix` in blocks that begin with this line and end at the next line that is not indented.
fn methods(text: &str, begin: &str, prefix: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_inside = begin.is_empty();
    for line in text.lines() {
        if !begin.is_empty() && !line.is_empty() && !line.starts_with(' ') {
            is_inside = line == begin;
        }
        if let Some(rest) = line.strip_prefix(prefix).filter(|_| is_inside) {
            names.push(rest.split(['(', '<']).next().unwrap_or_default().to_owned());
        }
    }
    names
}

/// The table of a page.
fn table(rows: &[CallRow], languages: &[usize]) -> String {
    let heads: Vec<&str> = languages.iter().map(|language| LANGUAGES[*language]).collect();
    let mut text = format!("| to | {} |\n|-|{}\n", heads.join(" | "), "-|".repeat(heads.len()));
    for row in rows {
        let Some(purpose) = row.purpose else { continue };
        let cells: Vec<String> = languages.iter().map(|language| row.shown(*language)).collect();
        text += &format!("| {purpose} | {} |\n", cells.join(" | "));
    }
    text
}

pub(super) fn look(root: &Path, files: &[SourceFile]) -> Result<Vec<Finding>> {
    let (rows, there) = (rows(), there(root, files)?);
    let mut findings = Vec::new();
    let mut refuse = |path: &str, line: usize, text: String| {
        findings.push(Finding { path: path.to_owned(), line, rule: RULE, text, standing: Standing::Refused });
    };
    for (language, names) in there.iter().enumerate() {
        for row in &rows {
            for name in row.names(language).filter(|name| !names.iter().any(|known| known == name)) {
                refuse(LIST_PATH, row.line, format!("{} has no {name}", LANGUAGES[language]));
            }
        }
        // The words of a C++ or Fortran header are not all calls.
        if [RUST, C, PYTHON].contains(&language) {
            let listed: Vec<&str> = rows.iter().flat_map(|row| row.names(language)).collect();
            for name in names.iter().filter(|name| !listed.contains(&name.as_str())) {
                refuse(LIST_PATH, 1, format!("{}'s {name} is in no row", LANGUAGES[language]));
            }
        }
    }
    for (path, languages) in PAGES {
        let wanted = table(&rows, languages);
        if !files.iter().any(|file| file.path == path && file.text.contains(&wanted)) {
            refuse(path, 1, format!("the page lacks this table of {LIST_PATH}:\n{wanted}"));
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_those_of_a_block() {
        let text = "impl Client {\n    pub fn push(&self) {\n    }\n\n    fn own() {}\n    pub fn scope<'a>() {}\n}\n\
                    impl Other {\n    pub fn not_this() {}\n}\n";
        assert_eq!(methods(text, "impl Client {", "    pub fn "), ["push", "scope"]);
        assert_eq!(methods("def connect(\ndef _own(\n", "", "def "), ["connect", "_own"]);
    }

    #[test]
    fn a_table_has_names_and_reasons() {
        let row = |purpose, cells: [&'static str; 5]| CallRow { line: 1, purpose, cells: cells.to_vec() };
        let rows =
            [row(Some("join"), ["new", "c_new c_with", "client", "=", "- no need"]), row(None, ["x", "", "", "", ""])];
        assert_eq!(
            table(&rows, &[RUST, FORTRAN, PYTHON]),
            "| to | Rust | Fortran | Python |\n|-|-|-|-|\n| join | `new` | as in C | none: no need |\n"
        );
    }
}
