//! Cursor over text, with positions for error messages. The parsers of configuration, rules and programs share it.

pub mod lexer;

use std::borrow::Cow;
use std::fmt::Display;

use crate::error::Failure;

/// A position in a text, counted from one; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: u32,
    /// The character in its line.
    pub column: u32,
}

impl Position {
    /// An error at this position.
    #[must_use]
    pub fn refuse(self, reason: impl Display) -> Failure {
        self.refuse_in(None, reason)
    }

    /// An error at this position of a file.
    #[must_use]
    pub fn refuse_in(self, file: Option<&str>, reason: impl Display) -> Failure {
        Failure::call(format!("{}: {reason}", self.label(file)))
    }

    /// `FILE:LINE:COLUMN`, or `line LINE, column COLUMN` of a text without a file.
    #[must_use]
    pub fn label(self, file: Option<&str>) -> String {
        let Self { line, column } = self;
        file.map_or_else(|| format!("line {line}, column {column}"), |file| format!("{file}:{line}:{column}"))
    }
}

/// Characters of somebody's text that a line has room for.
const SHOWN_CHARACTERS_MAX: usize = 200;

/// A text of another process or of a user on one line: control characters as escapes, such as `\n` and `\u{1b}`, which
/// could begin a line or command a terminal.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let escape = |character: char| {
        let is_control = character.is_control();
        let (plain, escape) =
            if is_control { (None, Some(character.escape_default())) } else { (Some(character), None) };
        plain.into_iter().chain(escape.into_iter().flatten())
    };
    Cow::Owned(text.chars().flat_map(escape).collect())
}

/// The beginning of a text, [`escaped`], fit for a line.
#[must_use]
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS_MAX) {
        Some((end, _)) => format!("{}...", escaped(&text[..end])),
        None => escaped(text).into_owned(),
    }
}

/// The name nearest to a misspelt word, if at most a third of its letters differ, regardless of case.
#[must_use]
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let distances = names.into_iter().map(|name| (strsim::osa_distance(&word, &name.to_lowercase()), name));
    let (distance, name) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= (name.chars().count() / 3).max(1)).then_some(name)
}

/// The end of an error's text that proposes the [`nearest`] name; empty when none is near.
#[must_use]
pub fn suggestion<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, names).map_or_else(String::new, |name| format!("; the nearest is {name}"))
}

/// A size such as `64MiB` as the text of its number and the bytes of its unit: the first of `units` that ends it, or 1.
#[must_use]
pub fn number_and_unit<'a>(text: &'a str, units: &[(&str, u64)]) -> (&'a str, u64) {
    let mut found = units.iter().filter_map(|(unit, bytes)| Some((text.strip_suffix(unit)?.trim_end(), *bytes)));
    found.next().unwrap_or((text.trim_end(), 1))
}

/// The unread rest of a text.
#[derive(Clone, Debug)]
pub struct TextCursor<'a> {
    rest: &'a str,
    position: Position,
}

impl<'a> TextCursor<'a> {
    /// At the beginning of `text`.
    #[must_use]
    pub fn new(text: &'a str) -> Self {
        Self { rest: text, position: Position { line: 1, column: 1 } }
    }

    /// The unread rest.
    #[must_use]
    pub fn rest(&self) -> &'a str {
        self.rest
    }

    /// Its position.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// An error at this position.
    #[must_use]
    pub fn refuse(&self, reason: impl Display) -> Failure {
        self.position.refuse(reason)
    }

    /// The next character, without taking it.
    #[must_use]
    pub fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Takes the next character; none at the end.
    pub fn advance(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.rest = &self.rest[next.len_utf8()..];
        if next == '\n' {
            self.position = Position { line: self.position.line.saturating_add(1), column: 1 };
        } else {
            self.position.column = self.position.column.saturating_add(1);
        }
        Some(next)
    }

    /// Takes the next character when it is this one, and says whether it did.
    pub fn accept(&mut self, wanted: char) -> bool {
        let is_there = self.peek() == Some(wanted);
        if is_there {
            self.advance();
        }
        is_there
    }

    /// Takes `bytes` bytes, which end with a character.
    pub fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        while self.rest.len() > rest.len() {
            self.advance();
        }
        taken
    }

    /// Takes characters while `belongs` holds.
    pub fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        self.take(self.rest.find(|next| !belongs(next)).unwrap_or(self.rest.len()))
    }

    /// Takes white space and comments, which go from `#` to the end of their line.
    pub fn skip_blank(&mut self) {
        self.skip(char::is_whitespace);
    }

    /// Takes white space and comments up to the end of the line, without it.
    pub fn skip_blank_in_line(&mut self) {
        self.skip(|next| next != '\n' && next.is_whitespace());
    }

    fn skip(&mut self, is_blank: impl Fn(char) -> bool) {
        loop {
            match self.peek() {
                Some('#') => {
                    self.take_while(|next| next != '\n');
                }
                Some(next) if is_blank(next) => {
                    self.advance();
                }
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{TextCursor, nearest, number_and_unit};

    #[test]
    fn a_misspelt_word_is_near_to_one_name_or_to_none() {
        let check =
            |word, expected| assert_eq!(nearest(word, ["SGD", "Adagrad", "Adam", "trainers"]), expected, "{word}");
        check("Adma", Some("Adam"));
        check("adam", Some("Adam"));
        check("trainres", Some("trainers"));
        check("trainer", Some("trainers"));
        check("lion", None);
        check("", None);
        assert_eq!(nearest("a", []), None);
    }

    #[test]
    fn the_first_unit_that_fits_ends_a_size() {
        let check = |text, expected| assert_eq!(number_and_unit(text, &[("KiB", 1024), ("B", 1)]), expected);
        check("64 KiB", ("64", 1024));
        check("1.5B", ("1.5", 1));
        check("7", ("7", 1));
        check("7kib", ("7kib", 1));
    }

    /// Compares a cursor's position and rest after `bytes` of `text` and the blanks behind them.
    fn check(text: &str, bytes: usize, is_lines: bool, expected: (u32, u32, &str)) {
        let mut cursor = TextCursor::new(text);
        assert_eq!(cursor.take(bytes), &text[..bytes]);
        if is_lines {
            cursor.skip_blank_in_line()
        } else {
            cursor.skip_blank()
        }
        let position = cursor.position();
        assert_eq!((position.line, position.column, cursor.rest()), expected, "{text:?}");
    }

    #[test]
    fn a_position_counts_lines_and_characters_from_one() {
        check("", 0, false, (1, 1, ""));
        check("ab", 2, false, (1, 3, ""));
        check("a\nb", 2, false, (2, 1, "b"));
        check("\u{e9}\u{1f642}x", 6, false, (1, 3, "x"));
        check("\n\n  x", 0, false, (3, 3, "x"));
    }

    #[test]
    fn blanks_and_comments_are_skipped_and_a_line_keeps_its_end() {
        check("a # b\n c", 1, false, (2, 2, "c"));
        check("a # b\n c", 1, true, (1, 6, "\n c"));
        check("# only", 0, false, (1, 7, ""));
        check("# a\n# b\n", 0, false, (3, 1, ""));
        check("\u{a0}\tx", 0, true, (1, 3, "x"));
    }

    #[test]
    fn a_cursor_takes_the_matching_characters_and_leaves_the_next() {
        let mut cursor = TextCursor::new("12ab");
        assert_eq!(cursor.take_while(|next| next.is_ascii_digit()), "12");
        assert!(!cursor.accept('b'));
        assert!(cursor.accept('a'));
        assert_eq!((cursor.peek(), cursor.rest()), (Some('b'), "b"));
        assert_eq!(cursor.refuse("no").to_string(), "line 1, column 4: no");
        assert_eq!((cursor.advance(), cursor.advance()), (Some('b'), None));
    }
}
