//! Manifest: the list of a checkpoint's files. It is written last, so a checkpoint is whole when its manifest is.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::owner::{OwnerNumber, ShardIdentity, earlier_format, is_numbered_as_format_1, of_format_1};
use super::storage::{CHECKPOINT_PREFIX as PREFIX, Storage, join};
use crate::error::Failure;

/// Format version of checkpoints. A change that an older program would misread increments it.
pub(super) const FORMAT: u32 = 3;

/// Bound of a manifest's length, far above any: a part of a checkpoint takes about 150 bytes.
const MANIFEST_BYTES_MAX: u64 = 16 * 1024 * 1024;
const SUFFIX: &str = ".json";

/// The name of a checkpoint: ordered by owner, then by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CheckpointName {
    /// The owner that wrote it.
    pub owner: OwnerNumber,
    /// Its number. The next checkpoint takes the following number, whichever process writes it.
    pub number: u64,
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} of owner {}", self.number, self.owner.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    #[serde(flatten)]
    pub(super) name: CheckpointName,
    /// The shard of the chunks.
    pub(super) of: ShardIdentity,
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
    /// Digest of the file, hexadecimal.
    pub(super) blake3: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedManifest {
    manifest: Manifest,
    /// Digest of the manifest's compact JSON, hexadecimal.
    blake3: String,
}

/// The field that all formats have, to report an unsupported one.
#[derive(Deserialize)]
struct Versioned {
    manifest: Format,
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

impl Manifest {
    /// The bytes of all its files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let compact = serde_json::to_vec(self).expect("a manifest is plain data");
        let sealed = SealedManifest { manifest: self.clone(), blake3: blake3::hash(&compact).to_hex().to_string() };
        let mut text = serde_json::to_vec_pretty(&sealed).expect("a manifest is plain data");
        text.push(b'\n');
        text
    }

    /// Reads and checks the manifest of a checkpoint.
    pub(super) fn read(storage: &dyn Storage, directory: &str, name: CheckpointName) -> Result<Self, Failure> {
        let text = Self::text(storage, directory, name)?;
        let path = join(directory, &manifest_name(name));
        Self::decode(&text, name).map_err(|what| Failure::Call(format!("{path:?} {what}")))
    }

    fn text(storage: &dyn Storage, directory: &str, name: CheckpointName) -> Result<Vec<u8>, Failure> {
        let path = join(directory, &manifest_name(name));
        let mut reader = storage.open(&path)?;
        if reader.len() > MANIFEST_BYTES_MAX {
            return Err(Failure::Call(format!("{path:?} has {} bytes; a manifest is shorter", reader.len())));
        }
        let mut text = vec![0; usize::try_from(reader.len()).expect("bounded above")];
        reader.read_at(0, &mut text)?;
        Ok(text)
    }

    fn decode(text: &[u8], name: CheckpointName) -> Result<Self, String> {
        let format = serde_json::from_slice::<Versioned>(text)
            .map_err(|error| format!("is not a manifest: {error}"))?
            .manifest
            .format;
        if format != FORMAT {
            return Err(of_format(format));
        }
        let sealed: SealedManifest =
            serde_json::from_slice(text).map_err(|error| format!("is not a manifest: {error}"))?;
        // The text is compared with its encoding, so that every flipped bit is detected, even in a space.
        if sealed.manifest.encode() != text {
            return Err("does not agree with its own digest".to_owned());
        }
        sealed.manifest.check_names(name)?;
        Ok(sealed.manifest)
    }

    /// File names are unchecked input: only this checkpoint's own files are accepted.
    fn check_names(&self, name: CheckpointName) -> Result<(), String> {
        if self.name != name {
            return Err(format!("is the manifest of checkpoint {}", self.name));
        }
        let parts = self.files.len().saturating_sub(1);
        let expected = (0..parts).map(|part| data_name(name, part)).chain([chunks_name(name)]);
        if self.files.iter().map(|file| file.name.as_str()).eq(expected.collect::<Vec<_>>().iter().map(String::as_str))
        {
            return Ok(());
        }
        Err("does not list the files of its checkpoint".to_owned())
    }
}

/// The checkpoints in a directory that have a manifest, in ascending order.
///
/// # Errors
/// When the storage refuses, or a checkpoint is of the format before owners, which this program does not read.
pub(super) fn names(storage: &dyn Storage, directory: &str) -> Result<Vec<CheckpointName>, Failure> {
    let listed = storage.list(directory)?;
    let is_old =
        |name: &&String| is_numbered_as_format_1(name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX)));
    if let Some(name) = listed.iter().find(is_old) {
        return Err(of_format_1(&join(directory, name), "a checkpoint", FORMAT));
    }
    let mut names: Vec<CheckpointName> =
        listed.iter().filter_map(|file| name_of(file).filter(|name| *file == manifest_name(*name))).collect();
    names.sort_unstable();
    Ok(names)
}

/// A manifest with the format of a newer program, in words. A damaged number is none: with the number of this program
/// its digest is right.
pub(super) fn newer_file(storage: &dyn Storage, directory: &str) -> Option<String> {
    let is_damaged = |text: &[u8]| {
        serde_json::from_slice(text).is_ok_and(|SealedManifest { manifest, blake3 }| {
            let own = Manifest { format: FORMAT, ..manifest };
            serde_json::to_vec(&own).is_ok_and(|compact| blake3::hash(&compact).to_hex().as_str() == blake3)
        })
    };
    names(storage, directory).unwrap_or_default().into_iter().find_map(|name| {
        let text = Manifest::text(storage, directory, name).ok()?;
        let Format { format } = serde_json::from_slice::<Versioned>(&text).ok()?.manifest;
        let path = join(directory, &manifest_name(name));
        (FORMAT < format && !is_damaged(&text)).then(|| format!("{path:?} {}", of_format(format)))
    })
}

fn of_format(format: u32) -> String {
    if (1..FORMAT).contains(&format) {
        return format!("is {}", earlier_format(format, FORMAT));
    }
    format!("is of format {format}; this program reads format {FORMAT}")
}

/// The checkpoint that a file of this name belongs to, whole or not.
pub(super) fn name_of(file: &str) -> Option<CheckpointName> {
    let (owner, rest) = OwnerNumber::split(file.strip_prefix(PREFIX)?)?;
    let digits = rest.strip_prefix('-')?.get(..20)?;
    if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    Some(CheckpointName { owner, number: digits.parse().ok()? })
}

pub(super) fn manifest_name(name: CheckpointName) -> String {
    format!("{}{SUFFIX}", stem(name))
}

pub(super) fn chunks_name(name: CheckpointName) -> String {
    format!("{}.chunks", stem(name))
}

pub(super) fn data_name(name: CheckpointName, part: usize) -> String {
    format!("{}-{part:05}.safetensors", stem(name))
}

fn stem(name: CheckpointName) -> String {
    format!("{PREFIX}{}-{:020}", name.owner, name.number)
}
