//! Status of a program in which no unit is ready, and deadlock detection.

use super::marking::{Marking, UnitRunner};
use super::plan::ExecutionPlan;
use pserver_core::error::Failure;

/// The state of a program in which no unit is ready, or whose allowed number of units has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// Every op has run, and there is no loop.
    Ended,
    /// A value or room from outside is needed.
    Awaits,
    /// It may go on: the allowed number of units has run.
    Runs,
}

/// The status of a program without a ready unit.
///
/// # Errors
/// A deadlock: nothing from outside is awaited and the program has not ended. Names every waiting op and its reason.
pub fn run_status<P: UnitRunner>(plan: &ExecutionPlan, marking: &Marking, port: &mut P) -> Result<RunStatus, Failure> {
    if marking.has_ended() {
        return Ok(RunStatus::Ended);
    }
    let waiting = marking.waiting(plan, port);
    if waiting.iter().any(|(_, wait)| wait.is_outside()) {
        return Ok(RunStatus::Awaits);
    }
    let words = waiting.iter().map(|(unit, wait)| format!("{} {wait}", plan.label(&plan.units()[unit.place()])));
    let words: Vec<String> = words.collect();
    Err(Failure::call(format!("deadlock: no op is ready and nothing is awaited from outside: {}", words.join("; "))))
}
