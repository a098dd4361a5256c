//! Handles of clients, started calls, views and programs for C: numbers that are looked up, never addresses that are
//! dereferenced.
//!
//! A pointer handle is a scrambled count with the highest bit set, so it is no address that any memory has. A number
//! is given once in a process and its children, so a released handle stays invalid and can be distinguished from a
//! number that never was a handle. A child process starts a registry of its own without touching its parent's locks.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use pserver_core::error::Failure;

use super::loaded::LoadedProgram;
use super::session::Session;
use super::sys::{CallHandle, ClientHandle, ProgramHandle, ViewHandle};
use pserver_client::{CallNumber, View};

const _: () = assert!(size_of::<usize>() == size_of::<u64>(), "a pointer handle is 64 bits");

/// The highest bit, which no address in user space has.
const POINTER_BIT: u64 = 1 << 63;
/// The bit that distinguishes number handles from addresses and from pointer handles.
const NUMBER_BIT: u64 = 1 << 62;
/// Any odd number: its products with different 63-bit numbers differ in their low 63 bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bits that distinguish the handle of a call from the handle of a client; the highest bit stays clear.
const CALL_BITS: u64 = 0x2545_f491_4f6c_dd1d;
/// Bits that distinguish the handle of a view.
const VIEW_BITS: u64 = 0x1b87_3593_cc9e_2d51;
/// Bits that distinguish the handle of a program.
const PROGRAM_BITS: u64 = 0x3c6e_f372_fe94_f82b;
const GATHER: u64 = inverse(SPREAD);
/// The number of lists, each with its own lock, so that threads with different clients seldom contend.
const LISTS: usize = 16;

/// A handle of a client, as the C program passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handle {
    /// A handle of editions 1 to 3.
    Pointer(u64),
    /// A handle of edition go.
    Number(c_int),
}

type List = RwLock<BTreeMap<u64, Arc<Session>>>;

/// Handles of one kind of objects that clients own: started calls, views or programs.
struct KeptHandles {
    /// The noun for the kind in error texts.
    kind: &'static str,
    /// Bits that distinguish handles of this kind from others.
    bits: u64,
    /// Handles given so far.
    given: AtomicU64,
    /// The clients that own the objects that were not released.
    owners: Mutex<BTreeMap<u64, Weak<Session>>>,
}

/// The clients of one process.
struct Registry {
    process: u32,
    key: u64,
    /// Pointer handles given so far.
    pointers: AtomicU64,
    /// The first number that this process gives, and the next.
    numbers_first: u64,
    numbers: AtomicU64,
    lists: [List; LISTS],
    /// Handles of started calls: the number given so far, and those of calls that no thread has waited for.
    calls_given: AtomicU64,
    calls: Mutex<BTreeMap<u64, (Weak<Session>, CallNumber)>>,
    views: KeptHandles,
    programs: KeptHandles,
    /// The registry of the parent process, if this process is a fork.
    before: Option<&'static Registry>,
}

/// The registry of this process, or of the one that it was forked from.
static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

impl Handle {
    pub(super) fn of_pointer(pointer: *const ClientHandle) -> Self {
        Self::Pointer(pointer.addr() as u64)
    }

    /// The client of the handle. The client stays alive until the call is over even if another thread releases it.
    pub(super) fn find(self) -> Result<Arc<Session>, Failure> {
        let registry = Registry::current();
        let list = registry.list(self).read().unwrap_or_else(PoisonError::into_inner);
        list.get(&self.key()).cloned().ok_or_else(|| registry.unknown(self))
    }

    /// Removes the client from the registry; the handle is invalid from now on.
    pub(super) fn remove(self) -> Result<Arc<Session>, Failure> {
        let registry = Registry::current();
        let mut list = registry.list(self).write().unwrap_or_else(PoisonError::into_inner);
        let session = list.remove(&self.key()).ok_or_else(|| registry.unknown(self))?;
        session.client.named(None);
        Ok(session)
    }

    /// Cancels the calls of the client that are in progress; true if this process has such a client. A signal handler
    /// may call this function, so it does not look into the lists, which have locks.
    pub(super) fn cancel(self) -> bool {
        pserver_client::cancel(self.name())
    }

    /// The handle as a number that no other client of either kind has; zero for a handle that is never given.
    fn name(self) -> u64 {
        match self {
            Self::Pointer(bits) if bits & POINTER_BIT != 0 => bits,
            Self::Pointer(_) => 0,
            Self::Number(number) => u64::try_from(number).map_or(0, |number| number | NUMBER_BIT),
        }
    }

    /// Removes the client from the registry, and abandons its started calls that no thread has waited for. The client
    /// is dropped with the last call that uses it.
    pub(super) fn release(self) -> Result<(), Failure> {
        self.remove()?.client.give_up("the client was released");
        Ok(())
    }

    fn key(self) -> u64 {
        match self {
            Self::Pointer(bits) => bits,
            // A negative number is never given, and becomes a number that is in no list.
            Self::Number(number) => u64::try_from(number).unwrap_or(u64::MAX),
        }
    }
}

/// Gives a client a pointer handle.
pub(super) fn give_pointer(session: Session) -> *mut ClientHandle {
    let registry = Registry::current();
    let bits = registry.scramble(registry.pointers.fetch_add(1, Ordering::Relaxed));
    registry.insert(Handle::Pointer(bits), session);
    pointer(bits)
}

/// Gives a client the next number, from zero.
pub(super) fn give_number(session: Session) -> Result<c_int, Failure> {
    let registry = Registry::current();
    let count = registry.numbers.fetch_add(1, Ordering::Relaxed);
    let number = c_int::try_from(count)
        .map_err(|_| Failure::call("no client number is left; expected a release of clients and a new process"))?;
    registry.insert(Handle::Number(number), session);
    Ok(number)
}

/// Gives a started call a handle. The handle does not keep the client alive.
pub(super) fn give_call(session: &Arc<Session>, number: CallNumber) -> *mut CallHandle {
    let registry = Registry::current();
    let bits = registry.scramble(registry.calls_given.fetch_add(1, Ordering::Relaxed)) ^ CALL_BITS;
    let mut calls = registry.calls.lock().unwrap_or_else(PoisonError::into_inner);
    calls.insert(bits, (Arc::downgrade(session), number));
    pointer(bits)
}

/// The call of a handle, and the client of the call.
pub(super) fn find_call(pointer: *const CallHandle) -> Result<(Arc<Session>, CallNumber), Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let calls = registry.calls.lock().unwrap_or_else(PoisonError::into_inner);
    alive(calls.get(&bits).cloned().ok_or_else(|| registry.unknown_call(bits))?)
}

/// Removes a call; its handle is invalid from now on.
pub(super) fn take_call(pointer: *const CallHandle) -> Result<(Arc<Session>, CallNumber), Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let mut calls = registry.calls.lock().unwrap_or_else(PoisonError::into_inner);
    alive(calls.remove(&bits).ok_or_else(|| registry.unknown_call(bits))?)
}

/// Gives a view a handle. The handle does not keep the client alive.
pub(super) fn give_view(session: &Arc<Session>, view: View) -> *mut ViewHandle {
    let registry = Registry::current();
    let bits = registry.give_kept(&registry.views, session);
    session.views().insert(bits, view);
    pointer(bits)
}

/// Calls a function with the view of a handle.
pub(super) fn find_view<T>(
    pointer: *const ViewHandle,
    look: impl FnOnce(&View) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let session = registry.find_kept(|of| &of.views, bits)?;
    let views = session.views();
    look(views.get(&bits).ok_or_else(|| registry.unknown_kept(|of| &of.views, bits))?)
}

/// Removes a view; its handle is invalid from now on.
pub(super) fn take_view(pointer: *const ViewHandle) -> Result<View, Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let session = registry.take_kept(|of| &of.views, bits)?;
    session.views().remove(&bits).ok_or_else(|| registry.unknown_kept(|of| &of.views, bits))
}

/// Gives a program a handle. The handle does not keep the client alive.
pub(super) fn give_program(session: &Arc<Session>, program: LoadedProgram) -> *mut ProgramHandle {
    let registry = Registry::current();
    let bits = registry.give_kept(&registry.programs, session);
    session.programs().insert(bits, Arc::new(Mutex::new(program)));
    pointer(bits)
}

/// The program of a handle. The program stays alive until the call is over even if another thread releases it.
pub(super) fn find_program(pointer: *const ProgramHandle) -> Result<Arc<Mutex<LoadedProgram>>, Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let session = registry.find_kept(|of| &of.programs, bits)?;
    let found = session.programs().get(&bits).cloned();
    found.ok_or_else(|| registry.unknown_kept(|of| &of.programs, bits))
}

/// Removes a program; its handle is invalid from now on.
pub(super) fn take_program(pointer: *const ProgramHandle) -> Result<(), Failure> {
    let (registry, bits) = (Registry::current(), pointer.addr() as u64);
    let session = registry.take_kept(|of| &of.programs, bits)?;
    let found = session.programs().remove(&bits);
    found.map(drop).ok_or_else(|| registry.unknown_kept(|of| &of.programs, bits))
}

fn pointer<T>(bits: u64) -> *mut T {
    ptr::without_provenance_mut(usize::try_from(bits).expect("a pointer is 64 bits"))
}

fn alive((session, number): (Weak<Session>, CallNumber)) -> Result<(Arc<Session>, CallNumber), Failure> {
    let session = session.upgrade();
    session
        .map(|session| (session, number))
        .ok_or_else(|| Failure::call("the call's client was released before the call ended"))
}

impl KeptHandles {
    fn new(kind: &'static str, bits: u64) -> Self {
        Self { kind, bits, given: AtomicU64::new(0), owners: Mutex::default() }
    }

    fn owners(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Session>>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn without_client(&self) -> Failure {
        let kind = self.kind;
        Failure::call(format!("the {kind}'s client was released before the {kind}"))
    }
}

impl Registry {
    fn current() -> &'static Self {
        let process = std::process::id();
        loop {
            let seen = CURRENT.load(Ordering::Acquire);
            // SAFETY: CURRENT points to a registry that this function leaked, so it lives until the process ends.
            let known: Option<&'static Self> = unsafe { seen.as_ref() };
            if let Some(known) = known.filter(|known| known.process == process) {
                return known;
            }
            let fresh = Box::into_raw(Box::new(Self::new(process, known)));
            let placed = CURRENT.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire);
            if placed.is_err() {
                // SAFETY: another thread stored its registry first, so this registry was never shared.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    fn new(process: u32, before: Option<&'static Self>) -> Self {
        let numbers_first = before.map_or(0, |before| before.numbers.load(Ordering::Relaxed));
        Self {
            process,
            key: RandomState::new().hash_one(process) & !POINTER_BIT,
            pointers: AtomicU64::new(0),
            numbers_first,
            numbers: AtomicU64::new(numbers_first),
            lists: std::array::from_fn(|_| List::default()),
            calls_given: AtomicU64::new(0),
            calls: Mutex::default(),
            views: KeptHandles::new("view", VIEW_BITS),
            programs: KeptHandles::new("program", PROGRAM_BITS),
            before,
        }
    }

    fn insert(&self, handle: Handle, session: Session) {
        session.client.named(Some(handle.name()));
        let mut list = self.list(handle).write().unwrap_or_else(PoisonError::into_inner);
        list.insert(handle.key(), Arc::new(session));
    }

    fn list(&self, handle: Handle) -> &List {
        let index = usize::try_from(handle.key() % LISTS as u64).expect("it is below LISTS");
        &self.lists[index]
    }

    fn scramble(&self, count: u64) -> u64 {
        (count ^ self.key).wrapping_mul(SPREAD) | POINTER_BIT
    }

    /// Whether this process gave the pointer handle at some time.
    fn gave(&self, bits: u64) -> bool {
        let count = (bits.wrapping_mul(GATHER) ^ self.key) & !POINTER_BIT;
        bits & POINTER_BIT != 0 && count < self.pointers.load(Ordering::Relaxed)
    }

    /// The error of a handle that is not in the table of clients.
    fn unknown(&self, handle: Handle) -> Failure {
        let released = "client was released already; expected one that is alive";
        let forked = "client was made before a fork; the child process makes a client of its own";
        match handle {
            Handle::Pointer(0) => Failure::call("client is NULL; expected a client from paddle_new_pserver_client"),
            Handle::Pointer(bits) if self.gave(bits) => Failure::call(released),
            Handle::Pointer(bits) if self.parents().any(|parent| parent.gave(bits)) => Failure::call(forked),
            Handle::Number(_) if handle.key() < self.numbers_first => Failure::call(forked),
            Handle::Number(_) if handle.key() < self.numbers.load(Ordering::Relaxed) => Failure::call(released),
            Handle::Pointer(bits) => Failure::call(format!("client {bits:#x} was never given by this library")),
            Handle::Number(number) => Failure::call(format!("client {number} was never given by this library")),
        }
    }

    fn gave_call(&self, bits: u64) -> bool {
        let count = ((bits ^ CALL_BITS).wrapping_mul(GATHER) ^ self.key) & !POINTER_BIT;
        bits & POINTER_BIT != 0 && count < self.calls_given.load(Ordering::Relaxed)
    }

    /// The error of a handle that is not in the table of calls.
    fn unknown_call(&self, bits: u64) -> Failure {
        match bits {
            0 => Failure::call("call is NULL; expected a call from a function that starts one"),
            bits if self.gave_call(bits) => {
                Failure::call("call was waited for already; expected one wait for each call")
            }
            bits if self.parents().any(|parent| parent.gave_call(bits)) => {
                Failure::call("call was started before a fork; expected the process that started it")
            }
            bits => Failure::call(format!("call {bits:#x} was never given by this library")),
        }
    }

    fn give_kept(&self, of: &KeptHandles, session: &Arc<Session>) -> u64 {
        let bits = self.scramble(of.given.fetch_add(1, Ordering::Relaxed)) ^ of.bits;
        of.owners().insert(bits, Arc::downgrade(session));
        bits
    }

    /// The client that owns the object of a handle.
    fn find_kept(&self, of: fn(&Self) -> &KeptHandles, bits: u64) -> Result<Arc<Session>, Failure> {
        let owner = of(self).owners().get(&bits).cloned();
        owner.ok_or_else(|| self.unknown_kept(of, bits))?.upgrade().ok_or_else(|| of(self).without_client())
    }

    /// The client that owns the object of a handle; the handle is invalid from now on.
    fn take_kept(&self, of: fn(&Self) -> &KeptHandles, bits: u64) -> Result<Arc<Session>, Failure> {
        let owner = of(self).owners().remove(&bits);
        owner.ok_or_else(|| self.unknown_kept(of, bits))?.upgrade().ok_or_else(|| of(self).without_client())
    }

    fn gave_kept(&self, of: &KeptHandles, bits: u64) -> bool {
        let count = ((bits ^ of.bits).wrapping_mul(GATHER) ^ self.key) & !POINTER_BIT;
        bits & POINTER_BIT != 0 && count < of.given.load(Ordering::Relaxed)
    }

    /// The error of a handle that is not among those of its kind.
    fn unknown_kept(&self, of: fn(&Self) -> &KeptHandles, bits: u64) -> Failure {
        let kind = of(self).kind;
        Failure::call(match bits {
            0 => format!("{kind} is NULL; expected a {kind} from a function that makes one"),
            bits if self.gave_kept(of(self), bits) => {
                format!("{kind} was released already; expected one that is alive")
            }
            bits if self.parents().any(|parent| parent.gave_kept(of(parent), bits)) => {
                format!("{kind} was made before a fork; expected the process that made it")
            }
            bits => format!("{kind} {bits:#x} was never given by this library"),
        })
    }

    fn parents(&self) -> impl Iterator<Item = &'static Self> {
        std::iter::successors(self.before, |parent| parent.before)
    }
}

/// The number whose product with `odd` is one, by Newton's iteration: each step doubles the bits that are right.
const fn inverse(odd: u64) -> u64 {
    let mut guess = odd;
    let mut step = 0;
    while step < 5 {
        guess = guess.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(guess)));
        step += 1;
    }
    assert!(odd.wrapping_mul(guess) == 1, "five steps from three right bits are enough for 64");
    guess
}

#[cfg(test)]
mod tests {
    use super::*;
    use pserver_client::{Client, ClientOptions};
    use pserver_core::wire::Address;

    fn session() -> Session {
        let address = Address::parse("tcp://127.0.0.1:9").expect("it is an address");
        Session::new(Client::new(ClientOptions::new(address)).expect("a client connects later"), false)
    }

    fn check(outcome: Result<Arc<Session>, Failure>, expected: &str) {
        let text = outcome.err().expect("the handle is not alive").to_string();
        assert!(text.contains(expected), "{text}; expected {expected}");
    }

    #[test]
    fn a_pointer_handle_lives_until_it_is_released_and_never_again() {
        let pointer = give_pointer(session());
        let handle = Handle::of_pointer(pointer);
        assert!(pointer.addr() as u64 & POINTER_BIT != 0, "no program has memory there");
        handle.find().expect("it is alive");
        handle.remove().expect("it is alive");
        check(handle.find(), "released already");
        check(handle.remove(), "released already");
        assert_ne!(give_pointer(session()), pointer);
        check(handle.find(), "released already");
    }

    #[test]
    fn a_number_lives_until_it_is_released_and_never_again() {
        let number = give_number(session()).expect("there are many");
        Handle::Number(number).remove().expect("it is alive");
        check(Handle::Number(number).find(), "released already");
        check(Handle::Number(c_int::MAX).find(), "never given");
        check(Handle::Number(-1).find(), "never given");
        check(Handle::Number(c_int::MIN).remove(), "never given");
    }

    #[test]
    fn a_released_handle_is_distinguished_from_an_invalid_one() {
        give_pointer(session());
        check(Handle::Pointer(0).find(), "NULL");
        for bits in [1, 0x7fff_0000_1234, POINTER_BIT, POINTER_BIT | 1, u64::MAX] {
            check(Handle::Pointer(bits).find(), "never given");
        }
    }

    #[test]
    fn a_registry_knows_its_own_handles_and_those_from_before_a_fork() {
        let parent: &'static Registry = Box::leak(Box::new(Registry::new(1, None)));
        parent.pointers.store(5, Ordering::Relaxed);
        parent.numbers.store(3, Ordering::Relaxed);
        let child = Registry::new(2, Some(parent));
        let text = |handle| child.unknown(handle).to_string();
        assert!(text(Handle::Pointer(parent.scramble(4))).contains("before a fork"));
        assert!(text(Handle::Pointer(parent.scramble(5))).contains("never given"));
        assert!(text(Handle::Number(2)).contains("before a fork"));
        assert!(text(Handle::Number(3)).contains("never given"));
        assert_eq!((0..5).filter(|count| child.gave(parent.scramble(*count))).count(), 0);
    }
}
