//! Directories of killed servers, damaged, inspected and served: no value is wrong, no acknowledged gradient is
//! missing without a report, and the verdict of `inspect` is that of a server. The test makes 200 damages by default,
//! 5,000 with `PSERVER_FULL=1`, or the number in `PSERVER_DAMAGES`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, TCP, client, folder};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, begin, given, pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::checkpoint::inspect::InspectVerdict;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::server::survey;
use pserver_node::Server;
use pserver_transport::loopback::Hub;

const SGD: &str = "const_lr { learning_rate: 1.0 }";
const CHUNK_BYTES: u32 = 4096;
/// Pushes of ones before the older copy of a directory is taken, and after it.
const PUSHES: [u64; 2] = [9, 14];

fn damages() -> usize {
    let asked = std::env::var("PSERVER_DAMAGES").ok().map(|text| text.parse().expect("it is a number"));
    asked.unwrap_or(if is_full() { 5000 } else { 200 })
}

fn tensors() -> Vec<Tensor> {
    vec![Tensor::new("long", Float32, 5000, SGD).zeroed(), Tensor::new("short", Float32, 3, SGD).zeroed()]
}

fn job(root: &Path) -> Job {
    let job = Job { shards: 2, mode: "async", chunk_bytes: CHUNK_BYTES, ..Job::new(1, 1) };
    job.with_checkpoints(root)
}

/// The files of a directory, by their paths below it.
type Files = BTreeMap<PathBuf, Vec<u8>>;

fn read_all(root: &Path, below: &Path, files: &mut Files) {
    for entry in fs::read_dir(root.join(below)).expect("the directory is there") {
        let entry = entry.expect("the directory can be read");
        let path = below.join(entry.file_name());
        if entry.file_type().expect("it has a type").is_dir() {
            read_all(root, &path, files);
        } else {
            files.insert(path.clone(), fs::read(root.join(&path)).expect("the file can be read"));
        }
    }
}

fn write_all(root: &Path, files: &Files) {
    for (path, bytes) in files {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("it is below the root")).expect("there is room");
        fs::write(path, bytes).expect("there is room");
    }
}

/// The directory after a kill, and the directory some pushes earlier. `interval` is that of checkpoints in seconds.
fn killed(interval: &str) -> (Files, Files) {
    let root = folder();
    let job = Job { bind: TCP, ..job(root.path()) }.with("--checkpoint-interval-seconds", interval);
    let mut processes = Processes::start(job);
    let client = client(&processes.coordinator(), 0);
    let tensors = tensors();
    begin(&client, &tensors).expect("the tensors are initialised");
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    let (mut before, mut after) = (Files::new(), Files::new());
    for (count, files) in PUSHES.into_iter().zip([&mut before, &mut after]) {
        for _ in 0..count {
            client.push(&given(&tensors, &ones), None).expect("a gradient is taken");
            // tidy: allow sleep: checkpoints are taken by the clock, and some lie between these pushes
            std::thread::sleep(Duration::from_millis(20));
        }
        if files.is_empty() && count == PUSHES[0] {
            read_while_served(root.path(), files);
        }
    }
    processes.kill(0);
    read_all(root.path(), Path::new(""), &mut after);
    (before, after)
}

/// A server that serves may rename a file while it is read; then all are read again.
fn read_while_served(root: &Path, files: &mut Files) {
    let read = || {
        let mut found = Files::new();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read_all(root, Path::new(""), &mut found)))
            .is_ok()
            .then_some(found)
    };
    *files = (0..100).find_map(|_| read()).expect("a file is read between two checkpoints");
}

/// Damages one file or two; returns a description of the damage.
fn damage(prng: &mut SeededPrng, files: &mut Files, before: &Files) -> String {
    let paths: Vec<PathBuf> = files.keys().filter(|path| !path.ends_with("lock")).cloned().collect();
    let path = paths[prng.below(paths.len())].clone();
    let other = paths[prng.below(paths.len())].clone();
    let old = before.get(&path).cloned();
    let bytes = files.get_mut(&path).expect("it was listed");
    let at = prng.below(bytes.len().max(1));
    let shown = path.display();
    match prng.below(7) {
        0 if !bytes.is_empty() => {
            bytes[at] ^= 1 << prng.below(8);
            format!("{shown}: a bit of byte {at} flipped")
        }
        1 => {
            bytes.truncate(at);
            format!("{shown}: cut to {at}")
        }
        2 => {
            let end = bytes.len().min(at + 1 + prng.below(600));
            bytes[at.min(end)..end].fill(0);
            format!("{shown}: zeros from {at} to {end}")
        }
        3 => {
            let more = 1 + prng.below(100);
            bytes.extend((0..more).map(|_| prng.next().to_le_bytes()[0]));
            format!("{shown}: {more} bytes appended")
        }
        4 => {
            let mine = std::mem::take(bytes);
            let swapped = files.insert(other.clone(), mine).expect("it was listed");
            files.insert(path.clone(), swapped);
            format!("{shown} and {} swapped", other.display())
        }
        5 if old.is_some() => {
            *bytes = old.expect("it was looked at");
            format!("{shown}: as it was before")
        }
        _ => {
            files.remove(&path);
            format!("{shown}: deleted")
        }
    }
}

/// Serves a directory. Returns the number of pushes that each chunk contains, or the reason why no server starts.
fn serve(root: &Path, name: &'static str) -> Result<Option<Vec<f32>>, String> {
    let hub = Hub::default();
    let settings = Job { bind: name, ..job(root) }.settings(0, None);
    let server = Server::start_within(settings, &hub).map_err(|failure| failure.to_string())?;
    let options = ClientOptions::new(server.address().clone());
    let options = ClientOptions { is_reader: true, deadline: Duration::from_millis(2000), ..options };
    let reader = Client::within(options, &hub).expect("it needs nothing of the system");
    let values = pull(&reader, &tensors()).ok();
    drop(reader);
    server.stop().expect("a server stops without a failure");
    Ok(values.map(|values| {
        let chunks = values.iter().flat_map(|value| value.chunks(CHUNK_BYTES as usize));
        chunks.map(uniform).collect()
    }))
}

/// The value of every element of a chunk.
fn uniform(chunk: &[u8]) -> f32 {
    let numbers: Vec<f32> =
        chunk.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect();
    assert!(numbers.iter().all(|number| *number == numbers[0]), "a chunk is of one version: {numbers:?}");
    numbers[0]
}

#[test]
fn damaged_files_give_no_wrong_value_or_silent_loss_and_inspect_agrees() {
    let mut prng = SeededPrng::of("damage");
    let all: u64 = PUSHES.iter().sum();
    // One directory with many checkpoints, one with a journal from the beginning.
    let originals = [killed("0.1"), killed("600")];
    let mut counts = [0; 3];
    for number in 0..damages() {
        let (before, after) = &originals[number % originals.len()];
        let mut files = after.clone();
        let what = damage(&mut prng, &mut files, before);
        let root = folder();
        write_all(root.path(), &files);
        let storage = Directory::open(root.path()).expect("the directory is there");
        let report = survey(&storage, None).expect("there is a server");
        let served = serve(root.path(), "loopback://server-0:1");
        let context = || format!("damage {number}, {what}:\n{report}\n{served:?}");
        assert_eq!(report.verdict() == InspectVerdict::Refused, served.is_err(), "{}", context());
        counts[report.verdict() as usize] += 1;
        let Ok(values) = &served else { continue };
        #[expect(clippy::cast_precision_loss, reason = "pushes are few")]
        let all = all as f32;
        match values {
            Some(values) if report.is_sound() => assert!(values.iter().all(|value| *value == all), "{}", context()),
            Some(values) => {
                let is_count = |value: &f32| value.fract() == 0.0 && (0.0..=all).contains(value);
                assert!(values.iter().all(is_count), "{}", context());
            }
            None => assert!(!report.is_sound(), "{}", context()),
        }
    }
    let [sound, warned, refused] = counts;
    println!("{} damages: {sound} sound, {warned} warned, {refused} refused", damages());
}
