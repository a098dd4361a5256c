//! One suite for every storage, and tests of their differences.

use std::sync::Arc;

use super::*;

pub(in crate::checkpoint) fn put(storage: &dyn Storage, path: &str, bytes: &[u8]) {
    storage.create_anew(path).unwrap().write(&[bytes]).unwrap();
}

pub(in crate::checkpoint) fn get(storage: &dyn Storage, path: &str) -> Vec<u8> {
    let mut reader = storage.open(path).unwrap();
    let mut bytes = vec![0; usize::try_from(reader.len()).unwrap()];
    reader.read_at(0, &mut bytes).unwrap();
    bytes
}

fn refusal<T>(outcome: Result<T, Failure>) -> String {
    match outcome {
        Ok(_) => panic!("expected a refusal"),
        Err(failure) => failure.to_string(),
    }
}

/// The properties of every storage.
fn conforms(storage: &dyn Storage) {
    assert_eq!(storage.list("a").unwrap(), Vec::<String>::new(), "a directory that is not there is empty");
    let mut writer = storage.create("a/b/one").unwrap();
    writer.write(&[b"", b"he", b"", b"llo", b""]).unwrap();
    writer.write(&[]).unwrap();
    writer.write(&[b""]).unwrap();
    writer.sync().unwrap();
    assert_eq!(writer.position(), 5);
    storage.sync("a/b/one").unwrap();
    assert!(refusal(storage.sync("a/b/none")).contains("sync \"a/b/none\""), "a file that is not there is named");
    storage.sync_directory("a/b").unwrap();
    storage.sync_directory("").unwrap();
    assert_eq!(get(storage, "a/b/one"), b"hello");
    let mut reader = storage.open("a/b/one").unwrap();
    let mut middle = [0; 3];
    reader.read_at(1, &mut middle).unwrap();
    assert_eq!(&middle, b"ell");
    assert!(refusal(reader.read_at(3, &mut middle)).contains("a/b/one"), "a read past the end names the file");
    put(storage, "a/b/two", b"2");
    put(storage, "a/b-c", b"3");
    assert_eq!(storage.list("a/b").unwrap(), ["one", "two"]);
    assert_eq!(storage.list("a").unwrap(), ["b", "b-c"]);
    assert_eq!(storage.list("").unwrap(), ["a"]);
    refusal(storage.list("a/b/one"));
    storage.rename("a/b/two", "a/b/one").unwrap();
    assert_eq!(get(storage, "a/b/one"), b"2", "a rename replaces");
    assert!(refusal(storage.create("a/b/one")).contains("a/b/one"), "a file is created once");
    assert_eq!(get(storage, "a/b/one"), b"2", "and stays as it was");
    put(storage, "a/b/one", b"12345");
    let mut writer = storage.create_anew("a/b/one").unwrap();
    writer.write(&[b"12345"]).unwrap();
    writer.overwrite(1, b"ab").unwrap();
    writer.write(&[b"6"]).unwrap();
    assert_eq!(get(storage, "a/b/one"), b"1ab456", "bytes are written over where they are");
    assert!(storage.exists("a/b/one").unwrap());
    storage.remove("a/b/one").unwrap();
    assert!(!storage.exists("a/b/one").unwrap());
    assert!(refusal(storage.remove("a/b/one")).contains("remove \"a/b/one\""));
    assert!(storage.find("a/b/one").unwrap().is_none());
    assert!(refusal(storage.open("a/b/one")).contains("open \"a/b/one\""));
    assert!(refusal(storage.rename("a/b/one", "a/b/two")).contains("a/b/one"));
}

#[test]
fn every_storage_keeps_files_alike() {
    let root = tempfile::tempdir().unwrap();
    conforms(&Directory::open(root.path().join("not/yet/there")).unwrap());
    conforms(&InMemory::new());
    conforms(&Failing::new(Arc::new(InMemory::new()), StorageFault::None));
}

#[test]
fn no_path_leaves_the_root() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    let root = outside.path().join("root");
    let storage = Directory::open(&root).unwrap();
    std::os::unix::fs::symlink(outside.path(), root.join("link")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("secret"), root.join("file")).unwrap();
    let absolute = outside.path().join("secret").display().to_string();
    put(&storage, "mine", b"mine");
    for path in ["../secret", "a/../../secret", "link/secret", "file", absolute.as_str(), "..", "/"] {
        assert!(!matches!(storage.find(path), Ok(Some(_))), "{path}");
        refusal(storage.create(path));
        // A link may be replaced or removed; its target may not.
        if path != "file" {
            refusal(storage.rename("mine", path));
            refusal(storage.remove(path));
        }
    }
    refusal(storage.create("../new"));
    refusal(storage.create("link/new"));
    refusal(storage.create("link/deep/new"));
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"secret");
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 2, "nothing was added outside");
}

#[test]
fn a_full_disk_is_named_with_the_path_and_the_bytes() {
    // Every write to this device finds the disk full.
    let file = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut writer = directory::writer("shard-0/x", cap_std::fs::File::from_std(file));
    let text = refusal(writer.write(&[b"1234", b"567"]));
    assert!(text.contains("write 7 bytes at 0 to \"shard-0/x\": No space left"), "{text}");
    assert_eq!(writer.position(), 0);
}

#[test]
fn a_crash_keeps_only_the_synced_bytes() {
    let storage = InMemory::new();
    let mut kept = storage.create("d/kept").unwrap();
    kept.write(&[b"synced"]).unwrap();
    kept.sync().unwrap();
    kept.write(&[b" and not"]).unwrap();
    put(&storage, "d/unsynced", b"bytes");
    put(&storage, "d/synced by name", b"bytes");
    storage.sync("d/synced by name").unwrap();
    storage.sync_directory("d").unwrap();
    put(&storage, "d/unnamed", b"bytes");
    storage.rename("d/kept", "d/renamed").unwrap();
    storage.crash();
    assert_eq!(storage.list("d").unwrap(), ["kept", "synced by name", "unsynced"]);
    assert_eq!(get(&storage, "d/synced by name"), b"bytes");
    assert_eq!(get(&storage, "d/kept"), b"synced");
    assert_eq!(get(&storage, "d/unsynced"), b"");
}

#[test]
fn a_fault_occurs_at_the_configured_operation() {
    let attempt = |fault| {
        let inner = InMemory::new();
        let storage = Failing::new(Arc::new(inner.clone()), fault);
        let mut outcomes = Vec::new();
        let mut writer = storage.create("x").unwrap();
        for _ in 0..3 {
            outcomes.push(writer.write(&[b"12", b"34"]).is_ok());
        }
        drop(writer);
        (outcomes, get(&inner, "x").len(), storage.operations())
    };
    assert_eq!(attempt(StorageFault::None), (vec![true, true, true], 12, 4));
    assert_eq!(attempt(StorageFault::Once { operation: 2 }), (vec![true, false, true], 10, 4));
    assert_eq!(attempt(StorageFault::Crash { operation: 2 }), (vec![true, false, false], 6, 4));
    assert_eq!(attempt(StorageFault::Full { bytes: 5 }), (vec![true, false, false], 5, 4));
}
