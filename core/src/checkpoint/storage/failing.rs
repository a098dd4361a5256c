//! A storage that misbehaves on request, around any other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Storage, StorageReader, StorageWriter, total};
use crate::error::Failure;

/// The injected fault. Operations are the calls of [`Storage`], [`StorageWriter`] and [`StorageReader`] that can fail,
/// counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageFault {
    /// Nothing.
    None,
    /// One operation fails, the others work; a write that fails gets half of its bytes out.
    Once {
        /// The operation.
        operation: u64,
    },
    /// The process is killed: one operation and all after it fail; a write that is cut off gets half of its bytes out.
    Crash {
        /// The first that fails.
        operation: u64,
    },
    /// The disk is full: writes fail once this many bytes were written.
    Full {
        /// How many bytes fit.
        bytes: u64,
    },
}

/// Another storage, and a fault.
pub struct Failing {
    inner: Arc<dyn Storage>,
    meter: Arc<Meter>,
}

struct Meter {
    fault: StorageFault,
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl Failing {
    /// Wraps a storage.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, fault: StorageFault) -> Self {
        Self { inner, meter: Arc::new(Meter { fault, operations: AtomicU64::new(0), bytes: AtomicU64::new(0) }) }
    }

    /// The number of operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.meter.operations.load(Ordering::Relaxed)
    }
}

impl Meter {
    fn count(&self, operation: &str, path: &str) -> Result<(), Failure> {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        let fails = match self.fault {
            StorageFault::None | StorageFault::Full { .. } => false,
            StorageFault::Once { operation } => number == operation,
            StorageFault::Crash { operation } => number >= operation,
        };
        if fails {
            return Err(Failure::Call(format!("{operation} {path:?}: the injected fault of operation {number}")));
        }
        Ok(())
    }

    /// Whether the crash has come.
    fn is_dead(&self) -> bool {
        matches!(self.fault, StorageFault::Crash { operation } if self.operations.load(Ordering::Relaxed) > operation)
    }

    /// The part of `wanted` bytes that still fits on the disk.
    fn take(&self, wanted: u64) -> u64 {
        let StorageFault::Full { bytes } = self.fault else {
            return wanted;
        };
        let fits = wanted.min(bytes.saturating_sub(self.bytes.load(Ordering::Relaxed)));
        self.bytes.fetch_add(fits, Ordering::Relaxed);
        fits
    }
}

impl Storage for Failing {
    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        self.meter.count("create", path)?;
        let inner = self.inner.create(path)?;
        Ok(Box::new(FailingWriter { inner, path: path.to_owned(), meter: self.meter.clone() }))
    }

    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        self.meter.count("create", path)?;
        let inner = self.inner.create_owned(path)?;
        Ok(Box::new(FailingWriter { inner, path: path.to_owned(), meter: self.meter.clone() }))
    }

    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure> {
        self.meter.count("remove the abandoned file", path)?;
        self.inner.remove_abandoned(path)
    }

    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure> {
        self.meter.count("open", path)?;
        let Some(inner) = self.inner.find(path)? else { return Ok(None) };
        Ok(Some(Box::new(FailingReader { inner, path: path.to_owned(), meter: self.meter.clone() })))
    }

    fn free(&self) -> Option<u64> {
        self.inner.free()
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        self.meter.count("rename", from)?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        self.meter.count("remove", path)?;
        self.inner.remove(path)
    }

    fn list(&self, directory: &str) -> Result<Vec<String>, Failure> {
        self.meter.count("list", directory)?;
        self.inner.list(directory)
    }

    fn sync(&self, path: &str) -> Result<(), Failure> {
        self.meter.count("sync", path)?;
        self.inner.sync(path)
    }

    fn sync_directory(&self, directory: &str) -> Result<(), Failure> {
        self.meter.count("sync directory", directory)?;
        self.inner.sync_directory(directory)
    }
}

struct FailingWriter {
    inner: Box<dyn StorageWriter>,
    path: String,
    meter: Arc<Meter>,
}

impl FailingWriter {
    /// Leaves behind the bytes that a failed write got out.
    fn write_some(&mut self, parts: &[&[u8]], bytes: u64) -> Result<(), Failure> {
        let mut all = parts.concat();
        all.truncate(usize::try_from(bytes).expect("no more than the parts hold"));
        self.inner.write(&[&all])
    }
}

impl StorageWriter for FailingWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let wanted = total(parts);
        let first = !self.meter.is_dead();
        if let Err(failure) = self.meter.count("write", &self.path) {
            // A dead process writes nothing more.
            self.write_some(parts, if first { wanted / 2 } else { 0 })?;
            return Err(failure);
        }
        let fits = self.meter.take(wanted);
        if fits < wanted {
            self.write_some(parts, fits)?;
            let path = &self.path;
            return Err(Failure::Call(format!("write {wanted} bytes to {path:?}: no space left on device")));
        }
        self.inner.write(parts)
    }

    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.meter.count("write", &self.path)?;
        self.inner.overwrite(offset, bytes)
    }

    fn sync(&mut self) -> Result<(), Failure> {
        self.meter.count("sync", &self.path)?;
        self.inner.sync()
    }

    fn position(&self) -> u64 {
        self.inner.position()
    }
}

struct FailingReader {
    inner: Box<dyn StorageReader>,
    path: String,
    meter: Arc<Meter>,
}

impl StorageReader for FailingReader {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        self.meter.count("read", &self.path)?;
        self.inner.read_at(offset, into)
    }
}
