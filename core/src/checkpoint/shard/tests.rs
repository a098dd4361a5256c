use std::sync::Arc;

use safetensors::SafeTensors;

use super::*;
use crate::checkpoint::owner::tests::put_first;
use crate::checkpoint::owner::{OwnerNumber, OwnerRecord, ShardIdentity};
use crate::checkpoint::storage::join;
use crate::checkpoint::storage::tests::{get, put};
use crate::checkpoint::storage::{Directory, Failing, InMemory, Metered, StorageFault};
use crate::checkpoint::{
    Journal, Loaded, ReplayOptions, Replayed, StateLayout, Storage, inspect, journal_needed_from, load_latest, replay,
};
use crate::ids::{ChunkIndex, ParameterIndex, Version};
use crate::metrics::WorkMeter;
use crate::shares::ShardNeed;

const SHARD: &str = "server-0/shard-1";
const IDENTITY: ShardIdentity = ShardIdentity { job: 77, server: 0, shard: 1 };

fn folder(storage: Arc<dyn Storage>) -> Folder {
    Folder::first(storage, IDENTITY)
}

/// The names of the shard's files, but for its owner's.
fn files(storage: &dyn Storage) -> Vec<String> {
    let mut names = storage.list(SHARD).unwrap();
    names.retain(|name| !name.starts_with("owner-"));
    names
}

/// The folder of another process.
fn claim(storage: &InMemory) -> Folder {
    let record = OwnerRecord { server: 0, process: 2, host: String::new(), since: String::new() };
    Folder::claim(Arc::new(storage.clone()), IDENTITY, &record, ShardNeed::default()).unwrap()
}

fn journal(storage: &InMemory) -> Journal {
    Journal::begin(&folder(Arc::new(storage.clone())), false, &Replayed::default(), 0).unwrap()
}

fn named(number: u64) -> CheckpointName {
    CheckpointName { owner: OwnerNumber(1), number }
}

fn numbers(storage: &dyn Storage) -> Vec<u64> {
    manifest::names(storage, SHARD).unwrap().into_iter().map(|name| name.number).collect()
}

/// A chunk with bytes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Owned {
    id: ChunkId,
    version: Version,
    marks: Vec<u8>,
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
}

impl Owned {
    fn record<'a>(&'a self, states: &'a [&'a [u8]]) -> ChunkRecord<'a> {
        ChunkRecord { id: self.id, version: self.version, marks: &self.marks, value: &self.value, states }
    }

    fn layout(&self) -> ChunkLayout {
        let state = |(index, state): (usize, &Vec<u8>)| StateLayout {
            name: ["momentum", "last/seen", "empty"][index].into(),
            element_type: [ElementType::Float32, ElementType::Uint64, ElementType::Float32][index],
            bytes: state.len() as u64,
        };
        let states = self.states.iter().enumerate().map(state).collect();
        ChunkLayout::fixed(self.id, ElementType::Float32, self.value.len() as u64, states)
    }
}

fn chunk(parameter: u32, chunk: u64, fill: u8) -> Owned {
    Owned {
        id: ChunkId { parameter: ParameterIndex(parameter), chunk: ChunkIndex(chunk) },
        version: Version(u64::from(fill)),
        marks: vec![fill; usize::from(fill % 3)],
        value: vec![fill; 12],
        states: vec![vec![fill + 1; 12], vec![fill + 2; 8], Vec::new()],
    }
}

/// The chunks of the shard at checkpoint `number`.
fn chunks(number: u64) -> Vec<Owned> {
    let fill = u8::try_from(number * 10).unwrap();
    let mut chunks = vec![chunk(0, 0, fill), chunk(0, 1, fill + 1), chunk(7, 12, fill + 2), chunk(8, 0, fill + 3)];
    chunks[2].states.clear();
    chunks
}

fn write_parts(storage: Arc<dyn Storage>, number: u64, part_header_bytes: u64) -> Result<u64, Failure> {
    let chunks = chunks(number);
    let layout = chunks.iter().map(Owned::layout).collect();
    let mut checkpoint = ShardCheckpoint::begin(&folder(storage), number, number * 100, layout)?;
    checkpoint.part_header_bytes = part_header_bytes;
    for chunk in &chunks {
        assert_eq!(checkpoint.next(), Some(chunk.id));
        let states: Vec<&[u8]> = chunk.states.iter().map(Vec::as_slice).collect();
        checkpoint.push(chunk.record(&states))?;
    }
    assert_eq!(checkpoint.next(), None);
    checkpoint.finish()
}

/// Two parts.
fn write(storage: &InMemory, number: u64) -> Result<u64, Failure> {
    write_parts(Arc::new(storage.clone()), number, 400)
}

fn written(numbers: &[u64]) -> InMemory {
    let storage = InMemory::new();
    put_first(&storage, SHARD);
    numbers.iter().for_each(|number| assert!(write(&storage, *number).is_ok()));
    storage
}

/// Loads, and checks that all chunks are of one checkpoint.
fn load(storage: &dyn Storage) -> Result<Option<Loaded>, Failure> {
    let mut found = Vec::new();
    let loaded = load_latest(storage, SHARD, Some(&IDENTITY), &mut |record| {
        let ChunkRecord { id, version, marks, value, states } = record;
        let states = states.iter().map(|state| state.to_vec()).collect();
        found.push(Owned { id, version, marks: marks.to_vec(), value: value.to_vec(), states });
        Ok(())
    });
    match &loaded {
        Ok(Some(loaded)) => {
            assert_eq!(found, chunks(loaded.name.number));
            assert_eq!((loaded.journal_from, loaded.bytes), (loaded.name.number * 100, 4 * 12 + 3 * 20));
        }
        _ => assert_eq!(found, [], "nothing is visited of what is not whole"),
    }
    loaded
}

fn loaded_number(storage: &dyn Storage) -> Option<u64> {
    load(storage).unwrap().map(|loaded| loaded.name.number)
}

fn path(name: &str) -> String {
    join(SHARD, name)
}

#[test]
fn a_written_checkpoint_is_loaded() {
    let storage = written(&[]);
    assert_eq!(load(&storage), Ok(None));
    let bytes = write(&storage, 1).unwrap();
    let names = files(&storage);
    let on_disk: usize = names.iter().map(|name| get(&storage, &path(name)).len()).sum();
    assert_eq!((names.len(), on_disk as u64), (4, bytes), "two parts, the chunk table, the manifest");
    assert_eq!(load(&storage).unwrap().unwrap().fell_back, Vec::<String>::new());
    write_parts(Arc::new(storage.clone()), 2, PART_HEADER_BYTES).unwrap();
    assert_eq!(loaded_number(&storage), Some(2));
}

#[test]
fn a_real_disk_keeps_checkpoints_and_journal() {
    let root = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(Directory::open(root.path()).unwrap());
    put_first(&*storage, SHARD);
    let mut journal = Journal::begin(&folder(storage.clone()), true, &Replayed::default(), 0).unwrap();
    journal.keep(&[b"a ", b"frame"]).unwrap();
    for number in 1..=3 {
        write_parts(storage.clone(), number, 400).unwrap();
    }
    assert_eq!(loaded_number(&*storage), Some(3));
    assert_eq!(numbers(&*storage), [2, 3]);
    let mut records = Vec::new();
    let reading = ReplayOptions {
        storage: &*storage,
        directory: SHARD,
        identity: Some(&IDENTITY),
        from: 0,
        accepts_torn_tail: false,
    };
    let replayed = replay(&reading, &mut |_, payload| {
        records.push(payload.to_vec());
        Ok(())
    });
    assert_eq!((records, replayed.unwrap().warnings()), (vec![b"a frame".to_vec()], Vec::new()));
    assert!(inspect(&*storage, SHARD).unwrap().is_sound());
}

#[test]
fn a_shard_without_chunks_has_a_checkpoint_too() {
    let storage = written(&[]);
    let begun = ShardCheckpoint::begin(&folder(Arc::new(storage.clone())), 1, 5, Vec::new()).unwrap();
    begun.finish().unwrap();
    let loaded = load_latest(&storage, SHARD, None, &mut |_| panic!("there is no chunk")).unwrap().unwrap();
    assert_eq!((loaded.journal_from, loaded.bytes), (5, 0));
}

#[test]
fn the_data_is_safetensors_with_the_names_of_the_chunks() {
    let storage = written(&[1]);
    let file = get(&storage, &path(&data_name(named(1), 0)));
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let state = tensors.tensor("state/momentum/0/1").unwrap();
    assert_eq!((state.dtype(), state.shape(), state.data()), (safetensors::Dtype::F32, &[3][..], &[12; 12][..]));
    assert_eq!(tensors.tensor("state/last/seen/0/1").unwrap().dtype(), safetensors::Dtype::U64);
    assert_eq!(tensors.tensor("value/0/0").unwrap().data(), [10; 12]);
}

#[test]
fn the_newest_two_checkpoints_and_the_journal_that_they_need_are_kept() {
    let storage = written(&[]);
    assert_eq!(journal_needed_from(&storage, SHARD), Ok(None));
    journal(&storage).keep(&[b"x"]).unwrap();
    for (number, kept, needed) in [(1, vec![1], 100), (2, vec![1, 2], 100), (3, vec![2, 3], 200), (9, vec![3, 9], 300)]
    {
        write(&storage, number).unwrap();
        assert_eq!(numbers(&storage), kept);
        assert_eq!(journal_needed_from(&storage, SHARD), Ok(Some(needed)));
        assert_eq!(files(&storage).len(), kept.len() * 4 + 2, "no file is left over");
    }
}

#[test]
fn a_whole_checkpoint_is_not_overwritten_and_a_damaged_one_is() {
    let storage = written(&[1, 2]);
    assert!(write(&storage, 2).unwrap_err().to_string().contains("already there, and whole"));
    put(&storage, &path(&data_name(named(2), 1)), b"damaged");
    assert_eq!(loaded_number(&storage), Some(1));
    write(&storage, 2).unwrap();
    assert_eq!(loaded_number(&storage), Some(2));
}

#[test]
fn a_damaged_checkpoint_of_an_earlier_owner_is_removed_once_another_is_whole() {
    let storage = written(&[1, 5]);
    put(&storage, &path(&chunks_name(named(5))), b"damaged");
    let folder = claim(&storage);
    assert_eq!(folder.owner.number(), OwnerNumber(2));
    let begin = ShardCheckpoint::begin(&folder, 2, 200, Vec::new()).unwrap();
    begin.finish().unwrap();
    let owned = |owner, number| CheckpointName { owner: OwnerNumber(owner), number };
    assert_eq!(manifest::names(&storage, SHARD).unwrap(), [owned(1, 5), owned(2, 2)]);
    let begin = ShardCheckpoint::begin(&folder, 3, 300, Vec::new()).unwrap();
    begin.finish().unwrap();
    assert_eq!(manifest::names(&storage, SHARD).unwrap(), [owned(2, 2), owned(2, 3)]);
}

#[test]
fn a_replaced_owner_completes_no_checkpoint_and_removes_nothing() {
    let storage = written(&[1, 2]);
    let old = folder(Arc::new(storage.clone()));
    let mut late = ShardCheckpoint::begin(&old, 3, 300, vec![chunks(3)[0].layout()]).unwrap();
    let chunk = &chunks(3)[0];
    let states: Vec<&[u8]> = chunk.states.iter().map(Vec::as_slice).collect();
    late.push(chunk.record(&states)).unwrap();
    claim(&storage);
    assert!(matches!(late.finish(), Err(Failure::Node(_))));
    assert!(matches!(ShardCheckpoint::begin(&old, 4, 400, Vec::new()), Err(Failure::Node(_))));
    assert_eq!(numbers(&storage), [1, 2]);
    assert_eq!(loaded_number(&storage), Some(2));
}

#[test]
fn a_checkpoint_of_another_shard_or_job_is_refused_by_name() {
    let storage = written(&[1]);
    for (expected, remedy) in [
        (ShardIdentity { job: 78, ..IDENTITY }, "a directory of its own"),
        (ShardIdentity { shard: 0, ..IDENTITY }, "swapped or renamed"),
        (ShardIdentity { server: 3, ..IDENTITY }, "swapped or renamed"),
    ] {
        let refused = load_latest(&storage, SHARD, Some(&expected), &mut |_| panic!("not visited"));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("is of shard 1 of server 0, job 77"), "{text}");
        assert!(text.contains(&format!("expected {expected}: ")) && text.contains(remedy), "{text}");
    }
    assert!(load_latest(&storage, SHARD, None, &mut |_| Ok(())).unwrap().is_some());
}

#[test]
fn a_checkpoint_of_the_format_before_owners_is_refused_by_name() {
    let storage = InMemory::new();
    put(&storage, &path("checkpoint-00000000000000000007.json"), b"{}");
    let text = load(&storage).unwrap_err().to_string();
    assert!(text.contains("checkpoint-00000000000000000007.json") && text.contains("format 1"), "{text}");
    assert!(!inspect(&storage, SHARD).unwrap().is_sound());
}

#[test]
fn a_newer_format_is_refused_by_number() {
    let storage = written(&[1]);
    let text = String::from_utf8(get(&storage, &path(&manifest_name(named(1))))).unwrap();
    let newer = text.replace("\"format\": 3", "\"format\": 4, \"more\": []");
    put(&storage, &path(&manifest_name(named(1))), newer.as_bytes());
    let text = load(&storage).unwrap_err().to_string();
    assert!(text.contains("is of format 4; this program reads format 3"), "{text}");
}

#[test]
fn an_earlier_format_is_refused_with_the_last_revision_that_wrote_it() {
    let storage = written(&[1]);
    let text = String::from_utf8(get(&storage, &path(&manifest_name(named(1))))).unwrap();
    let earlier = text.replace("\"format\": 3", "\"format\": 2");
    put(&storage, &path(&manifest_name(named(1))), earlier.as_bytes());
    let text = load(&storage).unwrap_err().to_string();
    assert!(text.contains("is of format 2, which servers up to revision ca6eb58 wrote"), "{text}");
}

#[test]
fn the_bytes_of_a_manifest_and_a_chunk_table_do_not_change() {
    // The digest was computed by another program, from docs/CHECKPOINT.md.
    let manifest = Manifest {
        format: 3,
        name: named(7),
        of: IDENTITY,
        journal_from: 1234,
        chunks: 0,
        files: vec![FileEntry { name: chunks_name(named(7)), bytes: 16, blake3: "cd".repeat(32) }],
    };
    let expected = r#"{
  "manifest": {
    "format": 3,
    "owner": 1,
    "number": 7,
    "of": {
      "job": 77,
      "server": 0,
      "shard": 1
    },
    "journal_from": 1234,
    "chunks": 0,
    "files": [
      {
        "name": "checkpoint-0000000001-00000000000000000007.chunks",
        "bytes": 16,
        "blake3": "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"
      }
    ]
  },
  "blake3": "02db0b076c9c4f059b400ec94af4978b309b57cc4e46633f67aff2b014645ed7"
}
"#;
    assert_eq!(String::from_utf8(manifest.encode()).unwrap(), expected);
    let table = get(&written(&[1]), &path(&chunks_name(named(1))));
    let expected = b"PSCHUNK1\x04\0\0\0\0\0\0\0\
        \0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x0a\0\0\0\0\0\0\0\x0a\
        \0\0\0\0\x02\0\0\0\x01\0\0\0\0\0\0\0\x0b\0\0\0\0\0\0\0\x0b\x0b\
        \x07\0\0\0\0\0\0\0\x0c\0\0\0\0\0\0\0\x0c\0\0\0\0\0\0\0\
        \x08\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x0d\0\0\0\0\0\0\0\x0d";
    assert_eq!(table.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

#[test]
fn no_failed_operation_damages_the_previous_checkpoint() {
    let count = Arc::new(Failing::new(Arc::new(written(&[1, 2])), StorageFault::None));
    write_parts(count.clone(), 3, 400).unwrap();
    for operation in 0..count.operations() {
        for (fault, host_lost) in [
            (StorageFault::Once { operation }, false),
            (StorageFault::Crash { operation }, false),
            (StorageFault::Crash { operation }, true),
        ] {
            let storage = written(&[1, 2]);
            let saved = write_parts(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), 3, 400);
            if host_lost {
                storage.crash();
            }
            let number = loaded_number(&storage);
            let expected = if saved.is_ok() { vec![3] } else { vec![2, 3] };
            assert!(
                expected.contains(&number.unwrap()),
                "{fault:?}, host lost: {host_lost}: {number:?} after {saved:?}"
            );
            write(&storage, 4).unwrap();
            assert_eq!(loaded_number(&storage), Some(4), "the next checkpoint is not held up");
            assert_eq!(files(&storage).len(), 8, "{fault:?}: nothing is left over");
        }
    }
}

#[test]
fn a_full_disk_fails_only_the_new_checkpoint() {
    let whole = write(&written(&[1, 2]), 3).unwrap();
    for bytes in 0..whole {
        let storage = written(&[1, 2]);
        let full = Failing::new(Arc::new(storage.clone()), StorageFault::Full { bytes });
        let failure = write_parts(Arc::new(full), 3, 400).unwrap_err();
        assert!(matches!(&failure, Failure::Call(text) if text.contains("no space left")), "{failure}");
        assert_eq!(loaded_number(&storage), Some(2));
        assert!(!storage.list(SHARD).unwrap().iter().any(|name| name.ends_with(PARTIAL)), "the space is given back");
    }
    let exactly = Failing::new(Arc::new(written(&[1, 2])), StorageFault::Full { bytes: whole });
    assert_eq!(write_parts(Arc::new(exactly), 3, 400), Ok(whole));
}

#[test]
fn a_failed_read_falls_back_or_fails_but_never_loads_a_part() {
    let storage = written(&[1, 2]);
    let count = Failing::new(Arc::new(storage.clone()), StorageFault::None);
    load(&count).unwrap();
    for operation in 0..count.operations() {
        let failing = Failing::new(Arc::new(storage.clone()), StorageFault::Once { operation });
        let mut visits = 0;
        let loaded = load_latest(&failing, SHARD, None, &mut |_| {
            visits += 1;
            Ok(())
        });
        if let Ok(loaded) = loaded {
            assert_eq!((visits, loaded.unwrap().fell_back.len()), (4, 1), "operation {operation}");
        }
    }
}

/// Puts `bytes` in place of a file of checkpoint 2, and expects checkpoint 1.
fn check_falls_back(storage: &InMemory, name: &str, bytes: &[u8], what: &str) {
    put(storage, &path(name), bytes);
    let loaded = load(storage).unwrap().unwrap();
    assert_eq!((loaded.name.number, loaded.fell_back.len()), (1, 1), "{name} {what}");
    assert!(
        loaded.fell_back[0].starts_with("checkpoint 2 of owner 1: ") && loaded.fell_back[0].contains(name),
        "{loaded:?}"
    );
}

#[test]
fn no_damage_is_loaded() {
    let storage = written(&[1, 2]);
    let names = storage.list(SHARD).unwrap();
    for name in names.iter().filter(|name| manifest::name_of(name) == Some(named(2))) {
        let whole = get(&storage, &path(name));
        for length in 0..whole.len() {
            check_falls_back(&storage, name, &whole[..length], &format!("cut to {length}"));
        }
        check_falls_back(&storage, name, &[&whole[..], b"\n"].concat(), "with a byte more");
        for byte in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[byte] ^= 1 << (byte % 8);
            check_falls_back(&storage, name, &bytes, &format!("with a flipped bit in byte {byte}"));
        }
        put(&storage, &path(name), &whole);
        assert_eq!(loaded_number(&storage), Some(2));
    }
}

#[test]
fn a_directory_of_damaged_checkpoints_is_not_taken_for_an_empty_one() {
    let storage = written(&[1, 2]);
    for number in [1, 2] {
        storage.remove(&path(&chunks_name(named(number)))).unwrap();
    }
    let failure = load(&storage).unwrap_err();
    let text = failure.to_string();
    assert!(matches!(failure, Failure::Node(_)));
    assert!(text.contains("checkpoint 1 of owner 1: ") && text.contains("checkpoint 2 of owner 1: "), "{text}");
}

/// Replaces a file and its digests, as a process with write access can.
fn forge(storage: &InMemory, name: &str, bytes: &[u8]) {
    put(storage, &path(name), bytes);
    let mut manifest = Manifest::read(storage, SHARD, named(1)).unwrap();
    let file = manifest.files.iter_mut().find(|file| file.name == name).unwrap();
    (file.bytes, file.blake3) = (bytes.len() as u64, blake3::hash(bytes).to_hex().to_string());
    put(storage, &path(&manifest_name(named(1))), &manifest.encode());
}

#[test]
fn a_forged_checkpoint_is_refused_before_the_first_visit() {
    let original = written(&[1]);
    for name in [chunks_name(named(1)), data_name(named(1), 0), data_name(named(1), 1)] {
        let whole = get(&original, &path(&name));
        for byte in 0..whole.len().min(700) {
            let storage = written(&[1]);
            let mut bytes = whole.clone();
            bytes[byte] ^= 0x41;
            forge(&storage, &name, &bytes);
            let mut visits = 0;
            let loaded = load_latest(&storage, SHARD, None, &mut |_| {
                visits += 1;
                Ok(())
            });
            assert_eq!(visits, if loaded.is_ok() { 4 } else { 0 }, "{name}, byte {byte}");
            forge(&storage, &name, &whole[..byte]);
            load_latest(&storage, SHARD, None, &mut |_| panic!("{name} cut to {byte}")).unwrap_err();
        }
    }
}

#[test]
#[should_panic(expected = "pushed in the layout's order")]
fn chunks_in_another_order_are_a_bug() {
    let chunks = chunks(1);
    let layout = chunks.iter().map(Owned::layout).collect();
    let mut checkpoint = ShardCheckpoint::begin(&folder(Arc::new(written(&[]))), 1, 0, layout).unwrap();
    let states: Vec<&[u8]> = chunks[1].states.iter().map(Vec::as_slice).collect();
    let _ = checkpoint.push(chunks[1].record(&states));
}

#[test]
fn a_checkpoint_can_be_finished_on_another_thread() {
    fn sendable<T: Send>() {}
    sendable::<ShardCheckpoint>();
    sendable::<Journal>();
    sendable::<crate::checkpoint::ModelWriter>();
}

#[test]
fn a_report_names_chunks_digests_and_journal() {
    let storage = written(&[1, 2]);
    let mut journal = journal(&storage);
    journal.keep(&[b"one"]).unwrap();
    journal.keep(&[b"two"]).unwrap();
    let report = inspect(&storage, SHARD).unwrap();
    assert!(report.is_sound());
    for line in [
        "checkpoint 2 of owner 1: whole\n  shard 1 of server 0, job 77, journal from 200, 4 chunks\n",
        "  checkpoint-0000000001-00000000000000000002-00001.safetensors ",
        "  value/7/12 F32 [3] version 22\n",
        "  state/last/seen/0/1 U64 [1] version 21\n",
        "server-0/shard-1: checkpoint 2 of owner 1, then 0 records (0 bytes) to position 54\n",
    ] {
        assert!(report.to_string().contains(line), "expected {line:?} in\n{report}");
    }
    put(&storage, &path(&chunks_name(named(2))), b"damaged");
    let report = inspect(&storage, SHARD).unwrap();
    assert!(!report.is_sound());
    for line in ["checkpoint 2 of owner 1: not whole: ", " BAD\n", "checkpoint 1 of owner 1: whole\n"] {
        assert!(report.to_string().contains(line), "expected {line:?} in\n{report}");
    }
}

#[test]
fn files_of_a_newer_program_are_named_and_damaged_numbers_are_not_taken_for_them() {
    let manifest = path(&manifest_name(named(2)));
    let segment = format!("{SHARD}/journal-0000000001-00000000000000000000");
    for (file, ours, newer, field) in [
        (&manifest, "\"format\": 3", "\"format\": 4", "\"journal_from\": "),
        (&segment, "PSJOURN3", "PSJOURN4", "PSJOURN"),
    ] {
        let storage = written(&[1, 2]);
        journal(&storage).keep(&[b"one"]).unwrap();
        let sound = get(&storage, file);
        let with = |replace: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = sound.clone();
            replace(&mut bytes);
            put(&storage, file, &bytes);
            inspect(&storage, SHARD).unwrap().summary()
        };
        let number = |bytes: &mut Vec<u8>| {
            let at = find(bytes, ours);
            bytes[at..at + newer.len()].copy_from_slice(newer.as_bytes());
        };
        let damaged = with(&number);
        assert!(damaged.starts_with("damaged: "), "the digest is that of our own format: {damaged}");
        let newer = with(&|bytes| {
            number(bytes);
            // The digest of a newer program is not that of our format.
            let at = find(bytes, field) + field.len() + 2;
            bytes[at] ^= 1;
        });
        let named = newer.contains(file.rsplit('/').next().unwrap()) && newer.contains("is of format 4; this program");
        assert!(newer.starts_with("newer format: ") && named, "{newer}");
    }
}

#[test]
fn a_meter_counts_what_was_announced_and_the_bytes_of_headers_besides() {
    let (storage, meter) = (InMemory::new(), Arc::new(WorkMeter::default()));
    put_first(&storage, SHARD);
    let metered: Arc<dyn Storage> = Arc::new(Metered::new(Arc::new(storage.clone()), Arc::clone(&meter)));
    write_parts(Arc::clone(&metered), 1, PART_HEADER_BYTES).unwrap();
    let on_disk: u64 = storage.list(SHARD).unwrap().iter().map(|name| get(&storage, &path(name)).len() as u64).sum();
    let values: u64 =
        chunks(1).iter().map(|chunk| 12 + chunk.states.iter().map(|one| one.len() as u64).sum::<u64>()).sum();
    let (expected, written) = meter.counts();
    // The owner's file is no part of the checkpoint, and its manifest is.
    assert_eq!(expected, values);
    assert!(values < written && written <= on_disk, "{written} of {on_disk}");
    let mut journal = Journal::begin(&folder(Arc::clone(&metered)), false, &Replayed::default(), 100).unwrap();
    journal.keep(&[&[1; 100_000]]).unwrap();
    assert_eq!(meter.counts().1, written, "the data path is not counted");
    let reading = Arc::new(WorkMeter::default());
    let metered = Metered::new(Arc::new(storage.clone()), Arc::clone(&reading));
    let report = inspect(&metered, SHARD).unwrap();
    assert!(report.is_sound(), "{report}");
    let (expected, read) = reading.counts();
    assert!(expected <= read && read < expected + 20_000, "{read} of {expected}");
}

fn find(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|window| window == text.as_bytes()).expect("it is there")
}
