//! One page with the environment, a plot and the table; nothing in it is fetched from elsewhere.

use anyhow::Result;
use maud::{DOCTYPE, PreEscaped, html};

use super::table::{bare, cell, head};
use super::{Report, plot};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;\
    color:#1b1f24;background:#fff}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;\
    border-bottom:1px solid #d8dee4}td:first-child,th:first-child{text-align:left}dl{display:grid;\
    grid-template-columns:max-content auto;gap:0 1em}dt{color:#57606a}dd{margin:0;overflow-wrap:anywhere}\
    .bad{color:#b00020;font-weight:bold}svg{max-width:100%;height:auto}";

pub(super) fn write(report: &Report) -> Result<String> {
    let title = format!("psbench {}", report.start.get("subcommand").map(bare).unwrap_or_default());
    let plots = plot::all(report)?;
    let (columns, wrong) = (report.shown(), report.wrong());
    let parameters = report.start.get("parameters").map(|value| ("parameters", bare(value)));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head { meta charset="utf-8"; title { (title) } style { (PreEscaped(STYLE)) } }
            body {
                h1 { (title) }
                @if wrong == 0 { p { "Every element that came back was checked, and none was wrong." } }
                @else { p.bad { (wrong) " elements came back wrong." } }
                @for svg in plots { (PreEscaped(svg)) }
                table {
                    tr { @for column in &columns { th { (head(report, column)) } } }
                    @for result in &report.results {
                        tr { @for column in &columns { td { (cell(report, column, result.field(column.field))) } } }
                    }
                }
                h2 { "Where and how" }
                dl {
                    @for (key, value) in report.header().into_iter().chain(parameters) { dt { (key) } dd { (value) } }
                }
            }
        }
    };
    Ok(page.into_string())
}
