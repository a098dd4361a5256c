//! Where a shard's leases come from: arenas that may be added while parameters are initialised, and never after.

use super::halves::Halves;
use crate::error::Failure;
use crate::limits::CHUNK_BYTES_MAX;
use crate::memory::{Arena, Budget, Lease};
use crate::port::Accelerator;

/// The first extent of a size maps at most this much; every further one twice as much as the one before.
const FIRST_EXTENT_BYTES: u64 = 64 * 1024 * 1024;

/// The first extent for rows of a size.
const FIRST_ROWS_BYTES: u64 = 4 * 1024 * 1024;

/// The arenas of one shard.
pub(super) struct Pool {
    extents: Vec<Arena>,
    /// Values as halves, in leases that are to spare as long as nobody reads them.
    pub(super) halves: Halves,
    /// Whether trainers of this machine may read the arenas where they are.
    is_shared: bool,
    sealed: bool,
    /// Arenas for payloads of rows, whose lengths nobody knows beforehand; they grow up to a bound.
    rows: Vec<Arena>,
    rows_bytes: u64,
    rows_bytes_max: u64,
}

impl Pool {
    pub(super) fn new(is_shared: bool) -> Self {
        Self {
            extents: Vec::new(),
            halves: Halves::default(),
            is_shared,
            sealed: false,
            rows: Vec::new(),
            rows_bytes: 0,
            rows_bytes_max: 0,
        }
    }

    /// A lease of `bytes`, if need be one of a half that nobody reads. Before the pool is sealed a missing slot is
    /// mapped; afterwards it is a refusal.
    pub(super) fn take(&mut self, bytes: u32) -> Result<Lease, Failure> {
        if let Some(lease) = self.take_free(bytes) {
            return Ok(lease);
        }
        if self.sealed {
            if self.halves.give_up_unread()
                && let Some(lease) = self.take_free(bytes)
            {
                return Ok(lease);
            }
            return Err(Failure::call(format!("no free chunk of {bytes} bytes: every one in the budget is in use")));
        }
        self.grow(bytes)?;
        self.extents.last().expect("an extent was just added").take(bytes)
    }

    /// A lease that is free as it is.
    pub(super) fn take_free(&self, bytes: u32) -> Option<Lease> {
        self.extents.iter().rev().find_map(|arena| arena.take(bytes).ok())
    }

    /// As [`Pool::take`], `count` of them, each handed to `give`: those that one extent has are taken together.
    pub(super) fn take_many(&mut self, bytes: u32, count: usize, give: &mut dyn FnMut(Lease)) -> Result<(), Failure> {
        let found = match self.extents.last() {
            Some(arena) => arena.take_many(bytes, count, give)?,
            None => 0,
        };
        (found..count).try_for_each(|_| self.take(bytes).map(&mut *give))
    }

    /// A lease for rows. What is there is used again; beyond it memory is mapped up to the bound.
    pub(super) fn take_for_rows(&mut self, bytes: u32) -> Result<Lease, Failure> {
        if !self.sealed {
            return self.take(bytes);
        }
        if let Some(lease) = self.rows.iter().find_map(|arena| arena.take(bytes).ok()) {
            return Ok(lease);
        }
        let slot = bytes.clamp(64, CHUNK_BYTES_MAX).next_power_of_two();
        let wanted = (self.rows_bytes / 4).clamp(FIRST_ROWS_BYTES, FIRST_EXTENT_BYTES);
        let mut budget = Budget::new();
        budget.line("payloads of rows", slot, (wanted / u64::from(slot)).max(1));
        if self.rows_bytes.saturating_add(budget.bytes()) > self.rows_bytes_max {
            let (found, most) = (self.rows_bytes, self.rows_bytes_max);
            return Err(Failure::call(format!(
                "no room for {bytes} bytes of rows: {found} of at most {most} bytes are mapped and in use"
            )));
        }
        let arena = self.arena(&budget)?;
        self.rows_bytes += budget.bytes();
        self.rows.push(arena);
        self.rows.last().expect("it was just added").take(bytes)
    }

    /// Adds the last arena: from here on nothing is mapped but for rows, and for those at most `rows_bytes`.
    pub(super) fn seal(&mut self, budget: &Budget, rows_bytes: u64) -> Result<(), Failure> {
        self.rows_bytes_max = rows_bytes;
        if budget.bytes() > 0 {
            self.add(budget)?;
        }
        self.sealed = true;
        Ok(())
    }

    /// Offers the memory of values, states and gradients to a device; rows stay on the processor.
    pub(super) fn offer(&self, accelerator: &mut dyn Accelerator) -> Result<(), Failure> {
        self.extents.iter().try_for_each(|arena| accelerator.pin(arena))
    }

    fn grow(&mut self, bytes: u32) -> Result<(), Failure> {
        let slot = bytes.clamp(64, CHUNK_BYTES_MAX).next_power_of_two();
        let extents = u32::try_from(self.extents.len()).unwrap_or(u32::MAX).min(10);
        let extent = FIRST_EXTENT_BYTES << extents;
        let mut budget = Budget::new();
        budget.line("values while parameters are initialised", slot, (extent / u64::from(slot)).clamp(1, 1 << 20));
        self.add(&budget)
    }

    fn add(&mut self, budget: &Budget) -> Result<(), Failure> {
        let arena = self.arena(budget)?;
        self.extents.push(arena);
        Ok(())
    }

    fn arena(&self, budget: &Budget) -> Result<Arena, Failure> {
        if self.is_shared { Arena::shared(budget) } else { Arena::new(budget) }
    }
}
