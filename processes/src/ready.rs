//! The line with which a process says that it is ready, and where: `ready ADDRESS`.

use std::fmt::Display;

const WORD: &str = "ready ";

/// The line, with its end.
pub fn line(address: impl Display) -> String {
    format!("{WORD}{address}\n")
}

/// The address in a line of a process, if it is the line.
#[must_use]
pub fn address_in(line: &str) -> Option<&str> {
    line.strip_prefix(WORD).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_is_written() {
        assert_eq!(address_in(&line("tcp://127.0.0.1:7164")), Some("tcp://127.0.0.1:7164"));
        assert_eq!(address_in("starting"), None);
        assert_eq!(address_in(" ready here"), None);
    }
}
