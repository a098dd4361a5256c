//! Tables of `docs/SETTINGS.md`: the effect of a setting that differs from the job's. Cases contradict a job and check
//! that the page is right.

use std::collections::BTreeSet;

const PAGE: &str = include_str!("../../../docs/SETTINGS.md");

/// The reaction to a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    TakesEffect,
    Refused,
    Warned,
}

impl Outcome {
    /// Each with its words on the page.
    const WORDS: [(&str, Self); 3] =
        [("takes effect", Self::TakesEffect), ("refused", Self::Refused), ("warned", Self::Warned)];

    /// The outcomes that a cell names.
    pub(crate) fn of_cell(cell: &str) -> impl Iterator<Item = Self> {
        Self::WORDS.into_iter().filter(move |(words, _)| cell.contains(words)).map(|(_, outcome)| outcome)
    }
}

/// The rows of a section: the settings in the first column, and the other cells.
pub(crate) fn rows(section: &str) -> Vec<(Vec<&'static str>, Vec<&'static str>)> {
    let (_, rest) = PAGE.split_once(&format!("\n## {section}\n")).expect("the page has the section");
    let table = rest.split("\n## ").next().expect("it is never empty").lines().filter(|line| line.starts_with("| "));
    let row = |line: &'static str| {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        (cells[0].split(", ").map(|name| name.trim_matches('`')).collect(), cells[1..].to_vec())
    };
    // The first line has the columns' names.
    table.skip(1).map(row).collect()
}

/// A case of a column: settings, their effect, and the function that contradicts a job with them and checks it.
pub(crate) type Case<S> = (&'static [&'static str], Outcome, fn(&S));

/// Checks that the cases of a column are those of the page, for each setting each outcome that its cell names, and runs
/// them.
pub(crate) fn check<S>(section: &str, column: usize, scene: &S, cases: &[Case<S>]) {
    let cells = rows(section).into_iter().map(|(names, cells)| (names, cells[column]));
    let of_page = cells.flat_map(|(names, cell)| pairs(&names, &Outcome::of_cell(cell).collect::<Vec<_>>()));
    let of_page: BTreeSet<_> = of_page.collect();
    let of_cases: BTreeSet<_> = cases.iter().flat_map(|(names, outcome, _)| pairs(names, &[*outcome])).collect();
    let missing: Vec<_> = of_page.difference(&of_cases).collect();
    assert!(missing.is_empty(), "{section}, column {column}: no case shows of the page {missing:?}");
    let unknown: Vec<_> = of_cases.difference(&of_page).collect();
    assert!(unknown.is_empty(), "{section}, column {column}: the page has not {unknown:?}");
    for (names, outcome, shows) in cases {
        println!("{section}, column {column}: {outcome:?} {names:?}");
        shows(scene);
    }
}

fn pairs(names: &[&str], outcomes: &[Outcome]) -> Vec<(String, Outcome)> {
    names.iter().flat_map(|name| outcomes.iter().map(|outcome| ((*name).to_owned(), *outcome))).collect()
}
