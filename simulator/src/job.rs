//! The job of a simulation: how many processes, which parameters, and what each gradient and each value must be.
//!
//! Every gradient is one at a single element of each chunk and zero elsewhere: the element of its trainer and step. So
//! a value shows which gradients it contains, and each of them once.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use pserver_core::config::{Merge, Mode, OptimizerSettings, ParameterConfig};
use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, ShardId};
use pserver_core::partition::{Buckets, Catalogue, ChunkSpan, Declaration, Name, Parameter, Topology};
use pserver_core::prng::Prng;
use pserver_core::wire::{Address, RowsPart, Scheme};
use pserver_node::settings::{JournalSetting, Settings};
use serde::{Deserialize, Serialize};

/// Steps by which the fastest trainer is ahead of the slowest in mode bounded, at most.
pub(crate) const BOUND: u32 = 2;

/// Bytes of a chunk, and its elements.
const CHUNK_BYTES: u32 = 4096;
const CHUNK_ELEMENTS: u64 = 1024;
/// Elements of a row, and buckets of a table.
const ROW_ELEMENTS: u32 = 2;
const BUCKETS: u32 = 3;
/// Steps of a trainer; a set of them is one number of 64 bits.
const STEPS_MAX: u64 = 60;

/// The rule of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SimRule {
    /// `w -= g`.
    Sgd,
    /// `m = m / 2 + g; w -= m`.
    Momentum,
    /// As [`SimRule::Sgd`], with a norm that never limits: all chunks are updated together.
    Grouped,
    /// As [`SimRule::Sgd`], on the rows of a table: an element of the others is a row here.
    Rows,
    /// The same, in two parts. The first may be dropped, and gradients that are then pushed anew are counted once by
    /// their round only.
    SplitRows,
    /// A value that trainer 0 replaces, and to which no trainer sends gradients: every element is its number.
    Set,
    /// As [`SimRule::Sgd`], and trainer 0 replaces the value between steps: every element is its number then.
    SgdAndSet,
}

/// A chunk of the job.
#[derive(Clone, Debug)]
pub(crate) struct SimChunk {
    pub(crate) id: ChunkId,
    /// Bytes of its value, or of all of its rows.
    pub(crate) bytes: u32,
    /// The rows that a bucket may have, in order.
    pub(crate) rows: Option<Vec<u64>>,
    /// The number of parts in which they come.
    pub(crate) parts: u32,
    /// Whether trainer 0 replaces it.
    pub(crate) is_set: bool,
    /// Whether trainers send gradients.
    pub(crate) has_gradients: bool,
}

/// How trainers share a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SimMode {
    Sync,
    Async,
    Bounded,
}

/// How trainers that have left come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SimReturn {
    /// They stay away.
    #[default]
    Never,
    /// One that has left before the others comes back after this time, and stays to the end.
    Alone { after: Duration, kill: Option<SimKill> },
    /// All leave after a step. After this time a second run of trainers goes on.
    SecondRun { last: u64, after: Duration, kill: Option<SimKill> },
}

/// The kill of a server, so long after a trainer has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SimKill {
    pub(crate) server: u16,
    pub(crate) after: Duration,
}

/// The job of one simulation, drawn from its seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SimJob {
    pub(crate) servers: u16,
    pub(crate) shards: u16,
    pub(crate) trainers: u32,
    pub(crate) mode: SimMode,
    /// Whether all servers have one checkpoint directory, so that shards can move between them. The loss of a host then
    /// loses nothing of it.
    #[serde(default)]
    pub(crate) shares_disk: bool,
    /// Whether the coordinator keeps its state in a store apart from the checkpoint directories.
    #[serde(default)]
    pub(crate) stores_apart: bool,
    /// Whether the journal is synced, so that acknowledged gradients survive the loss of a host.
    pub(crate) is_synced: bool,
    /// Steps of a trainer that stays to the end.
    pub(crate) steps: u64,
    /// The last step of each trainer; one with fewer leaves the job after it.
    pub(crate) lasts: Vec<u64>,
    #[serde(default)]
    pub(crate) returns: SimReturn,
    checkpoint_millis: u64,
    parameters: Vec<(SimRule, u64)>,
}

impl SimJob {
    pub(crate) fn draw(prng: &mut Prng) -> Self {
        let mode = prng.choose(&[SimMode::Sync, SimMode::Sync, SimMode::Async, SimMode::Bounded]);
        let rules: &[SimRule] = match mode {
            SimMode::Sync => &[
                SimRule::Sgd,
                SimRule::Momentum,
                SimRule::Grouped,
                SimRule::Rows,
                SimRule::SplitRows,
                SimRule::Set,
                SimRule::SgdAndSet,
            ],
            // The order of gradients, which momentum depends on, is not known.
            _ => &[SimRule::Sgd, SimRule::Grouped, SimRule::Rows, SimRule::Set],
        };
        // A shard sums the first gradients of a round early where at least five trainers are.
        let trainers = prng.choose(&[1, 1, 1, 2, 2, 2, 3, 3, 6, 6]);
        let steps = 20 + prng.below(STEPS_MAX - 20);
        let least = u64::from(trainers) * steps;
        let parameter = |prng: &mut Prng| {
            // An element at least has no gradients.
            let last = least + 1 + prng.below(CHUNK_ELEMENTS - least);
            (prng.choose(rules), prng.below(3) * CHUNK_ELEMENTS + last)
        };
        let last_of = |trainer: u32, prng: &mut Prng| match prng.below(4) {
            // By then every trainer has joined: one that joins while no other is connected begins a new run.
            0 if trainer > 0 => steps / 2 + prng.below(steps / 2),
            _ => steps,
        };
        let mut parameters: Vec<_> = (0..1 + prng.below(3)).map(|_| parameter(prng)).collect();
        if parameters.iter().all(|(rule, _)| *rule == SimRule::Set) {
            parameters[0].0 = SimRule::Sgd;
        }
        let servers = u16::try_from(1 + prng.below(3)).expect("it is small");
        let lasts: Vec<_> = (0..trainers).map(|trainer| last_of(trainer, prng)).collect();
        let after = Duration::from_millis(1 + prng.clone().choose(&[50, 50, 1000, 3000]));
        let kill = (prng.below(3) > 0).then(|| SimKill {
            server: u16::try_from(prng.below(servers.into())).expect("it is small"),
            after: match prng.below(3) {
                0 => Duration::from_millis(prng.below(4000)),
                // Soon after the return.
                _ => after + Duration::from_millis(prng.below(150)),
            },
        });
        let returns = match (lasts.iter().all(|last| *last == steps), prng.below(3)) {
            (true, 0) => SimReturn::SecondRun { last: 1 + prng.below(steps - 1), after, kill },
            // Where staleness is bounded, one that goes on for longer than the others waits for them.
            (false, 0 | 1) if mode != SimMode::Bounded => SimReturn::Alone { after, kill },
            _ => SimReturn::Never,
        };
        Self {
            servers,
            shares_disk: 1 < servers && prng.below(2) == 0,
            stores_apart: prng.below(3) == 0,
            shards: u16::try_from(1 + prng.below(2)).expect("it is small"),
            trainers,
            mode,
            is_synced: prng.below(2) == 0,
            steps,
            lasts,
            returns,
            checkpoint_millis: prng.choose(&[50, 200, 1000]),
            parameters,
        }
    }

    pub(crate) fn settings(&self) -> Result<Settings> {
        let mut line = Vec::new();
        let mut set = |name: &str, value: String| line.extend([format!("--{name}"), value]);
        set("servers", self.servers.to_string());
        set("shards", self.shards.to_string());
        set("trainers", self.trainers.to_string());
        set("chunk-bytes", CHUNK_BYTES.to_string());
        set("merge", "sum".to_owned());
        set("checkpoint-dir", "/nonexistent/simulated".to_owned());
        set("model-dir", "/nonexistent/simulated".to_owned());
        set("device", "cpu".to_owned());
        set("bind", "tcp://127.0.0.1:1".to_owned());
        let mut settings = Settings::of_words(line)?;
        let mode = match self.mode {
            SimMode::Sync => Mode::Sync,
            SimMode::Async => Mode::Async,
            SimMode::Bounded => Mode::Staleness { bound: BOUND },
        };
        (settings.job.mode, settings.job.merge) = (mode, Merge::Sum);
        settings.storage.journal = if self.is_synced { JournalSetting::Sync } else { JournalSetting::On };
        settings.storage.checkpoint_interval = Duration::from_millis(self.checkpoint_millis);
        settings.times.rank_grace = Duration::from_secs(2);
        settings.times.lease = Duration::from_secs(2);
        settings.times.round_timeout = Duration::from_secs(30);
        Ok(settings)
    }

    /// Whether its first parameter is a plain one, and every trainer stays to the end.
    #[cfg(test)]
    pub(crate) fn is_plain(&self) -> bool {
        let is_plain = !matches!(self.parameters[0].0, SimRule::Rows | SimRule::SplitRows | SimRule::Set);
        is_plain && !self.has_leavers() && self.returns == SimReturn::Never
    }

    fn rule(&self, index: ParameterIndex) -> SimRule {
        self.parameters[index.0 as usize].0
    }

    /// Whether trainer 0 replaces the value of a parameter.
    fn is_set(&self, index: ParameterIndex) -> bool {
        matches!(self.rule(index), SimRule::Set | SimRule::SgdAndSet)
    }

    /// Whether trainers send gradients for a parameter.
    pub(crate) fn has_gradients(&self, index: ParameterIndex) -> bool {
        self.rule(index) != SimRule::Set
    }

    /// Whether trainer 0 replaces values.
    pub(crate) fn has_set(&self) -> bool {
        self.parameters.iter().any(|(rule, _)| matches!(rule, SimRule::Set | SimRule::SgdAndSet))
    }

    pub(crate) fn address(server: u16) -> Address {
        Address { scheme: Scheme::Loopback, host: format!("server-{server}"), port: 0 }
    }

    /// The catalogue that the initialising trainer declares.
    pub(crate) fn catalogue(&self, topology: Topology) -> Result<Catalogue> {
        let mut catalogue = Catalogue::new(topology, CHUNK_BYTES)?;
        for (index, (rule, elements)) in self.parameters.iter().enumerate() {
            let rows = self.elements();
            let text = match rule {
                SimRule::Sgd | SimRule::Set | SimRule::SgdAndSet => "optimizer: SGD".to_owned(),
                SimRule::Momentum => "sgd { momentum: 0.5 } const_lr { learning_rate: 1.0 }".to_owned(),
                SimRule::Grouped => "sgd { } clip_norm: 1e9 const_lr { learning_rate: 1.0 }".to_owned(),
                SimRule::Rows | SimRule::SplitRows => {
                    format!("sparse {{ height: {rows} width: {ROW_ELEMENTS} buckets: {BUCKETS} }}")
                }
            };
            let settings = OptimizerSettings::from_text(&text)?;
            let rule = settings.rule.unwrap_or_default();
            let of_rows = settings.sparse;
            let row_bytes = u64::from(ROW_ELEMENTS) * 4;
            catalogue.declare(Declaration {
                name: Name::new(format!("w{index}").as_bytes())?,
                element_type: ElementType::Float32,
                bytes: if of_rows.is_some() { rows * row_bytes } else { elements * 4 },
                shape: if of_rows.is_some() { vec![rows, ROW_ELEMENTS.into()] } else { Vec::new() },
                whole: of_rows.is_none() && !rule.is_element_wise(),
                config: ParameterConfig { sparse: of_rows, ..ParameterConfig::of(rule) }.encode(),
                buckets: of_rows.map(|_| Buckets { rows, count: BUCKETS }),
                owner: None,
                sender: None,
                total_part: None,
                hosted: None,
            })?;
        }
        Ok(catalogue)
    }

    /// The chunks of a parameter, each with its shard.
    pub(crate) fn chunks(&self, parameter: &Parameter) -> Vec<(ShardId, SimChunk)> {
        let buckets = parameter.declaration().buckets;
        let of_bucket = |chunk: ChunkIndex| {
            let buckets = buckets?;
            Some((0..self.elements()).filter(|row| u64::from(buckets.of(*row)) == chunk.0).collect::<Vec<_>>())
        };
        let chunk = |(chunk, span): (ChunkIndex, ChunkSpan)| {
            let rows = of_bucket(chunk);
            let bytes = rows
                .as_ref()
                .map_or(span.bytes, |rows| u32::try_from(rows.len()).expect("they are few") * ROW_ELEMENTS * 4);
            let id = ChunkId { parameter: parameter.index(), chunk };
            let (is_set, has_gradients) = (self.is_set(id.parameter), self.has_gradients(id.parameter));
            let parts = if self.rule(id.parameter) == SimRule::SplitRows { 2 } else { 1 };
            (parameter.shard_of(chunk), SimChunk { id, bytes, rows, parts, is_set, has_gradients })
        };
        parameter.chunks().map(chunk).collect()
    }

    /// The gradient of a trainer in a step, counted from one, for a chunk; a bucket without the step's row gets none.
    /// Where rows come in parts, each has the row with its share.
    pub(crate) fn gradient(&self, trainer: u32, step: u64, chunk: &SimChunk, part: u32) -> Vec<u8> {
        let element = self.element(trainer, step);
        if let Some(rows) = &chunk.rows {
            if !rows.contains(&element) {
                return Vec::new();
            }
            let part = RowsPart { index: part, count: chunk.parts };
            let share = 1.0 / part.count as f32;
            let row = (0..ROW_ELEMENTS).flat_map(|_| share.to_le_bytes());
            return part.encode().into_iter().chain(element.to_le_bytes()).chain(row).collect();
        }
        let mut gradient = vec![0; chunk.bytes as usize];
        let at = usize::try_from(element * 4).expect("it is small");
        gradient[at..at + 4].copy_from_slice(&1_f32.to_le_bytes());
        gradient
    }

    /// Whether a chunk is a bucket with the row that a trainer sends in a step.
    pub(crate) fn has_row(&self, trainer: u32, step: u64, chunk: &SimChunk) -> bool {
        chunk.rows.as_ref().is_some_and(|rows| rows.contains(&self.element(trainer, step)))
    }

    /// Whether a trainer leaves before the others.
    pub(crate) fn has_leavers(&self) -> bool {
        self.lasts.iter().any(|last| *last < self.steps)
    }

    /// The last step of a trainer, before or after it has left and returned.
    pub(crate) fn last(&self, trainer: u32, has_returned: bool) -> u64 {
        match self.returns {
            SimReturn::SecondRun { last, .. } if !has_returned => last,
            SimReturn::Alone { .. } if has_returned => self.steps,
            _ => self.lasts[trainer as usize],
        }
    }

    /// Whether a trainer leaves after its last step.
    pub(crate) fn leaves(&self, trainer: u32, has_returned: bool) -> bool {
        self.last(trainer, has_returned) < self.steps
    }

    /// Whether a trainer misses rounds, from its first last step until it is back.
    pub(crate) fn misses_rounds(&self, trainer: u32) -> bool {
        matches!(self.returns, SimReturn::Alone { .. }) && self.lasts[trainer as usize] < self.steps
    }

    /// Elements, or rows, that trainers send to.
    fn elements(&self) -> u64 {
        u64::from(self.trainers) * self.steps
    }

    fn element(&self, trainer: u32, step: u64) -> u64 {
        u64::from(trainer) * self.steps + step - 1
    }

    /// The steps of a trainer whose gradients a chunk gets, as bits from step 1 on.
    pub(crate) fn steps_of(&self, trainer: u32, chunk: &SimChunk) -> u64 {
        let is_here = |step: &u64| match &chunk.rows {
            Some(rows) => rows.contains(&self.element(trainer, *step)),
            None => true,
        };
        (1..=self.steps).filter(is_here).map(|step| 1 << (step - 1)).sum()
    }

    /// The gradients of each trainer that a value contains, as bits from step 1 on, and the number that replaced it.
    ///
    /// # Errors
    /// When an element is not what any set of gradients makes, each counted once.
    pub(crate) fn contents(&self, chunk: &SimChunk, version: u64, value: &[u8]) -> Result<(Vec<u64>, f32)> {
        let elements: Vec<f32> =
            value.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect();
        let rule = self.rule(chunk.id.parameter);
        let base = if chunk.is_set { elements.last().copied().unwrap_or(0.0) } else { 0.0 };
        if chunk.rows.is_none() {
            let of_trainers = usize::try_from(self.elements()).expect("it is small");
            if let Some(at) = elements[of_trainers..].iter().position(|element| *element != base) {
                bail!("element {} is {}; expected {base}", of_trainers + at, elements[of_trainers + at]);
            }
        }
        let mut sets = vec![0; self.trainers as usize];
        for trainer in 0..self.trainers {
            for step in 1..=self.steps {
                let wanted = self.element(trainer, step);
                let found = match &chunk.rows {
                    None => &elements[usize::try_from(wanted).expect("it is small")..][..1],
                    Some(rows) => match rows.binary_search(&wanted) {
                        Ok(at) => &elements[at * ROW_ELEMENTS as usize..][..ROW_ELEMENTS as usize],
                        Err(_) => continue,
                    },
                };
                if found.iter().all(|element| *element == base) {
                    continue;
                }
                let expected = if rule == SimRule::Momentum { moved(version.checked_sub(step)) } else { base - 1.0 };
                ensure!(
                    found.iter().all(|element| element.to_bits() == expected.to_bits()),
                    "the element of trainer {trainer}, step {step} is {found:?}; expected {expected}"
                );
                sets[trainer as usize] |= 1 << (step - 1);
            }
        }
        Ok((sets, base))
    }
}

/// The value of an element so many updates after the one with its gradient.
fn moved(further: Option<u64>) -> f32 {
    let (mut momentum, mut value) = (1.0_f32, -1.0_f32);
    for _ in 0..further.unwrap_or(0) {
        momentum *= 0.5;
        value -= momentum;
    }
    value
}

/// The first so many steps, as bits.
pub(crate) fn first_steps(count: u64) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}
