//! The accelerator over the stand-in driver and the kernels that the shim made.

use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Formula, Prepared, Step};

use super::standin::{each, kernels};
use crate::conformance;
use crate::cuda::{Beside, Cuda, Emitted, Module, Settings};

const FLOATS: [ElementType; 2] = [ElementType::Float32, ElementType::Float64];

fn settings() -> Settings {
    Settings { gradient_bytes: 4 << 20, chunk_bytes: 1 << 20, ..Settings::of(0) }
}

fn open() -> Cuda {
    Cuda::open(settings()).expect("the stand-in is there")
}

/// All kernels of the suite in one library.
fn all() -> Option<String> {
    let step = Step { version: Version(1), rate: None, norm: Some(1.0), scale: 1.0 };
    let emitted = |rule| {
        let prepared = Prepared::new(rule).expect("it is a rule");
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = prepared.formula(&step, &mut scalars) else { return None };
        Some(Emitted::of(code))
    };
    let emitted: Vec<_> = conformance::rules().into_iter().filter_map(emitted).collect();
    let module = Module::new(&emitted, &FLOATS);
    println!("{} kernels", module.entries().count());
    Some(kernels(&module)?.display().to_string())
}

#[test]
fn every_update_on_the_device_has_the_bits_of_the_plain_form() {
    let Some(library) = all() else { return };
    each(&[&[("PSERVER_STANDIN_KERNELS", &library)]], || {
        conformance::check(&mut Beside::new(open(), 64 << 10, 32));
    });
}
