//! Tests of the executor: contracts of flow ops, trainers and servers joined by a simulated wire, and random schedules.

mod failures;
mod flow;
mod joined;
mod plans;
mod rows;
mod saved;
mod schedules;
mod stage;
mod words;
