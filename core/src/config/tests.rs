use proptest::prelude::*;

use super::schema::{Field, FieldKind, Schema};
use super::*;
use std::sync::Arc;

use crate::ids::{ServerIndex, TrainerId};
use crate::limits::{PARAMETER_CONFIG_BYTES_MAX, RULE_TEXT_BYTES_MAX};
use crate::optim::{Algorithm, Regularizer, Schedule};
use crate::rows::Initializer;
use crate::rule::CheckedRule;

/// The one configuration file Paddle shipped (`optimizer.pb`): SGD, a constant rate of .1, `clip_norm` .1.
const OPTIMIZER_PB: [u8; 50] = [
    0x08, 0x01, 0x1a, 0x17, 0xa9, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0xb9, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0xc0, 0x01, 0x00,
    0x58, 0x00, 0x62, 0x09, 0x09, 0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 0xa9, 0x06, 0x9a, 0x99, 0x99, 0x99,
    0x99, 0x99, 0xb9, 0x3f,
];

fn rule_of(text: &str) -> Rule {
    OptimizerSettings::from_text(text).unwrap_or_else(|failure| panic!("{text}: {failure}")).rule.unwrap()
}

/// The text means the rule.
fn check(text: &str, rule: Rule) {
    assert_eq!(rule_of(text), rule, "{text}");
}

/// The text is refused, and the reason contains every one of the parts.
fn check_refused(text: &str, parts: &[&str]) {
    let Err(failure) = OptimizerSettings::from_text(text) else { panic!("{text}: was let through") };
    let reason = failure.to_string();
    assert!(parts.iter().all(|part| reason.contains(part)), "{text}: found {reason:?}, expected {parts:?}");
}

fn optimizer_pb_rule() -> Rule {
    Rule { clip_norm: Some(0.1), schedule: Schedule::Const { rate: 0.1 }, ..Rule::default() }
}

#[test]
fn paddles_own_file_is_read_with_and_without_padding() {
    let check_bytes = |padding: &[u8]| {
        let bytes = [&OPTIMIZER_PB, padding].concat();
        assert_eq!(OptimizerSettings::from_bytes(&bytes).unwrap().rule, Some(optimizer_pb_rule()));
    };
    check_bytes(&[]);
    // The buffer of getline: the string's end, then stale heap bytes, up to its capacity of 120.
    check_bytes(&[0; 70]);
    check_bytes(&[&[0][..], &[0xff; 69]].concat());
    // The text form of the same file, as protoc prints it.
    let text = "optimizer: SGD\nsgd {\n  momentum: 0\n  decay: 0\n  nesterov: false\n}\nlr_policy: Const\n\
                const_lr {\n  learning_rate: 0.1\n}\nclip_norm: 0.1\n";
    check(text, optimizer_pb_rule());
}

#[test]
fn bytes_that_are_neither_fields_nor_padding_are_refused() {
    let check_bytes = |tail: &[u8], part: &str| {
        let failure = OptimizerSettings::from_bytes(&[&OPTIMIZER_PB, tail].concat()).unwrap_err().to_string();
        assert!(failure.contains(part), "{tail:02x?}: {failure}");
    };
    check_bytes(&[0xff; 70], "longer than 64 bits");
    check_bytes(b"garbage", "OptimizerConfig.const_lr: the wire type is 7; expected 2");
    check_bytes(b"padding", "field number 14 is not known; expected one of optimizer, sgd");
    check_bytes(&[0x07], "field number 0 is not known");
    check_bytes(&[0x08], "OptimizerConfig.optimizer: cut short");
    check_bytes(&[0x0a, 0x01], "OptimizerConfig.optimizer: the wire type is 2; expected 0");
    check_bytes(&[0x08, 0x09], "OptimizerConfig.optimizer is 9; expected one of SGD (1), Adadelta (2)");
    check_bytes(&[0x1a, 0x20, 0xa9], "OptimizerConfig.sgd: cut short; expected 32 bytes, found 1");
    check_bytes(&[0x1a, 0x02, 0x00, 0x00], "OptimizerConfig.sgd: field number 0 is not known");
    check_bytes(&[0x1a, 0x02, 0xa9, 0x01], "OptimizerConfig.sgd.momentum: cut short; expected 8 bytes, found 0");
    check_bytes(&[0xea, 0x3e, 0x02, 0xff, 0xff], "algorithm");
    check_bytes(&[0xa8, 0x3f, 0x80, 0x80, 0x80, 0x80, 0x10], "staleness_bound is 4294967296; expected at most");
}

#[test]
fn padding_without_a_field_is_refused() {
    assert_eq!(OptimizerSettings::from_bytes(&[]).unwrap(), OptimizerSettings::default());
    for bytes in [&[0][..], &[0; 120], &[&[0], &OPTIMIZER_PB[..]].concat()] {
        let failure = OptimizerSettings::from_bytes(bytes).unwrap_err().to_string();
        assert!(failure.contains(&format!("{} bytes that begin with a zero", bytes.len())), "{failure}");
    }
}

/// SGD with momentum 0.9 at a rate of 0.1: no byte of it is zero.
const WITHOUT_ZEROS: &[u8] = &[
    0x08, 0x01, 0x1a, 0x0a, 0xa9, 0x01, 0xcd, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xec, 0x3f, 0x62, 0x09, 0x09, 0x9a, 0x99,
    0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f,
];

fn from_c_text(bytes: &[u8]) -> Result<OptimizerSettings, Failure> {
    OptimizerSettings::from_c_text(bytes, &no_files)
}

#[test]
fn a_binary_form_without_zero_bytes_may_be_passed_as_a_c_string() {
    let expected = rule_of("optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }");
    assert_eq!(from_c_text(WITHOUT_ZEROS).unwrap().rule, Some(expected.clone()));
    assert_eq!(from_c_text(&[0x08, 0x01]).unwrap().rule, Some(Rule::default()));
    // The text form, base64 and an empty text are accepted too.
    assert_eq!(
        from_c_text(b"sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }").unwrap().rule,
        Some(expected.clone())
    );
    let encoded = format!("base64:{}", BASE64.encode(WITHOUT_ZEROS));
    assert_eq!(from_c_text(encoded.as_bytes()).unwrap().rule, Some(expected));
    assert_eq!(from_c_text(b" \n").unwrap(), OptimizerSettings::default());
}

#[test]
fn a_binary_form_that_was_cut_at_a_zero_is_refused_with_both_remedies() {
    // A message without a schedule's message has zeros wherever a number is round.
    let whole = ParameterConfig::of(Rule::default()).encode();
    for message in [&OPTIMIZER_PB[..], &whole] {
        let zeros = message.iter().enumerate().filter(|(_, byte)| **byte == 0);
        for (zero, _) in zeros {
            let seen = message[..zero].split(|byte| *byte == 0).next().unwrap();
            let failure = from_c_text(seen).unwrap_err().to_string();
            assert!(failure.contains("base64:") && failure.contains("_n"), "{failure}");
        }
    }
    // A mistake in a text is reported as such.
    let failure = from_c_text(b"optimiser: SGD").unwrap_err().to_string();
    assert!(failure.contains("\"optimiser\" is not known") && !failure.contains("binary"), "{failure}");
}

#[test]
fn comments_and_blanks_count_towards_the_limit() {
    let most = PARAMETER_CONFIG_BYTES_MAX;
    let text = |bytes: usize| format!("sgd {{ }} #{}", "x".repeat(bytes - 9));
    assert!(from_c_text(text(most).as_bytes()).is_ok());
    let failure = from_c_text(text(most + 1).as_bytes()).unwrap_err().to_string();
    assert!(failure.contains("of 65537 bytes; expected at most 65536"), "{failure}");
    assert!(from_c_text(text(70_000).as_bytes()).is_err());
    assert!(from_c_text(" ".repeat(70_000).as_bytes()).is_err());
    // Base64 of a message that is too long, though its text is not.
    let encoded = format!("base64:{}", BASE64.encode(vec![8; most + 1]));
    let failure = from_c_text(encoded.as_bytes()).unwrap_err().to_string();
    assert!(failure.contains("after base64:: configuration of 65537 bytes"), "{failure}");
}

#[test]
fn names_of_other_libraries_are_refused_with_our_names() {
    for text in ["algorithm: 'nesterov'", "optimizer: Nesterov", "optimizer: nesterov"] {
        check_refused(text, &["optimizer: SGD sgd { momentum: 0.9 nesterov: true }"]);
    }
    for text in ["algorithm: 'momentum'", "optimizer: Momentum"] {
        check_refused(text, &["optimizer: SGD sgd { momentum: 0.9 }"]);
    }
    check_refused("algorithm: 'adam'", &["optimizer: Adam adam { }"]);
    check_refused("optimizer: AdamW", &["algorithm: 'adamw' adamw { }"]);
    check_refused("optimizer: RMSProp", &["algorithm: 'rmsprop' rmsprop { }"]);
    check_refused("nesterov: true", &["sgd { momentum: 0.9 nesterov: true }"]);
}

#[test]
fn a_configuration_without_a_rule_differs_from_the_default_rule() {
    let check = |text: &str, expected: OptimizerSettings| {
        assert_eq!(OptimizerSettings::from_text(text).unwrap(), expected, "{text}");
    };
    let nothing = OptimizerSettings::default();
    check("", nothing.clone());
    check("  # only a comment", nothing.clone());
    check("base64:", nothing.clone());
    check("mode: Async", OptimizerSettings { mode: Some(Mode::Async), ..nothing.clone() });
    check(
        "mode: Sync merge: Sum",
        OptimizerSettings { mode: Some(Mode::Sync), merge: Some(Merge::Sum), ..nothing.clone() },
    );
    check(
        "mode: Delta, merge: Mean",
        OptimizerSettings { mode: Some(Mode::Delta), merge: Some(Merge::Mean), ..nothing.clone() },
    );
    let staleness = Some(Mode::Staleness { bound: 3 });
    check("mode: Staleness; staleness_bound: 3;", OptimizerSettings { mode: staleness, ..nothing.clone() });
    check("home: 4095", OptimizerSettings { owner: Some(ServerIndex(4095)), ..nothing.clone() });
    check("sender: 4095", OptimizerSettings { sender: Some(TrainerId(4095)), ..nothing.clone() });
    check("optimizer: SGD", OptimizerSettings { rule: Some(Rule::default()), ..nothing });
    assert_eq!(OptimizerSettings::from_bytes(&[]).unwrap(), OptimizerSettings::default());
}

#[test]
fn every_algorithm_is_chosen_by_its_name() {
    let check = |text: &str, algorithm: Algorithm| check(text, Rule { algorithm, ..Rule::default() });
    let adam = |beta1, beta2, epsilon| Algorithm::Adam { beta1, beta2, epsilon };
    check("optimizer: SGD", Algorithm::Sgd);
    check("sgd { nesterov: true }", Algorithm::Sgd);
    check("sgd { momentum: 0.9 }", Algorithm::Momentum { momentum: 0.9, nesterov: false });
    check("optimizer: SGD sgd { momentum: 0.9 nesterov: true }", Algorithm::Momentum { momentum: 0.9, nesterov: true });
    check("optimizer: Adadelta adadelta {}", Algorithm::Adadelta { rho: 0.9, epsilon: 1e-5 });
    check("optimizer: Adadelta adadelta { rho: 0.5 epsilon: 1 }", Algorithm::Adadelta { rho: 0.5, epsilon: 1.0 });
    check("optimizer: Adagrad adagrad {}", Algorithm::Adagrad { epsilon: 1e-5 });
    check("optimizer: Adagrad adagrad { epsilon: 0.5 }", Algorithm::Adagrad { epsilon: 0.5 });
    check("optimizer: Adam adam {}", adam(0.9, 0.999, 1e-8));
    check("optimizer: 4 adam { beta_1: 0 beta_2: .5 epsilon: 1e-3 }", adam(0.0, 0.5, 1e-3));
    check("algorithm: 'add'", Algorithm::Add);
    check("algorithm: 'sum'", Algorithm::Sum);
    check("algorithm: 'rmsprop' rmsprop {}", Algorithm::RmsProp { rho: 0.9, epsilon: 1e-5, momentum: 0.0 });
    let rmsprop = Algorithm::RmsProp { rho: 0.5, epsilon: 0.25, momentum: 0.125 };
    check("algorithm: 'rmsprop' rmsprop { rho: .5 epsilon: .25 momentum: .125 }", rmsprop);
    check("algorithm: 'adamw' adamw {}", Algorithm::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 });
    check("algorithm: 'ftrl' ftrl {}", Algorithm::Ftrl { learning_rate_power: -0.5, beta: 0.0 });
    let ftrl = Algorithm::Ftrl { learning_rate_power: -1.0, beta: 2.0 };
    check("algorithm: 'ftrl' ftrl { learning_rate_power: - 1 beta: 2 }", ftrl);
}

const LION: &str = include_str!("../../rules/lion.rule");

/// The algorithm of a rule's text.
fn written(text: &str, set: &[(&str, f64)]) -> Algorithm {
    let settings = set.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    Algorithm::Custom(Arc::new(CheckedRule::new(text, &settings).unwrap()))
}

#[test]
fn a_rule_is_given_by_its_text_its_name_or_its_file() {
    let check = |text: &str, algorithm: Algorithm| check(text, Rule { algorithm, ..Rule::default() });
    check("rule: 'w -= lr * g'", written("w -= lr * g", &[]));
    check("rule: 'state m = 0\\n' 'm = mu*m + g\\n' 'w -= lr*m' rule_set { key: 'mu' value: .9 }", {
        written("state m = 0\nm = mu*m + g\nw -= lr*m", &[("mu", 0.9)])
    });
    check("algorithm: 'lion'", written(LION, &[]));
    check("algorithm: 'lion' rule_set { key: 'b1' value: .5 } rule_set { key: 'wd' value: 1 }", {
        written(LION, &[("b1", 0.5), ("wd", 1.0)])
    });
    let open = |path: &str| match path {
        "my.rule" => Ok("w -= a*g".to_owned()),
        other => Err(Failure::call(format!("{other} is not there"))),
    };
    let settings = |text| OptimizerSettings::from_text_with(text, &open);
    let found = settings("rule_file: 'my.rule' rule_set { key: 'a' value: 2 }").unwrap().rule.unwrap();
    assert_eq!(found.algorithm, written("w -= a*g", &[("a", 2.0)]));
    assert_eq!(settings("rule_file: 'your.rule'").unwrap_err().to_string(), "your.rule is not there");
    let mistaken = settings("rule_file: 'my.rule'").unwrap_err().to_string();
    assert_eq!(mistaken, "my.rule: line 1, column 6: expected a known name (g, lr, n, w), found \"a\"");
    // Everything else that a configuration says goes with it.
    let whole = rule_of("rule: 'w -= lr*g' l2: .5 clip_norm: 2 const_lr { learning_rate: 3 } rate_scale: 4");
    assert_eq!((whole.l2, whole.clip_norm, whole.rate_scale), (0.5, Some(2.0), 4.0));
}

#[test]
fn an_invalid_rule_is_refused_with_its_position() {
    check_refused("rule: 'w -= lr*'", &["rule: line 1, column 9: expected a value, found the end"]);
    check_refused("rule: 'w = 1\\nw -= x'", &["rule: line 2, column 6: expected a known name", "found \"x\""]);
    check_refused("rule: 'g = 1'", &["rule: the rule never assigns w"]);
    check_refused("rule: 'w = g' rule_set { key: 'a' value: 1 }", &["\"a\" is set, and the rule has no such"]);
    check_refused("rule: 'w = a' rule_set { key: 'a' value: inf }", &["expected \"a\" in a finite number, found inf"]);
    check_refused(
        "algorithm: 'lion' rule_set { key: 'b1' value: 1 }",
        &["lion: line 2, column 7", "[0.0, 1.0), found 1"],
    );
    check_refused("rule: 'w = a' rule_set { key: 'a' }", &["rule_set has no key or no value"]);
    let twice = "rule: 'w = a' rule_set { key: 'a' value: 1 } rule_set { key: 'a' value: 2 }";
    check_refused(twice, &["rule_set gives \"a\" twice"]);
    check_refused("rule_set { key: 'a' value: 1 }", &["rule_set names \"a\" and there is no rule"]);
    check_refused("optimizer: SGD rule: 'w = g'", &["a rule is given and an optimizer or an algorithm too"]);
    check_refused("rule: 'w = g' sgd {}", &["sgd is given and the algorithm is that of rule"]);
    check_refused("rule: 'w = g' rule_file: 'x'", &["rule and rule_file \"x\" are both given"]);
    check_refused("rule_file: '/etc/passwd'", &["only a trainer opens it"]);
    check_refused("algorithm: 'tiger'", &["\"tiger\" is not known", "ftrl, lamb, lars, lion, or instead of it"]);
    let long = format!("rule: '{}w = w' clip_value: 1", "w = w*w + g;".repeat(250));
    check_refused(&long, &["operations in a rule"]);
}

#[test]
fn every_schedule_is_chosen_by_its_policy() {
    let check = |text: &str, schedule: Schedule| check(text, Rule { schedule, ..Rule::default() });
    let (rate, a, b) = (0.5, 0.25, 0.125);
    check("lr_policy: Const", Schedule::Const { rate: 1.0 });
    check("const_lr { learning_rate: 0.5 }", Schedule::Const { rate });
    check("lr_policy: Linear linear_lr {}", Schedule::Linear { rate: 1.0, a: 0.0, b: 0.0 });
    let text = |policy: &str, name: &str| {
        format!("lr_policy: {policy} {name} {{ learning_rate: 0.5 lr_decay_a: 0.25 lr_decay_b: 0.125 }}")
    };
    check(&text("Linear", "linear_lr"), Schedule::Linear { rate, a, b });
    check(&text("Poly", "poly_lr"), Schedule::Poly { rate, a, b });
    check(&text("Exp", "exp_lr"), Schedule::Exp { rate, a, b });
    check(&text("DiscExp", "disc_exp_lr"), Schedule::DiscExp { rate, a, b });
}

#[test]
fn paddles_decay_becomes_l2() {
    let decayed = |algorithm, l1, l2, regularizer| Rule { algorithm, l1, l2, regularizer, ..Rule::default() };
    let momentum = Algorithm::Momentum { momentum: 0.9, nesterov: false };
    let adam = Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
    let adamw = Algorithm::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
    check("sgd { decay: 0.01 }", decayed(Algorithm::Sgd, 0.0, 0.01, Regularizer::Decoupled));
    check("sgd { decay: 0 } l1: 2", decayed(Algorithm::Sgd, 2.0, 0.0, Regularizer::Proximal));
    check("sgd { decay: 0.01 } l2: 0.5", decayed(Algorithm::Sgd, 0.0, 0.5, Regularizer::Proximal));
    check("sgd { decay: 0.01 } regularizer: Coupled", decayed(Algorithm::Sgd, 0.0, 0.01, Regularizer::Coupled));
    check("sgd { momentum: 0.9 decay: 0.01 }", decayed(momentum, 0.0, 0.01, Regularizer::Coupled));
    check("optimizer: Adam adam { decay: 0.01 }", decayed(adam, 0.0, 0.01, Regularizer::Decoupled));
    check("algorithm: 'adamw' adamw { decay: 0.01 }", decayed(adamw, 0.0, 0.01, Regularizer::Decoupled));
    let adagrad = Algorithm::Adagrad { epsilon: 1e-5 };
    check("optimizer: Adagrad adagrad { decay: 0.5 }", decayed(adagrad, 0.0, 0.5, Regularizer::Decoupled));
    let adadelta = Algorithm::Adadelta { rho: 0.9, epsilon: 1e-5 };
    check("optimizer: Adadelta adadelta { decay: 0.5 }", decayed(adadelta, 0.0, 0.5, Regularizer::Decoupled));
}

#[test]
fn clip_bounds_of_zero_turn_clipping_off() {
    check("clip_norm: 0 clip_value: -0.0", Rule::default());
    check("clip_norm: 2 clip_value: 3", Rule { clip_norm: Some(2.0), clip_value: Some(3.0), ..Rule::default() });
    check("rate_scale: 0.5", Rule { rate_scale: 0.5, ..Rule::default() });
}

#[test]
fn invalid_settings_are_refused_by_name() {
    check_refused(
        "const_lr { learning_rate: nan }",
        &["const_lr.learning_rate is NaN", "expected a finite number, zero or above"],
    );
    check_refused("const_lr { learning_rate: -0.1 }", &["const_lr.learning_rate is -0.1"]);
    check_refused("const_lr { learning_rate: inf }", &["const_lr.learning_rate is inf"]);
    check_refused("const_lr { learning_rate: 1e999 }", &["const_lr.learning_rate is inf"]);
    check_refused("lr_policy: Linear linear_lr { lr_decay_b: -1 }", &["linear_lr.lr_decay_b is -1"]);
    check_refused("lr_policy: Linear linear_lr { lr_decay_a: -1 }", &["linear_lr.lr_decay_a is -1; expected"]);
    check_refused(
        "const_lr { learning_rate: 1e200 } rate_scale: 1e200",
        &["the learning rate 1e200 times rate_scale 1e200 is inf", "expected at most 1.797"],
    );
    check_refused(
        "lr_policy: Linear linear_lr { learning_rate: 1 lr_decay_b: 1e300 } rate_scale: 1e9",
        &["the learning rate 1e300 times rate_scale 1e9 is inf"],
    );
    check_refused("lr_policy: Poly poly_lr { lr_decay_a: -1 }", &["poly_lr.lr_decay_a is -1"]);
    check_refused(
        "lr_policy: Exp exp_lr { lr_decay_a: 0.5 }",
        &["exp_lr.lr_decay_b is 0; expected a finite number above zero"],
    );
    check_refused("lr_policy: DiscExp disc_exp_lr { lr_decay_a: 2 lr_decay_b: 1 }", &["disc_exp_lr.lr_decay_a is 2"]);
    check_refused("sgd { momentum: 1 }", &["sgd.momentum is 1; expected a number above zero and below one"]);
    check_refused("sgd { momentum: nan }", &["sgd.momentum is NaN"]);
    check_refused("sgd { decay: -1 }", &["sgd.decay is -1"]);
    check_refused(
        "optimizer: Adam adam { beta_1: 1 }",
        &["adam.beta_1 is 1; expected a number of at least zero and below one"],
    );
    check_refused("optimizer: Adam adam { beta_2: -0.1 }", &["adam.beta_2 is -0.1"]);
    check_refused("optimizer: Adam adam { epsilon: 0 }", &["adam.epsilon is 0; expected a finite number above zero"]);
    check_refused("algorithm: 'adamw' adamw { beta_2: 1.5 }", &["adamw.beta_2 is 1.5"]);
    check_refused("algorithm: 'rmsprop' rmsprop { rho: 2 }", &["rmsprop.rho is 2"]);
    check_refused("algorithm: 'ftrl' ftrl { learning_rate_power: 1 }", &["ftrl.learning_rate_power is 1"]);
    check_refused("optimizer: Adadelta adadelta { rho: -inf }", &["adadelta.rho is -inf"]);
    check_refused("l1: -1", &["l1 is -1"]);
    check_refused("l2: nan", &["l2 is NaN"]);
    check_refused("rate_scale: -2", &["rate_scale is -2"]);
    check_refused("clip_norm: -1", &["clip_norm is -1"]);
    check_refused("clip_value: inf", &["clip_value is inf"]);
    check_refused("algorithm: 'add' l1: 1", &["l1 is 1 with the algorithm add"]);
    check_refused("algorithm: 'add' clip_norm: 1", &["clip_norm is 1 with the algorithm add"]);
}

#[test]
fn a_choice_without_its_message_and_a_message_without_its_choice_are_refused() {
    check_refused("optimizer: Adam", &["optimizer: Adam is given without adam"]);
    check_refused("algorithm: \"ftrl\"", &["algorithm: \"ftrl\" is given without ftrl"]);
    check_refused("lr_policy: Linear", &["lr_policy: Linear is given without linear_lr"]);
    check_refused("adam {}", &["adam is given and the algorithm is that of sgd"]);
    // The message of Paddle's own trainer for Adadelta.
    check_refused(
        "optimizer: Adagrad adagrad {} adadelta {}",
        &["adadelta is given and the algorithm is that of adagrad"],
    );
    check_refused("linear_lr {}", &["linear_lr is given and the lr_policy is that of const_lr"]);
    check_refused("optimizer: SGD algorithm: 'add'", &["\"add\"", "expected one of the two"]);
    check_refused(
        "algorithm: 'lookahead'",
        &["algorithm \"lookahead\" is not known", "add, sum, rmsprop, adamw, ftrl"],
    );
    check_refused("mode: Staleness", &["staleness_bound is not given"]);
    check_refused("home: 4096", &["home is 4096; expected a server below 4096"]);
    check_refused("sender: 4096", &["sender is 4096; expected a trainer below 4096"]);
    check_refused("mode: Async staleness_bound: 3", &["staleness_bound is 3; expected mode: Staleness"]);
    check_refused("staleness_bound: 0", &["staleness_bound is 0; expected mode: Staleness"]);
    check_refused("mode: Staleness staleness_bound: 0", &["staleness_bound is 0", "expected 1 or more, or mode: Sync"]);
}

#[test]
fn the_text_form_is_that_of_protobuf() {
    let expected =
        || Rule { algorithm: Algorithm::Momentum { momentum: 0.5, nesterov: true }, l1: 25.0, ..Rule::default() };
    check("sgd { momentum: 0.5 nesterov: true } l1: 25", expected());
    check("sgd: { momentum: 5e-1, nesterov: True, }, l1: 2.5e+1;", expected());
    check("sgd<momentum:.5f;nesterov:1>l1:25.", expected());
    check("# first\nsgd { # second\n\tmomentum\n:\n0.5 nesterov: t }l1:25.0F#end", expected());
    check("algorithm: \"a\" 'd' \"\\x64\"", Rule { algorithm: Algorithm::Add, ..Rule::default() });
    check("algorithm: '\\141\\144d'", Rule { algorithm: Algorithm::Add, ..Rule::default() });
    check("mode: Staleness staleness_bound: 0x10 l1: 0", Rule::default());
}

#[test]
fn a_mistake_in_the_text_is_named_with_its_place() {
    check_refused(
        "optimiser: SGD",
        &["line 1, column 1: ", "\"optimiser\" is not known in OptimizerConfig", "optimizer, sgd,"],
    );
    check_refused(
        "sgd {\n  momentun: 1\n}",
        &["line 2, column 3: ", "\"momentun\" is not known in SGDConfig; expected one of momentum, decay, nesterov"],
    );
    check_refused(
        "optimizer: Adamax",
        &["line 1, column 12: ", "\"Adamax\"", "SGD (1), Adadelta (2), Adagrad (3), Adam (4)"],
    );
    check_refused("optimizer: 7", &["column 12", "\"7\""]);
    check_refused("optimizer SGD", &["column 11", "found \"SGD\"; expected ':' after \"optimizer\""]);
    check_refused("optimizer:", &["column 11", "the end"]);
    check_refused(
        "adam",
        &["column 5: found the end after \"adam\", which is a message; expected its fields in braces", "adam { }"],
    );
    check_refused(
        "adam: 3",
        &["column 7: found \"3\" after \"adam\", which is a message; expected its fields in braces"],
    );
    check_refused("sgd { momentum: 0.5", &["found the end; expected a field's name or '}'"]);
    check_refused("sgd { momentum: 0.5 >", &["found '>'; expected a field's name or '}'"]);
    check_refused("}", &["column 1", "found '}'; expected a field's name"]);
    check_refused("l1: 1 l1: 2", &["column 7", "\"l1\" is given twice"]);
    check_refused("l1: much", &["\"l1\" has \"much\"; expected a number"]);
    check_refused("l1: '1'", &["the string \"1\"", "expected a number"]);
    check_refused("l1: 1_000", &["expected a number"]);
    check_refused("sgd { nesterov: yes }", &["expected true or false"]);
    check_refused("mode: Staleness staleness_bound: 010", &["\"010\"", "expected a whole number"]);
    check_refused("mode: Staleness staleness_bound: 4294967296", &["expected a whole number below 4294967296"]);
    check_refused("mode: Staleness staleness_bound: -1", &["column 34", "'-'"]);
    check_refused("algorithm: add", &["\"algorithm\" has \"add\"; expected a string in quotes"]);
    check_refused("algorithm: 'add", &["column 12", "no closing quote"]);
    check_refused(
        "rule: 'm = g\n w -= lr*m'",
        &["no closing quote on its line", "expected \\n where", "which are joined"],
    );
    check_refused("algorithm: 'a\\q'", &["column 15", "escape"]);
    check_refused("algorithm: '\\xff'", &["is not UTF-8"]);
    check_refused("algorithm: '\\777'", &["escape"]);
    check_refused("base64:!!!", &["expected base64 of the binary form"]);
}

#[test]
fn base64_carries_the_binary_form() {
    let encoded = BASE64.encode(OPTIMIZER_PB);
    check(&format!("base64:{encoded}"), optimizer_pb_rule());
    check(&format!("  base64: {}\n", encoded.trim_end_matches('=')), optimizer_pb_rule());
}

/// Every field of the schema, written as text, comes through the message's own decoder and encoder unchanged.
#[test]
fn schema_and_message_agree() {
    let text = text_of_every_field(&OptimizerConfig::SCHEMA);
    let binary = text::to_binary(&OptimizerConfig::SCHEMA, &text).unwrap();
    let message = OptimizerConfig::decode(&binary[..]).unwrap();
    assert_eq!(message.encode_to_vec(), binary, "{text}");
    assert_eq!(schema::checked(&OptimizerConfig::SCHEMA, &binary).unwrap(), binary);
}

fn text_of_every_field(schema: &Schema) -> String {
    let value = |field: &Field| match field.kind {
        FieldKind::Double => ": 1.5".to_owned(),
        FieldKind::Bool => ": true".to_owned(),
        FieldKind::Uint32 => ": 4000000000".to_owned(),
        FieldKind::Uint64 => ": 18000000000000000000".to_owned(),
        FieldKind::Text => ": 'text'".to_owned(),
        FieldKind::Enumeration(values) => format!(": {}", values.last().unwrap().0),
        FieldKind::Message(inner) => format!(" {{ {} }}", text_of_every_field(inner)),
    };
    schema.fields.iter().map(|field| format!("{}{} ", field.name, value(field))).collect()
}

#[test]
fn a_sparse_parameter_is_declared_by_its_height_or_its_rows() {
    let sparse = |text: &str| OptimizerSettings::from_text(&format!("sparse {{ {text} }}")).unwrap().sparse.unwrap();
    let rows = SparseSettings { height: Some(9), width: Some(2), ..SparseSettings::default() };
    assert_eq!(sparse("height: 9 width: 2"), rows);
    assert_eq!(sparse("rows: 5 lazy: true seed: 18446744073709551615 buckets: 3").seed, Some(u64::MAX));
    assert_eq!((sparse("rows: 5 seed: 0").seed, sparse("rows: 5").seed), (Some(0), None));
    assert_eq!((sparse("rows: 5 first: 7").first, sparse("rows: 5").first), (7, 0));
    assert_eq!(
        sparse("rows: 5 uniform { low: -0.5 high: 0.5 }").initializer,
        Initializer::Uniform { low: -0.5, high: 0.5 }
    );
    assert_eq!(sparse("rows: 5 gaussian { }").initializer, Initializer::Gaussian { mean: 0.0, deviation: 1.0 });
    check_refused("sparse { }", &["neither height nor rows"]);
    check_refused("sparse { height: 9223372036854775809 }", &["sparse.height", "at most"]);
    check_refused("sparse { rows: 1 buckets: 100000 }", &["sparse.buckets", "100000"]);
    check_refused("sparse { rows: 1 uniform { low: 2 high: 1 } }", &["sparse.uniform.low is 2"]);
    check_refused("sparse { rows: 1 gaussian { deviation: -1 } }", &["sparse.gaussian.deviation"]);
    check_refused("sparse { rows: 1 constant { value: nan } }", &["sparse.constant.value"]);
    check_refused("sparse { rows: 1 constant { } uniform { } }", &["more than one"]);
    let config = ParameterConfig {
        rule: Rule::default(),
        sparse: Some(sparse("rows: 7 seed: 3 first: 9 uniform { }")),
        backup_trainers: 3,
    };
    assert_eq!(ParameterConfig::decode(&config.encode()).unwrap(), config);
}

#[test]
fn a_catalogue_entry_without_a_rule_is_refused() {
    let check = |bytes: &[u8], part: &str| {
        let failure = ParameterConfig::decode(bytes).unwrap_err().to_string();
        assert!(failure.contains(part), "{failure}");
    };
    check(&[], "found no rule in 0 bytes");
    check(&[0; 9], "9 bytes that begin with a zero");
    let invalid = ParameterConfig::of(Rule { l1: -1.0, ..Rule::default() });
    check(&invalid.encode(), "l1 is -1");
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    let fraction = 0.0..1.0_f64;
    let open = 1e-9..1.0_f64;
    let positive = 1e-12..10.0_f64;
    let adam = (fraction.clone(), fraction.clone(), positive.clone());
    prop_oneof![
        Just(Algorithm::Sgd),
        (open, any::<bool>()).prop_map(|(momentum, nesterov)| Algorithm::Momentum { momentum, nesterov }),
        positive.clone().prop_map(|epsilon| Algorithm::Adagrad { epsilon }),
        (fraction.clone(), positive.clone()).prop_map(|(rho, epsilon)| Algorithm::Adadelta { rho, epsilon }),
        (fraction.clone(), positive.clone(), prop_oneof![Just(0.0), fraction])
            .prop_map(|(rho, epsilon, momentum)| Algorithm::RmsProp { rho, epsilon, momentum }),
        adam.clone().prop_map(|(beta1, beta2, epsilon)| Algorithm::Adam { beta1, beta2, epsilon }),
        adam.prop_map(|(beta1, beta2, epsilon)| Algorithm::AdamW { beta1, beta2, epsilon }),
        (-2.0..=0.0, 0.0..2.0).prop_map(|(learning_rate_power, beta)| Algorithm::Ftrl { learning_rate_power, beta }),
        (0.0..1.0_f64).prop_map(|b1| written(LION, &[("b1", b1)])),
        any::<f64>().prop_filter("finite", |a| a.is_finite()).prop_map(|a| written("# \"a\\\nw = a\n", &[("a", a)])),
    ]
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let decaying = (0.0..10.0_f64, 1e-9..=1.0_f64, 1e-9..1e6_f64);
    prop_oneof![
        (0.0..10.0_f64).prop_map(|rate| Schedule::Const { rate }),
        decaying.clone().prop_map(|(rate, a, b)| Schedule::Linear { rate, a, b }),
        decaying.clone().prop_map(|(rate, a, b)| Schedule::Poly { rate, a, b }),
        decaying.clone().prop_map(|(rate, a, b)| Schedule::Exp { rate, a, b }),
        decaying.prop_map(|(rate, a, b)| Schedule::DiscExp { rate, a, b }),
    ]
}

fn rules() -> impl Strategy<Value = Rule> {
    let regularizers = prop::sample::select(vec![Regularizer::Proximal, Regularizer::Coupled, Regularizer::Decoupled]);
    let clip = || prop::option::of(1e-9..1e9_f64);
    let weights = (prop_oneof![Just(0.0), 0.0..1.0_f64], 0.0..1.0_f64, 0.0..2.0_f64);
    let optimized = (algorithms(), weights, regularizers, clip(), clip(), schedules()).prop_map(
        |(algorithm, (l1, l2, rate_scale), regularizer, clip_norm, clip_value, schedule)| Rule {
            algorithm,
            l1,
            l2,
            regularizer,
            clip_norm,
            clip_value,
            schedule,
            rate_scale,
            stage: None,
        },
    );
    let added = schedules().prop_map(|schedule| Rule { algorithm: Algorithm::Add, schedule, ..Rule::default() });
    prop_oneof![9 => optimized, 1 => added]
}

/// Fragments of the text form, so that random text comes further than its first word.
fn fragments() -> impl Strategy<Value = String> {
    let fields = OptimizerConfig::SCHEMA.fields.iter().map(|field| field.name);
    let inner = ["momentum", "beta_1", "rho", "learning_rate", "lr_decay_b", "epsilon"];
    let marks = [
        ":", "{", "}", "<", ">", ",", ";", "-", "#", "\n", "'", "\"", "\\", "\\x", "\\7", "inf", "nan", "1e5", "0",
        ".5", "0x", "SGD", "Adam", "Linear", "'ftrl'", "true", "é", "\u{2028}", "[", "base64:",
    ];
    let words: Vec<&str> = fields.chain(inner).chain(marks).collect();
    prop::collection::vec(prop::sample::select(words), 0..24).prop_map(|words| words.join(" "))
}

/// A text of the longest rule is itself a config that an update takes.
#[test]
fn the_longest_rule_has_a_text_that_is_not_too_long() {
    for filling in ["é", "\u{1}", "\u{1f600}", "\"", "\\", "\t", "\n"] {
        let code = "w = w - lr*g\n#";
        let comment = if filling == "\n" { filling } else { &filling.repeat(64) };
        let most = (RULE_TEXT_BYTES_MAX - code.len()) / comment.len();
        let rule = format!("{code}{}", comment.repeat(most));
        let settings = format!("rule: \"{}\" const_lr {{ learning_rate: 0.5 }}", rule.as_bytes().escape_ascii());
        let rule = OptimizerSettings::from_text(&settings).unwrap().rule.unwrap();
        let config = ParameterConfig::of(rule);
        let text = config.to_text();
        assert!(text.len() <= PARAMETER_CONFIG_BYTES_MAX, "{filling:?}: {} bytes", text.len());
        assert_eq!(OptimizerSettings::from_text(&text).unwrap().rule, Some(config.rule), "{filling:?}");
    }
}

proptest! {
    #[test]
    fn a_valid_rule_survives_the_catalogue(rule in rules()) {
        prop_assert!(rule.validate().is_ok(), "{:?}", rule.validate());
        let config = ParameterConfig::of(rule);
        prop_assert_eq!(OptimizerSettings::from_text(&config.to_text()).unwrap().rule, Some(config.rule.clone()));
        prop_assert_eq!(ParameterConfig::decode(&config.encode()).unwrap(), config);
    }

    /// The text of a rule, its binary form and base64 of that mean the same.
    #[test]
    fn text_and_binary_form_agree(rule in rules()) {
        let binary = ParameterConfig::of(rule.clone()).encode();
        let text = print(&OptimizerConfig::SCHEMA, &binary);
        prop_assert_eq!(text::to_binary(&OptimizerConfig::SCHEMA, &text).unwrap(), binary.clone(), "{}", text);
        let encoded = format!("base64:{}", BASE64.encode(&binary));
        prop_assert_eq!(OptimizerSettings::from_text(&text).unwrap().rule, Some(rule.clone()));
        prop_assert_eq!(OptimizerSettings::from_text(&encoded).unwrap().rule, Some(rule));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = OptimizerSettings::from_bytes(&bytes);
        let _ = ParameterConfig::decode(&bytes);
    }

    #[test]
    fn a_damaged_message_never_panics(
        rule in rules(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = ParameterConfig::of(rule).encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes.truncate(if cut { at } else { bytes.len() });
        if let Ok(OptimizerSettings { rule: Some(rule), .. }) = OptimizerSettings::from_bytes(&bytes) {
            prop_assert!(rule.validate().is_ok());
        }
    }

    #[test]
    fn arbitrary_text_never_panics(noise in any::<String>(), fragments in fragments()) {
        let _ = OptimizerSettings::from_text(&noise);
        if let Ok(OptimizerSettings { rule: Some(rule), .. }) = OptimizerSettings::from_text(&fragments) {
            prop_assert!(rule.validate().is_ok());
        }
    }
}

/// Writes a valid binary form as text: the way back, which only tests need.
fn print(schema: &Schema, mut binary: &[u8]) -> String {
    let mut text = String::new();
    while !binary.is_empty() {
        let key = prost::encoding::decode_varint(&mut binary).unwrap();
        let field = schema.fields.iter().find(|field| field.key() == key).unwrap();
        let value = match field.kind {
            FieldKind::Double => {
                let (value, rest) = binary.split_first_chunk().unwrap();
                binary = rest;
                format!(": {:?}", f64::from_le_bytes(*value))
            }
            FieldKind::Text | FieldKind::Message(_) => {
                let length = prost::decode_length_delimiter(&mut binary).unwrap();
                let (value, rest) = binary.split_at(length);
                binary = rest;
                match field.kind {
                    FieldKind::Message(schema) => format!(" {{ {} }}", print(schema, value)),
                    _ => format!(": \"{}\"", value.escape_ascii()),
                }
            }
            FieldKind::Bool | FieldKind::Uint32 | FieldKind::Uint64 => {
                format!(": {}", prost::encoding::decode_varint(&mut binary).unwrap())
            }
            FieldKind::Enumeration(values) => {
                let number = prost::encoding::decode_varint(&mut binary).unwrap();
                format!(": {}", values.iter().find(|(_, value)| u64::from(*value) == number).unwrap().0)
            }
        };
        text += &format!("{}{value} ", field.name);
    }
    text
}
