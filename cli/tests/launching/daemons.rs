//! Daemons of the launcher tests: processes that end with the test, an sshd among them, and the processes that a job by
//! ssh left running.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_kernels::conformance::skips::skip;

use super::ports::free_port;
use super::{PATIENCE, has_programs, processes_with};

/// Whether the programs are installed; a skip is reported where they are not.
pub(crate) fn has(what: &str, programs: &[&str]) -> bool {
    let has = has_programs(programs);
    if !has {
        skip(what, &format!("found no {}", programs.join(", ")));
    }
    has
}

/// A variable that this test's remote processes have.
pub(crate) fn run_mark() -> String {
    format!("PSERVER_TEST_HOST=of-{}", std::process::id())
}

/// Command lines of the processes with a variable.
pub(crate) fn remote_processes(mark: &str) -> Vec<String> {
    let words = |process: PathBuf| fs::read(process.join("cmdline")).unwrap_or_default();
    processes_with(&[mark]).map(|process| String::from_utf8_lossy(&words(process)).replace('\0', " ")).collect()
}

/// A daemon of a test; it is killed with its descendants' session.
pub(crate) struct Daemon(Child);

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
pub(crate) fn daemon(folder: &Path, program: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Daemon {
    let log =
        fs::File::create(folder.join(format!("{}.log", program.rsplit('/').next().expect("a name")))).expect("a file");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).envs(variables.iter().copied()).stdin(Stdio::null());
    command.stdout(log.try_clone().expect("a file can be shared")).stderr(log);
    Daemon(command.spawn().unwrap_or_else(|error| panic!("{program}: {error}")))
}

/// Repeats a command until it succeeds.
pub(crate) fn await_success(mut command: Command, folder: &Path) {
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

/// An sshd on each of some hosts, all with one key, and the words of `ssh` for them.
pub(crate) struct TestSsh {
    _daemons: Vec<Daemon>,
    pub(crate) command: String,
}

/// A host of a test: the command within which its processes run, and the addresses at which its sshd listens.
pub(crate) struct TestHost<'a> {
    pub(crate) within: &'a [&'a str],
    pub(crate) addresses: &'a [&'a str],
}

impl TestSsh {
    /// Hosts of any name are this machine; `down` is none.
    pub(crate) fn on_loopback(folder: &Path) -> Self {
        let port = free_port();
        // The first value counts, so the exception stands first.
        let client = format!("Host down\nPort 1\nHost *\nHostName 127.0.0.1\nPort {port}\n");
        let host = TestHost { within: &[], addresses: &["127.0.0.1"] };
        Self::start(folder, &[host], port, &client)
    }

    /// Hosts are reached at their addresses.
    pub(crate) fn on_hosts(folder: &Path, hosts: &[TestHost<'_>]) -> Self {
        let port = free_port();
        Self::start(folder, hosts, port, &format!("Host *\nPort {port}\n"))
    }

    fn start(folder: &Path, hosts: &[TestHost<'_>], port: u16, client: &str) -> Self {
        let place = folder.display();
        for key in ["host", "user"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key));
            assert!(command.status().expect("there is ssh-keygen").success(), "ssh-keygen");
        }
        let client = format!(
            "{client}IdentityFile {place}/user\nIdentitiesOnly yes\nStrictHostKeyChecking no\n\
             UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        );
        fs::write(folder.join("ssh_config"), client).expect("a file");
        let _ = fs::create_dir_all("/run/sshd");
        let ssh = ["ssh".to_owned(), "-F".to_owned(), folder.join("ssh_config").display().to_string()];
        let mut daemons = Vec::new();
        for (number, host) in hosts.iter().enumerate() {
            let listen: String = host.addresses.iter().map(|address| format!("ListenAddress {address}\n")).collect();
            // Without the files of the user, whose shell may print something when it starts.
            let server = format!(
                "Port {port}\n{listen}HostKey {place}/host\nAuthorizedKeysFile {place}/user.pub\nPidFile none\n\
                 StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n\
                 SetEnv HOME={place}\n"
            );
            let config = folder.join(format!("sshd_config{number}"));
            fs::write(&config, server).expect("a file");
            let config = config.display().to_string();
            let words = [host.within, &["/usr/sbin/sshd", "-D", "-e", "-f", &config]].concat();
            daemons.push(daemon(folder, words[0], &words[1..], &[]));
            let mut probe = Command::new(host.within.first().unwrap_or(&"env"));
            probe.args(host.within.iter().skip(1)).args(&ssh).args(["-o", "BatchMode=yes", host.addresses[0], "true"]);
            await_success(probe, folder);
        }
        Self { _daemons: daemons, command: ssh.join(" ") }
    }
}
