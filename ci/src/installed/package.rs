//! The Debian package in a root of its own, with a database of its own.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Site, TEXT_ARGUMENTS, built, job, trainers};
use crate::debian::succeed;
use crate::install::{deb, files_below};

/// Installs, trains with what was installed, removes; nothing of the package may remain.
pub(super) fn check(site: &Site<'_>) -> Result<()> {
    let root = site.folder.join("root");
    let database = root.join("var/lib/dpkg");
    for folder in ["info", "updates", "triggers"] {
        fs::create_dir_all(database.join(folder)).context("cannot make dpkg's database")?;
    }
    // The libraries of the system count as installed, in the versions that this machine has.
    let needed = succeed(Command::new("dpkg-query").arg("--status").args(deb::NEEDED))?;
    fs::write(database.join("status"), needed).context("cannot write dpkg's database")?;
    let package = deb::make(site.workspace, &site.binaries, &site.folder, deb::FAST)?;

    dpkg(&root, "--install", &package)?;
    let usr = root.join("usr");
    let folder = site.examples("package")?;
    let mut make = Command::new("make");
    make.current_dir(&folder).env("PKG_CONFIG_PATH", usr.join("lib/pkgconfig"));
    built(make.args(["--silent", "digits_c"]))?;
    job::train(&[usr.join("bin/pserver").into()], &[], trainers(&folder, "digits_c", TEXT_ARGUMENTS))?;

    dpkg(&root, "--purge", Path::new("pserver"))?;
    let left = if usr.exists() { files_below(&usr)? } else { Vec::new() };
    ensure!(left.is_empty(), "the removed package left {left:?}");
    Ok(())
}

fn dpkg(root: &Path, action: &str, package: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg");
    dpkg.arg("--root").arg(root).args(["--force-not-root", "--log=/dev/null", action]).arg(package);
    // dpkg wants the programs of the system's folders.
    let path = std::env::var("PATH").unwrap_or_default();
    built(dpkg.env("PATH", format!("{path}:/usr/sbin:/sbin")))
}
