//! Skips of tests without their hardware or tool (`docs/TESTING.md`, "Skips").

use std::fs::OpenOptions;
use std::io::Write;
use std::{env, io};

/// Says that something was not tested, and reports it.
///
/// # Panics
/// When it is required here, or the report cannot be written.
pub fn skip(what: &str, why: &str) {
    assert!(!is_required(what), "{what} is required here: {why}");
    let line = format!("SKIPPED: {what}: {why}\n");
    print!("{line}");
    let Some(report) = env::var_os("PSERVER_SKIP_REPORT") else { return };
    let file = OpenOptions::new().create(true).append(true).open(&report);
    let written: io::Result<()> = file.and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|error| panic!("the report of skipped tests, {}: {error}", report.display()));
}

/// Whether this must be there.
#[must_use]
pub fn is_required(what: &str) -> bool {
    names(&env::var("PSERVER_REQUIRE").unwrap_or_default(), what)
}

/// Whether a list, with commas and perhaps blanks around them, names this.
fn names(list: &str, what: &str) -> bool {
    list.split(',').any(|one| one.trim() == what)
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn required_resources_are_a_list_of_whole_names() {
        let check = |list, expected: [bool; 2]| assert_eq!(["cuda", "g++"].map(|what| names(list, what)), expected);
        check("", [false, false]);
        check("cuda", [true, false]);
        check("rdma, cuda\t,g++", [true, true]);
        check("cudas,no-cuda,g", [false, false]);
    }
}
