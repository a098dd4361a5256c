//! Interrupts of blocking calls: a function of the program that a waiting call asks whether it is to end.
//!
//! A language with handlers for signals of its own, such as Python, runs them in one thread between two steps of its
//! programs. While that thread waits in a call, the call asks this function, and the function runs the handlers.

use std::sync::OnceLock;
use std::time::Duration;

/// Longest time between two questions of a waiting call.
pub(super) const INTERRUPTS_ASKED: Duration = Duration::from_millis(20);

static ASK: OnceLock<fn() -> bool> = OnceLock::new();

/// Makes every blocking call of this process ask `ask`, on its own thread and at least every 40 ms while it waits,
/// whether it is to end; true cancels the call. `ask` holds no lock of a client meanwhile and may make other calls. The
/// first function that is given stays.
pub fn ask_while_waiting(ask: fn() -> bool) {
    let _ = ASK.set(ask);
}

/// The function, if there is one.
pub(super) fn asked() -> Option<fn() -> bool> {
    ASK.get().copied()
}
