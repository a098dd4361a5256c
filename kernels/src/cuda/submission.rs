//! Submission of work to the device: copies, kernels and events.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::memory::Lease;
use pserver_core::port::{Done, Work};

use super::accelerator::{Cuda, RING_PIECES};
use super::arguments::{ElementKind, SquaresArguments, SumMode, UpdateArguments};
use super::checked::DriverError;
use super::gathering::{GatherPlan, aligned};
use super::in_flight::{CopyProgress, FailedWork, FreeEvents, GradientGroup, Submission, SubmittedWork, WorkKind};
use super::safe::{DeviceRange, StreamId, Ticket, grid, grid_of};

impl Cuda {
    /// Submits one piece of work, completely or as far as the ring has room. A driver error is the work's outcome, or
    /// makes the device lost.
    pub(super) fn begin(&mut self, work: Work) -> Result<(), Failure> {
        let index = work.slot().0 as usize;
        let slot = &mut self.chunks.slots[index];
        if let Some(reason) = &slot.broken {
            let outcome = Err(Failure::Device(format!("slot {index} is broken: {reason}")));
            self.outcomes.completed.push(Done { work, outcome });
            return Ok(());
        }
        slot.check(&work);
        slot.is_busy = true;
        let mut launch = slot.arguments();
        self.prepared.gradients.clear();
        self.prepared.pinned.clear();
        let task = match &work {
            Work::Load { states, .. } => WorkKind::Load { states: states.len() },
            Work::Store { .. } => WorkKind::Store,
            Work::Sum { gradients, .. } => {
                self.prepared
                    .gradients
                    .extend(gradients.iter().map(|gradient| (gradient.bytes, gradient.element_type)));
                slot.kept.as_mut().expect("the work was checked").is_there = false;
                WorkKind::Sum
            }
            Work::Update { numbers, gradients, is_summed, .. } => {
                if *is_summed {
                    launch.sum = slot.kept.as_ref().expect("the work was checked").sum.address();
                } else {
                    self.prepared
                        .gradients
                        .extend(gradients.iter().map(|gradient| (gradient.bytes, gradient.element_type)));
                }
                slot.set_numbers(&mut launch, numbers, &mut self.prepared.packed);
                WorkKind::Update
            }
        };
        self.lock(&work);
        let FreeEvents { place, end, mut works } = self.events.free.pop().expect("the caller checked has_room");
        works.push(work);
        let ticket = self.streams.hold(SubmittedWork { works, place }, end);
        self.submission = Some(Submission {
            ticket,
            index,
            place,
            task,
            launch,
            group: GradientGroup::default(),
            copy: CopyProgress::default(),
            is_written: false,
        });
        self.advance()
    }

    /// Continues a partial submission as far as the ring has room.
    pub(super) fn advance(&mut self) -> Result<(), Failure> {
        let Some(mut submission) = self.submission.take() else { return Ok(()) };
        submission.copy.allowed = RING_PIECES;
        let advanced = match submission.task {
            WorkKind::Load { states } => self.load(&mut submission, states),
            WorkKind::Sum => self.sum(&mut submission),
            WorkKind::Update => self.update(&mut submission),
            WorkKind::Store => self.store(&submission).map(|()| true),
        };
        match advanced {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.submission = Some(submission);
                Ok(())
            }
            Err(refused) => self.fail_work(submission.ticket, refused, usize::from(submission.is_written)),
        }
    }

    /// Pins the pages that the work's copies touch, and records which sources of copies to the device are not pinned.
    fn lock(&mut self, work: &Work) {
        let (arenas, is_pinned) = (&mut self.arenas, &mut self.prepared.is_pinned);
        is_pinned.clear();
        match work {
            Work::Load { parameter, states, .. } => {
                is_pinned.push(arenas.lock_bytes(parameter.bytes()).unwrap_or_default());
                is_pinned.extend(states.iter().map(|lease| arenas.lock(lease)));
            }
            Work::Update { is_summed: true, into, .. } => {
                arenas.lock(into);
            }
            Work::Sum { gradients, squares: into, .. } | Work::Update { gradients, into, .. } => {
                is_pinned.extend(gradients.iter().map(|gradient| arenas.lock(&gradient.lease)));
                arenas.lock(into);
            }
            Work::Store { states, .. } => states.iter().for_each(|lease| {
                arenas.lock(lease);
            }),
        }
    }

    /// Submits the rest of the current tensor's copy; returns whether the copy is complete.
    fn copy_to_device(
        &mut self,
        submission: &mut Submission,
        from: ItemBytes,
        to: &DeviceRange,
    ) -> Result<bool, DriverError> {
        let (ticket, item, length) = (submission.ticket, submission.copy.item, to.bytes());
        let from_offset = |offset: u64| {
            let number = |bytes| usize::try_from(bytes).expect("a chunk's length has 32 bits");
            number(offset)..number(length)
        };
        if self.prepared.is_pinned[item] {
            self.streams.copy_in(ticket, |job| &from(job, item)[from_offset(0)], to)?;
        }
        while !self.prepared.is_pinned[item] && submission.copy.offset < length {
            if submission.copy.allowed == 0 {
                return Ok(false);
            }
            let (offset, rest) = (submission.copy.offset, to.part(submission.copy.offset..length));
            let went = self.streams.copy_through(
                &mut self.ring,
                ticket,
                |job| &from(job, item)[from_offset(offset)],
                &rest,
            )?;
            if went == 0 {
                return Ok(false);
            }
            submission.copy.offset += went as u64;
            submission.copy.allowed -= 1;
        }
        submission.copy.item += 1;
        submission.copy.offset = 0;
        Ok(true)
    }

    fn load(&mut self, submission: &mut Submission, states: usize) -> Result<bool, DriverError> {
        while submission.copy.item <= states {
            let slot = &self.chunks.slots[submission.index];
            let to = if submission.copy.item == 0 { &slot.parameter } else { &slot.states[submission.copy.item - 1] };
            let to = to.clone();
            let is_on_its_way = self.copy_to_device(submission, loaded, &to)?;
            // From the first copy on the slot's old content is lost.
            submission.is_written = true;
            if !is_on_its_way {
                return Ok(false);
            }
        }
        self.streams.close(StreamId::In, submission.ticket)?;
        Ok(true)
    }

    fn store(&mut self, submission: &Submission) -> Result<(), DriverError> {
        let slot = &self.chunks.slots[submission.index];
        for (place, state) in slot.states.iter().enumerate() {
            let length = slot.resident.bytes as usize;
            self.streams.copy_out(submission.ticket, state, |job| &mut stored(job, place).bytes_mut()[..length])?;
        }
        self.streams.close(StreamId::Out, submission.ticket)
    }

    /// Sums the gradients into the slot's kept sum, and then their squares.
    fn sum(&mut self, submission: &mut Submission) -> Result<bool, DriverError> {
        while self.next_group(submission)? {
            if !self.gather(submission)? {
                return Ok(false);
            }
            self.sum_group(submission)?;
        }
        let (slot, reached) = (&self.chunks.slots[submission.index], &self.events.reached[submission.place]);
        let kept = slot.kept.as_ref().expect("the work was checked");
        let (elements, values) = (submission.launch.elements, kept.sum.address());
        if self.prepared.gradients.is_empty() {
            let zero = UpdateArguments { weights: values, merge: SumMode::Sum as u32, ..submission.launch };
            self.streams.launch(&slot.sum, grid(elements), &zero)?;
        }
        // One thread per block of squares.
        let threads = u64::from(slot.resident.squares_bytes()) / 8;
        let squares = SquaresArguments { values, elements, squares: kept.squares.address() };
        self.streams.launch(&kept.entry, grid_of(threads), &squares)?;
        self.streams.record(StreamId::Compute, reached)?;
        self.streams.wait(StreamId::Out, reached)?;
        let length = slot.resident.squares_bytes() as usize;
        self.streams.copy_out(submission.ticket, &kept.squares, |job| &mut into(job).bytes_mut()[..length])?;
        self.streams.close(StreamId::Out, submission.ticket)?;
        Ok(true)
    }

    fn update(&mut self, submission: &mut Submission) -> Result<bool, DriverError> {
        while self.next_group(submission)? {
            if !self.gather(submission)? {
                return Ok(false);
            }
            self.sum_group(submission)?;
        }
        let (slot, reached) = (&self.chunks.slots[submission.index], &self.events.reached[submission.place]);
        if self.prepared.gradients.is_empty() {
            // Nothing is copied in, and what the slot holds was there before this work began.
            self.streams.launch(&slot.program.entry, grid(submission.launch.elements), &submission.launch)?;
            submission.is_written = true;
            self.streams.record(StreamId::Compute, reached)?;
            self.streams.wait(StreamId::Out, reached)?;
        } else {
            // The kernel released the last group's bank.
            self.streams.wait(StreamId::Out, &self.summing.banks.bank(submission.group.bank).used)?;
        }
        let length = slot.resident.bytes as usize;
        self.streams.copy_out(submission.ticket, &slot.parameter, |job| &mut into(job).bytes_mut()[..length])?;
        self.streams.close(StreamId::Out, submission.ticket)?;
        Ok(true)
    }

    /// Whether there is a group to copy: the current one, or the next one, for which a bank is taken.
    fn next_group(&mut self, submission: &mut Submission) -> Result<bool, DriverError> {
        if !submission.group.range.is_empty() {
            return Ok(true);
        }
        let Some(group) = next_group(&self.prepared.gradients, submission.group.range.end, self.summing.banks.room())
        else {
            return Ok(false);
        };
        submission.group.bank = self.summing.banks.turn();
        self.streams.wait(StreamId::In, &self.summing.banks.bank(submission.group.bank).used)?;
        (submission.copy.item, submission.group.range, submission.group.filled) = (group.start, group, 0);
        Ok(true)
    }

    /// Copies a group's gradients one behind the other into its bank, and enters their addresses; returns whether all
    /// are submitted.
    fn gather(&mut self, submission: &mut Submission) -> Result<bool, DriverError> {
        while submission.copy.item < submission.group.range.end {
            let bytes = u64::from(self.prepared.gradients[submission.copy.item].0);
            let part = self
                .summing
                .banks
                .bank(submission.group.bank)
                .part
                .part(submission.group.filled..submission.group.filled + bytes);
            let place = submission.copy.item - submission.group.range.start;
            let address = part.address();
            if self.prepared.is_pinned[submission.copy.item] {
                self.prepared.pinned.push((submission.copy.item, part));
                submission.copy.item += 1;
            } else if !self.copy_to_device(submission, gradient, &part)? {
                self.streams.copy_all_in(submission.ticket, &mut self.prepared.pinned, gradient)?;
                return Ok(false);
            }
            submission.launch.gradients[place] = address;
            submission.group.filled += aligned(bytes);
        }
        self.streams.copy_all_in(submission.ticket, &mut self.prepared.pinned, gradient)?;
        Ok(true)
    }

    /// Starts the kernel of a copied group: it sums, and with the last group of an update it also computes that.
    fn sum_group(&mut self, submission: &mut Submission) -> Result<(), DriverError> {
        let (slot, bank) = (&self.chunks.slots[submission.index], self.summing.banks.bank(submission.group.bank));
        let Submission { launch, group: GradientGroup { range: group, .. }, task, .. } = submission;
        // A kept sum is computed in the slot's own memory.
        let kept = slot.kept.as_ref().filter(|_| matches!(task, WorkKind::Sum)).map(|kept| kept.sum.address());
        launch.count = u32::try_from(group.len()).expect("a group has at most as many as a kernel takes");
        launch.gradient_kind = ElementKind::of(self.prepared.gradients[group.start].1).code();
        self.streams.record(StreamId::In, &bank.filled)?;
        self.streams.wait(StreamId::Compute, &bank.filled)?;
        if kept.is_some() || group.end < self.prepared.gradients.len() {
            let weights = kept.unwrap_or_else(|| self.summing.partial.address());
            let partial = UpdateArguments { weights, merge: SumMode::Sum as u32, ..*launch };
            self.streams.launch(&slot.sum, grid(launch.elements), &partial)?;
            launch.sum = weights;
        } else {
            let entry = &slot.program.entry;
            self.streams.launch(entry, grid(launch.elements), launch)?;
            submission.is_written = true;
        }
        *group = group.end..group.end;
        self.streams.record(StreamId::Compute, &bank.used)
    }

    /// Waits for the submitted part of failed work, of which the first `written` pieces have written their slots, and
    /// returns its leases; or marks the device as lost.
    pub(super) fn fail_work(&mut self, ticket: Ticket, refused: DriverError, written: usize) -> Result<(), Failure> {
        if !refused.is_of_the_call() {
            return Err(self.lose(&refused));
        }
        self.prepared.pinned.clear();
        self.outcomes.failed.push(FailedWork { ticket, refused, complete: 0, written });
        self.streams.close_early(ticket).map_err(|refused| self.lose(&refused))
    }
}

/// The next group of gradients from `first` on: of one type, and as many as a bank holds.
fn next_group(gradients: &[(u32, ElementType)], first: usize, room: u64) -> Option<Range<usize>> {
    let (bytes, element_type) = *gradients.get(first)?;
    let alike = gradients[first..].iter().take_while(|(_, other)| *other == element_type).count();
    let at_once = GatherPlan::of(alike, bytes.into(), room).at_once();
    Some(first..first + alike.min(at_once))
}

/// The source bytes of a copy to the device, by index.
type ItemBytes = fn(&SubmittedWork, usize) -> &[u8];

fn loaded(job: &SubmittedWork, item: usize) -> &[u8] {
    let Work::Load { parameter, states, .. } = &job.works[0] else { unreachable!("only a load brings states") };
    item.checked_sub(1).map_or_else(|| parameter.bytes(), |place| states[place].bytes())
}

fn stored(job: &mut SubmittedWork, place: usize) -> &mut Lease {
    let Work::Store { states, .. } = &mut job.works[0] else { unreachable!("only a store takes states") };
    &mut states[place]
}

fn gradient(job: &SubmittedWork, index: usize) -> &[u8] {
    let (Work::Sum { gradients, .. } | Work::Update { gradients, .. }) = &job.works[0] else {
        unreachable!("only a sum and an update have gradients")
    };
    gradients[index].gradient().bytes
}

fn into(job: &mut SubmittedWork) -> &mut Lease {
    let (Work::Sum { squares: into, .. } | Work::Update { into, .. }) = &mut job.works[0] else {
        unreachable!("only a sum and an update have one place")
    };
    into
}
