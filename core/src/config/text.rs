//! Parser of protobuf's text form, which converts it to the binary form by the schema.
//!
//! `name: value` for numbers, names and strings; `name { ... }`, `name: { ... }` or `name < ... >` for messages; fields
//! may be followed by `,` or `;`; `#` starts a comment. A field may be given once, unless it is repeated.

use std::fmt::{self, Display};

use crate::error::Failure;
use crate::text::{Position, TextCursor, suggestion};

use super::rule::remedy;
use super::schema::{Field, FieldKind, Schema, enumerators};

/// Reads a whole message and gives its binary form.
pub(super) fn to_binary(schema: &'static Schema, text: &str) -> Result<Vec<u8>, Failure> {
    let mut parser = ConfigParser { text: TextCursor::new(text) };
    parser.message(schema, None)
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ConfigToken<'a> {
    /// A name or a number: letters, digits, `_`, `.`, and the sign of an exponent.
    Plain(&'a str),
    /// A string, its escapes resolved.
    Quoted(Vec<u8>),
    Symbol(char),
    End,
}

struct ConfigParser<'a> {
    text: TextCursor<'a>,
}

impl<'a> ConfigParser<'a> {
    /// Fields up to `close`, or up to the end when there is none.
    fn message(&mut self, schema: &'static Schema, close: Option<char>) -> Result<Vec<u8>, Failure> {
        let mut binary = Vec::new();
        let mut seen = Vec::new();
        loop {
            let (position, token) = self.token()?;
            match (token, close) {
                (ConfigToken::End, None) => return Ok(binary),
                (ConfigToken::Symbol(symbol), Some(close)) if symbol == close => return Ok(binary),
                (ConfigToken::Plain(name), _) => {
                    let field = known(schema, name).map_err(|reason| position.refuse(reason))?;
                    if seen.contains(&field.number) && !field.is_repeated {
                        return Err(position.refuse(format!("field {name:?} is given twice")));
                    }
                    seen.push(field.number);
                    self.field(field, &mut binary)?;
                    let _separator = self.take_symbol(',') || self.take_symbol(';');
                }
                (token, Some(close)) => {
                    return Err(position.refuse(format!("found {token}; expected a field's name or '{close}'")));
                }
                (token, None) => return Err(position.refuse(format!("found {token}; expected a field's name"))),
            }
        }
    }

    fn field(&mut self, field: &Field, binary: &mut Vec<u8>) -> Result<(), Failure> {
        let colon = self.take_symbol(':');
        if !colon && !matches!(field.kind, FieldKind::Message(_)) {
            let (position, token) = self.token()?;
            return Err(position.refuse(format!("found {token}; expected ':' after {:?}", field.name)));
        }
        push_varint(binary, field.key());
        match field.kind {
            FieldKind::Double => binary.extend(self.double(field.name)?.to_le_bytes()),
            FieldKind::Bool => binary.push(self.plain(field.name, always("true or false"), to_bool)?.into()),
            FieldKind::Uint32 => {
                let value = self.plain(field.name, always("a whole number below 4294967296"), to_uint32)?;
                push_varint(binary, value.into());
            }
            FieldKind::Uint64 => {
                let value = self.plain(field.name, always("a whole number below 2^64"), to_uint64)?;
                push_varint(binary, value);
            }
            FieldKind::Enumeration(values) => {
                let names = || values.iter().map(|(name, _)| *name);
                // A word that differs only in case has the correctly written word as its nearest.
                let is_own = |word: &str| names().any(|name| name.eq_ignore_ascii_case(word));
                let is_elsewhere = |word: &str| field.name == "optimizer" && !is_own(word);
                let of_optimizers = |word: &str| remedy(word).filter(|_| is_elsewhere(word));
                let near = |word: &str| of_optimizers(word).unwrap_or_else(|| suggestion(word, names()));
                let expected = |word: &str| format!("one of {}{}", enumerators(values), near(word));
                let number = self.plain(field.name, expected, |text| {
                    values.iter().find(|(name, number)| *name == text || to_uint32(text) == Some(*number))
                })?;
                push_varint(binary, number.1.into());
            }
            FieldKind::Text => push_delimited(binary, &self.quoted(field.name)?),
            FieldKind::Message(schema) => push_delimited(binary, &self.nested(field.name, schema)?),
        }
        Ok(())
    }

    fn nested(&mut self, name: &str, schema: &'static Schema) -> Result<Vec<u8>, Failure> {
        match self.token()? {
            (_, ConfigToken::Symbol('{')) => self.message(schema, Some('}')),
            (_, ConfigToken::Symbol('<')) => self.message(schema, Some('>')),
            (position, token) => {
                let expected = format!("its fields in braces, which may be empty: {name} {{ }}");
                Err(position.refuse(format!("found {token} after {name:?}, which is a message; expected {expected}")))
            }
        }
    }

    fn double(&mut self, name: &str) -> Result<f64, Failure> {
        let sign = if self.take_symbol('-') { -1.0 } else { 1.0 };
        self.plain(name, always("a number"), to_double).map(|value| sign * value)
    }

    /// Takes a name or a number and converts it. `expected` gets the word that does not convert.
    fn plain<T>(
        &mut self,
        name: &str,
        expected: impl Fn(&str) -> String,
        convert: impl Fn(&'a str) -> Option<T>,
    ) -> Result<T, Failure> {
        let (position, token) = self.token()?;
        let word = if let ConfigToken::Plain(text) = token { text } else { "" };
        let value = if word.is_empty() { None } else { convert(word) };
        value.ok_or_else(|| position.refuse(format!("{name:?} has {token}; expected {}", expected(word))))
    }

    /// Takes one or more adjacent strings, and joins them.
    fn quoted(&mut self, name: &str) -> Result<Vec<u8>, Failure> {
        let (position, token) = self.token()?;
        let ConfigToken::Quoted(mut bytes) = token else {
            return Err(position.refuse(format!("{name:?} has {token}; expected a string in quotes")));
        };
        while let Some(quote) = self.take_quote() {
            self.string(quote, position, &mut bytes)?;
        }
        match str::from_utf8(&bytes) {
            Ok(_) => Ok(bytes),
            Err(_) => Err(position.refuse(format!("{name:?} is not UTF-8"))),
        }
    }

    /// Takes the next non-blank character if it is this one.
    fn take_symbol(&mut self, symbol: char) -> bool {
        self.text.skip_blank();
        self.text.accept(symbol)
    }

    fn take_quote(&mut self) -> Option<char> {
        ['"', '\''].into_iter().find(|quote| self.take_symbol(*quote))
    }

    fn token(&mut self) -> Result<(Position, ConfigToken<'a>), Failure> {
        self.text.skip_blank();
        let position = self.text.position();
        if let Some(quote) = self.take_quote() {
            let mut bytes = Vec::new();
            self.string(quote, position, &mut bytes)?;
            return Ok((position, ConfigToken::Quoted(bytes)));
        }
        let plain = self.text.take(plain_length(self.text.rest()));
        if plain.is_empty() {
            return Ok((position, self.text.advance().map_or(ConfigToken::End, ConfigToken::Symbol)));
        }
        Ok((position, ConfigToken::Plain(plain)))
    }

    /// The content of a string after its opening quote, and the closing quote.
    fn string(&mut self, quote: char, start: Position, bytes: &mut Vec<u8>) -> Result<(), Failure> {
        loop {
            match self.text.advance() {
                None | Some('\n') => {
                    return Err(start.refuse(
                        "a string has no closing quote on its line; expected \\n where its text has a line's end, or a \
                         string in quotes on each line, which are joined",
                    ));
                }
                Some(character) if character == quote => return Ok(()),
                Some('\\') => bytes.extend(self.escape()?),
                Some(character) => push_character(bytes, character),
            }
        }
    }

    /// The escape after a backslash: a letter, up to three octal digits, or `x` and up to two hexadecimal ones.
    fn escape(&mut self) -> Result<Vec<u8>, Failure> {
        let position = self.text.position();
        let digits = |length: usize, radix: u32, rest: &str| -> String {
            rest.chars().take(length).take_while(|digit| digit.is_digit(radix)).collect()
        };
        let octal = digits(3, 8, self.text.rest());
        let (text, radix) = match self.text.rest().strip_prefix(['x', 'X']) {
            Some(rest) => (digits(2, 16, rest), 16),
            None => (octal, 8),
        };
        if let Ok(byte) = u8::from_str_radix(&text, radix) {
            self.text.take(text.len() + usize::from(radix == 16));
            return Ok(vec![byte]);
        }
        let byte = match self.text.advance() {
            Some('a') => 0x07,
            Some('b') => 0x08,
            Some('f') => 0x0c,
            Some('n') => b'\n',
            Some('r') => b'\r',
            Some('t') => b'\t',
            Some('v') => 0x0b,
            Some('\\') => b'\\',
            Some('\'') => b'\'',
            Some('"') => b'"',
            Some('?') => b'?',
            _ => {
                return Err(position.refuse("an escape is not known; expected one of abfnrtv\\'\"?, octal digits or x"));
            }
        };
        Ok(vec![byte])
    }
}

impl Display for ConfigToken<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(text) => write!(formatter, "{text:?}"),
            Self::Quoted(bytes) => write!(formatter, "the string \"{}\"", bytes.escape_ascii()),
            Self::Symbol(symbol) => write!(formatter, "{symbol:?}"),
            Self::End => formatter.write_str("the end"),
        }
    }
}

/// An expected form that does not depend on the found word.
fn always(expected: &'static str) -> impl Fn(&str) -> String {
    move |_| expected.to_owned()
}

fn known(schema: &'static Schema, name: &str) -> Result<&'static Field, String> {
    schema.fields.iter().find(|field| field.name == name).ok_or_else(|| {
        let near = || suggestion(name, schema.fields.iter().map(|field| field.name));
        let near = remedy(name).unwrap_or_else(near);
        format!("field {name:?} is not known in {}; expected one of {}{near}", schema.name, schema.names())
    })
}

/// Bytes of the next name or number. A sign belongs to a number's exponent.
fn plain_length(text: &str) -> usize {
    let is_number = text.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    let mut before = ' ';
    for (index, character) in text.char_indices() {
        let is_sign = is_number && matches!((before, character), ('e' | 'E', '+' | '-'));
        if !is_sign && !character.is_ascii_alphanumeric() && !matches!(character, '_' | '.') {
            return index;
        }
        before = character;
    }
    text.len()
}

/// Decimal, with or without the `f` of the text form; `inf`, `infinity` and `nan` in any case.
fn to_double(text: &str) -> Option<f64> {
    let is_number = text.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    let digits = if is_number { text.trim_end_matches(['f', 'F']) } else { text };
    digits.parse().ok()
}

fn to_bool(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "t" | "1" => Some(true),
        "false" | "False" | "f" | "0" => Some(false),
        _ => None,
    }
}

/// Decimal, or hexadecimal after `0x`. A leading zero would mean octal in protobuf and decimal to a reader: refused.
fn to_uint32(text: &str) -> Option<u32> {
    to_uint64(text).and_then(|value| u32::try_from(value).ok())
}

fn to_uint64(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text.len() > 1 && text.starts_with('0') => None,
        None => text.parse().ok(),
    }
}

fn push_character(bytes: &mut Vec<u8>, character: char) {
    bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
}

fn push_delimited(binary: &mut Vec<u8>, value: &[u8]) {
    push_varint(binary, value.len() as u64);
    binary.extend_from_slice(value);
}

/// Appends a varint.
fn push_varint(binary: &mut Vec<u8>, mut value: u64) {
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            return binary.push(low);
        }
        binary.push(low | 0x80);
    }
}
