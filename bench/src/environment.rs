//! Where a measurement was taken.

use std::fs;

use pserver_transport::verbs::{FabricChoice, FabricOption, FabricSettings};
use serde_json::{Map, Value, json};

/// The description of the machine above every result.
pub(crate) fn facts() -> Map<String, Value> {
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let cpu = read("/proc/cpuinfo").and_then(|text| {
        text.lines()
            .find(|line| line.starts_with("model name"))?
            .split_once(':')
            .map(|(_, name)| name.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let nodes = read("/sys/devices/system/node/online").unwrap_or_else(|| "0".to_owned());
    let facts = json!({
        "program": "psbench",
        "command": command(),
        "version": env!("CARGO_PKG_VERSION"),
        "git_revision": env!("PSERVER_GIT_REVISION"),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
        "cpu": cpu.unwrap_or_else(|| "unknown".to_owned()),
        "cores": cores,
        "numa_nodes": nodes,
        "memory_bytes": memory_bytes(),
        "kernel": read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
        "host": read("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown".to_owned()),
        "load_average_1m": read("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse::<f64>().ok()),
    });
    match facts {
        Value::Object(map) => map,
        _ => unreachable!("it was written as an object"),
    }
}

/// The command line of this process, quoted for a shell.
fn command() -> String {
    // A list with commas needs no quotes, which the library adds.
    let is_plain = |word: &str| word.chars().all(|one| one.is_ascii_alphanumeric() || ",./:=@%+-_".contains(one));
    let quoted = |word: String| match shlex::try_quote(&word) {
        Ok(quoted) if word.is_empty() || !is_plain(&word) => quoted.into_owned(),
        _ => word,
    };
    std::iter::once("psbench".to_owned()).chain(std::env::args().skip(1).map(quoted)).collect::<Vec<_>>().join(" ")
}

/// Memory of this machine.
pub(crate) fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}

/// The settings of the fabric that this process's environment has, and their sources.
///
/// # Errors
/// The variable that is wrong.
pub(crate) fn fabric_settings() -> Result<(FabricSettings, Vec<FabricChoice>), String> {
    let variable = |name: &str| std::env::var(name).ok();
    let text = variable("PSERVER_RDMA_FABRIC").unwrap_or_default();
    let option = FabricOption::new(&text, "PSERVER_RDMA_FABRIC");
    let option = option.map_err(|expected| format!("PSERVER_RDMA_FABRIC is {text:?}; expected {expected}"))?;
    FabricSettings::find(&option, &variable)
}

/// The same without their sources; wrong ones are refused by the servers and clients.
pub(crate) fn fabric() -> FabricSettings {
    fabric_settings().map(|(fabric, _)| fabric).unwrap_or_default()
}
