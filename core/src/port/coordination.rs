//! The store of a job's coordination: one value with a version, which one process at a time replaces.
//!
//! The coordinator keeps its state in it, and the map of shards with it, before anybody learns of a change. Adapters: a
//! file in the directory of server 0 ([`crate::checkpoint::CoordinatorFile`]), and the memory of a process
//! ([`MemoryStore`]), which [`FailingStore`] makes fail for tests.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::error::Failure;

/// Version of a store's value: it rises with each change. Zero is that of a store without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoreVersion(pub u64);

/// A store's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredValue {
    /// Its version.
    pub version: StoreVersion,
    /// The value, opaque to stores.
    pub bytes: Vec<u8>,
}

/// Why a store did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreFailure {
    /// Another process has replaced the value, or it alone may do so from now on: this one coordinates no longer.
    #[error("{0}")]
    Superseded(String),
    /// The store did not answer. A change may have happened nevertheless, and may be asked for again.
    #[error("{0}")]
    Unavailable(Failure),
}

impl From<StoreFailure> for Failure {
    fn from(failure: StoreFailure) -> Self {
        match failure {
            StoreFailure::Superseded(text) => Self::Node(text),
            StoreFailure::Unavailable(failure) => failure,
        }
    }
}

/// A store as one process uses it. Every other process has another of the same place.
pub trait CoordinationStore: Send {
    /// The value, and its version; the default where there is none.
    ///
    /// # Errors
    /// When the store does not answer, or what it holds is damaged.
    fn read(&mut self) -> Result<StoredValue, StoreFailure>;

    /// Replaces the value if no other process has replaced that of version `expected`. When it returns, the value
    /// survives this process and its host, as far as the store promises, and may be acted on.
    ///
    /// A change that this process asked for before, and that the store did not answer, is no change by another one.
    ///
    /// # Errors
    /// [`StoreFailure::Superseded`] when another process has; else the store's failure.
    fn compare_and_set(&mut self, expected: StoreVersion, bytes: &[u8]) -> Result<StoreVersion, StoreFailure>;

    /// Looks whether another process has replaced the value of version `seen`. It is called several times a second.
    ///
    /// # Errors
    /// As [`CoordinationStore::compare_and_set`].
    fn watch(&mut self, seen: StoreVersion) -> Result<(), StoreFailure>;
}

/// A store in memory. A clone is the same process's; [`MemoryStore::another`] is that of another process.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    place: Arc<Mutex<MemoryPlace>>,
    process: u64,
}

#[derive(Debug, Default)]
struct MemoryPlace {
    value: StoredValue,
    /// The process that has set the value.
    setter: u64,
    processes: u64,
}

impl MemoryStore {
    /// The same place, for another process.
    #[must_use]
    pub fn another(&self) -> Self {
        let mut place = self.lock();
        place.processes += 1;
        Self { place: Arc::clone(&self.place), process: place.processes }
    }

    fn lock(&self) -> MutexGuard<'_, MemoryPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, place: &MemoryPlace, seen: StoreVersion) -> Result<(), StoreFailure> {
        let now = place.value.version;
        if now == seen || place.setter == self.process {
            return Ok(());
        }
        Err(StoreFailure::Superseded(format!(
            "another process has replaced version {} of the coordinator's state by version {}: this one coordinates no \
             longer, and stops",
            seen.0, now.0
        )))
    }
}

impl CoordinationStore for MemoryStore {
    fn read(&mut self) -> Result<StoredValue, StoreFailure> {
        Ok(self.lock().value.clone())
    }

    fn compare_and_set(&mut self, expected: StoreVersion, bytes: &[u8]) -> Result<StoreVersion, StoreFailure> {
        let mut place = self.lock();
        self.check(&place, expected)?;
        let version = StoreVersion(place.value.version.0 + 1);
        place.value = StoredValue { version, bytes: bytes.to_vec() };
        place.setter = self.process;
        Ok(version)
    }

    fn watch(&mut self, seen: StoreVersion) -> Result<(), StoreFailure> {
        self.check(&self.lock(), seen)
    }
}

/// The failure of one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFault {
    /// It does not happen.
    Refused,
    /// It happens, and its answer is lost.
    Unanswered,
}

/// A store whose changes fail as told.
pub struct FailingStore<S> {
    inner: S,
    faults: StoreFaults,
}

/// The failures of the changes to come, in order.
pub type StoreFaults = Arc<Mutex<VecDeque<StoreFault>>>;

impl<S: CoordinationStore> FailingStore<S> {
    /// Makes a store fail.
    pub fn new(inner: S, faults: StoreFaults) -> Self {
        Self { inner, faults }
    }
}

impl<S: CoordinationStore> CoordinationStore for FailingStore<S> {
    fn read(&mut self) -> Result<StoredValue, StoreFailure> {
        self.inner.read()
    }

    fn compare_and_set(&mut self, expected: StoreVersion, bytes: &[u8]) -> Result<StoreVersion, StoreFailure> {
        let fault = self.faults.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let failed =
            |what: &str| StoreFailure::Unavailable(Failure::call(format!("setting the coordinator's state: {what}")));
        match fault {
            None => self.inner.compare_and_set(expected, bytes),
            Some(StoreFault::Refused) => Err(failed("the injected refusal")),
            Some(StoreFault::Unanswered) => {
                self.inner.compare_and_set(expected, bytes)?;
                Err(failed("the injected loss of an answer"))
            }
        }
    }

    fn watch(&mut self, seen: StoreVersion) -> Result<(), StoreFailure> {
        self.inner.watch(seen)
    }
}

#[cfg(test)]
mod tests;
