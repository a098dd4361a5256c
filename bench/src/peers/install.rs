//! Where peers lie, and how they get there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Kit;
use super::partner::Bounded;
use crate::job::word;

/// The scripts, and the folder that they install into.
pub(crate) struct InstallFolders {
    pub(crate) scripts: PathBuf,
    pub(crate) folder: PathBuf,
}

impl InstallFolders {
    /// Both as they are found from any folder: peers start where they like.
    pub(crate) fn new(scripts: &Path, folder: &Path) -> Result<Self> {
        let make = || format!("{} cannot be made", folder.display());
        std::fs::create_dir_all(folder).with_context(make)?;
        let whole = |path: &Path| {
            path.canonicalize().with_context(|| format!("{}: expected the folder of a peer's scripts", path.display()))
        };
        Ok(Self { scripts: whole(scripts)?, folder: whole(folder)? })
    }

    pub(super) fn python(&self, kit: Kit) -> String {
        text(&self.folder.join(word(kit)).join("bin/python"))
    }

    pub(super) fn program(&self, kit: Kit) -> String {
        text(&self.folder.join(word(kit)).join(word(kit)))
    }

    /// The launcher of a program that needs one.
    pub(super) fn launcher(&self, kit: Kit) -> String {
        text(&self.folder.join(word(kit)).join("mpirun"))
    }

    pub(super) fn script(&self, name: &str) -> String {
        text(&self.scripts.join(name))
    }

    /// Where somebody's words go who is no part of the report.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        let name: String = name.chars().map(|one| if one.is_ascii_alphanumeric() { one } else { '-' }).collect();
        self.folder.join(format!("{name}.log"))
    }
}

/// Puts a kit into its folder, unless it is there.
pub(crate) fn install(kit: Kit, places: &InstallFolders, limit: Duration) -> Result<()> {
    let command = ["sh", &places.script("install.sh"), &word(kit), &text(&places.folder)].map(str::to_owned);
    Bounded::start(&format!("the installation of {}", word(kit)), &command, &places.log(&word(kit)), limit)?.finish()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
