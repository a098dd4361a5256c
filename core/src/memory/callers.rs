//! Memory that the caller allocated and registered with devices: address, length, and the devices' callbacks that
//! deregister it.
//!
//! This module neither accesses nor maps nor frees the memory.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Failure;

/// Deregistration callback of a device; true when the device no longer touches the memory.
pub type LetGo = dyn Fn() -> bool + Send + Sync;

/// A range of the caller's memory.
pub(super) struct Callers {
    address: usize,
    bytes: usize,
    /// Callbacks of the devices that registered the range.
    devices: Mutex<Vec<Weak<LetGo>>>,
}

impl Callers {
    pub(super) fn new(address: usize, bytes: usize) -> Result<Self, Failure> {
        let end = address.checked_add(bytes).filter(|end| *end > address && address > 0);
        end.ok_or_else(|| {
            Failure::call(format!(
                "the caller's memory at {address:#x} has {bytes} bytes; expected 1 or more at an address"
            ))
        })?;
        Ok(Self { address, bytes, devices: Mutex::default() })
    }

    pub(super) fn address(&self) -> usize {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Notes a device, which has the range registered as long as `let_go` exists.
    pub(super) fn has_device(&self, let_go: &Arc<LetGo>) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|one| one.strong_count() > 0);
        devices.push(Arc::downgrade(let_go));
    }

    /// Makes every device deregister the range; true when all did.
    pub(super) fn let_go(&self) -> bool {
        // The callbacks run without the lock: a device takes locks of its own in them, under which it may call this
        // module.
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        devices.iter().filter_map(Weak::upgrade).filter(|let_go| !let_go()).count() == 0
    }

    /// The error for a range that a device keeps registered.
    pub(super) fn held(&self) -> Failure {
        let Self { address, bytes, .. } = self;
        Failure::call(format!(
            "a device does not release {bytes} bytes at {address:#x} and may still read and write them; keep them \
             mapped and unused until this process ends"
        ))
    }
}

impl fmt::Debug for Callers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Callers({} bytes at {:#x})", self.bytes, self.address)
    }
}
