//! What can be chosen for a device.

use std::path::PathBuf;

use pserver_core::error::Failure;
use pserver_core::limits::CHUNK_BYTES_MAX;

/// Which device, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which device, from zero, as the driver counts them.
    pub ordinal: u32,
    /// Bytes of its memory for parameters and states; none is whatever is free. They are taken when chunks are adopted.
    pub memory_bytes: Option<u64>,
    /// Bytes of its memory for gradients that are on their way to a sum. They are taken when the device is opened.
    pub gradient_bytes: u64,
    /// The largest chunk that is adopted.
    pub chunk_bytes: u32,
    /// Chunks shorter than this are not offered (see [`DeviceFacts`](pserver_core::port::DeviceFacts)).
    pub bytes_least: u32,
    /// Where compiled rules are kept between runs; none is nowhere.
    pub cache: Option<PathBuf>,
}

impl Settings {
    /// A device with everything else as it is when nobody chooses.
    ///
    /// A quarter of a gibibyte holds, four times over, sixteen gradients of four MiB or sixty-four of one. Below 64 KiB
    /// a launch and its copies take about as long as the processor needs for the same chunk; that is reckoned from
    /// what calls of the driver cost, and not measured.
    #[must_use]
    pub fn of(ordinal: u32) -> Self {
        Self {
            ordinal,
            memory_bytes: None,
            gradient_bytes: 256 << 20,
            chunk_bytes: CHUNK_BYTES_MAX,
            bytes_least: 64 << 10,
            cache: None,
        }
    }

    /// # Errors
    /// When a number cannot be; names it and what is expected.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.chunk_bytes == 0 || CHUNK_BYTES_MAX < self.chunk_bytes {
            let found = self.chunk_bytes;
            return Err(Failure::call(format!("chunks of {found} bytes on a device; expected 1 to {CHUNK_BYTES_MAX}")));
        }
        let least = u64::from(self.chunk_bytes) * super::gathering::BANKS as u64;
        if self.gradient_bytes < least {
            let (found, chunk) = (self.gradient_bytes, self.chunk_bytes);
            return Err(Failure::call(format!(
                "{found} bytes of device memory for gradients; expected {least} or more, for chunks of {chunk}"
            )));
        }
        Ok(())
    }
}
