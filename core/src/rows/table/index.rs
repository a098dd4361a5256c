//! Index from row id to slot: an extendible hash table.
//!
//! A directory of 2^depth entries maps the first bits of an id's hash to pages of 4 KiB. A page is a small
//! open-addressing table: an id is at the position given by the last bits of its hash, or at the next free one. A page
//! that is four fifths full is split in two by one more bit, so growth never costs more than one page's work at once
//! and nothing is rehashed as a whole. Only the directory, 4 bytes for some hundred rows, doubles.
//!
//! Entries are never removed.

use crate::error::Failure;
use crate::memory::{Lease, prefetch};
use crate::rows::initializer::mix;

use super::pieces::TablePieces;

/// An id, and its slot plus one; zero marks an empty entry. Both are little endian.
const ENTRY_BYTES: usize = 16;
const PAGE_ENTRIES: usize = 256;
const PAGE_BYTES: usize = PAGE_ENTRIES * ENTRY_BYTES;
/// Fill of a page at which it is split: at four fifths, finding an existing id takes three probes on average.
const PAGE_ENTRIES_MAX: u16 = 204;
/// The directory's largest depth, at 1 GiB.
const DEPTH_MAX: u8 = 28;
/// A page that is this many bits deeper than the number of pages requires holds ids that were chosen to collide; random
/// ids never reach it. So the directory has at most 256 entries, 1 KiB, for each page.
const DEPTH_BEYOND_MAX: u32 = 8;

/// The slots of rows, by id.
#[derive(Debug)]
pub(super) struct Index {
    pieces: TablePieces,
    leases: Vec<Lease>,
    /// Number of the lower bits of a page number that are the page's index within its piece.
    bits: u32,
    /// Page numbers, 2^depth of them.
    directory: Vec<u32>,
    depth: u8,
    /// State of each page.
    pages: Vec<IndexPage>,
}

#[derive(Clone, Copy, Debug)]
struct IndexPage {
    /// Number of hash bits that all its ids share.
    depth: u8,
    entries: u16,
}

/// An id's hash, which determines its position in the directory and in its page.
#[derive(Clone, Copy, Debug)]
struct Hash(u64);

impl Hash {
    #[inline]
    fn of(id: u64) -> Self {
        Self(mix(id))
    }

    /// The index in a directory of 2^depth entries.
    #[inline]
    fn directory(self, depth: u8) -> usize {
        // In two steps, because a shift by 64 is undefined.
        usize::try_from(self.0 >> 1 >> (63 - depth)).expect("a directory's index is short")
    }

    /// The index in a page.
    #[inline]
    fn place(self) -> usize {
        usize::try_from(self.0 % PAGE_ENTRIES as u64).expect("a page is small")
    }
}

impl Index {
    pub(super) fn new(pieces: TablePieces) -> Result<Self, Failure> {
        let pages_per_piece = pieces.bytes() / u32::try_from(PAGE_BYTES).expect("a page is small");
        let Some(bits) = pages_per_piece.checked_ilog2() else {
            return Err(Failure::call(format!("pieces of {} bytes; expected at least {PAGE_BYTES}", pieces.bytes())));
        };
        let mut index = Self { pieces, leases: Vec::new(), bits, directory: vec![0], depth: 0, pages: Vec::new() };
        index.add_page(0)?;
        Ok(index)
    }

    /// Bytes of the pieces it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.leases.len() as u64 * u64::from(self.pieces.bytes())
    }

    /// Prefetches the entry that [`find`](Self::find) reads first.
    #[inline]
    pub(super) fn prefetch(&self, id: u64) {
        let hash = Hash::of(id);
        let page = self.page(self.directory[hash.directory(self.depth)]);
        prefetch(&page[hash.place()]);
    }

    /// The slot of a row, if it has one.
    #[inline]
    pub(super) fn find(&self, id: u64) -> Option<u32> {
        let hash = Hash::of(id);
        let page = self.page(self.directory[hash.directory(self.depth)]);
        let mut place = hash.place();
        loop {
            let (there, slot) = read(&page[place]);
            if there == id || slot.is_none() {
                return slot;
            }
            place = (place + 1) % PAGE_ENTRIES;
        }
    }

    /// Adds the slot of a row that has none. After an error the index is unchanged.
    pub(super) fn insert(&mut self, id: u64, slot: u32) -> Result<(), Failure> {
        let hash = Hash::of(id);
        let mut page = self.directory[hash.directory(self.depth)];
        while self.pages[page as usize].entries >= PAGE_ENTRIES_MAX {
            self.split(hash)?;
            page = self.directory[hash.directory(self.depth)];
        }
        self.pages[page as usize].entries += 1;
        put(self.page_mut(page), id, slot);
        Ok(())
    }

    /// Every row and its slot, in no order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        (0..self.pages()).flat_map(|number| self.entries_in(number))
    }

    /// Number of pages. A split moves half of a page's rows to a new page at the end.
    pub(super) fn pages(&self) -> u32 {
        u32::try_from(self.pages.len()).expect("pages are numbered in 32 bits")
    }

    /// The rows of a page and their slots, in no order.
    pub(super) fn entries_in(&self, number: u32) -> impl Iterator<Item = (u64, u32)> {
        self.page(number).iter().map(read).filter_map(|(id, slot)| slot.map(|slot| (id, slot)))
    }

    /// Up to `most` ids after `after`, or the first ones, in the order of their hashes, which growth does not change.
    /// The cost is that of the returned ids and of one page. The largest number, which ends lists, is left out.
    pub(super) fn ids_after(&self, after: Option<u64>, most: usize) -> Vec<u64> {
        let after = after.map(Hash::of);
        let mut ids = Vec::with_capacity(most + PAGE_ENTRIES);
        let mut at = after.map_or(0, |hash| hash.directory(self.depth));
        while ids.len() < most && at < self.directory.len() {
            let page = self.directory[at];
            let before = ids.len();
            let entries = self.page(page).iter().map(read).filter_map(|(id, slot)| slot.map(|_| id));
            let entries = entries.filter(|id| *id != u64::MAX);
            ids.extend(entries.filter(|id| after.is_none_or(|after| after.0 < Hash::of(*id).0)));
            ids[before..].sort_unstable_by_key(|id| Hash::of(*id).0);
            // All directory entries of this page.
            at = (at | ((1 << (self.depth - self.pages[page as usize].depth)) - 1)) + 1;
        }
        ids.truncate(most);
        ids
    }

    /// Splits the page of a hash by one more bit.
    fn split(&mut self, hash: Hash) -> Result<(), Failure> {
        let low = self.directory[hash.directory(self.depth)];
        let depth = self.pages[low as usize].depth + 1;
        if depth > DEPTH_MAX || u32::from(depth) > self.pages.len().ilog2() + DEPTH_BEYOND_MAX {
            return Err(Failure::call(format!(
                "{PAGE_ENTRIES_MAX} rows whose ids share {} bits of their hash, in an index of {} pages",
                depth - 1,
                self.pages.len()
            )));
        }
        let high = self.add_page(depth)?;
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|page| [*page, *page]).collect();
            self.depth = depth;
        }
        // The directory entries of a page are consecutive; their upper half now belongs to the new page.
        let shared = self.depth - depth;
        let second = (hash.directory(depth) | 1) << shared;
        self.directory[second..second + (1 << shared)].fill(high);
        self.move_entries(low, high, depth);
        Ok(())
    }

    fn move_entries(&mut self, low: u32, high: u32, depth: u8) {
        let mut whole = [[0; ENTRY_BYTES]; PAGE_ENTRIES];
        let page = self.page_mut(low);
        whole.copy_from_slice(page);
        page.fill([0; ENTRY_BYTES]);
        let mut counts = [0; 2];
        for (id, slot) in whole.iter().map(read).filter_map(|(id, slot)| slot.map(|slot| (id, slot))) {
            let half = Hash::of(id).directory(depth) & 1;
            put(self.page_mut([low, high][half]), id, slot);
            counts[half] += 1;
        }
        let [below, above] = counts;
        self.pages[low as usize] = IndexPage { depth, entries: below };
        self.pages[high as usize] = IndexPage { depth, entries: above };
    }

    /// An empty page.
    fn add_page(&mut self, depth: u8) -> Result<u32, Failure> {
        let number = u32::try_from(self.pages.len()).map_err(|_| Failure::call("more pages than can be numbered"))?;
        if number.trailing_zeros() >= self.bits {
            self.leases.push(self.pieces.take()?);
        }
        self.pages.push(IndexPage { depth, entries: 0 });
        self.page_mut(number).fill([0; ENTRY_BYTES]);
        Ok(number)
    }

    #[inline]
    fn page(&self, number: u32) -> &[[u8; ENTRY_BYTES]] {
        let start = self.start(number);
        let bytes = self.leases[(number >> self.bits) as usize].bytes();
        bytes[start..start + PAGE_BYTES].as_chunks().0
    }

    fn page_mut(&mut self, number: u32) -> &mut [[u8; ENTRY_BYTES]] {
        let start = self.start(number);
        let bytes = self.leases[(number >> self.bits) as usize].bytes_mut();
        bytes[start..start + PAGE_BYTES].as_chunks_mut().0
    }

    /// The offset of a page in its piece.
    #[inline]
    fn start(&self, number: u32) -> usize {
        (number & ((1 << self.bits) - 1)) as usize * PAGE_BYTES
    }
}

/// Puts an entry at the first free position from its own on; a page always has one.
fn put(page: &mut [[u8; ENTRY_BYTES]], id: u64, slot: u32) {
    let mut place = Hash::of(id).place();
    while read(&page[place]).1.is_some() {
        place = (place + 1) % PAGE_ENTRIES;
    }
    let (key, value) = page[place].split_at_mut(8);
    key.copy_from_slice(&id.to_le_bytes());
    value.copy_from_slice(&(u64::from(slot) + 1).to_le_bytes());
}

/// An entry's id, and its slot if the entry is in use.
#[inline]
fn read(entry: &[u8; ENTRY_BYTES]) -> (u64, Option<u32>) {
    let (key, value) = entry.split_at(8);
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("half of an entry"));
    (number(key), number(value).checked_sub(1).and_then(|slot| u32::try_from(slot).ok()))
}

#[cfg(test)]
mod tests {
    use super::{Hash, Index, PAGE_ENTRIES, read};
    use crate::memory::{Arena, Budget};
    use crate::partition::Buckets;
    use crate::prng::Prng;
    use crate::rows::ROW_IDS_MAX;
    use crate::rows::table::TablePieces;

    const IDS: usize = 20_000;
    /// Mean probes for an existing id in a full page.
    const MEAN_STEPS_MAX: f64 = 3.0;
    /// Pages of 102 ids each, the lowest fill after a split.
    const PAGES_MAX: u32 = 200;

    fn index(ids: impl IntoIterator<Item = u64>) -> (Index, Vec<u64>) {
        let mut budget = Budget::new();
        budget.line("pages", 4096, 2 * u64::from(PAGES_MAX));
        let arena = Arena::new(&budget).expect("a small arena");
        let mut index = Index::new(TablePieces::new(arena, 4096)).expect("there is room");
        let ids: Vec<u64> = ids.into_iter().filter(|id| *id < ROW_IDS_MAX).take(IDS).collect();
        for (slot, id) in (0..).zip(&ids) {
            index.insert(*id, slot).expect("chance does not make ids share their hash");
        }
        (index, ids)
    }

    /// Probes to find an existing id.
    fn steps(index: &Index, id: u64) -> usize {
        let hash = Hash::of(id);
        let page = index.page(index.directory[hash.directory(index.depth)]);
        let places = (0..PAGE_ENTRIES).map(|step| (hash.place() + step) % PAGE_ENTRIES);
        1 + places.take_while(|place| read(&page[*place]).0 != id).count()
    }

    fn check(what: &str, ids: impl IntoIterator<Item = u64>) {
        let (index, ids) = index(ids);
        let steps: Vec<usize> = ids.iter().map(|id| steps(&index, *id)).collect();
        let mean = steps.iter().sum::<usize>() as f64 / steps.len() as f64;
        let longest = steps.iter().max().expect("there are ids");
        assert!(mean <= MEAN_STEPS_MAX && *longest <= PAGE_ENTRIES / 2, "{what}: {mean} steps, at most {longest}");
        assert!(index.pages() <= PAGES_MAX, "{what}: {} pages for {} ids", index.pages(), ids.len());
        assert!((0..).zip(&ids).all(|(slot, id)| index.find(*id) == Some(slot)), "{what}: every id is found");
    }

    #[test]
    fn an_id_is_found_in_few_probes_for_any_distribution_of_ids() {
        check("one after another", 0..);
        check("one after another, from the end", (0..ROW_IDS_MAX).rev());
        for bits in 1..49 {
            check("multiples of a power of two", (0..).map(|id: u64| id << bits));
        }
        check("two runs, alike but for the upper bits", (0..).flat_map(|id| [id, id | 1 << 62]));
        check("the bits of a number turned round", (1..).map(|id: u64| id.reverse_bits() >> 1));
        let mut prng = Prng(5);
        check("at random", std::iter::repeat_with(move || prng.below(ROW_IDS_MAX)));
        let buckets = Buckets { count: 64, rows: 1 << 40 };
        check("those of one bucket of many", (0..).filter(|id| buckets.of(*id) == 7));
    }
}
