//! Syntax tree of a rule: statements and expressions, each with its position in the text.

use crate::text::Position;

use super::interval::Interval;
use super::ssa::{Comparison, RuleFunction};

/// The syntax tree of a rule. [`Syntax::parse`] makes it; it prints as text that parses to the same tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Syntax {
    /// In order.
    pub statements: Vec<Statement>,
}

/// A declaration or an assignment.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// Where its name stands.
    pub position: Position,
    /// The name that it declares or assigns to.
    pub name: String,
    /// The kind of statement.
    pub kind: StatementKind,
}

/// A statement's effect on its name.
#[derive(Clone, Debug, PartialEq)]
pub enum StatementKind {
    /// `param name in [0, 1) = 0.9`
    Parameter {
        /// The numbers it may have; all finite ones when there is no interval.
        interval: Option<Interval>,
        /// The value without a setting.
        default: Option<f64>,
    },
    /// `state name = 0`
    State(Expression),
    /// `let name = value`
    Let(Expression),
    /// `name = value`, or with an operator `name += value`
    Assign(Option<ArithmeticOperator>, Expression),
    /// `update`, in a stage only: the place of the rule that the stage is around.
    Update,
}

/// A value, as written.
#[derive(Clone, Debug, PartialEq)]
pub struct Expression {
    /// Where its operator, name, number or function stands.
    pub position: Position,
    /// The kind of expression.
    pub kind: ExpressionKind,
}

/// How an expression is made.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpressionKind {
    /// Finite, zero or above.
    Number(f64),
    /// A declared or predefined name.
    Name(String),
    /// `-x`
    Negate(Box<Expression>),
    /// `not x`
    Not(Box<Expression>),
    /// `x ^ y`
    Power(Box<Expression>, Box<Expression>),
    /// `x + y - z` or `x * y / z`: a sum or a product of one level, however long, computed from left to right. There is
    /// at least one term, and `x` is no chain of the same kind.
    Chain(Box<Expression>, Vec<ChainTerm>),
    /// `x < y`
    Compare(Relation, Box<Expression>, Box<Expression>),
    /// `x and y`, `x or y`
    Logic(Logic, Box<Expression>, Box<Expression>),
    /// `name(x, y)`; as many arguments as the function takes
    Call(NamedFunction, Vec<Expression>),
}

/// An operator of a chain and what stands on its right.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainTerm {
    /// Where the operator stands.
    pub position: Position,
    /// The operator, of the same [binding](ArithmeticOperator::is_sum) in the whole chain.
    pub operator: ArithmeticOperator,
    /// The right operand.
    pub operand: Expression,
}

/// An operator between two numbers with a number as its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArithmeticOperator {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`
    Divide,
}

impl ArithmeticOperator {
    /// Whether it is `+` or `-`, which bind less tightly than `*` and `/`.
    #[must_use]
    pub const fn is_sum(self) -> bool {
        matches!(self, Self::Add | Self::Subtract)
    }
}

/// An operator between two numbers with a condition as its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `<`
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
}

/// An operator between two conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    /// `and`
    And,
    /// `or`
    Or,
}

/// A function by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedFunction {
    /// `abs(x)`
    Absolute,
    /// `sqrt(x)`
    SquareRoot,
    /// `sign(x)`
    Sign,
    /// `floor(x)`
    Floor,
    /// `exp(x)` and its like.
    Function(RuleFunction),
    /// `pow(x, y)`, which is `x ^ y`
    Power,
    /// `min(x, y)`
    Minimum,
    /// `max(x, y)`
    Maximum,
    /// `copysign(x, y)`
    CopySign,
    /// `select(condition, x, y)`
    Select,
    /// `clamp(x, low, high)`, which is `max(min(x, high), low)`
    Clamp,
    /// `soft_threshold(x, t)`: zero with the sign of `x` where `abs(x) <= t`, else `x - copysign(t, x)`
    SoftThreshold,
    /// `sum(x)`: over all elements of the parameter, a number without an element
    Sum,
    /// `norm(x)`: the root of the sum of the squares over all elements of the parameter
    Norm,
    /// `single(x)`: a number without an element, rounded to binary32
    Single,
    /// `total(x)`: what the job's trainers make of `x`, a number without an element, and of those of other parameters
    Total,
}

/// Every function, by the name that a text has for it.
pub(super) const FUNCTIONS: [(&str, NamedFunction); 20] = [
    ("abs", NamedFunction::Absolute),
    ("sqrt", NamedFunction::SquareRoot),
    ("sign", NamedFunction::Sign),
    ("floor", NamedFunction::Floor),
    ("exp", NamedFunction::Function(RuleFunction::Exponential)),
    ("expm1", NamedFunction::Function(RuleFunction::ExponentialMinusOne)),
    ("log", NamedFunction::Function(RuleFunction::Logarithm)),
    ("log1p", NamedFunction::Function(RuleFunction::LogarithmOnePlus)),
    ("tanh", NamedFunction::Function(RuleFunction::HyperbolicTangent)),
    ("pow", NamedFunction::Power),
    ("min", NamedFunction::Minimum),
    ("max", NamedFunction::Maximum),
    ("copysign", NamedFunction::CopySign),
    ("select", NamedFunction::Select),
    ("clamp", NamedFunction::Clamp),
    ("soft_threshold", NamedFunction::SoftThreshold),
    ("sum", NamedFunction::Sum),
    ("norm", NamedFunction::Norm),
    ("single", NamedFunction::Single),
    ("total", NamedFunction::Total),
];

/// Words that are no names.
pub(super) const KEYWORDS: [&str; 8] = ["param", "state", "let", "in", "and", "or", "not", "inf"];

impl Syntax {
    /// Whether it is `g = g * factor; update`, where the factor's only elements are gradients within a total.
    pub(super) fn scales_gradient_by_total(&self) -> bool {
        let [first, second] = self.statements.as_slice() else { return false };
        let factor = match &first.kind {
            StatementKind::Assign(Some(ArithmeticOperator::Multiply), factor) => Some(factor),
            StatementKind::Assign(None, value) => value.factor_of_gradient(),
            _ => None,
        };
        second.kind == StatementKind::Update
            && first.name == "g"
            && factor.is_some_and(|one| one.reads_gradients(false))
    }
}

impl Expression {
    /// The factor of `g * factor`.
    fn factor_of_gradient(&self) -> Option<&Self> {
        let ExpressionKind::Chain(first, terms) = &self.kind else { return None };
        let ([ChainTerm { operator: ArithmeticOperator::Multiply, operand, .. }], ExpressionKind::Name(name)) =
            (terms.as_slice(), &first.kind)
        else {
            return None;
        };
        (name == "g").then_some(operand)
    }

    /// Whether it reads no element but gradients, and those within a total only.
    fn reads_gradients(&self, is_in_total: bool) -> bool {
        let all = |some: &[&Self], is_in_total| some.iter().all(|one| one.reads_gradients(is_in_total));
        match &self.kind {
            ExpressionKind::Number(_) => true,
            ExpressionKind::Name(name) => match name.as_str() {
                "g" => is_in_total,
                name => name != "w",
            },
            ExpressionKind::Negate(one) | ExpressionKind::Not(one) => one.reads_gradients(is_in_total),
            ExpressionKind::Power(one, other)
            | ExpressionKind::Compare(_, one, other)
            | ExpressionKind::Logic(_, one, other) => all(&[one, other], is_in_total),
            ExpressionKind::Chain(first, terms) => {
                first.reads_gradients(is_in_total) && terms.iter().all(|one| one.operand.reads_gradients(is_in_total))
            }
            ExpressionKind::Call(function, arguments) => {
                let is_in_total = is_in_total || *function == NamedFunction::Total;
                arguments.iter().all(|one| one.reads_gradients(is_in_total))
            }
        }
    }
}

impl NamedFunction {
    /// How many arguments it takes.
    #[must_use]
    pub fn arity(self) -> usize {
        match self {
            Self::Absolute
            | Self::SquareRoot
            | Self::Sign
            | Self::Floor
            | Self::Function(_)
            | Self::Sum
            | Self::Norm
            | Self::Single
            | Self::Total => 1,
            Self::Power | Self::Minimum | Self::Maximum | Self::CopySign | Self::SoftThreshold => 2,
            Self::Select | Self::Clamp => 3,
        }
    }

    /// As a text writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = FUNCTIONS.iter().find(|(_, named)| *named == self);
        found.expect("every function has a name").0
    }
}

impl Relation {
    /// The comparison of the operands, whether they are exchanged, and whether its result is turned round.
    pub(super) fn comparison(self) -> (Comparison, bool, bool) {
        match self {
            Self::Less => (Comparison::Less, false, false),
            Self::LessOrEqual => (Comparison::LessOrEqual, false, false),
            Self::Greater => (Comparison::Less, true, false),
            Self::GreaterOrEqual => (Comparison::LessOrEqual, true, false),
            Self::Equal => (Comparison::Equal, false, false),
            Self::NotEqual => (Comparison::Equal, false, true),
        }
    }
}
