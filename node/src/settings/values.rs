//! Parsers of settings. An error is the expected text.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::limits::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN};
use pserver_core::server::NonFinite;
use pserver_core::text::number_and_unit;
use pserver_core::wire::Address;

/// The shortest time a setting may name: below it a busy machine alone would let leases lapse.
const SECONDS_MIN: f64 = 0.1;
/// The longest: a year.
const SECONDS_MAX: f64 = 366.0 * 24.0 * 3600.0;

const OPTIMIZER_EXAMPLE: &str = "optimizer: Adam adam { } const_lr { learning_rate: 0.001 }";

/// A whole number within bounds that fit its type.
pub(super) fn whole<T: TryFrom<u64>>(least: u64, most: u64) -> impl Fn(&str) -> Result<T, String> {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number
            .and_then(|number: u64| T::try_from(number).ok())
            .ok_or_else(|| format!("a whole number from {least} to {most}"))
    }
}

/// Nothing for empty text.
pub(super) fn optional<T>(parse: impl Fn(&str) -> Result<T, String>) -> impl Fn(&str) -> Result<Option<T>, String> {
    move |text| if text.is_empty() { Ok(None) } else { parse(text).map(Some) }
}

pub(super) fn address(text: &str) -> Result<Address, String> {
    Address::parse(text).map_err(|failure| format!("an address ({failure})"))
}

/// An address that others connect to, so its port must be known.
pub(super) fn reachable(text: &str) -> Result<Address, String> {
    let address = address(text)?;
    if address.port == 0 { Err("an address with a port above 0".to_owned()) } else { Ok(address) }
}

/// A size of memory, such as `64MiB`.
///
/// # Errors
/// Names the expected form.
pub fn bytes(text: &str) -> Result<u64, String> {
    let bytes = whole_bytes(text, &[("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)]);
    bytes.filter(|bytes| 0 < *bytes).ok_or_else(|| "a size above 0, in bytes or with KiB, MiB or GiB".to_owned())
}

pub(super) fn chunk_bytes(text: &str) -> Result<u32, String> {
    let bytes = whole_bytes(text, &[("KiB", 1 << 10), ("MiB", 1 << 20)]).and_then(|bytes| u32::try_from(bytes).ok());
    let is_valid = |bytes: &u32| (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(bytes) && bytes.is_power_of_two();
    bytes.filter(is_valid).ok_or_else(|| {
        let (least, most) = (CHUNK_BYTES_MIN / 1024, CHUNK_BYTES_MAX / 1024 / 1024);
        format!("a power of two from {least}KiB to {most}MiB, in bytes or with KiB or MiB")
    })
}

fn whole_bytes(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let (number, unit) = number_and_unit(text, units);
    number.parse::<u64>().ok()?.checked_mul(unit)
}

pub(super) fn mode(text: &str, bound: u32) -> Result<Mode, String> {
    match text {
        "sync" => Ok(Mode::Sync),
        "async" => Ok(Mode::Async),
        "bounded" => Ok(Mode::Staleness { bound }),
        "delta" => Ok(Mode::Delta),
        _ => Err("one of sync, async, bounded, delta".to_owned()),
    }
}

pub(super) fn merge(text: &str) -> Result<Merge, String> {
    match text {
        "mean" => Ok(Merge::Mean),
        "sum" => Ok(Merge::Sum),
        _ => Err("one of mean, sum".to_owned()),
    }
}

pub(super) fn nonfinite(text: &str) -> Result<NonFinite, String> {
    match text {
        "refuse" => Ok(NonFinite::Refuse),
        "skip" => Ok(NonFinite::Skip),
        "accept" => Ok(NonFinite::Accept),
        _ => Err("one of refuse, skip, accept".to_owned()),
    }
}

pub(super) fn optimizer(text: &str) -> Result<String, String> {
    let checked = OptimizerSettings::from_text(text);
    checked.map_err(|failure| format!("an optimizer message ({failure}), such as {OPTIMIZER_EXAMPLE}"))?;
    Ok(text.to_owned())
}

pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() || text.contains('\0') { Err("a path".to_owned()) } else { Ok(PathBuf::from(text)) }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    seconds_from(SECONDS_MIN, text)
}

/// A time that may be zero.
pub(super) fn seconds_from_none(text: &str) -> Result<Duration, String> {
    seconds_from(0.0, text)
}

fn seconds_from(least: f64, text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (least..=SECONDS_MAX).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("a number of seconds from {least} to {SECONDS_MAX}"))
}

/// A value of a type with `FromStr`.
pub(super) fn plain<T: FromStr>(expected: &'static str) -> impl Fn(&str) -> Result<T, String> {
    move |text| text.parse().map_err(|_| expected.to_owned())
}

/// One of the words of an enumeration.
pub(super) fn word<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| {
        let values = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let words: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
        format!("one of {}", words.join(", "))
    })
}
