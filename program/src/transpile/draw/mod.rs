//! Diagrams of parts: text for Graphviz, SVG that needs no other program, and a page that shows it.
//!
//! Ops are boxes, coloured by role, with the names of their outputs. Data, parameters and states have boxes of their
//! own. A dashed line is a value that is sent to another process. Ops that run once, to fill parameters and states, are
//! omitted.
//!
//! Read in this order: [`Scene`], a part as boxes and lines; `fold`, which makes one picture of all scenes; `layout`;
//! `svg`, `html` and `dot`.

mod dot;
mod fold;
mod html;
mod layout;
mod svg;

use crate::graph::{Graph, Node, VariableIndex};
use crate::op::{Destination, OpKind, OpRole, ProgramPeer};
use crate::variable::Purpose;

use super::part::ProgramPart;

pub use dot::dot;
pub use html::html;
pub use svg::svg;

/// The meaning of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeShape {
    Op(OpRole),
    Variable(Purpose),
}

impl NodeShape {
    /// Its colour.
    const fn fill(self) -> &'static str {
        match self {
            Self::Op(OpRole::Initialise) => "#eeeeee",
            Self::Op(OpRole::Forward) => "#dbe9f9",
            Self::Op(OpRole::Backward) => "#fbe3d0",
            Self::Op(OpRole::Optimize) => "#dcf0d5",
            Self::Op(OpRole::Communication) => "#f4eec4",
            Self::Variable(_) => "#ffffff",
        }
    }

    const fn is_variable(self) -> bool {
        matches!(self, Self::Variable(_))
    }
}

/// One box.
#[derive(Clone, Debug)]
struct DrawnNode {
    title: String,
    note: String,
    shape: NodeShape,
    /// Whether it is within the loop.
    is_in_loop: bool,
}

/// A line between two boxes of one part, from the earlier to the later one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DrawnEdge {
    from: usize,
    to: usize,
    arrow: Arrow,
    /// The input's number, where inputs are not alike.
    slot: usize,
}

/// The direction of a value's way along an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Arrow {
    Forward,
    /// The later op writes a variable that has a box already.
    Back,
    /// The later op reads and writes it.
    Both,
}

/// A part as boxes and lines.
#[derive(Clone, Debug, Default)]
struct Scene {
    items: Vec<DrawnNode>,
    lines: Vec<DrawnEdge>,
    /// Sends: the box, the channel, and the destination; none means the senders of the round.
    sends: Vec<(usize, String, Option<ProgramPeer>)>,
    /// Receives: the box and the channel.
    receives: Vec<(usize, String)>,
}

impl Scene {
    fn of(part: &ProgramPart) -> Self {
        let graph = &part.graph;
        let mut scene = Self::default();
        let mut boxes: Vec<Option<usize>> = vec![None; graph.variables().len()];
        for (block, scope) in graph.scopes().iter().enumerate() {
            for node in scope.nodes.iter().filter(|node| is_drawn(node)) {
                scene.node(graph, node, block > 0, &mut boxes);
            }
        }
        scene
    }

    /// Adds an op, and those of its variables that have a box and none yet.
    fn node(&mut self, graph: &Graph, node: &Node, is_in_loop: bool, boxes: &mut [Option<usize>]) {
        let variable = |index: VariableIndex| graph.variable(index);
        for index in node.inputs.iter().chain(&node.outputs) {
            let known = variable(*index);
            if known.purpose != Purpose::Temporary && boxes[index.place()].is_none() {
                boxes[index.place()] = Some(self.items.len());
                self.items.push(DrawnNode {
                    title: known.name.clone(),
                    note: known.facts.to_string(),
                    shape: NodeShape::Variable(known.purpose),
                    is_in_loop: is_in_loop && known.purpose == Purpose::Data,
                });
            }
        }
        let place = self.items.len();
        let is_written = |index: &VariableIndex| node.outputs.contains(index);
        let new = node.outputs.iter().filter(|index| variable(**index).purpose == Purpose::Temporary);
        let note: Vec<&str> = new.map(|index| variable(*index).name.as_str()).collect();
        self.items.push(DrawnNode {
            title: heading(&node.kind),
            note: note.join(", "),
            shape: NodeShape::Op(node.role),
            is_in_loop,
        });
        let first_line = self.lines.len();
        for (number, index) in node.inputs.iter().enumerate() {
            let Some(from) = boxes[index.place()].filter(|from| *from < place) else { continue };
            if !self.lines[first_line..].iter().any(|line| line.from == from) {
                let arrow = if is_written(index) { Arrow::Both } else { Arrow::Forward };
                let slot = if matches!(node.kind, OpKind::Concat { .. } | OpKind::Sum) { 0 } else { number };
                self.lines.push(DrawnEdge { from, to: place, arrow, slot });
            }
        }
        for index in &node.outputs {
            match variable(*index).purpose {
                Purpose::Temporary => boxes[index.place()] = Some(place),
                _ if node.inputs.contains(index) => {}
                _ => self.lines.extend(boxes[index.place()].map(|from| DrawnEdge {
                    from,
                    to: place,
                    arrow: Arrow::Back,
                    slot: 0,
                })),
            }
        }
        match &node.kind {
            OpKind::Send { channel, to: Destination::Peer(peer) } => {
                self.sends.push((place, channel.clone(), Some(*peer)))
            }
            OpKind::Send { channel, to: Destination::Senders } => self.sends.push((place, channel.clone(), None)),
            OpKind::Recv { channel } => self.receives.push((place, channel.clone())),
            OpKind::PullRows { channel, to, .. } => {
                self.sends.push((place, channel.clone(), Some(*to)));
                self.receives.push((place, channel.clone()));
            }
            _ => {}
        }
    }
}

/// A value that travels: from a box of one part to a box of another, or of the same part when its processes are many.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Journey {
    from: (usize, usize),
    to: (usize, usize),
    channel: String,
}

/// Everything that travels, each way between two boxes once.
fn journeys(parts: &[ProgramPart], scenes: &[Scene]) -> Vec<Journey> {
    let mut all = Vec::new();
    for (from, scene) in scenes.iter().enumerate() {
        for (send, channel, peer) in &scene.sends {
            let is_there = |part: &ProgramPart| match peer {
                Some(peer) => part.peers.contains(peer),
                None => part.peers.iter().any(|peer| matches!(peer, ProgramPeer::Trainer(_))),
            };
            for (to, _) in parts.iter().enumerate().filter(|(_, part)| is_there(part)) {
                let receives = scenes[to].receives.iter().filter(|(_, own)| own == channel);
                all.extend(receives.map(|(recv, _)| Journey {
                    from: (from, *send),
                    to: (to, *recv),
                    channel: channel.clone(),
                }));
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// A loop is drawn as a frame around its block.
fn is_drawn(node: &Node) -> bool {
    node.role != OpRole::Initialise && !matches!(node.kind, OpKind::LoopForever { .. })
}

/// An op's kind, and what of its attributes says most.
fn heading(kind: &OpKind) -> String {
    let name = kind.name();
    match kind {
        OpKind::Send { to: Destination::Peer(peer), .. } => format!("{name} to {peer}"),
        OpKind::Send { to: Destination::Senders, .. } => format!("{name} to senders"),
        OpKind::PullRows { to, .. } => format!("{name} from {to}"),
        OpKind::GradientAccumulator { count, .. } | OpKind::StringAccumulator { count } => format!("{name}({count})"),
        _ => name.to_owned(),
    }
}
