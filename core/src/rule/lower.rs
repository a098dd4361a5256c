//! Lowering of a rule's text to straight-line code, with all checks.
//!
//! One pass resolves names, separates reals from conditions, folds constants, eliminates common subexpressions, and
//! reports errors with their place. Values that do not depend on an element become scalars, in binary64; where one
//! meets an element it is rounded to the parameter's type.
//!
//! No rewrite changes a bit: `(g * lr) * mu` is two operations on elements, as written.

use std::collections::BTreeMap;

use crate::error::Failure;
use crate::limits::STATES_MAX;
use crate::text::Position;

use super::code::{CodeBuilder, Operand};
use super::interval::Interval;
use super::ssa::{Binary, Comparison, Lowered, ReductionKind, ScalarInput, StateId, Unary};
use super::syntax::{
    ArithmeticOperator, ChainTerm, Expression, ExpressionKind, Logic, NamedFunction, Relation, Statement,
    StatementKind, Syntax,
};
use super::tunable::{Tunable, TunableNames};

/// Values of a rule's parameters, by name, as far as they are set.
pub type RuleSettings = BTreeMap<String, f64>;

/// A text and the values of its parameters.
#[derive(Clone, Copy)]
pub(super) struct RulePiece<'a> {
    pub(super) syntax: &'a Syntax,
    pub(super) settings: &'a RuleSettings,
    pub(super) tunables: TunableNames,
}

/// State of the lowering of all texts.
pub(super) struct Lowering {
    code: CodeBuilder,
    weight: Operand,
    gradient: Operand,
    rate: Operand,
    states: Vec<PendingState>,
    assigns_weight: bool,
}

/// A state during the lowering.
struct PendingState {
    name: String,
    initial: f64,
    value: Operand,
}

/// The meaning of a name.
#[derive(Clone, Copy)]
enum Meaning {
    Weight,
    Gradient,
    /// `lr`, which a stage may assign.
    Rate,
    State(usize),
    /// A parameter, a predefined name, or a name that `let` defines.
    Value(Operand),
}

/// State of the lowering of one text.
struct TextLowering<'a> {
    lowering: &'a mut Lowering,
    piece: RulePiece<'a>,
    /// The rules in place of `update`, where the text is a stage.
    inner: Option<&'a [RulePiece<'a>]>,
    names: BTreeMap<&'a str, Meaning>,
    parameters: BTreeMap<String, f64>,
    /// Whether the expression is in a branch that a constant condition excludes; there a division by zero is allowed.
    is_left_out: bool,
}

impl Lowering {
    pub(super) fn new() -> Self {
        let mut code = CodeBuilder::default();
        let weight = code.weight();
        let gradient = code.gradient();
        let rate = code.input(ScalarInput::Rate);
        Self { code, weight, gradient, rate, states: Vec::new(), assigns_weight: false }
    }

    /// Whether any text so far assigned `w`.
    pub(super) fn assigns_weight(&self) -> bool {
        self.assigns_weight
    }

    /// Adds a text; gives the values of its parameters. A stage has `inner`, the rules in place of its `update`.
    pub(super) fn add(
        &mut self,
        piece: RulePiece<'_>,
        inner: Option<&[RulePiece<'_>]>,
    ) -> Result<BTreeMap<String, f64>, Failure> {
        let syntax = piece.syntax;
        let mut piece = TextLowering {
            lowering: self,
            piece,
            inner,
            names: BTreeMap::new(),
            parameters: BTreeMap::new(),
            is_left_out: false,
        };
        let count = piece.lowering.code.input(ScalarInput::Count);
        let names =
            [("w", Meaning::Weight), ("g", Meaning::Gradient), ("lr", Meaning::Rate), ("n", Meaning::Value(count))];
        piece.names.extend(names);
        for statement in &syntax.statements {
            piece.statement(statement)?;
        }
        Ok(piece.parameters)
    }

    /// The code, without unused values.
    pub(super) fn finish(self) -> Lowered {
        let states = self.states.into_iter().map(|state| (state.name, state.initial, state.value)).collect();
        self.code.finish(states, self.weight)
    }
}

impl<'a> TextLowering<'a> {
    fn statement(&mut self, statement: &'a Statement) -> Result<(), Failure> {
        let Statement { position, name, kind } = statement;
        match kind {
            StatementKind::Parameter { interval, default } => {
                self.refuse_known(*position, name)?;
                let value = self.parameter(*position, name, *interval, *default)?;
                self.names.insert(name, Meaning::Value(value));
            }
            StatementKind::State(initial) => {
                self.refuse_known(*position, name)?;
                self.state(*position, name, initial)?;
            }
            StatementKind::Let(value) => {
                self.refuse_known(*position, name)?;
                let value = self.expression(value)?;
                self.names.insert(name, Meaning::Value(value));
            }
            StatementKind::Assign(operator, value) => self.assign(*position, name, *operator, value)?,
            StatementKind::Update => {
                let inner = self.inner.ok_or_else(|| {
                    position.refuse("expected a statement of a rule, found update, which only a stage has")
                })?;
                for piece in inner {
                    self.lowering.add(*piece, None)?;
                }
            }
        }
        self.lowering.code.check_limits().map_err(|reason| position.refuse(reason))
    }

    fn parameter(
        &mut self,
        position: Position,
        name: &str,
        interval: Option<Interval>,
        default: Option<f64>,
    ) -> Result<Operand, Failure> {
        let value = self.piece.settings.get(name).copied().or(default).ok_or_else(|| {
            position.refuse(format!("expected a value for the parameter {name:?}, which has no default, found none"))
        })?;
        let holds = interval.map_or(value.is_finite(), |interval| interval.holds(value));
        if !holds {
            let range = interval.map_or("a finite number".to_owned(), |interval| interval.to_string());
            return Err(position.refuse(format!("expected {name:?} in {range}, found {value}")));
        }
        self.parameters.insert(name.to_owned(), value);
        let code = &mut self.lowering.code;
        Ok(match self.piece.tunables.of(name) {
            Some(tunable) => code.tunable(Tunable { name: tunable.to_owned(), value, interval }),
            None => code.constant(value),
        })
    }

    fn state(&mut self, position: Position, name: &'a str, initial: &'a Expression) -> Result<(), Failure> {
        let operand = self.real(initial)?;
        let Some(value) = self.lowering.code.decide(operand) else {
            let reason =
                "expected a first value made of numbers and parameters, found one that changes with the update";
            return Err(initial.position.refuse(reason));
        };
        if self.lowering.states.iter().any(|state| state.name == *name) {
            return Err(position.refuse(format!("the state {name:?} is declared by two texts; expected one")));
        }
        let place = self.lowering.states.len();
        if place == STATES_MAX {
            return Err(position.refuse(format!("expected at most {STATES_MAX} states, found one more: {name:?}")));
        }
        let id = StateId(u16::try_from(place).expect("states are few"));
        let state = PendingState { name: name.to_owned(), initial: value, value: self.lowering.code.state(id) };
        self.lowering.states.push(state);
        self.names.insert(name, Meaning::State(place));
        Ok(())
    }

    fn assign(
        &mut self,
        position: Position,
        name: &'a str,
        operator: Option<ArithmeticOperator>,
        value: &'a Expression,
    ) -> Result<(), Failure> {
        let target = self.look_up(position, name)?;
        if matches!(target, Meaning::Value(_)) || (matches!(target, Meaning::Rate) && self.inner.is_none()) {
            let reason = format!("expected w, g or a state before '=', found {name:?}, which is constant");
            return Err(position.refuse(reason));
        }
        let mut operand = self.real(value)?;
        if let Some(arithmetic) = operator {
            operand = self.arithmetic(value.position, arithmetic, self.value(target), operand)?;
        }
        match target {
            Meaning::Weight => {
                self.lowering.weight = operand;
                self.lowering.assigns_weight = true;
            }
            Meaning::Gradient => self.lowering.gradient = operand,
            Meaning::Rate => match operand {
                Operand::Scalar(_) => self.lowering.rate = operand,
                _ => return Err(value.position.refuse("expected one number for all elements as lr, found an element")),
            },
            Meaning::State(place) => self.lowering.states[place].value = operand,
            Meaning::Value(_) => unreachable!("it was just refused"),
        }
        Ok(())
    }

    fn value(&self, meaning: Meaning) -> Operand {
        match meaning {
            Meaning::Weight => self.lowering.weight,
            Meaning::Gradient => self.lowering.gradient,
            Meaning::Rate => self.lowering.rate,
            Meaning::State(place) => self.lowering.states[place].value,
            Meaning::Value(operand) => operand,
        }
    }

    /// A name's meaning here; an undeclared name with a setting is a parameter.
    fn look_up(&mut self, position: Position, name: &'a str) -> Result<Meaning, Failure> {
        if let Some(meaning) = self.names.get(name) {
            return Ok(*meaning);
        }
        let is_declared = |statement: &&Statement| {
            statement.name == name && !matches!(statement.kind, StatementKind::Assign(..) | StatementKind::Update)
        };
        if let Some(later) = self.piece.syntax.statements.iter().find(is_declared) {
            let line = later.position.line;
            return Err(
                position.refuse(format!("expected a name from above, found {name:?}, which comes on line {line}"))
            );
        }
        if self.piece.settings.contains_key(name) {
            let meaning = Meaning::Value(self.parameter(position, name, None, None)?);
            self.names.insert(name, meaning);
            return Ok(meaning);
        }
        let known: Vec<&str> = self.names.keys().copied().collect();
        Err(position.refuse(format!("expected a known name ({}), found {name:?}", known.join(", "))))
    }

    fn refuse_known(&self, position: Position, name: &str) -> Result<(), Failure> {
        if self.names.contains_key(name) {
            return Err(position.refuse(format!("expected a new name, found {name:?}, which is known already")));
        }
        Ok(())
    }

    fn expression(&mut self, expression: &'a Expression) -> Result<Operand, Failure> {
        let position = expression.position;
        let operand = match &expression.kind {
            ExpressionKind::Number(number) => self.lowering.code.constant(*number),
            ExpressionKind::Name(name) => {
                let meaning = self.look_up(position, name)?;
                self.value(meaning)
            }
            ExpressionKind::Negate(operand) => {
                let operand = self.real(operand)?;
                self.lowering.code.unary(Unary::Negate, operand)
            }
            ExpressionKind::Not(operand) => {
                let operand = self.condition(operand)?;
                self.lowering.code.not(operand)
            }
            ExpressionKind::Power(left, right) => {
                let (left, right) = (self.real(left)?, self.real(right)?);
                self.lowering.code.power(left, right)
            }
            ExpressionKind::Chain(first, rest) => self.chain(first, rest)?,
            ExpressionKind::Compare(relation, left, right) => {
                let (left, right) = (self.real(left)?, self.real(right)?);
                self.compare(*relation, left, right)
            }
            ExpressionKind::Logic(logic, left, right) => {
                let (left, right) = (self.condition(left)?, self.condition(right)?);
                match logic {
                    Logic::And => self.lowering.code.and(left, right),
                    Logic::Or => self.lowering.code.or(left, right),
                }
            }
            ExpressionKind::Call(NamedFunction::Select, arguments) => self.select(arguments)?,
            ExpressionKind::Call(named, arguments) => self.call(position, *named, arguments)?,
        };
        self.refuse_infinite(position, operand)?;
        Ok(operand)
    }

    fn chain(&mut self, first: &'a Expression, rest: &'a [ChainTerm]) -> Result<Operand, Failure> {
        let mut left = self.real(first)?;
        for ChainTerm { position, operator, operand } in rest {
            let right = self.real(operand)?;
            left = self.arithmetic(*position, *operator, left, right)?;
            self.refuse_infinite(*position, left)?;
        }
        Ok(left)
    }

    fn arithmetic(
        &mut self,
        position: Position,
        arithmetic: ArithmeticOperator,
        left: Operand,
        right: Operand,
    ) -> Result<Operand, Failure> {
        let code = &mut self.lowering.code;
        let binary = match arithmetic {
            ArithmeticOperator::Add => Binary::Add,
            ArithmeticOperator::Subtract => Binary::Subtract,
            ArithmeticOperator::Multiply => Binary::Multiply,
            ArithmeticOperator::Divide if code.known(right) == Some(0.0) && !self.is_left_out => {
                return Err(position.refuse("expected a divisor that is not zero, found one that is always zero"));
            }
            ArithmeticOperator::Divide => Binary::Divide,
        };
        Ok(code.binary(binary, left, right))
    }

    fn compare(&mut self, relation: Relation, left: Operand, right: Operand) -> Operand {
        let (comparison, is_exchanged, is_negated) = relation.comparison();
        let (left, right) = if is_exchanged { (right, left) } else { (left, right) };
        let code = &mut self.lowering.code;
        let holds = code.compare(comparison, left, right);
        if is_negated { code.not(holds) } else { holds }
    }

    fn call(
        &mut self,
        position: Position,
        named: NamedFunction,
        arguments: &'a [Expression],
    ) -> Result<Operand, Failure> {
        let mut operands = Vec::with_capacity(arguments.len());
        for argument in arguments {
            operands.push(self.real(argument)?);
        }
        if let (NamedFunction::Sum | NamedFunction::Norm, [Operand::Scalar(_)]) = (named, operands.as_slice()) {
            let name = named.name();
            return Err(position.refuse(format!("expected {name} of a value of elements, found one number for all")));
        }
        let code = &mut self.lowering.code;
        Ok(match (named, operands.as_slice()) {
            (NamedFunction::Absolute, [x]) => code.unary(Unary::Absolute, *x),
            (NamedFunction::SquareRoot, [x]) => code.unary(Unary::SquareRoot, *x),
            (NamedFunction::Sign, [x]) => code.unary(Unary::Sign, *x),
            (NamedFunction::Floor, [x]) => code.unary(Unary::Floor, *x),
            (NamedFunction::Function(function), [x]) => code.call(function, *x),
            (NamedFunction::Power, [x, y]) => code.power(*x, *y),
            (NamedFunction::Minimum, [x, y]) => code.binary(Binary::Minimum, *x, *y),
            (NamedFunction::Maximum, [x, y]) => code.binary(Binary::Maximum, *x, *y),
            (NamedFunction::CopySign, [x, y]) => code.binary(Binary::CopySign, *x, *y),
            (NamedFunction::Clamp, [x, low, high]) => {
                let kept = code.binary(Binary::Minimum, *x, *high);
                code.binary(Binary::Maximum, kept, *low)
            }
            (NamedFunction::SoftThreshold, [x, threshold]) => soft_threshold(code, *x, *threshold),
            (NamedFunction::Single, [x]) => code.single(*x).ok_or_else(|| {
                position.refuse("expected single of one number for all elements, found a value of elements")
            })?,
            (NamedFunction::Sum, [x]) => code.reduce(ReductionKind::Sum, *x),
            (NamedFunction::Total, [x]) => match (self.inner, x) {
                (None, _) => {
                    return Err(position.refuse("expected a function of rules, found total, which only a stage has"));
                }
                (_, Operand::Scalar(_)) if code.has_total() => {
                    return Err(position.refuse("expected one total of a parameter, found another one"));
                }
                (_, Operand::Scalar(_)) => code.reduce(ReductionKind::Total, *x),
                _ => return Err(position.refuse("expected total of one number for all elements, found an element")),
            },
            (NamedFunction::Norm, [x]) => {
                let squares = code.reduce(ReductionKind::SquareSum, *x);
                code.unary(Unary::SquareRoot, squares)
            }
            _ => {
                let found = operands.len();
                return Err(position.refuse(format!("expected {} arguments, found {found}", named.arity())));
            }
        })
    }

    fn select(&mut self, arguments: &'a [Expression]) -> Result<Operand, Failure> {
        let [condition, then, otherwise] = arguments else { unreachable!("the parser counts arguments") };
        let condition = self.condition(condition)?;
        let chosen = self.lowering.code.known(condition).map(|truth| truth != 0.0);
        let then = self.branch(then, chosen == Some(false))?;
        let otherwise = self.branch(otherwise, chosen == Some(true))?;
        Ok(self.lowering.code.select(condition, then, otherwise))
    }

    fn branch(&mut self, expression: &'a Expression, is_left_out: bool) -> Result<Operand, Failure> {
        let around = self.is_left_out;
        self.is_left_out = around || is_left_out;
        let operand = self.real(expression);
        self.is_left_out = around;
        operand
    }

    fn real(&mut self, expression: &'a Expression) -> Result<Operand, Failure> {
        let operand = self.expression(expression)?;
        match operand {
            Operand::Scalar(_) | Operand::Element(_) => Ok(operand),
            Operand::Truth(_) | Operand::Mask(_) => {
                Err(expression.position.refuse("expected a number, found a condition; select(condition, x, y) chooses"))
            }
        }
    }

    fn condition(&mut self, expression: &'a Expression) -> Result<Operand, Failure> {
        let operand = self.expression(expression)?;
        match operand {
            Operand::Truth(_) | Operand::Mask(_) => Ok(operand),
            Operand::Scalar(_) | Operand::Element(_) => {
                Err(expression.position.refuse("expected a condition such as x < y, found a number"))
            }
        }
    }

    fn refuse_infinite(&self, position: Position, operand: Operand) -> Result<(), Failure> {
        match self.lowering.code.known(operand) {
            Some(value) if !value.is_finite() && !self.is_left_out => {
                Err(position.refuse(format!("expected a finite number, found one that is always {value}")))
            }
            _ => Ok(()),
        }
    }
}

fn soft_threshold(code: &mut CodeBuilder, x: Operand, threshold: Operand) -> Operand {
    let magnitude = code.unary(Unary::Absolute, x);
    let is_near = code.compare(Comparison::LessOrEqual, magnitude, threshold);
    let zero = code.constant(0.0);
    let zero = code.binary(Binary::CopySign, zero, x);
    let step = code.binary(Binary::CopySign, threshold, x);
    let moved = code.binary(Binary::Subtract, x, step);
    code.select(is_near, zero, moved)
}
