//! Seeds repeat, and what once failed holds.

use std::fs;
use std::path::Path;

use pserver_simulator::{SimCase, run_seed};

/// Events of a seed here.
const EVENTS: u64 = 2000;

#[test]
fn a_seed_gives_the_same_events_again() {
    for seed in 1..=5 {
        let [first, second] = [seed, seed].map(|seed| run_seed(seed, EVENTS).expect("its jobs can be described"));
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert!(first.events >= EVENTS && first.failure.is_none(), "seed {seed}: {first:?}");
        let other = run_seed(seed + 1000, EVENTS).expect("its jobs can be described");
        assert_ne!(first.digest, other.digest, "seed {seed}");
    }
}

#[test]
fn the_kept_cases_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be listed").path();
        let case: SimCase = serde_json::from_str(&fs::read_to_string(&path).expect("it can be read")).expect("a case");
        let failure = case.run().expect("its job can be described");
        assert_eq!(failure, None, "{}", path.display());
        count += 1;
    }
    assert!(count >= 1, "there are kept cases");
}
