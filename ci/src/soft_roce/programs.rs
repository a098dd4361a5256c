//! The programs of this workspace that guests run, and how they are built.
//!
//! Not here: what they need besides ([`mod@super::furnish`]).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::built::Built;
use crate::debian::{Packages, succeed};
use crate::soft_roce::furnish::{Downloads, Furnishing, folder};
use crate::workspace::Workspace;

/// Test programs: their names in the guest, and the targets that they are the tests of. The first are the tests within
/// `pserver-transport`, the others are files of `cli/tests`.
const TESTS: &[(&str, &str)] = &[
    ("transport-unit", "pserver_transport"),
    ("cli-kill", "kill"),
    ("cli-digest", "digest"),
    ("cli-c_programs", "c_programs"),
];
/// Programs that guests run under the same names.
const PROGRAMS: &[&str] = &["pserver", "psbench"];
const LIBRARY: &str = "libpaddle_pserver.so";
/// Where C programs are, and those that are no tests.
const C_SOURCES: &str = "capi/tests/c";
const EXAMPLES: [&str; 2] = ["examples/trainer.c", "examples/digits.c"];
/// The peer that reduces over verbs, and its packages.
const GLOO_SOURCE: &str = "bench/peers/gloo_ibverbs.cc";
const GLOO: &[&str] = &["libgloo-dev", "libgloo0", "libhiredis0.14", "libibverbs-dev"];
/// Source files that tests read.
const READ: &[&str] = &["core/rules/lion.rule"];

/// Held while machines are made and run: two at once would write to the same files.
pub(super) fn lock(workspace: &Workspace) -> Result<File> {
    let path = folder(workspace)?.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    if file.try_lock().is_err() {
        say!("soft-roce: waiting for another that runs here");
        file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    }
    Ok(file)
}

/// The build of the programs and of the C library.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Build {
    /// As `rust-tests` builds them: after it, or before it, nothing is built twice.
    OfTests,
    /// With `--release`, so that the figures are those of the programs that ship.
    ForSpeed,
}

const FOR_SPEED: &[&str] =
    &["build", "--release", "--package", "pserver", "--package", "pserver-capi", "--package", "pserver-bench"];

/// Builds the tests and the programs, and adds them to Debian's.
pub(super) fn add(workspace: &Workspace, furnishing: &mut Furnishing, build: Build) -> Result<()> {
    let tests = Built::tests(workspace)?;
    for (name, target) in TESTS {
        furnishing.add(workspace, name, Path::new(&tests.program(target, true)?))?;
    }
    let fast = match build {
        Build::OfTests => None,
        Build::ForSpeed => Some(Built::by(workspace, FOR_SPEED)?),
    };
    let programs = fast.as_ref().unwrap_or(&tests);
    for name in PROGRAMS {
        furnishing.add(workspace, name, Path::new(&programs.program(name, false)?))?;
    }
    // The tests of a package know where its programs are.
    furnishing.link(&tests.program("pserver", false)?, "/bin/pserver");
    add_c_programs(workspace, furnishing, Path::new(&programs.file(LIBRARY)?))?;
    // Tests go there from their package's folder.
    furnishing.folder(&workspace.root().join("cli"));
    READ.iter().try_for_each(|path| furnishing.same(&workspace.root().join(path)))
}

/// Compiles the all-reduce of gloo, whose packages are Debian's.
pub(super) fn add_gloo(workspace: &Workspace, furnishing: &mut Furnishing, downloads: &Downloads) -> Result<()> {
    let (gloo, program) =
        (Packages { folder: "gloo", names: GLOO }.unpack(workspace)?, folder(workspace)?.join("gloo"));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O2", "-Wl,--allow-shlib-undefined", "-I"]).arg(gloo.join("usr/include"));
    compiler.arg(workspace.root().join(GLOO_SOURCE)).arg("-o").arg(&program);
    succeed(compiler.arg(gloo.join("usr/lib/libgloo.so.0")))?;
    let own = [gloo.join("usr/lib"), gloo.join("usr/lib/x86_64-linux-gnu")];
    let libraries: Vec<_> = own.into_iter().chain(downloads.libraries()).collect();
    furnishing.program("bin/gloo", &program, &libraries)
}

/// C programs are compiled here, and linked with the C library.
fn add_c_programs(workspace: &Workspace, furnishing: &mut Furnishing, library: &Path) -> Result<()> {
    let (root, folder) = (workspace.root(), folder(workspace)?);
    succeed(Command::new("strip").arg("-o").arg(folder.join(LIBRARY)).arg(library))?;
    let sources = fs::read_dir(root.join(C_SOURCES)).with_context(|| format!("cannot list {C_SOURCES}"))?;
    let sources = sources.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
    let is_source = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "c" || extension == "cpp");
    let sources = sources.into_iter().filter(is_source);
    for source in sources.chain(EXAMPLES.map(|example| root.join(example))) {
        let name = source.file_stem().context("a source has a name")?.to_string_lossy().into_owned();
        let program = folder.join(format!("c-{name}"));
        let is_cpp = source.extension().is_some_and(|extension| extension == "cpp");
        let mut compiler = Command::new(if is_cpp { "c++" } else { "cc" });
        compiler.args(if is_cpp { ["-std=c++17", "-static-libstdc++"] } else { ["-std=c99", "-g"] }).arg("-I");
        compiler.arg(root.join("capi/include")).arg(&source).arg("-o").arg(&program);
        succeed(compiler.arg("-L").arg(&folder).arg("-lpaddle_pserver"))?;
        furnishing.program(&format!("c/{name}"), &program, std::slice::from_ref(&folder))?;
    }
    Ok(())
}
