//! Any device, with faults: completions that fail, are lost, come twice or out of order, numbers that are not those
//! that were sent, keys of others, and calls that are refused.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pserver_core::memory::Mapped;
use rustix::event::{EventfdFlags, eventfd};

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
    /// So many pieces of memory can be registered.
    Limit(u64),
    /// The other side is told this key, whatever memory is meant.
    Key(u32),
    /// Nothing completes any more, and pairs are not destroyed.
    Dead,
    /// Everything completes some polls after it was done.
    Slow,
    /// Pairs come up and carry nothing: what is posted finds nobody.
    Silent,
    /// Connecting a pair takes until the plot is over.
    Stuck,
    /// A pair is not connected.
    Unmet,
    /// Memory stays registered.
    KeepsMemory,
    /// Both: nothing completes any more, pairs are not destroyed, and memory stays registered.
    Hung,
    /// The device says that it has failed.
    Fatal,
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
    plot: Arc<(Mutex<Option<Plot>>, Condvar)>,
    /// Readable when there is something to tell of the device.
    events: Arc<OwnedFd>,
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
    /// What was posted and found nobody.
    unheard: Vec<Done>,
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
        let events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
        Self { inner, plot: Arc::default(), events: Arc::new(events) }
    }

    /// From here on this goes wrong.
    pub(super) fn plot(&self, plot: Option<Plot>) {
        *self.lock() = plot;
        self.plot.1.notify_all();
        if self.lasting(true) == Some(Mischief::Fatal) {
            rustix::io::write(&self.events, &1_u64.to_ne_bytes()).expect("there is room");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Plot>> {
        self.plot.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once nothing of this kind is plotted.
    fn wait_out(&self, mischief: Mischief, is_open: bool) {
        let is_on =
            |plot: &mut Option<Plot>| plot.is_some_and(|one| (one.mischief, one.is_open) == (mischief, is_open));
        drop(self.plot.1.wait_while(self.lock(), is_on).unwrap_or_else(PoisonError::into_inner));
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

    fn device_memory(&self) -> Result<(), Fault> {
        self.inner.device_memory()
    }
}

impl Station for RoughStation {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn drain(&self) -> Result<(), Fault> {
        self.0.drain()
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.1.events.as_fd())
    }

    fn trouble(&self) -> Result<Option<String>, Fault> {
        let is_told = rustix::io::read(&self.1.events, &mut [0; 8]).is_ok();
        Ok(is_told.then(|| "the device has failed".to_owned()))
    }

    fn domain(&self) -> Result<Arc<dyn Domain>, Fault> {
        Ok(Arc::new(RoughDomain(self.0.domain()?, self.1.clone())))
    }
}

impl Domain for RoughDomain {
    fn register(&self, memory: &Mapped, piece: (usize, usize), access: Access) -> Result<Box<dyn Region>, Fault> {
        let is_open = access != Access::Near;
        let is_refused = match self.1.lasting(is_open) {
            Some(Mischief::RegistersNothing | Mischief::Limit(0)) => true,
            Some(Mischief::Limit(pieces)) => {
                *self.1.lock() = Some(Plot { mischief: Mischief::Limit(pieces - 1), is_open, after: 0 });
                false
            }
            _ => false,
        };
        if is_refused {
            return Err(Fault::new("so much memory cannot be registered"));
        }
        Ok(Box::new(RoughRegion(self.0.register(memory, piece, access)?, self.1.clone())))
    }

    fn pair(&self, plan: &Plan) -> Result<Box<dyn Pair>, Fault> {
        let (inner, rough) = (self.0.pair(plan)?, self.1.clone());
        let (late, slow, unheard, is_open) = (Vec::new(), VecDeque::new(), Vec::new(), plan.is_open);
        Ok(Box::new(RoughPair { inner, is_open, late, slow, polls: 0, unheard, rough }))
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

    fn close(&mut self) -> Result<(), Fault> {
        if self.1.lasting(true).is_some_and(|mischief| matches!(mischief, Mischief::KeepsMemory | Mischief::Hung)) {
            return Err(Fault::new("the device does not let go of the memory"));
        }
        self.0.close()
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
        self.rough.wait_out(Mischief::Stuck, self.is_open);
        if self.rough.lasting(self.is_open) == Some(Mischief::Unmet) {
            return Err(Fault::new("nobody has that address"));
        }
        self.inner.connect(there)
    }

    fn receive(&mut self, room: &[Receive]) -> Result<(), Fault> {
        self.inner.receive(room)
    }

    fn post(&mut self, work: &[Work]) -> Result<(), Fault> {
        if self.rough.lasting(self.is_open) == Some(Mischief::Silent) {
            self.unheard.extend(work.first().map(|work| Done { id: work.id, what: Err(Status::NO_ANSWER) }));
            return Ok(());
        }
        match self.rough.next(self.is_open, |mischief| mischief == Mischief::Refuses) {
            Some(_) => Err(Fault::new("the device takes no more work")),
            None => self.inner.post(work),
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Fault> {
        match self.rough.lasting(self.is_open) {
            Some(Mischief::Deaf) => return Err(Fault::new("the completion queue is lost")),
            Some(Mischief::Dead | Mischief::Hung) => return Ok(()),
            _ => {}
        }
        done.append(&mut self.unheard);
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
        if matches!(self.rough.lasting(self.is_open), Some(Mischief::Dead | Mischief::Hung)) {
            return Err(Fault::new("the device does not destroy the pair"));
        }
        self.inner.close()
    }
}
