//! Execution of generated code and callbacks from it: the only unsafe code of this package besides CUDA.
//!
//! Code is written into memory that is not executable, and executed in memory that is not writable; the change is
//! one-way.

pub(super) mod lanes;

use memmap2::{Mmap, MmapMut};
use pserver_core::rule::ssa::Lowered;

use super::layout::{CallFrame, TENSORS_MAX};
use super::routine::{self, PREFETCHED, Routine};
use crate::native::{CONSTANTS, CallTensors, CodeTarget, GRADIENTS_MAX, GradientFormat, used_scalars};

/// Bytes of the longest vector.
const VECTOR_MAX: usize = 64;

/// A function that was assembled for one rule, one type and one kind of gradient.
#[derive(Debug)]
pub(crate) struct GeneratedFunction {
    memory: Mmap,
    /// Elements in a vector.
    lanes: usize,
    /// Elements in a turn of the wide loop.
    wide_lanes: usize,
    /// Powers of two, as are the lanes: a division would take longer than a short row's arithmetic.
    element_shift: u32,
    source_shift: u32,
    scalars: usize,
    states: usize,
}

/// One vector of every tensor, for the elements after the last full vector.
#[repr(align(64))]
struct PartialVector<const TENSORS: usize, const GRADIENTS: usize> {
    tensors: [[u8; VECTOR_MAX]; TENSORS],
    gradients: [[u8; VECTOR_MAX]; GRADIENTS],
}

impl GeneratedFunction {
    /// Assembles a rule. None when the machine has no such vectors or no memory for code, or when the rule needs too
    /// much stack.
    pub(crate) fn new(code: &Lowered, target: CodeTarget, source: GradientFormat) -> Option<Self> {
        if !target.vectors.are_there() {
            return None;
        }
        let Routine { bytes, wide_lanes } = routine::assemble(code, target, source)?;
        assert!(wide_lanes.is_power_of_two() && target.lanes().is_power_of_two(), "lengths are rounded by masks");
        let memory = executable(&bytes)?;
        let (scalars, states) = (used_scalars(code).len() + CONSTANTS, code.states().len());
        let element_shift = target.element_bytes().trailing_zeros();
        let source_shift = target.source_bytes(source).trailing_zeros();
        Some(Self { memory, lanes: target.lanes(), wide_lanes, element_shift, source_shift, scalars, states })
    }

    /// Updates weights and states by the sum of the gradients.
    ///
    /// # Panics
    ///
    /// When tensors differ in length, or their number is not that of the rule.
    pub(crate) fn run(&self, tensors: CallTensors<'_, '_>) {
        let CallTensors { weights, states, gradients, scalars } = tensors;
        let elements = weights.len() >> self.element_shift;
        assert!(weights.len() == elements << self.element_shift, "a parameter is whole elements");
        assert!(states.len() == self.states, "these are the rule's states");
        assert!(states.iter().all(|state| state.len() == weights.len()), "a state is as long as its parameter");
        assert!((1..=GRADIENTS_MAX).contains(&gradients.len()), "{} gradients in one call", gradients.len());
        let gradients_fit = gradients.iter().all(|gradient| gradient.len() == elements << self.source_shift);
        assert!(gradients_fit, "a gradient is as long as its parameter");
        assert!(scalars.len() == self.scalars << self.element_shift, "these are the rule's scalars");
        let tensors = CallTensors { weights, states, gradients, scalars };
        match tensors.gradients.len() {
            1 => self.run_whole::<1>(elements, tensors),
            _ => self.run_whole::<GRADIENTS_MAX>(elements, tensors),
        }
    }

    /// Updates the full vectors, and then the remaining elements.
    fn run_whole<const GRADIENTS: usize>(&self, elements: usize, tensors: CallTensors<'_, '_>) {
        let whole = elements & !(self.lanes - 1);
        if whole > 0 {
            let mut pointers = [std::ptr::null(); GRADIENTS];
            pointers.iter_mut().zip(tensors.gradients).for_each(|(pointer, gradient)| *pointer = gradient.as_ptr());
            let mut frame = self.frame(whole, tensors.scalars, &pointers, tensors.gradients.len());
            frame.tensors[0] = tensors.weights.as_mut_ptr();
            for (pointer, state) in frame.tensors[1..].iter_mut().zip(tensors.states.iter_mut()) {
                *pointer = state.as_mut_ptr();
            }
            self.enter(&frame);
        }
        match (whole == elements, self.states) {
            (true, _) => {}
            (false, 0..=2) => self.run_rest::<3, GRADIENTS>(whole, tensors),
            (false, _) => self.run_rest::<TENSORS_MAX, GRADIENTS>(whole, tensors),
        }
    }

    /// Updates the elements from `whole` on, fewer than a vector, in memory that has room for one.
    fn run_rest<const TENSORS: usize, const GRADIENTS: usize>(&self, whole: usize, tensors: CallTensors<'_, '_>) {
        let mut rest = PartialVector { tensors: [[0; VECTOR_MAX]; TENSORS], gradients: [[0; VECTOR_MAX]; GRADIENTS] };
        let mut pointers = [std::ptr::null(); GRADIENTS];
        for ((pointer, room), gradient) in pointers.iter_mut().zip(&mut rest.gradients).zip(tensors.gradients) {
            let gradient = &gradient[whole << self.source_shift..];
            room[..gradient.len()].copy_from_slice(gradient);
            *pointer = room.as_ptr();
        }
        let begin = whole << self.element_shift;
        let bytes = tensors.weights.len() - begin;
        let mut frame = self.frame(self.lanes, tensors.scalars, &pointers, tensors.gradients.len());
        let all = std::iter::once(&mut *tensors.weights).chain(tensors.states.iter_mut().map(|state| &mut **state));
        for ((pointer, room), tensor) in frame.tensors.iter_mut().zip(&mut rest.tensors).zip(all) {
            room[..bytes].copy_from_slice(&tensor[begin..]);
            *pointer = room.as_mut_ptr();
        }
        self.enter(&frame);
        let all = std::iter::once(&mut *tensors.weights).chain(tensors.states.iter_mut().map(|state| &mut **state));
        for (room, tensor) in rest.tensors.iter().zip(all) {
            tensor[begin..].copy_from_slice(&room[..bytes]);
        }
    }

    fn frame(&self, end: usize, scalars: &[u8], gradients: &[*const u8], count: usize) -> CallFrame {
        let turns = |elements: usize| (elements & !(self.wide_lanes - 1)) as u64;
        CallFrame {
            far_end: turns(end.saturating_sub(PREFETCHED >> self.element_shift)),
            wide_end: turns(end),
            end: end as u64,
            scalars: scalars.as_ptr(),
            gradients: gradients.as_ptr(),
            gradient_count: count as u64,
            tensors: [std::ptr::null_mut(); TENSORS_MAX],
        }
    }

    fn enter(&self, frame: &CallFrame) {
        // SAFETY: the memory begins with a whole function of this signature, which `routine::assemble` wrote and nobody
        // can write since; it lives as long as `self`.
        let function = unsafe {
            std::mem::transmute::<*const u8, unsafe extern "sysv64" fn(*const CallFrame)>(self.memory.as_ptr())
        };
        // SAFETY: the function reads the frame, the scalars and `end` elements of each gradient, and reads and writes
        // `end` elements of each tensor of the rule: `run` checked that slices of these lengths stand behind the
        // pointers, and holds them. It keeps the registers that its signature says, and takes less than a page of
        // the stack. The machine has its instructions: `new` asked.
        unsafe { function(frame) }
    }
}

/// Whether the system allows executing generated code.
pub(crate) fn is_allowed() -> bool {
    /// A whole function: `ret`.
    const RETURN: &[u8] = &[0xc3];
    executable(RETURN).is_some()
}

fn executable(bytes: &[u8]) -> Option<Mmap> {
    let mut memory = MmapMut::map_anon(bytes.len()).ok()?;
    memory.copy_from_slice(bytes);
    memory.make_exec().ok()
}
