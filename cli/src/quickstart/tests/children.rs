//! The parent with a shell script in the place of the program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use clap::Parser;
use tempfile::TempDir;

use super::super::runner::{Args, Summary, run_job};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

/// A server that gets ready and lives as long as its parent, and trainers that report and end.
const SERVER: &str = "echo $$ >>\"$0.pids\"; echo starting; echo ready tcp://127.0.0.1:$$; exec cat";
const TRAINER: &str = r#"
    echo $$ >>"$0.pids"
    echo "{\"trainer\":$5,\"epoch\":1,\"loss\":0.5,\"steps\":12,\"bytes\":1000,\"seconds\":0.5}"
    [ $5 -gt 0 ] && exit 0
    read order; [ "$order" = finish ] || exit 9
    echo '{"trainer":0,"accuracy":0.975,"path":"models/digits"}'
"#;

struct Stage {
    folder: TempDir,
}

impl Stage {
    fn new(server: &str, trainer: &str) -> Self {
        let stage = Self { folder: TempDir::new().unwrap() };
        let text = format!("#!/bin/sh\ncase $1 in serve) {server} ;;\n*) {trainer} ;;\nesac\n");
        fs::write(stage.program(), text).unwrap();
        fs::set_permissions(stage.program(), fs::Permissions::from_mode(0o755)).unwrap();
        stage
    }

    fn program(&self) -> PathBuf {
        self.folder.path().join("program")
    }

    fn run_job(&self) -> Result<Summary, String> {
        let mut args = Line::parse_from(["quickstart", "--epochs", "1", "--json"]).args;
        args.model_dir = self.folder.path().join("models");
        let outcome = run_job(&args, &self.program()).map_err(|error| format!("{error:#}"));
        let pids = fs::read_to_string(self.folder.path().join("program.pids")).unwrap_or_default();
        for pid in pids.lines() {
            assert!(!PathBuf::from(format!("/proc/{pid}")).exists(), "child {pid} is left behind");
        }
        outcome
    }
}

fn check_fails(server: &str, trainer: &str, expected: &str) {
    let error = Stage::new(server, trainer).run_job().unwrap_err();
    assert!(error.contains(expected), "found {error}\nexpected {expected}");
}

#[test]
fn a_run_ends_with_its_summary_and_without_children() {
    let stage = Stage::new(SERVER, TRAINER);
    let expected = Summary {
        accuracy: 0.975,
        model: "models/digits".to_owned(),
        bytes: 4000,
        seconds: 0.5,
        bytes_per_second: 8000.0,
    };
    assert_eq!(stage.run_job(), Ok(expected));
    let pids = fs::read_to_string(stage.folder.path().join("program.pids")).unwrap();
    assert_eq!(pids.lines().count(), 6, "two servers and four trainers ran");
}

#[test]
fn a_child_that_dies_is_named_with_its_status_and_last_lines() {
    check_fails(
        "echo one >&2; echo the disk is full >&2; exit 3",
        TRAINER,
        "server 0 did not get ready: server 0 failed: exit status: 3\n  one\n  the disk is full",
    );
    check_fails(
        SERVER,
        "[ $5 = 2 ] && { echo lost >&2; exit 4; }; exec cat",
        "trainer 2 failed: exit status: 4\n  lost",
    );
    check_fails(SERVER, "[ $5 = 1 ] && kill -9 $$; exec cat", "trainer 1 failed: signal: 9");
}

#[test]
fn a_child_that_leaves_early_is_named() {
    check_fails("exit 0", TRAINER, "server 0 exited before the end of its work");
    check_fails(SERVER, "[ $5 = 0 ] && exit 0; exec cat", "trainer 0 exited before the end of its work");
}

#[test]
fn a_trainer_with_invalid_output_is_named() {
    check_fails(SERVER, "[ $5 = 3 ] && echo hello; exec cat", "trainer 3 wrote \"hello\"; expected a report in JSON");
}

#[test]
fn a_child_that_does_not_stop_when_asked_is_killed() {
    let deaf = format!("trap '' TERM; {SERVER}");
    assert_eq!(Stage::new(&deaf, TRAINER).run_job().unwrap().model, "models/digits");
}
