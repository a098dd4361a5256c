//! The accelerators of a server's shards.
//!
//! Not here: the interface of an accelerator ([`pserver_core::port::Accelerator`]), and how a device of CUDA is opened
//! ([`pserver_kernels::cuda`]).

use pserver_core::config::Mode;
use pserver_core::error::Failure;
use pserver_core::port::{Accelerator, Simulated};
use pserver_core::server::NoRoom;
use pserver_core::shares::SharedNeeds;
use pserver_kernels::cpu::Cpu;
use pserver_kernels::cuda::{Cuda, CudaDevice, CudaSettings};

use crate::device_speed::MeasuredWork;
use crate::settings::{DeviceSetting, Settings};

/// The most polls that a piece of simulated work takes.
const SIMULATED_POLLS: u64 = 7;

/// The accelerator of one shard; none for the processor alone.
pub(super) type ShardDevice = Option<Box<dyn Accelerator>>;

/// Opens the accelerator of every shard, and logs the choice and its reason once.
///
/// # Errors
/// When the configured device cannot be opened for every shard.
pub(super) fn open(settings: &Settings) -> Result<Vec<ShardDevice>, Failure> {
    let none = || (0..settings.shards).map(|_| None).collect();
    match settings.device.processor {
        DeviceSetting::Cpu => Ok(none()),
        DeviceSetting::Simulated => {
            let simulated = || Box::new(Simulated::new(Cpu::new(), u64::MAX, SIMULATED_POLLS));
            tracing::info!("device: {}", simulated().capabilities().name);
            Ok((0..settings.shards).map(|_| Some(simulated() as Box<dyn Accelerator>)).collect())
        }
        DeviceSetting::Cuda { ordinal } => {
            let OpenedShards { devices, refused, text } = CudaDevice::look(ordinal)
                .and_then(|found| open_shards(&found, &for_shard(settings, ordinal), settings))
                .map_err(|failure| Failure::Node(format!("device cuda:{ordinal}: {failure}")))?;
            tracing::info!("device: {text}");
            match refused.first() {
                None => Ok(devices),
                Some((shard, failure)) => Err(Failure::Node(format!(
                    "device cuda:{ordinal}: shard {shard} of {}: {failure}",
                    settings.shards
                ))),
            }
        }
        DeviceSetting::Auto => Ok(open_better(settings).unwrap_or_else(|why| {
            tracing::info!("device: cpu: {why}");
            none()
        })),
    }
}

/// The accelerator of a shard that a server takes up while it serves. Devices of CUDA are opened at start alone, so it
/// is on the processor there.
pub(super) fn of_a_shard_that_moved(settings: &Settings) -> ShardDevice {
    match settings.device.processor {
        DeviceSetting::Simulated => Some(Box::new(Simulated::new(Cpu::new(), u64::MAX, SIMULATED_POLLS))),
        DeviceSetting::Cpu | DeviceSetting::Auto | DeviceSetting::Cuda { .. } => None,
    }
}

/// Opens the first device of CUDA if it is the better choice, or says why it is not.
fn open_better(settings: &Settings) -> Result<Vec<ShardDevice>, String> {
    let each = for_shard(settings, 0);
    let found = CudaDevice::look(0).map_err(|failure| failure.to_string())?;
    let OpenedShards { mut devices, refused, text } =
        open_shards(&found, &each, settings).map_err(|failure| failure.to_string())?;
    let Some(first) = devices.iter_mut().flatten().next() else {
        return Err(refused.first().map_or_else(|| "no shards".to_owned(), |(_, failure)| failure.to_string()));
    };
    let work = MeasuredWork::new(settings.job.chunk_bytes, gradients_at_once(settings), settings.shards);
    let speeds = work.measure(first.as_mut()).map_err(|failure| format!("cuda:0 was not measured: {failure}"))?;
    if !speeds.prefers_accelerator() {
        return Err(format!("cuda:0 is slower: {speeds}; --device cuda:0 takes it all the same"));
    }
    tracing::info!("device: {text}; {speeds}");
    if let Some((_, failure)) = refused.first() {
        let shards: Vec<String> = refused.iter().map(|(shard, _)| shard.to_string()).collect();
        tracing::warn!("device: cpu for shards {}: {failure}", shards.join(", "));
    }
    Ok(devices)
}

/// The policy for parameters that do not fit: a configured device must hold all that it can.
pub(super) fn no_room(settings: &Settings) -> NoRoom {
    if settings.device.processor == DeviceSetting::Auto { NoRoom::Processor } else { NoRoom::Refused }
}

/// A shard for which the device could not be opened, and the failure.
type RefusedShard = (u16, Failure);

/// The devices of shards, those that were refused one, and the choice in words.
struct OpenedShards {
    devices: Vec<ShardDevice>,
    refused: Vec<RefusedShard>,
    text: String,
}

/// Opens the device for each shard.
fn open_shards(found: &CudaDevice, each: &CudaSettings, settings: &Settings) -> Result<OpenedShards, Failure> {
    let (free, total) = found.memory()?;
    let (mut devices, mut refused): (Vec<ShardDevice>, Vec<_>) = (Vec::new(), Vec::new());
    let needs = SharedNeeds::default();
    for shard in 0..settings.shards {
        match Cuda::open_sharing(each.clone(), needs.shard()) {
            Ok(cuda) => devices.push(Some(Box::new(cuda))),
            Err(failure) => {
                refused.push((shard, failure));
                devices.push(None);
            }
        }
    }
    let have = usize::from(settings.shards) - refused.len();
    let text = format!(
        "cuda:{} ({}) for {have} of {} shards; {free} of its {total} bytes were free; {}",
        each.ordinal,
        found.name(),
        settings.shards,
        summary(each, settings)
    );
    Ok(OpenedShards { devices, refused, text })
}

/// Describes the device memory of each shard, and its reason.
fn summary(each: &CudaSettings, settings: &Settings) -> String {
    let CudaSettings { gradient_bytes, chunk_bytes, bytes_least, .. } = each;
    let gradients = match settings.device.gradients {
        Some(all) => format!("its share of {all}"),
        None => format!("for {} of each chunk", gradients_at_once(settings)),
    };
    let memory = each.memory_bytes.map_or_else(
        || "all free memory is for parameters and states".to_owned(),
        |bytes| format!("{bytes} bytes are for the parameters and states of all"),
    );
    let cache = each.cache.as_ref().map_or_else(
        || "compiled rules are not kept".to_owned(),
        |folder| format!("compiled rules are kept in {}", folder.display()),
    );
    format!(
        "each takes {gradient_bytes} bytes for gradients ({gradients}) and {chunk_bytes} for a sum; {memory}; chunks \
         of {bytes_least} bytes or more live there; {cache}"
    )
}

/// The CUDA settings of one shard.
fn for_shard(settings: &Settings, ordinal: u32) -> CudaSettings {
    let shards = u64::from(settings.shards);
    let of_job = CudaSettings::for_job(ordinal, settings.job.chunk_bytes, gradients_at_once(settings));
    CudaSettings {
        memory_bytes: settings.device.memory,
        gradient_bytes: settings.device.gradients.map_or(of_job.gradient_bytes, |all| all / shards),
        bytes_least: u32::try_from(settings.device.least).unwrap_or(u32::MAX),
        cache: settings.device.cache.clone(),
        ..of_job
    }
}

/// Largest number of gradients in an update.
fn gradients_at_once(settings: &Settings) -> u32 {
    if settings.job.mode == Mode::Sync { settings.job.trainers } else { 1 }
}

#[cfg(test)]
mod tests {
    use pserver_kernels::cuda::CudaSettings;

    use super::{for_shard, summary};
    use crate::settings::Settings;

    fn settings(flags: &str) -> Settings {
        Settings::of_words(flags.split_whitespace()).expect("they are settings")
    }

    #[test]
    fn a_shard_gets_its_share_of_the_memory_settings_of_the_process() {
        let check = |flags, expected: CudaSettings| assert_eq!(for_shard(&settings(flags), 3), expected, "{flags}");
        let plain = CudaSettings { gradient_bytes: 32 << 20, chunk_bytes: 1 << 20, ..CudaSettings::of(3) };
        check("", plain.clone());
        check("--chunk-bytes 64KiB", CudaSettings { chunk_bytes: 64 << 10, ..plain.clone() });
        check("--trainers 32", CudaSettings { gradient_bytes: 128 << 20, ..plain.clone() });
        check("--trainers 32 --mode async", plain.clone());
        check(
            "--shards 4 --device-memory 1GiB --device-gradients 64MiB --device-least 4KiB --device-cache /c",
            CudaSettings {
                memory_bytes: Some(1 << 30),
                gradient_bytes: 16 << 20,
                bytes_least: 4096,
                cache: Some("/c".into()),
                ..plain
            },
        );
    }

    #[test]
    fn the_summary_names_the_chosen_sizes_with_their_reasons() {
        let check = |flags, expected: &str| {
            let settings = settings(flags);
            assert_eq!(summary(&for_shard(&settings, 0), &settings), expected);
        };
        check(
            "--trainers 32",
            "each takes 134217728 bytes for gradients (for 32 of each chunk) and 1048576 for a sum; all free memory is \
             for parameters and states; chunks of 65536 bytes or more live there; compiled rules are not kept",
        );
        check(
            "--shards 2 --device-memory 1GiB --device-gradients 8MiB --device-cache /c",
            "each takes 4194304 bytes for gradients (its share of 8388608) and 1048576 for a sum; 1073741824 bytes are \
             for the parameters and states of all; chunks of 65536 bytes or more live there; compiled rules are kept \
             in /c",
        );
    }
}
