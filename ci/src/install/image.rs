//! `cargo ci image`: an image of containers that has the program, the libraries of the system that it needs, and
//! nothing else. buildah makes it from `deploy/Containerfile`, without root and without a registry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Binaries, VERSION, binaries, copy, licences, remove_debug, set_mode, write, write_licences};
use crate::debian::succeed;
use crate::workspace::{Tally, Workspace};

/// The image's name in the store of images, and in its archive.
pub(crate) const NAME: &str = "localhost/pserver";
/// Packages of Debian's whose files are in the image.
const SYSTEM_PACKAGES: [&str; 2] = super::deb::NEEDED;
/// The user of the program, as the manifests of Kubernetes have it.
const USERS: &str = "root:x:0:0:root:/:/sbin/nologin\npserver:x:1000:1000:pserver:/:/sbin/nologin\n";
const GROUPS: &str = "root:x:0:\npserver:x:1000:\n";

/// The tool: builds with a profile, and makes an archive of the image in `target`.
pub(crate) fn run(workspace: &Workspace, profile: &str) -> Result<Tally> {
    let binaries = Binaries::of_profile(workspace, profile)?;
    let path = workspace.root().join("target").join(archive_name());
    archive(workspace, &binaries, &path)?;
    say!("{}: {} bytes, for `podman load -i` and `docker load -i`", path.display(), fs::metadata(&path)?.len());
    Ok(Tally::of_step(true))
}

/// The file name of the image's archive.
pub(crate) fn archive_name() -> String {
    format!("pserver-{VERSION}-{}.image.tar", std::env::consts::ARCH)
}

/// Makes the image, and an archive of it.
pub(crate) fn archive(workspace: &Workspace, binaries: &Binaries, path: &Path) -> Result<()> {
    let store = Store::new(workspace)?;
    store.build(binaries)?;
    let _ = fs::remove_file(path);
    let to = format!("docker-archive:{}:{NAME}:{VERSION}", path.display());
    succeed(store.buildah().args(["push", "--quiet", &format!("{NAME}:{VERSION}"), &to]))?;
    Ok(())
}

/// A store of images in a folder of its own, which is removed with this value.
pub(crate) struct Store<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Store<'a> {
    /// An empty store.
    pub(crate) fn new(workspace: &'a Workspace) -> Result<Self> {
        let folder = workspace.root().join("target").join(format!("image-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { workspace, folder })
    }

    /// buildah with this store. Files of images are plain folders, which every file system has.
    pub(crate) fn buildah(&self) -> Command {
        let mut buildah = self.workspace.command("buildah");
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(self.folder.join("store"));
        buildah.arg("--runroot").arg(self.folder.join("run"));
        buildah
    }

    /// Makes the image [`NAME`]. Its times are those of no build, so the same files have the same image.
    pub(crate) fn build(&self, binaries: &Binaries) -> Result<()> {
        let context = self.folder.join("context");
        fill(self.workspace, binaries, &context)?;
        let mut build = self.buildah();
        build.args(["build", "--quiet", "--isolation", "chroot", "--layers=false", "--timestamp", "0"]);
        build.args(["--build-arg", &format!("VERSION={VERSION}"), "--tag", &format!("{NAME}:{VERSION}"), "--file"]);
        succeed(build.arg(self.workspace.root().join("deploy/Containerfile")).arg(&context))?;
        Ok(())
    }
}

impl Drop for Store<'_> {
    fn drop(&mut self) {
        // Files of images belong to users of a namespace of buildah's.
        let _ = succeed(self.buildah().args(["rmi", "--all", "--force"]));
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Makes the folders that the Containerfile copies.
fn fill(workspace: &Workspace, binaries: &Binaries, context: &Path) -> Result<()> {
    let root = context.join("root");
    let program = root.join("usr/bin/pserver");
    copy(&binaries.program, &program, super::PROGRAM_MODE)?;
    binaries::strip_to_debug(&program, "--strip-all")?;
    remove_debug(&root.join("usr/bin"))?;
    for library in libraries(&binaries.program)? {
        let owner = package_of(&library)?;
        ensure!(SYSTEM_PACKAGES.contains(&&*owner), "{} is of {owner}; name its licence here", library.display());
        let real = fs::canonicalize(&library).with_context(|| library.display().to_string())?;
        copy(&real, &beneath(&root, &library)?, super::PROGRAM_MODE)?;
    }
    write(&root.join("etc/passwd"), USERS)?;
    write(&root.join("etc/group"), GROUPS)?;
    let documents = root.join("usr/share/doc/pserver");
    write_licences(workspace, licences::INSTALLED, &system()?, &documents.join(super::COMPONENTS))?;
    for package in SYSTEM_PACKAGES {
        let licence = PathBuf::from(format!("/usr/share/doc/{package}/copyright"));
        let real = fs::canonicalize(&licence).with_context(|| licence.display().to_string())?;
        copy(&real, &beneath(&root, &licence)?, super::FILE_MODE)?;
    }
    let temporary = root.join("tmp");
    fs::create_dir_all(&temporary).context("cannot make tmp")?;
    set_mode(&temporary, 0o1777)?;
    fs::create_dir_all(context.join("data")).context("cannot make data")
}

/// The packages of Debian's whose files the image has, as components.
fn system() -> Result<Vec<Value>> {
    let of = |package: &&str| {
        let version = succeed(Command::new("dpkg-query").args(["--show", "--showformat", "${Version}", package]))?;
        let place = format!("pkg:deb/debian/{package}@{version}");
        // Their licences are several: the file `copyright` of each is in the image.
        let licence = json!([{ "license": { "name": format!("/usr/share/doc/{package}/copyright") } }]);
        Ok(json!({
            "type": "library", "bom-ref": place, "name": package, "version": version, "purl": place,
            "licenses": licence,
        }))
    };
    SYSTEM_PACKAGES.iter().map(of).collect()
}

/// The package of Debian's that has a file.
fn package_of(path: &Path) -> Result<String> {
    let real = fs::canonicalize(path).with_context(|| path.display().to_string())?;
    // Debian's list may have the name from before `/lib` became a link to `/usr/lib`.
    let old = real.strip_prefix("/usr").map(|rest| Path::new("/").join(rest));
    let found =
        [Ok(real), old].into_iter().flatten().find_map(|path| succeed(Command::new("dpkg").arg("-S").arg(path)).ok());
    let found = found.with_context(|| format!("{} is in no package", path.display()))?;
    Ok(found.split(':').next().unwrap_or_default().to_owned())
}

/// The libraries that a program needs and the loader of both, where the loader of this system finds them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listed = succeed(Command::new("ldd").arg(program))?;
    let found = libraries_of(&listed);
    ensure!(found.len() > 1, "ldd names no libraries of {}:\n{listed}", program.display());
    Ok(found)
}

/// The paths in ldd's list: `libc.so.6 => /lib/libc.so.6 (0x7f...)`, `/lib64/ld-linux-x86-64.so.2 (0x7f...)`.
fn libraries_of(listed: &str) -> Vec<PathBuf> {
    listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

fn beneath(root: &Path, path: &Path) -> Result<PathBuf> {
    Ok(root.join(path.strip_prefix("/").with_context(|| format!("{}: not absolute", path.display()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_the_output_of_ldd() {
        let listed = "\tlinux-vdso.so.1 (0x7ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f1)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x7f2)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(libraries_of(listed), expected);
    }
}
