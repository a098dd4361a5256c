//! The device that a connection gets on hosts of many kinds, which are tables of a false libibverbs.
//!
//! Addresses of 127.0.0.0/8 and ::1 are those of the network namespace that tests run in, and all others are foreign.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::fixtures::skip;
use crate::verbs::choice::{ConnectionPlace, PeerLink};
use crate::verbs::device_context::find;
use crate::verbs::provider::{LinkLayer, PairAddress};
use crate::verbs::{DeviceChoice, FabricOption, FabricSettings, VerbsDevice, VerbsDevices};

/// A host, a connection of it, and the device that this gets, or words of the reason for none.
pub(super) struct Host {
    about: &'static str,
    table: String,
    /// The setting, the local address or nothing, and the turn.
    place: (&'static str, &'static str, usize),
    expected: &'static str,
    /// Functions that its library lacks.
    lacks: &'static [&'static str],
    /// A variable of the environment.
    variable: (&'static str, &'static str),
}

impl Host {
    pub(super) fn new(about: &'static str, table: &[&str], expected: &'static str) -> Self {
        Self { about, table: table.join("\n"), place: ("auto", "", 0), expected, lacks: &[], variable: ("LANG", "C") }
    }

    fn at(self, choice: &'static str, local: &'static str, turn: usize) -> Self {
        Self { place: (choice, local, turn), ..self }
    }

    pub(super) fn with(self, name: &'static str, value: &'static str) -> Self {
        Self { variable: (name, value), ..self }
    }

    /// With a library before rdma-core 32.
    fn old(self) -> Self {
        self.lacking(&["_ibv_query_gid_table"])
    }

    /// With a library without these functions.
    pub(super) fn lacking(self, lacks: &'static [&'static str]) -> Self {
        Self { lacks, ..self }
    }
}

const INFINIBAND: &str = "port active ib 128x2 lid=7 flags=0\ngid 0 ib fe80::1";
const SLOW: &str = "port active ethernet 32x1 lid=0 flags=0\ngid 3 roce2 127.0.0.2";
const ROCE: &str = "port active ethernet 128x2 lid=0 flags=0\ngid 0 roce1 fe80::2\ngid 1 roce2 fe80::2";
const DOWN: &str = "port down ib 128x2 lid=7 flags=0\ngid 0 ib fe80::1";

fn device(name: &str, transport: &str, ports: &str) -> String {
    format!("device {name} {transport} /sys/class/infiniband/{name}\n{ports}")
}

/// Eight cards of InfiniBand with 400 Gbit/s behind two of RoCE with 25.
fn dgx() -> Vec<String> {
    let slow = ["mlx5_1", "mlx5_2"].map(|name| device(name, "ib", SLOW));
    let fast = [0, 3, 4, 5, 6, 9, 10, 11].map(|number| device(&format!("mlx5_{number}"), "ib", INFINIBAND));
    slow.into_iter().chain(fast).collect()
}

fn hosts(sysfs: &Path) -> Vec<Host> {
    let lines = |all: Vec<String>| all.join("\n");
    let dgx = lines(dgx());
    let of_oci = [device("mlx5_0", "ib", SLOW), device("mlx5_1", "ib", &format!("{ROCE}\ngid 3 roce2 127.0.0.3"))];
    let bnxt = device("bnxt_re0", "ib", &format!("{ROCE}\ngid 2 roce1 127.0.0.2\ngid 3 roce2 127.0.0.2"));
    let pod = format!("{ROCE}\ngid 3 roce2 10.0.0.5\ngid 5 roce2 127.0.0.9\ngid 7 roce2 10.0.0.7");
    let old = format!("device mlx5_0 ib {}\n{ROCE}\ngid 3 roce2 127.0.0.2", sysfs.display());
    let many: Vec<String> =
        (1..600).map(|index| format!("gid {} roce1 10.1.{}.{}", index % 250, index / 250, index % 250)).collect();
    let many = format!("{ROCE}\n{}\ngid 255 roce2 127.0.0.2", many.join("\n"));
    vec![
        Host::new("a DGX", &[&dgx], "mlx5_0:1:0, InfiniBand, 400 Gbit/s, fe80::1"),
        Host::new("a DGX whose name is a slow card's", &[&dgx], "mlx5_0:1:0").at("auto", "127.0.0.2", 0),
        Host::new("a DGX's sixth shard", &[&dgx], "mlx5_9:1:0").at("auto", "127.0.0.2", 5),
        Host::new("a DGX's ninth shard", &[&dgx], "mlx5_0:1:0").at("auto", "", 8),
        Host::new("a DGX with a list", &[&dgx], "mlx5_1:1:3, RoCE v2, 25 Gbit/s").at("mlx5_11,mlx5_1", "", 1),
        Host::new("a DGX without some", &[&dgx], "mlx5_9:1:0").at("^mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6", "", 0),
        Host::new("OCI", &[&of_oci.join("\n")], "mlx5_1:1:3, RoCE v2, 400 Gbit/s, 127.0.0.3").at(
            "auto",
            "127.0.0.2",
            0,
        ),
        Host::new(
            "Azure",
            &[&device("mlx5_an0", "ib", SLOW), &device("mlx5_ib0", "ib", INFINIBAND)],
            "mlx5_ib0:1:0, InfiniBand",
        ),
        Host::new("EFA", &[&device("rdmap0s6", "unspecified", INFINIBAND)], "rdmap0s6: EFA, which has no reliable"),
        Host::new("an E810 with iWARP", &[&device("irdma0", "iwarp", SLOW)], "irdma0: iWARP, which has no write with"),
        Host::new(
            "an E810 whose second port has RoCE",
            &[&device("irdma0", "iwarp", SLOW), &device("rocep1s0f1", "ib", SLOW)],
            "rocep1s0f1:1:3, RoCE v2, 25 Gbit/s, 127.0.0.2",
        ),
        Host::new("a Broadcom card", &[&bnxt], "bnxt_re0:1:3, RoCE v2"),
        Host::new("a bond", &[&device("mlx5_bond_0", "ib", SLOW)], "mlx5_bond_0:1:3, RoCE v2"),
        Host::new("a pod", &[&device("mlx5_2", "ib", &pod)], "mlx5_2:1:5, RoCE v2, 400 Gbit/s, 127.0.0.9"),
        Host::new("a pod that names another's address", &[&device("mlx5_2", "ib", &pod)], "mlx5_2:1:7").at(
            "mlx5_2:1:7",
            "",
            0,
        ),
        Host::new(
            "a pod without an address",
            &[&device("mlx5_2", "ib", "port active ethernet 128x2 lid=0 flags=0\ngid 3 roce2 10.0.0.5")],
            "addresses of other network namespaces",
        ),
        Host::new(
            "IPv6 alone",
            &[&device("mlx5_0", "ib", &format!("{ROCE}\ngid 3 roce2 ::1"))],
            "mlx5_0:1:3, RoCE v2, 400 Gbit/s, ::1",
        ),
        Host::new("a port that is down", &[&device("mlx5_0", "ib", &format!("{DOWN}\n{INFINIBAND}"))], "mlx5_0:2:0"),
        Host::new("ports that are down", &[&device("mlx5_0", "ib", DOWN)], "mlx5_0:1 is not active (state 1)"),
        Host::new(
            "RoCE version 1",
            &[&device("mlx4_0", "ib", "port active ethernet 32x1 lid=0 flags=0\ngid 0 roce1 127.0.0.2")],
            "mlx4_0:1 has 1 addresses; expected one of InfiniBand or of RoCE version 2",
        ),
        Host::new(
            "an address beyond the 256th",
            &[&device("mlx5_0", "ib", &format!("{ROCE}\ngid 256 roce2 127.0.0.2"))],
            "mlx5_0:1:1",
        ),
        Host::new("more addresses than 512", &[&device("mlx5_0", "ib", &many)], "mlx5_0:1:255"),
        Host::new("an old library", &[&old], "mlx5_0:1:3, RoCE v2").old(),
        Host::new("an old library and InfiniBand", &[&device("mlx4_0", "ib", INFINIBAND)], "mlx4_0:1:0, Infini").old(),
        Host::new("no device", &[], "none has an active port"),
    ]
}

/// Hosts whose environment says how verbs are used.
fn hosts_with_variables() -> Vec<Host> {
    let dgx = dgx().join("\n");
    let pod = device("mlx5_2", "ib", &format!("{ROCE}\ngid 3 roce2 10.0.0.5\ngid 5 roce2 127.0.0.9"));
    vec![
        Host::new("a DGX with NCCL's list", &[&dgx], "mlx5_4:1:0").with("NCCL_IB_HCA", "=mlx5_4,mlx5_5"),
        Host::new("a DGX without NCCL's list", &[&dgx], "mlx5_3:1:0").with("NCCL_IB_HCA", "^mlx5_0,mlx5_1"),
        Host::new("a list beside NCCL's", &[&dgx], "mlx5_6:1:0").with("NCCL_IB_HCA", "=mlx5_4").at("mlx5_6", "", 0),
        Host::new("a DGX without NCCL's verbs", &[&dgx], "off by a variable of NCCL").with("NCCL_IB_DISABLE", "1"),
        Host::new("a pod with an index", &[&pod], "mlx5_2:1:5").with("NCCL_IB_GID_INDEX", "5"),
        Host::new("a host whose index is of RoCE", &[&dgx], "mlx5_0:1:0").with("NCCL_IB_GID_INDEX", "3"),
        Host::new("a card without that index", &[&pod], "found no address 9").with("UCX_IB_GID_INDEX", "9"),
        Host::new("a DGX with a prefix", &[&dgx], "mlx5_0:1:0").with("NCCL_IB_HCA", "mlx5"),
        Host::new("a DGX with UCX over TCP", &[&dgx], "mlx5_0:1:0").with("UCX_NET_DEVICES", "eth0"),
    ]
}

/// The false library, made with the tests; without it, the named test is reported as skipped.
pub(super) fn library(test: &str) -> Option<PathBuf> {
    let tests = std::env::current_exe().expect("a test has a path");
    let made =
        tests.parent().and_then(Path::parent).expect("tests are in a folder").join("examples/libfalse_ibverbs.so");
    if !made.exists() {
        skip(test, &format!("{} is not there, which `cargo build --examples` makes", made.display()));
        return None;
    }
    Some(made)
}

/// Runs the test again in a process for which the library is libibverbs.
pub(super) fn run_again(test: &str, (library, folder): (&Path, &Path), host: &Host) -> String {
    let table = folder.join("table");
    fs::write(&table, &host.table).expect("the table can be written");
    let link = folder.join("libibverbs.so.1");
    let _ = fs::remove_file(&link);
    if host.lacks.is_empty() {
        symlink(library, &link).expect("it is not there");
    } else {
        // The name of a function that the library lacks becomes another one.
        let mut bytes = fs::read(library).expect("the library can be read");
        for name in host.lacks {
            let name = [name.as_bytes(), &[0]].concat();
            let places: Vec<_> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(&name)).collect();
            assert!(!places.is_empty(), "the library has the name");
            places.into_iter().for_each(|at| bytes[at + 1] = b'x');
        }
        fs::write(&link, bytes).expect("the library can be written");
    }
    let (choice, local, turn) = host.place;
    let ended = Command::new(std::env::current_exe().expect("a test has a path"))
        .args(["--exact", test, "--nocapture"])
        .env("LD_LIBRARY_PATH", folder)
        .env(host.variable.0, host.variable.1)
        .env("PSERVER_FALSE_IBVERBS", &table)
        .env("PSERVER_FALSE_IBVERBS_LOG", folder.join("log"))
        .env("HOST_PLACE", format!("{choice} {turn} {local}"))
        .output()
        .expect("the test can run");
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(ended.status.success(), "{}: {said}{}", host.about, String::from_utf8_lossy(&ended.stderr));
    said
}

/// The settings of this process.
fn fabric() -> FabricSettings {
    FabricSettings::find(&FabricOption::default(), &|name| std::env::var(name).ok()).expect("they are right").0
}

/// In such a process: the place that was asked for.
pub(super) fn asked() -> Option<(VerbsDevices, ConnectionPlace)> {
    let text = std::env::var("HOST_PLACE").ok()?;
    let mut words = text.split(' ');
    let choice: DeviceChoice = words.next()?.parse().expect("it is a choice");
    let turn = words.next()?.parse().expect("it is a number");
    let local = words.next().filter(|text| !text.is_empty()).map(|text| text.parse().expect("it is an address"));
    Some((VerbsDevices::from(&choice), ConnectionPlace { local, turn, ..ConnectionPlace::default() }))
}

#[test]
fn every_host_selects_the_expected_device() {
    if let Some((devices, place)) = asked() {
        let found = find(&devices, &fabric(), &place).map(|device| device.name().to_owned());
        return println!("<{}>", found.unwrap_or_else(|fault| fault.to_string()));
    }
    let test = "verbs::tests::hosts::every_host_selects_the_expected_device";
    let Some(library) = library(test) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let types = folder.path().join("ports/1/gid_attrs/types");
    fs::create_dir_all(&types).expect("it is new");
    for (index, kind) in [(0, "IB/RoCE v1"), (1, "RoCE v2"), (3, "RoCE v2")] {
        fs::write(types.join(index.to_string()), format!("{kind}\n")).expect("it can be written");
    }
    let hosts: Vec<_> = hosts(folder.path()).into_iter().chain(hosts_with_variables()).collect();
    for host in &hosts {
        let said = run_again(test, (&library, folder.path()), host);
        assert!(said.contains(host.expected), "{}: {said}; expected {}", host.about, host.expected);
    }
}

#[test]
fn a_device_is_opened_once_per_process() {
    if asked().is_some() {
        let link = PairAddress {
            number: 1,
            packet: 1,
            gid: std::net::Ipv6Addr::LOCALHOST.octets(),
            lid: 1,
            mtu: 5,
            reads_in: 1,
            layer: LinkLayer::Ethernet,
        };
        for turn in 0..10 {
            let place = ConnectionPlace { turn, ..ConnectionPlace::default() };
            find(&VerbsDevices::Best, &FabricSettings::default(), &place).expect("there are cards");
            let refused = find(
                &VerbsDevices::Best,
                &FabricSettings::default(),
                &ConnectionPlace { link: PeerLink::of(&link), ..place },
            );
            let text = refused.map(drop).expect_err("no card has such an address").to_string();
            assert!(text.contains("the peer has RoCE v2 with the address ::1, found mlx5_1:1:3"), "{text}");
        }
        return;
    }
    let test = "verbs::tests::hosts::a_device_is_opened_once_per_process";
    let Some(library) = library(test) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let host = Host::new("a DGX", &[&dgx().join("\n")], "");
    run_again(test, (&library, folder.path()), &host);
    let log = fs::read_to_string(folder.path().join("log")).expect("cards were opened");
    let mut lines: Vec<_> = log.lines().collect();
    let count = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!((count, lines.len()), (10, 10), "{log}");
    assert!(lines.iter().all(|line| line.starts_with("open ")), "{log}");
}

/// A kernel that copies registered pages at a fork needs no preparation. Any other kernel gets it, and is named.
#[test]
fn a_kernel_before_5_12_is_prepared_for_forks_and_named() {
    if let Some((devices, place)) = asked() {
        find(&devices, &fabric(), &place).expect("there is a card");
        return println!("<{:?}>", VerbsDevice::fork_warning());
    }
    let test = "verbs::tests::hosts::a_kernel_before_5_12_is_prepared_for_forks_and_named";
    let Some(library) = library(test) else { return };
    for (kernel, calls, warning) in [("new", 0, "<None>"), ("old", 1, "<Some(\"the kernel does not copy registered")] {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let host =
            Host::new(kernel, &[&device("mlx5_0", "ib", SLOW)], warning).with("PSERVER_FALSE_IBVERBS_FORK", kernel);
        let said = run_again(test, (&library, folder.path()), &host);
        assert!(said.contains(warning), "{said}");
        let log = fs::read_to_string(folder.path().join("log")).expect("a card was opened");
        assert_eq!(log.lines().filter(|line| *line == "fork_init").count(), calls, "{kernel}: {log}");
    }
}

#[test]
fn a_port_outside_the_partition_is_not_used_and_is_reported() {
    if let Some((devices, place)) = asked() {
        let (usable, unusable) = VerbsDevice::survey(&fabric()).expect("there are cards");
        assert!(usable.len() == 1 && usable[0].starts_with("mlx5_1:1:0"), "{usable:?}");
        assert_eq!(unusable, ["mlx5_0:1: no partition with the key 0x8003; expected one of 0xffff, 0x8001"]);
        let found = find(&devices, &fabric(), &place).expect("one card is in the partition");
        return println!("<{}>", found.name());
    }
    let test = "verbs::tests::hosts::a_port_outside_the_partition_is_not_used_and_is_reported";
    let Some(library) = library(test) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let cards = [("mlx5_0", ["0xffff", "0x8001"]), ("mlx5_1", ["0xffff", "0x8003"])].map(|(name, keys)| {
        let sysfs = folder.path().join(name);
        fs::create_dir_all(sysfs.join("ports/1/pkeys")).expect("it is new");
        for (index, key) in keys.iter().enumerate() {
            let place = sysfs.join(format!("ports/1/pkeys/{index}"));
            fs::write(place, format!("{key}\n")).expect("it can be written");
        }
        format!("device {name} ib {}\n{INFINIBAND}", sysfs.display())
    });
    let host = Host::new("two partitions", &[&cards[0], &cards[1]], "<mlx5_1:1:0").with("PSERVER_RDMA_PKEY", "0x8003");
    let said = run_again(test, (&library, folder.path()), &host);
    assert!(said.contains(host.expected), "{said}");
}
