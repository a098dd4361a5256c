//! Statements of the design documents: the page that says which test shows each of them.
//!
//! A row of its tables has a statement, and in its second cell tests, each as a file and a function, or a sentence that
//! says how the statement is read differently.

use crate::tidy::mentions::Repository;
use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Standing};

const RULE: &str = "statements";
const PAGE: &str = "docs/SEEDS.md";
const DIFFERENT: &str = "Read differently: ";

/// The findings of the page, if it is among the files.
pub(super) fn look(files: &[SourceFile], repository: &Repository) -> Vec<Finding> {
    let page = files.iter().find(|file| file.path == PAGE);
    let lines = page.into_iter().flat_map(|page| page.page_lines());
    let rows = lines.filter(|(_, line)| line.starts_with("| ") && !line.starts_with("| statement |"));
    let finding = |line, text| Finding { path: PAGE.to_owned(), line, rule: RULE, text, standing: Standing::Refused };
    rows.filter_map(|(line, row)| fault(row, repository).map(|text| finding(line, text))).collect()
}

/// The fault of a row.
fn fault(row: &str, repository: &Repository) -> Option<String> {
    let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
    let [_, shown] = cells[..] else {
        return Some(format!("found {} cells; expected a statement and its tests", cells.len()));
    };
    if shown.starts_with(DIFFERENT) {
        return None;
    }
    let is_test = |test: &str| {
        let parts =
            test.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')).and_then(|one| one.split_once("`: `"));
        parts.is_some_and(|(file, name)| {
            let text = repository.source(file).unwrap_or_default();
            [format!("fn {name}("), format!("def {name}(")].iter().any(|begin| text.contains(begin))
        })
    };
    let wrong = shown.split("; ").find(|test| !is_test(test))?;
    Some(format!("found {wrong:?}; expected a test, as `file`: `function`, or {DIFFERENT:?} and how"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_names_tests_that_exist_or_says_how_it_is_read() {
        let mut repository = Repository::default();
        repository.add("core/src/tests.rs", "#[test]\nfn a_test() {}\n");
        let check = |cell: &str, expected: Option<&str>| {
            let text = format!("# Title\n\n| statement | shown by |\n|-|-|\n| Servers add. | {cell} |\n");
            let found = look(&[SourceFile::new(PAGE, &text)], &repository);
            let texts: Vec<String> = found.iter().map(|one| format!("{}: {}", one.line, one.text)).collect();
            let expected = expected.map(|wrong| {
                format!("5: found {wrong:?}; expected a test, as `file`: `function`, or {DIFFERENT:?} and how")
            });
            assert_eq!(texts, expected.into_iter().collect::<Vec<_>>(), "{cell}");
        };
        check("`core/src/tests.rs`: `a_test`", None);
        check("`core/src/tests.rs`: `a_test`; `core/src/tests.rs`: `a_test`", None);
        check("Read differently: servers multiply.", None);
        check("`core/src/tests.rs`: `another`", Some("`core/src/tests.rs`: `another`"));
        check("`core/src/none.rs`: `a_test`", Some("`core/src/none.rs`: `a_test`"));
        check("`core/src/tests.rs`: `a_test`; soon", Some("soon"));
        check("", Some(""));
    }
}
