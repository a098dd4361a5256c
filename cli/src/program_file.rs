//! Programs in files: the text form, or protobuf in files that end in `.pb`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use pserver_core::limits::PROGRAM_BYTES_MAX;
use pserver_program::{Graph, Program};

/// Reads and checks a program. A file that does not end in `.pb` and is not UTF-8 is read as protobuf, too.
///
/// # Errors
/// When the file cannot be read, is too long, or is not a program; of text with the position.
pub fn read(path: &Path) -> Result<Graph> {
    let shown = path.display();
    let bytes = read_bytes(path)?;
    if let (Ok(text), false) = (std::str::from_utf8(&bytes), is_protobuf(path)) {
        let (program, positions) = Program::read(text, Some(&shown.to_string()))?;
        return Ok(Graph::located(program, positions)?);
    }
    Program::decode(&bytes).and_then(Graph::new).with_context(|| shown.to_string())
}

/// The bytes of a file, at most as many as a program may have.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let length = std::fs::metadata(path).with_context(|| shown.to_string())?.len();
    if length > PROGRAM_BYTES_MAX as u64 {
        bail!("{shown}: {length} bytes; expected at most {PROGRAM_BYTES_MAX}");
    }
    std::fs::read(path).with_context(|| shown.to_string())
}

/// Arguments of `pserver convert`.
#[derive(clap::Args, Clone, Debug)]
pub struct ConvertArgs {
    /// The program: text, or protobuf in a file that ends in .pb.
    input: std::path::PathBuf,
    /// The converted program: protobuf where it ends in .pb, text where it ends in .program or .txt.
    output: std::path::PathBuf,
}

/// Converts a program between text and protobuf.
///
/// # Errors
/// When the input is not a program, or the output has another extension or cannot be written.
pub fn convert(args: &ConvertArgs) -> Result<()> {
    let graph = read(&args.input)?;
    let program = graph.program();
    let output = args.output.display();
    let extension = args.output.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let bytes = match extension {
        "pb" => program.encode(),
        "program" | "txt" => program.to_string().into_bytes(),
        other => bail!("{output}: found the extension {other:?}; expected .pb, .program or .txt"),
    };
    std::fs::write(&args.output, bytes).with_context(|| output.to_string())
}

fn is_protobuf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "pb")
}
