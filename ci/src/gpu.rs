//! `cargo ci gpu`: `kernels/cu/check-on-gpu.sh` on a device; without a device, on the driver that stands in for one, so
//! that the script works on the day when a device is lent for a quarter of an hour.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::built::Built;
use crate::kernels;
use crate::workspace::{Tally, Workspace};

const SCRIPT: &str = "kernels/cu/check-on-gpu.sh";
/// The parts that `cargo ci test` runs on the stand-in: one of each kind. The others differ in an argument (`bits-ptx`
/// in the image, `racecheck` in the sanitizer's tool); `cargo ci long` runs them. The programs of `torch-bits` and
/// `torch-step` are tests of the Python package.
const SHORT_PARTS: &str = "probe,driver,bits-cubin,kernels,step,digits,suite,memcheck,end-to-end";
const ALL_PARTS: &str =
    "probe,driver,bits-cubin,kernels,step,digits,torch-peer,suite,bits-ptx,memcheck,racecheck,end-to-end";
/// A program with the arguments of compute-sanitizer: it runs its program and checks nothing.
const SANITIZER: &str = "#!/bin/sh\nwhile [ \"${1#--}\" != \"$1\" ]; do shift 2; done\nexec \"$@\"\n";
/// A program with the arguments of a Python that has torch. It prints no measurement.
const TORCH: &str = "#!/bin/sh\nexit 0\n";
/// The architecture of the devices that are lent, for which rules are compiled ahead.
const ARCHITECTURE: &str = "sm_90";
/// The largest kit: it travels to the device in a part of the quarter of an hour.
const KIT_BYTES_MAX: u64 = 40_000_000;

/// A file of the kit: the target that makes it, whether it is the target's tests, and its name in the kit.
type Packed = (&'static str, bool, &'static str);
const PROGRAMS: [Packed; 4] = [
    ("pserver_kernels", true, "suite"),
    ("cuda", true, "tables"),
    ("psbench", false, "psbench"),
    ("pserver", false, "pserver"),
];
const EXTENSION: (&str, &str) = ("lib_pserver.so", "_pserver.abi3.so");
/// The builds of a kit for a device.
const KIT: [&[&str]; 4] = [
    &["test", "--no-run", "-p", "pserver-kernels", "--lib", "--test", "cuda"],
    &["build", "-p", "pserver-kernels", "--example", "cuda_module"],
    &["build", "-p", "pserver-bench", "--bin", "psbench", "-p", "pserver", "--bin", "pserver"],
    &["build", "-p", "pserver-python", "--lib"],
];

/// Builds `target/gpu-kit/kit.tar.gz`: what the script runs, for a machine that has a device, and neither Rust nor a
/// network.
pub(crate) fn kit(workspace: &Workspace) -> Result<Tally> {
    let folder = workspace.root().join("target/gpu-kit");
    let kit = folder.join("kit");
    if kit.exists() {
        fs::remove_dir_all(&kit).context("an earlier kit")?;
    }
    fs::create_dir_all(&kit).context("the folder of the kit")?;
    let [tests, example, programs, module] =
        KIT.map(|arguments| Built::by(workspace, &[arguments, &["--release"]].concat()));
    let (tests, example, programs, module) = (tests?, example?, programs?, module?);
    fill(
        &kit,
        |target, is_test| if is_test { tests.program(target, is_test) } else { programs.program(target, is_test) },
    )?;
    let (extension, name) = EXTENSION;
    fs::copy(module.file(extension)?, kit.join(name)).context("the Python extension")?;
    for entry in fs::read_dir(&kit)? {
        // Names of functions are most of it.
        let path = entry?.path();
        let stripped = Command::new("strip").arg(&path).status();
        ensure!(stripped.is_ok_and(|status| status.success()), "strip refuses {}", path.display());
    }
    kernels::compile_ahead(workspace, &example, ARCHITECTURE, &kit.join("rules"))?;
    describe(workspace, &kit)?;
    let archive = folder.join("kit.tar.gz");
    let mut tar = Command::new("tar");
    let packed = tar.arg("-czf").arg(&archive).arg("-C").arg(&kit).arg(".").status().context("start tar")?;
    ensure!(packed.success(), "tar ended with {packed}");
    let bytes = fs::metadata(&archive)?.len();
    say!("{}: {bytes} bytes; at most {KIT_BYTES_MAX}", archive.display());
    Ok(Tally::of_step(bytes <= KIT_BYTES_MAX))
}

/// Puts the programs into a kit.
fn fill(kit: &Path, program: impl Fn(&str, bool) -> Result<String>) -> Result<()> {
    for (target, is_test, name) in PROGRAMS {
        let path = program(target, is_test)?;
        // The tests keep files beside their program, so it is a copy.
        fs::copy(&path, kit.join(name)).with_context(|| path.clone())?;
    }
    Ok(())
}

/// Writes the revision and the sources that a kit was made of.
fn describe(workspace: &Workspace, kit: &Path) -> Result<()> {
    let revision = workspace.command("git").args(["rev-parse", "--short", "HEAD"]).output().context("start git")?;
    fs::write(kit.join("revision"), revision.stdout).context("the kit's revision")?;
    let sources = workspace.command("sh").args([SCRIPT, "--sources"]).output().context("start the script")?;
    ensure!(sources.status.success(), "{SCRIPT} --sources: {}", String::from_utf8_lossy(&sources.stderr));
    fs::write(kit.join("sources"), sources.stdout).context("the digest of the kit's sources")
}

/// On a device the parts that are stale; otherwise some parts on the stand-in.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    if Path::new("/dev/nvidia0").exists() {
        let mut tally = kit(workspace)?;
        let out = workspace.root().join("target/gpu-report");
        tally += workspace.step_that_may_skip(workspace.command("sh").args([SCRIPT, "--next", "1800"]).arg(&out))?;
        return Ok(tally);
    }
    workspace.skip("cuda", "no CUDA device")?;
    if Command::new("g++").arg("--version").output().is_err() {
        return Ok(Tally::default());
    }
    on_standin(workspace, SHORT_PARTS)
}

/// The long form: all parts on the stand-in.
pub(crate) fn long(workspace: &Workspace) -> Result<Tally> {
    on_standin(workspace, ALL_PARTS)
}

/// Parts of the script with small tensors. They must skip nothing, and the ledger must hold what they left.
fn on_standin(workspace: &Workspace, parts: &str) -> Result<Tally> {
    let folder = workspace.root().join("target/gpu-standin");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("an earlier run's files")?;
    }
    let (kit, out) = (folder.join("kit"), folder.join("out"));
    fs::create_dir_all(&kit).context("the folder of the kit")?;
    let built = Built::tests(workspace)?;
    fill(&kit, |target, is_test| built.program(target, is_test))?;
    describe(workspace, &kit)?;
    let mut script = workspace.command("sh");
    script.arg(SCRIPT).args(["--parts", parts]).arg(&out);
    let environment = String::from_utf8(kernels::module_program(workspace, &built, &["standin"])?)
        .context("the environment of the stand-in driver")?;
    script.envs(environment.lines().filter_map(|line| line.split_once('=')));
    for (variable, name, text) in [("PSERVER_SANITIZER", "sanitizer", SANITIZER), ("PSERVER_TORCH", "torch", TORCH)] {
        let path = folder.join(name);
        fs::write(&path, text).and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))?;
        script.env(variable, path);
    }
    script.env("PSERVER_KIT", &kit).env("PSERVER_GPU_STANDIN", "1");
    script.env("PSERVER_STANDIN_MEMORY", (1_u64 << 30).to_string());
    // The script's skips are those of the stand-in, not of this run.
    script.env_remove(crate::workspace::SKIP_REPORT).env_remove("PSERVER_REQUIRE");
    let mut tally = workspace.step(&mut script)?;
    let merged = workspace.step(workspace.command("sh").args([SCRIPT, "--merge", "--ledger"]).args([&folder, &out]))?;
    tally += merged;
    let stale = workspace.command("sh").args([SCRIPT, "--stale", "--ledger"]).arg(&folder).output()?;
    let stale = String::from_utf8_lossy(&stale.stdout).into_owned();
    for part in parts.split(',') {
        let is_proven = stale.lines().any(|line| line == format!("{part}: not stale"));
        if !is_proven {
            say!("{SCRIPT}: part {part} did not pass on the stand-in:\n{stale}");
        }
        tally += Tally::of_step(is_proven);
    }
    Ok(tally)
}
