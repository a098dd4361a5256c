//! Loans: a caller's own memory, touched by others for the length of a blocking call.
//!
//! The proof is that of `std::thread::scope`. The slices outlive the call of [`lend`], loans are counted, and
//! [`lend`] does not return while one is out. So a loan needs no lifetime of its own and may travel through queues.

use std::cell::Cell;
use std::fmt;
use std::io::Write;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use super::shared::ForeignBytes;
use super::{Mapped, Mapping, SharedRange};
use crate::limits::PAST_CACHES_BYTES_MIN;

/// Lends slices of the caller's memory for the length of `body`. Every loan must be dropped before `body` returns or
/// unwinds. A loan that still exists then is a bug of this program, and its memory may be freed at any moment, so the
/// process prints an error and aborts.
///
/// ```
/// use pserver_core::memory::lend;
///
/// let gradient = [1, 2, 3, 4];
/// let mut parameter = [0; 4];
/// lend(|book| {
///     let out = book.read(&gradient);
///     let mut back = book.write(&mut parameter);
///     back.bytes_mut().copy_from_slice(out.bytes());
/// });
/// assert_eq!(parameter, gradient);
/// ```
///
/// A slice that does not outlive the call is refused:
///
/// ```compile_fail,E0597
/// use pserver_core::memory::lend;
///
/// lend(|book| {
///     let local = vec![0; 64];
///     let loan = book.read(&local);
/// });
/// ```
///
/// An access to memory that is lent for writing is refused too:
///
/// ```compile_fail,E0502
/// use pserver_core::memory::lend;
///
/// let mut parameter = [0; 64];
/// lend(|book| {
///     let loan = book.write(&mut parameter);
///     let torn = parameter[0];
/// });
/// ```
///
/// A loan that exists at the end aborts the process:
///
/// ```should_panic,standalone_crate
/// use pserver_core::memory::lend;
///
/// let gradient = [1, 2, 3, 4];
/// let kept = lend(|book| book.read(&gradient));
/// ```
pub fn lend<'env, R>(body: impl FnOnce(&LoanBook<'env>) -> R) -> R {
    let line = LINE.try_with(Cell::take).ok().flatten();
    let book = LoanBook { line: Some(line.unwrap_or_default()), closes: true, env: PhantomData };
    // The book closes when it is dropped: here, after the body's result is known, or while the body unwinds.
    body(&book)
}

thread_local! {
    /// The count of the thread's last book, for its next one.
    static LINE: Cell<Option<Arc<()>>> = const { Cell::new(None) };
}

/// Makes and counts loans. `'env` is the lifetime of the lent memory, which outlives the call of [`lend`].
pub struct LoanBook<'env> {
    /// Every loan holds a clone, so the clones are the count. None once the book is dropped.
    line: Option<Arc<()>>,
    /// Whether every loan must be dropped before the book.
    closes: bool,
    /// Makes `'env` invariant: were it allowed to shrink, a slice of the body's own could be lent.
    env: PhantomData<fn(&'env ()) -> &'env ()>,
}

/// Memory lent for reading, to a sender.
pub struct LoanOut {
    // A pointer and not a reference: a reference would have to stay valid until the end of its own drop, but the
    // memory may be freed as soon as the count is zero.
    start: *const u8,
    bytes: u32,
    /// The buffer around the slice, and the offset in it.
    within: Option<(Arc<Mapping>, usize)>,
    _line: Arc<()>,
}

/// Memory that lends its own parts, in order and each once, to a call that outlives the function which starts it.
/// Memory that is dropped while a loan of it exists is leaked.
///
/// ```
/// use pserver_core::memory::LendingMemory;
///
/// let mut memory = LendingMemory::new(vec![0; 6]);
/// let sent = memory.read(4, |part| part.copy_from_slice(&[1, 2, 3, 4]));
/// let mut received = memory.write(2);
/// received.bytes_mut().copy_from_slice(&sent.bytes()[..2]);
/// drop((sent, received));
/// assert_eq!(memory.take_back(), Some(vec![1, 2, 3, 4, 1, 2]));
/// ```
pub struct LendingMemory {
    bytes: ManuallyDrop<Vec<u8>>,
    /// Bytes from the start that were lent.
    lent: usize,
    /// Every loan holds a clone.
    line: Arc<()>,
}

/// Memory lent for writing, to a receiver: a loan for reading whose memory is borrowed exclusively.
pub struct LoanIn {
    loan: LoanOut,
    /// Whether a copy into it goes past the caches.
    is_past_caches: bool,
}

impl LoanBook<'static> {
    /// A book of static memory, whose loans may outlive the book.
    ///
    /// ```compile_fail,E0597
    /// use pserver_core::memory::LoanBook;
    ///
    /// let local = vec![0; 64];
    /// let loan = LoanBook::open().read(&local);
    /// ```
    #[must_use]
    pub fn open() -> Self {
        Self { line: Some(Arc::new(())), closes: false, env: PhantomData }
    }
}

impl<'env> LoanBook<'env> {
    /// Lends a slice to be read. For many at once, lend its sub-slices.
    ///
    /// # Panics
    /// When the slice has 2^32 bytes or more; a loan is a chunk or less.
    pub fn read(&self, slice: &'env [u8]) -> LoanOut {
        LoanOut { bytes: length(slice), start: slice.as_ptr(), within: None, _line: self.line() }
    }

    /// Lends a slice to be written. For many at once, lend disjoint sub-slices.
    ///
    /// # Panics
    /// When the slice has 2^32 bytes or more; a loan is a chunk or less.
    pub fn write(&self, slice: &'env mut [u8]) -> LoanIn {
        let start = slice.as_mut_ptr().cast_const();
        LoanIn::new(LoanOut { bytes: length(slice), start, within: None, _line: self.line() })
    }

    fn line(&self) -> Arc<()> {
        Arc::clone(self.line.as_ref().expect("the book is open"))
    }
}

impl LendingMemory {
    /// Memory of which nothing is lent.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: ManuallyDrop::new(bytes), lent: 0, line: Arc::new(()) }
    }

    /// Lends the next bytes to be read, once `fill` has written them.
    ///
    /// # Panics
    /// When fewer bytes are left.
    pub fn read(&mut self, bytes: u32, fill: impl FnOnce(&mut [u8])) -> LoanOut {
        let mut loan = self.write(bytes);
        fill(loan.bytes_mut());
        loan.loan
    }

    /// Lends the next bytes to be written.
    ///
    /// # Panics
    /// When fewer bytes are left.
    pub fn write(&mut self, bytes: u32) -> LoanIn {
        let end = self.lent.checked_add(bytes as usize).filter(|end| *end <= self.bytes.len());
        let end = end.expect("as many bytes are lent as the memory has");
        // Derived from the vector's pointer and not from a slice, which would cover parts that are lent.
        let start = self.bytes.as_mut_ptr().wrapping_add(std::mem::replace(&mut self.lent, end)).cast_const();
        LoanIn::new(LoanOut { bytes, start, within: None, _line: Arc::clone(&self.line) })
    }

    /// The memory, when every loan was dropped.
    #[must_use]
    pub fn take_back(mut self) -> Option<Vec<u8>> {
        self.is_back().then(|| std::mem::take(&mut *self.bytes))
    }

    /// Whether every loan was dropped. That acquires what the borrowers did to the memory.
    fn is_back(&mut self) -> bool {
        Arc::get_mut(&mut self.line).is_some()
    }
}

impl Drop for LendingMemory {
    fn drop(&mut self) {
        if self.is_back() {
            drop(std::mem::take(&mut *self.bytes));
        }
    }
}

impl LoanOut {
    /// The same loan with its offset in a buffer; unchanged when the slice does not lie in it.
    #[must_use]
    pub fn within(self, mapping: &Arc<Mapping>) -> Self {
        let within = mapping.offset_of(self.bytes()).map(|offset| (Arc::clone(mapping), offset));
        Self { within, ..self }
    }

    /// The slice's range in shared memory, when it lies in a shared buffer.
    #[must_use]
    pub fn shared(&self) -> Option<SharedRange<'_>> {
        self.within.as_ref().and_then(|(mapping, offset)| mapping.shared_at(*offset))
    }

    /// The mapping to register with a device, and the offset in it, while the buffer is in place.
    #[must_use]
    pub fn mapped(&self) -> Option<(Mapped, usize)> {
        let (mapping, offset) = self.within.as_ref().filter(|(mapping, _)| mapping.is_in_place())?;
        Some((Mapped::buffer(mapping), *offset))
    }

    /// Notes that another process or a device may access the slice and has not yet returned it.
    pub fn tear(&self) {
        if let Some((mapping, _)) = &self.within {
            mapping.tear();
        }
    }

    /// The length of the slice in bytes.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.bytes
    }

    /// Whether the slice has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The slice.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the pointer and the length came from one `&'env [u8]`, or from one `&'env mut [u8]` that only a
        // `LoanIn` writes, which `&self` keeps away. `'env` lasts until `lend` returns, and `lend` does not return
        // while this loan is in the book. Or they are a part of a `LendingMemory`, which neither touches nor frees a
        // part that it has lent, and lends it once.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes as usize) }
    }
}

impl LoanIn {
    fn new(loan: LoanOut) -> Self {
        Self { loan, is_past_caches: false }
    }

    /// The same loan with its offset in a buffer; unchanged when the slice does not lie in it.
    #[must_use]
    pub fn within(self, mapping: &Arc<Mapping>) -> Self {
        Self { loan: self.loan.within(mapping), ..self }
    }

    /// The same loan as a part of so many bytes that are filled together: copies of more than caches hold go past them.
    #[must_use]
    pub fn of(self, bytes: usize) -> Self {
        Self { is_past_caches: PAST_CACHES_BYTES_MIN <= bytes, ..self }
    }

    /// Fills the slice.
    ///
    /// # Panics
    /// When the source has another length.
    pub fn fill(&mut self, source: ForeignBytes<'_>) {
        if self.is_past_caches {
            source.copy_past_caches_to(self.bytes_mut());
        } else {
            source.copy_to(self.bytes_mut());
        }
    }

    /// The slice, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pointer and the length came from one `&'env mut [u8]`, and `'env` lasts until `lend` returns,
        // and `lend` does not return while this loan is in the book. That borrow was exclusive and `&mut self` is too.
        // A part of a `LendingMemory` is lent once, and neither touched nor freed while this loan exists.
        unsafe { std::slice::from_raw_parts_mut(self.loan.start.cast_mut(), self.loan.bytes as usize) }
    }
}

impl Deref for LoanIn {
    type Target = LoanOut;

    fn deref(&self) -> &LoanOut {
        &self.loan
    }
}

// SAFETY: a loan is a `&[u8]`, or in a `LoanIn` a `&mut [u8]`, that is known to be alive, and those may be sent.
unsafe impl Send for LoanOut {}
// SAFETY: a shared loan only reads; writing takes `&mut LoanIn`.
unsafe impl Sync for LoanOut {}
impl Drop for LoanBook<'_> {
    fn drop(&mut self) {
        // A copy that is dropped releases what the borrower did to the memory; finding none acquires it.
        let Some(mut line) = self.line.take().filter(|_| self.closes) else { return };
        if Arc::get_mut(&mut line).is_none() {
            let out = Arc::strong_count(&line) - 1;
            let text = "loans of the caller's memory exist at the end of its call; expected none; aborting";
            // Standard error may be closed; the process ends in any case.
            let _ = writeln!(std::io::stderr(), "pserver: {out} {text}");
            std::process::abort();
        }
        // A thread that ends has no use for it.
        let _ = LINE.try_with(|kept| kept.set(Some(line)));
    }
}

impl fmt::Debug for LoanOut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LoanOut({} bytes)", self.bytes)
    }
}

impl fmt::Debug for LoanIn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LoanIn({} bytes)", self.len())
    }
}

fn length(slice: &[u8]) -> u32 {
    u32::try_from(slice.len()).expect("a loan is a chunk or less: lend a large tensor in pieces")
}
