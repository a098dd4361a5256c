//! The record of a training beside its checkpoints: what a resumed training must repeat, so that it goes on with the
//! rows after those of its last step.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pserver_client::console;
use serde::{Deserialize, Serialize};

use super::Args;
use super::plan::TrainingPlan;

const FILE: &str = "training.json";

/// How a training counts its steps and orders its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct TrainingRecord {
    /// Rows that it trains on.
    rows: usize,
    batch: u32,
    shuffle: Option<u64>,
    /// None in the record of an earlier version, as the next.
    #[serde(default)]
    loss: Option<String>,
    /// The checksum of the program's text, before gradients and optimizer are added.
    #[serde(default)]
    program: Option<u32>,
}

/// Writes the record of a new training, or compares that of a resumed one.
pub(super) fn keep_or_check(args: &Args, plan: &TrainingPlan, folder: &Path) -> Result<()> {
    let own = TrainingRecord {
        rows: plan.data.rows(),
        batch: args.batch,
        shuffle: args.shuffle,
        loss: Some(args.loss.clone()),
        program: Some(plan.checksum),
    };
    let path = folder.join(FILE);
    let shown = path.display();
    if !args.processes.resume {
        std::fs::create_dir_all(folder).with_context(|| format!("--checkpoint {}", folder.display()))?;
        let text = serde_json::to_string_pretty(&own)?;
        return std::fs::write(&path, text).with_context(|| format!("writing {shown}"));
    }
    if let Some(values) = &args.values {
        let values = values.display();
        console::remark(format_args!("--values {values}: no effect beside --resume; the checkpoint has the values"));
    }
    if !path.exists() {
        let text = "the training of an earlier version, which kept no record of program, loss, rows, batch and shuffle";
        console::remark(format_args!("--resume: found no {shown}, as in {text}; expected the same ones"));
        return Ok(());
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {shown}"))?;
    let kept: TrainingRecord = serde_json::from_str(&text).with_context(|| format!("reading {shown}"))?;
    own.check(&kept, args)
}

impl TrainingRecord {
    fn check(&self, kept: &Self, args: &Args) -> Result<()> {
        let remedy = "or a new folder, which trains from the start";
        if let (Some(own), Some(kept)) = (self.program, kept.program) {
            let shown = args.program.display();
            ensure!(
                own == kept,
                "{shown}: found a program whose text has the checksum {own:08x}; that of the training in the \
                 checkpoint has {kept:08x}; expected the same program, {remedy}"
            );
        }
        if let (Some(own), Some(kept)) = (&self.loss, &kept.loss) {
            let found = "the training in the checkpoint has the loss";
            ensure!(own == kept, "--loss {own}: {found} {kept}; expected --loss {kept}, {remedy}");
        }
        ensure!(
            self.batch == kept.batch,
            "--batch {}: the training in the checkpoint has steps of {} rows, by which its epochs are counted; \
             expected --batch {}, {remedy}",
            self.batch,
            kept.batch,
            kept.batch
        );
        let named = |seed: Option<u64>| seed.map_or("no --shuffle".to_owned(), |seed| format!("--shuffle {seed}"));
        ensure!(
            self.shuffle == kept.shuffle,
            "found {}: the training in the checkpoint has {}, which gives the order of rows; expected the \
             same, {remedy}",
            named(self.shuffle),
            named(kept.shuffle)
        );
        ensure!(
            self.rows == kept.rows,
            "--data: found {} rows to train on, without those of --validation; the training in the checkpoint has {}, \
             by which its epochs are counted; expected as many, {remedy}",
            self.rows,
            kept.rows
        );
        Ok(())
    }
}
