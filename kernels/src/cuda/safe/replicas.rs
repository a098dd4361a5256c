//! Memory of several devices that is one to its owner: what is read is the sum of all, what is written goes to all.
//!
//! The first one's device does it, on its default stream, which first waits for what the others' default streams were
//! told so far: pieces of the others are copied beside it, and the kernel that servers sum gradients with adds them.
//! Nothing is left on its way when a call returns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytemuck::{Zeroable, bytes_of};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::foreign::Place;
use super::lanes::Event;
use super::{Context, Entry, Memory, Module};
use crate::cuda::arguments::{Address, GRADIENTS_MAX, Kind, Merge, UpdateArguments, sum_entry};
use crate::cuda::checked::{Refused, called};
use crate::cuda::code::load_shipped;
use crate::cuda::submission::grid;
use crate::cuda::sys::CUstream;

/// Bytes of each that are summed at once. More takes memory that the trainer may want; less, calls that copies do not
/// hide.
const PIECE: u64 = 4 << 20;
/// Bytes of all pieces, at most: with many replicas they are shorter.
const ROOM: u64 = 64 << 20;
/// What pieces begin at multiples of.
const ALIGNED: u64 = 256;
/// The stream of a context that everybody has.
const DEFAULT: CUstream = std::ptr::null_mut();

/// The places beside the first. They are used, and dropped, where the first one's context was pushed.
#[derive(Default)]
pub(super) struct Replicas {
    others: Vec<Other>,
    /// What the first one's device has for sums, from the first one on.
    sums: Option<Arc<Sums>>,
}

struct Other {
    /// On its device's default stream.
    told: Event,
    place: Place,
}

/// What a context has for sums, whosever they are.
struct Sums {
    context: Arc<Context>,
    module: Arc<Module>,
    /// A piece for each of the others of who has most, one for their sum, which may be twice as wide, and one for its
    /// halves.
    pieces: Mutex<Option<Arc<Memory>>>,
}

/// What is summed, and by what.
#[derive(Clone, Copy)]
struct Whole<'a> {
    place: &'a Place,
    kernel: &'a Entry,
    /// Where pieces begin, and how long one is.
    pieces: Address,
    piece: u64,
    element_type: ElementType,
}

/// By the context.
static SUMS: Mutex<BTreeMap<usize, Weak<Sums>>> = Mutex::new(BTreeMap::new());

impl Replicas {
    /// One more.
    ///
    /// # Errors
    /// [`Failure::Call`] when there are as many as there can be, or with what the driver refused.
    pub(super) fn add(&mut self, place: Place) -> Result<(), Failure> {
        let most = GRADIENTS_MAX - 1;
        if self.others.len() == most {
            return Err(Failure::call(format!("a replica more than the {most} there can be")));
        }
        let entered = place.enter().map_err(failure)?;
        let context = Context::of_somebody(place.driver, place.context, place.ordinal).map_err(failure)?;
        let told = Event::new(&context, false).map_err(failure)?;
        drop(entered);
        self.others.push(Other { told, place });
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.others.is_empty()
    }

    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.others.iter().map(|other| &other.place)
    }

    /// Writes the sum of a range of all to `into`, which is as long.
    pub(super) fn sum(
        &mut self,
        place: &Place,
        range: Range<usize>,
        element_type: ElementType,
        into: &mut [u8],
    ) -> Result<(), Failure> {
        let whole = element_type.bytes();
        let starts = std::iter::once(place).chain(self.places()).map(|one| one.address + range.start as u64);
        if let Some(start) = starts.chain([range.len() as u64]).find(|number| number % whole != 0) {
            return Err(Failure::call(format!(
                "{} bytes of {element_type} and their replicas: {start:#x} is no multiple of {whole}",
                range.len()
            )));
        }
        let sums = match &self.sums {
            Some(sums) => Arc::clone(sums),
            None => Arc::clone(self.sums.insert(Sums::of(place)?)),
        };
        let pieces = sums.pieces(self.others.len())?;
        let first = pieces.as_ref().expect("they were made").part(0..0).address();
        let failed =
            |refused: Refused| Failure::call(format!("the sum of {} bytes and their replicas: {refused}", range.len()));
        let whole = Whole {
            place,
            kernel: &sums.kernel(element_type).map_err(failed)?,
            pieces: first,
            piece: piece_of(self.others.len()),
            element_type,
        };
        let step = usize::try_from(whole.piece).expect("a piece is short");
        let summed = self.wait().and_then(|()| {
            into.chunks_mut(step).enumerate().try_for_each(|(index, piece)| {
                self.sum_piece(&sums, &whole, range.start as u64 + index as u64 * whole.piece, piece)
            })
        });
        settled(place, summed).map_err(failed)
    }

    /// Copies a range of the first to all others.
    pub(super) fn spread(&self, place: &Place, range: &Range<usize>) -> Result<(), Refused> {
        let offset = range.start as u64;
        let copied = self.wait().and_then(|()| {
            self.places().try_for_each(|other| {
                copy(place, (other, other.address + offset), (place, place.address + offset), range.len())
            })
        });
        settled(place, copied)
    }

    /// What is submitted to the first one's device comes behind what all others were told so far.
    fn wait(&self) -> Result<(), Refused> {
        self.others.iter().try_for_each(|Other { told, place }| {
            {
                let _entered = place.enter()?;
                told.record_on(DEFAULT)?;
            }
            told.awaited_by(DEFAULT)
        })
    }

    fn sum_piece(&self, sums: &Sums, whole: &Whole<'_>, offset: u64, into: &mut [u8]) -> Result<(), Refused> {
        let Whole { place, kernel, pieces, piece: length, element_type } = *whole;
        let kind = Kind::of(element_type);
        let is_half = kind.suffix().is_none();
        let at = |number: usize| pieces + number as u64 * length;
        let (sum, halves) = (at(self.others.len()), at(self.others.len() + 2));
        let elements = into.len() as u64 / element_type.bytes();
        let mut gradients: [Address; GRADIENTS_MAX] = [0; GRADIENTS_MAX];
        gradients[0] = place.address + offset;
        for (number, other) in self.places().enumerate() {
            copy(place, (place, at(number)), (other, other.address + offset), into.len())?;
            gradients[number + 1] = at(number);
        }
        let arguments = UpdateArguments {
            elements,
            weights: sum,
            count: u32::try_from(self.others.len() + 1).expect("there are few"),
            gradient_kind: kind.code(),
            copy_kind: kind.code(),
            copy: if is_half { halves } else { 0 },
            merge: Merge::Sum as u32,
            gradients,
            ..UpdateArguments::zeroed()
        };
        kernel.launch(&sums.context, grid(&sums.context, kernel, elements), bytes_of(&arguments), DEFAULT)?;
        let from = if is_half { halves } else { sum };
        // SAFETY: the piece is as long as what was summed, which is there until the copy has returned.
        let code = unsafe { (place.driver.cuMemcpyDtoH_v2)(into.as_mut_ptr().cast(), from, into.len()) };
        called(&place.driver, "cuMemcpyDtoH", code)
    }
}

impl Sums {
    /// What a context has for sums, of which there is one.
    fn of(place: &Place) -> Result<Arc<Self>, Failure> {
        let mut all = SUMS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, one| one.strong_count() > 0);
        if let Some(known) = all.get(&place.context.addr()).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let context = Context::of_somebody(place.driver, place.context, place.ordinal).map_err(failure)?;
        let module = load_shipped(&context)?;
        let new = Arc::new(Self { context, module, pieces: Mutex::default() });
        all.insert(place.context.addr(), Arc::downgrade(&new));
        Ok(new)
    }

    /// What adds gradients of this type: halves in binary32.
    fn kernel(&self, element_type: ElementType) -> Result<Entry, Refused> {
        let halves = "pserver_sum_f32";
        self.module.entry(sum_entry(element_type).unwrap_or(halves))
    }

    /// Pieces for so many others, for one sum alone.
    fn pieces(&self, others: usize) -> Result<MutexGuard<'_, Option<Arc<Memory>>>, Failure> {
        let bytes = (others as u64 + 3) * piece_of(others);
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if pieces.as_ref().is_none_or(|had| had.bytes() < bytes) {
            *pieces = None;
            *pieces = Some(Memory::new(&self.context, bytes).map_err(|refused| {
                let ordinal = self.context.properties().ordinal;
                Failure::call(format!("{bytes} bytes of CUDA device {ordinal} for sums: {refused}"))
            })?);
        }
        Ok(pieces)
    }
}

/// How long a piece is where there are so many others.
fn piece_of(others: usize) -> u64 {
    (ROOM / (others as u64 + 3)).min(PIECE) / ALIGNED * ALIGNED
}

/// How a call ended, when nothing of it is on its way any more.
fn settled(first: &Place, outcome: Result<(), Refused>) -> Result<(), Refused> {
    // SAFETY: every context has this stream.
    let code = unsafe { (first.driver.cuStreamSynchronize)(DEFAULT) };
    outcome.and(called(&first.driver, "cuStreamSynchronize", code))
}

/// From one device to another, or the same, on the first one's default stream.
fn copy(
    first: &Place,
    (to, into): (&Place, Address),
    (from, out): (&Place, Address),
    bytes: usize,
) -> Result<(), Refused> {
    // SAFETY: both ranges are whole: of memory that somebody registered, or of the pieces.
    let code = unsafe { (first.driver.cuMemcpyPeerAsync)(into, to.context, out, from.context, bytes, DEFAULT) };
    called(&first.driver, "cuMemcpyPeerAsync", code)
}

fn failure(refused: Refused) -> Failure {
    Failure::call(refused.to_string())
}
