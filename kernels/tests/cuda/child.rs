//! The module in a process that the shim makes: pipes command it, and a crash is a failed test.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use pserver_kernels::conformance::{skips::skip, standin};
use pserver_kernels::cuda::ModuleSource;

use crate::launcher::{BufferId, DeviceAddress, Launcher, Launchers};

/// A process that runs kernels.
pub(crate) struct Shim {
    process: Child,
    commands: Option<ChildStdin>,
    answers: ChildStdout,
    buffers: u64,
}

impl Shim {
    /// A process for this module; none, with a reported skip, where there is no g++, and none where tests look at a
    /// device alone.
    pub(crate) fn new(module: &ModuleSource) -> Option<Self> {
        if Launchers::wanted() != Launchers::All {
            skip("shim", "PSERVER_LAUNCHERS leaves it out");
            return None;
        }
        let (runner, kernels) = match standin::runner().and_then(|runner| Ok((runner, standin::kernels(module)?))) {
            Ok(made) => made,
            Err(why) => {
                skip("g++", &why);
                return None;
            }
        };
        let mut process = Command::new(runner)
            .arg(kernels)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("what g++ made starts");
        let commands = process.stdin.take();
        let answers = process.stdout.take().expect("stdout was piped above");
        Some(Self { process, commands, answers, buffers: 0 })
    }

    /// Leaves out the barrier at this line of the module; zero leaves out none.
    pub(crate) fn drop_barrier(&mut self, line: u64) {
        self.numbers(&[6, line]);
    }

    /// The lines of the barriers that were run.
    pub(crate) fn barriers(&mut self) -> Vec<u64> {
        self.numbers(&[7]);
        let lines = self.answer(64 * 8);
        lines.as_chunks().0.iter().map(|line| u64::from_le_bytes(*line)).filter(|line| *line != 0).collect()
    }

    /// Ends the process, and returns its exit status.
    pub(crate) fn end(mut self) -> std::process::ExitStatus {
        drop(self.commands.take());
        self.process.wait().expect("a child can be waited for")
    }

    fn numbers(&mut self, numbers: &[u64]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.send(&bytes);
    }

    fn send(&mut self, bytes: &[u8]) {
        // The next read of an answer detects a process that has ended.
        let _ = self.commands.as_mut().expect("it was piped").write_all(bytes);
    }

    fn answer(&mut self, bytes: usize) -> Vec<u8> {
        let mut answer = vec![0; bytes];
        let _ = self.commands.as_mut().expect("it was piped").flush();
        if self.answers.read_exact(&mut answer).is_err() {
            panic!("a kernel ended the process: {}", self.process.wait().expect("a child can be waited for"));
        }
        answer
    }
}

impl Launcher for Shim {
    fn buffer(&mut self, content: &[u8], align: usize) -> BufferId {
        self.numbers(&[1, content.len() as u64, align as u64]);
        self.send(content);
        self.buffers += 1;
        BufferId(self.buffers - 1)
    }

    fn launch(&mut self, name: &str, grid: [u64; 2], arguments: &[u8], addresses: &[DeviceAddress]) {
        self.numbers(&[2, name.len() as u64]);
        self.send(name.as_bytes());
        self.numbers(&[grid[0], grid[1], arguments.len() as u64]);
        self.send(arguments);
        self.numbers(&[addresses.len() as u64]);
        for address in addresses {
            self.numbers(&[address.offset as u64, address.buffer.0, address.within]);
        }
    }

    fn read(&mut self, buffer: BufferId, bytes: usize) -> Vec<u8> {
        self.numbers(&[3, buffer.0]);
        self.answer(bytes)
    }

    fn release(&mut self) {
        self.numbers(&[5]);
        self.buffers = 0;
    }

    fn order(&mut self, order: u64) {
        self.numbers(&[8, order]);
    }

    fn has(&mut self, name: &str) -> bool {
        self.numbers(&[9, name.len() as u64]);
        self.send(name.as_bytes());
        self.answer(8) != [0; 8]
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.process.wait();
    }
}
