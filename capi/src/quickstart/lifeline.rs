//! A child's hold on its parent: standard input is a pipe that only the parent keeps open, so it closes with the
//! parent, however the parent ends, and no child is left behind.

use std::io::{self, BufRead};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Reads standard input for as long as this process lives. Lines go to the receiver; when the input ends, `closed`
/// is called, once, on a thread of its own.
///
/// # Errors
/// When the system gives no thread.
pub fn watch(closed: impl FnOnce() + Send + 'static) -> io::Result<Receiver<String>> {
    // The parent says one thing in a child's life; with more, reading waits until somebody listens.
    let (sender, lines) = sync_channel(1);
    thread::Builder::new().name("lifeline".to_owned()).spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            // Nobody listening is no reason to stop watching.
            let _ = sender.send(line);
        }
        closed();
    })?;
    Ok(lines)
}
