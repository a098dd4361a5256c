//! `pserver convert`: programs between text and protobuf.

use anyhow::{Context, Result, bail};
use pserver_trainer::read_program;

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
