//! A checkpoint that is being taken, chunk by chunk.

use prost::Message;

use super::bucket::BucketTensors;
use super::chunk::Chunk;
use super::marks::MarksMessage;
use super::saved_program::SavedProgramMessage;
use crate::checkpoint::{ChunkRecord, ShardCheckpoint};
use crate::error::Failure;
use crate::ids::{Generation, Version};

/// A checkpoint that is being taken.
pub struct Checkpointing {
    pub(super) writer: ShardCheckpoint,
    pub(super) about: Vec<u8>,
    pub(super) generation: Generation,
    /// The bucket that is being written, if one is.
    bucket: Option<BucketWriting>,
}

/// A bucket being written: its rows are copied in pieces, one per turn, as of the start, and the copy is then written
/// in pieces.
struct BucketWriting {
    version: Version,
    marks: Vec<u8>,
    /// The complete copy.
    copy: Option<BucketTensors>,
    /// Bytes written.
    written: u64,
}

impl Checkpointing {
    /// A checkpoint that `writer` takes of a shard with this description.
    pub(super) fn new(writer: ShardCheckpoint, about: Vec<u8>, generation: Generation) -> Self {
        Self { writer, about, generation, bucket: None }
    }

    /// Whether a bucket is written in part.
    pub(super) fn is_in_bucket(&self) -> bool {
        self.bucket.is_some()
    }

    /// Writes a dense chunk, with the program that it begins if it is one; returns its bytes.
    pub(super) fn push_chunk(
        &mut self,
        chunk: &Chunk,
        position: u64,
        host: Option<SavedProgramMessage>,
    ) -> Result<u64, Failure> {
        let marks = MarksMessage { host, ..MarksMessage::of(chunk, position) }.encode_to_vec();
        let bytes = chunk.bytes as usize;
        let states: Vec<&[u8]> = chunk.states.iter().map(|state| &state.bytes()[..bytes]).collect();
        self.writer.push(ChunkRecord {
            id: chunk.id,
            version: chunk.version,
            marks: &marks,
            value: chunk.value_bytes(),
            states: &states,
        })?;
        Ok(u64::from(chunk.bytes) * (1 + states.len() as u64))
    }

    /// Copies about `left` bytes of a bucket, or writes so many of its copy. The bucket is the next chunk until it is
    /// whole.
    pub(super) fn push_bucket(&mut self, chunk: &mut Chunk, position: u64, left: &mut u64) -> Result<(), Failure> {
        let id = chunk.id;
        let mut writing = self.bucket.take().unwrap_or_else(|| BucketWriting::begin(chunk, position));
        let BucketWriting { version, marks, copy, written } = &mut writing;
        let Some(whole) = copy else {
            *copy = chunk.bucket_mut().expect("a bucket is pushed").copy_on(left);
            self.bucket = Some(writing);
            return Ok(());
        };
        let (value, states) = whole.parts();
        let record = ChunkRecord { id, version: *version, marks, value, states: &states };
        let before = *written;
        let is_whole = self.writer.push_some(record, written, *left)?;
        *left -= *written - before;
        if !is_whole {
            self.bucket = Some(writing);
        }
        Ok(())
    }
}

impl BucketWriting {
    fn begin(chunk: &mut Chunk, position: u64) -> Self {
        let marks = MarksMessage::of(chunk, position).encode_to_vec();
        chunk.bucket_mut().expect("a bucket is pushed").begin_copy();
        Self { version: chunk.version, marks, copy: None, written: 0 }
    }
}
