//! `pserver import-paddle`: a training program of PaddlePaddle as a program of ours, as text.
//!
//! Not here: the mapping ([`pserver_program::import_paddle`]); training.

use std::path::PathBuf;

use anyhow::{Context, Result};
use pserver_program::{PaddleImport, import_paddle};

use crate::program_file::read_bytes;

/// Arguments of `pserver import-paddle`.
#[derive(clap::Args, Clone, Debug)]
pub struct ImportPaddleArgs {
    /// The main program after `minimize`: the bytes of `program.desc.serialize_to_string()`.
    main: PathBuf,
    /// The startup program, in the same form.
    startup: PathBuf,
    /// Write the program to this file instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Prints or writes the program, and to standard error what was mapped, dropped or chosen.
///
/// # Errors
/// When a file cannot be read or written, or the program has something without a counterpart, which is named.
pub fn run(args: &ImportPaddleArgs) -> Result<()> {
    let (main, startup) = (read_bytes(&args.main)?, read_bytes(&args.startup)?);
    let PaddleImport { program, loss, report } =
        import_paddle(&main, &startup).with_context(|| args.main.display().to_string())?;
    report.iter().for_each(|line| eprintln!("{line}"));
    eprintln!("loss: {loss}");
    match &args.output {
        Some(path) => std::fs::write(path, program.to_string()).with_context(|| path.display().to_string()),
        None => {
            print!("{program}");
            Ok(())
        }
    }
}
