//! Launcher: starts carriers, tells agents what to run, shows output, and ends everything.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pserver_client::console;
use pserver_processes::ready;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::carriers::{self, AgentDoor, Carrier};
use super::descendants::{Descendants, POLL_PERIOD};
use super::message::{
    self, AgentHello, AgentMessage, AgentOrder, AgentParts, HEARTBEATS, PartEnd, PartKind, PartOrder,
};
use super::output::LaunchOutput;
use super::{JobPart, LaunchArgs, LaunchEvent, LaunchSender};

/// Server 0, whose address the others are told.
const FIRST: JobPart = JobPart { kind: PartKind::Server, index: 0 };
/// Options of servers that the launcher sets, and what to use in their place.
const OF_LAUNCH: [(&str, &str); 7] = [
    ("--trainers", "its own --trainers"),
    ("--servers", "its own --servers"),
    ("--index", "none: servers are numbered from 0"),
    ("--coordinator", "none: server 0 is started with the others"),
    ("--http", "its own --http"),
    ("--token-file", "none: each launch makes a token"),
    ("--encrypt", "its own --encrypt, which trainers need too"),
];
/// Variables that the launcher sets for parts, and what to use in their place.
const SET_BY_LAUNCH: [(&str, &str); 8] = [
    ("PSERVER_TRAINERS", "--trainers"),
    ("PSERVER_SERVERS", "--servers"),
    ("PSERVER_INDEX", "none: servers are numbered from 0"),
    ("PSERVER_TRAINER", "none: trainers are numbered from 0"),
    ("PSERVER_COORDINATOR", "none: server 0 is started with the others"),
    ("PSERVER_HTTP", "--http"),
    ("PSERVER_BIND", "--server-args '--bind ADDRESS'"),
    ("PSERVER_TOKEN_FILE", "none: each launch makes a token"),
];
/// Time until server 0 listens.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Beyond the grace, time for agents to report and for carriers to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Signals that are handled; the next one ends the launcher at once.
const SIGNALS_MAX: usize = 3;
/// Period at which signals are looked for.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);
/// Messages that wait for the launcher; an agent that sends more blocks.
const EVENTS_MAX: usize = 1024;

/// A job that is running.
struct LaunchedJob<'a> {
    args: &'a LaunchArgs,
    /// Dedicated servers, trainers, then colocated servers, once it is known which hosts have trainers.
    parts: Vec<JobPart>,
    token: String,
    secret: String,
    output: LaunchOutput,
    inbox: LaunchInbox,
    stage: JobStage,
    carriers: Vec<Carrier>,
    agents: Vec<JobAgent>,
    /// Parts that have ended.
    ended: BTreeMap<usize, PartEnd>,
    /// The launcher's status and its reason, once the job ends early.
    failed: Option<(u8, String)>,
}

/// Events and signals that wait for the launcher.
struct LaunchInbox {
    events: Receiver<LaunchEvent>,
    sender: LaunchSender,
    /// The last signal that was not handled, or 0.
    signals: Arc<AtomicI32>,
}

/// The part of its life that a job is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum JobStage {
    Starting,
    /// All parts were told server 0's address.
    Running,
    /// A signal was passed on to the trainers, which end by themselves.
    Interrupted,
    /// Agents were told to stop.
    Ending,
}

/// An agent's connection.
struct JobAgent {
    to: AgentWriter,
    hello: Option<AgentHello>,
    /// Its parts among those of the job.
    parts: Vec<usize>,
    is_open: bool,
    /// Time of its last message, once it has its parts.
    heard_at: Option<Instant>,
}

/// The sending side of an agent's connection: orders and heartbeats.
type AgentWriter = Arc<Mutex<Box<dyn Write + Send>>>;

fn write(to: &AgentWriter, order: &AgentOrder) {
    // A closed connection is an event of its own.
    let _ = message::write(&mut **to.lock().unwrap_or_else(PoisonError::into_inner), order);
}

pub(super) fn run(args: &LaunchArgs) -> Result<u8> {
    let (servers, trainers) = (usize::from(args.dedicated_servers()), usize::try_from(args.trainers)?);
    let servers = (0..servers).map(|index| JobPart { kind: PartKind::Server, index });
    let trainers = (0..trainers).map(|index| JobPart { kind: PartKind::Trainer, index });
    let parts: Vec<JobPart> = servers.chain(trainers).collect();
    let plans = carriers::plan(args, &parts)?;
    let is_local = plans.iter().all(|plan| !plan.needs_door()) && args.hosts.is_none() && args.hostfile.is_none();
    if is_local {
        check_program(&args.command[0])?;
    }
    check_server_words(args)?;
    passed_on(args)?;
    let descendants = Descendants::adopt().context("cannot become a subreaper")?;
    let (sender, events) = sync_channel(EVENTS_MAX);
    let mut job = LaunchedJob {
        args,
        parts,
        token: random_text()?,
        secret: random_text()?,
        output: LaunchOutput::new(),
        inbox: LaunchInbox { events, sender, signals: await_signals()? },
        stage: JobStage::Starting,
        carriers: Vec::new(),
        agents: Vec::new(),
        ended: BTreeMap::new(),
        failed: None,
    };
    let outcome = job.start(plans).and_then(|()| job.follow());
    if let Err(error) = outcome {
        job.fail(1, format!("{error:#}"));
    }
    job.end();
    descendants.kill_all();
    if let Some(error) = job.output.take_lost() {
        job.fail(1, format!("output of the job was lost ({error}); every part has ended with status 0"));
    }
    Ok(match job.failed.take() {
        None => 0,
        Some((status, why)) => {
            // The reader of the output may be gone, which is one of the reasons.
            console::remark(format_args!("pserver: {why}"));
            status
        }
    })
}

/// Refuses a program that this machine cannot run, before anything is started.
fn check_program(program: &str) -> Result<()> {
    let is_executable =
        |path: &Path| path.metadata().is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0);
    ensure!(!program.is_empty(), "the command is an empty word; expected the trainer's program");
    if program.contains('/') {
        let path = Path::new(program);
        let facts = path.metadata().with_context(|| format!("{program}: expected the trainer's program"))?;
        ensure!(!facts.is_dir(), "{program}: found a folder; expected the trainer's program");
        ensure!(is_executable(path), "{program}: found a file that is not executable; expected a program (chmod +x)");
        return Ok(());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder: PathBuf| is_executable(&folder.join(program)));
    ensure!(
        found,
        "{program}: found no such program in PATH; expected one, or a path with a slash such as ./{program}"
    );
    Ok(())
}

fn server_words(args: &LaunchArgs) -> Result<Vec<String>> {
    let text = &args.server_args;
    shlex::split(text).with_context(|| format!("--server-args {text:?}: expected options with quotes in pairs"))
}

/// Refuses options of servers that are this command's: each would contradict what the parts are told.
fn check_server_words(args: &LaunchArgs) -> Result<()> {
    for word in server_words(args)? {
        let name = word.split('=').next().unwrap_or_default();
        let Some((_, remedy)) = OF_LAUNCH.iter().find(|(option, _)| *option == name) else { continue };
        bail!("--server-args: found {name}, which every part gets from pserver launch; expected {remedy}");
    }
    Ok(())
}

/// A token: 32 random bytes as hexadecimal digits.
fn random_text() -> Result<String> {
    let mut random = [0; 32];
    let mut source = std::fs::File::open("/dev/urandom").context("/dev/urandom")?;
    source.read_exact(&mut random).context("/dev/urandom")?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Notes signals in a number that the launcher looks at. The third ends this process at once, wherever it is: agents
/// then end their parts.
fn await_signals() -> Result<Arc<AtomicI32>> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("setting up signals")?;
    let noted = Arc::new(AtomicI32::new(0));
    let last = Arc::clone(&noted);
    let wait = move || {
        for (count, signal) in signals.forever().enumerate() {
            last.store(signal, Ordering::Release);
            if SIGNALS_MAX <= count + 1 {
                std::process::exit(128 + signal);
            }
        }
    };
    thread::Builder::new().name("launch-signals".to_owned()).spawn(wait).context("cannot start a thread")?;
    Ok(noted)
}

/// `exit status 3` or `SIGKILL`, and the launcher's own status for it.
fn described(end: PartEnd) -> (String, u8) {
    match end {
        PartEnd::Exited(code) => (format!("ended with exit status {code}"), u8::try_from(code).unwrap_or(1)),
        PartEnd::Killed(signal) => {
            let name = Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |one| one.to_string());
            (format!("was ended by {name}"), 128_u8.saturating_add(u8::try_from(signal).unwrap_or(127)))
        }
    }
}

impl LaunchedJob<'_> {
    /// Starts carriers and waits for their agents, then for server 0, then has all parts started.
    fn start(&mut self, plans: Vec<carriers::CarrierPlan>) -> Result<()> {
        let needs_door = plans.iter().any(carriers::CarrierPlan::needs_door);
        let door = needs_door.then(|| AgentDoor::open(self.args)).transpose()?;
        if let Some(door) = &door {
            door.listen(self.inbox.sender.clone())?;
        }
        let counts = plans.iter().map(|plan| if plan.needs_door() { plan.parts.len() } else { 1 });
        let awaited: usize = counts.sum();
        for (carrier, plan) in plans.into_iter().enumerate() {
            let secret = self.secret.clone();
            let mut started = plan.start(carrier, door.as_ref().map(|door| (door, &*secret)), &self.inbox.sender)?;
            if let (Some(to), Some(from)) = (started.child.stdin.take(), started.child.stdout.take()) {
                self.meet(Box::new(to), Box::new(from))?;
            }
            self.carriers.push(started);
        }
        let limit = u64::from(self.args.limits.connect_timeout);
        let deadline = Instant::now() + Duration::from_secs(limit);
        while self.agents.iter().filter(|agent| agent.hello.is_some()).count() < awaited {
            if !self.turn(Some(deadline))? {
                bail!("{} within {limit} s; expected all", self.silent());
            }
            if self.failed.is_some() {
                return Ok(());
            }
        }
        self.order_parts()?;
        self.keep_alive()?;
        let deadline = Instant::now() + READY_TIMEOUT;
        while self.failed.is_none() && self.stage == JobStage::Starting {
            ensure!(self.turn(Some(deadline))?, "server 0 did not get ready within {} s", READY_TIMEOUT.as_secs());
        }
        Ok(())
    }

    /// Adds an agent's connection, and reads it on a thread of its own.
    fn meet(&mut self, to: Box<dyn Write + Send>, from: Box<dyn Read + Send>) -> Result<()> {
        let agent = self.agents.len();
        let to = Arc::new(Mutex::new(to));
        self.agents.push(JobAgent { to, hello: None, parts: Vec::new(), is_open: true, heard_at: None });
        let sender = self.inbox.sender.clone();
        let listen = move || {
            let mut from = BufReader::new(from);
            while let Ok(Some(message)) = message::read(&mut from) {
                if sender.send(LaunchEvent::Message(agent, message)).is_err() {
                    return;
                }
            }
            // The receiver is gone only at the end.
            let _ = sender.send(LaunchEvent::Closed(agent));
        };
        thread::Builder::new().name(format!("agent-{agent}")).spawn(listen).context("cannot start a thread")?;
        Ok(())
    }

    /// Names the carriers without an answer of all their agents.
    fn silent(&self) -> String {
        let hellos: Vec<&AgentHello> = self.agents.iter().filter_map(|agent| agent.hello.as_ref()).collect();
        let of = |(index, carrier): (usize, &Carrier)| {
            let ranks: Vec<u32> =
                hellos.iter().filter(|hello| hello.carrier == index).filter_map(|hello| hello.rank).collect();
            if carrier.by_rank {
                let missing: Vec<String> = (0..u32::try_from(carrier.parts.len()).expect("parts are few"))
                    .filter(|rank| !ranks.contains(rank))
                    .map(|rank| rank.to_string())
                    .collect();
                (!missing.is_empty()).then(|| format!("{}: no answer from rank {}", carrier.name, missing.join(", ")))
            } else {
                let is_silent = !hellos.iter().any(|hello| hello.carrier == index);
                is_silent.then(|| format!("{}: no answer", carrier.name))
            }
        };
        self.carriers.iter().enumerate().filter_map(of).collect::<Vec<_>>().join("; ")
    }

    /// Tells every agent its parts.
    fn order_parts(&mut self) -> Result<()> {
        let hellos: Vec<AgentHello> = self.agents.iter().filter_map(|agent| agent.hello.clone()).collect();
        let is_one_machine = hellos.iter().all(|hello| hello.boot == hellos[0].boot);
        let folder = std::env::current_dir().context("the present folder")?.into_os_string();
        if self.args.colocate {
            self.colocate();
        }
        for agent in 0..self.agents.len() {
            let Some(hello) = self.agents[agent].hello.clone() else { continue };
            let carrier = &self.carriers[hello.carrier];
            let host = match (is_one_machine, hello.address) {
                (true, _) => "127.0.0.1".to_owned(),
                (false, Some(address)) if address.contains(':') => format!("[{address}]"),
                (false, Some(address)) => address,
                (false, None) => bail!("{}: found no address of {} beyond loopback", carrier.name, hello.host),
            };
            let parts = &self.agents[agent].parts;
            let parts = parts.iter().map(|part| self.part_order(*part, &host)).collect::<Result<_>>()?;
            let (token, folder) = (self.token.clone(), folder.clone());
            let grace_millis = u64::from(self.args.limits.grace) * 1000;
            let silence_millis = self.silence_limit().map(|limit| u64::from(limit) * 1000);
            let parts = AgentParts { token, folder, parts, grace_millis, silence_millis };
            self.tell(agent, &AgentOrder::Parts(parts));
            self.agents[agent].heard_at = Some(Instant::now());
        }
        Ok(())
    }

    /// Adds a server to each host that has trainers, in the order of their ranks: the agent of the host's first trainer
    /// runs it.
    fn colocate(&mut self) {
        let mut hosts: BTreeSet<String> = BTreeSet::new();
        for trainer in usize::from(self.args.dedicated_servers())..self.parts.len() {
            let agent = self.agents.iter_mut().find(|agent| agent.parts.contains(&trainer));
            let Some(JobAgent { hello: Some(hello), parts, .. }) = agent else { continue };
            if hosts.insert(hello.boot.clone()) {
                parts.push(self.parts.len());
                let index = usize::from(self.args.dedicated_servers()) + hosts.len() - 1;
                self.parts.push(JobPart { kind: PartKind::Server, index });
            }
        }
    }

    /// Seconds of silence after which an agent is given up, where agents may be on other machines.
    fn silence_limit(&self) -> Option<u32> {
        self.carriers.iter().any(|carrier| carrier.is_remote).then_some(self.args.limits.heartbeat_timeout)
    }

    /// Tells agents at a period that the launcher is there, on a thread of its own: this one may wait for the reader of
    /// the output.
    fn keep_alive(&self) -> Result<()> {
        let Some(limit) = self.silence_limit() else { return Ok(()) };
        let period = Duration::from_secs(limit.into()) / HEARTBEATS;
        let agents: Vec<Weak<_>> = self.agents.iter().map(|agent| Arc::downgrade(&agent.to)).collect();
        let beat = move || {
            while 0 < agents.iter().filter_map(Weak::upgrade).map(|to| write(&to, &AgentOrder::Heartbeat)).count() {
                thread::sleep(period);
            }
        };
        thread::Builder::new().name("launch-heartbeat".to_owned()).spawn(beat).context("cannot start a thread")?;
        Ok(())
    }

    /// Fails where an agent was silent for too long, with no message of it left to handle.
    fn note_silent(&mut self) {
        let Some(limit) = self.silence_limit() else { return };
        for agent in 0..self.agents.len() {
            let JobAgent { is_open, heard_at, .. } = self.agents[agent];
            let is_silent =
                heard_at.is_some_and(|heard_at| limit <= u32::try_from(heard_at.elapsed().as_secs()).unwrap_or(limit));
            if is_open && is_silent {
                self.agents[agent].is_open = false;
                if let Some((name, part)) = self.running_part(agent) {
                    let text = "the host or the network is down; expected a heartbeat";
                    self.fail(1, format!("{name}: silent for {limit} s while {part} ran: {text}"));
                }
            }
        }
    }

    fn part_order(&self, part: usize, host: &str) -> Result<PartOrder> {
        let JobPart { kind, index } = self.parts[part];
        let servers = self.parts.iter().filter(|part| part.kind == PartKind::Server).count();
        let mut variables = passed_on(self.args)?;
        let mut set = |name: &str, text: String| variables.push((name.to_owned(), text));
        set("PSERVER_SERVERS", servers.to_string());
        set("PSERVER_TRAINERS", self.args.trainers.to_string());
        self.args.encrypt.iter().for_each(|encrypt| set("PSERVER_ENCRYPT", encrypt.clone()));
        let arguments = match kind {
            PartKind::Server => {
                if std::env::var_os("PSERVER_LOG_LEVEL").is_none() {
                    set("PSERVER_LOG_LEVEL", "warn".to_owned());
                }
                set("PSERVER_INDEX", index.to_string());
                let http = self.args.http.clone().or_else(|| std::env::var("PSERVER_HTTP").ok());
                http.into_iter().for_each(|http| set("PSERVER_HTTP", http_of(&http, index, host)));
                set("PSERVER_BIND", format!("{host}:0"));
                server_words(self.args)?
            }
            PartKind::Trainer => {
                set("PSERVER_TRAINER", index.to_string());
                self.args.command.clone()
            }
        };
        let is_first = self.parts[part] == FIRST;
        Ok(PartOrder { part, is_first, name: self.part_name(part), kind, arguments, variables })
    }

    /// Shows output until all parts have ended, or one has failed.
    fn follow(&mut self) -> Result<()> {
        while self.failed.is_none() && 0 < self.running(PartKind::Trainer) {
            self.turn(None)?;
        }
        if self.failed.is_none() {
            self.tell_all(&AgentOrder::Signal { kind: PartKind::Server, signal: SIGTERM });
        }
        while self.failed.is_none() && 0 < self.running(PartKind::Server) {
            self.turn(None)?;
        }
        Ok(())
    }

    /// Parts of a kind that have not ended.
    fn running(&self, kind: PartKind) -> usize {
        let parts = self.parts.iter().enumerate().filter(|(_, one)| one.kind == kind);
        parts.filter(|(part, _)| !self.ended.contains_key(part)).count()
    }

    /// Handles the next event; false after the deadline.
    fn turn(&mut self, deadline: Option<Instant>) -> Result<bool> {
        let event = loop {
            let signal = self.inbox.signals.swap(0, Ordering::AcqRel);
            if signal != 0 {
                self.interrupted(signal);
            }
            match self.inbox.events.recv_timeout(SIGNAL_PERIOD) {
                Ok(event) => break event,
                Err(RecvTimeoutError::Timeout) if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                    return Ok(false);
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.note_carriers();
                    self.note_silent();
                    if signal != 0 || self.failed.is_some() {
                        return Ok(true);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("this process holds a sender"),
            }
        };
        match event {
            LaunchEvent::Connected(stream) => self.connected(stream)?,
            LaunchEvent::Message(agent, Ok(message)) => self.received(agent, message)?,
            LaunchEvent::Message(agent, Err(text)) => {
                // A login shell's greeting, before the agent's first message. A stranger's is not shown.
                if let Some(carrier) = self.carriers.get(self.carrier_of(agent)).filter(|carrier| !carrier.by_rank) {
                    let _ = self.output.line(&carrier.name, 0, true, &text);
                }
            }
            LaunchEvent::Closed(agent) => self.closed(agent),
            LaunchEvent::CarrierLine { carrier, text } => {
                if let Some(carrier) = self.carriers.get_mut(carrier) {
                    let _ = self.output.line(&carrier.name, 0, true, &text);
                    if text.contains(char::is_alphanumeric) {
                        text.trim().clone_into(&mut carrier.last_error);
                    }
                }
            }
            LaunchEvent::CarrierSilent { carrier } => {
                if let Some(carrier) = self.carriers.get_mut(carrier) {
                    carrier.outputs -= 1;
                }
            }
        }
        self.note_carriers();
        Ok(true)
    }

    fn connected(&mut self, stream: TcpStream) -> Result<()> {
        let from = stream.try_clone().context("an agent's connection")?;
        self.meet(Box::new(stream), Box::new(from))
    }

    fn carrier_of(&self, agent: usize) -> usize {
        self.agents[agent].hello.as_ref().map_or(agent, |hello| hello.carrier)
    }

    fn received(&mut self, agent: usize, message: AgentMessage) -> Result<()> {
        self.agents[agent].heard_at.iter_mut().for_each(|heard_at| *heard_at = Instant::now());
        if self.agents[agent].hello.is_none() {
            let AgentMessage::Hello(hello) = message else { return Ok(()) };
            return self.greeted(agent, hello);
        }
        match message {
            AgentMessage::Hello(_) | AgentMessage::Heartbeat => {}
            AgentMessage::Line { part, is_error, text } => {
                let is_first = self.parts.get(part) == Some(&FIRST);
                if is_first
                    && !is_error
                    && self.stage == JobStage::Starting
                    && let Some(coordinator) = ready::address_in(&text)
                {
                    self.tell_all(&AgentOrder::Start { coordinator: coordinator.to_owned() });
                    self.stage = JobStage::Running;
                }
                let shown = self.output.line(&self.part_name(part), part, is_error, &text);
                if shown.is_err() && self.failed.is_none() {
                    self.fail(128 + 13, "nobody reads the output; expected standard output to stay open".to_owned());
                }
            }
            AgentMessage::Ended { part, end } => {
                self.ended.insert(part, end);
                let is_server = self.parts.get(part).is_some_and(|part| part.kind == PartKind::Server);
                let is_early = is_server && 0 < self.running(PartKind::Trainer);
                let (text, status) = described(end);
                let name = self.part_name(part);
                if end != PartEnd::Exited(0) {
                    self.fail(status, format!("{name} {text}; expected 0"));
                } else if is_early {
                    self.fail(1, format!("{name} {text} before the trainers; expected it to serve until they end"));
                }
            }
            AgentMessage::Failed { text } => {
                let name = self.carriers[self.carrier_of(agent)].name.clone();
                self.fail(1, format!("{name}: {text}"));
            }
        }
        Ok(())
    }

    /// Checks an agent's first message.
    fn greeted(&mut self, agent: usize, mut hello: AgentHello) -> Result<()> {
        let is_by_rank = self.carriers.first().is_some_and(|carrier| carrier.by_rank);
        if !is_by_rank {
            hello.carrier = agent;
        } else if hello.secret != self.secret || self.carriers.len() <= hello.carrier {
            // A stranger's connection.
            self.agents[agent].is_open = false;
            return Ok(());
        } else {
            let carrier = &self.carriers[hello.carrier];
            let (name, count) = (&carrier.name, carrier.parts.len());
            let rank =
                hello.rank.with_context(|| format!("{name} gave an agent no rank; expected 0 to {}", count - 1))?;
            let beyond = usize::try_from(rank).is_ok_and(|rank| count <= rank);
            ensure!(!beyond, "{name} started rank {rank}; expected ranks below {count}");
            let others = self.agents.iter().filter_map(|agent| agent.hello.as_ref());
            let is_twice = others.clone().any(|other| (other.carrier, other.rank) == (hello.carrier, hello.rank));
            ensure!(!is_twice, "{name} started rank {rank} twice; expected each of {count} ranks once");
        }
        let carrier = &self.carriers[hello.carrier];
        let rank = hello.rank.and_then(|rank| usize::try_from(rank).ok());
        self.agents[agent].parts = match rank.filter(|_| carrier.by_rank) {
            Some(rank) => vec![carrier.parts[rank]],
            None => carrier.parts.clone(),
        };
        self.agents[agent].hello = Some(hello);
        if self.stage == JobStage::Ending {
            self.tell(agent, &AgentOrder::Stop { is_urgent: false });
        }
        Ok(())
    }

    fn closed(&mut self, agent: usize) {
        self.agents[agent].is_open = false;
        if let Some((name, part)) = self.running_part(agent) {
            self.fail(1, format!("{name}: the connection ended while {part} ran"));
        }
    }

    /// The names of an agent's carrier and of the first of its parts that runs.
    fn running_part(&self, agent: usize) -> Option<(String, String)> {
        let hello = self.agents[agent].hello.as_ref()?;
        let part = self.agents[agent].parts.iter().find(|part| !self.ended.contains_key(part))?;
        Some((self.carriers[hello.carrier].name.clone(), self.part_name(*part)))
    }

    /// Fails where a carrier ended before its agents had answered.
    fn note_carriers(&mut self) {
        let mut early = None;
        for (index, carrier) in self.carriers.iter_mut().enumerate() {
            let hellos = self.agents.iter().filter_map(|agent| agent.hello.as_ref());
            let answered = hellos.filter(|hello| hello.carrier == index).count();
            let awaited = if carrier.by_rank { carrier.parts.len() } else { 1 };
            let is_open = !carrier.by_rank && self.agents.get(index).is_some_and(|agent| agent.is_open);
            if answered < awaited
                && let Some(status) = carrier.ended(is_open)
            {
                early.get_or_insert((carrier.name.clone(), status, carrier.last_error.clone()));
            }
        }
        if let Some((name, status, error)) = early.filter(|_| self.failed.is_none()) {
            let error = if error.is_empty() { String::new() } else { format!(": {error}") };
            self.fail(1, format!("{name} ended ({status}) before its parts were started{error}"));
        }
    }

    /// The first signal goes to the trainers, the next ends everything at once.
    fn interrupted(&mut self, signal: i32) {
        let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |one| one.to_string());
        if self.failed.is_some() {
            self.stage = JobStage::Ending;
            self.tell_all(&AgentOrder::Stop { is_urgent: true });
            return;
        }
        if self.stage == JobStage::Running {
            self.stage = JobStage::Interrupted;
        }
        self.fail(128_u8.saturating_add(u8::try_from(signal).unwrap_or(127)), format!("interrupted by {name}"));
        self.tell_all(&AgentOrder::Signal { kind: PartKind::Trainer, signal });
    }

    /// Notes the first failure.
    fn fail(&mut self, status: u8, why: String) {
        self.failed.get_or_insert((status, why));
    }

    /// Ends agents and carriers, and shows what they still say. After a signal the trainers end first, if they do so
    /// within the grace.
    fn end(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(self.args.limits.grace.into());
        while self.stage == JobStage::Interrupted && 0 < self.running(PartKind::Trainer) && Instant::now() < deadline {
            let _ = self.turn(Some(deadline));
        }
        self.stage = JobStage::Ending;
        self.tell_all(&AgentOrder::Stop { is_urgent: false });
        let deadline = Instant::now() + Duration::from_secs(self.args.limits.grace.into()) + END_TIMEOUT;
        while self.agents.iter().any(|agent| agent.is_open && agent.hello.is_some()) && Instant::now() < deadline {
            // An error here comes after the one that ends the job.
            let _ = self.turn(Some(deadline));
        }
        // An agent without an answer ends with its connection.
        self.agents.clear();
        let deadline = Instant::now() + if self.failed.is_some() { POLL_PERIOD * 50 } else { END_TIMEOUT };
        for carrier in &mut self.carriers {
            while matches!(carrier.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(POLL_PERIOD);
            }
            let group = Pid::from_raw(i32::try_from(carrier.child.id()).expect("process numbers are positive"));
            if matches!(carrier.child.try_wait(), Ok(None)) {
                let _ = killpg(group, Signal::SIGTERM);
                thread::sleep(POLL_PERIOD * 20);
                let _ = killpg(group, Signal::SIGKILL);
                let _ = carrier.child.wait();
            }
        }
    }

    fn tell(&mut self, agent: usize, order: &AgentOrder) {
        write(&self.agents[agent].to, order);
    }

    fn tell_all(&mut self, order: &AgentOrder) {
        for agent in 0..self.agents.len() {
            if self.agents[agent].hello.is_some() {
                self.tell(agent, order);
            }
        }
    }

    fn part_name(&self, part: usize) -> String {
        match self.parts.get(part) {
            Some(JobPart { kind: PartKind::Server, index }) => format!("server {index}"),
            Some(JobPart { kind: PartKind::Trainer, index }) => format!("trainer {index}"),
            None => format!("part {part}"),
        }
    }
}

/// Where a server serves over HTTP: server 0, which shows the whole job, at the address that is configured; the others
/// at the ports after it.
fn http_of(first: &str, server: usize, host: &str) -> String {
    let Ok(at) = first.parse::<SocketAddr>() else { return first.to_owned() };
    let number = u16::try_from(server).ok().filter(|_| 0 < at.port()).and_then(|server| at.port().checked_add(server));
    let port = number.unwrap_or(0);
    let own = host.trim_matches(['[', ']']).parse::<IpAddr>().ok().filter(|own| !own.is_loopback());
    let is_shared = server == 0 || at.ip().is_loopback() || at.ip().is_unspecified();
    SocketAddr::new(own.filter(|_| !is_shared).unwrap_or(at.ip()), port).to_string()
}

/// Variables that parts get from this environment: those of pserver, which the order's own follow, and --env.
fn passed_on(args: &LaunchArgs) -> Result<Vec<(String, String)>> {
    let text = |name: String, found: OsString| match found.into_string() {
        Ok(text) => Ok((name, text)),
        Err(bytes) => bail!("the variable {name} is {bytes:?}; expected text in UTF-8"),
    };
    // A name that is no text is none of ours.
    let all = std::env::vars_os().filter_map(|(name, found)| Some((name.into_string().ok()?, found)));
    let ours = all.filter(|(name, _)| name.starts_with("PSERVER_") && name != super::agent::VARIABLE);
    for word in &args.variables {
        let name = word.split('=').next().unwrap_or_default();
        ensure!(!name.is_empty(), "--env {word}: found no name; expected NAME=VALUE, or NAME");
        if let Some((_, remedy)) = SET_BY_LAUNCH.iter().find(|(variable, _)| *variable == name) {
            bail!("--env {word}: every part gets {name} from pserver launch; expected {remedy}");
        }
    }
    let named = args.variables.iter().map(|word| match word.split_once('=') {
        Some((name, text)) => Ok((name.to_owned(), text.to_owned())),
        None => {
            let found = std::env::var_os(word);
            text(word.clone(), found.with_context(|| format!("--env {word}: it is not set; expected a value"))?)
        }
    });
    ours.map(|(name, found)| text(name, found)).chain(named).collect()
}
