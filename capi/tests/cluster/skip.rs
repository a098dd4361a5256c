//! What was not run, said aloud and counted.

use std::io::Write;

/// Whether a test runs its whole size.
pub(crate) fn is_full() -> bool {
    is_set("PSERVER_FULL")
}

pub(crate) fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|text| text == "1")
}

/// Says that something was not tested. Where `PSERVER_SKIP_REPORT` names a file the line goes there too, and where
/// `PSERVER_REQUIRE` names the thing it was not allowed to be missing.
pub(crate) fn skip(what: &str, why: &str) {
    let required = std::env::var("PSERVER_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one.trim() == what), "{what} is required here: {why}");
    let line = format!("SKIPPED: {what}: {why}");
    println!("{line}");
    let Ok(report) = std::env::var("PSERVER_SKIP_REPORT") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&report);
    let written = file.and_then(|mut file| writeln!(file, "{line}"));
    written.unwrap_or_else(|error| panic!("the report of skipped tests, {report}: {error}"));
}
