//! A trainer's memory with replicas. On a machine with one device, all replicas are on it.

use pserver_core::dtype::ElementType::{self, Bfloat16, Float32};
use pserver_core::narrowing::half_bytes;
use pserver_core::optim::Gradient;
use pserver_core::port::{Kernels, Plain};
use pserver_kernels::conformance::compiled::module;
use pserver_kernels::conformance::values;
use pserver_kernels::cuda::{ForeignMemory, MemoryOwner};

use crate::launcher::{Launcher, on_device};
use crate::launches::{assert_same, floats, size};

const PLACES: u64 = 3;
/// No whole number of packs.
const SHORT: usize = 1027;
/// More than one piece of a sum.
const LONG: usize = (5 << 20) / 4 + 3;
const CASES: [(ElementType, usize, usize); 4] =
    [(Float32, LONG, 0), (Float32, SHORT, 4), (Bfloat16, SHORT, 0), (Bfloat16, SHORT, 2)];

#[test]
fn a_gradient_is_the_sum_of_all_replicas_and_a_value_goes_to_all() {
    on_device(&module(), |device| {
        for (element_type, elements, align) in CASES {
            let contents: Vec<_> = (1..=PLACES).map(|place| values(element_type, elements, place, 1)).collect();
            let bytes = contents[0].len();
            let buffers: Vec<_> = contents.iter().map(|content| device.buffer(content, align)).collect();
            let MemoryOwner::Device(all) = ForeignMemory::find(device.place(buffers[0]), bytes).expect("it is memory")
            else {
                panic!("it is a device's")
            };
            for other in &buffers[1..] {
                all.replicate(device.place(*other), bytes).expect("it is a device's, and as long");
            }
            let mut claim = all.claim(0, bytes).expect("it is unclaimed");
            claim.begin_fetch_sum(element_type).and_then(|()| claim.settle()).expect("it is summed");
            let name = format!("{element_type}, {align} bytes behind a multiple of 16");
            assert_same(element_type, claim.bytes(), &sum(element_type, &contents), &name);
            claim.bytes_mut().fill(0x3c);
            claim.begin_store().and_then(|()| claim.settle()).expect("it is written");
            for buffer in &buffers {
                assert_eq!(device.read(*buffer, bytes), vec![0x3c; bytes], "{name}");
            }
            drop((claim, all));
            device.release();
        }
    });
}

/// The sum as the servers' kernels compute it: in binary32, rounded once to half precision.
fn sum(element_type: ElementType, contents: &[Vec<u8>]) -> Vec<u8> {
    let gradients: Vec<_> = contents.iter().map(|bytes| Gradient { bytes, element_type }).collect();
    let mut sum = vec![0; contents[0].len() / size(element_type) * size(Float32)];
    Plain.sum(Float32, &mut sum, &gradients);
    if element_type == Float32 {
        return sum;
    }
    floats(Float32, &sum).into_iter().flat_map(|value| half_bytes(value, element_type)).collect()
}
