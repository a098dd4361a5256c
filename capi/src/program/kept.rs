//! What the parts of servers say: parameters, where they live, and how they begin and change.

use std::collections::BTreeMap;

use pserver_core::config::{OptimizerSettings, SparseSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ServerIndex;
use pserver_core::program::transpile::Part;
use pserver_core::program::{Dim, Facts, Graph, Node, OpKind, Peer, Role, Tensor, VariableIndex};
use pserver_core::rows::{Height, RowLayout};

use super::beginnings::Beginnings;
use super::terms::Terms;

/// A parameter, or some rows of one, that a server keeps.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// Its name, which is also that of the channel on which its value comes.
    pub(super) name: String,
    /// The channel on which its gradient goes.
    pub(super) gradient: String,
    /// Who keeps it.
    pub(super) server: u32,
    /// The type of its elements.
    pub(super) element_type: ElementType,
    /// Its dimensions.
    pub(super) shape: Vec<u64>,
    /// The rows of its gradient, when that is selected rows.
    pub(super) layout: Option<RowLayout>,
    /// Its rule, as configuration.
    pub(super) config: String,
    /// The op that fills it at the beginning, the last of them.
    pub(super) beginning: OpKind,
    /// How trainers share it.
    pub(super) terms: Terms,
}

impl Kept {
    /// Memory for its value.
    pub(super) fn zeros(&self) -> Result<Tensor, Failure> {
        let zeros = Tensor::try_zeros(self.element_type, &self.shape);
        zeros.map_err(|failure| Failure::call(format!("parameter {:?}: {failure}", self.name)))
    }

    /// How a client declares it.
    pub(super) fn settings(&self) -> Result<OptimizerSettings, Failure> {
        let mut settings = OptimizerSettings::from_text(&self.config)?;
        let home = u16::try_from(self.server).map(ServerIndex);
        settings.home = Some(home.map_err(|_| Failure::call(format!("found server {}; expected fewer", self.server)))?);
        settings.sparse = self.layout.map(|layout| self.sparse(layout));
        Ok(settings)
    }

    fn sparse(&self, layout: RowLayout) -> SparseSettings {
        let (seed, first) = match self.beginning {
            OpKind::Uniform { seed, first, .. } | OpKind::Gaussian { seed, first, .. } => (seed, first),
            _ => (0, 0),
        };
        SparseSettings {
            height: Some(layout.height().bound()),
            width: Some(layout.width()),
            seed,
            first,
            initializer: self.beginning.initializer().expect("beginnings of tables are checked"),
            ..SparseSettings::default()
        }
    }
}

/// Everything that servers keep, in the order of servers and of their updates.
///
/// # Errors
/// When a server's part does more than receive, accumulate, update and send.
pub(super) fn kept(parts: &[Part]) -> Result<Vec<Kept>, Failure> {
    let mut all = Vec::new();
    for part in parts {
        for peer in &part.peers {
            if let Peer::Server(server) = peer {
                all.extend(of_server(&part.graph, *server)?);
            }
        }
    }
    Ok(all)
}

fn of_server(graph: &Graph, server: u32) -> Result<Vec<Kept>, Failure> {
    let is_known = |node: &&Node| {
        node.rule.is_some() || node.kind.is_flow() || node.role == Role::Initialise || node.kind.name() == "cast"
    };
    if let Some(other) = nodes(graph).find(|node| !is_known(node)) {
        let name = other.kind.name();
        let expected = "expected recv, accumulators, update and send, which is what servers of a job run";
        return Err(Failure::call(format!("server {server}: found {name} in its part; {expected}")));
    }
    let run = nodes(graph).filter(|node| node.role != Role::Initialise);
    let writers = run.flat_map(|node| node.outputs.iter().map(move |output| (*output, node))).collect();
    let beginnings = Beginnings::of(graph);
    let updates = nodes(graph).filter(|node| node.rule.is_some());
    let kept = updates.map(|update| {
        let one = of_update(graph, server, update, &writers, &beginnings);
        let name = &graph.variable(update.inputs[0]).name;
        one.map_err(|reason| Failure::call(format!("server {server}, parameter {name:?}: {reason}")))
    });
    kept.collect()
}

fn of_update(
    graph: &Graph,
    server: u32,
    update: &Node,
    writers: &BTreeMap<VariableIndex, &Node>,
    beginnings: &Beginnings<'_>,
) -> Result<Kept, String> {
    let (OpKind::Update { config }, Some(rule)) = (&update.kind, &update.rule) else {
        unreachable!("an update has a rule")
    };
    let parameter = graph.variable(update.inputs[0]);
    let (gradient, facts, terms) = received(graph, update.inputs[1], writers)?;
    let (element_type, shape) = dimensions(&parameter.facts)?;
    let layout = layout(&facts).map_err(|failure| failure.to_string())?;
    let beginning = beginnings.check(update.inputs[0], layout.is_some())?;
    // The count of updates, then the rule's states, each with what it begins with.
    let initial = std::iter::once(0.0).chain(rule.states().iter().map(|state| state.initial));
    update.inputs[2..].iter().zip(initial).try_for_each(|(state, value)| beginnings.check_state(*state, value))?;
    Ok(Kept {
        name: parameter.name.clone(),
        gradient,
        server,
        element_type,
        shape,
        layout,
        config: config.clone(),
        beginning,
        terms,
    })
}

/// The channel that a merged gradient's pieces come on, what a piece is, and how pieces become one.
fn received(
    graph: &Graph,
    merged: VariableIndex,
    writers: &BTreeMap<VariableIndex, &Node>,
) -> Result<(String, Facts, Terms), String> {
    let (mut wanted, mut terms) = (merged, None);
    loop {
        let writer = writers.get(&wanted);
        let writer = writer.ok_or_else(|| format!("found nothing that writes {:?}", graph.variable(wanted).name))?;
        match writer.kind {
            OpKind::Recv { ref channel } => {
                let terms = terms.ok_or("found no accumulator between recv and update; expected one")?;
                return Ok((channel.clone(), graph.variable(wanted).facts.clone(), terms));
            }
            OpKind::GradientAccumulator { count, merge, staleness } if terms.is_none() => {
                terms = Some(Terms::of(&graph.variable(wanted).facts, count, merge, staleness)?);
            }
            OpKind::Cast { .. } => {}
            ref other => {
                let name = other.name();
                return Err(format!("found {name} between recv and update; expected one accumulator only"));
            }
        }
        wanted = writer.inputs[0];
    }
}

/// The type and the dimensions of what a server keeps.
pub(super) fn dimensions(facts: &Facts) -> Result<(ElementType, Vec<u64>), String> {
    let length = |dim: &Dim| match dim {
        Dim::Fixed(length) => Some(*length),
        Dim::Batch => None,
    };
    let known = match facts {
        Facts::Dense { element_type, shape } => {
            shape.iter().map(length).collect::<Option<Vec<u64>>>().map(|shape| (*element_type, shape))
        }
        _ => None,
    };
    known.ok_or_else(|| format!("found {facts}; expected known dimensions"))
}

fn layout(gradient: &Facts) -> Result<Option<RowLayout>, Failure> {
    match gradient {
        Facts::SelectedRows { element_type, height, width } => {
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
