//! A small job on an accelerator, with the same job in plain code as reference.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pserver_core::dtype::ElementType::{self, Bfloat16, Float16, Float32, Float64, Int64, Uint32};
use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pserver_core::memory::shared::{GiveBack, ReadOnly};
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Algorithm, Formula, Gradient, Prepared, Rule, Schedule, Step};
use pserver_core::port::{Accelerator, DeviceCode, DeviceSlot, GradientLease, Kernels, Plain, Resident, Update, Work};

use crate::cuda::{Emitted, ModuleSource};

/// Bytes of the largest chunk.
pub(super) const CHUNK_BYTES: u32 = 16 << 10;
const LEASES: u64 = 256;
const ROUNDS: u64 = 5;

/// A chunk in plain code, and its place on the device.
struct Chunk {
    code: DeviceCode,
    element_type: ElementType,
    gradient_type: ElementType,
    gradients: usize,
    parameter: Vec<u8>,
    states: Vec<Vec<u8>>,
    slot: DeviceSlot,
    rule: Option<Prepared>,
    /// The slot of the chunk failed, and is not checked any more.
    is_broken: bool,
}

/// The outcome of a job.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Fate {
    /// The number of refused submissions.
    pub(super) refused: usize,
    /// The number of broken slots.
    pub(super) broken: usize,
    /// The reason of the loss of the device.
    pub(super) lost: Option<String>,
    /// The number of leases that were not returned.
    pub(super) kept: u64,
}

/// A job's chunks: every type, rules with and without states, lengths that are no multiple of a pack, many gradients
/// and none.
const CHUNKS: [(&str, ElementType, ElementType, usize, usize); 8] = [
    ("adam", Float32, Bfloat16, 4, 4096),
    ("adam", Float32, Float32, 1, 1003),
    ("nesterov", Float64, Float16, 3, 777),
    ("sum", Int64, Int64, 2, 500),
    ("add", Uint32, Uint32, 17, 33),
    ("add", Float32, Bfloat16, 70, 129),
    ("sgd", Float64, Float64, 9, 2048),
    // No gradients in every other round: the moments decay.
    ("adam", Float32, Float16, 0, 64),
];

pub(super) fn rule(name: &str) -> Option<Prepared> {
    let algorithm = match name {
        "adam" => Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        "nesterov" => Algorithm::Momentum { momentum: 0.9, nesterov: true },
        "sgd" => Algorithm::Sgd,
        _ => return None,
    };
    let rule = Rule { algorithm, schedule: Schedule::Const { rate: 0.01 }, ..Rule::default() };
    Some(Prepared::new(rule).expect("it is a rule"))
}

/// The kernels of these rules.
pub(super) fn module() -> ModuleSource {
    let emitted: Vec<_> = ["adam", "nesterov", "sgd"].map(|name| emitted(&rule(name).expect("it is one"))).into();
    ModuleSource::new(&emitted, [], &[Float32, Float64])
}

pub(super) fn emitted(rule: &Prepared) -> Emitted {
    let mut scalars = Vec::new();
    let Formula::Rule { code, .. } = rule.formula(&step(1), &mut scalars) else { panic!("it has code") };
    Emitted::of(code)
}

pub(super) fn step(version: u64) -> Step {
    // Another rate in every round, so that numbers of the previous round give a wrong result.
    Step { version: Version(version), rate: Some(version as f64 / 128.0), scale: 0.5, ..Step::FIRST }
}

/// Numbers that differ with the seed, none of them special.
fn values(element_type: ElementType, elements: usize, seed: u64) -> Vec<u8> {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::new();
    for _ in 0..elements {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let value = half::bf16::from_f64((random >> 40) as f64 / f64::from(1 << 24) * 4.0 - 2.0);
        match element_type {
            Float32 => bytes.extend(value.to_f32().to_le_bytes()),
            Float64 => bytes.extend(value.to_f64().to_le_bytes()),
            Float16 => bytes.extend(half::f16::from_f32(value.to_f32()).to_le_bytes()),
            Bfloat16 => bytes.extend(value.to_le_bytes()),
            other => bytes.extend(&random.to_le_bytes()[..usize::try_from(other.bytes()).expect("it is eight")]),
        }
    }
    bytes
}

/// The digest of the job's results in reference code, equal on every device.
pub(super) const DIGEST: &str = "80591ed75e4f30fb2252627e1b4781cb7c3a3d15824ce4c3f07f8f252530bedf";

/// The job in plain code alone.
pub(super) fn digest() -> String {
    let mut hasher = blake3::Hasher::new();
    for (index, chunk) in CHUNKS.iter().enumerate() {
        let slot = DeviceSlot(u32::try_from(index).expect("there are eight"));
        let mut chunk = Chunk::new(chunk, index as u64, slot);
        (1..=ROUNDS).for_each(|round| chunk.update(round));
        hasher.update(&chunk.parameter);
        for state in &chunk.states {
            hasher.update(state);
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// Runs the job, and compares all results with the plain form.
pub(super) fn run(device: &mut dyn Accelerator) -> Fate {
    run_in(device, false)
}

/// As [`run`]. `is_all_pinned`: no memory is left that is not, so that updates are submitted together.
pub(super) fn run_in(device: &mut dyn Accelerator, is_all_pinned: bool) -> Fate {
    let mut budget = Budget::new();
    budget.line("test", CHUNK_BYTES, LEASES);
    let arena = || Arena::new(&budget).expect("there is memory");
    let arenas = Arenas { own: arena(), unpinned: arena(), trainer: Trainer::new(&budget) };
    let mut fate = Fate::default();
    // No memory is pinned on a device that cannot pin memory.
    let _ = device.pin(&arenas.own);
    if is_all_pinned {
        device.pin(&arenas.unpinned).expect("it can be pinned");
    }
    if let Err(failure) = play(device, &arenas, &mut fate) {
        fate.lost = Some(failure.to_string());
    }
    device.clear();
    let kept = [&arenas.own, &arenas.unpinned, &arenas.trainer.arena].map(|arena| arena.usage().slots_in_use);
    fate.kept = kept.iter().sum();
    if fate.lost.is_none() {
        assert_eq!(Arc::strong_count(&arenas.trainer.memory), 1, "a device that is well keeps no trainer's memory");
    }
    fate
}

/// The arenas from which leases are taken.
struct Arenas {
    own: Arena,
    unpinned: Arena,
    trainer: Trainer,
}

/// An arena of another process, and its mapping in this one.
pub(super) struct Trainer {
    arena: Arena,
    pub(super) memory: Arc<ReadOnly>,
}

/// A lease that a trainer has lent.
struct Lent(Mutex<Option<Lease>>);

impl GiveBack for Lent {
    fn give_back(&self, _: u32, _: u32) {
        self.0.lock().expect("no test panics with it").take();
    }

    fn is_kept(&self) -> bool {
        true
    }
}

impl Trainer {
    pub(super) fn new(budget: &Budget) -> Self {
        let arena = Arena::shared(budget).expect("this system shares memory");
        let lease = arena.take(1).expect("there is a lease");
        let descriptor = lease.shared().expect("the arena is shared").file.descriptor().try_clone_to_owned();
        let memory = ReadOnly::open(&descriptor.expect("descriptors are left")).expect("it is sealed");
        Self { arena, memory: Arc::new(memory) }
    }

    /// A view of a lease with these bytes.
    pub(super) fn lend(&self, bytes: &[u8]) -> Lease {
        let lease = lease(&self.arena, bytes);
        let (offset, length) = (lease.shared().expect("the arena is shared").offset, lease.len());
        let lent = Arc::new(Lent(Mutex::new(Some(lease))));
        Lease::view(&self.memory, offset, length, lent, 0).expect("it is inside")
    }
}

fn play(device: &mut dyn Accelerator, arenas: &Arenas, fate: &mut Fate) -> Result<(), Failure> {
    let mut chunks = Vec::new();
    for (index, chunk) in CHUNKS.iter().enumerate() {
        chunks.push(Chunk::adopt(device, chunk, index as u64)?);
    }
    let loads = chunks.iter().map(|chunk| chunk.load(&arenas.own)).collect();
    finish(device, loads, &mut chunks, fate, |_, _| ())?;
    for round in 1..=ROUNDS {
        let begun = chunks.iter().filter(|chunk| !chunk.is_broken).map(|chunk| chunk.begin(arenas, round)).collect();
        finish(device, begun, &mut chunks, fate, |chunk, work| {
            chunk.update(round);
            let Work::Update { into, .. } = work else { panic!("an update comes back as an update") };
            assert!(into.bytes() == chunk.parameter, "the parameter of {} in round {round}", chunk.slot);
        })?;
    }
    let stores = chunks.iter().filter(|chunk| !chunk.is_broken).map(|chunk| chunk.store(&arenas.own)).collect();
    finish(device, stores, &mut chunks, fate, |chunk, work| {
        let Work::Store { states, .. } = work else { panic!("a store comes back as a store") };
        for (place, (found, state)) in states.iter().zip(&chunk.states).enumerate() {
            assert!(found.bytes() == state, "state {place} of {}", chunk.slot);
        }
    })
}

/// Runs work to its end, with any outcome; `happened` sees the completed work.
fn finish(
    device: &mut dyn Accelerator,
    mut queue: VecDeque<Work>,
    chunks: &mut [Chunk],
    fate: &mut Fate,
    mut happened: impl FnMut(&mut Chunk, &Work),
) -> Result<(), Failure> {
    let mut left = queue.len();
    let mut done = Vec::new();
    while 0 < left {
        device.submit(&mut queue)?;
        device.wait(Duration::from_secs(1));
        device.poll(&mut done)?;
        left -= done.len();
        for one in done.drain(..) {
            let chunk = &mut chunks[one.work.slot().0 as usize];
            match one.outcome {
                Ok(()) => happened(chunk, &one.work),
                // A slot that was not loaded accepts no update.
                Err(Failure::Call(_)) if matches!(one.work, Work::Load { .. }) => {
                    fate.refused += 1;
                    chunk.is_broken = true;
                }
                Err(Failure::Call(_)) => fate.refused += 1,
                Err(Failure::Device(_)) => {
                    fate.broken += 1;
                    chunk.is_broken = true;
                }
                Err(other) => panic!("{other:?} is no outcome of work"),
            }
        }
    }
    Ok(())
}

impl Chunk {
    fn adopt(
        device: &mut dyn Accelerator,
        chunk: &(&str, ElementType, ElementType, usize, usize),
        seed: u64,
    ) -> Result<Self, Failure> {
        let mut chunk = Self::new(chunk, seed, DeviceSlot(0));
        let bytes = u32::try_from(chunk.parameter.len()).expect("it is short");
        let resident = Resident { element_type: chunk.element_type, bytes, code: chunk.code.clone(), keeps_sum: false };
        chunk.slot = device.adopt(&resident)?;
        Ok(chunk)
    }

    fn new(
        &(name, element_type, gradient_type, gradients, elements): &(&str, ElementType, ElementType, usize, usize),
        seed: u64,
        slot: DeviceSlot,
    ) -> Self {
        let rule = rule(name);
        let code = match &rule {
            None if name == "sum" => DeviceCode::Sum,
            None => DeviceCode::Add,
            Some(rule) => {
                let mut scalars = Vec::new();
                let Formula::Rule { code, .. } = rule.formula(&step(1), &mut scalars) else { panic!("it has code") };
                DeviceCode::Rule(Arc::clone(code))
            }
        };
        let parameter = values(element_type, elements, seed);
        let states = vec![vec![0; parameter.len()]; code.states()];
        let is_broken = false;
        Self { code, element_type, gradient_type, gradients, parameter, states, slot, rule, is_broken }
    }

    fn load(&self, arena: &Arena) -> Work {
        let bytes = u32::try_from(self.parameter.len()).expect("it is short");
        let parameter = Arc::new(Value::new(lease(arena, &self.parameter), bytes));
        let states = self.states.iter().map(|state| lease(arena, state)).collect();
        Work::Load { slot: self.slot, parameter, states }
    }

    fn numbers(&self, round: u64) -> Vec<f64> {
        let mut scalars = vec![0.5];
        if let Some(rule) = &self.rule {
            let _ = rule.formula(&step(round), &mut scalars);
        }
        scalars
    }

    fn gradients(&self, round: u64) -> Vec<Vec<u8>> {
        let elements = self.parameter.len() / usize::try_from(self.element_type.bytes()).expect("it is eight");
        let seed = |trainer| round * 1000 + u64::from(self.slot.0) * 100 + trainer;
        let count = if self.gradients == 0 { round % 2 } else { self.gradients as u64 };
        (0..count).map(|trainer| values(self.gradient_type, elements, seed(trainer))).collect()
    }

    /// Gradients are in memory of this process that is pinned, in memory that is not, and in a trainer's.
    fn begin(&self, arenas: &Arenas, round: u64) -> Work {
        let gradient = |(index, bytes): (usize, Vec<u8>)| {
            let lease = match index % 3 {
                0 => lease(&arenas.own, &bytes),
                1 => lease(&arenas.unpinned, &bytes),
                _ => arenas.trainer.lend(&bytes),
            };
            GradientLease { bytes: lease.len(), lease, element_type: self.gradient_type }
        };
        let gradients = self.gradients(round).into_iter().enumerate().map(gradient).collect();
        let into = lease(&arenas.own, &vec![0x5a; self.parameter.len()]);
        Work::Update { slot: self.slot, numbers: self.numbers(round), gradients, is_summed: false, into }
    }

    fn store(&self, arena: &Arena) -> Work {
        let states = self.states.iter().map(|state| lease(arena, &vec![0x5a; state.len()])).collect();
        Work::Store { slot: self.slot, states }
    }

    /// Runs the update in plain code.
    fn update(&mut self, round: u64) {
        let (numbers, gradients) = (self.numbers(round), self.gradients(round));
        let of = |bytes| Gradient { bytes, element_type: self.gradient_type };
        Plain.update(Update {
            formula: self.code.formula(&numbers),
            element_type: self.element_type,
            parameter: &mut self.parameter,
            states: &mut self.states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            gradients: &gradients.iter().map(|bytes| of(bytes.as_slice())).collect::<Vec<_>>(),
        });
    }
}

fn lease(arena: &Arena, bytes: &[u8]) -> Lease {
    let mut lease = arena.take(u32::try_from(bytes.len()).expect("it is short")).expect("there is a lease");
    lease.bytes_mut().copy_from_slice(bytes);
    lease
}
