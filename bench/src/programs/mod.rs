//! Steps of programs: the transpiler's estimates beside the times of real jobs over TCP within this machine.

mod data;
mod job;
mod machine;
mod random;
mod step;
#[cfg(test)]
mod tests;

pub(crate) use machine::{in_a_line, machine_rates};
pub(crate) use random::RandomProgram;
pub(crate) use step::{StepComparison, StepPlan};
