//! `cargo ci deb`: the installed tree as a package of Debian's, made by dpkg-deb.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Binaries, VERSION, copy, files_below, remove_debug, tree, write};
use crate::debian::succeed;
use crate::workspace::{Tally, Workspace};

/// Packages with the libraries of the system that ours are linked with.
pub(crate) const NEEDED: [&str; 2] = ["libc6", "libgcc-s1"];

/// Compressions of dpkg-deb: of packages that are given away, and of those of a test.
pub(crate) const SMALL: &str = "-Zxz";
pub(crate) const FAST: &str = "-Znone";

/// The tool: builds with a profile, and makes the package in `target`.
pub(crate) fn run(workspace: &Workspace, profile: &str) -> Result<Tally> {
    let path = make(workspace, &Binaries::of_profile(workspace, profile)?, &workspace.root().join("target"), SMALL)?;
    say!("{}: {} bytes", path.display(), fs::metadata(&path)?.len());
    Ok(Tally::of_step(true))
}

/// Makes the package in a folder. Its debug information is left out.
pub(crate) fn make(workspace: &Workspace, binaries: &Binaries, folder: &Path, compression: &str) -> Result<PathBuf> {
    let architecture = succeed(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let root = folder.join(format!("deb-{}", std::process::id()));
    let path = folder.join(format!("pserver_{VERSION}_{architecture}.deb"));
    let made = fill(workspace, binaries, &root, architecture).and_then(|()| {
        succeed(workspace.command("dpkg-deb").args(["--root-owner-group", compression, "--build"]).args([&root, &path]))
    });
    let _ = fs::remove_dir_all(&root);
    made.map(|_| path)
}

fn fill(workspace: &Workspace, binaries: &Binaries, root: &Path, architecture: &str) -> Result<()> {
    // The first call also empties the folder.
    tree(workspace, binaries, &root.join("usr"))?;
    ["usr/bin", "usr/lib"].iter().try_for_each(|folder| remove_debug(&root.join(folder)))?;
    let licence = root.join("usr/share/doc/pserver/copyright");
    copy(&workspace.root().join("LICENSE"), &licence, super::FILE_MODE)?;
    let unit = root.join("usr/lib/systemd/system/pserver.service");
    copy(&workspace.root().join("deploy/pserver.service"), &unit, super::FILE_MODE)?;
    let files = files_below(root)?;
    let mut bytes = 0;
    for file in &files {
        bytes += fs::symlink_metadata(root.join(file)).with_context(|| file.display().to_string())?.len();
    }
    let regular: Vec<&PathBuf> = files.iter().filter(|file| !root.join(file).is_symlink()).collect();
    let sums = succeed(Command::new("md5sum").args(regular).current_dir(root))?;
    write(&root.join("DEBIAN/md5sums"), &sums)?;
    write(&root.join("DEBIAN/triggers"), "activate-noawait ldconfig\n")?;
    write(&root.join("DEBIAN/control"), &control(architecture, bytes.div_ceil(1024), &dependencies(root)?)?)
}

fn control(architecture: &str, kibibytes: u64, dependencies: &str) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "Package: pserver\nVersion: {VERSION}\nArchitecture: {architecture}")?;
    writeln!(text, "Maintainer: pserver maintainers <maintainers@pserver.invalid>")?;
    writeln!(text, "Depends: {dependencies}\nInstalled-Size: {kibibytes}\nSection: science\nPriority: optional")?;
    writeln!(text, "Homepage: https://github.com/pserver/pserver")?;
    writeln!(text, "Description: parameter server for distributed training")?;
    writeln!(text, " The server and trainer program pserver, and the library libpaddle_pserver for")?;
    writeln!(text, " trainers in C, C++ and Fortran, with headers, pkg-config file and CMake package.")?;
    Ok(text)
}

/// The system's libraries; of glibc at least the version whose symbols are used.
fn dependencies(root: &Path) -> Result<String> {
    let mut newest = (0, 0);
    for file in ["usr/bin/pserver".to_owned(), format!("usr/lib/{}", super::soname())] {
        let symbols = succeed(Command::new("objdump").arg("-T").arg(root.join(file)))?;
        newest = newest.max(newest_glibc(&symbols));
    }
    Ok(format!("{} (>= {}.{}), {}", NEEDED[0], newest.0, newest.1, NEEDED[1]))
}

/// The highest of the versions `GLIBC_2.34` that a list of symbols names.
fn newest_glibc(symbols: &str) -> (u32, u32) {
    let version = |rest: &str| {
        let mut numbers = rest.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    };
    symbols.split("GLIBC_").skip(1).filter_map(version).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::newest_glibc;

    #[test]
    fn the_newest_version_is_compared_by_its_numbers() {
        let check = |symbols, expected| assert_eq!(newest_glibc(symbols), expected, "{symbols}");
        check("", (0, 0));
        check("0 DF *UND* 0 (GLIBC_2.4) a\n0 DF *UND* 0 (GLIBC_2.34) b\n0 DF *UND* 0 (GLIBC_2.2.5) c\n", (2, 34));
        check("0 DF *UND* 0 (GLIBC_PRIVATE) a\n0 DF *UND* 0 (GCC_3.0) b\n", (0, 0));
    }
}
