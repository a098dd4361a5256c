//! Helpers of tests of `pserver launch`: a folder with a trainer in C and the digits, runs with a bound in time, and
//! whether a run has left processes behind.

#![allow(dead_code, reason = "every test program uses the part that it needs")]

pub(crate) mod daemons;
#[path = "../cluster/ports.rs"]
pub(crate) mod ports;

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The time that a run may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The variable by which a run's processes are known.
const MARK: &str = "PSERVER_TEST_RUN";
/// Accuracy of the quickstart.
pub(crate) const ACCURACY_MIN: f64 = 0.95;

/// A command whose processes are known by a mark in their environment.
pub(crate) struct MarkedRun {
    child: KilledChild,
    mark: String,
    output: JoinHandle<String>,
    errors: JoinHandle<String>,
}

/// A process that does not outlive its test.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        // A process that has ended needs neither a kill nor a wait.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The end of a run.
#[derive(Debug)]
pub(crate) struct RunEnd {
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
    pub(crate) errors: String,
}

impl MarkedRun {
    /// Starts a command without the `PSERVER_` variables of this test.
    pub(crate) fn start(mut command: Command) -> Self {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
        pserver_processes::unconfigure(&mut command);
        command.env(MARK, &mark).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program can be run");
        let output = read(child.stdout.take().expect("it is a pipe"));
        let errors = read(child.stderr.take().expect("it is a pipe"));
        Self { child: KilledChild(child), mark, output, errors }
    }

    pub(crate) fn id(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(i32::try_from(self.child.0.id()).expect("process numbers are positive"))
    }

    /// Processes of the run, this one's child included.
    pub(crate) fn processes(&self) -> Vec<String> {
        let marked = format!("{MARK}={}", self.mark);
        let shown = |process: PathBuf| {
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            format!("{}: {}", process.display(), String::from_utf8_lossy(&words).replace('\0', " "))
        };
        processes_with(&[&marked]).map(shown).collect()
    }

    /// A process of the run with a variable.
    pub(crate) fn process_with(&self, variable: &str) -> Option<nix::unistd::Pid> {
        let marked = format!("{MARK}={}", self.mark);
        let process = processes_with(&[&marked, variable]).next()?;
        process.file_name()?.to_str()?.parse().ok().map(nix::unistd::Pid::from_raw)
    }

    /// Waits for the end, within [`PATIENCE`].
    pub(crate) fn end(mut self) -> RunEnd {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match self.child.0.try_wait().expect("it is a child") {
                Some(status) => break status,
                None if deadline < Instant::now() => {
                    panic!("no end within {PATIENCE:?}: {:?}", self.processes());
                }
                // tidy: allow sleep: a child's end has no event with a bound in time
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        let left = self.left();
        assert!(left.is_empty(), "left behind: {left:?}");
        let text = |reader: JoinHandle<String>| reader.join().expect("it reads");
        RunEnd { status, output: text(self.output), errors: text(self.errors) }
    }

    /// Processes that are still there after a moment: the kernel takes one to end a killed process.
    pub(crate) fn left(&self) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let left = self.processes();
            if left.is_empty() || deadline < Instant::now() {
                return left;
            }
            // tidy: allow sleep: the end of a stranger's child has no event
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl RunEnd {
    /// Asserts that the run succeeded, and returns the lowest of the accuracies that trainers printed last.
    pub(crate) fn accuracy(&self, trainers: u32) -> f64 {
        assert!(self.status.success(), "{}\n{}\n{}", self.status, self.output, self.errors);
        let last = |trainer: u32| {
            let prefix = format!("[trainer {trainer}] trainer {trainer}, epoch");
            let line = self.output.lines().rfind(|line| line.starts_with(&prefix));
            let line = line.unwrap_or_else(|| panic!("trainer {trainer} in\n{}\n{}", self.output, self.errors));
            line.rsplit_once(' ').expect("an accuracy").1.parse::<f64>().expect("a number")
        };
        (0..trainers).map(last).fold(1.0, f64::min)
    }
}

/// Folders in `/proc` of the processes with all of these variables.
pub(crate) fn processes_with(variables: &[&str]) -> impl Iterator<Item = PathBuf> {
    let has_all = move |process: &PathBuf| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        let set: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
        variables.iter().all(|variable| set.contains(&variable.as_bytes()))
    };
    fs::read_dir("/proc").expect("there is /proc").flatten().map(|entry| entry.path()).filter(has_all)
}

fn read(mut source: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes).expect("a pipe can be read");
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// `pserver launch` with arguments, in a folder.
pub(crate) fn launch(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.arg("launch").args(arguments).current_dir(folder);
    command
}

/// A folder with `./digits`, its program and data.
pub(crate) fn digits_folder() -> TempDir {
    let folder = TempDir::new().expect("there is room");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    compile("cc", "digits", folder.path());
    fs::copy(source.join("docs/programs/mlp.program"), folder.path().join("mlp.program")).expect("a file");
    let packed = fs::File::open(source.join("cli/data/digits.csv.gz")).expect("the digits");
    let mut text = String::new();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut text).expect("the digits are packed");
    fs::write(folder.path().join("digits.csv"), text).expect("a file");
    folder
}

/// Compiles an example in a folder.
pub(crate) fn compile(compiler: &str, example: &str, folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(compiler);
    command.arg("-I").arg(source.join("capi/include")).arg(source.join(format!("examples/{example}.c")));
    command.arg(library()).args(["-lpthread", "-ldl", "-lm", "-o"]).arg(folder.join(example));
    assert!(command.status().expect("there is a compiler").success(), "{example}.c");
}

/// The trainer's command in that folder, long enough for [`ACCURACY_MIN`].
pub(crate) const DIGITS: [&str; 7] = ["--", "./digits", "mlp.program", "digits.csv", "4", "12", "model.safetensors"];

fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a test has a path");
    let mut folders = program.ancestors().skip(1).take(2).map(|folder| folder.join("libpaddle_pserver.a"));
    folders.find(|path| path.exists()).expect("the library was built beside this test")
}

/// Writes an executable script.
pub(crate) fn script(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    fs::write(&path, text).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// Whether the programs are there.
pub(crate) fn has_programs(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    programs.iter().all(|program| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}
