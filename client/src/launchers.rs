//! Launchers: programs that start the processes of a job and number them in variables of the environment.
//!
//! `LAUNCHERS` is the table of these variables. It begins with the innermost launcher: `mpirun` within a Slurm step
//! numbers the processes that it starts, and Slurm's number there is that of the step's task. The first launcher with a
//! value gives it. Values that cannot both be true are an error that names both.
//!
//! Not here: options, files and defaults, which stand beside these variables ([`crate::environment`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use pserver_core::error::Failure;
use pserver_core::text::shown;

/// The port of server 0 where only its host is known: the first that Paddle's servers took.
pub const PORT_DEFAULT: &str = "7164";
/// Most hosts of a node list: those of the largest machines, times ten.
const NODES_MAX: usize = 100_000;

/// The variables of one launcher. Of several in a list the first that is set and not empty counts.
struct Launcher {
    name: &'static str,
    /// A trainer's rank.
    rank: &'static [&'static str],
    /// Trainers in the job, which are those that `rank` counts.
    size: &'static [&'static str],
    /// A server's index.
    index: &'static [&'static str],
    /// Servers in the job.
    servers: &'static [&'static str],
    address: AddressVariables,
    /// A variable without which the rank is of a surrounding process, which may have started this one.
    task: Option<&'static str>,
}

/// Variables from which the address of server 0 follows.
enum AddressVariables {
    None,
    /// The address.
    Address(&'static str),
    /// Hosts with commas between them, of which the first is that of server 0, and the variable of the port.
    Hosts(&'static str, &'static str),
    /// The host on which rank 0 runs, and by assumption server 0.
    Host(&'static str),
    /// A node list of Slurm, of which the first node is by assumption that of server 0.
    Nodes(&'static [&'static str]),
}

const NOTHING: Launcher =
    Launcher { name: "", rank: &[], size: &[], index: &[], servers: &[], address: AddressVariables::None, task: None };

/// Launchers whose variables a person or this project's own programs set: no other launcher contradicts them.
const EXPLICIT: usize = 2;

const LAUNCHERS: [Launcher; 9] = [
    Launcher {
        name: "pserver",
        rank: &["PSERVER_TRAINER"],
        size: &["PSERVER_TRAINERS"],
        index: &["PSERVER_INDEX"],
        servers: &["PSERVER_SERVERS"],
        address: AddressVariables::Address("PSERVER_COORDINATOR"),
        ..NOTHING
    },
    Launcher {
        name: "PaddlePaddle",
        rank: &["PADDLE_TRAINER_ID"],
        size: &["PADDLE_TRAINERS_NUM"],
        address: AddressVariables::Hosts("PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT"),
        ..NOTHING
    },
    Launcher {
        name: "ps-lite",
        rank: &["DMLC_WORKER_ID", "DMLC_RANK"],
        size: &["DMLC_NUM_WORKER"],
        index: &["DMLC_SERVER_ID"],
        servers: &["DMLC_NUM_SERVER"],
        address: AddressVariables::Hosts("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
        ..NOTHING
    },
    Launcher {
        name: "torchrun",
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        address: AddressVariables::Host("MASTER_ADDR"),
        ..NOTHING
    },
    Launcher { name: "Open MPI", rank: &["OMPI_COMM_WORLD_RANK"], size: &["OMPI_COMM_WORLD_SIZE"], ..NOTHING },
    Launcher { name: "MPICH", rank: &["PMI_RANK"], size: &["PMI_SIZE"], ..NOTHING },
    Launcher { name: "PMIx", rank: &["PMIX_RANK"], ..NOTHING },
    Launcher {
        name: "Slurm",
        rank: &["SLURM_PROCID"],
        size: &["SLURM_NTASKS", "SLURM_NPROCS"],
        address: AddressVariables::Nodes(&["SLURM_JOB_NODELIST", "SLURM_NODELIST"]),
        task: Some("SLURM_STEP_ID"),
        ..NOTHING
    },
    Launcher { name: "Kubernetes", rank: &["JOB_COMPLETION_INDEX"], ..NOTHING },
];

/// The part of a process in a job of ps-lite.
const ROLE: &str = "DMLC_ROLE";
/// The host of a process in a job of ps-lite, as the others reach it.
const NODE_HOST: &str = "DMLC_NODE_HOST";

/// The network interface of a process in a job of ps-lite, such as `eth0`: where others reach it.
const NODE_INTERFACE: &str = "DMLC_INTERFACE";

/// A variable of a launcher that is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherVariable {
    /// The launcher's name, such as `Slurm`.
    pub launcher: &'static str,
    /// The setting that the variable is for: `trainer`, `trainers`, `index`, `servers` or `coordinator`.
    pub setting: &'static str,
    /// The variable.
    pub name: &'static str,
    /// Its text.
    pub text: String,
}

/// A setting's text from a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherValue {
    /// The value.
    pub text: String,
    /// The variables that it is from.
    pub origin: String,
    /// Position of the launcher in the table.
    launcher: usize,
}

/// The variables of launchers in one process's environment. `variable` gives the text of a variable that is set.
pub struct Launchers<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Launchers<'a> {
    /// The launchers of an environment.
    #[must_use]
    pub fn new(variable: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { variable }
    }

    /// Every variable of the table that is set, in the order of precedence, for a person to read.
    #[must_use]
    pub fn variables(&self) -> Vec<LauncherVariable> {
        let of = |launcher: &Launcher| {
            let lists = [
                ("coordinator", launcher.address.names()),
                ("trainer", launcher.rank.to_vec()),
                ("trainers", launcher.size.to_vec()),
                ("index", launcher.index.to_vec()),
                ("servers", launcher.servers.to_vec()),
            ];
            let named =
                lists.into_iter().flat_map(|(setting, names)| names.into_iter().map(move |name| (setting, name)));
            let set = |(setting, name)| Some((setting, name, self.text(name)?));
            let name = launcher.name;
            let made = |(setting, variable, text)| LauncherVariable { launcher: name, setting, name: variable, text };
            named.filter_map(set).map(made).collect::<Vec<_>>()
        };
        LAUNCHERS.iter().flat_map(of).collect()
    }

    /// The rank of a trainer.
    ///
    /// # Errors
    /// Two launchers number the same count of processes in different orders; or the process is no worker of ps-lite.
    pub fn rank(&self) -> Result<Option<LauncherValue>, Failure> {
        let Some(rank) = self.first(|launcher| launcher.rank) else { return Ok(None) };
        self.check_role("worker")?;
        if EXPLICIT <= rank.launcher {
            self.check_numbering(&rank)?;
        }
        Ok(Some(rank))
    }

    /// The number of trainers: that of `PSERVER_TRAINERS`, else of the launcher that gave the rank.
    #[must_use]
    pub fn size(&self, rank: Option<&LauncherValue>) -> Option<LauncherValue> {
        let explicit = || self.of(0, |launcher| launcher.size);
        explicit().or_else(|| match rank {
            Some(rank) => self.of(rank.launcher, |launcher| launcher.size),
            None => None,
        })
    }

    /// The rank as a server's index, the number of servers and of trainers, as ps-lite's processes have them; the rank
    /// of another launcher is an index where several `servers` are configured.
    ///
    /// # Errors
    /// The process is no server of ps-lite.
    pub fn of_server(&self, setting: &str, servers: Option<&str>) -> Result<Option<LauncherValue>, Failure> {
        let of_ps_lite = |names: fn(&Launcher) -> &'static [&'static str]| {
            let found = self.first(names).filter(|found| LAUNCHERS[found.launcher].name == "ps-lite");
            found.map_or(Ok(None), |found| self.check_role("server").map(|()| Some(found)))
        };
        match setting {
            "servers" => of_ps_lite(|launcher| launcher.servers),
            "trainers" => of_ps_lite(|launcher| launcher.size),
            "index" => {
                let of_ps_lite = of_ps_lite(|launcher| launcher.index)?;
                let is_one_of_several = servers.and_then(|text| text.trim().parse::<u16>().ok()).unwrap_or(1) > 1;
                let rank = || self.first(|launcher| launcher.rank).filter(|rank| EXPLICIT <= rank.launcher);
                let rank = || rank().filter(|rank| LAUNCHERS[rank.launcher].name != "ps-lite" && is_one_of_several);
                Ok(of_ps_lite.or_else(rank))
            }
            _ => Ok(None),
        }
    }

    /// The address of server 0, as a launcher says it.
    #[must_use]
    pub fn address(&self) -> Option<LauncherValue> {
        LAUNCHERS.iter().enumerate().find_map(|(launcher, row)| match row.address {
            AddressVariables::Address(name) => {
                Some(LauncherValue { text: self.text(name)?, origin: name.to_owned(), launcher })
            }
            AddressVariables::Hosts(hosts, port) => self.host_and_port(hosts, port, launcher),
            _ => None,
        })
    }

    /// Where a server of ps-lite listens, as its users expect. Server 0 is the scheduler too, and listens at the
    /// address that all processes are given; another server at a port of the system's choice, of `DMLC_NODE_HOST`, of
    /// the interface `DMLC_INTERFACE`, or of the interface on the way to server 0. Nothing where another launcher gives
    /// server 0's address.
    ///
    /// # Errors
    /// The process is no server of ps-lite, has no such interface, or finds no way to server 0.
    pub fn bind_address(&self, is_first: bool) -> Result<Option<LauncherValue>, Failure> {
        let of_ps_lite = |found: &LauncherValue| LAUNCHERS[found.launcher].name == "ps-lite";
        let Some(root) = self.address().filter(of_ps_lite) else { return Ok(None) };
        self.check_role("server")?;
        if is_first {
            return Ok(Some(root));
        }
        if let Some(host) = self.text(NODE_HOST) {
            let (text, origin) = (format!("{}:0", in_brackets(&host)), NODE_HOST.to_owned());
            return Ok(Some(LauncherValue { text, origin, ..root }));
        }
        if let Some(name) = self.text(NODE_INTERFACE) {
            let text = SocketAddr::new(interface_address(&name)?, 0).to_string();
            return Ok(Some(LauncherValue { text, origin: NODE_INTERFACE.to_owned(), ..root }));
        }
        let near = near_end(&root.text).map_err(|error| {
            let LauncherValue { text, origin, .. } = &root;
            let text = shown(text);
            Failure::call(format!("{origin} is \"{text}\": {error}; expected an address that this host reaches"))
        })?;
        Ok(Some(LauncherValue { text: SocketAddr::new(near.ip(), 0).to_string(), ..root }))
    }

    /// The address of server 0 by the assumption that it runs on the first host: for jobs without any other.
    ///
    /// # Errors
    /// The node list cannot be read.
    pub fn assumed_address(&self) -> Result<Option<LauncherValue>, Failure> {
        for (launcher, row) in LAUNCHERS.iter().enumerate() {
            let found = match row.address {
                AddressVariables::Host(name) => self.text(name).map(|host| (host, name.to_owned())),
                AddressVariables::Nodes(names) => match names.iter().find_map(|name| Some((*name, self.text(name)?))) {
                    Some((name, list)) => Some(first_node(name, &list)?),
                    None => None,
                },
                _ => None,
            };
            if let Some((host, origin)) = found {
                let text = format!("{}:{PORT_DEFAULT}", in_brackets(&host));
                return Ok(Some(LauncherValue { text, origin, launcher }));
            }
        }
        Ok(None)
    }

    /// A variable that is set and not empty.
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn first(&self, names: fn(&Launcher) -> &'static [&'static str]) -> Option<LauncherValue> {
        (0..LAUNCHERS.len()).find_map(|launcher| self.of(launcher, names))
    }

    fn of(&self, launcher: usize, names: fn(&Launcher) -> &'static [&'static str]) -> Option<LauncherValue> {
        let named = |name: &&str| Some(LauncherValue { text: self.text(name)?, origin: (*name).to_owned(), launcher });
        names(&LAUNCHERS[launcher]).iter().find_map(named)
    }

    /// The first host of a list with the port from another variable, unless the host has its own.
    fn host_and_port(&self, hosts: &str, port: &str, launcher: usize) -> Option<LauncherValue> {
        let list = self.text(hosts)?;
        let host = list.split(',').next().unwrap_or_default().trim();
        if host.contains(':') && !host.ends_with(']') && host.parse::<Ipv6Addr>().is_err() {
            return Some(LauncherValue { text: host.to_owned(), origin: hosts.to_owned(), launcher });
        }
        let (number, origin) = match self.text(port) {
            Some(number) => (number, format!("{hosts} and {port}")),
            None => (PORT_DEFAULT.to_owned(), hosts.to_owned()),
        };
        Some(LauncherValue { text: format!("{}:{number}", in_brackets(host)), origin, launcher })
    }

    fn check_role(&self, expected: &str) -> Result<(), Failure> {
        match self.text(ROLE) {
            Some(role) if role != expected => {
                let role = shown(&role);
                let more = if role == "scheduler" { "; server 0 is the scheduler too, so none is started" } else { "" };
                Err(Failure::call(format!("{ROLE} is \"{role}\"; expected {expected} in this process{more}")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a rank beside that of an outer launcher which counts as many processes and numbers this one otherwise.
    /// Where the counts differ, the outer launcher started the inner one, and numbers other processes.
    fn check_numbering(&self, rank: &LauncherValue) -> Result<(), Failure> {
        let size = |launcher| self.of(launcher, |row| row.size).and_then(|size| size.text.parse::<u32>().ok());
        let Some(count) = size(rank.launcher).filter(|count| *count > 1) else { return Ok(()) };
        for (launcher, row) in LAUNCHERS.iter().enumerate().skip(rank.launcher + 1) {
            let is_task = row.task.is_none_or(|task| self.text(task).is_some());
            let other = self.of(launcher, |row| row.rank).filter(|_| is_task && size(launcher) == Some(count));
            if let Some(other) = other.filter(|other| other.text != rank.text) {
                return Err(Failure::call(format!(
                    "trainer (from {}) is \"{}\" and (from {}) \"{}\", each of {count}: expected one rank; \
                     PSERVER_TRAINER has precedence over both",
                    rank.origin,
                    shown(&rank.text),
                    other.origin,
                    shown(&other.text)
                )));
            }
        }
        Ok(())
    }
}

impl AddressVariables {
    fn names(&self) -> Vec<&'static str> {
        match *self {
            Self::None => vec![],
            Self::Address(name) | Self::Host(name) => vec![name],
            Self::Hosts(hosts, port) => vec![hosts, port],
            Self::Nodes(names) => names.to_vec(),
        }
    }
}

/// A host before a port: an IPv6 address has brackets there.
fn in_brackets(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// The address of a network interface; of several IPv4 comes first.
fn interface_address(name: &str) -> Result<IpAddr, Failure> {
    let all: Vec<_> = nix::ifaddrs::getifaddrs().into_iter().flatten().collect();
    let of = |interface: &&nix::ifaddrs::InterfaceAddress| interface.interface_name == name;
    let number = |interface: &nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let narrow = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        narrow.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    };
    let mut found: Vec<IpAddr> = all.iter().filter(of).filter_map(number).collect();
    found.sort_by_key(IpAddr::is_ipv6);
    found.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|interface| interface.interface_name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let (name, names) = (shown(name), names.join(", "));
        Failure::call(format!("{NODE_INTERFACE} is \"{name}\"; expected an interface with an address, of {names}"))
    })
}

/// This host's address on the way to another. Nothing is sent.
fn near_end(address: &str) -> std::io::Result<SocketAddr> {
    let mut failed = std::io::Error::other("the name has no address");
    for far in address.to_socket_addrs()? {
        let any = if far.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let near = UdpSocket::bind(SocketAddr::new(any, 0)).and_then(|socket| {
            socket.connect(far)?;
            socket.local_addr()
        });
        match near {
            Ok(near) => return Ok(near),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// The host of server 0 by a node list. Where the list has one node, that is this machine, and a server there that
/// listens on loopback is reached too.
fn first_node(name: &str, list: &str) -> Result<(String, String), Failure> {
    let nodes = nodes(list).map_err(|why| Failure::call(format!("{name} is \"{}\": {why}", shown(list))))?;
    Ok(match &nodes[..] {
        [_] => ("127.0.0.1".to_owned(), format!("{name}, of one node")),
        _ => (nodes[0].clone(), name.to_owned()),
    })
}

/// The hosts of a node list of Slurm, such as `n[01-03,7],gpu-1`, in its order.
///
/// # Errors
/// Names the found text and the expected form.
///
/// ```
/// let nodes = pserver_client::launchers::nodes("n[01-03,7],gpu-1")?;
/// assert_eq!(nodes, ["n01", "n02", "n03", "n7", "gpu-1"]);
/// # Ok::<(), String>(())
/// ```
pub fn nodes(list: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    for part in split_outside_brackets(list)? {
        expand(part.trim(), &mut all)?;
    }
    match all.iter().find(|node| node.is_empty()) {
        Some(_) => Err("an empty name; expected nodes such as n[01-03,7],gpu-1".to_owned()),
        None => Ok(all),
    }
}

/// Cuts a list at the commas that stand outside brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut begin, mut is_inside) = (Vec::new(), 0, false);
    for (place, letter) in list.char_indices() {
        match letter {
            '[' | ']' if is_inside == (letter == '[') => {
                return Err(format!("'{letter}' at {place}; expected brackets in pairs, such as n[01-03]"));
            }
            '[' | ']' => is_inside = !is_inside,
            ',' if !is_inside => {
                parts.push(&list[begin..place]);
                begin = place + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err("the end within brackets; expected ']'".to_owned());
    }
    parts.push(&list[begin..]);
    Ok(parts)
}

/// Adds the names of one part of a list, whose brackets stand in pairs.
fn expand(part: &str, all: &mut Vec<String>) -> Result<(), String> {
    let mut names = vec![String::new()];
    let mut rest = part;
    while let Some((before, behind)) = rest.split_once('[') {
        let (ranges, after) = behind.split_once(']').unwrap_or((behind, ""));
        let room = NODES_MAX.saturating_sub(all.len()) / names.len();
        let numbers = numbers(ranges, room)?;
        let each = |name: &String| numbers.iter().map(|number| format!("{name}{before}{number}")).collect::<Vec<_>>();
        names = names.iter().flat_map(each).collect();
        rest = after;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    all.append(&mut names);
    Ok(())
}

/// The numbers of ranges such as `01-03,7`, at most `room`, with the zeros of each range's begin.
fn numbers(ranges: &str, room: usize) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let read = |text: &str| text.parse::<u64>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        let bounds = read(first).zip(read(last)).filter(|(first, last)| first <= last);
        let (begin, end) = bounds
            .ok_or_else(|| format!("\"{}\" in brackets; expected numbers or ranges such as 01-03", shown(range)))?;
        if (room - all.len().min(room)) as u64 <= end - begin {
            return Err(format!("more than {NODES_MAX} nodes; expected at most so many"));
        }
        let width = first.len();
        all.extend((begin..=end).map(|number| format!("{number:0width$}")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_nodes(list: &str, expected: Result<&[&str], &str>) {
        match (nodes(list), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{list}"),
            (Err(text), Err(expected)) => assert!(text.contains(expected), "{list}: {text}; expected {expected}"),
            (found, expected) => panic!("{list}: {found:?}; expected {expected:?}"),
        }
    }

    #[test]
    fn a_node_list_of_slurm_is_expanded() {
        check_nodes("n1", Ok(&["n1"]));
        check_nodes("n[01-03,7],gpu-1", Ok(&["n01", "n02", "n03", "n7", "gpu-1"]));
        check_nodes("n[8-11]", Ok(&["n8", "n9", "n10", "n11"]));
        check_nodes("n[098-101]-ib", Ok(&["n098-ib", "n099-ib", "n100-ib", "n101-ib"]));
        check_nodes("r[1-2]n[3,5], x", Ok(&["r1n3", "r1n5", "r2n3", "r2n5", "x"]));
        check_nodes("n[01-03", Err("the end within brackets"));
        check_nodes("n]1", Err("']' at 1"));
        check_nodes("n[[1]]", Err("'[' at 2"));
        check_nodes("n[3-1]", Err("\"3-1\" in brackets; expected numbers or ranges such as 01-03"));
        check_nodes("n[a-b]", Err("\"a-b\" in brackets"));
        check_nodes("n[+1]", Err("\"+1\" in brackets"));
        check_nodes("n[]", Err("\"\" in brackets"));
        check_nodes("a,,b", Err("an empty name"));
        check_nodes("n[1-18446744073709551615]", Err("more than 100000 nodes"));
        check_nodes("n[0-999]m[0-999]", Err("more than 100000 nodes"));
    }

    #[test]
    fn every_variable_that_is_set_is_listed_by_precedence() {
        let set = [("PMI_RANK", "1"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("PSERVER_TRAINER", "7"), ("RANK", "")];
        let variable = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, text)| (*text).to_owned());
        let found: Vec<String> = Launchers::new(&variable)
            .variables()
            .iter()
            .map(|one| format!("{}: {} = {} ({})", one.launcher, one.name, one.text, one.setting))
            .collect();
        let expected = [
            "pserver: PSERVER_TRAINER = 7 (trainer)",
            "MPICH: PMI_RANK = 1 (trainer)",
            "Slurm: SLURM_JOB_NODELIST = n[1-2] (coordinator)",
        ];
        assert_eq!(found, expected);
    }

    /// Checks index, servers and trainers of a server with `NAME=value` variables.
    fn check_server(variables: &[&str], servers: Option<&str>, expected: [Option<&str>; 3]) {
        let variable = |name: &str| {
            variables.iter().find_map(|one| one.split_once('=').filter(|(key, _)| *key == name)).map(|one| one.1.into())
        };
        let launchers = Launchers::new(&variable);
        let found = ["index", "servers", "trainers"]
            .map(|setting| launchers.of_server(setting, servers).expect("no contradiction").map(|found| found.text));
        assert_eq!(found, expected.map(|text| text.map(str::to_owned)), "{variables:?}, {servers:?}");
    }

    fn check_bind(variables: &[&str], is_first: bool, expected: Result<Option<&str>, &str>) {
        let variable = |name: &str| {
            variables.iter().find_map(|one| one.split_once('=').filter(|(key, _)| *key == name)).map(|one| one.1.into())
        };
        let found = Launchers::new(&variable).bind_address(is_first);
        match (found.map(|found| found.map(|found| found.text)), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found.as_deref(), expected, "{variables:?}"),
            (Err(found), Err(expected)) => assert!(found.to_string().contains(expected), "{variables:?}: {found}"),
            (found, expected) => panic!("{variables:?}: {found:?}; expected {expected:?}"),
        }
    }

    #[test]
    fn a_server_takes_index_and_address_from_ps_lite_or_the_index_as_one_of_several_from_a_rank() {
        check_server(&["SLURM_PROCID=1"], None, [None; 3]);
        check_server(&["SLURM_PROCID=1"], Some("1"), [None; 3]);
        check_server(&["SLURM_PROCID=1", "SLURM_NTASKS=2"], Some("2"), [Some("1"), None, None]);
        let all = ["DMLC_ROLE=server", "DMLC_SERVER_ID=2", "DMLC_NUM_SERVER=3", "DMLC_NUM_WORKER=4"];
        check_server(&all, None, [Some("2"), Some("3"), Some("4")]);
        check_bind(&all, true, Ok(None));
        let root = ["DMLC_PS_ROOT_URI=127.0.0.1", "DMLC_PS_ROOT_PORT=9"];
        check_bind(&root, true, Ok(Some("127.0.0.1:9")));
        check_bind(&root, false, Ok(Some("127.0.0.1:0")));
        check_bind(&["DMLC_PS_ROOT_URI=::1", "DMLC_PS_ROOT_PORT=9"], true, Ok(Some("[::1]:9")));
        check_bind(&[&root[..], &["DMLC_NODE_HOST=fe80::1"]].concat(), false, Ok(Some("[fe80::1]:0")));
        check_bind(&[&root[..], &["DMLC_INTERFACE=lo"]].concat(), false, Ok(Some("127.0.0.1:0")));
        let expected = Err("DMLC_INTERFACE is \"none7\"; expected an interface with an address, of ");
        check_bind(&[&root[..], &["DMLC_INTERFACE=none7"]].concat(), false, expected);
        check_bind(&[&root[..], &["PADDLE_PSERVER_IPS=a"]].concat(), true, Ok(None));
        check_bind(&[&root[..], &["DMLC_ROLE=scheduler"]].concat(), true, Err("; server 0 is the scheduler too"));
        check_bind(&["DMLC_PS_ROOT_URI=host.invalid"], false, Err("DMLC_PS_ROOT_URI is \"host.invalid:7164\": "));
        let variable = |name: &str| match name {
            "DMLC_ROLE" => Some("worker".to_owned()),
            "DMLC_NUM_SERVER" => Some("3".to_owned()),
            _ => None,
        };
        let failure = Launchers::new(&variable).of_server("servers", None).expect_err("a worker is no server");
        assert_eq!(failure.to_string(), "DMLC_ROLE is \"worker\"; expected server in this process");
    }
}
