//! Training from text: a program and its loss become a trainable program, and data becomes batches.
//!
//! A batch is one step of all trainers together: trainer `r` of `n` computes its `r`th of `n` equal, contiguous parts.
//! Servers merge the parts' gradients by their mean, in trainer order. Where the loss is a mean over rows, a step
//! therefore equals the step of one process by the whole batch, up to rounding. The rows after the last whole batch of
//! an epoch are not used.

use std::collections::BTreeMap;
use std::path::Path;

use pserver_core::accumulator::LateGradients;
use pserver_core::config::Mode;
use pserver_core::error::Failure;
use pserver_core::prng::{Prng, mix};
use pserver_program::transpile::{Cluster, Columns, CostModel, MachineRates, ParameterServer, Placement, Transpiler};
use pserver_program::{
    Elements, Graph, Op, OpRole, ParameterGradient, Program, Purpose, Tensor, VariableFacts, VariableValue,
    append_backward, append_optimizer,
};

use super::data::{DataSet, check_model, write_parts};
use super::held_client::HeldClient;
use super::kept_columns::KeptColumns;
use super::step_numbers::StepNumbers;
use super::trainer::{Trainer, initialise, initialise_shared};

/// Adds gradients and an optimizer to a program that has no gradients, for the parameters that no op of the role
/// `optimize` writes. A program that has both is returned as it is; then there is no `optimizer`.
///
/// `optimizer` is an `OptimizerConfig` in protobuf's text form, as `paddle_begin_init_params` takes it.
///
/// # Errors
/// When the loss is no scalar of a float type that an op gives or has no gradient; when the configuration is invalid;
/// when the program has gradients and an optimizer, and another one is given; when it has no optimizer and none is
/// given, or has gradients only.
pub fn trainable(mut program: Program, loss: &str, optimizer: Option<&str>) -> Result<Graph, Failure> {
    let has = |role| program.blocks.iter().flat_map(|block| &block.ops).any(|op| op.role == role);
    match (has(OpRole::Optimize), has(OpRole::Backward), optimizer) {
        (true, true, None) => {}
        (true, false, None) => {
            let gradients = append_backward(&mut program.clone(), loss).unwrap_or_default();
            if let Some(ParameterGradient { parameter, .. }) = gradients.first() {
                return Err(Failure::call(format!(
                    "found no optimizer and no op of the role optimize that writes {parameter:?}, on which the loss \
                     depends; expected a configuration such as \"const_lr {{ learning_rate: 0.1 }}\""
                )));
            }
        }
        (true, true, Some(_)) => {
            return Err(Failure::call(
                "found an optimizer beside a program that has ops of the roles backward and optimize; expected one of \
                 the two",
            ));
        }
        (false, true, _) => {
            let text = "found ops of the role backward and none of the role optimize";
            let mut ops = program.blocks.iter().flat_map(|block| &block.ops);
            let writes =
                |op: &Op| op.role == OpRole::Backward && op.outputs.iter().any(|name| is_parameter(&program, name));
            return Err(Failure::call(match ops.find(|op| writes(op)) {
                Some(op) => format!(
                    "{text}, and an op {} that writes {:?}; expected the role optimize for the ops of the optimizer",
                    op.kind.name(),
                    op.outputs[0]
                ),
                None => format!("{text}; expected both, or a forward part only"),
            }));
        }
        (false, false, None) => {
            return Err(Failure::call(
                "found no optimizer and no op of the role optimize; expected a configuration such as \
                 \"const_lr { learning_rate: 0.1 }\"",
            ));
        }
        (_, false, Some(optimizer)) => {
            let gradients = append_backward(&mut program, loss)?;
            append_optimizer(&mut program, optimizer, &gradients)?;
        }
    }
    let graph = Graph::new(program)?;
    check_scalar(&graph, loss, "the loss")?;
    Ok(graph)
}

fn is_parameter(program: &Program, name: &str) -> bool {
    let mut declared = program.blocks.iter().flat_map(|block| &block.variables);
    declared.any(|known| known.name == name && known.purpose == Purpose::Parameter)
}

/// Refuses a variable that is no scalar of a float type.
///
/// # Errors
/// Names the variable, what was found and expected; `purpose` says what for.
pub fn check_scalar(graph: &Graph, name: &str, purpose: &str) -> Result<(), Failure> {
    let expected = "expected a scalar of float32 or float64";
    match graph.facts(name) {
        Some(VariableFacts::Dense { element_type, shape }) if element_type.is_float() && shape.is_empty() => Ok(()),
        Some(facts) => Err(Failure::call(format!("{purpose} {name:?} is {facts}; {expected}"))),
        None => Err(Failure::call(format!("found no variable {name:?} to be {purpose}; {expected}"))),
    }
}

/// The rows of each step, of one trainer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batches {
    rows: usize,
    batch: usize,
    /// Rows of each trainer's part.
    part: usize,
    trainer: usize,
    seed: Option<u64>,
}

impl Batches {
    /// The parts of trainer `trainer` of `trainers` of the batches of `batch` rows. With a seed each epoch has an order
    /// of its own, equal on every machine; without one all epochs have the file's order.
    ///
    /// # Errors
    /// When a batch does not divide into equal parts, or the data have fewer rows than a batch.
    pub fn new(rows: usize, batch: usize, trainer: u32, trainers: u32, seed: Option<u64>) -> Result<Self, Failure> {
        let refuse = |text: String| Err(Failure::call(text));
        if trainer >= trainers {
            return refuse(format!("found trainer {trainer} of {trainers}; expected a rank below {trainers}"));
        }
        let count = trainers as usize;
        if batch == 0 || !batch.is_multiple_of(count) {
            return refuse(format!(
                "found a batch of {batch} rows for {trainers} trainers; expected a multiple of {trainers}, since each \
                 trainer computes an equal part"
            ));
        }
        if rows < batch {
            return refuse(format!("found {rows} rows of data; expected at least the {batch} of a batch"));
        }
        Ok(Self { rows, batch, part: batch / count, trainer: trainer as usize, seed })
    }

    /// Steps of an epoch.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.rows / self.batch
    }

    /// The trainer's rows in each step of an epoch.
    #[must_use]
    pub fn epoch(&self, epoch: u32) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.rows).collect();
        if let Some(seed) = self.seed {
            let mut prng = Prng(mix(mix(seed) ^ u64::from(epoch)));
            (1..order.len()).rev().for_each(|last| order.swap(last, prng.index(last + 1)));
        }
        let parts = order.chunks_exact(self.batch);
        parts.map(|batch| batch[self.trainer * self.part..][..self.part].to_vec()).collect()
    }
}

/// One trainer of a job that trains a program on data.
///
/// ```no_run
/// use std::path::Path;
/// use pserver_client::{Client, ClientOptions};
/// use pserver_core::wire::Address;
/// use pserver_trainer::{Batches, DataSet, Training, trainable};
///
/// let program = "block 0 {
///     data x: float32[batch, 4]
///     parameter w: float32[4, 1]
///     initialise w = fill(value=0.5)
///     forward y = matmul(x, w)
///     forward loss = mean(y)
/// }";
/// let graph = trainable(program.parse()?, "loss", Some("const_lr { learning_rate: 0.1 }"))?;
/// let data = DataSet::read(Path::new("x.csv"), &graph)?;
/// let client = Client::new(ClientOptions::new(Address::parse("tcp://127.0.0.1:7164")?))?;
/// let batches = Batches::new(data.rows(), 32, client.trainer()?, client.trainers()?, None)?;
/// let mut training = Training::join(&client, &graph, 32)?;
/// for rows in batches.epoch(0) {
///     training.step(&data, &rows)?;
///     println!("{}", training.scalar("loss")?);
/// }
/// let parameters = training.parameters()?;
/// # drop(parameters);
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
pub struct Training<'c> {
    trainer: Trainer<'c>,
    /// Names of the program's parameters.
    parameters: Vec<String>,
    /// Steps of the job before this trainer joined.
    steps_before: u64,
    /// Steps of the job.
    steps: u64,
    rank: usize,
    numbers: StepNumbers,
    /// The weight whose columns trainers keep, if they do.
    columns: Option<KeptColumns>,
}

/// How the program of a training is divided, and how its parameters are shared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainingOptions {
    /// Rows of a step of all trainers.
    pub batch: usize,
    /// The mode; none for that of the job.
    pub mode: Option<Mode>,
    /// How servers share the parameters.
    pub placement: Placement,
    /// Bytes that a server may hold; zero without a limit.
    pub server_bytes_max: u64,
    /// Trainers that a round does not wait for.
    pub backup_trainers: u32,
    /// The fate of their gradients.
    pub late: LateGradients,
    /// The rates by which a placement is estimated.
    pub rates: MachineRates,
}

impl<'c> Training<'c> {
    /// Divides the program over the job's trainers and servers in the job's mode with merge mean, initialises the
    /// parameters if no other trainer does, and prepares this trainer's part. `batch` is that of a step of all
    /// trainers. Of a job in mode sync that has been trained, this trainer goes on with the step after
    /// [`steps_before`](Self::steps_before).
    ///
    /// # Errors
    /// When the program cannot be divided, or the job cannot run it, or was initialised with another program.
    pub fn join(client: impl Into<HeldClient<'c>>, graph: &Graph, batch: usize) -> Result<Self, Failure> {
        Self::join_with(client, graph, TrainingOptions { batch, ..TrainingOptions::default() })
    }

    /// As [`join`](Self::join), with other options than those of the job.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_with(
        client: impl Into<HeldClient<'c>>,
        graph: &Graph,
        options: TrainingOptions,
    ) -> Result<Self, Failure> {
        let client = client.into();
        let (trainers, servers) = (client.trainers()?, client.servers()?);
        let TrainingOptions { batch, placement, server_bytes_max, backup_trainers, late, rates, .. } = options;
        let batch = (batch as u64 / u64::from(trainers.max(1))).max(1);
        let costs = CostModel { batch, server_bytes_max, ..rates.model() };
        let mode = options.mode.map_or_else(|| client.mode(), Ok)?;
        let transpiler = ParameterServer { placement, mode, backup_trainers, late, ..ParameterServer::default() };
        let parts = transpiler.transpile(graph, Cluster { trainers, servers }, &costs)?;
        initialise(&client, &parts)?;
        // In other modes a gradient counts by itself, and the job has no steps.
        let rounds = if mode == Mode::Sync { client.resume_rounds()? } else { 0 };
        let trainer = Trainer::new(client, &parts)?;
        let steps_before = trainer.steps_ended().unwrap_or(rounds);
        Self::new(trainer, graph, steps_before)
    }

    /// As [`join`](Self::join), but with the columns of one layer, the largest, on all trainers
    /// ([`Columns`]). Trainer 0 computes on whole batches of `batch` rows, and the
    /// other trainers on their columns: they get no data, take as many steps ([`step_fed`](Self::step_fed)) and in the
    /// end [`publish`](Self::publish). Parameters end with the trainers' processes, so that no job is gone on with.
    ///
    /// # Errors
    /// As [`join`](Self::join); when the job has had steps.
    pub fn join_columns(client: impl Into<HeldClient<'c>>, graph: &Graph, batch: usize) -> Result<Self, Failure> {
        let client = client.into();
        let cluster = Cluster { trainers: client.trainers()?, servers: client.servers()? };
        let parts = Columns.transpile(graph, cluster, &CostModel::default())?;
        let columns = KeptColumns::of(graph, cluster, &parts)?;
        initialise_shared(&client, &parts, Some(batch as u64), &columns.queues(cluster.servers))?;
        Ok(Self { columns: Some(columns), ..Self::new(Trainer::new(client, &parts)?, graph, 0)? })
    }

    fn new(trainer: Trainer<'c>, graph: &Graph, steps_before: u64) -> Result<Self, Failure> {
        let parameters = graph.variables().iter().filter(|variable| variable.purpose == Purpose::Parameter);
        let parameters = parameters.map(|variable| variable.name.clone()).collect();
        let (rank, numbers) = (trainer.client().trainer()? as usize, StepNumbers::of(graph));
        Ok(Self { trainer, parameters, steps_before, steps: steps_before, rank, numbers, columns: None })
    }

    /// As [`Trainer::hosted`].
    pub fn hosted(&self) -> impl Iterator<Item = (u32, &str, &str)> {
        self.trainer.hosted()
    }

    /// Whether this trainer computes on data; all do, but for those that only have columns of a layer.
    #[must_use]
    pub const fn takes_data(&self) -> bool {
        self.columns.is_none() || self.rank == 0
    }

    /// Sends what only this trainer has of the parameters to servers, so that trainer 0 has all
    /// [`parameters`](Self::parameters): the columns of a trainer after its last step. Others have nothing to send.
    ///
    /// # Errors
    /// When a server does not answer before the deadline; another call repeats it.
    pub fn publish(&self) -> Result<(), Failure> {
        match &self.columns {
            Some(columns) if self.rank > 0 => columns.publish(&self.trainer, self.rank),
            _ => Ok(()),
        }
    }

    /// Steps that the job had when this trainer joined: 0 for a new one, and in modes without rounds. After a step that
    /// a failure broke off on some of the servers it is the number of whole steps; those servers do not apply the step
    /// again.
    #[must_use]
    pub const fn steps_before(&self) -> u64 {
        self.steps_before
    }

    /// Sets data for the next step; a step on rows of a [`DataSet`] does so itself.
    ///
    /// # Errors
    /// As [`Trainer::feed`].
    pub fn feed(&mut self, name: &str, tensor: Tensor) -> Result<(), Failure> {
        self.trainer.feed(name, tensor)
    }

    /// One step on the data that were fed.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn step_fed(&mut self) -> Result<(), Failure> {
        self.trainer.step()?;
        self.steps += 1;
        Ok(())
    }

    /// One step on these rows of the data. Ops `dropout` and `batch_norm` whose step is data get the number of the
    /// job's step, from 0.
    ///
    /// # Errors
    /// As [`Trainer::step`]; another call with the same rows repeats the step.
    pub fn step(&mut self, data: &DataSet, rows: &[usize]) -> Result<(), Failure> {
        for (name, tensor) in data.batch(rows) {
            self.feed(name, tensor)?;
        }
        for (name, value) in self.numbers.values(self.steps, self.rank * rows.len()) {
            self.trainer.feed(name, value)?;
        }
        self.step_fed()
    }

    /// The value of a scalar in the last step, on this trainer's part of the batch.
    ///
    /// # Errors
    /// When there is no such scalar of a float type among what trainers compute.
    pub fn scalar(&self, name: &str) -> Result<f64, Failure> {
        self.trainer.value(name).and_then(scalar).ok_or_else(|| {
            Failure::call(format!("found no scalar {name:?} after a step; expected one that trainers compute"))
        })
    }

    /// A variable's value after the last step: of a parameter as the servers have it, with all rows of a table; of
    /// another dense variable as this trainer computed it. A weight whose columns trainers keep is known to trainer 0
    /// alone, which waits until the others have called [`publish`](Self::publish).
    ///
    /// # Errors
    /// When there is no such value, or a server does not answer before the deadline.
    pub fn value(&self, name: &str) -> Result<Tensor, Failure> {
        if let Some(columns) = self.columns.as_ref().filter(|columns| columns.parameter == name) {
            return columns.whole(&self.trainer);
        }
        match self.trainer.value(name) {
            // A parameter that no optimizer op updates is not on the servers.
            Some(VariableValue::Dense(tensor)) if !self.trainer.is_on_servers(name) => Ok(tensor.clone()),
            None if !self.parameters.iter().any(|known| known == name) => Err(Failure::call(format!(
                "found no value of {name:?}; expected a parameter, or a variable that trainers have computed; states \
                 of the optimizer are with the servers alone"
            ))),
            Some(VariableValue::SelectedRows(_) | VariableValue::Strings(_)) if !self.trainer.is_on_servers(name) => {
                Err(Failure::call(format!("found a value of {name:?} that is no dense tensor; expected one")))
            }
            _ => self.trainer.fetch(name),
        }
    }

    /// The values of all parameters after the last step, by name.
    ///
    /// # Errors
    /// When a server does not answer before the deadline.
    pub fn parameters(&self) -> Result<BTreeMap<String, Tensor>, Failure> {
        self.parameters.iter().map(|name| Ok((name.clone(), self.value(name)?))).collect()
    }

    /// Writes the values of all parameters after the last step to a safetensors file, whole or not at all. No more than
    /// a part of a table is in memory.
    ///
    /// # Errors
    /// As [`parameters`](Self::parameters); when the name does not end in `.safetensors`, or the disk refuses.
    pub fn save(&self, path: &Path) -> Result<(), Failure> {
        check_model(path)?;
        let is_streamed = |name: &str| {
            let is_kept = self.columns.as_ref().is_some_and(|columns| columns.parameter == name);
            !is_kept && self.trainer.is_on_servers(name)
        };
        let mut others = BTreeMap::new();
        let mut facts = Vec::new();
        for name in &self.parameters {
            let (element_type, shape) = if is_streamed(name) {
                self.trainer.facts(name)?
            } else {
                let value = self.value(name)?;
                let facts = (value.elements().element_type(), value.shape().to_vec());
                others.insert(name.as_str(), value);
                facts
            };
            facts.push((name.clone(), element_type, shape));
        }
        write_parts(path, facts.into_iter(), &mut |name, take| match others.get(name) {
            Some(value) => take(value.bytes()),
            None => self.trainer.fetch_parts(name, take),
        })
    }
}

/// The number of a scalar.
pub(super) fn scalar(value: &VariableValue) -> Option<f64> {
    let VariableValue::Dense(tensor) = value else { return None };
    match tensor.elements() {
        _ if !tensor.shape().is_empty() => None,
        Elements::Float32(values) => values.first().map(|value| f64::from(*value)),
        Elements::Float64(values) => values.first().copied(),
        _ => None,
    }
}
