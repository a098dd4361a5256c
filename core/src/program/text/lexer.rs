//! Text as tokens with their places.

use std::fmt::{self, Display};

use crate::error::Failure;

/// A place in the text, counted from one; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    line: u32,
    column: u32,
}

impl Position {
    pub(super) fn refuse(self, reason: impl Display) -> Failure {
        Failure::call(format!("line {}, column {}: {reason}", self.line, self.column))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A bare name or word.
    Name(&'a str),
    /// What begins as a number.
    Number(&'a str),
    /// A text in quotes, its escapes resolved.
    Text(String),
    Symbol(char),
    End,
}

impl Display for Token<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(text) | Self::Number(text) => write!(formatter, "{text:?}"),
            Self::Text(text) => write!(formatter, "the text {text:?}"),
            Self::Symbol(symbol) => write!(formatter, "{symbol:?}"),
            Self::End => formatter.write_str("the end"),
        }
    }
}

/// Whether a name may be written without quotes.
pub(super) fn is_bare(name: &str) -> bool {
    !name.is_empty() && bare_length(name) == name.len()
}

fn bare_length(text: &str) -> usize {
    if !text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') {
        return 0;
    }
    text.find(|next: char| !next.is_ascii_alphanumeric() && !"_./@-".contains(next)).unwrap_or(text.len())
}

/// A sign, then letters, digits and points; a sign again where an exponent begins.
fn number_length(text: &str) -> usize {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if !digits.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        return 0;
    }
    let mut before = ' ';
    for (index, next) in digits.char_indices() {
        let is_sign = matches!((before, next), ('e' | 'E', '+' | '-'));
        if !is_sign && !next.is_ascii_alphanumeric() && next != '.' {
            return text.len() - digits.len() + index;
        }
        before = next;
    }
    text.len()
}

pub(super) struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    column: u32,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text, line: 1, column: 1 }
    }

    pub(super) fn next(&mut self) -> Result<(Position, Token<'a>), Failure> {
        self.skip_blank();
        let position = Position { line: self.line, column: self.column };
        let bare = bare_length(self.rest);
        if bare > 0 {
            return Ok((position, Token::Name(self.take(bare))));
        }
        let number = number_length(self.rest);
        if number > 0 {
            return Ok((position, Token::Number(self.take(number))));
        }
        let token = match self.advance() {
            None => Token::End,
            Some('"') => Token::Text(self.text(position)?),
            Some(symbol) => Token::Symbol(symbol),
        };
        Ok((position, token))
    }

    /// Takes so many bytes, which are ASCII without line ends.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        self.column = self.column.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        taken
    }

    /// The inside of a text whose first quote has been taken, and the closing quote.
    fn text(&mut self, start: Position) -> Result<String, Failure> {
        let mut text = String::new();
        loop {
            let position = Position { line: self.line, column: self.column };
            match self.advance() {
                None | Some('\n') => {
                    return Err(start.refuse("found a text without a closing quote; expected one on its line"));
                }
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape(position)?),
                Some(character) => text.push(character),
            }
        }
    }

    /// What follows a backslash: `"`, `\`, `n`, `r`, `t`, or `u{...}` with hexadecimal digits.
    fn escape(&mut self, start: Position) -> Result<char, Failure> {
        match self.advance() {
            Some(character @ ('"' | '\\')) => return Ok(character),
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('u') => {
                let digits =
                    self.rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map(|(digits, _)| digits);
                let is_short = |digits: &&str| (1..=6).contains(&digits.len()) && digits.is_ascii();
                let number = digits.filter(is_short).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                if let (Some(digits), Some(character)) = (digits, number.and_then(char::from_u32)) {
                    self.take(digits.len() + 2);
                    return Ok(character);
                }
            }
            _ => {}
        }
        Err(start.refuse("found an escape that is not known; expected one of \\\" \\\\ \\n \\r \\t \\u{...}"))
    }

    fn skip_blank(&mut self) {
        while let Some(character) = self.rest.chars().next() {
            if character == '#' {
                while self.advance().is_some_and(|character| character != '\n') {}
            } else if character.is_whitespace() {
                self.advance();
            } else {
                return;
            }
        }
    }

    fn advance(&mut self) -> Option<char> {
        let mut characters = self.rest.chars();
        let character = characters.next()?;
        self.rest = characters.as_str();
        if character == '\n' {
            self.line += 1;
            self.column = 1;
        } else {
            self.column += 1;
        }
        Some(character)
    }
}
