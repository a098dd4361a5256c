//! Conformance suite of all transports. A backend's own test is five lines:
//!
//! ```
//! use pserver_transport::{conformance, loopback};
//!
//! conformance::check(|| {
//!     let (near, far, address) = loopback::pair();
//!     conformance::TransportPair::new(Box::new(near), Box::new(far), address)
//! });
//! ```

mod promises;
pub(crate) mod rig;

use std::any::Any;

use pserver_core::port::Transport;
use pserver_core::wire::Address;

use rig::ConformanceRig;

/// Two transports that can reach each other.
pub struct TransportPair {
    /// The one that connects.
    pub near: Box<dyn Transport>,
    /// The one that is connected to.
    pub far: Box<dyn Transport>,
    /// The address of lane zero of `far`.
    pub address: Address,
    /// Receives of one connection that overlap under load, at least.
    pub landings: usize,
    /// Whether the receiver checks for non-finite elements.
    pub looks: bool,
    /// A guard, such as a listener's, that must live as long; dropped last.
    pub keep: Box<dyn Any>,
}

impl TransportPair {
    /// Two transports without a guard, and without overlapping receives.
    #[must_use]
    pub fn new(near: Box<dyn Transport>, far: Box<dyn Transport>, address: Address) -> Self {
        let keep = Box::new(());
        Self { near, far, address, landings: 1, looks: true, keep }
    }

    /// The pair without checks for non-finite elements, because a device moves the bytes.
    #[must_use]
    pub fn blind(self) -> Self {
        Self { looks: false, ..self }
    }

    /// The pair with so many overlapping receives.
    #[must_use]
    pub fn landing(self, landings: usize) -> Self {
        Self { landings, ..self }
    }
}

/// Checks every promise with a fresh pair.
///
/// # Panics
/// When a promise is broken; the line printed before names it.
pub fn check(make: impl Fn() -> TransportPair) {
    for (name, promise) in promises::ALL {
        println!("promise: {name}");
        promise(&mut ConformanceRig::new(make()));
    }
}
