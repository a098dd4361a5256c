//! Adapter from an accelerator to the kernels port: each update adopts, loads, updates and stores one chunk. For tests
//! and comparisons, not for speed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pserver_core::dtype::{ElementType, Half};
use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Formula, Gradient};
use pserver_core::port::{Accelerator, DeviceCode, DeviceSlot, GradientLease, Kernels, Plain, Resident, Update, Work};

/// Leases that an update may need besides its gradients.
const LEASES: u64 = 32;
/// Chunks that are adopted before all of them are cleared.
const CHUNKS: u32 = 1000;

/// Kernels that run their updates on an accelerator.
pub struct AcceleratorKernels<A> {
    accelerator: A,
    arena: Arena,
    chunks: u32,
}

impl<A: Accelerator> AcceleratorKernels<A> {
    /// Serves chunks of at most `bytes` bytes and at most `gradients` gradients.
    ///
    /// # Panics
    /// When there is no memory for that.
    pub fn new(mut accelerator: A, bytes: u32, gradients: u64) -> Self {
        assert!(bytes <= CHUNK_BYTES_MAX, "chunks of {bytes} bytes");
        let mut budget = Budget::new();
        budget.line("an update beside", bytes, LEASES + gradients);
        let arena = Arena::new(&budget).expect("there is memory for an update");
        accelerator.pin(&arena).expect("memory can be pinned");
        Self { accelerator, arena, chunks: 0 }
    }

    /// The accelerator.
    pub fn accelerator(&mut self) -> &mut A {
        &mut self.accelerator
    }

    fn lease(&self, bytes: &[u8]) -> Lease {
        let mut lease = self.empty(bytes.len());
        lease.bytes_mut().copy_from_slice(bytes);
        lease
    }

    fn empty(&self, bytes: usize) -> Lease {
        let bytes = u32::try_from(bytes).expect("a chunk's length has 32 bits");
        self.arena.take(bytes).expect("there is memory for an update")
    }

    fn adopt(&mut self, element_type: ElementType, bytes: u32, code: DeviceCode) -> DeviceSlot {
        let resident = Resident { element_type, bytes, code, keeps_sum: false };
        self.accelerator.adopt(&resident).expect("there is room for a chunk")
    }

    /// Runs one piece of work to completion.
    fn run(&mut self, work: Work) -> Work {
        let mut queue = VecDeque::from([work]);
        let mut done = Vec::new();
        while done.is_empty() {
            self.accelerator.submit(&mut queue).expect("the device is well");
            self.accelerator.wait(Duration::from_secs(1));
            self.accelerator.poll(&mut done).expect("the device is well");
        }
        let one = done.pop().expect("there is one");
        one.outcome.expect("the work was done");
        one.work
    }
}

impl<A: Accelerator> Kernels for AcceleratorKernels<A> {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        // Multiplying by one changes no bit.
        let formula = Formula::Sum { scale: 1.0 };
        self.update(Update { formula, element_type, parameter: into, states: &mut [], gradients });
    }

    fn update(&mut self, update: Update<'_>) {
        let Update { formula, element_type, parameter, states, gradients } = update;
        let (code, numbers) = match formula {
            Formula::Add { scale } => (DeviceCode::Add, vec![scale]),
            Formula::Sum { scale } => (DeviceCode::Sum, vec![scale]),
            Formula::Rule { code, scalars } => (DeviceCode::Rule(Arc::clone(code)), scalars.to_vec()),
        };
        let Ok(bytes) = u32::try_from(parameter.len()) else { panic!("a chunk of {} bytes", parameter.len()) };
        if bytes == 0 {
            return; // nothing to update
        }
        if self.chunks == CHUNKS {
            self.accelerator.clear();
            self.accelerator.pin(&self.arena).expect("memory can be pinned");
            self.chunks = 0;
        }
        self.chunks += 1;
        let slot = self.adopt(element_type, bytes, code);
        let value = Arc::new(Value::new(self.lease(parameter), bytes));
        let held = states.iter().map(|state| self.lease(state)).collect();
        self.run(Work::Load { slot, parameter: value, states: held });
        let gradients = gradients.iter().map(|gradient| GradientLease {
            lease: self.lease(gradient.bytes),
            bytes: u32::try_from(gradient.bytes.len()).expect("a gradient is no longer than its chunk"),
            element_type: gradient.element_type,
        });
        let gradients = gradients.collect();
        let into = self.empty(parameter.len());
        let update = Work::Update { slot, numbers, gradients, is_summed: false, into };
        let Work::Update { into, .. } = self.run(update) else { unreachable!("work comes back as it was") };
        parameter.copy_from_slice(into.bytes());
        let places = states.iter().map(|state| self.empty(state.len())).collect();
        let Work::Store { states: stored, .. } = self.run(Work::Store { slot, states: places }) else {
            unreachable!("work comes back as it was")
        };
        states.iter_mut().zip(&stored).for_each(|(state, lease)| state.copy_from_slice(lease.bytes()));
    }

    /// On the processor: an accelerator has no work item for it.
    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        Plain.narrow_to_half(half, value, into);
    }

    fn name(&self) -> &'static str {
        "an accelerator"
    }
}
