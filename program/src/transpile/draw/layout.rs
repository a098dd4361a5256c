//! Layered layout of a picture, from left to right.
//!
//! A frame has rows: what is before the loss, what is after it, the loop. A row has columns: a node is in the column
//! behind the last of its predecessors. Nothing but edges is in the gaps between columns and in the corridors between
//! rows. An edge to the next column crosses one gap; a longer one of the same row has a slot of its own in every column
//! between, as nodes have; any other goes through gaps, corridors and the left margin. So no edge meets a node.

use std::collections::{BTreeMap, BTreeSet};

use crate::op::OpRole;

use super::fold::{Picture, PictureNode};
use super::{Arrow, NodeShape};

/// Between lines of text, and of the smaller text of notes.
pub(super) const LINE: u32 = 14;
pub(super) const NOTE_LINE: u32 = 12;
/// Pixels of a letter of the fixed-width font, in tenths, at sizes 11 and 9.
const LETTER_TENTHS: usize = 67;
const NOTE_LETTER_TENTHS: usize = 55;
/// Letters after which a text goes on in a new line, at the next place between two words.
const LETTERS: usize = 20;
const PADDING: u32 = 8;
const GAP: u32 = 26;
const LANE: u32 = 6;
const SLOT: u32 = 6;
const BETWEEN: u32 = 14;
const MARGIN: u32 = 20;
/// Above the first row of a frame or of its loop: a title.
const HEAD: u32 = 30;
/// A row that is wider goes on below.
const ROW_WIDTH_MAX: u32 = 2600;

/// A rectangle in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) left: u32,
    pub(super) top: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Area {
    pub(super) const fn right(self) -> u32 {
        self.left + self.width
    }

    const fn middle(self) -> u32 {
        self.top + self.height / 2
    }
}

/// Where everything of a picture is.
#[derive(Clone, Debug, Default)]
pub(super) struct PictureLayout {
    pub(super) width: u32,
    pub(super) height: u32,
    /// For each node its box and the lines of its title and its notes.
    pub(super) boxes: Vec<(Area, Vec<String>, Vec<String>)>,
    pub(super) frames: Vec<Area>,
    /// The frame of each loop.
    pub(super) loops: Vec<Area>,
    /// The corners of each edge.
    pub(super) routes: Vec<Vec<(u32, u32)>>,
}

/// A node or a slot, which stand in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DrawnCell {
    Node(usize),
    /// The slot of the edges from a node to later columns.
    Slot(usize),
}

/// Columns side by side.
#[derive(Clone, Debug, Default)]
struct DrawnRow {
    frame: usize,
    is_loop: bool,
    columns: Vec<Vec<DrawnCell>>,
    /// The sources of the lines in the gap before each column and behind the last.
    lanes: Vec<BTreeSet<(usize, bool)>>,
    /// The left end of each column and its width.
    across: Vec<(u32, u32)>,
    top: u32,
    /// The end of the last gap.
    right: u32,
    height: u32,
}

impl PictureLayout {
    pub(super) fn of(picture: &Picture) -> Self {
        let mut layout = Self::default();
        for node in &picture.nodes {
            layout.boxes.push(sized(node));
        }
        let mut rows = rows(picture, &layout.boxes);
        for row in &mut rows {
            row.add_slots(picture);
            row.order(picture);
        }
        let (mut places, mut row_of) = (BTreeMap::new(), vec![0; picture.nodes.len()]);
        for (index, row) in rows.iter().enumerate() {
            for (column, cells) in row.columns.iter().enumerate() {
                for cell in cells {
                    places.insert((index, *cell), column);
                    if let DrawnCell::Node(node) = cell {
                        row_of[*node] = index;
                    }
                }
            }
        }
        let mut router = Router { picture, rows, row_of, places, corridors: Vec::new(), margin: BTreeSet::new() };
        router.reserve();
        router.place(&mut layout);
        layout
    }
}

fn sized(node: &PictureNode) -> (Area, Vec<String>, Vec<String>) {
    let title = wrapped(&node.title);
    let notes: Vec<String> = node.notes.iter().flat_map(|note| wrapped(note)).collect();
    let widest = |lines: &[String], tenths: usize| lines.iter().map(|line| letters(line) * tenths).max().unwrap_or(0);
    let tenths = widest(&title, LETTER_TENTHS).max(widest(&notes, NOTE_LETTER_TENTHS));
    let lines = |lines: &[String], height: u32| pixels(lines.len()) * height;
    let height = lines(&title, LINE) + lines(&notes, NOTE_LINE) + PADDING;
    let width = pixels(tenths.div_ceil(10)) + 2 * PADDING;
    (Area { width, height, ..Area::default() }, title, notes)
}

/// The columns that a text takes in a fixed-width font: two for the wide letters of East Asia.
fn letters(text: &str) -> usize {
    text.chars().map(|letter| if u32::from(letter) < 0x1100 { 1 } else { 2 }).sum()
}

/// A text in lines; each ends between two words of a name.
fn wrapped(text: &str) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_inclusive(['_', '@', '/', '.', ' ', ',', '-']) {
        if !line.is_empty() && letters(&line) + letters(word.trim_end()) > LETTERS {
            lines.push(std::mem::take(&mut line));
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// A number of lines or letters as pixels, which a program's limits keep small.
fn pixels(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX / 64)
}

/// Which part of its frame a node is in: before the loss, after it, in the loop.
fn stages(picture: &Picture) -> Vec<u8> {
    let mut has_forward = vec![false; picture.frames.len()];
    for node in &picture.nodes {
        has_forward[node.frame] |= node.shape == NodeShape::Op(OpRole::Forward);
    }
    let mut stages: Vec<u8> = Vec::new();
    for node in &picture.nodes {
        let is_late = matches!(node.shape, NodeShape::Op(OpRole::Backward | OpRole::Optimize));
        stages.push(if node.is_in_loop { 2 } else { u8::from(is_late && has_forward[node.frame]) });
    }
    let inner = || picture.edges.iter().filter(|edge| !edge.is_sent);
    for edge in inner() {
        stages[edge.to] = stages[edge.to].max(stages[edge.from]);
    }
    // Data and received values are in the row of their first reader.
    let is_read: BTreeSet<usize> = inner().map(|edge| edge.to).collect();
    let sources: Vec<usize> = (0..stages.len()).filter(|node| !is_read.contains(node) && stages[*node] == 0).collect();
    for node in sources {
        let readers = inner().filter(|edge| edge.from == node).map(|edge| stages[edge.to] % 2);
        stages[node] = readers.min().unwrap_or(0);
    }
    stages
}

/// The nodes of every row by column, without slots.
fn rows(picture: &Picture, boxes: &[(Area, Vec<String>, Vec<String>)]) -> Vec<DrawnRow> {
    let stages = stages(picture);
    let is_near =
        |from: usize, to: usize| picture.nodes[from].frame == picture.nodes[to].frame && stages[from] == stages[to];
    let inner: Vec<(usize, usize)> =
        picture.edges.iter().filter(|edge| !edge.is_sent).map(|edge| (edge.from, edge.to)).collect();
    let near: Vec<(usize, usize)> = inner.into_iter().filter(|(from, to)| is_near(*from, *to)).collect();
    let mut ranks = vec![0_usize; picture.nodes.len()];
    for (from, to) in &near {
        ranks[*to] = ranks[*to].max(ranks[*from] + 1);
    }
    let is_read: BTreeSet<usize> = near.iter().map(|(_, to)| *to).collect();
    for node in (0..ranks.len()).filter(|node| !is_read.contains(node)) {
        let readers = near.iter().filter(|(from, _)| *from == node).map(|(_, to)| ranks[*to]);
        ranks[node] = readers.min().map_or(0, |first| first.saturating_sub(1));
    }
    let mut columns: BTreeMap<(usize, u8, usize), Vec<DrawnCell>> = BTreeMap::new();
    for (node, known) in picture.nodes.iter().enumerate() {
        columns.entry((known.frame, stages[node], ranks[node])).or_default().push(DrawnCell::Node(node));
    }
    let (mut rows, mut before, mut width) = (Vec::<DrawnRow>::new(), None, 0);
    for ((frame, stage, _), cells) in columns {
        let own = cells.iter().map(|cell| if let DrawnCell::Node(node) = cell { boxes[*node].0.width } else { 0 });
        let own = own.max().unwrap_or(0) + 2 * GAP;
        width += own;
        if before != Some((frame, stage)) || width > ROW_WIDTH_MAX {
            rows.push(DrawnRow { frame, is_loop: stage == 2, ..DrawnRow::default() });
            (before, width) = (Some((frame, stage)), own);
        }
        rows.last_mut().expect("a row was added").columns.push(cells);
    }
    rows
}

impl DrawnRow {
    fn column_of(&self) -> BTreeMap<DrawnCell, usize> {
        let cells = self.columns.iter().enumerate();
        cells.flat_map(|(column, cells)| cells.iter().map(move |cell| (*cell, column))).collect()
    }

    /// Gives every edge that passes a column a slot there; edges from one node share it.
    fn add_slots(&mut self, picture: &Picture) {
        let columns = self.column_of();
        let mut slots = BTreeSet::new();
        for edge in picture.edges.iter().filter(|edge| !edge.is_sent) {
            let (from, to) = (columns.get(&DrawnCell::Node(edge.from)), columns.get(&DrawnCell::Node(edge.to)));
            if let (Some(from), Some(to)) = (from, to) {
                slots.extend((from + 1..*to).map(|column| (column, edge.from)));
            }
        }
        slots.into_iter().for_each(|(column, from)| self.columns[column].push(DrawnCell::Slot(from)));
    }

    /// Orders each column by the mean place of its neighbours, in a few sweeps.
    fn order(&mut self, picture: &Picture) {
        let columns = self.column_of();
        let mut around: BTreeMap<(usize, DrawnCell), Vec<(usize, DrawnCell)>> = BTreeMap::new();
        for edge in picture.edges.iter().filter(|edge| !edge.is_sent) {
            let (from, to) = (columns.get(&DrawnCell::Node(edge.from)), columns.get(&DrawnCell::Node(edge.to)));
            let (Some(first), Some(last)) = (from, to) else { continue };
            let cell = |column: usize| match column {
                column if column == *first => (column, DrawnCell::Node(edge.from)),
                column if column == *last => (column, DrawnCell::Node(edge.to)),
                column => (column, DrawnCell::Slot(edge.from)),
            };
            for column in *first..*last {
                around.entry(cell(column)).or_default().push(cell(column + 1));
                around.entry(cell(column + 1)).or_default().push(cell(column));
            }
        }
        for sweep in 0..8 {
            let count = self.columns.len();
            for step in 0..count {
                let column = if sweep % 2 == 0 { step } else { count - 1 - step };
                let other = if sweep % 2 == 0 { column.checked_sub(1) } else { Some(column + 1) };
                let place = |cells: &[DrawnCell]| -> BTreeMap<DrawnCell, usize> {
                    cells.iter().enumerate().map(|(place, cell)| (*cell, place * 1000 / cells.len().max(1))).collect()
                };
                let Some(beside) = other.and_then(|other| self.columns.get(other).map(|cells| (other, place(cells))))
                else {
                    continue;
                };
                let own = place(&self.columns[column]);
                let mean = |cell: &DrawnCell| {
                    let near = around.get(&(column, *cell)).into_iter().flatten().filter(|(at, _)| *at == beside.0);
                    let near: Vec<usize> = near.map(|(_, cell)| beside.1[cell]).collect();
                    if near.is_empty() { own[cell] } else { near.iter().sum::<usize>() / near.len() }
                };
                self.columns[column].sort_by_key(mean);
            }
        }
    }
}

/// Lines between rows, and where everything goes.
struct Router<'a> {
    picture: &'a Picture,
    rows: Vec<DrawnRow>,
    /// The row of each node.
    row_of: Vec<usize>,
    /// The column of a cell in its row.
    places: BTreeMap<(usize, DrawnCell), usize>,
    /// The sources of the lines in the corridor above each row and below the last.
    corridors: Vec<BTreeSet<usize>>,
    /// The sources of the lines left of all rows.
    margin: BTreeSet<usize>,
}

impl Router<'_> {
    fn row(&self, node: usize) -> usize {
        self.row_of[node]
    }

    fn column(&self, row: usize, cell: DrawnCell) -> usize {
        self.places[&(row, cell)]
    }

    /// The corridors that an edge leaves by and arrives by; none when it stays within its row.
    fn detour(&self, from: usize, to: usize, is_sent: bool) -> Option<(usize, usize)> {
        let (first, last) = (self.row(from), self.row(to));
        match first.cmp(&last) {
            std::cmp::Ordering::Less => Some((first + 1, last)),
            std::cmp::Ordering::Greater => Some((first, last + 1)),
            std::cmp::Ordering::Equal => is_sent.then_some((first + 1, first + 1)),
        }
    }

    /// Reserves lanes for edges that leave their row.
    fn reserve(&mut self) {
        self.corridors = vec![BTreeSet::new(); self.rows.len() + 1];
        for row in &mut self.rows {
            row.lanes = vec![BTreeSet::new(); row.columns.len() + 1];
        }
        for edge in &self.picture.edges {
            let Some((leave, arrive)) = self.detour(edge.from, edge.to, edge.is_sent) else { continue };
            let (first, last) = (self.row(edge.from), self.row(edge.to));
            let (out, into) =
                (self.column(first, DrawnCell::Node(edge.from)) + 1, self.column(last, DrawnCell::Node(edge.to)));
            self.rows[first].lanes[out].insert((edge.from, false));
            self.rows[last].lanes[into].insert((edge.to, true));
            self.corridors[leave].insert(edge.from);
            self.corridors[arrive].insert(edge.from);
            if leave != arrive {
                self.margin.insert(edge.from);
            }
        }
    }

    fn place(&mut self, layout: &mut PictureLayout) {
        let start = 2 * MARGIN + pixels(self.margin.len()) * LANE;
        let mut top = MARGIN;
        let mut corridors = Vec::new();
        let mut tops = BTreeMap::new();
        for index in 0..self.rows.len() {
            corridors.push(top);
            top += pixels(self.corridors[index].len()) * LANE + BETWEEN;
            let row = &self.rows[index];
            let begins =
                |key: (usize, bool)| index == 0 || (self.rows[index - 1].frame, self.rows[index - 1].is_loop) != key;
            let is_new = index == 0 || self.rows[index - 1].frame != row.frame;
            let heads = u32::from(is_new) + u32::from(row.is_loop && begins((row.frame, true)));
            top += heads * HEAD + u32::from(is_new) * BETWEEN;
            let row = &mut self.rows[index];
            row.spread(layout, (start + MARGIN, top));
            tops.insert(index, (top, is_new));
            top += row.height + BETWEEN;
            if self.rows.get(index + 1).is_none_or(|next| next.frame != self.rows[index].frame) {
                top += BETWEEN;
            }
        }
        corridors.push(top);
        layout.height = top + pixels(self.corridors[self.rows.len()].len()) * LANE + MARGIN;
        let right = self.rows.iter().map(|row| row.right).max().unwrap_or(0) + MARGIN;
        layout.width = right + MARGIN;
        for frame in 0..self.picture.frames.len() {
            let of = |is_loop: bool| {
                let rows =
                    self.rows.iter().enumerate().filter(|(_, row)| row.frame == frame && (row.is_loop || !is_loop));
                let ends: Vec<(u32, u32)> = rows.map(|(index, row)| (tops[&index].0, row.height)).collect();
                let (first, last) = (ends.first()?, ends.last()?);
                Some((first.0, last.0 + last.1))
            };
            let area = |ends: (u32, u32), inset: u32, head: u32| Area {
                left: start + inset,
                top: ends.0.saturating_sub(head),
                width: right - start - 2 * inset,
                height: ends.1 + BETWEEN + head - ends.0 - inset / 2,
            };
            let is_all_loop = of(false) == of(true);
            let head = if is_all_loop { 2 * HEAD } else { HEAD };
            layout.frames.push(of(false).map_or_else(Area::default, |ends| area(ends, 0, head)));
            layout.loops.extend(of(true).map(|ends| area(ends, 8, HEAD - 8)));
        }
        layout.routes = self.picture.edges.iter().map(|edge| self.route(layout, &corridors, edge)).collect();
    }

    fn route(&self, layout: &PictureLayout, corridors: &[u32], edge: &super::fold::PictureEdge) -> Vec<(u32, u32)> {
        let (from, to) = (layout.boxes[edge.from].0, layout.boxes[edge.to].0);
        let (first, last) = (self.row(edge.from), self.row(edge.to));
        let (row, target) = (&self.rows[first], &self.rows[last]);
        let begin = self.column(first, DrawnCell::Node(edge.from));
        let end = self.column(last, DrawnCell::Node(edge.to));
        let mut points = vec![(from.right(), from.middle())];
        let Some((leave, arrive)) = self.detour(edge.from, edge.to, edge.is_sent) else {
            let mut y = from.middle();
            for column in begin..end {
                let (left, width) = row.across[column];
                points.push((left + width, y));
                if column + 1 < end {
                    y = row.slot(layout, column + 1, edge.from);
                    points.push((row.across[column + 1].0, y));
                }
            }
            points.extend([(row.across[end].0, to.middle()), (to.left, to.middle())]);
            points.dedup();
            return points;
        };
        let out = row.lane(begin + 1, (edge.from, false));
        let into = target.lane(end, (edge.to, true));
        let level = |corridor: usize| {
            let place = self.corridors[corridor].iter().position(|own| *own == edge.from).unwrap_or(0);
            corridors[corridor] + LANE * pixels(place)
        };
        points.extend([(out, from.middle()), (out, level(leave))]);
        if leave != arrive {
            let place = self.margin.iter().position(|own| *own == edge.from).unwrap_or(0);
            let x = MARGIN + LANE * pixels(place);
            points.extend([(x, level(leave)), (x, level(arrive))]);
        }
        points.extend([(into, level(arrive)), (into, to.middle()), (to.left, to.middle())]);
        points
    }
}

impl DrawnRow {
    /// Places the nodes of all columns from a corner on.
    fn spread(&mut self, layout: &mut PictureLayout, (left, top): (u32, u32)) {
        let tall = |cells: &[DrawnCell], layout: &PictureLayout| -> u32 {
            cells.iter().map(|cell| cell.height(layout) + BETWEEN).sum::<u32>().saturating_sub(BETWEEN)
        };
        self.height = self.columns.iter().map(|cells| tall(cells, layout)).max().unwrap_or(0);
        let mut x = left;
        for (column, cells) in self.columns.iter().enumerate() {
            x += GAP + LANE * pixels(self.lanes[column].len());
            let width = cells.iter().map(|cell| cell.width(layout)).max().unwrap_or(0);
            let mut y = top + (self.height - tall(cells, layout)) / 2;
            for cell in cells {
                if let DrawnCell::Node(node) = cell {
                    let area = &mut layout.boxes[*node].0;
                    (area.left, area.top) = (x + (width - area.width) / 2, y);
                }
                y += cell.height(layout) + BETWEEN;
            }
            self.across.push((x, width));
            x += width;
        }
        self.right = x + GAP + LANE * pixels(self.lanes[self.columns.len()].len());
        self.top = top;
    }

    /// Where a line in a gap goes.
    fn lane(&self, gap: usize, key: (usize, bool)) -> u32 {
        let lanes = &self.lanes[gap];
        let place = lanes.iter().position(|own| *own == key).unwrap_or(0);
        let end = self.across.get(gap).map_or(self.right, |(left, _)| *left);
        end - GAP / 2 - LANE * pixels(lanes.len() - place)
    }

    /// The height at which the edges of a node pass a column.
    fn slot(&self, layout: &PictureLayout, column: usize, from: usize) -> u32 {
        let cells = &self.columns[column];
        let heights = || cells.iter().map(|cell| cell.height(layout) + BETWEEN);
        let all: u32 = heights().sum::<u32>().saturating_sub(BETWEEN);
        let place = cells.iter().position(|cell| *cell == DrawnCell::Slot(from)).unwrap_or(0);
        self.top + (self.height - all) / 2 + heights().take(place).sum::<u32>() + SLOT / 2
    }
}

impl DrawnCell {
    fn height(self, layout: &PictureLayout) -> u32 {
        match self {
            Self::Node(node) => layout.boxes[node].0.height,
            Self::Slot(_) => SLOT,
        }
    }

    fn width(self, layout: &PictureLayout) -> u32 {
        match self {
            Self::Node(node) => layout.boxes[node].0.width,
            Self::Slot(_) => 0,
        }
    }
}

/// The ends of an edge that have a tip: the first, the last.
pub(super) const fn tips(arrow: Arrow) -> (bool, bool) {
    match arrow {
        Arrow::Forward => (false, true),
        Arrow::Back => (true, false),
        Arrow::Both => (true, true),
    }
}
