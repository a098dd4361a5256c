//! Partial file, which gets its final name when it is complete.

use std::sync::Arc;

use super::path::PARTIAL;
use super::storage::{Storage, StorageWriter, join, parent};
use crate::error::Failure;

/// The prefix of a model's name while it is written; sixteen hexadecimal digits follow.
const SAVING: &str = "saving-";
const DIGITS: usize = 16;

/// A file under a temporary name.
pub(super) struct Partial {
    storage: Arc<dyn Storage>,
    path: String,
    temporary: String,
    writer: Box<dyn StorageWriter>,
}

impl Partial {
    /// A file that no other process writes: its temporary name is its own and [`PARTIAL`], in place of any that an
    /// earlier process left.
    pub(super) fn create(storage: &Arc<dyn Storage>, path: String) -> Result<Self, Failure> {
        let temporary = format!("{path}{PARTIAL}");
        let writer = storage.create_anew(&temporary)?;
        Ok(Self { storage: storage.clone(), path, temporary, writer })
    }

    /// A file that several writers may write at once, each under a number of its own; the last one that is placed
    /// replaces the others.
    pub(super) fn create_among_others(storage: &Arc<dyn Storage>, path: String, number: u64) -> Result<Self, Failure> {
        let temporary = join(parent(&path), &format!("{SAVING}{number:0DIGITS$x}{PARTIAL}"));
        let writer = storage.create_owned(&temporary)?;
        Ok(Self { storage: storage.clone(), path, temporary, writer })
    }

    pub(super) fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        self.writer.write(parts)
    }

    pub(super) fn position(&self) -> u64 {
        self.writer.position()
    }

    /// Renames the file to its final name, which survives the loss of the host once the directory is synced.
    pub(super) fn place(&mut self) -> Result<(), Failure> {
        self.writer.sync()?;
        self.storage.rename(&self.temporary, &self.path)
    }

    /// Frees the disk space of a file that will not be finished. If this fails, a later sweep removes it.
    pub(super) fn abandon(&self) {
        // The caller reports the failure that made it abandon the file; a failure of the removal would hide that.
        let _ = self.storage.remove(&self.temporary);
    }
}

/// Removes the unfinished models that killed processes left in a directory, and returns how many. A model that any
/// process is still writing stays, and so does every file with a name of another form.
pub fn sweep_models(storage: &dyn Storage, directory: &str) -> Result<usize, Failure> {
    let mut removed = 0;
    for name in storage.list(directory)?.iter().filter(|name| is_unfinished_model(name)) {
        removed += usize::from(storage.remove_abandoned(&join(directory, name))?);
    }
    Ok(removed)
}

fn is_unfinished_model(name: &str) -> bool {
    let number = name.strip_prefix(SAVING).and_then(|rest| rest.strip_suffix(PARTIAL));
    number.is_some_and(|number| {
        number.len() == DIGITS && number.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::storage::tests::put;
    use crate::checkpoint::storage::{Directory, InMemory};

    fn check(storage: Arc<dyn Storage>) {
        let others = [
            "saving-0123456789abcde.partial",
            "saving-0123456789abcdef0.partial",
            "saving-0123456789ABCDEF.partial",
            "saving-0123456789abcdef.partial2",
            "my-saving-0123456789abcdef.partial",
            "checkpoint-1.json.partial",
            "model",
        ];
        for name in others {
            put(&*storage, &format!("run/{name}"), b"of others");
        }
        put(&*storage, "run/saving-0123456789abcdef.partial", b"of a process that was killed");
        put(&*storage, "elsewhere/saving-0123456789abcdef.partial", b"in a directory that nothing is saved in");
        let mut one = Partial::create_among_others(&storage, "run/model".to_owned(), 1).unwrap();
        let mut two = Partial::create_among_others(&storage, "run/model".to_owned(), 2).unwrap();
        assert!(Partial::create_among_others(&storage, "run/other".to_owned(), 2).is_err(), "a number is one save's");
        assert_eq!(sweep_models(&*storage, "run"), Ok(1));
        assert_eq!(sweep_models(&*storage, "nothing is here"), Ok(0));
        let mut left: Vec<_> = others.to_vec();
        left.extend(["saving-0000000000000001.partial", "saving-0000000000000002.partial"]);
        left.sort_unstable();
        assert_eq!(storage.list("run").unwrap(), left);
        one.write(&[b"one"]).unwrap();
        two.write(&[b"two"]).unwrap();
        one.place().unwrap();
        two.place().unwrap();
        assert_eq!(crate::checkpoint::storage::tests::get(&*storage, "run/model"), b"two");
        let dropped = Partial::create_among_others(&storage, "run/model".to_owned(), 3).unwrap();
        assert_eq!(sweep_models(&*storage, "run"), Ok(0), "it is being written");
        drop(dropped);
        assert_eq!(sweep_models(&*storage, "run"), Ok(1), "its writer is gone");
        assert_eq!(
            storage.list("run").unwrap(),
            others.iter().copied().collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
        );
        assert_eq!(storage.list("elsewhere").unwrap().len(), 1);
    }

    #[test]
    fn abandoned_partial_models_are_swept_and_other_files_stay() {
        let root = tempfile::tempdir().unwrap();
        check(Arc::new(Directory::open(root.path()).unwrap()));
        check(Arc::new(InMemory::new()));
    }

    #[test]
    fn a_save_and_a_sweep_of_different_processes_do_not_conflict() {
        // Two roots share only the files, as two processes do.
        let root = tempfile::tempdir().unwrap();
        let sweeping: Arc<dyn Storage> = Arc::new(Directory::open(root.path()).unwrap());
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    // The sweep may find a file that was created at this moment and has no lock yet; its writer then
                    // creates another.
                    sweep_models(&*sweeping, "").unwrap();
                }
            });
            let storage: Arc<dyn Storage> = Arc::new(Directory::open(root.path()).unwrap());
            for number in 0..2000 {
                let mut file = Partial::create_among_others(&storage, "model".to_owned(), number).unwrap();
                file.place().unwrap();
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
