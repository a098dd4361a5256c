//! Replicas of a tensor on several devices: a read returns their sum, a write goes to all.
//!
//! The first device does the work on its default stream, which first waits for the default streams of the others:
//! pieces of the others are copied next to it, and the kernel that sums gradients on servers adds them. All work has
//! completed when a call returns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytemuck::{Zeroable, bytes_of};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::region::DeviceRegion;
use super::streams::CudaEvent;
use super::{CudaContext, CudaModule, DeviceMemory, KernelFunction, grid};
use crate::cuda::arguments::{DeviceAddress, ElementKind, GRADIENTS_MAX, SumMode, UpdateArguments, sum_entry};
use crate::cuda::checked::{DriverError, called};
use crate::cuda::code::load_shipped;
use crate::cuda::sys::CUstream;

/// Bytes of each replica that are summed at once. Larger pieces take memory from the trainer; smaller ones take more
/// calls than copies hide.
const PIECE: u64 = 4 << 20;
/// Bytes of all pieces, at most: with many replicas they are shorter.
const ROOM: u64 = 64 << 20;
/// The alignment of pieces.
const ALIGNED: u64 = 256;
/// The default stream of a context.
const DEFAULT: CUstream = std::ptr::null_mut();

/// The replicas besides the first. They are used, and dropped, while the first one's context is pushed.
#[derive(Default)]
pub(super) struct Replicas {
    others: Vec<Replica>,
    /// The buffers for sums on the first device, from the first replica on.
    sums: Option<Arc<Sums>>,
}

struct Replica {
    /// Event on the default stream of the replica's device.
    done: CudaEvent,
    place: DeviceRegion,
}

/// The buffers for sums of a context, shared by all tensors.
struct Sums {
    context: Arc<CudaContext>,
    module: Arc<CudaModule>,
    /// A piece for each further replica of the tensor with most, one for their sum, which may be twice as wide, and one
    /// for its half-precision form.
    pieces: Mutex<Option<Arc<DeviceMemory>>>,
}

/// The operands of a sum.
#[derive(Clone, Copy)]
struct ReplicaSum<'a> {
    place: &'a DeviceRegion,
    kernel: &'a KernelFunction,
    /// The address of the pieces, and the length of one.
    pieces: DeviceAddress,
    piece: u64,
    element_type: ElementType,
}

/// By context.
static SUMS: Mutex<BTreeMap<usize, Weak<Sums>>> = Mutex::new(BTreeMap::new());

impl Replicas {
    /// Adds a replica.
    ///
    /// # Errors
    /// [`Failure::Call`] when there are already as many as possible, or with the driver's error.
    pub(super) fn add(&mut self, place: DeviceRegion) -> Result<(), Failure> {
        let most = GRADIENTS_MAX - 1;
        if self.others.len() == most {
            return Err(Failure::call(format!("a replica more than the {most} there can be")));
        }
        let entered = place.enter().map_err(failure)?;
        let context = CudaContext::of_somebody(place.driver, place.context, place.ordinal).map_err(failure)?;
        let done = CudaEvent::new(&context, false).map_err(failure)?;
        drop(entered);
        self.others.push(Replica { done, place });
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.others.is_empty()
    }

    pub(super) fn places(&self) -> impl Iterator<Item = &DeviceRegion> {
        self.others.iter().map(|other| &other.place)
    }

    /// Writes the sum of a range of all replicas to `into`, which is as long.
    pub(super) fn sum(
        &mut self,
        place: &DeviceRegion,
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
        let failed = |refused: DriverError| {
            Failure::call(format!("the sum of {} bytes and their replicas: {refused}", range.len()))
        };
        let whole = ReplicaSum {
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
    pub(super) fn spread(&self, place: &DeviceRegion, range: &Range<usize>) -> Result<(), DriverError> {
        let offset = range.start as u64;
        let copied = self.wait().and_then(|()| {
            self.places().try_for_each(|other| {
                copy(place, (other, other.address + offset), (place, place.address + offset), range.len())
            })
        });
        settled(place, copied)
    }

    /// Orders later work on the first device behind earlier work on all others.
    fn wait(&self) -> Result<(), DriverError> {
        self.others.iter().try_for_each(|Replica { done, place }| {
            {
                let _entered = place.enter()?;
                done.record_on(DEFAULT)?;
            }
            done.awaited_by(DEFAULT)
        })
    }

    fn sum_piece(&self, sums: &Sums, whole: &ReplicaSum<'_>, offset: u64, into: &mut [u8]) -> Result<(), DriverError> {
        let ReplicaSum { place, kernel, pieces, piece: length, element_type } = *whole;
        let kind = ElementKind::of(element_type);
        let is_half = kind.suffix().is_none();
        let at = |number: usize| pieces + number as u64 * length;
        let (sum, halves) = (at(self.others.len()), at(self.others.len() + 2));
        let elements = into.len() as u64 / element_type.bytes();
        let mut gradients: [DeviceAddress; GRADIENTS_MAX] = [0; GRADIENTS_MAX];
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
            merge: SumMode::Sum as u32,
            gradients,
            ..UpdateArguments::zeroed()
        };
        kernel.launch(&sums.context, grid(elements), bytes_of(&arguments), DEFAULT)?;
        let from = if is_half { halves } else { sum };
        // SAFETY: the piece is as long as what was summed, which is there until the copy has returned.
        let code = unsafe { (place.driver.cuMemcpyDtoH_v2)(into.as_mut_ptr().cast(), from, into.len()) };
        called(&place.driver, "cuMemcpyDtoH", code)
    }
}

impl Sums {
    /// The buffers for sums of a context.
    fn of(place: &DeviceRegion) -> Result<Arc<Self>, Failure> {
        let mut all = SUMS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, one| one.strong_count() > 0);
        if let Some(known) = all.get(&place.context.addr()).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let context = CudaContext::of_somebody(place.driver, place.context, place.ordinal).map_err(failure)?;
        let (module, _) = load_shipped(&context, None)?;
        let new = Arc::new(Self { context, module, pieces: Mutex::default() });
        all.insert(place.context.addr(), Arc::downgrade(&new));
        Ok(new)
    }

    /// The kernel that adds gradients of this type: half precision in binary32.
    fn kernel(&self, element_type: ElementType) -> Result<KernelFunction, DriverError> {
        let halves = "pserver_sum_f32";
        self.module.entry(sum_entry(element_type).unwrap_or(halves))
    }

    /// Pieces for this many others, locked for one sum.
    fn pieces(&self, others: usize) -> Result<MutexGuard<'_, Option<Arc<DeviceMemory>>>, Failure> {
        let bytes = (others as u64 + 3) * piece_of(others);
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if pieces.as_ref().is_none_or(|had| had.bytes() < bytes) {
            *pieces = None;
            *pieces = Some(DeviceMemory::new(&self.context, bytes).map_err(|refused| {
                let ordinal = self.context.properties().ordinal;
                Failure::call(format!("{bytes} bytes of CUDA device {ordinal} for sums: {refused}"))
            })?);
        }
        Ok(pieces)
    }
}

/// The length of a piece for this many others.
fn piece_of(others: usize) -> u64 {
    (ROOM / (others as u64 + 3)).min(PIECE) / ALIGNED * ALIGNED
}

/// The result of a call, after all its work has completed.
fn settled(first: &DeviceRegion, outcome: Result<(), DriverError>) -> Result<(), DriverError> {
    // SAFETY: every context has this stream.
    let code = unsafe { (first.driver.cuStreamSynchronize)(DEFAULT) };
    outcome.and(called(&first.driver, "cuStreamSynchronize", code))
}

/// Copies between devices, or within one, on the first one's default stream.
fn copy(
    first: &DeviceRegion,
    (to, into): (&DeviceRegion, DeviceAddress),
    (from, out): (&DeviceRegion, DeviceAddress),
    bytes: usize,
) -> Result<(), DriverError> {
    // SAFETY: both ranges are whole: of registered memory, or of the pieces.
    let code = unsafe { (first.driver.cuMemcpyPeerAsync)(into, to.context, out, from.context, bytes, DEFAULT) };
    called(&first.driver, "cuMemcpyPeerAsync", code)
}

fn failure(refused: DriverError) -> Failure {
    Failure::call(refused.to_string())
}
