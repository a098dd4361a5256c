//! Kernels from the view of a caller: tensors in, tensors out.

use std::mem::offset_of;

use bytemuck::{Zeroable, bytes_of};
use half::{bf16, f16};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::optim::{Formula, Gradient};
use pserver_core::port::{Kernels, Update};
use pserver_kernels::cuda::Emitted;
use pserver_kernels::cuda::arguments::{CastArguments, ElementKind, SumMode, UpdateArguments, sum_entry};

use crate::launcher::{BufferId, DeviceAddress, Launcher};

pub(crate) const FLOATS: [ElementType; 2] = [ElementType::Float32, ElementType::Float64];

pub(crate) fn size(element_type: ElementType) -> usize {
    usize::try_from(element_type.bytes()).expect("it is at most eight")
}

/// One launch of an update or a sum.
#[derive(Clone, Copy)]
pub(crate) struct Launch<'a> {
    pub(crate) entry: &'a str,
    pub(crate) element_type: ElementType,
    pub(crate) weights: &'a [u8],
    pub(crate) states: &'a [&'a [u8]],
    pub(crate) sum: Option<&'a [u8]>,
    pub(crate) gradients: &'a [Gradient<'a>],
    pub(crate) scalars: &'a [u8],
    pub(crate) skip: Option<u32>,
    pub(crate) copy: Option<ElementType>,
    pub(crate) merge: SumMode,
    /// How many elements past an aligned address tensors begin.
    pub(crate) misaligned: usize,
    pub(crate) blocks: u64,
}

/// The results of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) weights: Vec<u8>,
    pub(crate) states: Vec<Vec<u8>>,
    pub(crate) copy: Vec<u8>,
}

impl Launch<'_> {
    pub(crate) fn run(self, launcher: &mut dyn Launcher) -> Left {
        let size = size(self.element_type);
        let align = self.misaligned * size % 16;
        let mut addresses = Vec::new();
        let mut place = |offset: usize, buffer: BufferId| addresses.push(DeviceAddress { offset, buffer, within: 0 });
        let mut arguments = UpdateArguments::zeroed();
        arguments.elements = (self.weights.len() / size) as u64;
        let weights = launcher.buffer(self.weights, align);
        place(offset_of!(UpdateArguments, weights), weights);
        let states: Vec<BufferId> = self.states.iter().map(|state| launcher.buffer(state, align)).collect();
        for (index, state) in states.iter().enumerate() {
            place(offset_of!(UpdateArguments, states) + 8 * index, *state);
        }
        if let Some(sum) = self.sum {
            place(offset_of!(UpdateArguments, sum), launcher.buffer(sum, align));
        }
        arguments.set_numbers(self.scalars);
        if let Some(skip) = self.skip {
            place(offset_of!(UpdateArguments, skip), launcher.buffer(&skip.to_le_bytes(), 4));
        }
        let copied = self.copy.map_or(0, |copy| self.weights.len() / size * self::size(copy));
        let copy = self.copy.map(|_| launcher.buffer(&vec![0x11; copied], 0));
        if let (Some(copy), Some(element_type)) = (copy, self.copy) {
            place(offset_of!(UpdateArguments, copy), copy);
            arguments.copy_kind = ElementKind::of(element_type).code();
        }
        arguments.count = u32::try_from(self.gradients.len()).expect("few gradients");
        let gradient_type = self.gradients.first().map_or(self.element_type, |first| first.element_type);
        arguments.gradient_kind = ElementKind::of(gradient_type).code();
        arguments.merge = self.merge as u32;
        for (index, gradient) in self.gradients.iter().enumerate() {
            assert_eq!(gradient.element_type, gradient_type, "a launch takes gradients of one type");
            let align = self.misaligned * self::size(gradient_type) % 16;
            place(offset_of!(UpdateArguments, gradients) + 8 * index, launcher.buffer(gradient.bytes, align));
        }
        launcher.launch(self.entry, [self.blocks, 1], bytes_of(&arguments), &addresses);
        let left = Left {
            weights: launcher.read(weights, self.weights.len()),
            states: states.iter().map(|state| launcher.read(*state, self.weights.len())).collect(),
            copy: copy.map_or(Vec::new(), |copy| launcher.read(copy, copied)),
        };
        launcher.release();
        left
    }
}

/// The kernels behind the port, as a server would launch them.
pub(crate) struct Port<'a> {
    launcher: &'a mut dyn Launcher,
    /// Orders, alignments and grids differ from call to call.
    calls: usize,
}

impl<'a> Port<'a> {
    pub(crate) fn new(launcher: &'a mut dyn Launcher) -> Self {
        Self { launcher, calls: 0 }
    }

    fn launch(&mut self, launch: Launch<'_>) -> Left {
        self.calls += 1;
        self.launcher.order([0, 1, self.calls as u64][self.calls % 3]);
        let (misaligned, blocks) = (self.calls % 5, 1 + (self.calls % 2) as u64);
        Launch { misaligned, blocks, ..launch }.run(self.launcher)
    }
}

fn nearest(element_type: ElementType, scale: f64) -> Vec<u8> {
    match element_type {
        #[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
        ElementType::Float32 => (scale as f32).to_le_bytes().to_vec(),
        _ => scale.to_le_bytes().to_vec(),
    }
}

impl Kernels for Port<'_> {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        let entry = sum_entry(element_type).expect("a parameter's type");
        let launch = Launch { entry, element_type, weights: into, gradients, ..plain() };
        let left = self.launch(launch);
        into.copy_from_slice(&left.weights);
    }

    fn update(&mut self, update: Update<'_>) {
        let Update { formula, element_type, parameter, states, gradients } = update;
        let (mut entry, mut scalars, mut merge) = (String::new(), Vec::new(), SumMode::Sum);
        match formula {
            Formula::Add { scale } => (scalars, merge) = (nearest(element_type, scale), SumMode::Add),
            Formula::Sum { scale } => (scalars, merge) = (nearest(element_type, scale), SumMode::Scale),
            Formula::Rule { code, scalars: values } => {
                let emitted = Emitted::of(code);
                entry = emitted.update_entry(element_type);
                emitted.pack(element_type, values, &mut scalars);
            }
        }
        let entry = if entry.is_empty() { sum_entry(element_type).expect("a parameter's type") } else { &entry };
        let before: Vec<&[u8]> = states.iter().map(|state| &**state).collect();
        let launch = Launch {
            entry,
            element_type,
            weights: parameter,
            states: &before,
            gradients,
            scalars: &scalars,
            merge,
            ..plain()
        };
        let left = self.launch(launch);
        parameter.copy_from_slice(&left.weights);
        states.iter_mut().zip(&left.states).for_each(|(state, left)| state.copy_from_slice(left));
    }

    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        self.calls += 1;
        let (held, left) = (self.launcher.buffer(value, 4 * (self.calls % 4)), self.launcher.buffer(into, 0));
        let mut arguments = CastArguments::zeroed();
        arguments.elements = into.len() as u64 / 2;
        arguments.from_kind = ElementKind::of(ElementType::Float32).code();
        arguments.into_kind = ElementKind::of(half.element_type()).code();
        let addresses = [
            DeviceAddress::of(offset_of!(CastArguments, from), held),
            DeviceAddress::of(offset_of!(CastArguments, into), left),
        ];
        self.launcher.launch("pserver_cast", [2, 1], bytes_of(&arguments), &addresses);
        into.copy_from_slice(&self.launcher.read(left, into.len()));
        self.launcher.release();
    }

    fn name(&self) -> &'static str {
        "cuda kernels, one launch at a time"
    }
}

/// A launch without elements and gradients.
pub(crate) fn plain() -> Launch<'static> {
    Launch {
        entry: "",
        element_type: ElementType::Float32,
        weights: &[],
        states: &[],
        sum: None,
        gradients: &[],
        scalars: &[],
        skip: None,
        copy: None,
        merge: SumMode::Sum,
        misaligned: 0,
        blocks: 1,
    }
}

/// The numbers of a tensor of floats.
pub(crate) fn floats(element_type: ElementType, bytes: &[u8]) -> Vec<f64> {
    match element_type {
        ElementType::Float32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect(),
        ElementType::Float16 => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).into()).collect(),
        ElementType::Bfloat16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).into()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
    }
}

/// Whether two tensors have the same bits, with all NaN taken as equal.
pub(crate) fn assert_same(element_type: ElementType, found: &[u8], expected: &[u8], case: &str) {
    assert_eq!(found.len(), expected.len(), "{case}");
    if found == expected {
        return;
    }
    let size = size(element_type);
    for (index, (found, expected)) in found.chunks(size).zip(expected.chunks(size)).enumerate() {
        let is_nan = |bytes: &[u8]| element_type.is_float() && floats(element_type, bytes)[0].is_nan();
        let is_same = found == expected || is_nan(found) && is_nan(expected);
        assert!(is_same, "{case}: element {index} is {found:?}, expected {expected:?}");
    }
}
