//! Files in memory, which lose in a crash what a host would lose.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Reader, Storage, Writer, parent, total};
use crate::error::Failure;

/// Files in memory. A clone is the same storage.
#[derive(Clone, Default)]
pub struct InMemory {
    tree: Arc<Mutex<Tree>>,
}

#[derive(Default)]
struct Tree {
    names: Names,
    /// The names that a crash leaves.
    synced: Names,
}

type Names = BTreeMap<String, Arc<Mutex<Contents>>>;

#[derive(Default)]
struct Contents {
    bytes: Vec<u8>,
    /// How many of them a crash leaves.
    synced: usize,
}

impl InMemory {
    /// An empty storage.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Loses the host: names go back to what was last synced, and files to the bytes that were.
    pub fn crash(&self) {
        let mut tree = lock(&self.tree);
        tree.names = tree.synced.clone();
        for contents in tree.names.values() {
            let mut contents = lock(contents);
            let synced = contents.synced;
            contents.bytes.truncate(synced);
        }
    }

    fn contents(&self, operation: &str, path: &str) -> Result<Arc<Mutex<Contents>>, Failure> {
        lock(&self.tree).names.get(path).cloned().ok_or_else(|| missing(operation, path))
    }
}

impl Storage for InMemory {
    fn create(&self, path: &str) -> Result<Box<dyn Writer>, Failure> {
        let contents = Arc::<Mutex<Contents>>::default();
        lock(&self.tree).names.insert(path.to_owned(), contents.clone());
        Ok(Box::new(MemoryWriter { contents, position: 0 }))
    }

    fn open(&self, path: &str) -> Result<Box<dyn Reader>, Failure> {
        let contents = self.contents("open", path)?;
        let length = lock(&contents).bytes.len() as u64;
        Ok(Box::new(MemoryReader { path: path.to_owned(), contents, length }))
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
        let Tree { names, synced } = &mut *tree;
        synced.retain(|path, _| parent(path) != directory);
        let inside = names.iter().filter(|(path, _)| parent(path) == directory);
        synced.extend(inside.map(|(path, contents)| (path.clone(), contents.clone())));
        Ok(())
    }
}

struct MemoryWriter {
    contents: Arc<Mutex<Contents>>,
    position: u64,
}

impl Writer for MemoryWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let mut contents = lock(&self.contents);
        for part in parts {
            contents.bytes.extend_from_slice(part);
        }
        self.position += total(parts);
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
    contents: Arc<Mutex<Contents>>,
    length: u64,
}

impl Reader for MemoryReader {
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
