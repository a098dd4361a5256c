//! A page of Markdown, for `docs/reports`.

use std::fmt::Write;

use serde_json::Value;

use super::Report;
use super::table::{bare, cell};

pub(super) fn write(report: &Report) -> String {
    let mut text = String::new();
    for (key, value) in report.start.iter().filter(|(key, _)| *key != "parameters") {
        let _ = writeln!(text, "- {key}: {}", bare(value));
    }
    if let Some(Value::Object(parameters)) = report.start.get("parameters") {
        parameters.iter().for_each(|(key, value)| {
            let _ = writeln!(text, "- {key}: {}", bare(value));
        });
    }
    // A column that no line has anything for says nothing.
    let has = |field| report.results.iter().any(|result| !result.field(field).is_null());
    let columns: Vec<_> = report.columns.iter().filter(|column| has(column.field)).collect();
    let row = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    text.push('\n');
    text += &row(columns.iter().map(|column| column.head.to_owned()).collect());
    text += &row(columns.iter().map(|_| "---".to_owned()).collect());
    for result in &report.results {
        text += &row(columns.iter().map(|column| cell(column, result.field(column.field)).replace('|', "/")).collect());
    }
    let _ = writeln!(text, "\nWrong elements: {}.", report.wrong());
    text
}
