//! Rules of the suite on a device: those that are shipped, and the sources of others, which tests there compile.
//!
//! The compiler takes a minute for all of them. A kit for a device has them compiled ahead
//! ([`compile_ahead`](crate::cuda::compile_ahead)).

use std::sync::Arc;

use pserver_core::ids::Version;
use pserver_core::optim::{Formula, Prepared, Rule, Step};
use pserver_core::rule::ssa::Lowered;

use crate::cuda::{Emitted, ModuleSource, shipped};

/// How many of the suite's rules are algorithms and nothing else.
const BARE: usize = 12;

/// Each compilation takes a second or more of a device's time, so of this many rules that are not shipped one runs.
const COMPILED_OF: usize = 8;

/// The code of a rule, for any step; none for a sum.
#[must_use]
pub fn code_of(prepared: &Prepared) -> Option<Arc<Lowered>> {
    let step = Step { version: Version(1), rate: Some(1.0), norm: Some(1.0), ..Step::FIRST };
    match prepared.formula(&step, &mut Vec::new()) {
        Formula::Rule { code, .. } => Some(Arc::clone(code)),
        Formula::Add { .. } | Formula::Sum { .. } => None,
    }
}

fn emitted(rule: &Rule) -> Option<Emitted> {
    let prepared = Prepared::new(rule.clone()).expect("the suite has valid rules");
    code_of(&prepared).map(|code| Emitted::of(&code))
}

/// A module with every rule of the suite, and for rows with those that stand alone.
#[must_use]
pub fn module() -> ModuleSource {
    let emitted: Vec<Emitted> = super::rules().iter().filter_map(emitted).collect();
    ModuleSource::new(&emitted, &emitted[..BARE], &shipped::ELEMENT_TYPES)
}

/// Whether a rule has shipped kernels; others must be compiled.
///
/// # Panics
/// When it is no valid rule.
#[must_use]
pub fn is_shipped(rule: &Rule) -> bool {
    let Some(emitted) = emitted(rule) else { return true };
    shipped::ELEMENT_TYPES.iter().all(|element_type| shipped::has(&emitted.update_entry(*element_type)))
}

/// Rules that are not shipped and that the suite of accelerators compiles.
#[must_use]
pub fn others() -> Vec<Rule> {
    super::rules().into_iter().filter(|rule| !is_shipped(rule)).step_by(COMPILED_OF).collect()
}

/// The sources of everything that tests on a device compile.
#[must_use]
pub fn sources() -> Vec<ModuleSource> {
    let emitted: Vec<Emitted> = others().iter().filter_map(emitted).collect();
    let alone = |emitted: &Emitted| shipped::ELEMENT_TYPES.map(|each| ModuleSource::of_update(emitted, each));
    [module()].into_iter().chain(emitted.iter().flat_map(alone)).collect()
}
