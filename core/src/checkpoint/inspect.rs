//! What a checkpoint directory or a model file holds, for people.

use std::fmt;

use super::journal::{Scan, segment_path, segments};
use super::load::{verify, verify_file, walk};
use super::manifest::{self, Manifest};
use super::source::digest;
use super::storage::Storage;
use super::tensors::{Tensor, read_header};
use crate::error::Failure;

/// What was found. It prints one line for every checkpoint, file, tensor and journal segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    lines: Vec<String>,
    faults: u64,
}

/// Reads a checkpoint directory, or a model file, to its last byte.
///
/// Damage is part of the report; a failure means that there is nothing to report on.
pub fn inspect(storage: &dyn Storage, path: &str) -> Result<Report, Failure> {
    let mut report = Report::default();
    match storage.list(path) {
        Ok(names) if !names.is_empty() => report.directory(storage, path)?,
        // What cannot be listed may be a file, and what is empty may not exist: opening it tells.
        _ => report.model(storage, path)?,
    }
    Ok(report)
}

impl Report {
    /// Whether everything is as it was written. A journal's unfinished last record is not a fault.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.faults == 0
    }

    fn directory(&mut self, storage: &dyn Storage, directory: &str) -> Result<(), Failure> {
        let numbers = manifest::numbers(storage, directory)?;
        let starts = segments(storage, directory)?;
        if numbers.is_empty() && starts.is_empty() {
            return Err(Failure::Call(format!("{directory:?} holds neither a checkpoint nor a journal")));
        }
        for number in numbers.into_iter().rev() {
            self.checkpoint(storage, directory, number);
        }
        for (index, start) in starts.iter().enumerate() {
            self.segment(storage, directory, *start, starts.get(index + 1).copied());
        }
        Ok(())
    }

    fn checkpoint(&mut self, storage: &dyn Storage, directory: &str, number: u64) {
        let manifest = match Manifest::read(storage, directory, number) {
            Ok(manifest) => manifest,
            Err(failure) => {
                return self.fault(format!("checkpoint {number}: not whole: {failure}"));
            }
        };
        match verify(storage, directory, number) {
            Ok(_) => self.lines.push(format!("checkpoint {number}: whole")),
            Err(failure) => self.fault(format!("checkpoint {number}: not whole: {failure}")),
        }
        let Manifest { catalogue, journal_from, chunks, files, .. } = &manifest;
        self.lines.push(format!("  catalogue {catalogue}, journal from {journal_from}, {chunks} chunks"));
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
            self.lines.push(format!("  its chunks cannot be listed further: {failure}"));
        }
    }

    fn segment(&mut self, storage: &dyn Storage, directory: &str, start: u64, end: Option<u64>) {
        let path = segment_path(directory, start);
        let mut records: u64 = 0;
        let scanned = Scan::open(storage, directory, start, end).and_then(|mut scan| {
            while scan.next()? {
                records += 1;
            }
            Ok(scan)
        });
        match scanned {
            Ok(scan) => {
                let tail = if scan.torn { ", then an unfinished one" } else { "" };
                self.lines.push(format!("{path}: {records} records to position {}{tail}", scan.position));
            }
            Err(failure) => self.fault(format!("{path}: {records} records, then: {failure}")),
        }
    }

    fn model(&mut self, storage: &dyn Storage, path: &str) -> Result<(), Failure> {
        let mut reader = storage.open(path)?;
        let bytes = reader.len();
        match read_header(&mut *reader, path) {
            Err(failure) => self.fault(failure.to_string()),
            Ok(header) => {
                let (count, digest) = (header.tensors.len(), digest(reader)?.to_hex());
                self.lines.push(format!("{path}: {count} tensors in {bytes} bytes, digest {digest}"));
                self.lines.extend(header.metadata.iter().map(|(name, value)| format!("  {name} = {value}")));
                self.lines.extend(header.tensors.iter().map(|tensor| format!("  {}", describe(tensor))));
            }
        }
        Ok(())
    }

    fn fault(&mut self, line: String) {
        self.faults += 1;
        self.lines.push(line);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

fn describe(tensor: &Tensor) -> String {
    format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape)
}
