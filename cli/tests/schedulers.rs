//! Jobs by real launchers of processes: Open MPI, MPICH, ssh and a one-node Slurm, each with the command of the docs.
//! Each learns the digits with four trainers, and leaves no process.

mod launching;

use std::fs;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use launching::{
    ACCURACY_MIN, DIGITS, MarkedRun, PATIENCE, RunEnd, compile, digits_folder, has_programs, launch, processes_with,
    script,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_kernels::conformance::skips::skip;

/// Whether the programs are installed; a skip is reported where they are not.
fn has(what: &str, programs: &[&str]) -> bool {
    let has = has_programs(programs);
    if !has {
        skip(what, &format!("found no {}", programs.join(", ")));
    }
    has
}

fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it is bound").port()
}

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

/// A job of the example with MPI, whose trainers are one MPI world.
fn check_mpi(flavour: &str, variables: &[(&str, &str)]) {
    if !has(flavour, &[&format!("mpirun.{flavour}"), &format!("mpicc.{flavour}")]) {
        return;
    }
    let folder = digits_folder();
    compile(&format!("mpicc.{flavour}"), "digits_mpi", folder.path());
    let begin = format!("pserver launch --servers 2 --trainers 4 --with mpirun --launcher 'mpirun.{flavour}");
    let end = run_line(folder.path(), &documented(&begin, "./digits_mpi digits.csv"), variables);
    assert!(end.status.success(), "{end:?}");
    let line = end.output.lines().find_map(|line| line.split_once("accuracy ")).unwrap_or_else(|| panic!("{end:?}"));
    let percent = line.1.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    assert!(percent.is_some_and(|percent| percent > 100.0 * ACCURACY_MIN), "{end:?}");
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

/// A daemon of a test; it is killed with its descendants' session.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let process = i32::try_from(self.0.id()).expect("process numbers are positive");
        let _ = kill(Pid::from_raw(process), Signal::SIGTERM);
        let deadline = Instant::now() + Duration::from_secs(10);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            // tidy: allow sleep: a child's end has no event with a bound in time
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a daemon that stays in the foreground; its words go to a file of its own.
fn daemon(folder: &Path, program: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Daemon {
    let log =
        fs::File::create(folder.join(format!("{}.log", program.rsplit('/').next().expect("a name")))).expect("a file");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).envs(variables.iter().copied()).stdin(Stdio::null());
    command.stdout(log.try_clone().expect("a file can be shared")).stderr(log);
    Daemon(command.spawn().unwrap_or_else(|error| panic!("{program}: {error}")))
}

/// Repeats a command until it succeeds.
fn await_success(mut command: Command, folder: &Path) {
    let deadline = Instant::now() + PATIENCE;
    while !command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        let logs = || {
            let all = fs::read_dir(folder).expect("it is there").flatten().map(|entry| entry.path());
            let logs = all.filter(|path| path.extension().is_some_and(|one| one == "log"));
            logs.map(|path| fs::read_to_string(path).unwrap_or_default()).collect::<String>()
        };
        assert!(Instant::now() < deadline, "{command:?} does not succeed: {}", logs());
        // tidy: allow sleep: a daemon's start has no event
        thread::sleep(Duration::from_millis(50));
    }
}

/// An sshd on loopback with keys of its own.
struct LoopbackSsh {
    _daemon: Daemon,
    /// The words of `ssh` for it.
    command: String,
}

impl LoopbackSsh {
    fn start(folder: &Path) -> Self {
        let place = folder.display();
        for key in ["host", "user"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key));
            assert!(command.status().expect("there is ssh-keygen").success(), "ssh-keygen");
        }
        let port = port();
        let server = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {place}/host\nAuthorizedKeysFile {place}/user.pub\nPidFile none\n\
             StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n"
        );
        fs::write(folder.join("sshd_config"), server).expect("a file");
        let hosts = format!(
            "Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {place}/user\nIdentitiesOnly yes\n\
             StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n\
             Host down\nPort 1\n"
        );
        // The first value counts, so the exception stands first.
        let (all, down) = hosts.split_once("Host down\n").expect("it has both");
        fs::write(folder.join("ssh_config"), format!("Host down\n{down}{all}")).expect("a file");
        let _ = fs::create_dir_all("/run/sshd");
        let config = folder.join("sshd_config").display().to_string();
        let daemon = daemon(folder, "/usr/sbin/sshd", &["-D", "-e", "-f", &config], &[]);
        let command = format!("ssh -F {place}/ssh_config");
        let mut probe = Command::new("ssh");
        probe.args(["-F", &folder.join("ssh_config").display().to_string(), "-o", "BatchMode=yes", "near", "true"]);
        await_success(probe, folder);
        Self { _daemon: daemon, command }
    }
}

#[test]
fn hosts_are_reached_by_ssh_and_the_one_that_is_down_is_named() {
    if !has("openssh-server", &["ssh", "ssh-keygen", "/usr/sbin/sshd"]) {
        return;
    }
    let folder = digits_folder();
    let ssh = LoopbackSsh::start(folder.path());
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

/// A variable that this test's remote processes have.
fn run_mark() -> String {
    format!("PSERVER_TEST_HOST=of-{}", std::process::id())
}

/// Command lines of the processes with a variable.
fn remote_processes(mark: &str) -> Vec<String> {
    let words = |process: PathBuf| fs::read(process.join("cmdline")).unwrap_or_default();
    processes_with(&[mark]).map(|process| String::from_utf8_lossy(&words(process)).replace('\0', " ")).collect()
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
        let (control, node) = (port(), port());
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
    let end = slurm.run(folder.path(), &documented);
    assert!(end.accuracy(4) > ACCURACY_MIN, "{}", end.output);

    // More trainers than the allocation has tasks, and a failure within it.
    let end = slurm.run(folder.path(), &documented.replace("--trainers 4", "--trainers 9"));
    assert!(!end.status.success(), "{end:?}");
    assert!(end.output.contains("pserver: srun of trainers ended (exit status: 1) before its parts"), "{end:?}");
    let fails = "#!/bin/sh\n#SBATCH --ntasks=2\npserver launch --trainers 2 -- \
                 sh -c '[ $PSERVER_TRAINER = 1 ] && exit 3; exec sleep 1000'\n";
    let end = slurm.run(folder.path(), fails);
    assert_eq!(end.status.code(), Some(3), "{end:?}");
    assert!(end.output.contains("pserver: trainer 1 ended with exit status 3; expected 0"), "{end:?}");
}
