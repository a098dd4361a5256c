//! Figures in tables of pages: a row that links a report has no figure that the report lacks.
//!
//! Not here: whether the report is true, or of this revision.

use crate::tidy::links::targets;
use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Standing};

const RULE: &str = "figures";
const REPORTS: &str = "docs/reports/";

/// The findings of all pages but the reports themselves.
pub(super) fn look(files: &[SourceFile]) -> Vec<Finding> {
    let pages = files.iter().filter(|file| file.is_prose() && !file.path.starts_with(REPORTS));
    pages.flat_map(|page| rows(page, files)).collect()
}

fn rows(page: &SourceFile, files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, row) in (1..).zip(page.text.lines()).filter(|(_, row)| row.starts_with('|')) {
        let linked = targets(row).filter_map(|link| link.split('#').next());
        let reports =
            linked.filter_map(|link| link.rsplit_once("reports/")).map(|(_, name)| format!("{REPORTS}{name}"));
        for report in reports {
            let known = files.iter().find(|file| file.path == report).map(|file| figures(&file.text));
            let known = known.unwrap_or_default();
            for figure in figures(row).into_iter().filter(|figure| !known.contains(figure)) {
                findings.push(Finding {
                    path: page.path.clone(),
                    line,
                    rule: RULE,
                    text: format!("{figure} is not in {report}"),
                    standing: Standing::Refused,
                });
            }
        }
    }
    findings
}

/// The decimal fractions of a text.
fn figures(text: &str) -> Vec<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.').map(|word| word.trim_matches('.'));
    words.filter(|word| word.split('.').count() == 2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_of_a_page_stands_in_the_report_that_its_row_links() {
        let report = || SourceFile::new(&format!("{REPORTS}speed.md"), "| tcp | 0.94 (0.90–0.98), 12.5 |");
        let check = |row: &str, expected: &[&str]| {
            let page = SourceFile::new("README.md", &format!("# Title\n\n{row}\n"));
            let found = look(&[report(), page]);
            let texts: Vec<String> = found.iter().map(|one| format!("{}:{}", one.line, one.text)).collect();
            let expected: Vec<String> =
                expected.iter().map(|figure| format!("3:{figure} is not in {REPORTS}speed.md")).collect();
            assert_eq!(texts, expected, "{row}");
        };
        check("| tcp | **0.94** | 12.5 | [speed](docs/reports/speed.md) |", &[]);
        check("| tcp | 0.95 | 12.5 | [speed](docs/reports/speed.md#x) |", &["0.95"]);
        check("| tcp | 2.5 | 0.9 | [speed](docs/reports/speed.md) |", &["2.5", "0.9"]);
        check("| tcp | 0.95 | no report |", &[]);
        check("0.95 in a sentence, see [speed](docs/reports/speed.md)", &[]);
    }
}
