//! Agent: the process on a host that runs parts of a job for the launcher and ends them, however the launcher ends.
//!
//! It talks over standard input and output, or, where a scheduler started it, over a connection to the launcher. When
//! that closes, or a launcher elsewhere is silent, the agent ends its parts: SIGTERM to their process groups, after the
//! grace SIGKILL to every process below it. The token is a file in memory, open in the agent alone, which parts find as
//! `PSERVER_TOKEN_FILE`.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use pserver_client::environment::of_process;
use pserver_client::launchers::Launchers;
use pserver_transport::network::{JobToken, share_token};
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::descendants::{self, Descendants};
use super::message::{
    self, AgentHello, AgentMessage, AgentOrder, AgentParts, HEARTBEATS, PartEnd, PartKind, PartOrder,
};
use crate::{descriptors, own_program};

/// How an agent finds the launcher: `CARRIER SECRET ADDRESS...`, where it is not standard input and output.
pub(super) const VARIABLE: &str = "PSERVER_LAUNCHER";
/// Time to connect to one address of the launcher.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to drain the output of an ended part: a process that it started may hold the pipe open.
const OUTPUT_DRAIN: Duration = Duration::from_secs(1);
/// Longest piece of a line that is delivered as a line.
const LINE_BYTES_MAX: usize = 64 << 10;
/// The least time between two lines of a display of progress.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);
/// Names of the token that are tried.
const TOKEN_FILES_MAX: usize = 64;
const NEVER: Duration = Duration::from_secs(3600);

type Output = Arc<Mutex<Box<dyn Write + Send>>>;

enum AgentEvent {
    Order(AgentOrder),
    /// The launcher is gone, or this process was asked to end.
    Closed,
    /// A child ended, or an output was closed.
    Look,
}

/// An agent at work.
struct Agent {
    output: Output,
    events: Receiver<AgentEvent>,
    sender: Sender<AgentEvent>,
    descendants: Descendants,
    parts: AgentParts,
    /// The path of the token's file, which this process keeps open.
    token_path: String,
    /// The soft limit of descriptors of parts, if there is one.
    open_files: Option<u64>,
    running: Vec<RunningPart>,
    /// Time of the launcher's last order.
    heard_at: Instant,
    /// Whether the launcher was silent for too long; a message to it could wait for ever.
    is_alone: bool,
}

struct RunningPart {
    part: usize,
    kind: PartKind,
    /// Its standard input closes with this process.
    child: Child,
    /// Open pipes, of standard output and standard error.
    open: Arc<AtomicU8>,
    ended: Option<(PartEnd, Instant)>,
    is_reported: bool,
}

/// The program `pserver launch-agent`.
///
/// # Errors
/// No launcher, or one that says something else than orders.
pub fn run() -> Result<()> {
    let descendants = Descendants::adopt().context("cannot become a subreaper")?;
    // Two outputs of each part.
    let open_files = descriptors::raise();
    let (sender, events) = channel();
    let mut way = None;
    let output: Output = match std::env::var(VARIABLE) {
        Ok(launcher) => {
            let stream = connect(&launcher)?;
            way = stream.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback());
            let input = stream.try_clone().context("a connection to the launcher")?;
            listen(Box::new(BufReader::new(input)), sender.clone())?;
            Arc::new(Mutex::new(Box::new(stream)))
        }
        Err(_) => {
            listen(Box::new(BufReader::new(std::io::stdin())), sender.clone())?;
            Arc::new(Mutex::new(Box::new(std::io::stdout())))
        }
    };
    await_signals(sender.clone())?;
    send(&output, &AgentMessage::Hello(hello(way)));
    let Ok(AgentEvent::Order(AgentOrder::Parts(parts))) = next_order(&events) else { return Ok(()) };
    let (_token, token_path) = token_file(&parts.token)?;
    if let Some(silence) = parts.silence_millis {
        keep_alive(Arc::clone(&output), Duration::from_millis(silence) / HEARTBEATS)?;
    }
    let (running, heard_at) = (Vec::new(), Instant::now());
    let mut agent = Agent {
        output,
        events,
        sender,
        descendants,
        parts,
        token_path,
        open_files,
        running,
        heard_at,
        is_alone: false,
    };
    if let Err(error) = agent.serve() {
        send(&agent.output, &AgentMessage::Failed { text: format!("{error:#}") });
    }
    agent.stop(false);
    Ok(())
}

/// Tells the launcher at a period that this agent is there, on a thread of its own.
fn keep_alive(output: Output, period: Duration) -> Result<()> {
    let beat = move || {
        loop {
            thread::sleep(period);
            send(&output, &AgentMessage::Heartbeat);
        }
    };
    thread::Builder::new().name("agent-heartbeat".to_owned()).spawn(beat).context("cannot start a thread")?;
    Ok(())
}

fn next_order(events: &Receiver<AgentEvent>) -> Result<AgentEvent> {
    loop {
        match events.recv_timeout(NEVER)? {
            AgentEvent::Look => {}
            event => return Ok(event),
        }
    }
}

fn send(output: &Output, message: &AgentMessage) {
    let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
    // The reader of orders notices that the launcher is gone.
    let _ = message::write(&mut **output, message);
}

/// The first message; `way` is this host's address on the way to the launcher.
fn hello(way: Option<IpAddr>) -> AgentHello {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let host = read("/proc/sys/kernel/hostname");
    let mut words = std::env::var(VARIABLE).unwrap_or_default();
    words.truncate(4096);
    let mut words = words.split(' ').map(str::to_owned);
    let carrier = words.next().and_then(|carrier| carrier.parse().ok()).unwrap_or_default();
    let secret = words.next().unwrap_or_default();
    let process = of_process();
    let ours = |name: &str| name.starts_with("PSERVER_") || name.starts_with("PADDLE_") || name.starts_with("DMLC_");
    let variable = |name: &str| {
        let found = process.iter().find(|(key, _)| key == name && !ours(name) && name != "RANK");
        found.map(|(_, text)| text.clone())
    };
    let rank = Launchers::new(&variable).rank().ok().flatten().and_then(|rank| rank.text.parse().ok());
    // `client-address client-port server-address server-port`: this host as the launcher reached it.
    let of_ssh = variable("SSH_CONNECTION").and_then(|words| words.split(' ').nth(2).map(str::to_owned));
    let of_ssh = of_ssh.filter(|_| std::env::var_os(VARIABLE).is_none());
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    AgentHello {
        secret,
        carrier,
        rank,
        boot: format!("{} {}", read("/proc/sys/kernel/random/boot_id"), network.display()),
        address: of_ssh.or_else(|| way.map(|address| address.to_string())).or_else(|| {
            let found = addresses(&host).into_iter().find(|address| !address.is_loopback());
            found.map(|address| address.to_string())
        }),
        host,
    }
}

/// The addresses of a host's name.
pub(super) fn addresses(host: &str) -> Vec<IpAddr> {
    (host, 0).to_socket_addrs().into_iter().flatten().map(|address| address.ip()).collect()
}

fn connect(launcher: &str) -> Result<TcpStream> {
    let mut failed = String::from("found no address");
    for address in launcher.split(' ').skip(2).filter_map(|address| address.parse().ok()) {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = format!("{address}: {error}"),
        }
    }
    bail!("the launcher cannot be reached: {failed}")
}

/// Reads orders on a thread of its own.
fn listen(mut from: Box<dyn BufRead + Send>, sender: Sender<AgentEvent>) -> Result<()> {
    let orders = move || {
        while let Ok(Some(Ok(order))) = message::read(&mut *from) {
            if sender.send(AgentEvent::Order(order)).is_err() {
                return;
            }
        }
        let _ = sender.send(AgentEvent::Closed);
    };
    thread::Builder::new().name("agent-orders".to_owned()).spawn(orders).context("cannot start a thread")?;
    Ok(())
}

fn await_signals(sender: Sender<AgentEvent>) -> Result<()> {
    let mut signals = Signals::new([SIGCHLD, SIGTERM, SIGINT, SIGHUP]).context("setting up signals")?;
    let wait = move || {
        for signal in signals.forever() {
            let event = if signal == SIGCHLD { AgentEvent::Look } else { AgentEvent::Closed };
            if sender.send(event).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("agent-signals".to_owned()).spawn(wait).context("cannot start a thread")?;
    Ok(())
}

/// A file in memory with the token, and its path. A part in a container cannot open the path, and gets the token from
/// this process.
fn token_file(token: &str) -> Result<(Vec<File>, String)> {
    let file = memfd_create("pserver-token", MemfdFlags::CLOEXEC).context("a file in memory for the token")?;
    fchmod(&file, Mode::RUSR | Mode::WUSR).context("the mode of the token's file")?;
    let mut file = File::from(file);
    file.write_all(token.as_bytes()).context("writing the token")?;
    let token = JobToken::new(token.as_bytes())?;
    let mut files = vec![file];
    loop {
        let last = files.last().expect("it has one");
        let path = format!("/proc/{}/fd/{}", std::process::id(), last.as_raw_fd());
        match share_token(path.as_ref(), &token) {
            Ok(()) => return Ok((files, path)),
            // An agent in another container has the same number.
            Err(error) if error.kind() == ErrorKind::AddrInUse && files.len() < TOKEN_FILES_MAX => {
                let other = last.try_clone().context("a file in memory for the token")?;
                files.push(other);
            }
            Err(error) => return Err(error).with_context(|| format!("sharing the token as {path}")),
        }
    }
}

/// The bytes of an output as lines. A line that a carriage return takes back, as displays of progress write, is shown
/// from time to time, so that they do not flood the output of a job.
#[derive(Default)]
struct PartLines {
    /// The line that has not ended.
    line: Vec<u8>,
    /// The last line that a carriage return has taken back and that was not shown.
    taken_back: Option<String>,
    /// When such a line was last shown.
    shown_at: Option<Instant>,
    /// Whether a carriage return has ended the line, which is then a whole one if a line feed follows.
    is_returned: bool,
}

impl PartLines {
    /// The lines that end with these bytes, and are to be shown.
    fn take(&mut self, bytes: &[u8], now: Instant) -> Vec<String> {
        let mut shown = Vec::new();
        for byte in bytes {
            if std::mem::take(&mut self.is_returned) && *byte != b'\n' {
                let text = self.text();
                let is_due = self.shown_at.is_none_or(|shown_at| PROGRESS_PERIOD <= now.duration_since(shown_at));
                if is_due && !text.is_empty() {
                    shown.push(text);
                    (self.shown_at, self.taken_back) = (Some(now), None);
                } else if !text.is_empty() {
                    self.taken_back = Some(text);
                }
            }
            match byte {
                b'\n' => {
                    self.taken_back = None;
                    shown.push(self.text());
                }
                b'\r' => self.is_returned = true,
                byte => self.line.push(*byte),
            }
            if self.line.len() >= LINE_BYTES_MAX {
                let rest = self.line.split_off(whole_characters(&self.line));
                shown.push(self.text());
                self.line = rest;
            }
        }
        shown
    }

    /// The lines at the end of the output.
    fn rest(mut self) -> Vec<String> {
        let last = Some(self.text()).filter(|text| !text.is_empty());
        last.or(self.taken_back).into_iter().collect()
    }

    fn text(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned()
    }
}

/// Bytes before the character that a piece of a line cuts at its end.
fn whole_characters(piece: &[u8]) -> usize {
    let is_within = |byte: &u8| byte & 0xc0 == 0x80;
    let behind = piece.iter().rev().take(3).take_while(|byte| is_within(byte)).count();
    let begin = piece.len().saturating_sub(behind + 1);
    let is_incomplete = std::str::from_utf8(&piece[begin..]).is_err_and(|error| error.error_len().is_none());
    if is_incomplete { begin } else { piece.len() }
}

impl Agent {
    /// Runs the parts until the launcher says that they are to end, or is gone.
    fn serve(&mut self) -> Result<()> {
        let folder = Path::new(&self.parts.folder);
        ensure!(folder.is_dir(), "found no folder {} here; expected the one of the launcher", folder.display());
        for order in self.parts.parts.clone().iter().filter(|order| order.is_first) {
            self.start(order, None)?;
        }
        loop {
            match self.events.recv_timeout(self.patience()) {
                Ok(AgentEvent::Order(AgentOrder::Stop { is_urgent })) => {
                    self.stop(is_urgent);
                    return Ok(());
                }
                Ok(AgentEvent::Order(order)) => {
                    self.heard_at = Instant::now();
                    self.obey(order)?;
                }
                Ok(AgentEvent::Closed) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if self.silence_left().is_zero() => {
                    self.is_alone = true;
                    return Ok(());
                }
                Ok(AgentEvent::Look) | Err(RecvTimeoutError::Timeout) => {}
            }
            self.note_ended();
        }
    }

    /// Carries out an order that is not the last one.
    fn obey(&mut self, order: AgentOrder) -> Result<()> {
        match order {
            AgentOrder::Start { coordinator } => {
                for order in self.parts.parts.clone().iter().filter(|order| !order.is_first) {
                    self.start(order, Some(&coordinator))?;
                }
            }
            AgentOrder::Signal { kind, signal } => self.signal(Some(kind), signal),
            AgentOrder::Parts(_) => bail!("found a second list of parts; expected one"),
            AgentOrder::Stop { .. } | AgentOrder::Heartbeat => {}
        }
        Ok(())
    }

    /// Time until there is something to look for without an event.
    fn patience(&self) -> Duration {
        let drains = self.running.iter().any(|part| part.ended.is_some() && !part.is_reported);
        let limit = if drains { descendants::POLL_PERIOD } else { NEVER };
        self.silence_left().min(limit)
    }

    /// Time until a silent launcher is given up.
    fn silence_left(&self) -> Duration {
        let limit = self.parts.silence_millis.map(Duration::from_millis);
        limit.map_or(NEVER, |limit| limit.saturating_sub(self.heard_at.elapsed()))
    }

    fn start(&mut self, order: &PartOrder, coordinator: Option<&str>) -> Result<()> {
        let program = own_program::path()?;
        let own = std::process::id();
        let mut command = Command::new(program);
        match order.kind {
            PartKind::Server => command.args(["serve", "--until-stdin-closes"]).stdin(Stdio::piped()),
            PartKind::Trainer => {
                let open_files = self.open_files.map(|limit| format!("--open-files={limit}"));
                command.args(["launch-exec", &own.to_string()]).args(open_files).arg("--").stdin(Stdio::null())
            }
        };
        command.args(&order.arguments).current_dir(&self.parts.folder).process_group(0);
        command.env_remove(VARIABLE).envs(order.variables.iter().map(|(name, text)| (name, text)));
        command.env("PSERVER_TOKEN_FILE", &self.token_path);
        if let Some(coordinator) = coordinator {
            command.env("PSERVER_COORDINATOR", coordinator);
        }
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.with_context(|| format!("{} cannot be started", order.name))?;
        let open = Arc::new(AtomicU8::new(2));
        let output = child.stdout.take().expect("it is a pipe");
        let errors = child.stderr.take().expect("it is a pipe");
        self.deliver(output, order.part, false, &open)?;
        self.deliver(errors, order.part, true, &open)?;
        let (part, kind) = (order.part, order.kind);
        self.running.push(RunningPart { part, kind, child, open, ended: None, is_reported: false });
        Ok(())
    }

    /// Sends the lines of one output on a thread of its own.
    fn deliver<R>(&self, source: R, part: usize, is_error: bool, open: &Arc<AtomicU8>) -> Result<()>
    where
        R: Read + Send + 'static,
    {
        let (output, open, sender) = (Arc::clone(&self.output), Arc::clone(open), self.sender.clone());
        let deliver = move || {
            let mut lines = PartLines::default();
            let mut source = BufReader::new(source);
            while let Ok(bytes) = source.fill_buf()
                && !bytes.is_empty()
            {
                let length = bytes.len();
                for text in lines.take(bytes, Instant::now()) {
                    send(&output, &AgentMessage::Line { part, is_error, text });
                }
                source.consume(length);
            }
            for text in lines.rest() {
                send(&output, &AgentMessage::Line { part, is_error, text });
            }
            open.fetch_sub(1, Ordering::AcqRel);
            // The receiver is gone only at the end.
            let _ = sender.send(AgentEvent::Look);
        };
        thread::Builder::new().name(format!("output-{part}")).spawn(deliver).context("cannot start a thread")?;
        Ok(())
    }

    /// Signals the process groups of the parts of a kind, or of all, that have not ended.
    fn signal(&self, kind: Option<PartKind>, signal: i32) {
        let Ok(signal) = Signal::try_from(signal) else { return };
        for part in self.running.iter().filter(|part| part.ended.is_none() && kind.is_none_or(|kind| kind == part.kind))
        {
            let group = i32::try_from(part.child.id()).expect("process numbers are positive");
            let _ = killpg(Pid::from_raw(group), signal);
        }
    }

    /// Notes parts that have ended, and reports those whose output was delivered.
    fn note_ended(&mut self) {
        for (process, status) in descendants::ended() {
            let end = match status {
                WaitStatus::Exited(_, code) => PartEnd::Exited(code),
                WaitStatus::Signaled(_, signal, _) => PartEnd::Killed(signal as i32),
                _ => continue,
            };
            let of = |part: &&mut RunningPart| i32::try_from(part.child.id()) == Ok(process.as_raw());
            // Others are what parts have started and left.
            if let Some(part) = self.running.iter_mut().filter(|part| part.ended.is_none()).find(of) {
                part.ended = Some((end, Instant::now()));
            }
        }
        for running in self.running.iter_mut().filter(|part| !part.is_reported) {
            let Some((end, since)) = running.ended else { continue };
            if running.open.load(Ordering::Acquire) == 0 || OUTPUT_DRAIN < since.elapsed() {
                running.is_reported = true;
                if !self.is_alone {
                    send(&self.output, &AgentMessage::Ended { part: running.part, end });
                }
            }
        }
    }

    /// Ends everything below this process.
    fn stop(&mut self, is_urgent: bool) {
        let mut deadline = Instant::now() + Duration::from_millis(if is_urgent { 0 } else { self.parts.grace_millis });
        self.signal(None, Signal::SIGTERM as i32);
        self.signal(None, Signal::SIGCONT as i32);
        while !self.descendants.present().is_empty() && Instant::now() < deadline {
            let is_part = self.running.iter().any(|part| part.ended.is_none());
            if !is_part {
                // Processes that the parts have left behind are not waited for.
                self.descendants.signal(Signal::SIGTERM);
            }
            if let Ok(AgentEvent::Order(AgentOrder::Stop { is_urgent: true })) =
                self.events.recv_timeout(descendants::POLL_PERIOD)
            {
                deadline = Instant::now();
            }
            self.note_ended();
        }
        while !self.descendants.present().is_empty() {
            self.signal(None, Signal::SIGKILL as i32);
            self.descendants.signal(Signal::SIGKILL);
            self.note_ended();
            thread::sleep(descendants::POLL_PERIOD);
        }
        let deadline = Instant::now() + OUTPUT_DRAIN;
        while self.running.iter().any(|part| !part.is_reported) && Instant::now() < deadline {
            self.note_ended();
            thread::sleep(descendants::POLL_PERIOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_shown_from_time_to_time_and_lines_whole() {
        let (mut lines, begin) = (PartLines::default(), Instant::now());
        let mut check = |text: &str, millis, expected: &[&str]| {
            assert_eq!(lines.take(text.as_bytes(), begin + Duration::from_millis(millis)), expected, "{text:?}");
        };
        check("one\r\ntwo\n\nth", 0, &["one", "two", ""]);
        check("ree\n", 1, &["three"]);
        check("\r10 %\r20 %\r30 %", 2, &["10 %"]);
        check("\r40 %\r", 900, &[]);
        check("50 %\r60 %\r", 1500, &["40 %"]);
        check("100 %\nend\n90 %\r95 %\r", 1600, &["100 %", "end"]);
        assert_eq!(lines.rest(), ["95 %"]);
    }

    #[test]
    fn a_piece_of_a_line_ends_with_a_whole_character() {
        let check = |piece: &[u8], expected| assert_eq!(whole_characters(piece), expected, "{piece:x?}");
        check(b"", 0);
        check(b"ab", 2);
        check("a\u{e9}".as_bytes(), 3);
        check(&"a\u{e9}".as_bytes()[..2], 1);
        let smile = "a\u{1f600}".as_bytes();
        check(smile, 5);
        (2..5).for_each(|cut| check(&smile[..cut], 1));
        // Bytes that are no text are not held back.
        check(b"a\xff", 2);
        check(&[0x80; 9], 9);
    }
}
