//! Settings of a device.

use std::path::{Path, PathBuf};

use pserver_core::error::Failure;
use pserver_core::limits::CHUNK_BYTES_MAX;

use super::arguments::GRADIENTS_MAX;
use super::gathering::{BANKS, aligned};

/// The least memory for gradients of a job, so that many small chunks are in flight at the same time.
const GRADIENT_BYTES_LEAST: u64 = 32 << 20;
/// The most: four banks of sixteen gradients of 4 MiB, or sixty-four of 1 MiB.
const GRADIENT_BYTES_MOST: u64 = 256 << 20;

/// Eight pieces of 256 KiB: while one is filled, which takes about 25 us, others are copied.
const STAGING_BYTES: u32 = 2 << 20;

/// The device, and the resources to take from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSettings {
    /// The ordinal of the device, from zero, as the driver counts.
    pub ordinal: u32,
    /// Bytes of device memory for parameters, states and kept sums, of all shards that share the device; none means all
    /// free memory. They are allocated when chunks are adopted.
    pub memory_bytes: Option<u64>,
    /// Bytes of device memory for gradients before they are summed. They are allocated when the device is opened.
    pub gradient_bytes: u64,
    /// Bytes of pinned host memory, through which memory that is not pinned is copied.
    pub staging_bytes: u32,
    /// The largest chunk that is adopted.
    pub chunk_bytes: u32,
    /// Chunks shorter than this are not offered (see [`DeviceFacts`](pserver_core::port::DeviceFacts)).
    pub bytes_least: u32,
    /// The folder of compiled rules; none means no cache.
    pub cache: Option<PathBuf>,
}

impl CudaSettings {
    /// Default settings for a device, for chunks of any size.
    ///
    /// Below 64 KiB a launch and its copies take about as long as the processor needs for the same chunk; that is an
    /// estimate from the cost of driver calls, not a measurement.
    #[must_use]
    pub fn of(ordinal: u32) -> Self {
        Self {
            ordinal,
            memory_bytes: None,
            gradient_bytes: GRADIENT_BYTES_MOST,
            staging_bytes: STAGING_BYTES,
            chunk_bytes: CHUNK_BYTES_MAX,
            bytes_least: 64 << 10,
            cache: None,
        }
    }

    /// Settings for a job whose chunks have at most `chunk_bytes` bytes, and whose updates at most `gradients`
    /// gradients: each bank holds all gradients of one update, within bounds.
    #[must_use]
    pub fn for_job(ordinal: u32, chunk_bytes: u32, gradients: u32) -> Self {
        let at_once = u64::from(gradients).clamp(1, GRADIENTS_MAX as u64);
        let all = at_once * aligned(chunk_bytes.into()) * BANKS as u64;
        let gradient_bytes = all.clamp(GRADIENT_BYTES_LEAST, GRADIENT_BYTES_MOST);
        Self { chunk_bytes, gradient_bytes, ..Self::of(ordinal) }
    }

    /// The least memory for gradients: each bank holds one of a whole chunk.
    #[must_use]
    pub fn gradient_bytes_least(chunk_bytes: u32) -> u64 {
        aligned(chunk_bytes.into()) * BANKS as u64
    }

    /// # Errors
    /// When a number is out of range; names it and the expected range.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.chunk_bytes == 0 || CHUNK_BYTES_MAX < self.chunk_bytes {
            let found = self.chunk_bytes;
            return Err(Failure::call(format!("chunks of {found} bytes on a device; expected 1 to {CHUNK_BYTES_MAX}")));
        }
        let least = Self::gradient_bytes_least(self.chunk_bytes);
        if self.gradient_bytes < least {
            let (found, chunk) = (self.gradient_bytes, self.chunk_bytes);
            return Err(Failure::call(format!(
                "{found} bytes of device memory for gradients; expected {least} or more, for chunks of {chunk}"
            )));
        }
        Ok(())
    }
}

/// The default folder of compiled rules: in the user's cache folder, by the XDG base directory specification.
/// `variable` looks up an environment variable. None when no variable names a folder.
#[must_use]
pub fn rules_folder(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    // A relative path is invalid there, and is treated as unset.
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join(Path::new("pserver/rules")))
}

#[cfg(test)]
mod tests {
    use super::{CudaSettings, rules_folder};

    #[test]
    fn a_job_gets_room_for_the_gradients_of_one_update_in_every_bank() {
        let check = |chunk_bytes, gradients, expected: u64| {
            let settings = CudaSettings::for_job(0, chunk_bytes, gradients);
            assert_eq!((settings.chunk_bytes, settings.gradient_bytes), (chunk_bytes, expected));
            settings.check().expect("it is one that can be opened");
        };
        check(1 << 20, 1, 32 << 20);
        check(1 << 20, 8, 32 << 20);
        check(1 << 20, 16, 64 << 20);
        check(1 << 20, 4096, 256 << 20);
        check(16 << 20, 2, 128 << 20);
        check(16 << 20, 5, 256 << 20);
        check(4096, 1, 32 << 20);
    }

    #[test]
    fn compiled_rules_are_kept_in_the_cache_of_the_user() {
        let check = |variables: &[(&str, &str)], expected: Option<&str>| {
            let variable =
                |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| (*text).to_owned());
            assert_eq!(rules_folder(variable), expected.map(Into::into), "{variables:?}");
        };
        check(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")], Some("/c/pserver/rules"));
        check(&[("HOME", "/h")], Some("/h/.cache/pserver/rules"));
        check(&[("XDG_CACHE_HOME", "c"), ("HOME", "/h")], Some("/h/.cache/pserver/rules"));
        check(&[("XDG_CACHE_HOME", ""), ("HOME", "h")], None);
        check(&[], None);
    }
}
