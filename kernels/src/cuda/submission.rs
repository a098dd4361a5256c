//! How a piece of work becomes copies, kernels and events.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::STATES_MAX;
use pserver_core::memory::Lease;
use pserver_core::port::{Done, Work};

use super::accelerator::{Cuda, Job, Seat, Slot};
use super::arguments::{BLOCK_THREADS, GRADIENTS_MAX, Kind, Merge, UpdateArguments};
use super::checked::Refused;
use super::gathering::{Gathering, aligned};
use super::safe::{Context, Grid, Lane, Lanes, Part, Ticket};

/// Elements that a thread computes at once.
const ELEMENTS_AT_ONCE: u64 = 8;
/// Blocks of a multiprocessor, all of which are there at once; more would wait for their turn.
const BLOCKS_EACH: u32 = 8;

/// Which work it is, once the lanes have it.
#[derive(Clone, Copy)]
enum Task {
    Load { states: usize },
    Update,
    Store,
}

/// Why work was not submitted whole, and whether its slot has been written.
struct Stopped {
    refused: Refused,
    is_written: bool,
}

impl From<Refused> for Stopped {
    fn from(refused: Refused) -> Self {
        Self { refused, is_written: false }
    }
}

impl Cuda {
    /// Submits one piece of work whole. What the driver refuses is the work's outcome, or the device's end.
    pub(super) fn begin(&mut self, work: Work) -> Result<(), Failure> {
        let index = work.slot().0 as usize;
        let slot = &mut self.slots[index];
        if let Some(reason) = &slot.broken {
            let outcome = Err(Failure::Device(format!("slot {index} is broken: {reason}")));
            self.over.push(Done { work, outcome });
            return Ok(());
        }
        slot.check(&work);
        slot.is_busy = true;
        self.gradients.clear();
        self.packed.clear();
        let task = match &work {
            Work::Load { states, .. } => Task::Load { states: states.len() },
            Work::Store { .. } => Task::Store,
            Work::Update { numbers, gradients, .. } => {
                self.gradients.extend(gradients.iter().map(|gradient| (gradient.bytes, gradient.element_type)));
                slot.program.numbers.pack(slot.resident.element_type, numbers, &mut self.packed);
                Task::Update
            }
        };
        self.lock(&work);
        let Seat { desk, mut numbers, end } = self.free.pop().expect("whoever begins has asked for room");
        numbers.bytes_mut()[..self.packed.len()].copy_from_slice(&self.packed);
        let ticket = self.lanes.hold(Job { work, desk, numbers }, end);
        let submitted = match task {
            Task::Load { states } => self.load(ticket, index, states),
            Task::Update => self.update(ticket, index, desk),
            Task::Store => self.store(ticket, index),
        };
        submitted.or_else(|stopped| self.spoil(ticket, index, &stopped))
    }

    /// Holds the pages that the work's copies touch; those of no arena are copied all the same.
    fn lock(&mut self, work: &Work) {
        let (arenas, context) = (&mut self.arenas, &self.context);
        let mut lock = |bytes: &[u8]| {
            let _ = arenas.iter_mut().any(|arena| arena.lock(context, bytes));
        };
        match work {
            Work::Load { parameter, states, .. } => {
                lock(parameter.bytes());
                states.iter().for_each(|lease| lock(lease.bytes()));
            }
            Work::Update { gradients, into, .. } => {
                gradients.iter().for_each(|gradient| lock(gradient.lease.bytes()));
                lock(into.bytes());
            }
            Work::Store { states, .. } => states.iter().for_each(|lease| lock(lease.bytes())),
        }
    }

    fn load(&mut self, ticket: Ticket, index: usize, states: usize) -> Result<(), Stopped> {
        let slot = &self.slots[index];
        // From the first copy on the slot is another one.
        let stopped = |refused| Stopped { refused, is_written: true };
        self.lanes.copy_in(ticket, parameter, &slot.parameter)?;
        for (place, state) in slot.states.iter().enumerate().take(states) {
            let length = slot.resident.bytes as usize;
            self.lanes.copy_in(ticket, |job| &loaded(job, place).bytes()[..length], state).map_err(stopped)?;
        }
        self.lanes.close(Lane::In, ticket).map_err(stopped)
    }

    fn store(&mut self, ticket: Ticket, index: usize) -> Result<(), Stopped> {
        let slot = &self.slots[index];
        for (place, state) in slot.states.iter().enumerate() {
            let length = slot.resident.bytes as usize;
            self.lanes.copy_out(ticket, state, |job| &mut stored(job, place).bytes_mut()[..length])?;
        }
        Ok(self.lanes.close(Lane::Out, ticket)?)
    }

    fn update(&mut self, ticket: Ticket, index: usize, desk: usize) -> Result<(), Stopped> {
        let (slot, desk) = (&self.slots[index], &self.desks[desk]);
        let mut launch = slot.arguments();
        if !self.packed.is_empty() {
            let numbers = self.packed.len();
            let place = desk.numbers.part(0..numbers as u64);
            self.lanes.copy_in(ticket, |job| &job.numbers.bytes()[..numbers], &place)?;
            launch.scalars = place.address();
        }
        let grid = grid(&self.context, launch.elements);
        let room = self.banks.room();
        let mut first = 0;
        while let Some(group) = next_group(&self.gradients, first, room) {
            let bank = self.banks.turn();
            self.lanes.wait(Lane::In, &bank.used)?;
            launch.fill(&mut self.lanes, ticket, (&group, &self.gradients), &bank.part)?;
            self.lanes.record(Lane::In, &bank.filled)?;
            self.lanes.wait(Lane::Compute, &bank.filled)?;
            first = group.end;
            if first < self.gradients.len() {
                let weights = self.sum.address();
                let partial = UpdateArguments { weights, scalars: 0, merge: Merge::Sum as u32, ..launch };
                self.lanes.launch(&slot.sum, grid, &partial)?;
                launch.sum = weights;
            } else {
                self.lanes.launch(&slot.program.entry, grid, &launch)?;
            }
            let is_written = first == self.gradients.len();
            self.lanes.record(Lane::Compute, &bank.used).map_err(|refused| Stopped { refused, is_written })?;
        }
        if self.gradients.is_empty() {
            self.lanes.record(Lane::In, &desk.copied)?;
            self.lanes.wait(Lane::Compute, &desk.copied)?;
            self.lanes.launch(&slot.program.entry, grid, &launch)?;
        }
        let stopped = |refused| Stopped { refused, is_written: true };
        self.lanes.record(Lane::Compute, &desk.computed).map_err(stopped)?;
        self.lanes.wait(Lane::Out, &desk.computed).map_err(stopped)?;
        let length = slot.resident.bytes as usize;
        self.lanes.copy_out(ticket, &slot.parameter, |job| &mut into(job).bytes_mut()[..length]).map_err(stopped)?;
        self.lanes.close(Lane::Out, ticket).map_err(stopped)
    }

    /// What was submitted of the work is waited for, and its leases come back; or the device is lost.
    fn spoil(&mut self, ticket: Ticket, index: usize, stopped: &Stopped) -> Result<(), Failure> {
        let Stopped { refused, is_written } = stopped;
        if !refused.is_of_the_call() {
            return Err(self.lose(refused));
        }
        let failure = if *is_written {
            Failure::Device(format!("slot {index} is broken: {refused}"))
        } else {
            Failure::call(format!("slot {index}: {refused}"))
        };
        self.spoiled.push((ticket, failure));
        self.lanes.close_early(ticket).map_err(|refused| self.lose(&refused))
    }
}

impl Slot {
    /// Whether the work is what the slot was adopted for.
    fn check(&self, work: &Work) {
        let slot = work.slot();
        assert!(!self.is_busy, "slot {slot} has work under way");
        let holds = |lease: &Lease| self.resident.bytes <= lease.len();
        match work {
            Work::Load { parameter, states, .. } => {
                assert_eq!(parameter.len(), self.resident.bytes, "the parameter of slot {slot}");
                let all = states.len() == self.states.len() || states.is_empty() && self.is_loaded;
                assert!(all, "{} states were loaded to slot {slot}, it has {}", states.len(), self.states.len());
                assert!(states.iter().all(holds), "a state of slot {slot} is too short");
            }
            Work::Update { gradients, into, .. } => {
                assert!(self.is_loaded && holds(into), "slot {slot} was not loaded, or its place is too short");
                let own = self.resident.element_type;
                for gradient in gradients {
                    assert!(gradient.element_type.is_gradient_for(own), "{} for {own}", gradient.element_type);
                    let bytes = self.elements() * gradient.element_type.bytes();
                    assert_eq!(u64::from(gradient.bytes), bytes, "a gradient of slot {slot}");
                }
            }
            Work::Store { states, .. } => {
                assert!(self.is_loaded && states.iter().all(holds), "slot {slot} was not loaded, or a place is short");
                assert_eq!(states.len(), self.states.len(), "a place for every state of slot {slot}");
            }
        }
    }

    fn elements(&self) -> u64 {
        u64::from(self.resident.bytes) / self.resident.element_type.bytes()
    }

    /// What its kernel takes, without gradients and numbers.
    fn arguments(&self) -> UpdateArguments {
        let mut states = [0; STATES_MAX];
        states.iter_mut().zip(&self.states).for_each(|(into, state)| *into = state.address());
        let own = Kind::of(self.resident.element_type).code();
        UpdateArguments {
            elements: self.elements(),
            weights: self.parameter.address(),
            states,
            sum: 0,
            scalars: 0,
            skip: 0,
            copy: 0,
            table: 0,
            count: 0,
            gradient_kind: own,
            copy_kind: own,
            merge: self.program.numbers.merge() as u32,
            gradients: [0; GRADIENTS_MAX],
        }
    }
}

impl UpdateArguments {
    /// Copies a group's gradients one behind the other into its bank, and says where they are.
    fn fill(
        &mut self,
        lanes: &mut Lanes<Job>,
        ticket: Ticket,
        (group, gradients): (&Range<usize>, &[(u32, ElementType)]),
        bank: &Part,
    ) -> Result<(), Refused> {
        let mut offset = 0;
        for (into, index) in self.gradients.iter_mut().zip(group.clone()) {
            let bytes = u64::from(gradients[index].0);
            let part = bank.part(offset..offset + bytes);
            lanes.copy_in(ticket, |job| gradient(job, index), &part)?;
            *into = part.address();
            offset += aligned(bytes);
        }
        self.count = u32::try_from(group.len()).expect("a group has at most as many as a kernel takes");
        self.gradient_kind = Kind::of(gradients[group.start].1).code();
        Ok(())
    }
}

/// The gradients from `first` on that are one group: of one type, and as many as there is room for.
fn next_group(gradients: &[(u32, ElementType)], first: usize, room: u64) -> Option<Range<usize>> {
    let (bytes, element_type) = *gradients.get(first)?;
    let alike = gradients[first..].iter().take_while(|(_, other)| *other == element_type).count();
    let at_once = Gathering::of(alike, bytes.into(), room).at_once();
    Some(first..first + alike.min(at_once))
}

/// As many blocks as the elements are worth, and no more than are there at once.
pub(super) fn grid(context: &Context, elements: u64) -> Grid {
    let worth = elements.div_ceil(ELEMENTS_AT_ONCE * u64::from(BLOCK_THREADS)).max(1);
    let most = u64::from(context.properties().multiprocessors.max(1) * BLOCKS_EACH);
    let blocks = u32::try_from(worth.min(most)).expect("a device has fewer multiprocessors than that");
    Grid { blocks: (blocks, 1), threads: BLOCK_THREADS, shared: 0 }
}

fn parameter(job: &Job) -> &[u8] {
    let Work::Load { parameter, .. } = &job.work else { unreachable!("only a load has a parameter") };
    parameter.bytes()
}

fn loaded(job: &Job, place: usize) -> &Lease {
    let Work::Load { states, .. } = &job.work else { unreachable!("only a load brings states") };
    &states[place]
}

fn stored(job: &mut Job, place: usize) -> &mut Lease {
    let Work::Store { states, .. } = &mut job.work else { unreachable!("only a store takes states") };
    &mut states[place]
}

fn gradient(job: &Job, index: usize) -> &[u8] {
    let Work::Update { gradients, .. } = &job.work else { unreachable!("only an update has gradients") };
    gradients[index].gradient().bytes
}

fn into(job: &mut Job) -> &mut Lease {
    let Work::Update { into, .. } = &mut job.work else { unreachable!("only an update has a place") };
    into
}
