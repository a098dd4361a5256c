//! The text that Graphviz draws.

use std::fmt::{self, Write};

use crate::transpile::part::ProgramPart;
use crate::variable::Purpose;

use super::fold::{Picture, PictureNode};
use super::svg::LEGEND;
use super::{Arrow, NodeShape};

/// One directed graph of all parts from left to right, a frame around each, and a legend. `dot -Tsvg` draws it.
#[must_use]
pub fn dot(parts: &[ProgramPart]) -> String {
    let mut text = String::new();
    write(&Picture::of(parts), &mut text).expect("a string takes everything");
    text
}

fn write(picture: &Picture, text: &mut String) -> fmt::Result {
    writeln!(text, "digraph program {{")?;
    writeln!(text, "    graph [rankdir=LR, fontname=\"sans-serif\", fontsize=13, labeljust=l, color=\"#888888\"];")?;
    writeln!(text, "    node [fontname=\"sans-serif\", fontsize=11, height=0.4, style=\"filled,rounded\"];")?;
    for (frame, title) in picture.frames.iter().enumerate() {
        writeln!(text, "    subgraph cluster_{frame} {{")?;
        writeln!(text, "        label={};", quoted(title))?;
        let own = |is_in_loop: bool| {
            let nodes = picture.nodes.iter().enumerate();
            nodes.filter(move |(_, node)| node.frame == frame && node.is_in_loop == is_in_loop)
        };
        own(false).try_for_each(|(index, node)| item(text, "        ", index, node))?;
        if own(true).next().is_some() {
            writeln!(text, "        subgraph cluster_{frame}_loop {{")?;
            writeln!(text, "            label=\"loop_forever\"; style=dashed;")?;
            own(true).try_for_each(|(index, node)| item(text, "            ", index, node))?;
            writeln!(text, "        }}")?;
        }
        writeln!(text, "    }}")?;
    }
    for edge in &picture.edges {
        let direction = match edge.arrow {
            Arrow::Forward => "",
            Arrow::Back => "dir=back",
            Arrow::Both => "dir=both",
        };
        let sent = if edge.is_sent { "style=dashed, color=\"#2060c0\", constraint=false" } else { "" };
        writeln!(text, "    n{} -> n{} [{direction}{sent}];", edge.from, edge.to)?;
    }
    writeln!(text, "    subgraph cluster_legend {{\n        label=\"legend\";")?;
    for (name, shape) in LEGEND {
        writeln!(text, "        {name} [shape={}, fillcolor=\"{}\"];", form(shape), shape.fill())?;
    }
    writeln!(text, "    }}\n}}")
}

fn item(text: &mut String, indent: &str, index: usize, node: &PictureNode) -> fmt::Result {
    let label: Vec<&str> = std::iter::once(&node.title).chain(&node.notes).map(String::as_str).collect();
    let (form, fill) = (form(node.shape), node.shape.fill());
    writeln!(text, "{indent}n{index} [label={}, shape={form}, fillcolor=\"{fill}\"];", quoted(&label.join("\n")))
}

fn form(shape: NodeShape) -> &'static str {
    match shape {
        NodeShape::Op(_) => "box",
        NodeShape::Variable(Purpose::Data) => "ellipse",
        NodeShape::Variable(_) => "cylinder",
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\n' => quoted.push_str("\\n"),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}
