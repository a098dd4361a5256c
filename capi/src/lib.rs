//! C library: the functions of `pserver_client` that C programs call, in four editions.
//!
//! Not here: a trainer's calls themselves (`pserver_client`), the server (`pserver_node`), the `pserver` program
//! (`pserver_cli`).

// cbindgen copies comments into the header, where `dst[i]` is C and not a link.
#![allow(rustdoc::broken_intra_doc_links)]

pub mod api;
