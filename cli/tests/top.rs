//! `pserver top`: a job as text and in a terminal, which is left as it was.

mod cluster;

use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cluster::job::{Job, client, folder};
use cluster::ports::free_port;
use cluster::process::Process;
use cluster::training::{Tensor, begin, push};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_core::dtype::ElementType::Float32;

/// The terminal's commands for a second screen, and for the first one again.
const SECOND_SCREEN: &str = "\u{1b}[?1049h";
const FIRST_SCREEN: &str = "\u{1b}[?1049l";
/// The terminal's command that shows the cursor.
const CURSOR: &str = "\u{1b}[?25h";

/// A server with HTTP at the port that it returns, which has done one round.
fn server(more: &[String]) -> (Process, String) {
    let at = format!("127.0.0.1:{}", free_port());
    let mut arguments = Job::new(1, 1).with("--http", &at).arguments(0, "127.0.0.1:0", None);
    arguments.extend(more.iter().cloned());
    let server = Process::start(&arguments).expect("it starts");
    let trainer = client(&server.address, 0);
    let tensors = [Tensor::new("w", Float32, 1000, "const_lr { learning_rate: 1.0 }").zeroed()];
    assert!(begin(&trainer, &tensors).expect("it is chosen"));
    push(&trainer, &tensors, 0, 1).expect("it is taken");
    (server, at)
}

fn once(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.arg("top").args(arguments).arg("--once").env_remove("PSERVER_HTTP_TOKEN_FILE");
    command.stdin(Stdio::null()).output().expect("the program can be run")
}

fn must_fail(arguments: &[&str], expected: &str) {
    let output = once(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    assert!(said.contains(expected), "{arguments:?}: {said}; expected {expected}");
}

#[test]
fn a_job_is_printed_once_as_plain_text() {
    let folder = folder();
    let token = folder.path().join("token");
    std::fs::write(&token, "correct horse battery staple\n").expect("there is room");
    let token = token.display().to_string();
    let (server, at) = server(&["--http-token-file".to_owned(), token.clone()]);
    let output = once(&[&format!("http://{at}/"), "--http-token-file", &token]);
    let text = String::from_utf8(output.stdout).expect("it is text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for expected in [
        "pserver: sync, ",
        " of 1 trainers, 1 of 1 servers",
        "rounds 1 (0.0 a second)",
        " 0.0 serving ",
        "optimizer state",
    ] {
        assert!(text.contains(expected), "{text}; expected {expected}");
    }
    assert!(!text.contains('\u{1b}'), "{text}");
    must_fail(&[&at], "has a token: expected the file with it in --http-token-file");
    must_fail(&[&at, "--http-token-file", "/nowhere/token"], "http_token_file /nowhere/token: No such file");
    must_fail(&["127.0.0.1"], "has no port; expected HOST:PORT");
    must_fail(&[&format!("127.0.0.1:{}", free_port())], "Connection refused");
    drop(server);
}

#[test]
fn a_server_that_is_stopped_is_shown_as_silent() {
    let at = format!("127.0.0.1:{}", free_port());
    let job = Job::new(2, 1);
    let first = Process::start(&job.clone().with("--http", &at).arguments(0, "127.0.0.1:0", None)).expect("it starts");
    let address = first.address.to_string();
    let second = Process::start(&job.arguments(1, "127.0.0.1:0", Some(&address))).expect("it starts");
    let shows = |expected: &str| {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let text = String::from_utf8(once(&[&at]).stdout).expect("it is text");
            if text.contains(expected) {
                return text;
            }
            assert!(Instant::now() < deadline, "{text}; expected {expected}");
            // tidy: allow sleep: time without a message has no event
            thread::sleep(Duration::from_millis(100));
        }
    };
    shows("2 of 2 servers");
    kill(second.id(), Signal::SIGSTOP).expect("it runs");
    let text = shows("server 1 has been silent for ");
    assert!(text.contains("1 of 2 servers"), "{text}");
    kill(second.id(), Signal::SIGCONT).expect("it is there");
    shows("2 of 2 servers");
    drop((first, second));
}

#[test]
fn a_terminal_is_left_as_it_was() {
    let (server, at) = server(&[]);
    let line = format!("top {at}");
    // The key ends it with success; so does a signal.
    let (mut top, seen, _) = in_a_terminal(&line, "PHASE");
    top.stdin.take().expect("it is piped").write_all(b"q").expect("it reads");
    is_left(top, seen);
    let (top, seen, id) = in_a_terminal(&line, "PHASE");
    kill(id, Signal::SIGTERM).expect("it runs");
    is_left(top, seen);
    drop(server);
}

#[test]
fn lines_of_the_log_have_colours_in_a_terminal_alone() {
    let (server, _, id) = in_a_terminal("serve --bind 127.0.0.1:0", "\u{1b}[32m INFO");
    kill(id, Signal::SIGTERM).expect("it runs");
    assert!(server.wait_with_output().expect("it ends").status.success());
    let mut server = Process::start(&["--bind".to_owned(), "127.0.0.1:0".to_owned()]).expect("it starts");
    let words = server.words();
    assert!(words.contains(" INFO ") && !words.contains('\u{1b}'), "{words}");
}

/// Runs the program in a terminal of its own until it shows `text`; its output so far, and the number of its process.
fn in_a_terminal(arguments: &str, text: &str) -> (Child, String, Pid) {
    // A text that does not come ends the wait.
    let mut command = Command::new("timeout");
    command.args(["--foreground", "60", "script"]);
    let program = env!("CARGO_BIN_EXE_pserver");
    let line = format!("stty rows 50 cols 120; echo pid=$$.; exec {program} {arguments}");
    command.args(["-qefc", &line, "/dev/null"]).env("TERM", "xterm").env("SHELL", "/bin/sh").env_remove("NO_COLOR");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut top = command.spawn().expect("util-linux is installed");
    let mut seen = String::new();
    let output = top.stdout.as_mut().expect("it is piped");
    while !seen.contains(text) {
        let mut bytes = [0; 4096];
        let count = output.read(&mut bytes).expect("it writes");
        assert!(count > 0, "it ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    let id = seen.split_once("pid=").and_then(|(_, rest)| rest.split('.').next()?.parse().ok()).expect("a number");
    (top, seen, Pid::from_raw(id))
}

fn is_left(top: Child, mut seen: String) {
    let ended = top.wait_with_output().expect("it ends");
    seen.push_str(&String::from_utf8_lossy(&ended.stdout));
    assert!(ended.status.success(), "{ended:?}");
    let (second, first) = (seen.rfind(SECOND_SCREEN), seen.rfind(FIRST_SCREEN));
    assert!(second.is_some() && second < first, "the first screen is back: {seen:?}");
    assert!(seen.rfind("\u{1b}[?25l") < seen.rfind(CURSOR), "the cursor is shown: {seen:?}");
}
