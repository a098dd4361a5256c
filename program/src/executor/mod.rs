//! Executor: runs a checked program, one unit at a time, on a trainer and in tests.
//!
//! Not here: arithmetic ([`Arithmetic`](super::Arithmetic) and [`Kernels`](pserver_core::port::Kernels)), transport of
//! values between programs ([`ProgramLink`]), threads, clocks. Nothing blocks in here: a unit is ready or not, and a
//! step runs one.
//!
//! **Units and stages.** An [`ExecutionPlan`] is made once from a checked program. Its *units* are the ops; an
//! accumulator has two, one that takes a piece and one that gives the merged value, and so has `pull_rows`, one that
//! asks and, later in the same turn, one that takes the answer. Two units that touch one variable,
//! of which at least one writes it, run in program order and belong to one *stage*. In a turn of its stage each unit
//! runs once; the stages of a [`LoopForever`](super::OpKind::LoopForever) have turn after turn, all others one turn in
//! every run. The two sides of a queue or an accumulator are not ordered, so they are in different stages unless a
//! variable joins them: N pieces are put while one merged gradient is taken.
//!
//! **Ready.** A unit is ready when its predecessors have run in this turn and its own condition holds: a received value
//! for `recv` and for the taking side of `pull_rows`, space for `enqueue`, as many items as outputs for `dequeue`, room
//! for the putting side of an accumulator, all pieces for its giving side, room at the destination for `send` and for
//! asking. No queue grows beyond its bound and nothing is dropped: a full destination blocks the ops before it.
//!
//! **Order.** A step runs the ready unit of the lowest index, counted from the end of the stage whose turn ended last,
//! cyclically. Nothing else decides, so the same received values give the same run.
//!
//! **Failures.** An op that fails has no effect, and leaves its run incomplete. [`Executor::restore`] undoes the run
//! with a snapshot that [`Executor::save`] took before it.
//!
//! **Pace.** An accumulator with a staleness bound decides which received value `recv` gives: with a bound of 0 one
//! piece of every sender in each merged gradient, and an early piece stays in the receive queue. So the content of a
//! round does not depend on the order of arrival, and pieces are added in the order of their senders.
//!
//! **Users.** Trainers, servers with [hosted programs](super::hosted), transpiled servers' parts in tests, and
//! benchmarks. Of what flows in code carry out ([`pserver_core::server`]) this module has only the
//! [`accumulator`](pserver_core::accumulator).
//!
//! Read in this order: [`UnitKind`] and [`ExecutionPlan`]; [`Marking`], the scheduler; [`Wait`]; [`Executor`].

mod machine;
mod marking;
mod merge;
mod plan;
mod queue;
mod run;
mod saved;
mod status;
#[cfg(test)]
mod tests;
mod wait;

pub use machine::{ExecutorParts, ProgramLink};
pub use marking::{Marking, UnitRunner};
pub use plan::{Accumulator, ExecutionPlan, Unit, UnitIndex, UnitKind};
pub use queue::Queue;
pub use run::{Executor, ExecutorSnapshot};
pub(crate) use saved::tensor_of;
pub use status::{RunStatus, run_status};
pub use wait::Wait;
