//! SVG diagram of all parts, from left to right, with a legend.

use std::fmt::{self, Write};

use crate::op::OpRole;
use crate::transpile::part::ProgramPart;
use crate::variable::Purpose;

use super::NodeShape;
use super::fold::{Picture, PictureNode};
use super::layout::{Area, LINE, NOTE_LINE, PictureLayout, tips};

/// Below the parts.
const LEGEND_HEIGHT: u32 = 76;
const LEGEND_STEP: u32 = 118;
pub(super) const LEGEND: [(&str, NodeShape); 7] = [
    ("forward", NodeShape::Op(OpRole::Forward)),
    ("backward", NodeShape::Op(OpRole::Backward)),
    ("optimize", NodeShape::Op(OpRole::Optimize)),
    ("communication", NodeShape::Op(OpRole::Communication)),
    ("data", NodeShape::Variable(Purpose::Data)),
    ("parameter", NodeShape::Variable(Purpose::Parameter)),
    ("state", NodeShape::Variable(Purpose::State)),
];

/// The picture. No edge meets a node but its own two; what repeats is one node or frame with its number.
#[must_use]
pub fn svg(parts: &[ProgramPart]) -> String {
    let picture = Picture::of(parts);
    let layout = PictureLayout::of(&picture);
    let mut text = String::new();
    write(&picture, &layout, &mut text).expect("a string takes everything");
    text
}

fn write(picture: &Picture, layout: &PictureLayout, text: &mut String) -> fmt::Result {
    let (width, height) = (layout.width.max(7 * LEGEND_STEP + 40), layout.height + LEGEND_HEIGHT);
    writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"11\">"
    )?;
    writeln!(text, "<defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" ")?;
    writeln!(text, "markerHeight=\"7\" orient=\"auto-start-reverse\"><path d=\"M0 0L8 4L0 8z\"/></marker></defs>")?;
    writeln!(text, "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>")?;
    for area in &layout.frames {
        rect(text, "frame", *area, "rx=\"6\" fill=\"#fafafa\" stroke=\"#888888\"")?;
    }
    for area in &layout.loops {
        rect(text, "loop", *area, "rx=\"4\" fill=\"none\" stroke=\"#666666\" stroke-dasharray=\"5 4\"")?;
    }
    for (edge, route) in picture.edges.iter().zip(&layout.routes) {
        let (first, last) = tips(edge.arrow);
        let mark = |is_there: bool, end: &str| {
            if is_there { format!(" marker-{end}=\"url(#tip)\"") } else { String::new() }
        };
        let marks = mark(first, "start") + &mark(last, "end");
        let points: Vec<String> = route.iter().map(|(x, y)| format!("{x},{y}")).collect();
        let stroke = if edge.is_sent { "#2060c0\" stroke-dasharray=\"6 4" } else { "#555555" };
        writeln!(
            text,
            "<polyline class=\"edge\" data-ends=\"{} {}\" points=\"{}\" fill=\"none\" stroke=\"{stroke}\" \
             stroke-linejoin=\"round\"{marks}/>",
            edge.from,
            edge.to,
            points.join(" ")
        )?;
    }
    for (node, (area, title, notes)) in picture.nodes.iter().zip(&layout.boxes) {
        boxed(text, node, *area, (title, notes))?;
    }
    for (title, area) in picture.frames.iter().zip(&layout.frames) {
        head(text, (area.left + 12, area.top + 18), title, "font-size=\"13\" font-weight=\"bold\"")?;
    }
    for area in &layout.loops {
        head(text, (area.left + 6, area.top + 13), "loop_forever", "fill=\"#444444\"")?;
    }
    legend(text, layout.height)?;
    writeln!(text, "</svg>")
}

fn rect(text: &mut String, class: &str, area: Area, style: &str) -> fmt::Result {
    let Area { left, top, width, height } = area;
    writeln!(text, "<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" {style}/>")
}

fn head(text: &mut String, (x, y): (u32, u32), title: &str, style: &str) -> fmt::Result {
    let halo = "stroke=\"#fafafa\" stroke-width=\"4\" paint-order=\"stroke\"";
    writeln!(text, "<text class=\"head\" x=\"{x}\" y=\"{y}\" {halo} {style}>{}</text>", plain(title))
}

fn boxed(text: &mut String, node: &PictureNode, area: Area, (title, notes): (&[String], &[String])) -> fmt::Result {
    writeln!(text, "<g><title>{}</title>", plain(&node.names.join(", ")))?;
    rect(text, "node", area, &style(node.shape, area.height))?;
    let middle = area.left + area.width / 2;
    let mut y = area.top + LINE;
    for line in title {
        writeln!(text, "<text class=\"label\" x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", plain(line))?;
        y += LINE;
    }
    for line in notes {
        writeln!(
            text,
            "<text class=\"label\" x=\"{middle}\" y=\"{}\" text-anchor=\"middle\" font-size=\"9\" \
             fill=\"#444444\">{}</text>",
            y - 2,
            plain(line)
        )?;
        y += NOTE_LINE;
    }
    writeln!(text, "</g>")
}

/// Ops have corners, variables are round, states have a broken line.
fn style(shape: NodeShape, height: u32) -> String {
    let round = if shape.is_variable() { (height / 2).min(14) } else { 3 };
    let broken = if shape == NodeShape::Variable(Purpose::State) { " stroke-dasharray=\"3 2\"" } else { "" };
    let thick = if shape == NodeShape::Variable(Purpose::Parameter) { " stroke-width=\"2\"" } else { "" };
    format!("rx=\"{round}\" fill=\"{}\" stroke=\"#333333\"{broken}{thick}", shape.fill())
}

fn legend(text: &mut String, top: u32) -> fmt::Result {
    let mut left = 20;
    for (name, shape) in LEGEND {
        rect(text, "legend", Area { left, top, width: LEGEND_STEP - 12, height: 24 }, &style(shape, 24))?;
        let x = left + LEGEND_STEP / 2 - 6;
        writeln!(text, "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{name}</text>", top + 16)?;
        left += LEGEND_STEP;
    }
    let lines =
        [("#555555", "value within a process"), ("#2060c0\" stroke-dasharray=\"6 4", "value sent to another process")];
    let (mut x, y) = (20, top + 46);
    for (stroke, name) in lines {
        writeln!(text, "<path d=\"M{x} {y}h40\" stroke=\"{stroke}\" marker-end=\"url(#tip)\"/>")?;
        writeln!(text, "<text x=\"{}\" y=\"{}\">{name}</text>", x + 48, y + 4)?;
        x += 270;
    }
    writeln!(text, "<text x=\"{x}\" y=\"{}\">\u{d7} N: N that are alike; op: kind, then outputs</text>", y + 4)
}

/// Text that XML takes.
pub(super) fn plain(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
