//! Updates and sums of whole tensors.

use pserver_kernels::conformance;

use crate::child::Shim;
use crate::launches::{OnShim, module};

#[test]
fn the_kernels_keep_every_promise_of_the_port() {
    let Some(shim) = Shim::new(&module()) else { return };
    let worst = conformance::worst(&mut OnShim::new(shim));
    assert!(worst.ulps <= conformance::TOLERANCE_ULPS, "{worst:?}");
}
