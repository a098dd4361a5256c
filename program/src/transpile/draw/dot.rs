//! The text that Graphviz draws.

use std::fmt::{self, Write};

use crate::transpile::part::ProgramPart;
use crate::variable::Purpose;

use super::{DrawnNode, NodeShape, Scene, journeys};

/// One directed graph of all parts, a frame around each. `dot -Tsvg` draws it.
#[must_use]
pub fn dot(parts: &[ProgramPart]) -> String {
    let mut text = String::new();
    write(parts, &mut text).expect("a string takes everything");
    text
}

fn write(parts: &[ProgramPart], text: &mut String) -> fmt::Result {
    let scenes: Vec<Scene> = parts.iter().map(Scene::of).collect();
    writeln!(text, "digraph program {{")?;
    writeln!(text, "    graph [fontname=\"sans-serif\", fontsize=13, labeljust=l, color=\"#888888\"];")?;
    writeln!(text, "    node [fontname=\"sans-serif\", fontsize=11, height=0.4, style=\"filled,rounded\"];")?;
    writeln!(text, "    edge [fontname=\"sans-serif\", fontsize=9];")?;
    for (part, scene) in scenes.iter().enumerate() {
        writeln!(text, "    subgraph cluster_{part} {{")?;
        writeln!(text, "        label={};", quoted(&scene.title))?;
        self::items(part, scene, false, "        ", text)?;
        if scene.items.iter().any(|item| item.is_in_loop) {
            writeln!(text, "        subgraph cluster_{part}_loop {{")?;
            writeln!(text, "            label=\"loop_forever\"; style=dashed;")?;
            self::items(part, scene, true, "            ", text)?;
            writeln!(text, "        }}")?;
        }
        for line in &scene.lines {
            let both = if line.is_both { ", dir=both" } else { "" };
            let (from, to) = (line.from, line.to);
            writeln!(text, "        p{part}_{from} -> p{part}_{to} [label={}{both}];", quoted(&line.name))?;
        }
        writeln!(text, "    }}")?;
    }
    for journey in journeys(parts, &scenes) {
        let ((from, send), (to, recv)) = (journey.from, journey.to);
        writeln!(
            text,
            "    p{from}_{send} -> p{to}_{recv} [label={}, style=dashed, color=\"#2060c0\", constraint=false];",
            quoted(&journey.channel)
        )?;
    }
    writeln!(text, "}}")
}

fn items(part: usize, scene: &Scene, is_in_loop: bool, indent: &str, text: &mut String) -> fmt::Result {
    for (place, item) in scene.items.iter().enumerate().filter(|(_, item)| item.is_in_loop == is_in_loop) {
        let label = if item.note.is_empty() { item.title.clone() } else { format!("{}\n{}", item.title, item.note) };
        let (form, fill) = (form(item), item.shape.fill());
        writeln!(text, "{indent}p{part}_{place} [label={}, shape={form}, fillcolor=\"{fill}\"];", quoted(&label))?;
    }
    Ok(())
}

fn form(item: &DrawnNode) -> &'static str {
    match item.shape {
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
