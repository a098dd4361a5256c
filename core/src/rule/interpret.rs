//! A rule run from its text, one element at a time, in binary64 throughout: the oracle for rules that a user writes.
//!
//! It shares nothing with the lowering but the text's checks, so that each can find the other's mistakes.

use std::collections::BTreeMap;

use super::ssa::Unary;
use super::syntax::{Arithmetic, Expression, ExpressionKind, Logic, Named, Relation, StatementKind};
use super::written::Written;

/// What an update gives a rule, besides the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Given {
    /// `lr`
    pub rate: f64,
    /// `n`
    pub count: f64,
}

#[derive(Clone, Copy)]
enum Value {
    Real(f64),
    Condition(bool),
}

type Names<'a> = BTreeMap<&'a str, Value>;

impl Written {
    /// Updates one element: gives the new weight, and replaces the states, which are in the order of
    /// [`states`](Self::states). The gradient is merged, scaled and clipped.
    ///
    /// # Panics
    ///
    /// When the states are not as many as the rule has.
    pub fn interpret(&self, given: &Given, weight: f64, gradient: f64, states: &mut [f64]) -> f64 {
        assert_eq!(states.len(), self.states().len(), "the states of this rule");
        let mut names: Names<'_> = BTreeMap::new();
        for (name, value) in [("w", weight), ("g", gradient), ("lr", given.rate), ("n", given.count)] {
            names.insert(name, Value::Real(value));
        }
        for (name, value) in self.parameters() {
            names.insert(name, Value::Real(*value));
        }
        for (state, value) in self.states().iter().zip(states.iter()) {
            names.insert(&state.name, Value::Real(*value));
        }
        for statement in &self.syntax().statements {
            let value = match &statement.kind {
                StatementKind::Parameter { .. } | StatementKind::State(_) => continue,
                StatementKind::Let(value) | StatementKind::Assign(None, value) => evaluate(&names, value),
                StatementKind::Assign(Some(arithmetic), value) => {
                    let before = real(names[statement.name.as_str()]);
                    Value::Real(compute(*arithmetic, before, real(evaluate(&names, value))))
                }
            };
            names.insert(&statement.name, value);
        }
        for (state, value) in self.states().iter().zip(states) {
            *value = real(names[state.name.as_str()]);
        }
        real(names["w"])
    }
}

fn evaluate(names: &Names<'_>, expression: &Expression) -> Value {
    let number = |expression: &Expression| real(evaluate(names, expression));
    let condition = |expression: &Expression| match evaluate(names, expression) {
        Value::Condition(condition) => condition,
        Value::Real(_) => unreachable!("the rule was checked"),
    };
    match &expression.kind {
        ExpressionKind::Number(number) => Value::Real(*number),
        ExpressionKind::Name(name) => names[name.as_str()],
        ExpressionKind::Negate(operand) => Value::Real(-number(operand)),
        ExpressionKind::Not(operand) => Value::Condition(!condition(operand)),
        ExpressionKind::Arithmetic(arithmetic, left, right) => {
            Value::Real(compute(*arithmetic, number(left), number(right)))
        }
        ExpressionKind::Compare(relation, left, right) => {
            Value::Condition(holds(*relation, number(left), number(right)))
        }
        ExpressionKind::Logic(Logic::And, left, right) => Value::Condition(condition(left) && condition(right)),
        ExpressionKind::Logic(Logic::Or, left, right) => Value::Condition(condition(left) || condition(right)),
        ExpressionKind::Call(Named::Select, arguments) => {
            evaluate(names, &arguments[if condition(&arguments[0]) { 1 } else { 2 }])
        }
        ExpressionKind::Call(named, arguments) => {
            let arguments: Vec<f64> = arguments.iter().map(number).collect();
            Value::Real(call(*named, &arguments))
        }
    }
}

fn compute(arithmetic: Arithmetic, left: f64, right: f64) -> f64 {
    match arithmetic {
        Arithmetic::Add => left + right,
        Arithmetic::Subtract => left - right,
        Arithmetic::Multiply => left * right,
        Arithmetic::Divide => left / right,
        Arithmetic::Power => left.powf(right),
    }
}

#[expect(clippy::float_cmp, reason = "it is what the text asks for")]
fn holds(relation: Relation, left: f64, right: f64) -> bool {
    match relation {
        Relation::Less => left < right,
        Relation::LessOrEqual => left <= right,
        Relation::Greater => left > right,
        Relation::GreaterOrEqual => left >= right,
        Relation::Equal => left == right,
        Relation::NotEqual => left != right,
    }
}

fn call(named: Named, arguments: &[f64]) -> f64 {
    match (named, arguments) {
        (Named::Absolute, [x]) => x.abs(),
        (Named::SquareRoot, [x]) => x.sqrt(),
        (Named::Sign, [x]) => Unary::Sign.of(*x),
        (Named::Floor, [x]) => x.floor(),
        (Named::Function(function), [x]) => function.of(*x),
        (Named::Power, [x, y]) => x.powf(*y),
        (Named::Minimum, [x, y]) => smaller(*x, *y),
        (Named::Maximum, [x, y]) => larger(*x, *y),
        (Named::CopySign, [x, y]) => x.copysign(*y),
        (Named::Clamp, [x, low, high]) => larger(smaller(*x, *high), *low),
        (Named::SoftThreshold, [x, threshold]) if x.abs() <= *threshold => 0.0_f64.copysign(*x),
        (Named::SoftThreshold, [x, threshold]) => x - threshold.copysign(*x),
        _ => unreachable!("the parser counts arguments"),
    }
}

/// The first unless the second is smaller.
fn smaller(x: f64, y: f64) -> f64 {
    if y < x { y } else { x }
}

/// The first unless the second is larger.
fn larger(x: f64, y: f64) -> f64 {
    if y > x { y } else { x }
}

fn real(value: Value) -> f64 {
    match value {
        Value::Real(value) => value,
        Value::Condition(_) => unreachable!("the rule was checked"),
    }
}
