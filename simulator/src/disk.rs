//! The disk as one process sees it: it takes time, fails, and takes nothing more after the process was killed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pserver_core::checkpoint::Storage;
use pserver_core::checkpoint::storage::{InMemory, StorageReader, StorageWriter};
use pserver_core::error::Failure;
use pserver_core::prng::Prng;

use crate::machine::ProcessFate;

/// Duration of an operation of the page cache.
const CACHED: Duration = Duration::from_micros(4);
/// Duration of a sync on a healthy disk.
const SYNCED: Duration = Duration::from_micros(300);

/// The disk of a host as one of its processes uses it.
#[derive(Clone)]
pub(crate) struct ProcessDisk {
    disk: InMemory,
    use_of: Arc<DiskUse>,
}

struct DiskUse {
    fate: Arc<ProcessFate>,
    operations: AtomicU64,
    /// The operation during which the process is killed.
    dies_at: AtomicU64,
    /// The operation that fails alone.
    fails_at: AtomicU64,
    /// How many times longer a sync takes.
    slowness: AtomicU64,
    prng: Mutex<Prng>,
}

/// Whether an operation happens.
enum Verdict {
    Whole,
    /// The process is killed while it writes, or the operation fails in the middle.
    Part(Failure),
}

impl ProcessDisk {
    pub(crate) fn new(disk: InMemory, fate: Arc<ProcessFate>, seed: u64) -> Self {
        let use_of = DiskUse {
            fate,
            operations: AtomicU64::new(0),
            dies_at: AtomicU64::new(u64::MAX),
            fails_at: AtomicU64::new(u64::MAX),
            slowness: AtomicU64::new(1),
            prng: Mutex::new(Prng(seed)),
        };
        Self { disk, use_of: Arc::new(use_of) }
    }

    /// The process is killed in the course of its `operations`-th operation from now on.
    pub(crate) fn die_after(&self, operations: u64) {
        self.use_of.set(&self.use_of.dies_at, operations);
    }

    /// The `operations`-th operation from now on fails.
    pub(crate) fn fail_after(&self, operations: u64) {
        self.use_of.set(&self.use_of.fails_at, operations);
    }

    pub(crate) fn set_slowness(&self, slowness: u64) {
        self.use_of.slowness.store(slowness, Ordering::Relaxed);
    }
}

impl DiskUse {
    fn set(&self, at: &AtomicU64, operations: u64) {
        at.store(self.operations.load(Ordering::Relaxed) + operations, Ordering::Relaxed);
    }

    fn count(&self, operation: &str) -> Result<Verdict, Failure> {
        let dead = || Failure::call(format!("{operation}: the simulated process was killed"));
        if self.fate.is_dead() {
            return Err(dead());
        }
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        self.fate.delay(CACHED);
        if number == self.dies_at.load(Ordering::Relaxed) {
            self.fate.kill();
            return if operation == "write" { Ok(Verdict::Part(dead())) } else { Err(dead()) };
        }
        if number == self.fails_at.load(Ordering::Relaxed) {
            let failure = Failure::call(format!("{operation}: simulated error of the disk"));
            return if operation == "write" { Ok(Verdict::Part(failure)) } else { Err(failure) };
        }
        Ok(Verdict::Whole)
    }

    fn sync(&self) {
        self.fate.delay(SYNCED * u32::try_from(self.slowness.load(Ordering::Relaxed)).unwrap_or(u32::MAX));
    }

    fn part(&self, bytes: usize) -> usize {
        self.prng.lock().unwrap_or_else(PoisonError::into_inner).index(bytes + 1)
    }
}

struct DiskWriter {
    inner: Box<dyn StorageWriter>,
    use_of: Arc<DiskUse>,
}

struct DiskReader {
    inner: Box<dyn StorageReader>,
    use_of: Arc<DiskUse>,
}

impl Storage for ProcessDisk {
    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        self.use_of.count("create")?;
        Ok(Box::new(DiskWriter { inner: self.disk.create(path)?, use_of: Arc::clone(&self.use_of) }))
    }

    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        self.use_of.count("create")?;
        Ok(Box::new(DiskWriter { inner: self.disk.create_owned(path)?, use_of: Arc::clone(&self.use_of) }))
    }

    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure> {
        self.use_of.count("remove")?;
        self.disk.remove_abandoned(path)
    }

    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure> {
        self.use_of.count("open")?;
        let reader = |inner| Box::new(DiskReader { inner, use_of: Arc::clone(&self.use_of) }) as Box<dyn StorageReader>;
        Ok(self.disk.find(path)?.map(reader))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        self.use_of.count("rename")?;
        self.disk.rename(from, to)
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        self.use_of.count("remove")?;
        self.disk.remove(path)
    }

    fn list(&self, directory: &str) -> Result<Vec<String>, Failure> {
        self.use_of.count("list")?;
        self.disk.list(directory)
    }

    fn sync(&self, path: &str) -> Result<(), Failure> {
        self.use_of.count("sync")?;
        self.use_of.sync();
        self.disk.sync(path)
    }

    fn sync_directory(&self, directory: &str) -> Result<(), Failure> {
        self.use_of.count("sync")?;
        self.use_of.sync();
        self.disk.sync_directory(directory)
    }
}

impl StorageWriter for DiskWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        match self.use_of.count("write")? {
            Verdict::Whole => self.inner.write(parts),
            Verdict::Part(failure) => {
                let all = parts.concat();
                self.inner.write(&[&all[..self.use_of.part(all.len())]])?;
                Err(failure)
            }
        }
    }

    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.use_of.count("overwrite")?;
        self.inner.overwrite(offset, bytes)
    }

    fn sync(&mut self) -> Result<(), Failure> {
        self.use_of.count("sync")?;
        self.use_of.sync();
        self.inner.sync()
    }

    fn position(&self) -> u64 {
        self.inner.position()
    }
}

impl StorageReader for DiskReader {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        self.use_of.count("read")?;
        self.inner.read_at(offset, into)
    }
}
