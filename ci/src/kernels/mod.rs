//! `cargo ci kernels`: the committed CUDA artifacts, made with a pinned compiler and compared with what is committed.
//!
//! The compilers come from PyPI into virtual environments under `target/`: NVRTC 13.0 for the cubin, and NVRTC 12.4 for
//! the PTX, because every driver from 550 on compiles that. A machine that cannot have them skips, which is counted.

mod disassembly;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::built::Built;
use crate::workspace::{Tally, Workspace};

const FOLDER: &str = "kernels/gen";
const CUBIN: &str = "pserver.sm_90.cubin";
const PTX: &str = "pserver.compute_80.ptx";
const MANIFEST: &str = "manifest.txt";

/// The most bytes of an artifact per kernel: 15,803 in the committed PTX and 13,660 in the cubin. A new rule leaves the
/// ratio as it is; an unrolled loop raises it.
const KERNEL_BYTES_MAX: u64 = 20_000;
/// The most bytes of either artifact: the crate carries both, and crates.io takes ten MiB.
const ARTIFACT_BYTES_MAX: u64 = 4 << 20;

/// A compiler, and what pip calls it.
struct Toolchain {
    folder: &'static str,
    packages: &'static [&'static str],
}

const CUBIN_TOOLCHAIN: Toolchain = Toolchain {
    folder: "target/cuda-13.0",
    packages: &["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.2.51"],
};
const PTX_TOOLCHAIN: Toolchain =
    Toolchain { folder: "target/cuda-12.4", packages: &["nvidia-cuda-nvrtc-cu12==12.4.127"] };

/// Makes the artifacts anew, in place of the committed ones.
pub(crate) fn make(workspace: &Workspace) -> Result<Tally> {
    let made = compile(workspace)?;
    for name in [CUBIN, PTX, MANIFEST] {
        fs::copy(made.join(name), workspace.root().join(FOLDER).join(name)).with_context(|| format!("copy {name}"))?;
    }
    let sizes = [CUBIN, PTX].map(|name| fs::metadata(made.join(name)).map_or(0, |file| file.len()));
    say!("{CUBIN}: {} bytes, {PTX}: {} bytes", sizes[0], sizes[1]);
    inspect(workspace, &made)
}

/// Makes the artifacts anew, in `target/`, and compares them with those that are committed.
pub(crate) fn check(workspace: &Workspace) -> Result<Tally> {
    if let Err(reason) = CUBIN_TOOLCHAIN.install(workspace).and_then(|()| PTX_TOOLCHAIN.install(workspace)) {
        workspace.skip("CUDA artifacts made anew", &format!("{reason:#}"))?;
        return Ok(Tally::default());
    }
    let made = compile(workspace)?;
    let mut tally = inspect(workspace, &made)?;
    for name in [CUBIN, PTX, MANIFEST] {
        let is_same = fs::read(made.join(name))? == fs::read(workspace.root().join(FOLDER).join(name))?;
        if !is_same {
            say!("{FOLDER}/{name} is not what the sources give: run `cargo ci kernels`");
        }
        tally += Tally::of_step(is_same);
    }
    Ok(tally)
}

/// Artifacts and manifest, in a folder under `target/`.
fn compile(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.root().join("target/cuda-kernels");
    fs::create_dir_all(&folder).context("make the folder for artifacts")?;
    let source = folder.join("pserver.cu");
    let built = Built::tests(workspace)?;
    fs::write(&source, module_program(workspace, &built, &["source"])?)?;
    for (toolchain, architecture, name) in [(CUBIN_TOOLCHAIN, "sm_90", CUBIN), (PTX_TOOLCHAIN, "compute_80", PTX)] {
        toolchain.install(workspace)?;
        toolchain.nvrtc(workspace, architecture, &source, &folder.join(name))?;
    }
    let paths = [CUBIN, PTX].map(|name| folder.join(name).display().to_string());
    fs::write(folder.join(MANIFEST), module_program(workspace, &built, &["manifest", &paths[0], &paths[1]])?)?;
    Ok(folder)
}

/// Compiles the rules of the tests for an architecture into a folder, by the compiler of the cubin: a device whose host
/// has the same version does not compile them.
pub(crate) fn compile_ahead(workspace: &Workspace, built: &Built, architecture: &str, folder: &Path) -> Result<()> {
    CUBIN_TOOLCHAIN.install(workspace)?;
    let library = CUBIN_TOOLCHAIN.program(workspace, "libnvrtc.so.13")?;
    let mut program = workspace.command(built.program("cuda_module", false)?);
    program.args(["rules", architecture]).arg(folder);
    run(program.env("LD_LIBRARY_PATH", library.parent().context("a library is in a folder")?))
}

/// The output of the example program `cuda_module` of the kernels.
pub(crate) fn module_program(workspace: &Workspace, built: &Built, arguments: &[&str]) -> Result<Vec<u8>> {
    let program = built.program("cuda_module", false)?;
    let output = workspace.command(program).args(arguments).stderr(Stdio::inherit()).output();
    let output = output.context("run the example cuda_module")?;
    if !output.status.success() {
        bail!("the example cuda_module ended with {}", output.status);
    }
    Ok(output.stdout)
}

/// Nothing is spilled, nothing is on a stack, tensors move 16 bytes at a time, and the artifacts are short.
fn inspect(workspace: &Workspace, made: &Path) -> Result<Tally> {
    let log = fs::read_to_string(made.join(format!("{CUBIN}.log"))).context("read the compiler's report")?;
    let nvdisasm = CUBIN_TOOLCHAIN.program(workspace, "nvdisasm")?;
    let output = Command::new(nvdisasm).arg("-c").arg(made.join(CUBIN)).output().context("run nvdisasm")?;
    let mut findings = disassembly::spills(&log);
    findings.extend(disassembly::narrow(&String::from_utf8_lossy(&output.stdout)));
    let manifest = fs::read_to_string(made.join(MANIFEST)).context("read the manifest")?;
    let kernels = manifest.lines().filter(|line| line.starts_with("entry ")).count() as u64;
    for name in [CUBIN, PTX] {
        let length = fs::metadata(made.join(name))?.len();
        let most = ARTIFACT_BYTES_MAX.min(kernels * KERNEL_BYTES_MAX);
        if most < length {
            findings.push(format!("{name} has {length} bytes for {kernels} kernels; expected at most {most}"));
        }
    }
    findings.iter().for_each(|finding| say!("{finding}"));
    Ok(Tally::of_step(findings.is_empty()))
}

impl Toolchain {
    /// Installs the toolchain, unless it is installed.
    fn install(&self, workspace: &Workspace) -> Result<()> {
        let folder = workspace.root().join(self.folder);
        let mark = folder.join("installed");
        let wanted = self.packages.join("\n");
        if fs::read_to_string(&mark).is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(folder.join("bin/pip")).args(["install", "--quiet"]).args(self.packages))?;
        fs::write(mark, wanted).context("note what is installed")
    }

    fn nvrtc(&self, workspace: &Workspace, architecture: &str, source: &Path, into: &Path) -> Result<()> {
        let script = workspace.root().join("ci/src/kernels/nvrtc.py");
        let mut python = Command::new(workspace.root().join(self.folder).join("bin/python"));
        run(python.arg(script).arg(architecture).arg(source).arg(into))
    }

    /// A program within one of the packages.
    fn program(&self, workspace: &Workspace, name: &str) -> Result<PathBuf> {
        let output = Command::new("find").arg(workspace.root().join(self.folder)).args(["-name", name]).output()?;
        let found = String::from_utf8_lossy(&output.stdout);
        found.lines().next().map(PathBuf::from).with_context(|| format!("{name} is in no package of {}", self.folder))
    }
}

fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().display().to_string();
    let status = command.status().with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} ended with {status}");
    }
    Ok(())
}
