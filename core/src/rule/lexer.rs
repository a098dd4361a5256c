//! Text cut into words, numbers and symbols.

use std::fmt;

use crate::error::Failure;
use crate::limits::{RULE_NAME_BYTES_MAX, RULE_TEXT_BYTES_MAX};
use crate::text::{Cursor, Position};

/// A word, with where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RuleToken<'a> {
    pub(super) position: Position,
    pub(super) kind: RuleTokenKind<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RuleTokenKind<'a> {
    /// Letters, digits and `_`, and no digit first.
    Word(&'a str),
    Number(f64),
    Symbol(&'static str),
    /// The end of a line.
    Break,
    End,
}

/// Longer ones first.
const SYMBOLS: [&str; 22] = [
    "+=", "-=", "*=", "/=", "<=", ">=", "==", "!=", "+", "-", "*", "/", "^", "<", ">", "=", "(", ")", "[", "]", ",",
    ";",
];

/// All tokens; the last one is the end.
pub(super) fn tokens(text: &str) -> Result<Vec<RuleToken<'_>>, Failure> {
    if text.len() > RULE_TEXT_BYTES_MAX {
        let length = text.len();
        return Err(Failure::call(format!("a rule of {length} bytes; expected at most {RULE_TEXT_BYTES_MAX}")));
    }
    let mut lexer = RuleLexer { text: Cursor::new(text) };
    let mut tokens = Vec::new();
    loop {
        let token = lexer.token()?;
        let is_end = token.kind == RuleTokenKind::End;
        tokens.push(token);
        if is_end {
            return Ok(tokens);
        }
    }
}

struct RuleLexer<'a> {
    text: Cursor<'a>,
}

impl<'a> RuleLexer<'a> {
    fn token(&mut self) -> Result<RuleToken<'a>, Failure> {
        self.text.skip_blank_in_line();
        let position = self.text.position();
        let kind = match self.text.peek() {
            None => RuleTokenKind::End,
            Some('\n') => {
                self.text.advance();
                RuleTokenKind::Break
            }
            Some(first) if first.is_ascii_alphabetic() || first == '_' => self.word(position)?,
            Some(first) if first.is_ascii_digit() || first == '.' => self.number(position)?,
            Some(first) => self.symbol(position, first)?,
        };
        Ok(RuleToken { position, kind })
    }

    fn word(&mut self, position: Position) -> Result<RuleTokenKind<'a>, Failure> {
        let word = self.text.take_while(|character| character.is_ascii_alphanumeric() || character == '_');
        if word.len() > RULE_NAME_BYTES_MAX {
            return Err(
                position.refuse(format!("a name of {} bytes; expected at most {RULE_NAME_BYTES_MAX}", word.len()))
            );
        }
        Ok(RuleTokenKind::Word(word))
    }

    /// Digits with at most one point, then perhaps an exponent. Letters that follow at once are a mistake.
    fn number(&mut self, position: Position) -> Result<RuleTokenKind<'a>, Failure> {
        let mut before = ' ';
        let mut length = 0;
        for character in self.text.rest().chars() {
            let is_sign = matches!((before, character), ('e' | 'E', '+' | '-'));
            if !is_sign && !character.is_ascii_alphanumeric() && !matches!(character, '.' | '_') {
                break;
            }
            before = character;
            length += character.len_utf8();
        }
        let text = self.text.take(length);
        // The library reads `1e5` and `.5`, and also `infinity`, which begins with a letter and does not come here.
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(RuleTokenKind::Number(value)),
            Ok(_) => Err(position.refuse(format!("expected a finite number, found {text}"))),
            Err(_) => Err(position.refuse(format!("expected a number such as 0.5 or 1e-8, found {text}"))),
        }
    }

    fn symbol(&mut self, position: Position, first: char) -> Result<RuleTokenKind<'a>, Failure> {
        let Some(symbol) = SYMBOLS.into_iter().find(|symbol| self.text.rest().starts_with(symbol)) else {
            return Err(position.refuse(format!("expected a name, a number or an operator, found {first:?}")));
        };
        self.text.take(symbol.len());
        Ok(RuleTokenKind::Symbol(symbol))
    }
}

impl fmt::Display for RuleTokenKind<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => write!(formatter, "{word:?}"),
            Self::Number(number) => write!(formatter, "{number}"),
            Self::Symbol(symbol) => write!(formatter, "'{symbol}'"),
            Self::Break => formatter.write_str("the end of the line"),
            Self::End => formatter.write_str("the end"),
        }
    }
}
