//! A device over ordinary memory, in process: the rules of reliable-connected queues, and nothing of a network.
//!
//! It does what it is posted at once, on the thread that posts. Keys, ranges, domains and kinds of access are checked
//! as a card checks them; a pair that fails flushes what it had, and its other end finds nobody. What completes comes
//! in order, and is announced where somebody armed the pair. It is the simplest provider, and the one that tests count
//! on.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::memory::Mapped;
use rustix::event::{EventfdFlags, eventfd};

use super::flights::Span;
use super::provider::{
    Access, Act, Domain, Done, End, Facts, FarPlace, Fault, Pair, Plan, Provider, Receive, Region, Station, What, Work,
};
use super::status::Status;

/// The device, and everything that is connected through it.
#[derive(Debug)]
pub(crate) struct Plain {
    facts: Facts,
    fabric: Arc<Fabric>,
}

#[derive(Debug, Default)]
struct Fabric {
    world: Mutex<World>,
    numbers: AtomicU32,
}

/// What the fabric holds.
#[derive(Debug, Default)]
struct World {
    pairs: BTreeMap<u32, Queues>,
    regions: BTreeMap<u32, Registered>,
    /// What was sent where there was no room.
    crowded: u64,
    /// What was read and written from one side to the other.
    moves: Vec<Move>,
}

/// Bytes that were read or written from one side to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) near: u64,
    pub(super) far: u64,
    pub(super) bytes: u32,
    pub(super) is_read: bool,
}

#[derive(Clone, Copy, Debug)]
struct Registered {
    domain: u32,
    address: u64,
    bytes: u64,
    access: Access,
}

#[derive(Debug)]
struct Queues {
    domain: u32,
    is_open: bool,
    packet: u32,
    there: Option<End>,
    has_failed: bool,
    receives: VecDeque<Receive>,
    done: VecDeque<Done>,
    is_armed: bool,
    bell: Arc<OwnedFd>,
}

struct PlainStation {
    fabric: Arc<Fabric>,
    bell: Arc<OwnedFd>,
}

struct PlainDomain {
    fabric: Arc<Fabric>,
    bell: Arc<OwnedFd>,
    number: u32,
}

struct PlainRegion {
    fabric: Arc<Fabric>,
    key: u32,
}

struct PlainPair {
    fabric: Arc<Fabric>,
    end: End,
}

impl Fabric {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that no pair, domain or region has or had. They are spread, so that a guess rarely hits one.
    fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Relaxed).wrapping_add(1).wrapping_mul(0x9e37_79b1) & 0x00ff_ffff
    }
}

impl Plain {
    pub(crate) fn new() -> Self {
        let name = "memory of this process".to_owned();
        let facts = Facts { name, gid: [0; 16], lid: 0, mtu: 5, reads_out: 16, reads_in: 16, is_limited: false };
        Self { facts, fabric: Arc::default() }
    }

    /// How often there was no room for a message.
    #[cfg(test)]
    pub(super) fn crowded(&self) -> u64 {
        self.fabric.lock().crowded
    }

    /// Takes what was read and written since the last time.
    #[cfg(test)]
    pub(super) fn take_moves(&self) -> Vec<Move> {
        std::mem::take(&mut self.fabric.lock().moves)
    }

    /// Lets a pair that has failed go on, as one that was reset and connected again.
    #[cfg(test)]
    pub(super) fn revive(&self, number: u32) {
        if let Ok(queues) = self.fabric.lock().queues(number) {
            queues.has_failed = false;
            queues.done.clear();
        }
    }

    /// Every region: its key, address and length.
    #[cfg(test)]
    pub(super) fn regions(&self) -> Vec<(u32, u64, u64)> {
        self.fabric.lock().regions.iter().map(|(key, region)| (*key, region.address, region.bytes)).collect()
    }
}

impl Provider for Plain {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn station(&self) -> Result<Arc<dyn Station>, Fault> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(|error| Fault::new(format!("making a descriptor: {error}")))?);
        Ok(Arc::new(PlainStation { fabric: Arc::clone(&self.fabric), bell }))
    }

    fn device_memory(&self) -> Result<(), Fault> {
        Err(Fault::new("it is of no processor's"))
    }
}

impl Station for PlainStation {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn drain(&self) -> Result<(), Fault> {
        // It has been rung, or it has not.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        Ok(())
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn trouble(&self) -> Result<Option<String>, Fault> {
        Ok(None)
    }

    fn domain(&self) -> Result<Arc<dyn Domain>, Fault> {
        let (fabric, bell) = (Arc::clone(&self.fabric), Arc::clone(&self.bell));
        let number = fabric.number();
        Ok(Arc::new(PlainDomain { fabric, bell, number }))
    }
}

impl Domain for PlainDomain {
    fn register(&self, memory: &Mapped, piece: (usize, usize), access: Access) -> Result<Box<dyn Region>, Fault> {
        let (begin, bytes) = piece;
        if bytes == 0 || begin.checked_add(bytes).is_none_or(|end| end > memory.len()) {
            return Err(Fault::new(format!("{bytes} bytes at {begin} of a mapping of {}", memory.len())));
        }
        let key = self.fabric.number();
        let address = (memory.address() + begin) as u64;
        let region = Registered { domain: self.number, address, bytes: bytes as u64, access };
        self.fabric.lock().regions.insert(key, region);
        Ok(Box::new(PlainRegion { fabric: Arc::clone(&self.fabric), key }))
    }

    fn pair(&self, plan: &Plan) -> Result<Box<dyn Pair>, Fault> {
        let (number, packet) = (self.fabric.number(), self.fabric.number());
        let queues = Queues {
            domain: self.number,
            is_open: plan.is_open,
            packet,
            there: None,
            has_failed: false,
            receives: VecDeque::new(),
            done: VecDeque::new(),
            is_armed: false,
            bell: Arc::clone(&self.bell),
        };
        self.fabric.lock().pairs.insert(number, queues);
        let end = End { number, packet, gid: [0; 16], lid: 0, mtu: 5, reads_in: 16 };
        Ok(Box::new(PlainPair { fabric: Arc::clone(&self.fabric), end }))
    }
}

impl Region for PlainRegion {
    fn near_key(&self) -> u32 {
        self.key
    }

    fn far_key(&self) -> u32 {
        self.key
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.fabric.lock().regions.remove(&self.key);
        Ok(())
    }
}

impl Drop for PlainRegion {
    fn drop(&mut self) {
        self.fabric.lock().regions.remove(&self.key);
    }
}

impl Pair for PlainPair {
    fn here(&self) -> End {
        self.end
    }

    fn connect(&mut self, there: &End) -> Result<(), Fault> {
        self.fabric.lock().queues(self.end.number)?.there = Some(*there);
        Ok(())
    }

    fn receive(&mut self, room: &[Receive]) -> Result<(), Fault> {
        let mut world = self.fabric.lock();
        let queues = world.queues(self.end.number)?;
        queues.receives.extend(room.iter().map(|Receive { id, near }| Receive { id: *id, near: *near }));
        if queues.has_failed {
            queues.flush();
        }
        Ok(())
    }

    fn post(&mut self, work: &[Work]) -> Result<(), Fault> {
        let mut world = self.fabric.lock();
        for work in work {
            let outcome = match world.queues(self.end.number)? {
                queues if queues.has_failed => Err(Status::FLUSHED),
                _ => world.act(self.end.number, work),
            };
            let queues = world.queues(self.end.number)?;
            if outcome.is_err() || work.is_told {
                queues.finish(Done { id: work.id, what: outcome.map(|()| What::Posted) });
            }
            if outcome.is_err() && !queues.has_failed {
                queues.has_failed = true;
                queues.flush();
            }
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Fault> {
        done.extend(self.fabric.lock().queues(self.end.number)?.done.drain(..));
        Ok(())
    }

    fn arm(&mut self) -> Result<(), Fault> {
        self.fabric.lock().queues(self.end.number)?.is_armed = true;
        Ok(())
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.fabric.lock().pairs.remove(&self.end.number);
        Ok(())
    }
}

impl Drop for PlainPair {
    fn drop(&mut self) {
        self.fabric.lock().pairs.remove(&self.end.number);
    }
}

impl Queues {
    fn finish(&mut self, done: Done) {
        self.done.push_back(done);
        if std::mem::take(&mut self.is_armed) {
            // A bell that is full has been rung.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    fn flush(&mut self) {
        while let Some(Receive { id, .. }) = self.receives.pop_front() {
            self.finish(Done { id, what: Err(Status::FLUSHED) });
        }
    }
}

impl World {
    fn queues(&mut self, number: u32) -> Result<&mut Queues, Fault> {
        self.pairs.get_mut(&number).ok_or_else(|| Fault::new("the queue pair is destroyed"))
    }

    /// Does one thing for pair `number`.
    fn act(&mut self, number: u32, work: &Work) -> Result<(), Status> {
        let near = work.near;
        let (here, there) = self.ends(number)?;
        if !self.may(near.key(), near.address(), near.bytes(), |region| region.domain == here) {
            return Err(Status::LOCAL_PROTECTION);
        }
        match work.act {
            Act::Send => {
                let receive = self.room(there)?;
                let target = self.pairs[&there].domain;
                let (room, key) = (receive.near.bytes(), receive.near.key());
                let is_right = near.bytes() <= room
                    && self.may(key, receive.near.address(), room, |region| region.domain == target);
                if !is_right {
                    self.fail(there, receive.id, Status::LOCAL_LENGTH);
                    return Err(Status::FAR_REQUEST);
                }
                copy(near.address(), receive.near.address(), near.bytes());
                self.complete(there, receive.id, What::Message(near.bytes()));
            }
            Act::Read(place) => {
                self.check(there, place, near.bytes(), Access::FarReads)?;
                self.note_move(near, place, true);
                copy(place.address, near.address(), near.bytes());
            }
            Act::Write(place, told) => {
                self.check(there, place, near.bytes(), Access::FarWrites)?;
                self.note_move(near, place, false);
                if let Some(told) = told {
                    let receive = self.room(there)?;
                    copy(near.address(), place.address, near.bytes());
                    self.complete(there, receive.id, What::Number(told));
                } else {
                    copy(near.address(), place.address, near.bytes());
                }
            }
        }
        Ok(())
    }

    /// Tests look where bytes came from and went.
    fn note_move(&mut self, near: Span, far: FarPlace, is_read: bool) {
        if cfg!(test) && near.bytes() > 0 {
            self.moves.push(Move { near: near.address(), far: far.address, bytes: near.bytes(), is_read });
        }
    }

    /// The domain of a pair, and the number of its other end, when that is connected to it.
    fn ends(&mut self, number: u32) -> Result<(u32, u32), Status> {
        let here = &self.pairs[&number];
        let there = here.there.ok_or(Status::NO_ANSWER)?;
        let other = self.pairs.get(&there.number).ok_or(Status::NO_ANSWER)?;
        let is_met = other.packet == there.packet && other.there.is_some_and(|end| end.number == number);
        if !is_met || other.has_failed || other.there.is_some_and(|end| end.packet != here.packet) {
            return Err(Status::NO_ANSWER);
        }
        Ok((here.domain, there.number))
    }

    fn room(&mut self, number: u32) -> Result<Receive, Status> {
        let room = self.pairs.get_mut(&number).and_then(|queues| queues.receives.pop_front());
        self.crowded += u64::from(room.is_none());
        room.ok_or(Status::NO_ROOM)
    }

    fn complete(&mut self, number: u32, id: u64, what: What) {
        if let Some(queues) = self.pairs.get_mut(&number) {
            queues.finish(Done { id, what: Ok(what) });
        }
    }

    fn fail(&mut self, number: u32, id: u64, status: Status) {
        if let Some(queues) = self.pairs.get_mut(&number) {
            queues.has_failed = true;
            queues.finish(Done { id, what: Err(status) });
            queues.flush();
        }
    }

    /// Whether the other end allows this access; nothing at all needs no leave.
    fn check(&mut self, there: u32, place: FarPlace, bytes: u32, access: Access) -> Result<(), Status> {
        let (target, is_open) = (self.pairs[&there].domain, self.pairs[&there].is_open);
        let is_right = |region: &Registered| region.domain == target && region.access == access;
        if is_open && self.may(place.key, place.address, bytes, is_right) {
            return Ok(());
        }
        // A pair that was asked for what it must not give ends, too.
        if let Some(queues) = self.pairs.get_mut(&there) {
            queues.has_failed = true;
            queues.flush();
        }
        Err(Status::FAR_ACCESS)
    }

    fn may(&self, key: u32, address: u64, bytes: u32, is_right: impl Fn(&Registered) -> bool) -> bool {
        let inside = |region: &Registered| {
            let end = address.checked_add(bytes.into());
            address >= region.address && end.is_some_and(|end| end <= region.address + region.bytes)
        };
        bytes == 0 || self.regions.get(&key).is_some_and(|region| inside(region) && is_right(region))
    }
}

/// Moves bytes between two pieces of registered memory.
fn copy(from: u64, to: u64, bytes: u32) {
    let address = |number: u64| usize::try_from(number).expect("it was an address of this process");
    if bytes == 0 {
        return;
    }
    let from = ptr::with_exposed_provenance::<u8>(address(from));
    let to = ptr::with_exposed_provenance_mut::<u8>(address(to));
    // SAFETY: both ranges were just found inside regions, whose mappings those who registered them keep as long. What
    // this side named is a span, whose memory `flights` holds by value until the work has completed; what the other
    // side opened it does not touch until it is told that it was read or written. So nobody reads what is written here,
    // or writes what is read. The two may overlap only if somebody connects to themselves, which `copy` allows.
    unsafe { ptr::copy(from, to, bytes as usize) }
}
