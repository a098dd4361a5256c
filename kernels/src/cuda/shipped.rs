//! Shipped module: the rules in it, and the committed binaries of its source.
//!
//! `cargo ci kernels` makes the binaries. A rule that is not in it is compiled at run time where there is a compiler,
//! and otherwise does not run on the device.

use std::io::Read;
use std::sync::Arc;

use flate2::read::ZlibDecoder;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Formula, Prepared, Regularizer, Rule, Step};
use pserver_core::rule::ssa::Lowered;
use pserver_core::rule::{CheckedRule, RuleSettings};

use super::{Emitted, ModuleSource};

/// The binaries as `build.rs` packs them.
const PACKED_CUBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pserver.sm_90.cubin.z"));
const PACKED_PTX: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pserver.compute_80.ptx.z"));
/// The inputs of the binaries: a word and its values a line.
pub const MANIFEST: &str = include_str!("../../gen/manifest.txt");

/// The parameter types of shipped rules.
pub const ELEMENT_TYPES: [ElementType; 2] = [ElementType::Float32, ElementType::Float64];

/// The binary for devices of compute capability 9.
#[must_use]
pub fn cubin() -> Vec<u8> {
    unpacked(PACKED_CUBIN)
}

/// The text for every device from compute capability 8 on; the driver compiles it. It ends with a zero, as the driver
/// requires.
#[must_use]
pub fn ptx() -> Vec<u8> {
    unpacked(PACKED_PTX)
}

fn unpacked(packed: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ZlibDecoder::new(packed).read_to_end(&mut bytes).expect("the build packed it");
    bytes
}

/// The names of the binaries' kernels.
pub fn entries() -> impl Iterator<Item = &'static str> {
    MANIFEST.lines().filter_map(|line| line.strip_prefix("entry ")?.split(' ').next())
}

/// Whether the binaries have a kernel of this name.
#[must_use]
pub fn has(entry: &str) -> bool {
    entries().any(|known| known == entry)
}

/// The shipped rules, each with a name for the manifest. Their numbers do not matter, except those that change the
/// code: zero, and FTRL's power of one half.
///
/// # Panics
/// When one of the project's own texts is no valid rule.
#[must_use]
pub fn rules() -> Vec<(String, Rule)> {
    let mut rules = Vec::new();
    for (name, algorithm) in algorithms() {
        let bare = Rule { algorithm, ..Rule::default() };
        rules.push((name.to_owned(), bare.clone()));
        if !matches!(name, "sgd" | "momentum" | "adam") {
            continue;
        }
        for (word, regularizer) in [
            ("proximal", Regularizer::Proximal),
            ("coupled", Regularizer::Coupled),
            ("decoupled", Regularizer::Decoupled),
        ] {
            rules.push((format!("{name} {word} l2"), Rule { l2: 0.5, regularizer, ..bare.clone() }));
        }
        for (word, l2) in [("l1", 0.0), ("l1 and l2", 0.5)] {
            rules.push((format!("{name} proximal {word}"), Rule { l1: 0.5, l2, ..bare.clone() }));
        }
        rules.push((format!("{name} clip_value"), Rule { clip_value: Some(0.5), ..bare }));
    }
    rules
}

/// The code of each shipped rule.
fn emitted_rules() -> Vec<(String, Emitted)> {
    let emitted = |rule| Emitted::of(&code_of(rule));
    rules().into_iter().map(|(name, rule)| (name, emitted(rule))).collect()
}

/// The whole module: every rule for tensors, and rules without regularizers or clips for rows.
#[must_use]
pub fn module() -> ModuleSource {
    let rules = emitted_rules();
    let is_alone = |name: &str| algorithms().iter().any(|(known, _)| *known == name);
    let rows = rules.iter().filter(|(name, _)| is_alone(name));
    ModuleSource::new(rules.iter().map(|(_, emitted)| emitted), rows.map(|(_, emitted)| emitted), &ELEMENT_TYPES)
}

/// The manifest for binaries of the current source.
#[must_use]
pub fn manifest(cubin: &[u8], ptx: &[u8]) -> String {
    let module = module();
    let digest = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    let mut text = format!(
        "source {}\nsm_90 pserver.sm_90.cubin {} {}\ncompute_80 pserver.compute_80.ptx {} {}\n",
        module.digest(),
        cubin.len(),
        digest(cubin),
        ptx.len(),
        digest(ptx)
    );
    for (name, emitted) in emitted_rules() {
        text.push_str(&format!("rule {} {name}\n", emitted.key()));
    }
    for entry in module.entries() {
        text.push_str(&format!("entry {entry}\n"));
    }
    text
}

fn code_of(rule: Rule) -> Arc<Lowered> {
    let prepared = Prepared::new(rule).expect("it is a rule");
    let step = Step { version: Version(1), ..Step::FIRST };
    match prepared.formula(&step, &mut Vec::new()) {
        Formula::Rule { code, .. } => Arc::clone(code),
        Formula::Add { .. } | Formula::Sum { .. } => unreachable!("add and sum have kernels of their own"),
    }
}

fn algorithms() -> [(&'static str, Algorithm); 11] {
    let lion =
        CheckedRule::new(include_str!("../../../core/rules/lion.rule"), &RuleSettings::new()).expect("it is a rule");
    [
        ("sgd", Algorithm::Sgd),
        ("momentum", Algorithm::Momentum { momentum: 0.9, nesterov: false }),
        ("nesterov", Algorithm::Momentum { momentum: 0.9, nesterov: true }),
        ("adagrad", Algorithm::Adagrad { epsilon: 1e-6 }),
        ("adadelta", Algorithm::Adadelta { rho: 0.95, epsilon: 1e-6 }),
        ("rmsprop", Algorithm::RmsProp { rho: 0.9, epsilon: 1e-8, momentum: 0.0 }),
        ("rmsprop momentum", Algorithm::RmsProp { rho: 0.9, epsilon: 1e-8, momentum: 0.5 }),
        ("adam", Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }),
        ("ftrl", Algorithm::Ftrl { learning_rate_power: -0.5, beta: 1.0 }),
        ("ftrl power", Algorithm::Ftrl { learning_rate_power: -0.3, beta: 1.0 }),
        ("lion", Algorithm::Custom(Arc::new(lion))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_artifacts_are_up_to_date_with_the_kernel_source() {
        let made = manifest(&cubin(), &ptx());
        assert!(made == MANIFEST, "kernels or rules changed: run `cargo ci kernels`; the manifest would be\n{made}");
    }

    /// Numbers are scalars: a rule with other numbers has the same kernel.
    #[test]
    fn a_rule_with_other_numbers_is_shipped_too() {
        let adam = Algorithm::AdamW { beta1: 0.8, beta2: 0.99, epsilon: 1e-7 };
        let rule = Rule { algorithm: adam, l2: 0.01, clip_norm: Some(3.0), ..Rule::default() };
        assert!(has(&Emitted::of(&code_of_clipped(rule)).update_entry(ElementType::Float32)));
        assert!(!has("pserver_update_f32_0000000000000000"));
    }

    fn code_of_clipped(rule: Rule) -> Arc<Lowered> {
        code_of(Rule { clip_norm: None, ..rule })
    }
}
