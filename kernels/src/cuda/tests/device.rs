//! The conformance suite and the job of the other tests on a device, where there is one.

use pserver_core::optim::Rule;
use pserver_core::port::Accelerator;

use super::job::{self, Fate};
use super::standin::{beside_the_program, skip};
use crate::conformance;
use crate::conformance::compiled::{is_shipped, others};
use crate::cuda::safe::Compiler;
use crate::cuda::{AcceleratorKernels, Cuda, CudaSettings};

/// Settings with a cache that keeps compiled rules between runs.
fn settings() -> CudaSettings {
    CudaSettings { cache: Some(beside_the_program("rules")), ..CudaSettings::of(0) }
}

/// The first device, or a skip with the reason why there is none.
fn device() -> Option<Cuda> {
    let opened = Cuda::open(settings());
    opened.map_err(|why| skip("cuda", &why.to_string())).ok()
}

/// The suite's rules that can run here: the shipped ones, and some others where there is a compiler.
fn rules() -> Vec<Rule> {
    let mut kept: Vec<_> = conformance::rules().into_iter().filter(is_shipped).collect();
    match Compiler::find() {
        Ok(_) => kept.extend(others()),
        Err(why) => println!("the rules that are not shipped are left out: {why}"),
    }
    kept
}

/// Some of them, for the suite of accelerators.
fn some(rules: Vec<Rule>) -> Vec<Rule> {
    let step = rules.len().div_ceil(16);
    let (clipped, others): (Vec<_>, Vec<_>) = rules.into_iter().partition(|rule| rule.clip_norm.is_some());
    others.into_iter().step_by(step).chain(clipped.into_iter().step_by(step)).collect()
}

#[test]
fn rules_of_the_suite_are_left_out_without_a_compiler() {
    let (shipped, others): (Vec<_>, Vec<_>) = conformance::rules().into_iter().partition(is_shipped);
    let names = shipped.iter().map(|rule| rule.algorithm.name()).collect::<std::collections::BTreeSet<_>>();
    assert!(8 <= names.len() && !others.is_empty(), "shipped: {names:?}, others: {}", others.len());
    assert!(4 <= some(shipped).len());
}

#[test]
fn a_job_on_the_device_has_the_committed_digest() {
    let Some(mut device) = device() else { return };
    println!("{}: the job's digest is {}", device.capabilities().name, job::DIGEST);
    // The job compares each parameter and state with the reference, which has the committed digest.
    assert_eq!(job::run(&mut device), Fate::default());
}

#[test]
fn the_device_passes_the_accelerator_suite() {
    let Some(device) = device() else { return };
    let rules = rules();
    let open = || -> Box<dyn Accelerator> { Box::new(Cuda::open(settings()).expect("it was there")) };
    conformance::device::check(open, &some(rules.clone()));
    let worst = conformance::worst_of(&mut AcceleratorKernels::new(device, 64 << 10, 32), rules);
    println!("the farthest from the oracle: {worst:?}");
    assert!(worst.ulps <= conformance::TOLERANCE_ULPS, "{worst:?}");
}
