//! Rates of machines as text: what `psbench doctor` measures, and estimates use.
//!
//! ```text
//! # a rate on each line; those that are not named have the default
//! message_seconds = 1.2e-5
//! shared_cores = 2
//! ```

use std::fmt;
use std::str::FromStr;

use pserver_core::error::Failure;

use super::cost::{CostModel, ProcessRates};
use super::given_placement::content_lines;

const CORES: &str = "shared_cores";

/// The rates of the machines of a job, all of them alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineRates {
    /// Every process.
    pub process: ProcessRates,
    /// As [`CostModel::shared_cores`].
    pub shared_cores: u32,
    /// As [`CostModel::crowding_seconds`].
    pub crowding_seconds: f64,
}

impl Default for MachineRates {
    fn default() -> Self {
        let CostModel { trainer, shared_cores, crowding_seconds, .. } = CostModel::default();
        Self { process: trainer, shared_cores, crowding_seconds }
    }
}

impl MachineRates {
    /// A cost model with these rates.
    #[must_use]
    pub fn model(self) -> CostModel {
        let Self { process, shared_cores, crowding_seconds } = self;
        CostModel { trainer: process, server: process, shared_cores, crowding_seconds, ..CostModel::default() }
    }

    /// The rates by name, beside the number of cores.
    fn by_name(&mut self) -> [(&'static str, &mut f64); 7] {
        let Self { process, crowding_seconds, .. } = self;
        [
            ("link_bytes_per_second", &mut process.link_bytes_per_second),
            ("message_seconds", &mut process.message_seconds),
            ("op_seconds", &mut process.op_seconds),
            ("row_seconds", &mut process.row_seconds),
            ("flops_per_second", &mut process.flops_per_second),
            ("memory_bytes_per_second", &mut process.memory_bytes_per_second),
            ("crowding_seconds", crowding_seconds),
        ]
    }

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        if name == CORES {
            self.shared_cores = value.parse().ok()?;
            return Some(());
        }
        let (_, rate) = self.by_name().into_iter().find(|(known, _)| *known == name)?;
        *rate = value.parse().ok()?;
        Some(())
    }
}

impl fmt::Display for MachineRates {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut own = *self;
        for (name, rate) in own.by_name() {
            writeln!(formatter, "{name} = {rate:.3e}")?;
        }
        writeln!(formatter, "{CORES} = {}", self.shared_cores)
    }
}

impl FromStr for MachineRates {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let mut rates = Self::default();
        for (number, line) in content_lines(text) {
            let known = line.split_once('=').and_then(|(name, value)| rates.set(name.trim(), value.trim()));
            known.ok_or_else(|| {
                Failure::call(format!(
                    "line {number}: found {line:?}; expected a rate and its number, such as \"message_seconds = 1e-5\""
                ))
            })?;
        }
        rates.model().validate()?;
        Ok(rates)
    }
}
