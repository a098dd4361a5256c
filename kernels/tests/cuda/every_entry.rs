//! Every shipped kernel once, for a sanitizer: each argument structure with aligned and misaligned tensors and each
//! type of gradients, few elements, and results compared with the plain form.

use std::collections::BTreeSet;

use pserver_core::dtype::ElementType::{Bfloat16, Float16};
use pserver_kernels::cuda::shipped;

use crate::launcher::{Launcher, Watched, on_every};
use crate::launches::FLOATS;
use crate::{reductions, rows, updates};

#[test]
fn every_entry_once() {
    on_every(&shipped::module(), check_every_entry);
}

fn check_every_entry(launcher: &mut dyn Launcher) {
    let mut launched = BTreeSet::new();
    let mut note = |name: &str| {
        launched.insert(name.to_owned());
        true
    };
    let mut launcher = Watched { inner: launcher, runs: &mut note };
    updates::check_sums_in_place(&mut launcher);
    for (index, (_, rule)) in shipped::rules().iter().enumerate() {
        for element_type in FLOATS {
            for gradient_type in [element_type, Float16, Bfloat16] {
                updates::check_rule(&mut launcher, rule, element_type, gradient_type);
            }
            let gradient_type = [element_type, Float16, Bfloat16][index % 3];
            rows::check_rule(&mut launcher, rule, element_type, gradient_type);
        }
    }
    reductions::check_each(&mut launcher);
    assert!(rows::uniting_is_right(&mut launcher), "sort and segments");
    let shipped: BTreeSet<String> = shipped::entries().map(str::to_owned).collect();
    assert_eq!(launched, shipped, "every shipped kernel was launched, and no other");
}
