//! Which accelerator a shard gets.
//!
//! Not here: what it does ([`pserver_core::port::Accelerator`]), and how a device of CUDA is opened
//! ([`pserver_kernels::cuda`]).

use pserver_core::error::Failure;
use pserver_core::port::{Accelerator, Simulated};
use pserver_kernels::cpu::Cpu;
use pserver_kernels::cuda::{Cuda, Settings};

use crate::settings::Device;

/// The most polls that a piece of simulated work takes.
const SIMULATED_POLLS: u64 = 7;

/// Opens what shard `index` works on beside the processor; nothing where that is all there is. The first shard says
/// what was chosen, and why.
///
/// # Errors
/// When a device was asked for and cannot be had.
pub(super) fn open(device: Device, index: u16) -> Result<Option<Box<dyn Accelerator>>, Failure> {
    let opened: Option<Box<dyn Accelerator>> = match device {
        Device::Cpu => None,
        Device::Simulated => Some(Box::new(Simulated::new(Cpu::new(), u64::MAX, SIMULATED_POLLS))),
        Device::Cuda { ordinal } => match Cuda::open(Settings::of(ordinal)) {
            Ok(cuda) => Some(Box::new(cuda)),
            Err(failure) => return Err(Failure::Node(format!("device cuda:{ordinal}: {failure}"))),
        },
        Device::Auto => match Cuda::open(Settings::of(0)) {
            Ok(cuda) => Some(Box::new(cuda)),
            Err(failure) => {
                if index == 0 {
                    tracing::info!("device: cpu: {failure}");
                }
                None
            }
        },
    };
    if let Some(accelerator) = opened.as_ref().filter(|_| index == 0) {
        tracing::info!("device: {}", accelerator.capabilities().name);
    }
    Ok(opened)
}
