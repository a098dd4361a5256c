//! `cargo ci python`: the wheel of the Python package, built, installed into an empty environment and tested.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ArgMatches;

use crate::workspace::{Tally, Workspace};

/// Packages that tests and type checks need beside the wheel and its dependencies.
const TOOLS_OF_TESTS: [&str; 2] = ["pytest", "mypy"];

/// The arguments that follow the name.
pub(crate) fn arguments(command: clap::Command) -> clap::Command {
    use clap::{Arg, ArgAction};
    let release = Arg::new("release").long("release").action(ArgAction::SetTrue);
    let torch = Arg::new("torch").long("torch").value_name("ENVIRONMENT");
    command
        .arg(release.help("Build the wheel that is published, which takes minutes"))
        .arg(torch.help("Use the torch of this virtual environment, as `bench/peers/install.sh torch` makes one"))
}

/// Builds, installs, tests, checks the types.
pub(crate) fn run(workspace: &Workspace, given: &ArgMatches) -> Result<Tally> {
    let folder = workspace.root().join("target/python-wheel");
    let builder = folder.join("builder");
    if !is_there(workspace, &builder, &["maturin"]) {
        workspace
            .skip("python", "maturin cannot be installed: neither Python's venv nor a package index may be here")?;
        return Ok(Tally::default());
    }
    let wheels = folder.join("wheels");
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels).context("removing earlier wheels")?;
    }
    let mut maturin = workspace.command(builder.join("bin/maturin"));
    maturin.args(["build", "--quiet", "--manifest-path", "python/Cargo.toml", "--out"]).arg(&wheels);
    if given.get_flag("release") {
        maturin.arg("--release");
    }
    let built = workspace.step(&mut maturin)?;
    if built.failed != 0 {
        return Ok(built);
    }
    let wheel = only_file(&wheels)?;
    let bytes = std::fs::metadata(&wheel).context("the wheel's size")?.len();
    println!("python: {} has {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    let environment = folder.join("environment");
    let mut total = built;
    total += install(workspace, &environment, &wheel, given.get_one::<String>("torch"))?;
    let python = environment.join("bin/python");
    // The tests begin in their own folder: beside the sources, Python would take the package from there.
    let mut pytest = workspace.command(&python);
    pytest.args(["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ignore", "test_export.py"]);
    total += workspace.tests(pytest.current_dir(workspace.root().join("python/tests")).env_remove("PYTHONPATH"))?;
    let strict = ["mypy", "--strict", "-p", "pserver._client", "-p", "pserver.__main__"];
    let stubs = ["mypy.stubtest", "pserver._pserver"];
    for module in [strict.as_slice(), &stubs] {
        let mut check = workspace.command(&python);
        total += workspace.step(check.arg("-P").arg("-m").args(module).current_dir(&folder))?;
    }
    Ok(total)
}

/// Makes an environment with the wheel and what its tests need.
fn install(workspace: &Workspace, environment: &Path, wheel: &Path, torch: Option<&String>) -> Result<Tally> {
    let mut venv = workspace.command("python3");
    workspace.step(venv.args(["-m", "venv", "--clear"]).arg(environment))?;
    let mut pip = workspace.command(environment.join("bin/pip"));
    let installed = workspace.step(pip.args(["install", "--quiet"]).arg(wheel).args(TOOLS_OF_TESTS))?;
    let Some(torch) = torch else { return Ok(installed) };
    let packages = |root: &Path| {
        let found = std::fs::read_dir(root.join("lib")).context("an environment has a folder lib")?;
        let python = found.filter_map(|entry| entry.ok().map(|entry| entry.path())).next();
        python.map(|python| python.join("site-packages")).context("an environment has site-packages")
    };
    let line = packages(Path::new(torch))?.display().to_string();
    std::fs::write(packages(environment)?.join("torch.pth"), line).context("naming the folder of torch")?;
    Ok(installed)
}

/// Whether an environment has packages, which are installed when it has none.
fn is_there(workspace: &Workspace, environment: &Path, packages: &[&str]) -> bool {
    if environment.join("installed").exists() {
        return true;
    }
    let mut venv = workspace.command("python3");
    let made = venv.args(["-m", "venv", "--clear"]).arg(environment).status();
    let mut pip = workspace.command(environment.join("bin/pip"));
    made.is_ok_and(|made| made.success())
        && pip.args(["install", "--quiet"]).args(packages).status().is_ok_and(|done| done.success())
        && std::fs::write(environment.join("installed"), "").is_ok()
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let files: Vec<PathBuf> = std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    match files.as_slice() {
        [one] => Ok(one.clone()),
        _ => bail!("found {} files in {}; expected one wheel", files.len(), folder.display()),
    }
}
