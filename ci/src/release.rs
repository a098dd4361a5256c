//! `cargo ci release`: everything that a version consists of, in one folder: wheel, Debian package, image, archive, the
//! list of what they are linked with, licences and checksums.
//!
//! All of it is built twice, each time from nothing, and compared: the same commit has the same bytes.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::debian::succeed;
use crate::install::{self, Binaries, VERSION, deb, image, licences};
use crate::python;
use crate::workspace::{Tally, Workspace};

/// Where cargo builds a version.
const BUILD: &str = "target/release-build";
/// The checksums of all other files.
const SUMS: &str = "SHA256SUMS";

/// The tool. The folder must be empty, or not exist.
pub(crate) fn run(workspace: &Workspace, out: &Path, profile: &str) -> Result<Tally> {
    let out = std::path::absolute(out).context("the folder")?;
    let is_empty = fs::read_dir(&out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_empty, "{}: found files; expected a folder that is empty or does not exist", out.display());
    let changed = succeed(workspace.command("git").args(["status", "--porcelain"]))?;
    ensure!(changed.is_empty(), "found changes that are not committed:\n{changed}expected a commit's sources");
    let mut total = build(workspace, &out, profile)?;
    let again = workspace.root().join("target").join(format!("release-again-{}", std::process::id()));
    let second = build(workspace, &again, profile);
    let compared = second.is_ok().then(|| compare(&out, &again));
    let _ = fs::remove_dir_all(&again);
    total += second?;
    total += compared.context("the second build was compared")??;
    say!("{}", succeed(workspace.command("sha256sum").arg(out.join(SUMS)))?.trim());
    let word = if total.failed == 0 { "released" } else { "NOT released: the second build differs from the first," };
    say!("{word} in {}", out.display());
    Ok(total)
}

/// Builds everything from nothing.
fn build(workspace: &Workspace, out: &Path, profile: &str) -> Result<Tally> {
    let built = workspace.root().join(BUILD);
    if built.exists() {
        fs::remove_dir_all(&built).with_context(|| format!("cannot empty {}", built.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let time = succeed(workspace.command("git").args(["log", "-1", "--format=%ct"]))?;
    // Tools that make archives take their times from the first. The second keeps folders of this machine out of
    // programs.
    let workspace = workspace.with("SOURCE_DATE_EPOCH", time.trim()).with("CARGO_TARGET_DIR", &built);
    let workspace = workspace.with("RUSTFLAGS", flags(&workspace)?);

    let binaries = Binaries::of_profile(&workspace, profile)?;
    deb::make(&workspace, &binaries, out, deb::SMALL)?;
    image::archive(&workspace, &binaries, &out.join(image::archive_name()))?;
    archive(&workspace, &binaries, out, time.trim())?;
    let tally = python::publish(&workspace, out)?;
    let list = out.join(format!("pserver-{VERSION}.cdx.json"));
    install::write_licences(&workspace, licences::RELEASED, &[], &list)?;
    let sums = succeed(workspace.command("sha256sum").args(names(out)?).current_dir(out))?;
    fs::write(out.join(SUMS), sums).context("cannot write the checksums")?;
    Ok(tally)
}

/// The installed tree as an archive.
fn archive(workspace: &Workspace, binaries: &Binaries, out: &Path, time: &str) -> Result<()> {
    let built = workspace.root().join(BUILD);
    let name = format!("pserver-{VERSION}-{}", std::env::consts::ARCH);
    let tree = built.join(&name);
    install::into(workspace, binaries, &tree)?;
    ["bin", "lib"].iter().try_for_each(|folder| install::remove_debug(&tree.join(folder)))?;
    let mut tar = workspace.command("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", &format!("--mtime=@{time}"), "--directory"]);
    tar.arg(&built).args(["--use-compress-program", "gzip -n9", "--create", "--file"]);
    succeed(tar.arg(out.join(format!("{name}.tar.gz"))).arg(&name))?;
    Ok(())
}

/// The flags of rustc: names of folders in programs are those of no machine.
fn flags(workspace: &Workspace) -> Result<String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home =
        home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo"))).context("no CARGO_HOME")?;
    let root = workspace.root().display();
    Ok(format!("--remap-path-prefix={root}=/pserver --remap-path-prefix={}=/cargo", home.display()))
}

/// Compares each file of two folders: one passed or failed for each.
fn compare(first: &Path, second: &Path) -> Result<Tally> {
    let mut total = Tally::of_step(names(first)? == names(second)?);
    for name in names(first)? {
        let read = |folder: &Path| fs::read(folder.join(&name)).with_context(|| name.clone());
        let is_same = read(first)? == read(second)?;
        say!("release: {name}: {}", if is_same { "the same bytes twice" } else { "OTHER BYTES" });
        total += Tally::of_step(is_same);
    }
    Ok(total)
}

/// The names of the files of a folder, in order.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let name = |entry: std::io::Result<fs::DirEntry>| Some(entry.ok()?.path().file_name()?.to_str()?.to_owned());
    let mut names: Vec<String> = entries.filter_map(name).filter(|name| OsStr::new(name) != SUMS).collect();
    names.sort();
    Ok(names)
}
