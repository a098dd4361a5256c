//! Standard output of `cargo ci`. A line that it does not take, such as one for `head` with enough of them, is left
//! out: the exit status says whether a task succeeded.

use std::fmt::Arguments;
use std::io::Write;

/// Prints a line, as `println!` does for an output that takes it.
macro_rules! say {
    ($($text:tt)*) => { $crate::console::say(format_args!($($text)*)) };
}

/// Prints a line, in one piece.
pub(crate) fn say(text: Arguments<'_>) {
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(format!("{text}\n").as_bytes()).and_then(|()| output.flush());
}
