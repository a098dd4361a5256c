//! A file that gets its name only when it is whole.

use std::sync::Arc;

use super::path::PARTIAL;
use super::storage::{Storage, Writer};
use crate::error::Failure;

/// A file under a temporary name.
pub(super) struct Partial {
    storage: Arc<dyn Storage>,
    path: String,
    writer: Box<dyn Writer>,
}

impl Partial {
    pub(super) fn create(storage: &Arc<dyn Storage>, path: String) -> Result<Self, Failure> {
        let writer = storage.create(&temporary(&path))?;
        Ok(Self { storage: storage.clone(), path, writer })
    }

    pub(super) fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        self.writer.write(parts)
    }

    pub(super) fn position(&self) -> u64 {
        self.writer.position()
    }

    /// Gives the file its name. The name lasts once its directory is synced.
    pub(super) fn place(&mut self) -> Result<(), Failure> {
        self.writer.sync()?;
        self.storage.rename(&temporary(&self.path), &self.path)
    }

    /// Gives back the disk space of a file that will not be finished. What fails here is swept up later.
    pub(super) fn abandon(&self) {
        // The failure that led here is the one to report; this one would only hide it.
        let _ = self.storage.remove(&temporary(&self.path));
    }
}

fn temporary(path: &str) -> String {
    format!("{path}{PARTIAL}")
}
