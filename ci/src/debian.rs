//! Packages of Debian, downloaded and unpacked under `target/debian`. Nothing is installed, so nobody need be root.
//!
//! Not here: what a task does with the files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::Workspace;

/// Packages that belong together, unpacked over one another.
pub(crate) struct Packages<'a> {
    /// The folder under `target/debian`.
    pub(crate) folder: &'a str,
    /// Names of packages. Their dependencies are not added.
    pub(crate) names: &'a [&'a str],
}

impl Packages<'_> {
    /// Downloads what is not there in its current version, and returns the folder that stands for `/`. An error is a
    /// machine that has no such packages, or no way to them.
    pub(crate) fn unpack(&self, workspace: &Workspace) -> Result<PathBuf> {
        let folder = workspace.root().join("target/debian").join(self.folder);
        let (root, stamp) = (folder.join("root"), folder.join("unpacked"));
        // Asked from where a file lies, apt-get does not name it.
        let empty = folder.join("empty");
        fs::create_dir_all(&empty).with_context(|| format!("cannot make {}", empty.display()))?;
        let files = self.files(&empty)?;
        let list = files.join("\n");
        if fs::read_to_string(&stamp).is_ok_and(|unpacked| unpacked == list) {
            return Ok(root);
        }
        // Neither need be there.
        let _ = fs::remove_file(&stamp);
        let _ = fs::remove_dir_all(&root);
        if files.iter().any(|file| !folder.join(file).exists()) {
            say!("debian: downloading {} packages to {}", files.len(), folder.display());
            self.apt_get(&folder, &["download", "--quiet=2"])?;
        }
        for file in &files {
            succeed(Command::new("dpkg").arg("--extract").arg(folder.join(file)).arg(&root))?;
        }
        fs::write(&stamp, list).with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(root)
    }

    /// The names of the files that hold these packages: a name holds the version.
    fn files(&self, empty: &Path) -> Result<Vec<String>> {
        let listing = match self.apt_get(empty, &["download", "--print-uris"]) {
            Ok(listing) => listing,
            // A machine that has never asked what there is.
            Err(_) => {
                succeed(Command::new("apt-get").args(["update", "--quiet=2"]))?;
                self.apt_get(empty, &["download", "--print-uris"])?
            }
        };
        let files = file_names(&listing);
        ensure!(files.len() == self.names.len(), "apt-get knows {files:?} of {:?}", self.names);
        Ok(files)
    }

    fn apt_get(&self, folder: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("apt-get");
        // The folder is ours alone, and the user that apt-get would otherwise become cannot write to it.
        command.args(["-o", "APT::Sandbox::User=root"]).args(arguments).args(self.names).current_dir(folder);
        succeed(&mut command)
    }
}

/// Runs a program to its end, and returns what it wrote. An error says what it complained about.
pub(crate) fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("{name} ended with {}: {}", output.status, complaint.trim().lines().next_back().unwrap_or("in silence"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The second words of lines such as `'http://…/kmod_30_amd64.deb' kmod_30_amd64.deb 94960 SHA256:…`.
fn file_names(listing: &str) -> Vec<String> {
    let lines = listing.lines().filter(|line| line.starts_with('\''));
    lines.filter_map(|line| line.split_whitespace().nth(1).map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::file_names;

    #[test]
    fn a_file_is_known_by_its_version() {
        let listing = "Reading lists...\n'http://a/k%3a30_amd64.deb' k_1%3a30_amd64.deb 94 SHA256:0\n\n";
        assert_eq!(file_names(listing), ["k_1%3a30_amd64.deb"]);
        assert_eq!(file_names("E: nothing\n"), Vec::<String>::new());
    }
}
