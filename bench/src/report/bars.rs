//! Bars of a report's page: a bar for each result, under the result's name, with its spread.

use maud::{Markup, html};

use super::{Outcome, Report};
use crate::statistics::percentile;

/// A chart of bars that a report may have.
struct BarKind {
    title: &'static str,
    /// The meaning of a bar and of its spread.
    note: &'static str,
    field: &'static str,
    spread: SpreadSource,
    /// The value that all bars are compared with.
    reference: Option<f64>,
    shown: fn(f64) -> String,
}

/// The fields that the ends of a spread come from.
enum SpreadSource {
    /// The quartiles of these samples.
    Quartiles(&'static str),
    /// Both ends.
    Ends(&'static str, &'static str),
    None,
}

/// One bar.
struct Bar<'a> {
    name: &'a str,
    value: f64,
    spread: Option<(f64, f64)>,
}

const KINDS: [BarKind; 6] = [
    BarKind {
        title: "Share of the ceiling",
        note: "1 is the speed of the ceiling, the simplest program for the same path. The mark is the 95 % interval of \
               the median.",
        field: "ratio_to_ceiling",
        spread: SpreadSource::Ends("ratio_low", "ratio_high"),
        reference: Some(1.0),
        shown: ratio,
    },
    BarKind {
        title: "Time of the peer over ours",
        note: "Above 1 pserver is faster. The mark is the 95 % interval of the median.",
        field: "peer_over_ours",
        spread: SpreadSource::Ends("peer_over_ours_low", "peer_over_ours_high"),
        reference: Some(1.0),
        shown: ratio,
    },
    BarKind {
        title: "Later time over earlier time",
        note: "Below 1 the later report is faster. The mark is the 95 % interval.",
        field: "change",
        spread: SpreadSource::Ends("change_low", "change_high"),
        reference: Some(1.0),
        shown: ratio,
    },
    BarKind {
        title: "Time per byte as the job grows",
        note: "1 is the time per byte of the first value on the axis; below 1 a byte takes less.",
        field: "growth",
        spread: SpreadSource::None,
        reference: Some(1.0),
        shown: ratio,
    },
    BarKind {
        title: "Bytes a second",
        note: "The bar is the median.",
        field: "bytes_per_second",
        spread: SpreadSource::None,
        reference: None,
        shown: gigabytes,
    },
    BarKind {
        title: "Median time",
        note: "The bar is the median of all blocks of measurements, the mark its quartiles: half of the blocks lie \
               within.",
        field: "latency_us_p50",
        spread: SpreadSource::Quartiles("block_latency_us"),
        reference: None,
        shown: time,
    },
];

/// The charts of bars for which the results have values. A chart in which all bars are equal to the reference, such as
/// ceilings beside themselves, is left out, and so are times that curves show.
pub(super) fn all(report: &Report, has_curves: bool) -> Markup {
    html! {
        @for kind in KINDS.iter().filter(|kind| !has_curves || kind.reference.is_some()) {
            @let bars = bars(&report.results, kind);
            @if bars.iter().any(|bar| Some(bar.value) != kind.reference) { (chart(kind, &bars)) }
        }
    }
}

fn bars<'a>(results: &'a [Outcome], kind: &BarKind) -> Vec<Bar<'a>> {
    let spread = |result: &Outcome| match kind.spread {
        SpreadSource::Quartiles(field) => quartiles(&samples(result, field)),
        SpreadSource::Ends(low, high) => Some((result.field(low).as_f64()?, result.field(high).as_f64()?)),
        SpreadSource::None => None,
    };
    let bar = |result: &'a Outcome| {
        let value = result.field(kind.field).as_f64()?;
        Some(Bar { name: result.name(), value, spread: spread(result) })
    };
    results.iter().filter_map(bar).collect()
}

fn chart(kind: &BarKind, bars: &[Bar<'_>]) -> Markup {
    let ends = bars.iter().flat_map(|bar| [Some(bar.value), bar.spread.map(|(_, high)| high), kind.reference]);
    let most = ends.flatten().fold(0.0, f64::max);
    let shown = kind.shown;
    let percent = |value: f64| format!("{:.2}%", (value / most * 100.0).clamp(0.0, 100.0));
    html! {
        section {
            h2 { (kind.title) }
            p.soft { (kind.note) }
            ol.bars {
                @for bar in bars {
                    li {
                        span.name { (bar.name) }
                        span.value {
                            (shown(bar.value))
                            @if let Some((low, high)) = bar.spread {
                                " " small { "(" (shown(low)) " to " (shown(high)) ")" }
                            }
                        }
                        div.track {
                            div.bar style=(format!("width:{}", percent(bar.value))) {}
                            @if let Some((low, high)) = bar.spread {
                                @let width = percent(high - low);
                                div.spread style=(format!("left:{};width:{width}", percent(low))) {}
                            }
                            @if let Some(reference) = kind.reference {
                                div.reference style=(format!("left:{}", percent(reference))) {}
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The numbers of a field that is a list.
pub(super) fn samples(result: &Outcome, field: &str) -> Vec<f64> {
    let all = result.field(field).as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(serde_json::Value::as_f64).collect()
}

/// The first and the third quartile; none of fewer than four samples.
pub(super) fn quartiles(samples: &[f64]) -> Option<(f64, f64)> {
    (4 <= samples.len()).then(|| (percentile(samples, 0.25), percentile(samples, 0.75)))
}

/// A time in the unit that suits it, from microseconds.
pub(super) fn time(micros: f64) -> String {
    match micros {
        _ if micros < 1e3 => format!("{} µs", digits(micros)),
        _ if micros < 1e6 => format!("{} ms", digits(micros / 1e3)),
        _ => format!("{} s", digits(micros / 1e6)),
    }
}

fn gigabytes(bytes_per_second: f64) -> String {
    format!("{} GB/s", digits(bytes_per_second / 1e9))
}

fn ratio(value: f64) -> String {
    format!("{value:.3}")
}

/// Three significant digits at least.
fn digits(value: f64) -> String {
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_unit() {
        let shown = [0.5, 12.34, 123.4, 1234.0, 56_780.0, 1.5e6].map(time);
        assert_eq!(shown, ["0.50 µs", "12.3 µs", "123 µs", "1.23 ms", "56.8 ms", "1.50 s"]);
    }

    #[test]
    fn half_of_the_samples_are_within_the_quartiles() {
        assert_eq!(quartiles(&[1.0, 2.0, 3.0]), None);
        assert_eq!(quartiles(&[4.0, 1.0, 3.0, 2.0, 5.0, 6.0, 7.0, 8.0]), Some((2.0, 6.0)));
    }
}
