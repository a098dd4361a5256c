//! Replicas: memory of several devices that its owner uses as one buffer.

use std::sync::Arc;

use half::{bf16, f16};
use pserver_core::dtype::ElementType;
use pserver_core::narrowing;

use super::standin::{each, each_seed, kernels};
use crate::cuda::ModuleSource;
use crate::cuda::code::load_shipped;
use crate::cuda::safe::{CudaContext, DeviceMemory, ForeignClaim, ForeignMemory, Grid, MemoryOwner};

const TYPES: [ElementType; 8] = ElementType::ALL;
/// The number of devices, each with one buffer of the memory.
const DEVICES: usize = 3;
/// The length of more than one piece, not a multiple of a piece.
const LONG: usize = (9 << 20) + 24;

/// Memory of devices 0, 1 and 2, each registered by itself, and the first with the others as replicas. The memory is
/// freed last.
struct Replicated {
    each: Vec<Arc<ForeignMemory>>,
    all: Arc<ForeignMemory>,
    _memory: Vec<Arc<DeviceMemory>>,
}

fn in_each(settings: &[(&str, &str)], body: impl FnOnce()) {
    let Some(library) = kernels(&ModuleSource::new([], [], &[])) else { return };
    let library = library.display().to_string();
    let basic = [("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_DEVICES", "3")];
    each(&[&[&basic[..], &[("PSERVER_STANDIN_GUARD", "1")], settings].concat()], body);
}

fn address(memory: &Arc<DeviceMemory>) -> usize {
    usize::try_from(memory.part(0..1).address()).expect("an address has 64 bits")
}

fn find(address: usize, bytes: usize) -> Arc<ForeignMemory> {
    match ForeignMemory::find(address, bytes).expect("it is memory") {
        MemoryOwner::Device(foreign) => foreign,
        MemoryOwner::Host | MemoryOwner::Managed => panic!("it is a device's"),
    }
}

fn allocate(bytes: usize) -> Vec<Arc<DeviceMemory>> {
    let one = |ordinal| DeviceMemory::new(&CudaContext::open(ordinal).expect("there are three"), bytes as u64);
    (0..3).map(|ordinal| one(ordinal).expect("there is as much")).collect()
}

fn replicated(bytes: usize) -> Replicated {
    let memory = allocate(bytes);
    let each: Vec<_> = memory.iter().map(|one| find(address(one), bytes)).collect();
    let all = find(address(&memory[0]), bytes);
    for other in &memory[1..] {
        all.replicate(address(other), bytes).expect("it is another device's");
    }
    Replicated { each, all, _memory: memory }
}

fn whole(memory: &Arc<ForeignMemory>) -> ForeignClaim {
    memory.claim(0, memory.len()).expect("it is unclaimed")
}

impl Replicated {
    fn fill(&self, contents: &[Vec<u8>]) {
        for (one, content) in self.each.iter().zip(contents) {
            let mut claim = whole(one);
            claim.bytes_mut().copy_from_slice(content);
            claim.begin_store().and_then(|()| claim.settle()).expect("it can be written");
        }
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        let read = |one| {
            let mut claim = whole(one);
            claim.begin_fetch().and_then(|()| claim.settle()).expect("it can be read");
            claim.bytes().to_vec()
        };
        self.each.iter().map(read).collect()
    }
}

/// Distinct numbers whose sums are rounded: device by device.
fn numbers(element_type: ElementType, bytes: usize) -> Vec<Vec<u8>> {
    let count = bytes / usize::try_from(element_type.bytes()).expect("it is short");
    let float =
        |device: usize, index: usize| ((index * 7 + device * 13) % 1009) as f64 / 3.0 - 100.0 / (device + 1) as f64;
    let word = |device: usize, index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> device;
    (0..DEVICES)
        .map(|device| {
            let of = |index| match element_type {
                ElementType::Float32 => narrowing::round_to_odd(float(device, index)).to_le_bytes().to_vec(),
                ElementType::Float64 => float(device, index).to_le_bytes().to_vec(),
                ElementType::Float16 => f16::from_f64(float(device, index)).to_le_bytes().to_vec(),
                ElementType::Bfloat16 => bf16::from_f64(float(device, index)).to_le_bytes().to_vec(),
                ElementType::Int32 | ElementType::Uint32 => word(device, index).to_le_bytes()[..4].to_vec(),
                ElementType::Int64 | ElementType::Uint64 => word(device, index).to_le_bytes().to_vec(),
            };
            (0..count).flat_map(of).collect()
        })
        .collect()
}

/// The reference sum: in the order of devices, half precision in binary32 and rounded once.
fn sum(element_type: ElementType, contents: &[Vec<u8>]) -> Vec<u8> {
    let width = usize::try_from(element_type.bytes()).expect("it is short");
    let element = |index: usize| {
        let of = |device: usize| &contents[device][index * width..][..width];
        match element_type {
            ElementType::Float32 => {
                let one = |device| f32::from_le_bytes(of(device).try_into().expect("four"));
                (one(0) + one(1) + one(2)).to_le_bytes().to_vec()
            }
            ElementType::Float64 => {
                let one = |device| f64::from_le_bytes(of(device).try_into().expect("eight"));
                (one(0) + one(1) + one(2)).to_le_bytes().to_vec()
            }
            ElementType::Float16 => {
                let one = |device| f16::from_le_bytes(of(device).try_into().expect("two")).to_f32();
                f16::from_f32(one(0) + one(1) + one(2)).to_le_bytes().to_vec()
            }
            ElementType::Bfloat16 => {
                let one = |device| bf16::from_le_bytes(of(device).try_into().expect("two")).to_f32();
                bf16::from_f32(one(0) + one(1) + one(2)).to_le_bytes().to_vec()
            }
            ElementType::Int32 | ElementType::Uint32 => {
                let one = |device| u32::from_le_bytes(of(device).try_into().expect("four"));
                one(0).wrapping_add(one(1)).wrapping_add(one(2)).to_le_bytes().to_vec()
            }
            ElementType::Int64 | ElementType::Uint64 => {
                let one = |device| u64::from_le_bytes(of(device).try_into().expect("eight"));
                one(0).wrapping_add(one(1)).wrapping_add(one(2)).to_le_bytes().to_vec()
            }
        }
    };
    (0..contents[0].len() / width).flat_map(element).collect()
}

#[test]
fn a_fetched_sum_adds_all_devices_in_order() {
    in_each(&[], || {
        for element_type in TYPES {
            for bytes in [8, 24, 1000, LONG] {
                if bytes == LONG && !matches!(element_type, ElementType::Float32 | ElementType::Bfloat16) {
                    continue;
                }
                let memory = replicated(bytes);
                let contents = numbers(element_type, bytes);
                memory.fill(&contents);
                let mut claim = whole(&memory.all);
                claim.begin_fetch_sum(element_type).and_then(|()| claim.settle()).expect("it can be summed");
                assert!(claim.bytes() == sum(element_type, &contents), "{element_type}, {bytes} bytes");
                assert!(memory.contents() == contents, "{element_type}: no gradient changes");
            }
        }
    });
}

#[test]
fn a_part_at_any_offset_is_summed_over_the_replicas() {
    in_each(&[], || {
        let memory = replicated(4096);
        let contents = numbers(ElementType::Float32, 4096);
        memory.fill(&contents);
        let mut claim = memory.all.claim(12, 100).expect("it is unclaimed");
        claim.begin_fetch_sum(ElementType::Float32).and_then(|()| claim.settle()).expect("it can be summed");
        assert_eq!(claim.bytes(), &sum(ElementType::Float32, &contents)[12..112]);
        claim.begin_fetch().and_then(|()| claim.settle()).expect("it can be read");
        assert_eq!(claim.bytes(), &contents[0][12..112], "a value is the first one's");
        drop(claim);
        let refused = memory.all.claim(2, 100).expect("it is unclaimed").begin_fetch_sum(ElementType::Float32);
        let text = refused.expect_err("no element begins there").to_string();
        assert!(
            text.contains("100 bytes of float32 and their replicas") && text.contains("no multiple of 4"),
            "{text}"
        );
    });
}

#[test]
fn a_store_writes_to_all_devices() {
    in_each(&[], || {
        let memory = replicated(1000);
        memory.fill(&numbers(ElementType::Float32, 1000));
        let before = memory.contents();
        let mut claim = memory.all.claim(100, 500).expect("it is unclaimed");
        claim.bytes_mut().fill(7);
        claim.begin_store().and_then(|()| claim.settle()).expect("it can be written");
        for (after, before) in memory.contents().iter().zip(&before) {
            assert_eq!(after[100..600], [7; 500]);
            assert_eq!((&after[..100], &after[600..]), (&before[..100], &before[600..]));
        }
    });
}

#[test]
fn sums_and_fetches_wait_for_the_default_streams() {
    let Some(library) = kernels(&ModuleSource::new([], [], &[])) else { return };
    let library = library.display().to_string();
    each_seed(8, &[("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_DEVICES", "3")], || {
        let memory = replicated(64);
        memory.fill(&[vec![0; 64], vec![0; 64], vec![0; 64]]);
        let fill = |ordinal: u32, value: u64| {
            let context = CudaContext::open(ordinal).expect("there are three");
            let (module, _) = load_shipped(&context, None).expect("it is there");
            let kernel = module.entry("standin_fill").expect("the stand-in has it");
            let one = &memory.each[ordinal as usize];
            let argument = [one.address(), 8, value];
            let grid = Grid { blocks: (1, 1), threads: 1, shared: 0 };
            let default = std::ptr::null_mut();
            kernel.launch(&context, grid, bytemuck::bytes_of(&argument), default).expect("it can be launched");
            (module, context)
        };
        let filled: Vec<_> = (0..3).map(|ordinal| fill(ordinal, 1 + u64::from(ordinal))).collect();
        let mut claim = whole(&memory.all);
        claim.begin_fetch_sum(ElementType::Uint64).and_then(|()| claim.settle()).expect("it can be summed");
        assert_eq!(claim.bytes(), bytemuck::bytes_of(&[6_u64; 8]));
        let filled_again: Vec<_> = (0..3).map(|ordinal| fill(ordinal, 7)).collect();
        claim.begin_store().and_then(|()| claim.settle()).expect("it can be written");
        drop(claim);
        for content in memory.contents() {
            assert_eq!(content, bytemuck::bytes_of(&[6_u64; 8]));
        }
        drop((filled, filled_again));
    });
}

#[test]
fn invalid_replicas_are_refused_with_the_expected_memory() {
    in_each(&[], || {
        let memory = allocate(1000);
        let [first, second, _] = [0, 1, 2].map(|ordinal| address(&memory[ordinal]));
        let all = find(first, 1000);
        let refused = |at, bytes| all.replicate(at, bytes).expect_err("it is no replica").to_string();
        let own = [0_u8; 1000];
        let text = refused(own.as_ptr().addr(), 1000);
        assert!(text.contains("it is not device memory; expected memory of a CUDA device"), "{text}");
        assert!(refused(second, 999).contains("999 bytes"), "{}", refused(second, 999));
        assert!(refused(second, 999).contains("expected 1000, as there are at"), "{}", refused(second, 999));
        assert!(refused(second, 1001).contains("of which CUDA device 1 has 1000"), "{}", refused(second, 1001));
        assert!(refused(first, 1000).contains("overlaps a replica"), "{}", refused(first, 1000));
        all.replicate(second, 1000).expect("it is another device's");
        assert!(refused(second, 1000).contains("overlaps a replica"), "{}", refused(second, 1000));
        let claim = whole(&all);
        let third = address(&memory[2]);
        assert!(refused(third, 1000).contains("used by a call that is in progress"), "{}", refused(third, 1000));
        drop(claim);
        all.replicate(third, 1000).expect("no call uses it");
    });
}

#[test]
fn memory_has_at_most_63_replicas() {
    in_each(&[], || {
        let context = CudaContext::open(0).expect("there are three");
        let memory = DeviceMemory::new(&context, 65 * 64).expect("there is as much");
        let at = |index: usize| address(&memory) + index * 64;
        let all = find(at(0), 64);
        (1..64).for_each(|index| all.replicate(at(index), 64).expect("there may be as many"));
        let text = all.replicate(at(64), 64).expect_err("there may not be as many").to_string();
        assert!(text.contains("a replica more than the 63 there can be"), "{text}");
        let every = find(at(0), 64 * 64);
        let mut claim = whole(&every);
        claim.bytes_mut().copy_from_slice(bytemuck::cast_slice(&[1_u32; 64 * 16]));
        claim.begin_store().and_then(|()| claim.settle()).expect("it can be written");
        let mut claim = whole(&all);
        claim.begin_fetch_sum(ElementType::Uint32).and_then(|()| claim.settle()).expect("it can be summed");
        assert_eq!(claim.bytes(), bytemuck::cast_slice::<u32, u8>(&[64; 16]));
    });
}

#[test]
fn errors_of_the_driver_are_named_and_the_next_call_succeeds() {
    in_each(&[("PSERVER_STANDIN_FAIL", "cuMemcpyPeerAsync:1:719,cuLaunchKernel:1:701,cuMemAlloc_v2:4:2")], || {
        let memory = allocate(1000);
        let all = find(address(&memory[0]), 1000);
        assert!(!whole(&all).has_replicas());
        all.replicate(address(&memory[1]), 1000).expect("it is another device's");
        for expected in [
            "16777216 bytes of CUDA device 0 for sums: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY",
            "the sum of 1000 bytes and their replicas: cuMemcpyPeerAsync: CUDA_ERROR_LAUNCH_FAILED",
            "the sum of 1000 bytes and their replicas: cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        ] {
            let text = whole(&all).begin_fetch_sum(ElementType::Float32).expect_err("the driver fails").to_string();
            assert!(text.contains(expected), "{text}");
        }
        whole(&all).begin_fetch_sum(ElementType::Float32).expect("the driver is well");
    });
}
