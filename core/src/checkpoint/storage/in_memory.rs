//! In-memory storage that loses in a simulated crash what a host would lose.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::{Storage, StorageReader, StorageWriter, parent, total};
use crate::error::Failure;
use crate::prng::Prng;

/// Bytes at the end of a torn file that are zeros: up to a sector.
const TORN_BYTES_MAX: usize = 512;

/// Files in memory. A clone is the same storage.
#[derive(Clone, Default)]
pub struct InMemory {
    tree: Arc<Mutex<FileTree>>,
}

#[derive(Default)]
struct FileTree {
    names: FileNames,
    /// The names that a crash leaves.
    synced: FileNames,
    /// Bytes of all files together that it tells to have room for.
    room: Option<u64>,
}

type FileNames = BTreeMap<String, Arc<Mutex<FileContents>>>;

#[derive(Default)]
struct FileContents {
    bytes: Vec<u8>,
    /// How many of them a crash leaves.
    synced: usize,
    /// The writer that owns the file, if there is one.
    owner: Weak<()>,
}

impl InMemory {
    /// An empty storage.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells how many bytes are free: all but those of its files, of so many. It takes more all the same.
    pub fn set_room(&self, bytes: u64) {
        lock(&self.tree).room = Some(bytes);
    }

    /// A storage of its own with the same files, all of them synced.
    #[must_use]
    pub fn copy(&self) -> Self {
        let tree = lock(&self.tree);
        let copied = tree.names.iter().map(|(path, contents)| {
            let bytes = lock(contents).bytes.clone();
            (path.clone(), Arc::new(Mutex::new(FileContents { synced: bytes.len(), bytes, ..FileContents::default() })))
        });
        let names: FileNames = copied.collect();
        Self { tree: Arc::new(Mutex::new(FileTree { synced: names.clone(), names, room: tree.room })) }
    }

    /// Simulates the loss of the host: names and bytes return to the last sync.
    pub fn crash(&self) {
        let mut tree = lock(&self.tree);
        tree.names = tree.synced.clone();
        for contents in tree.names.values() {
            let mut contents = lock(contents);
            let synced = contents.synced;
            contents.bytes.truncate(synced);
        }
    }

    /// As [`InMemory::crash`], of a host that had written down which names were taken away, and not which were given:
    /// until a directory is synced, either may be so.
    pub fn crash_after_removals(&self) {
        let mut tree = lock(&self.tree);
        let FileTree { names, synced, .. } = &mut *tree;
        synced.retain(|path, _| names.contains_key(path));
        drop(tree);
        self.crash();
    }

    /// As [`InMemory::crash`], of a host that had written a part of what was not synced, the end of which may be zeros.
    pub fn crash_torn(&self, prng: &mut Prng) {
        let mut tree = lock(&self.tree);
        tree.names = tree.synced.clone();
        for contents in tree.names.values() {
            let mut contents = lock(contents);
            let synced = contents.synced;
            let kept = prng.index(contents.bytes.len() - synced + 1);
            contents.bytes.truncate(synced + kept);
            let torn = prng.index(TORN_BYTES_MAX).min(kept);
            let start = contents.bytes.len() - torn;
            contents.bytes[start..].fill(0);
        }
    }

    fn contents(&self, operation: &str, path: &str) -> Result<Arc<Mutex<FileContents>>, Failure> {
        lock(&self.tree).names.get(path).cloned().ok_or_else(|| missing(operation, path))
    }
}

impl Storage for InMemory {
    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        let contents = Arc::<Mutex<FileContents>>::default();
        let mut tree = lock(&self.tree);
        if tree.names.contains_key(path) {
            return Err(Failure::Call(format!("create {path:?}: there is a file of this name")));
        }
        tree.names.insert(path.to_owned(), contents.clone());
        Ok(Box::new(MemoryWriter { contents, position: 0, _owns: None }))
    }

    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        let mut tree = lock(&self.tree);
        if tree.names.contains_key(path) {
            return Err(Failure::Call(format!("create {path:?}: the name is taken")));
        }
        let owner = Arc::new(());
        let contents = FileContents { owner: Arc::downgrade(&owner), ..FileContents::default() };
        let contents = Arc::new(Mutex::new(contents));
        tree.names.insert(path.to_owned(), contents.clone());
        Ok(Box::new(MemoryWriter { contents, position: 0, _owns: Some(owner) }))
    }

    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure> {
        let mut tree = lock(&self.tree);
        let is_abandoned = tree.names.get(path).is_some_and(|contents| lock(contents).owner.strong_count() == 0);
        Ok(is_abandoned && tree.names.remove(path).is_some())
    }

    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure> {
        let Some(contents) = lock(&self.tree).names.get(path).cloned() else { return Ok(None) };
        let length = lock(&contents).bytes.len() as u64;
        Ok(Some(Box::new(MemoryReader { path: path.to_owned(), contents, length })))
    }

    fn free(&self) -> Option<u64> {
        let tree = lock(&self.tree);
        let used: u64 = tree.names.values().map(|contents| lock(contents).bytes.len() as u64).sum();
        Some(tree.room?.saturating_sub(used))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        let mut tree = lock(&self.tree);
        let contents = tree.names.remove(from).ok_or_else(|| missing("rename", from))?;
        tree.names.insert(to.to_owned(), contents);
        Ok(())
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        lock(&self.tree).names.remove(path).map(drop).ok_or_else(|| missing("remove", path))
    }

    fn list(&self, directory: &str) -> Result<Vec<String>, Failure> {
        let tree = lock(&self.tree);
        if tree.names.contains_key(directory) {
            return Err(Failure::Call(format!("list {directory:?}: it is not a directory")));
        }
        let mut names: Vec<String> =
            tree.names.keys().filter_map(|path| Some(child(directory, path)?.to_owned())).collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    fn sync(&self, path: &str) -> Result<(), Failure> {
        let contents = self.contents("sync", path)?;
        let mut contents = lock(&contents);
        contents.synced = contents.bytes.len();
        Ok(())
    }

    fn sync_directory(&self, directory: &str) -> Result<(), Failure> {
        let mut tree = lock(&self.tree);
        let FileTree { names, synced, .. } = &mut *tree;
        synced.retain(|path, _| parent(path) != directory);
        let inside = names.iter().filter(|(path, _)| parent(path) == directory);
        synced.extend(inside.map(|(path, contents)| (path.clone(), contents.clone())));
        Ok(())
    }
}

struct MemoryWriter {
    contents: Arc<Mutex<FileContents>>,
    position: u64,
    _owns: Option<Arc<()>>,
}

impl StorageWriter for MemoryWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let mut contents = lock(&self.contents);
        for part in parts {
            contents.bytes.extend_from_slice(part);
        }
        self.position += total(parts);
        Ok(())
    }

    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        let mut contents = lock(&self.contents);
        let start = usize::try_from(offset).expect("a file in memory is short");
        let into = contents.bytes.get_mut(start..start + bytes.len());
        into.expect("what is written over was written before").copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Failure> {
        let mut contents = lock(&self.contents);
        contents.synced = contents.bytes.len();
        Ok(())
    }

    fn position(&self) -> u64 {
        self.position
    }
}

struct MemoryReader {
    path: String,
    contents: Arc<Mutex<FileContents>>,
    length: u64,
}

impl StorageReader for MemoryReader {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        let contents = lock(&self.contents);
        let found =
            usize::try_from(offset).ok().and_then(|start| contents.bytes.get(start..start.checked_add(into.len())?));
        let Some(found) = found else {
            let (path, wanted) = (&self.path, into.len());
            return Err(Failure::Call(format!("read {wanted} bytes at {offset} of {path:?}: the file ends before")));
        };
        into.copy_from_slice(found);
        Ok(())
    }
}

/// The first name below `directory` on the way to `path`.
fn child<'a>(directory: &str, path: &'a str) -> Option<&'a str> {
    let below = if directory.is_empty() { path } else { path.strip_prefix(directory)?.strip_prefix('/')? };
    below.split('/').next()
}

fn missing(operation: &str, path: &str) -> Failure {
    Failure::Call(format!("{operation} {path:?}: there is no such file"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing that holds this lock panics")
}
