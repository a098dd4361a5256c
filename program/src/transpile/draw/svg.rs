//! SVG diagram of all parts side by side: an op is below the ops whose values it reads, parameters and states are at
//! the right.

use std::fmt::{self, Write};

use crate::transpile::part::ProgramPart;
use crate::variable::Purpose;

use super::{DrawnEdge, DrawnNode, NodeShape, Scene, journeys};

const WIDTH: u32 = 190;
const HEIGHT: u32 = 38;
const BESIDE: u32 = 22;
const BELOW: u32 = 26;
const MARGIN: u32 = 24;
/// Above the first row: the title.
const HEAD: u32 = 40;
/// Between two parts, for the lines of sent values.
const BETWEEN: u32 = 60;
/// Letters that a box has room for.
const LETTERS: usize = 30;

/// The picture.
#[must_use]
pub fn svg(parts: &[ProgramPart]) -> String {
    let scenes: Vec<Scene> = parts.iter().map(Scene::of).collect();
    let mut left = MARGIN;
    let panels: Vec<Panel> = scenes.iter().map(|scene| Panel::new(scene, &mut left)).collect();
    let height = panels.iter().map(|panel| panel.height).max().unwrap_or(0) + 2 * MARGIN;
    let mut text = String::new();
    write(parts, &scenes, &panels, (left, height), &mut text).expect("a string takes everything");
    text
}

fn write(
    parts: &[ProgramPart],
    scenes: &[Scene],
    panels: &[Panel],
    size: (u32, u32),
    text: &mut String,
) -> fmt::Result {
    let (width, height) = (size.0 - BETWEEN + MARGIN, size.1);
    writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">"
    )?;
    writeln!(text, "<defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" ")?;
    writeln!(text, "markerHeight=\"8\" orient=\"auto-start-reverse\"><path d=\"M0 0L8 4L0 8z\"/></marker></defs>")?;
    writeln!(text, "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>")?;
    for (scene, panel) in scenes.iter().zip(panels) {
        panel.frame(scene, text)?;
        scene.lines.iter().try_for_each(|line| panel.line(line, scene, text))?;
        scene.items.iter().zip(&panel.places).try_for_each(|(item, place)| boxed(item, *place, text))?;
    }
    for journey in journeys(parts, scenes) {
        let from = panels[journey.from.0].places[journey.from.1];
        let to = panels[journey.to.0].places[journey.to.1];
        travel(from, to, text)?;
    }
    writeln!(text, "</svg>")
}

/// Where the boxes of a part are: their upper left corners.
struct Panel {
    left: u32,
    width: u32,
    height: u32,
    places: Vec<(u32, u32)>,
    /// The first row within the loop.
    loop_row: Option<u32>,
    rows: u32,
    /// The width of the rows, without parameters and states.
    main: u32,
}

impl Panel {
    /// Lays a part out, and moves `left` to where the next begins.
    fn new(scene: &Scene, left: &mut u32) -> Self {
        let rows = rows(scene);
        let is_aside = |place: usize| is_kept(&scene.items[place]);
        let count = rows.iter().max().map_or(0, |row| row + 1);
        let mut in_row = vec![0; count as usize];
        for (_, row) in rows.iter().enumerate().filter(|(place, _)| !is_aside(*place)) {
            in_row[*row as usize] += 1;
        }
        let widest = in_row.iter().copied().max().unwrap_or(0).max(1);
        let main = widest * (WIDTH + BESIDE) - BESIDE;
        let mut next: Vec<u32> = in_row.iter().map(|boxes| (widest - boxes) * (WIDTH + BESIDE) / 2).collect();
        let mut is_taken = vec![false; count as usize];
        let mut lowest = count;
        let places = rows.iter().enumerate().map(|(place, row)| {
            let mut row = *row;
            if is_aside(place) {
                while is_taken.get(row as usize).copied().unwrap_or(false) {
                    row += 1;
                }
                is_taken.resize(is_taken.len().max(row as usize + 1), false);
                is_taken[row as usize] = true;
                lowest = lowest.max(row + 1);
                return (*left + MARGIN + main + 2 * BESIDE, y(row));
            }
            let across = next[row as usize];
            next[row as usize] += WIDTH + BESIDE;
            (*left + MARGIN + across, y(row))
        });
        let places: Vec<(u32, u32)> = places.collect();
        let kept = if is_taken.contains(&true) { 2 * BESIDE + WIDTH } else { 0 };
        let width = 2 * MARGIN + main + kept;
        let looped = rows.iter().zip(&scene.items).filter(|(_, item)| item.is_in_loop && !is_kept(item));
        let loop_row = looped.map(|(row, _)| *row).min();
        let panel = Self { left: *left, width, height: y(lowest) + MARGIN, places, loop_row, rows: count, main };
        *left += width + BETWEEN;
        panel
    }

    fn frame(&self, scene: &Scene, text: &mut String) -> fmt::Result {
        let Self { left, width, height, .. } = self;
        writeln!(
            text,
            "<rect x=\"{left}\" y=\"{MARGIN}\" width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#fafafa\" \
             stroke=\"#888888\"/>"
        )?;
        let (x, base) = (left + 12, MARGIN + 18);
        writeln!(
            text,
            "<text x=\"{x}\" y=\"{base}\" font-size=\"13\" font-weight=\"bold\">{}</text>",
            plain(&scene.title)
        )?;
        let Some(row) = self.loop_row else { return Ok(()) };
        let (x, top) = (left + MARGIN - 10, y(row) - 18);
        let (wide, tall) = (self.main + 20, y(self.rows) - y(row) + 8);
        writeln!(
            text,
            "<rect x=\"{x}\" y=\"{top}\" width=\"{wide}\" height=\"{tall}\" rx=\"4\" fill=\"none\" stroke=\"#666666\" \
             stroke-dasharray=\"5 4\"/>"
        )?;
        writeln!(text, "<text x=\"{}\" y=\"{}\" fill=\"#444444\">loop_forever</text>", x + 6, top + 12)
    }

    fn line(&self, line: &DrawnEdge, scene: &Scene, text: &mut String) -> fmt::Result {
        let (from, to) = (self.places[line.from], self.places[line.to]);
        let start = if line.is_both { " marker-start=\"url(#tip)\"" } else { "" };
        let (one, other) = (is_kept(&scene.items[line.from]), is_kept(&scene.items[line.to]));
        let path = if one || other {
            let (kept, op) = if one { (from, to) } else { (to, from) };
            let ends = ((op.0 + WIDTH, op.1 + HEIGHT / 2), (kept.0, kept.1 + HEIGHT / 2));
            let (first, last) = if one { (ends.1, ends.0) } else { ends };
            format!("M{} {}L{} {}", first.0, first.1, last.0, last.1)
        } else {
            let (x, top) = (from.0 + WIDTH / 2, from.1 + HEIGHT);
            let (across, end) = (to.0 + WIDTH / 2, to.1);
            format!("M{x} {top}C{x} {} {across} {} {across} {end}", top + BELOW, end.saturating_sub(BELOW))
        };
        writeln!(text, "<path d=\"{path}\" fill=\"none\" stroke=\"#555555\" marker-end=\"url(#tip)\"{start}/>")
    }
}

fn y(row: u32) -> u32 {
    MARGIN + HEAD + row * (HEIGHT + BELOW)
}

/// The row of each box: below everything that it reads; the loop's below all others.
fn rows(scene: &Scene) -> Vec<u32> {
    let mut rows = vec![0_u32; scene.items.len()];
    let outside = scene.items.iter().any(|item| !item.is_in_loop && !is_kept(item));
    for is_in_loop in [false, true] {
        let highest = scene.items.iter().zip(&rows).filter(|(item, _)| !item.is_in_loop && !is_kept(item));
        let first = highest.map(|(_, row)| row + 1).max().unwrap_or(0);
        let first = if is_in_loop && outside { first } else { 0 };
        for place in (0..rows.len()).filter(|place| scene.items[*place].is_in_loop == is_in_loop) {
            let reads = scene.lines.iter().filter(|line| line.to == place && !is_kept(&scene.items[line.from]));
            rows[place] = reads.map(|line| rows[line.from] + 1).max().unwrap_or(first).max(first);
        }
    }
    // Parameters and states are beside the first op that touches them, data above.
    for place in 0..rows.len() {
        let beside = scene.lines.iter().filter(|line| line.from == place || line.to == place);
        let other = |line: &DrawnEdge| rows[if line.from == place { line.to } else { line.from }];
        let first: u32 = beside.map(other).min().unwrap_or(0);
        match scene.items[place].shape {
            NodeShape::Variable(Purpose::Data) => rows[place] = first.saturating_sub(1),
            NodeShape::Variable(_) => rows[place] = first,
            NodeShape::Op(_) => {}
        }
    }
    rows
}

fn is_kept(item: &DrawnNode) -> bool {
    item.shape.is_variable() && item.shape != NodeShape::Variable(Purpose::Data)
}

fn boxed(item: &DrawnNode, (x, y): (u32, u32), text: &mut String) -> fmt::Result {
    let round = if item.shape.is_variable() { HEIGHT / 2 } else { 3 };
    let fill = item.shape.fill();
    writeln!(
        text,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"{round}\" fill=\"{fill}\" \
         stroke=\"#333333\"/>"
    )?;
    let middle = x + WIDTH / 2;
    let base = if item.note.is_empty() { y + HEIGHT / 2 + 4 } else { y + 16 };
    writeln!(text, "<text x=\"{middle}\" y=\"{base}\" text-anchor=\"middle\">{}</text>", plain(&item.title))?;
    if item.note.is_empty() {
        return Ok(());
    }
    let base = y + 30;
    let note = plain(&item.note);
    writeln!(
        text,
        "<text x=\"{middle}\" y=\"{base}\" text-anchor=\"middle\" font-size=\"9\" fill=\"#444444\">{note}</text>"
    )
}

fn travel(from: (u32, u32), to: (u32, u32), text: &mut String) -> fmt::Result {
    let is_right = from.0 < to.0;
    let (x, end) = if is_right { (from.0 + WIDTH, to.0) } else { (from.0, to.0 + WIDTH) };
    let (top, bottom) = (from.1 + HEIGHT / 2, to.1 + HEIGHT / 2);
    let middle = u32::midpoint(x, end);
    writeln!(
        text,
        "<path d=\"M{x} {top}C{middle} {top} {middle} {bottom} {end} {bottom}\" fill=\"none\" stroke=\"#2060c0\" \
         stroke-dasharray=\"6 4\" marker-end=\"url(#tip)\"/>"
    )
}

/// Text that XML takes, as long as a box is wide.
fn plain(text: &str) -> String {
    let is_short = text.chars().count() <= LETTERS;
    let shown: String =
        if is_short { text.to_owned() } else { text.chars().take(LETTERS - 1).chain(['…']).collect() };
    shown.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
