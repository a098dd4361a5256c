//! Plots as SVG: a latency over bytes beside its ceiling or beside peers, and every result's share of its ceiling.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::{Outcome, Report};

const SIZE: (u32, u32) = (860, 380);
const OURS: RGBColor = RGBColor(9, 105, 218);
const OURS_TOO: RGBColor = RGBColor(84, 174, 255);
const CEILING: RGBColor = RGBColor(207, 34, 46);
/// Plots are drawn for so many trainers.
const TRAINERS_MAX: u64 = 31;

/// Of peers, one after the other.
const OTHERS: [RGBColor; 7] = [
    RGBColor(207, 34, 46),
    RGBColor(191, 135, 0),
    RGBColor(26, 127, 55),
    RGBColor(130, 80, 223),
    RGBColor(191, 57, 137),
    RGBColor(87, 96, 106),
    RGBColor(14, 138, 143),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A line: its name, its colour, and its points by size.
type Line = (String, RGBColor, Vec<(f64, f64)>);

/// The plots that this report's results allow.
pub(super) fn all(report: &Report) -> Result<Vec<String>> {
    let mut plots = Vec::new();
    let ours = points(&report.results, "latency_us_p50");
    let ceiling = points(&report.results, "ceiling_latency_us_p50");
    let sizes = ours.iter().map(|point| point.0.to_bits()).collect::<std::collections::BTreeSet<_>>();
    // Beside peers there are several transports and numbers of trainers, which are lines of their own.
    let has_peers = report.results.iter().any(|result| !result.field("peer").is_null());
    if sizes.len() > 1 && !ceiling.is_empty() && !has_peers {
        let lines = [("pserver", OURS, ours), ("baseline server", CEILING, ceiling)];
        let lines = lines.map(|(name, color, points)| (name.to_owned(), color, points));
        plots.push(draw(|area| latencies(area, "a round's median, over bytes", &lines))?);
    }
    for trainers in 1..=TRAINERS_MAX {
        let lines = peers(&report.results, trainers);
        if lines.iter().any(|(_, _, points)| points.len() > 1) {
            let caption = format!("a round's median, over bytes, {trainers} trainers");
            plots.push(draw(|area| latencies(area, &caption, &lines))?);
        }
    }
    let ratios: Vec<f64> =
        report.results.iter().filter_map(|result| result.field("ratio_to_ceiling").as_f64()).collect();
    if !ratios.is_empty() {
        plots.push(draw(|area| shares(area, &ratios))?);
    }
    Ok(plots)
}

fn draw(paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        paint(&area)?;
        area.present().map_err(failed)?;
    }
    // A page has its own head.
    Ok(svg.find("<svg").map_or_else(String::new, |start| svg[start..].to_owned()))
}

/// Results with a size and a value, by size.
fn points(results: &[Outcome], field: &str) -> Vec<(f64, f64)> {
    let point = |result: &Outcome| Some((result.field("bytes").as_f64()?, result.field(field).as_f64()?));
    let mut points: Vec<_> = results.iter().filter_map(point).filter(|(x, y)| *x > 0.0 && *y > 0.0).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// This server over each transport, then its peers, where so many trainers run rounds.
fn peers(results: &[Outcome], trainers: u64) -> Vec<Line> {
    let text = |result: &Outcome, field: &str| result.field(field).as_str().map(str::to_owned);
    let mut lines: Vec<(String, Vec<Outcome>, &str)> = Vec::new();
    for (field, who) in [("transport", "latency_us_p50"), ("peer_transport", "peer_latency_us_p50")] {
        for result in results.iter().filter(|result| result.field("trainers").as_u64() == Some(trainers)) {
            let Some((path, peer)) = text(result, field).zip(text(result, "peer")) else { continue };
            let name = format!("{} over {path}", if field == "transport" { "pserver" } else { &peer });
            let line = lines.iter().position(|(known, ..)| *known == name).unwrap_or(lines.len());
            if line == lines.len() {
                lines.push((name, Vec::new(), who));
            }
            lines[line].1.push(result.clone());
        }
    }
    let colors = [OURS, OURS_TOO].into_iter().chain(OTHERS);
    lines.into_iter().zip(colors).map(|((name, of, who), color)| (name, color, least(points(&of, who)))).collect()
}

/// One point for each size: the least of what was measured.
fn least(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    points.dedup_by_key(|point| point.0.to_bits());
    points
}

fn latencies(area: &Area<'_>, caption: &str, lines: &[Line]) -> Result<()> {
    let every = || lines.iter().flat_map(|(_, _, points)| points);
    let least = |pick: fn(&(f64, f64)) -> f64| every().map(pick).fold(f64::INFINITY, f64::min) / 1.5;
    let most = |pick: fn(&(f64, f64)) -> f64| every().map(pick).fold(0.0, f64::max) * 1.5;
    let (x, y) = (least(|one| one.0)..most(|one| one.0), least(|one| one.1)..most(|one| one.1));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .caption(caption, ("sans-serif", 18))
        .build_cartesian_2d(x.log_scale(), y.log_scale())
        .map_err(failed)?;
    chart.configure_mesh().x_desc("bytes").y_desc("microseconds").draw().map_err(failed)?;
    for (name, color, points) in lines {
        let color = *color;
        let line = LineSeries::new(points.iter().copied(), color.stroke_width(2)).point_size(4);
        let series = chart.draw_series(line).map_err(failed)?;
        series
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw().map_err(failed)
}

fn shares(area: &Area<'_>, ratios: &[f64]) -> Result<()> {
    let count = ratios.len() as f64;
    let top = ratios.iter().copied().fold(1.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .caption("share of the ceiling, in the order of the table", ("sans-serif", 18))
        .build_cartesian_2d(0.0..count, 0.0..top)
        .map_err(failed)?;
    chart.configure_mesh().disable_x_mesh().x_desc("result").y_desc("ceiling = 1").draw().map_err(failed)?;
    let bars = ratios.iter().enumerate().map(|(index, ratio)| {
        let left = index as f64;
        Rectangle::new([(left + 0.15, 0.0), (left + 0.85, *ratio)], OURS.filled())
    });
    chart.draw_series(bars).map_err(failed)?;
    let ceiling = LineSeries::new([(0.0, 1.0), (count, 1.0)], CEILING.stroke_width(2));
    chart.draw_series(ceiling).map_err(failed)?;
    Ok(())
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing a plot: {error}")
}
