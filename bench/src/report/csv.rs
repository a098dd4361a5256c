//! Comma-separated values, as RFC 4180 has them.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::table::bare;
use super::{Outcome, Report};

/// The first columns, in this order.
const FIRST: [&str; 3] = ["name", "ratio_to_ceiling", "wrong"];

pub(super) fn write(report: &Report) -> String {
    let known: BTreeSet<&str> =
        report.results.iter().flat_map(|result| result.fields().keys().map(String::as_str)).collect();
    let others = known.into_iter().filter(|name| !FIRST.contains(name));
    let columns: Vec<&str> = FIRST.into_iter().chain(others).collect();
    let mut text = columns.join(",") + "\r\n";
    for result in &report.results {
        let cells: Vec<_> = columns.iter().map(|column| cell(result, column)).collect();
        let _ = write!(text, "{}\r\n", cells.join(","));
    }
    text
}

fn cell(result: &Outcome, column: &str) -> String {
    let value = result.field(column);
    if value.is_null() {
        return String::new();
    }
    let text = bare(value);
    if text.contains([',', '"', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}
