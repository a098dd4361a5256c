//! A server's steps on a device, without the network: what is copied in, updated, and copied out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use half::bf16;
use pserver_core::dtype::ElementType;
use pserver_core::limits::CHUNK_BYTES_DEFAULT;
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Formula, Prepared};
use pserver_core::port::{Accelerator, Done, GradientLease, Kernels, Plain, Resident, Update, Work};
use pserver_kernels::cuda::{Cuda, CudaSettings};

use super::{Case, PARAMETER, step};
use crate::tensors::{PERIOD, value};

/// Elements of a chunk, as servers cut them.
const CHUNK: u64 = CHUNK_BYTES_DEFAULT as u64 / 4;

/// A parameter in chunks on the device, and one step's work for all of them.
pub(super) struct DeviceServer {
    device: Cuda,
    prepared: Option<Prepared>,
    /// The state between two steps.
    work: VecDeque<Work>,
    chunks: usize,
    steps: u64,
    gradient_type: ElementType,
    gradients: usize,
}

impl DeviceServer {
    pub(super) fn new(settings: &CudaSettings, case: &Case<'_>, elements: u64) -> Result<Self> {
        let mut device = Cuda::open(settings.clone())?;
        let (code, prepared) = (case.program.code.clone(), case.program.prepared.clone());
        let (chunks, states) = (elements.div_ceil(CHUNK), code.states() as u64);
        let bytes = |elements: u64, of: ElementType| u32::try_from(elements * of.bytes());
        let mut budget = Budget::new();
        budget.line("gradients", bytes(CHUNK, case.gradient_type)?, chunks * u64::from(case.gradients));
        budget.line("parameters", bytes(CHUNK, PARAMETER)?, chunks + 1 + states);
        let arena = Arena::new(&budget)?;
        device.pin(&arena)?;
        let mut work = VecDeque::new();
        for chunk in 0..chunks {
            let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(elements);
            let length = range.end - range.start;
            let (bytes, code) = (bytes(length, PARAMETER)?, code.clone());
            let resident = Resident { element_type: PARAMETER, bytes, code, keeps_sum: false };
            let slot = device.adopt(&resident)?;
            let parameter = filled(&arena, range.clone(), PARAMETER, 0)?;
            let parameter = Arc::new(Value::new(parameter, resident.bytes));
            let states = (0..states).map(|_| arena.take_zeroed(resident.bytes)).collect::<Result<_, _>>()?;
            finish(&mut device, &mut VecDeque::from([Work::Load { slot, parameter, states }]), 1)?;
            let gradient = |seed| -> Result<GradientLease> {
                let lease = filled(&arena, range.clone(), case.gradient_type, seed)?;
                Ok(GradientLease { bytes: lease.len(), lease, element_type: case.gradient_type })
            };
            let gradients = (1..=case.gradients as usize).map(gradient).collect::<Result<_>>()?;
            let into = arena.take(resident.bytes)?;
            work.push_back(Work::Update { slot, numbers: Vec::new(), gradients, is_summed: false, into });
        }
        let (chunks, gradients) = (work.len(), case.gradients as usize);
        Ok(Self { device, prepared, work, chunks, steps: 0, gradient_type: case.gradient_type, gradients })
    }

    /// One update of every chunk; seconds from the first copy in to the last one out.
    pub(super) fn step(&mut self) -> Result<f64> {
        self.steps += 1;
        let mut scalars = vec![1.0];
        if let Some(prepared) = &self.prepared {
            let _ = prepared.formula(&step(self.steps), &mut scalars);
        }
        for work in &mut self.work {
            if let Work::Update { numbers, .. } = work {
                numbers.clone_from(&scalars);
            }
        }
        let start = Instant::now();
        let done = finish(&mut self.device, &mut self.work, self.chunks)?;
        let seconds = start.elapsed().as_secs_f64();
        self.work.extend(done.into_iter().map(|one| one.work));
        Ok(seconds)
    }

    /// Elements that do not have the bits of the plain form. Values repeat, so one period stands for all.
    pub(super) fn wrong(&self) -> u64 {
        let mut plain = bytes_of(0..PERIOD, PARAMETER, 0);
        let count = self.prepared.as_ref().map_or(0, |prepared| prepared.states().len());
        let mut states = vec![vec![0; plain.len()]; count];
        let gradients: Vec<_> =
            (1..=self.gradients).map(|seed| bytes_of(0..PERIOD, self.gradient_type, seed)).collect();
        for version in 1..=self.steps {
            let mut scalars = Vec::new();
            let formula = match &self.prepared {
                Some(prepared) => prepared.formula(&step(version), &mut scalars),
                None => Formula::Sum { scale: 1.0 },
            };
            let of = |bytes| pserver_core::optim::Gradient { bytes, element_type: self.gradient_type };
            Plain.update(Update {
                formula,
                element_type: PARAMETER,
                parameter: &mut plain,
                states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
                gradients: &gradients.iter().map(|bytes| of(bytes.as_slice())).collect::<Vec<_>>(),
            });
        }
        let period = plain.as_chunks::<4>().0;
        let wrong = self.work.iter().map(|work| {
            let Work::Update { slot, into, .. } = work else { return 0 };
            let first = usize::try_from(u64::from(slot.0) * CHUNK).expect("an address has 64 bits");
            let found = into.bytes().as_chunks::<4>().0.iter().enumerate();
            found.filter(|(index, found)| **found != period[(first + index) % PERIOD]).count() as u64
        });
        wrong.sum()
    }
}

/// Runs work until so much of it is over.
fn finish(device: &mut Cuda, queue: &mut VecDeque<Work>, count: usize) -> Result<Vec<Done>> {
    let mut done = Vec::with_capacity(count);
    while done.len() < count {
        device.submit(queue)?;
        device.poll(&mut done)?;
        if queue.is_empty() && done.len() < count {
            device.wait(Duration::from_secs(10));
        }
    }
    for one in &done {
        one.outcome.clone()?;
    }
    Ok(done)
}

/// A lease with the values of these elements.
fn filled(arena: &Arena, range: std::ops::Range<u64>, element_type: ElementType, seed: usize) -> Result<Lease> {
    let of = |index: u64| usize::try_from(index).expect("an address has 64 bits");
    let bytes = bytes_of(of(range.start)..of(range.end), element_type, seed);
    let mut lease = arena.take(u32::try_from(bytes.len())?)?;
    lease.bytes_mut().copy_from_slice(&bytes);
    Ok(lease)
}

fn bytes_of(range: std::ops::Range<usize>, element_type: ElementType, seed: usize) -> Vec<u8> {
    let values = range.map(|index| value(index, seed));
    match element_type {
        ElementType::Bfloat16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}
