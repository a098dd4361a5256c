//! Source of a shard's leases: arenas added during initialisation, and none afterwards.

use std::collections::BTreeMap;

use super::half_values::HalfValues;
use super::needs::Needs;
use super::options::ProcessMemory;
use crate::error::Failure;
use crate::limits::CHUNK_BYTES_MAX;
use crate::memory::{Arena, Budget, Lease};
use crate::port::Accelerator;

/// Size of the first extent of a class; each further one is twice as large.
const FIRST_EXTENT_BYTES: u64 = 64 * 1024 * 1024;

/// Size of the first extent for rows.
const FIRST_ROWS_BYTES: u64 = 4 * 1024 * 1024;

/// The arenas of one shard.
pub(super) struct Pool {
    extents: Vec<Arena>,
    /// Half-precision copies of values; unread copies are dropped when leases are short.
    pub(super) halves: HalfValues,
    /// Whether trainers on this host may map the arenas.
    is_shared: bool,
    memory_limit: Option<ProcessMemory>,
    sealed: bool,
    /// Arenas for payloads of rows, whose lengths are not known in advance; bounded.
    rows: Vec<Arena>,
    rows_bytes: u64,
    rows_bytes_max: u64,
    /// Mapped bytes by reason.
    pub(super) mapped: BTreeMap<&'static str, u64>,
}

impl Pool {
    pub(super) fn new(is_shared: bool, memory_limit: Option<ProcessMemory>) -> Self {
        Self {
            extents: Vec::new(),
            halves: HalfValues::default(),
            is_shared,
            memory_limit,
            sealed: false,
            rows: Vec::new(),
            rows_bytes: 0,
            rows_bytes_max: 0,
            mapped: BTreeMap::new(),
        }
    }

    /// A lease of `bytes`. A full pool drops unread half-precision copies first. Before the pool is sealed a missing
    /// slot is mapped; afterwards it is an error.
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

    /// A free lease, without reclaiming any.
    pub(super) fn take_free(&self, bytes: u32) -> Option<Lease> {
        self.extents.iter().rev().find_map(|arena| arena.take(bytes).ok())
    }

    /// As [`Pool::take`] for `count` leases, each passed to `give`; leases of one extent are taken together.
    pub(super) fn take_many(&mut self, bytes: u32, count: usize, give: &mut dyn FnMut(Lease)) -> Result<(), Failure> {
        let found = match self.extents.last() {
            Some(arena) => arena.take_many(bytes, count, give)?,
            None => 0,
        };
        (found..count).try_for_each(|_| self.take(bytes).map(&mut *give))
    }

    /// A lease for rows: a free one, or newly mapped up to the bound.
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

    /// Adds the last arena. Afterwards only rows map memory, at most `rows_bytes`.
    pub(super) fn seal(&mut self, budget: &Budget, rows_bytes: u64) -> Result<(), Failure> {
        self.rows_bytes_max = rows_bytes;
        if budget.bytes() > 0 {
            self.add(budget)?;
        }
        self.sealed = true;
        Ok(())
    }

    /// Adds an arena to a sealed pool, for more trainers; rows may map `rows_bytes` from now on.
    pub(super) fn extend(&mut self, budget: &Budget, rows_bytes: u64) -> Result<Option<&Arena>, Failure> {
        self.rows_bytes_max = self.rows_bytes_max.max(rows_bytes);
        if budget.bytes() == 0 {
            return Ok(None);
        }
        self.add(budget)?;
        Ok(self.extents.last())
    }

    /// Notes the need of the parameters in a run of another number of trainers.
    pub(super) fn note_need(&self, needs: &Needs) {
        self.memory_limit.iter().for_each(|limit| limit.need.set(needs.least()));
    }

    /// Pins the memory of values, states and gradients for a device; rows stay on the processor.
    pub(super) fn offer(&self, accelerator: &mut dyn Accelerator) -> Result<(), Failure> {
        self.extents.iter().try_for_each(|arena| accelerator.pin(arena))
    }

    /// Checks what this shard will need for sure, when its parameters are declared. Returns whether all that it may
    /// need fits.
    ///
    /// # Errors
    /// Names the need, the limit and the remedies.
    pub(super) fn check_limit(&self, needs: &Needs) -> Result<bool, Failure> {
        let Some(limit) = &self.memory_limit else { return Ok(true) };
        // Tables may stay smaller than they were declared.
        let (values, least) = (needs.values, needs.states + needs.gradients);
        let need = values.saturating_add(least);
        limit.need.set(need);
        let left = limit.left();
        if need <= left {
            return Ok(needs.most <= left);
        }
        Err(Failure::call(format!(
            "parameters need {need} bytes or more on this shard (values {values}, states and a gradient of each \
             trainer {least}); found {left} bytes for it, which the other shards leave of a memory limit of {} bytes \
             (cgroup); expected a higher limit, more servers, or fewer trainers",
            limit.bytes
        )))
    }

    fn grow(&mut self, bytes: u32) -> Result<(), Failure> {
        let values = self.extents.iter().map(|arena| arena.usage().bytes_in_use).sum();
        self.check_limit(&Needs { values, states: bytes.into(), ..Needs::default() })?;
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

    fn arena(&mut self, budget: &Budget) -> Result<Arena, Failure> {
        let shared = if self.is_shared { Arena::shared(budget).map(Some) } else { Ok(None) };
        let shared = shared.unwrap_or_else(|failure| {
            // Trainers on this host then get copies of values.
            tracing::warn!("memory of values is not shared with trainers on this host: {failure}");
            self.is_shared = false;
            None
        });
        let arena = shared.map_or_else(|| Arena::new(budget), Ok)?;
        for line in budget.lines() {
            *self.mapped.entry(line.reason).or_default() += line.mapped_bytes();
        }
        Ok(arena)
    }
}
