//! The shared library, the static library and the program as they are installed: linked, stripped, their debug
//! information in files of its own.
//!
//! Not here: where they are installed ([`super`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::built::Built;
use crate::debian::succeed;
use crate::workspace::Workspace;

/// The exported symbols, one in a line: those of the headers, as `capi/tests/header.rs` checks.
pub(crate) const SYMBOLS: &str = "capi/symbols.txt";
/// Libraries of the system that the static library needs.
pub(super) const SYSTEM_LIBRARIES: &str = "-lpthread -ldl -lm";

/// The files that cargo builds.
pub(crate) struct Binaries {
    pub(crate) static_library: PathBuf,
    pub(crate) program: PathBuf,
}

impl Binaries {
    /// Builds with a profile of cargo's. The library is built as a static one alone: link-time optimisation needs that.
    pub(crate) fn of_profile(workspace: &Workspace, profile: &str) -> Result<Self> {
        let library =
            ["rustc", "--package", "pserver-capi", "--lib", "--crate-type", "staticlib", "--profile", profile];
        let program = ["build", "--package", "pserver", "--bin", "pserver", "--profile", profile];
        Ok(Self {
            static_library: Built::by(workspace, &library)?.file("libpaddle_pserver.a")?.into(),
            program: Built::by(workspace, &program)?.program("pserver", false)?.into(),
        })
    }

    /// The binaries that `rust-tests` builds, so that nothing is built twice.
    pub(crate) fn of_tests(workspace: &Workspace) -> Result<Self> {
        let built = Built::tests(workspace)?;
        let static_library = built.file("libpaddle_pserver.a")?.into();
        Ok(Self { static_library, program: built.program("pserver", false)?.into() })
    }
}

/// Links the shared library from the static one: it exports the committed symbols and no others.
pub(super) fn link_shared(workspace: &Workspace, static_library: &Path, name: &str, into: &Path) -> Result<()> {
    let symbols = symbols(workspace)?;
    let script = into.with_extension("version-script");
    let exported: String = symbols.iter().map(|symbol| format!("{symbol};")).collect();
    fs::write(&script, format!("{{ global: {exported} local: *; }};\n"))
        .with_context(|| format!("cannot write {}", script.display()))?;
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.arg("-shared").arg("-o").arg(into).arg(format!("-Wl,-soname,{name}"));
    compiler.arg(format!("-Wl,--version-script={}", script.display()));
    // A symbol of the list that the library lacks ends the link.
    compiler.args(symbols.iter().map(|symbol| format!("-Wl,--require-defined={symbol}")));
    compiler.arg(static_library).args(["-Wl,--gc-sections", "-Wl,-O1", "-Wl,--as-needed", "-Wl,--build-id"]);
    compiler.args(["-Wl,-z,relro,-z,now,-z,defs"]).args(SYSTEM_LIBRARIES.split(' '));
    let output = compiler.output().context("cannot start the C compiler, which links the shared library")?;
    fs::remove_file(&script).context("cannot remove the version script")?;
    if !output.status.success() {
        bail!("{} is not linked:\n{}", into.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The committed list.
pub(crate) fn symbols(workspace: &Workspace) -> Result<Vec<String>> {
    let text = fs::read_to_string(workspace.root().join(SYMBOLS)).with_context(|| format!("cannot read {SYMBOLS}"))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Removes the debug information of programs or libraries that were stripped in a folder.
pub(crate) fn remove_debug(folder: &Path) -> Result<()> {
    let debug = folder.join(".debug");
    fs::remove_dir_all(&debug).with_context(|| format!("cannot remove {}", debug.display()))
}

/// Strips a file; its debug information goes to `.debug` beside it, where gdb looks for it.
pub(super) fn strip_to_debug(path: &Path, strip: &str) -> Result<()> {
    let folder = path.parent().context("a file is in a folder")?.join(".debug");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let name = path.file_name().context("a file has a name")?.to_string_lossy();
    let debug = folder.join(format!("{name}.debug"));
    succeed(Command::new("objcopy").args(["--only-keep-debug", "--compress-debug-sections"]).args([path, &debug]))?;
    succeed(Command::new("strip").arg(strip).arg(path))?;
    let mut link = "--add-gnu-debuglink=".to_owned();
    link.push_str(debug.to_str().context("the folder has no name in UTF-8")?);
    succeed(Command::new("objcopy").arg(link).arg(path))?;
    Ok(())
}
