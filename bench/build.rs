//! Which revision of the sources `psbench` was built from.
//!
//! `PSERVER_GIT_REVISION` says so where it is set. Else git does, if these sources are a checkout of its: then a commit
//! or another branch makes this run again, and nothing else does. Elsewhere the revision is `unknown`. Changes that
//! are not committed are not seen.

use std::path::Path;
use std::process::Command;

const VARIABLE: &str = "PSERVER_GIT_REVISION";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let given = std::env::var(VARIABLE).ok().map(|given| given.trim().to_owned()).filter(|given| !given.is_empty());
    let revision = given.or_else(revision).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env={VARIABLE}={revision}");
}

/// The commit that these files are of.
fn revision() -> Option<String> {
    // Sources that were unpacked within somebody else's checkout are none of its files.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // Every commit, reset and switch writes a line to the log of HEAD. Without one they write the other three. A path
    // that does not exist would make every build run this.
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    let others = ["HEAD", "packed-refs"].into_iter().chain(branch.as_deref());
    let paths = |names: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        let path = |name| git(&["rev-parse", "--path-format=absolute", "--git-path", name]);
        names.filter_map(path).filter(|path| Path::new(path).exists()).collect()
    };
    let log = paths(&mut std::iter::once("logs/HEAD"));
    let watched = if log.is_empty() { paths(&mut { others }) } else { log };
    watched.iter().for_each(|path| println!("cargo::rerun-if-changed={path}"));
    git(&["rev-parse", "HEAD"])
}

/// The output of git in this folder; none where git is missing or refuses.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
