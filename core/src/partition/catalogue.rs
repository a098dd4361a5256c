//! Catalogue: the parameters of a job and their placement.

use std::collections::HashMap;

use super::declaration::{Declaration, Hosted, Name, TotalPart};
use super::placement::{Layout, Loads, Size};
use super::topology::Topology;
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex, ParameterIndex, ServerIndex, ShardId};
use crate::limits::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, PARAMETERS_MAX};

/// The parameters of a job in the order of their declaration, and the shard of each chunk.
///
/// ```
/// use pserver_core::dtype::ElementType;
/// use pserver_core::partition::{Catalogue, Declaration, Name, Topology};
///
/// let mut catalogue = Catalogue::new(Topology::new(vec![2, 2])?, 4096)?;
/// let index = catalogue.declare(Declaration {
///     name: Name::new(b"embedding")?,
///     element_type: ElementType::Float32,
///     bytes: 10_000,
///     shape: vec![50, 50],
///     whole: false,
///     config: Vec::new(),
///     buckets: None,
///     owner: None,
///     sender: None,
///     total_part: None,
///     hosted: None,
/// })?;
/// assert_eq!(catalogue.find("embedding"), Some(index));
/// assert_eq!(catalogue.parameter(index).map(|parameter| parameter.chunk_count()), Some(3));
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
#[derive(Clone, Debug)]
pub struct Catalogue {
    topology: Topology,
    chunk_bytes: u32,
    parameters: Vec<Parameter>,
    /// Looked up by name and never iterated, so its order has no effect.
    by_name: HashMap<Name, ParameterIndex>,
    loads: Loads,
    bytes: u64,
}

/// A parameter is cut into about this many chunks or more, so that push, sum and pull of different chunks overlap.
const CHUNKS_WANTED: u64 = 4;
/// Bytes of a number of a total.
const NUMBER_BYTES: u32 = TotalPart::NUMBER_BYTES;
/// The least size of a chunk of a parameter that is cut for overlap: each chunk costs some microseconds.
const CHUNK_BYTES_WANTED: u64 = 256 * 1024;
/// The least size of a chunk of a parameter that is cut so that no server is without a chunk.
const CHUNK_BYTES_LEAST: u32 = 64 * 1024;

/// One parameter: its checked declaration, and where its chunks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    declaration: Declaration,
    index: ParameterIndex,
    chunk_bytes: u32,
    layout: Layout,
}

/// The bytes of a chunk within its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSpan {
    /// Where it begins, in bytes; a multiple of the chunk size.
    pub offset: u64,
    /// Its length in bytes; the chunk size, or less for the last.
    pub bytes: u32,
}

impl Catalogue {
    /// A catalogue without parameters.
    ///
    /// # Errors
    /// [`Failure::Call`] unless `chunk_bytes` is a power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
    pub fn new(topology: Topology, chunk_bytes: u32) -> Result<Self, Failure> {
        if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            return Err(Failure::Call(format!(
                "chunks of {chunk_bytes} bytes; expected a power of two from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
            )));
        }
        let loads = Loads::new(&topology);
        Ok(Self { topology, chunk_bytes, parameters: Vec::new(), by_name: HashMap::new(), loads, bytes: 0 })
    }

    /// Adds a parameter and places it. An empty shape becomes one dimension of all elements.
    ///
    /// # Errors
    /// [`Failure::Call`], which names the parameter, when the declaration breaks one of the promises its fields
    /// make, when the name is taken, or when there are too many parameters. Then nothing has changed.
    pub fn declare(&mut self, declaration: Declaration) -> Result<ParameterIndex, Failure> {
        let declaration = declaration.checked()?;
        let refused = |why: String| Failure::Call(format!("parameter {}: {why}", declaration.name.quoted()));
        if let Some(index) = self.find(declaration.name.as_str()) {
            return Err(refused(format!("declared already, as number {index}; expected a new name")));
        }
        let index = u32::try_from(self.parameters.len()).ok().filter(|index| *index < PARAMETERS_MAX);
        let index = index.ok_or_else(|| {
            refused(format!("the job has {PARAMETERS_MAX} parameters already; expected at most as many"))
        })?;
        let servers = self.topology.servers();
        if let Some(owner) = declaration.owner.filter(|owner| owner.0 >= servers) {
            return Err(refused(format!("its home is server {owner}; expected one below {servers}")));
        }
        let reader = declaration.total_part.map(|part| self.reader(index, part, declaration.bytes).map_err(refused));
        let beside = match declaration.hosted {
            Some(Hosted::Part) => Some(self.host().ok_or_else(|| {
                refused("a part of a hosted program; expected it after the program and its other parts".to_owned())
            })?),
            _ => reader.transpose()?,
        };
        let total = self.bytes.checked_add(declaration.bytes);
        let total = total.ok_or_else(|| refused(format!("the sum of all lengths exceeds {} bytes", u64::MAX)))?;

        let index = ParameterIndex(index);
        let has_numbers = declaration.total_part.is_some() && declaration.bytes > u64::from(NUMBER_BYTES);
        let goes_anywhere = !declaration.whole && declaration.owner.is_none() && declaration.buckets.is_none();
        let largest = match self.chunk_bytes {
            _ if has_numbers => NUMBER_BYTES,
            largest if goes_anywhere && self.loads.has_empty_server() => {
                chunk_bytes_for_all(largest, declaration.bytes, servers)
            }
            largest => largest,
        };
        let size = size(largest, &declaration);
        let layout = match beside {
            Some(layout) => self.loads.add_beside(size, layout),
            None => self.loads.add(size, declaration.whole, declaration.owner),
        };
        self.bytes = total;
        self.by_name.insert(declaration.name.clone(), index);
        self.parameters.push(Parameter { declaration, index, chunk_bytes: size.chunk_bytes, layout });
        Ok(index)
    }

    /// The layout of the parameter that reads the total of which the next parameter, of so many bytes, is a part.
    fn reader(&self, index: u32, part: TotalPart, bytes: u64) -> Result<Layout, String> {
        let reader = part.reader(ParameterIndex(index)).and_then(|reader| self.parameter(reader));
        let is_one = |of: &Declaration| (of.whole || of.buckets.is_some()) && of.total_part.is_none();
        let is_next = part == TotalPart::Share
            || self.parameters.last().is_some_and(|last| last.declaration.total_part == Some(TotalPart::Share));
        let Some(reader) = reader.filter(|reader| is_one(&reader.declaration) && is_next) else {
            return Err(format!(
                "a part of a total ({part:?}); expected it after a whole parameter or a table, first its share, then \
                 its total"
            ));
        };
        let numbers = self.numbers_of_part(part);
        if bytes == numbers * u64::from(NUMBER_BYTES) {
            return Ok(reader.layout.clone());
        }
        let expected = numbers * u64::from(NUMBER_BYTES);
        Err(format!("a part of a total with {bytes} bytes; expected {expected}: one float64, of a table one a bucket"))
    }

    /// The layout of the hosted program of which the next parameter is a part.
    fn host(&self) -> Option<Layout> {
        let last = self.parameters.last().filter(|last| last.declaration.hosted.is_some());
        last.map(|last| last.layout.clone())
    }

    /// How many numbers the next parameter has as this part of a total: one for each bucket of the table that reads it.
    #[must_use]
    pub fn numbers_of_part(&self, part: TotalPart) -> u64 {
        let reader = u32::try_from(self.parameters.len()).ok().and_then(|next| part.reader(ParameterIndex(next)));
        let reader = reader.and_then(|reader| self.parameter(reader));
        reader.filter(|reader| reader.declaration.buckets.is_some()).map_or(1, Parameter::chunk_count)
    }

    /// The servers and their shards.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The size in bytes that no chunk exceeds.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// How many parameters there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The bytes of all parameters.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The parameter with this number, if there is one.
    #[must_use]
    pub fn parameter(&self, index: ParameterIndex) -> Option<&Parameter> {
        self.parameters.get(index.0 as usize)
    }

    /// The number of the parameter with this name, in constant time.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ParameterIndex> {
        self.by_name.get(name).copied()
    }

    /// The parameters, in the order of their declaration.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter()
    }

    /// The bytes of the chunks on this server; zero if there is no such server.
    #[must_use]
    pub fn bytes_on(&self, server: ServerIndex) -> u64 {
        self.loads.bytes_on(server)
    }

    /// The chunks of this shard, by parameter and then by chunk. The cost is proportional to the number of parameters
    /// and of chunks found.
    pub fn chunks_on(&self, shard: ShardId) -> impl Iterator<Item = (ChunkId, ChunkSpan)> {
        self.parameters.iter().flat_map(move |parameter| parameter.chunks_on(shard))
    }
}

impl Parameter {
    /// Its chunk size in bytes.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The checked declaration, with its shape filled in.
    #[must_use]
    pub fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    /// Its number.
    #[must_use]
    pub fn index(&self) -> ParameterIndex {
        self.index
    }

    /// How many chunks it has; at least one.
    #[must_use]
    pub fn chunk_count(&self) -> u64 {
        match self.declaration.buckets {
            Some(buckets) => buckets.count.into(),
            None => self.declaration.bytes.div_ceil(u64::from(self.chunk_bytes)),
        }
    }

    /// The bytes of this chunk, if it exists; for a bucket, the bytes that placement assumes.
    #[must_use]
    pub fn span(&self, chunk: ChunkIndex) -> Option<ChunkSpan> {
        if self.declaration.buckets.is_some() {
            let offset = chunk.0.checked_mul(u64::from(self.chunk_bytes)).filter(|_| chunk.0 < self.chunk_count())?;
            return Some(ChunkSpan { offset, bytes: self.chunk_bytes });
        }
        let offset = chunk.0.checked_mul(u64::from(self.chunk_bytes))?;
        let left = self.declaration.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        let bytes = u32::try_from(left).map_or(self.chunk_bytes, |left| left.min(self.chunk_bytes));
        Some(ChunkSpan { offset, bytes })
    }

    /// The shard that holds this chunk, in constant time.
    ///
    /// # Panics
    /// When the chunk does not exist. The caller checks a number from a peer with [`Parameter::span`] first.
    #[must_use]
    pub fn shard_of(&self, chunk: ChunkIndex) -> ShardId {
        assert!(chunk.0 < self.chunk_count(), "chunk {chunk} of {}", self.chunk_count());
        self.layout.shard_of(chunk)
    }

    /// Its chunks, in order.
    pub fn chunks(&self) -> impl Iterator<Item = (ChunkIndex, ChunkSpan)> {
        self.spans(0, 1)
    }

    /// Those of its chunks that this shard holds, in order.
    pub fn chunks_on(&self, shard: ShardId) -> impl Iterator<Item = (ChunkId, ChunkSpan)> {
        let stride = self.layout.stride(shard);
        let spans = stride.into_iter().flat_map(|(first, step)| self.spans(first, step));
        spans.map(|(chunk, span)| (ChunkId { parameter: self.index, chunk }, span))
    }

    /// Every `step`-th chunk from the `first` on.
    fn spans(&self, first: u64, step: u64) -> impl Iterator<Item = (ChunkIndex, ChunkSpan)> {
        let chunks = std::iter::successors(Some(first), move |chunk| chunk.checked_add(step)).map(ChunkIndex);
        chunks.map_while(|chunk| Some((chunk, self.span(chunk)?)))
    }
}

#[cfg(test)]
impl Parameter {
    /// An upper bound of what it holds on the heap: the lanes of its layout, its shape, and its name with its counts.
    pub(super) fn heap_bytes_max(&self) -> usize {
        let Declaration { name, shape, config, .. } = &self.declaration;
        self.layout.heap_bytes() + 8 * shape.capacity() + config.capacity() + name.as_str().len() + 16
    }
}

#[cfg(test)]
impl Catalogue {
    /// An upper bound of what its parameters and their names take; the table has at most twice the room it needs
    /// after it has doubled, at seven eighths, and so has the list.
    pub(super) fn heap_bytes_max(&self) -> usize {
        let table = self.by_name.capacity() * 8 / 7 * (size_of::<(Name, ParameterIndex)>() + 1);
        let list = self.parameters.capacity() * size_of::<Parameter>();
        table + list + self.iter().map(Parameter::heap_bytes_max).sum::<usize>()
    }

    /// The bytes of each shard of a server, as placement counted them.
    pub(super) fn shard_bytes(&self, server: ServerIndex) -> Vec<u64> {
        self.loads.shards_of(server).to_vec()
    }
}

/// The number and size of a parameter's chunks, none of them above `largest`. Buckets are assumed to be equally full.
fn size(largest: u32, declaration: &Declaration) -> Size {
    match declaration.buckets {
        Some(buckets) => {
            let chunks = u64::from(buckets.count);
            let chunk_bytes = u32::try_from(declaration.bytes.div_ceil(chunks)).expect("the declaration was checked");
            Size { chunks, chunk_bytes, bytes: chunks * u64::from(chunk_bytes) }
        }
        None => {
            let chunk_bytes = chunk_bytes(largest, declaration.bytes);
            let chunks = declaration.bytes.div_ceil(u64::from(chunk_bytes));
            Size { chunks, chunk_bytes, bytes: declaration.bytes }
        }
    }
}

/// The largest chunk with which a parameter of `bytes` bytes has one for every server, and about as many on each, if it
/// has enough for that; otherwise `largest`.
fn chunk_bytes_for_all(largest: u32, bytes: u64, servers: u16) -> u32 {
    let servers = u64::from(servers);
    let usual = bytes.div_ceil(u64::from(chunk_bytes(largest, bytes)));
    if servers <= usual || bytes / servers < u64::from(CHUNK_BYTES_LEAST) {
        return largest;
    }
    let wanted = u32::try_from(bytes / (servers * CHUNKS_WANTED)).unwrap_or(u32::MAX).max(CHUNK_BYTES_LEAST);
    largest.min(1 << wanted.ilog2())
}

/// The chunk size of a parameter of `bytes` bytes: a power of two, at most `largest`.
fn chunk_bytes(largest: u32, bytes: u64) -> u32 {
    let wanted = bytes.div_ceil(CHUNKS_WANTED).checked_next_power_of_two().unwrap_or(u64::MAX);
    u32::try_from(wanted.max(CHUNK_BYTES_WANTED)).map_or(largest, |wanted| wanted.min(largest))
}
