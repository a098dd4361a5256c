//! `cargo ci python` and `cargo ci wheel`: the Python package's wheel, built, installed into an empty environment, and
//! tested there.
//!
//! The wheel of the tests has the extension as the workspace's tests were built, so that nothing is compiled twice;
//! `cargo ci wheel` builds the one that is published. Tools and PyTorch lie in environments of their own, which stay;
//! the environment of the wheel names their folders.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::built::Built;
use crate::workspace::{Tally, Workspace};

/// Packages of builds, tests and type checks.
const TOOLS: [&str; 5] = ["maturin>=1.9,<2", "wheel", "pytest", "pytest-xdist", "mypy"];
/// Where `bench/peers/install.sh torch target/kits` installs PyTorch.
const TORCH: &str = "target/kits/torch";
/// The largest wheel that is published, in bytes.
const WHEEL_BYTES_MAX: u64 = 20_000_000;

/// The task of `cargo ci test`: the wheel of the workspace's build.
pub(crate) fn check(workspace: &Workspace) -> Result<Tally> {
    check_wheel(workspace, false)
}

/// The tool: the wheel that is published.
pub(crate) fn check_published(workspace: &Workspace) -> Result<Tally> {
    check_wheel(workspace, true)
}

fn check_wheel(workspace: &Workspace, is_release: bool) -> Result<Tally> {
    let folder = workspace.root().join("target/python-wheel");
    let tools = folder.join("tools");
    if !has_tools(workspace, &tools) {
        workspace
            .skip("python", "pytest, mypy and maturin cannot be installed: no venv or no package index is here")?;
        return Ok(Tally::default());
    }
    let wheels = folder.join("wheels");
    if wheels.exists() {
        std::fs::remove_dir_all(&wheels).context("removing earlier wheels")?;
    }
    let mut total = if is_release {
        build_wheel(workspace, &tools, &wheels)?
    } else {
        pack(workspace, &tools, &folder.join("unpacked"), &wheels)?
    };
    if total.failed != 0 {
        return Ok(total);
    }
    let wheel = only_file(&wheels, |_| true)?;
    let bytes = std::fs::metadata(&wheel).context("the wheel's size")?.len();
    say!("python: {} has {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    if is_release {
        total += Tally::of_step(bytes < WHEEL_BYTES_MAX);
    }
    let torch = Some(workspace.root().join(TORCH)).filter(|torch| torch.join("installed").exists());
    let environment = folder.join("environment");
    total += install(workspace, &environment, &wheel, torch.as_deref())?;
    name_folders(&environment, torch.as_deref().into_iter().chain([tools.as_path()]))?;
    // The types keep one processor, and the tests wait now and then.
    let (types, tests) = std::thread::scope(|threads| {
        let types = threads.spawn(|| check_types(workspace, &environment, &folder, torch.is_some()));
        let tests = test(workspace, &environment);
        (types.join().expect("it does not panic"), tests)
    });
    total += tests?;
    total += types?;
    Ok(total)
}

/// Builds the wheel that is published into a folder, and does not test it.
pub(crate) fn publish(workspace: &Workspace, folder: &Path) -> Result<Tally> {
    let tools = workspace.root().join("target/python-wheel/tools");
    ensure!(has_tools(workspace, &tools), "maturin cannot be installed: no venv or no package index is here");
    build_wheel(workspace, &tools, folder)
}

fn build_wheel(workspace: &Workspace, tools: &Path, folder: &Path) -> Result<Tally> {
    let mut maturin = workspace.command(tools.join("bin/maturin"));
    maturin.args(["build", "--quiet", "--release", "--manifest-path", "python/Cargo.toml", "--out"]);
    workspace.step(maturin.arg(folder))
}

/// Builds the extension with the features that the workspace's tests have, and packs it as maturin does.
fn pack(workspace: &Workspace, tools: &Path, unpacked: &Path, wheels: &Path) -> Result<Tally> {
    // Without every package or without a test, third-party packages have other features, and all would be built again.
    let built = Built::by(workspace, &["build", "--workspace", "--lib", "--test", "garbage"])?;
    if unpacked.exists() {
        std::fs::remove_dir_all(unpacked).context("removing an earlier package")?;
    }
    std::fs::create_dir_all(wheels)?;
    std::fs::create_dir_all(unpacked)?;
    let mut facts = workspace.command(tools.join("bin/maturin"));
    facts.args(["pep517", "write-dist-info", "--metadata-directory"]).arg(unpacked);
    facts.current_dir(workspace.root().join("python")).stdout(std::process::Stdio::null());
    let mut total = workspace.step(&mut facts)?;
    let package = unpacked.join("pserver");
    copy_sources(&workspace.root().join("python/pserver"), &package)?;
    let mut strip = workspace.command("strip");
    total +=
        workspace.step(strip.arg("-o").arg(package.join("_pserver.abi3.so")).arg(built.file("lib_pserver.so")?))?;
    let mut zip = workspace.command(tools.join("bin/python"));
    zip.args(["-m", "wheel", "pack", "--dest-dir"]).arg(wheels).arg(unpacked);
    total += workspace.step(zip.stdout(std::process::Stdio::null()))?;
    Ok(total)
}

/// Copies the files of a package that Python and type checkers read.
fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().context("an entry has a name")?;
        let ending = path.extension().and_then(OsStr::to_str);
        if path.is_dir() && name != "__pycache__" {
            copy_sources(&path, &to.join(name))?;
        } else if matches!(ending, Some("py" | "pyi" | "typed")) {
            std::fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Makes an environment with the wheel and its dependencies alone, and trains there once: says how long that took.
fn install(workspace: &Workspace, environment: &Path, wheel: &Path, torch: Option<&Path>) -> Result<Tally> {
    let mut venv = workspace.command("python3");
    let mut total = workspace.step(venv.args(["-m", "venv", "--clear"]).arg(environment))?;
    let began = Instant::now();
    let mut pip = workspace.command(environment.join("bin/pip"));
    total += workspace.step(pip.args(["install", "--quiet"]).arg(wheel))?;
    let installed = began.elapsed();
    let example = if torch.is_some() { "digits.py" } else { "numpy_only.py" };
    name_folders(environment, torch)?;
    let mut first = python(workspace, environment);
    let example = workspace.root().join("python/examples").join(example);
    total += workspace.step(first.arg(example).args(["--steps", "1"]).current_dir(environment))?;
    let (all, install) = (began.elapsed().as_secs_f64(), installed.as_secs_f64());
    say!("python: pip install took {install:.1} s, and with the first trained step {all:.1} s");
    Ok(total)
}

/// Runs the tests, a share of them for each processor and one more: a quarter of their time they wait for processes.
/// They report what is skipped without torch.
fn test(workspace: &Workspace, environment: &Path) -> Result<Tally> {
    // The tests begin in their own folder: beside the sources, Python would take the package from there.
    let mut pytest = python(workspace, environment);
    let shares = std::thread::available_parallelism().map_or(2, |processors| processors.get() + 1);
    pytest.args(["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", &shares.to_string()]);
    // Every processor has a test already: threads of torch that wait for work would only take it from them.
    pytest.env("OMP_NUM_THREADS", "1");
    workspace.tests(pytest.current_dir(workspace.root().join("python/tests")))
}

/// Checks the types, those of the parts for torch where it is there.
fn check_types(workspace: &Workspace, environment: &Path, folder: &Path, has_torch: bool) -> Result<Tally> {
    let mut strict =
        vec!["mypy", "--strict", "-p", "pserver._client", "-p", "pserver._supervisor", "-p", "pserver.__main__"];
    if has_torch {
        strict.extend(["-p", "pserver.torch", "-p", "pserver.export"]);
    }
    let mut total = Tally::default();
    for module in [strict, vec!["mypy.stubtest", "pserver._pserver"]] {
        let mut check = python(workspace, environment);
        total += workspace.step(check.arg("-P").arg("-m").args(module).current_dir(folder))?;
    }
    Ok(total)
}

/// The Python of an environment, without packages from elsewhere.
fn python(workspace: &Workspace, environment: &Path) -> Command {
    let mut python = workspace.command(environment.join("bin/python"));
    python.env_remove("PYTHONPATH");
    python
}

/// Makes the packages of other environments available in this one.
fn name_folders<'a>(environment: &Path, others: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let mut lines = String::new();
    for other in others {
        lines.push_str(&format!("{}\n", site_packages(other)?.display()));
    }
    std::fs::write(site_packages(environment)?.join("others.pth"), lines)
        .context("naming the folders of tools and torch")
}

fn site_packages(environment: &Path) -> Result<PathBuf> {
    let python = only_file(&environment.join("lib"), |name| name.starts_with("python"))?;
    Ok(python.join("site-packages"))
}

/// Whether the environment has the tools, which are installed when it has none.
fn has_tools(workspace: &Workspace, environment: &Path) -> bool {
    let wanted = TOOLS.join(" ");
    if std::fs::read_to_string(environment.join("installed")).is_ok_and(|found| found == wanted) {
        return true;
    }
    let mut venv = workspace.command("python3");
    let made = venv.args(["-m", "venv", "--clear"]).arg(environment).status();
    let mut pip = workspace.command(environment.join("bin/pip"));
    made.is_ok_and(|made| made.success())
        && pip.args(["install", "--quiet"]).args(TOOLS).status().is_ok_and(|done| done.success())
        && std::fs::write(environment.join("installed"), wanted).is_ok()
}

fn only_file(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let read = std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let files: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let name = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(&is_wanted);
    match files.iter().filter(|path| name(path)).collect::<Vec<_>>().as_slice() {
        [one] => Ok((*one).clone()),
        found => bail!("found {} files in {}; expected one", found.len(), folder.display()),
    }
}
