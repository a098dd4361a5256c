//! Curves of a report's page: times over sizes, both on logarithmic axes, with bands of their spread, as SVG.
//!
//! A curve is drawn twice, for wide and for narrow windows, so that its text has one size in both.

use maud::{Markup, html};

use super::bars::{quartiles, samples, time};
use super::{Outcome, Report};
use crate::sizes;

/// Plots are drawn for so many trainers.
const TRAINERS_MAX: u64 = 31;
/// Curves have so many colours.
const COLOURS: usize = 8;

/// The measured times of one system.
struct Curve {
    name: String,
    /// By size.
    points: Vec<CurvePoint>,
}

#[derive(Clone, Copy)]
struct CurvePoint {
    bytes: u64,
    /// Median, in microseconds.
    time: f64,
    /// Its quartiles.
    band: Option<(f64, f64)>,
}

/// The room of a drawing, in pixels.
#[derive(Clone, Copy)]
struct DrawingSize {
    class: &'static str,
    width: f64,
    height: f64,
}

const FRAMES: [DrawingSize; 2] = [
    DrawingSize { class: "wide", width: 1100.0, height: 360.0 },
    DrawingSize { class: "narrow", width: 340.0, height: 300.0 },
];
/// Beside the drawing, for the text of its axes.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;

/// Where values are in a frame.
struct CurveScale {
    frame: DrawingSize,
    bytes: (f64, f64),
    times: (f64, f64),
}

/// The curves that this report's results allow.
pub(super) fn all(report: &Report) -> Markup {
    let has_peers = report.results.iter().any(|result| !result.field("peer").is_null());
    // Results of other subcommands are several things of one size.
    let is_by_size = report.start.get("subcommand").is_some_and(|name| name == "pushpull" || name == "latency");
    let teams = if has_peers {
        (1..=TRAINERS_MAX).map(|trainers| beside_peers(report, trainers)).collect()
    } else if is_by_size {
        vec![beside_baseline(report)]
    } else {
        Vec::new()
    };
    html! {
        @for (trainers, curves) in (1_u64..).zip(&teams) {
            @if curves.iter().any(|curve| curve.points.len() > 1) {
                section {
                    h2 { "Median time of a round by size" @if has_peers { ", " (trainers) " trainers" } }
                    p.soft {
                        "Both axes are logarithmic. The band is the quartiles of the blocks of rounds: half of the \
                         blocks lie within."
                    }
                    ul.legend {
                        @for (curve, colour) in curves.iter().zip((0..COLOURS).cycle()) {
                            li class=(format!("c{colour}")) { span.swatch {} (curve.name) }
                        }
                    }
                    @for frame in FRAMES { (drawing(curves, frame)) }
                }
            }
        }
    }
}

fn beside_baseline(report: &Report) -> Vec<Curve> {
    let own = |result: &Outcome| point(result, "latency_us_p50", &samples(result, "block_latency_us"));
    let other = |result: &Outcome| {
        let field = "ceiling_latency_us_p50";
        point(result, field, &blocks(report, result.name(), field))
    };
    let (ours, baseline) = (report.results.iter().filter_map(own), report.results.iter().filter_map(other));
    let curves = [("pserver", ours.collect()), ("baseline server", baseline.collect())];
    curves
        .into_iter()
        .map(|(name, points)| Curve::new(name.to_owned(), points))
        .filter(|curve| !curve.points.is_empty())
        .collect()
}

/// This server over each transport, then its peers, where so many trainers run rounds.
fn beside_peers(report: &Report, trainers: u64) -> Vec<Curve> {
    let mut curves: Vec<(String, Vec<CurvePoint>)> = Vec::new();
    for is_peer in [false, true] {
        for result in report.results.iter().filter(|result| result.field("trainers").as_u64() == Some(trainers)) {
            let transport = if is_peer { "peer_transport" } else { "transport" };
            let Some((path, peer)) = result.field(transport).as_str().zip(result.field("peer").as_str()) else {
                continue;
            };
            let point = if is_peer {
                let blocks = blocks(report, &format!("{}: the peer", result.name()), "latency_us_p50");
                point(result, "peer_latency_us_p50", &blocks)
            } else {
                point(result, "latency_us_p50", &samples(result, "block_latency_us"))
            };
            let Some(point) = point else { continue };
            let name = format!("{} over {path}", if is_peer { peer } else { "pserver" });
            match curves.iter_mut().find(|(known, _)| *known == name) {
                Some((_, points)) => points.push(point),
                None => curves.push((name, vec![point])),
            }
        }
    }
    curves.into_iter().map(|(name, points)| Curve::new(name, points)).collect()
}

/// A field of the blocks with this name.
fn blocks(report: &Report, name: &str, field: &str) -> Vec<f64> {
    let blocks = report.intervals.iter().filter(|block| block["name"] == name);
    blocks.filter_map(|block| block[field].as_f64()).collect()
}

fn point(result: &Outcome, field: &str, blocks: &[f64]) -> Option<CurvePoint> {
    let (bytes, time) = (result.field("bytes").as_u64()?, result.field(field).as_f64()?);
    (0 < bytes && 0.0 < time).then(|| CurvePoint { bytes, time, band: quartiles(blocks) })
}

impl Curve {
    /// One point for each size: the least of its times.
    fn new(name: String, mut points: Vec<CurvePoint>) -> Self {
        points.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.time.total_cmp(&b.time)));
        points.dedup_by_key(|point| point.bytes);
        Self { name, points }
    }
}

impl CurveScale {
    fn new(curves: &[Curve], frame: DrawingSize) -> Self {
        let points = || curves.iter().flat_map(|curve| &curve.points);
        let ends = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)))
        };
        let times = |point: &CurvePoint| point.band.map_or([point.time; 3], |(low, high)| [low, point.time, high]);
        let (low, high) = ends(&mut points().flat_map(times));
        Self { frame, bytes: ends(&mut points().map(|point| point.bytes as f64)), times: (low / 1.25, high * 1.25) }
    }

    fn x(&self, bytes: u64) -> f64 {
        LEFT + share(self.bytes, bytes as f64) * (self.frame.width - LEFT - RIGHT)
    }

    fn y(&self, time: f64) -> f64 {
        self.frame.height - BOTTOM - share(self.times, time) * (self.frame.height - TOP - BOTTOM)
    }

    /// The sizes that were measured, as many as have room beside each other.
    fn sizes(&self, curves: &[Curve]) -> Vec<u64> {
        const LABEL: f64 = 62.0;
        let mut all: Vec<u64> = curves.iter().flat_map(|curve| &curve.points).map(|point| point.bytes).collect();
        all.sort_unstable();
        all.dedup();
        let mut last = f64::NEG_INFINITY;
        all.retain(|bytes| {
            let has_room = last + LABEL <= self.x(*bytes);
            last = if has_room { self.x(*bytes) } else { last };
            has_room
        });
        all
    }

    /// Round times: of each power of ten one, or three where there are few powers.
    fn ticks(&self) -> Vec<f64> {
        let (low, high) = self.times;
        let few = (high / low).log10() < 2.5;
        let of_power = |power: i32| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power));
        let all = (-3..10).flat_map(of_power).filter(|tick| (low..=high).contains(tick));
        all.filter(|tick| few || (tick.log10().fract().abs() < 1e-9)).collect()
    }
}

/// Where a value is between two others, on a logarithmic scale.
fn share((low, high): (f64, f64), value: f64) -> f64 {
    if low < high { (value / low).ln() / (high / low).ln() } else { 0.5 }
}

fn drawing(curves: &[Curve], frame: DrawingSize) -> Markup {
    let DrawingSize { class, width, height } = frame;
    let scale = CurveScale::new(curves, frame);
    let (right, bottom) = (width - RIGHT, height - BOTTOM);
    html! {
        svg class=(class) viewBox=(format!("0 0 {width} {height}")) role="img" aria-label="Times by size" {
            @for tick in scale.ticks() {
                @let y = scale.y(tick);
                line.grid x1=(LEFT) x2=(right) y1=(px(y)) y2=(px(y)) {}
                text.left x=(LEFT - 8.0) y=(px(y + 4.0)) { (tick_text(tick)) }
            }
            @for bytes in scale.sizes(curves) {
                @let x = scale.x(bytes);
                line.grid x1=(px(x)) x2=(px(x)) y1=(TOP) y2=(bottom) {}
                text.below x=(px(x)) y=(bottom + 18.0) { (sizes::show(bytes)) }
            }
            @for (curve, colour) in curves.iter().zip((0..COLOURS).cycle()) {
                g class=(format!("c{colour}")) { (curve_of(curve, &scale)) }
            }
        }
    }
}

fn curve_of(curve: &Curve, scale: &CurveScale) -> Markup {
    let at = |bytes: u64, time: f64| format!("{},{}", px(scale.x(bytes)), px(scale.y(time)));
    let with_bands = || curve.points.iter().filter_map(|point| Some((point.bytes, point.band?)));
    let above = with_bands().map(|(bytes, (_, high))| at(bytes, high));
    let below = with_bands().map(|(bytes, (low, _))| at(bytes, low)).collect::<Vec<_>>().into_iter().rev();
    let line: Vec<String> = curve.points.iter().map(|point| at(point.bytes, point.time)).collect();
    html! {
        polygon.band points=(above.chain(below).collect::<Vec<_>>().join(" ")) {}
        polyline.line points=(line.join(" ")) {}
        @for point in &curve.points {
            circle cx=(px(scale.x(point.bytes))) cy=(px(scale.y(point.time))) r="4" { title { (tip(curve, point)) } }
        }
    }
}

/// A point in words.
fn tip(curve: &Curve, point: &CurvePoint) -> String {
    let band = point.band.map_or(String::new(), |(low, high)| format!(" ({} to {})", time(low), time(high)));
    format!("{}, {}: {}{band}", curve.name, sizes::show(point.bytes), time(point.time))
}

/// A round time without decimals that say nothing.
fn tick_text(micros: f64) -> String {
    let text = time(micros);
    let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
    let number = if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number };
    format!("{number} {unit}")
}

/// A coordinate to a tenth of a pixel.
fn px(value: f64) -> String {
    format!("{value:.1}")
}
