//! What a shard holds, and how it comes to hold it: parameters are declared and filled under one generation,
//! and a newer generation starts from nothing. The generation is the fence: an initialiser that was superseded
//! finds its frames refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::chunk::Chunk;
use super::reply::Refusal;
use crate::config::ParameterConfig;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkId, Generation, ParameterIndex};
use crate::memory::Lease;
use crate::optim::Prepared;
use crate::partition::Declaration;
use crate::wire::{Entry, InitMessage};

/// A parameter of which this shard holds chunks.
pub(super) struct Held {
    pub(super) message: InitMessage,
    pub(super) declaration: Declaration,
    /// One for all parameters with the same rule.
    pub(super) rule: Arc<Prepared>,
    pub(super) chunk_bytes: u32,
    pub(super) group: Group,
}

/// The chunks of a parameter that must step together because its rule needs the whole gradient.
#[derive(Default)]
pub(super) struct Group {
    /// Places in the table, in chunk order.
    pub(super) chunks: Vec<usize>,
    /// Whose round is open, in the modes where each gradient is a round of its own.
    pub(super) owner: Option<crate::ids::TrainerId>,
}

impl Held {
    /// Checks what an init frame says of its parameter.
    fn from_message(message: InitMessage, rules: &Rules) -> Result<Self, Refusal> {
        let invalid = |failure: Failure| Refusal::invalid(failure.to_string());
        let Some(declared) = &message.declaration else {
            return Err(Refusal::invalid("an init frame without a declaration"));
        };
        let declaration = Declaration::try_from(declared.clone()).map_err(invalid)?;
        let prepared = match rules.get(&declaration.config) {
            Some(known) => Arc::clone(known),
            None => Arc::new(
                ParameterConfig::decode(&declaration.config)
                    .and_then(|config| Prepared::new(config.rule))
                    .map_err(invalid)?,
            ),
        };
        let rule = prepared.rule();
        rule.validate_for(declaration.element_type).map_err(invalid)?;
        if !rule.is_element_wise() && !declaration.whole {
            return Err(Refusal::invalid(format!(
                "parameter \"{}\": its rule needs the whole gradient, and the parameter is not declared whole",
                declaration.name.as_str()
            )));
        }
        let chunk_bytes = message.chunk_bytes;
        let limits = crate::limits::CHUNK_BYTES_MIN..=crate::limits::CHUNK_BYTES_MAX;
        if !chunk_bytes.is_power_of_two() || !limits.contains(&chunk_bytes) {
            return Err(Refusal::invalid(format!("chunk size {chunk_bytes} is not a power of two within the limits")));
        }
        Ok(Self { message, declaration, rule: prepared, chunk_bytes, group: Group::default() })
    }

    pub(super) fn name(&self) -> &str {
        self.declaration.name.as_str()
    }

    pub(super) fn element_type(&self) -> ElementType {
        self.declaration.element_type
    }

    /// Checks an entry with a payload that fills a chunk of this parameter.
    fn check_whole(&self, entry: &Entry) -> Result<(), Refusal> {
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

    /// The length of a chunk, if the parameter has it.
    fn span(&self, id: ChunkId) -> Option<u32> {
        let offset = id.chunk.0.checked_mul(self.chunk_bytes.into())?;
        let left = self.declaration.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        u32::try_from(left.min(self.chunk_bytes.into())).ok()
    }
}

/// The rules of a table by their configuration: parameters that say the same share one, which then stays in cache, and
/// for which a kernel makes code once.
type Rules = BTreeMap<Vec<u8>, Arc<Prepared>>;

/// Everything that a shard holds under one generation.
pub(super) struct Table {
    pub(super) generation: Generation,
    pub(super) parameters: BTreeMap<ParameterIndex, Held>,
    pub(super) chunks: Vec<Chunk>,
    rules: Rules,
    // Only looked up, never iterated: its order can reach no sum.
    places: FxHashMap<ChunkId, usize>,
}

impl Table {
    pub(super) fn new(generation: Generation) -> Self {
        Self {
            generation,
            parameters: BTreeMap::new(),
            chunks: Vec::new(),
            rules: Rules::new(),
            places: FxHashMap::default(),
        }
    }

    /// The place of a chunk, if this shard holds it.
    pub(super) fn place(&self, id: ChunkId) -> Option<usize> {
        self.places.get(&id).copied()
    }

    /// The parameter of a chunk that this shard holds.
    pub(super) fn held(&self, id: ChunkId) -> &Held {
        self.parameters.get(&id.parameter).expect("a chunk in the table has its parameter there")
    }

    /// Declares the parameter of an init frame that brings these entries, or checks that it was declared alike.
    /// A frame that is refused declares nothing.
    pub(super) fn declare(&mut self, message: InitMessage, entries: &[Entry]) -> Result<(), Refusal> {
        let index = ParameterIndex(message.parameter);
        let check = |held: &Held| {
            entries.iter().try_for_each(|entry| match entry.id.parameter == index {
                true => held.check_whole(entry),
                false => Err(Refusal::invalid("an init frame brings chunks of one parameter")),
            })
        };
        match self.parameters.get(&index) {
            Some(held) if held.message == message => check(held),
            Some(held) => Err(Refusal::invalid(format!(
                "parameter {index} was declared as \"{}\" before and differently now",
                held.name()
            ))),
            None => {
                let held = Held::from_message(message, &self.rules)?;
                check(&held)?;
                let config = &held.declaration.config;
                if !self.rules.contains_key(config) {
                    self.rules.insert(config.clone(), Arc::clone(&held.rule));
                }
                self.parameters.insert(index, held);
                Ok(())
            }
        }
    }

    /// Checks an entry with a payload that replaces a chunk.
    pub(super) fn check_whole(&self, entry: &Entry) -> Result<(), Refusal> {
        // A chunk of the parameter may well live on another shard.
        self.place(entry.id).ok_or_else(|| unknown(entry.id))?;
        self.held(entry.id).check_whole(entry)
    }

    /// Checks an entry that brings a gradient and gives its chunk's place; halves are shorter than their chunk.
    pub(super) fn check_gradient(&self, entry: &Entry) -> Result<usize, Refusal> {
        let place = self.place(entry.id).ok_or_else(|| unknown(entry.id))?;
        let chunk = &self.chunks[place];
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
        if u64::from(entry.bytes) != expected {
            return Err(wrong_length(self.held(entry.id), entry, expected));
        }
        Ok(place)
    }

    /// Puts an initial value in its place; the last one sent counts.
    pub(super) fn fill(&mut self, entry: &Entry, value: Lease) {
        if let Some(place) = self.place(entry.id) {
            self.chunks[place].set_value(value);
            return;
        }
        let place = self.chunks.len();
        self.places.insert(entry.id, place);
        let held = self.parameters.get_mut(&entry.id.parameter).expect("the entry was checked");
        self.chunks.push(Chunk::new(entry.id, held.element_type(), Arc::clone(&held.rule), value, entry.bytes));
        held.group.chunks.push(place);
    }
}

fn wrong_length(held: &Held, entry: &Entry, expected: u64) -> Refusal {
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
