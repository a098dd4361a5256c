use super::*;
use crate::checkpoint::storage::tests::put;
use crate::checkpoint::storage::{Failing, InMemory, StorageFault};

fn record(process: u32) -> OwnerRecord {
    OwnerRecord { server: 0, process, host: "here".to_owned(), since: "2026-11-22T18:00:00Z".to_owned() }
}

/// Writes the owner's file of [`Folder::first`], so that it survives the loss of the host.
pub(in crate::checkpoint) fn put_first(storage: &dyn Storage, directory: &str) {
    let path = join(directory, "owner-0000000001");
    put(storage, &path, b"");
    storage.sync(&path).unwrap();
    storage.sync_directory(directory).unwrap();
}

fn claim(storage: &InMemory, process: u32) -> Result<DirectoryOwner, Failure> {
    DirectoryOwner::claim_server(Arc::new(storage.clone()), &record(process))
}

#[test]
fn each_start_has_a_higher_number_and_a_replaced_owner_learns_its_successor() {
    let storage = InMemory::new();
    let first = claim(&storage, 11).unwrap();
    first.check().unwrap();
    let second = claim(&storage, 22).unwrap();
    assert_eq!((first.number(), second.number()), (OwnerNumber(1), OwnerNumber(2)));
    let replaced = first.check().unwrap_err();
    assert!(matches!(replaced, Failure::Node(_)));
    let text = replaced.to_string();
    assert!(text.contains("owner 1 of \"server-0\"") && text.contains("owner 2"), "{text}");
    assert!(text.contains("process 22 on host \"here\", started 2026-11-22T18:00:00Z"), "{text}");
    second.check().unwrap();
    assert_eq!(storage.list("server-0").unwrap(), ["owner-0000000002"]);
}

#[test]
fn an_owner_number_is_not_reused_after_the_owners_file_is_lost() {
    let storage = InMemory::new();
    claim(&storage, 1).unwrap();
    storage.remove("server-0/owner-0000000001").unwrap();
    put(&storage, "server-0/coordinator-0000000012-00000000000000000003", b"");
    assert_eq!(claim(&storage, 2).unwrap().number(), OwnerNumber(13));
    put(&storage, "server-0/shard-3/journal-0000000007-00000000000000000000", b"");
    let directory = shard_directory(0, 3);
    let owner = DirectoryOwner::claim(Arc::new(storage.clone()), directory, &record(2)).unwrap();
    assert_eq!(owner.number(), OwnerNumber(8), "a shard's directory counts its own owners");
}

#[test]
fn a_claim_of_one_shard_replaces_the_owner_of_that_shard_alone() {
    let storage = InMemory::new();
    let server = claim(&storage, 1).unwrap();
    let shard = |shard, server| {
        let record = OwnerRecord { server, ..record(1) };
        Folder::claim(
            Arc::new(storage.clone()),
            ShardIdentity { job: 1, server: 0, shard },
            &record,
            ShardNeed::default(),
        )
        .unwrap()
    };
    let (stays, moves) = (shard(0, 0), shard(1, 0));
    let moved = shard(1, 2);
    let replaced = moves.owner().check().unwrap_err().to_string();
    assert!(replaced.contains("\"server-0/shard-1\"") && replaced.contains("(server 2, process 1"), "{replaced}");
    for owner in [&server, stays.owner(), moved.owner()] {
        owner.check().unwrap();
    }
}

#[test]
fn a_number_of_more_than_ten_digits_is_read_as_it_is_written() {
    for number in [0, 1, 9_999_999_999, 10_000_000_000, u64::MAX] {
        let text = format!("{}-rest", OwnerNumber(number));
        assert_eq!(OwnerNumber::split(&text), Some((OwnerNumber(number), "-rest")), "{text}");
    }
    for wrong in ["", "1", "00000000001", "-", "99999999999999999999999"] {
        assert_eq!(OwnerNumber::split(wrong), None, "{wrong:?}");
    }
}

#[test]
fn the_directory_of_another_server_is_refused_by_name() {
    let storage = InMemory::new();
    claim(&storage, 1).unwrap();
    storage.rename("server-0/owner-0000000001", "server-4/owner-0000000001").unwrap();
    let refused = DirectoryOwner::claim_server(Arc::new(storage.clone()), &OwnerRecord { server: 4, ..record(2) });
    let text = refused.err().expect("it is another server's").to_string();
    assert!(text.contains("\"server-4\" is that of server 0, and this is server 4"), "{text}");
    // A damaged file names no owner.
    put(&storage, "server-4/owner-0000000001", b"{\"server\":0");
    DirectoryOwner::claim_server(Arc::new(storage), &OwnerRecord { server: 4, ..record(2) }).unwrap();
}

#[test]
fn every_flipped_bit_of_an_owners_record_is_noticed() {
    let whole = record(77).encode();
    let storage = InMemory::new();
    put(&storage, "r", &whole);
    assert_eq!(OwnerRecord::read(&storage, "r"), Some(record(77)));
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        put(&storage, "r", &bytes);
        assert_eq!(OwnerRecord::read(&storage, "r"), None, "bit {bit}");
    }
}

#[test]
fn a_claim_that_fails_at_any_operation_leaves_the_directory_to_the_next() {
    for operation in 0..30 {
        let storage = InMemory::new();
        let before = claim(&storage, 1).unwrap();
        let dying = Failing::new(Arc::new(storage.clone()), StorageFault::Crash { operation });
        let died = DirectoryOwner::claim_server(Arc::new(dying), &record(2));
        let after = claim(&storage, 3).unwrap();
        after.check().unwrap();
        before.check().unwrap_err();
        assert!(after.number() > before.number(), "operation {operation}");
        if let Ok(died) = died {
            assert!(after.number() > died.number());
        }
        assert_eq!(storage.list("server-0").unwrap().len(), 1, "one owner's file is left");
    }
}
