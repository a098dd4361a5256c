//! Simulated CUDA driver (`kernels/cu/standin`) for tests: g++ compiles it once, and a test runs itself again in a
//! process that loads it.
//!
//! Every file is named by the digest of its sources, in one folder beside the tests' programs, which all packages
//! share. The head of `driver.cpp` lists the driver's options.

use std::fs::{create_dir_all, rename, write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::{env, io};

use crate::cuda::ModuleSource;

const DRIVER: &str = include_str!("../../cu/standin/driver.cpp");
const COMPILER: &str = include_str!("../../cu/standin/compiler.cpp");
const RUNNER: &str = include_str!("../../cu/shim/runner.cpp");
/// The texts before and behind a module's source.
const SHIM: [(&str, &str); 2] =
    [("shim.h", include_str!("../../cu/shim/shim.h")), ("launch.h", include_str!("../../cu/shim/launch.h"))];

const STRICT: &[&str] = &["-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"];
/// Products and sums are not contracted, and type punning is allowed.
const EXACT: &[&str] = &["-ffp-contract=off", "-fno-fast-math", "-fno-strict-aliasing", "-w", "-fPIC", "-shared"];
const PROGRAM: &[&str] = &["-Wall", "-Wextra", "-Werror"];

/// Set in the process in which a test runs itself again.
const INSIDE: &str = "PSERVER_STANDIN";
const PATH: &str = "LD_LIBRARY_PATH";

/// Environment variables for a process.
pub type DriverEnvironment = Vec<(&'static str, String)>;

/// Whether this is a process in which a test runs itself again.
#[must_use]
pub fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

/// Runs the calling test, and no other, in a process of its own with this environment; returns its output and exit
/// status.
///
/// # Panics
/// When the caller is not on a test's own thread, which has its name, or the program cannot be started again.
#[must_use]
pub fn again(vars: &[(&str, &str)]) -> Output {
    let thread = std::thread::current();
    let name = thread.name().filter(|name| *name != "main").expect("a test runs on a thread with its name");
    let mut command = Command::new(env::current_exe().expect("a process knows its program"));
    command.args(["--exact", name, "--nocapture"]).stdin(Stdio::null());
    command.env(INSIDE, "1").envs(vars.iter().copied()).output().expect("the program can be started again")
}

/// As [`again`]; the test must have run, and ended well.
///
/// # Panics
/// With all that the test wrote, when it has not.
pub fn run_again(vars: &[(&str, &str)]) {
    let output = again(vars);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "with {vars:?}: {}\n{text}", output.status);
    assert!(text.contains("1 passed"), "the test ran itself: {text}");
}

/// The environment in which a process loads the driver.
///
/// # Errors
/// When there is no g++.
pub fn driver() -> Result<DriverEnvironment, String> {
    // Under every name that is looked for, so that none finds the driver that a host has.
    let library = made("driver", "libcuda.so", DRIVER, STRICT)?;
    let folder = library.parent().expect("it is in a folder");
    // Under a name of its own first: other processes do the same at the same time.
    let own = folder.join(format!("link-{}-{:?}", std::process::id(), std::thread::current().id()));
    let linked = symlink("libcuda.so", &own).and_then(|()| rename(&own, folder.join("libcuda.so.1")));
    linked.expect("the folder of the tests can be written");
    Ok(vec![(PATH, folder.display().to_string())])
}

/// As [`driver`], for modules with these kernels.
///
/// # Errors
/// When there is no g++.
pub fn driver_with(module: &ModuleSource) -> Result<DriverEnvironment, String> {
    let mut vars = driver()?;
    vars.push(("PSERVER_STANDIN_KERNELS", kernels(module)?.display().to_string()));
    Ok(vars)
}

/// As [`driver`], with a simulated NVRTC.
///
/// # Errors
/// When there is no g++.
///
/// # Panics
/// When the folder of the tests cannot be written.
pub fn driver_with_compiler() -> Result<DriverEnvironment, String> {
    let mut vars = driver()?;
    // The first name that is looked for, so that it comes before one that the host has.
    let library = made("compiler", "libnvrtc.so", COMPILER, STRICT)?;
    let folder = library.parent().expect("it is in a folder").display().to_string();
    let shim = folder_of("shim", &SHIM.map(|(_, text)| text).concat());
    for (name, text) in SHIM {
        put(&shim.join(name), text);
    }
    vars[0].1 = format!("{}:{folder}", vars[0].1);
    // A compiled text names files of this folder, and is kept there: another checkout has other files.
    vars.extend([("XDG_CACHE_HOME", folder.clone()), ("PSERVER_STANDIN_FOLDER", folder)]);
    vars.push(("PSERVER_STANDIN_SHIM", shim.display().to_string()));
    Ok(vars)
}

/// As [`driver_with_compiler`], for shipped modules with these kernels: everything that a program needs.
///
/// # Errors
/// When there is no g++.
pub fn everything(module: &ModuleSource) -> Result<DriverEnvironment, String> {
    let mut vars = driver_with_compiler()?;
    vars.push(("PSERVER_STANDIN_KERNELS", kernels(module)?.display().to_string()));
    Ok(vars)
}

/// A library of these kernels, for the driver or for [`runner`].
///
/// # Errors
/// When there is no g++.
pub fn kernels(module: &ModuleSource) -> Result<PathBuf, String> {
    made("kernels", "kernels.so", &module.shim(), EXACT)
}

/// A program that loads such a library and executes the commands on its standard input.
///
/// # Errors
/// When there is no g++.
pub fn runner() -> Result<PathBuf, String> {
    made("runner", "runner", RUNNER, PROGRAM)
}

/// A file or folder beside the tests' program, which is in the build's own folder.
///
/// # Panics
/// When a process does not know its program.
#[must_use]
pub fn beside_the_program(name: &str) -> PathBuf {
    env::current_exe().expect("a process knows its program").with_file_name(name)
}

/// The folder for the outputs of this source.
fn folder_of(what: &str, text: &str) -> PathBuf {
    let digest = blake3::hash(text.as_bytes()).to_hex();
    // Tests are in `deps`, examples in `examples`, and all share one folder.
    let folder = beside_the_program("../standin").join(format!("{what}-{}", &digest[..16]));
    create_dir_all(&folder).expect("the folder of the tests can be written");
    folder
}

/// The output of g++ for a source, compiled on first use.
fn made(what: &str, name: &str, text: &str, options: &[&str]) -> Result<PathBuf, String> {
    // Tests of one process need the same output at the same time; the first one compiles it.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder_of(what, &format!("{options:?}\n{text}"));
    let into = folder.join(name);
    if into.exists() {
        return Ok(into);
    }
    let source = folder.join("source.cpp");
    put(&source, text);
    // To a name of its own first: other processes do the same at the same time.
    let own = folder.join(format!("{name}.{}", std::process::id()));
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1"]).args(options).arg("-o").args([&own, &source]);
    match command.output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err("there is no C++ compiler to build the stand-in driver and kernels with".to_owned())
        }
        Err(error) => panic!("g++ cannot be started: {error}"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "g++ refuses {}: {said}", source.display());
            rename(&own, &into).expect("a file can be renamed in its folder");
            Ok(into)
        }
    }
}

/// Writes a file atomically.
fn put(path: &Path, text: &str) {
    let own = path.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    let written = write(&own, text).and_then(|()| rename(&own, path));
    written.expect("the folder of the tests can be written");
}
