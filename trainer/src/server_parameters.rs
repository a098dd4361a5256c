//! Parameters in the parts of servers: owner, type, initial value, rule and sharing of each.

use std::collections::BTreeMap;

use pserver_core::accumulator::LateGradients;
use pserver_core::config::{OptimizerSettings, SparseSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ServerIndex;
use pserver_core::rows::{Height, RowLayout};
use pserver_program::server_stage::{ServerStage, StageTotal, server_stages};
use pserver_program::transpile::ProgramPart;
use pserver_program::{Graph, Node, OpKind, OpRole, ProgramPeer, Tensor, VariableFacts, VariableIndex};

use super::initial_values::InitialValues;
use super::sharing::ProgramSharing;

/// A parameter, or some rows of one, that a server owns.
#[derive(Clone, Debug)]
pub(super) struct ServerParameter {
    /// Its name, and the name of the channel of its value.
    pub(super) name: String,
    /// The channel of its gradient.
    pub(super) gradient: String,
    /// The channels on which trainers ask for its rows.
    pub(super) row_channels: Vec<String>,
    /// Index of the server that owns it.
    pub(super) server: u32,
    /// The type of its elements.
    pub(super) element_type: ElementType,
    /// Its dimensions.
    pub(super) shape: Vec<u64>,
    /// Layout of the rows of its gradient; none for a dense gradient.
    pub(super) layout: Option<RowLayout>,
    /// Its rule, as configuration.
    pub(super) config: String,
    /// The last initialising op that writes it.
    pub(super) initialising_op: OpKind,
    /// How trainers share it.
    pub(super) sharing: ProgramSharing,
    /// Trainers that its rounds do not wait for.
    pub(super) backup_trainers: u32,
    /// The number of several parameters that its rule reads.
    pub(super) total: Option<ServerTotal>,
}

/// A number that trainers make of several parameters in the middle of a round. Its channels are the names of the
/// parameters that servers have for it.
#[derive(Clone, Debug)]
pub(super) struct ServerTotal {
    /// The share that the server computes.
    pub(super) share: String,
    /// Whether trainers receive the share.
    pub(super) has_share: bool,
    /// The number that trainers send.
    pub(super) total: String,
    /// The type of both in the program; servers have float64.
    pub(super) element_type: ElementType,
}

impl ServerParameter {
    /// Memory for its value.
    pub(super) fn zeros(&self) -> Result<Tensor, Failure> {
        let zeros = Tensor::try_zeros(self.element_type, &self.shape);
        zeros.map_err(|failure| Failure::call(format!("parameter {:?}: {failure}", self.name)))
    }

    /// Bytes of its value.
    pub(super) fn byte_count(&self) -> Result<usize, Failure> {
        let bytes = self.shape.iter().fold(self.element_type.bytes(), |bytes, length| bytes.saturating_mul(*length));
        usize::try_from(bytes).map_err(|_| Failure::call(format!("parameter {:?}: found {bytes} bytes", self.name)))
    }

    /// The settings with which a client declares it.
    pub(super) fn settings(&self) -> Result<OptimizerSettings, Failure> {
        let mut settings = OptimizerSettings::from_text(&self.config)?;
        let home = u16::try_from(self.server).map(ServerIndex);
        settings.owner = Some(
            home.map_err(|_| Failure::call(format!("found server {}; expected an index below 65536", self.server)))?,
        );
        settings.sparse = self.layout.map(|layout| self.sparse(layout));
        settings.backup_trainers = self.backup_trainers;
        Ok(settings)
    }

    fn sparse(&self, layout: RowLayout) -> SparseSettings {
        let (seed, first) = match self.initialising_op {
            OpKind::Uniform { seed, first, .. } | OpKind::Gaussian { seed, first, .. } => (seed, first),
            _ => (0, 0),
        };
        SparseSettings {
            height: Some(layout.height().bound()),
            width: Some(layout.width()),
            seed: Some(seed),
            first,
            // All rows of a given table are sent.
            initializer: self.initialising_op.initializer().unwrap_or_default(),
            ..SparseSettings::default()
        }
    }
}

/// The number of trainers for which a program was divided.
pub(super) fn trainer_count(parts: &[ProgramPart]) -> u32 {
    let peers = parts.iter().flat_map(|part| &part.peers);
    let trainers = peers.filter(|peer| matches!(peer, ProgramPeer::Trainer(_))).count();
    u32::try_from(trainers).unwrap_or(u32::MAX)
}

/// The parameters in a server's part, or in a component of one, in the order of their updates.
///
/// # Errors
/// When it has an op that no flow of a parameter carries out.
pub(super) fn parameters_of(graph: &Graph, server: u32, trainers: u32) -> Result<Vec<ServerParameter>, Failure> {
    let is_known = |node: &&Node| {
        let is_of_flow = matches!(node.kind, OpKind::Cast { .. } | OpKind::LookupTable { .. });
        node.kind.is_flow() || is_of_flow || matches!(node.role, OpRole::Initialise | OpRole::Optimize)
    };
    if let Some(other) = nodes(graph).find(|node| !is_known(node)) {
        let (name, role) = (other.kind.name(), other.role.name());
        let expected = "expected only flow and the roles initialise and optimize";
        return Err(Failure::call(format!("server {server}: found {name} of the role {role}; {expected}")));
    }
    let run = nodes(graph).filter(|node| node.role != OpRole::Initialise);
    let writers = run.flat_map(|node| node.outputs.iter().map(move |output| (*output, node))).collect();
    let initial_values = InitialValues::of(graph);
    let stages = server_stages(graph).map_err(|failure| Failure::call(format!("server {server}: {failure}")))?;
    let kept = stages.iter().map(|stage| {
        let one = of_stage(graph, (server, trainers), stage, &writers, &initial_values);
        let name = &graph.variable(stage.update.inputs[0]).name;
        one.map_err(|reason| Failure::call(format!("server {server}, parameter {name:?}: {reason}")))
    });
    kept.collect()
}

fn of_stage(
    graph: &Graph,
    (server, trainers): (u32, u32),
    stage: &ServerStage<'_>,
    writers: &BTreeMap<VariableIndex, &Node>,
    initial_values: &InitialValues<'_>,
) -> Result<ServerParameter, String> {
    let ServerStage { update, merged, config, total, .. } = stage;
    let rule = update.rule.as_ref().expect("an update has a rule");
    let parameter = graph.variable(update.inputs[0]);
    let (gradient, facts, (sharing, backup_trainers)) = received(graph, *merged, writers, trainers)?;
    let (element_type, shape) = dimensions(&parameter.facts)?;
    let layout = layout(&facts).map_err(|failure| failure.to_string())?;
    if layout.is_some() && total.is_some() {
        return Err("found a number of several parameters of a gradient of rows; expected one of a dense gradient, \
                    which an op sum of the role backward makes of zeros and the rows"
            .to_owned());
    }
    let initialising_op = initial_values.check(update.inputs[0], layout.is_some())?;
    // The count of updates, then the rule's states, each with its initial value.
    let initial = std::iter::once(0.0).chain(rule.states().iter().map(|state| state.initial));
    update.inputs[2..].iter().zip(initial).try_for_each(|(state, value)| initial_values.check_state(*state, value))?;
    Ok(ServerParameter {
        name: parameter.name.clone(),
        gradient,
        row_channels: row_channels(graph, update.inputs[0], writers),
        server,
        element_type,
        shape,
        layout,
        config: config.clone(),
        initialising_op,
        sharing,
        backup_trainers,
        total: total.as_ref().map(|total| server_total(graph, &parameter.name, total)).transpose()?,
    })
}

fn server_total(graph: &Graph, parameter: &str, total: &StageTotal) -> Result<ServerTotal, String> {
    let (element_type, _) = dimensions(&graph.variable(total.number).facts)?;
    let share = total.share.as_ref().map(|(_, channel)| channel.clone());
    let (has_share, share) = (share.is_some(), share.unwrap_or_else(|| format!("{parameter}@share")));
    Ok(ServerTotal { share, has_share, total: total.channel.clone(), element_type })
}

/// The channels of ids that are looked up in a parameter.
fn row_channels(graph: &Graph, parameter: VariableIndex, writers: &BTreeMap<VariableIndex, &Node>) -> Vec<String> {
    let lookups = nodes(graph).filter(|node| matches!(node.kind, OpKind::LookupTable { .. }));
    let ids = lookups.filter(|node| node.inputs[0] == parameter).filter_map(|node| writers.get(&node.inputs[1]));
    let channels = ids.filter_map(|node| match &node.kind {
        OpKind::Recv { channel } => Some(channel.clone()),
        _ => None,
    });
    channels.collect()
}

/// Channel and facts of the gradients that are merged into `merged`, and their sharing.
fn received(
    graph: &Graph,
    merged: VariableIndex,
    writers: &BTreeMap<VariableIndex, &Node>,
    trainers: u32,
) -> Result<(String, VariableFacts, (ProgramSharing, u32)), String> {
    let (mut wanted, mut sharing) = (merged, None);
    loop {
        let writer = writers.get(&wanted);
        let writer = writer.ok_or_else(|| format!("found nothing that writes {:?}", graph.variable(wanted).name))?;
        match writer.kind {
            OpKind::Recv { ref channel } => {
                let sharing = sharing.ok_or("found no accumulator between recv and update; expected one")?;
                return Ok((channel.clone(), graph.variable(wanted).facts.clone(), sharing));
            }
            OpKind::GradientAccumulator { late: LateGradients::NextRound, .. } => {
                return Err("found late gradients that count in the next round; a flow drops them".to_owned());
            }
            OpKind::GradientAccumulator { count, merge, staleness, .. } if sharing.is_none() => {
                let facts = &graph.variable(wanted).facts;
                sharing = Some(ProgramSharing::of(facts, (count, merge, staleness), trainers)?);
            }
            // A half is added in the parameter's type.
            OpKind::Cast { .. } if sharing.is_some() && is_widened_half(graph, writer, writers, merged) => {}
            OpKind::Cast { .. } => {
                return Err("found a cast of other than a received half to the parameter's type".to_owned());
            }
            ref other => {
                let name = other.name();
                return Err(format!("found {name} between recv and update; expected one accumulator only"));
            }
        }
        wanted = writer.inputs[0];
    }
}

/// Whether a cast makes of a half, as it was received, what is merged.
fn is_widened_half(
    graph: &Graph,
    cast: &Node,
    writers: &BTreeMap<VariableIndex, &Node>,
    merged: VariableIndex,
) -> bool {
    let element_type = |variable| graph.variable(variable).facts.element_type();
    let is_received = writers.get(&cast.inputs[0]).is_some_and(|one| matches!(one.kind, OpKind::Recv { .. }));
    let is_half = element_type(cast.inputs[0]).is_some_and(|found| !found.is_parameter_type());
    is_received && is_half && element_type(cast.outputs[0]) == element_type(merged)
}

/// Element type and dimensions of a dense variable.
pub(super) fn dimensions(facts: &VariableFacts) -> Result<(ElementType, Vec<u64>), String> {
    facts.fixed_dense().ok_or_else(|| format!("found {facts}; expected known dimensions"))
}

fn layout(gradient: &VariableFacts) -> Result<Option<RowLayout>, Failure> {
    match gradient {
        VariableFacts::SelectedRows { element_type, height, width } => {
            let width = u32::try_from(*width)
                .map_err(|_| Failure::call(format!("found rows of {width} elements; expected fewer than 2^32")))?;
            RowLayout::new(*element_type, width, Height::Rows(*height)).map(Some)
        }
        _ => Ok(None),
    }
}

pub(super) fn nodes(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.scopes().iter().flat_map(|scope| &scope.nodes)
}
