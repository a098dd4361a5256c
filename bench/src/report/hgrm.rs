//! Distributions of latencies in the form that HdrHistogram's plotters read; values are microseconds.

use std::fmt::Write;

use hdrhistogram::Histogram;

use super::Report;

/// Lines for each halving of what is left of the distribution.
const TICKS: u32 = 5;

pub(super) fn write(report: &Report) -> String {
    report.histograms.iter().map(|(name, histogram)| distribution(name, histogram)).collect()
}

fn distribution(name: &str, histogram: &Histogram<u64>) -> String {
    let mut text =
        format!("# {name}\n{:>12} {:>14} {:>10} {:>14}\n\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)");
    let mut count = 0;
    for value in histogram.iter_quantiles(TICKS) {
        count += value.count_since_last_iteration();
        let (micros, quantile) = (value.value_iterated_to() as f64 * 1e-3, value.quantile_iterated_to());
        let _ = write!(text, "{micros:>12.3} {quantile:>14.12} {count:>10}");
        // The last line is the whole, and 1 / 0 is left out as the other tools do.
        let _ = if quantile < 1.0 { writeln!(text, " {:>14.2}", 1.0 / (1.0 - quantile)) } else { writeln!(text) };
    }
    let _ = writeln!(
        text,
        "#[Mean = {:>12.3}, StdDeviation = {:>12.3}]",
        histogram.mean() * 1e-3,
        histogram.stdev() * 1e-3
    );
    let _ = writeln!(text, "#[Max = {:>12.3}, Total count = {:>12}]", histogram.max() as f64 * 1e-3, histogram.len());
    let _ = writeln!(text, "#[Buckets = {:>12}, SubBuckets = {:>12}]\n", histogram.buckets(), 2048);
    text
}
