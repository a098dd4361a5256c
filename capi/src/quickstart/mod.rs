//! `pserver quickstart`.

pub mod digits;
mod luck;
pub mod model;
