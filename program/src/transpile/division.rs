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
}

/// Input of the generators of parts.
pub(super) struct Division<'a> {
    pub(super) graph: &'a Graph,
    pub(super) outline: &'a Outline<'a>,
    pub(super) groups: &'a Groups,
    /// The variables on servers that trainers read, in order of first use, each with its index in that order.
    pub(super) wanted: &'a BTreeMap<&'a str, usize>,
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
