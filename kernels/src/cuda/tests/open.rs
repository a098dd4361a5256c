//! Opening of a device, and the error texts of failures.

use super::standin::{each, without_driver};
use crate::cuda::safe::{CudaContext, DeviceMemory, PinnedMemory};

fn refusal(ordinal: u32) -> String {
    CudaContext::open(ordinal).map(|_| ()).expect_err("there is no such device")
}

#[test]
fn a_host_without_a_driver_says_so() {
    without_driver(|| {
        assert_eq!(
            refusal(0),
            "libcuda.so.1 not found: the NVIDIA driver is not installed, or not in the loader's path"
        );
    });
}

#[test]
fn a_driver_without_a_device_says_so() {
    each(&[&[("PSERVER_STANDIN_DEVICES", "0")]], || {
        assert_eq!(refusal(0), "no CUDA device: the driver is loaded and reports none");
    });
}

#[test]
fn a_driver_that_is_too_old_names_both_versions() {
    each(&[&[("PSERVER_STANDIN_VERSION", "11080")]], || {
        assert_eq!(refusal(0), "the NVIDIA driver is too old: it is of CUDA 11.8; expected 12.4 or newer");
    });
}

#[test]
fn a_device_that_does_not_exist_is_told_how_many_there_are() {
    each(&[&[("PSERVER_STANDIN_DEVICES", "2")]], || {
        assert_eq!(refusal(2), "CUDA device 2 does not exist: there are 2, numbered 0 to 1");
        assert!(refusal(u32::MAX).contains("there are 2"));
        assert_eq!(CudaContext::open(1).expect("there are two").properties().ordinal, 1);
    });
}

#[test]
fn each_call_that_fails_while_a_device_is_opened_is_named() {
    each(&[&[("PSERVER_STANDIN_FAIL", "cuInit:1:3,cuDeviceGetCount:1:3,cuDevicePrimaryCtxRetain:1:2")]], || {
        assert_eq!(refusal(0), "cuInit: CUDA_ERROR_NOT_INITIALIZED (3)");
        assert_eq!(refusal(0), "cuDeviceGetCount: CUDA_ERROR_NOT_INITIALIZED (3)");
        assert_eq!(
            refusal(0),
            "memory of CUDA device 0: a context, which takes some hundred MiB of 268435456 bytes, found no room; other \
             processes have the rest: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)"
        );
        assert!(CudaContext::open(0).is_ok());
    });
}

#[test]
fn an_unusable_driver_is_reported_with_the_remedy() {
    each(&[&[("PSERVER_STANDIN_FAIL", "cuInit:1:802,cuInit:2:803,cuInit:3:999")]], || {
        for (code, remedy) in [("802", "nvidia-fabricmanager"), ("803", "one package"), ("999", "nvidia-modprobe -u")] {
            let found = refusal(0);
            assert!(found.starts_with("cuInit: ") && found.contains(code) && found.contains(remedy), "{found}");
        }
        assert!(CudaContext::open(0).is_ok());
    });
}

#[test]
fn a_device_reports_its_properties() {
    each(&[&[]], || {
        let context = CudaContext::open(0).expect("there is one");
        let found = context.properties();
        assert_eq!((found.name.as_str(), found.capability, found.multiprocessors), ("stand-in", (9, 0), 4));
        assert_eq!(found.driver, (12, 4));
    });
}

#[test]
fn device_memory_is_allocated_and_freed() {
    each(&[&[("PSERVER_STANDIN_MEMORY", "1000000")]], || {
        let context = CudaContext::open(0).expect("there is one");
        let memory = DeviceMemory::new(&context, 600_000).expect("there is as much");
        assert_eq!(context.memory().expect("it is asked"), (400_000, 1_000_000));
        let refused = DeviceMemory::new(&context, 600_000).map(|_| ()).expect_err("there is less");
        assert_eq!(refused.to_string(), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)");
        drop(memory);
        assert_eq!(context.memory().expect("it is asked"), (1_000_000, 1_000_000));
        let mut pieces = PinnedMemory::new(&context, 1000).expect("there is as much").pieces(300);
        assert_eq!(pieces.len(), 3);
        pieces[2].bytes_mut().fill(7);
        assert!(pieces[1].bytes().iter().all(|byte| *byte == 0));
    });
}
