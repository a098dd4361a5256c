//! The plan of a training: its program and its data, read and checked before any process starts.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use pserver_core::checksum::checksum;
use pserver_program::Graph;
use pserver_trainer::{DataSet, ForwardRun, ValueFile, check_scalar, read_program, trainable};

use super::Args;
use crate::program_file::optimizer_text;

/// A program and its data.
pub(super) struct TrainingPlan {
    pub(super) graph: Graph,
    pub(super) data: DataSet,
    pub(super) validation: Option<Validation>,
    /// The loss, then the metrics.
    pub(super) watched: Vec<String>,
    /// The checksum of the program's text, before gradients and optimizer are added.
    pub(super) checksum: u32,
}

/// The forward part of the loss and the metrics, and the rows on which it is run in the end.
pub(super) struct Validation {
    pub(super) forward: ForwardRun,
    pub(super) data: DataSet,
}

impl TrainingPlan {
    pub(super) fn new(args: &Args) -> Result<Self> {
        let shown = || args.program.display().to_string();
        let program = read_program(&args.program)?;
        program.check_initialised()?;
        let program = program.into_program();
        let checksum = checksum(program.to_string().as_bytes());
        let optimizer = args.optimizer.as_deref().map(optimizer_text).transpose()?;
        let graph = trainable(program.clone(), &args.loss, optimizer.as_deref()).with_context(shown)?;
        let graph = with_values(graph, args.values.as_deref())?;
        for metric in &args.metrics {
            check_scalar(&graph, metric, "the metric").with_context(shown)?;
        }
        let watched: Vec<String> = std::iter::once(&args.loss).chain(&args.metrics).cloned().collect();
        let mut data = DataSet::read(&args.data, &graph)?;
        data.check(&args.data, &graph)?;
        let validation = args.validation.as_deref().map(|source| {
            let forward = ForwardRun::new(&program, &watched).with_context(shown)?;
            let data = match source.parse::<f64>() {
                Ok(share) => data.split_off(held_out(share, data.rows())?),
                Err(_) => {
                    let (path, graph) = (Path::new(source), forward.graph());
                    let read = || {
                        let data = DataSet::read(path, graph)?;
                        data.check(path, graph).map(|()| data)
                    };
                    read().context("--validation")?
                }
            };
            ensure!(data.rows() > 0, "--validation {source}: found no rows; expected one or more");
            Ok(Validation { forward, data })
        });
        if let Some(path) = &args.save {
            check_save(path)?;
        }
        let validation = validation.transpose()?;
        Ok(Self { graph, data, validation, watched, checksum })
    }
}

/// The graph with the file's values for its ops `given`.
fn with_values(graph: Graph, file: Option<&Path>) -> Result<Graph> {
    let first = graph.given_names().next();
    match (file, first) {
        (None, None) => Ok(graph),
        (None, Some(name)) => bail!("found an op given(name={name:?}) and no values; expected --values FILE with them"),
        (Some(path), None) => bail!("--values {}: found no op given in the program; expected one", path.display()),
        (Some(path), Some(_)) => {
            let values = ValueFile::open(path)?;
            graph.with_values(Arc::new(values)).with_context(|| format!("--values {}", path.display()))
        }
    }
}

/// How many of the last rows are held out.
fn held_out(share: f64, rows: usize) -> Result<usize> {
    if !(0.0 < share && share < 1.0) {
        bail!("--validation {share}: expected a share above 0 and below 1, or a file");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is below 1")]
    let held_out = (rows as f64 * share).round() as usize;
    Ok(held_out)
}

/// Refuses a model's path before hours of training.
fn check_save(path: &Path) -> Result<()> {
    let shown = path.display();
    ensure!(
        path.extension().is_some_and(|extension| extension == "safetensors"),
        "--save {shown}: expected a file that ends in .safetensors"
    );
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "--save {shown}: found no folder {}; expected one", folder.display());
    ensure!(!path.is_dir(), "--save {shown}: found a folder; expected a file, which may be there");
    // A folder may take no files for many reasons, such as a disk that is mounted to be read.
    let tried = tempfile::NamedTempFile::new_in(folder).map(drop);
    tried.with_context(|| format!("--save {shown}: the folder {} takes no files", folder.display()))
}
