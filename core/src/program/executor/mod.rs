//! The executor: runs a checked program, one unit at a time, on a trainer, on a server and in tests.
//!
//! Not here: arithmetic ([`Arithmetic`](crate::port::Arithmetic) and [`Kernels`](crate::port::Kernels) do it), what
//! carries values between programs ([`Link`]), threads, clocks. Nothing waits in here: a unit is ready or it is not,
//! and a step runs one.
//!
//! **Units and stages.** A [`Plan`] is made once of a checked program. Its *units* are the ops; an accumulator has
//! two, one that puts a piece and one that gives what they make. Two units that touch one variable, which one of them
//! writes, run in the program's order, and are of one *stage*. In a turn of its stage each unit runs once; the stages
//! of a [`LoopForever`](super::OpKind::LoopForever) have turn after turn, all others one in every run. Nothing orders
//! the two sides of a queue or of an accumulator, so they are of different stages unless a variable joins them: pieces
//! are put N times while the merged gradient is given once.
//!
//! **Ready.** A unit is ready when those before it have run in this turn, and when what it waits for beyond them is
//! there: `recv` for a value that was sent, `enqueue` for space, `dequeue` for as many items as it gives, the putting
//! side of an accumulator for room, its giving side for all pieces, `send` for room at its destination. No queue grows
//! beyond its bound and nothing is dropped: who has no room makes the one before it wait.
//!
//! **Order.** A step runs the ready unit of the lowest index, counted from the end of the stage whose turn ended last
//! and around. Nothing else decides, so that the same arrivals give the same run.
//!
//! **What fails.** An op that fails has done nothing, and its run is half over. Who saved what a run can change before
//! it ([`Executor::save`]) takes it back ([`Executor::restore`]).
//!
//! **Whose turn it is.** An accumulator with a staleness bound says which arrival `recv` gives: with a bound of 0 one
//! piece of every sender in each merged gradient, and a piece that is early waits where it has arrived. So what a
//! round is made of does not depend on the order of arrival, and pieces are added in their senders' order.
//!
//! **Who runs it.** An [`Executor`] has the values of its program in variables. A server runs the same [`Plan`] and
//! [`Marking`] over a [`Port`] of its own, whose values are the chunks of a shard (`crate::server`).
//!
//! Read in this order: [`Act`] and [`Plan`]; [`Marking`], which is the executor proper; [`Wait`]; [`Executor`].

mod flow;
mod machine;
mod marking;
mod merge;
mod plan;
mod run;
#[cfg(test)]
mod tests;
mod wait;

pub use flow::{Pace, Pieces, Queue, Sent};
pub use machine::{Link, Parts};
pub use marking::{Marking, Port};
pub use plan::{Accumulator, Act, Fused, Plan, Unit, UnitIndex};
pub use run::{Executor, Saved};
pub use wait::{Standing, Wait, standing};
