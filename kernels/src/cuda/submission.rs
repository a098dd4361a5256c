//! How a piece of work becomes copies, kernels and events.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::STATES_MAX;
use pserver_core::memory::Lease;
use pserver_core::port::{Done, GradientLease, Work};

use super::accelerator::{Cuda, Job, RING_PIECES, Seat, Slot};
use super::arguments::{BLOCK_THREADS, GRADIENTS_MAX, Kind, Merge, SquaresArguments, UpdateArguments};
use super::checked::Refused;
use super::gathering::{Gathering, aligned};
use super::safe::{Context, Entry, Grid, Lane, Part, Ticket};

/// Elements that a thread computes at once.
const ELEMENTS_AT_ONCE: u64 = 8;

/// Which work it is, once the lanes have it.
#[derive(Clone, Copy)]
enum Task {
    Load { states: usize },
    Sum,
    Update,
    Store,
}

/// Work that is submitted as far as there is room in the ring.
pub(super) struct Course {
    pub(super) ticket: Ticket,
    index: usize,
    desk: usize,
    task: Task,
    /// What the kernel will take.
    launch: UpdateArguments,
    /// The gradients that come together, in which bank, and how much of it they take.
    group: Range<usize>,
    bank: usize,
    filled: u64,
    /// What goes to the device next, and how much of it is on its way.
    item: usize,
    offset: u64,
    /// Whether its numbers are on their way.
    is_begun: bool,
    /// Whether its slot has been written.
    is_written: bool,
    /// Pieces of the ring that it may take in this turn.
    allowed: usize,
}

/// Why work was not submitted whole, and whether its slot has been written.
struct Stopped {
    refused: Refused,
    is_written: bool,
}

impl Cuda {
    /// Submits one piece of work, whole or as far as there is room in the ring. What the driver refuses is the work's
    /// outcome, or the device's end.
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
        let mut launch = slot.arguments();
        self.gradients.clear();
        self.packed.clear();
        let task = match &work {
            Work::Load { states, .. } => Task::Load { states: states.len() },
            Work::Store { .. } => Task::Store,
            Work::Sum { gradients, .. } => {
                self.gradients.extend(gradients.iter().map(|gradient| (gradient.bytes, gradient.element_type)));
                slot.kept.as_mut().expect("the work was checked").is_there = false;
                Task::Sum
            }
            Work::Update { numbers, gradients, is_summed, .. } => {
                if *is_summed {
                    launch.sum = slot.kept.as_ref().expect("the work was checked").sum.address();
                } else {
                    self.gradients.extend(gradients.iter().map(|gradient| (gradient.bytes, gradient.element_type)));
                }
                slot.program.numbers.pack(slot.resident.element_type, numbers, &mut self.packed);
                Task::Update
            }
        };
        self.lock(&work);
        let Seat { desk, mut numbers, end } = self.free.pop().expect("whoever begins has asked for room");
        numbers.bytes_mut()[..self.packed.len()].copy_from_slice(&self.packed);
        let ticket = self.lanes.hold(Job { work, desk, numbers }, end);
        self.course = Some(Course {
            ticket,
            index,
            desk,
            task,
            launch,
            group: 0..0,
            bank: 0,
            filled: 0,
            item: 0,
            offset: 0,
            is_begun: false,
            is_written: false,
            allowed: 0,
        });
        self.go_on()
    }

    /// Goes on with the work that is not all submitted, as far as there is room.
    pub(super) fn go_on(&mut self) -> Result<(), Failure> {
        let Some(mut course) = self.course.take() else { return Ok(()) };
        course.allowed = RING_PIECES;
        let advanced = match course.task {
            Task::Load { states } => self.load(&mut course, states),
            Task::Sum => self.sum(&mut course),
            Task::Update => self.update(&mut course),
            Task::Store => self.store(&course).map(|()| true),
        };
        match advanced {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.course = Some(course);
                Ok(())
            }
            Err(refused) => {
                let Course { ticket, index, is_written, .. } = course;
                self.spoil(ticket, index, &Stopped { refused, is_written })
            }
        }
    }

    /// Holds the pages that the work's copies touch, and notes which of those to the device lie in others.
    fn lock(&mut self, work: &Work) {
        let (arenas, context, is_pinned) = (&mut self.arenas, &self.context, &mut self.is_pinned);
        let mut lock =
            |bytes: &[u8]| arenas.iter_mut().find_map(|arena| arena.lock(context, bytes)).unwrap_or_default();
        is_pinned.clear();
        match work {
            Work::Load { parameter, states, .. } => {
                is_pinned.push(lock(parameter.bytes()));
                is_pinned.extend(states.iter().map(|lease| lock(lease.bytes())));
            }
            Work::Update { is_summed: true, into, .. } => {
                lock(into.bytes());
            }
            Work::Sum { gradients, squares: into, .. } | Work::Update { gradients, into, .. } => {
                is_pinned.extend(gradients.iter().map(|gradient| lock(gradient.lease.bytes())));
                lock(into.bytes());
            }
            Work::Store { states, .. } => states.iter().for_each(|lease| {
                lock(lease.bytes());
            }),
        }
    }

    /// Copies what is left of the course's next item to its place; whether all of it is on its way.
    fn bring(&mut self, course: &mut Course, from: Item, to: &Part) -> Result<bool, Refused> {
        let (ticket, item, length) = (course.ticket, course.item, to.bytes());
        let from_offset = |offset: u64| {
            let number = |bytes| usize::try_from(bytes).expect("a chunk's length has 32 bits");
            number(offset)..number(length)
        };
        if self.is_pinned[item] {
            self.lanes.copy_in(ticket, |job| &from(job, item)[from_offset(0)], to)?;
        }
        while !self.is_pinned[item] && course.offset < length {
            if course.allowed == 0 {
                return Ok(false);
            }
            let (offset, rest) = (course.offset, to.part(course.offset..length));
            let went =
                self.lanes.copy_through(&mut self.ring, ticket, |job| &from(job, item)[from_offset(offset)], &rest)?;
            if went == 0 {
                return Ok(false);
            }
            course.offset += went as u64;
            course.allowed -= 1;
        }
        course.item += 1;
        course.offset = 0;
        Ok(true)
    }

    fn load(&mut self, course: &mut Course, states: usize) -> Result<bool, Refused> {
        while course.item <= states {
            let slot = &self.slots[course.index];
            let to = if course.item == 0 { &slot.parameter } else { &slot.states[course.item - 1] };
            let to = to.clone();
            let is_on_its_way = self.bring(course, loaded, &to)?;
            // From the first copy on the slot is another one.
            course.is_written = true;
            if !is_on_its_way {
                return Ok(false);
            }
        }
        self.lanes.close(Lane::In, course.ticket)?;
        Ok(true)
    }

    fn store(&mut self, course: &Course) -> Result<(), Refused> {
        let slot = &self.slots[course.index];
        for (place, state) in slot.states.iter().enumerate() {
            let length = slot.resident.bytes as usize;
            self.lanes.copy_out(course.ticket, state, |job| &mut stored(job, place).bytes_mut()[..length])?;
        }
        self.lanes.close(Lane::Out, course.ticket)
    }

    /// Sums the gradients in the slot's place for a sum, and then their squares.
    fn sum(&mut self, course: &mut Course) -> Result<bool, Refused> {
        while self.next_group(course)? {
            if !self.gather(course)? {
                return Ok(false);
            }
            self.reckon(course)?;
        }
        let (slot, desk) = (&self.slots[course.index], &self.desks[course.desk]);
        let kept = slot.kept.as_ref().expect("the work was checked");
        let (elements, values) = (course.launch.elements, kept.sum.address());
        if self.gradients.is_empty() {
            let zero = UpdateArguments { weights: values, merge: Merge::Sum as u32, ..course.launch };
            self.lanes.launch(&slot.sum, grid(&self.context, &slot.sum, elements), &zero)?;
        }
        // A thread has a block of squares to itself.
        let threads = u64::from(slot.resident.squares_bytes()) / 8;
        let grid = grid(&self.context, &kept.entry, threads * ELEMENTS_AT_ONCE);
        let squares = SquaresArguments { values, elements, squares: kept.squares.address() };
        self.lanes.launch(&kept.entry, grid, &squares)?;
        self.lanes.record(Lane::Compute, &desk.reached)?;
        self.lanes.wait(Lane::Out, &desk.reached)?;
        let length = slot.resident.squares_bytes() as usize;
        self.lanes.copy_out(course.ticket, &kept.squares, |job| &mut into(job).bytes_mut()[..length])?;
        self.lanes.close(Lane::Out, course.ticket)?;
        Ok(true)
    }

    fn update(&mut self, course: &mut Course) -> Result<bool, Refused> {
        if !std::mem::replace(&mut course.is_begun, true) && !self.packed.is_empty() {
            let numbers = self.packed.len();
            let place = self.desks[course.desk].numbers.part(0..numbers as u64);
            self.lanes.copy_in(course.ticket, |job| &job.numbers.bytes()[..numbers], &place)?;
            course.launch.scalars = place.address();
        }
        while self.next_group(course)? {
            if !self.gather(course)? {
                return Ok(false);
            }
            self.reckon(course)?;
        }
        let (slot, desk) = (&self.slots[course.index], &self.desks[course.desk]);
        if self.gradients.is_empty() {
            let grid = grid(&self.context, &slot.program.entry, course.launch.elements);
            self.lanes.record(Lane::In, &desk.reached)?;
            self.lanes.wait(Lane::Compute, &desk.reached)?;
            self.lanes.launch(&slot.program.entry, grid, &course.launch)?;
            course.is_written = true;
            self.lanes.record(Lane::Compute, &desk.reached)?;
            self.lanes.wait(Lane::Out, &desk.reached)?;
        } else {
            // The kernel is what used the last group.
            self.lanes.wait(Lane::Out, &self.banks.bank(course.bank).used)?;
        }
        let length = slot.resident.bytes as usize;
        self.lanes.copy_out(course.ticket, &slot.parameter, |job| &mut into(job).bytes_mut()[..length])?;
        self.lanes.close(Lane::Out, course.ticket)?;
        Ok(true)
    }

    /// Whether there is a group to bring: the one that is on its way, or another one, for which a bank is taken.
    fn next_group(&mut self, course: &mut Course) -> Result<bool, Refused> {
        if !course.group.is_empty() {
            return Ok(true);
        }
        let Some(group) = next_group(&self.gradients, course.group.end, self.banks.room()) else { return Ok(false) };
        course.bank = self.banks.turn();
        self.lanes.wait(Lane::In, &self.banks.bank(course.bank).used)?;
        (course.item, course.group, course.filled) = (group.start, group, 0);
        Ok(true)
    }

    /// Copies a group's gradients one behind the other into its bank, and says where they are; whether all are on
    /// their way.
    fn gather(&mut self, course: &mut Course) -> Result<bool, Refused> {
        while course.item < course.group.end {
            let bytes = u64::from(self.gradients[course.item].0);
            let part = self.banks.bank(course.bank).part.part(course.filled..course.filled + bytes);
            let place = course.item - course.group.start;
            if !self.bring(course, gradient, &part)? {
                return Ok(false);
            }
            course.launch.gradients[place] = part.address();
            course.filled += aligned(bytes);
        }
        Ok(true)
    }

    /// Starts the kernel of a group that is on its way: it sums, and with the last group of an update it computes that.
    fn reckon(&mut self, course: &mut Course) -> Result<(), Refused> {
        let (slot, bank) = (&self.slots[course.index], self.banks.bank(course.bank));
        let Course { launch, group, task, .. } = course;
        // Whose sum stays with the slot is summed there.
        let kept = slot.kept.as_ref().filter(|_| matches!(task, Task::Sum)).map(|kept| kept.sum.address());
        launch.count = u32::try_from(group.len()).expect("a group has at most as many as a kernel takes");
        launch.gradient_kind = Kind::of(self.gradients[group.start].1).code();
        self.lanes.record(Lane::In, &bank.filled)?;
        self.lanes.wait(Lane::Compute, &bank.filled)?;
        if kept.is_some() || group.end < self.gradients.len() {
            let weights = kept.unwrap_or_else(|| self.sum.address());
            let partial = UpdateArguments { weights, scalars: 0, merge: Merge::Sum as u32, ..*launch };
            self.lanes.launch(&slot.sum, grid(&self.context, &slot.sum, launch.elements), &partial)?;
            launch.sum = weights;
        } else {
            let entry = &slot.program.entry;
            self.lanes.launch(entry, grid(&self.context, entry, launch.elements), launch)?;
            course.is_written = true;
        }
        *group = group.end..group.end;
        self.lanes.record(Lane::Compute, &bank.used)
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
            Work::Sum { gradients, squares, .. } => {
                let holds_squares = self.resident.squares_bytes() <= squares.len();
                assert!(self.is_loaded && holds_squares, "slot {slot} was not loaded, or its place is too short");
                assert!(self.kept.is_some(), "slot {slot} was adopted without a place for a sum");
                self.check_gradients(gradients);
            }
            Work::Update { gradients, is_summed, into, .. } => {
                assert!(self.is_loaded && holds(into), "slot {slot} was not loaded, or its place is too short");
                let has_sum = self.kept.as_ref().is_some_and(|kept| kept.is_there);
                assert!(has_sum || !is_summed, "slot {slot} has no sum");
                self.check_gradients(gradients);
            }
            Work::Store { states, .. } => {
                assert!(self.is_loaded && states.iter().all(holds), "slot {slot} was not loaded, or a place is short");
                assert_eq!(states.len(), self.states.len(), "a place for every state of slot {slot}");
            }
        }
    }

    fn check_gradients(&self, gradients: &[GradientLease]) {
        let own = self.resident.element_type;
        for gradient in gradients {
            assert!(gradient.element_type.is_gradient_for(own), "{} for {own}", gradient.element_type);
            let bytes = self.elements() * gradient.element_type.bytes();
            assert_eq!(u64::from(gradient.bytes), bytes, "a gradient for a chunk of {} bytes", self.resident.bytes);
        }
    }

    /// Work of the slot has happened.
    pub(super) fn note_happened(&mut self, work: &Work) {
        self.is_loaded = true;
        let is_there = match work {
            Work::Sum { .. } => true,
            Work::Load { .. } | Work::Update { .. } => false,
            Work::Store { .. } => return,
        };
        self.kept.iter_mut().for_each(|kept| kept.is_there = is_there);
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
            count: 0,
            gradient_kind: own,
            copy_kind: own,
            merge: self.program.numbers.merge() as u32,
            gradients: [0; GRADIENTS_MAX],
        }
    }
}

/// The gradients from `first` on that are one group: of one type, and as many as there is room for.
fn next_group(gradients: &[(u32, ElementType)], first: usize, room: u64) -> Option<Range<usize>> {
    let (bytes, element_type) = *gradients.get(first)?;
    let alike = gradients[first..].iter().take_while(|(_, other)| *other == element_type).count();
    let at_once = Gathering::of(alike, bytes.into(), room).at_once();
    Some(first..first + alike.min(at_once))
}

/// As many blocks as the elements are worth, and no more than are there at once: others would wait for their turn.
pub(super) fn grid(context: &Context, entry: &Entry, elements: u64) -> Grid {
    let worth = elements.div_ceil(ELEMENTS_AT_ONCE * u64::from(BLOCK_THREADS)).max(1);
    let most = u64::from(context.properties().multiprocessors.max(1) * entry.resident());
    let blocks = u32::try_from(worth.min(most)).expect("a device has fewer multiprocessors than that");
    Grid { blocks: (blocks, 1), threads: BLOCK_THREADS, shared: 0 }
}

/// The bytes of work that go to the device, by their number.
type Item = fn(&Job, usize) -> &[u8];

fn loaded(job: &Job, item: usize) -> &[u8] {
    let Work::Load { parameter, states, .. } = &job.work else { unreachable!("only a load brings states") };
    item.checked_sub(1).map_or_else(|| parameter.bytes(), |place| states[place].bytes())
}

fn stored(job: &mut Job, place: usize) -> &mut Lease {
    let Work::Store { states, .. } = &mut job.work else { unreachable!("only a store takes states") };
    &mut states[place]
}

fn gradient(job: &Job, index: usize) -> &[u8] {
    let (Work::Sum { gradients, .. } | Work::Update { gradients, .. }) = &job.work else {
        unreachable!("only a sum and an update have gradients")
    };
    gradients[index].gradient().bytes
}

fn into(job: &mut Job) -> &mut Lease {
    let (Work::Sum { squares: into, .. } | Work::Update { into, .. }) = &mut job.work else {
        unreachable!("only a sum and an update have one place")
    };
    into
}
