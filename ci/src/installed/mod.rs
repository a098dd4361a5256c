//! `cargo ci installed`: an installed prefix as users have it. Examples are built from it by pkg-config and by CMake
//! in empty folders and train on two servers; the package of Debian's is installed, used and removed; servers run in
//! containers.
//!
//! Not here: how files are installed ([`crate::install`]). Read [`CHECKS`], then [`job`] (a training), [`readme`],
//! [`package`] and [`image`].

mod image;
mod job;
mod package;
mod readme;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::debian::succeed;
use crate::install::{self, Binaries};
use crate::workspace::{Tally, Workspace};

/// The installed prefix, and the folders of the checks.
struct Site<'a> {
    workspace: &'a Workspace,
    binaries: Binaries,
    /// Where everything is installed.
    prefix: PathBuf,
    /// A folder for each check, empty at first.
    folder: PathBuf,
}

/// One check of the prefix. An error is a failure.
struct Check {
    name: &'static str,
    /// Programs without which the check is skipped.
    needs: &'static [&'static str],
    /// Why this machine cannot run it, though it has the programs.
    lacks: fn() -> Option<&'static str>,
    run: fn(&Site<'_>) -> Result<()>,
}

impl Check {
    const fn new(name: &'static str, needs: &'static [&'static str], run: fn(&Site<'_>) -> Result<()>) -> Self {
        Self { name, needs, lacks: || None, run }
    }
}

const CHECKS: &[Check] = &[
    Check::new("the shared library has its name, no path and the committed symbols", &[], library),
    Check::new("pages, completions and licences are there", &["bash"], documents),
    Check::new("C and C++ by pkg-config", &["pkg-config", "g++"], c_by_pkg_config),
    Check::new("Fortran by pkg-config", &["pkg-config", "gfortran"], fortran_by_pkg_config),
    Check::new("MPICH by pkg-config", &["pkg-config", "mpicc.mpich"], |site| mpi(site, "mpich")),
    Check::new("Open MPI by pkg-config", &["pkg-config", "mpicc.openmpi"], |site| mpi(site, "openmpi")),
    Check::new("all examples by CMake", &["cmake", "gfortran", "mpicc.mpich"], by_cmake),
    Check::new("a program that was built before starts with the library installed anew", &[], again),
    Check::new("the program and the commands of the README", &["cc", "pkg-config"], readme::check),
    Check::new("the Debian package is installed, used and removed", &["dpkg-deb"], package::check),
    Check {
        lacks: lacks_mounts,
        ..Check::new("two servers in containers of the image train", &["buildah"], image::check)
    },
];

/// The task.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let folder = std::env::temp_dir().join(format!("pserver-installed-{}", std::process::id()));
    let done = checked(workspace, &folder);
    let _ = fs::remove_dir_all(&folder);
    done
}

fn checked(workspace: &Workspace, folder: &Path) -> Result<Tally> {
    let binaries = Binaries::of_tests(workspace)?;
    let first = folder.join("first");
    install::into(workspace, &binaries, &first)?;
    // Nothing in a prefix may name the place where it was installed.
    let prefix = folder.join("prefix");
    fs::rename(&first, &prefix).context("cannot move the prefix")?;
    let site = Site { workspace, binaries, prefix, folder: folder.to_path_buf() };
    let mut total = Tally::default();
    for check in CHECKS {
        let missing = check.needs.iter().find(|program| !is_there(program));
        let missing = missing.map(|program| format!("{program} is not installed"));
        if let Some(why) = missing.or_else(|| (check.lacks)().map(str::to_owned)) {
            workspace.skip("installed", &format!("{why}: {}", check.name))?;
            continue;
        }
        let began = Instant::now();
        let ended = (check.run)(&site);
        let word = if ended.is_ok() { "ok" } else { "FAILED" };
        say!("installed: {}: {word}, {:.1} s", check.name, began.elapsed().as_secs_f64());
        if let Err(error) = &ended {
            say!("{error:#}");
        }
        total += Tally::of_step(ended.is_ok());
    }
    Ok(total)
}

/// Containers need namespaces in which file systems may be mounted.
fn lacks_mounts() -> Option<&'static str> {
    let mount = ["-Urm", "mount", "-t", "tmpfs", "none", "/mnt"];
    succeed(Command::new("unshare").args(mount)).is_err().then_some("no file system may be mounted in a namespace")
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

impl Site<'_> {
    /// A copy of the installed examples in a folder of its own.
    fn examples(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.join(name);
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let from = self.prefix.join("share/doc/pserver/examples");
        for file in install::files_below(&from)? {
            fs::copy(from.join(&file), folder.join(&file))
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
        Ok(folder)
    }

    /// Makes targets of the examples' Makefile.
    fn make(&self, folder: &Path, arguments: &[&str]) -> Result<()> {
        let mut make = Command::new("make");
        make.current_dir(folder).env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        built(make.arg("--silent").arg("CFLAGS=-O2 -Wall -Wextra -Werror").args(arguments))
    }

    fn pserver(&self) -> PathBuf {
        self.prefix.join("bin/pserver")
    }

    /// Four processes of a program train on servers of the prefix; each prints its accuracy.
    fn train(&self, folder: &Path, program: &str, arguments: &[&str]) -> Result<()> {
        job::train(&[self.pserver().into()], &[], trainers(folder, program, arguments))
            .with_context(|| format!("{}/{program}", folder.display()))
    }

    /// One launcher starts the four ranks.
    fn train_by_mpirun(&self, folder: &Path, mpi: &str) -> Result<()> {
        let mut command = job::bounded(format!("mpirun.{mpi}"));
        command.current_dir(folder).args(["-n", &job::TRAINERS.to_string()]);
        if mpi == "openmpi" {
            command.args(["--oversubscribe", "--allow-run-as-root"]);
        }
        command.args(["./digits_mpi", "digits.csv"]);
        job::train(&[self.pserver().into()], &[], vec![command]).with_context(|| format!("mpirun.{mpi}"))
    }
}

/// Four processes of a program in a folder.
fn trainers(folder: &Path, program: &str, arguments: &[&str]) -> Vec<Command> {
    let trainer = |_| {
        let mut command = job::bounded(folder.join(program));
        command.args(arguments).current_dir(folder);
        command
    };
    (0..job::TRAINERS).map(trainer).collect()
}

const TEXT_ARGUMENTS: &[&str] = &["mlp.program", "digits.csv", "4", "15", "model.safetensors"];
const OWN_ARGUMENTS: &[&str] = &["digits.csv", "4"];

/// Runs a compiler or a build system; an error has all of its output.
fn built(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        bail!("{command:?}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
    }
    Ok(())
}

fn library(site: &Site<'_>) -> Result<()> {
    let path = site.prefix.join("lib/libpaddle_pserver.so");
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(&path))?;
    let soname = format!("Library soname: [{}]", install::soname());
    ensure!(dynamic.contains(&soname), "expected {soname}, found\n{dynamic}");
    ensure!(!dynamic.contains("RPATH") && !dynamic.contains("RUNPATH"), "the library has a path:\n{dynamic}");
    let sections = succeed(Command::new("readelf").args(["-S", "--wide"]).arg(&path))?;
    ensure!(!sections.contains(" .symtab ") && sections.contains(".gnu_debuglink"), "not stripped:\n{sections}");
    let listed = succeed(Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(&path))?;
    let expected: BTreeSet<String> = install::symbols(site.workspace)?.into_iter().collect();
    let found: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    ensure!(found == expected, "exported beside the list: {:?}", found.symmetric_difference(&expected));
    Ok(())
}

fn documents(site: &Site<'_>) -> Result<()> {
    let help = succeed(Command::new(site.pserver()).arg("--help"))?;
    let commands = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let names: Vec<&str> = commands.map_while(|line| line.split_whitespace().next()).collect();
    ensure!(names.contains(&"serve"), "pserver --help names no commands:\n{help}");
    for name in names.iter().filter(|name| !name.is_empty() && **name != "help" && !name.starts_with('-')) {
        let page = site.prefix.join(format!("share/man/man1/pserver-{name}.1"));
        ensure!(page.is_file() || help.contains(&format!("[{name}]")), "there is no {}", page.display());
    }
    let completion = site.prefix.join("share/bash-completion/completions/pserver");
    let script = format!("source '{}' && complete -p pserver", completion.display());
    succeed(Command::new("bash").args(["-c", &script]))?;
    let licences = site.prefix.join("share/doc/pserver/THIRD-PARTY-LICENCES");
    let text = fs::read_to_string(&licences).context("the licences")?;
    for package in ["tokio ", "crossbeam ", "clap "] {
        ensure!(text.lines().any(|line| line.starts_with(package)), "{} does not name {package}", licences.display());
    }
    Ok(())
}

fn c_by_pkg_config(site: &Site<'_>) -> Result<()> {
    let folder = site.examples("pkg-config")?;
    site.make(&folder, &["digits_c", "digits_static", "digits_cpp"])?;
    site.train(&folder, "digits_c", TEXT_ARGUMENTS)?;
    site.train(&folder, "digits_static", TEXT_ARGUMENTS)?;
    site.train(&folder, "digits_cpp", OWN_ARGUMENTS)
}

fn fortran_by_pkg_config(site: &Site<'_>) -> Result<()> {
    let folder = site.examples("fortran")?;
    site.make(&folder, &["digits_fortran"])?;
    site.train(&folder, "digits_fortran", OWN_ARGUMENTS)
}

fn mpi(site: &Site<'_>, mpi: &str) -> Result<()> {
    let folder = site.examples(mpi)?;
    site.make(&folder, &["digits_mpi", &format!("MPICC=mpicc.{mpi}")])?;
    site.train_by_mpirun(&folder, mpi)
}

fn by_cmake(site: &Site<'_>) -> Result<()> {
    let folder = site.examples("cmake")?;
    let prefix = format!("-DCMAKE_PREFIX_PATH={}", site.prefix.display());
    let mut configure = Command::new("cmake");
    configure.current_dir(&folder).args(["-S", ".", "-B", ".", "-DCMAKE_BUILD_TYPE=Release", &prefix]);
    built(configure.arg("-DMPI_C_COMPILER=mpicc.mpich"))?;
    built(Command::new("cmake").current_dir(&folder).args(["--build", ".", "--parallel", "2"]))?;
    site.train(&folder, "digits_c", TEXT_ARGUMENTS)?;
    site.train(&folder, "digits_static", TEXT_ARGUMENTS)?;
    site.train(&folder, "digits_cpp", OWN_ARGUMENTS)?;
    site.train(&folder, "digits_fortran", OWN_ARGUMENTS)?;
    site.train_by_mpirun(&folder, "mpich")
}

/// The second installation links the library anew and replaces it. A library without one of the symbols would not link.
fn again(site: &Site<'_>) -> Result<()> {
    let folder = site.examples("again")?;
    site.make(&folder, &["digits_c"])?;
    fs::remove_file(site.prefix.join("lib").join(install::soname())).context("the library's name")?;
    let refused = job::bounded(folder.join("digits_c")).output().context("a program without its library")?;
    ensure!(String::from_utf8_lossy(&refused.stderr).contains("cannot open shared object"), "it needs no library");
    install::into(site.workspace, &site.binaries, &site.prefix)?;
    site.train(&folder, "digits_c", TEXT_ARGUMENTS)
}
