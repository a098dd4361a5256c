//! A rule's text from a file of this machine. Trainers and the quickstart open one; servers never do.

use std::fs;

use pserver_core::error::Failure;
use pserver_core::limits::RULE_TEXT_BYTES_MAX;

/// Reads a rule's file, which is looked at before it is read: it is an ordinary file, and not too long.
pub fn open(path: &str) -> Result<String, Failure> {
    let refuse = |reason: &dyn std::fmt::Display| Failure::call(format!("the rule's file {path:?}: {reason}"));
    let about = fs::metadata(path).map_err(|error| refuse(&error))?;
    if !about.is_file() {
        return Err(refuse(&"expected a file"));
    }
    let most = u64::try_from(RULE_TEXT_BYTES_MAX).expect("it is small");
    if about.len() > most {
        return Err(refuse(&format!("expected at most {most} bytes, found {}", about.len())));
    }
    fs::read_to_string(path).map_err(|error| refuse(&error))
}
