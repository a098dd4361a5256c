//! Stages: computations around a rule, in one pass over memory with it.

use super::{bytes_of, update_reduced};
use crate::config::{OptimizerSettings, ParameterConfig};
use crate::dtype::ElementType;
use crate::ids::Version;
use crate::optim::{Formula, Prepared, ReducedPiece, Step, reduce, share};
use crate::port::Plain;
use crate::rule::CheckedRule;

/// The rule of a configuration, through the catalogue's bytes and through the text form.
fn prepared(config: &str) -> Prepared {
    let rule = OptimizerSettings::from_text(config).expect("it is a configuration").rule.expect("it has a rule");
    let config = ParameterConfig::of(rule);
    assert_eq!(ParameterConfig::decode(&config.encode()), Ok(config.clone()), "the bytes keep the stage");
    let read = OptimizerSettings::from_text(&config.to_text()).expect("the text keeps the stage");
    assert_eq!(read.rule, Some(config.rule.clone()));
    Prepared::new(config.rule).expect("it is a rule")
}

/// Three updates of `[1, 2, 6]` by the gradient `[3, 0, 4]`; `expected` computes an update of weight, states and `n`.
fn check(config: &str, states: usize, expected: impl Fn(&mut [f64; 3], &mut Vec<[f64; 3]>, f64)) {
    let rule = prepared(config);
    assert_eq!(rule.states().len(), states, "{config}");
    assert_eq!(rule.rule().states().len(), states, "{config}");
    let (mut weights, mut kept) = ([1.0, 2.0, 6.0], vec![[0.0; 3]; states]);
    let mut found = (bytes_of(ElementType::Float64, &weights), vec![vec![0; 24]; states]);
    for version in 1..=3_u8 {
        expected(&mut weights, &mut kept, version.into());
        update_reduced(
            &rule,
            (ElementType::Float64, version.into()),
            &mut found.0,
            &mut found.1,
            &bytes_of(ElementType::Float64, &[3.0, 0.0, 4.0]),
            4096,
        );
        assert_eq!(found.0, bytes_of(ElementType::Float64, &weights), "{config}, update {version}");
        for (found, expected) in found.1.iter().zip(&kept) {
            assert_eq!(*found, bytes_of(ElementType::Float64, expected), "{config}, states of update {version}");
        }
    }
}

const GRADIENT: [f64; 3] = [3.0, 0.0, 4.0];

fn descend(weights: &mut [f64; 3], rate: f64, gradient: impl Fn(usize, f64) -> f64) {
    for (place, weight) in weights.iter_mut().enumerate() {
        *weight -= rate * gradient(place, *weight);
    }
}

#[test]
fn a_stage_computes_before_and_after_the_rule() {
    let rate = "const_lr { learning_rate: 0.5 }";
    check(&format!("{rate} stage: 'g = 0.5*g; update'"), 0, |weights, _, _| {
        descend(weights, 0.5, |place, _| 0.5 * GRADIENT[place]);
    });
    check(&format!("{rate} stage: 'let half = 0.5*w; g = g + half; update; w = w + half'"), 0, |weights, _, _| {
        let half = weights.map(|weight| 0.5 * weight);
        descend(weights, 0.5, |place, _| GRADIENT[place] + half[place]);
        (0..3).for_each(|place| weights[place] += half[place]);
    });
    check(&format!("{rate} stage: 'state mean = 0; update; mean = 0.75*mean + 0.25*w'"), 1, |weights, kept, _| {
        descend(weights, 0.5, |place, _| GRADIENT[place]);
        (0..3).for_each(|place| kept[0][place] = 0.75 * kept[0][place] + 0.25 * weights[place]);
    });
}

#[test]
fn a_stage_has_the_norm_the_rate_and_the_count() {
    check("const_lr { learning_rate: 0.5 } stage: 'g = g * (1 / norm(g)); update'", 0, |weights, _, _| {
        descend(weights, 0.5, |place, _| GRADIENT[place] * (1.0 / 5.0));
    });
    check("const_lr { learning_rate: 0.5 } stage: 'lr = lr / n; update'", 0, |weights, _, version| {
        descend(weights, 0.5 / version, |place, _| GRADIENT[place]);
    });
    // The rule's own pieces are within the stage: clip_value bounds what the stage makes of the gradient.
    check("const_lr { learning_rate: 1 } clip_value: 5 stage: 'g = 2*g; update'", 0, |weights, _, _| {
        descend(weights, 1.0, |place, _| (2.0 * GRADIENT[place]).min(5.0));
    });
    check("const_lr { learning_rate: 1 } stage: 'g = g * single(1 / (n + 2)); update'", 0, |weights, _, version| {
        #[expect(clippy::cast_possible_truncation, reason = "the rounding is what is tested")]
        let factor = f64::from((1.0 / (version + 2.0)) as f32);
        descend(weights, 1.0, |place, _| GRADIENT[place] * factor);
    });
}

#[test]
fn a_rules_own_states_come_after_those_of_its_stage() {
    let rule = prepared("optimizer: Adam adam {} stage: 'state mean = 0; update; mean = w'");
    let names: Vec<&str> = rule.states().iter().map(|state| state.name.as_str()).collect();
    assert_eq!(names, ["mean", "first_moment", "second_moment"]);
    assert_eq!(rule.rule().states(), names);
    assert!(rule.rule().is_element_wise());
    assert!(!prepared("stage: 'g = g / norm(g); update'").rule().is_element_wise());
}

/// Of `[1, 2, 6]` and the gradient `[3, 0, 4]`: the share, and the reductions of the update with the total 2.
#[test]
fn a_share_is_the_argument_of_total_and_the_update_reads_the_total() {
    let check = |stage: &str, expected: f64, reductions: &[f64]| {
        let rule = prepared(&format!("optimizer: SGD stage: '{stage}; update'"));
        assert!(rule.rule().has_total() && !rule.rule().is_element_wise(), "{stage}");
        let element_type = ElementType::Float64;
        let [weights, gradient] = [[1.0, 2.0, 6.0], GRADIENT].map(|values| bytes_of(element_type, &values));
        let step = Step { version: Version(3), ..Step::FIRST };
        let mut visit = |piece: &mut dyn FnMut(ReducedPiece<'_, '_>)| {
            piece(ReducedPiece { element_type, parameter: &weights, states: &mut [], gradient: &gradient });
        };
        assert_eq!(share(&mut Plain, &rule, &step, &mut visit), expected, "{stage}");
        assert_eq!(reduce(&mut Plain, &rule, &step, Some(2.0), &mut visit), reductions, "{stage}");
    };
    check("g = g * total(sum(g * g))", 25.0, &[0.0, 2.0]);
    check("g = g * total(sqrt(sum(g * g)) + n) + norm(w)", 8.0, &[0.0, 2.0, 41.0]);
    check("let s = sum(g * g); g = g * total(s) / s", 25.0, &[25.0, 2.0]);
    check("let s = sum(g); g = g * total(sum(g * s)) * sum(w * s)", 49.0, &[7.0, 0.0, 2.0, 63.0]);
    check("g = g * total(0.5)", 0.5, &[2.0]);
}

#[test]
fn a_stage_costs_its_operations() {
    let operations = |config: &str| {
        let (rule, mut scalars) = (prepared(config), Vec::new());
        let step = Step { version: Version(1), scale: 0.5, ..Step::FIRST };
        let Formula::Rule { code, .. } = rule.formula(&step, &mut scalars) else { panic!("it has code") };
        code.ops().len()
    };
    for optimizer in ["optimizer: SGD", "optimizer: Adam adam {}"] {
        let plain = operations(optimizer);
        assert_eq!(operations(&format!("{optimizer} stage: 'update'")), plain);
        assert_eq!(operations(&format!("{optimizer} stage: 'lr = 0.1 * 0.9^n; update'")), plain);
        // The bounds are two more operations, each with its number.
        let clipped = operations(&format!("{optimizer} clip_value: 0.5"));
        assert_eq!(operations(&format!("{optimizer} stage: 'g = max(min(g, 0.5), -0.5); update'")), clipped);
        assert_eq!(clipped, plain + 4);
    }
}

#[test]
fn a_table_accepts_a_total_only_as_a_factor_of_its_gradients() {
    for (stage, expected) in [
        ("g = g * min(2 / (total(sum(g * g)) + 1e-6), 1); update", true),
        ("g *= select(total(sum(abs(g))) > 1, lr, -n ^ 2); update", true),
        ("update; g = g * total(sum(g))", false),
        ("g = g * total(sum(g * w)); update", false),
        ("g = g * total(sum(g)) * w; update", false),
        ("g = g * (total(sum(g)) + sum(w)); update", false),
        ("g = total(sum(g)) * g; update", false),
        ("g = g / total(sum(g)); update", false),
        ("g = g + total(sum(g)); update", false),
        ("lr = lr * total(sum(g)); update", false),
        ("state k = 1; g = g * total(sum(g)); update", false),
        ("g = g * 2; update", false),
    ] {
        let found = CheckedRule::stage(stage).expect(stage);
        assert_eq!(found.scales_by_total(), expected, "{stage}");
    }
    let is_row_wise = |config: &str| {
        let settings = OptimizerSettings::from_text(config).expect(config);
        settings.rule.expect("there is one").is_row_wise()
    };
    let stage = "stage: 'g = g * total(sum(g)); update'";
    assert!(is_row_wise(&format!("optimizer: Adam adam {{}} {stage}")));
    assert!(is_row_wise("optimizer: SGD stage: 'g = 2 * g; update'"));
    assert!(!is_row_wise(&format!("optimizer: SGD clip_norm: 1 {stage}")));
    assert!(!is_row_wise(&format!("rule: 'w -= lr * g / norm(g)' {stage}")));
    assert!(!is_row_wise("optimizer: SGD stage: 'g = g * norm(g); update'"));
}

#[test]
fn an_invalid_stage_is_refused() {
    for (stage, expected) in [
        ("g = 2*g", "found update 0 times; expected it once"),
        ("update; update", "found update 2 times"),
        ("update; state m = 0; m = w", "column 15: expected every state of a stage before its update"),
        ("lr = g; update", "expected one number for all elements as lr, found an element"),
        ("n = 2; update", "found \"n\", which is constant"),
        ("g = single(g); update", "expected single of one number for all elements"),
        ("g = h; update", "expected a known name"),
        ("g = g * total(g); update", "expected total of one number for all elements, found an element"),
        ("g = g * total(sum(g)) * total(norm(g)); update", "expected one total of a parameter, found another one"),
    ] {
        let text = CheckedRule::stage(stage).expect_err(stage).to_string();
        assert!(text.contains(expected), "{stage}: {text}");
    }
    let refused = |config: &str| OptimizerSettings::from_text(config).expect_err(config).to_string();
    let text = refused("stage: 'g = 2*g'");
    assert!(text.contains("stage: found update 0 times"), "{text}");
    let text = refused("algorithm: 'add' stage: 'g = 2*g; update'");
    assert!(text.contains("a stage is given with the algorithm add"), "{text}");
    let text = refused("rule: 'update; w = g'");
    assert!(text.contains("found update, which only a stage has"), "{text}");
    let text = refused("rule: 'state mean = 0; w -= lr*g; mean = w' stage: 'state mean = 0; update; mean = w'");
    assert!(text.contains("the state \"mean\" is declared by two texts"), "{text}");
}
