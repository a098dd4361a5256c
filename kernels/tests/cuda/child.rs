//! The module as a program: g++ makes it, pipes command it, and a crash is a failed test.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::{env, fs};

use pserver_kernels::cuda::Module;
use pserver_kernels::cuda::source::SHIM_RUNNER;

/// No product is fused with a sum, and elements are read as what they are not declared as.
const FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-fno-strict-aliasing", "-w"];

/// Tests of one program run in many threads; each text is compiled once.
static COMPILING: Mutex<()> = Mutex::new(());

/// A process that runs kernels.
pub(crate) struct Shim {
    process: Child,
    commands: Option<ChildStdin>,
    answers: ChildStdout,
    buffers: u64,
}

/// A buffer of the process, until it is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferId(u64);

/// An address to be written at an offset of a structure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) offset: usize,
    pub(crate) buffer: BufferId,
    pub(crate) within: u64,
}

impl Shim {
    /// Of this module; none, and the skip is reported, where there is no g++.
    pub(crate) fn new(module: &Module) -> Option<Self> {
        if Command::new("g++").arg("--version").stdout(Stdio::null()).status().is_err() {
            skip("g++", "there is none, and the CUDA kernels do not run on the processor");
            return None;
        }
        let mut process = Command::new(program(module))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("what g++ made starts");
        let commands = process.stdin.take();
        let answers = process.stdout.take().expect("stdout was piped above");
        Some(Self { process, commands, answers, buffers: 0 })
    }

    /// A buffer with these bytes, at an address that is so much above a multiple of 16.
    pub(crate) fn buffer(&mut self, content: &[u8], align: usize) -> BufferId {
        self.numbers(&[1, content.len() as u64, align as u64]);
        self.send(content);
        self.buffers += 1;
        BufferId(self.buffers - 1)
    }

    /// Puts an address into a buffer.
    pub(crate) fn relocate(&mut self, into: BufferId, address: Address) {
        self.numbers(&[4, into.0, address.offset as u64, address.buffer.0, address.within]);
    }

    /// Runs a kernel; its structure has addresses put in.
    pub(crate) fn launch(&mut self, name: &str, grid: [u64; 2], arguments: &[u8], addresses: &[Address]) {
        self.numbers(&[2, name.len() as u64]);
        self.send(name.as_bytes());
        self.numbers(&[grid[0], grid[1], arguments.len() as u64]);
        self.send(arguments);
        self.numbers(&[addresses.len() as u64]);
        for address in addresses {
            self.numbers(&[address.offset as u64, address.buffer.0, address.within]);
        }
    }

    /// What a buffer holds: all its bytes.
    pub(crate) fn read(&mut self, buffer: BufferId, bytes: usize) -> Vec<u8> {
        self.numbers(&[3, buffer.0]);
        self.answer(bytes)
    }

    /// Gives all buffers back; the process ends if something was written beside one.
    pub(crate) fn release(&mut self) {
        self.numbers(&[5]);
        self.buffers = 0;
    }

    /// Leaves out the barrier at this line; zero leaves out none.
    pub(crate) fn drop_barrier(&mut self, line: u64) {
        self.numbers(&[6, line]);
    }

    /// The lines of the barriers that were run.
    pub(crate) fn barriers(&mut self) -> Vec<u64> {
        self.numbers(&[7]);
        let lines = self.answer(64 * 8);
        lines.as_chunks().0.iter().map(|line| u64::from_le_bytes(*line)).filter(|line| *line != 0).collect()
    }

    /// Threads and blocks forwards (0), backwards (1), or shuffled.
    pub(crate) fn order(&mut self, order: u64) {
        self.numbers(&[8, order]);
    }

    /// Ends the process, and says what of.
    pub(crate) fn end(mut self) -> std::process::ExitStatus {
        drop(self.commands.take());
        self.process.wait().expect("a child can be waited for")
    }

    fn numbers(&mut self, numbers: &[u64]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.send(&bytes);
    }

    fn send(&mut self, bytes: &[u8]) {
        // A process that has ended is found out by whoever waits for an answer.
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

impl Drop for Shim {
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.process.wait();
    }
}

/// The compiled module, which is kept between runs under its digest.
fn program(module: &Module) -> PathBuf {
    let _guard = COMPILING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let text = module.shim() + SHIM_RUNNER;
    let digest = blake3::hash(text.as_bytes()).to_hex();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("cuda-shim-{}", &digest[..16]));
    if program.exists() {
        return program;
    }
    let source = folder.join(format!("cuda-shim-{}.cpp", &digest[..16]));
    fs::write(&source, text).expect("the folder for tests can be written");
    let unfinished = folder.join(format!("cuda-shim-{}.part-{}", &digest[..16], std::process::id()));
    let made = Command::new("g++").args(FLAGS).arg("-o").args([&unfinished, &source]).status().expect("g++ starts");
    assert!(made.success(), "g++ refuses {}", source.display());
    fs::rename(&unfinished, &program).expect("a name in the same folder");
    program
}

/// Reports a skip; fails where the tool is required.
pub(crate) fn skip(what: &str, why: &str) {
    let required = env::var("PSERVER_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one.trim() == what), "{what} is required here: {why}");
    if let Some(report) = env::var_os("PSERVER_SKIP_REPORT") {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(report).expect("the skip report opens");
        writeln!(file, "SKIPPED: {what}: {why}").expect("the skip report can be written");
    }
}
