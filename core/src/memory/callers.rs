//! Memory that the caller made and gave to devices: an address, a length, and how the devices let go of it.
//!
//! Nothing here reads or writes it, maps it or frees it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Failure;

/// Deregistration callback of a device; true when the device no longer touches the memory.
pub type LetGo = dyn Fn() -> bool + Send + Sync;

/// Some bytes of the caller's.
pub(super) struct Callers {
    address: usize,
    bytes: usize,
    /// Of the devices that have it.
    devices: Mutex<Vec<Weak<LetGo>>>,
}

impl Callers {
    pub(super) fn new(address: usize, bytes: usize) -> Result<Self, Failure> {
        let end = address.checked_add(bytes).filter(|end| *end > address && address > 0);
        end.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
        Ok(Self { address, bytes, devices: Mutex::default() })
    }

    pub(super) fn address(&self) -> usize {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// A device has it as long as `let_go` is kept.
    pub(super) fn has_device(&self, let_go: &Arc<LetGo>) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|one| one.strong_count() > 0);
        devices.push(Arc::downgrade(let_go));
    }

    /// Every device lets go of it; whether all of them did.
    pub(super) fn let_go(&self) -> bool {
        // A device that lets go takes locks of its own, under which it may be asking here.
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        devices.iter().filter_map(Weak::upgrade).filter(|let_go| !let_go()).count() == 0
    }

    /// That a device has it for good.
    pub(super) fn held(&self) -> Failure {
        let Self { address, bytes, .. } = self;
        Failure::call(format!(
            "a device does not let go of {bytes} bytes at {address:#x}, which it may still read and write: they must \
             stay, and hold nothing, until this process ends"
        ))
    }
}

impl fmt::Debug for Callers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Callers({} bytes at {:#x})", self.bytes, self.address)
    }
}
