//! Programs in files: the text form, or protobuf in files that end in `.pb`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_BYTES_MAX;
use pserver_program::{Graph, Program};

/// Reads and checks a program. A file that does not end in `.pb` and is not UTF-8 is read as protobuf, too.
///
/// # Errors
/// When the file cannot be read, is too long, or is not a program; of text with the position.
pub fn read_program(path: &Path) -> Result<Graph, Failure> {
    let shown = path.display();
    let bytes = program_bytes(path)?;
    let is_protobuf = path.extension().is_some_and(|extension| extension == "pb");
    if let (Ok(text), false) = (std::str::from_utf8(&bytes), is_protobuf) {
        let (program, positions) = Program::read(text, Some(&shown.to_string()))?;
        return Graph::located(program, positions);
    }
    Program::decode(&bytes).and_then(Graph::new).map_err(|failure| Failure::call(format!("{shown}: {failure}")))
}

/// The bytes of a file, at most as many as a program may have.
///
/// # Errors
/// When the file cannot be read or is too long.
pub fn program_bytes(path: &Path) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    let refuse = |error: std::io::Error| Failure::call(format!("{shown}: {error}"));
    let mut bytes = Vec::new();
    // A device has no length, and some have no end.
    let bounded = File::open(path).map_err(refuse)?.take(PROGRAM_BYTES_MAX as u64 + 1);
    { bounded }.read_to_end(&mut bytes).map_err(refuse)?;
    if bytes.len() > PROGRAM_BYTES_MAX {
        let found = format!("found more than {PROGRAM_BYTES_MAX} bytes; expected at most these");
        return Err(Failure::call(format!("{shown}: {found}")));
    }
    Ok(bytes)
}
