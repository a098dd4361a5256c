//! The grammar (`docs/RULES.md` has it whole): statements by line, expressions by precedence.

use crate::error::Failure;
use crate::limits::{RULE_DEPTH_MAX, RULE_TEXT_BYTES_MAX};
use crate::text::Position;
use crate::text::lexer::{Language, TextLexer, TextToken};

use super::interval::Interval;
use super::syntax::{
    ArithmeticOperator, ChainTerm, Expression, ExpressionKind, FUNCTIONS, KEYWORDS, Logic, NamedFunction, Relation,
    Statement, StatementKind, Syntax,
};

/// The most levels of nested parentheses and operators. An expression of the permitted depth prints with at most one
/// pair of parentheses per level, and parses again.
const NESTING_MAX: usize = 2 * RULE_DEPTH_MAX;

/// How tightly an operator binds. A comparison has no side: `a < b < c` is refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Binding {
    Or,
    And,
    Not,
    Compare,
    Sum,
    Product,
    Sign,
    Power,
    Atom,
}

/// The operators between two expressions.
#[derive(Clone, Copy)]
enum Operator {
    Arithmetic(ArithmeticOperator),
    Power,
    Compare(Relation),
    Logic(Logic),
}

/// An expression and how many levels it has.
struct Sized {
    expression: Expression,
    depth: usize,
}

impl Syntax {
    /// Parses a text. The error has the line and the column, the expected and the found token.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let tokens = tokens(text)?;
        let mut parser = RuleParser { tokens: &tokens, next: 0, open: 0 };
        let mut statements = Vec::new();
        loop {
            while parser.at_break() {
                parser.next += 1;
            }
            if *parser.peek().1 == TextToken::End {
                return Ok(Self { statements });
            }
            statements.push(parser.statement()?);
            let (position, token) = parser.peek();
            if !parser.at_break() && *token != TextToken::End {
                let reason = format!("expected an operator, ';' or the end of the line, found {token}");
                return Err(position.refuse(reason));
            }
        }
    }
}

/// All tokens; the last one is the end.
fn tokens(text: &str) -> Result<Vec<(Position, TextToken<'_>)>, Failure> {
    if text.len() > RULE_TEXT_BYTES_MAX {
        let length = text.len();
        return Err(Failure::call(format!("a rule of {length} bytes; expected at most {RULE_TEXT_BYTES_MAX}")));
    }
    let mut lexer = TextLexer::new(Language::Rule, text);
    let mut tokens = vec![lexer.next_token()?];
    while !matches!(tokens.last(), Some((_, TextToken::End))) {
        tokens.push(lexer.next_token()?);
    }
    Ok(tokens)
}

struct RuleParser<'a> {
    tokens: &'a [(Position, TextToken<'a>)],
    next: usize,
    /// How many parentheses are open; within them the end of a line means nothing.
    open: usize,
}

impl<'a> RuleParser<'a> {
    fn statement(&mut self) -> Result<Statement, Failure> {
        let (position, word) = self.word("a statement: param, state, let or a name to assign to")?;
        match word {
            "param" => self.parameter(),
            "state" => self.definition(StatementKind::State),
            "let" => self.definition(StatementKind::Let),
            "update" if self.at_break() || *self.peek().1 == TextToken::End => {
                Ok(Statement { position, name: "update".to_owned(), kind: StatementKind::Update })
            }
            name => {
                refuse_keyword(position, name, "a statement")?;
                let operator = self.assignment(name)?;
                let value = self.expression(Binding::Or, 0)?.expression;
                Ok(Statement { position, name: name.to_owned(), kind: StatementKind::Assign(operator, value) })
            }
        }
    }

    fn parameter(&mut self) -> Result<Statement, Failure> {
        let (position, name) = self.name("the parameter's name")?;
        let mut interval = None;
        if *self.peek().1 == TextToken::Word("in") {
            self.next += 1;
            interval = Some(self.interval()?);
        }
        let mut default = None;
        if self.take("=") {
            default = Some(self.number("the parameter's default")?);
        }
        Ok(Statement { position, name: name.to_owned(), kind: StatementKind::Parameter { interval, default } })
    }

    fn definition(&mut self, kind: impl Fn(Expression) -> StatementKind) -> Result<Statement, Failure> {
        let (position, name) = self.name("a name")?;
        self.symbol("=", &format!("'=' after {name:?}"))?;
        let value = self.expression(Binding::Or, 0)?.expression;
        Ok(Statement { position, name: name.to_owned(), kind: kind(value) })
    }

    fn assignment(&mut self, name: &str) -> Result<Option<ArithmeticOperator>, Failure> {
        let (position, token) = self.advance();
        match token {
            TextToken::Symbol("=") => Ok(None),
            TextToken::Symbol("+=") => Ok(Some(ArithmeticOperator::Add)),
            TextToken::Symbol("-=") => Ok(Some(ArithmeticOperator::Subtract)),
            TextToken::Symbol("*=") => Ok(Some(ArithmeticOperator::Multiply)),
            TextToken::Symbol("/=") => Ok(Some(ArithmeticOperator::Divide)),
            found => {
                Err(position.refuse(format!("expected '=', '+=', '-=', '*=' or '/=' after {name:?}, found {found}")))
            }
        }
    }

    fn interval(&mut self) -> Result<Interval, Failure> {
        let (position, _) = self.peek();
        let has_low = self.take("[");
        if !has_low {
            self.symbol("(", "'[' or '(' and the lowest value")?;
        }
        let low = self.bound("the lowest value")?;
        self.symbol(",", "',' and the highest value")?;
        let high = self.bound("the highest value")?;
        let has_high = self.take("]");
        if !has_high {
            self.symbol(")", "']' or ')'")?;
        }
        if low >= high {
            return Err(position.refuse(format!("expected a lowest value below the highest, found {low} and {high}")));
        }
        Ok(Interval { low, high, has_low, has_high })
    }

    /// A number with its sign, or an infinity.
    fn bound(&mut self, what: &str) -> Result<f64, Failure> {
        let sign = if self.take("-") { -1.0 } else { 1.0 };
        if *self.peek().1 == TextToken::Word("inf") {
            self.next += 1;
            return Ok(sign * f64::INFINITY);
        }
        self.number(what).map(|number| sign * number)
    }

    /// A number with its sign.
    fn number(&mut self, what: &str) -> Result<f64, Failure> {
        let sign = if self.take("-") { -1.0 } else { 1.0 };
        let (position, token) = self.advance();
        match token {
            TextToken::Number(number) => Ok(sign * number),
            found => Err(position.refuse(format!("expected {what}, a number, found {found}"))),
        }
    }

    /// An expression whose operators bind at least as tightly as `least`.
    fn expression(&mut self, least: Binding, depth: usize) -> Result<Sized, Failure> {
        let mut left = self.prefix(depth)?;
        loop {
            let (position, token) = self.peek();
            let Some((operator, binding)) = operator(token) else { return Ok(left) };
            if binding < least {
                return Ok(left);
            }
            self.next += 1;
            let right = self.expression(tighter(binding), depth + 1)?;
            if let Operator::Arithmetic(arithmetic) = operator {
                left = chain(left, arithmetic, position, right)?;
                continue;
            }
            let deepest = left.depth.max(right.depth);
            let (one, other) = (Box::new(left.expression), Box::new(right.expression));
            let kind = match operator {
                Operator::Arithmetic(_) | Operator::Power => ExpressionKind::Power(one, other),
                Operator::Compare(relation) => ExpressionKind::Compare(relation, one, other),
                Operator::Logic(logic) => ExpressionKind::Logic(logic, one, other),
            };
            left = sized(position, kind, deepest)?;
            if binding == Binding::Compare && matches!(self::operator(self.peek().1), Some((_, Binding::Compare))) {
                let (position, token) = self.peek();
                return Err(position.refuse(format!("expected 'and' between two comparisons, found {token}")));
            }
        }
    }

    fn prefix(&mut self, depth: usize) -> Result<Sized, Failure> {
        let (position, _) = self.peek();
        if depth > NESTING_MAX {
            return Err(too_deep(position));
        }
        if self.take("-") {
            let operand = self.expression(Binding::Power, depth + 1)?;
            return sized(position, ExpressionKind::Negate(Box::new(operand.expression)), operand.depth);
        }
        if *self.peek().1 == TextToken::Word("not") {
            self.next += 1;
            let operand = self.expression(Binding::Compare, depth + 1)?;
            return sized(position, ExpressionKind::Not(Box::new(operand.expression)), operand.depth);
        }
        self.atom(depth)
    }

    fn atom(&mut self, depth: usize) -> Result<Sized, Failure> {
        if self.take("(") {
            self.open += 1;
            let inside = self.expression(Binding::Or, depth + 1)?;
            self.open -= 1;
            self.skip_breaks();
            self.symbol(")", "an operator or ')'")?;
            return Ok(inside);
        }
        let (position, token) = self.advance();
        match token {
            TextToken::Number(number) => sized(position, ExpressionKind::Number(*number), 0),
            TextToken::Word(word) if *self.peek().1 == TextToken::Symbol("(") => self.call(position, word, depth),
            TextToken::Word(word) => {
                refuse_keyword(position, word, "a value")?;
                sized(position, ExpressionKind::Name((*word).to_owned()), 0)
            }
            found => Err(position.refuse(format!("expected a value, found {found}"))),
        }
    }

    fn call(&mut self, position: Position, word: &str, depth: usize) -> Result<Sized, Failure> {
        let Some((_, named)) = FUNCTIONS.iter().find(|(name, _)| *name == word) else {
            let names: Vec<&str> = FUNCTIONS.iter().map(|(name, _)| *name).collect();
            return Err(position.refuse(format!("expected a function ({}), found {word:?}", names.join(", "))));
        };
        self.next += 1;
        self.open += 1;
        let (mut arguments, mut deepest) = (Vec::new(), 0);
        loop {
            let argument = self.expression(Binding::Or, depth + 1)?;
            deepest = deepest.max(argument.depth);
            arguments.push(argument.expression);
            self.skip_breaks();
            if !self.take(",") {
                break;
            }
        }
        self.open -= 1;
        self.symbol(")", "an operator, ',' or ')'")?;
        check_arity(position, *named, arguments.len())?;
        sized(position, ExpressionKind::Call(*named, arguments), deepest)
    }

    fn name(&mut self, what: &str) -> Result<(Position, &'a str), Failure> {
        let (position, name) = self.word(what)?;
        refuse_keyword(position, name, what)?;
        Ok((position, name))
    }

    fn word(&mut self, what: &str) -> Result<(Position, &'a str), Failure> {
        let (position, token) = self.advance();
        match token {
            TextToken::Word(word) => Ok((position, *word)),
            found => Err(position.refuse(format!("expected {what}, found {found}"))),
        }
    }

    fn symbol(&mut self, symbol: &str, what: &str) -> Result<(), Failure> {
        let (position, token) = self.peek();
        if self.take(symbol) {
            return Ok(());
        }
        Err(position.refuse(format!("expected {what}, found {token}")))
    }

    /// Takes the next token when it is this symbol.
    fn take(&mut self, symbol: &str) -> bool {
        let found = *self.peek().1 == TextToken::Symbol(symbol);
        self.next += usize::from(found);
        found
    }

    /// The next token; within parentheses the next that is no end of a line.
    fn peek(&mut self) -> (Position, &'a TextToken<'a>) {
        if self.open > 0 {
            self.skip_breaks();
        }
        let (position, token) = &self.tokens[self.next.min(self.tokens.len() - 1)];
        (*position, token)
    }

    fn advance(&mut self) -> (Position, &'a TextToken<'a>) {
        let token = self.peek();
        self.next += 1;
        token
    }

    /// Whether a statement may end here: with its line, or at `;`.
    fn at_break(&mut self) -> bool {
        matches!(self.peek().1, TextToken::Break | TextToken::Symbol(";"))
    }

    fn skip_breaks(&mut self) {
        while matches!(self.tokens.get(self.next), Some((_, TextToken::Break))) {
            self.next += 1;
        }
    }
}

fn operator(token: &TextToken<'_>) -> Option<(Operator, Binding)> {
    let arithmetic = |arithmetic, binding| Some((Operator::Arithmetic(arithmetic), binding));
    let compare = |relation| Some((Operator::Compare(relation), Binding::Compare));
    match token {
        TextToken::Symbol("+") => arithmetic(ArithmeticOperator::Add, Binding::Sum),
        TextToken::Symbol("-") => arithmetic(ArithmeticOperator::Subtract, Binding::Sum),
        TextToken::Symbol("*") => arithmetic(ArithmeticOperator::Multiply, Binding::Product),
        TextToken::Symbol("/") => arithmetic(ArithmeticOperator::Divide, Binding::Product),
        TextToken::Symbol("^") => Some((Operator::Power, Binding::Power)),
        TextToken::Symbol("<") => compare(Relation::Less),
        TextToken::Symbol("<=") => compare(Relation::LessOrEqual),
        TextToken::Symbol(">") => compare(Relation::Greater),
        TextToken::Symbol(">=") => compare(Relation::GreaterOrEqual),
        TextToken::Symbol("==") => compare(Relation::Equal),
        TextToken::Symbol("!=") => compare(Relation::NotEqual),
        TextToken::Word("and") => Some((Operator::Logic(Logic::And), Binding::And)),
        TextToken::Word("or") => Some((Operator::Logic(Logic::Or), Binding::Or)),
        _ => None,
    }
}

/// The least binding of the right operand. A power takes a power, and a sign, on its right.
fn tighter(binding: Binding) -> Binding {
    match binding {
        Binding::Or => Binding::And,
        Binding::And => Binding::Not,
        Binding::Not => Binding::Compare,
        Binding::Compare => Binding::Sum,
        Binding::Sum => Binding::Product,
        Binding::Product => Binding::Sign,
        Binding::Sign | Binding::Power => Binding::Power,
        Binding::Atom => Binding::Atom,
    }
}

/// A term more of a sum or a product, which stays one level deep: only its deepest operand counts.
fn chain(left: Sized, operator: ArithmeticOperator, position: Position, right: Sized) -> Result<Sized, Failure> {
    let term = ChainTerm { position, operator, operand: right.expression };
    match left.expression.kind {
        ExpressionKind::Chain(first, mut rest) if rest[0].operator.is_sum() == operator.is_sum() => {
            rest.push(term);
            let deepest = right.depth.max(left.depth - 1);
            sized(left.expression.position, ExpressionKind::Chain(first, rest), deepest)
        }
        kind => {
            let first = Box::new(Expression { position: left.expression.position, kind });
            sized(position, ExpressionKind::Chain(first, vec![term]), left.depth.max(right.depth))
        }
    }
}

fn sized(position: Position, kind: ExpressionKind, deepest: usize) -> Result<Sized, Failure> {
    let depth = deepest + 1;
    if depth > RULE_DEPTH_MAX {
        return Err(too_deep(position));
    }
    Ok(Sized { expression: Expression { position, kind }, depth })
}

fn too_deep(position: Position) -> Failure {
    position
        .refuse(format!("expected at most {RULE_DEPTH_MAX} levels of an expression, found more; name a part by let"))
}

fn refuse_keyword(position: Position, word: &str, what: &str) -> Result<(), Failure> {
    if KEYWORDS.contains(&word) {
        return Err(position.refuse(format!("expected {what}, found the word {word:?}")));
    }
    Ok(())
}

fn check_arity(position: Position, named: NamedFunction, found: usize) -> Result<(), Failure> {
    let expected = named.arity();
    if found != expected {
        let name = named.name();
        return Err(position.refuse(format!("expected {expected} arguments of {name}, found {found}")));
    }
    Ok(())
}
