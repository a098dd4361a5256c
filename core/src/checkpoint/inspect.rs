//! Report on a shard's directory or a model file, for operators, with the reaction of a server to it.
//!
//! The verdict on a shard comes from the code that a restart runs, so both agree.

use std::fmt;

use super::cursor::digest;
use super::journal::{self, ReplayOptions, replay};
use super::load::{load_latest, verify, verify_file, walk};
use super::manifest::{self, CheckpointName, Manifest};
use super::owner::ShardIdentity;
use super::storage::Storage;
use super::tensors::{FileTensor, read_header};
use crate::error::Failure;

/// The reaction of a server to the inspected files, from the best to the worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum InspectVerdict {
    /// Everything is as it was written.
    #[default]
    Sound,
    /// A server starts, and warns of damaged or missing files.
    Warned,
    /// A server refuses to start; a model cannot be read.
    Refused,
}

/// The result of an inspection. It prints a line for every checkpoint, file, tensor and journal, and the verdict in its
/// last line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InspectReport {
    lines: Vec<String>,
    faults: Vec<String>,
    verdict: InspectVerdict,
}

/// Reads a shard's directory, or a model file, to its last byte.
///
/// # Errors
/// When there is nothing to report on. Damage is part of the report.
pub fn inspect(storage: &dyn Storage, path: &str) -> Result<InspectReport, Failure> {
    let mut report = InspectReport::default();
    match storage.list(path) {
        Ok(names) if !names.is_empty() => {
            let is_none = report.directory(storage, path)?;
            if is_none {
                return Err(Failure::Call(format!("{path:?} holds neither a checkpoint nor a journal")));
            }
        }
        // A path that cannot be listed may be a file, and an empty one may not exist: opening it decides.
        _ => report.model(storage, path)?,
    }
    Ok(report)
}

/// The shard that the files of a directory name: the newest valid manifest, else the newest valid segment; none where
/// there is neither.
#[must_use]
pub fn identity_of(storage: &dyn Storage, directory: &str) -> Option<ShardIdentity> {
    let manifests = manifest::names(storage, directory).unwrap_or_default();
    let of = |name: &CheckpointName| Some(Manifest::read(storage, directory, *name).ok()?.of);
    manifests.iter().rev().find_map(of).or_else(|| journal::identity_of(storage, directory))
}

impl InspectReport {
    /// The reaction of a server.
    #[must_use]
    pub fn verdict(&self) -> InspectVerdict {
        self.verdict
    }

    /// Whether everything is as it was written.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.verdict == InspectVerdict::Sound
    }

    /// A line for people.
    pub fn note(&mut self, line: String) {
        self.lines.push(line);
    }

    /// Adds a line about a fault, and its severity.
    pub fn fault(&mut self, verdict: InspectVerdict, line: String) {
        self.verdict = self.verdict.max(verdict);
        self.faults.push(line.clone());
        self.lines.push(line);
    }

    /// Restores the shard as a restart does, without serving it; returns whether there was nothing to restore. With
    /// `identity`, files of another shard are refused as a server does.
    pub fn shard(&mut self, storage: &dyn Storage, directory: &str, identity: Option<&ShardIdentity>) -> bool {
        let loaded = match load_latest(storage, directory, identity, &mut |_| Ok(())) {
            Ok(loaded) => loaded,
            Err(failure) => {
                self.fault(InspectVerdict::Refused, format!("{directory}: {failure}"));
                return false;
            }
        };
        for reason in loaded.iter().flat_map(|loaded| &loaded.fell_back) {
            self.fault(InspectVerdict::Warned, format!("{directory}: an older checkpoint is used: {reason}"));
        }
        let from = loaded.as_ref().map_or(0, |loaded| loaded.journal_from);
        let reading = ReplayOptions { storage, directory, identity, from, accepts_torn_tail: false };
        match replay(&reading, &mut |_, _| Ok(())) {
            Ok(replayed) => {
                let checkpoint =
                    loaded.as_ref().map_or("no checkpoint".to_owned(), |loaded| format!("checkpoint {}", loaded.name));
                self.lines.push(format!("{directory}: {checkpoint}, then {replayed}"));
                replayed
                    .warnings()
                    .into_iter()
                    .for_each(|line| self.fault(InspectVerdict::Warned, format!("{directory}: {line}")));
                loaded.is_none() && replayed.records == 0
            }
            Err(failure) => {
                self.fault(InspectVerdict::Refused, format!("{directory}: {failure}"));
                false
            }
        }
    }

    fn directory(&mut self, storage: &dyn Storage, directory: &str) -> Result<bool, Failure> {
        match manifest::names(storage, directory) {
            Ok(names) => {
                names.into_iter().rev().for_each(|name| self.checkpoint(storage, directory, name));
            }
            Err(failure) => self.fault(InspectVerdict::Refused, failure.to_string()),
        }
        let is_none = self.shard(storage, directory, None);
        Ok(is_none
            && self.lines.len() == 1
            && !storage.list(directory)?.iter().any(|name| name.starts_with("journal-")))
    }

    fn checkpoint(&mut self, storage: &dyn Storage, directory: &str, name: CheckpointName) {
        let manifest = match Manifest::read(storage, directory, name) {
            Ok(manifest) => manifest,
            Err(failure) => {
                return self.lines.push(format!("checkpoint {name}: not whole: {failure}"));
            }
        };
        match verify(storage, directory, name) {
            Ok(_) => self.lines.push(format!("checkpoint {name}: whole")),
            // The verdict on a missing shard follows below, where the shard is restored.
            Err(failure) => self.lines.push(format!("checkpoint {name}: not whole: {failure}")),
        }
        let Manifest { of, journal_from, chunks, files, .. } = &manifest;
        self.lines.push(format!("  {of}, journal from {journal_from}, {chunks} chunks"));
        for file in files {
            let verdict = if verify_file(storage, directory, file).is_ok() { "good" } else { "BAD" };
            self.lines.push(format!("  {} {} bytes, digest {} {verdict}", file.name, file.bytes, file.blake3));
        }
        let walked = walk(storage, directory, &manifest, &mut |chunk| {
            for tensor in chunk.tensors {
                self.lines.push(format!("  {} version {}", describe(tensor), chunk.version));
            }
            Ok(())
        });
        if let Err(failure) = walked {
            self.lines.push(format!("  the list of its chunks ends here: {failure}"));
        }
    }

    fn model(&mut self, storage: &dyn Storage, path: &str) -> Result<(), Failure> {
        let mut reader = storage.open(path)?;
        let bytes = reader.len();
        match read_header(&mut *reader, path) {
            Err(failure) => self.fault(InspectVerdict::Refused, failure.to_string()),
            Ok(header) => {
                let (count, digest) = (header.tensors.len(), digest(reader)?.to_hex());
                self.lines.push(format!("{path}: {count} tensors in {bytes} bytes, digest {digest}"));
                self.lines.extend(header.metadata.iter().map(|(name, value)| format!("  {name} = {value}")));
                self.lines.extend(header.tensors.iter().map(|tensor| format!("  {}", describe(tensor))));
            }
        }
        Ok(())
    }
}

impl fmt::Display for InspectReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(formatter, "{line}"))?;
        let first = self.faults.first().map_or("", String::as_str);
        let count = self.faults.len();
        match self.verdict {
            InspectVerdict::Sound => writeln!(formatter, "verdict: sound"),
            InspectVerdict::Warned => writeln!(formatter, "verdict: a server starts with warnings ({count}): {first}"),
            InspectVerdict::Refused => writeln!(formatter, "verdict: refused ({count} faults): {first}"),
        }
    }
}

fn describe(tensor: &FileTensor) -> String {
    format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape)
}
