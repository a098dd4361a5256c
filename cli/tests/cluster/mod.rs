//! Helpers of cluster tests: servers in this process and in processes of their own, tensors with known gradients, and
//! a reader of checkpoint directories.
//!
//! Read in this order: `job` (which servers there are), `process` (one that can be killed), `ports` (where it
//! listens), `training` (what is trained), `rows` (the same by rows), `kept` (what was kept of it), `seeded` (what
//! differs from run to run), `settings_page` (what becomes of settings), `asked` (what is run only when somebody asks
//! for it).

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
