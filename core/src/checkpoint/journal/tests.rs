use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::owner::OwnerRecord;
use crate::checkpoint::owner::tests::put_first;
use crate::checkpoint::storage::tests::{get, put};
use crate::checkpoint::storage::{Failing, InMemory, StorageFault};
use crate::shares::{ShardNeed, SharedNeeds};

const SHARD: &str = "server-0/shard-1";
const IDENTITY: ShardIdentity = ShardIdentity { job: 77, server: 0, shard: 1 };
const MARK: &str = "server-0/shard-1/acknowledged-0000000001";

type Records = Vec<(u64, Vec<u8>)>;

/// The directory of the first owner, on a disk that has its file.
fn folder(storage: Arc<dyn Storage>) -> Folder {
    Folder::first(storage, IDENTITY)
}

/// Claims the directory for another process.
fn claim(storage: &InMemory) -> Folder {
    let storage: Arc<dyn Storage> = Arc::new(storage.clone());
    let record = OwnerRecord { server: 0, process: 5, host: "h".to_owned(), since: "s".to_owned() };
    Folder::claim(storage, IDENTITY, &record, ShardNeed::default()).unwrap()
}

/// A restart: another process claims the directory, reads the journal and goes on.
fn restart(storage: &InMemory, sync: bool) -> Journal {
    let folder = claim(storage);
    let found = read(storage, 0).unwrap().1;
    Journal::begin(&folder, sync, &found, 0).unwrap()
}

fn first(storage: Arc<dyn Storage>, sync: bool) -> Result<Journal, Failure> {
    Journal::begin(&folder(storage), sync, &Replayed::default(), 0)
}

fn empty() -> InMemory {
    let storage = InMemory::new();
    put_first(&storage, SHARD);
    storage
}

fn reading(storage: &dyn Storage, from: u64) -> ReplayOptions<'_> {
    ReplayOptions { storage, directory: SHARD, identity: Some(&IDENTITY), from, accepts_torn_tail: false }
}

fn read(storage: &InMemory, from: u64) -> Result<(Records, Replayed), Failure> {
    read_as(&reading(storage, from))
}

fn read_as(reading: &ReplayOptions<'_>) -> Result<(Records, Replayed), Failure> {
    let mut records = Vec::new();
    let replayed = replay(reading, &mut |position, payload| {
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
    let storage = empty();
    let mut journal = first(Arc::new(storage.clone()), false).unwrap();
    assert_eq!(journal.keep(&[b"a", b"", b"b"]).unwrap(), 0);
    assert_eq!(journal.keep(&[b"cde"]).unwrap(), 26);
    journal.rotate().unwrap();
    assert_eq!(journal.keep(&[b"f"]).unwrap(), 53);
    assert_eq!(journal.position(), 78);
    storage
}

fn segment(start: u64) -> String {
    join(SHARD, &SegmentName { owner: OwnerNumber(1), start }.to_string())
}

fn starts(storage: &InMemory) -> Vec<u64> {
    segments(storage, SHARD).unwrap().into_iter().map(|name| name.start).collect()
}

#[test]
fn the_bytes_of_a_journal_do_not_change() {
    // The checksums were computed by another program, from docs/CHECKPOINT.md.
    let storage = small();
    let first: &[u8] = b"PSJOURN3\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
        \0\0\0\0\0\0\0\0M\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0kQaw\
        PSRC\x02\0\0\0\0\0\0\0\0\0\0\x006)\xa2\xe2\x9c,\xbf\x9c\
        ab\
        PSRC\x03\0\0\0\x01\0\0\0\0\0\0\0`\xdbJ6\xde\xf1\xd6(\
        cde";
    let second: &[u8] = b"PSJOURN3\x01\0\0\0\0\0\0\x005\0\0\0\0\0\0\x005\0\0\0\0\0\0\0\
        \x02\0\0\0\0\0\0\0M\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\x83Y-R\
        PSRC\x01\0\0\0\x02\0\0\0\0\0\0\0\xdb'\x1a\x15W\xd9\x01\x0f\
        f";
    let mark: &[u8] = b"PSACKED1N\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\xa4\x07\xeb\xe4\0\0\0\0";
    let names = [
        "acknowledged-0000000001",
        "journal-0000000001-00000000000000000000",
        "journal-0000000001-00000000000000000053",
        "owner-0000000001",
    ];
    assert_eq!(storage.list(SHARD).unwrap(), names);
    assert_eq!(get(&storage, &segment(0)).escape_ascii().to_string(), first.escape_ascii().to_string());
    assert_eq!(get(&storage, &segment(53)).escape_ascii().to_string(), second.escape_ascii().to_string());
    assert_eq!(get(&storage, MARK).escape_ascii().to_string(), mark.escape_ascii().to_string());
}

#[test]
fn a_journal_of_frames_is_refused_with_the_last_revision_that_wrote_one() {
    let storage = small();
    let mut bytes = get(&storage, &segment(0));
    bytes[7] = b'2';
    // With the checksum of the format before, as above.
    bytes[60..64].copy_from_slice(b"\x01\xa2l\xbe");
    put(&storage, &segment(0), &bytes);
    let text = read(&storage, 0).unwrap_err().to_string();
    assert!(text.contains("is a journal of format 2, which servers up to revision ca6eb58 wrote"), "{text}");
}

#[test]
fn a_replay_visits_all_records_from_the_requested_position() {
    let storage = small();
    let all: Records = vec![(0, b"ab".to_vec()), (26, b"cde".to_vec()), (53, b"f".to_vec())];
    for (from, skipped) in [(0, 0), (26, 1), (53, 2), (78, 3)] {
        let (records, replayed) = read(&storage, from).unwrap();
        assert_eq!(records, all[skipped..]);
        let bytes: u64 = records.iter().map(|(_, payload)| payload.len() as u64).sum();
        assert_eq!((replayed.records, replayed.bytes), (records.len() as u64, bytes));
        assert_eq!((replayed.end.max(from), replayed.warnings()), (78, Vec::new()), "from {from}");
    }
    assert!(read(&storage, 30).unwrap_err().to_string().contains("at offset 94: a record's header"));
    assert_eq!(read(&InMemory::new(), 0).unwrap(), (Vec::new(), Replayed::default()));
}

#[test]
fn a_visit_that_fails_ends_the_replay() {
    let refused = Failure::Call("no".to_owned());
    let outcome = replay(&reading(&small(), 0), &mut |_, _| Err(Failure::Call("no".to_owned())));
    assert_eq!(outcome, Err(refused));
}

#[test]
fn a_tail_torn_at_any_byte_is_counted_as_missing_and_the_journal_goes_on() {
    let whole = get(&small(), &segment(53));
    for length in 0..whole.len() {
        let storage = small();
        put(&storage, &segment(53), &whole[..length]);
        let (records, replayed) = read(&storage, 0).unwrap();
        assert_eq!(records.len(), 2, "cut to {length}");
        // A segment with nothing after its header has no remains of a record.
        assert_eq!(replayed.torn.is_some(), length != 64, "cut to {length}");
        assert_eq!(replayed.missing, Some(Missing { records: 1, bytes: 25 }), "cut to {length}");
        let mut journal = restart(&storage, false);
        assert_eq!(journal.keep(&[b"g"]).unwrap(), 78, "a position that was given is not given again");
        assert_eq!(payloads(&storage, 0), [&b"ab"[..], b"cde", b"g"], "cut to {length}");
        assert_eq!(read(&storage, 0).unwrap().1.warnings(), Vec::<String>::new(), "it is said once");
    }
}

#[test]
fn an_unacknowledged_partial_record_is_torn_and_nothing_is_missing() {
    let storage = small();
    let mut bytes = get(&storage, &segment(53));
    let next = RecordHeader { length: 9, payload: 0, ordinal: 3 }.encode(OwnerNumber(1), 78);
    bytes.extend_from_slice(&[&next[..], b"four"].concat());
    put(&storage, &segment(53), &bytes);
    let replayed = read(&storage, 0).unwrap().1;
    assert_eq!((replayed.torn.is_some(), replayed.missing.clone(), replayed.end), (true, None, 78));
    let text = replayed.warnings().concat();
    assert!(text.contains("has 28 bytes at offset 89 of which a record is cut off"), "{text}");
    restart(&storage, false).keep(&[b"g"]).unwrap();
    let (records, replayed) = read(&storage, 0).unwrap();
    assert_eq!(records[3], (78, b"g".to_vec()));
    assert_eq!(replayed.warnings(), Vec::<String>::new());
}

#[test]
fn a_flipped_bit_is_never_replayed_and_is_refused_or_counted() {
    for start in [0, 53] {
        let whole = get(&small(), &segment(start));
        for bit in 0..whole.len() * 8 {
            let storage = small();
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            put(&storage, &segment(start), &bytes);
            match read(&storage, 0) {
                Ok((records, replayed)) => {
                    assert_eq!((start, records.len()), (53, 2), "bit {bit}");
                    assert_eq!(replayed.missing, Some(Missing { records: 1, bytes: 25 }), "bit {bit}");
                }
                Err(failure) => {
                    let text = failure.to_string();
                    assert!(text.contains(&segment(start)) && text.contains("at offset"), "bit {bit}: {text}");
                    assert!(matches!(failure, Failure::Node(_)));
                    // Before a whole record in the last segment only its header can be bad.
                    assert!(start == 0 || bit < 64 * 8, "bit {bit}: {text}");
                    assert!(text.contains("whole records") && text.contains("--accept-torn-tail"), "{text}");
                }
            }
        }
    }
}

/// A record in the middle is damaged in its length, in its header and in its payload.
#[test]
fn damage_before_whole_records_stops_the_start_unless_it_is_accepted() {
    for flipped in [91 + 4, 91 + 9, 91 + 24] {
        let storage = empty();
        let mut journal = first(Arc::new(storage.clone()), true).unwrap();
        for payload in [&b"one"[..], b"two", b"three", b"four"] {
            journal.keep(&[payload]).unwrap();
        }
        journal.rotate().unwrap();
        journal.keep(&[b"five"]).unwrap();
        let mut bytes = get(&storage, &segment(0));
        bytes[flipped] ^= 1;
        put(&storage, &segment(0), &bytes);
        let text = read(&storage, 0).unwrap_err().to_string();
        assert!(text.contains("is damaged at offset 91: a record"), "{text}");
        assert!(text.contains("3 whole records (13 bytes) follow"), "{text}");
        // Each later start refuses too, until it is accepted.
        let folder = claim(&storage);
        read(&storage, 0).unwrap_err();
        let (records, found) =
            read_as(&ReplayOptions { accepts_torn_tail: true, ..reading(&storage, 0) }).expect("it was accepted");
        assert_eq!(records, [(0, b"one".to_vec())]);
        let text = found.warnings().concat();
        assert!(text.contains("drops 3 whole records (13 bytes)") && text.contains(&segment(0)), "{text}");
        let mut journal = Journal::begin(&folder, true, &found, 0).unwrap();
        assert_eq!(journal.keep(&[b"six"]).unwrap(), 139, "no position is given twice");
        let (records, replayed) = read(&storage, 0).unwrap();
        assert_eq!(records, [(0, b"one".to_vec()), (139, b"six".to_vec())], "what was dropped stays dropped");
        assert_eq!(replayed.warnings(), Vec::<String>::new());
    }
}

#[test]
fn a_journal_cut_between_two_records_is_detected_by_its_mark() {
    let storage = small();
    storage.remove(&segment(53)).unwrap();
    let (records, replayed) = read(&storage, 0).unwrap();
    assert_eq!((records.len(), replayed.missing), (2, Some(Missing { records: 1, bytes: 25 })));
    let whole = get(&storage, &segment(0));
    put(&storage, &segment(0), &whole[..64 + 26]);
    assert_eq!(read(&storage, 0).unwrap().1.missing, Some(Missing { records: 2, bytes: 52 }));
    storage.remove(&segment(0)).unwrap();
    assert_eq!(read(&storage, 0).unwrap().1.missing, Some(Missing { records: 3, bytes: 78 }));
    // A checkpoint that contains the missing records makes up for them.
    assert_eq!(read(&storage, 78).unwrap().1.warnings(), Vec::<String>::new());
    assert_eq!(read(&storage, 53).unwrap().1.missing.map(|missing| missing.bytes), Some(25));
}

#[test]
fn a_damaged_or_missing_mark_is_reported_as_unsure() {
    let whole = get(&small(), MARK);
    for bit in 0..whole.len() * 8 {
        let storage = small();
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        put(&storage, MARK, &bytes);
        let (records, replayed) = read(&storage, 0).unwrap();
        assert_eq!(records.len(), 3);
        assert!(replayed.unsure.is_some_and(|text| text.contains(MARK)), "bit {bit}");
    }
    let storage = small();
    storage.remove(MARK).unwrap();
    assert!(read(&storage, 0).unwrap().1.unsure.is_some_and(|text| text.contains("mark")));
    restart(&storage, false);
    assert_eq!(read(&storage, 0).unwrap().1.warnings(), Vec::<String>::new());
    // An older mark is valid, and detects less.
    let storage = small();
    put(&storage, MARK, &JournalMark { position: 26, records: 1 }.encode(OwnerNumber(1)));
    assert_eq!(read(&storage, 0).unwrap().1.warnings(), Vec::<String>::new());
}

#[test]
fn zeros_after_the_last_record_are_not_records() {
    let storage = small();
    let mut bytes = get(&storage, &segment(53));
    bytes.resize(4096, 0);
    put(&storage, &segment(53), &bytes);
    let (records, replayed) = read(&storage, 0).unwrap();
    assert_eq!((records.len(), replayed.torn.is_some(), replayed.missing), (3, true, None));
}

#[test]
fn a_missing_segment_is_refused() {
    let storage = small();
    restart(&storage, false).keep(&[b"g"]).unwrap();
    storage.remove(&segment(53)).unwrap();
    assert!(read(&storage, 0).unwrap_err().to_string().contains("ends before the next one begins"));
    storage.remove(&segment(0)).unwrap();
    assert!(read(&storage, 0).unwrap_err().to_string().contains("records from 0 on are needed"));
}

#[test]
fn a_segment_of_another_shard_or_under_another_name_is_refused() {
    let storage = small();
    let other = ShardIdentity { shard: 0, ..IDENTITY };
    let text = read_as(&ReplayOptions { identity: Some(&other), ..reading(&storage, 0) }).unwrap_err().to_string();
    assert!(text.contains("is of shard 1 of server 0, job 77; expected shard 0 of server 0"), "{text}");
    let (one, two) = (get(&storage, &segment(0)), get(&storage, &segment(53)));
    put(&storage, &segment(0), &two);
    put(&storage, &segment(53), &one);
    read(&storage, 0).unwrap_err();
    put(&storage, "server-0/shard-1/journal-00000000000000000000", b"PSJOURN1");
    assert!(read(&storage, 0).unwrap_err().to_string().contains("format 1"));
}

#[test]
fn a_journal_lost_with_the_host_restarts_at_the_position_of_the_checkpoint() {
    let storage = small();
    let folder = claim(&storage);
    let (records, replayed) = read(&storage, 500).unwrap();
    assert_eq!((records.len(), replayed.warnings()), (0, Vec::new()), "the checkpoint contains all of it");
    let mut journal = Journal::begin(&folder, false, &replayed, 500).unwrap();
    assert_eq!(journal.keep(&[b"later"]).unwrap(), 500);
    assert_eq!(payloads(&storage, 500), [b"later"]);
}

#[test]
fn a_replaced_owner_appends_no_record_and_its_unacknowledged_ones_are_void() {
    let storage = small();
    let found = read(&storage, 0).unwrap().1;
    let mut old = Journal::begin(&folder(Arc::new(storage.clone())), false, &found, 0).unwrap();
    old.keep(&[b"acknowledged"]).unwrap();
    let mut new = restart(&storage, false);
    for _ in 0..3 {
        assert!(matches!(old.keep(&[b"late"]), Err(Failure::Node(_))));
    }
    assert!(matches!(old.rotate(), Err(Failure::Node(_))));
    assert!(matches!(old.retain_from(u64::MAX), Err(Failure::Node(_))));
    new.keep(&[b"new"]).unwrap();
    let after = restart(&storage, false);
    assert_eq!(payloads(&storage, 0), [&b"ab"[..], b"cde", b"f", b"acknowledged", b"new"]);
    drop(after);
}

/// The old owner is stopped between its write and its check of the owner, at every operation of the new one's start.
#[test]
fn a_record_is_acknowledged_or_void_in_every_interleaving_of_two_owners() {
    for pause in 0..60 {
        let storage = small();
        let found = read(&storage, 0).unwrap().1;
        let mut old = Journal::begin(&folder(Arc::new(storage.clone())), false, &found, 0).unwrap();
        // The new owner starts and dies after this many operations; then the old one continues.
        let dying: Arc<dyn Storage> =
            Arc::new(Failing::new(Arc::new(storage.clone()), StorageFault::Crash { operation: pause }));
        let record = OwnerRecord { server: 0, process: 6, host: String::new(), since: String::new() };
        let _ = Folder::claim(Arc::clone(&dying), IDENTITY, &record, ShardNeed::default()).and_then(|folder| {
            let found = replay(&reading(&*dying, 0), &mut |_, _| Ok(()))?;
            Journal::begin(&folder, false, &found, 0)?.keep(&[b"new"])
        });
        let mut acknowledged = vec![b"ab".to_vec(), b"cde".to_vec(), b"f".to_vec()];
        let is_acknowledged = old.keep(&[b"old"]).is_ok();
        acknowledged.extend(is_acknowledged.then(|| b"old".to_vec()));
        restart(&storage, false);
        let found = payloads(&storage, 0);
        assert_eq!(found[..acknowledged.len()], acknowledged, "after {pause} operations");
    }
}

#[test]
fn segments_are_removed_once_none_of_their_records_is_needed() {
    let storage = small();
    let mut journal = restart(&storage, false);
    for (position, left) in [(52, 3), (53, 2), (1000, 1)] {
        journal.retain_from(position).unwrap();
        assert_eq!(starts(&storage).len(), left, "retained from {position}");
    }
    journal.keep(&[b"g"]).unwrap();
    assert_eq!(payloads(&storage, 78), [b"g"]);
}

#[test]
fn a_rotation_of_an_empty_segment_changes_nothing() {
    let storage = empty();
    let mut journal = first(Arc::new(storage.clone()), false).unwrap();
    journal.rotate().unwrap();
    journal.rotate().unwrap();
    journal.keep(&[b"a"]).unwrap();
    assert_eq!(starts(&storage), [0]);
    assert_eq!(payloads(&storage, 0), [b"a"]);
}

#[test]
fn a_record_that_is_too_long_is_refused_and_the_longest_is_kept() {
    let storage = empty();
    let mut journal = first(Arc::new(storage.clone()), false).unwrap();
    let mut payload = vec![7; JOURNAL_RECORD_BYTES_MAX as usize];
    journal.keep(&[&payload]).unwrap();
    assert_eq!(payloads(&storage, 0), [payload.clone()]);
    payload.push(7);
    assert!(journal.keep(&[&payload]).unwrap_err().to_string().contains("at most 67174400"));
    let header = get(&storage, &segment(0))[..64].to_vec();
    let huge = RecordHeader { length: u32::MAX, payload: 0, ordinal: 0 }.encode(OwnerNumber(1), 0);
    put(&storage, &segment(0), &[&header[..], &huge].concat());
    assert!(read(&storage, 0).unwrap().1.torn.is_some(), "a length is bounded before it is believed");
}

impl Journal {
    /// Appends a record and commits it, as a turn with one record does.
    pub(in crate::checkpoint) fn keep(&mut self, parts: &[&[u8]]) -> Result<u64, Failure> {
        let position = self.append(parts)?;
        self.commit().map(|()| position)
    }
}

/// Appends eighteen records with a rotation now and then, and commits after every `each` records. Goes on after every
/// failure except that of a commit. Returns the acknowledged records.
fn work(storage: Arc<dyn Storage>, sync: bool, each: u8) -> Vec<Vec<u8>> {
    let (mut acknowledged, mut written) = (Vec::new(), Vec::new());
    let Ok(mut journal) = first(storage, sync) else {
        return acknowledged;
    };
    for number in 0..18u8 {
        if number % 5 == 4 {
            let _ = journal.rotate();
        }
        let payload = vec![number; usize::from(number)];
        if journal.append(&[&payload]).is_ok() {
            written.push(payload);
        }
        if number % each == each - 1 {
            if journal.commit().is_err() {
                break;
            }
            acknowledged.append(&mut written);
        }
    }
    acknowledged
}

/// Every acknowledged record is replayed, in order; of the others at most the last `each`.
fn check_nothing_lost(storage: &InMemory, mut acknowledged: Vec<Vec<u8>>, each: u8, context: &str) {
    let (records, replayed) = read(storage, 0).unwrap();
    assert_eq!((&replayed.missing, &replayed.dropped), (&None, &None), "{context}");
    let mut found: Vec<Vec<u8>> = records.into_iter().map(|(_, payload)| payload).collect();
    let rest = found.split_off(acknowledged.len().min(found.len()));
    assert!(rest.len() <= each.into(), "{context}");
    assert_eq!(found, acknowledged, "{context}");
    restart(storage, false).keep(&[b"after"]).unwrap();
    acknowledged.extend(rest);
    acknowledged.push(b"after".to_vec());
    assert_eq!(payloads(storage, 0), acknowledged, "{context}, and after");
}

#[test]
fn no_failed_operation_loses_an_acknowledged_record() {
    for (sync, each) in [(false, 1), (true, 1), (false, 3), (true, 3)] {
        let count = Arc::new(Failing::new(Arc::new(empty()), StorageFault::None));
        work(count.clone(), sync, each);
        for operation in 0..count.operations() {
            for fault in [StorageFault::Once { operation }, StorageFault::Crash { operation }] {
                let storage = empty();
                let acknowledged = work(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), sync, each);
                check_nothing_lost(&storage, acknowledged, each, &format!("sync {sync}, each {each}, {fault:?}"));
            }
        }
    }
}

#[test]
fn a_lost_host_loses_no_record_that_was_synced() {
    for (operation, each) in (0..200).flat_map(|operation| [(operation, 1), (operation, 3)]) {
        for fault in [StorageFault::Crash { operation }, StorageFault::Once { operation }] {
            let storage = empty();
            let acknowledged = work(Arc::new(Failing::new(Arc::new(storage.clone()), fault)), true, each);
            storage.crash();
            check_nothing_lost(&storage, acknowledged, each, &format!("each {each}, {fault:?}"));
        }
    }
}

#[test]
fn a_full_disk_refuses_records_and_keeps_those_before() {
    for bytes in 0..1000 {
        let storage = empty();
        let full = Failing::new(Arc::new(storage.clone()), StorageFault::Full { bytes });
        let acknowledged = work(Arc::new(full), false, 1);
        check_nothing_lost(&storage, acknowledged, 1, &format!("{bytes} bytes fit"));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), whole: bool) {
        let storage = small();
        let header = get(&storage, &segment(0))[..64].to_vec();
        storage.remove(&segment(53)).unwrap();
        put(&storage, &segment(0), &if whole { [header, bytes].concat() } else { bytes });
        // Chance does not make a checksum.
        prop_assert!(read(&storage, 0).map_or(true, |(records, _)| records.is_empty()));
    }
}

#[test]
fn an_append_leaves_the_reserved_bytes_free() {
    let storage = empty();
    let needs = SharedNeeds::default();
    let (need, other) = (needs.shard(), needs.shard());
    let folder = Folder { need, ..folder(Arc::new(storage.clone())) };
    let mut journal = Journal::begin(&folder, false, &Replayed::default(), 0).unwrap();
    // Two shards share the disk: each may use the bytes that the other does not need.
    other.set(1_000_000);
    let used = 10_000_000 - {
        storage.set_room(10_000_000);
        storage.free().unwrap()
    };
    storage.set_room(used + 1_000_000 + 5000 + 100 + RECORD_HEADER_BYTES);
    journal.keep_free(5000);
    journal.keep(&[&[1; 100]]).unwrap();
    let refused = journal.keep(&[&[2; 100]]).unwrap_err().to_string();
    assert!(refused.contains("of which 5000 are kept for its next checkpoints"), "{refused}");
    assert!(journal.is_short());
    journal.keep_free(0);
    journal.keep(&[&[3; 100]]).unwrap();
    assert!(!journal.is_short());
    assert_eq!(payloads(&storage, 0), [vec![1; 100], vec![3; 100]], "nothing is left of what was refused");
}
