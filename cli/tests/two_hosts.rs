//! A job over two hosts: network namespaces that a pair of interfaces joins, each with an sshd of its own. They share
//! files and processes, but neither loopback nor shared-memory names, and the way between them can go down.

mod launching;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use launching::daemons::{TestHost, TestSsh, has, remote_processes, run_mark};
use launching::{ACCURACY_MIN, DIGITS, MarkedRun, PATIENCE, RunEnd, digits_folder, script};
use pserver_kernels::conformance::skips::skip;

/// Two network namespaces with an interface each. Dropping it removes them.
struct TwoHosts {
    names: [String; 2],
}

/// The addresses of either host.
const ADDRESSES: [[&str; 2]; 2] = [["10.77.7.1", "fd77:7::1"], ["10.77.7.2", "fd77:7::2"]];

impl TwoHosts {
    /// Two network namespaces; none where the kernel refuses them, which is reported as a skip.
    fn new() -> Option<Self> {
        if !has("two hosts", &["ip", "ssh", "ssh-keygen", "/usr/sbin/sshd"]) {
            return None;
        }
        static MADE: AtomicU32 = AtomicU32::new(0);
        let pair = format!("pserver-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let hosts = Self { names: ["a", "b"].map(|host| format!("{pair}{host}")) };
        let made = hosts.make();
        if let Err(why) = &made {
            skip("two hosts", &format!("no network namespaces: {why}"));
        }
        made.is_ok().then_some(hosts)
    }

    fn make(&self) -> Result<(), String> {
        let [first, second] = &self.names;
        ip(&["netns", "add", first])?;
        ip(&["netns", "add", second])?;
        ip(&["link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second])?;
        for (name, [four, six]) in self.names.iter().zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{four}/24"), "dev", "wire"])?;
            ip(&["-n", name, "addr", "add", &format!("{six}/64"), "dev", "wire", "nodad"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "wire", "up"])?;
        }
        Ok(())
    }

    /// The words before a command that runs on a host.
    fn within(&self, host: usize) -> [&str; 4] {
        ["ip", "netns", "exec", &self.names[host]]
    }

    /// An sshd on each.
    fn ssh(&self, folder: &Path) -> TestSsh {
        let (first, second) = (self.within(0), self.within(1));
        let host = |within, host: usize| TestHost { within, addresses: &ADDRESSES[host] };
        TestSsh::on_hosts(folder, &[host(&first, 0), host(&second, 1)])
    }

    /// `pserver launch` on the first host.
    fn launch(&self, folder: &Path, arguments: &[&str]) -> MarkedRun {
        let within = self.within(0);
        let mut command = Command::new(within[0]);
        command.args(&within[1..]).args([env!("CARGO_BIN_EXE_pserver"), "launch"]).args(arguments);
        command.current_dir(folder);
        MarkedRun::start(command)
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for name in &self.names {
            // The namespace may not exist. Its interfaces are removed with it.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| error.to_string())?;
    let text = format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    if output.status.success() { Ok(()) } else { Err(text) }
}

#[test]
fn a_job_by_ssh_trains_over_two_hosts_at_addresses_that_both_reach() {
    let Some(hosts) = TwoHosts::new() else { return };
    let folder = digits_folder();
    let ssh = hosts.ssh(folder.path());
    for version in 0..2 {
        let both = ADDRESSES.map(|addresses| addresses[version]);
        let job = ["--servers", "2", "--trainers", "4", "--hosts", &both.join(","), "--launcher", &ssh.command];
        let end = hosts.launch(folder.path(), &[&job, &DIGITS[..]].concat()).end();
        assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);
        for (server, address) in both.iter().enumerate() {
            let address = if version == 0 { format!("{address}:") } else { format!("[{address}]:") };
            assert!(end.output.contains(&format!("[server {server}] ready {address}")), "{}", end.output);
        }
        assert_eq!(end.errors, "");
    }
}

/// An `mpirun` that starts ranks in turn on both hosts, as `mpirun --map-by node` does.
fn mpirun_by_host(hosts: &TwoHosts, folder: &Path) -> [&'static str; 4] {
    let text = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\nn=$2; i=0\nwhile [ $i -lt $n ]; do\n\
         if [ $((i % 2)) = 0 ]; then host={}; else host={}; fi\n\
         PMI_RANK=$i PMI_SIZE=$n ip netns exec $host \"$3\" \"$4\" &\ni=$((i+1)); done\nwait\n",
        hosts.names[0], hosts.names[1]
    );
    script(folder, "mpirun-by-host", &text);
    ["--with", "mpirun", "--launcher", "./mpirun-by-host"]
}

#[test]
fn agents_by_mpirun_reach_the_launcher_on_another_host() {
    let Some(hosts) = TwoHosts::new() else { return };
    let folder = digits_folder();
    let mpirun = mpirun_by_host(&hosts, folder.path());
    let job = ["--servers", "2", "--trainers", "4"];
    let end = hosts.launch(folder.path(), &[&job, &mpirun[..], &DIGITS].concat()).end();
    assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);
    assert!(end.output.contains(&format!("[server 1] ready {}:", ADDRESSES[1][0])), "{}", end.output);
}

#[test]
fn servers_beside_the_trainers_come_to_the_same_model() {
    let Some(hosts) = TwoHosts::new() else { return };
    let folder = digits_folder();
    let ssh = hosts.ssh(folder.path());
    let both = ADDRESSES.map(|addresses| addresses[0]).join(",");
    let by_ssh = ["--hosts", &both, "--launcher", &ssh.command];
    let mpirun = mpirun_by_host(&hosts, folder.path());
    let run = |words: &[&str]| {
        let end = hosts.launch(folder.path(), &[&["--trainers", "2"], words, &DIGITS].concat()).end();
        assert!(end.accuracy(2) > ACCURACY_MIN, "{}", end.output);
        let model = std::fs::read(folder.path().join("model.safetensors")).expect("trainer 0 has saved it");
        (end, model)
    };
    let is_ready = |end: &RunEnd, server, host: usize| {
        end.output.contains(&format!("[server {server}] ready {}:", ADDRESSES[host][0]))
    };
    let (end, dedicated) = run(&[&by_ssh[..], &["--servers", "1"]].concat());
    assert!(is_ready(&end, 0, 0), "{}", end.output);
    for way in [&by_ssh[..], &mpirun] {
        let (end, model) = run(&[way, &["--colocate"]].concat());
        assert!(is_ready(&end, 0, 0) && is_ready(&end, 1, 1), "{}", end.output);
        assert!(!end.output.contains("[server 2]"), "{}", end.output);
        assert!(model == dedicated, "the model is not that of a job with a dedicated server");
    }
    let (end, model) = run(&[&by_ssh[..], &["--colocate", "--servers", "1"]].concat());
    assert!(is_ready(&end, 0, 1) && is_ready(&end, 1, 0), "{}", end.output);
    assert!(model == dedicated, "the model is not that of a job with a dedicated server");
}

#[test]
fn a_host_that_goes_down_is_named_and_the_job_ends_on_every_host() {
    let Some(hosts) = TwoHosts::new() else { return };
    let folder = tempfile::TempDir::new().expect("there is room");
    let ssh = hosts.ssh(folder.path());
    let both = ADDRESSES.map(|addresses| addresses[0]).join(",");
    let (mark, text) = (run_mark(), "touch at$PSERVER_TRAINER; exec sleep 1000");
    let job = ["--servers", "2", "--trainers", "2", "--hosts", &both, "--launcher", &ssh.command, "--env", &mark];
    let limits = ["--heartbeat-timeout", "2", "--grace", "0", "--", "sh", "-c", text];
    let run = hosts.launch(folder.path(), &[&job, &limits[..]].concat());
    let begun = Instant::now();
    while !["at0", "at1"].iter().all(|name| folder.path().join(name).exists()) {
        assert!(begun.elapsed() < PATIENCE, "{:?}", run.processes());
        std::thread::yield_now();
    }
    ip(&["-n", &hosts.names[1], "link", "set", "wire", "down"]).expect("it is up");
    let end = run.end();
    assert_eq!(end.status.code(), Some(1), "{end:?}");
    let expected = format!("pserver: host {}: silent for 2 s while server 1 ran: the host or", ADDRESSES[1][0]);
    assert!(end.errors.contains(&expected), "{end:?}");
    let begun = Instant::now();
    while !remote_processes(&mark).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "left on the host: {:?}", remote_processes(&mark));
        std::thread::yield_now();
    }
}
