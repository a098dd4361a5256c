//! Jobs by real launchers of processes: Open MPI, MPICH, ssh and a one-node Slurm, each with the command of the docs.
//! Each learns the digits with four trainers, and leaves no process.

mod launching;

use std::fs;
use std::net::ToSocketAddrs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Instant;

use launching::daemons::{Daemon, TestSsh, await_success, daemon, has, remote_processes, run_mark};
use launching::ports::free_port;
use launching::{ACCURACY_MIN, DIGITS, MarkedRun, PATIENCE, RunEnd, compile, digits_folder, launch, script};
use nix::sys::signal::{Signal, kill};
use pserver_kernels::conformance::skips::skip;

/// Runs a command of the docs in the folder of the digits, with `pserver` in PATH.
fn run_line(folder: &Path, line: &str, variables: &[(&str, &str)]) -> RunEnd {
    let mut command = Command::new("sh");
    command.arg("-c").arg(line).current_dir(folder).env("PATH", path()).envs(variables.iter().copied());
    MarkedRun::start(command).end()
}

/// PATH with the folder of `pserver` before it.
fn path() -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_pserver"));
    let folder = program.parent().expect("a program is in a folder").display().to_string();
    format!("{folder}:{}", std::env::var("PATH").unwrap_or_default())
}

/// The block of a page's commands that begins so, with the docs' trainer as the one of this test.
fn documented(begin: &str, trainer: &str) -> String {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/LAUNCH.md")).expect("the page");
    let lines = page.lines().map(|line| line.strip_prefix("    ").unwrap_or_default());
    let mut block = lines.skip_while(|line| !line.starts_with(begin)).take_while(|line| !line.is_empty()).peekable();
    assert!(block.peek().is_some(), "no command in the page begins with {begin}");
    let block: Vec<&str> = block.collect();
    let text = block.join("\n");
    assert!(text.contains("./trainer arguments"), "{text}");
    text.replace("./trainer arguments", trainer)
}

/// A command of the docs, with a server on each trainer's host instead.
fn colocated(line: &str) -> String {
    assert!(line.contains("--servers 2 "), "{line}");
    line.replace("--servers 2 ", "--colocate ")
}

/// A job of the example with MPI, whose trainers are one MPI world.
fn check_mpi(flavour: &str, variables: &[(&str, &str)]) {
    if !has(flavour, &[&format!("mpirun.{flavour}"), &format!("mpicc.{flavour}")]) {
        return;
    }
    let folder = digits_folder();
    compile(&format!("mpicc.{flavour}"), "digits_mpi", folder.path());
    // Open MPI shares a folder there among a user's jobs, and removes it with one of them.
    let own_folder = folder.path().display().to_string();
    let variables = &[variables, &[("TMPDIR", &own_folder)]].concat();
    let begin = format!("pserver launch --servers 2 --trainers 4 --with mpirun --launcher 'mpirun.{flavour}");
    let dedicated = documented(&begin, "./digits_mpi digits.csv");
    for line in [dedicated.clone(), colocated(&dedicated)] {
        let end = run_line(folder.path(), &line, variables);
        assert!(end.status.success(), "{end:?}");
        let found = end.output.lines().find_map(|line| line.split_once("accuracy "));
        let (_, rest) = found.unwrap_or_else(|| panic!("{end:?}"));
        let percent = rest.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        assert!(percent.is_some_and(|percent| percent > 100.0 * ACCURACY_MIN), "{end:?}");
    }
}

#[test]
fn open_mpi_starts_a_job() {
    check_mpi("openmpi", &[("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
}

#[test]
fn mpich_starts_a_job() {
    check_mpi("mpich", &[]);
}

#[test]
fn a_failure_under_mpirun_ends_everything_with_its_status() {
    if has("mpich", &["mpirun.mpich"]) {
        let folder = tempfile::TempDir::new().expect("there is room");
        let text = "[ $PSERVER_TRAINER = 1 ] && exit 3; exec sleep 1000";
        let mpirun = ["--with", "mpirun", "--launcher", "mpirun.mpich"];
        let end = MarkedRun::start(launch(
            folder.path(),
            &[&mpirun, &["--trainers", "2", "--", "sh", "-c", text][..]].concat(),
        ))
        .end();
        assert!(end.status.code() == Some(3) && end.errors.contains("trainer 1 ended with exit status 3"), "{end:?}");
    }
}

#[test]
fn hosts_are_reached_by_ssh_and_the_one_that_is_down_is_named() {
    if !has("openssh-server", &["ssh", "ssh-keygen", "/usr/sbin/sshd"]) {
        return;
    }
    let folder = digits_folder();
    let ssh = TestSsh::on_loopback(folder.path());
    let hosts = ["--servers", "2", "--trainers", "4", "--hosts", "node[1-2]", "--launcher", &ssh.command];
    let end = MarkedRun::start(launch(folder.path(), &[&hosts, &DIGITS[..]].concat()));
    let end = end.end();
    assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);

    let text = "wc -c < $PSERVER_TOKEN_FILE; grep -laF -f $PSERVER_TOKEN_FILE /proc/[0-9]*/cmdline \
                /proc/[0-9]*/environ 2>/dev/null; echo $NAMED";
    let one = ["--hosts", "node1", "--env", "NAMED=by hand", "--launcher", &ssh.command, "--", "sh", "-c", text];
    let end = MarkedRun::start(launch(folder.path(), &one)).end();
    assert!(end.output.ends_with("[trainer 0] 64\n[trainer 0] by hand\n"), "{end:?}");

    let down = ["--trainers", "2", "--hosts", "node1,down", "--launcher", &ssh.command, "--", "sleep", "1000"];
    let end = MarkedRun::start(launch(folder.path(), &down)).end();
    assert_eq!(end.status.code(), Some(1), "{end:?}");
    assert!(
        end.errors.contains("pserver: host down ended (exit status: 255) before its parts were started: ssh: conn")
    );

    let run = MarkedRun::start(launch(
        folder.path(),
        &["--grace", "0", "--hosts", "node1", "--launcher", &ssh.command, "--env", &run_mark(), "--", "sleep", "1000"],
    ));
    let remote = || remote_processes(&run_mark());
    while !remote().iter().any(|words| words.starts_with("sleep 1000")) {
        thread::yield_now();
    }
    kill(run.id(), Signal::SIGKILL).expect("it runs");
    run.end();
    let deadline = Instant::now() + PATIENCE;
    while !remote().is_empty() {
        assert!(Instant::now() < deadline, "left on the host: {:?}", remote());
        thread::yield_now();
    }
}

/// A Slurm of one node in a folder.
struct LoopbackSlurm {
    _daemons: Vec<Daemon>,
    config: String,
}

impl LoopbackSlurm {
    fn start(folder: &Path, host: &str) -> Self {
        let place = folder.display();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
        for name in ["spool", "state"] {
            fs::create_dir(folder.join(name)).expect("there is room");
        }
        let (control, node) = (free_port(), free_port());
        let config = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmctldPort={control}\n\
             SlurmdPort={node}\nAuthType=auth/munge\nAuthInfo=socket={place}/munge.socket\nCryptoType=crypto/munge\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nSwitchType=switch/none\nMpiDefault=pmi2\nReturnToService=2\n\
             SlurmctldPidFile={place}/slurmctld.pid\nSlurmdPidFile={place}/slurmd.pid\nSlurmdSpoolDir={place}/spool\n\
             StateSaveLocation={place}/state\nSlurmdParameters=config_overrides\n\
             SchedulerParameters=batch_sched_delay=0,sched_interval=1\n\
             JobCompType=jobcomp/none\nAccountingStorageType=accounting_storage/none\n\
             JobAcctGatherType=jobacct_gather/none\nKillWait=1\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN\n\
             PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8\n"
        );
        fs::write(folder.join("slurm.conf"), config).expect("a file");
        fs::write(folder.join("munge.key"), [7; 128]).expect("a file");
        fs::set_permissions(folder.join("munge.key"), fs::Permissions::from_mode(0o600)).expect("it is ours");
        let word = |option: &str, name: &str| format!("--{option}={place}/{name}");
        let munge = ["--foreground", "--force", "--num-threads=1"].map(str::to_owned);
        let munge = [&munge[..], &[word("socket", "munge.socket"), word("key-file", "munge.key")]].concat();
        let more = [word("pid-file", "munge.pid"), word("log-file", "munged.log"), word("seed-file", "munge.seed")];
        let munge = [munge, more.to_vec()].concat();
        let config = folder.join("slurm.conf").display().to_string();
        let variables = [("SLURM_CONF", &*config)];
        let mut daemons = Vec::new();
        daemons.push(daemon(folder, "/usr/sbin/munged", &munge.iter().map(String::as_str).collect::<Vec<_>>(), &[]));
        let mut probe = Command::new("munge");
        probe.args(["-n", "-S"]).arg(folder.join("munge.socket"));
        await_success(probe, folder);
        daemons.push(daemon(folder, "/usr/sbin/slurmctld", &["-D", "-c"], &variables));
        daemons.push(daemon(folder, "/usr/sbin/slurmd", &["-D"], &variables));
        // The last one is to end first.
        daemons.reverse();
        let mut probe = Command::new("sh");
        probe.args(["-c", "sinfo -h -o %t | grep -q idle"]).env("SLURM_CONF", &config);
        await_success(probe, folder);
        Self { _daemons: daemons, config }
    }
}

impl LoopbackSlurm {
    /// Runs a script by `sbatch`; its output is that of the job.
    fn run(&self, folder: &Path, text: &str) -> RunEnd {
        script(folder, "job.sh", text);
        let mut command = Command::new("sbatch");
        command.args(["--wait", "--output=job.out", "job.sh"]).current_dir(folder);
        command.env("PATH", path()).env("SLURM_CONF", &self.config);
        let end = MarkedRun::start(command).end();
        let output = fs::read_to_string(folder.join("job.out")).unwrap_or_default();
        RunEnd { output, ..end }
    }
}

#[test]
fn a_slurm_script_of_the_docs_starts_a_job() {
    let daemons = ["/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged"];
    if !has("slurm", &[&["srun", "sbatch", "munge", "sinfo"], &daemons[..]].concat()) {
        return;
    }
    let host = nix::unistd::gethostname().expect("a name").into_string().expect("it is UTF-8");
    if !rustix::process::geteuid().is_root() || (host.as_str(), 0).to_socket_addrs().is_err() {
        skip("slurm", "its daemons need root, and this host's name an address");
        return;
    }
    let (folder, place) = (digits_folder(), tempfile::TempDir::new().expect("there is room"));
    let slurm = LoopbackSlurm::start(place.path(), &host);
    let documented = documented("#!/bin/sh", &DIGITS[1..].join(" "));
    for line in [documented.clone(), colocated(&documented)] {
        let end = slurm.run(folder.path(), &line);
        assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);
    }

    // More trainers than the allocation has tasks, and a failure within it.
    let end = slurm.run(folder.path(), &documented.replace("--trainers 4", "--trainers 9"));
    assert!(!end.status.success(), "{end:?}");
    assert!(end.output.contains("pserver: srun of trainers ended (exit status: 1) before its parts"), "{end:?}");
    let fails = "#!/bin/sh\n#SBATCH --ntasks=2\npserver launch --trainers 2 -- \
                 sh -c '[ $PSERVER_TRAINER = 1 ] && exit 3; exec sleep 1000'\n";
    let end = slurm.run(folder.path(), fails);
    assert_eq!(end.status.code(), Some(3), "{end:?}");
    assert!(end.output.contains("pserver: trainer 1 ended with exit status 3; expected 0"), "{end:?}");

    // The launcher as a task of a step of its own, and as several.
    let nested = |tasks: u32| {
        let step = format!("srun --ntasks={tasks} pserver launch --trainers 2 -- sh -c 'echo of $PSERVER_TRAINERS'");
        slurm.run(folder.path(), &format!("#!/bin/sh\n#SBATCH --ntasks=4\n{step}\n"))
    };
    let end = nested(1);
    assert!(end.status.success() && end.output.contains("[trainer 1] of 2\n"), "{end:?}");
    let end = nested(2);
    let expected = "=2: this is one of several tasks; expected pserver launch once, before srun or mpirun";
    assert!(end.status.code() == Some(1) && end.output.contains(expected), "{end:?}");
}
