//! Simulated driver in tests: a test runs itself again in a process that loads it.

use std::path::PathBuf;

use crate::conformance::standin;
use crate::cuda::{ModuleSource, sys};

pub(super) use crate::conformance::skips::skip;
pub(super) use crate::conformance::standin::{beside_the_program, is_inside};

/// Runs `body` in a process of its own that finds the stand-in driver, once for each of `settings` (see the head of
/// `driver.cpp`). A test calls this first and does nothing else.
pub(super) fn each(settings: &[&[(&str, &str)]], body: impl FnOnce()) {
    if is_inside() {
        return body();
    }
    let Some(driver) = there(standin::driver()) else { return };
    let driver: Vec<(&str, &str)> = driver.iter().map(|(name, value)| (*name, value.as_str())).collect();
    for settings in settings {
        standin::run_again(&[&driver[..], settings].concat());
    }
}

/// Runs once for each seed, and prints the seed of a failure.
pub(super) fn each_seed(seeds: u32, settings: &[(&str, &str)], body: impl FnOnce()) {
    let texts: Vec<String> = (1..=seeds).map(|seed| seed.to_string()).collect();
    let with_seed = |seed| [&[("PSERVER_STANDIN_SEED", seed)], settings].concat();
    let all: Vec<Vec<(&str, &str)>> = texts.iter().map(|seed| with_seed(seed.as_str())).collect();
    each(&all.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}

/// The environment in which a process finds the simulated compiler too.
pub(super) fn compiler() -> Option<standin::DriverEnvironment> {
    there(standin::driver_with_compiler())
}

/// A library of these kernels, for `PSERVER_STANDIN_KERNELS`; made once for each text.
pub(super) fn kernels(module: &ModuleSource) -> Option<PathBuf> {
    there(standin::kernels(module))
}

/// Runs this test in a process that has no driver at all; where the loader finds one by itself, that is a skip.
pub(super) fn without_driver(body: impl FnOnce()) {
    if is_inside() {
        return if sys::driver().is_some() { skip("no-cuda", "this host has a driver") } else { body() };
    }
    let output = standin::again(&[("LD_LIBRARY_PATH", "/nonexistent")]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    println!("{text}");
}

/// The compiled library; a skip where there is no g++.
fn there<T>(made: Result<T, String>) -> Option<T> {
    made.map_err(|why| skip("g++", &why)).ok()
}
