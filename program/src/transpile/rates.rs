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

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        let process = &mut self.process;
        let rate = match name {
            "shared_cores" => {
                self.shared_cores = value.parse().ok()?;
                return Some(());
            }
            "link_bytes_per_second" => &mut process.link_bytes_per_second,
            "message_seconds" => &mut process.message_seconds,
            "op_seconds" => &mut process.op_seconds,
            "row_seconds" => &mut process.row_seconds,
            "flops_per_second" => &mut process.flops_per_second,
            "memory_bytes_per_second" => &mut process.memory_bytes_per_second,
            "crowding_seconds" => &mut self.crowding_seconds,
            _ => return None,
        };
        *rate = value.parse().ok()?;
        Some(())
    }
}

impl fmt::Display for MachineRates {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, shared_cores, crowding_seconds } = self;
        writeln!(formatter, "link_bytes_per_second = {:.3e}", process.link_bytes_per_second)?;
        writeln!(formatter, "message_seconds = {:.3e}", process.message_seconds)?;
        writeln!(formatter, "op_seconds = {:.3e}", process.op_seconds)?;
        writeln!(formatter, "row_seconds = {:.3e}", process.row_seconds)?;
        writeln!(formatter, "flops_per_second = {:.3e}", process.flops_per_second)?;
        writeln!(formatter, "memory_bytes_per_second = {:.3e}", process.memory_bytes_per_second)?;
        writeln!(formatter, "shared_cores = {shared_cores}")?;
        writeln!(formatter, "crowding_seconds = {crowding_seconds:.3e}")
    }
}

impl FromStr for MachineRates {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let mut rates = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
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
