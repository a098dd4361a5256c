//! Helpers of cluster tests: servers in this process and in processes of their own, tensors with known gradients, and
//! a reader of checkpoint directories.
//!
//! Read in this order: `job` (the servers of a job), `process` (a server process that can be killed), `ports` (its
//! port), `training` (tensors and gradients), `rows` (rows of sparse parameters), `kept` (the state that servers keep),
//! `seeded` (random values from a seed), `settings_page` (the tables of the page on settings), `asked` (tests that run
//! only on request).

#![allow(dead_code, reason = "every test program uses the part that it needs")]

pub(crate) mod asked;
pub(crate) mod job;
pub(crate) mod kept;
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod rows;
pub(crate) mod seeded;
pub(crate) mod settings_page;
pub(crate) mod training;
