//! RDMA through libibverbs, which is opened when a program starts and need not be there.
//!
//! Not here yet: the transport. Read [`sys`]: the library as C sees it.

pub(crate) mod sys;
