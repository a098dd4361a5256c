//! The table of a shard: parameters are declared and filled under one generation, and a newer generation starts from an
//! empty table. The generation is the fence that refuses frames of a superseded initialiser.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::bucket::{Bucket, RowsPlan, RowsWorkspace};
use super::chunk::Chunk;
use super::group::{Group, GroupIndex, SlotIndex, TotalSlots, UpdateUnit};
use super::reply::Refusal;
use super::saved_program::SavedProgramMessage;
use crate::config::ParameterConfig;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex, Generation, ParameterIndex};
use crate::memory::{Lease, Value};
use crate::optim::Prepared;
use crate::partition::{Declaration, DeclarationMessage, Hosted, TotalPart};
use crate::wire::{Entry, InitMessage};

/// A parameter with chunks on this shard.
pub(super) struct ShardParameter {
    /// The declaration without its configuration.
    pub(super) declaration: Declaration,
    /// Shared by parameters with equal configurations.
    config: Arc<[u8]>,
    /// Shared by parameters with equal rules.
    pub(super) rule: Arc<Prepared>,
    /// The plan of its buckets, if it is sparse.
    pub(super) rows: Option<Box<RowsPlan>>,
    pub(super) chunk_bytes: u32,
    /// Trainers without whose gradients a round is complete.
    pub(super) backup_trainers: u32,
    /// Slot indices in chunk order; two are stored inline.
    pub(super) chunks: SmallVec<[SlotIndex; 2]>,
}

// The state of a parameter with one chunk and one trainer, beside its value: with name, shape and allocator overhead
// below 1 KiB.
const _: () = assert!(
    size_of::<ShardParameter>() + size_of::<Chunk>() + size_of::<Value>() + 2 * size_of::<(ChunkId, SlotIndex)>()
        <= 640
);

impl ShardParameter {
    /// Checks the declaration in an init frame.
    fn from_message(message: InitMessage, rules: &Rules) -> Result<Self, Refusal> {
        let invalid = |failure: Failure| Refusal::invalid(failure.to_string());
        let InitMessage { declaration: Some(declared), chunk_bytes, .. } = message else {
            return Err(Refusal::invalid("an init frame without a declaration"));
        };
        let mut declaration = Declaration::try_from(declared).map_err(invalid)?;
        let config = std::mem::take(&mut declaration.config);
        let ParameterConfig { rule, sparse, backup_trainers } = ParameterConfig::decode(&config).map_err(invalid)?;
        let (config, prepared) = match rules.get_key_value(config.as_slice()) {
            Some((known, prepared)) => (Arc::clone(known), Arc::clone(prepared)),
            None => (config.into(), Arc::new(Prepared::new(rule).map_err(invalid)?)),
        };
        let rule = prepared.rule();
        rule.validate_for(declaration.element_type).map_err(invalid)?;
        let rows = RowsPlan::of(&declaration, rule, sparse).map_err(invalid)?.map(Box::new);
        if rows.is_none() && !rule.is_element_wise() && !declaration.whole {
            return Err(Refusal::invalid(format!(
                "parameter \"{}\": its rule needs the whole gradient, and the parameter is not declared whole",
                declaration.name.as_str()
            )));
        }
        let limits = crate::limits::CHUNK_BYTES_MIN..=crate::limits::CHUNK_BYTES_MAX;
        let is_number = declaration.total_part.is_some() && chunk_bytes == TotalPart::NUMBER_BYTES;
        let is_legal = is_number || chunk_bytes.is_power_of_two() && limits.contains(&chunk_bytes);
        if rows.is_none() && !is_legal {
            return Err(Refusal::invalid(format!(
                "chunk size {chunk_bytes}; expected a power of two within the limits"
            )));
        }
        declaration.shape.shrink_to_fit();
        Ok(Self { declaration, config, rule: prepared, rows, chunk_bytes, backup_trainers, chunks: SmallVec::new() })
    }

    /// The init message that declares this parameter.
    pub(super) fn message(&self, index: ParameterIndex) -> InitMessage {
        let declared = DeclarationMessage::from(&self.declaration);
        let declaration = Some(DeclarationMessage { config: self.config.to_vec(), ..declared });
        InitMessage { parameter: index.0, declaration, chunk_bytes: self.chunk_bytes }
    }

    pub(super) fn name(&self) -> &str {
        self.declaration.name.as_str()
    }

    pub(super) fn element_type(&self) -> ElementType {
        self.declaration.element_type
    }

    /// Checks an initial entry of this parameter: a value, or rows.
    fn check_initial(&self, entry: &Entry) -> Result<(), Refusal> {
        match &self.rows {
            Some(plan) if entry.id.chunk.0 < plan.buckets.count.into() => plan.check_entry(self.name(), entry),
            Some(_) => Err(unknown(entry.id)),
            None => self.check_whole(entry),
        }
    }

    /// Checks an entry that fills a chunk of this parameter.
    fn check_whole(&self, entry: &Entry) -> Result<(), Refusal> {
        if self.rows.is_some() {
            return Err(Refusal::invalid(format!(
                "parameter \"{}\" is sparse: a value of {} bytes was sent as a whole, expected rows",
                self.name(),
                entry.bytes
            )));
        }
        let bytes = self.span(entry.id).ok_or_else(|| unknown(entry.id))?;
        if entry.element_type != self.element_type() {
            return Err(Refusal::invalid(format!(
                "parameter \"{}\": element type {} was sent, expected {}",
                self.name(),
                entry.element_type,
                self.element_type()
            )));
        }
        if entry.bytes != bytes {
            return Err(wrong_length(self, entry, bytes.into()));
        }
        Ok(())
    }

    /// The length of a chunk, if it exists.
    fn span(&self, id: ChunkId) -> Option<u32> {
        let offset = id.chunk.0.checked_mul(self.chunk_bytes.into())?;
        let left = self.declaration.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        u32::try_from(left.min(self.chunk_bytes.into())).ok()
    }
}

/// Rules by configuration: parameters with equal configurations share one, which stays in cache and is compiled once.
type Rules = BTreeMap<Arc<[u8]>, Arc<Prepared>>;

/// The chunks of a shard, in the order of their initialisation.
#[derive(Default)]
pub(super) struct Chunks(Vec<Chunk>);

impl Chunks {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The places of all.
    pub(super) fn slot_indices(&self) -> impl ExactSizeIterator<Item = SlotIndex> + use<> {
        (0..self.0.len()).map(SlotIndex::new)
    }

    pub(super) fn get(&self, slot_index: SlotIndex) -> Option<&Chunk> {
        self.0.get(slot_index.place())
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Chunk> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> std::slice::IterMut<'_, Chunk> {
        self.0.iter_mut()
    }

    /// The item in the open round of an input, which these chunks are.
    pub(super) fn item(&self, slot_indices: &[SlotIndex]) -> Cow<'_, [u8]> {
        let of = |slot_index: &SlotIndex| {
            let chunk = &self[*slot_index];
            chunk.round.merged(false, chunk.bytes)
        };
        match slot_indices {
            [alone] => Cow::Borrowed(of(alone)),
            several => Cow::Owned(several.iter().flat_map(of).copied().collect()),
        }
    }

    /// All, each with its place.
    pub(super) fn placed_mut(&mut self) -> impl Iterator<Item = (SlotIndex, &mut Chunk)> {
        self.0.iter_mut().enumerate().map(|(place, chunk)| (SlotIndex::new(place), chunk))
    }
}

impl Index<SlotIndex> for Chunks {
    type Output = Chunk;

    #[inline]
    fn index(&self, slot_index: SlotIndex) -> &Chunk {
        &self.0[slot_index.place()]
    }
}

impl IndexMut<SlotIndex> for Chunks {
    #[inline]
    fn index_mut(&mut self, slot_index: SlotIndex) -> &mut Chunk {
        &mut self.0[slot_index.place()]
    }
}

/// The chunks and parameters of a shard under one generation.
pub(super) struct ChunkTable {
    pub(super) generation: Generation,
    /// Boxed: a map reserves room for almost twice its entries.
    pub(super) parameters: BTreeMap<ParameterIndex, Box<ShardParameter>>,
    pub(super) chunks: Chunks,
    /// The chunks that are updated together; made when serving begins.
    pub(super) groups: Vec<Group>,
    /// The hosted programs of a checkpoint, until they go on.
    pub(super) programs: BTreeMap<ParameterIndex, SavedProgramMessage>,
    /// Whether any chunk is a bucket.
    pub(super) has_rows: bool,
    rules: Rules,
    // Never iterated, so its order reaches no sum.
    slot_indices: FxHashMap<ChunkId, SlotIndex>,
}

impl ChunkTable {
    pub(super) fn new(generation: Generation) -> Self {
        Self {
            generation,
            parameters: BTreeMap::new(),
            chunks: Chunks::default(),
            groups: Vec::new(),
            programs: BTreeMap::new(),
            has_rows: false,
            rules: Rules::new(),
            slot_indices: FxHashMap::default(),
        }
    }

    /// The slot index of a chunk, if this shard holds it.
    pub(super) fn slot_index(&self, id: ChunkId) -> Option<SlotIndex> {
        self.slot_indices.get(&id).copied()
    }

    /// As [`ChunkTable::slot_index`], tried first at the slot after `last`: most frames name chunks in the order of
    /// their declaration.
    #[inline]
    pub(super) fn place_after(&self, last: Option<SlotIndex>, id: ChunkId) -> Option<SlotIndex> {
        let next = last.map_or(SlotIndex::FIRST, SlotIndex::next);
        let is_next = self.chunks.get(next).is_some_and(|chunk| chunk.id == id);
        if is_next { Some(next) } else { self.slot_index(id) }
    }

    /// The parameter of a held chunk.
    pub(super) fn held(&self, id: ChunkId) -> &ShardParameter {
        self.parameters.get(&id.parameter).expect("a chunk in the table has its parameter there")
    }

    /// Groups the chunks of every parameter whose rule needs the whole gradient, with the total that the rule reads; of
    /// a table each bucket with its own.
    pub(super) fn make_groups(&mut self) {
        let Self { parameters, chunks, groups, slot_indices, .. } = self;
        for held in parameters.values_mut() {
            held.chunks.sort_by_key(|slot_index| chunks[*slot_index].id);
            let rule = held.rule.rule();
            // An item of a hosted program arrives whole.
            let is_input = held.declaration.hosted.is_some() && held.declaration.sender.is_some();
            if rule.is_element_wise() && !is_input || held.chunks.is_empty() {
                continue;
            }
            let each = if held.rows.is_some() { 1 } else { held.chunks.len() };
            for members in held.chunks.chunks(each) {
                let first = chunks[members[0]].id;
                let slot = |part: TotalPart| slot_indices[&part.of(first)];
                let total = rule.has_total();
                let total = total.then(|| TotalSlots { share: slot(TotalPart::Share), total: slot(TotalPart::Total) });
                let group = Some(GroupIndex::new(groups.len()));
                let new = Group::new(members, total);
                new.chunks.iter().for_each(|slot_index| chunks[*slot_index].group = group);
                groups.push(new);
            }
        }
    }

    /// The parameter that reads the total of which a parameter is a part, or the parameter itself.
    pub(super) fn reader_of(&self, index: ParameterIndex) -> ParameterIndex {
        let part = self.parameters.get(&index).and_then(|held| held.declaration.total_part);
        part.and_then(|part| part.reader(index)).unwrap_or(index)
    }

    /// The hosted program that a parameter is of.
    pub(super) fn program_of(&self, index: ParameterIndex) -> Option<ParameterIndex> {
        self.parameters.get(&index)?.declaration.hosted?;
        let mut before = self.parameters.range(..=index).rev();
        before.find(|(_, held)| held.declaration.hosted == Some(Hosted::Program)).map(|(index, _)| *index)
    }

    /// The first chunk of the group that a chunk, or its share, is of: of a bucket's numbers the bucket, and of parts
    /// of a hosted program the program.
    pub(super) fn first_of_group(&self, id: ChunkId) -> ChunkId {
        let parameter = self.program_of(id.parameter).unwrap_or_else(|| self.reader_of(id.parameter));
        let is_table = self.parameters.get(&parameter).is_some_and(|reader| reader.rows.is_some());
        ChunkId { parameter, chunk: if is_table { id.chunk } else { ChunkIndex(0) } }
    }

    /// The group of a chunk, if it is updated together with others.
    #[inline]
    pub(super) fn group(&self, chunk: &Chunk) -> Option<&Group> {
        Some(&self.groups[chunk.group?.place()])
    }

    /// The unit that a chunk is updated and published with.
    #[inline]
    pub(super) fn unit(&self, slot_index: SlotIndex) -> UpdateUnit {
        match self.chunks[slot_index].group {
            None => UpdateUnit::One(slot_index),
            Some(group) => UpdateUnit::Group(group, Arc::clone(&self.groups[group.place()].chunks)),
        }
    }

    /// The first chunk of that unit, by which its stalls name it.
    pub(super) fn first_of_unit(&self, slot_index: SlotIndex) -> SlotIndex {
        self.group(&self.chunks[slot_index]).map_or(slot_index, |group| group.chunks[0])
    }

    /// Declares the parameter of an init frame, or checks that an earlier declaration is equal. A refused frame
    /// declares nothing.
    pub(super) fn declare(&mut self, message: InitMessage, entries: &[Entry]) -> Result<(), Refusal> {
        let index = ParameterIndex(message.parameter);
        let check = |held: &ShardParameter| {
            entries.iter().try_for_each(|entry| match entry.id.parameter == index {
                true => held.check_initial(entry),
                false => Err(Refusal::invalid("an init frame brings chunks of one parameter")),
            })
        };
        match self.parameters.get(&index) {
            Some(held) if held.message(index) == message => check(held),
            Some(held) => Err(Refusal::invalid(format!(
                "parameter {index} was declared as \"{}\" before and differently now",
                held.name()
            ))),
            None => {
                let held = ShardParameter::from_message(message, &self.rules)?;
                check(&held)?;
                if !self.rules.contains_key(&held.config) {
                    self.rules.insert(Arc::clone(&held.config), Arc::clone(&held.rule));
                }
                self.parameters.insert(index, Box::new(held));
                Ok(())
            }
        }
    }

    /// Checks an entry with a payload that replaces a chunk.
    pub(super) fn check_whole(&self, entry: &Entry) -> Result<(), Refusal> {
        // Other chunks of the parameter may live on another shard.
        self.slot_index(entry.id).ok_or_else(|| unknown(entry.id))?;
        let held = self.held(entry.id);
        held.rows.as_ref().map_or_else(|| held.check_whole(entry), |plan| plan.check_set(held.name(), entry))
    }

    /// Checks a gradient entry and returns its chunk's slot index, tried first after `last`; half precision shortens
    /// the payload.
    pub(super) fn check_gradient(&self, last: Option<SlotIndex>, entry: &Entry) -> Result<SlotIndex, Refusal> {
        let slot_index = self.place_after(last, entry.id).ok_or_else(|| unknown(entry.id))?;
        let chunk = &self.chunks[slot_index];
        if chunk.bucket().is_some() {
            let held = self.held(entry.id);
            held.rows.as_ref().expect("the chunk is a bucket").check_entry(held.name(), entry)?;
            return Ok(slot_index);
        }
        if (entry.element_type, entry.bytes) == (chunk.element_type, chunk.bytes) {
            return Ok(slot_index);
        }
        if !entry.element_type.is_gradient_for(chunk.element_type) {
            return Err(Refusal::invalid(format!(
                "parameter \"{}\": a gradient of {} was sent for a parameter of {}",
                self.held(entry.id).name(),
                entry.element_type,
                chunk.element_type
            )));
        }
        let elements = u64::from(chunk.bytes) / chunk.element_type.bytes();
        let expected = elements * entry.element_type.bytes();
        // An entry without a payload is checked with the mode.
        if entry.bytes != 0 && u64::from(entry.bytes) != expected {
            return Err(wrong_length(self.held(entry.id), entry, expected));
        }
        Ok(slot_index)
    }

    /// Applies initial data: a value, or rows of a bucket.
    pub(super) fn begin(
        &mut self,
        room: &mut RowsWorkspace,
        entry: &Entry,
        payload: Option<Lease>,
    ) -> Result<(), Refusal> {
        let held = self.held(entry.id);
        if held.rows.is_none() {
            let value = payload.ok_or_else(|| wrong_length(held, entry, held.span(entry.id).unwrap_or(0).into()))?;
            self.fill(entry, value);
            return Ok(());
        }
        let name = held.name().to_owned();
        let refused = |failure: Failure| Refusal::invalid(format!("parameter \"{name}\": {failure}"));
        let bucket = self.bucket(entry.id).map_err(refused)?.bucket_mut().expect("it was made as one");
        let Some(lease) = payload else { return Ok(()) };
        bucket.set(room, entry, &lease.bytes()[..entry.bytes as usize]).map_err(refused)
    }

    /// Stores an initial value; the last one sent counts.
    pub(super) fn fill(&mut self, entry: &Entry, value: Lease) {
        if let Some(slot_index) = self.slot_index(entry.id) {
            self.chunks[slot_index].put_value(value);
            return;
        }
        let held = self.parameters.get(&entry.id.parameter).expect("the entry was checked");
        self.add(Chunk::new(entry.id, held.element_type(), Arc::clone(&held.rule), value, entry.bytes));
    }

    /// The bucket of a checked entry, created on first use.
    pub(super) fn bucket(&mut self, id: ChunkId) -> Result<&mut Chunk, Failure> {
        let slot_index = if let Some(slot_index) = self.slot_index(id) {
            slot_index
        } else {
            let held = self.parameters.get(&id.parameter).expect("the entry was checked");
            let plan = held.rows.as_ref().expect("the parameter is one of rows");
            let chunk = Chunk::of_rows(id, Arc::clone(&held.rule), Bucket::new(plan, id.chunk, &held.rule)?);
            self.add(chunk)
        };
        Ok(&mut self.chunks[slot_index])
    }

    /// Replaces the rule of every parameter.
    pub(super) fn replace_rule(&mut self, rule: &Arc<Prepared>) -> Result<(), Failure> {
        self.parameters.values_mut().for_each(|held| held.rule = Arc::clone(rule));
        for chunk in self.chunks.iter_mut() {
            let plan = self.parameters.get(&chunk.id.parameter).and_then(|held| held.rows.as_deref());
            chunk.replace_rule(rule, plan)?;
        }
        Ok(())
    }

    fn add(&mut self, chunk: Chunk) -> SlotIndex {
        let slot_index = SlotIndex::new(self.chunks.len());
        self.has_rows |= chunk.bucket().is_some();
        self.slot_indices.insert(chunk.id, slot_index);
        let held = self.parameters.get_mut(&chunk.id.parameter).expect("the entry was checked");
        held.chunks.push(slot_index);
        self.chunks.0.push(chunk);
        slot_index
    }

    /// Whether the payload of an entry is rows or their ids.
    pub(super) fn is_of_rows(&self, entry: &Entry) -> bool {
        self.has_rows && self.slot_index(entry.id).is_some_and(|slot_index| self.chunks[slot_index].bucket().is_some())
    }

    /// Names a bucket.
    pub(super) fn bucket_text(&self, slot_index: SlotIndex) -> String {
        let id = self.chunks[slot_index].id;
        format!("parameter \"{}\" bucket {}", self.held(id).name(), id.chunk)
    }
}

fn wrong_length(held: &ShardParameter, entry: &Entry, expected: u64) -> Refusal {
    Refusal::invalid(format!(
        "parameter \"{}\" chunk {}: {} bytes were sent, expected {expected}",
        held.name(),
        entry.id.chunk,
        entry.bytes
    ))
}

pub(super) fn unknown(id: ChunkId) -> Refusal {
    Refusal::invalid(format!("this shard holds no chunk {} of parameter {}", id.chunk, id.parameter))
}
