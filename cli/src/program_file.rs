//! Programs and optimizers that a command line names; `pserver convert`: programs between text and protobuf.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use pserver_trainer::{program_bytes, read_program};

/// An optimizer's configuration, or the content of the file that is named.
pub(crate) fn optimizer_text(optimizer: &str) -> Result<String> {
    let path = Path::new(optimizer);
    // A configuration has a field's name, then a colon or a brace.
    let is_text = optimizer.contains([':', '{']) && !path.is_file();
    if is_text {
        return Ok(optimizer.to_owned());
    }
    let text = program_bytes(path).map_err(anyhow::Error::new).and_then(|bytes| Ok(String::from_utf8(bytes)?));
    text.with_context(|| {
        format!(
            "--optimizer {optimizer:?}: found neither a configuration such as \"const_lr {{ learning_rate: 0.1 }}\" \
             nor a file"
        )
    })
}

/// Arguments of `pserver convert`.
#[derive(clap::Args, Clone, Debug)]
pub struct ConvertArgs {
    /// The program: text, or protobuf in a file that ends in .pb.
    input: PathBuf,
    /// The converted program: protobuf where it ends in .pb, text where it ends in .program or .txt.
    output: PathBuf,
}

/// Converts a program between text and protobuf.
///
/// # Errors
/// When the input is not a program, or the output has another extension or cannot be written.
pub fn convert(args: &ConvertArgs) -> Result<()> {
    let graph = read_program(&args.input)?;
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
