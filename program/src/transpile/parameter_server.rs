//! Parameter-server transpiler: optimizer ops and their outputs go to servers, everything else to trainers.

use std::collections::BTreeMap;

use crate::graph::Graph;
use crate::op::{OpRole, ProgramPeer};
use crate::update_loop::GradientNames;
use crate::variable::{Dim, VariableFacts};
use pserver_core::accumulator::AccumulatorSettings;
use pserver_core::config::{Merge, Mode};
use pserver_core::error::Failure;
use pserver_core::limits::{SERVERS_MAX, TRAINERS_MAX};

use super::Transpiler;
use super::cost::{CostModel, group_work};
use super::division::{Division, GroupSlice};
use super::group::{Groups, OpGroup};
use super::outline::{Outline, ops};
use super::part::{Cluster, ProgramPart};
use super::placement::{Load, Placement, Portion};
use super::write::{UsedNames, part};
use super::{server, trainer};

/// The transpiler of the parameter server.
///
/// A step of a trainer's part receives the parameters it reads, runs forward and backward, and sends each gradient when
/// it is there. A server's part sends its parameters to every trainer once, and then loops: it accumulates the
/// gradients, optimizes, and sends the parameter to the senders of these gradients.
///
/// ```
/// use pserver_core::dtype::ElementType::Float32;
/// use pserver_program::transpile::{Cluster, CostModel, ParameterServer, Transpiler};
/// use pserver_program::{Builder, Dim, Graph, append_backward, append_optimizer};
/// use pserver_core::rows::Initializer;
///
/// let p = Builder::new();
/// let x = p.data("x", Float32, [Dim::Batch, Dim::Fixed(8)]);
/// let w = p.parameter("w", Float32, &[8, 1], Initializer::Zeros, 0);
/// p.named("loss", p.mean(p.matmul(x, w)));
/// let mut program = p.finish()?.into_program();
/// let gradients = append_backward(&mut program, "loss")?;
/// append_optimizer(&mut program, "const_lr { learning_rate: 0.1 }", &gradients)?;
///
/// let cluster = Cluster { trainers: 4, servers: 2 };
/// let parts = ParameterServer::default().transpile(&Graph::new(program)?, cluster, &CostModel::default())?;
/// assert_eq!(parts.iter().map(|part| part.peers.len()).collect::<Vec<_>>(), [4, 1, 1]);
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterServer {
    /// How servers share the parameters.
    pub placement: Placement,
    /// Whether an update waits for a gradient of every trainer.
    pub mode: Mode,
    /// How the gradients of one update are merged; integers are added.
    pub merge: Merge,
}

impl Transpiler for ParameterServer {
    fn transpile(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<Vec<ProgramPart>, Failure> {
        costs.validate()?;
        check(cluster)?;
        let accumulators = self.accumulators(cluster)?;
        let outline = Outline::of(graph);
        let groups = Groups::find(&outline)?;
        let wanted = wanted(graph, &groups);
        let empty = Division {
            graph,
            outline: &outline,
            wanted: &wanted,
            groups: &groups,
            pieces: Vec::new(),
            cluster,
            accumulators,
        };
        let loads: Result<Vec<Load>, Failure> = groups.all.iter().map(|group| load(&empty, group, costs)).collect();
        let portions = self.placement.place(&loads?, cluster.servers);

        let mut names = UsedNames::of(graph);
        let placed = groups.all.iter().zip(&portions);
        let pieces = placed.flat_map(|(group, portions)| pieces(graph, group, portions, &mut names)).collect();
        let division = Division { pieces, ..empty };
        let trainers = (0..cluster.trainers).map(ProgramPeer::Trainer).collect();
        let mut parts = vec![part(graph, trainers, vec![trainer::block(&division)])?];
        for server in 0..cluster.servers {
            parts.push(part(graph, vec![ProgramPeer::Server(server)], server::blocks(&division, server))?);
        }
        Ok(parts)
    }
}

impl ParameterServer {
    fn accumulators(&self, cluster: Cluster) -> Result<AccumulatorSettings, Failure> {
        match self.mode {
            Mode::Staleness { bound: 0 } => {
                Err(Failure::call("found a staleness bound of 0; expected 1 or more, or mode sync"))
            }
            Mode::Delta => Err(Failure::call("found the mode Delta, in which trainers optimize; expected another one")),
            mode => Ok(AccumulatorSettings::of(mode, self.merge, cluster.trainers)),
        }
    }
}

fn check(cluster: Cluster) -> Result<(), Failure> {
    let Cluster { trainers, servers } = cluster;
    if trainers == 0 || trainers > TRAINERS_MAX {
        return Err(Failure::call(format!("{trainers} trainers; expected 1 to {TRAINERS_MAX}")));
    }
    if servers == 0 || servers > u32::from(SERVERS_MAX) {
        return Err(Failure::call(format!("{servers} servers; expected 1 to {SERVERS_MAX}")));
    }
    Ok(())
}

/// The cost of a group for the server that has it, as the cost of a part with this group alone. `all` has no pieces
/// yet.
fn load<'a>(all: &Division<'a>, group: &'a OpGroup, costs: &CostModel) -> Result<Load, Failure> {
    let Division { graph, cluster, .. } = *all;
    let whole = [Portion { server: 0, rows: 0..group.rows.unwrap_or(1) }];
    let pieces = pieces(graph, group, &whole, &mut UsedNames::of(graph));
    let division = Division { pieces, ..*all };
    let alone = part(graph, vec![ProgramPeer::Server(0)], server::blocks(&division, 0))?;
    let work = group_work(&alone.graph, cluster, costs);
    let seconds = work.seconds(&costs.server);
    let fixed = super::StepWork { messages: work.messages, ..super::StepWork::default() }.seconds(&costs.server);
    let unit = unit(graph, group, costs.chunk_bytes);
    Ok(Load { fixed, rows_seconds: seconds - fixed, rows: group.rows.unwrap_or(1), unit })
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

/// The pieces of a group, with all their names.
fn pieces<'a>(
    graph: &'a Graph,
    group: &'a OpGroup,
    portions: &[Portion],
    names: &mut UsedNames<'_>,
) -> Vec<GroupSlice<'a>> {
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
        let mut piece = GroupSlice { group, server: *server, rows, names: own, arrivals: Vec::new() };
        for gradient in &group.arrivals {
            let arrival = arrival(graph, &piece, gradient, names);
            piece.names.insert(gradient, arrival.merged.clone());
            piece.arrivals.push(arrival);
        }
        pieces.push(piece);
    }
    pieces
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

/// The variables that a group's ops and their initialisation touch, in the order of the ops.
fn touched<'a>(graph: &'a Graph, group: &'a OpGroup) -> impl Iterator<Item = &'a str> {
    let ops = group.ops.iter().map(|place| &graph.program().blocks[0].ops[*place]);
    ops.flat_map(|op| op.inputs.iter().chain(&op.outputs)).map(String::as_str)
}

/// The parameters and states that trainers' ops read and servers keep, with their places in the order in which they are
/// read first.
fn wanted<'a>(graph: &'a Graph, groups: &Groups) -> BTreeMap<&'a str, usize> {
    let readers = ops(graph).filter(|(_, op)| matches!(op.role, OpRole::Forward | OpRole::Backward));
    let mut wanted = BTreeMap::new();
    for name in readers.flat_map(|(_, op)| &op.inputs).filter(|name| groups.keeper(name).is_some()) {
        let next = wanted.len();
        wanted.entry(name.as_str()).or_insert(next);
    }
    wanted
}
