//! The table for people: the environment as comments, then columns.

use std::fmt::Write;

use serde_json::Value;

use super::{Column, Report};

pub(super) fn write(report: &Report) -> String {
    let mut text = String::new();
    for (key, value) in report.header() {
        let _ = writeln!(text, "# {key}: {value}");
    }
    if let Some(Value::Object(parameters)) = report.start.get("parameters") {
        let all: Vec<_> = parameters.iter().map(|(key, value)| format!("{key}={}", bare(value))).collect();
        let _ = writeln!(text, "# parameters: {}", all.join(" "));
    }
    let columns = report.shown();
    let mut rows = vec![columns.iter().map(|column| head(report, column)).collect::<Vec<_>>()];
    for result in &report.results {
        rows.push(columns.iter().map(|column| cell(report, column, result.field(column.field))).collect());
    }
    let widths: Vec<usize> =
        (0..columns.len()).map(|index| rows.iter().map(|row| row[index].chars().count()).max().unwrap_or(0)).collect();
    // Texts stand left, numbers stand right.
    let is_text = |column: &&Column| report.results.iter().any(|result| result.field(column.field).is_string());
    let left: Vec<bool> = columns.iter().map(is_text).collect();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::from(if number == 0 { "#" } else { " " });
        for ((cell, width), is_left) in row.iter().zip(&widths).zip(&left) {
            let _ = if *is_left { write!(line, "  {cell:<width$}") } else { write!(line, "  {cell:>width$}") };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let wrong = report.wrong();
    let _ = writeln!(text, "# wrong elements: {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" });
    text
}

/// A value without the quotes of JSON.
pub(super) fn bare(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// The heading of a column.
pub(super) fn head(report: &Report, column: &Column) -> String {
    if report.in_gigabits { column.head.replace("GB/s", "Gb/s") } else { column.head.to_owned() }
}

pub(super) fn cell(report: &Report, column: &Column, value: &Value) -> String {
    let is_rate = column.field.contains("bytes_per_second");
    let unit = if report.in_gigabits && is_rate { column.unit / 8.0 } else { column.unit };
    match value.as_f64() {
        Some(number) if column.decimals > 0 || column.unit != 1.0 => {
            format!("{:.*}", column.decimals, number / unit)
        }
        _ => bare(value),
    }
}
