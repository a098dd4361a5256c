//! Arithmetic of a trainer's executor: the processor's kernels, within the limit of a program's memory.

use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::executor::ExecutorParts;

/// The executor's arithmetic, kernels and limits.
pub(super) fn executor_parts() -> ExecutorParts {
    ExecutorParts {
        arithmetic: Box::new(CpuArithmetic::default()),
        kernels: Box::new(Cpu::default()),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    }
}
