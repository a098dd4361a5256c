//! Parts a Rust source into code and comments, so that a rule never mistakes a string for code.

/// The same text twice, line for line and column for column: once with only its code, once with only its comments.
/// Everything else is spaces. A literal or a lifetime begins with `"` in the code and is otherwise blank.
pub(super) struct Parted {
    pub(super) code: String,
    pub(super) comments: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Code,
    Comment,
    Literal,
}

struct Lexer {
    text: Vec<char>,
    at: usize,
    parted: Parted,
}

/// Parts `text`. An unfinished string or comment reaches to the end.
pub(super) fn part(text: &str) -> Parted {
    let parted = Parted { code: String::new(), comments: String::new() };
    let mut lexer = Lexer { text: text.chars().collect(), at: 0, parted };
    while lexer.at < lexer.text.len() {
        let (length, kind) = lexer.next();
        lexer.take(length, kind);
    }
    lexer.parted
}

pub(super) fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

impl Lexer {
    fn next(&self) -> (usize, TextKind) {
        match (self.peek(0), self.peek(1)) {
            ('/', '/') => (self.count(0, |letter| letter != '\n'), TextKind::Comment),
            ('/', '*') => (self.block_comment(), TextKind::Comment),
            ('"', _) => (self.string(), TextKind::Literal),
            ('\'', _) => (self.quote(), TextKind::Literal),
            (first, _) if is_word(first) => self.word(),
            _ => (1, TextKind::Code),
        }
    }

    /// A word, or the raw string whose prefix it is.
    fn word(&self) -> (usize, TextKind) {
        let length = self.count(0, is_word);
        let word: String = self.text[self.at..self.at + length].iter().collect();
        let hashes = self.count(length, |letter| letter == '#');
        if matches!(word.as_str(), "r" | "br" | "cr") && self.peek(length + hashes) == '"' {
            return (self.raw_string(length, hashes), TextKind::Literal);
        }
        (length, TextKind::Code)
    }

    fn raw_string(&self, prefix: usize, hashes: usize) -> usize {
        let mut length = prefix + hashes + 1;
        while !self.ends(length) {
            length += 1;
            if self.peek(length - 1) == '"' && self.count(length, |letter| letter == '#') >= hashes {
                return length + hashes;
            }
        }
        length
    }

    fn string(&self) -> usize {
        let mut length = 1;
        while !self.ends(length) && self.peek(length) != '"' {
            length += if self.peek(length) == '\\' { 2 } else { 1 };
        }
        length + 1
    }

    /// A character, or a lifetime when no quote closes it.
    fn quote(&self) -> usize {
        if self.peek(1) == '\\' {
            return 4 + self.count(3, |letter| letter != '\'');
        }
        if self.peek(2) == '\'' { 3 } else { 1 + self.count(1, is_word) }
    }

    fn block_comment(&self) -> usize {
        let (mut length, mut depth) = (2, 1);
        while depth > 0 && !self.ends(length) {
            match (self.peek(length), self.peek(length + 1)) {
                ('/', '*') => (length, depth) = (length + 2, depth + 1),
                ('*', '/') => (length, depth) = (length + 2, depth - 1),
                _ => length += 1,
            }
        }
        length
    }

    fn take(&mut self, length: usize, kind: TextKind) {
        let end = (self.at + length).min(self.text.len());
        for index in self.at..end {
            let letter = self.text[index];
            let opens_literal = kind == TextKind::Literal && index == self.at;
            let (code, comment) = match kind {
                _ if letter == '\n' => ('\n', '\n'),
                _ if opens_literal => ('"', ' '),
                TextKind::Code => (letter, ' '),
                TextKind::Comment => (' ', letter),
                TextKind::Literal => (' ', ' '),
            };
            self.parted.code.push(code);
            self.parted.comments.push(comment);
        }
        self.at = end;
    }

    fn peek(&self, ahead: usize) -> char {
        self.text.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn ends(&self, ahead: usize) -> bool {
        self.at + ahead >= self.text.len()
    }

    fn count(&self, from: usize, wanted: impl Fn(char) -> bool) -> usize {
        self.text.iter().skip(self.at + from).take_while(|letter| wanted(**letter)).count()
    }
}
