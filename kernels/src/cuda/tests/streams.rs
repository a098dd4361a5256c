//! Streams run in the order that events require, and values are released when the work is done.

use std::sync::Arc;

use pserver_core::memory::{Arena, Budget, Lease};

use super::standin::{each, each_seed};
use crate::cuda::safe::{
    CudaContext, CudaEvent, CudaModule, DeviceMemory, DeviceRange, Grid, HostMapping, KernelFunction, RegisteredRange,
    StreamId, StreamSet, Ticket,
};

const BYTES: u32 = 4096;
const WORDS: usize = BYTES as usize / 8;
const ONE: Grid = Grid { blocks: (1, 1), threads: 1, shared: 0 };

/// A device, an arena that is pinned, and the kernel that adds words.
struct Bench {
    context: Arc<CudaContext>,
    arena: Arena,
    streams: StreamSet<[Lease; 2]>,
    add: KernelFunction,
    _pinned: RegisteredRange,
}

impl Bench {
    fn new(leases: u64) -> Self {
        let context = CudaContext::open(0).expect("there is a device");
        let mut budget = Budget::new();
        budget.line("test", BYTES, leases);
        let arena = Arena::new(&budget).expect("there is memory");
        let mapping = Arc::new(HostMapping::Arena(arena.clone()));
        let pinned = RegisteredRange::new(&context, &mapping, 0..mapping.all().len()).expect("it can be pinned");
        let module = CudaModule::load(&context, b".version 8.4").expect("it is PTX");
        let add = module.entry("standin_add").expect("the stand-in has it");
        Self { streams: StreamSet::new(&context, 64).expect("there are streams"), context, arena, add, _pinned: pinned }
    }

    fn event(&self) -> CudaEvent {
        CudaEvent::new(&self.context, false).expect("there are events")
    }

    fn lease(&self, value: u64) -> Lease {
        let mut lease = self.arena.take(BYTES).expect("there is a lease");
        lease.bytes_mut().chunks_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
        lease
    }

    /// Copies a value to the device, adds it to the sum, and copies the sum back.
    fn step(&mut self, value: u64, place: &TestBank, sum: &DeviceRange, copied: &CudaEvent) -> Ticket {
        let ticket = self.streams.hold([self.lease(value), self.lease(0)], self.event());
        let streams = &mut self.streams;
        streams.wait(StreamId::In, &place.used).unwrap();
        streams.copy_in(ticket, |[from, _]| from.bytes(), &place.part).unwrap();
        streams.record(StreamId::In, &place.filled).unwrap();
        streams.wait(StreamId::Compute, &place.filled).unwrap();
        // The sum changes only when the step before has copied it out.
        streams.wait(StreamId::Compute, copied).unwrap();
        streams.launch(&self.add, ONE, &[place.part.address(), sum.address(), WORDS as u64]).unwrap();
        streams.record(StreamId::Compute, &place.used).unwrap();
        streams.wait(StreamId::Out, &place.used).unwrap();
        streams.copy_out(ticket, sum, |[_, into]| into.bytes_mut()).unwrap();
        streams.record(StreamId::Out, copied).unwrap();
        streams.close(StreamId::Out, ticket).unwrap();
        ticket
    }
}

/// A bank of the device for values, used in alternation.
struct TestBank {
    part: DeviceRange,
    filled: CudaEvent,
    used: CudaEvent,
}

const STEPS: u64 = 20;

/// Steps that alternate between two banks; returns the words that each bank copied out.
fn sums() -> Vec<Vec<u64>> {
    let mut bench = Bench::new(2 * STEPS);
    let memory = DeviceMemory::new(&bench.context, u64::from(BYTES) * 3).expect("there is memory");
    let part = |index: u64| memory.part(index * u64::from(BYTES)..(index + 1) * u64::from(BYTES));
    let places = [1, 2].map(|index| TestBank { part: part(index), filled: bench.event(), used: bench.event() });
    let (sum, copied) = (part(0), bench.event());
    bench.streams.fill(StreamId::Compute, &sum, 0).unwrap();
    let mut order = Vec::new();
    for (value, place) in (1..=STEPS).zip(places.iter().cycle()) {
        order.push(bench.step(value, place, &sum, &copied));
    }
    let mut found = vec![Vec::new(); order.len()];
    while 0 < bench.streams.len() {
        let come = |ticket, [_, into]: [Lease; 2], _| {
            let place = order.iter().position(|known| *known == ticket).expect("it was held");
            found[place] = words(&into);
        };
        bench.streams.release(come).unwrap();
    }
    assert_eq!(bench.arena.usage().slots_in_use, 0, "every lease came back");
    found
}

fn words(lease: &Lease) -> Vec<u64> {
    lease.bytes().as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn expected() -> Vec<Vec<u64>> {
    (1..=STEPS).map(|step| vec![step * (step + 1) / 2; WORDS]).collect()
}

#[test]
fn work_that_waits_for_an_event_runs_after_it() {
    each_seed(8, &[], || assert!(sums() == expected(), "the lanes ran in another order than asked for"));
}

#[test]
fn streams_that_ignore_waits_give_a_wrong_sum() {
    each_seed(4, &[("PSERVER_STANDIN_NO_WAITS", "1")], || assert!(sums() != expected(), "this order hides the waits"));
}

#[test]
fn a_value_stays_until_its_end_has_happened() {
    each_seed(4, &[], || {
        let mut bench = Bench::new(4);
        let memory = DeviceMemory::new(&bench.context, u64::from(BYTES)).expect("there is memory");
        let part = memory.part(0..u64::from(BYTES));
        let ticket = bench.streams.hold([bench.lease(7), bench.lease(0)], bench.event());
        bench.streams.copy_in(ticket, |[from, _]| from.bytes(), &part).unwrap();
        for _ in 0..100 {
            bench.streams.release(|_, _, _| panic!("it is not closed")).unwrap();
        }
        bench.streams.close(StreamId::In, ticket).unwrap();
        let mut come = 0;
        while come == 0 {
            bench
                .streams
                .release(|found, [from, _], _| {
                    assert_eq!((found, words(&from)), (ticket, vec![7; WORDS]));
                    come += 1;
                })
                .unwrap();
        }
    });
}

#[test]
fn a_value_whose_copy_was_refused_comes_back() {
    each(&[&[("PSERVER_STANDIN_FAIL", "cuMemcpyHtoDAsync_v2:2:1")]], || {
        let mut bench = Bench::new(4);
        let memory = DeviceMemory::new(&bench.context, u64::from(BYTES)).expect("there is memory");
        let part = memory.part(0..u64::from(BYTES));
        let ticket = bench.streams.hold([bench.lease(7), bench.lease(0)], bench.event());
        bench.streams.copy_in(ticket, |[from, _]| from.bytes(), &part).unwrap();
        let refused = bench.streams.copy_in(ticket, |[from, _]| from.bytes(), &part).expect_err("it is to fail");
        assert_eq!(refused.to_string(), "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE (1)");
        bench.streams.close_early(ticket).unwrap();
        while 0 < bench.streams.len() {
            bench.streams.release(|_, _, _| ()).unwrap();
        }
        assert_eq!(bench.arena.usage().slots_in_use, 0);
    });
}

#[test]
fn memory_that_a_lost_device_may_write_is_not_used_again() {
    each(&[&[("PSERVER_STANDIN_FAIL", "execute:1:700")]], || {
        let mut bench = Bench::new(4);
        let memory = DeviceMemory::new(&bench.context, u64::from(BYTES)).expect("there is memory");
        let part = memory.part(0..u64::from(BYTES));
        let ticket = bench.streams.hold([bench.lease(7), bench.lease(0)], bench.event());
        bench.streams.copy_in(ticket, |[from, _]| from.bytes(), &part).unwrap();
        bench.streams.close(StreamId::In, ticket).unwrap();
        let refused = loop {
            if let Err(refused) = bench.streams.release(|_, _, _| panic!("it did not happen")) {
                break refused;
            }
        };
        assert_eq!(refused.to_string(), "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        let arena = bench.arena.clone();
        drop(bench);
        assert_eq!(arena.usage().slots_in_use, 2, "the device has them");
    });
}
