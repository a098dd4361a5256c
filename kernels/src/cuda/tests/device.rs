//! The same suite and the same job on a device, where there is one.

use pserver_core::port::Accelerator;

use super::job::{self, Fate};
use super::standin::skip;
use crate::conformance;
use crate::cuda::{Beside, Cuda, open};

/// The first device, or a skip that says why there is none.
fn device() -> Option<Cuda> {
    let opened = open(0);
    opened.map_err(|why| skip("cuda", &why.to_string())).ok()
}

#[test]
fn a_job_on_the_device_has_the_committed_digest() {
    let Some(mut device) = device() else { return };
    println!("{}: the job's digest is {}", device.capabilities().name, job::DIGEST);
    // It compares each parameter and state with the plain form, which has the committed digest.
    assert_eq!(job::run(&mut device), Fate::default());
}

#[test]
fn the_device_keeps_every_promise_of_the_suite() {
    let Some(device) = device() else { return };
    let some: Vec<_> = conformance::rules().into_iter().filter(|rule| rule.clip_norm.is_none()).step_by(13).collect();
    conformance::device::check(|| Box::new(open(0).expect("it was there")), &some);
    let worst = conformance::worst(&mut Beside::new(device, 64 << 10, 32));
    println!("the farthest from the oracle: {worst:?}");
    assert!(worst.ulps <= conformance::TOLERANCE_ULPS, "{worst:?}");
}
