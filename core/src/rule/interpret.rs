//! Interpreter of a rule's text, one element at a time, in binary64: the oracle for rules that a user writes.
//!
//! The interpreter shares only the text's checks with the lowering, so that each reveals faults of the other.

use std::collections::BTreeMap;

use super::checked::CheckedRule;
use super::ssa::{Unary, single};
use super::syntax::{
    ArithmeticOperator, ChainTerm, Expression, ExpressionKind, Logic, NamedFunction, Relation, StatementKind,
};

/// Inputs of an update besides the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateInputs {
    /// `lr`
    pub rate: f64,
    /// `n`
    pub count: f64,
}

#[derive(Clone, Copy)]
enum InterpretedValue {
    Real(f64),
    Condition(bool),
}

type NamedValues<'a> = BTreeMap<&'a str, InterpretedValue>;

impl CheckedRule {
    /// Updates one element: gives the new weight, and replaces the states, which are in the order of
    /// [`states`](Self::states). The gradient is merged, scaled and clipped.
    ///
    /// # Panics
    ///
    /// When the states are not as many as the rule has, or the rule reduces: `sum` and `norm` are of all elements.
    pub fn interpret(&self, given: &UpdateInputs, weight: f64, gradient: f64, states: &mut [f64]) -> f64 {
        assert_eq!(states.len(), self.states().len(), "the states of this rule");
        let mut names: NamedValues<'_> = BTreeMap::new();
        for (name, value) in [("w", weight), ("g", gradient), ("lr", given.rate), ("n", given.count)] {
            names.insert(name, InterpretedValue::Real(value));
        }
        for (name, value) in self.parameters() {
            names.insert(name, InterpretedValue::Real(*value));
        }
        for (state, value) in self.states().iter().zip(states.iter()) {
            names.insert(&state.name, InterpretedValue::Real(*value));
        }
        for statement in &self.syntax().statements {
            let value = match &statement.kind {
                StatementKind::Parameter { .. } | StatementKind::State(_) | StatementKind::Update => continue,
                StatementKind::Let(value) | StatementKind::Assign(None, value) => evaluate(&names, value),
                StatementKind::Assign(Some(arithmetic), value) => {
                    let before = real(names[statement.name.as_str()]);
                    InterpretedValue::Real(compute(*arithmetic, before, real(evaluate(&names, value))))
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

fn evaluate(names: &NamedValues<'_>, expression: &Expression) -> InterpretedValue {
    let number = |expression: &Expression| real(evaluate(names, expression));
    let condition = |expression: &Expression| match evaluate(names, expression) {
        InterpretedValue::Condition(condition) => condition,
        InterpretedValue::Real(_) => unreachable!("the rule was checked"),
    };
    match &expression.kind {
        ExpressionKind::Number(number) => InterpretedValue::Real(*number),
        ExpressionKind::Name(name) => names[name.as_str()],
        ExpressionKind::Negate(operand) => InterpretedValue::Real(-number(operand)),
        ExpressionKind::Not(operand) => InterpretedValue::Condition(!condition(operand)),
        ExpressionKind::Power(left, right) => InterpretedValue::Real(number(left).powf(number(right))),
        ExpressionKind::Chain(first, rest) => {
            let term = |sum, term: &ChainTerm| compute(term.operator, sum, number(&term.operand));
            InterpretedValue::Real(rest.iter().fold(number(first), term))
        }
        ExpressionKind::Compare(relation, left, right) => {
            InterpretedValue::Condition(holds(*relation, number(left), number(right)))
        }
        ExpressionKind::Logic(Logic::And, left, right) => {
            InterpretedValue::Condition(condition(left) && condition(right))
        }
        ExpressionKind::Logic(Logic::Or, left, right) => {
            InterpretedValue::Condition(condition(left) || condition(right))
        }
        ExpressionKind::Call(NamedFunction::Select, arguments) => {
            evaluate(names, &arguments[if condition(&arguments[0]) { 1 } else { 2 }])
        }
        ExpressionKind::Call(named, arguments) => {
            let arguments: Vec<f64> = arguments.iter().map(number).collect();
            InterpretedValue::Real(call(*named, &arguments))
        }
    }
}

fn compute(arithmetic: ArithmeticOperator, left: f64, right: f64) -> f64 {
    match arithmetic {
        ArithmeticOperator::Add => left + right,
        ArithmeticOperator::Subtract => left - right,
        ArithmeticOperator::Multiply => left * right,
        ArithmeticOperator::Divide => left / right,
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

fn call(named: NamedFunction, arguments: &[f64]) -> f64 {
    match (named, arguments) {
        (NamedFunction::Absolute, [x]) => x.abs(),
        (NamedFunction::SquareRoot, [x]) => x.sqrt(),
        (NamedFunction::Sign, [x]) => Unary::Sign.of(*x),
        (NamedFunction::Floor, [x]) => x.floor(),
        (NamedFunction::Function(function), [x]) => function.of(*x),
        (NamedFunction::Power, [x, y]) => x.powf(*y),
        (NamedFunction::Minimum, [x, y]) => smaller(*x, *y),
        (NamedFunction::Maximum, [x, y]) => larger(*x, *y),
        (NamedFunction::CopySign, [x, y]) => x.copysign(*y),
        (NamedFunction::Clamp, [x, low, high]) => larger(smaller(*x, *high), *low),
        (NamedFunction::SoftThreshold, [x, threshold]) if x.abs() <= *threshold => 0.0_f64.copysign(*x),
        (NamedFunction::SoftThreshold, [x, threshold]) => x - threshold.copysign(*x),
        (NamedFunction::Single, [x]) => single(*x),
        (NamedFunction::Sum | NamedFunction::Norm | NamedFunction::Total, _) => panic!("a reduction of one element"),
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

fn real(value: InterpretedValue) -> f64 {
    match value {
        InterpretedValue::Real(value) => value,
        InterpretedValue::Condition(_) => unreachable!("the rule was checked"),
    }
}
