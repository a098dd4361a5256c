//! Carriers: commands that start agents, on this machine, on a host by `ssh`, or on an allocation's nodes by `srun` or
//! `mpirun`.
//!
//! `srun` and `mpirun` start the agents of servers and those of trainers by a command each, so that trainers have an
//! MPI world of their own.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use pserver_client::launchers;

use super::agent::{VARIABLE, addresses};
use super::message::PartKind;
use super::{JobPart, LaunchArgs, LaunchEvent, LaunchSender};
use crate::own_program;

/// The means by which the parts of a job are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LaunchMethod {
    /// On this machine.
    Local,
    /// On the hosts of --hosts or --hostfile.
    Ssh,
    /// On the nodes of a Slurm allocation, as two steps: servers and trainers.
    Srun,
    /// By MPICH's or Open MPI's mpirun: servers and trainers.
    Mpirun,
}

/// A command that starts agents.
pub(super) struct Carrier {
    /// The name in errors and before its own output.
    pub(super) name: String,
    pub(super) child: Child,
    /// The parts of its agent; with `by_rank` each of its agents has the one of its rank.
    pub(super) parts: Vec<usize>,
    pub(super) by_rank: bool,
    /// Whether its agents may be on other machines, so that silence is the only sign of their loss.
    pub(super) is_remote: bool,
    /// The last line of its standard error.
    pub(super) last_error: String,
    /// Its outputs that are read here and have not ended.
    pub(super) outputs: usize,
    /// The time at which its end was noticed.
    pub(super) ended_at: Option<Instant>,
}

/// Time after a carrier's end in which its outputs may still end. Processes that it left may keep them.
const LAST_WORDS: Duration = Duration::from_millis(500);

impl Carrier {
    /// Its status, once it has ended and what it said is here; `is_open` says whether its agent's connection is open.
    pub(super) fn ended(&mut self, is_open: bool) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        let ended_at = *self.ended_at.get_or_insert_with(Instant::now);
        (self.outputs == 0 && !is_open || LAST_WORDS <= ended_at.elapsed()).then_some(status)
    }
}

/// Carriers before they are started: what each runs, and with which parts.
pub(super) struct CarrierPlan {
    name: String,
    command: Vec<String>,
    pub(super) parts: Vec<usize>,
    by_rank: bool,
    is_remote: bool,
}

/// Plans the carriers of these parts: dedicated servers, then trainers.
pub(super) fn plan(args: &LaunchArgs, planned: &[JobPart]) -> Result<Vec<CarrierPlan>> {
    let agent = agent_command()?;
    let all: Vec<usize> = (0..planned.len()).collect();
    match method(args)? {
        LaunchMethod::Local => {
            let name = "this machine".to_owned();
            Ok(vec![CarrierPlan { name, command: agent, parts: all, by_rank: false, is_remote: false }])
        }
        LaunchMethod::Ssh => on_hosts(args, planned, &agent),
        method => {
            let of = |kind: PartKind| -> Result<CarrierPlan> {
                let parts: Vec<usize> = all.iter().copied().filter(|part| planned[*part].kind == kind).collect();
                let command = scheduled(args, method, kind, parts.len(), &agent)?;
                let whose = if kind == PartKind::Server { "servers" } else { "trainers" };
                let name = format!("{} of {whose}", command[0].rsplit('/').next().unwrap_or_default());
                Ok(CarrierPlan { name, command, parts, by_rank: true, is_remote: true })
            };
            let servers = (0 < args.dedicated_servers()).then(|| of(PartKind::Server)).transpose()?;
            Ok(servers.into_iter().chain([of(PartKind::Trainer)?]).collect())
        }
    }
}

/// The method, from the arguments or from the allocation around this process.
fn method(args: &LaunchArgs) -> Result<LaunchMethod> {
    let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let step = |(size, task): &(&'static str, &str)| {
        variable(size).filter(|_| variable(task).is_some()).filter(|text| text != "1").map(|text| (*size, text))
    };
    let steps = [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ];
    if let Some((size, text)) = steps.iter().find_map(step) {
        bail!("found {size}={text}: this is one of several tasks; expected pserver launch once, before srun or mpirun");
    }
    let by_hosts = args.hosts.is_some() || args.hostfile.is_some();
    let in_slurm = variable("SLURM_JOB_ID").is_some();
    let by_allocation =
        ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"].iter().any(|name| variable(name).is_some());
    let found = match args.with {
        Some(method) => method,
        None if by_hosts => LaunchMethod::Ssh,
        None if in_slurm => LaunchMethod::Srun,
        None if by_allocation => LaunchMethod::Mpirun,
        None => LaunchMethod::Local,
    };
    ensure!(found == LaunchMethod::Ssh || !by_hosts, "--with {found:?}: found hosts; expected --with ssh for them");
    ensure!(found != LaunchMethod::Ssh || by_hosts, "--with ssh: found no hosts; expected --hosts or --hostfile");
    ensure!(
        found != LaunchMethod::Srun || in_slurm,
        "--with srun: found no allocation (SLURM_JOB_ID is not set); expected salloc or sbatch around this command"
    );
    ensure!(
        found != LaunchMethod::Local || args.launcher.is_none(),
        "--launcher: expected ssh, srun or mpirun with it"
    );
    Ok(found)
}

fn agent_command() -> Result<Vec<String>> {
    let program = own_program::path()?;
    let program = program.into_os_string().into_string();
    let program = program.map_err(|path| anyhow::anyhow!("{}: expected a path in UTF-8", path.display()))?;
    Ok(vec![program, "launch-agent".to_owned()])
}

/// The words of --launcher, or its default.
fn launcher_words(args: &LaunchArgs, default: &str) -> Result<Vec<String>> {
    let text = args.launcher.as_deref().unwrap_or(default);
    let words = shlex::split(text).filter(|words| !words.is_empty());
    words.with_context(|| format!("--launcher {text:?}: expected a command, with quotes in pairs"))
}

fn scheduled(
    args: &LaunchArgs,
    method: LaunchMethod,
    kind: PartKind,
    count: usize,
    agent: &[String],
) -> Result<Vec<String>> {
    let is_srun = method == LaunchMethod::Srun;
    let mut words = launcher_words(args, if is_srun { "srun" } else { "mpirun" })?;
    // An agent that is bound to the processors of its trainer would bind its server to them too.
    let is_unbound = |option: &str| args.colocate && !words.iter().any(|word| word.contains(option));
    let mut more = if is_srun {
        let nodes = std::env::var("SLURM_JOB_NUM_NODES").ok().and_then(|text| text.parse().ok()).unwrap_or(1_usize);
        // Dedicated servers beside colocated ones get the last nodes, if some are left for trainers.
        let apart = if args.colocate { usize::from(args.dedicated_servers()) } else { 0 };
        ensure!(
            apart < nodes,
            "--colocate --servers {apart}: found {nodes} nodes; expected more, as dedicated servers have one each"
        );
        let (first, nodes) =
            if kind == PartKind::Server && 0 < apart { (nodes - apart, apart) } else { (0, nodes - apart) };
        let (tasks, size) = (format!("--ntasks={count}"), format!("--nodes={}", count.min(nodes)));
        let mut more = vec!["--overlap".to_owned(), "--input=none".to_owned(), tasks, size];
        more.extend(is_unbound("cpu-bind").then(|| "--cpu-bind=none".to_owned()));
        more.extend((0 < first).then(|| format!("--relative={first}")));
        more
    } else {
        let mut more = vec!["-n".to_owned(), count.to_string()];
        if is_open_mpi(&words[0])? {
            more.extend(["-x".to_owned(), VARIABLE.to_owned()]);
            if is_unbound("bind-to") {
                more.extend(["--bind-to", "none"].map(str::to_owned));
            }
        }
        more
    };
    words.append(&mut more);
    words.extend_from_slice(agent);
    Ok(words)
}

fn is_open_mpi(program: &str) -> Result<bool> {
    let version = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let version = version.with_context(|| format!("{program} cannot be started; expected the mpirun of an MPI"))?;
    Ok(String::from_utf8_lossy(&version.stdout).contains("Open MPI"))
}

/// The hosts of --hosts and --hostfile, with the bracket forms of node lists.
fn hosts(args: &LaunchArgs) -> Result<Vec<String>> {
    let mut all = Vec::new();
    if let Some(list) = &args.hosts {
        ensure!(
            !list.trim().is_empty(),
            "--hosts {list:?}: found no host; expected one or more, such as a,b or n[01-04]"
        );
        all = launchers::nodes(list).map_err(|why| anyhow::anyhow!("--hosts {list:?}: {why}"))?;
    }
    if let Some(path) = &args.hostfile {
        let text = std::fs::read_to_string(path).with_context(|| format!("--hostfile {}", path.display()))?;
        let words = text
            .trim_start_matches('\u{feff}')
            .lines()
            .filter_map(|line| line.split('#').next()?.split_whitespace().next());
        all.extend(words.map(str::to_owned));
        ensure!(!all.is_empty(), "--hostfile {}: found no host; expected one in each line", path.display());
    }
    for (place, host) in all.iter().enumerate() {
        ensure!(!all[..place].contains(host), "host {host} is given twice; expected once");
        ensure!(!host.starts_with('-'), "host {host:?}: expected a name without a dash before it");
        ensure!(!host.contains(char::is_whitespace), "host {host:?}: found a blank; expected commas between hosts");
        let port = host.split_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        if let Some((name, port)) = port {
            bail!("host {host:?}: found a port; expected {name}, with --launcher 'ssh -p {port}' or in ~/.ssh/config");
        }
    }
    Ok(all)
}

/// Servers in turn over the hosts, trainers in equal blocks; where servers are colocated, the dedicated ones get the
/// last hosts.
fn on_hosts(args: &LaunchArgs, planned: &[JobPart], agent: &[String]) -> Result<Vec<CarrierPlan>> {
    let hosts = hosts(args)?;
    let servers = usize::from(args.dedicated_servers());
    let trainers = planned.len() - servers;
    let apart = if args.colocate { servers } else { 0 };
    ensure!(
        apart < hosts.len(),
        "--colocate --servers {apart}: found {} hosts; expected more than dedicated servers, which have a host each",
        hosts.len()
    );
    let shared = hosts.len() - apart;
    let mut words = launcher_words(args, "ssh")?;
    words.extend(["-o", "BatchMode=yes", "-o"].map(str::to_owned));
    words.push(format!("ConnectTimeout={}", args.limits.connect_timeout));
    let remote = shlex::try_join(agent.iter().map(String::as_str)).context("the path of this program")?;
    let host_of = |part: &JobPart| match part.kind {
        PartKind::Server if args.colocate => shared + part.index,
        PartKind::Server => part.index % hosts.len(),
        PartKind::Trainer => part.index * shared / trainers,
    };
    let of = |(place, host): (usize, &String)| CarrierPlan {
        name: format!("host {host}"),
        command: [&words[..], &["--".to_owned(), host.clone(), format!("exec {remote}")]].concat(),
        parts: (0..planned.len()).filter(|part| host_of(&planned[*part]) == place).collect(),
        by_rank: false,
        is_remote: true,
    };
    Ok(hosts.iter().enumerate().map(of).filter(|plan| !plan.parts.is_empty()).collect())
}

/// The IPv4 addresses of this machine's interfaces.
fn interfaces() -> impl Iterator<Item = IpAddr> {
    let all = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|interface| interface.address);
    all.filter_map(|address| address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip())))
}

/// Where agents that a scheduler started connect to.
pub(super) struct AgentDoor {
    listener: TcpListener,
    addresses: String,
}

impl AgentDoor {
    /// Listens where the nodes of the allocation reach this process.
    pub(super) fn open(args: &LaunchArgs) -> Result<Self> {
        let several = |name: &str| std::env::var(name).is_ok_and(|text| text != "1");
        let named = ["host", "machinefile", "-f"];
        let words = args.launcher.as_deref().unwrap_or_default();
        let is_wide = several("SLURM_JOB_NUM_NODES")
            || ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"].iter().any(|name| several(name))
            || named.iter().any(|word| words.contains(word));
        let address = if is_wide { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        let listener = TcpListener::bind((address, 0)).context("listening for agents")?;
        let port = listener.local_addr().context("listening for agents")?.port();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mut all: Vec<IpAddr> = Vec::new();
        if is_wide {
            // A host's name may stand for loopback alone.
            let named = addresses(host.trim()).into_iter().chain(interfaces());
            named.filter(|address| !address.is_loopback()).for_each(|one| {
                if !all.contains(&one) {
                    all.push(one)
                }
            });
        }
        all.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let all: Vec<String> = all.iter().map(|address| SocketAddr::new(*address, port).to_string()).collect();
        Ok(Self { listener, addresses: all.join(" ") })
    }

    /// Passes on each connection.
    pub(super) fn listen(&self, sender: LaunchSender) -> Result<()> {
        let listener = self.listener.try_clone().context("listening for agents")?;
        let accept = move || {
            for stream in listener.incoming().flatten() {
                if sender.send(LaunchEvent::Connected(stream)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("launch-door".to_owned()).spawn(accept).context("cannot start a thread")?;
        Ok(())
    }
}

impl CarrierPlan {
    /// Starts the command, and passes on the lines of its standard error, with a door of its standard output too.
    pub(super) fn start(
        self,
        carrier: usize,
        door: Option<(&AgentDoor, &str)>,
        sender: &LaunchSender,
    ) -> Result<Carrier> {
        let Self { name, command, parts, by_rank, is_remote } = self;
        let mut process = Command::new(&command[0]);
        process.args(&command[1..]).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        match door {
            Some((door, secret)) => {
                process.stdin(Stdio::null()).env(VARIABLE, format!("{carrier} {secret} {}", door.addresses))
            }
            None => process.stdin(Stdio::piped()).env_remove(VARIABLE),
        };
        let child = process.spawn();
        let mut child = child.with_context(|| format!("{name}: {} cannot be started", command[0]))?;
        let mut outputs = 1;
        if door.is_some() {
            pass_on(child.stdout.take().expect("it is a pipe"), carrier, sender)?;
            outputs += 1;
        }
        pass_on(child.stderr.take().expect("it is a pipe"), carrier, sender)?;
        Ok(Carrier { name, child, parts, by_rank, is_remote, last_error: String::new(), outputs, ended_at: None })
    }

    /// Whether its agents connect by themselves.
    pub(super) fn needs_door(&self) -> bool {
        self.by_rank
    }
}

/// Passes on the lines of a carrier's own output, and its end.
fn pass_on<R: Read + Send + 'static>(source: R, carrier: usize, sender: &LaunchSender) -> Result<()> {
    let sender = sender.clone();
    let pass = move || {
        for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).into_owned();
            if sender.send(LaunchEvent::CarrierLine { carrier, text }).is_err() {
                return;
            }
        }
        // The launcher may have ended before.
        let _ = sender.send(LaunchEvent::CarrierSilent { carrier });
    };
    thread::Builder::new().name(format!("carrier-{carrier}")).spawn(pass).context("cannot start a thread")?;
    Ok(())
}
