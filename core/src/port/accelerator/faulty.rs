//! An accelerator with an injected fault, for tests of error handling.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Accelerator, DeviceFacts, DeviceSlot, Done, NotAdopted, Resident, Work};
use crate::error::Failure;
use crate::memory::Arena;

/// The injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The nth accepted piece of work, from one, is refused: [`Failure::Call`].
    Refuses(u64),
    /// The nth completed piece of work breaks its slot: [`Failure::Device`].
    Breaks(u64),
    /// The device is lost after this many completions.
    Dies(u64),
    /// Work from the nth piece on never completes.
    Hangs(u64),
    /// The nth chunk and all after it find no room.
    IsFull(u64),
    /// No arena's pages can be locked.
    CannotPin,
}

/// An accelerator with one fault, and otherwise correct.
pub struct FaultyAccelerator<A> {
    inner: A,
    fault: Fault,
    ended: u64,
    taken: u64,
    adopted: u64,
    /// Work that hangs.
    hangs: Vec<Work>,
    /// Slots that broke.
    broken: Vec<DeviceSlot>,
    /// Accepted work that is refused.
    refused: Vec<Done>,
}

impl<A: Accelerator> FaultyAccelerator<A> {
    /// `inner`, with a fault.
    #[must_use]
    pub fn new(inner: A, fault: Fault) -> Self {
        let (hangs, broken, refused) = (Vec::new(), Vec::new(), Vec::new());
        Self { inner, fault, ended: 0, taken: 0, adopted: 0, hangs, broken, refused }
    }

    fn check_alive(&self) -> Result<(), Failure> {
        match self.fault {
            Fault::Dies(after) if after <= self.ended => Err(Failure::Device(format!("it died after {after}"))),
            _ => Ok(()),
        }
    }
}

impl<A: Accelerator> Accelerator for FaultyAccelerator<A> {
    fn capabilities(&self) -> DeviceFacts {
        let inner = self.inner.capabilities();
        DeviceFacts { name: format!("faulty {}", inner.name), ..inner }
    }

    fn pin(&mut self, arena: &Arena) -> Result<(), Failure> {
        if self.fault == Fault::CannotPin {
            let bytes = arena.mapping().len();
            return Err(Failure::call(format!("{bytes} bytes cannot be locked: the limit of this process is 65536")));
        }
        self.inner.pin(arena)
    }

    fn adopt(&mut self, resident: &Resident) -> Result<DeviceSlot, NotAdopted> {
        self.adopted += 1;
        match self.fault {
            Fault::IsFull(from) if from <= self.adopted => {
                let bytes = resident.bytes_total();
                Err(NotAdopted::Full(format!("{bytes} bytes were asked for and 0 are free")))
            }
            _ => self.inner.adopt(resident),
        }
    }

    fn clear(&mut self) {
        self.hangs.clear();
        self.broken.clear();
        self.refused.clear();
        self.inner.clear();
    }

    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure> {
        self.check_alive()?;
        let mut one = VecDeque::with_capacity(1);
        while let Some(work) = queue.pop_front() {
            let nth = self.taken + 1;
            if self.broken.contains(&work.slot()) {
                let outcome = Err(Failure::Device(format!("slot {} is broken", work.slot())));
                self.refused.push(Done { work, outcome });
            } else if self.fault == Fault::Refuses(nth) {
                let outcome = Err(Failure::call(format!("{} {nth} was refused", work.name())));
                self.refused.push(Done { work, outcome });
            } else if matches!(self.fault, Fault::Hangs(from) if from <= nth) {
                self.hangs.push(work);
            } else {
                one.push_back(work);
                self.inner.submit(&mut one)?;
            }
            if let Some(work) = one.pop_front() {
                queue.push_front(work);
                break;
            }
            self.taken = nth;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        self.check_alive()?;
        let from = done.len();
        self.inner.poll(done)?;
        for one in &mut done[from..] {
            self.ended += 1;
            if self.fault == Fault::Breaks(self.ended) {
                self.broken.push(one.work.slot());
                one.outcome = Err(Failure::Device(format!("{} {} broke its slot", one.work.name(), self.ended)));
            }
        }
        done.append(&mut self.refused);
        Ok(())
    }

    fn wait(&mut self, limit: Duration) {
        self.inner.wait(limit);
    }
}
