//! Memory of chunks: an arena mapped once, leases of its slots, and loans of a caller's own memory.
//!
//! Not here: files, devices, registration of memory with a network card, and allocation of chunk bytes after
//! [`Arena::new`]. Placement of chunks is in [`partition`](crate::partition).
//!
//! Read in this order: [`Budget`] (the reasons for memory), [`Arena`] (its mapping), [`Lease`] (access to one slot),
//! [`lend`] (access to a caller's memory), [`shared`] (memory of two processes), [`Buffer`] (a trainer's memory that
//! servers read in place). The reasoning is in `docs/MEMORY.md`.
//!
//! A lease moves. Its former owner cannot touch its bytes:
//!
//! ```compile_fail,E0382
//! use pserver_core::memory::{Arena, Budget, Lease};
//!
//! fn submit(_to_the_device: Lease) {}
//!
//! let mut budget = Budget::new();
//! budget.line("example", 64, 1);
//! let mut lease = Arena::new(&budget).unwrap().take(64).unwrap();
//! submit(lease);
//! lease.bytes_mut()[0] = 1; // the lease was moved to the device
//! ```
//!
//! A shared lease cannot be written:
//!
//! ```compile_fail,E0596
//! use pserver_core::memory::{Arena, Budget};
//! use std::sync::Arc;
//!
//! let mut budget = Budget::new();
//! budget.line("example", 64, 1);
//! let shared = Arc::new(Arena::new(&budget).unwrap().take(64).unwrap());
//! shared.bytes_mut()[0] = 1; // another owner of the `Arc` may be reading
//! ```

mod arena;
mod budget;
mod buffer;
mod callers;
mod free;
mod loan;
mod mapped;
mod prefetch;
pub mod shared;
mod slab;
mod value;

#[cfg(test)]
mod tests;

pub use arena::{Arena, ArenaUsage, Lease, Stretch, StretchMut};
pub use budget::{Budget, BudgetLine};
pub use buffer::{Buffer, Mapping};
pub use callers::LetGo;
pub use loan::{LendingMemory, LoanBook, LoanIn, LoanOut, lend};
pub use mapped::Mapped;
pub use prefetch::prefetch;
pub use shared::SharedRange;
pub use value::Value;
