use proptest::prelude::*;

use super::reference::ElementMachine;
use super::ssa::{Binary, Lowered, RuleOp, ScalarInputs, round_to_binary32};
use super::syntax::{
    ArithmeticOperator, ChainTerm, Expression, ExpressionKind, FUNCTIONS, Logic, NamedFunction, Relation, Statement,
    StatementKind, Syntax,
};
use super::*;
use crate::limits::{RULE_DEPTH_MAX, RULE_NAME_BYTES_MAX, RULE_OPS_MAX, RULE_TEXT_BYTES_MAX, STATES_MAX};
use crate::text::Position;

const BUILT_IN: [&str; 14] = [
    include_str!("../../rules/adadelta.rule"),
    include_str!("../../rules/adagrad.rule"),
    include_str!("../../rules/adam.rule"),
    include_str!("../../rules/clip.rule"),
    include_str!("../../rules/coupled.rule"),
    include_str!("../../rules/decoupled.rule"),
    include_str!("../../rules/ftrl.rule"),
    include_str!("../../rules/lion.rule"),
    include_str!("../../rules/momentum.rule"),
    include_str!("../../rules/nesterov.rule"),
    include_str!("../../rules/proximal.rule"),
    include_str!("../../rules/rmsprop.rule"),
    include_str!("../../rules/rmsprop_momentum.rule"),
    include_str!("../../rules/sgd.rule"),
];
const GIVEN: UpdateInputs = UpdateInputs { rate: 0.5, count: 3.0 };

fn settings(pairs: &[(&str, f64)]) -> RuleSettings {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

fn written(text: &str) -> CheckedRule {
    CheckedRule::new(text, &RuleSettings::new()).unwrap_or_else(|failure| panic!("{text:?}: {failure}"))
}

fn lowered(text: &str) -> Lowered {
    written(text).lower().expect("it was checked")
}

/// The weight after one update by the code, in binary64.
fn run(rule: &CheckedRule, weight: f64, gradient: f64, states: &mut [f64]) -> f64 {
    let code = rule.lower().expect("it was checked");
    let mut scalars = Vec::new();
    code.evaluate(
        &ScalarInputs { rate: GIVEN.rate, count: GIVEN.count, gradient_scale: 1.0, settings: StepSettings::NONE },
        &[],
        &mut scalars,
    );
    ElementMachine::new(&code).update(&code, &scalars, weight, gradient, states)
}

fn same(one: f64, other: f64) -> bool {
    one.to_bits() == other.to_bits() || (one.is_nan() && other.is_nan())
}

/// `w = 3`, `g = -2`, `lr = 0.5`, `n = 3`; both the text and the code must give the expected value.
fn check(expression: &str, expected: f64) {
    let rule =
        CheckedRule::new(&format!("w = {expression}"), &settings(&[])).unwrap_or_else(|failure| panic!("{failure}"));
    for found in [run(&rule, 3.0, -2.0, &mut []), rule.interpret(&GIVEN, 3.0, -2.0, &mut [])] {
        assert!(same(found, expected), "{expression} is {found:?}, expected {expected:?}");
    }
}

#[test]
fn expressions_follow_the_precedence_and_associativity_of_mathematics() {
    check("1 + 2 * g", -3.0);
    check("(1 + 2) * g", -6.0);
    check("8 / 2 / w * 3", 4.0);
    check("8 - 2 - w", 3.0);
    check("-w ^ 2", -9.0);
    check("2 ^ 3 ^ (w - 1)", 512.0);
    check("2 ^ -g", 4.0);
    check("2 * -w", -6.0);
    check("- -w", 3.0);
    check("lr * w + n", 4.5);
    check("1e-1 + .5 * w", 1.6);
    check("w # the rest is for people + 7", 3.0);
    check("(w +\n  # a sum over lines\n  g)", 1.0);
}

#[test]
fn each_function_computes_its_mathematical_definition() {
    check("abs(g)", 2.0);
    check("sqrt(w + 1)", 2.0);
    check("sign(g)", -1.0);
    check("sign(w - w)", 0.0);
    check("sign(0 * g)", -0.0);
    check("floor(g / 4)", -1.0);
    check("exp(w)", 3.0_f64.exp());
    check("expm1(w)", 3.0_f64.exp_m1());
    check("log(w)", 3.0_f64.ln());
    check("log1p(w)", 3.0_f64.ln_1p());
    check("tanh(g)", (-2.0_f64).tanh());
    check("pow(w, 3)", 27.0);
    check("min(w, g)", -2.0);
    check("max(w, g)", 3.0);
    check("copysign(w, g)", -3.0);
    check("clamp(g, -1, 1)", -1.0);
    check("clamp(w, -1, 1)", 1.0);
    check("soft_threshold(w, 1)", 2.0);
    check("soft_threshold(g, 1)", -1.0);
    check("soft_threshold(g, 2)", -0.0);
}

#[test]
fn a_condition_selects_one_of_two_values() {
    check("select(w > g, 1, 2)", 1.0);
    check("select(w >= 3 and g <= -2, 1, 2)", 1.0);
    check("select(w < g or g == -2, 1, 2)", 1.0);
    check("select(not (w != 3), w, g)", 3.0);
    check("select(w > g and n < 3, w, g)", -2.0);
    check("select(n < 3 or w > g, w, g)", 3.0);
    check("select(lr < 1, w, g)", 3.0);
    check("select(not (lr < 1), 7, n)", 3.0);
    check("select(lr < 1 and n > 3, 1, 2)", 2.0);
    check("select(1 < 2, w, 1 / 0)", 3.0);
    check("select(not (0 < 1) or w > 0, 1, 2)", 1.0);
}

#[test]
fn nan_and_negative_zero_propagate_and_select_as_documented() {
    let nan = "sqrt(g)";
    check(nan, f64::NAN);
    check(&format!("min({nan}, w)"), f64::NAN);
    check(&format!("min(w, {nan})"), 3.0);
    check(&format!("max({nan}, w)"), f64::NAN);
    check(&format!("max(w, {nan})"), 3.0);
    check(&format!("clamp({nan}, -1, 1)"), f64::NAN);
    check(&format!("sign({nan})"), f64::NAN);
    check(&format!("soft_threshold({nan}, 1)"), f64::NAN);
    check(&format!("select({nan} < 0, 1, 2)"), 2.0);
    check(&format!("select({nan} >= 0, 1, 2)"), 2.0);
    check(&format!("select({nan} == {nan}, 1, 2)"), 2.0);
    check(&format!("select({nan} != {nan}, 1, 2)"), 1.0);
    check(&format!("select(not ({nan} < 0), 1, 2)"), 1.0);
    check("min(w - w, 0 * g)", 0.0);
    check("min(0 * g, w - w)", -0.0);
    check("max(0 * g, w - w)", -0.0);
    check("-(w - w)", -0.0);
    check("abs(0 * g)", 0.0);
}

#[test]
fn statements_run_in_order_and_states_are_kept() {
    let check = |text: &str, weight: f64, states: &[f64]| {
        let rule = written(text);
        let initial: Vec<f64> = rule.states().iter().map(|state| state.initial).collect();
        let (mut by_code, mut by_text) = (initial.clone(), initial);
        let found = [run(&rule, 3.0, -2.0, &mut by_code), rule.interpret(&GIVEN, 3.0, -2.0, &mut by_text)];
        assert_eq!((found, by_code.as_slice(), by_text.as_slice()), ([weight; 2], states, states), "{text}");
    };
    check("w -= lr*g", 4.0, &[]);
    check("w += 1; w *= 2; w /= 4; w -= 1", 1.0, &[]);
    check("state m = 1; m = 0.5*m + g; w = w - lr*m", 3.75, &[-1.5]);
    check("state m = 1; w = w - lr*m; m = 0.5*m + g", 2.5, &[-1.5]);
    check("g *= 3; let h = g; g = 1; w = h + g", -5.0, &[]);
    check("param a in [0, 1) = 0.25\nstate s = 2*a\nstate t = -1\nt = s; w += a", 3.25, &[0.5, 0.5]);
    check("state kept = 7; w = kept", 7.0, &[7.0]);
    check("w = 0", 0.0, &[]);
}

/// A setting gives a declared parameter its value, or a name that is used and never declared.
#[test]
fn settings_are_parameters() {
    let check = |text: &str, set: &[(&str, f64)], expected: f64| {
        let rule = CheckedRule::new(text, &settings(set)).expect("it is a rule");
        assert_eq!(run(&rule, 3.0, -2.0, &mut []), expected, "{text}");
    };
    check("param a = 2; w = a*g", &[], -4.0);
    check("param a = 2; w = a*g", &[("a", 3.0)], -6.0);
    check("param a; w = a*g", &[("a", 3.0)], -6.0);
    check("w = a*g + b", &[("a", 3.0), ("b", 1.0)], -5.0);
}

/// Error texts for users. The position is that of the mistake.
#[test]
fn a_bad_rule_is_refused_with_its_place_and_a_reason() {
    let check = |text: &str, expected: &str| {
        let found = CheckedRule::new(text, &settings(&[])).expect_err(text).to_string();
        assert_eq!(found, expected, "{text:?}");
    };
    check("", "the rule never assigns w; expected a statement such as w -= lr * g");
    check("state m = 0\nm = g", "the rule never assigns w; expected a statement such as w -= lr * g");
    check("w = total(1)", "line 1, column 5: expected a function of rules, found total, which only a stage has");
    check("w -= lr*", "line 1, column 9: expected a value, found the end");
    check("w = 1\nw -= (g", "line 2, column 8: expected an operator or ')', found the end");
    check("w = g g", "line 1, column 7: expected an operator, ';' or the end of the line, found \"g\"");
    check("w == g", "line 1, column 3: expected '=', '+=', '-=', '*=' or '/=' after \"w\", found '=='");
    check("w = g $ 2", "line 1, column 7: expected a name, a number or an operator, found '$'");
    check("w = 1.2.3", "line 1, column 5: expected a number such as 0.5 or 1e-8, found 1.2.3");
    check("w = 1e999", "line 1, column 5: expected a finite number, found 1e999");
    check("let state = 1", "line 1, column 5: expected a name, found the word \"state\"");
    check("w = in", "line 1, column 5: expected a value, found the word \"in\"");
    check("param a in [1, 0]", "line 1, column 12: expected a lowest value below the highest, found 1 and 0");
    check("param a in 3", "line 1, column 12: expected '[' or '(' and the lowest value, found 3");
    check("param a = inf", "line 1, column 11: expected the parameter's default, a number, found \"inf\"");
    check("param a", "line 1, column 7: expected a value for the parameter \"a\", which has no default, found none");
    check("param a in [0, 1) = 1", "line 1, column 7: expected \"a\" in [0.0, 1.0), found 1");
    check("w = mu*g", "line 1, column 5: expected a known name (g, lr, n, w), found \"mu\"");
    check("w = m*g\nstate m = 0", "line 1, column 5: expected a name from above, found \"m\", which comes on line 2");
    check("lr = 1", "line 1, column 1: expected w, g or a state before '=', found \"lr\", which is constant");
    check("let w = 1", "line 1, column 5: expected a new name, found \"w\", which is known already");
    check(
        "state s = g",
        concat!(
            "line 1, column 11: expected a first value made of numbers and parameters, ",
            "found one that changes with the update"
        ),
    );
    check("w = g / (1 - 1)", "line 1, column 7: expected a divisor that is not zero, found one that is always zero");
    check("w = g * log(0)", "line 1, column 9: expected a finite number, found one that is always -inf");
    check("w = g < 1", "line 1, column 7: expected a number, found a condition; select(condition, x, y) chooses");
    check("w = select(g, 1, 2)", "line 1, column 12: expected a condition such as x < y, found a number");
    check("w = select(1 < g < 2, 1, 2)", "line 1, column 18: expected 'and' between two comparisons, found '<'");
    check(
        "w = sin(g)",
        concat!(
            "line 1, column 5: expected a function (abs, sqrt, sign, floor, exp, expm1, log, log1p, tanh, pow, min, ",
            "max, copysign, select, clamp, soft_threshold, sum, norm, single, total), found \"sin\""
        ),
    );
    check("w = min(g)", "line 1, column 5: expected 2 arguments of min, found 1");
    check("\n\n  w = é", "line 3, column 7: expected a name, a number or an operator, found 'é'");
    let unused =
        CheckedRule::new("param a = 1; w = a", &settings(&[("b", 1.0)])).expect_err("b is nothing").to_string();
    assert_eq!(unused, "\"b\" is set, and the rule has no such parameter; expected one of: a");
}

#[test]
fn a_rule_at_its_limits_is_accepted_and_one_beyond_them_is_refused() {
    let check = |text: &str, expected: &str| {
        let found =
            CheckedRule::new(text, &RuleSettings::new()).err().map(|failure| failure.to_string()).unwrap_or_default();
        assert!(if expected.is_empty() { found.is_empty() } else { found.contains(expected) }, "{found:?}: {text:.60}");
    };
    let comment = |bytes: usize| format!("w = g #{}", "x".repeat(bytes - 7));
    check(&comment(RULE_TEXT_BYTES_MAX), "");
    check(&comment(RULE_TEXT_BYTES_MAX + 1), "bytes; expected at most");
    let states = |count: usize| (0..count).map(|state| format!("state s{state} = 0;")).collect::<String>() + "w = g";
    check(&states(STATES_MAX), "");
    check(&states(STATES_MAX + 1), "expected at most 8 states");
    let nested = |levels: usize| format!("w = {}g{}", "(".repeat(levels), ")".repeat(levels));
    check(&nested(2 * RULE_DEPTH_MAX), "");
    check(&nested(2 * RULE_DEPTH_MAX + 1), "levels of an expression");
    check(&nested(RULE_TEXT_BYTES_MAX / 2 - 10), "levels of an expression");
    check(&nested(100_000), "a rule of 200005 bytes; expected at most");
    // A flat sum or product has one level, however many terms; its operations count, if they do not fold.
    check(&format!("w = g{}", " + g".repeat(490)), "");
    check(&format!("w = g{}", " + g - g".repeat(RULE_OPS_MAX)), "operations in a rule");
    check(&format!("w = g*(1{})", "+0".repeat(8000)), "");
    check(&format!("w = g/({}1)", "1*".repeat(8000)), "");
    check(&format!("w = g{}", "+1".repeat(100_000)), "a rule of 200005 bytes; expected at most");
    let powers = |levels: usize| format!("w = g{}", "^(1".repeat(levels) + &")".repeat(levels));
    check(&powers(RULE_DEPTH_MAX - 1), "");
    check(&powers(RULE_DEPTH_MAX), "levels of an expression");
    let sums = |levels: usize| format!("w = g{}", "+(1".repeat(levels) + &")".repeat(levels));
    check(&sums(RULE_DEPTH_MAX / 2 - 1), "");
    check(&sums(RULE_DEPTH_MAX), "levels of an expression");
    check(&format!("w = {}g", "-".repeat(1000)), "levels of an expression");
    check(&format!("w = {}g", "2^".repeat(1000)), "levels of an expression");
    let long = |statements: usize| "w = w*w + g;".repeat(statements);
    check(&long(RULE_OPS_MAX / 2 - 10), "");
    check(&long(RULE_OPS_MAX / 2), "operations in a rule");
    let numbers = |count: usize| (0..count).map(|number| format!("let l{number} = lr + {number}.5;"));
    let numbers = |count: usize| numbers(count).collect::<String>() + "w = g";
    check(&numbers(120), "");
    check(&numbers(130), "numbers and scalars in a rule");
    check(&format!("let {} = 1; w = g", "x".repeat(RULE_NAME_BYTES_MAX)), "");
    check(&format!("let {} = 1; w = g", "x".repeat(RULE_NAME_BYTES_MAX + 1)), "a name of 65 bytes");
}

/// The size of the generated code: equal operations are merged, known values are folded, unused ones removed.
#[test]
fn code_is_as_short_as_it_can_be_without_changing_a_bit() {
    let check = |text: &str, ops: usize, scalars: usize| {
        let code = lowered(text);
        assert_eq!((code.ops().len(), code.scalars().len()), (ops, scalars), "{text}: {code:#?}");
    };
    // The weight, the sum, the scale, their product; the rate, the step, the difference.
    check("w -= lr*g", 7, 2);
    check("let unused = exp(g) * lr; w -= lr*g", 7, 2);
    check("w -= 2*3*lr*g/1*1 - 0", 7, 4);
    check("w = w*g + w*g + g*w", 7, 1);
    check("param a = 0; w -= select(a == 0, lr*g, exp(g))", 7, 2);
    check("w = w; g = exp(g)", 1, 0);
    check("w = 7 - 2^2", 1, 1);
    // A sum with zero is not removed, because negative zero plus zero is positive zero.
    check("w += 0", 3, 1);
    check("w = w * 0", 3, 1);
    check("w = - -w", 1, 0);
    check("state s = 0; w = s^2 + s^0.5 + s^1", 5, 0);
    check("w = select(lr < 1, w, w)", 1, 0);
}

#[test]
fn values_that_are_equal_for_all_elements_are_scalars() {
    let code = lowered(include_str!("../../rules/adam.rule"));
    assert_eq!(code.ops().iter().filter(|op| matches!(op, RuleOp::Power(..) | RuleOp::Call(..))).count(), 0);
    let divisions = code.ops().iter().filter(|op| matches!(op, RuleOp::Binary(Binary::Divide, ..))).count();
    assert_eq!(divisions, 1, "{code:#?}");
    assert!(code.ops().len() <= 28, "{} operations: {code:#?}", code.ops().len());
}

#[test]
fn a_scalar_that_is_not_zero_never_becomes_zero() {
    let check = |scalar: f64, expected: f32| assert_eq!(round_to_binary32(scalar).to_bits(), expected.to_bits());
    check(0.1, 0.1);
    check(0.0, 0.0);
    check(-0.0, -0.0);
    check(1e-60, f32::MIN_POSITIVE);
    check(-1e-42, -f32::MIN_POSITIVE);
    check(1e60, f32::INFINITY);
}

#[test]
#[should_panic(expected = "uses a mask where it needs a real")]
fn ill_formed_code_cannot_be_made() {
    use super::ssa::{Comparison, ValueId};
    let ops = vec![RuleOp::Weight, RuleOp::Compare(Comparison::Less, ValueId(0), ValueId(0))];
    let _ = Lowered::new(Vec::new(), ops, Vec::new(), ValueId(1));
}

#[test]
fn the_built_in_rules_print_as_text_that_parses_to_the_same_rule() {
    for text in BUILT_IN {
        let syntax = Syntax::parse(text).expect("it reads");
        let printed = syntax.to_string();
        let again = Syntax::parse(&printed).expect("what is printed reads");
        assert_eq!(without_places(again), without_places(syntax), "{printed}");
    }
}

fn without_places(mut syntax: Syntax) -> Syntax {
    for statement in &mut syntax.statements {
        statement.position = NOWHERE;
        match &mut statement.kind {
            StatementKind::Parameter { .. } | StatementKind::Update => {}
            StatementKind::State(value) | StatementKind::Let(value) | StatementKind::Assign(_, value) => forget(value),
        }
    }
    syntax
}

fn forget(expression: &mut Expression) {
    expression.position = NOWHERE;
    match &mut expression.kind {
        ExpressionKind::Number(_) | ExpressionKind::Name(_) => {}
        ExpressionKind::Negate(operand) | ExpressionKind::Not(operand) => forget(operand),
        ExpressionKind::Chain(first, rest) => {
            forget(first);
            rest.iter_mut().for_each(|term| {
                term.position = NOWHERE;
                forget(&mut term.operand);
            });
        }
        ExpressionKind::Power(left, right)
        | ExpressionKind::Compare(_, left, right)
        | ExpressionKind::Logic(_, left, right) => {
            forget(left);
            forget(right);
        }
        ExpressionKind::Call(_, arguments) => arguments.iter_mut().for_each(forget),
    }
}

const NOWHERE: Position = Position { line: 0, column: 0 };

fn nowhere(kind: ExpressionKind) -> Expression {
    Expression { position: NOWHERE, kind }
}

fn numbers() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), Just(0.5), Just(2.0), 0.0..10.0_f64, Just(1e-300), Just(1.7976931348623157e308)]
}

/// Any real that a text may have, over these names.
fn reals(names: &'static [&'static str]) -> BoxedStrategy<Expression> {
    let name = prop::sample::select(names).prop_map(|name| ExpressionKind::Name(name.to_owned()));
    let leaf = prop_oneof![numbers().prop_map(ExpressionKind::Number), name].prop_map(nowhere);
    leaf.prop_recursive(5, 40, 3, |inner| {
        let pair = (inner.clone(), inner.clone()).prop_map(|(left, right)| (Box::new(left), Box::new(right)));
        let terms = prop::collection::vec((any::<bool>(), inner.clone()), 1..4);
        let chain = (any::<bool>(), inner.clone(), terms);
        // Reductions are of more than the one element that is compared here.
        let of_elements = FUNCTIONS.map(|(_, named)| named).into_iter();
        let of_elements = of_elements.filter(|named| {
            use NamedFunction::{Norm, Single, Sum, Total};
            !matches!(named, Sum | Norm | Single | Total)
        });
        let function = prop::sample::select(of_elements.collect::<Vec<_>>());
        let call = (function, prop::collection::vec(inner.clone(), 3), conditions(inner.clone()));
        prop_oneof![
            5 => inner.prop_map(|operand| ExpressionKind::Negate(Box::new(operand))),
            1 => pair.prop_map(|(left, right)| ExpressionKind::Power(left, right)),
            4 => chain.prop_map(|(is_sum, first, terms)| chained(is_sum, first, terms)),
            5 => call.prop_map(|(named, mut arguments, condition)| {
                arguments.truncate(named.arity());
                if named == NamedFunction::Select {
                    arguments[0] = condition;
                }
                ExpressionKind::Call(named, arguments)
            }),
        ]
        .prop_map(nowhere)
    })
    .boxed()
}

/// A sum or a product, as the parser makes it: the terms of a first operand of the same kind are its own.
fn chained(is_sum: bool, first: Expression, terms: Vec<(bool, Expression)>) -> ExpressionKind {
    let (plus, minus) = if is_sum {
        (ArithmeticOperator::Add, ArithmeticOperator::Subtract)
    } else {
        (ArithmeticOperator::Multiply, ArithmeticOperator::Divide)
    };
    let terms = terms.into_iter().map(|(is_plus, operand)| ChainTerm {
        position: NOWHERE,
        operator: if is_plus { plus } else { minus },
        operand,
    });
    match first.kind {
        ExpressionKind::Chain(first, mut rest) if rest[0].operator.is_sum() == is_sum => {
            rest.extend(terms);
            ExpressionKind::Chain(first, rest)
        }
        kind => ExpressionKind::Chain(Box::new(nowhere(kind)), terms.collect()),
    }
}

fn conditions(reals: impl Strategy<Value = Expression> + Clone + 'static) -> BoxedStrategy<Expression> {
    let relation = prop::sample::select(vec![
        Relation::Less,
        Relation::LessOrEqual,
        Relation::Greater,
        Relation::GreaterOrEqual,
        Relation::Equal,
        Relation::NotEqual,
    ]);
    let compare = (relation, reals.clone(), reals)
        .prop_map(|(relation, left, right)| ExpressionKind::Compare(relation, Box::new(left), Box::new(right)))
        .prop_map(nowhere);
    compare
        .prop_recursive(3, 8, 2, |inner| {
            let logic = prop::sample::select(vec![Logic::And, Logic::Or]);
            prop_oneof![
                inner.clone().prop_map(|operand| ExpressionKind::Not(Box::new(operand))),
                (logic, inner.clone(), inner).prop_map(|(logic, left, right)| ExpressionKind::Logic(
                    logic,
                    Box::new(left),
                    Box::new(right)
                )),
            ]
            .prop_map(nowhere)
        })
        .boxed()
}

fn statements() -> impl Strategy<Value = Statement> {
    let bound = prop_oneof![-5.0..5.0_f64, Just(f64::NEG_INFINITY), Just(f64::INFINITY)];
    let interval = (bound.clone(), bound, any::<bool>(), any::<bool>())
        .prop_filter("an interval is not empty", |(low, high, ..)| low < high)
        .prop_map(|(low, high, has_low, has_high)| Interval { low, high, has_low, has_high });
    let parameter = (prop::option::of(interval), prop::option::of(-9.0..9.0_f64))
        .prop_map(|(interval, default)| StatementKind::Parameter { interval, default });
    let operator = prop::option::of(prop::sample::select(vec![
        ArithmeticOperator::Add,
        ArithmeticOperator::Subtract,
        ArithmeticOperator::Multiply,
        ArithmeticOperator::Divide,
    ]));
    let names: &[&str] = &["w", "g", "m", "a_1"];
    let kind = prop_oneof![
        parameter,
        reals(names).prop_map(StatementKind::State),
        reals(names).prop_map(StatementKind::Let),
        (operator, reals(names)).prop_map(|(operator, value)| StatementKind::Assign(operator, value)),
    ];
    (prop::sample::select(names), kind).prop_map(|(name, kind)| Statement {
        position: NOWHERE,
        name: name.to_owned(),
        kind,
    })
}

/// A text of the words of rules, in random order.
fn random_words() -> impl Strategy<Value = String> {
    let words = vec![
        "param", "state", "let", "update", "in", "and", "or", "not", "inf", "w", "g", "lr", "n", "m", "select", "min",
        "sqrt", "(", ")", "[", "]", ",", ";", "\n", "+", "-", "*", "/", "^", "=", "+=", "-=", "<", "<=", "==", "!=",
        "1", "0", "0.5", "1e-8", ".", "#", "é", "\0", " ",
    ];
    prop::collection::vec(prop::sample::select(words), 0..60).prop_map(|words| words.join(" "))
}

proptest! {
    #[test]
    fn a_printed_rule_parses_to_the_same_rule(statements in prop::collection::vec(statements(), 0..6)) {
        let syntax = Syntax { statements };
        let printed = syntax.to_string();
        let read = Syntax::parse(&printed).map_err(|failure| TestCaseError::fail(format!("{failure}\n{printed}")))?;
        prop_assert_eq!(without_places(read), syntax, "{}", printed);
    }

    #[test]
    fn no_text_makes_the_compiler_panic(text in prop_oneof![any::<String>(), random_words()]) {
        if let Ok(rule) = CheckedRule::new(&text, &RuleSettings::new()) {
            rule.lower().expect("what was checked can be lowered");
        }
        if let Ok(stage) = CheckedRule::stage(&text) {
            lower(Some(&stage), &[&written("w -= lr*g")]).expect("what was checked can be lowered");
        }
    }

    /// In binary64 the code agrees exactly with the text: for `x ^ 2` the text's power may differ by a rounding, so
    /// powers are left out.
    #[test]
    fn the_code_computes_the_values_of_the_text(
        first in reals(&["w", "g", "m", "lr", "n", "a"]),
        second in reals(&["w", "g", "m", "lr", "n", "a"]),
        (weight, gradient, state) in (-3.0..3.0_f64, -3.0..3.0_f64, -3.0..3.0_f64),
    ) {
        let text = format!("param a = 0.75; state m = 1; w = {first}\nm = {second}");
        prop_assume!(!text.contains('^') && !text.contains("pow"));
        let Ok(rule) = CheckedRule::new(&text, &RuleSettings::new()) else { return Ok(()) };
        let (mut by_code, mut by_text) = ([state], [state]);
        let found = run(&rule, weight, gradient, &mut by_code);
        let expected = rule.interpret(&GIVEN, weight, gradient, &mut by_text);
        prop_assert!(same(found, expected), "{text}: the code says {found:?}, the text {expected:?}");
        prop_assert!(same(by_code[0], by_text[0]), "{text}: the code keeps {by_code:?}, the text {by_text:?}");
    }
}
