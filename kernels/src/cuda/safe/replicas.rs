//! Memory of several devices that is one to its owner: what is read is the sum of all, what is written goes to all.
//!
//! The first one's device sums: pieces of the others are copied beside it, and the kernel that servers sum gradients
//! with adds them. All of it is submitted to default streams, so what these were told before has happened by then.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Zeroable, bytes_of};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::foreign::Place;
use super::{Context, Memory, Module};
use crate::cuda::arguments::{Address, GRADIENTS_MAX, Kind, Merge, UpdateArguments, sum_entry};
use crate::cuda::checked::{Refused, called};
use crate::cuda::code::load_shipped;
use crate::cuda::submission::grid;

/// Bytes of each that are summed at once. More takes memory that the trainer may want; less, calls that copies do not
/// hide.
const PIECE: u64 = 4 << 20;
/// What pieces begin at multiples of.
const ALIGNED: u64 = 256;

/// The places beside the first, and what the first one's device has for them. It is used, and dropped, where the first
/// one's context was pushed.
pub(super) struct Replicas {
    others: Vec<Place>,
    /// A piece for each of the others, one for their sum, which may be twice as wide, and one for its halves.
    pieces: Arc<Memory>,
    piece: u64,
    module: Arc<Module>,
    context: Arc<Context>,
}

impl Replicas {
    /// The first one beside `place`.
    pub(super) fn new(place: &Place, other: Place) -> Result<Self, Failure> {
        let context = Context::of_somebody(place.driver, place.context, place.ordinal).map_err(failure)?;
        let module = load_shipped(&context)?;
        let piece = PIECE.min(place.bytes as u64).next_multiple_of(ALIGNED);
        let pieces = pieces(&context, 1, piece)?;
        Ok(Self { others: vec![other], pieces, piece, module, context })
    }

    /// One more.
    pub(super) fn add(&mut self, other: Place) -> Result<(), Failure> {
        let count = self.others.len() + 1;
        if count == GRADIENTS_MAX {
            return Err(Failure::call(format!("a replica more than the {} there can be", count - 1)));
        }
        self.pieces = pieces(&self.context, count, self.piece)?;
        self.others.push(other);
        Ok(())
    }

    pub(super) fn places(&self) -> &[Place] {
        &self.others
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
        let starts = std::iter::once(place).chain(&self.others).map(|one| one.address + range.start as u64);
        if let Some(start) = starts.chain([range.len() as u64]).find(|number| number % whole != 0) {
            return Err(Failure::call(format!(
                "{} bytes of {element_type} and their replicas: {start:#x} is no multiple of {whole}",
                range.len()
            )));
        }
        let step = usize::try_from(self.piece).expect("a piece is short");
        for (index, piece) in into.chunks_mut(step).enumerate() {
            let offset = range.start as u64 + index as u64 * self.piece;
            self.sum_piece(place, offset, element_type, piece).map_err(|refused| {
                Failure::call(format!("the sum of {} bytes and their replicas: {refused}", range.len()))
            })?;
        }
        Ok(())
    }

    /// Copies a range of the first to all others.
    pub(super) fn spread(&self, place: &Place, range: Range<usize>) -> Result<(), Refused> {
        let offset = range.start as u64;
        self.others.iter().try_for_each(|other| {
            copy(place, (other, other.address + offset), (place, place.address + offset), range.len())
        })
    }

    fn sum_piece(&self, place: &Place, offset: u64, element_type: ElementType, into: &mut [u8]) -> Result<(), Refused> {
        let kind = Kind::of(element_type);
        // Halves are summed in binary32.
        let sum_type = if kind.suffix().is_some() { element_type } else { ElementType::Float32 };
        let at = |number: usize| self.pieces.part(0..0).address() + number as u64 * self.piece;
        let (sum, halves) = (at(self.others.len()), at(self.others.len() + 2));
        let elements = into.len() as u64 / element_type.bytes();
        let mut gradients: [Address; GRADIENTS_MAX] = [0; GRADIENTS_MAX];
        gradients[0] = place.address + offset;
        for (number, other) in self.others.iter().enumerate() {
            copy(place, (place, at(number)), (other, other.address + offset), into.len())?;
            gradients[number + 1] = at(number);
        }
        let arguments = UpdateArguments {
            elements,
            weights: sum,
            count: u32::try_from(self.others.len() + 1).expect("there are few"),
            gradient_kind: kind.code(),
            copy_kind: kind.code(),
            copy: if sum_type == element_type { 0 } else { halves },
            merge: Merge::Sum as u32,
            gradients,
            ..UpdateArguments::zeroed()
        };
        self.launch(sum_entry(sum_type).expect("it is a parameter's type"), elements, bytes_of(&arguments))?;
        let from = if sum_type == element_type { sum } else { halves };
        // SAFETY: the piece is as long as what was summed, which is there until the copy has returned.
        let code = unsafe { (place.driver.cuMemcpyDtoH_v2)(into.as_mut_ptr().cast(), from, into.len()) };
        called(&place.driver, "cuMemcpyDtoH", code)
    }

    fn launch(&self, entry: &str, elements: u64, argument: &[u8]) -> Result<(), Refused> {
        let entry = self.module.entry(entry)?;
        entry.launch(&self.context, grid(&self.context, &entry, elements), argument, std::ptr::null_mut())
    }
}

fn pieces(context: &Arc<Context>, others: usize, piece: u64) -> Result<Arc<Memory>, Failure> {
    let bytes = (others as u64 + 3) * piece;
    Memory::new(context, bytes).map_err(|refused| {
        Failure::call(format!("{bytes} bytes of CUDA device {} for sums: {refused}", context.properties().ordinal))
    })
}

/// From one device to another, or the same.
fn copy(
    caller: &Place,
    (to, into): (&Place, Address),
    (from, out): (&Place, Address),
    bytes: usize,
) -> Result<(), Refused> {
    // SAFETY: both ranges are whole: of memory that somebody registered, or of the pieces.
    let code = unsafe { (caller.driver.cuMemcpyPeer)(into, to.context, out, from.context, bytes) };
    called(&caller.driver, "cuMemcpyPeer", code)
}

fn failure(refused: Refused) -> Failure {
    Failure::call(refused.to_string())
}
