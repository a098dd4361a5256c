//! Parent-death signal: a child's standard input is a pipe that only the parent keeps open, so the pipe closes however
//! the parent ends, and no child outlives its parent.

use std::io::{self, BufRead};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Reads standard input for as long as this process lives. Lines go to the receiver; when the input ends, `closed`
/// is called, once, on a thread of its own.
///
/// # Errors
/// The thread cannot be started.
pub fn watch(closed: impl FnOnce() + Send + 'static) -> io::Result<Receiver<String>> {
    // The parent writes one line in a child's life; a second one would block until the first is received.
    let (sender, lines) = sync_channel(1);
    thread::Builder::new().name("parent-death".to_owned()).spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            // A dropped receiver does not end the watch.
            let _ = sender.send(line);
        }
        closed();
    })?;
    Ok(lines)
}
