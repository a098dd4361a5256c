//! Device memory that another library allocated.

use std::fs;
use std::sync::Arc;

use super::standin::{each, is_inside, without_driver};
use crate::cuda::safe::{CudaContext, DeviceMemory, ForeignMemory, MemoryOwner};

const GUARD: (&str, &str) = ("PSERVER_STANDIN_GUARD", "1");

fn found(address: u64, bytes: usize) -> Result<bool, String> {
    let address = usize::try_from(address).expect("an address has 64 bits");
    ForeignMemory::find(address, bytes)
        .map(|found| matches!(found, MemoryOwner::Device(_)))
        .map_err(|failure| failure.to_string())
}

fn device(found: MemoryOwner) -> Arc<ForeignMemory> {
    let MemoryOwner::Device(foreign) = found else { panic!("it is a device's") };
    foreign
}

#[test]
fn without_a_driver_all_memory_is_host_memory() {
    without_driver(|| {
        let own = [0_u8; 64];
        assert_eq!(found(own.as_ptr().addr() as u64, 64), Ok(false));
    });
}

#[test]
fn memory_is_host_memory_while_the_driver_is_not_loaded() {
    each(&[&[], &[("PSERVER_STANDIN_STRANGERS", "201")]], || {
        let own = [0_u8; 64];
        let address = own.as_ptr().addr() as u64;
        assert_eq!(found(address, 64), Ok(false), "this process has no driver yet");
        let context = CudaContext::open(0).expect("there is one");
        let memory = DeviceMemory::new(&context, 1000).expect("there is as much");
        assert_eq!((found(address, 64), found(memory.part(0..1).address(), 1)), (Ok(false), Ok(true)));
    });
}

#[test]
fn bytes_go_from_a_device_to_the_host_and_back_through_pinned_pages() {
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let log = folder.path().join("unpinned").display().to_string();
    let log: (&str, &str) = ("PSERVER_STANDIN_UNPINNED", &log);
    let pooled = |how| [GUARD, log, ("PSERVER_STANDIN_POOLED", how)];
    each(&[&[GUARD, log], &pooled("1"), &pooled("2")], || {
        let context = CudaContext::open(0).expect("there is one");
        let memory = DeviceMemory::new(&context, 1000).expect("there is as much");
        let address = usize::try_from(memory.part(0..1).address()).expect("an address has 64 bits");
        let foreign = device(ForeignMemory::find(address + 100, 600).expect("it is a device's"));
        let mut claim = foreign.claim(8, 64).expect("it is there");
        claim.begin_fetch().and_then(|()| claim.settle()).expect("it can be read");
        // The simulated driver's fill of new memory.
        assert_eq!(claim.bytes(), [0xa5; 64]);
        claim.bytes_mut().fill(7);
        claim.begin_store().and_then(|()| claim.settle()).expect("it can be written");
        let mut beside = foreign.claim(72, 8).expect("it is unclaimed");
        let refused = foreign.claim(71, 1).map(drop).expect_err("it is claimed").to_string();
        assert!(refused.contains("1 bytes of a device's memory are used by a call that is in progress"), "{refused}");
        let refused = foreign.claim(590, 11).map(drop).expect_err("it is not all there").to_string();
        assert!(refused.contains("11 bytes of a device's memory, of which 10 are registered"), "{refused}");
        drop(claim);
        let mut again = foreign.claim(0, 72).expect("the claim was dropped");
        again.begin_fetch().and_then(|()| again.settle()).expect("it can be read");
        beside.begin_fetch().and_then(|()| beside.settle()).expect("it can be read");
        assert_eq!((&again.bytes()[..8], &again.bytes()[8..]), (&[0xa5; 8][..], &[7; 64][..]));
        assert_eq!(beside.bytes(), [0xa5; 8]);
    });
    if !is_inside() {
        assert!(fs::read(log.1).is_err(), "a copy of memory that is not pinned");
    }
}

#[test]
fn a_claim_that_is_dropped_waits_for_its_copy() {
    each(&[&[GUARD]], || {
        let context = CudaContext::open(0).expect("there is one");
        let memory = DeviceMemory::new(&context, 1000).expect("there is as much");
        let address = usize::try_from(memory.part(0..1).address()).expect("an address has 64 bits");
        let foreign = device(ForeignMemory::find(address, 600).expect("it is a device's"));
        let mut claim = foreign.claim(0, 300).expect("it is unclaimed");
        claim.begin_fetch().expect("it can be read");
        drop(claim);
        let mut again = foreign.claim(0, 300).expect("the claim was dropped");
        again.bytes_mut().fill(7);
        let mut beside = foreign.claim(300, 8).expect("it is unclaimed");
        beside.begin_fetch().and_then(|()| beside.settle()).expect("all that the stream had to do is done");
        assert_eq!(again.bytes(), [7; 300]);
    });
}

#[test]
fn memory_of_another_kind_is_refused_with_what_was_expected() {
    each(&[&[("PSERVER_STANDIN_KIND", "3")]], || {
        let context = CudaContext::open(0).expect("there is one");
        let address = DeviceMemory::new(&context, 1000).map(|memory| (memory.part(0..1).address(), memory));
        let (address, _memory) = address.expect("there is as much");
        let expected = format!(
            "memory at {address:#x}: the driver says that it is of kind 3; expected the host's memory (kind 1) or a \
             CUDA device's (kind 2)"
        );
        assert_eq!(found(address, 1), Err(expected));
    });
}

#[test]
fn a_range_beyond_its_allocation_is_refused_with_the_allocated_bytes() {
    each(&[&[GUARD]], || {
        let context = CudaContext::open(0).expect("there is one");
        let memory = DeviceMemory::new(&context, 1000).expect("there is as much");
        let address = memory.part(0..1).address();
        let expected =
            format!("1001 bytes at {address:#x}, of which CUDA device 0 has 1000; expected all of them there");
        assert_eq!(found(address, 1001), Err(expected));
        assert_eq!(found(address, 0), Err(format!("0 bytes at {address:#x}; expected 1 or more")));
    });
}

#[test]
fn errors_of_the_driver_are_named() {
    each(
        &[&[("PSERVER_STANDIN_FAIL", "cuMemHostAlloc:1:2,cuMemcpyDtoHAsync_v2:1:700,cuPointerGetAttribute:1:999")]],
        || {
            let context = CudaContext::open(0).expect("there is one");
            let memory = DeviceMemory::new(&context, 1000).expect("there is as much");
            let address = memory.part(0..1).address();
            let refused = found(address, 8).expect_err("the driver fails");
            assert!(
                refused.contains("cuPointerGetAttribute: an error that the driver has no name for (999)"),
                "{refused}"
            );
            let refused = found(address, 8).expect_err("there is no memory");
            assert_eq!(
                refused,
                format!(
                    "8 bytes of the host's memory for those at {address:#x} on a device: cuMemHostAlloc: \
                     CUDA_ERROR_OUT_OF_MEMORY (2)"
                )
            );
            let address = usize::try_from(address).expect("an address has 64 bits");
            let foreign = device(ForeignMemory::find(address, 8).expect("it is a device's"));
            let refused =
                foreign.claim(0, 8).expect("it is there").begin_fetch().expect_err("the driver fails").to_string();
            assert_eq!(
                refused,
                "reading 8 bytes of a device's memory: cuMemcpyDtoHAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
            );
        },
    );
}
