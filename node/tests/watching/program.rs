//! A program that a test starts, and that ends with the test, also when the test is killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running program.
pub(crate) struct TestProgram {
    child: Child,
}

impl TestProgram {
    /// Starts a program; an error when it is not installed.
    pub(crate) fn start(program: &str, arguments: &[&str]) -> std::io::Result<Self> {
        // setpriv starts whatever is named, so its own status would hide a program that is missing.
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", program]).args(arguments);
        Self::spawn(&mut command)
    }

    /// Starts a command.
    pub(crate) fn spawn(command: &mut Command) -> std::io::Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        Ok(Self { child })
    }

    /// Reads its output until `find` finds something in a line, and goes on reading on a thread of its own.
    pub(crate) fn read_until<T>(&mut self, find: impl Fn(&str) -> Option<T>) -> T {
        let mut lines = BufReader::new(self.child.stdout.take().expect("it is piped")).lines();
        let found = lines.by_ref().map_while(Result::ok).find_map(|line| find(&line));
        std::thread::spawn(move || drain(lines));
        found.expect("the program says it before it ends")
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).expect("a process number is short");
        kill(Pid::from_raw(id), signal).expect("the process is there");
    }
}

impl Drop for TestProgram {
    fn drop(&mut self) {
        // One that has ended already cannot be killed, and is only waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn drain(lines: std::io::Lines<BufReader<ChildStdout>>) {
    lines.map_while(Result::ok).for_each(drop);
}
