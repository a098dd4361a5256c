//! Tests of calls over loopback, against the sessions of `pserver_core::server` on threads of the test.

mod calls;
mod packing;
mod rows;
mod servers;
mod views;
