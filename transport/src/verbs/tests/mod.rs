//! Tests of verbs beyond the common suite, over the software device and, where there is one, over a real device.

mod answers;
mod copies;
mod failures;
mod fallback;
mod false_library;
pub(super) mod fixtures;
mod hostile_client;
mod hosts;
mod real;
