//! `pserver import-paddle`: a training program of PaddlePaddle as a program of ours, as text.
//!
//! Not here: the mapping ([`pserver_program::import_paddle`]); training.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pserver_client::console;
use pserver_program::{Graph, PaddleImport, import_paddle_given};
use pserver_trainer::{ValueFile, program_bytes};

/// Arguments of `pserver import-paddle`.
#[derive(clap::Args, Clone, Debug)]
pub struct ImportPaddleArgs {
    /// The main program after `minimize`: the bytes of `program.desc.serialize_to_string()`.
    main: PathBuf,
    /// The startup program, in the same form.
    startup: PathBuf,
    /// The parameters' initial values, by name: .safetensors or .npz. Ops given take them in place of the startup
    /// program's initializers; pserver train needs the same --values.
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// Write the program to this file instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Prints or writes the program, and to standard error what was mapped, dropped or chosen.
///
/// # Errors
/// When a file cannot be read or written, or the program has something without a counterpart, which is named.
pub fn run(args: &ImportPaddleArgs) -> Result<()> {
    let (main, startup) = (program_bytes(&args.main)?, program_bytes(&args.startup)?);
    let values = args.values.as_deref().map(ValueFile::open).transpose()?;
    let has_value = |name: &str| values.as_ref().is_some_and(|values| values.has(name));
    let imported = import_paddle_given(&main, &startup, has_value);
    let PaddleImport { program, loss, report } = imported.with_context(|| args.main.display().to_string())?;
    if let (Some(values), Some(path)) = (values, &args.values) {
        let graph = Graph::new(program.clone())?;
        if graph.given_names().next().is_none() {
            bail!(
                "--values {}: found values of no parameter; expected names such as those in the report",
                path.display()
            );
        }
        graph.with_values(Arc::new(values)).with_context(|| format!("--values {}", path.display()))?;
    }
    report.iter().for_each(console::remark);
    console::remark(format_args!("loss: {loss}"));
    match &args.output {
        Some(path) => std::fs::write(path, program.to_string()).with_context(|| path.display().to_string()),
        None => Ok(console::print(program)?),
    }
}
