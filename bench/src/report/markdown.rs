//! A page of Markdown, for `docs/reports`.

use std::fmt::Write;

use serde_json::Value;

use super::Report;
use super::table::{bare, cell, head};

pub(super) fn write(report: &Report) -> String {
    let mut text = String::new();
    for (key, value) in report.header() {
        let _ = writeln!(text, "- {key}: {value}");
    }
    if let Some(Value::Object(parameters)) = report.start.get("parameters") {
        parameters.iter().for_each(|(key, value)| {
            let _ = writeln!(text, "- {key}: {}", bare(value));
        });
    }
    let columns = report.shown();
    let row = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    text.push('\n');
    text += &row(columns.iter().map(|column| head(report, column)).collect());
    text += &row(columns.iter().map(|_| "---".to_owned()).collect());
    for result in &report.results {
        let cells = columns.iter().map(|column| cell(report, column, result.field(column.field)).replace('|', "/"));
        text += &row(cells.collect());
    }
    let _ = writeln!(text, "\nWrong elements: {}.", report.wrong());
    text
}
