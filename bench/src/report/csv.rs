//! Comma-separated values, as RFC 4180 has them.

use std::collections::BTreeSet;

use anyhow::Result;
use csv::{Terminator, WriterBuilder};

use super::table::bare;
use super::{Outcome, Report};

/// The first columns, in this order.
const FIRST: [&str; 3] = ["name", "ratio_to_ceiling", "wrong"];

pub(super) fn write(report: &Report) -> Result<String> {
    let known: BTreeSet<&str> =
        report.results.iter().flat_map(|result| result.fields().keys().map(String::as_str)).collect();
    let others = known.into_iter().filter(|name| !FIRST.contains(name));
    let columns: Vec<&str> = FIRST.into_iter().chain(others).collect();
    let mut writer = WriterBuilder::new().terminator(Terminator::CRLF).from_writer(Vec::new());
    writer.write_record(&columns)?;
    for result in &report.results {
        writer.write_record(columns.iter().map(|column| cell(result, column)))?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

fn cell(result: &Outcome, column: &str) -> String {
    let value = result.field(column);
    if value.is_null() { String::new() } else { bare(value) }
}
