use super::*;
use crate::checkpoint::owner::OwnerRecord;
use crate::checkpoint::storage::tests::{get, put};
use crate::checkpoint::storage::{Failing, InMemory, StorageFault};

fn claim(storage: &InMemory) -> DirectoryOwner {
    let record = OwnerRecord { server: 0, process: 1, host: String::new(), since: String::new() };
    DirectoryOwner::claim_server(Arc::new(storage.clone()), &record).unwrap()
}

fn begin(storage: &InMemory) -> CoordinatorFile {
    CoordinatorFile::new(Arc::new(storage.clone()), claim(storage))
}

fn keep(file: &mut CoordinatorFile, state: &[u8]) -> Result<StoreVersion, StoreFailure> {
    let seen = file.read().unwrap().version;
    file.compare_and_set(seen, state)
}

fn recalled(storage: &InMemory) -> Option<Vec<u8>> {
    CoordinatorState::recall(storage).unwrap().map(|state| state.bytes)
}

fn files(storage: &InMemory) -> Vec<String> {
    let mut names = storage.list("server-0").unwrap();
    names.retain(|name| name.starts_with(PREFIX));
    names
}

#[test]
fn the_newest_state_is_recalled_and_older_files_are_removed() {
    let storage = InMemory::new();
    assert_eq!(recalled(&storage), None);
    let mut file = begin(&storage);
    for state in [&b"one"[..], b"", b"three"] {
        keep(&mut file, state).unwrap();
        assert_eq!(recalled(&storage).as_deref(), Some(state));
        assert_eq!(files(&storage).len(), 1);
    }
    keep(&mut begin(&storage), b"four").unwrap();
    assert_eq!(recalled(&storage).as_deref(), Some(&b"four"[..]));
    assert_eq!(files(&storage), ["coordinator-0000000002-00000000000000000004"]);
}

#[test]
fn a_replaced_coordinator_keeps_nothing() {
    let storage = InMemory::new();
    let mut old = begin(&storage);
    keep(&mut old, b"old").unwrap();
    let mut new = begin(&storage);
    assert!(matches!(old.watch(StoreVersion(1)), Err(StoreFailure::Superseded(_))));
    new.watch(StoreVersion(1)).unwrap();
    assert!(matches!(keep(&mut old, b"late"), Err(StoreFailure::Superseded(_))));
    assert_eq!(recalled(&storage).as_deref(), Some(&b"old"[..]));
    keep(&mut new, b"new").unwrap();
    assert!(matches!(keep(&mut old, b"later"), Err(StoreFailure::Superseded(_))));
    assert_eq!(recalled(&storage).as_deref(), Some(&b"new"[..]));
}

#[test]
fn every_flipped_bit_every_cut_and_every_added_byte_is_refused_by_name() {
    let storage = InMemory::new();
    let mut file = begin(&storage);
    keep(&mut file, b"some state").unwrap();
    let path = format!("server-0/{}", files(&storage)[0]);
    let whole = get(&storage, &path);
    let refused = |bytes: &[u8], context: String| {
        put(&storage, &path, bytes);
        let text = CoordinatorState::recall(&storage).unwrap_err().to_string();
        assert!(text.contains(&path), "{context}: {text}");
    };
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        refused(&bytes, format!("bit {bit}"));
    }
    (0..whole.len()).for_each(|length| refused(&whole[..length], format!("cut to {length}")));
    refused(&[&whole[..], b"x"].concat(), "a byte more".to_owned());
    // An earlier state under the current name.
    put(&storage, &path, &whole);
    keep(&mut file, b"newer state").unwrap();
    put(&storage, &format!("server-0/{}", files(&storage)[0]), &whole);
    CoordinatorState::recall(&storage).unwrap_err();
    // The format before owners.
    put(&storage, "server-0/coordinator", b"");
    assert!(CoordinatorState::recall(&storage).unwrap_err().to_string().contains("format 1"));
}

#[test]
fn a_kept_state_survives_the_loss_of_the_host_at_any_operation() {
    for operation in 0..40 {
        let storage = InMemory::new();
        keep(&mut begin(&storage), b"before").unwrap();
        let owner = claim(&storage);
        let dying = Failing::new(Arc::new(storage.clone()), StorageFault::Crash { operation });
        let kept = CoordinatorFile::new(Arc::new(dying), owner).compare_and_set(StoreVersion(1), b"after");
        storage.crash();
        let found = recalled(&storage).expect("one of the two is there");
        assert!(found == b"after" || kept.is_err() && found == b"before", "operation {operation}: {found:?}");
    }
}
