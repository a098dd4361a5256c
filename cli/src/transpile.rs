//! `pserver transpile`: a program divided into what trainers and servers run, as text or as a picture.
//!
//! Not here: how it is divided ([`pserver_program::transpile`]); running the parts.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use pserver_client::console;
use pserver_core::accumulator::LateGradients;
use pserver_core::config::{Merge, Mode};
use pserver_node::settings;
use pserver_program::transpile::{
    Cluster, Columns, CostModel, Estimate, MachineRates, ParameterServer, Placement, ProcessRates, ProgramPart,
    Transpiler, dot, estimate, html, svg,
};
use pserver_program::{Graph, OpRole, ProgramPeer};
use pserver_trainer::{PartWay, ServedPart, explain, read_program, trainable};

use crate::program_file::optimizer_text;

/// Arguments of `pserver transpile`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The program: the text form of docs/PROGRAMS.md, or protobuf (.pb). With --optimizer both it and gradients are
    /// added.
    program: PathBuf,
    /// The loss, a scalar.
    #[arg(long, value_name = "NAME", default_value = "loss")]
    loss: String,
    /// The optimizer, such as 'const_lr { learning_rate: 0.1 }', or a file with one; none where the program has
    /// optimizer ops.
    #[arg(long, value_name = "TEXT|FILE")]
    optimizer: Option<String>,
    /// Trainers.
    #[arg(long, default_value_t = 1)]
    trainers: u32,
    /// Servers.
    #[arg(long, default_value_t = 1)]
    servers: u32,
    #[command(flatten)]
    division: DivisionArgs,
    #[command(flatten)]
    updates: Updates,
    #[command(flatten)]
    print: Printed,
    #[command(flatten)]
    rates: Rates,
}

/// In place of the text of the parts.
#[derive(clap::Args, Clone, Debug)]
struct Printed {
    /// Print a directed graph for Graphviz.
    #[arg(long)]
    dot: bool,
    /// Print a picture.
    #[arg(long, conflicts_with = "dot")]
    svg: bool,
    /// Write a page that shows the picture, to be moved and zoomed; it needs nothing from elsewhere.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dot", "svg", "costs"])]
    html: Option<PathBuf>,
    /// Print an estimate of each process's cost of a step.
    #[arg(long, conflicts_with_all = ["dot", "svg"])]
    costs: bool,
    /// Print how servers run each part, by a flow in code, or on the executor and why; and which parameters are not
    /// cut, and why.
    #[arg(long, conflicts_with_all = ["dot", "svg", "html", "costs"])]
    explain: bool,
    /// Print the servers of the parameters, as --placement takes them.
    #[arg(long, conflicts_with_all = ["dot", "svg", "html", "costs", "explain"])]
    placed: bool,
}

/// How the program is divided.
#[derive(clap::Args, Clone, Debug)]
struct DivisionArgs {
    /// How the program is divided.
    #[arg(long, value_enum, default_value_t = Strategy::ParameterServer)]
    strategy: Strategy,
    #[command(flatten)]
    balance: Balance,
}

/// The amount that servers have about equally, and a limit.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Balance {
    /// Servers get about equal amounts of this, with the strategy parameter-server: the time of a step, and bytes as
    /// far as it gets little longer; or the bytes that they hold.
    #[arg(long, value_enum, default_value_t = Balanced::Time)]
    balance: Balanced,
    /// The bytes that a server may hold, such as 16GiB: parameters, states, and gradients of a round.
    #[arg(long, value_name = "BYTES", value_parser = settings::bytes)]
    pub(crate) memory: Option<u64>,
    /// A file with the server of each parameter, as 'pserver transpile --placed' prints it.
    #[arg(long, value_name = "FILE", conflicts_with = "balance")]
    pub(crate) placement: Option<PathBuf>,
}

impl Balance {
    /// Its options, each with its value.
    pub(crate) fn words(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        let placed = match (&self.placement, self.balance.to_possible_value()) {
            (Some(file), _) => Some(("placement", file.as_os_str().to_owned())),
            (None, balance) => balance.map(|balance| ("balance", balance.get_name().into())),
        };
        placed.into_iter().chain(self.memory.map(|bytes| ("memory", bytes.to_string().into())))
    }

    /// # Errors
    /// When the file of a given placement cannot be read, or is none.
    pub(crate) fn placement(&self) -> Result<Placement> {
        let Some(file) = &self.placement else {
            return Ok(match self.balance {
                Balanced::Time => Placement::Balanced,
                Balanced::Memory => Placement::EqualBytes,
            });
        };
        let named = || format!("--placement {}", file.display());
        let text = std::fs::read_to_string(file).with_context(named)?;
        Ok(Placement::Given(text.parse().with_context(named)?))
    }
}

/// An amount that servers have about equally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Balanced {
    Time,
    Memory,
}

/// Which gradients are an update.
#[derive(clap::Args, Clone, Debug)]
struct Updates {
    /// Every gradient is an update; no trainer waits for another.
    #[arg(long = "async")]
    is_async: bool,
    /// As --async, with the fastest trainer at most so many steps in front of the slowest, 1 or more.
    #[arg(long, conflicts_with = "is_async", value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    staleness: Option<u32>,
    /// Trainers without whose gradients an update is made: the slowest ones of each round, whose gradients are dropped.
    #[arg(long, value_name = "TRAINERS", default_value_t = 0)]
    backup_trainers: u32,
    /// Gradients of backup trainers count in no round, or in the next one, which the executor of a
    /// server computes.
    #[arg(long, value_enum, default_value_t = Late::Drop)]
    late_gradients: Late,
    /// How the gradients of one update become one.
    #[arg(long, value_enum, default_value_t = Merging::Mean)]
    merge: Merging,
}

/// The estimate's assumptions about every process.
#[derive(clap::Args, Clone, Debug)]
struct Rates {
    /// Examples in a trainer's batch.
    #[arg(long, default_value_t = CostModel::default().batch)]
    batch: u64,
    /// Pieces of a parameter are multiples of this number of bytes, as far as rows allow.
    #[arg(long, default_value_t = CostModel::default().chunk_bytes, value_name = "BYTES")]
    chunk_bytes: u32,
    #[command(flatten)]
    measured: MeasuredRates,
    /// Cores that all processes share, on one machine; 0 if each has a machine of its own.
    #[arg(long, value_name = "CORES")]
    shared_cores: Option<u32>,
    /// Seconds by which a round trip takes longer for each process that exchanges messages beyond those cores.
    #[arg(long, value_name = "SECONDS")]
    crowding_seconds: Option<f64>,
    /// Bytes per second of a link, both directions together.
    #[arg(long, value_name = "RATE")]
    link_bytes_per_second: Option<f64>,
    /// Seconds of a message, beyond those of its bytes.
    #[arg(long, value_name = "SECONDS")]
    message_seconds: Option<f64>,
    /// Seconds of an op, beyond those of its arithmetic.
    #[arg(long, value_name = "SECONDS")]
    op_seconds: Option<f64>,
    /// Seconds of a selected row, beyond those of its bytes.
    #[arg(long, value_name = "SECONDS")]
    row_seconds: Option<f64>,
    /// Floating-point operations per second.
    #[arg(long, value_name = "RATE")]
    flops_per_second: Option<f64>,
    /// Bytes per second of memory that is read and written.
    #[arg(long, value_name = "RATE")]
    memory_bytes_per_second: Option<f64>,
}

/// Rates in a file.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct MeasuredRates {
    /// A file with the machines' rates, as 'psbench doctor --rates' measures them, by which a placement is estimated.
    #[arg(long, value_name = "FILE")]
    pub(crate) rates: Option<PathBuf>,
}

impl MeasuredRates {
    /// # Errors
    /// When the file cannot be read, or has something else.
    pub(crate) fn read(&self) -> Result<MachineRates> {
        let Some(file) = &self.rates else { return Ok(MachineRates::default()) };
        let named = || format!("--rates {}", file.display());
        std::fs::read_to_string(file).with_context(named)?.parse().with_context(named)
    }
}

/// The fate of a gradient whose round was completed without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Late {
    /// It counts in no round.
    #[default]
    Drop,
    /// It counts in the next one.
    Next,
}

impl From<Late> for LateGradients {
    fn from(late: Late) -> Self {
        match late {
            Late::Drop => Self::Drop,
            Late::Next => Self::NextRound,
        }
    }
}

/// How a program is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Optimizer ops and their parameters to servers, so that a step is as short as possible; the rest to trainers.
    ParameterServer,
    /// The same, with whole parameters to the servers in turn.
    RoundRobin,
    /// The largest weight by columns to the trainers; servers hold queues between them.
    Columns,
    /// Undivided: the program as it is.
    Whole,
}

/// How gradients become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Merging {
    Mean,
    Sum,
}

/// Prints what was asked for.
///
/// # Errors
/// When the file cannot be read, is not a program (with line and column), or cannot be divided.
pub fn run(args: &Args) -> Result<()> {
    let output = output(args)?;
    match &args.print.html {
        Some(file) => std::fs::write(file, output).with_context(|| file.display().to_string()),
        None => Ok(console::print(output)?),
    }
}

fn output(args: &Args) -> Result<String> {
    let graph = read_program(&args.program)?;
    graph.check_initialised()?;
    let costs = CostModel { server_bytes_max: args.division.balance.memory.unwrap_or(0), ..args.rates.model()? };
    costs.validate()?;
    let graph = args.with_optimizer(graph)?;
    if args.print.placed {
        let placed = args.transpiler()?.placement_of(&graph, args.cluster(), &costs)?;
        return Ok(placed.to_string());
    }
    let whole = match args.print.explain && args.has_servers() && 1 < args.servers {
        true => ParameterServer::whole_parameters(&graph)?,
        false => Vec::new(),
    };
    let parts = args.divide(graph, &costs)?;
    Ok(match &args.print {
        Printed { dot: true, .. } => dot(&parts),
        Printed { svg: true, .. } => svg(&parts),
        Printed { html: Some(_), .. } => html(&parts),
        Printed { costs: true, .. } => table(&estimate(&parts, &costs)),
        Printed { explain: true, .. } => ways(&explain(&parts, Some(costs.batch))?, &whole),
        _ => texts(&parts),
    })
}

impl Args {
    fn cluster(&self) -> Cluster {
        Cluster { trainers: self.trainers, servers: self.servers }
    }

    /// Whether servers have parameters.
    fn has_servers(&self) -> bool {
        matches!(self.division.strategy, Strategy::ParameterServer | Strategy::RoundRobin)
    }

    /// The program with gradients and optimizer, which servers cannot do without.
    fn with_optimizer(&self, graph: Graph) -> Result<Graph> {
        let mut ops = graph.program().blocks.iter().flat_map(|block| &block.ops);
        if self.optimizer.is_none() && (!self.has_servers() || ops.any(|op| op.role == OpRole::Optimize)) {
            return Ok(graph);
        }
        let optimizer = self.optimizer.as_deref().map(optimizer_text).transpose()?;
        trainable(graph.into_program(), &self.loss, optimizer.as_deref())
            .with_context(|| self.program.display().to_string())
    }

    fn divide(&self, graph: Graph, costs: &CostModel) -> Result<Vec<ProgramPart>> {
        Ok(match self.division.strategy {
            Strategy::Whole => vec![ProgramPart { peers: Vec::new(), graph }],
            Strategy::Columns => Columns.transpile(&graph, self.cluster(), costs)?,
            Strategy::ParameterServer | Strategy::RoundRobin => {
                self.transpiler()?.transpile(&graph, self.cluster(), costs)?
            }
        })
    }

    fn transpiler(&self) -> Result<ParameterServer> {
        let placement = match self.division.strategy {
            Strategy::ParameterServer => self.division.balance.placement()?,
            Strategy::RoundRobin => Placement::RoundRobin,
            Strategy::Columns | Strategy::Whole => {
                bail!("--placed: found a strategy whose servers have no parameters; expected parameter-server")
            }
        };
        let mode = match (self.updates.is_async, self.updates.staleness) {
            (true, _) => Mode::Async,
            (false, Some(bound)) => Mode::Staleness { bound },
            (false, None) => Mode::Sync,
        };
        let merge = match self.updates.merge {
            Merging::Mean => Merge::Mean,
            Merging::Sum => Merge::Sum,
        };
        let (backup_trainers, late) = (self.updates.backup_trainers, self.updates.late_gradients.into());
        Ok(ParameterServer { placement, mode, merge, backup_trainers, late })
    }
}

impl Rates {
    fn model(&self) -> Result<CostModel> {
        let MachineRates { process, shared_cores, crowding_seconds } = self.measured.read()?;
        let process = ProcessRates {
            link_bytes_per_second: self.link_bytes_per_second.unwrap_or(process.link_bytes_per_second),
            message_seconds: self.message_seconds.unwrap_or(process.message_seconds),
            op_seconds: self.op_seconds.unwrap_or(process.op_seconds),
            row_seconds: self.row_seconds.unwrap_or(process.row_seconds),
            flops_per_second: self.flops_per_second.unwrap_or(process.flops_per_second),
            memory_bytes_per_second: self.memory_bytes_per_second.unwrap_or(process.memory_bytes_per_second),
        };
        let rates = MachineRates {
            process,
            shared_cores: self.shared_cores.unwrap_or(shared_cores),
            crowding_seconds: self.crowding_seconds.unwrap_or(crowding_seconds),
        };
        Ok(CostModel { batch: self.batch, chunk_bytes: self.chunk_bytes, ..rates.model() })
    }
}

/// Every part, after a comment that names its processes.
fn texts(parts: &[ProgramPart]) -> String {
    let texts = parts.iter().map(|part| {
        let peers: Vec<String> = part.peers.iter().map(ProgramPeer::to_string).collect();
        let names = if peers.is_empty() { String::new() } else { format!("# {}\n", peers.join(", ")) };
        format!("{names}{}", part.graph.program())
    });
    texts.collect::<Vec<_>>().join("\n")
}

/// A line for each part of a server, and for each parameter that is not cut.
fn ways(parts: &[ServedPart], whole: &[(String, String)]) -> String {
    let line = |ServedPart { server, name, way }: &ServedPart| match way {
        PartWay::Flow(what) => format!("server:{server}  {name}  flow: {what}\n"),
        PartWay::Executor(why) => format!("server:{server}  {name}  executor: {why}\n"),
    };
    let whole = whole.iter().map(|(name, why)| format!("{name}  on one server: {why}\n"));
    parts.iter().map(line).chain(whole).collect()
}

fn table(estimate: &Estimate) -> String {
    let mut text = String::new();
    let heads =
        ["sent bytes", "received bytes", "messages", "ops", "rows", "flops", "moved bytes", "held bytes", "seconds"];
    write!(text, "{:<14}", "process").expect("a string takes everything");
    heads.iter().for_each(|head| write!(text, "{head:>16}").expect("a string takes everything"));
    for node in &estimate.nodes {
        let work = node.work;
        let counts = [
            work.sent_bytes,
            work.received_bytes,
            work.messages,
            work.ops,
            work.rows,
            work.flops,
            work.memory_bytes,
            node.held_bytes,
        ];
        write!(text, "\n{:<14}", node.peer.to_string()).expect("a string takes everything");
        counts.iter().for_each(|count| write!(text, "{count:>16}").expect("a string takes everything"));
        write!(text, "{:>16.6}", node.seconds).expect("a string takes everything");
    }
    writeln!(text, "\n{:<14}{:>144.6}", "step", estimate.step_seconds).expect("a string takes everything");
    text
}
