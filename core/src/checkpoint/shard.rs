//! Checkpoint of one shard, written a chunk at a time while the shard serves.
//!
//! Every chunk is a consistent value, and chunks may be of different moments: `journal_from` is the journal's
//! position when the checkpoint began, and replay from there brings all of them to the present.

use std::collections::BTreeMap;
use std::ops::Range;

use super::chunk::{CHUNKS_MAGIC, ChunkLayout, ChunkRecord, STATE_PREFIX, value_name};
use super::journal;
use super::manifest::{self, CheckpointName, FORMAT, FileEntry, Manifest, chunks_name, data_name, manifest_name};
use super::owner::Folder;
use super::partial::Partial;
use super::path::PARTIAL;
use super::tensors::HeaderBuilder;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::ChunkId;

/// A data file is closed when its header has grown to this: one header in memory stays small, and readers of the
/// format refuse headers above 100 MB, which a million chunks would exceed.
const PART_HEADER_BYTES: u64 = 16 * 1024 * 1024;
/// The chunk table is written in pieces of about this size.
const TABLE_BUFFER_BYTES: usize = 64 * 1024;

/// A checkpoint being written. It can be sent to another thread, where [`Self::finish`] may wait for the disk.
pub struct ShardCheckpoint {
    folder: Folder,
    name: CheckpointName,
    journal_from: u64,
    layout: Vec<ChunkLayout>,
    /// How many chunks of the layout were pushed.
    pushed: usize,
    /// How many chunks of the layout the files in `data` have room for.
    placed: usize,
    data: Vec<Hashed>,
    chunks: Hashed,
    table: Vec<u8>,
    part_header_bytes: u64,
}

impl ShardCheckpoint {
    /// Begins checkpoint `number` of the shard whose files are in `folder`, and removes the remains of an unfinished
    /// checkpoint. The journal is needed from `journal_from` on; `layout` lists every chunk of the shard, in the order
    /// in which they will be pushed. A number that a valid checkpoint already has is refused.
    pub fn begin(folder: &Folder, number: u64, journal_from: u64, layout: Vec<ChunkLayout>) -> Result<Self, Failure> {
        folder.owner.check()?;
        let name = CheckpointName { owner: folder.owner.number(), number };
        clear(folder, name)?;
        let mut chunks = Hashed::create(folder, chunks_name(name))?;
        let count = (layout.len() as u64).to_le_bytes();
        // Tables of rows announce nothing: how much they have is known when they are written.
        let states = |chunk: &ChunkLayout| chunk.states.iter().map(|state| state.bytes).sum::<u64>();
        let bytes = layout.iter().filter(|chunk| !chunk.grows).map(|chunk| chunk.value_bytes + states(chunk));
        folder.storage.expect(bytes.sum());
        if let Err(failure) = chunks.write(&[&CHUNKS_MAGIC, &count]) {
            chunks.file.abandon();
            return Err(failure);
        }
        Ok(Self {
            folder: folder.clone(),
            name,
            journal_from,
            layout,
            pushed: 0,
            placed: 0,
            data: Vec::new(),
            chunks,
            table: Vec::new(),
            part_header_bytes: PART_HEADER_BYTES,
        })
    }

    /// The chunk that must be pushed next; `None` when it is time to finish.
    #[must_use]
    pub fn next(&self) -> Option<ChunkId> {
        self.layout.get(self.pushed).map(|chunk| chunk.id)
    }

    /// The bytes that it has written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.data.iter().chain([&self.chunks]).map(|file| file.file.position()).sum()
    }

    /// Writes the next chunk of the layout. After a failure the checkpoint is to be dropped: its files are gone.
    pub fn push(&mut self, chunk: ChunkRecord<'_>) -> Result<(), Failure> {
        let mut from = 0;
        self.push_some(chunk, &mut from, u64::MAX)?;
        Ok(())
    }

    /// As [`push`](Self::push), but at most `bytes` of the chunk's tensors, from offset `from` on, which is advanced.
    /// True when the chunk is complete; until then the caller pushes the same one again. Beginning a chunk costs
    /// nothing, so it is begun whatever `bytes` is.
    pub fn push_some(&mut self, chunk: ChunkRecord<'_>, from: &mut u64, bytes: u64) -> Result<bool, Failure> {
        if *from == 0 {
            self.check(&chunk);
        }
        let until = from.saturating_add(bytes).min(chunk.bytes());
        let written = self.write(&chunk, *from..until);
        *from = until;
        let is_whole = until == chunk.bytes();
        self.pushed += usize::from(is_whole);
        self.abandon_on_failure(written)?;
        Ok(is_whole)
    }

    /// Completes the checkpoint and removes all older ones but the newest. Returns its bytes on disk.
    pub fn finish(mut self) -> Result<u64, Failure> {
        assert_eq!(self.pushed, self.layout.len(), "every chunk of the layout is pushed before the checkpoint ends");
        let sealed = self.seal();
        let bytes = self.abandon_on_failure(sealed)?;
        if let Err(failure) = remove_superseded(&self.folder, self.name) {
            // The checkpoint is complete, and the next one tries the removal again.
            tracing::warn!(directory = self.folder.directory, %failure, "an old checkpoint could not be removed");
        }
        Ok(bytes)
    }

    fn check(&mut self, chunk: &ChunkRecord<'_>) {
        let layout = self.layout.get_mut(self.pushed).expect("no chunk is pushed beyond the layout");
        if layout.grows {
            layout.grow_to(chunk);
        }
        let states = chunk.states.iter().map(|state| state.len() as u64);
        assert_eq!(chunk.id, layout.id, "chunks are pushed in the layout's order");
        assert_eq!(chunk.value.len() as u64, layout.value_bytes, "a value is as long as the layout says");
        assert!(states.eq(layout.states.iter().map(|state| state.bytes)), "states are as the layout says");
    }

    /// Writes a part of a chunk's tensors, and after the last the chunk's record.
    fn write(&mut self, chunk: &ChunkRecord<'_>, part: Range<u64>) -> Result<(), Failure> {
        if self.pushed == self.placed {
            self.begin_part()?;
        }
        self.data.last_mut().expect("a part has begun").write(&chunk.part(&part))?;
        if part.end < chunk.bytes() {
            return Ok(());
        }
        let found = chunk.marks.len();
        let marks_bytes = u32::try_from(found).map_err(|_| {
            Failure::Node(format!("found {found} bytes beside the value of {:?}; expected fewer than 2^32", chunk.id))
        })?;
        self.table.extend_from_slice(&chunk.id.parameter.0.to_le_bytes());
        self.table.extend_from_slice(&marks_bytes.to_le_bytes());
        self.table.extend_from_slice(&chunk.id.chunk.0.to_le_bytes());
        self.table.extend_from_slice(&chunk.version.0.to_le_bytes());
        self.table.extend_from_slice(chunk.marks);
        if self.table.len() >= TABLE_BUFFER_BYTES { self.write_table() } else { Ok(()) }
    }

    fn begin_part(&mut self) -> Result<(), Failure> {
        let mut header = HeaderBuilder::new(&BTreeMap::new());
        let first = self.placed;
        for chunk in &self.layout[first..] {
            if chunk.grows && self.placed > first {
                break;
            }
            add_chunk(&mut header, chunk);
            self.placed += 1;
            if chunk.grows || header.header_bytes() >= self.part_header_bytes {
                break;
            }
        }
        let name = data_name(self.name, self.data.len());
        self.data.push(Hashed::create(&self.folder, name)?);
        self.data.last_mut().expect("just pushed").write(&[&header.finish()])
    }

    fn write_table(&mut self) -> Result<(), Failure> {
        self.chunks.write(&[&self.table])?;
        self.table.clear();
        Ok(())
    }

    fn seal(&mut self) -> Result<u64, Failure> {
        self.write_table()?;
        let mut files = Vec::with_capacity(self.data.len() + 1);
        for file in self.data.iter_mut().chain([&mut self.chunks]) {
            file.file.place()?;
            files.push(file.entry());
        }
        // Gradients that are not in a value are in the journal, and `journal_from` covers them.
        let Folder { storage, directory, identity, owner, .. } = &self.folder;
        journal::sync_from(&**storage, directory, self.journal_from)?;
        storage.sync_directory(directory)?;
        // A process that was replaced meanwhile leaves files without a manifest, which the new owner removes.
        owner.check()?;
        let manifest = Manifest {
            format: FORMAT,
            name: self.name,
            of: *identity,
            journal_from: self.journal_from,
            chunks: self.layout.len() as u64,
            files,
        };
        let text = manifest.encode();
        let mut file = Partial::create(storage, self.folder.path(&manifest_name(self.name)))?;
        let placed = file.write(&[&text]).and_then(|()| file.place());
        if let Err(failure) = placed {
            file.abandon();
            return Err(failure);
        }
        storage.sync_directory(directory)?;
        Ok(text.len() as u64 + manifest.files.iter().map(|file| file.bytes).sum::<u64>())
    }

    fn abandon_on_failure<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        if outcome.is_err() {
            self.data.iter().chain([&self.chunks]).for_each(|file| file.file.abandon());
        }
        outcome
    }
}

fn add_chunk(header: &mut HeaderBuilder, chunk: &ChunkLayout) {
    let shape = |bytes: u64, element_type: ElementType| {
        assert_eq!(bytes % element_type.bytes(), 0, "a chunk is cut between elements");
        [bytes / element_type.bytes()]
    };
    header.add(&value_name(chunk.id), chunk.element_type, &shape(chunk.value_bytes, chunk.element_type));
    for state in &chunk.states {
        let ChunkId { parameter, chunk } = chunk.id;
        let name = format!("{STATE_PREFIX}{}/{parameter}/{chunk}", state.name);
        header.add(&name, state.element_type, &shape(state.bytes, state.element_type));
    }
}

/// Removes the remains of unfinished checkpoints. Files of a later owner are skipped: this process does not own them.
fn clear(folder: &Folder, name: CheckpointName) -> Result<(), Failure> {
    let Folder { storage, directory, .. } = folder;
    if manifest::names(&**storage, directory)?.contains(&name) {
        if super::load::verify(&**storage, directory, name).is_ok() {
            return Err(Failure::Call(format!("checkpoint {name} in {directory:?} is already there, and whole")));
        }
        // The invalid manifest must not be left beside the data of the new checkpoint.
        storage.remove(&folder.path(&manifest_name(name)))?;
        storage.sync_directory(directory)?;
    }
    for file in storage.list(directory)? {
        if manifest::name_of(&file).is_some_and(|other| other.owner <= name.owner) && file.ends_with(PARTIAL) {
            storage.remove(&folder.path(&file))?;
        }
    }
    Ok(())
}

/// Removes every checkpoint but this one and the newest before it. A lower owner's checkpoint with a higher number was
/// refused when this owner began; otherwise it would have been loaded, and numbers would continue from it.
fn remove_superseded(folder: &Folder, name: CheckpointName) -> Result<(), Failure> {
    let Folder { storage, directory, owner, .. } = folder;
    owner.check()?;
    let names = manifest::names(&**storage, directory)?;
    let previous = names.iter().rev().find(|other| **other < name).copied();
    let mut files = storage.list(directory)?;
    files.retain(|file| manifest::name_of(file).is_some_and(|other| other < name && Some(other) != previous));
    // Manifests first: a checkpoint without one is no checkpoint, while one without data would be a broken one.
    files.sort_by_key(|file| !file.ends_with(".json"));
    files.iter().try_for_each(|file| storage.remove(&folder.path(file)))
}

/// A file of the checkpoint, digested as it is written.
struct Hashed {
    name: String,
    file: Partial,
    hasher: blake3::Hasher,
}

impl Hashed {
    fn create(folder: &Folder, name: String) -> Result<Self, Failure> {
        let file = Partial::create(&folder.storage, folder.path(&name))?;
        Ok(Self { name, file, hasher: blake3::Hasher::new() })
    }

    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        for part in parts {
            self.hasher.update(part);
        }
        self.file.write(parts)
    }

    fn entry(&self) -> FileEntry {
        let blake3 = self.hasher.finalize().to_hex().to_string();
        FileEntry { name: self.name.clone(), bytes: self.file.position(), blake3 }
    }
}

#[cfg(test)]
mod tests;
