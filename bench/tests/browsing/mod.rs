//! The browser of the watch page's tests, for the page of a report.

#![allow(dead_code, reason = "the other tests use the rest")]

#[path = "../../../node/tests/watching/browser.rs"]
pub(crate) mod browser;
#[path = "../../../node/tests/watching/program.rs"]
pub(crate) mod program;

use std::time::Duration;

/// The longest wait for an answer.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
