//! Calls of methods between the files of a package: edges that imports do not show.
//!
//! A type whose methods stand in many files needs no import to call from one into another. A call counts where the
//! type of its receiver is plain: `self` in an `impl`, or a variable with the name of a type, as `chunk` for `Chunk`.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::source::SourceFile;

/// A type's method.
type Method = (String, String);

/// An `impl` block of a type itself, by its tokens.
struct ImplBlock {
    type_name: String,
    begin: usize,
    end: usize,
}

/// The files that each file calls into, by their places in `files`, with the first line that does. All are of one
/// package.
pub(super) fn between(files: &[&SourceFile]) -> Vec<BTreeMap<usize, usize>> {
    let blocks: Vec<Vec<ImplBlock>> = files.iter().map(|file| impl_blocks(file)).collect();
    let mut owners: BTreeMap<Method, BTreeSet<usize>> = BTreeMap::new();
    for (at, file) in files.iter().enumerate() {
        for block in &blocks[at] {
            for method in methods(file, block) {
                owners.entry((block.type_name.clone(), method)).or_default().insert(at);
            }
        }
    }
    let types: BTreeMap<String, &str> = owners.keys().map(|(name, _)| (snake_case(name), name.as_str())).collect();
    let calls = |(at, file): (usize, &&SourceFile)| {
        let mut found = BTreeMap::new();
        for dot in 1..file.tokens.len() {
            let is_call = file.token(dot) == "." && file.token(dot + 2) == "(";
            if !is_call || file.is_test(file.tokens[dot].line) || (dot >= 2 && file.token(dot - 2) == ".") {
                continue;
            }
            let receiver = match file.token(dot - 1) {
                "self" => {
                    blocks[at].iter().find(|block| (block.begin..block.end).contains(&dot)).map(|one| &*one.type_name)
                }
                name => types.get(name).copied(),
            };
            let Some(receiver) = receiver else { continue };
            let to = owners.get(&(receiver.to_owned(), file.token(dot + 1).to_owned()));
            for to in to.into_iter().flatten().filter(|to| **to != at) {
                found.entry(*to).or_insert(file.tokens[dot].line);
            }
        }
        found
    };
    files.iter().enumerate().map(calls).collect()
}

/// The blocks of types, without those of traits.
fn impl_blocks(file: &SourceFile) -> Vec<ImplBlock> {
    let mut blocks = Vec::new();
    for at in 0..file.tokens.len() {
        if file.token(at) != "impl" || file.is_test(file.tokens[at].line) {
            continue;
        }
        let Some(open) = file.body(at) else { continue };
        let mut depth = 0_i32;
        let mut names = Vec::new();
        for head in at + 1..open {
            match file.token(head) {
                "<" => depth += 1,
                ">" => depth -= 1,
                "where" => break,
                word if depth == 0 => names.push(word),
                _ => {}
            }
        }
        if !names.contains(&"for")
            && let Some(name) = names.last()
        {
            blocks.push(ImplBlock { type_name: (*name).to_owned(), begin: open, end: file.closing(open) });
        }
    }
    blocks
}

/// The functions of a block that take `self`.
fn methods(file: &SourceFile, block: &ImplBlock) -> Vec<String> {
    let is_fn = |at: &usize| file.token(*at) == "fn";
    let takes_self = |at: &usize| {
        let open = (*at..block.end).find(|at| file.token(*at) == "(");
        open.is_some_and(|open| (open + 1..open + 5).any(|at| file.token(at) == "self"))
    };
    (block.begin..block.end).filter(is_fn).filter(takes_self).map(|at| file.token(at + 1).to_owned()).collect()
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}
