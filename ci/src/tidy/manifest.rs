//! Rules for `Cargo.toml`: the workspace's lints, the workspace's versions, and dependencies on lower floors only.

use crate::tidy::source::SourceFile;
use crate::tidy::{Report, floors};

/// The rule, for the root and for every package.
pub(super) fn manifest(file: &SourceFile, report: &mut Report<'_>) {
    if file.path == "Cargo.toml" {
        for member in members(&file.text).iter().filter(|member| !floors::is_package(member)) {
            report.refuse(1, format!("the package `{member}` has no floor; give it one in ci/src/tidy/floors.rs"));
        }
    } else if let Some(folder) = file.path.strip_suffix("/Cargo.toml") {
        match file.text.lines().any(|line| line.trim() == "[workspace]") {
            true => apart(&file.text, report),
            false => package(folder, &file.text, report),
        }
    }
}

/// A package that is a workspace of its own inherits nothing, so it pins what it needs.
fn apart(text: &str, report: &mut Report<'_>) {
    let mut is_dependency = false;
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            is_dependency = line.trim().trim_matches(['[', ']']).ends_with("dependencies");
        } else if is_dependency
            && let Some((key, value)) = line.split_once('=')
            && !key.starts_with('#')
            && !value.trim().starts_with("\"=")
            && !value.contains("path =")
        {
            report.refuse(index + 1, format!("`{}` is not pinned; write \"=1.2.3\"", key.trim()));
        }
    }
}

/// The folders of the packages that a root manifest lists.
pub(super) fn members(text: &str) -> Vec<String> {
    let list = text.split_once("\nmembers").map_or("", |(_, rest)| rest.split_once(']').map_or("", |(list, _)| list));
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

fn package(folder: &str, text: &str, report: &mut Report<'_>) {
    let (mut section, mut inherits_lints) = (String::new(), false);
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            section = line.trim().trim_matches(['[', ']']).to_owned();
            if section.contains("dependencies.") {
                report.refuse(index + 1, "write a dependency on one line, `name.workspace = true`");
            }
        } else if section == "lints" && line.replace(' ', "") == "workspace=true" {
            inherits_lints = true;
        } else if section.ends_with("dependencies")
            && let Some((key, value)) = line.split_once('=')
        {
            dependency(folder, (index + 1, key.trim(), value), report);
        }
    }
    if !inherits_lints {
        report.refuse(1, "no `[lints] workspace = true`");
    }
}

fn dependency(folder: &str, (line, key, value): (usize, &str, &str), report: &mut Report<'_>) {
    let name = key.split('.').next().unwrap_or(key).trim_matches('"');
    let is_inherited = key.ends_with(".workspace") || value.replace(' ', "").contains("workspace=true");
    if !key.starts_with('#') && !is_inherited {
        report.refuse(line, format!("`{name}` has a version of its own; the root Cargo.toml holds versions"));
    }
    if let Some(reason) = floors::dependency_refusal(folder, name) {
        report.refuse(line, reason);
    }
}
