//! State of a chunk that lives on an accelerator, and the work that the accelerator does for it.

use std::sync::Arc;

use crate::memory::Lease;
use crate::port::{DeviceCode, DeviceSlot, GradientLease, Work};

/// State of a chunk on an accelerator.
pub(super) struct DeviceChunk {
    pub(super) slot: DeviceSlot,
    pub(super) code: DeviceCode,
    pub(super) doing: DeviceActivity,
    /// Whether the states in host memory equal those on the device, or there are none.
    pub(super) is_fresh: bool,
    /// Whether a checkpoint holds it: no update begins.
    pub(super) is_held: bool,
    /// Whether it returns to the processor after the current update is published.
    pub(super) is_leaving: bool,
    /// Why its states could not be stored.
    pub(super) not_stored: Option<String>,
    device: Arc<str>,
}

/// Current work of a chunk on the device.
#[derive(Default)]
pub(super) enum DeviceActivity {
    #[default]
    Nothing,
    Loading,
    /// Its gradients are being summed, for a grouped update.
    Summing,
    /// Its sum is on the device and awaits the other chunks of the group.
    Summed(Box<DeviceSum>),
    Updating,
    Storing,
    /// The update is complete and not published.
    Updated(Lease),
    /// Its states are being stored for its return to the processor, with the work that failed.
    Leaving(Option<Box<Work>>),
}

/// The sum of a chunk in a grouped update.
pub(super) struct DeviceSum {
    /// The summed gradients, for an update on the processor if the device fails.
    pub(super) gradients: Vec<GradientLease>,
    /// Lease for the next value; holds the sums of squares until then.
    pub(super) into: Lease,
}

impl DeviceChunk {
    pub(super) fn new(slot: DeviceSlot, code: DeviceCode, device: Arc<str>) -> Self {
        Self {
            slot,
            code,
            doing: DeviceActivity::Loading,
            is_fresh: true,
            is_held: false,
            is_leaving: false,
            not_stored: None,
            device,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.doing, DeviceActivity::Nothing)
    }

    /// Whether the device has failed and nothing of it is left to do: the chunk returns to the processor.
    pub(super) fn has_left(&self) -> bool {
        self.is_leaving && !self.is_busy()
    }

    /// Whether the device does a part of its update.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.doing, DeviceActivity::Summing | DeviceActivity::Updating | DeviceActivity::Leaving(Some(_)))
    }

    /// Whether a checkpoint can write the chunk now: value, states and call ids are of one version, and later gradients
    /// are here.
    pub(super) fn is_writable(&self) -> bool {
        match self.doing {
            DeviceActivity::Nothing => self.is_fresh || self.code.states() == 0,
            DeviceActivity::Loading | DeviceActivity::Storing => self.code.states() == 0,
            _ => false,
        }
    }

    /// The device that a complete round waits for.
    pub(super) fn waits_for(&self) -> Option<String> {
        self.is_busy().then(|| self.device.to_string())
    }
}
