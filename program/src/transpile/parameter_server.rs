//! Parameter-server transpiler: optimizer ops and their outputs go to servers, everything else to trainers.

use std::collections::BTreeMap;

use crate::graph::Graph;
use crate::op::{OpRole, ProgramPeer};
use pserver_core::accumulator::{AccumulatorSettings, LateGradients};
use pserver_core::config::{Merge, Mode};
use pserver_core::error::Failure;
use pserver_core::limits::{SERVERS_MAX, TRAINERS_MAX};

use super::Transpiler;
use super::cost::{CostModel, estimate};
use super::division::{Division, Portion};
use super::given_placement::GivenPlacement;
use super::group::Groups;
use super::outline::{Outline, ops};
use super::part::{Cluster, ProgramPart};
use super::placement::Placement;
use super::pulls::tables;
use super::step_loads::StepLoads;
use super::write::part;
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterServer {
    /// How servers share the parameters.
    pub placement: Placement,
    /// Whether an update waits for a gradient of every trainer.
    pub mode: Mode,
    /// How the gradients of one update are merged; integers are added.
    pub merge: Merge,
    /// Trainers without whose gradients an update is made in mode sync: the slowest ones of each round.
    pub backup_trainers: u32,
    /// The fate of their gradients; with the next round the executor runs a server's part.
    pub late: LateGradients,
}

impl Transpiler for ParameterServer {
    fn transpile(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<Vec<ProgramPart>, Failure> {
        Ok(self.divide(graph, cluster, costs)?.1)
    }
}

impl ParameterServer {
    /// The servers of the parameters as [`transpile`](Transpiler::transpile) places them, to be changed and
    /// [given](Placement::Given) again.
    ///
    /// # Errors
    /// As [`transpile`](Transpiler::transpile).
    pub fn placement_of(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<GivenPlacement, Failure> {
        let portions = self.divide(graph, cluster, costs)?.0;
        Ok(GivenPlacement::of(graph, &Groups::find(&Outline::of(graph))?, &portions))
    }

    /// The parameters of which each is on one server, with the reason.
    ///
    /// # Errors
    /// When the program has no optimizer part that can be divided.
    pub fn whole_parameters(graph: &Graph) -> Result<Vec<(String, String)>, Failure> {
        let groups = Groups::find(&Outline::of(graph))?;
        let whole = groups.all.iter().filter(|group| group.rows.is_none());
        Ok(whole.map(|group| (group.name(graph), group.why_whole.clone())).collect())
    }

    fn divide(
        &self,
        graph: &Graph,
        cluster: Cluster,
        costs: &CostModel,
    ) -> Result<(Vec<Vec<Portion>>, Vec<ProgramPart>), Failure> {
        costs.validate()?;
        check(cluster)?;
        let accumulators = self.accumulators(cluster)?;
        let outline = Outline::of(graph);
        let groups = Groups::find(&outline)?;
        self.check_totals(graph, &groups)?;
        let wanted = wanted(graph, &groups);
        let tables = tables(graph, &groups, &wanted);
        let division = Division {
            graph,
            outline: &outline,
            wanted: &wanted,
            tables: &tables,
            groups: &groups,
            pieces: Vec::new(),
            cluster,
            accumulators,
        };
        if let Placement::Given(given) = &self.placement {
            let portions = given.portions(graph, &groups, cluster.servers)?;
            let parts = divide(&division, &portions)?;
            estimate(&parts, costs).check_held(&parts, costs)?;
            return Ok((portions, parts));
        }
        self.search(&division, costs)
    }

    /// The best division that is found.
    fn search(
        &self,
        division: &Division<'_>,
        costs: &CostModel,
    ) -> Result<(Vec<Vec<Portion>>, Vec<ProgramPart>), Failure> {
        let servers = division.cluster.servers;
        let loads = StepLoads::of(division, costs)?;
        // Loads are linear in rows; the estimate rounds, and decides.
        let divided = |portions: &[Vec<Portion>]| {
            let parts = divide(division, portions)?;
            let estimated = estimate(&parts, costs);
            Ok::<_, Failure>((estimated.check_held(&parts, costs), estimated.step_seconds, parts))
        };
        let mut chosen = self.placement.place(&loads, servers);
        let (mut held, step_seconds, mut parts) = divided(&chosen)?;
        let mut others = Vec::new();
        if self.placement == Placement::Balanced {
            others.push(Placement::RoundRobin.place(&loads, servers));
        }
        if held.is_err() && self.placement != Placement::RoundRobin {
            let unlimited = StepLoads { bytes_max: 0.0, ..loads };
            others.push(Placement::EqualBytes.place(&unlimited, servers));
        }
        others.retain(|portions| *portions != chosen);
        for portions in others {
            let (is_held, seconds, others) = divided(&portions)?;
            if is_held.is_ok() && (held.is_err() || seconds < step_seconds) {
                (held, parts, chosen) = (is_held, others, portions);
            }
        }
        held.map(|()| (chosen, parts))
    }

    /// Refuses numbers of several parameters where a parameter has no rounds.
    fn check_totals(&self, graph: &Graph, groups: &Groups<'_>) -> Result<(), Failure> {
        if groups.totals.is_empty() || self.mode == Mode::Sync && self.backup_trainers == 0 {
            return Ok(());
        }
        let (label, found) = (graph.label(0, groups.totals.ops[0]), self.mode);
        let backup = match self.backup_trainers {
            0 => String::new(),
            backup => format!(" with {backup} backup trainers"),
        };
        Err(Failure::call(format!(
            "{label}: found a number of several parameters in mode {found:?}{backup}; expected mode Sync, in which all \
             gradients are of one round, without backup trainers"
        )))
    }

    fn accumulators(&self, cluster: Cluster) -> Result<AccumulatorSettings, Failure> {
        match self.mode {
            Mode::Staleness { bound: 0 } => {
                Err(Failure::call("found a staleness bound of 0; expected 1 or more, or mode sync"))
            }
            Mode::Delta => Err(Failure::call("found the mode Delta, in which trainers optimize; expected another one")),
            mode if 0 < self.backup_trainers && (mode != Mode::Sync || cluster.trainers <= self.backup_trainers) => {
                let (found, trainers) = (self.backup_trainers, cluster.trainers);
                Err(Failure::call(format!(
                    "found {found} backup trainers of {trainers} in mode {mode:?}; expected fewer than the trainers, \
                     in mode Sync"
                )))
            }
            mode => {
                let late = if self.backup_trainers == 0 { LateGradients::Drop } else { self.late };
                let all = AccumulatorSettings::of(mode, self.merge, cluster.trainers);
                Ok(AccumulatorSettings { late, ..all.without(self.backup_trainers) })
            }
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

/// The parts of a program whose groups are placed so. `empty` has no pieces.
fn divide(empty: &Division<'_>, portions: &[Vec<Portion>]) -> Result<Vec<ProgramPart>, Failure> {
    let division = empty.with(portions);
    let Cluster { trainers, servers } = division.cluster;
    let trainers = (0..trainers).map(ProgramPeer::Trainer).collect();
    let mut parts = vec![part(division.graph, trainers, vec![trainer::block(&division)])?];
    for server in 0..servers {
        parts.push(part(division.graph, vec![ProgramPeer::Server(server)], server::blocks(&division, server))?);
    }
    Ok(parts)
}

/// The parameters and states that trainers' ops read and servers keep, with their places in the order in which they are
/// read first.
fn wanted<'a>(graph: &'a Graph, groups: &Groups<'_>) -> BTreeMap<&'a str, usize> {
    let readers = ops(graph).filter(|(_, op)| matches!(op.role, OpRole::Forward | OpRole::Backward));
    let mut wanted = BTreeMap::new();
    for name in readers.flat_map(|(_, op)| &op.inputs).filter(|name| groups.keeper(name).is_some()) {
        let next = wanted.len();
        wanted.entry(name.as_str()).or_insert(next);
    }
    wanted
}
