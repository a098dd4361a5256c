//! The subcommands, one a file.

pub(crate) mod ceiling;
pub(crate) mod compare;
pub(crate) mod doctor;
pub(crate) mod kernels;
pub(crate) mod latency;
pub(crate) mod memory;
pub(crate) mod peers;
pub(crate) mod programs;
pub(crate) mod pushpull;
pub(crate) mod rows;
pub(crate) mod scale;
