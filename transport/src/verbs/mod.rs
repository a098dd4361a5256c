//! RDMA through libibverbs, which is opened when a program starts and need not be there.
//!
//! Not here yet: the transport. Read [`sys`] (the library as C sees it), then [`probe`] (what a device does with it).

mod probe;
pub(crate) mod sys;
