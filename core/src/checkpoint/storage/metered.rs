//! Storage that counts what is read through it, and what is written to checkpoints, for a display of progress.

use std::sync::Arc;

use super::{Storage, StorageReader, StorageWriter, total};
use crate::error::Failure;
use crate::metrics::WorkMeter;

/// The beginning of the names of a checkpoint's files.
pub(in crate::checkpoint) const CHECKPOINT_PREFIX: &str = "checkpoint-";

/// Another storage, with a count of its bytes. Journals are written as without it.
pub struct Metered {
    storage: Arc<dyn Storage>,
    meter: Arc<WorkMeter>,
}

struct MeteredReader {
    reader: Box<dyn StorageReader>,
    meter: Arc<WorkMeter>,
}

struct MeteredWriter {
    writer: Box<dyn StorageWriter>,
    meter: Arc<WorkMeter>,
}

impl Metered {
    /// Counts what passes through a storage.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, meter: Arc<WorkMeter>) -> Self {
        Self { storage, meter }
    }
}

impl Storage for Metered {
    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        let writer = self.storage.create(path)?;
        let is_checkpoint = path.rsplit('/').next().is_some_and(|name| name.starts_with(CHECKPOINT_PREFIX));
        let meter = Arc::clone(&self.meter);
        Ok(if is_checkpoint { Box::new(MeteredWriter { writer, meter }) } else { writer })
    }

    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        self.storage.create_owned(path)
    }

    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure> {
        self.storage.remove_abandoned(path)
    }

    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure> {
        let metered =
            |reader| Box::new(MeteredReader { reader, meter: Arc::clone(&self.meter) }) as Box<dyn StorageReader>;
        Ok(self.storage.find(path)?.map(metered))
    }

    fn exists(&self, path: &str) -> Result<bool, Failure> {
        self.storage.exists(path)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        self.storage.rename(from, to)
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        self.storage.remove(path)
    }

    fn list(&self, directory: &str) -> Result<Vec<String>, Failure> {
        self.storage.list(directory)
    }

    fn sync(&self, path: &str) -> Result<(), Failure> {
        self.storage.sync(path)
    }

    fn sync_directory(&self, directory: &str) -> Result<(), Failure> {
        self.storage.sync_directory(directory)
    }

    fn free(&self) -> Option<u64> {
        self.storage.free()
    }

    fn expect(&self, bytes: u64) {
        self.meter.expect(bytes);
    }
}

impl StorageReader for MeteredReader {
    fn len(&self) -> u64 {
        self.reader.len()
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        self.reader.read_at(offset, into)?;
        self.meter.add(into.len() as u64);
        Ok(())
    }
}

impl StorageWriter for MeteredWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        self.writer.write(parts)?;
        self.meter.add(total(parts));
        Ok(())
    }

    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.writer.overwrite(offset, bytes)
    }

    fn sync(&mut self) -> Result<(), Failure> {
        self.writer.sync()
    }

    fn position(&self) -> u64 {
        self.writer.position()
    }
}
