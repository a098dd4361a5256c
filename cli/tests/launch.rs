//! `pserver launch` on this machine: training, output, signals, the token, and 50 mistakes that leave nothing behind.

mod launching;

use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Instant, SystemTime};

use launching::{ACCURACY_MIN, DIGITS, MarkedRun, PATIENCE, RunEnd, digits_folder, launch, script};
use nix::sys::signal::{Signal, kill};
use pserver_kernels::conformance::skips::skip;
use tempfile::TempDir;

/// The fewest mistakes that the table holds.
const MISTAKES_MIN: usize = 50;

#[test]
fn two_servers_and_four_trainers_learn_the_digits() {
    let folder = digits_folder();
    let end = MarkedRun::start(launch(folder.path(), &[&["--servers", "2", "--trainers", "4"], &DIGITS[..]].concat()));
    let end = end.end();
    assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);
    assert!(end.output.contains("[server 0] ready ") && end.output.contains("[server 1] ready "), "{}", end.output);
    assert_eq!(end.errors, "", "servers leave the job in order");
}

#[test]
fn a_job_that_is_encrypted_learns_the_digits_by_the_token_alone() {
    let folder = digits_folder();
    let arguments = [&["--encrypt", "tcp", "--servers", "2", "--trainers", "2"], &DIGITS[..]].concat();
    let end = MarkedRun::start(launch(folder.path(), &arguments)).end();
    assert!(end.accuracy(2) > ACCURACY_MIN, "{}", end.output);
    assert_eq!(end.errors, "", "servers leave the job in order");
    let arguments = ["--encrypt", "required", "--", "sh", "-c", "echo encrypt $PSERVER_ENCRYPT"];
    let end = MarkedRun::start(launch(folder.path(), &arguments)).end();
    assert!(end.output.contains("[trainer 0] encrypt required"), "{end:?}");
    let end = MarkedRun::start(launch(folder.path(), &["--server-args", "--encrypt tcp", "--", "true"])).end();
    assert!(end.errors.contains("found --encrypt, which every part gets from pserver launch"), "{end:?}");
}

#[test]
fn lines_of_several_trainers_are_whole_named_and_in_order() {
    let folder = TempDir::new().expect("there is room");
    let text = "i=0; while [ $i -lt 500 ]; do printf '%s ' a b c; echo $PSERVER_TRAINER of $PSERVER_TRAINERS $i; \
                i=$((i+1)); done; printf end; echo fault >&2";
    let end = MarkedRun::start(launch(folder.path(), &["--trainers", "4", "--", "sh", "-c", text])).end();
    assert!(end.status.success(), "{end:?}");
    for trainer in 0..4 {
        let prefix = format!("[trainer {trainer}] ");
        let found: Vec<&str> = end.output.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<String> = (0..500).map(|line| format!("a b c {trainer} of 4 {line}")).collect();
        assert!(found[..500] == expected[..] && found[500..] == ["end"], "{found:?}");
        assert!(end.errors.contains(&format!("{prefix}fault\n")), "{}", end.errors);
    }
    assert_eq!(end.output.lines().filter(|line| !line.contains("] ready ")).count(), 4 * 501);
}

#[test]
fn server_0_shows_the_job_and_the_others_their_metrics() {
    let folder = TempDir::new().expect("there is room");
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let port = (20_000..30_000).step_by(7).find(|port| (0..3).all(|server| is_free(port + server)));
    let port = port.expect("three ports are free");
    let text = "ask() { exec 3<>/dev/tcp/127.0.0.1/$1; printf 'GET /%s HTTP/1.0\\r\\n\\r\\n' $2 >&3; cat <&3; }; \
                count() { ask $1 status | grep -Eo '\"is_connected\": ?true' | wc -l; }; \
                until [ $(count $1) = 3 ]; do sleep 0.05; done; \
                for p in $(($1+1)) $(($1+2)); do ask $p metrics | grep -m1 -o pserver_ > /dev/null && \
                echo metrics; done; \
                ask $1 status | grep -Eo '\"level\": ?\"INFO\"' | head -n 1 | sed 's/ //g'; echo shown";
    let (at, port) = (format!("127.0.0.1:{port}"), port.to_string());
    let command = ["--servers", "3", "--http", &at, "--", "bash", "-c", text, "bash", &port];
    let end = MarkedRun::start(launch(folder.path(), &command)).end();
    assert!(end.status.success() && end.output.contains("[trainer 0] shown\n"), "{end:?}");
    assert_eq!(end.output.matches("[trainer 0] metrics\n").count(), 2, "{end:?}");
    assert!(end.output.contains("[trainer 0] \"level\":\"INFO\"\n"), "its events are there without lines: {end:?}");
}

#[test]
fn surroundings_that_are_no_text_are_taken_or_named() {
    let folder = TempDir::new().expect("there is room");
    let inner = folder.path().join(OsStr::from_bytes(b"d\xff"));
    fs::create_dir(&inner).expect("there is room");
    let bytes = OsStr::from_bytes(b"\xff\xfe");
    let mut command = launch(&inner, &["--", "sh", "-c", "pwd | grep -c d"]);
    command.env("OTHER", bytes).env(OsStr::from_bytes(b"N\xff"), "1");
    let end = MarkedRun::start(command).end();
    assert!(end.status.success() && end.output.contains("[trainer 0] 1\n"), "{end:?}");
    let mut command = launch(folder.path(), &["--", "true"]);
    command.env("PSERVER_SHARDS", bytes);
    let end = MarkedRun::start(command).end();
    assert!(end.errors.contains("the variable PSERVER_SHARDS is \"\\xFF\\xFE\"; expected text in UTF-8"), "{end:?}");
    let mut command = launch(folder.path(), &["--env", "OTHER", "--", "true"]);
    command.env("OTHER", bytes);
    let end = MarkedRun::start(command).end();
    assert!(!end.status.success() && end.errors.contains("the variable OTHER is"), "{end:?}");
}

#[test]
fn a_trainer_in_a_container_gets_the_token() {
    let container = ["unshare", "-Urpf", "--mount-proc"];
    let works = Command::new(container[0]).args(&container[1..]).arg("true").output();
    if !works.is_ok_and(|ended| ended.status.success()) {
        skip("namespaces", "a user may not make them here");
        return;
    }
    let folder = TempDir::new().expect("there is room");
    let text = "[ -e $PSERVER_TOKEN_FILE ] && echo readable; exec \"$0\" env";
    let command = [&["--"][..], &container, &["sh", "-c", text, env!("CARGO_BIN_EXE_pserver")]].concat();
    let end = MarkedRun::start(launch(folder.path(), &command)).end();
    assert!(end.status.success() && !end.output.contains("readable"), "{end:?}");
    assert!(end.output.contains("[trainer 0] token_file = /proc/"), "{end:?}");
}

/// The end of a job of two trainers on a disk of so many bytes, and the files that its server leaves there.
fn trained_on_a_disk(bytes: u64) -> Option<(RunEnd, String)> {
    let container = ["unshare", "-Urm"];
    let works = Command::new(container[0]).args(&container[1..]).args(["mount", "-t", "tmpfs", "x", "/mnt"]).output();
    if !works.is_ok_and(|ended| ended.status.success()) {
        skip("namespaces", "a user may not mount a file system in one");
        return None;
    }
    let folder = digits_folder();
    fs::create_dir(folder.path().join("disk")).expect("there is room");
    let text = format!(
        "mount -t tmpfs -o size={bytes} x disk && \"$0\" launch --trainers 2 --server-args '--checkpoint-dir disk/c \
         --shards 1' -- ./digits mlp.program digits.csv 2 90 model.safetensors; ended=$?; ls disk/c/server-0/shard-0 > \
         files; exit $ended"
    );
    let mut command = Command::new(container[0]);
    command.args(&container[1..]).args(["sh", "-c", &text, env!("CARGO_BIN_EXE_pserver")]).current_dir(folder.path());
    let end = MarkedRun::start(command).end();
    Some((end, fs::read_to_string(folder.path().join("files")).expect("they were listed")))
}

#[test]
fn a_journal_is_cut_before_a_small_disk_is_full() {
    let Some((end, files)) = trained_on_a_disk(18 << 20) else { return };
    assert!(end.accuracy(2) > ACCURACY_MIN, "{}", end.output);
    let journals = files.lines().filter(|name| name.starts_with("journal-"));
    let begins = journals.map(|name| name.rsplit_once('-').expect("a position").1.parse::<u64>().expect("a number"));
    assert!(begins.max().expect("there is one") > 18 << 20, "more was journalled than the disk holds: {files}");
}

#[test]
fn a_disk_that_is_too_small_for_a_jobs_files_refuses_its_parameters() {
    let Some((end, files)) = trained_on_a_disk(10 << 20) else { return };
    let text = format!("{}{}", end.output, end.errors);
    assert!(!end.status.success() && !files.contains("checkpoint-"), "{text}");
    assert!(text.contains("bytes of the disk on this shard (three checkpoints of "), "{text}");
    assert!(text.contains("which the other shards leave or in files of this one"), "{text}");
}

#[test]
fn a_display_of_progress_is_shown() {
    let folder = TempDir::new().expect("there is room");
    let text = "printf 'step 1\\rstep 2\\rstep 3\\n'";
    let end = MarkedRun::start(launch(folder.path(), &["--", "sh", "-c", text])).end();
    assert!(end.output.contains("[trainer 0] step 1\n[trainer 0] step 3\n"), "{end:?}");
}

#[test]
fn a_long_line_is_cut_between_characters_and_bytes_that_are_no_text_are_shown() {
    let folder = TempDir::new().expect("there is room");
    let text = "printf x; head -c 99999 /dev/zero | sed 's/\\x0/\u{e9}/g'; echo; printf 'a\\377b'";
    let end = MarkedRun::start(launch(folder.path(), &["--", "sh", "-c", text])).end();
    let pieces: Vec<&str> = end.output.lines().filter_map(|line| line.strip_prefix("[trainer 0] ")).collect();
    assert_eq!(pieces.iter().map(|piece| piece.matches('\u{e9}').count()).sum::<usize>(), 99_999, "{}", end.errors);
    assert_eq!((pieces.len(), pieces.last()), (5, Some(&"a\u{fffd}b")));
}

#[test]
fn the_token_is_in_no_command_line_and_no_environment() {
    let folder = TempDir::new().expect("there is room");
    let text = "wc -c < $PSERVER_TOKEN_FILE; grep -laF -f $PSERVER_TOKEN_FILE /proc/[0-9]*/cmdline \
                /proc/[0-9]*/environ 2>/dev/null; echo found $?";
    let end = MarkedRun::start(launch(folder.path(), &["--", "sh", "-c", text])).end();
    assert!(
        end.output.ends_with("[trainer 0] 64\n[trainer 0] found 1\n") || end.output.ends_with("found 2\n"),
        "{end:?}"
    );
    assert!(!end.output.contains("/proc/"), "{end:?}");
}

/// A trainer that prints when it is ready for a signal, and then the first signal that it receives.
const TRAPPED: &str = "for s in INT TERM HUP; do trap \"echo got $s; exit 0\" $s; done; touch at$PSERVER_TRAINER; \
                       while :; do sleep 0.05; done";

/// Waits until both trainers are ready.
fn await_both(run: &MarkedRun, folder: &Path) {
    let (begun, is_ready) = (Instant::now(), || ["at0", "at1"].iter().all(|name| folder.join(name).exists()));
    while !is_ready() {
        assert!(begun.elapsed() < PATIENCE, "not ready: {:?}", run.processes());
        std::thread::yield_now();
    }
}

#[test]
fn signals_are_passed_on_and_are_the_status() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let folder = TempDir::new().expect("there is room");
        let run = MarkedRun::start(launch(folder.path(), &["--trainers", "2", "--", "sh", "-c", TRAPPED]));
        await_both(&run, folder.path());
        kill(run.id(), signal).expect("it runs");
        let end = run.end();
        assert_eq!(end.status.code(), Some(128 + signal as i32), "{end:?}");
        let name = signal.as_str().trim_start_matches("SIG");
        (0..2).for_each(|one| assert!(end.output.contains(&format!("[trainer {one}] got {name}\n")), "{end:?}"));
        assert!(end.errors.contains(&format!("pserver: interrupted by {signal}")), "{end:?}");
    }
}

#[test]
fn a_killed_launcher_leaves_no_process() {
    let folder = TempDir::new().expect("there is room");
    let text = "trap '' TERM INT HUP; (setsid sleep 1000 &); touch at$PSERVER_TRAINER; while :; do sleep 0.05; done";
    let run = MarkedRun::start(launch(folder.path(), &["--grace", "0", "--trainers", "2", "--", "sh", "-c", text]));
    await_both(&run, folder.path());
    kill(run.id(), Signal::SIGKILL).expect("it runs");
    assert_eq!(run.end().status.signal(), Some(9));
}

#[test]
fn a_killed_server_ends_the_job_and_nothing_is_left() {
    let since = SystemTime::now();
    let (folder, work) = (TempDir::new().expect("there is room"), TempDir::new().expect("there is room"));
    let text =
        "touch FOLDER/at$PSERVER_TRAINER; exec sleep 1000".replace("FOLDER", &folder.path().display().to_string());
    let mut command = launch(work.path(), &["--servers", "2", "--trainers", "2", "--", "sh", "-c", &text]);
    command.env("TMPDIR", work.path());
    let run = MarkedRun::start(command);
    await_both(&run, folder.path());
    let server = run.process_with("PSERVER_INDEX=1").expect("it runs");
    kill(server, Signal::SIGKILL).expect("it runs");
    let end = run.end();
    assert_eq!(end.status.code(), Some(137), "{end:?}");
    assert!(end.errors.contains("pserver: server 1 was ended by SIGKILL; expected 0"), "{end:?}");
    assert_eq!(files_left(work.path(), "", since), Vec::<PathBuf>::new());
}

#[test]
fn a_server_by_hand_that_is_killed_leaves_no_file_and_no_name() {
    let (work, since) = (TempDir::new().expect("there is room"), SystemTime::now());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.args(["serve", "--bind", "127.0.0.1:0", "--ready-fd", "3"]).current_dir(work.path());
    let ready = work.path().join("ready");
    let shell = format!("exec \"$@\" 3>'{}'", ready.display());
    let mut server = Command::new("sh");
    server.args(["-c", &shell, "sh"]).arg(command.get_program()).args(command.get_args());
    server.current_dir(work.path()).env("TMPDIR", work.path());
    let run = MarkedRun::start(server);
    let begun = Instant::now();
    let address = loop {
        let said = fs::read_to_string(&ready).unwrap_or_default();
        if let Some(line) = said.strip_suffix('\n') {
            break line.to_owned();
        }
        assert!(begun.elapsed() < PATIENCE, "not ready: {:?}", run.processes());
        std::thread::yield_now();
    };
    let port = address.rsplit_once(':').expect("an address").1.to_owned();
    let names = || fs::read_to_string("/proc/net/unix").expect("there is /proc");
    let is_named = || names().lines().any(|line| line.ends_with(&format!("@pserver-token-127.0.0.1-{port}")));
    assert!(is_named(), "{address}: clients of this user get the token");
    kill(run.id(), Signal::SIGKILL).expect("it runs");
    assert_eq!(run.end().status.signal(), Some(9));
    assert!(!is_named(), "{}", names());
    fs::remove_file(&ready).expect("it is ours");
    assert_eq!(files_left(work.path(), &port, since), Vec::<PathBuf>::new());
}

/// Files in a run's folder, and files and shared memory that a server at a port has made since in the folders of all.
fn files_left(folder: &Path, port: &str, since: SystemTime) -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let files = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let common = [format!("/tmp/pserver-{user}"), format!("/run/user/{user}/pserver"), "/dev/shm".to_owned()];
    let of_server = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_new = path.metadata().and_then(|facts| facts.modified()).is_ok_and(|modified| since <= modified);
        is_new && (name.contains("pserver") || !port.is_empty() && name.contains(port))
    };
    let common = common.iter().flat_map(|folder| files(Path::new(folder))).filter(of_server);
    files(folder).into_iter().chain(common).collect()
}

#[test]
fn a_job_by_the_variables_of_ps_lite_learns_the_digits() {
    let folder = digits_folder();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).expect("a port is free").port();
    let process = |program: &str, arguments: &[&str], variables: &[String]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder.path()).env("DMLC_PS_ROOT_URI", "127.0.0.1");
        command.env("DMLC_PS_ROOT_PORT", port.to_string()).env("DMLC_NUM_SERVER", "2").env("DMLC_NUM_WORKER", "2");
        command.envs(variables.iter().filter_map(|one| one.split_once('=')));
        MarkedRun::start(command)
    };
    let server = |index: u32| {
        let variables = ["DMLC_ROLE=server".to_owned(), format!("DMLC_SERVER_ID={index}")];
        process(env!("CARGO_BIN_EXE_pserver"), &["serve", "--log-level", "warn"], &variables)
    };
    let worker = |rank: u32| {
        let variables = ["DMLC_ROLE=worker".to_owned(), format!("DMLC_WORKER_ID={rank}")];
        process("./digits", &DIGITS[2..], &variables)
    };
    let (servers, workers) = ([server(0), server(1)], [worker(0), worker(1)]);
    for (rank, worker) in workers.into_iter().enumerate() {
        let end = worker.end();
        assert!(end.status.success(), "{end:?}");
        let prefix = format!("trainer {rank}, epoch");
        let line = end.output.lines().rfind(|line| line.starts_with(&prefix)).unwrap_or_else(|| panic!("{end:?}"));
        let accuracy: f64 = line.rsplit_once(' ').expect("an accuracy").1.parse().expect("a number");
        assert!(accuracy > ACCURACY_MIN, "{end:?}");
    }
    for (index, server) in servers.into_iter().enumerate().rev() {
        kill(server.id(), Signal::SIGTERM).expect("it runs");
        let end = server.end();
        assert!(end.status.success() && end.errors.is_empty(), "{end:?}");
        let root = format!("ready 127.0.0.1:{port}\n");
        assert_eq!(end.output == root, index == 0, "server 0 is where all look for it: {}", end.output);
    }
}

/// Arguments, words separated by `|`; the exit status; and parts of the text, in their order. `FOLDER` is a folder with
/// the files of [`prepare`], `TAKEN` a port with a listener that says nothing, `FREE` one without.
type LaunchMistake = (&'static str, i32, &'static [&'static str]);

const MISTAKES: &[LaunchMistake] = &[
    ("", 2, &["required arguments were not provided", "COMMAND"]),
    ("--trainers|2|true", 2, &["unexpected argument 'true'", "[OPTIONS] -- <COMMAND>"]),
    ("--servers|0|--|true", 2, &["invalid value '0' for '--servers", "1..=1024"]),
    ("--trainers|0|--|true", 2, &["invalid value '0' for '--trainers", "1..=4096"]),
    ("--trainers|5000|--|true", 2, &["invalid value '5000' for '--trainers"]),
    ("--servers|many|--|true", 2, &["invalid value 'many' for '--servers"]),
    ("--trainer|2|--|true", 2, &["unexpected argument '--trainer'", "a similar argument exists: '--trainers'"]),
    ("--with|docker|--|true", 2, &["invalid value 'docker'", "possible values: local, ssh, srun, mpirun"]),
    ("--|", 1, &["the command is an empty word; expected the trainer's program"]),
    (
        "--http|9464|--|true",
        1,
        &["[server 0]", "http (from PSERVER_HTTP) is \"9464\"; expected the number of an address"],
    ),
    ("--hostfile|FOLDER/marked|--launcher|FOLDER/refused|--|true", 1, &["host m ended (exit status: 255)"]),
    ("--|./none", 1, &["./none: expected the trainer's program: No such file"]),
    ("--|no-such-program", 1, &["no-such-program: found no such program in PATH", "such as ./no-such-program"]),
    ("--|FOLDER/text", 1, &["text: found a file that is not executable", "(chmod +x)"]),
    ("--|FOLDER", 1, &["found a folder; expected the trainer's program"]),
    ("--|FOLDER/garbage", 127, &["[trainer 0]", "garbage", "not found", "trainer 0 ended with exit status 127"]),
    ("--|FOLDER/interpreter", 127, &["interpreter cannot be started: No such file", "exit status 127"]),
    ("--trainers|2|--|FOLDER/one-fails", 3, &["trainer 1 ended with exit status 3; expected 0"]),
    ("--trainers|2|--|FOLDER/one-is-killed", 137, &["trainer 1 was ended by SIGKILL; expected 0"]),
    ("--trainers|2|--|FOLDER/one-aborts", 134, &["trainer 1 was ended by SIGABRT"]),
    ("--trainers|2|--grace|0|--|FOLDER/stubborn", 3, &["trainer 1 ended with exit status 3"]),
    ("--trainers|2|--|FOLDER/leaves-a-daemon", 3, &["trainer 1 ended with exit status 3"]),
    ("--|sh|-c|kill -9 $PPID; sleep 1000", 1, &["this machine: the connection ended while server 0 ran"]),
    ("--|PROGRAM|env|trainer=9", 1, &["[trainer 0] pserver: trainer (from the options) is \"9\"", "below trainers"]),
    ("--server-args|--shards 0|--|true", 1, &["[server 0]", "shards (from --shards) is \"0\"", "server 0 ended with"]),
    ("--server-args|--shard 2|--|true", 2, &["[server 0] error: unexpected argument '--shard'", "similar"]),
    ("--server-args|--optimizer 'Adam|--|true", 1, &["--server-args", "expected options with quotes in pairs"]),
    ("--server-args|--optimizer Adma|--|true", 1, &["[server 0]", "optimizer (from --optimizer)"]),
    ("--server-args|--bind 127.0.0.1:TAKEN|--|true", 1, &["[server 0]", "127.0.0.1:TAKEN", "in use", "server 0 ended"]),
    ("--server-args|--config FOLDER/none|--|true", 1, &["[server 0]", "none cannot be read"]),
    ("--server-args|--index 1|--|true", 1, &["--server-args: found --index", "expected none: servers are numbered"]),
    ("--trainers|2|--server-args|--shards 2 --trainers=4|--|true", 1, &["found --trainers", "its own --trainers"]),
    ("--env|PSERVER_TOKEN_FILE=|--|true", 1, &["--env PSERVER_TOKEN_FILE=: every part gets", "makes a token"]),
    ("--env|PSERVER_TRAINER=7|--|true", 1, &["--env PSERVER_TRAINER=7: every part gets", "numbered from 0"]),
    ("--env|=x|--|true", 1, &["--env =x: found no name; expected NAME=VALUE"]),
    ("--hosts||--|true", 1, &["--hosts \"\": found no host; expected one or more"]),
    ("--with|srun|--|true", 1, &["found no allocation (SLURM_JOB_ID is not set)", "expected salloc or sbatch"]),
    ("--with|ssh|--|true", 1, &["--with ssh: found no hosts; expected --hosts or --hostfile"]),
    ("--with|local|--hosts|a|--|true", 1, &["found hosts; expected --with ssh"]),
    ("--hosts|a,b,a|--|true", 1, &["host a is given twice; expected once"]),
    ("--hosts|n[1-|--|true", 1, &["--hosts \"n[1-\": the end within brackets; expected ']'"]),
    ("--hosts=-oProxyCommand=x|--|true", 1, &["host \"-oProxyCommand=x\": expected a name without a dash"]),
    ("--hosts|a b|--|true", 1, &["host \"a b\": found a blank; expected commas between hosts"]),
    ("--hosts|me@a:22|--|true", 1, &["host \"me@a:22\": found a port; expected me@a, with --launcher 'ssh -p 22'"]),
    ("--hosts|a,,b|--|true", 1, &["--hosts \"a,,b\": an empty name"]),
    ("--hosts|[::1]|--|true", 1, &["--hosts \"[::1]\": \"::1\" in brackets"]),
    ("--hostfile|FOLDER/bytes|--|true", 1, &["--hostfile", "bytes: stream did not contain valid UTF-8"]),
    ("--hostfile|FOLDER|--|true", 1, &["--hostfile", "Is a directory"]),
    ("--hosts|a|--launcher|no-such-ssh|--|true", 1, &["host a: no-such-ssh cannot be started: No such file"]),
    (
        "--hosts|a|--launcher|FOLDER/refused|--|true",
        1,
        &["[host a] me@a: Permission denied", "host a ended (exit status: 255)"],
    ),
    ("--heartbeat-timeout|0|--|true", 2, &["invalid value '0' for '--heartbeat-timeout"]),
    ("--hostfile|FOLDER/none|--|true", 1, &["--hostfile", "none: No such file"]),
    ("--hostfile|FOLDER/empty|--|true", 1, &["--hostfile", "empty: found no host; expected one in each line"]),
    ("--hosts|a|--launcher|/no/ssh|--|true", 1, &["host a: /no/ssh cannot be started: No such file"]),
    (
        "--hosts|a|--launcher|echo hello|--|true",
        1,
        &["[host a] hello", "host a ended (exit status: 0) before its parts"],
    ),
    ("--hosts|a|--launcher|FOLDER/silent|--connect-timeout|1|--|true", 1, &["host a: no answer within 1 s"]),
    ("--launcher|ssh|--|true", 1, &["--launcher: expected ssh, srun or mpirun with it"]),
    (
        "--with|mpirun|--launcher|/no/mpirun|--|true",
        1,
        &["/no/mpirun cannot be started; expected the mpirun of an MPI"],
    ),
    ("--with|mpirun|--launcher|mpirun 'x|--|true", 1, &["--launcher", "expected a command, with quotes in pairs"]),
    ("--with|mpirun|--launcher|FOLDER/refuses|--|true", 1, &["not enough slots", "before its parts were started"]),
    // An agent that answers after the others were stopped is stopped too; the launcher does not wait for the grace.
    (
        "--with|mpirun|--trainers|2|--launcher|FOLDER/twice|--grace|3600|--|true",
        1,
        &["twice of trainers started rank 0 twice"],
    ),
    (
        "--with|mpirun|--trainers|2|--connect-timeout|1|--launcher|FOLDER/few|--|true",
        1,
        &["few of trainers: no answer from rank 1 within 1 s; expected all"],
    ),
    ("--with|mpirun|--launcher|FOLDER/beyond|--|true", 1, &["started rank 7; expected ranks below 1"]),
    ("--with|mpirun|--launcher|FOLDER/unnumbered|--|true", 1, &["gave an agent no rank; expected 0 to 0"]),
    ("--env|NO_SUCH_VARIABLE|--|true", 1, &["--env NO_SUCH_VARIABLE: it is not set; expected a value"]),
];

/// Writes the files that the table names.
fn prepare(folder: &Path) {
    let of_one = |what: &str| format!("#!/bin/sh\n[ $PSERVER_TRAINER = 1 ] && {what}\nexec sleep 1000\n");
    let agents = |what: &str| format!("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n{what}\nwait\n");
    fs::write(folder.join("text"), "no program\n").expect("a file");
    fs::write(folder.join("empty"), "# no host\n\n").expect("a file");
    fs::write(folder.join("marked"), "\u{feff}m slots=2\r\n\t# none\r\n").expect("a file");
    fs::write(folder.join("bytes"), b"a\xff\n").expect("a file");
    let scripts = [
        ("refused", "#!/bin/sh\necho 'me@a: Permission denied (publickey).' >&2\nexit 255\n".to_owned()),
        ("garbage", "\u{1}\u{2}garbage".to_owned()),
        ("interpreter", "#!/no/such/interpreter\n".to_owned()),
        ("one-fails", of_one("exit 3")),
        ("one-is-killed", of_one("kill -KILL $$")),
        ("one-aborts", of_one("kill -ABRT $$")),
        (
            "stubborn",
            "#!/bin/sh\n[ $PSERVER_TRAINER = 1 ] && exit 3\ntrap '' TERM\nwhile :; do sleep 0.1; done\n".to_owned(),
        ),
        ("leaves-a-daemon", of_one("{ (setsid sh -c 'trap \"\" HUP; exec sleep 1000' >/dev/null 2>&1 &); exit 3; }")),
        ("silent", "#!/bin/sh\nexec sleep 1000\n".to_owned()),
        ("refuses", "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'not enough slots' >&2\nexit 1\n".to_owned()),
        ("twice", agents("n=$2\nwhile [ $n -gt 0 ]; do PMI_RANK=0 PMI_SIZE=$2 \"$3\" \"$4\" & n=$((n-1)); done")),
        ("few", agents("PMI_RANK=0 PMI_SIZE=$2 \"$3\" \"$4\" &")),
        ("beyond", agents("PMI_RANK=7 \"$3\" \"$4\" &")),
        ("unnumbered", agents("\"$3\" \"$4\" &")),
    ];
    scripts.iter().for_each(|(name, text)| script(folder, name, text));
}

#[test]
fn a_mistake_is_named_everything_ends_and_nothing_is_left() {
    const { assert!(MISTAKES_MIN <= MISTAKES.len()) };
    let (folder, work) = (TempDir::new().expect("there is room"), TempDir::new().expect("there is room"));
    prepare(folder.path());
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let taken = taken.local_addr().expect("it is bound").port().to_string();
    let mut wrong = Vec::new();
    for (mistake, status, parts) in MISTAKES {
        let place = folder.path().to_str().expect("it is UTF-8");
        let expand = |text: &str| {
            let text = text.replace("FOLDER", place).replace("TAKEN", &taken);
            text.replace("PROGRAM", env!("CARGO_BIN_EXE_pserver"))
        };
        let line = expand(mistake);
        let words: Vec<&str> = if line.is_empty() { Vec::new() } else { line.split('|').collect() };
        let mut command = launch(work.path(), &words);
        command.env("TMPDIR", work.path());
        let end = MarkedRun::start(command).end();
        let text = format!("{}{}", end.output, end.errors);
        let mut rest = Some(&text[..]);
        for part in parts.iter().map(|part| expand(part)) {
            rest = rest.and_then(|rest| rest.split_once(&part)).map(|(_, rest)| rest);
        }
        let left: Vec<_> = fs::read_dir(work.path()).expect("it is there").flatten().collect();
        if end.status.code() != Some(*status) || rest.is_none() || text.contains("panicked") || !left.is_empty() {
            wrong.push(format!("{mistake}: {}, left {left:?}, expected {status}, {parts:?} in\n{text}", end.status));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let shared = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let ours: Vec<_> = shared.filter(|entry| entry.file_name().to_string_lossy().contains("pserver")).collect();
    assert!(ours.is_empty(), "{ours:?}");
}

#[test]
fn a_launcher_within_the_tasks_of_another_is_refused() {
    for (size, rank) in [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ] {
        let folder = TempDir::new().expect("there is room");
        let mut command = launch(folder.path(), &["--", "true"]);
        command.env(size, "4").env(rank, "1");
        let end = MarkedRun::start(command).end();
        let expected = format!("pserver: found {size}=4: this is one of several tasks; expected pserver launch once");
        assert!(end.status.code() == Some(1) && end.errors.starts_with(&expected), "{end:?}");
    }
}
