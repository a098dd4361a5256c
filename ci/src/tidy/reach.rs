//! Access to the system by floor: clocks, threads, the disk, the environment, raw memory.

use crate::tidy::Report;
use crate::tidy::source::{NamedPath, SourceFile};

/// Something of the world that `core` and `program` do not touch.
struct Ban {
    path: &'static [&'static str],
    reason: &'static str,
    /// Files under these may; a prefix, so that `storage.rs` and `storage/` are one door.
    doors: &'static [&'static str],
    tests_may: bool,
}

const CLOCK: &str = "time is an argument: take a core::time::Now";
const DISK: &str = "the disk has one door: core::checkpoint::storage";
const STORAGE: &[&str] = &["core/src/checkpoint/storage"];

const BANS: &[Ban] = &[
    Ban { path: &["std", "time", "Instant"], reason: CLOCK, doors: &[], tests_may: false },
    Ban { path: &["std", "time", "SystemTime"], reason: CLOCK, doors: &[], tests_may: false },
    Ban { path: &["time", "Instant"], reason: CLOCK, doors: &[], tests_may: false },
    Ban { path: &["time", "SystemTime"], reason: CLOCK, doors: &[], tests_may: false },
    Ban { path: &["std", "thread"], reason: "who runs a session chooses the thread", doors: &[], tests_may: true },
    Ban { path: &["std", "net"], reason: "sockets live in transport", doors: &[], tests_may: false },
    Ban {
        path: &["std", "process", "abort"],
        reason: "only core::memory stops the process",
        doors: &["core/src/memory"],
        tests_may: false,
    },
    Ban {
        path: &["std", "process"],
        reason: "a state machine starts and ends no process",
        doors: &[],
        tests_may: false,
    },
    Ban { path: &["std", "fs"], reason: DISK, doors: STORAGE, tests_may: true },
    Ban { path: &["cap_std"], reason: DISK, doors: STORAGE, tests_may: true },
];

/// Floors 0 to 3.
const BELOW_MAIN: &[&str] = &["core/src/", "transport/src/", "kernels/src/", "program/src/"];

/// Where raw memory, devices and C are.
const UNSAFE_DOORS: &[&str] = &[
    "core/src/memory",
    "transport/src/verbs",
    "kernels/src/cuda",
    "kernels/src/native/x86/raw",
    "client/src/cancels",
    "capi/src",
    "cli/src/commands",
    "cli/tests/fork",
    "python/src/arrays",
    "python/src/dlpack",
    "python/src/logs",
    "python/src/tensors",
    "bench/src/baseline/shared",
    // Compares the types of C functions.
    "ci/rdma-sys-check/src",
    // Counts what is allocated.
    "transport/tests/allocations",
    "transport/examples/false_ibverbs",
];

/// The rule: `core` and `program` have no outside.
pub(super) fn purity(file: &SourceFile, report: &mut Report<'_>) {
    if !["core/src/", "program/src/"].iter().any(|folder| file.path.starts_with(folder)) {
        return;
    }
    for path in file.paths() {
        // The first ban that fits decides, so a door in a narrow one stands before a wide one.
        let Some(ban) = BANS.iter().find(|ban| leads_to(&path, ban.path)) else { continue };
        let is_open = stands_in(file, ban.doors) || ban.tests_may && file.is_test(path.line);
        if !is_open {
            report.refuse(path.line, format!("{}: {}", path.parts.join("::"), ban.reason));
        }
    }
}

/// The rule: only programs read the environment.
pub(super) fn environment(file: &SourceFile, report: &mut Report<'_>) {
    if !BELOW_MAIN.iter().any(|folder| file.path.starts_with(folder)) {
        return;
    }
    for path in file.paths() {
        if leads_to(&path, &["std", "env"]) && !file.is_test(path.line) {
            let name = path.parts.join("::");
            report.refuse(path.line, format!("{name}: no environment below main; take it as an argument"));
        }
    }
}

/// The rule: `unsafe` only behind its doors, and each block argued that a person wrote.
pub(super) fn unsafety(file: &SourceFile, report: &mut Report<'_>) {
    for (at, token) in file.tokens.iter().enumerate().filter(|(_, token)| token.text == "unsafe") {
        if !stands_in(file, UNSAFE_DOORS) {
            report.refuse(token.line, format!("unsafe lives only in {}", UNSAFE_DOORS.join(", ")));
        } else if matches!(file.token(at + 1), "{" | "impl") && !file.is_generated() && !is_argued(file, token.line) {
            report.refuse(token.line, "no `// SAFETY:` comment says which fact makes this sound");
        }
    }
}

/// Files that print what only a test shows, besides those of tests: a wrapper for tests, and programs of `cargo bench`.
/// Cargo reads what a build script prints.
const PRINTS: &[&str] = &["transport/src/fault", "bench/benches", "kernels/examples"];

/// The rule: a program does not panic where its output is closed or full.
pub(super) fn output(file: &SourceFile, report: &mut Report<'_>) {
    if !file.is_rust() || file.path.ends_with("/build.rs") || stands_in(file, PRINTS) {
        return;
    }
    let is_macro = |at: usize| {
        matches!(file.token(at), "print" | "println" | "eprint" | "eprintln" | "dbg") && file.token(at + 1) == "!"
    };
    for (at, token) in file.tokens.iter().enumerate().filter(|(at, _)| is_macro(*at)) {
        if !file.is_test(token.line) {
            let name = file.token(at);
            report
                .refuse(token.line, format!("{name}! panics where the output is closed or full: use a console module"));
        }
    }
}

/// Whether `path` names the banned thing, something inside it, or everything beside it with `*`.
fn leads_to(path: &NamedPath, banned: &[&str]) -> bool {
    for (index, wanted) in banned.iter().enumerate() {
        match path.parts.get(index).map(String::as_str) {
            Some("*") => return true,
            Some(part) if part == *wanted => {}
            _ => return false,
        }
    }
    true
}

/// Whether the file is a door or in one: `core/src/memory` is `memory.rs` and `memory/…`, but not `memory_map.rs`.
fn stands_in(file: &SourceFile, doors: &[&str]) -> bool {
    let rests = doors.iter().filter_map(|door| file.path.strip_prefix(door));
    rests.into_iter().any(|rest| rest.starts_with(['/', '.']))
}

/// Whether a `SAFETY:` comment stands on the line, or above the statement that holds it.
fn is_argued(file: &SourceFile, line: usize) -> bool {
    let argues = |line: usize| file.comment(line).contains("SAFETY:");
    let mut above = line - 1;
    // Up to where the statement begins.
    while is_unfinished(file.code(above)) {
        above -= 1;
    }
    let mut is_argued = argues(line);
    while !is_argued && file.code(above).trim().is_empty() && !file.comment(above).trim().is_empty() {
        is_argued = argues(above);
        above -= 1;
    }
    is_argued
}

fn is_unfinished(code: &str) -> bool {
    let code = code.trim_end();
    !code.is_empty() && !code.ends_with([';', '{', '}', ','])
}
