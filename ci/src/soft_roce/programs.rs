//! The programs of this workspace that guests run, and how they are built.
//!
//! Not here: what they need besides ([`super::furnish`]).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::debian::succeed;
use crate::soft_roce::furnish::{Furnishing, folder};
use crate::workspace::Workspace;

/// Test programs, by their names in the guest: `transport-unit` are the tests within `pserver-transport`, the others
/// are files of `capi/tests`.
const TESTS: &[&str] = &["transport-unit", "capi-kill", "capi-digest", "capi-c_programs"];
/// What is measured.
const PROGRAMS: &[&str] = &["pserver", "psbench"];
const LIBRARY: &str = "libpaddle_pserver.so";
/// Where C programs are, and one that is no test.
const C_SOURCES: &str = "capi/tests/c";
const EXAMPLE: &str = "capi/examples/trainer.c";
/// What tests read from their sources, where they expect it.
const READ: &[&str] = &["core/rules/lion.rule"];

/// Held while machines are made and run: two at once would write to the same files.
pub(super) fn lock(workspace: &Workspace) -> Result<File> {
    let path = folder(workspace)?.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    if file.try_lock().is_err() {
        println!("soft-roce: waiting for another that runs here");
        file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    }
    Ok(file)
}

/// Builds everything, and puts it beside Debian's. Tests are built as `rust-tests` builds the whole workspace, so that
/// after them nothing is left to do; what is measured is built for speed.
pub(super) fn add(workspace: &Workspace, furnishing: &mut Furnishing) -> Result<()> {
    let tests = build(workspace, &["test", "--workspace", "--no-run"])?;
    for name in TESTS {
        furnishing.add(workspace, name, Path::new(&built(&tests, name)?))?;
    }
    let fast = build(workspace, &["build", "--release", "--package", "pserver", "--package", "pserver-bench"])?;
    for name in PROGRAMS {
        furnishing.add(workspace, name, Path::new(&built(&fast, name)?))?;
    }
    furnishing.pserver = PathBuf::from(built(&fast, "pserver")?);
    // The tests of a package know where its programs are.
    furnishing.link(&built(&tests, "pserver")?, "/bin/pserver");
    let library = library(&fast).context("cargo does not say that it built the library")?;
    add_c_programs(workspace, furnishing, Path::new(&library))?;
    // Tests go there from their package's folder.
    furnishing.folder(&workspace.root().join("capi"));
    READ.iter().try_for_each(|path| furnishing.same(&workspace.root().join(path)))
}

/// C programs are compiled here, and linked with the library that is measured.
fn add_c_programs(workspace: &Workspace, furnishing: &mut Furnishing, library: &Path) -> Result<()> {
    let (root, folder) = (workspace.root(), folder(workspace)?);
    succeed(Command::new("strip").arg("-o").arg(folder.join(LIBRARY)).arg(library))?;
    let sources = fs::read_dir(root.join(C_SOURCES)).with_context(|| format!("cannot list {C_SOURCES}"))?;
    let sources = sources.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
    let sources = sources.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "c"));
    for source in sources.chain([root.join(EXAMPLE)]) {
        let name = source.file_stem().context("a source has a name")?.to_string_lossy().into_owned();
        let program = folder.join(format!("c-{name}"));
        let mut compiler = Command::new("cc");
        compiler.args(["-std=c99", "-g", "-I"]).arg(root.join("capi/include")).arg(&source).arg("-o").arg(&program);
        succeed(compiler.arg("-L").arg(&folder).arg("-lpaddle_pserver"))?;
        furnishing.program(&format!("c/{name}"), &program, &folder)?;
    }
    Ok(())
}

/// What cargo says about what it has built.
fn build(workspace: &Workspace, arguments: &[&str]) -> Result<String> {
    let mut cargo = workspace.cargo();
    cargo.args(arguments).args(["--quiet", "--message-format=json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where cargo says that it put a program.
fn built(messages: &str, name: &str) -> Result<String> {
    let (target, is_test) = match (name, name.strip_prefix("capi-")) {
        ("transport-unit", _) => ("pserver_transport", true),
        (_, Some(test)) => (test, true),
        (program, None) => (program, false),
    };
    let found = read(messages).find_map(|message| {
        let is_wanted = message["target"]["name"] == target && message["profile"]["test"] == is_test;
        message["executable"].as_str().filter(|_| is_wanted).map(str::to_owned)
    });
    found.with_context(|| format!("cargo does not say that it built {name}"))
}

/// Where it put the C library.
fn library(messages: &str) -> Option<String> {
    read(messages).find_map(|message| {
        let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
        files.filter(|file| file.ends_with(LIBRARY)).map(str::to_owned).next()
    })
}

fn read(messages: &str) -> impl Iterator<Item = serde_json::Value> {
    messages.lines().filter_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_among_the_messages_of_cargo() {
        let message = |name: &str, test: bool, path: &str| {
            let executable = if path.is_empty() { "null".to_owned() } else { format!("\"{path}\"") };
            format!(
                "{{\"target\":{{\"name\":\"{name}\"}},\"profile\":{{\"test\":{test}}},\
                 \"filenames\":[\"/a/x.rlib\",\"{path}.so\"],\"executable\":{executable}}}"
            )
        };
        let messages = [
            message("pserver_transport", false, ""),
            message("pserver_transport", true, "/a/unit"),
            message("pserver", true, "/a/tests-of-pserver"),
            "not json".to_owned(),
            message("pserver", false, "/a/pserver"),
            message("kill", true, "/a/libpaddle_pserver"),
        ];
        let messages = messages.join("\n");
        let found = |name| built(&messages, name).ok();
        assert_eq!(found("transport-unit").as_deref(), Some("/a/unit"));
        assert_eq!(found("pserver").as_deref(), Some("/a/pserver"));
        assert_eq!(found("capi-kill").as_deref(), Some("/a/libpaddle_pserver"));
        assert_eq!(library(&messages).as_deref(), Some("/a/libpaddle_pserver.so"));
        assert_eq!(built(&messages, "psbench").unwrap_err().to_string(), "cargo does not say that it built psbench");
    }
}
