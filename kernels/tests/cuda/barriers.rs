//! Barriers of kernels: each is left out once, and a check must fail without it.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pserver_kernels::conformance::compiled::module;

use crate::child::Shim;
use crate::launcher::Launcher;

use crate::reductions::{scalars_are_right, total_is_right};
use crate::rows::uniting_is_right;

/// A kernel's name, and the check of its results.
type Workload = (&'static str, fn(&mut dyn Launcher) -> bool);

/// The launches that cover every kernel with a barrier.
const WORKLOADS: [Workload; 3] =
    [("sort and segments", uniting_is_right), ("total", total_is_right), ("scalars", scalars_are_right)];

/// The lines of the module that wait for the whole block.
fn written() -> BTreeSet<u64> {
    let text = module().text().to_owned();
    (1..).zip(text.lines()).filter(|(_, line)| line.contains("__syncthreads();")).map(|(number, _)| number).collect()
}

/// Without any one of the barriers some order of threads gives other results, or ends the process.
#[test]
fn every_missing_barrier_is_noticed() {
    let mut run = BTreeSet::new();
    for (name, is_right) in WORKLOADS {
        let Some(mut shim) = Shim::new(&module()) else { return };
        assert!(is_right(&mut shim), "{name} with all barriers");
        let barriers = shim.barriers();
        assert!(!barriers.is_empty(), "{name} has barriers");
        for line in barriers {
            let is_noticed = [0, 1, 5, 6].into_iter().any(|order| {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    let mut shim = Shim::new(&module()).expect("g++ was there a moment ago");
                    shim.order(order);
                    shim.drop_barrier(line);
                    is_right(&mut shim)
                }));
                !outcome.unwrap_or(false)
            });
            println!("{name}: line {line} of the module: {}", if is_noticed { "noticed" } else { "not noticed" });
            assert!(is_noticed, "{name}: the barrier at line {line} of the module may be left out");
            run.insert(line);
        }
    }
    assert_eq!(run, written(), "every barrier of the module is run, and left out, by some workload");
}
