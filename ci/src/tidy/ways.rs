//! Lists in pages of the functions that a gradient passes through, checked against the code.
//!
//! A list is numbered and stands below the heading `The way of a gradient, trainer` or `The way of a gradient, server`.
//! An item is a file, a function and a sentence: ``1. `a/b.rs`: `c`: takes the gradient.`` The end ``Queue: `d`.``
//! marks a function that puts the gradient into the queue `d`, from which a later function takes it.
//!
//! Every function is in its file. It is called by the function before it, or by one to which that function returns;
//! behind a queue no call is needed. A queue is named by the function that is marked and by a later one.

use crate::tidy::mentions::Repository;
use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Standing};

/// A list and its limits.
struct FunctionList {
    heading: &'static str,
    functions_max: usize,
    queues_max: usize,
    /// Whether the functions of a file follow each other, so that each file is read once.
    reads_files_once: bool,
}

const TRAINER: FunctionList = FunctionList {
    heading: "The way of a gradient, trainer",
    functions_max: 20,
    queues_max: 2,
    reads_files_once: false,
};
const SERVER: FunctionList = FunctionList {
    heading: "The way of a gradient, server",
    functions_max: usize::MAX,
    queues_max: usize::MAX,
    reads_files_once: true,
};

/// A line of a page, counted from 1, and what is wrong with it.
type Refusal = (usize, String);

/// An item of a list.
struct ListItem {
    /// Counted from 1.
    line: usize,
    text: String,
}

/// A function of a list.
struct ListedFunction<'a> {
    line: usize,
    file: &'a str,
    name: &'a str,
    queue: Option<&'a str>,
    /// The tokens of its body; of all functions of its name where the file has several.
    body: Vec<String>,
}

impl ListedFunction<'_> {
    fn calls(&self, function: &str) -> bool {
        self.body.windows(2).any(|pair| pair[0] == function && pair[1] == "(")
    }

    fn mentions(&self, word: &str) -> bool {
        self.body.iter().any(|token| token == word)
    }
}

/// The items of a page's lists that the code refutes.
pub(super) fn look(page: &str, text: &str, repository: &Repository) -> Vec<Finding> {
    let mut refusals = Vec::new();
    for list in [&TRAINER, &SERVER] {
        if let Some((heading, items)) = items(text, list.heading) {
            refusals.extend(check(list, heading, &items, repository));
        }
    }
    let finding =
        |(line, text)| Finding { path: page.to_owned(), line, rule: "ways", text, standing: Standing::Refused };
    refusals.into_iter().map(finding).collect()
}

fn check(list: &FunctionList, heading: usize, items: &[ListItem], repository: &Repository) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if items.is_empty() {
        refusals.push((heading, "expected a numbered list below this heading".to_owned()));
    }
    let mut functions = Vec::new();
    for item in items {
        match read(item, repository) {
            Ok(function) => functions.push(function),
            Err(text) => refusals.push((item.line, text)),
        }
    }
    let queues = functions.iter().filter(|one| one.queue.is_some()).count();
    for (found, most, what) in [(functions.len(), list.functions_max, "functions"), (queues, list.queues_max, "queues")]
    {
        if found > most {
            refusals.push((heading, format!("{found} {what}, at most {most}")));
        }
    }
    refusals.extend(missing_calls(&functions));
    refusals.extend(missing_queues(&functions));
    if list.reads_files_once {
        refusals.extend(repeated_files(&functions));
    }
    refusals
}

/// Functions that no function before them, of those that have not returned, calls.
fn missing_calls(functions: &[ListedFunction<'_>]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut running: Vec<&ListedFunction<'_>> = Vec::new();
    for (at, function) in functions.iter().enumerate() {
        let caller = running.iter().rposition(|before| before.calls(function.name));
        let is_behind_queue = at > 0 && functions[at - 1].queue.is_some();
        if caller.is_none() && at > 0 && !is_behind_queue {
            let text = format!("no function before it calls {} of {}", function.name, function.file);
            refusals.push((function.line, text));
        }
        running.truncate(caller.map_or(0, |caller| caller + 1));
        running.push(function);
    }
    refusals
}

/// Queues that are not named where the gradient enters them, or by no later function.
fn missing_queues(functions: &[ListedFunction<'_>]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for (at, function) in functions.iter().enumerate() {
        let Some(queue) = function.queue else { continue };
        if !function.mentions(queue) {
            refusals.push((function.line, format!("{} does not name the queue {queue}", function.name)));
        }
        if !functions[at + 1..].iter().any(|later| later.mentions(queue)) {
            refusals.push((function.line, format!("no later function names the queue {queue}")));
        }
    }
    refusals
}

/// Functions of a file whose other functions stand before those of another file.
fn repeated_files(functions: &[ListedFunction<'_>]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for (at, function) in functions.iter().enumerate() {
        let is_again = functions[..at].iter().any(|before| before.file == function.file);
        if is_again && functions[at - 1].file != function.file {
            refusals.push((function.line, format!("{} occurs again after other files", function.file)));
        }
    }
    refusals
}

/// The line of a heading and the items of the list below it; none for a page without the heading.
fn items(text: &str, heading: &str) -> Option<(usize, Vec<ListItem>)> {
    let is_heading = |line: &str| line.starts_with('#');
    let start = text.lines().position(|line| is_heading(line) && line.trim_start_matches(['#', ' ']) == heading)?;
    let mut items: Vec<ListItem> = Vec::new();
    for (index, line) in text.lines().enumerate().skip(start + 1) {
        if is_heading(line) {
            break;
        }
        let number = line.split_once(". ").map_or("", |(number, _)| number);
        if !number.is_empty() && number.chars().all(|digit| digit.is_ascii_digit()) {
            items.push(ListItem { line: index + 1, text: line.to_owned() });
        } else if let Some(item) = items.last_mut().filter(|_| line.starts_with("  ")) {
            item.text.push(' ');
            item.text.push_str(line.trim());
        }
    }
    Some((start + 1, items))
}

/// The function of an item, or the reason why it is none.
fn read<'a>(item: &'a ListItem, repository: &Repository) -> Result<ListedFunction<'a>, String> {
    let parts: Vec<&str> = item.text.split('`').collect();
    let [_, file, ": ", function, ..] = parts[..] else {
        return Err("expected a file and a function: `a/b.rs`: `c`".to_owned());
    };
    let name = function.rsplit("::").next().unwrap_or_default();
    let text = repository.source(file).ok_or_else(|| format!("there is no {file}"))?;
    let body = body(&SourceFile::new(file, text), name).ok_or_else(|| format!("{file} has no function {name}"))?;
    let queue = item.text.split_once("Queue: `").and_then(|(_, rest)| rest.split_once('`')).map(|(queue, _)| queue);
    Ok(ListedFunction { line: item.line, file, name, queue, body })
}

/// The tokens within the functions of this name, outside of tests.
fn body(file: &SourceFile, function: &str) -> Option<Vec<String>> {
    let mut body: Option<Vec<String>> = None;
    for at in 0..file.tokens.len() {
        let is_definition = file.stands(at, &["fn", function]) && !file.is_test(file.tokens[at].line);
        if let Some(open) = file.body(at).filter(|_| is_definition) {
            let tokens = file.tokens[open..file.closing(open)].iter().map(|token| token.text.clone());
            body.get_or_insert_default().extend(tokens);
        }
    }
    body
}
