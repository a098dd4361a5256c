//! Which packages are linked into the installed files, and their licences in one text: each licence text once, below
//! the packages that carry it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::debian::succeed;
use crate::workspace::Workspace;

/// Beginnings of the names of files that have a licence.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];
/// The standard library is linked too; cargo does not list it.
const STANDARD_LIBRARY: &str = "The Rust standard library, MIT OR Apache-2.0, https://github.com/rust-lang/rust";

/// A package of others that is linked into the installed files.
pub(super) struct LinkedPackage {
    pub(super) name: String,
    pub(super) version: String,
    /// Its licence as an SPDX expression, where it names one.
    pub(super) licence: String,
    pub(super) repository: String,
    /// The identity that other packages have for it in cargo's metadata.
    pub(super) id: String,
    authors: String,
    folder: PathBuf,
}

/// The packages of this workspace that an installed tree has.
pub(crate) const INSTALLED: &[&str] = &["pserver-capi", "pserver"];
/// Those, and that of the wheel.
pub(crate) const RELEASED: &[&str] = &["pserver-capi", "pserver", "pserver-python"];

/// The packages that some of this workspace are linked with.
pub(super) struct Linked {
    /// Packages of others.
    pub(super) packages: Vec<LinkedPackage>,
    /// The identities of those of this workspace.
    pub(super) ours: BTreeSet<String>,
    /// Cargo's metadata of the workspace.
    pub(super) metadata: Value,
}

/// The packages that these of ours are linked with.
pub(super) fn linked(workspace: &Workspace, ours: &[&str]) -> Result<Linked> {
    let names = names(workspace, ours)?;
    let metadata = succeed(workspace.cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let (mut packages, mut ours) = (Vec::new(), BTreeSet::new());
    for package in metadata["packages"].as_array().context("cargo metadata has no packages")? {
        let string = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        if !names.contains(&format!("{} v{}", string("name"), string("version"))) {
            continue;
        }
        if package["source"].is_null() {
            ours.insert(string("id"));
            continue;
        }
        packages.push(LinkedPackage {
            name: string("name"),
            version: string("version"),
            // Cargo took a stroke for "or" once.
            licence: string("license").replace('/', " OR ").replace("  ", " "),
            repository: string("repository"),
            id: string("id"),
            authors: package["authors"].to_string(),
            folder: Path::new(&string("manifest_path")).parent().context("a manifest is in a folder")?.into(),
        });
    }
    Ok(Linked { packages, ours, metadata })
}

/// The text. A package without a file of a licence is named with its licence and authors.
pub(super) fn text(linked: &Linked) -> Result<String> {
    let mut by_text: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in &linked.packages {
        let LinkedPackage { name, version, licence, repository, authors, folder, .. } = package;
        let mut texts = texts(folder)?;
        if texts.is_empty() {
            texts.push(format!("No file with a licence. Authors: {authors}\n"));
        }
        for text in texts {
            by_text.entry(text).or_default().insert(format!("{name} {version}, {licence}, {repository}"));
        }
    }
    let mut all =
        format!("pserver is linked with these packages, under the licences that follow.\n\n{STANDARD_LIBRARY}\n");
    for (text, packages) in by_text {
        let names: Vec<String> = packages.into_iter().collect();
        write!(all, "\n{}\n{}\n\n{}\n", "=".repeat(80), names.join("\n"), text.trim_end())?;
    }
    Ok(all)
}

/// Name and version of each package that is linked, as cargo prints them. Procedural macros are not linked.
fn names(workspace: &Workspace, ours: &[&str]) -> Result<BTreeSet<String>> {
    let mut tree: Command = workspace.cargo();
    tree.args(["tree", "--locked", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}"]);
    let lines = succeed(tree.args(ours.iter().flat_map(|package| ["--package", package])))?;
    let name = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(lines.lines().filter(|line| !line.is_empty()).map(name).collect())
}

/// The texts of the licences in a package's folder, ordered by name.
fn texts(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let is_licence = |path: &&std::path::PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().to_uppercase()).unwrap_or_default();
        path.is_file() && NAMES.iter().any(|begin| name.starts_with(begin))
    };
    let read = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
    };
    paths.iter().filter(is_licence).map(read).collect()
}
