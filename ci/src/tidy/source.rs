//! One file as the rules see it: its text, its code, its comments, its tokens and the paths it names.

use crate::tidy::lexer::{self, is_word};

/// A file, parted once.
pub(super) struct SourceFile {
    /// From the root, with `/`.
    pub(super) path: String,
    pub(super) text: String,
    pub(super) tokens: Vec<Token>,
    code: Vec<String>,
    comments: Vec<String>,
    /// For each line, whether it belongs to a test.
    tests: Vec<bool>,
}

/// A word, `::`, or one other sign.
pub(super) struct Token {
    pub(super) text: String,
    pub(super) line: usize,
}

/// A path such as `crate::ids::PeerId`, also from the inside of `use crate::{ids::PeerId, limits}`.
pub(super) struct NamedPath {
    pub(super) parts: Vec<String>,
    pub(super) line: usize,
    /// How many modules written in this file stand around it.
    pub(super) inline_modules: usize,
    /// The name that a `pub use` gives it in this module; `*` for all names in it.
    pub(super) exported: Option<String>,
}

impl SourceFile {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let is_rust = path.ends_with(".rs");
        let parted = lexer::part(if is_rust { text } else { "" });
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let mut file = Self {
            path: path.to_owned(),
            text: text.to_owned(),
            tokens: tokens(&parted.code),
            code: lines(&parted.code),
            comments: lines(&parted.comments),
            tests: vec![is_test_file(path); text.lines().count()],
        };
        file.mark_tests();
        file
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether a program wrote it: it is called `bindings.rs`, and its first line says so. How its code looks and how
    /// it argues is that program's affair; where it may stand is not.
    pub(super) fn is_generated(&self) -> bool {
        self.path.ends_with("/bindings.rs") && self.text.starts_with("// @generated ")
    }

    /// Whether it is a page for people.
    pub(super) fn is_prose(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// The lines of a page outside of blocks of code between fences, with their numbers, counted from 1.
    pub(super) fn page_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_code = false;
        (1..).zip(self.text.lines()).filter(move |(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            !is_fence && !is_code
        })
    }

    /// Whether the line, counted from 1, belongs to a test.
    pub(super) fn is_test(&self, line: usize) -> bool {
        self.tests.get(line - 1).copied().unwrap_or(false)
    }

    /// The comment on a line, counted from 1; empty before the first and after the last.
    pub(super) fn comment(&self, line: usize) -> &str {
        line_of(&self.comments, line)
    }

    /// The code on a line, counted from 1; empty before the first and after the last.
    pub(super) fn code(&self, line: usize) -> &str {
        line_of(&self.code, line)
    }

    /// The token at `at`; empty after the last.
    pub(super) fn token(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.text)
    }

    /// Whether `texts` stand at `at`, one after the other.
    pub(super) fn stands(&self, at: usize, texts: &[&str]) -> bool {
        texts.iter().enumerate().all(|(offset, text)| self.token(at + offset) == *text)
    }

    /// Where the bracket that opens at `open` closes; the last token when it never does.
    pub(super) fn closing(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        for at in open..self.tokens.len() {
            match self.token(at) {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" if depth <= 1 => return at,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
        }
        self.tokens.len().saturating_sub(1)
    }

    /// The `{` that begins the body of the item at `at`; none when a `;` ends it first.
    pub(super) fn body(&self, mut at: usize) -> Option<usize> {
        while at < self.tokens.len() {
            match self.token(at) {
                "{" => return Some(at),
                ";" => return None,
                "(" | "[" => at = self.closing(at) + 1,
                _ => at += 1,
            }
        }
        None
    }

    /// Every path of two parts or more, except those of visibilities such as `pub(in crate::wire)`.
    pub(super) fn paths(&self) -> Vec<NamedPath> {
        let (mut paths, mut at, mut modules) = (Vec::new(), 0, Vec::new());
        while at < self.tokens.len() {
            modules.retain(|end| *end > at);
            if self.token(at) == "mod" && self.token(at + 2) == "{" {
                modules.push(self.closing(at + 2));
            }
            if self.stands(at, &["(", "in"]) {
                at = self.closing(at);
            }
            let begins = at == 0 || !matches!(self.token(at - 1), "::" | ".");
            if begins && self.is_name(at) {
                let first = paths.len();
                let start = at;
                at = self.path_tree(at, &[], modules.len(), &mut paths);
                if !self.is_reexport(start) {
                    paths[first..].iter_mut().for_each(|path| path.exported = None);
                }
            } else {
                at += 1;
            }
        }
        paths
    }

    /// Reads one path, or one branch of a `use` tree, and returns where it ends.
    fn path_tree(&self, mut at: usize, before: &[String], inline_modules: usize, paths: &mut Vec<NamedPath>) -> usize {
        let (mut parts, line) = (before.to_vec(), self.tokens[at].line);
        while self.is_name(at) {
            parts.push(self.token(at).to_owned());
            let goes_on = self.token(at + 1) == "::" && (self.is_name(at + 2) || self.token(at + 2) == "{");
            at += if goes_on { 2 } else { 1 };
            if !goes_on {
                break;
            }
        }
        if self.token(at) != "{" || self.token(at - 1) != "::" {
            if parts.len() > 1 {
                let own = parts.iter().rev().find(|part| *part != "self").cloned();
                let exported = if self.token(at) == "as" { Some(self.token(at + 1).to_owned()) } else { own };
                paths.push(NamedPath { parts, line, inline_modules, exported });
            }
            return at;
        }
        let end = self.closing(at);
        at += 1;
        while at < end {
            // A branch begins after `{` or `,`; what follows `as` is a new name and not a path.
            let begins = matches!(self.token(at - 1), "{" | ",");
            at = if begins && self.is_name(at) { self.path_tree(at, &parts, inline_modules, paths) } else { at + 1 };
        }
        end + 1
    }

    /// Whether the path at `at` belongs to a `pub use`, also one of limited visibility.
    fn is_reexport(&self, at: usize) -> bool {
        let before = |back: usize| at.checked_sub(back).map_or("", |at| self.token(at));
        before(1) == "use" && matches!(before(2), "pub" | ")")
    }

    fn is_name(&self, at: usize) -> bool {
        self.token(at) == "*" && at > 0 && matches!(self.token(at - 1), "::" | "{" | ",")
            || self.token(at).starts_with(is_word)
    }

    fn mark_tests(&mut self) {
        for at in 0..self.tokens.len() {
            if !self.stands(at, &["#", "[", "cfg", "(", "test", ")", "]"]) && !self.stands(at, &["#", "[", "test", "]"])
            {
                continue;
            }
            let first = self.tokens[at].line;
            let last = self.item_end(at);
            let lines = self.tests.iter_mut().take(last).skip(first - 1);
            lines.for_each(|is_test| *is_test = true);
        }
    }

    /// The last line of the item whose attribute stands at `at`.
    fn item_end(&self, at: usize) -> usize {
        let last = match self.body(at) {
            Some(open) => self.closing(open),
            None => (at..self.tokens.len()).find(|at| self.token(*at) == ";").unwrap_or(at),
        };
        self.tokens[last].line
    }
}

/// Test programs, `tests.rs`, and the conformance suites, which exist to be run by tests.
fn is_test_file(path: &str) -> bool {
    path.split('/').any(|part| matches!(part, "tests" | "tests.rs" | "conformance" | "conformance.rs"))
}

fn line_of(lines: &[String], line: usize) -> &str {
    line.checked_sub(1).and_then(|index| lines.get(index)).map_or("", String::as_str)
}

fn tokens(code: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for (index, text) in code.lines().enumerate() {
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                _ if is_word(first) => rest.find(|letter| !is_word(letter)).unwrap_or(rest.len()),
                _ if rest.starts_with("::") => 2,
                _ => first.len_utf8(),
            };
            tokens.push(Token { text: rest[..length].to_owned(), line: index + 1 });
            rest = rest[length..].trim_start();
        }
    }
    tokens
}
