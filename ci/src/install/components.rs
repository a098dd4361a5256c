//! The list of what is linked into the installed files, in the JSON form of CycloneDX 1.5 (an SBOM).
//!
//! It has no time and no serial number: the same sources have the same list.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::VERSION;
use super::licences::{Linked, LinkedPackage};
use crate::debian::succeed;
use crate::workspace::Workspace;

/// The packages of this workspace that are installed, together.
const OURS: &str = "pkg:generic/pserver";

/// The list of what packages of ours are linked with, and of more components, as text.
pub(super) fn text(workspace: &Workspace, linked: &Linked, more: &[Value]) -> Result<String> {
    let lock = std::fs::read_to_string(workspace.root().join("Cargo.lock")).context("Cargo.lock")?;
    let mut list = list(linked, &checksums(&lock));
    let compiler = succeed(Command::new("rustc").arg("--version"))?;
    let standard = json!({
        "type": "library", "bom-ref": "pkg:generic/rust-std", "name": "rust-std", "version": compiler.trim(),
        "licenses": [{ "expression": "MIT OR Apache-2.0" }],
        "externalReferences": [{ "type": "vcs", "url": "https://github.com/rust-lang/rust" }],
    });
    if let Some(components) = list["components"].as_array_mut() {
        components.extend(more.iter().chain([&standard]).cloned());
    }
    Ok(serde_json::to_string_pretty(&list).context("JSON")? + "\n")
}

fn list(linked: &Linked, checksums: &BTreeMap<(&str, &str), &str>) -> Value {
    let Linked { packages, ours: own, metadata } = linked;
    let components: Vec<Value> = packages.iter().map(|package| component(package, checksums)).collect();
    let known: BTreeMap<&str, String> = packages.iter().map(|package| (&*package.id, purl(package))).collect();
    let ours = format!("{OURS}@{VERSION}");
    // All packages of ours are one component, which depends on what any of them does.
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for node in metadata["resolve"]["nodes"].as_array().into_iter().flatten() {
        let id = node["id"].as_str().unwrap_or_default();
        let Some(from) = known.get(id).cloned().or(own.contains(id).then(|| ours.clone())) else { continue };
        // A dependency of tests or of the build has another kind than null.
        let is_linked =
            |one: &&Value| one["dep_kinds"].as_array().is_some_and(|all| all.iter().any(|kind| kind["kind"].is_null()));
        let to = node["deps"].as_array().into_iter().flatten().filter(is_linked);
        let to = to.filter_map(|one| known.get(one["pkg"].as_str()?).cloned());
        edges.entry(from).or_default().extend(to);
    }
    let dependencies: Vec<Value> = edges.iter().map(|(from, to)| json!({ "ref": from, "dependsOn": to })).collect();
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application", "bom-ref": ours, "name": "pserver", "version": VERSION, "purl": ours,
            "licenses": [{ "expression": "Apache-2.0" }],
        } },
        "components": components,
        "dependencies": dependencies,
    })
}

fn component(package: &LinkedPackage, checksums: &BTreeMap<(&str, &str), &str>) -> Value {
    let LinkedPackage { name, version, licence, repository, .. } = package;
    let purl = purl(package);
    let mut found = json!({
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required",
    });
    if !licence.is_empty() {
        found["licenses"] = json!([{ "expression": licence }]);
    }
    if let Some(checksum) = checksums.get(&(&**name, &**version)) {
        found["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    if !repository.is_empty() {
        found["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    found
}

fn purl(package: &LinkedPackage) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

/// The SHA-256 of each package's archive, by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let of = |entry| {
        let value = |key: &str| {
            let mut lines = str::lines(entry);
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'))
        };
        Some(((value("name")?, value("version")?), value("checksum")?))
    };
    lock.split("[[package]]").filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::licences::{RELEASED, linked};

    #[test]
    fn every_linked_package_has_its_licence_its_checksum_and_its_place() {
        let workspace = Workspace::of_this_program();
        let linked = linked(&workspace, RELEASED).expect("cargo knows them");
        let list = text(&workspace, &linked, &[]).expect("cargo knows them");
        let list: Value = serde_json::from_str(&list).expect("it is JSON");
        let components = list["components"].as_array().expect("components");
        assert!(components.len() > 50, "{}", components.len());
        for one in components {
            assert!(one["licenses"][0]["expression"].is_string(), "{one}");
            if one["name"] == "rust-std" {
                continue;
            }
            assert_eq!(one["hashes"][0]["content"].as_str().map(str::len), Some(64), "{one}");
        }
        let names: BTreeSet<&str> = components.iter().filter_map(|one| one["bom-ref"].as_str()).collect();
        assert_eq!(names.len(), components.len(), "a reference is there twice");
        for linked in ["pkg:cargo/tokio@", "pkg:cargo/pyo3@"] {
            assert!(names.iter().any(|name| name.starts_with(linked)), "{linked}");
        }
        assert!(!names.iter().any(|name| name.starts_with("pkg:cargo/proptest@")), "tests are not linked");
        let dependencies = list["dependencies"].as_array().expect("dependencies");
        let referred = dependencies.iter().flat_map(|one| one["dependsOn"].as_array().into_iter().flatten());
        assert!(referred.filter_map(Value::as_str).all(|name| names.contains(name)));
    }
}
