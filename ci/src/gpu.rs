//! `cargo ci gpu`: `kernels/cu/check-on-gpu.sh` on a device; without a device, on the driver that stands in for one, so
//! that the script works on the day when a device is lent for an hour.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::built::Built;
use crate::kernels;
use crate::workspace::{Tally, Workspace};

const SCRIPT: &str = "kernels/cu/check-on-gpu.sh";
/// The programs of the script: the variable that names each, its target, and whether it is the target's tests.
const PROGRAMS: [(&str, &str, bool); 4] = [
    ("PSERVER_GPU_TESTS", "pserver_kernels", true),
    ("PSERVER_GPU_TABLES", "cuda", true),
    ("PSBENCH", "psbench", false),
    ("PSERVER", "pserver", false),
];
/// The parts that `cargo ci test` runs on the stand-in: one of each kind. The others differ in an argument (`racecheck`
/// in the sanitizer's tool, `adamw` and `rules` in the rules of psbench); `cargo ci long` runs them.
const SHORT_PARTS: &str = "build,suite,tables,memcheck,digits,goals";
const ALL_PARTS: &str = "build,suite,tables,memcheck,racecheck,digits,goals,adamw,rules";
/// A program with the arguments of compute-sanitizer: it runs its program and checks nothing.
const SANITIZER: &str = "#!/bin/sh\n[ \"$1\" = --help ] && exit\nshift 4\nexec \"$@\"\n";
/// A program with the arguments of a Python that has torch. It prints no measurement.
const TORCH: &str = "#!/bin/sh\nexit 0\n";

/// The builds of `cargo ci gpu-kit`, and the programs of each that go into the kit: target, whether it is the target's
/// tests, and the name that the script looks for.
const KIT: [(&[&str], &[Packed]); 2] = [
    (
        &["test", "--no-run", "-p", "pserver-kernels", "--lib", "--test", "cuda"],
        &[("pserver_kernels", true, "suite"), ("cuda", true, "tables")],
    ),
    (
        &["build", "-p", "pserver-bench", "--bin", "psbench", "-p", "pserver", "--bin", "pserver"],
        &[("psbench", false, "psbench"), ("pserver", false, "pserver")],
    ),
];
type Packed = (&'static str, bool, &'static str);

/// Builds the programs of the script into `target/gpu-kit`, for a machine that has a device and no Rust.
pub(crate) fn kit(workspace: &Workspace) -> Result<Tally> {
    let folder = workspace.root().join("target/gpu-kit");
    fs::create_dir_all(&folder).context("the folder of the kit")?;
    for (arguments, packed) in KIT {
        let built = Built::by(workspace, &[arguments, &["--release"]].concat())?;
        for (target, is_test, name) in packed {
            let into = folder.join(name);
            fs::copy(built.program(target, *is_test)?, &into).with_context(|| format!("{}", into.display()))?;
            // Names of functions are most of it, and it has to travel.
            let stripped = Command::new("strip").arg(&into).status();
            ensure!(stripped.is_ok_and(|status| status.success()), "strip refuses {}", into.display());
            println!("{}: {} bytes", into.display(), fs::metadata(&into)?.len());
        }
    }
    let revision = workspace.command("git").args(["rev-parse", "--short", "HEAD"]).output().context("start git")?;
    fs::write(folder.join("revision"), revision.stdout).context("the kit's revision")?;
    Ok(Tally::of_step(true))
}

pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let tally = workspace.step_that_may_skip(workspace.command("sh").arg(SCRIPT))?;
    // A script that passed without a skip, or failed, has found a device.
    if tally.passed + tally.failed != 0 || Command::new("g++").arg("--version").output().is_err() {
        return Ok(tally);
    }
    on_standin(workspace, SHORT_PARTS)
}

/// The long form: all parts on the stand-in.
pub(crate) fn long(workspace: &Workspace) -> Result<Tally> {
    on_standin(workspace, ALL_PARTS)
}

/// Parts of the script with small tensors. They must skip nothing.
fn on_standin(workspace: &Workspace, parts: &str) -> Result<Tally> {
    let mut script = workspace.command("sh");
    let report = workspace.root().join("target/gpu-standin.txt");
    script.arg(SCRIPT).args(["--parts", parts, "--elements", "20000", "--step-elements", "5000"]).arg("--markdown");
    script.arg(report.with_extension("md")).arg(&report);
    let built = Built::tests(workspace)?;
    let environment = String::from_utf8(kernels::module_program(workspace, &built, &["standin"])?)
        .context("the environment of the stand-in driver")?;
    script.envs(environment.lines().filter_map(|line| line.split_once('=')));
    for (variable, target, is_test) in PROGRAMS {
        script.env(variable, built.program(target, is_test)?);
    }
    for (variable, name, text) in
        [("PSERVER_SANITIZER", "gpu-sanitizer", SANITIZER), ("PSERVER_TORCH", "gpu-torch", TORCH)]
    {
        let path = workspace.root().join("target").join(name);
        fs::write(&path, text).and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))?;
        script.env(variable, path);
    }
    script.env("PSERVER_GPU_STANDIN", "1").env("PSERVER_STANDIN_MEMORY", (1_u64 << 30).to_string());
    // The script's skips are those of the stand-in, not of this run.
    script.env_remove(crate::workspace::SKIP_REPORT).env_remove("PSERVER_REQUIRE");
    let tally = workspace.step(&mut script)?;
    let text = fs::read_to_string(&report).context("the script's report")?;
    let skipped: Vec<&str> = text.lines().filter(|line| line.starts_with("SKIPPED")).collect();
    let is_whole = skipped.iter().all(|line| line.contains("nvidia-smi"));
    if !is_whole {
        println!("{SCRIPT} skipped on the stand-in: {skipped:?}");
    }
    Ok(if is_whole { tally } else { Tally::of_step(false) })
}
