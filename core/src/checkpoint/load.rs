//! Loading of checkpoints: the newest valid one, or the one before it, or an error; never a part of one.

use super::chunk::{CHUNKS_MAGIC, ChunkRecord, STATE_PREFIX, value_name};
use super::cursor::{FileCursor, digest};
use super::manifest::{self, CheckpointName, FileEntry, Manifest, manifest_name};
use super::owner::ShardIdentity;
use super::storage::{Storage, StorageReader, join};
use super::tensors::{FileTensor, read_header};
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex, ParameterIndex, Version};

/// A checkpoint that was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Its name.
    pub name: CheckpointName,
    /// The position at which replay of the journal begins.
    pub journal_from: u64,
    /// The bytes of values and states.
    pub bytes: u64,
    /// The reason why each newer checkpoint was not loaded, newest first, for the operator.
    pub fell_back: Vec<String>,
}

/// Loads the newest valid checkpoint in `directory`, one visit for every chunk, in the order of writing.
///
/// Every file is read and compared with its digest before the first visit. `None` means that there is no checkpoint. If
/// checkpoints exist and none is valid, the load fails: a start without them would lose their content. It also fails
/// for a checkpoint of another shard than `identity`, if that is given.
pub fn load_latest(
    storage: &dyn Storage,
    directory: &str,
    identity: Option<&ShardIdentity>,
    visit: &mut dyn FnMut(ChunkRecord<'_>) -> Result<(), Failure>,
) -> Result<Option<Loaded>, Failure> {
    let mut fell_back = Vec::new();
    for name in manifest::names(storage, directory)?.into_iter().rev() {
        match verify(storage, directory, name) {
            Ok(manifest) => {
                if let Some(identity) = identity {
                    manifest.of.check(identity, &join(directory, &manifest_name(name)))?;
                }
                storage.expect(manifest.bytes());
                let bytes = load(storage, directory, &manifest, visit)?;
                return Ok(Some(Loaded { name, journal_from: manifest.journal_from, bytes, fell_back }));
            }
            Err(failure) => fell_back.push(format!("checkpoint {name}: {failure}")),
        }
    }
    if fell_back.is_empty() {
        return Ok(None);
    }
    Err(Failure::Node(format!("no checkpoint in {directory:?} can be loaded: {}", fell_back.join("; "))))
}

/// The journal position that the oldest kept checkpoint needs: the journal must retain records from there on, so that
/// falling back stays possible. `None` without a checkpoint, when the journal must keep everything.
pub fn journal_needed_from(storage: &dyn Storage, directory: &str) -> Result<Option<u64>, Failure> {
    let mut needed: Option<u64> = None;
    for name in manifest::names(storage, directory)? {
        // A manifest that cannot be trusted can never be loaded, so it needs nothing.
        if let Ok(manifest) = Manifest::read(storage, directory, name) {
            needed = Some(needed.map_or(manifest.journal_from, |least| least.min(manifest.journal_from)));
        }
    }
    Ok(needed)
}

/// Reads all of a checkpoint, and returns the first fault.
pub(super) fn verify(storage: &dyn Storage, directory: &str, name: CheckpointName) -> Result<Manifest, Failure> {
    let manifest = Manifest::read(storage, directory, name)?;
    for file in &manifest.files {
        verify_file(storage, directory, file)?;
    }
    // The digests show that the files are unchanged; this checks their content.
    walk(storage, directory, &manifest, &mut |_| Ok(()))?;
    Ok(manifest)
}

/// Compares a file with its entry in the manifest.
pub(super) fn verify_file(storage: &dyn Storage, directory: &str, file: &FileEntry) -> Result<(), Failure> {
    let path = join(directory, &file.name);
    storage.expect(file.bytes);
    let reader = storage.open(&path)?;
    let (found, expected) = (reader.len(), file.bytes);
    if found != expected {
        return Err(Failure::Call(format!("{path:?} has {found} bytes and its manifest says {expected}")));
    }
    let found = digest(reader)?.to_hex();
    if found.as_str() != file.blake3 {
        let expected = &file.blake3;
        return Err(Failure::Call(format!("{path:?} has the digest {found} and its manifest says {expected}")));
    }
    Ok(())
}

/// A chunk and the location of its bytes.
pub(super) struct Located<'a> {
    pub(super) id: ChunkId,
    pub(super) version: Version,
    pub(super) marks: &'a [u8],
    pub(super) reader: &'a mut dyn StorageReader,
    /// The value, then the states.
    pub(super) tensors: &'a [FileTensor],
}

/// Visits a checkpoint's chunks in order, reading the chunk table and the headers but not the tensors.
pub(super) fn walk(
    storage: &dyn Storage,
    directory: &str,
    manifest: &Manifest,
    each: &mut dyn FnMut(Located<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (table, data) = manifest.files.split_last().expect("the manifest was checked to list the chunk table");
    let mut table = ChunkTableReader::open(storage, join(directory, &table.name), manifest.chunks)?;
    let mut left = manifest.chunks;
    for file in data {
        let path = join(directory, &file.name);
        let mut reader = storage.open(&path)?;
        let header = read_header(&mut *reader, &path)?;
        let mut tensors = header.tensors.as_slice();
        while !tensors.is_empty() && left > 0 {
            let (id, version) = table.next()?;
            let count = chunk_tensors(tensors, id).ok_or_else(|| {
                Failure::Call(format!("{path:?} holds {:?}, expected {}", tensors[0].name, value_name(id)))
            })?;
            let (chunk, rest) = tensors.split_at(count);
            each(Located { id, version, marks: &table.marks, reader: &mut *reader, tensors: chunk })?;
            tensors = rest;
            left -= 1;
        }
        if !tensors.is_empty() {
            return Err(Failure::Call(format!("{path:?} holds more chunks than its manifest counts")));
        }
    }
    table.end(left)
}

/// Reads every chunk of a verified checkpoint, one in memory at a time.
fn load(
    storage: &dyn Storage,
    directory: &str,
    manifest: &Manifest,
    visit: &mut dyn FnMut(ChunkRecord<'_>) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let mut bytes = Vec::new();
    let mut total = 0;
    walk(storage, directory, manifest, &mut |chunk| {
        let (first, last) = (&chunk.tensors[0], &chunk.tensors[chunk.tensors.len() - 1]);
        let place = |at: u64| usize::try_from(at - first.start).expect("a chunk fits in memory");
        bytes.resize(place(last.end), 0);
        chunk.reader.read_at(first.start, &mut bytes)?;
        let parts: Vec<&[u8]> =
            chunk.tensors.iter().map(|tensor| &bytes[place(tensor.start)..place(tensor.end)]).collect();
        total += bytes.len() as u64;
        let Located { id, version, marks, .. } = chunk;
        visit(ChunkRecord { id, version, marks, value: parts[0], states: &parts[1..] })
    })?;
    Ok(total)
}

/// The number of tensors of the chunk that must come next; none if another one comes.
fn chunk_tensors(tensors: &[FileTensor], id: ChunkId) -> Option<usize> {
    if tensors.first()?.name != value_name(id) {
        return None;
    }
    let suffix = format!("/{}/{}", id.parameter, id.chunk);
    let is_state = |tensor: &&FileTensor| tensor.name.starts_with(STATE_PREFIX) && tensor.name.ends_with(&suffix);
    let states = tensors[1..].iter().take_while(is_state);
    Some(1 + states.count())
}

/// The chunk table, read in order.
struct ChunkTableReader {
    path: String,
    source: FileCursor,
    /// The marks of the last chunk that was read.
    marks: Vec<u8>,
}

impl ChunkTableReader {
    fn open(storage: &dyn Storage, path: String, chunks: u64) -> Result<Self, Failure> {
        let mut table = Self { source: FileCursor::new(storage.open(&path)?), path, marks: Vec::new() };
        let magic: [u8; 8] = table.array()?;
        if magic != CHUNKS_MAGIC {
            return Err(table.wrong(format!("begins with {magic:?}, expected {CHUNKS_MAGIC:?}")));
        }
        let count = u64::from_le_bytes(table.array()?);
        if count != chunks {
            return Err(table.wrong(format!("counts {count} chunks and its manifest {chunks}")));
        }
        Ok(table)
    }

    /// The next chunk. Its marks are left in `marks`.
    fn next(&mut self) -> Result<(ChunkId, Version), Failure> {
        let parameter = ParameterIndex(u32::from_le_bytes(self.array()?));
        let marks_bytes = u32::from_le_bytes(self.array()?);
        let chunk = ChunkIndex(u64::from_le_bytes(self.array()?));
        let version = Version(u64::from_le_bytes(self.array()?));
        let left = self.source.remaining();
        if u64::from(marks_bytes) > left {
            return Err(self.wrong(format!("claims {marks_bytes} bytes of marks where {left} are left")));
        }
        self.marks.resize(usize::try_from(marks_bytes).expect("an address has 64 bits"), 0);
        self.source.take(&mut self.marks)?;
        Ok((ChunkId { parameter, chunk }, version))
    }

    fn end(&self, chunks_left: u64) -> Result<(), Failure> {
        let bytes_left = self.source.remaining();
        if chunks_left == 0 && bytes_left == 0 {
            return Ok(());
        }
        Err(self.wrong(format!("ends with {chunks_left} chunks without data and {bytes_left} bytes without a chunk")))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Failure> {
        let left = self.source.remaining();
        if left < N as u64 {
            return Err(self.wrong(format!("ends after {left} of the {N} bytes of a field")));
        }
        self.source.array()
    }

    fn wrong(&self, what: String) -> Failure {
        Failure::Call(format!("{:?} {what}", self.path))
    }
}
