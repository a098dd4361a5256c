//! The measurements of a guest as one table: psbench beside perftest, in the same machine.
//!
//! Not here: a verdict. The processors of a guest are made of software and both ends share them, so a figure says
//! nothing about a network card, and a ratio only what our own code adds to the verbs that it uses.

use std::fmt::Write;

use crate::soft_roce::report::{ProgramRun, Report};

/// A program that moves bytes, or that waits for few.
struct Row {
    name: &'static str,
    /// A second program, whose figure is added.
    and: &'static str,
    figure: fn(&ProgramRun) -> Option<f64>,
    /// The divisor of the ratio.
    beside: &'static str,
    /// The goal of the ratio.
    goal: &'static str,
}

/// Millions of bytes moved in a second, in both directions together: perftest moves them in one. All of them move
/// messages of 1 MiB, of which sixteen are under way.
const RATES: &[Row] = &[
    row("ib_write_bw", perftest_rate, "ib_write_bw", ""),
    row("ib_send_bw", perftest_rate, "ib_write_bw", ""),
    row("ib_read_bw", perftest_rate, "ib_write_bw", ""),
    row("pushpull-verbs", psbench_rate, "ib_write_bw", ">= 0.90"),
    row("pushpull-tcp", psbench_rate, "ib_write_bw", ""),
    row("pushpull-verbs", psbench_rate, "pushpull-tcp", "> 1.00"),
];

/// Microseconds of a round of 4 KiB there and back; of perftest twice what it says, which is the half of it.
const TIMES: &[Row] = &[
    row("ib_write_lat", perftest_round, "ib_write_lat", ""),
    row("latency-verbs", psbench_time, "ib_write_lat", "<= 1.30"),
    row("latency-tcp", psbench_time, "ib_write_lat", ""),
    row("latency-verbs", psbench_time, "latency-tcp", ""),
];

/// Thousands of instructions of a round there and back, both ends with the kernel: microseconds of a machine that
/// counts. A round of ours carries a gradient there and a value back.
const COUNTS: &[Row] = &[
    row("ib_send_lat", perftest_round, "ib_send_lat", ""),
    row("verbs", psbench_time, "ib_send_lat", "<= 1.15"),
    row("verbs-64", psbench_time, "ib_send_lat", ""),
    row("tcp", psbench_time, "ib_send_lat", ""),
    row("shm", psbench_time, "ib_send_lat", ""),
    row("ib_send_lat-1m", perftest_round, "ib_send_lat-1m", ""),
    row("verbs-1m", psbench_time, "ib_send_lat-1m", "<= 1.02"),
    row("tcp-1m", psbench_time, "ib_send_lat-1m", ""),
];

/// Instructions for each byte that goes over the wire, of 1 MiB and two of each kind: a trainer sends and receives it
/// whole, a rank of gloo both halves once. Of a server on each trainer's host, half of what it moves goes over the wire
/// and as much through shared memory: a byte of the wire costs as much as one of each.
const BYTES: &[Row] = &[
    row("gloo-1m", gloo_byte, "gloo-1m", ""),
    row("verbs-1m-2", trainers_byte, "gloo-1m", "<= 1.00"),
    row("shm-1m-2", trainers_byte, "gloo-1m", ""),
    Row { and: "shm-1m-2", ..row("verbs-1m-2", trainers_byte, "gloo-1m", "<= 1.00") },
];

const fn row(
    name: &'static str,
    figure: fn(&ProgramRun) -> Option<f64>,
    beside: &'static str,
    goal: &'static str,
) -> Row {
    Row { name, and: "", figure, beside, goal }
}

/// The table. A program that measured nothing has a dash.
pub(super) fn table(report: &Report) -> String {
    written(report, &[("moved, MB/s", RATES), ("median, us", TIMES)])
}

/// The table of a machine that counts.
pub(super) fn counts(report: &Report) -> String {
    written(report, &[("1000 instr.", COUNTS), ("instr./byte", BYTES)])
}

fn written(report: &Report, parts: &[(&str, &[Row])]) -> String {
    let mut text = String::new();
    for (title, rows) in parts {
        let _ = writeln!(text, "{:<16} {title:>12} {:>8}   {:<14} {:>8}", "", "ratio", "to", "goal");
        for row in *rows {
            let own = figure(report, row);
            let other = rows.iter().find(|other| other.name == row.beside).and_then(|other| figure(report, other));
            let ratio = own.zip(other).filter(|(_, other)| *other > 0.0).map(|(own, other)| own / other);
            let (own, ratio) = (shown(own, 1), shown(ratio, 2));
            let name = if row.and.is_empty() { row.name.to_owned() } else { format!("+ {}", row.and) };
            let line = format!("{name:<16} {own:>12} {ratio:>8}   {:<14} {:>8}", row.beside, row.goal);
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
    text
}

fn figure(report: &Report, row: &Row) -> Option<f64> {
    let own = (row.figure)(report.run(row.name)?)?;
    if row.and.is_empty() { Some(own) } else { (row.figure)(report.run(row.and)?).map(|second| own + second) }
}

fn shown(figure: Option<f64>, digits: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.digits$}"))
}

/// The lines of perftest that are numbers and nothing else, with so many columns.
fn rows(run: &ProgramRun, columns: usize) -> impl Iterator<Item = Vec<f64>> {
    let numbers = |line: &String| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
    run.output.iter().filter_map(numbers).filter(move |row| row.len() == columns)
}

/// `#bytes #iterations BW peak BW average MsgRate`. Both ends write it; of a SEND the one that receives may not know.
fn perftest_rate(run: &ProgramRun) -> Option<f64> {
    let average = rows(run, 5).map(|row| row[3]).fold(0.0, f64::max);
    (average > 0.0).then_some(average * 1.048_576)
}

/// `#bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%`.
fn perftest_round(run: &ProgramRun) -> Option<f64> {
    rows(run, 9).map(|row| 2.0 * row[4]).reduce(f64::min)
}

fn psbench_rate(run: &ProgramRun) -> Option<f64> {
    result(run, "bytes_per_second").map(|rate| rate / 1e6)
}

/// `gloo median M us`, of which two ranks move 2 MiB.
fn gloo_byte(run: &ProgramRun) -> Option<f64> {
    let medians =
        run.output.iter().filter_map(|line| line.strip_prefix("gloo median ")?.split(' ').next()?.parse().ok());
    medians.reduce(f64::min).map(|micros| micros * 1e3 / f64::from(2 << 20))
}

/// Two trainers move 4 MiB.
fn trainers_byte(run: &ProgramRun) -> Option<f64> {
    psbench_time(run).map(|micros| micros * 1e3 / f64::from(4 << 20))
}

fn psbench_time(run: &ProgramRun) -> Option<f64> {
    result(run, "latency_us_p50")
}

/// Payload bytes that a processor copied for trainers over verbs.
pub(super) fn copied(report: &Report) -> Option<f64> {
    result(report.run("pushpull-verbs")?, "copies")
}

/// A field of the first result of `psbench --json`; the blocks, which have fields of the same name, come after it.
fn result(run: &ProgramRun, name: &str) -> Option<f64> {
    let text = run.output.join("\n");
    let (_, results) = text.rsplit_once("\"results\"")?;
    let (_, value) = results.split_once(&format!("\"{name}\":"))?;
    let value = value.trim_start();
    value[..value.find([',', '}', '\n']).unwrap_or(value.len())].trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(programs: &[(&str, &str)]) -> Report {
        let run = |(name, output): &(&str, &str)| ProgramRun {
            name: (*name).to_owned(),
            output: output.lines().map(str::to_owned).collect(),
            ..ProgramRun::default()
        };
        Report { programs: programs.iter().map(run).collect(), ..Report::default() }
    }

    #[test]
    fn our_figures_are_listed_beside_those_of_perftest() {
        let rate =
            " #bytes     #iterations    BW peak\n 65536   200  0.00  0.00  0.0\n 65536   200  21.96   20.00  0.1\n";
        let time = " 8       200          15.16    14132.18      16.00  78.70  731.77  10145.81  14132.18\n";
        let json = "{\"end\":{\"results\":[{\n\"bytes_per_second\": 10485760.0,\n\"ceiling_latency_us_p50\": 7,\n\
                    \"latency_us_p50\": 48.0\n}],\"wrong\":0},\n\"intervals\":[{\"latency_us_p50\":9}]}";
        let programs = [("ib_write_bw", rate), ("ib_write_lat", time), ("pushpull-verbs", json), ("latency-tcp", json)];
        let table = table(&report(&programs));
        let check = |name: &str, beside: &str, expected: &str| {
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let mut lines = table.lines().map(words).filter(|words| words[0] == name);
            let line = lines.find(|words| words.get(3).is_some_and(|word| word == beside));
            assert_eq!(line.unwrap_or_default()[1..], words(expected), "{name} beside {beside} in\n{table}");
        };
        check("ib_write_bw", "ib_write_bw", "21.0 1.00 ib_write_bw");
        check("pushpull-verbs", "ib_write_bw", "10.5 0.50 ib_write_bw >= 0.90");
        check("pushpull-verbs", "pushpull-tcp", "10.5 - pushpull-tcp > 1.00");
        check("ib_write_lat", "ib_write_lat", "32.0 1.00 ib_write_lat");
        check("latency-tcp", "ib_write_lat", "48.0 1.50 ib_write_lat");
        check("latency-verbs", "ib_write_lat", "- - ib_write_lat <= 1.30");
    }
}
