//! The list of a checkpoint's files, written last: a checkpoint is whole when its manifest is.

use serde::{Deserialize, Serialize};

use super::storage::{Storage, join};
use crate::error::Failure;

/// The format of everything in a checkpoint. A change that an older program would misread adds one.
pub(super) const FORMAT: u32 = 1;

/// Far above any manifest: a part of a checkpoint costs it about 150 bytes.
const MANIFEST_BYTES_MAX: u64 = 16 * 1024 * 1024;
const PREFIX: &str = "checkpoint-";
const SUFFIX: &str = ".json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) number: u64,
    /// Hexadecimal.
    pub(super) catalogue: String,
    pub(super) journal_from: u64,
    pub(super) chunks: u64,
    /// The data files in order, then the chunk table.
    pub(super) files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Hexadecimal.
    pub(super) blake3: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    /// Of the manifest's compact JSON, hexadecimal.
    blake3: String,
}

/// Just enough of any format to say that it is too new.
#[derive(Deserialize)]
struct Versioned {
    manifest: Format,
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

impl Manifest {
    pub(super) fn encode(&self) -> Vec<u8> {
        let compact = serde_json::to_vec(self).expect("a manifest is plain data");
        let sealed = Sealed { manifest: self.clone(), blake3: blake3::hash(&compact).to_hex().to_string() };
        let mut text = serde_json::to_vec_pretty(&sealed).expect("a manifest is plain data");
        text.push(b'\n');
        text
    }

    /// Reads the manifest of checkpoint `number`, or says why it cannot be trusted.
    pub(super) fn read(storage: &dyn Storage, directory: &str, number: u64) -> Result<Self, Failure> {
        let path = join(directory, &manifest_name(number));
        let mut reader = storage.open(&path)?;
        if reader.len() > MANIFEST_BYTES_MAX {
            return Err(Failure::Call(format!("{path:?} has {} bytes; a manifest is shorter", reader.len())));
        }
        let mut text = vec![0; usize::try_from(reader.len()).expect("bounded above")];
        reader.read_at(0, &mut text)?;
        Self::decode(&text, number).map_err(|what| Failure::Call(format!("{path:?} {what}")))
    }

    fn decode(text: &[u8], number: u64) -> Result<Self, String> {
        let format = serde_json::from_slice::<Versioned>(text)
            .map_err(|error| format!("is not a manifest: {error}"))?
            .manifest
            .format;
        if format != FORMAT {
            return Err(format!("is of format {format}; this program reads format {FORMAT}"));
        }
        let sealed: Sealed = serde_json::from_slice(text).map_err(|error| format!("is not a manifest: {error}"))?;
        // Byte for byte what would be written today, so that no flipped bit goes unseen, be it in a space.
        if sealed.manifest.encode() != text {
            return Err("does not agree with its own digest".to_owned());
        }
        sealed.manifest.check_names(number)?;
        Ok(sealed.manifest)
    }

    /// The names are claims too: they may only be those of this checkpoint's own files.
    fn check_names(&self, number: u64) -> Result<(), String> {
        if self.number != number {
            return Err(format!("is the manifest of checkpoint {}", self.number));
        }
        let parts = self.files.len().saturating_sub(1);
        let expected = (0..parts).map(|part| data_name(number, part)).chain([chunks_name(number)]);
        if self.files.iter().map(|file| file.name.as_str()).eq(expected.collect::<Vec<_>>().iter().map(String::as_str))
        {
            return Ok(());
        }
        Err("does not list the files of its checkpoint".to_owned())
    }
}

/// The numbers of the checkpoints in a directory that have a manifest, rising.
pub(super) fn numbers(storage: &dyn Storage, directory: &str) -> Result<Vec<u64>, Failure> {
    let mut numbers: Vec<u64> = storage
        .list(directory)?
        .iter()
        .filter_map(|name| number_of(name).filter(|number| *name == manifest_name(*number)))
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The checkpoint that a file of this name belongs to, whole or not.
pub(super) fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.get(..20)?;
    if digits.bytes().all(|digit| digit.is_ascii_digit()) { digits.parse().ok() } else { None }
}

pub(super) fn manifest_name(number: u64) -> String {
    format!("{PREFIX}{number:020}{SUFFIX}")
}

pub(super) fn chunks_name(number: u64) -> String {
    format!("{PREFIX}{number:020}.chunks")
}

pub(super) fn data_name(number: u64, part: usize) -> String {
    format!("{PREFIX}{number:020}-{part:05}.safetensors")
}
