//! `pserver predict`: the forward part of a program, with saved parameters, on a file of data.
//!
//! Not here: which ops are run, and the formats of files ([`pserver_trainer`]).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use pserver_client::console;
use pserver_trainer::{DataSet, ForwardRun, read_model, read_program, table, write_tensors};

/// Arguments of `pserver predict`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The program: text, or protobuf in a file that ends in .pb.
    program: PathBuf,
    /// The parameters by name: a safetensors file, such as `pserver train --save` writes.
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// The data: .safetensors, .npz or .csv, as for `pserver train`; only what the results need.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// The variables to compute.
    #[arg(long, value_name = "NAME", required = true, value_delimiter = ',')]
    fetch: Vec<String>,
    /// Rows of one run; all when not given. With several runs the results are put one after another.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// The file of results: .safetensors, .npz or .csv. Without it they are printed as CSV.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Computes the variables and writes or prints them.
///
/// # Errors
/// When a file cannot be read or written; when the program, the parameters and the data do not fit together.
pub fn run(args: &Args) -> Result<()> {
    let shown = || args.program.display().to_string();
    let forward = ForwardRun::new(read_program(&args.program)?.program(), &args.fetch).with_context(shown)?;
    let data = DataSet::read(&args.data, forward.graph())?;
    if data.rows() == 0 {
        bail!("{}: found no rows that {} needs; expected one or more", args.data.display(), args.fetch.join(", "));
    }
    let values = read_model(&args.model)?;
    let batch = args.batch.map(usize::try_from).transpose()?;
    let results = forward.predict(&values, &data, batch).with_context(|| args.model.display().to_string())?;
    match &args.output {
        Some(path) => Ok(write_tensors(path, &results)?),
        None => Ok(console::print(table(&results)?)?),
    }
}
