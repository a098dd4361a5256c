//! The job of one run: its settings, handed to each child as one line of JSON.

use std::ops::Range;

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::{ElementType, Half};
use pserver_core::optim::Prepared;
use pserver_transport::verbs::{DEVICE_EXPECTED, DeviceChoice, VerbsDevice, VerbsDevices};
use serde::{Deserialize, Serialize};

use crate::sizes::{length, show};

/// More have no counter in the baseline server's shared memory.
const TRAINERS_MAX: u32 = 31;

/// How bytes get from a trainer to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TransportName {
    /// The best available: shared memory within a machine, else verbs, else sockets.
    Auto,
    /// Sockets.
    Tcp,
    /// Memory that processes of one machine share.
    Shm,
    /// RDMA verbs.
    Verbs,
    /// Within one process.
    Loopback,
}

/// The servers' update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RuleName {
    /// Nothing: one trainer sets values and pulls them.
    None,
    /// The value becomes the sum of the round's gradients.
    Sum,
    /// Gradient descent with a learning rate of 1 on the sum of the gradients.
    Sgd,
    /// Adam.
    Adam,
}

/// How trainers share parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModeName {
    /// One update per round.
    Sync,
    /// One update per gradient.
    Async,
    /// One update per gradient, and nobody more than `--staleness` rounds ahead.
    Bounded,
    /// Differences are added, and nothing else is done to them.
    Delta,
}

/// Which payloads over TCP carry checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Checks {
    /// Those that leave their host, so none here.
    #[default]
    BetweenHosts,
    /// All.
    Always,
    /// None.
    Never,
}

/// The type of gradients; values have it too, or are f32 where it is a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// IEEE binary16 gradients of f32 values.
    F16,
    /// bfloat16 gradients of f32 values.
    Bf16,
}

/// The memory of gradients and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Buffers {
    /// The trainer's own, as it comes from the system.
    #[default]
    Ordinary,
    /// The trainer's own, which it has registered.
    Own,
    /// Gradients in a buffer of the library, values read where the servers wrote them.
    Registered,
}

/// How somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    /// Looks again and again.
    Busy,
    /// Looks for 50 microseconds, then sleeps.
    Adaptive,
    /// Sleeps.
    Block,
}

/// One run.
//
// tidy: allow fields: one line of JSON for each child, which is also a flat object in the result files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BenchJob {
    pub(crate) transport: TransportName,
    pub(crate) trainers: u32,
    pub(crate) servers: u16,
    pub(crate) shards: u16,
    /// Bytes of all values.
    pub(crate) bytes: u64,
    /// Into how many parameters they are cut.
    pub(crate) parameters: u32,
    pub(crate) chunk_bytes: u64,
    pub(crate) mode: ModeName,
    /// How many rounds one trainer may be ahead of the slowest in bounded mode.
    pub(crate) staleness: u32,
    pub(crate) checks: Checks,
    /// Which RDMA device everybody uses, as `pserver serve --rdma-device` reads it.
    pub(crate) rdma_device: String,
    /// The file with the token of servers that are somebody else's.
    pub(crate) token_file: Option<String>,
    pub(crate) dtype: Dtype,
    /// The element type of pulled values, where it is half precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) values: Option<Dtype>,
    pub(crate) rule: RuleName,
    pub(crate) poll: Poll,
    pub(crate) buffers: Buffers,
    /// Whether servers and trainers are kept apart, each on half of the cores.
    pub(crate) pin: bool,
    /// More settings of `pserver serve`, each as `name=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) serve: Vec<String>,
    /// The build of this program whose servers and trainers do it, if not this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) program: Option<String>,
}

impl Dtype {
    pub(crate) fn gradient(self) -> ElementType {
        match self {
            Self::F32 => ElementType::Float32,
            Self::F64 => ElementType::Float64,
            Self::F16 => ElementType::Float16,
            Self::Bf16 => ElementType::Bfloat16,
        }
    }

    pub(crate) fn value(self) -> ElementType {
        if self == Self::F64 { ElementType::Float64 } else { ElementType::Float32 }
    }
}

impl RuleName {
    /// The optimizer message that the servers get.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::None | Self::Sgd => "optimizer: SGD sgd { } const_lr { learning_rate: 1 }",
            Self::Sum => "algorithm: \"sum\"",
            Self::Adam => "optimizer: Adam adam { } const_lr { learning_rate: 0.001 }",
        }
    }
}

impl BenchJob {
    /// Refuses what cannot be run, naming what was found and what was expected.
    pub(crate) fn check(&self) -> Result<()> {
        let element = self.dtype.value().bytes();
        ensure!(
            self.bytes >= element && self.bytes.is_multiple_of(element),
            "--bytes {}: expected a multiple of {element}, the size of an element, above zero",
            self.bytes
        );
        ensure!(
            self.elements() >= u64::from(self.parameters.max(1)),
            "--params {}: more than elements",
            self.parameters
        );
        ensure!(self.parameters > 0, "--params 0: expected 1 or more");
        ensure!(
            self.values
                .is_none_or(|values| values.gradient() == self.dtype.value() || values.value() != values.gradient()),
            "--values {} with values of {}; expected these or a half",
            self.values.map(word).unwrap_or_default(),
            self.dtype.value()
        );
        ensure!(
            self.half().is_none() || self.dtype.value() == ElementType::Float32,
            "--values {}: only values of float32 come as halves; found --dtype {}",
            self.values.map(word).unwrap_or_default(),
            word(self.dtype)
        );
        ensure!(self.trainers <= TRAINERS_MAX, "--trainers {}: expected at most {TRAINERS_MAX}", self.trainers);
        ensure!(self.trainers > 0 && self.servers > 0 && self.shards > 0, "expected at least one of everybody");
        ensure!(
            matches!(self.mode, ModeName::Sync | ModeName::Delta) || self.rule == RuleName::Sgd || self.trainers == 1,
            "--mode {} with --trainers {}: what comes of it depends on who is first; expected --rule sgd",
            word(self.mode),
            self.trainers
        );
        ensure!(
            self.rule != RuleName::None || self.trainers == 1 && self.mode != ModeName::Delta,
            "--rule none sets values, which only one trainer can do, and not by differences; found --trainers {} and \
             --mode {}",
            self.trainers,
            word(self.mode)
        );
        ensure!(
            self.buffers != Buffers::Registered || self.rule != RuleName::None && self.mode == ModeName::Sync,
            "--buffers registered measures rounds of gradients; expected --mode sync and a rule that takes them"
        );
        ensure!(
            self.checks == Checks::BetweenHosts || matches!(self.transport, TransportName::Tcp | TransportName::Auto),
            "--checks {} is about payloads over TCP; found --transport {}",
            word(self.checks),
            word(self.transport)
        );
        if self.transport == TransportName::Verbs {
            let choice: DeviceChoice = self
                .rdma_device
                .parse()
                .map_err(|()| anyhow!("--rdma-device {}: expected {DEVICE_EXPECTED}", self.rdma_device))?;
            let found = VerbsDevice::find(&VerbsDevices::from(&choice), &crate::environment::fabric());
            found.map_err(|reason| anyhow!("--transport verbs: {reason}; expected tcp or shm"))?;
        }
        ensure!(
            self.transport != TransportName::Loopback || self.poll != Poll::Adaptive,
            "--poll adaptive: within one process who waits sleeps or looks; expected block or busy with --transport \
             loopback"
        );
        Ok(())
    }

    /// The optimizer message that the servers get, or what they do with differences.
    pub(crate) fn optimizer(&self) -> &'static str {
        if self.mode == ModeName::Delta { "algorithm: \"add\"" } else { self.rule.text() }
    }

    /// The rule that they update by; none where a value becomes the gradients' sum, or what it is set to.
    pub(crate) fn rule(&self) -> Result<Option<Prepared>> {
        if self.mode != ModeName::Delta && matches!(self.rule, RuleName::None | RuleName::Sum) {
            return Ok(None);
        }
        let rule = OptimizerSettings::from_text(self.optimizer())?.rule.context("the message names a rule")?;
        Ok(Some(Prepared::new(rule)?))
    }

    pub(crate) fn elements(&self) -> u64 {
        self.bytes / self.dtype.value().bytes()
    }

    /// The element type of pulled values, where it is half precision.
    pub(crate) fn half(&self) -> Option<Half> {
        self.values.and_then(|values| Half::of(values.gradient()))
    }

    /// Bytes of one trainer's values as they come.
    pub(crate) fn value_bytes(&self) -> u64 {
        if self.half().is_some() { self.bytes / 2 } else { self.bytes }
    }

    /// Bytes of one trainer's gradient.
    pub(crate) fn gradient_bytes(&self) -> u64 {
        self.elements() * self.dtype.gradient().bytes()
    }

    /// The elements of each parameter: as many as its neighbour's, the last with what is left.
    pub(crate) fn cuts(&self) -> Vec<Range<usize>> {
        let (all, count) = (length(self.elements()), length(u64::from(self.parameters)));
        let each = all / count;
        (0..count).map(|index| index * each..if index + 1 == count { all } else { (index + 1) * each }).collect()
    }

    /// The name of the servers and trainers of ours that do it.
    pub(crate) fn team(&self) -> String {
        let with = if self.serve.is_empty() { String::new() } else { format!(" with {}", self.serve.join(", ")) };
        let of = self.program.as_ref().map_or_else(String::new, |program| format!(" of {program}"));
        format!("pserver {}{with}{of}", word(self.transport))
    }

    /// A description of the job in one line.
    pub(crate) fn title(&self) -> String {
        let parameters = if self.parameters == 1 { String::new() } else { format!(" in {}", self.parameters) };
        let trainers = if self.trainers == 1 { "1 trainer".to_owned() } else { format!("{} trainers", self.trainers) };
        format!("{}{parameters}, {trainers}", show(self.bytes))
    }
}

/// The word that the command line has for a value.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("no value is skipped").get_name().to_owned()
}
