//! Settings that a step carries: the same code and the same bits as those of a rule configured with the settings.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{ADADELTA, ADAGRAD, ADAM, ADAMW, FTRL, MOMENTUM, NESTEROV, RMSPROP, RMSPROP_MOMENTUM, bytes_of};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::Version;
use crate::optim::{Algorithm, Formula, Gradient, Numbers, Prepared, Regularizer, Rule, Step};
use crate::port::{Kernels, Plain, Update};
use crate::rule::{CheckedRule, StepSettings};

fn prepared(rule: Rule) -> Arc<Prepared> {
    Arc::new(Prepared::new(rule).expect("it is a rule"))
}

/// Weight and states after an update of some elements by this formula.
fn updated(rule: &Prepared, formula: Formula<'_>, element_type: ElementType) -> Vec<Vec<u8>> {
    let gradient = bytes_of(element_type, &[3.0, -0.25, 0.0, 1e-3]);
    let mut tensors = vec![bytes_of(element_type, &[1.0, -2.0, 0.5, 6.0])];
    tensors.resize(1 + rule.states().len(), bytes_of(element_type, &[0.5, 0.25, 0.125, 2.0]));
    let (weights, states) = tensors.split_first_mut().expect("there are weights");
    Plain.update(Update {
        formula,
        element_type,
        parameter: weights,
        states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
        gradients: &[Gradient { bytes: &gradient, element_type }],
    });
    tensors
}

/// A step with these settings computes, by the code of `configured`, what `other` computes without any.
fn check(configured: Rule, other: Rule, given: &[(&str, f64)]) {
    let (configured, other) = (prepared(configured), prepared(other));
    let settings = configured.settings(given.iter().copied()).unwrap_or_else(|failure| panic!("{given:?}: {failure}"));
    for version in [1, 2, 1000] {
        let step = Step { version: Version(version), rate: Some(0.1), ..Step::FIRST };
        let (mut own, mut others, mut numbers) = (Vec::new(), Vec::new(), Numbers::default());
        for element_type in [ElementType::Float32, ElementType::Float64] {
            let expected = updated(&other, other.formula(&step, &mut others), element_type);
            let carrying = Step { settings, ..step };
            assert_eq!(
                updated(&configured, configured.formula(&carrying, &mut own), element_type),
                expected,
                "{given:?}"
            );
            // The cache tells a step with settings from one without.
            let plain = updated(&configured, configured.formula(&step, &mut own), element_type);
            assert_ne!(plain, expected, "{given:?} change something");
            for (step, expected) in [(&step, &plain), (&carrying, &expected), (&step, &plain)] {
                let formula = numbers.formula(&configured, step, &[]);
                let Formula::Rule { code, .. } = formula else { panic!("it is a rule") };
                assert_eq!(code.states(), configured.states(), "the code stays");
                assert_eq!(updated(&configured, formula, element_type), *expected, "{given:?}");
            }
        }
    }
}

fn with(algorithm: Algorithm) -> Rule {
    Rule { algorithm, ..Rule::default() }
}

#[test]
fn a_step_with_settings_gives_the_bits_of_a_rule_configured_with_them() {
    let adam = |beta1, beta2, epsilon| with(Algorithm::Adam { beta1, beta2, epsilon });
    check(with(ADAM), adam(0.8, 0.95, 1e-3), &[("beta_1", 0.8), ("beta_2", 0.95), ("epsilon", 1e-3)]);
    check(with(ADAM), adam(0.0, 0.999, 1e-8), &[("beta_1", 0.0)]);
    // Two numbers of one value are still two.
    check(adam(0.9, 0.9, 1e-8), adam(0.9, 0.5, 1e-8), &[("beta_2", 0.5)]);
    check(with(ADAM), adam(0.999, 0.999, 1e-8), &[("beta_1", 0.999)]);
    let adamw = Algorithm::AdamW { beta1: 0.8, beta2: 0.999, epsilon: 1e-8 };
    check(Rule { l2: 0.1, ..with(ADAMW) }, Rule { l2: 0.3, ..with(adamw) }, &[("l2", 0.3), ("beta_1", 0.8)]);
    let momentum = |nesterov| with(Algorithm::Momentum { momentum: 0.3, nesterov });
    check(with(MOMENTUM), momentum(false), &[("momentum", 0.3)]);
    check(with(NESTEROV), momentum(true), &[("momentum", 0.3)]);
    check(with(ADAGRAD), with(Algorithm::Adagrad { epsilon: 0.5 }), &[("epsilon", 0.5)]);
    let means = [("rho", 0.5), ("epsilon", 0.25)];
    check(with(ADADELTA), with(Algorithm::Adadelta { rho: 0.5, epsilon: 0.25 }), &means);
    check(with(RMSPROP), with(Algorithm::RmsProp { rho: 0.5, epsilon: 0.25, momentum: 0.0 }), &means);
    let rmsprop = Algorithm::RmsProp { rho: 0.9, epsilon: 0.6, momentum: 0.7 };
    check(with(RMSPROP_MOMENTUM), with(rmsprop), &[("momentum", 0.7)]);
}

#[test]
fn a_step_with_a_penalty_gives_the_bits_of_a_rule_configured_with_it() {
    for regularizer in [Regularizer::Coupled, Regularizer::Decoupled, Regularizer::Proximal] {
        let rule = |l1, l2| Rule { l1, l2, regularizer, clip_value: Some(2.0), ..with(MOMENTUM) };
        check(rule(0.0, 0.5), rule(0.0, 0.25), &[("l2", 0.25)]);
        check(rule(0.5, 0.0), rule(0.25, 0.0), &[("l1", 0.25)]);
        check(rule(0.5, 0.5), rule(0.125, 0.25), &[("l1", 0.125), ("l2", 0.25)]);
        // A penalty factor of zero makes the term zero, and NaN where the weight is infinite.
        check(rule(0.0, 0.5), rule(0.0, 1e-300), &[("l2", 0.0)]);
    }
}

fn written(text: &str) -> Rule {
    with(Algorithm::Custom(Arc::new(CheckedRule::new(text, &BTreeMap::new()).expect("it is a rule"))))
}

#[test]
fn a_step_with_parameters_of_a_text_gives_the_bits_of_a_text_with_these_numbers() {
    let text = |a: &str, b: &str| {
        let names = format!("param a in [0, 4) = {a}; param b = {b}; state m = 0; let c = 1 - a");
        written(&format!(
            "{names}; m = a * m + select(n == 1, 1, c) * g; w -= lr * m * select(a < 2, 0.5, b) / (b - 3)"
        ))
    };
    check(text("0.9", "2"), text("0.5", "2"), &[("a", 0.5)]);
    check(text("0.9", "2"), text("0.9", "-7"), &[("b", -7.0)]);
    check(text("0.9", "2"), text("3", "-7"), &[("b", -7.0), ("a", 3.0)]);
    let conditions =
        |a: &str| written(&format!("param a = {a}; w -= select(a < 1 and n < 5 or a > 8, lr + a, 2 * a) * g"));
    check(conditions("0.5"), conditions("9"), &[("a", 9.0)]);
}

fn refusal(rule: Rule, given: &[(&str, f64)]) -> String {
    let found = prepared(rule).settings(given.iter().copied());
    found.map_or_else(|failure: Failure| failure.to_string(), |_| panic!("{given:?} are accepted"))
}

#[test]
fn settings_that_a_rule_does_not_take_are_refused_by_name() {
    let check = |rule: Rule, given: &[(&str, f64)], expected: &str| {
        let found = refusal(rule, given);
        assert!(found.contains(expected), "{found}; expected {expected}");
    };
    let known = "expected some of: beta_1, beta_2, epsilon";
    check(with(ADAM), &[("momentum", 0.5)], known);
    check(with(ADAM), &[("l2", 0.5)], known);
    check(with(Algorithm::Sgd), &[("momentum", 0.5)], "expected some of: none");
    check(with(FTRL), &[("beta", 0.5)], "expected some of: none");
    check(with(Algorithm::Add), &[("momentum", 0.5)], "expected some of: none");
    check(with(ADAM), &[("beta_1", 1.0)], "\"beta_1\" = 1; expected one in [0.0, 1.0)");
    check(with(ADAM), &[("epsilon", 0.0)], "\"epsilon\" = 0; expected one in (0.0, inf)");
    check(with(ADAM), &[("beta_2", f64::NAN)], "\"beta_2\" = NaN; expected");
    check(written("param a = 1; w -= a * g * lr"), &[("a", f64::INFINITY)], "\"a\" = inf; expected a finite number");
    check(with(ADAM), &[("beta_1", 0.5), ("beta_1", 0.5)], "\"beta_1\" twice");
    check(Rule { l2: 0.5, ..with(ADAM) }, &[("l1", 0.5)], "expected some of: beta_1, beta_2, epsilon, l2");
    // A text's own parameter of this name hides the weight of the penalty.
    let hiding = Rule { l2: 0.5, ..written("param l2 = 1; w -= lr * l2 * g") };
    assert_eq!(prepared(hiding).tunables().count(), 1);
}

#[test]
fn settings_that_change_the_operations_are_refused() {
    let check = |text: &str, given: f64| {
        let found = refusal(written(text), &[("a", given)]);
        assert!(found.contains("other operations or an infinite number"), "{text}: {found}");
    };
    // A factor of one is left out, and so is a zero that is subtracted.
    check("param a = 1; w -= lr * (a * g)", 0.5);
    check("param a = 0; w -= lr * (g - a)", 0.5);
    check("param a = 2; w -= lr * (g ^ a)", 3.0);
    check("param a = 2; w -= lr * select(a > 1, g, w)", 0.5);
    check("param a = 2; w -= lr * select(a > 1 and g > 0, g, w)", 0.5);
    check("param a = 2; state m = a; m += g; w -= lr * m", 3.0);
    check("param a = 2; w -= lr * g / (a - 1)", 1.0);
    let beta1 = Algorithm::Adam { beta1: 0.0, beta2: 0.999, epsilon: 1e-8 };
    let found = refusal(with(beta1), &[("beta_1", 0.9)]);
    assert!(found.contains("beta_1 = 0.9 (configured as 0)"), "{found}");
    // The same value is no change.
    let same = prepared(written("param a = 1; w -= lr * (a * g)"));
    assert!(same.settings([("a", 1.0)]).is_ok());
}

#[test]
fn a_text_has_eight_tunables_at_most_and_other_parameters_stay() {
    let names: String = (0..9).map(|at| format!("param p{at} = {}; ", at + 2)).collect();
    let sum: String = (0..9).map(|at| format!(" + p{at} * g")).collect();
    let rule = prepared(written(&format!("{names}w -= lr * (0{sum})")));
    assert_eq!(rule.tunables().count(), crate::limits::TUNABLES_MAX);
    let found = rule.settings([("p8", 1.0)]).expect_err("it is the ninth").to_string();
    assert!(found.contains("p0, p1, p2, p3, p4, p5, p6, p7"), "{found}");
}

#[test]
fn equal_settings_have_equal_bits() {
    let (id, _) =
        prepared(with(ADAM)).tunables().next().map(|(id, tunable)| (id, tunable.clone())).expect("it has some");
    let mut settings = StepSettings::NONE;
    settings.put(id, -0.0);
    assert_eq!(settings.of(id).map(f64::to_bits), Some(0));
    assert!(!settings.is_empty() && StepSettings::NONE.is_empty());
}
