//! Folding of scenes: what repeats becomes one node or one frame with its number.
//!
//! Two ops or variables are alike if they have the same kind, role and part in the flow, and their neighbours in both
//! directions are alike, whatever their names and shapes are: the pieces of a table, the tables that are used in one
//! way. Two processes are alike if they have nodes of the same classes.

use std::collections::{BTreeMap, BTreeSet};

use crate::op::ProgramPeer;
use crate::transpile::part::ProgramPart;

use super::{Arrow, DrawnNode, NodeShape, Scene, journeys};

/// All parts, folded.
#[derive(Clone, Debug, Default)]
pub(super) struct Picture {
    /// The title of each frame.
    pub(super) frames: Vec<String>,
    /// In an order in which edges within a frame go forward.
    pub(super) nodes: Vec<PictureNode>,
    pub(super) edges: Vec<PictureEdge>,
}

/// One box of a picture.
#[derive(Clone, Debug)]
pub(super) struct PictureNode {
    pub(super) frame: usize,
    pub(super) shape: NodeShape,
    pub(super) is_in_loop: bool,
    /// The kind or name, with the number of folded ones.
    pub(super) title: String,
    /// Names of outputs, or facts.
    pub(super) notes: Vec<String>,
    /// Every folded name, for a tooltip.
    pub(super) names: Vec<String>,
}

/// An edge of a picture. Within a frame `from` is before `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PictureEdge {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) arrow: Arrow,
    /// Whether the value is sent to another process.
    pub(super) is_sent: bool,
}

/// A node's part and its place there.
type Address = (usize, usize);

/// An edge's kind as its end sees it, and the class of its other end.
type Neighbour = (u8, usize, usize);

impl Picture {
    pub(super) fn of(parts: &[ProgramPart]) -> Self {
        let scenes: Vec<Scene> = parts.iter().map(Scene::of).collect();
        let sent: Vec<(Address, Address)> =
            journeys(parts, &scenes).into_iter().map(|sent| (sent.from, sent.to)).collect();
        let classes = classes(&scenes, &sent);
        let (frame_of, members) = frames(&classes);
        let mut picture = Self { frames: members.iter().map(|of| title(parts, of)).collect(), ..Self::default() };
        let mut groups: BTreeMap<(usize, usize), Vec<Address>> = BTreeMap::new();
        for (part, own) in classes.iter().enumerate() {
            for (place, class) in own.iter().enumerate() {
                groups.entry((frame_of[part], *class)).or_default().push((part, place));
            }
        }
        let depths: Vec<Vec<usize>> = scenes.iter().map(depths).collect();
        let mut ordered: Vec<((usize, usize), Vec<Address>)> = groups.into_iter().collect();
        ordered.sort_by_key(|((frame, _), of)| (*frame, depths[of[0].0][of[0].1], of[0]));
        let mut node_of: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for (key, of) in &ordered {
            node_of.insert(*key, picture.nodes.len());
            picture.nodes.push(PictureNode::new(key.0, &scenes, of));
        }
        let node = |(part, place): Address| node_of[&(frame_of[part], classes[part][place])];
        let mut edges = BTreeSet::new();
        for (part, scene) in scenes.iter().enumerate() {
            edges.extend(scene.lines.iter().map(|line| PictureEdge {
                from: node((part, line.from)),
                to: node((part, line.to)),
                arrow: line.arrow,
                is_sent: false,
            }));
        }
        edges.extend(sent.iter().map(|(from, to)| PictureEdge {
            from: node(*from),
            to: node(*to),
            arrow: Arrow::Forward,
            is_sent: true,
        }));
        picture.edges = edges.into_iter().collect();
        picture
    }
}

impl PictureNode {
    fn new(frame: usize, scenes: &[Scene], of: &[Address]) -> Self {
        let item = |(part, place): &Address| &scenes[*part].items[*place];
        let first = item(&of[0]);
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        of.iter().for_each(|(part, _)| *counts.entry(*part).or_default() += 1);
        let (least, most) = (counts.values().min().unwrap_or(&1), counts.values().max().unwrap_or(&1));
        let times = match (least, most) {
            (1, 1) => String::new(),
            (least, most) if least == most => format!(" \u{d7} {most}"),
            (least, most) => format!(" \u{d7} {least} to {most}"),
        };
        let distinct = |text: &dyn Fn(&DrawnNode) -> String| -> Vec<String> {
            let mut all: Vec<String> = of.iter().map(|address| text(item(address))).collect();
            let mut seen = BTreeSet::new();
            all.retain(|name| !name.is_empty() && seen.insert(name.clone()));
            all
        };
        let (title, notes, names) = if first.shape.is_variable() {
            let names = distinct(&|item| item.title.clone());
            let facts = distinct(&|item| item.note.clone());
            let facts = if facts.len() == 1 { facts } else { vec![format!("{} shapes", facts.len())] };
            (span(&names).join(" "), facts, names)
        } else {
            let kinds = distinct(&|item| item.title.clone());
            let title = if kinds.len() == 1 { kinds[0].clone() } else { format!("{}s", base(&kinds[0])) };
            let names = distinct(&|item| item.note.clone());
            (title, span(&names), names)
        };
        Self { frame, shape: first.shape, is_in_loop: first.is_in_loop, title: format!("{title}{times}"), notes, names }
    }
}

/// All names of one or two, the first and the last of more.
fn span(names: &[String]) -> Vec<String> {
    match names {
        [first, .., last] => vec![format!("{first} \u{2026}"), last.clone()],
        few => few.to_vec(),
    }
}

/// A title without the number of a process: `send to server`.
fn base(title: &str) -> &str {
    match title.rsplit_once(':') {
        Some((before, number)) if number.bytes().all(|digit| digit.is_ascii_digit()) => before,
        _ => title,
    }
}

/// The class of every node, by part and place: the coarsest division in which alike nodes have alike neighbours.
fn classes(scenes: &[Scene], sent: &[(Address, Address)]) -> Vec<Vec<usize>> {
    let mut known: BTreeMap<(String, bool), usize> = BTreeMap::new();
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for scene in scenes {
        let own = scene.items.iter().map(|item| {
            let label = if item.shape.is_variable() { "" } else { base(&item.title) };
            let next = known.len();
            *known.entry((format!("{:?} {label}", item.shape), item.is_in_loop)).or_insert(next)
        });
        classes.push(own.collect());
    }
    let mut count = known.len();
    loop {
        let mut around: Vec<Vec<BTreeSet<Neighbour>>> =
            scenes.iter().map(|scene| vec![BTreeSet::new(); scene.items.len()]).collect();
        for (part, scene) in scenes.iter().enumerate() {
            for line in &scene.lines {
                let kind = 1 + line.arrow as u8;
                around[part][line.to].insert((kind, line.slot, classes[part][line.from]));
                around[part][line.from].insert((kind + 8, line.slot, classes[part][line.to]));
            }
        }
        for (from, to) in sent {
            around[to.0][to.1].insert((20, 0, classes[from.0][from.1]));
            around[from.0][from.1].insert((21, 0, classes[to.0][to.1]));
        }
        let mut known: BTreeMap<(usize, BTreeSet<Neighbour>), usize> = BTreeMap::new();
        for (own, around) in classes.iter_mut().zip(around) {
            for (class, around) in own.iter_mut().zip(around) {
                let next = known.len();
                *class = *known.entry((*class, around)).or_insert(next);
            }
        }
        if known.len() == count {
            return classes;
        }
        count = known.len();
    }
}

/// The frame of each part, and the parts of each frame.
fn frames(classes: &[Vec<usize>]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let mut known: BTreeMap<BTreeSet<usize>, usize> = BTreeMap::new();
    let (mut frame_of, mut members) = (Vec::new(), Vec::<Vec<usize>>::new());
    for (part, own) in classes.iter().enumerate() {
        let next = members.len();
        let frame = *known.entry(own.iter().copied().collect()).or_insert(next);
        if frame == next {
            members.push(Vec::new());
        }
        members[frame].push(part);
        frame_of.push(frame);
    }
    (frame_of, members)
}

/// The longest way to each node within its part.
fn depths(scene: &Scene) -> Vec<usize> {
    let mut depths = vec![0; scene.items.len()];
    let mut lines: Vec<(usize, usize)> = scene.lines.iter().map(|line| (line.from, line.to)).collect();
    lines.sort_unstable();
    for (from, to) in lines {
        depths[to] = depths[to].max(depths[from] + 1);
    }
    depths
}

fn title(parts: &[ProgramPart], of: &[usize]) -> String {
    let peers: Vec<String> = of.iter().flat_map(|part| &parts[*part].peers).map(ToString::to_string).collect();
    match &peers[..] {
        [] => "the whole program".to_owned(),
        [one] => one.clone(),
        [first, .., last] if is_range(of.iter().flat_map(|part| &parts[*part].peers)) => {
            format!("{first} to {last} \u{d7} {}", peers.len())
        }
        several => format!("{} \u{d7} {}", several.join(", "), several.len()),
    }
}

/// Whether these processes have numbers without gaps.
fn is_range<'a>(peers: impl Iterator<Item = &'a ProgramPeer>) -> bool {
    let numbers: Vec<u32> = peers
        .map(|peer| match peer {
            ProgramPeer::Trainer(number) | ProgramPeer::Server(number) => *number,
        })
        .collect();
    numbers.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]))
}
