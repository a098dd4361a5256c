//! One page with the environment, a plot and the table; nothing in it is fetched from elsewhere.

use std::fmt::Write;

use anyhow::Result;

use super::table::{bare, cell, head};
use super::{Report, plot};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;\
    color:#1b1f24;background:#fff}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;\
    border-bottom:1px solid #d8dee4}td:first-child,th:first-child{text-align:left}dl{display:grid;\
    grid-template-columns:max-content auto;gap:0 1em}dt{color:#57606a}dd{margin:0;overflow-wrap:anywhere}\
    .bad{color:#b00020;font-weight:bold}svg{max-width:100%;height:auto}";

pub(super) fn write(report: &Report) -> Result<String> {
    let subcommand = escape(&report.start.get("subcommand").map(bare).unwrap_or_default());
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>psbench {subcommand}</title>\
         <style>{STYLE}</style></head><body><h1>psbench {subcommand}</h1>\n"
    );
    page.push_str(&verdict(report.wrong()));
    for svg in plot::all(report)? {
        page.push_str(&svg);
    }
    page.push_str(&table(report));
    page.push_str("<h2>Where and how</h2><dl>");
    let parameters = report.start.get("parameters").map(|value| ("parameters", bare(value)));
    for (key, value) in report.header().into_iter().chain(parameters) {
        let _ = writeln!(page, "<dt>{}</dt><dd>{}</dd>", escape(key), escape(&value));
    }
    page.push_str("</dl></body></html>\n");
    Ok(page)
}

fn verdict(wrong: u64) -> String {
    match wrong {
        0 => "<p>Every element that came back was checked, and none was wrong.</p>\n".to_owned(),
        wrong => format!("<p class=\"bad\">{wrong} elements came back wrong.</p>\n"),
    }
}

fn table(report: &Report) -> String {
    let mut text = String::from("<table><tr>");
    let columns = report.shown();
    for column in &columns {
        let _ = write!(text, "<th>{}</th>", escape(&head(report, column)));
    }
    for result in &report.results {
        text.push_str("</tr>\n<tr>");
        for column in &columns {
            let _ = write!(text, "<td>{}</td>", escape(&cell(report, column, result.field(column.field))));
        }
    }
    text + "</tr></table>\n"
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
