//! What the parts of servers say: parameters, where they live, and how they begin and change.

use pserver_core::config::{OptimizerSettings, SparseSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ServerIndex;
use pserver_core::program::transpile::Part;
use pserver_core::program::{Dim, Facts, Graph, Node, OpKind, Peer, Role, Tensor, VariableIndex};
use pserver_core::rows::{Height, RowLayout};

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
    /// The op that fills it at the beginning.
    pub(super) beginning: OpKind,
}

impl Kept {
    /// Memory for its value.
    pub(super) fn zeros(&self) -> Tensor {
        Tensor::zeros(self.element_type, &self.shape)
    }

    /// How a client declares it.
    pub(super) fn settings(&self) -> Result<OptimizerSettings, Failure> {
        let mut settings = OptimizerSettings::from_text(&self.config)?;
        let home = u16::try_from(self.server).map(ServerIndex);
        settings.home = Some(home.map_err(|_| Failure::call(format!("found server {}; expected fewer", self.server)))?);
        if let Some(layout) = self.layout {
            settings.sparse = Some(self.sparse(layout)?);
        }
        Ok(settings)
    }

    fn sparse(&self, layout: RowLayout) -> Result<SparseSettings, Failure> {
        let refuse = || {
            let Self { server, name, .. } = self;
            let reason = "found another beginning than fill, uniform or gaussian";
            Failure::call(format!("server {server}, parameter {name:?}: {reason}"))
        };
        let (seed, first) = match self.beginning {
            OpKind::Uniform { seed, first, .. } | OpKind::Gaussian { seed, first, .. } => (seed, first),
            _ => (0, 0),
        };
        Ok(SparseSettings {
            height: Some(layout.height().bound()),
            width: Some(layout.width()),
            seed,
            first,
            initializer: self.beginning.initializer().ok_or_else(refuse)?,
            ..SparseSettings::default()
        })
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
    let nodes = || graph.scopes().iter().flat_map(|scope| &scope.nodes);
    let mut all = Vec::new();
    for update in nodes().filter(|node| node.rule.is_some()) {
        let OpKind::Update { config } = &update.kind else { continue };
        let parameter = graph.variable(update.inputs[0]);
        let refuse =
            |reason: String| Failure::call(format!("server {server}, parameter {:?}: {reason}", parameter.name));
        let (gradient, facts) = received(graph, update.inputs[1]).map_err(refuse)?;
        let (element_type, shape) = dimensions(&parameter.facts).map_err(refuse)?;
        let beginning = beginning(graph, update.inputs[0]);
        all.push(Kept {
            name: parameter.name.clone(),
            gradient,
            server,
            element_type,
            shape,
            layout: layout(&facts)?,
            config: config.clone(),
            beginning: beginning.ok_or_else(|| refuse("found nothing that fills it at the beginning".to_owned()))?,
        });
    }
    let is_known = |node: &Node| {
        node.rule.is_some() || node.kind.is_flow() || node.role == Role::Initialise || node.kind.name() == "cast"
    };
    if let Some(other) = nodes().find(|node| !is_known(node)) {
        let name = other.kind.name();
        let expected = "expected recv, accumulators, update and send, which is what servers of a job run";
        return Err(Failure::call(format!("server {server}: found {name} in its part; {expected}")));
    }
    Ok(all)
}

/// The channel that a merged gradient's pieces come on, and what a piece is.
fn received(graph: &Graph, merged: VariableIndex) -> Result<(String, Facts), String> {
    let mut wanted = merged;
    loop {
        let writer = graph.scopes().iter().flat_map(|scope| &scope.nodes).find(|node| node.outputs.contains(&wanted));
        match writer {
            Some(Node { kind: OpKind::Recv { channel }, .. }) => {
                return Ok((channel.clone(), graph.variable(wanted).facts.clone()));
            }
            Some(Node { kind: OpKind::GradientAccumulator { .. } | OpKind::Cast { .. }, inputs, .. }) => {
                wanted = inputs[0];
            }
            Some(other) => {
                return Err(format!(
                    "found {} between recv and update; expected an accumulator only",
                    other.kind.name()
                ));
            }
            None => return Err(format!("found nothing that writes {:?}", graph.variable(wanted).name)),
        }
    }
}

fn beginning(graph: &Graph, parameter: VariableIndex) -> Option<OpKind> {
    let mut nodes = graph.scopes().iter().flat_map(|scope| &scope.nodes);
    let filler = nodes.find(|node| node.role == Role::Initialise && node.outputs.contains(&parameter));
    filler.map(|node| node.kind.clone())
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
