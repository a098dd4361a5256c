//! Several updates as one launch.
//!
//! An update alone takes ten calls of the driver, and one for each gradient. Updates that wait in a row, run the same
//! kernel and fit in a bank together take two each, and one for each gradient, and seven for all: what the kernel takes
//! for each, and their numbers, go to the device in one copy, and what waits for what is said once.

use std::collections::VecDeque;

use pserver_core::error::Failure;
use pserver_core::port::Work;

use super::accelerator::{Cuda, Job, ROWS_MAX, Seat};
use super::arguments::{GRADIENTS_MAX, Kind, UpdateArguments};
use super::checked::Refused;
use super::gathering::aligned;
use super::safe::{Entry, Lane, Part, Ticket};
use super::submission::{Stopped, gradient, grid_of, into};

/// Updates that begin together.
struct Together {
    /// Of each, its work and its slot.
    jobs: Vec<(Ticket, usize)>,
    /// Where each one's gradients go, in order.
    parts: Vec<Vec<Part>>,
    bank: usize,
    /// What goes to the device for all of them.
    table: Part,
    /// Whether the kernel was started.
    is_written: bool,
    /// How many are submitted whole.
    closed: usize,
}

/// What goes to the device for updates that begin together.
#[derive(Default)]
struct Rows {
    rows: Vec<UpdateArguments>,
    /// Of all, one behind the other.
    numbers: Vec<u8>,
    parts: Vec<Vec<Part>>,
}

impl Cuda {
    /// How many updates at the front of the queue can be one launch.
    pub(super) fn alike(&mut self, queue: &VecDeque<Work>) -> usize {
        let most = if self.tables.is_empty() { 0 } else { self.free.len().min(ROWS_MAX) };
        let (mut left, mut first): (u64, Option<Entry>) = (self.banks.room(), None);
        for (count, work) in queue.iter().take(most).enumerate() {
            let Some((entry, bytes)) = self.fits(work) else { return count };
            let is_again = queue.iter().take(count).any(|other| other.slot() == work.slot());
            if is_again || left < bytes || first.as_ref().is_some_and(|first| !first.is(&entry)) {
                return count;
            }
            left -= bytes;
            first = Some(entry);
        }
        queue.len().min(most)
    }

    /// What an update runs and takes of a bank, if all of it can be there at once, and goes there by itself.
    fn fits(&mut self, work: &Work) -> Option<(Entry, u64)> {
        let Work::Update { slot, gradients, .. } = work else { return None };
        let slot = &self.slots[slot.0 as usize];
        let element_type = gradients.first()?.element_type;
        if slot.broken.is_some() || GRADIENTS_MAX < gradients.len() {
            return None;
        }
        let mut bytes = 0;
        for gradient in gradients {
            let lock = self.arenas.iter_mut().find_map(|arena| arena.lock(&self.context, gradient.lease.bytes()));
            if lock != Some(true) || gradient.element_type != element_type {
                return None;
            }
            bytes += aligned(gradient.bytes.into());
        }
        Some((slot.program.entry.clone(), bytes))
    }

    /// Begins updates that [`Cuda::alike`] has counted.
    pub(super) fn begin_together(&mut self, works: Vec<Work>) -> Result<(), Failure> {
        let bank = self.banks.turn();
        let mut table = self.tables.pop().expect("whoever counts has asked for one");
        let Rows { rows, numbers, parts } = self.rows(&works, bank, &table.part);
        let (head, tail) = table.host.bytes_mut().split_at_mut(size_of_val(rows.as_slice()));
        head.copy_from_slice(bytemuck::cast_slice(&rows));
        tail[..numbers.len()].copy_from_slice(&numbers);
        let part = table.part.part(0..(size_of_val(rows.as_slice()) + numbers.len()) as u64);
        let mut table = Some(table);
        let mut jobs = Vec::with_capacity(works.len());
        for work in works {
            let slot = work.slot().0 as usize;
            self.slots[slot].is_busy = true;
            if let Work::Update { into, .. } = &work {
                let _ = self.arenas.iter_mut().find_map(|arena| arena.lock(&self.context, into.bytes()));
            }
            let Seat { desk, numbers, end } = self.free.pop().expect("whoever counts has asked for room");
            jobs.push((self.lanes.hold(Job { work, desk, numbers, table: table.take() }, end), slot));
        }
        let mut all = Together { jobs, parts, bank, table: part, is_written: false, closed: 0 };
        let Err(refused) = self.submit_together(&mut all, &rows) else { return Ok(()) };
        let stopped = Stopped { refused, is_written: all.is_written };
        all.jobs[all.closed..].iter().try_for_each(|(ticket, slot)| self.spoil(*ticket, *slot, &stopped))
    }

    /// What the kernel takes for each, their numbers, and where their gradients go.
    fn rows(&mut self, works: &[Work], bank: usize, table: &Part) -> Rows {
        let mut all = Rows::default();
        let numbers_at = table.address() + (works.len() * size_of::<UpdateArguments>()) as u64;
        let mut filled = 0;
        for work in works {
            let Work::Update { slot, numbers, gradients, .. } = work else { unreachable!("these are updates") };
            let slot = &self.slots[slot.0 as usize];
            slot.check(work);
            let mut row = slot.arguments();
            slot.program.numbers.pack(slot.resident.element_type, numbers, &mut self.packed);
            if !self.packed.is_empty() {
                row.scalars = numbers_at + all.numbers.len() as u64;
                all.numbers.extend_from_slice(&self.packed);
                all.numbers.resize(all.numbers.len().next_multiple_of(size_of::<f64>()), 0);
            }
            let mut parts = Vec::with_capacity(gradients.len());
            for (address, gradient) in row.gradients.iter_mut().zip(gradients) {
                let bytes = u64::from(gradient.bytes);
                let part = self.banks.bank(bank).part.part(filled..filled + bytes);
                *address = part.address();
                filled += aligned(bytes);
                parts.push(part);
            }
            row.count = u32::try_from(gradients.len()).expect("a kernel takes as many");
            row.gradient_kind = Kind::of(gradients[0].element_type).code();
            all.rows.push(row);
            all.parts.push(parts);
        }
        all
    }

    fn submit_together(&mut self, all: &mut Together, rows: &[UpdateArguments]) -> Result<(), Refused> {
        let bank = self.banks.bank(all.bank);
        self.lanes.wait(Lane::In, &bank.used)?;
        for ((ticket, _), parts) in all.jobs.iter().zip(&all.parts) {
            for (index, part) in parts.iter().enumerate() {
                self.lanes.copy_in(*ticket, |job| gradient(job, index), part)?;
            }
        }
        let length = usize::try_from(all.table.bytes()).expect("an address has 64 bits");
        self.lanes.copy_in(all.jobs[0].0, |job| &table(job)[..length], &all.table)?;
        self.lanes.record(Lane::In, &bank.filled)?;
        self.lanes.wait(Lane::Compute, &bank.filled)?;
        let most = rows.iter().map(|row| row.elements).max().unwrap_or(0);
        let high = u32::try_from(rows.len()).expect("they are few");
        let entry = &self.slots[all.jobs[0].1].program.entry;
        let whole = UpdateArguments { table: all.table.address(), ..rows[0] };
        self.lanes.launch(entry, grid_of(&self.context, most, high), &whole)?;
        all.is_written = true;
        self.lanes.record(Lane::Compute, &bank.used)?;
        self.lanes.wait(Lane::Out, &bank.used)?;
        for (ticket, slot) in &all.jobs {
            let slot = &self.slots[*slot];
            let length = slot.resident.bytes as usize;
            self.lanes.copy_out(*ticket, &slot.parameter, |job| &mut into(job).bytes_mut()[..length])?;
            self.lanes.close(Lane::Out, *ticket)?;
            all.closed += 1;
        }
        Ok(())
    }
}

fn table(job: &Job) -> &[u8] {
    job.table.as_ref().expect("the first has the table").host.bytes()
}
