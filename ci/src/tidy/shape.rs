//! How code looks: lengths, names, and what has no place in a finished source.

use crate::tidy::Report;
use crate::tidy::source::SourceFile;

/// A function fits on a screen.
const FUNCTION_LINES_MAX: usize = 70;
/// Two files side by side fit on one too.
const LINE_COLUMNS_MAX: usize = 120;

/// A thing that has no noun does not yet have a place.
const EMPTY_NAMES: &[&str] = &["utils", "common", "helpers", "manager", "handler"];
const ALLOW_SLEEP: &str = "// tidy: allow sleep:";

/// The rule: a function has at most 70 lines, from the line of `{` to the line of `}`.
pub(super) fn function_length(file: &SourceFile, report: &mut Report<'_>) {
    if file.is_generated() {
        return;
    }
    for at in 0..file.tokens.len() {
        // After `fn` stands a name, in a macro `$name`, in a type `(`.
        if file.token(at) != "fn" || file.token(at + 1) == "(" {
            continue;
        }
        let Some(open) = file.body(at) else { continue };
        let lines = file.tokens[file.closing(open)].line - file.tokens[open].line + 1;
        if lines > FUNCTION_LINES_MAX {
            let text = format!("`{}` has {lines} lines, at most {FUNCTION_LINES_MAX} fit", file.token(at + 1));
            report.refuse(file.tokens[at].line, text);
        }
    }
}

/// The rule: no long line, no tab, no space at the end.
pub(super) fn layout(file: &SourceFile, report: &mut Report<'_>) {
    if !file.is_rust() || file.is_generated() {
        return;
    }
    for (index, text) in file.text.split('\n').enumerate() {
        let columns = text.chars().count();
        if columns > LINE_COLUMNS_MAX {
            report.refuse(index + 1, format!("{columns} columns, at most {LINE_COLUMNS_MAX} fit"));
        }
        if text.contains('\t') {
            report.refuse(index + 1, "a tab; write spaces, or \\t in a literal");
        }
        if text.ends_with(char::is_whitespace) {
            report.refuse(index + 1, "white space at the end of the line");
        }
    }
}

/// The rule: what is written for people has lines as long as code has. Tables, code, and what has no space to break at
/// are as long as they are.
pub(super) fn prose(file: &SourceFile, report: &mut Report<'_>) {
    if !file.is_prose() {
        return;
    }
    for (line, text) in file.page_lines() {
        let may_be_long = text.starts_with("    ") || text.starts_with('|');
        let columns = text.chars().count();
        if columns > LINE_COLUMNS_MAX && !may_be_long && text.trim().contains(' ') {
            report.refuse(line, format!("{columns} columns, at most {LINE_COLUMNS_MAX} fit; wrap it"));
        }
    }
}

/// The rule: no module is called `utils`, `cache_manager` and the like.
pub(super) fn names(file: &SourceFile, report: &mut Report<'_>) {
    if !file.is_rust() {
        return;
    }
    let is_empty = |name: &str| name.split(['_', '-']).any(|word| EMPTY_NAMES.contains(&word));
    let stem = file.path.trim_end_matches(".rs");
    for name in stem.split('/').filter(|name| is_empty(name)) {
        report.refuse(1, format!("`{name}` does not say what is in it"));
    }
    for at in 0..file.tokens.len() {
        if file.token(at) == "mod" && is_empty(file.token(at + 1)) {
            report.refuse(file.tokens[at].line, format!("`{}` does not say what is in it", file.token(at + 1)));
        }
    }
}

/// The rule: a test runs, or skips aloud.
pub(super) fn ignored_tests(file: &SourceFile, report: &mut Report<'_>) {
    let text = "a test that cannot run skips aloud; it is not ignored";
    for at in 0..file.tokens.len() {
        let attribute = file.stands(at, &["#", "["]).then(|| at + 2..file.closing(at + 1));
        let Some(mut inside) = attribute else { continue };
        let is_conditional = file.token(inside.start) == "cfg_attr";
        let is_ignored = file.token(inside.start) == "ignore";
        if is_ignored || is_conditional && inside.any(|at| file.token(at) == "ignore") {
            report.refuse(file.tokens[at].line, text);
        }
    }
    for line in 1..=file.text.lines().count() {
        let comment = file.comment(line).trim().trim_start_matches(['/', '!']).trim();
        if comment.strip_prefix("```").is_some_and(|flags| flags.split(',').any(|flag| flag.trim() == "ignore")) {
            report.refuse(line, text);
        }
    }
}

/// The rule: a test waits for an event, not for a while.
pub(super) fn sleeping_tests(file: &SourceFile, report: &mut Report<'_>) {
    for path in file.paths() {
        let sleeps = path.parts.ends_with(&["thread".to_owned(), "sleep".to_owned()]);
        if !sleeps || !file.is_test(path.line) {
            continue;
        }
        let reason = [path.line, path.line - 1].into_iter().find_map(|line| {
            let reason = file.comment(line).trim().strip_prefix(ALLOW_SLEEP)?.trim();
            (!reason.is_empty()).then(|| reason.to_owned())
        });
        match reason {
            Some(reason) => report.excuse(path.line, reason),
            None => {
                report.refuse(path.line, format!("a test sleeps; wait for the event, or write `{ALLOW_SLEEP} why`"))
            }
        }
    }
}
