//! A file that a setting names: the configuration, or the job's token.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use pserver_core::error::Failure;
use pserver_transport::network::shared_token;

/// The bytes of a file that are read at most: a configuration has some thousand.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The text of a file, of a token's also where its path is that of a process outside this container.
///
/// # Errors
/// Names the file, and why it cannot be read.
pub fn open(path: &str) -> Result<String, Failure> {
    let path = Path::new(path);
    let text = read(path).or_else(|error| {
        let shared = shared_token(path).and_then(|secret| String::from_utf8(secret).ok());
        shared.ok_or(error)
    });
    text.map_err(|error| Failure::call(format!("the file {} cannot be read: {error}", path.display())))
}

/// The text of a file; an error also where it is longer than a configuration, such as a device without an end.
///
/// # Errors
/// Why it cannot be read.
pub fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if FILE_BYTES_MAX < text.len() as u64 {
        let reason = format!("found more than {FILE_BYTES_MAX} bytes; expected at most these");
        return Err(io::Error::new(ErrorKind::FileTooLarge, reason));
    }
    Ok(text)
}
