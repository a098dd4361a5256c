//! Damaged directories of checkpoints, journals and coordinators: a read is refused by name, or gives the same contents
//! again, also to the next owner.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use pserver_core::checkpoint::owner::server_directory;
use pserver_core::checkpoint::storage::InMemory;
use pserver_core::checkpoint::{
    ChunkLayout, ChunkRecord, CoordinatorFile, CoordinatorState, DirectoryOwner, Folder, Journal, OwnerRecord,
    ReplayOptions, Replayed, ShardCheckpoint, StateLayout, Storage, inspect, load_latest, replay,
};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, Epoch, ParameterIndex, Version};
use pserver_core::port::{CoordinationStore, StoreVersion};
use pserver_core::server::{Coordinator, CoordinatorOptions, OperatorSettings};
use pserver_core::wire::JobMessage;

const JOB: Epoch = Epoch(7);
/// Bytes of a change as [`Change::all`] reads it.
const CHANGE_BYTES: usize = 6;
/// The largest number of changes; more find no further states.
const CHANGES_MAX: usize = 12;

/// One change of a directory, valid for any numbers.
struct Change {
    what: u8,
    file: u8,
    offset: u16,
    length: u8,
    value: u8,
}

impl Change {
    fn all(bytes: &[u8]) -> impl Iterator<Item = Self> {
        let changes = bytes.chunks_exact(CHANGE_BYTES).take(CHANGES_MAX);
        changes.map(|bytes| {
            let offset = u16::from_le_bytes([bytes[2], bytes[3]]);
            Self { what: bytes[0], file: bytes[1], offset, length: bytes[4], value: bytes[5] }
        })
    }

    /// Changes one of the files of `directory` whose names begin with `prefix`, if there is one.
    fn make(&self, storage: &InMemory, directory: &str, prefix: &str) {
        let names = storage.list(directory).expect("memory lists what it has");
        let paths = names.iter().filter(|name| name.starts_with(prefix)).map(|name| format!("{directory}/{name}"));
        let paths: Vec<_> = paths.collect();
        let Some(path) = paths.get(usize::from(self.file) % paths.len().max(1)) else { return };
        let mut bytes = read(storage, path);
        let at = usize::from(self.offset) % (bytes.len() + 1);
        let end = (at + usize::from(self.length)).min(bytes.len());
        match self.what % 8 {
            0 => bytes[at..end].iter_mut().for_each(|byte| *byte ^= self.value),
            1 => bytes.truncate(at),
            2 => bytes[at..end].fill(0),
            3 => bytes.resize(bytes.len() + usize::from(self.length), self.value),
            4 => return storage.remove(path).expect("it is there"),
            5 => bytes = read(storage, &paths[usize::from(self.value) % paths.len()]),
            6 => drop(bytes.splice(at..end, [self.value])),
            _ => {
                let mut other = path.clone().into_bytes();
                let at = other.len() - 1 - usize::from(self.offset) % other.len().min(48);
                other[at] = if other[at].is_ascii_digit() { b'0' + self.value % 10 } else { other[at] };
                let other = String::from_utf8(other).expect("a digit for a digit");
                return storage.rename(path, &other).expect("it is there");
            }
        }
        write(storage, path, &bytes);
    }
}

fn read(storage: &InMemory, path: &str) -> Vec<u8> {
    let storage: &dyn Storage = storage;
    let mut reader = storage.open(path).expect("it is there");
    let mut bytes = vec![0; usize::try_from(reader.len()).expect("it is short")];
    reader.read_at(0, &mut bytes).expect("it is as long as it says");
    bytes
}

fn write(storage: &InMemory, path: &str, bytes: &[u8]) {
    if storage.exists(path).expect("memory finds") {
        storage.remove(path).expect("it is there");
    }
    storage.create(path).and_then(|mut file| file.write(&[bytes])).expect("memory has room");
}

fn claim(storage: &InMemory) -> Result<Folder, Failure> {
    Folder::claim_alone(Arc::new(storage.clone()), JOB)
}

type Records = Vec<(u64, Vec<u8>)>;

fn records(folder: &Folder, accepts_torn_tail: bool) -> Result<(Replayed, Records), Failure> {
    let mut records = Vec::new();
    let (storage, directory, identity) = (folder.storage(), folder.directory(), Some(folder.identity()));
    let reading = ReplayOptions { storage, directory, identity, from: 0, accepts_torn_tail };
    let found = replay(&reading, &mut |position, payload| {
        records.push((position, payload.to_vec()));
        Ok(())
    })?;
    Ok((found, records))
}

/// Continues the journal behind its existing records, and writes some records.
fn append(storage: &InMemory, count: u8) -> Result<Folder, Failure> {
    let folder = claim(storage)?;
    let (found, _) = records(&folder, true)?;
    let mut journal = Journal::begin(&folder, false, &found, 0)?;
    for number in 0..count {
        journal.append(&[&[number; 20], &[0; 30]])?;
        journal.commit()?;
        if number % 4 == 3 {
            journal.rotate()?;
        }
    }
    Ok(folder)
}

/// A journal of two owners and several segments.
static JOURNAL: LazyLock<InMemory> = LazyLock::new(|| {
    let storage = InMemory::new();
    for count in [6, 9] {
        append(&storage, count).expect("the storage is well");
    }
    storage
});

/// A journal with these changes, and owners that start between them: the next owner's journal has the records that were
/// found and those that it wrote, and none is missing. Returns whether a start without `--accept-torn-tail` accepts it.
pub(crate) fn journal(bytes: &[u8]) -> bool {
    let storage = JOURNAL.copy();
    let Ok(folder) = claim(&storage) else { panic!("the directory is as it was") };
    for change in Change::all(bytes) {
        if change.what < 128 {
            change.make(&storage, folder.directory(), "");
        } else {
            drop(append(&storage, change.length % 8));
        }
    }
    let Ok(folder) = claim(&storage) else { return false };
    let strict = records(&folder, false);
    let Ok((found, before)) = records(&folder, true) else {
        assert!(strict.is_err(), "who accepts damage is not refused what others get");
        return false;
    };
    if let Ok((_, strict)) = &strict {
        assert_eq!(strict, &before, "accepting what is not there changes nothing");
    }
    let Ok(mut journal) = Journal::begin(&folder, false, &found, 0) else { return strict.is_ok() };
    let position = journal.append(&[b"behind"]).expect("the storage is well");
    journal.commit().expect("the storage is well");
    let (found, after) = records(&folder, false).expect("what an owner began is whole");
    assert_eq!(after[..before.len()], before, "what was found stays");
    assert_eq!(after[before.len()..], [(position, b"behind".to_vec())], "and what was written comes next");
    assert_eq!((found.missing, found.unsure, found.dropped), (None, None, None));
    strict.is_ok()
}

/// A shard's directory with two checkpoints of two chunks, in two files each.
static CHECKPOINTS: LazyLock<InMemory> = LazyLock::new(|| {
    let storage = InMemory::new();
    for number in [1_u8, 2] {
        let folder = claim(&storage).expect("the storage is well");
        let id = |chunk| ChunkId { parameter: ParameterIndex(3), chunk: ChunkIndex(chunk) };
        let states = vec![StateLayout { name: "momentum".into(), element_type: Float32, bytes: 8 }];
        let layout =
            vec![ChunkLayout::fixed(id(0), Float32, 8, states.clone()), ChunkLayout::growing(id(1), Float32, states)];
        let mut checkpoint = ShardCheckpoint::begin(&folder, number.into(), 0, layout).expect("the storage is well");
        for chunk in [0_u8, 1] {
            let (value, states) = ([number; 8], [&[chunk; 8][..]]);
            let record = ChunkRecord {
                id: id(chunk.into()),
                version: Version(number.into()),
                marks: b"marks",
                value: &value,
                states: &states,
            };
            checkpoint.push(record).expect("the storage is well");
        }
        checkpoint.finish().expect("the storage is well");
    }
    storage
});

/// Checkpoints with these changes. Some get correct digests, so that the contents under the digests are read too.
/// Returns whether a checkpoint is loaded.
pub(crate) fn manifest(bytes: &[u8]) -> bool {
    let storage = CHECKPOINTS.copy();
    let folder = claim(&storage).expect("the directory is as it was");
    for change in Change::all(bytes) {
        change.make(&storage, folder.directory(), "checkpoint-");
        if change.what >= 128 {
            make_good(&storage, folder.directory());
        }
    }
    let load = || {
        let mut chunks: Vec<(ChunkId, Version, Vec<u8>)> = Vec::new();
        let loaded = load_latest(&storage, folder.directory(), Some(folder.identity()), &mut |chunk| {
            let tensors = [&[chunk.marks, chunk.value], chunk.states].concat().concat();
            chunks.push((chunk.id, chunk.version, tensors));
            Ok(())
        });
        (loaded, chunks)
    };
    let (loaded, chunks) = load();
    assert_eq!(load(), (loaded.clone(), chunks), "what is read is read again");
    if let Ok(report) = inspect(&storage, folder.directory()) {
        assert!(!report.is_sound() || loaded.is_ok(), "what is sound is loaded: {report}");
    }
    matches!(loaded, Ok(Some(_)))
}

/// Gives every manifest the lengths and digests of the files that it lists, and its own.
fn make_good(storage: &InMemory, directory: &str) {
    let names = storage.list(directory).expect("memory lists what it has");
    for name in names.iter().filter(|name| name.ends_with(".json")) {
        let path = format!("{directory}/{name}");
        let Ok(mut text) = String::from_utf8(read(storage, &path)) else { continue };
        for file in &names {
            let Some(at) = text.find(&format!("\"{file}\"")) else { continue };
            let bytes = read(storage, &format!("{directory}/{file}"));
            let digest = blake3::hash(&bytes).to_hex().to_string();
            let at = replace(&mut text, at, "\"bytes\": ", &bytes.len().to_string());
            replace(&mut text, at, "\"blake3\": \"", &digest);
        }
        let (Some(from), Some(to)) = (text.find("\"manifest\": "), text.rfind(",\n  \"blake3\"")) else { continue };
        let Some(sealed) = text.get(from + "\"manifest\": ".len()..to) else { continue };
        let digest = blake3::hash(compact(sealed).as_bytes()).to_hex().to_string();
        replace(&mut text, to, "\"blake3\": \"", &digest);
        write(storage, &path, text.as_bytes());
    }
}

/// Replaces the letters and digits behind the next `key`; returns their position.
fn replace(text: &mut String, from: usize, key: &str, by: &str) -> usize {
    let Some(at) = text.get(from..).and_then(|rest| rest.find(key)) else { return from };
    let start = from + at + key.len();
    let length = text[start..].bytes().take_while(u8::is_ascii_alphanumeric).count();
    text.replace_range(start..start + length, by);
    start
}

/// JSON without the spaces between its words.
fn compact(pretty: &str) -> String {
    let mut is_word = false;
    let kept = pretty.chars().filter(|letter| {
        is_word ^= *letter == '"';
        is_word || !letter.is_whitespace()
    });
    kept.collect()
}

fn options() -> CoordinatorOptions {
    CoordinatorOptions {
        epoch: JOB,
        servers: 1,
        job: JobMessage { trainers: 2, ..JobMessage::default() },
        default_config: Vec::new(),
        given: OperatorSettings::default(),
        lease: Duration::from_secs(1),
        watches: false,
        takes_nonfinite: false,
        model_dir: String::new(),
        grace: Duration::from_secs(1),
    }
}

/// A coordinator's file: the first byte says whether the others are changes of it, or a state with a checksum that
/// holds. Returns whether a coordinator accepts the file.
pub(crate) fn coordinator_file(bytes: &[u8]) -> bool {
    let Some((first, rest)) = bytes.split_first() else { return false };
    let memory = InMemory::new();
    let storage: Arc<dyn Storage> = Arc::new(memory.clone());
    let record = OwnerRecord { server: 0, process: 1, host: String::new(), since: String::new() };
    let owner = DirectoryOwner::claim_server(Arc::clone(&storage), &record).expect("the storage is well");
    let mut file = CoordinatorFile::new(Arc::clone(&storage), owner);
    let state = if *first == 0 { b"a state" } else { rest };
    file.compare_and_set(StoreVersion::default(), state).expect("the storage is well");
    if *first == 0 {
        Change::all(rest).for_each(|change| change.make(&memory, &server_directory(0), "coordinator-"));
    }
    match CoordinatorState::recall(&*storage) {
        Ok(Some(state)) if *first == 0 => state.bytes == b"a state",
        Ok(Some(state)) => {
            assert_eq!(state.bytes, rest, "what was kept is recalled");
            Coordinator::new(options(), Some(&state.bytes)).is_ok()
        }
        Ok(None) | Err(_) => false,
    }
}
