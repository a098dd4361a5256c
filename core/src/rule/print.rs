//! Printer of rules: one statement a line, without unnecessary parentheses.

use std::fmt::{self, Display, Formatter};

use super::interval::Interval;
use super::parser::Binding;
use super::syntax::{
    ArithmeticOperator, ChainTerm, Expression, ExpressionKind, Logic, Relation, Statement, StatementKind, Syntax,
};

impl Display for Syntax {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        self.statements.iter().try_for_each(|statement| writeln!(formatter, "{statement}"))
    }
}

impl Display for Statement {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.kind {
            StatementKind::Parameter { interval, default } => {
                write!(formatter, "param {name}")?;
                if let Some(interval) = interval {
                    write!(formatter, " in {interval}")?;
                }
                default.map_or(Ok(()), |default| write!(formatter, " = {default:?}"))
            }
            StatementKind::State(value) => write!(formatter, "state {name} = {value}"),
            StatementKind::Let(value) => write!(formatter, "let {name} = {value}"),
            StatementKind::Update => formatter.write_str("update"),
            StatementKind::Assign(None, value) => write!(formatter, "{name} = {value}"),
            StatementKind::Assign(Some(operator), value) => write!(formatter, "{name} {}= {value}", operator.symbol()),
        }
    }
}

impl Display for Interval {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let open = if self.has_low { '[' } else { '(' };
        let close = if self.has_high { ']' } else { ')' };
        write!(formatter, "{open}{:?}, {:?}{close}", self.low, self.high)
    }
}

impl Display for Expression {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ExpressionKind::Number(number) => write!(formatter, "{number:?}"),
            ExpressionKind::Name(name) => formatter.write_str(name),
            ExpressionKind::Negate(operand) => {
                formatter.write_str("-")?;
                write_at_least(formatter, operand, Binding::Power)
            }
            ExpressionKind::Not(operand) => {
                formatter.write_str("not ")?;
                write_at_least(formatter, operand, Binding::Compare)
            }
            ExpressionKind::Power(left, right) => {
                write_at_least(formatter, left, Binding::Atom)?;
                formatter.write_str(" ^ ")?;
                write_at_least(formatter, right, Binding::Power)
            }
            ExpressionKind::Chain(first, rest) => {
                let is_sum = rest.iter().any(|term| term.operator.is_sum());
                let least = if is_sum { Binding::Product } else { Binding::Sign };
                write_at_least(formatter, first, least)?;
                rest.iter().try_for_each(|ChainTerm { operator, operand, .. }| {
                    write!(formatter, " {} ", operator.symbol())?;
                    write_at_least(formatter, operand, least)
                })
            }
            ExpressionKind::Compare(relation, left, right) => {
                write_between(formatter, (left, Binding::Sum), relation.symbol(), (right, Binding::Sum))
            }
            ExpressionKind::Logic(Logic::And, left, right) => {
                write_between(formatter, (left, Binding::And), "and", (right, Binding::Not))
            }
            ExpressionKind::Logic(Logic::Or, left, right) => {
                write_between(formatter, (left, Binding::Or), "or", (right, Binding::And))
            }
            ExpressionKind::Call(named, arguments) => {
                write!(formatter, "{}(", named.name())?;
                for (place, argument) in arguments.iter().enumerate() {
                    formatter.write_str(if place == 0 { "" } else { ", " })?;
                    write!(formatter, "{argument}")?;
                }
                formatter.write_str(")")
            }
        }
    }
}

/// Writes a binary operation. Each operand stands with the binding below which it needs parentheses.
fn write_between(
    formatter: &mut Formatter<'_>,
    (left, left_least): (&Expression, Binding),
    symbol: &str,
    (right, right_least): (&Expression, Binding),
) -> fmt::Result {
    write_at_least(formatter, left, left_least)?;
    write!(formatter, " {symbol} ")?;
    write_at_least(formatter, right, right_least)
}

fn write_at_least(formatter: &mut Formatter<'_>, expression: &Expression, least: Binding) -> fmt::Result {
    if binding(expression) < least { write!(formatter, "({expression})") } else { write!(formatter, "{expression}") }
}

fn binding(expression: &Expression) -> Binding {
    match &expression.kind {
        ExpressionKind::Number(_) | ExpressionKind::Name(_) | ExpressionKind::Call(..) => Binding::Atom,
        ExpressionKind::Negate(_) => Binding::Sign,
        ExpressionKind::Not(_) => Binding::Not,
        ExpressionKind::Power(..) => Binding::Power,
        ExpressionKind::Chain(_, rest) if rest.iter().any(|term| term.operator.is_sum()) => Binding::Sum,
        ExpressionKind::Chain(..) => Binding::Product,
        ExpressionKind::Compare(..) => Binding::Compare,
        ExpressionKind::Logic(Logic::And, ..) => Binding::And,
        ExpressionKind::Logic(Logic::Or, ..) => Binding::Or,
    }
}

impl ArithmeticOperator {
    const fn symbol(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Subtract => "-",
            Self::Multiply => "*",
            Self::Divide => "/",
        }
    }
}

impl Relation {
    const fn symbol(self) -> &'static str {
        match self {
            Self::Less => "<",
            Self::LessOrEqual => "<=",
            Self::Greater => ">",
            Self::GreaterOrEqual => ">=",
            Self::Equal => "==",
            Self::NotEqual => "!=",
        }
    }
}
