use super::*;

fn superseded(outcome: Result<impl std::fmt::Debug, StoreFailure>) {
    assert!(matches!(outcome, Err(StoreFailure::Superseded(_))), "{outcome:?}");
}

#[test]
fn one_of_two_processes_that_read_the_same_version_replaces_it() {
    let mut first = MemoryStore::default();
    assert_eq!(first.read().unwrap(), StoredValue::default());
    let seen = first.compare_and_set(StoreVersion::default(), b"first").unwrap();
    let mut second = first.another();
    assert_eq!(second.read().unwrap(), StoredValue { version: seen, bytes: b"first".to_vec() });
    first.watch(seen).unwrap();
    let next = second.compare_and_set(seen, b"second").unwrap();
    assert!(next > seen);
    superseded(first.watch(seen));
    superseded(first.compare_and_set(seen, b"late"));
    assert_eq!(first.read().unwrap().bytes, b"second");
    second.watch(next).unwrap();
    // A process that has read no version changes nothing.
    superseded(first.another().compare_and_set(StoreVersion::default(), b"third"));
}

#[test]
fn an_unanswered_change_is_retried() {
    let memory = MemoryStore::default();
    let faults = StoreFaults::default();
    let mut store = FailingStore::new(memory.clone(), Arc::clone(&faults));
    let seen = store.compare_and_set(StoreVersion::default(), b"zero").unwrap();
    for (fault, state) in [(StoreFault::Refused, b"one"), (StoreFault::Unanswered, b"two")] {
        let seen = store.read().unwrap().version;
        faults.lock().unwrap().push_back(fault);
        assert!(matches!(store.compare_and_set(seen, state), Err(StoreFailure::Unavailable(_))));
        store.watch(seen).unwrap();
        store.compare_and_set(seen, state).unwrap();
        assert_eq!(store.read().unwrap().bytes, state);
    }
    // The retry is refused after a change by another process.
    let seen = store.read().unwrap().version.max(seen);
    faults.lock().unwrap().push_back(StoreFault::Unanswered);
    store.compare_and_set(seen, b"three").unwrap_err();
    let mut other = memory.another();
    let three = other.read().unwrap();
    assert_eq!(three.bytes, b"three");
    other.compare_and_set(three.version, b"four").unwrap();
    superseded(store.compare_and_set(seen, b"three"));
}
