//! Report on a shard's directory or a model file, for operators, with the reaction of a server to it.
//!
//! The verdict on a shard comes from the code that a restart runs, so both agree.

use std::fmt;

use super::coordinator;
use super::cursor::digest;
use super::journal::{self, ReplayOptions, replay};
use super::load::{load_latest, verify_file, walk};
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

/// The kind of a fault; of several the last in this order names the verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum InspectCause {
    /// Bytes are not as they were written, or acknowledged bytes are missing.
    #[default]
    Damaged,
    /// All files of a shard are gone.
    Missing,
    /// The files of another shard or server are in the directory.
    Misplaced,
    /// A newer program wrote the files.
    NewerFormat,
}

/// The result of an inspection. It prints its [`summary`](Self::summary), then a line for every checkpoint, file,
/// tensor and journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InspectReport {
    /// The inspected thing, such as `4 shards of 2 servers`.
    subject: String,
    lines: Vec<String>,
    faults: Vec<String>,
    verdict: InspectVerdict,
    cause: InspectCause,
    /// A file of a newer program.
    newer: Option<String>,
    /// A server that runs and writes the files.
    user: Option<String>,
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

    /// Names the inspected thing.
    pub fn is_about(&mut self, subject: String) {
        self.subject = subject;
    }

    /// Notes a server that runs, in words: its files change while they are read, so a fault may be of the moment.
    pub fn is_used_by(&mut self, user: String) {
        self.lines.insert(0, format!("{user} runs and writes to it"));
        if self.verdict > InspectVerdict::Sound {
            self.verdict = InspectVerdict::Warned;
        }
        self.user.get_or_insert(user);
    }

    /// Adds a line about a fault, its severity and its kind.
    pub fn fault(&mut self, verdict: InspectVerdict, cause: InspectCause, line: String) {
        self.verdict = self.verdict.max(verdict);
        self.cause = self.cause.max(cause);
        self.faults.push(line.clone());
        self.lines.push(line);
    }

    /// The verdict in one line: a word for the state, the reaction of a server, the first fault, the remedy.
    #[must_use]
    pub fn summary(&self) -> String {
        let count = match self.faults.len() {
            1 => "1 fault".to_owned(),
            count => format!("{count} faults"),
        };
        let first = self.newer.as_ref().or(self.faults.first()).map_or("", String::as_str);
        let subject = &self.subject;
        match (&self.user, self.verdict) {
            (Some(user), InspectVerdict::Sound) => return format!("sound: {subject}, as written; {user} runs"),
            (Some(user), _) => {
                return format!(
                    "in use: {subject}; {user} runs and writes to it, so this may be of the moment ({count}): {first}. \
                     To do: inspect it again when the server has stopped"
                );
            }
            (None, _) => {}
        }
        let reaction = match self.verdict {
            InspectVerdict::Sound => return format!("sound: {subject}, as written; a server starts with all of it"),
            InspectVerdict::Warned => format!("a server starts, and warns ({count})"),
            InspectVerdict::Refused => format!("a server refuses it ({count})"),
        };
        let (word, remedy) = match (self.cause, self.verdict) {
            (InspectCause::NewerFormat, _) => {
                ("newer format", ". To do: use the program that wrote it, or a newer one")
            }
            (InspectCause::Misplaced, _) => ("misplaced", ". To do: bring each directory back to its own place"),
            // The fault's text says it.
            (InspectCause::Missing, _) => ("missing", ""),
            (InspectCause::Damaged, InspectVerdict::Refused) => {
                ("damaged", ". To do: bring the file back from a copy, or begin anew in another directory")
            }
            (InspectCause::Damaged, _) => {
                ("damaged", ". To do: start the servers; keep a copy first if the loss is to be examined")
            }
        };
        format!("{word}: {subject}; {reaction}: {first}{remedy}")
    }

    /// Restores the shard as a restart does, without serving it; returns whether there was nothing to restore. With
    /// `identity`, files of another shard are refused as a server does.
    pub fn shard(&mut self, storage: &dyn Storage, directory: &str, identity: Option<&ShardIdentity>) -> bool {
        let cause = self.cause_in(storage, directory, identity);
        let loaded = match load_latest(storage, directory, identity, &mut |_| Ok(())) {
            Ok(loaded) => loaded,
            Err(failure) => {
                self.fault(InspectVerdict::Refused, cause, format!("{directory}: {failure}"));
                return false;
            }
        };
        for reason in loaded.iter().flat_map(|loaded| &loaded.fell_back) {
            self.fault(InspectVerdict::Warned, cause, format!("{directory}: an older checkpoint is used: {reason}"));
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
                    .for_each(|line| self.fault(InspectVerdict::Warned, cause, format!("{directory}: {line}")));
                loaded.is_none() && replayed.records == 0
            }
            Err(failure) => {
                self.fault(InspectVerdict::Refused, cause, format!("{directory}: {failure}"));
                false
            }
        }
    }

    /// The kind of a fault that is found in a directory. With `identity` files of another shard are misplaced.
    pub fn cause_in(
        &mut self,
        storage: &dyn Storage,
        directory: &str,
        identity: Option<&ShardIdentity>,
    ) -> InspectCause {
        if let Some(newer) = newer_file(storage, directory) {
            self.newer.get_or_insert(newer);
            return InspectCause::NewerFormat;
        }
        let found = identity.and_then(|own| Some((own, identity_of(storage, directory)?)));
        if found.is_some_and(|(own, found)| found != *own) { InspectCause::Misplaced } else { InspectCause::Damaged }
    }

    fn directory(&mut self, storage: &dyn Storage, directory: &str) -> Result<bool, Failure> {
        match manifest::names(storage, directory) {
            Ok(names) => {
                names.into_iter().rev().for_each(|name| self.checkpoint(storage, directory, name));
            }
            Err(failure) => self.fault(InspectVerdict::Refused, InspectCause::Damaged, failure.to_string()),
        }
        self.is_about("1 shard".to_owned());
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
        let Manifest { of, journal_from, chunks, files, .. } = &manifest;
        let verified: Vec<_> = files.iter().map(|file| verify_file(storage, directory, file)).collect();
        let mut tensors = Vec::new();
        let walked = walk(storage, directory, &manifest, &mut |chunk| {
            let described = |tensor| format!("  {} version {}", describe(tensor), chunk.version);
            tensors.extend(chunk.tensors.iter().map(described));
            Ok(())
        });
        // The verdict on a missing shard follows below, where the shard is restored.
        let fault = verified.iter().chain([&walked]).find_map(|checked| checked.as_ref().err());
        let state = fault.map_or("whole".to_owned(), |failure| format!("not whole: {failure}"));
        self.lines.push(format!("checkpoint {name}: {state}"));
        self.lines.push(format!("  {of}, journal from {journal_from}, {chunks} chunks"));
        for (file, verified) in files.iter().zip(&verified) {
            let state = if verified.is_ok() { "good" } else { "BAD" };
            self.lines.push(format!("  {} {} bytes, digest {} {state}", file.name, file.bytes, file.blake3));
        }
        self.lines.append(&mut tensors);
        if let Err(failure) = walked {
            self.lines.push(format!("  the list of its chunks ends here: {failure}"));
        }
    }

    fn model(&mut self, storage: &dyn Storage, path: &str) -> Result<(), Failure> {
        let mut reader = storage.open(path)?;
        let bytes = reader.len();
        self.is_about(format!("a file of {bytes} bytes"));
        storage.expect(bytes);
        match read_header(&mut *reader, path) {
            Err(failure) => self.fault(InspectVerdict::Refused, InspectCause::Damaged, failure.to_string()),
            Ok(header) => {
                let (count, digest) = (header.tensors.len(), digest(reader)?.to_hex());
                self.is_about(format!("a model of {count} tensors in {bytes} bytes"));
                self.lines.push(format!("{path}: {count} tensors in {bytes} bytes, digest {digest}"));
                self.lines.extend(header.metadata.iter().map(|(name, value)| format!("  {name} = {value}")));
                self.lines.extend(header.tensors.iter().map(|tensor| format!("  {}", describe(tensor))));
            }
        }
        Ok(())
    }
}

/// A file in the directory of a server or shard whose format only newer programs read, in words.
#[must_use]
pub fn newer_file(storage: &dyn Storage, directory: &str) -> Option<String> {
    let checks = [manifest::newer_file, journal::newer_file, coordinator::newer_file];
    checks.iter().find_map(|check| check(storage, directory))
}

impl fmt::Display for InspectReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{}", self.summary())?;
        self.lines.iter().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

fn describe(tensor: &FileTensor) -> String {
    format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape)
}
