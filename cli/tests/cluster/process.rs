//! A server in a process of its own, which can be killed; none outlives its test.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_core::wire::Address;
use pserver_processes::{ready, unconfigure};

use super::job::Job;
use super::ports::free_port;

/// The time that a server may take to start or to stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server that runs; dropping it kills it.
pub(crate) struct Process {
    child: Option<Child>,
    stderr: File,
    pub(crate) address: Address,
}

/// A server's exit status, and the end of its standard error.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) words: String,
}

impl Process {
    /// Runs `pserver serve` and waits until the server is ready; returns the end of a server that did not start.
    pub(crate) fn start(arguments: &[String]) -> Result<Self, Ended> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
        command.arg("serve").args(arguments);
        Self::run(&mut command)
    }

    /// Starts a server by a command that becomes the server process.
    pub(crate) fn run(command: &mut Command) -> Result<Self, Ended> {
        let stderr = tempfile::tempfile().expect("there is a place for temporary files");
        unconfigure(command);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(stderr.try_clone().expect("a file can be shared"));
        let mut child = command.spawn().expect("the program can be run");
        let stdout = child.stdout.take().expect("it is piped");
        let (said, lines) = mpsc::channel();
        std::thread::spawn(move || BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|l| said.send(l)));
        let address = Address { port: 0, ..Address::parse("tcp://127.0.0.1:1").expect("it is an address") };
        let mut process = Self { child: Some(child), stderr, address };
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                let address = ready::address_in(&line).expect("the first line says where it is");
                process.address = Address::parse(address).expect("the line has an address");
                Ok(process)
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(process.wait()),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("not ready within {PATIENCE:?}: {}", process.words()),
        }
    }

    pub(crate) fn id(&self) -> Pid {
        let id = self.child.as_ref().expect("it runs").id();
        Pid::from_raw(i32::try_from(id).expect("a process number is short"))
    }

    /// SIGKILL, and the end of the process.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// SIGTERM, and how the process ended.
    pub(crate) fn terminate(self) -> Ended {
        kill(self.id(), Signal::SIGTERM).expect("the process is there");
        self.wait()
    }

    /// Waits until the server ends by itself.
    pub(crate) fn wait(mut self) -> Ended {
        let id = self.id();
        let mut child = self.child.take().expect("it runs");
        let (said, ended) = mpsc::channel();
        std::thread::spawn(move || said.send(child.wait()));
        match ended.recv_timeout(PATIENCE) {
            Ok(status) => Ended { status: status.expect("a child can be waited for"), words: self.words() },
            Err(_) => {
                // The thread above still waits for this child process, so its id is not reused.
                let _ = kill(id, Signal::SIGKILL);
                panic!("process {id} did not end within {PATIENCE:?}: {}", self.words());
            }
        }
    }

    /// Standard error so far.
    pub(crate) fn words(&mut self) -> String {
        let _ = self.stderr.rewind();
        std::io::read_to_string(&self.stderr).unwrap_or_else(|error| format!("unreadable: {error}"))
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A child that has ended already cannot be killed, and is only waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            let words = self.words();
            println!("the server at {} said:\n{words}", self.address);
        }
    }
}

/// The servers of a job in processes of their own, on ports that they keep when they start again.
pub(crate) struct Processes {
    job: Job,
    ports: Vec<u16>,
    pub(crate) running: Vec<Option<Process>>,
}

impl Processes {
    pub(crate) fn start(job: Job) -> Self {
        let ports: Vec<u16> = (0..job.servers).map(|_| free_port()).collect();
        let mut processes = Self { running: ports.iter().map(|_| None).collect(), job, ports };
        (0..processes.ports.len()).for_each(|server| processes.start_again(server));
        processes
    }

    /// The address of server 0, by which trainers find the job.
    pub(crate) fn coordinator(&self) -> Address {
        Address::parse(&self.address(0)).expect("it is an address")
    }

    pub(crate) fn kill(&mut self, server: usize) {
        self.running[server].take().expect("it runs").kill();
    }

    /// Stops a server in order.
    pub(crate) fn stop(&mut self, server: usize) {
        let ended = self.running[server].take().expect("it runs").terminate();
        assert!(ended.status.success(), "{ended:?}");
    }

    /// Servers that start from now on have these settings.
    pub(crate) fn change(&mut self, job: Job) {
        self.job = job;
    }

    /// Starts a server with the arguments that it had.
    pub(crate) fn start_again(&mut self, server: usize) {
        let started = Process::start(&self.arguments(server));
        self.running[server] = Some(started.unwrap_or_else(|ended| panic!("server {server}: {ended:?}")));
    }

    /// Starts a server with the arguments that it had, but on another port.
    pub(crate) fn start_elsewhere(&mut self, server: usize) {
        self.ports[server] = free_port();
        self.start_again(server);
    }

    pub(crate) fn arguments(&self, server: usize) -> Vec<String> {
        let index = u16::try_from(server).expect("servers are few");
        let coordinator = (server > 0).then(|| self.address(0));
        self.job.arguments(index, &self.address(server), coordinator.as_deref())
    }

    /// Stops every server in order; each must end well.
    pub(crate) fn terminate(mut self) {
        // Server 0 stops last: the others may still send requests to it.
        for process in self.running.drain(..).rev().flatten() {
            let ended = process.terminate();
            assert!(ended.status.success(), "{ended:?}");
        }
    }

    fn address(&self, server: usize) -> String {
        let (host, _) = self.job.bind.rsplit_once(':').expect("an address has a port");
        format!("{host}:{}", self.ports[server])
    }
}

/// This program once more, with one of its tests alone, named with its module.
pub(crate) fn one_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
    command.args(["--exact", name, "--nocapture"]);
    command
}
