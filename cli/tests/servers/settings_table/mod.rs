//! Every cell of the tables of `docs/SETTINGS.md` about servers and clients: a case contradicts a job with the setting,
//! and checks the effect that the cell documents.
//!
//! Read in this order: this file (a stopped job whose servers restart), `either` (settings that take effect in both
//! columns of a server's table), `restarted` and `beside` (the columns), `clients` (clients and `begin_init`).

mod beside;
mod clients;
mod either;
mod restarted;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::cluster::job::{Job, client, folder, reader};
use crate::cluster::ports::free_port;
use crate::cluster::process::{Ended, Process};
use crate::cluster::training::{Tensor, begin, given, pull};
use pserver_client::Client;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::Address;
use tempfile::TempDir;

const SERVE: &str = "`pserver serve`";
const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const RATE: &str = "optimizer: SGD const_lr { learning_rate: 0.5 }";
const ADAM: &str = "optimizer: Adam adam { } const_lr { learning_rate: 1 }";

/// A job that has stopped, of which one server is started again with other settings: server 0 of one, or server 1 of
/// two beside server 0.
struct Scene {
    tested: u16,
    job: Job,
    ports: Vec<u16>,
    kept: TempDir,
}

/// A copy of the job's directory, and server 0 where it is not the tested one.
struct Stage<'a> {
    scene: &'a Scene,
    folder: TempDir,
    first: Option<Process>,
}

/// Contents of files by path.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A parameter on server 0, and one on the tested server.
fn tensors(tested: u16) -> [Tensor; 2] {
    let tensor = |name: &str, home: u16| Tensor::new(name, Float32, 1000, &format!("home: {home}")).zeroed();
    [tensor("first", 0), tensor("own", tested)]
}

impl Scene {
    /// Both trainers have given one gradient of ones, at a rate of one, and not left.
    fn new(tested: u16) -> Self {
        let job = Job::new(tested + 1, 2).with("--optimizer", SGD).with("--rank-grace-seconds", "0.2");
        let ports = (0..job.servers).map(|_| free_port()).collect();
        let scene = Self { tested, job, ports, kept: folder() };
        let stage = scene.stage_at(folder(), &[]);
        let own = stage.start(&[]);
        let coordinator = stage.coordinator(&own);
        let first = client(&coordinator, 0);
        begin(&first, &tensors(tested)).expect("nobody else does");
        drop(first);
        assert_eq!(step(tested, &coordinator), ([0.0; 2], [1.0; 2]));
        let folder = stage.stop(own);
        copy(folder.path(), scene.kept.path());
        scene
    }

    /// The job's directory and other servers again; server 0 with these changes, where it is not the tested one.
    fn stage(&self, changes: &[&str]) -> Stage<'_> {
        let folder = folder();
        copy(self.kept.path(), folder.path());
        self.stage_at(folder, changes)
    }

    fn stage_at(&self, folder: TempDir, changes: &[&str]) -> Stage<'_> {
        let start = || Process::start(&self.arguments(0, folder.path(), changes)).expect("server 0 starts");
        let first = (self.tested > 0).then(start);
        Stage { scene: self, folder, first }
    }

    /// The arguments of a server with changes, each `--option=value`.
    fn arguments(&self, index: u16, folder: &Path, changes: &[&str]) -> Vec<String> {
        let address = |index: u16| format!("tcp://127.0.0.1:{}", self.ports[usize::from(index)]);
        let coordinator = (index > 0).then(|| address(0));
        let job = self.job.clone().with_checkpoints(folder);
        let mut all = job.arguments(index, &address(index), coordinator.as_deref());
        for change in changes {
            let option = change.split_once('=').expect("it has a value").0;
            if let Some(at) = all.iter().position(|one| one == option) {
                all.drain(at..at + 2);
            }
            all.push((*change).to_owned());
        }
        all
    }
}

impl Stage<'_> {
    /// The tested server with changes.
    fn try_start(&self, changes: &[&str]) -> Result<Process, Ended> {
        Process::start(&self.scene.arguments(self.scene.tested, self.folder.path(), changes))
    }

    fn start(&self, changes: &[&str]) -> Process {
        self.try_start(changes).unwrap_or_else(|ended| panic!("{changes:?}: {ended:?}"))
    }

    /// The same, and it warns of nothing.
    fn start_quietly(&self, changes: &[&str]) -> Process {
        let mut process = self.start(changes);
        let words = process.words();
        assert!(!words.contains("WARN"), "{changes:?}: {words}");
        process
    }

    /// Each of the changes refuses the start, with these words, and nothing on disk changes.
    fn refuse(&self, changes: &[&str], expected: &[&str]) {
        let before = files(self.folder.path());
        let Err(ended) = self.try_start(changes) else { panic!("{changes:?}: the server starts") };
        assert!(!ended.status.success(), "{changes:?}: {ended:?}");
        let words = &ended.words;
        expected.iter().for_each(|word| assert!(words.contains(word), "{changes:?}: expected {word:?} in: {words}"));
        let after = files(self.folder.path());
        let changed: Vec<_> =
            after.keys().chain(before.keys()).filter(|path| after.get(*path) != before.get(*path)).collect();
        assert!(changed.is_empty(), "{changes:?} has changed {changed:?}");
    }

    /// The address of server 0, by which trainers find the job.
    fn coordinator(&self, tested: &Process) -> Address {
        self.first.as_ref().map_or(&tested.address, |first| &first.address).clone()
    }

    /// The job goes on: both trainers give a gradient, and each value moves by the rate, from where it was on disk.
    fn goes_on(&self, tested: &Process) {
        assert_eq!(step(self.scene.tested, &self.coordinator(tested)), ([-1.0; 2], [1.0; 2]));
    }

    /// Stops the servers in order.
    fn stop(self, tested: Process) -> TempDir {
        for process in std::iter::once(tested).chain(self.first) {
            let ended = process.terminate();
            assert!(ended.status.success(), "{ended:?}");
        }
        self.folder
    }
}

/// A trainer that knows the parameters of a job that has them, and goes on with its rounds.
fn trainer(coordinator: &Address, rank: u32) -> Client {
    let client = client(coordinator, rank);
    assert!(!client.begin_init(&OptimizerSettings::default()).expect("it fits the job"), "the job has its parameters");
    client.resume_rounds().expect("servers answer");
    client
}

/// Both trainers give gradients of ones: the values before, and by how much they have moved.
fn step(tested: u16, coordinator: &Address) -> ([f32; 2], [f32; 2]) {
    step_of(&[0, 1].map(|rank| trainer(coordinator, rank)), tested)
}

fn step_of(trainers: &[Client], tested: u16) -> ([f32; 2], [f32; 2]) {
    let tensors = tensors(tested);
    let before = values(&trainers[0], tested);
    let ones = tensors.each_ref().map(|tensor| tensor.constant(1.0));
    trainers.iter().for_each(|trainer| trainer.push(&given(&tensors, &ones), None).expect("a gradient is taken"));
    let after = values(&trainers[0], tested);
    (before, [0, 1].map(|at| before[at] - after[at]))
}

/// The first element of each parameter.
fn values(client: &Client, tested: u16) -> [f32; 2] {
    let values = pull(client, &tensors(tested)).expect("servers answer");
    [0, 1].map(|at| f32::from_le_bytes(values[at][..4].try_into().expect("four bytes")))
}

/// The values as a reader finds them.
fn read(tested: u16, coordinator: &Address) -> [f32; 2] {
    values(&reader(coordinator), tested)
}

/// A file with a token of this name, which only this user may read.
fn secret(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("correct horse battery staple of {name}")).expect("there is room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
    path
}

/// The files of a job, without the number and the name of the process that owns a directory.
fn files(root: &Path) -> Files {
    let mut found = Files::new();
    visit(root, Path::new(""), &mut |path| {
        if !["lock", "owner"]
            .iter()
            .any(|name| path.file_name().is_some_and(|file| file.to_string_lossy().contains(name)))
        {
            found.insert(path.to_owned(), fs::read(root.join(path)).expect("the file can be read"));
        }
    });
    found
}

fn copy(from: &Path, to: &Path) {
    visit(from, Path::new(""), &mut |path| {
        fs::create_dir_all(to.join(path).parent().expect("it is below the root")).expect("there is room");
        fs::copy(from.join(path), to.join(path)).expect("there is room");
    });
}

/// Visits the files of a directory, by their paths below it.
fn visit(root: &Path, below: &Path, each: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(root.join(below)).expect("the directory is there") {
        let entry = entry.expect("the directory can be read");
        let path = below.join(entry.file_name());
        if entry.file_type().expect("it has a type").is_dir() { visit(root, &path, each) } else { each(&path) }
    }
}
