//! The device's memory for chunks: taken in blocks while chunks are adopted, for reasons that are counted.

use std::fmt;
use std::sync::Arc;

use pserver_core::port::{NotAdopted, Resident};

use super::checked::Refused;
use super::gathering::aligned;
use super::safe::{Context, Memory, Part};

/// Memory is taken from the driver so much at a time, because it gives whole pages of two MiB, and few allocations are
/// few registrations for a network card.
const BLOCK_BYTES: u64 = 64 << 20;

/// Left to the driver and to others where nobody has set a limit: modules, pinned pages and another shard's streams
/// take some when the chunks are there. Of a small device a part.
const KEPT_BYTES: u64 = 256 << 20;
const KEPT_PART: u64 = 64;

/// Why there is memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reasons {
    pub(super) parameters: u64,
    pub(super) states: u64,
    /// Sums that wait for the norm of a whole gradient, with their squares.
    pub(super) kept: u64,
    /// Gradients on their way, a sum, and numbers.
    pub(super) gradients: u64,
}

/// A chunk's memory.
pub(super) struct Places {
    pub(super) parameter: Part,
    pub(super) states: Vec<Part>,
    /// The sum that it keeps, and its sums of squares.
    pub(super) kept: Option<(Part, Part)>,
}

/// Memory that is handed out from its beginning to its end, and given back as a whole.
pub(super) struct Room {
    context: Arc<Context>,
    limit: Option<u64>,
    blocks: Vec<Arc<Memory>>,
    /// What is left of the last block.
    left: Option<Part>,
    /// Bytes of all blocks.
    taken: u64,
    reasons: Reasons,
}

impl fmt::Display for Reasons {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, states, kept, gradients } = self;
        write!(formatter, "parameters {parameters}, states {states}, kept sums {kept}, gradients and sums {gradients}")
    }
}

impl Room {
    /// Room for at most `limit` bytes, beside what was taken before for gradients.
    pub(super) fn new(context: &Arc<Context>, limit: Option<u64>, gradients: u64) -> Self {
        let reasons = Reasons { gradients, ..Reasons::default() };
        Self { context: Arc::clone(context), limit, blocks: Vec::new(), left: None, taken: 0, reasons }
    }

    /// Bytes that can still be handed out, as far as anybody knows.
    pub(super) fn free(&self) -> u64 {
        self.left.as_ref().map_or(0, Part::bytes) + self.allowed()
    }

    /// Bytes that may still be taken of the driver.
    fn allowed(&self) -> u64 {
        let (free, total) = self.context.memory().unwrap_or((0, 0));
        match self.limit {
            Some(limit) => free.min(limit.saturating_sub(self.taken)),
            None => free.saturating_sub(kept(total)),
        }
    }

    /// A chunk's parameter, its states, and the sum that it keeps.
    ///
    /// # Errors
    /// [`NotAdopted::Full`] when there is not as much; names the bytes that were asked for and those that are free.
    pub(super) fn take(&mut self, resident: &Resident) -> Result<Places, NotAdopted> {
        let (bytes, states) = (u64::from(resident.bytes), resident.code.states() as u64);
        let squares = u64::from(resident.squares_bytes());
        let each = aligned(bytes);
        let kept = if resident.keeps_sum { each + aligned(squares) } else { 0 };
        let needed = each * (1 + states) + kept;
        if self.left.as_ref().is_none_or(|left| left.bytes() < needed) {
            self.grow(needed)?;
        }
        let left = self.left.as_ref().expect("it was made large enough");
        let part = |index| left.part(index * each..index * each + bytes);
        let behind = (2 + states) * each;
        let kept_parts = resident.keeps_sum.then(|| (part(1 + states), left.part(behind..behind + squares)));
        let places = Places { parameter: part(0), states: (1..=states).map(part).collect(), kept: kept_parts };
        self.left = Some(left.part(needed..left.bytes()));
        self.reasons.parameters += each;
        self.reasons.states += each * states;
        self.reasons.kept += kept;
        Ok(places)
    }

    /// Gives everything back.
    pub(super) fn clear(&mut self) {
        self.left = None;
        self.blocks.clear();
        self.taken = 0;
        self.reasons = Reasons { gradients: self.reasons.gradients, ..Reasons::default() };
    }

    fn grow(&mut self, needed: u64) -> Result<(), NotAdopted> {
        let allowed = self.allowed();
        // A whole block, or as much as is needed when that is all there is.
        let mut refused = None;
        for bytes in [needed.max(BLOCK_BYTES), needed].into_iter().filter(|bytes| *bytes <= allowed) {
            match Memory::new(&self.context, bytes) {
                Ok(memory) => {
                    self.left = Some(memory.part(0..bytes));
                    self.blocks.push(memory);
                    self.taken += bytes;
                    return Ok(());
                }
                Err(error) => refused = Some(error),
            }
        }
        Err(self.exhausted(needed, refused.as_ref()))
    }

    /// Why there is not as much: the bound, or what the driver said.
    fn exhausted(&self, needed: u64, refused: Option<&Refused>) -> NotAdopted {
        let (free, total) = self.context.memory().unwrap_or((0, 0));
        let kept = || format!(", {} are kept for the driver", kept(total));
        let limit = self.limit.map_or_else(kept, |limit| format!(", {limit} are allowed for chunks"));
        let why = refused.map_or_else(String::new, |refused| format!(": {refused}"));
        NotAdopted::Full(format!(
            "memory of CUDA device {}: {needed} bytes were asked for, {free} of {total} are free{limit}; taken for \
             {}{why}",
            self.context.properties().ordinal,
            self.reasons
        ))
    }
}

/// What is left to the driver of a device of so many bytes.
fn kept(total: u64) -> u64 {
    KEPT_BYTES.min(total / KEPT_PART)
}
