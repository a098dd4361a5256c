//! The `pserver` program as a user runs it: its output, its error texts, its exit status, and no process that it
//! leaves running.
//!
//! Not here: the update of a parameter by a gradient. No test sleeps: each waits for a line, or for a pipe to close.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::wire::Address;
use pserver_processes::ready;
use tempfile::TempDir;

/// The program under test.
const PROGRAM: &str = env!("CARGO_BIN_EXE_pserver");
/// The time after which a test gives up: far above the duration of every test, only to end a test that hangs.
const HANGS: Duration = Duration::from_secs(120);
/// The interval at which a test polls for processes.
const LOOK: Duration = Duration::from_millis(20);

/// A process that is killed when the test is over, if it still runs then.
struct Running {
    child: Child,
    output: Receiver<String>,
    errors: Receiver<String>,
}

/// Output of a process that has exited.
#[derive(Debug)]
struct Ended {
    status: ExitStatus,
    output: String,
    errors: String,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = lines(child.stdout.take().unwrap());
        let errors = lines(child.stderr.take().unwrap());
        Self { child, output, errors }
    }

    /// A server of a job of its own, on a free port.
    fn serve<S: AsRef<OsStr>>(arguments: &[S]) -> Self {
        Self::start(pserver("serve").args(["--bind", "tcp://127.0.0.1:0"]).args(arguments))
    }

    fn line(&self) -> String {
        self.output.recv_timeout(HANGS).expect("the program says a line")
    }

    /// The address in a server's first line.
    fn ready(&self) -> Address {
        let line = self.line();
        Address::parse(ready::address_in(&line).unwrap_or_else(|| panic!("found {line}"))).unwrap()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits for both pipes to close, then for the process.
    fn end(mut self) -> Ended {
        let (output, errors) = (rest(&self.output), rest(&self.errors));
        Ended { status: self.child.wait().unwrap(), output, errors }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pserver(command: &str) -> Command {
    let mut pserver = Command::new(PROGRAM);
    // Variables of the tester's environment must not reach the program.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PSERVER_")) {
        pserver.env_remove(name);
    }
    pserver.arg(command);
    pserver
}

fn lines(source: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || BufReader::new(source).lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    receiver
}

fn rest(lines: &Receiver<String>) -> String {
    let end = Instant::now() + HANGS;
    let mut text = String::new();
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => text += &(line + "\n"),
            Err(RecvTimeoutError::Disconnected) => return text,
            Err(RecvTimeoutError::Timeout) => panic!("the pipe is still open; so far it brought\n{text}"),
        }
    }
}

fn run(command: &mut Command) -> Ended {
    Running::start(command).end()
}

fn check_refused(arguments: &[&str], file: &str, expected: &[&str]) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("pserver.toml");
    fs::write(&path, file).unwrap();
    let ended = run(pserver("serve").arg("--config").arg(&path).args(arguments));
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    for expected in expected {
        let expected = expected.replace("FILE", path.to_str().unwrap());
        assert!(ended.errors.contains(&expected), "expected {expected}\nfound {}", ended.errors);
    }
    assert_eq!(ended.output, "", "what is refused says nothing on standard output");
}

#[test]
fn print_config_prints_each_setting_with_its_source() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("pserver.toml");
    fs::write(&path, "trainers = 2\nshards = 3\nmode = \"async\"\n").unwrap();
    let mut command = pserver("serve");
    command.args(["--print-config", "--trainers", "4"]).env("PSERVER_CONFIG", &path).env("PSERVER_SHARDS", "5");
    let ended = run(&mut command);
    assert!(ended.status.success(), "{ended:?}");
    let from_file = format!("mode = \"async\" # {}", path.display());
    for expected in ["trainers = 4 # --trainers", "shards = 5 # PSERVER_SHARDS", &from_file, "index = 0 # default"] {
        assert!(ended.output.lines().any(|line| line == expected), "expected {expected}\nfound {}", ended.output);
    }
}

#[test]
fn a_wrong_configuration_is_refused_by_key_source_value_and_expectation() {
    check_refused(&[], "trainers = ", &["the configuration file FILE is not TOML"]);
    check_refused(&[], "trainer = 2", &["trainer (from FILE) is no setting; the nearest is trainers"]);
    check_refused(&["--journal", "on"], "", &["journal (from --journal) is \"on\"; expected off, or a checkpoint_dir"]);
    check_refused(&["--bind", "0.0.0.0:0"], "", &["bind (from --bind) is \"0.0.0.0:0\"", "loopback", "insecure"]);
    let check_optimizer = |text: &str, expected: &str| {
        let said = format!("optimizer (from --optimizer) is \"{text}\"; expected an optimizer message ({expected}");
        check_refused(&["--optimizer", text], "", &[&said]);
    };
    check_optimizer("optimizer: Best", "line 1, column 12: \"optimizer\" has \"Best\"; expected one of SGD");
    check_optimizer("algorithm: 'best'", "algorithm \"best\" is not known; expected one of add");
    check_optimizer("const_lr { learning_rate: nan }", "const_lr.learning_rate is NaN; expected a finite number");
    check_optimizer("const_lr { learning_rate: -1 }", "const_lr.learning_rate is -1; expected a finite number");
    check_optimizer("sgd { momentun: 1 }", "line 1, column 7: field \"momentun\" is not known in SGDConfig");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    check_refused(&["--bind", &address], "", &[&format!("listening on {address}: Address already in use")]);
}

#[test]
fn a_server_that_is_asked_to_stop_exits_with_zero() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let server = Running::serve::<&str>(&[]);
        server.ready();
        server.signal(signal);
        let ended = server.end();
        assert!(ended.status.success(), "{signal}: {ended:?}");
    }
}

#[test]
fn a_server_that_waits_for_server_0_stops_when_asked() {
    // A listener that never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let coordinator = silent.local_addr().unwrap().to_string();
    let server = Running::serve(&["--index", "1", "--servers", "2", "--coordinator", &coordinator]);
    silent.accept().unwrap();
    server.signal(Signal::SIGTERM);
    let ended = server.end();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn ready_fd_gets_one_line_and_is_closed() {
    let script = r#"exec "$0" serve --bind tcp://127.0.0.1:0 --ready-fd 3 3>&1 1>/dev/null"#;
    let server = Running::start(Command::new("/bin/sh").args(["-c", script, PROGRAM]));
    let address = server.ready();
    assert_ne!(address.port, 0);
    assert_eq!(rest(&server.output), "", "the descriptor is closed while the server runs");
    server.signal(Signal::SIGTERM);
    assert!(server.end().status.success());
}

fn accuracy(mode: &str, seed: u32) -> f64 {
    let folder = TempDir::new().unwrap();
    let mut command = pserver("quickstart");
    // A setting for another job, which alone would be refused.
    command.env("PSERVER_JOURNAL", "on");
    let ended =
        run(command.args(["--json", "--mode", mode, "--seed", &seed.to_string(), "--model-dir"]).arg(folder.path()));
    assert!(ended.status.success(), "{mode}: {ended:?}");
    assert_eq!(ended.errors, "", "there is no progress for those who are no terminal");
    let summary: serde_json::Value = serde_json::from_str(&ended.output).expect("one JSON object alone");
    let model = folder.path().join("digits.safetensors");
    assert_eq!(summary["model"], model.to_str().unwrap());
    let ended = run(pserver("inspect").arg(&model));
    assert!(ended.status.success(), "{ended:?}");
    assert!(ended.output.contains("6 tensors") && ended.output.contains("layer1/weight F32 [64, 64]"), "{ended:?}");
    summary["accuracy"].as_f64().unwrap()
}

/// Without rounds the order in which trainers push is random, and one run differs from the next by half a point (nine
/// runs: 0.9765 on average, deviation 0.0047). The mean of three seeds differs by a quarter of one, so the bound is
/// more than four deviations away.
#[test]
fn the_quickstart_learns_in_every_mode() {
    let of = |mode| [1, 2, 3].map(|seed| accuracy(mode, seed));
    let mean = |all: [f64; 3]| all.iter().sum::<f64>() / 3.0;
    let sync = of("sync");
    assert!(sync.iter().all(|one| *one >= 0.96), "sync: {sync:?}");
    for mode in ["async", "delta"] {
        let found = of(mode);
        assert!(mean(found) >= mean(sync) - 0.01, "{mode}: {found:?}, sync: {sync:?}");
    }
}

#[test]
fn a_rule_of_the_users_own_trains_with_no_change_to_the_server() {
    let lion = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/rules/lion.rule");
    let lamb = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/rules/lamb.rule");
    for (rule, set) in [(lion, "lr=0.001,b1=0.9,b2=0.99,wd=0"), (lamb, "lr=0.005")] {
        let folder = TempDir::new().unwrap();
        let mut command = pserver("quickstart");
        command.args(["--rule", rule, "--set", set, "--json", "--model-dir"]);
        let ended = run(command.arg(folder.path()));
        assert!(ended.status.success(), "{ended:?}");
        let summary: serde_json::Value = serde_json::from_str(&ended.output).expect("one JSON object alone");
        println!("{rule}: {}", summary["accuracy"]);
        assert!(summary["accuracy"].as_f64().unwrap() >= 0.96, "{rule}: {summary}");
    }
}

#[test]
fn a_bad_rule_is_refused_before_anything_starts() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("bad.rule");
    let check = |text: &str, more: &[&str], expected: &str| {
        fs::write(&path, text).unwrap();
        let mut command = pserver("quickstart");
        command.arg("--model-dir").arg(folder.path()).arg("--rule").arg(&path);
        let ended = run(command.args(more));
        assert!(!ended.status.success() && ended.errors.contains(expected), "{ended:?}, expected {expected}");
    };
    check("state m = 0\nw -= lr*(m", &[], "bad.rule: line 2, column 11: expected an operator or ')', found the end");
    check("w -= lr*g", &["--set", "mu=0.9"], "\"mu\" is set, and the rule has no such parameter");
    check("w -= lr*g", &["--set", "lr"], "expected name=value with a number, found \"lr\"");
    check("w -= lr*g", &["--mode", "delta"], "in delta mode the servers only add");
    check(&"#".repeat(20_000), &[], "expected at most 16384 bytes, found 20000");
}

/// The processes that a process has started and that still run.
fn children(parent: i32) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|pid: &i32| parent_of(*pid) == Some(parent)).collect()
}

/// A process's parent; nothing when it has ended.
fn parent_of(pid: i32) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before them may hold anything, also blanks and brackets.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    fields.next().filter(|state| *state != "Z")?;
    fields.next()?.parse().ok()
}

/// Sends a signal to a quickstart in full swing. The descriptor 3 of the shell goes to all descendants, so the pipe
/// behind it closes when the last of them has ended.
fn check_leaves_nobody(signal: Signal) -> Ended {
    let folder = TempDir::new().unwrap();
    let script = r#"exec "$0" quickstart --json --epochs 10000 --model-dir "$1" 3>&1"#;
    let mut command = Command::new("/bin/sh");
    let parent = Running::start(command.args(["-c", script, PROGRAM]).arg(folder.path()));
    let (end, mut family) = (Instant::now() + HANGS, Vec::new());
    while family.len() < 6 {
        assert!(Instant::now() < end, "two servers and four trainers run, found {family:?}");
        let said = parent.errors.recv_timeout(LOOK);
        assert_eq!(said, Err(RecvTimeoutError::Timeout), "it says nothing and runs");
        family = children(parent.pid());
    }
    parent.signal(signal);
    let closed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| parent.end()));
    for pid in &family {
        // A process that still exists was left running; it must not disturb the next test.
        if closed.is_err() && parent_of(*pid).is_some() {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
    }
    closed.unwrap_or_else(|_| panic!("one of {family:?} outlived its parent"))
}

#[test]
fn an_interrupted_quickstart_leaves_no_process_behind() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let ended = check_leaves_nobody(signal);
        assert_eq!((ended.status.code(), ended.errors.as_str()), (Some(1), "pserver: interrupted\n"));
    }
}

#[test]
fn a_killed_quickstart_leaves_no_process_behind() {
    let ended = check_leaves_nobody(Signal::SIGKILL);
    assert_eq!(ended.status.signal(), Some(9));
}

const VALUES: [f32; 3] = [1.0, 2.0, 3.0];

fn trainer(coordinator: Address) -> Client {
    Client::new(ClientOptions { trainer: Some(0), ..ClientOptions::new(coordinator) }).unwrap()
}

/// Initialises a job of one trainer with one parameter, and sends one gradient of ones at a rate of 1.
fn one_step(coordinator: Address) {
    let (client, settings) = (trainer(coordinator), OptimizerSettings::default());
    assert!(client.begin_init(&settings).unwrap());
    let content = bytemuck::cast_slice(&VALUES);
    client.init_param("w", ElementType::Float32, &[3], content, &settings).unwrap();
    client.finish_init().unwrap();
    let content = bytemuck::cast_slice(&[1.0_f32; 3]);
    client.push(&[GradientSlice { name: "w", element_type: ElementType::Float32, content }], None).unwrap();
}

fn pulled(coordinator: Address) -> [f32; 3] {
    let mut values = [0.0_f32; 3];
    let content = bytemuck::cast_slice_mut(&mut values);
    trainer(coordinator).pull(&mut [DestinationSlice::new("w", content)]).unwrap();
    values
}

fn serve_with_checkpoints(folder: &Path) -> Running {
    Running::serve(&[OsStr::new("--shards=1"), OsStr::new("--checkpoint-dir"), folder.as_os_str()])
}

#[test]
fn a_killed_server_with_a_checkpoint_dir_loses_no_gradient() {
    let folder = TempDir::new().unwrap();
    let server = serve_with_checkpoints(folder.path());
    one_step(server.ready());
    server.signal(Signal::SIGKILL);
    assert_eq!(server.end().status.signal(), Some(9));
    let server = serve_with_checkpoints(folder.path());
    assert_eq!(pulled(server.ready()), VALUES.map(|value| value - 1.0));
}

fn find(folder: &Path, ending: &str) -> PathBuf {
    let mut names: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let found = names.iter().rfind(|name| name.to_str().unwrap().ends_with(ending));
    found.unwrap_or_else(|| panic!("no {ending} in {names:?}")).clone()
}

#[test]
fn inspect_tells_a_sound_checkpoint_from_a_damaged_one() {
    let folder = TempDir::new().unwrap();
    let server = serve_with_checkpoints(folder.path());
    one_step(server.ready());
    server.signal(Signal::SIGTERM);
    assert!(server.end().status.success());
    let shard = folder.path().join("server-0/shard-0");
    for path in [folder.path(), &folder.path().join("server-0"), &shard] {
        let ended = run(pserver("inspect").arg(path));
        assert!(ended.status.success() && ended.output.starts_with("sound: 1 shard"), "{ended:?}");
        let short = run(pserver("inspect").arg("--short").arg(path));
        assert!(short.status.success(), "{short:?}");
        assert_eq!(short.output.lines().collect::<Vec<_>>(), [ended.output.lines().next().unwrap()]);
    }
    let ended = run(pserver("inspect").arg(&shard));
    assert!(ended.output.contains(": whole\n") && ended.output.contains("version 1"), "{ended:?}");
    let file = find(&shard, ".safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let ended = run(pserver("inspect").arg(&shard));
    assert!(ended.output.contains(": not whole") && ended.output.contains("BAD"), "{ended:?}");
    // Without any whole checkpoint a server refuses, and so does the verdict on the job and on the shard.
    for file in fs::read_dir(&shard).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            fs::write(&file, b"damaged").unwrap();
        }
    }
    for path in [folder.path(), &folder.path().join("server-0"), &shard] {
        let ended = run(pserver("inspect").arg(path));
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        let first = ended.output.lines().next().unwrap_or_default();
        assert!(first.starts_with("damaged: 1 shard") && first.contains("can be loaded"), "{ended:?}");
        assert!(first.contains("a server refuses it") && first.contains("To do: bring"), "{ended:?}");
    }
}

#[test]
fn inspect_says_that_a_server_runs() {
    let folder = TempDir::new().unwrap();
    let server = serve_with_checkpoints(folder.path());
    one_step(server.ready());
    for path in [folder.path(), &folder.path().join("server-0"), &folder.path().join("server-0/shard-0")] {
        let ended = run(pserver("inspect").arg("--short").arg(path));
        let is_known = ended.output.starts_with("sound: ") || ended.output.starts_with("in use: ");
        let owner = format!("server 0 (server 0, process {}", server.pid());
        assert!(is_known && ended.output.contains(&owner) && ended.output.contains(" runs"), "{owner}: {ended:?}");
    }
    // Files that cannot be read while a server writes them are no verdict on the directory.
    let shard = folder.path().join("server-0/shard-0");
    fs::write(find(&shard, ".safetensors"), b"damaged").unwrap();
    let ended = run(pserver("inspect").arg(folder.path()));
    assert!(ended.status.code() == Some(1) && ended.output.starts_with("in use: "), "{ended:?}");
    assert!(ended.output.contains("inspect it again when the server has stopped"), "{ended:?}");
    server.signal(Signal::SIGKILL);
    server.end();
    let ended = run(pserver("inspect").arg("--short").arg(folder.path()));
    assert!(ended.output.starts_with("damaged: "), "{ended:?}");
}

/// The last file by name whose name begins so: a server that is killed may leave an older one.
fn find_starting(folder: &Path, beginning: &str) -> PathBuf {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(beginning));
    paths.max().unwrap_or_else(|| panic!("no {beginning} in {}", folder.display()))
}

#[test]
fn a_server_refuses_a_newer_format_as_inspect_does() {
    let folder = TempDir::new().unwrap();
    let server = serve_with_checkpoints(folder.path());
    one_step(server.ready());
    server.signal(Signal::SIGKILL);
    server.end();
    let journal = find_starting(&folder.path().join("server-0/shard-0"), "journal-");
    let mut bytes = fs::read(&journal).unwrap();
    bytes[7] += 1;
    let sum = pserver_core::checksum::checksum(&bytes[..60]);
    bytes[60..64].copy_from_slice(&sum.to_le_bytes());
    fs::write(&journal, &bytes).unwrap();
    let ended = run(pserver("inspect").arg(folder.path()));
    assert!(ended.output.starts_with("newer format: "), "{ended:?}");
    let ended = serve_with_checkpoints(folder.path()).end();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let expected =
        ["checkpoint_dir (from --checkpoint-dir): a newer format", "nothing is damaged", "the program that wrote it"];
    assert!(expected.iter().all(|part| ended.errors.contains(part)), "{ended:?}");
    assert!(!ended.errors.contains("accept-torn-tail"), "{ended:?}");
    assert!(fs::read(&journal).unwrap() == bytes, "it is as it was");
}

#[test]
fn a_probe_of_the_port_is_not_logged() {
    let server = Running::serve::<&str>(&[]);
    let address = server.ready();
    let at = (address.host.as_str(), address.port);
    drop(std::net::TcpStream::connect(at).unwrap());
    let mut stranger = std::net::TcpStream::connect(at).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n0123456789012345678901234567890123456789").unwrap();
    stranger.read_to_end(&mut Vec::new()).unwrap();
    server.signal(Signal::SIGTERM);
    let ended = server.end();
    assert_eq!(ended.errors.matches("WARN").count(), 1, "a stranger is, and a probe is not: {ended:?}");
}

#[test]
fn inspect_refuses_a_path_that_is_no_checkpoint_and_names_it() {
    let folder = TempDir::new().unwrap();
    let check = |path: &Path, status: i32, expected: &str| {
        let ended = run(pserver("inspect").arg(path));
        assert_eq!(ended.status.code(), Some(status), "{ended:?}");
        let named = ended.errors.contains(path.to_str().unwrap()) && ended.errors.contains(expected);
        assert!(named || ended.output.contains(expected), "expected {expected}: {ended:?}");
    };
    check(&folder.path().join("nothing"), 3, "No such file");
    check(folder.path(), 3, "cannot be inspected");
    let file = folder.path().join("model.safetensors");
    fs::write(&file, [1, 2, 3]).unwrap();
    check(&file, 2, "damaged: a file of 3 bytes; a server refuses it (1 fault)");
}
