//! Conformance suite for every implementation of [`Accelerator`].
//!
//! - An update has the bits of [`Plain`], the parameter's and the states', round after round, with any other work in
//!   flight.
//! - A sum that stays with its slot has the sums of squares of the reference, and an update of it the bits of one of
//!   its gradients.
//! - Work completes once and as a whole, and its leases are released then.
//! - A load of the parameter alone does not change the states.
//! - A chunk without room is refused with the bytes asked for; slots are counted from zero, and again from zero after
//!   [`Accelerator::clear`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pserver_core::dtype::ElementType::{self, Bfloat16, Float16, Float32, Float64, Int64};
use pserver_core::ids::Version;
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Algorithm, Formula, Gradient, Prepared, Rule, Step, square_sums};
use pserver_core::port::{
    Accelerator, DeviceCode, DeviceSlot, Done, GradientLease, Kernels, NotAdopted, Plain, Resident, Update, Work,
};

/// A device that has not completed its work after this many waits counts as lost.
const WAITS_MAX: u32 = 20_000;
const WAIT: Duration = Duration::from_millis(1);
const ROUNDS: u64 = 3;
/// A round in which a sum is made, and the update is not of it.
const UNSUMMED: u64 = 2;

/// Panics with the first promise that an accelerator breaks. `open` opens one with room for a MiB or more, which takes
/// these rules, momentum, [`DeviceCode::Add`] and [`DeviceCode::Sum`].
///
/// # Panics
/// That is how it tells.
pub fn check(mut open: impl FnMut() -> Box<dyn Accelerator>, rules: &[Rule]) {
    let arena = arena();
    let clipped = Rule { clip_norm: Some(0.5), ..momentum() };
    check_updates(open().as_mut(), &arena, &[rules, &[clipped]].concat());
    check_parameter_alone(open().as_mut(), &arena);
    check_room(open().as_mut());
    check_clear(open().as_mut(), &arena);
    assert_eq!(arena.usage().slots_in_use, 0, "a device that is gone has no leases");
}

/// A chunk as it must be, beside the device's.
struct ReferenceChunk {
    prepared: Prepared,
    element_type: ElementType,
    parameter: Vec<u8>,
    states: Vec<Vec<u8>>,
    slot: DeviceSlot,
}

impl ReferenceChunk {
    fn resident(&self) -> Resident {
        let bytes = u32::try_from(self.parameter.len()).expect("a chunk is short");
        Resident { element_type: self.element_type, bytes, code: code_of(&self.prepared), keeps_sum: self.keeps_sum() }
    }

    /// Whether its rule needs the norm of its gradient.
    fn keeps_sum(&self) -> bool {
        !self.prepared.rule().is_element_wise()
    }

    fn load(&self, arena: &Arena) -> Work {
        let parameter = Arc::new(Value::new(filled(arena, &self.parameter), self.resident().bytes));
        let states = self.states.iter().map(|state| filled(arena, state)).collect();
        Work::Load { slot: self.slot, parameter, states }
    }

    /// The gradients of a round's update.
    fn gradients(&self, round: u64) -> Vec<(ElementType, Vec<u8>)> {
        let elements = self.parameter.len() / size(self.element_type);
        let count = [1, 2, 5][usize::try_from((round + u64::from(self.slot.0)) % 3).expect("it is small")];
        let types = if self.element_type.is_float() { [self.element_type, Float16, Bfloat16] } else { [Int64; 3] };
        (0..count)
            .map(|trainer| {
                let own = types[usize::try_from((round + trainer) % 3).expect("it is small")];
                (own, super::values(own, elements, round * 100 + trainer * 10 + u64::from(self.slot.0), 0))
            })
            .collect()
    }

    /// The sums of squares of the sum of a round's gradients, here by [`Plain`].
    fn squares(&self, round: u64) -> Vec<f64> {
        let mut sum = vec![0; self.parameter.len()];
        Plain.sum(self.element_type, &mut sum, &self.gradients(round).iter().map(view).collect::<Vec<_>>());
        let mut squares = Vec::new();
        square_sums(self.element_type, &sum, &mut |block| squares.push(block));
        squares
    }

    /// The work that sums a round. That of [`UNSUMMED`] has other gradients than the update.
    fn sum(&self, arena: &Arena, round: u64) -> Work {
        let gradients = self.gradients(if round == UNSUMMED { round + 1 } else { round });
        let squares = arena.take(self.resident().squares_bytes()).expect("there is room");
        Work::Sum { slot: self.slot, gradients: lent(arena, gradients), squares }
    }

    /// The update of a round, done here by [`Plain`] and returned for the device.
    fn update(&mut self, arena: &Arena, round: u64) -> Work {
        let gradients = self.gradients(round);
        let scale = 1.0 / gradients.len() as f64;
        let norm = self.keeps_sum().then(|| self.squares(round).into_iter().sum::<f64>().sqrt() * scale);
        let step = Step { version: Version(round), norm, scale, ..Step::FIRST };
        let mut numbers = Vec::new();
        let formula = self.prepared.formula(&step, &mut numbers);
        let scale = match formula {
            Formula::Add { scale } | Formula::Sum { scale } => Some(scale),
            Formula::Rule { .. } => None,
        };
        Plain.update(Update {
            formula,
            element_type: self.element_type,
            parameter: &mut self.parameter,
            states: &mut self.states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            gradients: &gradients.iter().map(view).collect::<Vec<_>>(),
        });
        Work::Update {
            slot: self.slot,
            numbers: scale.map_or(numbers, |scale| vec![scale]),
            gradients: lent(arena, gradients),
            is_summed: self.keeps_sum() && round != UNSUMMED,
            into: arena.take(self.resident().bytes).expect("there is room"),
        }
    }

    fn store(&self, arena: &Arena) -> Work {
        let take = |state: &Vec<u8>| arena.take(u32::try_from(state.len()).expect("short")).expect("there is room");
        Work::Store { slot: self.slot, states: self.states.iter().map(take).collect() }
    }

    fn check(&self, done: &Done, round: u64) {
        let case = format!("{} of slot {} in round {round}: {:?}", done.work.name(), self.slot, self.prepared.rule());
        assert_eq!(done.outcome, Ok(()), "{case}");
        match &done.work {
            Work::Load { states, .. } => assert_eq!(states.len(), self.states.len(), "{case}"),
            Work::Sum { squares, .. } => {
                let expected = self.squares(if round == UNSUMMED { round + 1 } else { round });
                let expected: Vec<u8> = expected.iter().flat_map(|block| block.to_le_bytes()).collect();
                super::assert_same(Float64, &squares.bytes()[..expected.len()], &expected, || case.clone());
            }
            Work::Update { into, .. } => {
                super::assert_same(self.element_type, &into.bytes()[..self.parameter.len()], &self.parameter, || {
                    case.clone()
                });
            }
            Work::Store { states, .. } => {
                assert_eq!(states.len(), self.states.len(), "{case}");
                for (found, state) in states.iter().zip(&self.states) {
                    super::assert_same(self.element_type, &found.bytes()[..state.len()], state, || case.clone());
                }
            }
        }
    }
}

fn chunks(device: &mut dyn Accelerator, rules: &[Rule]) -> Vec<ReferenceChunk> {
    let exact = |algorithm| Rule { algorithm, ..Rule::default() };
    let all = rules.iter().cloned().flat_map(|rule| [(rule.clone(), Float32, 1027), (rule, Float64, 64)]);
    let (add, sum) = (exact(Algorithm::Add), exact(Algorithm::Sum));
    let sums = [(add.clone(), Int64, 33), (sum, Float32, 1), (add, Float64, 515)];
    let mut chunks = Vec::new();
    for (rule, element_type, elements) in all.chain(sums) {
        let prepared = Prepared::new(rule).expect("it is a rule");
        let seed = 7 + chunks.len() as u64;
        let state = |(index, _)| {
            let bytes = super::values(element_type, elements, seed + 31 * index as u64, 5);
            super::absolute(element_type, &bytes)
        };
        let states = prepared.states().iter().enumerate().map(state).collect();
        let parameter = super::values(element_type, elements, seed ^ 0x55, 3);
        let mut chunk = ReferenceChunk { prepared, element_type, parameter, states, slot: DeviceSlot(0) };
        chunk.slot = device.adopt(&chunk.resident()).expect("there is room");
        assert_eq!(chunk.slot.0 as usize, chunks.len(), "slots are counted from zero");
        chunks.push(chunk);
    }
    chunks
}

/// Every chunk at once, round after round.
fn check_updates(device: &mut dyn Accelerator, arena: &Arena, rules: &[Rule]) {
    device.pin(arena).expect("the suite's memory can be locked");
    let mut chunks = chunks(device, rules);
    let loads = chunks.iter().map(|chunk| chunk.load(arena)).collect();
    run(device, loads).iter().for_each(|done| chunks[done.work.slot().0 as usize].check(done, 0));
    for round in 1..=ROUNDS {
        let sums: Vec<_> = chunks.iter().filter(|chunk| chunk.keeps_sum()).collect();
        let works = sums.iter().map(|chunk| chunk.sum(arena, round)).collect();
        run(device, works).iter().for_each(|done| chunks[done.work.slot().0 as usize].check(done, round));
        // A store in between does not change the sums.
        let stores = sums.iter().map(|chunk| chunk.store(arena)).collect();
        run(device, stores).iter().for_each(|done| chunks[done.work.slot().0 as usize].check(done, round));
        let updates = chunks.iter_mut().map(|chunk| chunk.update(arena, round)).collect();
        run(device, updates).iter().for_each(|done| chunks[done.work.slot().0 as usize].check(done, round));
        let stores = chunks.iter().filter(|chunk| !chunk.states.is_empty()).map(|chunk| chunk.store(arena)).collect();
        run(device, stores).iter().for_each(|done| chunks[done.work.slot().0 as usize].check(done, round));
        assert_eq!(arena.usage().slots_in_use, 0, "completed work was dropped with its leases");
    }
}

fn check_parameter_alone(device: &mut dyn Accelerator, arena: &Arena) {
    let mut chunk = chunks(device, &[momentum()]).swap_remove(0);
    run(device, vec![chunk.load(arena)]);
    for round in 1..=ROUNDS {
        let update = chunk.update(arena, round);
        run(device, vec![update]).iter().for_each(|done| chunk.check(done, round));
        chunk.parameter = super::values(chunk.element_type, chunk.parameter.len() / 4, 1000 + round, 3);
        let Work::Load { slot, parameter, .. } = chunk.load(arena) else { unreachable!("it is a load") };
        run(device, vec![Work::Load { slot, parameter, states: Vec::new() }]);
    }
    let store = chunk.store(arena);
    run(device, vec![store]).iter().for_each(|done| chunk.check(done, ROUNDS));
}

/// Free bytes are those of the whole device: on a real one the driver's pools and other processes change them too. The
/// stand-in driver's device is smaller, and its free bytes are exact.
const ROOM_SLACK: u64 = 64 << 20;
const EXACT_BYTES_MAX: u64 = 1 << 30;

fn check_room(device: &mut dyn Accelerator) {
    let resident = |bytes| Resident { element_type: Float32, bytes, code: DeviceCode::Add, keeps_sum: false };
    let slack = |free: u64| if EXACT_BYTES_MAX < free { ROOM_SLACK } else { 0 };
    let before = device.capabilities().bytes_free;
    device.adopt(&resident(4096)).expect("there is room");
    let after = device.capabilities().bytes_free;
    assert!(after + 4096 <= before + slack(before), "{before} bytes were free and {after} are, after a chunk of 4096");
    let refused = device.adopt(&Resident { element_type: Float16, ..resident(4096) });
    assert!(matches!(refused, Err(NotAdopted::Unfit(_))), "no parameter is of type float16: {refused:?}");
    assert_eq!(device.adopt(&resident(4096)), Ok(DeviceSlot(1)), "what was refused has no slot");
    let before = device.capabilities().bytes_free;
    device.adopt(&Resident { keeps_sum: true, ..resident(4096) }).expect("there is room");
    let after = device.capabilities().bytes_free;
    assert!(
        after + 2 * 4096 + 8 <= before + slack(before),
        "{before} bytes were free and {after} are, after one that keeps a sum"
    );
    let refused = device.adopt(&Resident { element_type: Int64, keeps_sum: true, ..resident(4096) });
    assert!(matches!(refused, Err(NotAdopted::Unfit(_))), "no sum of int64 is kept: {refused:?}");
}

fn check_clear(device: &mut dyn Accelerator, arena: &Arena) {
    let chunk = chunks(device, &[]).swap_remove(0);
    let mut queue = VecDeque::from([chunk.load(arena)]);
    device.submit(&mut queue).expect("the device is there");
    device.clear();
    drop(queue);
    let mut done = Vec::new();
    device.poll(&mut done).expect("the device is there");
    assert!(done.is_empty(), "what was under way does not come back");
    assert_eq!(arena.usage().slots_in_use, 0, "its leases were dropped");
    assert_eq!(device.adopt(&chunk.resident()), Ok(DeviceSlot(0)), "slots are counted from zero again");
}

/// Runs work to its end. Each piece comes back once.
fn run(device: &mut dyn Accelerator, work: Vec<Work>) -> Vec<Done> {
    let mut expected: Vec<DeviceSlot> = work.iter().map(Work::slot).collect();
    let (mut queue, mut all, mut waits) = (VecDeque::from(work), Vec::new(), 0);
    while all.len() < expected.len() {
        device.submit(&mut queue).expect("the device is there");
        device.poll(&mut all).expect("the device is there");
        assert!(waits < WAITS_MAX, "{} of {} pieces of work came back", all.len(), expected.len());
        device.wait(WAIT);
        waits += 1;
    }
    let mut found: Vec<DeviceSlot> = all.iter().map(|done| done.work.slot()).collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected, "each piece of work comes back once");
    all
}

fn momentum() -> Rule {
    Rule { algorithm: Algorithm::Momentum { momentum: 0.5, nesterov: false }, ..Rule::default() }
}

fn code_of(prepared: &Prepared) -> DeviceCode {
    let step = Step { version: Version(1), norm: Some(1.0), ..Step::FIRST };
    match prepared.formula(&step, &mut Vec::new()) {
        Formula::Add { .. } => DeviceCode::Add,
        Formula::Sum { .. } => DeviceCode::Sum,
        Formula::Rule { code, .. } => DeviceCode::Rule(Arc::clone(code)),
    }
}

fn arena() -> Arena {
    let mut budget = Budget::new();
    budget.line("values, states and gradients", 8192, 2000);
    Arena::new(&budget).expect("a test has so much memory")
}

fn view((element_type, bytes): &(ElementType, Vec<u8>)) -> Gradient<'_> {
    Gradient { bytes, element_type: *element_type }
}

fn lent(arena: &Arena, gradients: Vec<(ElementType, Vec<u8>)>) -> Vec<GradientLease> {
    let lent = |(element_type, bytes): (ElementType, Vec<u8>)| {
        let lease = filled(arena, &bytes);
        GradientLease { bytes: lease.len(), lease, element_type }
    };
    gradients.into_iter().map(lent).collect()
}

fn filled(arena: &Arena, bytes: &[u8]) -> Lease {
    let mut lease = arena.take(u32::try_from(bytes.len()).expect("a chunk is short")).expect("there is room");
    lease.bytes_mut().copy_from_slice(bytes);
    lease
}

fn size(element_type: ElementType) -> usize {
    usize::try_from(element_type.bytes()).expect("it is small")
}

#[cfg(test)]
mod tests {
    use pserver_core::port::{Fault, FaultyAccelerator, Simulated};

    use super::*;
    use crate::cpu::Cpu;

    #[test]
    fn the_simulated_accelerator_passes_the_conformance_suite() {
        for (polls, depth) in [(1, 1), (5, 3), (7, 64)] {
            let open = || Box::new(Simulated::new(Cpu::new(), 1 << 24, polls).of_depth(depth)) as Box<dyn Accelerator>;
            check(open, &super::super::rules());
        }
    }

    #[test]
    fn a_faulty_accelerator_fails_the_suite() {
        for fault in [Fault::Refuses(3), Fault::Breaks(2), Fault::Dies(4), Fault::IsFull(2), Fault::CannotPin] {
            let open = || {
                let inner = Simulated::new(crate::FaultyKernels::new(Cpu::new(), u64::MAX), 1 << 24, 2);
                Box::new(FaultyAccelerator::new(inner, fault)) as Box<dyn Accelerator>
            };
            std::panic::catch_unwind(|| check(open, &[])).expect_err("the suite sees it");
        }
        let wrong =
            || Box::new(Simulated::new(crate::FaultyKernels::new(Cpu::new(), 5), 1 << 24, 2)) as Box<dyn Accelerator>;
        std::panic::catch_unwind(|| check(wrong, &[])).expect_err("a wrong bit is seen");
    }
}
