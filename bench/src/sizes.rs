//! Sizes as people write them: `64MiB`, `4k`, `1e6`.

use anyhow::{Context, Result, ensure};
use pserver_core::text::number_and_unit;

/// The sizes that measurements are made at when nobody says otherwise.
pub(crate) const USUAL: &str = "4KiB,1MiB,4MiB,64MiB";

/// The sizes of `--all`, as perftest has them without the two that hold no element: every power of two from 4 bytes to
/// 8 MiB.
pub(crate) fn all() -> Vec<u64> {
    (2..=23).map(|power| 1 << power).collect()
}

/// Units and what they stand for. A lone `k`, `m` or `g` is binary, as in perftest and `dd`.
const UNITS: [(&str, u64); 13] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

/// Reads a size in bytes, or a count.
pub(crate) fn parse(text: &str) -> Result<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, unit) = number_and_unit(&lower, &UNITS);
    let expected = || format!("\"{text}\": not a size; expected a number and a unit, such as 4k, 64MiB or 1e6");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).with_context(expected);
    }
    let value = number.parse::<f64>().with_context(expected)? * unit as f64;
    // Beyond 2^53 a float cannot tell neighbours apart.
    ensure!((0.0..9e15).contains(&value) && value.fract() == 0.0, expected());
    format!("{value:.0}").parse().with_context(expected)
}

/// A size in the largest binary unit that divides it.
pub(crate) fn show(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

/// A length of memory of this process.
pub(crate) fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("sizes are checked against this machine's memory when they are read")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<u64>) {
        assert_eq!(parse(text).ok(), expected, "{text}");
    }

    #[test]
    fn sizes_are_parsed_with_their_units() {
        check("64MiB", Some(64 << 20));
        check("4k", Some(4096));
        check("1e6", Some(1_000_000));
        check("1.5 KiB", Some(1536));
        check("2GB", Some(2_000_000_000));
        check("17", Some(17));
        check("0", Some(0));
    }

    #[test]
    fn an_invalid_size_is_refused() {
        for text in ["", "MiB", "-1", "1.0001k", "ten", "1e30", "99999999TiB", "nan"] {
            check(text, None);
        }
    }

    #[test]
    fn sizes_are_shown_in_the_unit_that_divides_them() {
        assert_eq!(show(64 << 20), "64 MiB");
        assert_eq!(show(1536), "1536 B");
        assert_eq!(show(0), "0 B");
    }
}
