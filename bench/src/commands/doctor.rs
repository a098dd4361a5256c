//! `psbench doctor`: what on this machine is in the way of speed, and how to mend it.

use std::borrow::Cow;
use std::fs;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, getrlimit};
use pserver_transport::verbs::{DeviceChoice, FabricChoice, VerbsDevice, VerbsDevices};
use serde_json::json;

use crate::environment::{fabric_settings, memory_bytes};
use crate::programs::{in_a_line, machine_rates};
use crate::report::{Column, Outcome, Report, plain};

/// The options of `psbench doctor`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Addresses that must be reachable from here, such as 10.0.0.2:7164; several with commas between them.
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS")]
    peers: Vec<String>,
    /// How long a peer may take to answer, in seconds.
    #[arg(long, default_value_t = 2.0)]
    patience: f64,
    /// Measures this machine's rates, for some seconds, and writes them to a file for 'pserver transpile --rates' and
    /// 'pserver train --rates'.
    #[arg(long, value_name = "FILE")]
    rates: Option<PathBuf>,
}

const COLUMNS: &[Column] =
    &[plain("name", "what"), plain("verdict", "verdict"), plain("found", "found"), plain("fix", "fix")];

/// The object of the finding.
struct Diagnosis {
    name: String,
    /// `ok`, `note` (slower than it could be) or `bad` (something will not work).
    verdict: &'static str,
    found: String,
    fix: Cow<'static, str>,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let mut report = Report::new("doctor", json!({ "peers": args.peers }), COLUMNS);
    let mut findings =
        vec![cores(), numa(), memlock(), nofile(), huge_pages(), shared_huge_pages(), clock(), socket_buffers()];
    findings.extend(interfaces());
    findings.extend(rdma());
    findings.extend(verbs());
    findings.extend(args.peers.iter().map(|peer| reach(peer, args.patience)));
    if let Some(file) = &args.rates {
        let rates = machine_rates()?;
        fs::write(file, rates.to_string()).with_context(|| format!("--rates {}", file.display()))?;
        findings.push(finding("rates", "ok", in_a_line(&rates), ""));
    }
    for one in findings {
        let result = Outcome::new(&one.name).with("verdict", one.verdict).with("found", one.found);
        let result = result.without_ratio("a finding, which measures nothing");
        // A good finding has no remedy.
        report.push(result.with("fix", if one.verdict == "ok" { "" } else { &*one.fix }));
    }
    Ok(report)
}

fn finding(
    name: &str,
    verdict: &'static str,
    found: impl Into<String>,
    fix: impl Into<Cow<'static, str>>,
) -> Diagnosis {
    Diagnosis { name: name.to_owned(), verdict, found: found.into(), fix: fix.into() }
}

fn cores() -> Diagnosis {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let online = read("/sys/devices/system/cpu/online").unwrap_or_else(|| "unknown".to_owned());
    let verdict = if usable >= 3 { "ok" } else { "note" };
    let fix = "a server, a trainer and everything else want a core each: with fewer do not use --poll busy; if cores \
               are online that this process may not use, look at taskset and the cgroup's cpuset";
    finding("cores", verdict, format!("{usable} usable, online {online}"), fix)
}

fn numa() -> Diagnosis {
    let nodes = read("/sys/devices/system/node/online").unwrap_or_else(|| "0".to_owned());
    let verdict = if nodes == "0" { "ok" } else { "note" };
    let fix = "start a server on each node: numactl --cpunodebind=N --membind=N pserver serve ...";
    finding("NUMA nodes", verdict, nodes, fix)
}

fn memlock() -> Diagnosis {
    let bytes = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    let enough = bytes >= memory_bytes().unwrap_or(u64::MAX) / 2;
    let found = if bytes == u64::MAX { "unlimited".to_owned() } else { format!("{bytes} bytes (ulimit -l)") };
    let fix = "RDMA registers the servers' memory, and registered memory is locked: ulimit -l unlimited, or \
               '* - memlock unlimited' in /etc/security/limits.conf; TCP and shared memory do not need it";
    finding("locked memory", if enough { "ok" } else { "note" }, found, fix)
}

fn nofile() -> Diagnosis {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    let fix = "a server has a descriptor for each trainer and shard: ulimit -n 65536, or LimitNOFILE=65536 in the unit";
    finding("open files", if files >= 4096 { "ok" } else { "bad" }, format!("{files} (ulimit -n)"), fix)
}

fn huge_pages() -> Diagnosis {
    let fix = "large parameters walk many pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    switched("huge pages", "/sys/kernel/mm/transparent_hugepage/enabled", fix)
}

/// Of files in memory, which shared memory of several processes is.
fn shared_huge_pages() -> Diagnosis {
    let fix = "over shared memory large parameters walk many pages: echo advise > \
               /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    switched("huge pages of shared memory", "/sys/kernel/mm/transparent_hugepage/shmem_enabled", fix)
}

/// A setting of the system whose words name what may be chosen, and whether the chosen one switches it off.
fn switched(name: &str, path: &str, fix: &'static str) -> Diagnosis {
    let text = read(path).unwrap_or_else(|| "not supported".to_owned());
    let is_on = text.contains('[') && !text.contains("[never]") && !text.contains("[deny]");
    finding(name, if is_on { "ok" } else { "note" }, text, fix)
}

fn clock() -> Diagnosis {
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource").unwrap_or_default();
    let is_fast = matches!(source.as_str(), "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page" | "arch_sys_counter");
    let fix = "reading this clock is a system call: boot with clocksource=tsc if the processor's is stable";
    finding("clock", if is_fast { "ok" } else { "note" }, source, fix)
}

fn socket_buffers() -> Diagnosis {
    let most =
        |path: &str| read(path).and_then(|text| text.split_whitespace().last()?.parse::<u64>().ok()).unwrap_or(0);
    let (receive, send) = (most("/proc/sys/net/ipv4/tcp_rmem"), most("/proc/sys/net/ipv4/tcp_wmem"));
    let verdict = if receive.min(send) >= 4 << 20 { "ok" } else { "note" };
    let fix = "between machines a window of a few MiB keeps a fast link full: sysctl -w net.ipv4.tcp_rmem='4096 131072 \
               16777216' net.ipv4.tcp_wmem='4096 131072 16777216'";
    finding("TCP buffers", verdict, format!("receive {receive}, send {send} bytes at most"), fix)
}

/// Every network interface that is up.
fn interfaces() -> Vec<Diagnosis> {
    let is_up = |path: &PathBuf| read(path.join("operstate")).is_some_and(|state| state == "up" || state == "unknown");
    let mut found = Vec::new();
    for path in entries("/sys/class/net").into_iter().filter(is_up) {
        let name = file_name(&path);
        let mtu = read(path.join("mtu")).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let speed = read(path.join("speed")).unwrap_or_else(|| "unknown".to_owned());
        let node = read(path.join("device/numa_node")).unwrap_or_else(|| "-".to_owned());
        let text = format!("MTU {mtu}, {speed} Mb/s, NUMA node {node}");
        let fix = format!("if every switch on the way takes jumbo frames: ip link set dev {name} mtu 9000");
        found.push(finding(&format!("interface {name}"), if mtu >= 9000 { "ok" } else { "note" }, text, fix));
    }
    found
}

/// Every RDMA device with its ports and addresses.
fn rdma() -> Vec<Diagnosis> {
    let fix = "without a device trainers on other machines use TCP; with one, load its driver (modprobe mlx5_ib, or \
               rdma_rxe for software RoCE: rdma link add rxe0 type rxe netdev NAME)";
    let devices = entries("/sys/class/infiniband");
    if devices.is_empty() {
        return vec![finding("RDMA devices", "note", "none", fix)];
    }
    let mut found = Vec::new();
    for (device, port) in
        devices.iter().flat_map(|path| entries(path.join("ports")).into_iter().map(move |port| (path, port)))
    {
        let state = read(port.join("state")).unwrap_or_else(|| "unknown".to_owned());
        let link = read(port.join("link_layer")).unwrap_or_else(|| "unknown".to_owned());
        let is_set = |gid: &String| gid.chars().any(|digit| digit != '0' && digit != ':');
        let gids: Vec<_> = entries(port.join("gids"))
            .into_iter()
            .filter_map(|path| Some(format!("{}={}", file_name(&path), read(&path).filter(is_set)?)))
            .collect();
        let is_active = state.contains("ACTIVE") && !gids.is_empty();
        let node = read(device.join("device/numa_node")).unwrap_or_else(|| "-".to_owned());
        let text = format!("{state}, {link}, NUMA node {node}, GIDs {}", gids.join(" "));
        let name = format!("RDMA {} port {}", file_name(device), file_name(&port));
        let fix =
            "the port is down or has no address: look at the cable, ibstat, and for RoCE at the interface's address";
        found.push(finding(&name, if is_active { "ok" } else { "bad" }, text, fix));
    }
    found
}

/// The settings of the fabric, the ports that may be used and those that may not, the device that connections over
/// verbs would use, and the support for memory of accelerators.
fn verbs() -> Vec<Diagnosis> {
    let fix = "docs/LAUNCH.md#rdma-devices has its variables";
    let (fabric, choices) = match fabric_settings() {
        Ok(found) => found,
        Err(reason) => return vec![finding("RDMA settings", "bad", reason, fix)],
    };
    let setting = |choice: &FabricChoice| finding("RDMA setting", "note", choice.to_string(), fix);
    let mut found: Vec<_> = choices.iter().map(setting).collect();
    let fix = "connections between machines go over TCP";
    let (usable, unusable) = VerbsDevice::survey(&fabric).unwrap_or_default();
    found.extend(usable.into_iter().map(|port| finding("RDMA address", "note", port, "--rdma-device chooses")));
    found.extend(unusable.into_iter().map(|reason| finding("RDMA port", "note", format!("not used: {reason}"), fix)));
    let choice = std::env::var("PSERVER_RDMA_DEVICE").ok().and_then(|text| text.parse::<DeviceChoice>().ok());
    let device = match VerbsDevice::find(&VerbsDevices::from(&choice.unwrap_or_default()), &fabric) {
        Ok(device) => device,
        Err(reason) => {
            found.push(finding("verbs", "note", reason, fix));
            return found;
        }
    };
    let fix_memory = "gradients of an accelerator go through the host";
    found.push(finding("verbs", "ok", device.name(), fix));
    found.push(finding("device memory over verbs", "note", device.device_memory(), fix_memory));
    let fix = "start workers with spawn, not with fork";
    found.extend(VerbsDevice::fork_warning().map(|warning| finding("fork", "bad", warning, fix)));
    found
}

fn reach(peer: &str, patience: f64) -> Diagnosis {
    let place = peer.split_once("://").map_or(peer, |(_, place)| place);
    let fix = "is a server there (it says `ready ADDRESS`), does it listen on more than loopback (--bind, \
               --advertise), and does a firewall let the port through?";
    let name = format!("peer {peer}");
    let addresses: Vec<_> = match place.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            return finding(&name, "bad", format!("no address: {error}"), "expected HOST:PORT; is the name known?");
        }
    };
    let mut last = "no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, Duration::from_secs_f64(patience.clamp(0.01, 600.0))) {
            Ok(_) => return finding(&name, "ok", format!("{address} accepts"), fix),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    finding(&name, "bad", last, fix)
}

fn read(path: impl Into<PathBuf>) -> Option<String> {
    fs::read_to_string(path.into()).ok().map(|text| text.trim().to_owned())
}

/// The entries of a folder, sorted; none where there is no such folder.
fn entries(path: impl Into<PathBuf>) -> Vec<PathBuf> {
    let Ok(all) = fs::read_dir(path.into()) else { return Vec::new() };
    let mut paths: Vec<_> = all.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn file_name(path: &std::path::Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
