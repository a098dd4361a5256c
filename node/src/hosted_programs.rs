//! Programs that the executor runs on shards: its arithmetic and its limits.

use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::port::HostedProgram;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::executor::ExecutorParts;
use pserver_program::hosted;

/// Loads a program that a shard is to host.
pub(crate) fn load(program: &[u8], trainers: u32) -> Result<Box<dyn HostedProgram>, Failure> {
    let parts = ExecutorParts {
        arithmetic: Box::new(CpuArithmetic::default()),
        kernels: Box::new(Cpu::default()),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    };
    hosted::load(program, trainers, parts)
}
