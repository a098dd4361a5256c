//! The rule for the wording of comments and pages: the subject of a sentence is a named thing.

use crate::tidy::Report;
use crate::tidy::source::SourceFile;

/// Words without a named thing behind them. A question may begin with them.
const UNNAMED: &[&str] = &["Who", "Whose", "Whoever", "What", "Whatever"];

/// The rule: no sentence of a comment or of a page begins with an unnamed subject, unless it is a question.
pub(super) fn sentences(file: &SourceFile, report: &mut Report<'_>) {
    if file.is_generated() {
        return;
    }
    let lines: Vec<String> = if file.is_prose() { prose(file) } else { comments(file) };
    for (at, line) in lines.iter().enumerate() {
        for (begin, word) in words(line) {
            let begins = begins_sentence(&line[..begin], at.checked_sub(1).map_or("", |before| lines[before].trim()));
            if UNNAMED.contains(&word) && begins && !is_question(&line[begin..], &lines[at + 1..]) {
                report.count(at + 1, format!("a sentence begins with `{word}`: name its subject"));
            }
        }
    }
}

/// The text of each line's comment, without its slashes; empty where the line has none, and in code within a comment.
fn comments(file: &SourceFile) -> Vec<String> {
    let lines = 1..=file.text.lines().count();
    let mut is_code = false;
    lines
        .map(|line| {
            let text = file.comment(line).trim().trim_start_matches(['/', '!', '*']).to_owned();
            let is_fence = text.trim_start().starts_with("```");
            is_code = !text.is_empty() && (is_code ^ is_fence);
            if is_code || is_fence { String::new() } else { text }
        })
        .collect()
}

/// The lines of a page; empty where they are code or a table.
fn prose(file: &SourceFile) -> Vec<String> {
    let mut lines = vec![String::new(); file.text.lines().count()];
    for (line, text) in file.page_lines().filter(|(_, text)| !text.starts_with("    ") && !text.starts_with('|')) {
        text.trim_start_matches(['-', '#', '>', ' ']).clone_into(&mut lines[line - 1]);
    }
    lines
}

/// Each word of a line and where it begins.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> {
    line.split(' ').map(move |word| {
        let begin = word.as_ptr() as usize - line.as_ptr() as usize;
        (begin, word.trim_end_matches([',', ':', ';', '.']))
    })
}

/// Whether a sentence ends at the end of `same`, the beginning of the line, or where that is empty at the end of the
/// line `above`.
fn begins_sentence(same: &str, above: &str) -> bool {
    let before = if same.trim().is_empty() { above } else { same.trim() };
    before.is_empty() || before.trim_end_matches(['`', '"', ')', '*']).ends_with(['.', '!', '?'])
}

/// Whether the sentence that begins with `rest`, and goes on in the lines that follow, ends with a question mark.
fn is_question(rest: &str, following: &[String]) -> bool {
    let following = following.iter().map(String::as_str).take_while(|line| !line.trim().is_empty());
    for line in std::iter::once(rest).chain(following) {
        let mut ends = line.match_indices(['.', '?', '!']).filter(|(at, mark)| {
            let after = line[at + mark.len()..].chars().next();
            after.is_none_or(|letter| letter.is_whitespace() || matches!(letter, '"' | ')' | '*'))
        });
        if let Some((_, mark)) = ends.next() {
            return mark == "?";
        }
    }
    false
}
