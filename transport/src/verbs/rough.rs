//! Any device, with faults: completions that fail, are lost, come twice or out of order, numbers that are not those
//! that were sent, keys of others, and calls that are refused.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::memory::Mapped;

use super::plain::Plain;
use super::provider::{
    Access, Domain, Done, End, Facts, Fault, Pair, Plan, Provider, Receive, Region, Station, What, Work,
};
use super::status::Status;

/// A device that takes its time tells of what is done after so many polls.
const SLOW_POLLS: u64 = 40;

/// What a device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mischief {
    /// A completion says that it failed.
    Fails(Status),
    /// A completion does not come.
    Lost,
    /// A completion comes twice.
    Twice,
    /// The completion of a message comes after the one behind it.
    Late,
    /// A completion is for work that was never posted.
    Stranger,
    /// The number that comes with a write is another.
    WrongNumber,
    /// A message says that it is longer than its room.
    TooLong,
    /// The device cannot be asked any more.
    Deaf,
    /// Work is not taken.
    Refuses,
    /// Memory is not registered.
    RegistersNothing,
    /// The other side is told this key, whatever memory is meant.
    Key(u32),
    /// Nothing completes any more, and pairs are not destroyed.
    Dead,
    /// Everything completes some polls after it was done.
    Slow,
}

/// What goes wrong, and when: for pairs that are open or for those that are not, with the completion of this number
/// from now on, or the call. It goes wrong once, but for what is wrong with the device as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plot {
    pub(super) mischief: Mischief,
    pub(super) is_open: bool,
    pub(super) after: u32,
}

/// A device with a plot.
#[derive(Clone, Debug)]
pub(super) struct Rough {
    inner: Arc<dyn Provider>,
    plot: Arc<Mutex<Option<Plot>>>,
}

struct RoughStation(Arc<dyn Station>, Rough);

struct RoughDomain(Arc<dyn Domain>, Rough);

struct RoughRegion(Box<dyn Region>, Rough);

struct RoughPair {
    inner: Box<dyn Pair>,
    is_open: bool,
    late: Vec<Done>,
    /// What has completed, by the poll in which it is told.
    slow: VecDeque<(u64, Done)>,
    polls: u64,
    rough: Rough,
}

impl Rough {
    /// A device in process that takes its time.
    pub(super) fn slow() -> Self {
        let slow = Self::new(Arc::new(Plain::new()));
        slow.plot(Some(Plot { mischief: Mischief::Slow, is_open: true, after: 0 }));
        slow
    }

    pub(super) fn new(inner: Arc<dyn Provider>) -> Self {
        Self { inner, plot: Arc::default() }
    }

    /// From here on this goes wrong.
    pub(super) fn plot(&self, plot: Option<Plot>) {
        *self.lock() = plot;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Plot>> {
        self.plot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What lasts, if it is plotted for this kind of pair.
    fn lasting(&self, is_open: bool) -> Option<Mischief> {
        self.lock().filter(|plot| plot.is_open == is_open).map(|plot| plot.mischief)
    }

    /// Whether all of it is slow, whichever pairs.
    fn is_slow(&self) -> bool {
        self.lock().is_some_and(|plot| plot.mischief == Mischief::Slow)
    }

    /// What happens to the next completion or call that `applies` picks.
    fn next(&self, is_open: bool, applies: impl Fn(Mischief) -> bool) -> Option<Mischief> {
        let mut plot = self.lock();
        let due = plot.as_mut().filter(|plot| plot.is_open == is_open && applies(plot.mischief))?;
        if due.after > 0 {
            due.after -= 1;
            return None;
        }
        plot.take().map(|plot| plot.mischief)
    }
}

impl Provider for Rough {
    fn facts(&self) -> &Facts {
        self.inner.facts()
    }

    fn station(&self) -> Result<Arc<dyn Station>, Fault> {
        Ok(Arc::new(RoughStation(self.inner.station()?, self.clone())))
    }
}

impl Station for RoughStation {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn drain(&self) -> Result<(), Fault> {
        self.0.drain()
    }

    fn domain(&self) -> Result<Arc<dyn Domain>, Fault> {
        Ok(Arc::new(RoughDomain(self.0.domain()?, self.1.clone())))
    }
}

impl Domain for RoughDomain {
    fn register(&self, memory: &Mapped, piece: (usize, usize), access: Access) -> Result<Box<dyn Region>, Fault> {
        let is_open = access != Access::Near;
        if self.1.lasting(is_open) == Some(Mischief::RegistersNothing) {
            return Err(Fault::new("so much memory cannot be registered"));
        }
        Ok(Box::new(RoughRegion(self.0.register(memory, piece, access)?, self.1.clone())))
    }

    fn pair(&self, plan: &Plan) -> Result<Box<dyn Pair>, Fault> {
        let (inner, rough) = (self.0.pair(plan)?, self.1.clone());
        let (late, slow, is_open) = (Vec::new(), VecDeque::new(), plan.is_open);
        Ok(Box::new(RoughPair { inner, is_open, late, slow, polls: 0, rough }))
    }
}

impl Region for RoughRegion {
    fn near_key(&self) -> u32 {
        self.0.near_key()
    }

    fn far_key(&self) -> u32 {
        match self.1.lasting(true) {
            Some(Mischief::Key(key)) => key,
            _ => self.0.far_key(),
        }
    }
}

impl RoughPair {
    fn spoil(&mut self, mut one: Done, done: &mut Vec<Done>) {
        let is_number = matches!(one.what, Ok(What::Number(_)));
        let is_message = matches!(one.what, Ok(What::Message(_)));
        let applies = |mischief| match mischief {
            Mischief::WrongNumber => is_number,
            Mischief::TooLong => is_message,
            // Work that completes stands for all before it, so only messages are missed.
            Mischief::Lost | Mischief::Late => is_message,
            Mischief::Fails(_) | Mischief::Twice | Mischief::Stranger => true,
            _ => false,
        };
        match (self.rough.next(self.is_open, applies), one.what) {
            (Some(Mischief::Fails(status)), _) => one.what = Err(status),
            (Some(Mischief::Lost), _) => return,
            (Some(Mischief::Late), _) => return self.late.push(one),
            (Some(Mischief::Twice), _) => done.push(one),
            (Some(Mischief::Stranger), _) => one.id ^= 0x00ff_ff00,
            (Some(Mischief::WrongNumber), Ok(What::Number(number))) => one.what = Ok(What::Number(number ^ 0x100)),
            (Some(Mischief::TooLong), _) => one.what = Ok(What::Message(u32::MAX)),
            _ => {}
        }
        done.push(one);
    }
}

impl Pair for RoughPair {
    fn here(&self) -> End {
        self.inner.here()
    }

    fn connect(&mut self, there: &End) -> Result<(), Fault> {
        self.inner.connect(there)
    }

    fn receive(&mut self, room: &[Receive]) -> Result<(), Fault> {
        self.inner.receive(room)
    }

    fn post(&mut self, work: &[Work]) -> Result<(), Fault> {
        match self.rough.next(self.is_open, |mischief| mischief == Mischief::Refuses) {
            Some(_) => Err(Fault::new("the device takes no more work")),
            None => self.inner.post(work),
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Fault> {
        match self.rough.lasting(self.is_open) {
            Some(Mischief::Deaf) => return Err(Fault::new("the completion queue is lost")),
            Some(Mischief::Dead) => return Ok(()),
            _ => {}
        }
        let mut whole = Vec::new();
        self.inner.poll(&mut whole)?;
        self.polls += 1;
        if self.rough.is_slow() || !self.slow.is_empty() {
            let due = self.polls + SLOW_POLLS;
            self.slow.extend(whole.drain(..).map(|done| (due, done)));
            while let Some((_, done)) = self.slow.pop_front_if(|(due, _)| *due <= self.polls) {
                whole.push(done);
            }
        }
        let has_message = whole.iter().any(|one| matches!(one.what, Ok(What::Message(_))));
        let late = if has_message { std::mem::take(&mut self.late) } else { Vec::new() };
        whole.into_iter().for_each(|one| self.spoil(one, done));
        done.extend(late);
        Ok(())
    }

    fn arm(&mut self) -> Result<(), Fault> {
        self.inner.arm()
    }

    fn close(&mut self) -> Result<(), Fault> {
        if self.rough.lasting(self.is_open) == Some(Mischief::Dead) {
            return Err(Fault::new("the device does not destroy the pair"));
        }
        self.inner.close()
    }
}
