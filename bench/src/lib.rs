//! `psbench`, which measures the parameter server from outside, and microbenchmarks of its pieces
//! (`cargo bench -p pserver-bench`).
//!
//! Not here: how any of it works. Servers and trainers are those that ship (`shipped`), and what they are compared with
//! are the simplest programs that do the same (`baseline`).
//!
//! Read in this order: `job` (what a run works on), `pattern` (what is sent, and what must come back), `trainer`
//! (rounds, timed and checked), `baseline`, `alternation` (both in turns), `hosts`, `commands`, `report`.

mod alternation;
mod baseline;
mod child;
mod commands;
mod comparison;
mod counters;
mod environment;
mod fused;
mod hosts;
mod job;
mod pattern;
mod peers;
pub mod program;
mod programs;
mod report;
mod route;
mod rows;
mod servers;
mod shipped;
mod sizes;
mod statistics;
mod tensors;
mod threads;
mod trainer;
mod within;

pub use fused::Fused;
pub use servers::serve;
pub use within::{LocalJob, Ping};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::partition::{Catalogue, Declaration, Name, Topology};

/// Whether benchmarks are measured (`cargo bench`), and do not only run once, at small sizes, as in tests.
#[must_use]
pub fn is_measured() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// Bytes of the chunk that kernels and checksums work on: the default chunk.
pub const CHUNK: usize = 1024 * 1024;

/// A catalogue of `parameters` parameters of `bytes` bytes each over 4 servers of 4 shards.
///
/// # Errors
/// When a bound of the catalogue is exceeded.
pub fn catalogue(parameters: u32, bytes: u64) -> Result<Catalogue, Failure> {
    let mut catalogue = Catalogue::new(Topology::new(vec![4; 4])?, pserver_core::limits::CHUNK_BYTES_DEFAULT)?;
    for index in 0..parameters {
        catalogue.declare(Declaration {
            name: Name::new(format!("layer{index}/weight").as_bytes())?,
            element_type: ElementType::Float32,
            bytes,
            shape: Vec::new(),
            whole: false,
            config: Vec::new(),
            buckets: None,
            owner: None,
            sender: None,
            total_part: None,
            hosted: None,
        })?;
    }
    Ok(catalogue)
}

/// A gradient of `bytes` bytes of f32 that differs from trainer to trainer.
#[must_use]
pub fn gradient(trainer: u16, bytes: usize) -> Vec<u8> {
    let value = |index: usize| f32::from(u16::try_from(index % 251).unwrap_or(0)) / 251.0 + f32::from(trainer);
    (0..bytes / 4).flat_map(|index| value(index).to_le_bytes()).collect()
}
