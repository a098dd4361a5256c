//! Path of a model that a trainer asks to save: unchecked input, until validated.

use std::fmt;

use super::storage::parent;
use crate::error::Failure;

/// The longest path a trainer may name.
pub const PATH_BYTES_MAX: usize = 1024;
/// The longest name between two slashes, which is what Linux file systems take, less room for [`PARTIAL`].
pub const COMPONENT_BYTES_MAX: usize = 255 - PARTIAL.len();
/// The suffix of a file's name until the file is complete.
pub const PARTIAL: &str = ".partial";

const EXPECTED: &str = "expected a path below the model directory, such as \"run-7/model.safetensors\"; the setting \
     --model-dir (PSERVER_MODEL_DIR) of server 0 chooses that directory";

/// A path that stays inside the model directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelPath(String);

impl ModelPath {
    /// Checks a path. Refused are the empty one, absolute ones, ones with `.` or `..` or nothing between two
    /// slashes, with a control character, too long ones, and names that end as unfinished files do.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        match fault(text) {
            None => Ok(Self(text.to_owned())),
            Some(fault) => {
                let shown: String = text.chars().take(80).collect();
                Err(Failure::Call(format!("the model path {shown:?} {fault}; {EXPECTED}")))
            }
        }
    }

    /// The path.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The directory that it is in; empty for the model directory itself.
    #[must_use]
    pub fn directory(&self) -> &str {
        parent(&self.0)
    }
}

impl fmt::Display for ModelPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

fn fault(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("is empty".to_owned());
    }
    if text.len() > PATH_BYTES_MAX {
        return Some(format!("is {} bytes long and at most {PATH_BYTES_MAX} are allowed", text.len()));
    }
    if let Some(control) = text.chars().find(|character| character.is_control()) {
        return Some(format!("holds the control character {control:?}"));
    }
    if text.starts_with('/') {
        return Some("is absolute".to_owned());
    }
    text.split('/').find_map(component_fault)
}

fn component_fault(component: &str) -> Option<String> {
    match component {
        "" => Some("has an empty name between, before or after its slashes".to_owned()),
        "." => Some("holds \".\"".to_owned()),
        ".." => Some("holds \"..\"".to_owned()),
        long if long.len() > COMPONENT_BYTES_MAX => {
            Some(format!("holds a name of {} bytes and at most {COMPONENT_BYTES_MAX} are allowed", long.len()))
        }
        partial if partial.ends_with(PARTIAL) => Some(format!("holds a name that ends in {PARTIAL:?}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, refusal: Option<&str>) {
        match (ModelPath::parse(path), refusal) {
            (Ok(parsed), None) => assert_eq!(parsed.as_str(), path),
            (Err(Failure::Call(text)), Some(refusal)) => {
                assert!(text.contains(refusal), "{path:?}: expected {refusal:?} in {text:?}");
                assert!(text.contains(EXPECTED), "{path:?}: {text:?} does not say what is expected");
            }
            (found, expected) => panic!("{path:?}: expected {expected:?}, found {found:?}"),
        }
    }

    #[test]
    fn a_path_inside_the_model_directory_is_taken() {
        for path in ["model.safetensors", "run-7/step 100/m", "..model", "a/...", "ein/größeres/Modell", "a\\b", "~x"]
        {
            check(path, None);
        }
        check(&vec!["d"; 512].join("/"), None);
        check(&"x".repeat(COMPONENT_BYTES_MAX), None);
    }

    #[test]
    fn a_path_that_could_leave_or_confuse_is_refused_and_says_why() {
        check("", Some("is empty"));
        check("/etc/passwd", Some("is absolute"));
        check("//server/share", Some("is absolute"));
        check("..", Some("holds \"..\""));
        check("a/../../b", Some("holds \"..\""));
        check("./model", Some("holds \".\""));
        check("a//b", Some("empty name"));
        check("model/", Some("empty name"));
        check("a\0b", Some("control character '\\0'"));
        check("a\nb", Some("control character '\\n'"));
        check("a\u{7f}", Some("control character"));
        check("model.partial", Some("ends in \".partial\""));
        check("run/saving-0123456789abcdef.partial", Some("ends in \".partial\""));
        check(&"x".repeat(256), Some("a name of 256 bytes"));
        check(&vec!["dd"; 400].join("/"), Some("is 1199 bytes long"));
    }
}
