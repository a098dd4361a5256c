use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::storage::tests::{get, put};
use crate::checkpoint::storage::{Failing, Fault, InMemory};

const SHARD: &str = "server-0/shard-0";

type Records = Vec<(u64, Vec<u8>)>;

fn journal(storage: &InMemory, sync: bool) -> Journal {
    Journal::open(Arc::new(storage.clone()), SHARD, sync).unwrap()
}

fn read(storage: &InMemory, from: u64) -> Result<(Records, Replayed), Failure> {
    let mut records = Vec::new();
    let replayed = replay(storage, SHARD, from, &mut |position, payload| {
        records.push((position, payload.to_vec()));
        Ok(())
    })?;
    Ok((records, replayed))
}

fn payloads(storage: &InMemory, from: u64) -> Vec<Vec<u8>> {
    read(storage, from).unwrap().0.into_iter().map(|(_, payload)| payload).collect()
}

/// `ab`, `cde` in one segment, `f` in the next.
fn small() -> InMemory {
    let storage = InMemory::new();
    let mut journal = journal(&storage, false);
    assert_eq!(journal.append(&[b"a", b"", b"b"]).unwrap(), 0);
    assert_eq!(journal.append(&[b"cde"]).unwrap(), 10);
    journal.rotate().unwrap();
    assert_eq!(journal.append(&[b"f"]).unwrap(), 21);
    assert_eq!(journal.position(), 30);
    storage
}

fn segment(start: u64) -> String {
    segment_path(SHARD, start)
}

#[test]
fn the_bytes_of_a_journal_do_not_change() {
    // The checksums were computed by another program, from docs/CHECKPOINT.md.
    let storage = small();
    let first: &[u8] = b"PSJOURN1\0\0\0\0\0\0\0\0\
        \x02\0\0\0\xd6\xc9\x24\xbeab\
        \x03\0\0\0\x4b\x50\x7b\x40cde";
    let second: &[u8] = b"PSJOURN1\x15\0\0\0\0\0\0\0\
        \x01\0\0\0\x70\x7a\xa0\x33f";
    assert_eq!(storage.list(SHARD).unwrap(), ["journal-00000000000000000000", "journal-00000000000000000021"]);
    assert_eq!(get(&storage, &segment(0)).escape_ascii().to_string(), first.escape_ascii().to_string());
    assert_eq!(get(&storage, &segment(21)).escape_ascii().to_string(), second.escape_ascii().to_string());
}

#[test]
fn a_replay_visits_what_was_appended_from_where_it_is_asked() {
    let storage = small();
    let all: Records = vec![(0, b"ab".to_vec()), (10, b"cde".to_vec()), (21, b"f".to_vec())];
    for (from, skipped) in [(0, 0), (10, 1), (21, 2), (30, 3)] {
        let (records, replayed) = read(&storage, from).unwrap();
        assert_eq!(records, all[skipped..]);
        let bytes = records.iter().map(|(_, payload)| payload.len() as u64).sum();
        assert_eq!(replayed, Replayed { records: records.len() as u64, bytes, torn_tail: false });
    }
    assert!(read(&storage, 11).unwrap_err().to_string().contains("spans position 11"));
    assert_eq!(read(&InMemory::new(), 0).unwrap(), (Vec::new(), Replayed::default()));
}

#[test]
fn a_visit_that_fails_ends_the_replay() {
    let refused = Failure::Call("no".to_owned());
    let outcome = replay(&small(), SHARD, 0, &mut |_, _| Err(Failure::Call("no".to_owned())));
    assert_eq!(outcome, Err(refused));
}

#[test]
fn a_tail_torn_at_any_byte_loses_only_itself_and_the_journal_goes_on() {
    let whole = get(&small(), &segment(21));
    for length in 0..whole.len() {
        let storage = small();
        put(&storage, &segment(21), &whole[..length]);
        let (records, replayed) = read(&storage, 0).unwrap();
        assert_eq!(records.len(), 2, "cut to {length}");
        // A segment with nothing after its header was only just begun.
        assert_eq!(replayed.torn_tail, length != 16, "cut to {length}");
        let mut journal = journal(&storage, false);
        assert_eq!(journal.append(&[b"g"]).unwrap(), 21);
        assert_eq!(payloads(&storage, 0), [&b"ab"[..], b"cde", b"g"], "cut to {length}");
    }
}

#[test]
fn a_torn_record_behind_others_is_not_read_after_appending_resumed() {
    let storage = small();
    let mut bytes = get(&storage, &segment(21));
    bytes.extend_from_slice(&[5, 0, 0, 0, 1, 2, 3, 4, b'x']);
    put(&storage, &segment(21), &bytes);
    assert!(read(&storage, 0).unwrap().1.torn_tail);
    journal(&storage, false).append(&[b"g"]).unwrap();
    let (records, replayed) = read(&storage, 0).unwrap();
    assert_eq!(records[3], (30, b"g".to_vec()));
    assert!(!replayed.torn_tail);
}

#[test]
fn a_flipped_bit_is_never_replayed_and_is_refused_where_records_follow() {
    for start in [0, 21] {
        let whole = get(&small(), &segment(start));
        for bit in 0..whole.len() * 8 {
            let storage = small();
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            put(&storage, &segment(start), &bytes);
            match read(&storage, 0) {
                Ok((records, replayed)) => {
                    assert_eq!((start, records.len()), (21, 2), "bit {bit}");
                    assert!(replayed.torn_tail, "bit {bit}");
                }
                Err(failure) => {
                    let text = failure.to_string();
                    assert!(text.contains(&segment(start)) && text.contains("at offset"), "bit {bit}: {text}");
                    assert!(matches!(failure, Failure::Node(_)));
                    // Only a segment's header can be bad before a whole record in the last segment.
                    assert!(start == 0 || bit < 16 * 8, "bit {bit}: {text}");
                }
            }
        }
    }
}

#[test]
fn a_bad_record_before_a_whole_one_is_refused_in_the_last_segment_too() {
    let storage = InMemory::new();
    let mut journal = journal(&storage, true);
    journal.append(&[b"one"]).unwrap();
    journal.append(&[b"two"]).unwrap();
    let mut bytes = get(&storage, &segment(0));
    bytes[24] ^= 1;
    put(&storage, &segment(0), &bytes);
    let text = read(&storage, 0).unwrap_err().to_string();
    assert!(text.contains("at offset 16: a record does not agree with its checksum, and a whole record follows"));
    assert!(Journal::open(Arc::new(storage), SHARD, true).is_err());
}

#[test]
fn zeros_after_the_last_record_are_not_records() {
    let storage = small();
    let mut bytes = get(&storage, &segment(21));
    bytes.resize(4096, 0);
    put(&storage, &segment(21), &bytes);
    let (records, replayed) = read(&storage, 0).unwrap();
    assert_eq!(records.len(), 3);
    assert!(replayed.torn_tail);
}

#[test]
fn a_missing_segment_is_refused() {
    let storage = small();
    journal(&storage, false).append(&[b"g"]).unwrap();
    storage.remove(&segment(21)).unwrap();
    assert!(read(&storage, 0).unwrap_err().to_string().contains("ends before the next one begins"));
    storage.remove(&segment(0)).unwrap();
    assert!(read(&storage, 0).unwrap_err().to_string().contains("records from 0 on are needed"));
}

#[test]
fn a_journal_that_was_lost_with_the_host_begins_anew_where_the_checkpoint_ends() {
    let storage = small();
    let (records, replayed) = read(&storage, 500).unwrap();
    assert_eq!((records.len(), replayed.torn_tail), (0, true));
    let mut journal = journal(&storage, false);
    assert_eq!(journal.append(&[b"later"]).unwrap(), 500);
    assert_eq!(payloads(&storage, 500), [b"later"]);
    assert!(read(&storage, 21).is_err(), "what is missing between is missed");
}

#[test]
fn a_journal_opened_before_its_replay_does_not_append_behind_the_present() {
    let storage = small();
    let mut early = journal(&storage, false);
    read(&storage, 500).unwrap();
    assert!(early.append(&[b"lost"]).unwrap_err().to_string().contains("before it was replayed"));
}

#[test]
fn segments_are_removed_once_nothing_in_them_is_needed() {
    let storage = small();
    let mut journal = journal(&storage, false);
    for (position, left) in [(20, 2), (21, 1), (1000, 1)] {
        journal.retain_from(position).unwrap();
        assert_eq!(segments(&storage, SHARD).unwrap().len(), left, "retained from {position}");
    }
    assert_eq!(payloads(&storage, 21), [b"f"]);
}

#[test]
fn a_rotation_of_an_empty_segment_changes_nothing() {
    let storage = InMemory::new();
    let mut journal = journal(&storage, false);
    journal.rotate().unwrap();
    journal.rotate().unwrap();
    journal.append(&[b"a"]).unwrap();
    assert_eq!(segments(&storage, SHARD).unwrap(), [0]);
    assert_eq!(payloads(&storage, 0), [b"a"]);
}

#[test]
fn a_record_that_is_too_long_is_refused_and_the_longest_is_kept() {
    let storage = InMemory::new();
    let mut journal = journal(&storage, false);
    let mut payload = vec![7; JOURNAL_RECORD_BYTES_MAX as usize];
    journal.append(&[&payload]).unwrap();
    assert_eq!(payloads(&storage, 0), [payload.clone()]);
    payload.push(7);
    assert!(journal.append(&[&payload]).unwrap_err().to_string().contains("at most 67174400"));
    let huge = [MAGIC.to_vec(), vec![0; 8], u32::MAX.to_le_bytes().to_vec(), vec![0; 4]].concat();
    put(&storage, &segment(0), &huge);
    assert!(read(&storage, 0).unwrap().1.torn_tail, "a length is bounded before it is believed");
}

/// Appends twenty records with a rotation and a removal now and then, going on after every failure; returns those
/// that were acknowledged.
fn work(storage: Arc<dyn Storage>, sync: bool) -> Vec<Vec<u8>> {
    let mut acknowledged = Vec::new();
    let Ok(mut journal) = Journal::open(storage, SHARD, sync) else {
        return acknowledged;
    };
    for number in 0..20u8 {
        if number % 5 == 4 {
            let _ = journal.rotate();
        }
        let payload = vec![number; usize::from(number)];
        if journal.append(&[&payload]).is_ok() {
            acknowledged.push(payload);
        }
    }
    acknowledged
}

/// Everything acknowledged is replayed, in order; of what was not, at most the very last record.
fn check_nothing_lost(storage: &InMemory, mut acknowledged: Vec<Vec<u8>>, context: &str) {
    let mut found = payloads(storage, 0);
    if found.len() > acknowledged.len() {
        found.truncate(acknowledged.len());
        assert_eq!(payloads(storage, 0).len(), found.len() + 1, "{context}");
    }
    assert_eq!(found, acknowledged, "{context}");
    let mut journal = journal(storage, false);
    let rest = payloads(storage, 0).split_off(found.len());
    journal.append(&[b"after"]).unwrap();
    acknowledged.extend(rest);
    acknowledged.push(b"after".to_vec());
    assert_eq!(payloads(storage, 0), acknowledged, "{context}, and after");
}

#[test]
fn no_failed_operation_loses_an_acknowledged_record() {
    for sync in [false, true] {
        let count = Failing::new(Arc::new(InMemory::new()), Fault::None);
        let count = Arc::new(count);
        work(count.clone(), sync);
        for operation in 0..count.operations() {
            for fault in [Fault::Once { operation }, Fault::Crash { operation }] {
                let storage = InMemory::new();
                let acknowledged = work(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), sync);
                check_nothing_lost(&storage, acknowledged, &format!("sync {sync}, {fault:?}"));
            }
        }
    }
}

#[test]
fn a_lost_host_loses_no_record_that_was_synced() {
    for operation in 0..100 {
        let storage = InMemory::new();
        let fault = Fault::Crash { operation };
        let acknowledged = work(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), true);
        storage.crash();
        check_nothing_lost(&storage, acknowledged, &format!("{fault:?}"));
    }
}

#[test]
fn a_full_disk_refuses_records_and_keeps_those_before() {
    for bytes in 0..400 {
        let storage = InMemory::new();
        let acknowledged = work(Arc::new(Failing::new(Arc::new(storage.clone()), Fault::Full { bytes })), false);
        check_nothing_lost(&storage, acknowledged, &format!("{bytes} bytes fit"));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), whole: bool) {
        let storage = InMemory::new();
        let header = [MAGIC.to_vec(), vec![0; 8]].concat();
        put(&storage, &segment(0), &if whole { [header, bytes].concat() } else { bytes });
        // Chance does not make a checksum.
        prop_assert!(read(&storage, 0).map_or(true, |(records, _)| records.is_empty()));
    }
}
