//! One page with curves, bars, the table and the environment; nothing in it is fetched from elsewhere.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

use super::table::{bare, cell, head};
use super::{Column, Outcome, Report, bars, curves};
use crate::sizes;

const STYLE: &str = include_str!("page.css");

pub(super) fn write(report: &Report) -> String {
    let title = format!("psbench {}", report.start.get("subcommand").map(bare).unwrap_or_default());
    let fact = |name: &str| report.start.get(name).map(bare).unwrap_or_default();
    let curves = curves::all(report);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                link rel="icon" href="data:,";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (title) }
                    p.soft {
                        (fact("cpu")) ", " (fact("cores")) " cores, Linux " (fact("kernel")) "; pserver "
                        (fact("version")) " of " (fact("git_revision")) ", " (fact("build")) " build"
                    }
                    (verdict(report))
                }
                main {
                    (curves)
                    (bars::all(report, !curves.0.is_empty()))
                    section { h2 { "All figures" } (table(report)) }
                    section { h2 { "Hardware and configuration" } (facts(report)) }
                }
            }
        }
    };
    page.into_string()
}

fn verdict(report: &Report) -> Markup {
    let wrong = report.wrong();
    html! {
        @if report.results.is_empty() { p.bad { "Nothing was measured." } }
        @else if wrong == 0 { p.good { "Every element that came back was checked, and none was wrong." } }
        @else { p.bad { (wrong) " elements came back wrong." } }
    }
}

fn table(report: &Report) -> Markup {
    let columns = report.shown();
    let is_text = |column: &Column| report.results.iter().any(|result| result.field(column.field).is_string());
    let class = |column: &Column| is_text(column).then_some("text");
    html! {
        table {
            thead {
                tr {
                    @for column in &columns {
                        th class=[class(column)] title=(column.field) { (head(report, column)) }
                    }
                }
            }
            tbody {
                @for result in &report.results {
                    tr {
                        @for column in &columns {
                            td class=[class(column)] data-name=(head(report, column)) {
                                (figure(report, column, result))
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A cell as in the printed table, but sizes as people write them.
fn figure(report: &Report, column: &Column, result: &Outcome) -> String {
    let value = result.field(column.field);
    match value.as_u64() {
        Some(bytes) if column.field == "bytes" => sizes::show(bytes),
        _ => cell(report, column, value),
    }
}

/// Command, machine, build and every parameter.
fn facts(report: &Report) -> Markup {
    let parameters = report.start.get("parameters").and_then(Value::as_object);
    html! {
        dl {
            @for (key, value) in report.header().into_iter().filter(|(_, value)| value != "-") {
                dt { (key.replace('_', " ")) }
                dd { @if key == "command" { code { (value) } } @else { (fact(key, value)) } }
            }
            @for (key, value) in parameters.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
                dt { (key.replace('_', " ")) }
                dd { (listed(key, value)) }
            }
        }
    }
}

fn fact(key: &str, value: String) -> String {
    match value.parse() {
        Ok(bytes) if key == "memory_bytes" => format!("{:.1} GiB", bytes_in_gibibytes(bytes)),
        _ => value,
    }
}

fn bytes_in_gibibytes(bytes: u64) -> f64 {
    bytes as f64 / 1_073_741_824.0
}

/// A parameter as people write it: sizes with units, several values with commas between them.
fn listed(key: &str, value: &Value) -> String {
    match value {
        Value::Object(all) => {
            let said = all.iter().filter(|(_, value)| !value.is_null());
            said.map(|(key, value)| format!("{} {}", key.replace('_', " "), listed(key, value)))
                .collect::<Vec<_>>()
                .join(", ")
        }
        Value::Array(all) => all.iter().map(|one| listed(key, one)).collect::<Vec<_>>().join(", "),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::Number(number) if key.ends_with("bytes") => {
            number.as_u64().map_or_else(|| number.to_string(), sizes::show)
        }
        other => bare(other),
    }
}
