//! Counts whose ceiling may only fall: names that two types share, names that the field does not know, structs of many
//! fields and functions of many parameters.

use std::collections::BTreeMap;

use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Report, Standing};

/// A struct of more fields has parts that deserve a name.
const FIELDS_MAX: usize = 12;
/// A function of more parameters, `self` not counted, takes a struct.
const PARAMETERS_MAX: usize = 5;
const ALLOW_FIELDS: &str = "// tidy: allow fields:";
const ALLOW_PARAMETERS: &str = "// tidy: allow parameters:";

/// Names that several types may have, each with its reason.
const SHARED_TYPES: &[(&str, &str)] = &[
    ("Args", "the arguments of a subcommand; each stands alone in the private module of its command"),
    (
        "GeneratedFunction",
        "the same type of kernels::native: one module has it where code is generated, the other elsewhere",
    ),
    ("Error", "the error of a module, written with the module's path"),
    ("Report", "the output of tidy's rules, of the virtual machines and of psbench, in private modules"),
];

/// Module names that the field does not know, the folder of the sources, and the field's name.
const OLD_MODULES: &[(&str, &str, &str)] = &[
    ("luck", "core/src", "prng"),
    ("narrow", "core/src", "narrowing"),
    ("halves", "core/src", "half_precision"),
    ("halves", "kernels/src", "half_precision"),
    ("gate", "core/src", "initialisation"),
    ("whole", "core/src", "grouped"),
    ("hall", "transport/src", "context"),
    ("mail", "transport/src", "credits"),
    ("flights", "transport/src", "in_flight"),
    ("meeting", "transport/src", "handshake"),
    ("post", "transport/src", "control"),
    ("outward", "transport/src", "send"),
    ("inward", "transport/src", "receive"),
    ("rough", "transport/src", "faulty"),
    ("plain", "transport/src", "software"),
    ("line", "transport/src", "connection"),
    ("seat", "kernels/src", "device_slot"),
    ("course", "kernels/src", "submission"),
    ("dealt", "client/src", "bucketize"),
    ("turns", "client/src", "contention"),
    ("beginnings", "trainer/src", "initial_values"),
    ("terms", "trainer/src", "sharing"),
    ("conduct", "cli/src", "runner"),
    ("family", "cli/src", "children"),
    ("lifeline", "cli/src", "parent_death"),
    ("straight", "bench/src", "baseline"),
    ("ours", "bench/src", "pserver"),
    ("carried", "bench/src", "counters"),
    ("contest", "bench/src", "comparison"),
    ("duel", "bench/src", "alternation"),
];

/// The rule: a module has the field's name.
pub(super) fn old_names(file: &SourceFile, report: &mut Report<'_>) {
    let mut parts: Vec<&str> = file.path.trim_end_matches(".rs").split('/').collect();
    if !file.is_rust() || file.path.ends_with("/mod.rs") && parts.pop().is_none() {
        return;
    }
    for (old, folder, new) in OLD_MODULES {
        if file.path.starts_with(&format!("{folder}/")) && parts.last() == Some(old) {
            report.count(1, format!("the module `{old}` is called `{new}` in the field"));
        }
    }
}

/// The rule: a struct has at most 12 fields, or a reason.
pub(super) fn fields(file: &SourceFile, report: &mut Report<'_>) {
    for at in 0..file.tokens.len() {
        if file.token(at) != "struct" || is_exempt(file, at) {
            continue;
        }
        let Some(open) = file.body(at) else { continue };
        let count = colons(file, open);
        if count > FIELDS_MAX && !is_allowed(file, file.tokens[at].line, ALLOW_FIELDS) {
            let text = format!("`{}` has {count} fields, at most {FIELDS_MAX} are read at once", file.token(at + 1));
            report.count(file.tokens[at].line, text);
        }
    }
}

/// The rule: a function has at most five parameters beside `self`, or a reason.
pub(super) fn parameters(file: &SourceFile, report: &mut Report<'_>) {
    for at in 0..file.tokens.len() {
        if file.token(at) != "fn" || file.token(at + 1) == "(" || is_exempt(file, at) {
            continue;
        }
        let Some(open) = (at..file.tokens.len()).find(|at| matches!(file.token(*at), "(" | "{" | ";")) else {
            continue;
        };
        let count = if file.token(open) == "(" { colons(file, open) } else { 0 };
        if count > PARAMETERS_MAX && !is_allowed(file, file.tokens[at].line, ALLOW_PARAMETERS) {
            let text =
                format!("`{}` has {count} parameters, at most {PARAMETERS_MAX} are read at once", file.token(at + 1));
            report.count(file.tokens[at].line, text);
        }
    }
}

/// The rule over all files: one name, one type. Each place of a name is a finding, but for the first.
pub(super) fn type_names(files: &[SourceFile]) -> Vec<Finding> {
    let mut places: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for file in files {
        for at in 0..file.tokens.len() {
            let is_type = matches!(file.token(at), "struct" | "enum" | "trait" | "union");
            let name = file.token(at + 1);
            if is_type && name.starts_with(char::is_uppercase) && !is_exempt(file, at) {
                places.entry(name).or_default().push((&file.path, file.tokens[at].line));
            }
        }
    }
    let is_shared = |name: &str| SHARED_TYPES.iter().any(|(shared, _)| *shared == name);
    let twice = places.into_iter().filter(|(name, places)| places.len() > 1 && !is_shared(name));
    let findings = twice.flat_map(|(name, places)| {
        let (first, first_line) = places[0];
        places.into_iter().skip(1).map(move |(path, line)| Finding {
            path: path.to_owned(),
            line,
            rule: "type-names",
            text: format!("`{name}` is also a type in {first}:{first_line}"),
            standing: Standing::Counted,
        })
    });
    findings.collect()
}

/// Tests may have small types of their own, and a generator has a shape of its own.
fn is_exempt(file: &SourceFile, at: usize) -> bool {
    file.is_generated() || file.is_test(file.tokens[at].line)
}

/// The fields or parameters within the bracket at `open`: each has one colon outside of further brackets.
fn colons(file: &SourceFile, open: usize) -> usize {
    let (end, mut at, mut count) = (file.closing(open), open + 1, 0);
    while at < end {
        match file.token(at) {
            "(" | "[" | "{" => at = file.closing(at),
            ":" => count += 1,
            _ => {}
        }
        at += 1;
    }
    count
}

/// Whether a reason stands on the line, or in the comments and attributes right above it.
fn is_allowed(file: &SourceFile, line: usize, marker: &str) -> bool {
    let has_reason = |line: usize| {
        let reason = file.comment(line).trim().strip_prefix(marker);
        reason.is_some_and(|reason| !reason.trim().is_empty())
    };
    let belongs = |line: &usize| {
        let code = file.code(*line).trim();
        code.starts_with("#[") || code.is_empty() && !file.comment(*line).trim().is_empty()
    };
    has_reason(line) || (1..line).rev().take_while(belongs).any(has_reason)
}
