//! Results, and the forms they are written in.
//!
//! A result is a flat list of fields with units in their names, so that every form is made of the same thing. Three
//! are always there: `name`, `ratio_to_ceiling` and `wrong`. Where there is no ratio, `no_ratio_because` says why.

mod bars;
mod csv;
mod curves;
mod hgrm;
mod html;
mod markdown;
mod table;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use pserver_core::metrics::WorkMeter;
use pserver_node::progress::{self, ProgressUnit, TerminalProgress};
use serde_json::{Map, Value, json};

use crate::environment;
use crate::route::Route;

/// The version of the JSON's shape. It grows when a field goes or changes its meaning.
pub(crate) const SCHEMA_VERSION: u32 = 2;

/// The first lines above a table.
const ORDER: [&str; 16] = [
    "program",
    "command",
    "version",
    "git_revision",
    "build",
    "subcommand",
    "cpu",
    "numa_nodes",
    "kernel",
    "link",
    "link_bits_per_second",
    "link_mtu_bytes",
    "transport",
    "transport_reason",
    "gpu_direct",
    "gpu_direct_reason",
];

/// A line for people on standard error, above the display of progress.
pub(crate) fn announce(text: &str) {
    // Nothing depends on its being read.
    let _ = writeln!(progress::stderr(), "psbench: {text}");
}

/// The file that gets each result as soon as it is measured.
static LINES: OnceLock<Mutex<File>> = OnceLock::new();

/// Appends each result of this process's report to a file, as a line of JSON, as soon as it is measured: a run that is
/// cut loses the rest alone. A line of a name that was there before replaces the earlier one.
pub(crate) fn append_lines_to(path: &Path) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let file = file.with_context(|| format!("{} cannot be written", path.display()))?;
    LINES.get_or_init(|| Mutex::new(file));
    Ok(())
}

fn append_line(result: &Outcome) {
    if let Some(file) = LINES.get() {
        let line = format!("{}\n", Value::Object(result.fields.clone()));
        // The report has the result even if the disk is full.
        let _ = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes());
    }
}

/// One line of a table.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    fields: Map<String, Value>,
}

/// Everything that a run says.
pub(crate) struct Report {
    pub(crate) start: Map<String, Value>,
    pub(crate) intervals: Vec<Value>,
    results: Vec<Outcome>,
    /// Latencies in nanoseconds, by name.
    pub(crate) histograms: Vec<(String, Histogram<u64>)>,
    /// The fields that people see, with what stands above them.
    pub(crate) columns: &'static [Column],
    /// Whether people see thousand million bits instead of bytes.
    pub(crate) in_gigabits: bool,
    progress: ReportProgress,
}

/// Progress of a run on a terminal.
#[derive(Default)]
struct ReportProgress {
    meter: Arc<WorkMeter>,
    display: Option<TerminalProgress>,
}

/// A column of the table: a field, how it is headed, and what it is divided by to be read.
pub(crate) struct Column {
    pub(crate) field: &'static str,
    pub(crate) head: &'static str,
    pub(crate) unit: f64,
    pub(crate) decimals: usize,
}

/// A column of text or of whole numbers.
pub(crate) const fn plain(field: &'static str, head: &'static str) -> Column {
    Column { field, head, unit: 1.0, decimals: 0 }
}

/// A column of fractions.
pub(crate) const fn scaled(field: &'static str, head: &'static str, unit: f64, decimals: usize) -> Column {
    Column { field, head, unit, decimals }
}

impl Outcome {
    pub(crate) fn new(name: &str) -> Self {
        let mut fields = Map::new();
        fields.insert("name".to_owned(), json!(name));
        fields.insert("ratio_to_ceiling".to_owned(), Value::Null);
        fields.insert("wrong".to_owned(), json!(0));
        Self { fields }
    }

    pub(crate) fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(field.to_owned(), value.into());
        self
    }

    /// Without a ratio, for this reason.
    pub(crate) fn without_ratio(self, why: &str) -> Self {
        self.with("ratio_to_ceiling", Value::Null).with("no_ratio_because", why)
    }

    pub(crate) fn field(&self, name: &str) -> &Value {
        self.fields.get(name).unwrap_or(&Value::Null)
    }

    pub(crate) fn name(&self) -> &str {
        self.field("name").as_str().unwrap_or_default()
    }

    pub(crate) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    fn wrong(&self) -> u64 {
        self.field("wrong").as_u64().unwrap_or(0)
    }
}

impl Report {
    /// A report of a subcommand, with every parameter of the run.
    pub(crate) fn new(subcommand: &str, parameters: Value, columns: &'static [Column]) -> Self {
        let mut start = environment::facts();
        start.insert("schema_version".to_owned(), json!(SCHEMA_VERSION));
        start.insert("subcommand".to_owned(), json!(subcommand));
        start.insert("parameters".to_owned(), parameters);
        let (results, histograms) = (Vec::new(), Vec::new());
        let progress = ReportProgress::default();
        Self { start, intervals: Vec::new(), results, histograms, columns, in_gigabits: false, progress }
    }

    /// Adds a result, also to the file of lines.
    pub(crate) fn push(&mut self, result: Outcome) {
        append_line(&result);
        self.results.push(result);
    }

    /// Replaces the last result of the same name by one that knows more, and appends that to the file of lines.
    pub(crate) fn replace(&mut self, result: Outcome) {
        append_line(&result);
        if let Some(known) = self.results.iter_mut().rfind(|one| one.name() == result.name()) {
            *known = result;
        }
    }

    /// All results so far.
    pub(crate) fn results(&self) -> &[Outcome] {
        &self.results
    }

    /// Announces measurements, for a display of progress; `things` is their name in the plural.
    pub(crate) fn expect(&mut self, count: usize, things: &'static str) {
        let ReportProgress { meter, display } = &mut self.progress;
        display.get_or_insert_with(|| TerminalProgress::start("measuring", ProgressUnit::Things(things), meter));
        meter.expect(count as u64);
    }

    /// Counts measurements that are over, or left out.
    pub(crate) fn measured(&self, count: usize) {
        self.progress.meter.add(count as u64);
    }

    /// Takes the display of progress away.
    pub(crate) fn complete(&mut self) {
        self.progress.display = None;
    }

    /// Notes how bytes travelled, why, and over what; of several routes the first.
    pub(crate) fn travelled(&mut self, route: &Route) {
        let Route { carried, link, no_gpu_direct } = route;
        let facts = [
            ("transport", json!(carried.by)),
            ("transport_reason", json!(carried.reason)),
            ("link", json!(link.name)),
            ("link_bits_per_second", json!(link.bits_per_second)),
            ("link_mtu_bytes", json!(link.mtu_bytes)),
            // No transport hands an accelerator's memory to a card.
            ("gpu_direct", json!(false)),
            ("gpu_direct_reason", json!(no_gpu_direct)),
        ];
        for (key, value) in facts {
            self.start.entry(key).or_insert(value);
        }
    }

    /// The columns of a printed table: those for which some result has a value.
    fn shown(&self) -> Vec<&'static Column> {
        let has = |field| self.results.iter().any(|result| !result.field(field).is_null());
        self.columns.iter().filter(|column| has(column.field)).collect()
    }

    /// The environment as people see it, in the order of what they ask first.
    fn header(&self) -> Vec<(&str, String)> {
        let known = ORDER.iter().filter_map(|key| self.start.get_key_value(*key));
        let others = self.start.iter().filter(|(key, _)| !ORDER.contains(&key.as_str()) && *key != "parameters");
        let text_of = |value: &Value| match value {
            Value::Bool(true) => "yes".to_owned(),
            Value::Bool(false) => "no".to_owned(),
            other => table::bare(other),
        };
        known.chain(others).map(|(key, value)| (key.as_str(), text_of(value))).collect()
    }

    /// Elements that came back wrong, in all results.
    pub(crate) fn wrong(&self) -> u64 {
        self.results.iter().map(Outcome::wrong).sum()
    }

    /// The whole report as JSON.
    pub(crate) fn json(&self) -> Value {
        let results: Vec<_> = self.results.iter().map(|one| Value::Object(one.fields.clone())).collect();
        json!({
            "start": self.start,
            "intervals": self.intervals,
            "end": { "results": results, "wrong": self.wrong() },
        })
    }

    /// The table for people.
    pub(crate) fn table(&self) -> String {
        table::write(self)
    }

    /// One line for each result, one column for each field that any of them has.
    pub(crate) fn csv(&self) -> Result<String> {
        csv::write(self)
    }

    /// A page that needs nothing but a browser.
    pub(crate) fn html(&self) -> String {
        html::write(self)
    }

    /// A page of Markdown: the environment and the table.
    pub(crate) fn markdown(&self) -> String {
        markdown::write(self)
    }

    /// Every latency's distribution, as HdrHistogram's own tools write it.
    pub(crate) fn hgrm(&self) -> String {
        hgrm::write(self)
    }

    /// The whole report as JSON, written out.
    pub(crate) fn json_text(&self) -> Result<String> {
        serde_json::to_string_pretty(&self.json()).context("a report is JSON")
    }
}
