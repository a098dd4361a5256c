//! Standard output and standard error of a program.
//!
//! Either may be closed, or a file on a full disk, and the macros of the standard library panic then. Here a result
//! that cannot be written is an error, and a remark that cannot be written is left out.

use std::error::Error;
use std::fmt::{self, Display};
use std::io::{self, ErrorKind, Write};

/// A result that standard output did not take.
#[derive(Debug)]
pub struct OutputError(io::Error);

impl OutputError {
    /// Whether its reader has closed the pipe, such as `head` with enough lines: then nobody waits for an explanation.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.kind() == ErrorKind::BrokenPipe
    }
}

impl Display for OutputError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("writing to standard output")
    }
}

impl Error for OutputError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

/// Writes a result to standard output, whole.
///
/// # Errors
/// Standard output is closed or full.
pub fn print(text: impl Display) -> Result<(), OutputError> {
    let mut output = io::stdout().lock();
    output.write_all(text.to_string().as_bytes()).and_then(|()| output.flush()).map_err(OutputError)
}

/// Writes a line to standard error, in one piece, if that takes it.
pub fn remark(text: impl Display) {
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}
