//! Tokens of update rules and of programs.

use std::fmt::{self, Display};

use crate::error::Failure;
use crate::limits::RULE_NAME_BYTES_MAX;
use crate::text::{Position, TextCursor};

/// The language of a text, which decides what is one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Update rules.
    Rule,
    /// Programs.
    Program,
}

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub enum TextToken<'a> {
    /// Letters, digits and `_`, and no digit first; in a program also `. / @ -`.
    Word(&'a str),
    /// A number of a rule, without a sign.
    Number(f64),
    /// A word of a program that begins like a number, perhaps with a sign.
    Numeral(&'a str),
    /// A text of a program in quotes, its escapes resolved.
    Text(String),
    /// An operator of a rule; in a program any other character.
    Symbol(&'a str),
    /// The end of a line of a rule.
    Break,
    /// The end of the text.
    End,
}

/// The operators of rules, longer ones first.
const OPERATORS: [&str; 22] = [
    "+=", "-=", "*=", "/=", "<=", ">=", "==", "!=", "+", "-", "*", "/", "^", "<", ">", "=", "(", ")", "[", "]", ",",
    ";",
];

/// Whether a program's name may be written without quotes.
#[must_use]
pub fn is_bare(name: &str) -> bool {
    !name.is_empty() && word_length(Language::Program, name) == name.len()
}

fn word_length(language: Language, text: &str) -> usize {
    if !text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') {
        return 0;
    }
    let others = if language == Language::Program { "_./@-" } else { "_" };
    text.find(|next: char| !next.is_ascii_alphanumeric() && !others.contains(next)).unwrap_or(text.len())
}

/// Digits, letters and points, and a sign where an exponent begins. In a program a sign may come first, in a rule a
/// point. Letters that follow a number at once belong to it, and make it a mistake.
fn number_length(language: Language, text: &str) -> usize {
    let (digits, other) = match language {
        Language::Program => (text.strip_prefix('-').unwrap_or(text), '.'),
        Language::Rule => (text, '_'),
    };
    if !digits.starts_with(|first: char| first.is_ascii_alphanumeric() || language == Language::Rule && first == '.') {
        return 0;
    }
    let mut before = ' ';
    let ends = |next: char| {
        let is_sign = matches!((before, next), ('e' | 'E', '+' | '-'));
        before = next;
        !is_sign && !next.is_ascii_alphanumeric() && next != '.' && next != other
    };
    text.len() - digits.len() + digits.find(ends).unwrap_or(digits.len())
}

/// Cursor that reads tokens.
pub struct TextLexer<'a> {
    language: Language,
    text: TextCursor<'a>,
    file: Option<&'a str>,
}

impl<'a> TextLexer<'a> {
    /// A cursor at the beginning of a text.
    #[must_use]
    pub fn new(language: Language, text: &'a str) -> Self {
        Self { language, text: TextCursor::new(text), file: None }
    }

    /// The same of a file, whose name is in every error.
    #[must_use]
    pub fn of_file(self, file: Option<&'a str>) -> Self {
        Self { file, ..self }
    }

    /// An error at a position of this text.
    #[must_use]
    pub fn refuse(&self, position: Position, reason: impl Display) -> Failure {
        position.refuse_in(self.file, reason)
    }

    /// The next token and its position; at the end [`TextToken::End`].
    ///
    /// # Errors
    /// At a character that begins no token, with its position.
    pub fn next_token(&mut self) -> Result<(Position, TextToken<'a>), Failure> {
        match self.language {
            Language::Rule => self.text.skip_blank_in_line(),
            Language::Program => self.text.skip_blank(),
        }
        let (position, rest) = (self.text.position(), self.text.rest());
        let token = match word_length(self.language, rest) {
            0 => match number_length(self.language, rest) {
                0 => self.symbol(position)?,
                length => self.number(position, length)?,
            },
            length if self.language == Language::Rule && length > RULE_NAME_BYTES_MAX => {
                let reason = format!("a name of {length} bytes; expected at most {RULE_NAME_BYTES_MAX}");
                return Err(self.refuse(position, reason));
            }
            length => TextToken::Word(self.text.take(length)),
        };
        Ok((position, token))
    }

    fn number(&mut self, position: Position, length: usize) -> Result<TextToken<'a>, Failure> {
        let text = self.text.take(length);
        if self.language == Language::Program {
            return Ok(TextToken::Numeral(text));
        }
        // The library reads `1e5` and `.5`, and also `infinity`, which begins with a letter and does not come here.
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(TextToken::Number(value)),
            Ok(_) => Err(self.refuse(position, format!("expected a finite number, found {text}"))),
            Err(_) => Err(self.refuse(position, format!("expected a number such as 0.5 or 1e-8, found {text}"))),
        }
    }

    fn symbol(&mut self, position: Position) -> Result<TextToken<'a>, Failure> {
        let rest = self.text.rest();
        let Some(first) = self.text.peek() else { return Ok(TextToken::End) };
        let operator = OPERATORS.into_iter().find(|operator| rest.starts_with(operator)).map(str::len);
        let length = match (self.language, first) {
            (Language::Rule, '\n') => {
                self.text.advance();
                return Ok(TextToken::Break);
            }
            (Language::Rule, _) => operator.ok_or_else(|| {
                self.refuse(position, format!("expected a name, a number or an operator, found {first:?}"))
            })?,
            (Language::Program, '"') => return self.quoted(position).map(TextToken::Text),
            (Language::Program, _) => first.len_utf8(),
        };
        Ok(TextToken::Symbol(self.text.take(length)))
    }

    /// A text in quotes, which ends on its line.
    fn quoted(&mut self, start: Position) -> Result<String, Failure> {
        self.text.advance();
        let mut text = String::new();
        loop {
            let position = self.text.position();
            match self.text.advance() {
                None | Some('\n') => {
                    return Err(self.refuse(start, "found a text without a closing quote; expected one on its line"));
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
        Err(self.refuse(start, "found an escape that is not known; expected one of \\\" \\\\ \\n \\r \\t \\u{...}"))
    }
}

impl Display for TextToken<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(text) | Self::Numeral(text) => write!(formatter, "{text:?}"),
            Self::Number(number) => write!(formatter, "{number}"),
            Self::Text(text) => write!(formatter, "the text {text:?}"),
            Self::Symbol(symbol) => write!(formatter, "'{}'", symbol.escape_debug()),
            Self::Break => formatter.write_str("the end of the line"),
            Self::End => formatter.write_str("the end"),
        }
    }
}
