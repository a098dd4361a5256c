//! Arena: one mapping cut into slots, each accessed through one lease.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::{MmapOptions, MmapRaw};

use super::budget::{Budget, CLASSES, SLOT_BYTES_MIN, class_of, slot_bytes};
use super::free::SLOTS_MAX;
use super::mapped::Mapped;
use super::shared::{File, ForeignBytes, GiveBack, ReadOnly, SharedRange};
use super::slab::Slab;
use crate::error::Failure;
use crate::limits::CHUNK_BYTES_MAX;

/// All memory for chunks. Clones are handles to the same slots, for any thread.
#[derive(Clone)]
pub struct Arena {
    slab: Arc<Slab>,
}

/// Exclusive access to one slot: there is no other way to its bytes. Any thread may drop the lease, which returns the
/// slot without waiting.
///
/// To share a lease for reading, put it into an `Arc`; to write again, use `Arc::get_mut` or `Arc::try_unwrap`,
/// and copy into a fresh lease when they refuse. A lease that a dead device may still write is quarantined by
/// `std::mem::forget`: its slot is not given out again, and the mapping stays.
///
/// A lease may also be a view of memory that another process shares with this one, until the lease is dropped. Such a
/// lease is foreign: it is read like any other and never written.
pub struct Lease {
    backing: Backing,
    /// The bytes asked for, at least one and at most the slot's.
    bytes: u32,
}

/// Backing of a lease. A shard has several leases for each chunk, and few views.
enum Backing {
    Slot { slab: Arc<Slab>, slot: u32, class: u8 },
    View(Box<ForeignView>),
}

const _: () = assert!(CLASSES <= u8::MAX as usize, "a class is told by 8 bits");
const _: () = assert!(size_of::<Lease>() <= 24, "a shard keeps and moves several for each chunk");

/// A part of another process's memory.
struct ForeignView {
    memory: Arc<ReadOnly>,
    offset: usize,
    owner: Arc<dyn GiveBack>,
    token: u32,
}

/// Leased slots of an arena: a snapshot, because other threads take and return meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUsage {
    /// Slots out on lease.
    pub slots_in_use: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// Bytes of the slots out on lease, each at the size of its class.
    pub bytes_in_use: u64,
    /// Bytes of all slots.
    pub bytes_total: u64,
}

impl Arena {
    /// Maps the whole budget at once. The pages are not touched, so memory becomes resident only with use.
    ///
    /// # Errors
    /// [`Failure::Node`] when a line asks for slots of no bytes or of more than [`CHUNK_BYTES_MAX`], for more slots
    /// than can be numbered, or when the system refuses the mapping; it names the bytes asked for.
    pub fn new(budget: &Budget) -> Result<Self, Failure> {
        let counts = slots_by_class(budget)?;
        Ok(Self::over(map(budget.bytes())?, None, &counts, budget.bytes()))
    }

    /// As [`Arena::new`], with large pages where the system has them, for memory that is accessed in random order: with
    /// small pages most accesses would miss the processor's address cache. A touched part takes memory a large page at
    /// a time.
    ///
    /// # Errors
    /// The errors of [`Arena::new`].
    pub fn of_large_pages(budget: &Budget) -> Result<Self, Failure> {
        let counts = slots_by_class(budget)?;
        let map = map(budget.bytes())?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "the system has no large pages for an arena of {} bytes", budget.bytes());
        }
        Ok(Self::over(map, None, &counts, budget.bytes()))
    }

    /// As [`Arena::new`], over memory that other processes can map to read. No other process can write it.
    ///
    /// # Errors
    /// The errors of [`Arena::new`], and a system without such memory: sealed files in memory came with Linux 5.1.
    pub fn shared(budget: &Budget) -> Result<Self, Failure> {
        let counts = slots_by_class(budget)?;
        let (file, map) = File::for_readers(budget.bytes().max(u64::from(SLOT_BYTES_MIN)))?;
        Ok(Self::over(map, Some(file), &counts, budget.bytes()))
    }

    fn over(map: MmapRaw, file: Option<File>, counts: &[u32; CLASSES], bytes: u64) -> Self {
        Self { slab: Arc::new(Slab::over(map, file, counts, bytes)) }
    }

    /// Takes a slot of the smallest class that holds `bytes`, or of a larger one when that class is empty. The lease
    /// may hold old bytes: the caller fills it before it is read, or uses [`Arena::take_zeroed`].
    ///
    /// # Errors
    /// [`Failure::Call`] when `bytes` is zero or more than [`CHUNK_BYTES_MAX`], and when no slot is free.
    pub fn take(&self, bytes: u32) -> Result<Lease, Failure> {
        check_bytes(bytes)?;
        let smallest = class_of(bytes);
        (smallest..CLASSES).find_map(|class| self.slab.take(class)).map_or_else(
            || Err(self.exhausted(bytes, smallest)),
            |(class, slot)| {
                let class = u8::try_from(class).expect("there are few classes");
                Ok(Lease { backing: Backing::Slot { slab: Arc::clone(&self.slab), slot, class }, bytes })
            },
        )
    }

    /// Takes up to `count` free slots of the smallest class that holds `bytes`, passes each to `give`, and returns
    /// their number. Slots returned together are given in address order, so that receives into neighbours merge.
    ///
    /// # Errors
    /// [`Failure::Call`] when `bytes` is zero or more than [`CHUNK_BYTES_MAX`].
    pub fn take_many(&self, bytes: u32, count: usize, give: &mut dyn FnMut(Lease)) -> Result<usize, Failure> {
        /// Slots that are taken by one change.
        const TOGETHER: usize = 128;
        check_bytes(bytes)?;
        let class = class_of(bytes);
        let entry = &self.slab.classes()[class];
        let class = u8::try_from(class).expect("there are few classes");
        let mut left = count;
        while left > 0 {
            let mut room = [0; TOGETHER];
            let found = entry.free.take_many(&mut room[..left.min(TOGETHER)]);
            let slots = &mut room[..found];
            if slots.is_empty() {
                break;
            }
            entry.in_use.fetch_add(found as u64, Relaxed);
            // Most often the slots are one run already, ascending or descending.
            slots.sort_unstable();
            for slot in slots.iter() {
                give(Lease { backing: Backing::Slot { slab: Arc::clone(&self.slab), slot: *slot, class }, bytes });
            }
            left -= found;
        }
        Ok(count - left)
    }

    /// As [`Arena::take`], with every byte zero.
    ///
    /// # Errors
    /// The errors of [`Arena::take`].
    pub fn take_zeroed(&self, bytes: u32) -> Result<Lease, Failure> {
        let mut lease = self.take(bytes)?;
        lease.bytes_mut().fill(0);
        Ok(lease)
    }

    /// Usage of the arena.
    #[must_use]
    pub fn usage(&self) -> ArenaUsage {
        let mut usage = ArenaUsage::default();
        for (class, entry) in self.slab.classes().iter().enumerate() {
            let in_use = entry.in_use.load(Relaxed);
            let bytes = u64::from(slot_bytes(class));
            usage.slots_in_use += in_use;
            usage.slots_total += entry.free.slots();
            usage.bytes_in_use += in_use * bytes;
            usage.bytes_total += entry.free.slots() * bytes;
        }
        usage
    }

    /// The range of all slots, for a device that locks them in memory. It stays mapped as long as a clone of the arena
    /// or a lease of it exists.
    #[must_use]
    pub fn mapping(&self) -> NonNull<[u8]> {
        let map = self.slab.map();
        let start = NonNull::new(map.as_mut_ptr()).expect("a mapping does not begin at address zero");
        NonNull::slice_from_raw_parts(start, map.len())
    }

    fn exhausted(&self, bytes: u32, class: usize) -> Failure {
        let slots = self.slab.classes()[class].free.slots();
        Failure::Call(format!(
            "no memory for {bytes} bytes: all {slots} slots of {} bytes are in use, and no larger slot is free",
            slot_bytes(class),
        ))
    }
}

impl Lease {
    /// The bytes asked for.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a lease of no bytes is refused")]
    #[inline]
    pub fn len(&self) -> u32 {
        self.bytes
    }

    /// A view of another process's memory: `bytes` bytes from `offset` on, until `owner` gets them back with `token`.
    /// None when the range is not inside that memory, or does not begin at a multiple of 64.
    #[must_use]
    pub fn view(memory: &Arc<ReadOnly>, offset: u64, bytes: u32, owner: Arc<dyn GiveBack>, token: u32) -> Option<Self> {
        memory.bytes(offset, bytes)?;
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(SLOT_BYTES_MIN as usize))?;
        let view = ForeignView { memory: Arc::clone(memory), offset, owner, token };
        Some(Self { backing: Backing::View(Box::new(view)), bytes })
    }

    /// Whether the lease is a view of another process's memory, which cannot be written: the caller copies bytes that
    /// it changes.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        matches!(self.backing, Backing::View(_))
    }

    /// The other process's memory that the lease is a view of.
    #[must_use]
    pub fn foreign(&self) -> Option<&Arc<ReadOnly>> {
        match &self.backing {
            Backing::Slot { .. } => None,
            Backing::View(view) => Some(&view.memory),
        }
    }

    /// Whether all bytes that were read so far are valid. False only for a view whose owner no longer keeps it.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        match &self.backing {
            Backing::Slot { .. } => true,
            Backing::View(view) => view.owner.is_kept(),
        }
    }

    /// The lease's range in shared memory, when its arena is shared.
    #[must_use]
    pub fn shared(&self) -> Option<SharedRange<'_>> {
        match &self.backing {
            Backing::Slot { slab, slot, class } => {
                slab.file().map(|file| SharedRange { file, offset: slab.offset(*class, *slot) as u64 })
            }
            Backing::View(_) => None,
        }
    }

    /// The mapping of the lease's slot, to register with a device; none for a view of another process's memory.
    #[must_use]
    pub fn mapped(&self) -> Option<Mapped> {
        match &self.backing {
            Backing::Slot { slab, .. } => Some(Mapped::slab(slab)),
            Backing::View(_) => None,
        }
    }

    /// The mapping's address and the slot's offset in it. No slot lies across a multiple of [`CHUNK_BYTES_MAX`].
    #[must_use]
    pub fn position(&self) -> Option<(usize, usize)> {
        match &self.backing {
            Backing::Slot { slab, slot, class } => Some((slab.map().as_mut_ptr().addr(), slab.offset(*class, *slot))),
            Backing::View(_) => None,
        }
    }

    /// The bytes, to read: [`Lease::len`] of them, at an address that is a multiple of 64. Bytes of a foreign lease may
    /// change while they are read: they are for arithmetic alone. Bytes that are checked, parsed or stored are copied
    /// first ([`Lease::copy_to`]).
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        let start = match &self.backing {
            Backing::Slot { slab, slot, class } => slab.start(*class, *slot),
            Backing::View(view) => return view.bytes(self.bytes).in_place(),
        };
        // SAFETY: `start` points at a slot of at least `bytes` bytes inside the mapping, which was zeroed by the
        // system and which the slab keeps. This lease is the only one for the slot, and `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(start, self.bytes as usize) }
    }

    /// Copies the first bytes, as many as `into` has. The copy of a foreign lease's bytes does not change when their
    /// owner writes.
    ///
    /// # Panics
    /// When the lease is shorter.
    pub fn copy_to(&self, into: &mut [u8]) {
        match &self.backing {
            Backing::Slot { .. } => into.copy_from_slice(&self.bytes()[..into.len()]),
            Backing::View(view) => {
                let bytes = u32::try_from(into.len()).ok().filter(|bytes| *bytes <= self.bytes);
                let bytes = bytes.unwrap_or_else(|| panic!("{} bytes of a lease of {}", into.len(), self.bytes));
                view.bytes(bytes).copy_to(into);
            }
        }
    }

    /// The bytes, to write: [`Lease::len`] of them, at an address that is a multiple of 64.
    ///
    /// # Panics
    /// When the lease is foreign.
    #[must_use]
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = match &self.backing {
            Backing::Slot { slab, slot, class } => slab.start(*class, *slot),
            Backing::View(_) => panic!("another process's memory is read, not written"),
        };
        // SAFETY: `start` points at a slot of at least `bytes` bytes inside the mapping, which was zeroed by the
        // system and which the slab keeps. This lease is the only one for the slot, and `&mut self` is the only
        // way to it.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes as usize) }
    }
}

/// Adjacent leases of one arena as one slice to read, so that they are sent in fewer pieces.
///
/// ```
/// use pserver_core::memory::{Arena, Budget, Stretch};
///
/// let mut budget = Budget::new();
/// budget.line("example", 64, 2);
/// let arena = Arena::new(&budget).unwrap();
/// let (one, other) = (arena.take(64).unwrap(), arena.take(64).unwrap());
/// let mut both = Stretch::of(&one, 64).unwrap();
/// assert!(both.goes_on(&other, 64));
/// assert_eq!(both.bytes().len(), 128);
/// ```
///
/// The leases cannot be written while the stretch exists:
///
/// ```compile_fail,E0502
/// use pserver_core::memory::{Lease, Stretch};
///
/// fn torn(mut lease: Lease) {
///     let stretch = Stretch::of(&lease, 64).unwrap();
///     lease.bytes_mut()[0] = 1;
///     assert_eq!(stretch.bytes()[0], 0);
/// }
/// ```
pub struct Stretch<'a> {
    slab: &'a Slab,
    begin: usize,
    end: usize,
}

impl<'a> Stretch<'a> {
    /// The first `bytes` of a lease; none for a view of another process's memory.
    ///
    /// # Panics
    /// When the lease is shorter.
    #[must_use]
    #[inline]
    pub fn of(lease: &'a Lease, bytes: u32) -> Option<Self> {
        assert!(bytes <= lease.bytes, "a stretch of {bytes} bytes in a lease of {}", lease.bytes);
        match &lease.backing {
            Backing::Slot { slab, slot, class } => {
                let begin = slab.offset(*class, *slot);
                Some(Self { slab, begin, end: begin + bytes as usize })
            }
            Backing::View(_) => None,
        }
    }

    /// Appends the first `bytes` of another lease; false when they do not begin where this stretch ends.
    ///
    /// # Panics
    /// As [`Stretch::of`].
    #[must_use]
    #[inline]
    pub fn goes_on(&mut self, lease: &'a Lease, bytes: u32) -> bool {
        let next = Self::of(lease, bytes).filter(|next| self.ends_at(next));
        next.is_some_and(|next| {
            self.end = next.end;
            true
        })
    }

    /// Whether `next` begins where this stretch ends.
    #[inline]
    fn ends_at(&self, next: &Stretch<'_>) -> bool {
        std::ptr::eq(next.slab, self.slab) && next.begin == self.end
    }

    /// The stretch's address and length.
    #[inline]
    fn span(&self) -> (*mut u8, usize) {
        // SAFETY: the stretch begins at a slot, so the offset is inside the mapping, which the slab keeps.
        let start = unsafe { self.slab.map().as_mut_ptr().add(self.begin) };
        (start, self.end - self.begin)
    }

    /// All of it.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        let (start, length) = self.span();
        // SAFETY: from `begin` to `end` it is the bytes of one lease after another, without a gap: `goes_on` took in
        // only what lay where it ended. They are initialised, as those of every lease are, and each of these leases is
        // borrowed for `'a`, which keeps writers away.
        unsafe { std::slice::from_raw_parts(start, length) }
    }
}

/// As [`Stretch`], to write.
///
/// ```compile_fail,E0505
/// use pserver_core::memory::{Lease, StretchMut};
///
/// fn torn(mut lease: Lease) {
///     let stretch = StretchMut::of(&mut lease, 64).unwrap();
///     drop(lease);
///     stretch.into_bytes()[0] = 1;
/// }
/// ```
pub struct StretchMut<'a>(Stretch<'a>);

impl<'a> StretchMut<'a> {
    /// As [`Stretch::of`].
    ///
    /// # Panics
    /// When the lease is shorter.
    #[must_use]
    #[inline]
    pub fn of(lease: &'a mut Lease, bytes: u32) -> Option<Self> {
        Stretch::of(lease, bytes).map(Self)
    }

    /// Whether a lease begins where this stretch ends.
    #[must_use]
    #[inline]
    pub fn is_followed_by(&self, lease: &Lease) -> bool {
        Stretch::of(lease, 0).is_some_and(|next| self.0.ends_at(&next))
    }

    /// Appends the first `bytes` of the lease that follows.
    ///
    /// # Panics
    /// When the lease does not follow, or is shorter.
    #[inline]
    pub fn extend_by(&mut self, lease: &'a mut Lease, bytes: u32) {
        assert!(self.0.goes_on(lease, bytes), "an appended lease begins where the stretch ends");
    }

    /// All of it.
    #[must_use]
    #[inline]
    pub fn into_bytes(self) -> &'a mut [u8] {
        let (start, length) = self.0.span();
        // SAFETY: as in `Stretch::bytes`, and each of these leases is borrowed alone for `'a`: there is no other way to
        // their bytes.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }
}

impl ForeignView {
    /// Its first `bytes` bytes.
    fn bytes(&self, bytes: u32) -> ForeignBytes<'_> {
        self.memory.range(self.offset, bytes as usize)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        match &self.backing {
            Backing::Slot { slab, class, slot } => slab.give_back(*class, *slot),
            Backing::View(view) => view.owner.give_back(view.token, self.bytes),
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Arena({:?})", self.usage())
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backing {
            Backing::Slot { class, .. } => {
                write!(formatter, "Lease({} of {} bytes)", self.bytes, slot_bytes((*class).into()))
            }
            Backing::View(_) => write!(formatter, "Lease({} bytes of another process)", self.bytes),
        }
    }
}

fn check_bytes(bytes: u32) -> Result<(), Failure> {
    if bytes == 0 || bytes > CHUNK_BYTES_MAX {
        return Err(Failure::Call(format!("lease of {bytes} bytes; expected 1 to {CHUNK_BYTES_MAX}")));
    }
    Ok(())
}

fn slots_by_class(budget: &Budget) -> Result<[u32; CLASSES], Failure> {
    let mut counts = [0; CLASSES];
    for line in budget.lines() {
        if line.bytes == 0 || line.bytes > CHUNK_BYTES_MAX {
            return Err(Failure::Node(format!(
                "memory for {}: slots of {} bytes; expected 1 to {CHUNK_BYTES_MAX}",
                line.reason, line.bytes,
            )));
        }
        let class = class_of(line.bytes);
        let count = line.count.saturating_add(u64::from(counts[class]));
        counts[class] = u32::try_from(count).ok().filter(|count| *count <= SLOTS_MAX).ok_or_else(|| {
            Failure::Node(format!(
                "memory for {}: {count} slots of {} bytes; expected at most {SLOTS_MAX} (budget: {} bytes)",
                line.reason,
                slot_bytes(class),
                budget.bytes(),
            ))
        })?;
    }
    Ok(counts)
}

fn map(bytes: u64) -> Result<MmapRaw, Failure> {
    let refused = |why: &dyn fmt::Display| Failure::Node(format!("mapping {bytes} bytes of memory: {why}"));
    // The system refuses a mapping of no bytes, and an arena without slots is legal: it maps one unused slot. A budget
    // is an upper bound far above the usual need, and only touched pages take memory, so no swap space is reserved.
    let length = usize::try_from(bytes.max(u64::from(SLOT_BYTES_MIN))).map_err(|error| refused(&error))?;
    let map = MmapOptions::new().len(length).no_reserve_swap().map_anon().map_err(|error| refused(&error))?;
    Ok(MmapRaw::from(map))
}
