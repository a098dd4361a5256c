//! C interface: four editions, each a thin layer over one checked client.
//!
//! A function of an edition checks every pointer, calls one function of [`pserver_client`], and writes outputs only
//! when that call succeeded. `guard` catches panics and failures, and keeps the text that `paddle_last_error` gives.
//!
//! Not here: the calls themselves ([`pserver_client`]), the discovery of a job ([`pserver_client::environment`]), the
//! headers (`capi/include`, generated from these files by `capi/tests/header.rs`).
//!
//! Read in this order: [`sys`] (the C types), `checked` (validation of arguments), `handles` (handles of clients and
//! calls), `places` (destinations of fetched parameters), `staged` (contents on a device), `loaded` (a program that a
//! client trains), then the functions: [`shared`], [`rows`] and [`program`] of all editions, [`batch`], [`started`],
//! [`tensors`], [`states`] and [`memory`] of 2 and 3, [`edition1`], [`edition2`], [`edition3`], [`go`].

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
