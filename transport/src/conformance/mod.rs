//! What every transport promises, as one suite. A backend's own test is five lines:
//!
//! ```
//! use pserver_transport::{conformance, loopback};
//!
//! conformance::check(|| {
//!     let (near, far, address) = loopback::pair();
//!     conformance::Ends::new(Box::new(near), Box::new(far), address)
//! });
//! ```

mod promises;
pub(crate) mod world;

use std::any::Any;

use pserver_core::port::Transport;
use pserver_core::wire::Address;

use world::World;

/// Two transports that can reach each other.
pub struct Ends {
    /// The one that connects.
    pub near: Box<dyn Transport>,
    /// The one that is connected to.
    pub far: Box<dyn Transport>,
    /// Where `near` finds lane zero of `far`.
    pub address: Address,
    /// Frames of one connection that land at once under load, at least.
    pub landings: usize,
    /// What must live as long as the two, such as a listener; dropped last.
    pub keep: Box<dyn Any>,
}

impl Ends {
    /// Two transports that need nothing else to live, and land one frame after the other.
    #[must_use]
    pub fn new(near: Box<dyn Transport>, far: Box<dyn Transport>, address: Address) -> Self {
        let keep = Box::new(());
        Self { near, far, address, landings: 1, keep }
    }

    /// The same, of which so many frames land at once.
    #[must_use]
    pub fn landing(self, landings: usize) -> Self {
        Self { landings, ..self }
    }
}

/// Holds every promise against fresh ends.
///
/// # Panics
/// When one is not kept; the line printed before names it.
pub fn check(make: impl Fn() -> Ends) {
    for (name, promise) in promises::ALL {
        println!("promise: {name}");
        promise(&mut World::new(make()));
    }
}
