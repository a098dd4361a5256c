//! The C boundary: four editions of one interface, as thin faces over one checked client.
//!
//! A face checks every pointer, calls one function of [`pserver_client`], and writes outputs only when that
//! succeeded. Panics and failures stop in `guard`, which keeps the text that `paddle_last_error` gives.
//!
//! Not here: what a call does ([`pserver_client`]), where a job is found ([`pserver_client::environment`]), the headers
//! (`capi/include`, made from these files by `capi/tests/header.rs`).
//!
//! Read in this order: [`sys`] (the C types), `checked` (claims become facts), `handles` (clients and calls that C can
//! only name), `places` (where parameters go), `staged` (contents on a device), `loaded` (a program that a client
//! trains), then the faces: [`shared`], [`rows`] and [`program`] by all editions, [`batch`], [`started`], [`tensors`],
//! [`states`] and [`memory`] by 2 and 3, [`edition1`], [`edition2`], [`edition3`], [`go`].

pub mod batch;
pub mod edition1;
pub mod edition2;
pub mod edition3;
pub mod go;
pub mod memory;
pub mod program;
pub mod rows;
pub mod shared;
pub mod started;
pub mod states;
pub mod sys;
pub mod tensors;

mod allocation;
mod checked;
mod guard;
mod handles;
mod loaded;
mod places;
mod session;
mod staged;
