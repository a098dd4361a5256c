//! Text as tokens with their places.

use std::fmt::{self, Display};

use crate::error::Failure;
use crate::text::{Cursor, Position};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProgramToken<'a> {
    /// A bare name or word.
    Name(&'a str),
    /// A word that begins like a number.
    Number(&'a str),
    /// A text in quotes, its escapes resolved.
    Text(String),
    Symbol(char),
    End,
}

impl Display for ProgramToken<'_> {
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

pub(super) struct ProgramLexer<'a> {
    text: Cursor<'a>,
}

impl<'a> ProgramLexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text: Cursor::new(text) }
    }

    pub(super) fn next(&mut self) -> Result<(Position, ProgramToken<'a>), Failure> {
        self.text.skip_blank();
        let position = self.text.position();
        let bare = bare_length(self.text.rest());
        if bare > 0 {
            return Ok((position, ProgramToken::Name(self.text.take(bare))));
        }
        let number = number_length(self.text.rest());
        if number > 0 {
            return Ok((position, ProgramToken::Number(self.text.take(number))));
        }
        let token = match self.text.advance() {
            None => ProgramToken::End,
            Some('"') => ProgramToken::Text(self.text(position)?),
            Some(symbol) => ProgramToken::Symbol(symbol),
        };
        Ok((position, token))
    }

    /// The inside of a string whose first quote has been taken, and the closing quote.
    fn text(&mut self, start: Position) -> Result<String, Failure> {
        let mut text = String::new();
        loop {
            let position = self.text.position();
            match self.text.advance() {
                None | Some('\n') => {
                    return Err(start.refuse("found a text without a closing quote; expected one on its line"));
                }
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape(position)?),
                Some(character) => text.push(character),
            }
        }
    }

    /// The escape after a backslash: `"`, `\`, `n`, `r`, `t`, or `u{...}` with hexadecimal digits.
    fn escape(&mut self, start: Position) -> Result<char, Failure> {
        match self.text.advance() {
            Some(character @ ('"' | '\\')) => return Ok(character),
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('u') => {
                let digits =
                    self.text.rest().strip_prefix('{').and_then(|rest| rest.split_once('}')).map(|(digits, _)| digits);
                let is_short = |digits: &&str| (1..=6).contains(&digits.len()) && digits.is_ascii();
                let number = digits.filter(is_short).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                if let (Some(digits), Some(character)) = (digits, number.and_then(char::from_u32)) {
                    self.text.take(digits.len() + 2);
                    return Ok(character);
                }
            }
            _ => {}
        }
        Err(start.refuse("found an escape that is not known; expected one of \\\" \\\\ \\n \\r \\t \\u{...}"))
    }
}
