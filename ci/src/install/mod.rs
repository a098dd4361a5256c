//! `cargo ci install`, `cargo ci deb` and `cargo ci image`: the C library, the program, and the files by which
//! compilers, build systems, shells, clusters and people find them.
//!
//! Not here: the check of an installed prefix ([`crate::installed`]); why it is no tool of others
//! (`docs/decisions/install.md`). Read [`tree`] (which file is where), then [`binaries`], [`licences`],
//! [`components`], [`deb`] and [`image`].

mod binaries;
mod components;
pub(crate) mod deb;
pub(crate) mod image;
pub(crate) mod licences;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::debian::succeed;
use crate::workspace::{Tally, Workspace};

pub(crate) use binaries::{Binaries, remove_debug, symbols};

/// All packages of the workspace have one version.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The profile of installed files when none is asked for.
pub(crate) const PROFILE: &str = "dist";
/// The permissions of files and of programs.
const FILE_MODE: u32 = 0o644;
const PROGRAM_MODE: u32 = 0o755;
/// Where documents are below the prefix.
const DOCUMENTS: &str = "share/doc/pserver";
/// The list of components among them.
const COMPONENTS: &str = "components.cdx.json";
/// Headers, and the module that Fortran compilers read.
const HEADERS: [&str; 4] =
    ["paddle_pserver.h", "libpaddle_pserver_cclient.h", "paddle_pserver.hpp", "paddle_pserver.f90"];
/// Files that name the version: their templates in `capi/install`, and their places.
const TEMPLATES: [(&str, &str); 3] = [
    ("paddle_pserver.pc.in", "lib/pkgconfig/paddle_pserver.pc"),
    ("paddle_pserver-config.cmake.in", "lib/cmake/paddle_pserver/paddle_pserver-config.cmake"),
    ("paddle_pserver-config-version.cmake.in", "lib/cmake/paddle_pserver/paddle_pserver-config-version.cmake"),
];

/// The shared library's name without its version.
const LIBRARY: &str = "libpaddle_pserver.so";

/// The name that programs ask for. While the major version is 0, a new minor version may change the interface.
pub(crate) fn soname() -> String {
    format!("{LIBRARY}.{}", series())
}

/// Major and minor version.
fn series() -> &'static str {
    VERSION.rsplit_once('.').map_or(VERSION, |(series, _)| series)
}

/// The tool: builds with a profile, and installs below `DESTDIR` and the prefix.
pub(crate) fn run(workspace: &Workspace, prefix: &Path, profile: &str) -> Result<Tally> {
    let prefix = std::path::absolute(prefix).context("the prefix")?;
    let binaries = Binaries::of_profile(workspace, profile)?;
    let mut root = std::env::var_os("DESTDIR").unwrap_or_default();
    root.push(&prefix);
    into(workspace, &binaries, Path::new(&root))?;
    say!("installed in {}", Path::new(&root).display());
    Ok(Tally::of_step(true))
}

/// Installs below `root`. All files are made in a folder of the workspace before the first one is replaced.
pub(crate) fn into(workspace: &Workspace, binaries: &Binaries, root: &Path) -> Result<()> {
    let staged = workspace.root().join("target").join(format!("staged-{}", std::process::id()));
    let made = tree(workspace, binaries, &staged).and_then(|()| move_over(&staged, root));
    let _ = fs::remove_dir_all(&staged);
    made
}

/// Makes the whole tree in a new folder. No file in it names the folder, so the tree can be moved.
fn tree(workspace: &Workspace, binaries: &Binaries, root: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(root);
    libraries(workspace, binaries, root)?;
    let program = root.join("bin/pserver");
    copy(&binaries.program, &program, PROGRAM_MODE)?;
    binaries::strip_to_debug(&program, "--strip-all")?;
    for header in HEADERS {
        copy(&workspace.root().join("capi/include").join(header), &root.join("include").join(header), FILE_MODE)?;
    }
    for (template, place) in TEMPLATES {
        let text = fs::read_to_string(workspace.root().join("capi/install").join(template))
            .with_context(|| format!("cannot read {template}"))?;
        write(&root.join(place), &filled(&text))?;
    }
    // The manual and the completions are those of the program that is installed.
    succeed(Command::new(&binaries.program).arg("pages").arg(root.join("share")))?;
    let documents = root.join(DOCUMENTS);
    write_licences(workspace, licences::INSTALLED, &[], &documents.join(COMPONENTS))?;
    operators_files(workspace, &documents)?;
    examples(workspace, &documents.join("examples"))
}

/// Writes the list of what these packages of ours are linked with, and of more components, and beside it our licence
/// and theirs.
pub(crate) fn write_licences(workspace: &Workspace, ours: &[&str], more: &[Value], list: &Path) -> Result<()> {
    let linked = licences::linked(workspace, ours)?;
    copy(&workspace.root().join("LICENSE"), &list.with_file_name("LICENSE"), FILE_MODE)?;
    write(&list.with_file_name("THIRD-PARTY-LICENCES"), &licences::text(&linked)?)?;
    write(list, &components::text(workspace, &linked, more)?)
}

/// Files for those who run servers: unit, manifests, dashboard and pages.
fn operators_files(workspace: &Workspace, documents: &Path) -> Result<()> {
    for folder in ["deploy", "docs"] {
        for entry in fs::read_dir(workspace.root().join(folder)).with_context(|| format!("cannot list {folder}"))? {
            let path = entry.with_context(|| format!("cannot list {folder}"))?.path();
            if path.is_file() {
                let name = path.file_name().context("a file has a name")?;
                copy(&path, &documents.join(folder).join(name), FILE_MODE)?;
            }
        }
    }
    Ok(())
}

fn libraries(workspace: &Workspace, binaries: &Binaries, root: &Path) -> Result<()> {
    let folder = root.join("lib");
    let fixed = folder.join("libpaddle_pserver.a");
    copy(&binaries.static_library, &fixed, FILE_MODE)?;
    let shared = folder.join(format!("{LIBRARY}.{VERSION}"));
    binaries::link_shared(workspace, &fixed, &soname(), &shared)?;
    binaries::strip_to_debug(&shared, "--strip-unneeded")?;
    set_mode(&shared, FILE_MODE)?;
    succeed(Command::new("strip").arg("--strip-unneeded").arg(&fixed))?;
    for (link, target) in [(soname(), format!("{LIBRARY}.{VERSION}")), (LIBRARY.to_owned(), soname())] {
        symlink(&target, folder.join(&link)).with_context(|| format!("cannot link {link}"))?;
    }
    Ok(())
}

/// The sources of the examples with the program and the digits that they read.
fn examples(workspace: &Workspace, folder: &Path) -> Result<()> {
    let root = workspace.root();
    for entry in fs::read_dir(root.join("examples")).context("cannot list the examples")? {
        let path = entry.context("cannot list the examples")?.path();
        let name = path.file_name().context("an example has a name")?;
        copy(&path, &folder.join(name), FILE_MODE)?;
    }
    copy(&root.join("docs/programs/mlp.program"), &folder.join("mlp.program"), FILE_MODE)?;
    let digits = succeed(Command::new("gzip").arg("-dc").arg(root.join("cli/data/digits.csv.gz")))?;
    write(&folder.join("digits.csv"), &digits)
}

/// A template with the version in it.
fn filled(template: &str) -> String {
    let places = [
        ("@VERSION@", VERSION),
        ("@SERIES@", series()),
        ("@SONAME@", &soname()),
        ("@SYSTEM_LIBRARIES@", binaries::SYSTEM_LIBRARIES),
    ];
    places.iter().fold(template.to_owned(), |text, (place, value)| text.replace(place, value))
}

/// Moves a tree over another. A file is replaced as a whole: a program that runs keeps the library that it has mapped.
fn move_over(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", from.display()))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().with_context(|| format!("cannot look at {}", source.display()))?;
        if kind.is_dir() {
            move_over(&source, &target)?;
            continue;
        }
        ensure!(!target.is_dir(), "{} is a folder; a file is installed there", target.display());
        let beside = to.join(format!(".{}.new", entry.file_name().to_string_lossy()));
        let _ = fs::remove_file(&beside);
        let placed = if kind.is_symlink() {
            fs::read_link(&source).and_then(|aim| symlink(aim, &beside))
        } else {
            fs::copy(&source, &beside).map(|_| ())
        };
        placed
            .and_then(|()| fs::rename(&beside, &target))
            .with_context(|| format!("cannot write {}", target.display()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    make_parent(to)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    set_mode(to, mode)
}

fn write(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    set_mode(path, FILE_MODE)
}

fn make_parent(path: &Path) -> Result<()> {
    let folder = path.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).with_context(|| format!("{}", path.display()))
}

/// All files below a folder, relative to it.
pub(crate) fn files_below(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            if entry.file_type().context("a file has a type")?.is_dir() {
                folders.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(root).context("a file is below its root")?.to_path_buf());
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_of_a_template_is_filled() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/install");
        for (template, _) in TEMPLATES {
            let text = filled(&fs::read_to_string(folder.join(template)).expect("the template is there"));
            assert!(text.contains(VERSION), "{template} does not name the version");
            assert!(!text.contains('@'), "{template}: {text}");
        }
    }
}
