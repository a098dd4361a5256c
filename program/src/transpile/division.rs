//! Division of a program: the groups of ops, or their rows, of each server. The parts are written from it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::graph::Graph;
use crate::update_loop::GradientNames;
use crate::variable::{Dim, VariableFacts};
use pserver_core::accumulator::AccumulatorSettings;

use super::group::{Groups, OpGroup};
use super::outline::Outline;
use super::part::Cluster;
use super::pulls::PulledTable;
use super::totals::{share_channel, total_channel};
use super::write::UsedNames;

/// Some rows of a group, on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Portion {
    /// The server.
    pub(super) server: u32,
    /// The rows.
    pub(super) rows: Range<u64>,
}

/// A group, or some rows of it, on one server.
#[derive(Debug)]
pub(super) struct GroupSlice<'a> {
    pub(super) group: &'a OpGroup,
    pub(super) server: u32,
    /// The rows of its variables; none when the group is not cut.
    pub(super) rows: Option<Range<u64>>,
    /// The names of the group's variables here.
    pub(super) names: BTreeMap<&'a str, String>,
    /// For each gradient of the group, in order, its names on the server.
    pub(super) arrivals: Vec<GradientNames>,
    /// The names of its share and its total, if its ops read a total.
    pub(super) total: Option<TotalNames>,
    /// By table of the group of which trainers pull rows: the names of each pull, in order.
    pub(super) pulls: BTreeMap<&'a str, Vec<PullNames>>,
}

/// Names of the variables of one pull of rows of a table's piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PullNames {
    /// The channel of the ids, and of the rows.
    pub(super) channel: String,
    /// On the trainer, the count of the piece's updates.
    pub(super) count: String,
    /// On the trainer, the rows.
    pub(super) rows: String,
    /// On the trainer, the rows of all pieces; as `rows` where the table is not cut.
    pub(super) joined: String,
    /// On the server, the ids.
    pub(super) ids: String,
    /// On the server, the trainer that asks.
    pub(super) sender: String,
    /// On the server, the rows' values.
    pub(super) values: String,
}

/// The names of a share and a total on the server.
#[derive(Debug)]
pub(super) struct TotalNames {
    /// The channel of the share.
    pub(super) share: String,
    /// The total, of which every trainer sends one.
    pub(super) arrival: GradientNames,
}

/// Input of the generators of parts.
pub(super) struct Division<'a> {
    pub(super) graph: &'a Graph,
    pub(super) outline: &'a Outline<'a>,
    pub(super) groups: &'a Groups<'a>,
    /// The variables on servers that trainers read, in order of first use, each with its index in that order.
    pub(super) wanted: &'a BTreeMap<&'a str, usize>,
    /// The tables of which trainers pull rows.
    pub(super) tables: &'a BTreeMap<&'a str, PulledTable<'a>>,
    /// In the order of groups, and of rows.
    pub(super) pieces: Vec<GroupSlice<'a>>,
    pub(super) cluster: Cluster,
    pub(super) accumulators: AccumulatorSettings,
}

impl<'a> GroupSlice<'a> {
    /// The name of one of its group's variables here.
    pub(super) fn name<'n>(&'n self, name: &'n str) -> &'n str {
        self.names.get(name).map_or(name, String::as_str)
    }

    /// The facts of one of its group's variables here.
    pub(super) fn facts(&self, facts: &VariableFacts) -> VariableFacts {
        let Some(rows) = &self.rows else { return facts.clone() };
        let mut facts = facts.clone();
        match &mut facts {
            VariableFacts::Dense { shape, .. } => {
                // Only the count of updates has no rows, and every piece has its own.
                if let Some(first) = shape.first_mut() {
                    *first = Dim::Fixed(rows.end - rows.start);
                }
            }
            VariableFacts::SelectedRows { height, .. } => *height = rows.end - rows.start,
            VariableFacts::Queue { .. } | VariableFacts::Strings => {}
        }
        facts
    }
}

impl<'a> Division<'a> {
    /// The same with these portions of each group.
    pub(super) fn with(&self, portions: &[Vec<Portion>]) -> Self {
        let mut names = UsedNames::of(self.graph);
        let placed = self.groups.all.iter().zip(portions);
        let pieces = placed.flat_map(|(group, portions)| pieces(self, group, portions, &mut names)).collect();
        Self { pieces, ..*self }
    }

    /// The same with one group alone, whole, on server 0.
    pub(super) fn with_only(&self, group: usize) -> Self {
        let group = &self.groups.all[group];
        let whole = [Portion { server: 0, rows: 0..group.rows.unwrap_or(1) }];
        let pieces = pieces(self, group, &whole, &mut UsedNames::of(self.graph));
        Self { pieces, ..*self }
    }
}

/// The pieces of a group, with all their names.
fn pieces<'a>(
    all: &Division<'a>,
    group: &'a OpGroup,
    portions: &[Portion],
    names: &mut UsedNames<'_>,
) -> Vec<GroupSlice<'a>> {
    let graph = all.graph;
    let is_whole = portions.len() == 1;
    let mut pieces = Vec::new();
    for (number, Portion { server, rows }) in portions.iter().enumerate() {
        let mut own: BTreeMap<&str, String> = BTreeMap::new();
        if !is_whole {
            for name in touched(graph, group) {
                own.entry(name).or_insert_with(|| names.fresh(format!("{name}@piece{number}")));
            }
        }
        let rows = (!is_whole).then(|| rows.clone());
        let mut piece = GroupSlice {
            group,
            server: *server,
            rows,
            names: own,
            arrivals: Vec::new(),
            total: None,
            pulls: BTreeMap::new(),
        };
        for gradient in &group.arrivals {
            let arrival = arrival(graph, &piece, gradient, names);
            piece.names.insert(gradient, arrival.merged.clone());
            piece.arrivals.push(arrival);
        }
        piece.total = total_names(graph, &mut piece.names, group, names);
        for (name, table) in group.kept.iter().filter_map(|name| all.tables.get_key_value(name.as_str())) {
            piece.pulls.insert(name, pull_names(name, table, &piece, names));
        }
        pieces.push(piece);
    }
    pieces
}

/// The names of a group's total, which its ops then read under the merged one.
fn total_names<'a>(
    graph: &Graph,
    own: &mut BTreeMap<&'a str, String>,
    group: &'a OpGroup,
    names: &mut UsedNames<'_>,
) -> Option<TotalNames> {
    let number = group.totals.first()?;
    let owner = group.name(graph);
    let arrival = GradientNames {
        channel: total_channel(&owner),
        piece: names.fresh(total_channel(&owner)),
        wide: names.fresh(format!("{owner}@total@wide")),
        sender: names.fresh(format!("{owner}@total@sender")),
        merged: names.fresh(format!("{owner}@total@merged")),
        senders: names.fresh(format!("{owner}@total@senders")),
    };
    own.insert(number, arrival.merged.clone());
    Some(TotalNames { share: share_channel(&owner), arrival })
}

/// The names of a gradient on the server: after the group's parameter, or after itself when there are several
/// gradients.
fn arrival(graph: &Graph, piece: &GroupSlice<'_>, gradient: &str, names: &mut UsedNames<'_>) -> GradientNames {
    let parameter = piece.group.name(graph);
    let owner = if piece.group.arrivals.len() == 1 { parameter.as_str() } else { gradient };
    let owner = piece.name(owner).to_owned();
    GradientNames {
        piece: piece.name(gradient).to_owned(),
        wide: names.fresh(format!("{owner}@wide")),
        sender: names.fresh(format!("{owner}@sender")),
        merged: names.fresh(format!("{owner}@merged")),
        senders: names.fresh(format!("{owner}@senders")),
        channel: owner,
    }
}

/// The names of each pull of rows of a piece of a table. The rows of the first pull have the piece's name.
fn pull_names(
    name: &str,
    table: &PulledTable<'_>,
    piece: &GroupSlice<'_>,
    names: &mut UsedNames<'_>,
) -> Vec<PullNames> {
    let own = piece.name(name);
    let count = names.fresh(format!("{own}@updates"));
    let mut all: Vec<PullNames> = Vec::with_capacity(table.pulls.len());
    for number in 0..table.pulls.len() {
        let mut more = |name: &str| if number == 0 { name.to_owned() } else { names.fresh(format!("{name}@more")) };
        let rows = more(own);
        let joined = if own == name { rows.clone() } else { more(name) };
        all.push(PullNames {
            channel: names.fresh(format!("{own}@rows")),
            count: count.clone(),
            rows,
            joined,
            ids: names.fresh(format!("{own}@ids")),
            sender: names.fresh(format!("{own}@asker")),
            values: names.fresh(format!("{own}@values")),
        });
    }
    all
}

/// The variables that a group's ops and their initialisation touch, in the order of the ops.
fn touched<'a>(graph: &'a Graph, group: &'a OpGroup) -> impl Iterator<Item = &'a str> {
    let ops = group.ops.iter().map(|place| &graph.program().blocks[0].ops[*place]);
    ops.flat_map(|op| op.inputs.iter().chain(&op.outputs)).map(String::as_str)
}
