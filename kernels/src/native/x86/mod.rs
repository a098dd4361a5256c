//! Code for x86-64 with AVX2 or AVX-512.
//!
//! Read in this order: `target` (the instructions), `layout` (general registers), `body` (one vector: register
//! allocation and operations), `routine` (the loops around it), `raw` (memory that runs; the only unsafe code).

mod assembler;
mod body;
mod layout;
mod raw;
mod routine;
mod target;

pub(crate) use raw::{GeneratedFunction, is_allowed};
pub(crate) use target::gradients_at_once;
