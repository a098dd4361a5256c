//! Loads of a step: the time that each group of ops takes on servers and on trainers, from which a placement is found.

use std::collections::BTreeMap;

use crate::graph::Graph;
use crate::op::{OpRole, ProgramPeer};
use crate::variable::{Dim, VariableFacts};
use pserver_core::error::Failure;

use super::cost::{
    ChannelPieces, CostModel, Exchanges, StepWork, held_bytes, id_count, real, row_counts, server_work, trainer_works,
};
use super::division::{Division, Portion};
use super::group::OpGroup;
use super::step_time::{ProcessSeconds, StepPace};
use super::write::part;
use super::{server, trainer};

/// The loads of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepLoads {
    pub(super) groups: Vec<GroupLoad>,
    /// A trainer with every group in one piece, without messages.
    pub(super) trainer: ProcessSeconds,
    pub(super) trainers: u32,
    /// Seconds of a message on a trainer.
    pub(super) trainer_message: f64,
    /// Seconds of a message on a server.
    pub(super) server_message: f64,
    pub(super) pace: StepPace,
    /// Bytes that a server may hold; zero without a limit.
    pub(super) bytes_max: f64,
}

/// The load of one group of ops.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GroupLoad {
    /// Seconds of a server that do not depend on the number of rows.
    pub(super) fixed: f64,
    /// A server's seconds of all rows.
    pub(super) rows_seconds: ProcessSeconds,
    /// Bytes that a server holds of all rows; the few that do not depend on the number of rows are among them.
    pub(super) rows_bytes: f64,
    /// Seconds of a trainer if the group is cut in two.
    pub(super) cut: f64,
    /// Seconds of a trainer for every further piece.
    pub(super) piece: f64,
    /// How its gradients and values travel.
    pub(super) exchanges: Exchanges,
    /// Rows; one when the group cannot be cut.
    pub(super) rows: u64,
    /// Cuts are at multiples of this many rows.
    pub(super) unit: u64,
}

impl StepLoads {
    /// The loads of the groups of a division, which has no pieces yet.
    pub(super) fn of(empty: &Division<'_>, costs: &CostModel) -> Result<Self, Failure> {
        let mut groups = Vec::new();
        let row_counts = row_counts(empty.graph, costs);
        for (number, group) in empty.groups.all.iter().enumerate() {
            let unit = unit(empty.graph, group, costs.chunk_bytes);
            let rows = group.rows.unwrap_or(1);
            let mut load = GroupLoad { rows, unit, exchanges: exchanges(empty.graph, group), ..GroupLoad::default() };
            load.add_server(empty, number, &row_counts, costs)?;
            groups.push(load);
        }
        let [whole, halves, thirds] = [1, 2, 3].map(|count| trainer_loads(empty, &groups, count, costs));
        let (base, whole) = whole?;
        let (halves, thirds) = (halves?.1, thirds?.1);
        for (group, load) in groups.iter_mut().enumerate() {
            load.cut = halves[group] - whole[group];
            load.piece = thirds[group] - halves[group];
        }
        Ok(Self {
            groups,
            trainer: base,
            trainers: empty.cluster.trainers,
            trainer_message: costs.trainer.message_seconds,
            server_message: costs.server.message_seconds,
            pace: StepPace {
                is_waiting: empty.cluster.trainers == 1 || empty.accumulators.count > 1,
                shared_cores: costs.shared_cores,
                crowding_seconds: costs.crowding_seconds,
            },
            bytes_max: real(costs.server_bytes_max),
        })
    }
}

impl GroupLoad {
    pub(super) fn units(&self) -> u64 {
        self.rows.div_ceil(self.unit)
    }

    /// Adds the work of a server for the group: of its part with this group alone.
    fn add_server(
        &mut self,
        empty: &Division<'_>,
        group: usize,
        row_counts: &BTreeMap<&str, u64>,
        costs: &CostModel,
    ) -> Result<(), Failure> {
        let division = empty.with_only(group);
        let alone = part(empty.graph, vec![ProgramPeer::Server(0)], server::blocks(&division, 0))?;
        let mut channels: BTreeMap<&str, u64> = division
            .pieces
            .iter()
            .flat_map(|piece| piece.group.arrivals.iter().zip(&piece.arrivals))
            .map(|(gradient, names)| (names.channel.as_str(), row_counts.get(gradient.as_str()).copied().unwrap_or(0)))
            .collect();
        for (table, pulls) in division.pieces.iter().flat_map(|piece| &piece.pulls) {
            let height = match empty.graph.facts(table) {
                Some(VariableFacts::Dense { shape, .. }) if let Some(Dim::Fixed(height)) = shape.first() => *height,
                _ => u64::MAX,
            };
            for (names, pull) in pulls.iter().zip(&empty.tables[table].pulls) {
                channels.insert(&names.channel, id_count(empty.graph, &pull.ids, costs).min(height));
            }
        }
        let pieces = |channel: &str| ChannelPieces {
            count: division.cluster.trainers.into(),
            rows: channels.get(channel).copied().unwrap_or(0),
        };
        let work = server_work(&alone.graph, &pieces, costs);
        self.fixed = StepWork { ops: work.ops, ..StepWork::default() }.seconds(&costs.server);
        self.rows_seconds = StepWork { ops: 0, ..work }.process_seconds(&costs.server);
        self.rows_bytes = real(held_bytes(&alone.graph, &pieces, costs));
        Ok(())
    }

    /// This many pieces of about equal size, on server 0.
    fn pieces(&self, count: u64) -> Vec<Portion> {
        let units = self.units();
        let count = count.min(units);
        let row = |piece: u64| (piece * units / count * self.unit).min(self.rows);
        (0..count).map(|piece| Portion { server: 0, rows: row(piece)..row(piece + 1) }).collect()
    }
}

/// The seconds of a trainer if every group is in this many pieces: all of them, and those of each group's receiving
/// and sending.
fn trainer_loads(
    empty: &Division<'_>,
    groups: &[GroupLoad],
    count: u64,
    costs: &CostModel,
) -> Result<(ProcessSeconds, Vec<f64>), Failure> {
    let portions: Vec<Vec<Portion>> = groups.iter().map(|load| load.pieces(count)).collect();
    let division = empty.with(&portions);
    let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
    let numbers = (0..).zip(&portions).flat_map(|(number, portions)| std::iter::repeat_n(number, portions.len()));
    for (number, piece) in numbers.zip(&division.pieces) {
        let own = piece.group.kept.iter().map(|name| piece.name(name));
        let pulled =
            piece.pulls.values().flatten().flat_map(|names| [names.count.as_str(), &names.rows, &names.joined]);
        let arrived = piece.arrivals.iter().map(|names| names.piece.as_str());
        owners.extend(own.chain(arrived).chain(pulled).map(|name| (name, number)));
    }
    let own = part(empty.graph, vec![ProgramPeer::Trainer(0)], vec![trainer::block(&division)])?;
    let mut all = StepWork::default();
    let mut seconds = vec![0.0; groups.len()];
    for (node, work) in trainer_works(&own.graph, costs) {
        all.add(&work, 1);
        let mut names = node.inputs.iter().chain(&node.outputs).map(|index| own.graph.variable(*index).name.as_str());
        let owner = names.find_map(|name| owners.get(name)).filter(|_| node.role == OpRole::Communication);
        if let Some(group) = owner {
            seconds[*group] += work.process_seconds(&costs.trainer).own;
        }
    }
    Ok((all.process_seconds(&costs.trainer), seconds))
}

fn exchanges(graph: &Graph, group: &OpGroup) -> Exchanges {
    let mut all = Exchanges::default();
    group.arrivals.iter().filter_map(|name| graph.facts(name)).for_each(|facts| all.add(Exchanges::of(facts)));
    all
}

/// The fewest rows that fill a chunk.
fn unit(graph: &Graph, group: &OpGroup, chunk_bytes: u32) -> u64 {
    let Some(rows) = group.rows else { return 1 };
    let bytes = group.kept.iter().filter_map(|name| match graph.facts(name)? {
        VariableFacts::Dense { element_type, shape } if !shape.is_empty() => {
            Some(shape.iter().fold(element_type.bytes(), |bytes, dim| match dim {
                Dim::Fixed(length) => bytes.saturating_mul(*length),
                Dim::Batch => bytes,
            }))
        }
        _ => None,
    });
    let row_bytes = bytes.max().unwrap_or(1) / rows;
    u64::from(chunk_bytes).div_ceil(row_bytes.max(1)).min(rows)
}
