//! How a test gets the stand-in driver: it runs itself again in a process that finds it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{env, fs, io};

use crate::cuda::{Module, sys};

/// Set in the process where the body of a test runs.
const INSIDE: &str = "PSERVER_STANDIN";

/// Runs `body` in a process of its own that finds the stand-in driver, once for each of `settings` (see the head of
/// `driver.cpp`). A test calls this first and does nothing else.
pub(super) fn each(settings: &[&[(&str, &str)]], body: impl FnOnce()) {
    if is_inside() {
        return body();
    }
    let Some(folder) = library() else { return };
    for settings in settings {
        let output = again(folder, settings);
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "with {settings:?}: {}\n{text}", output.status);
        assert!(text.contains("1 passed"), "the test ran itself: {text}");
    }
}

/// Once for each of so many seeds, which are printed when one fails.
pub(super) fn each_seed(seeds: u32, settings: &[(&str, &str)], body: impl FnOnce()) {
    let texts: Vec<String> = (1..=seeds).map(|seed| seed.to_string()).collect();
    let with_seed = |seed| [&[("PSERVER_STANDIN_SEED", seed)], settings].concat();
    let all: Vec<Vec<(&str, &str)>> = texts.iter().map(|seed| with_seed(seed.as_str())).collect();
    each(&all.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}

/// Whether this is the process in which a body runs.
pub(super) fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

/// What a process needs to find the stand-in compiler too.
pub(super) fn compiler() -> Option<Vec<(&'static str, String)>> {
    let (driver, made) = (library()?, folder().join("compiler"));
    fs::create_dir_all(&made).expect("the folder of the tests can be written");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cu");
    // The first name that is looked for, so that it comes before one that the host has.
    build(&sources.join("standin/compiler.cpp"), &made.join("libnvrtc.so"), &["-Wall", "-Wextra", "-Werror"])?;
    let path = format!("{}:{}", driver.display(), made.display());
    Some(vec![
        ("LD_LIBRARY_PATH", path),
        ("PSERVER_STANDIN_FOLDER", made.display().to_string()),
        ("PSERVER_STANDIN_SHIM", sources.join("shim").display().to_string()),
    ])
}

/// Runs this test in a process that has no driver at all; where the loader finds one by itself, that is a skip.
pub(super) fn without_driver(body: impl FnOnce()) {
    if is_inside() {
        return if sys::driver().is_some() { skip("no-cuda", "this host has a driver") } else { body() };
    }
    let output = again(Path::new("/nonexistent"), &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    println!("{text}");
}

/// This test, and no other, in a new process.
fn again(folder: &Path, settings: &[(&str, &str)]) -> Output {
    let thread = std::thread::current();
    let name = thread.name().filter(|name| name.contains("::")).expect("a test runs on a thread with its name");
    let mut command = Command::new(env::current_exe().expect("a process knows its program"));
    command.args(["--exact", name, "--nocapture"]).stdin(Stdio::null());
    command.env(INSIDE, "1").env("LD_LIBRARY_PATH", folder).envs(settings.iter().copied());
    command.output().expect("the program can be started again")
}

/// The folder with the driver, built when its source is newer; none where there is no compiler.
fn library() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(driver).as_deref()
}

/// Builds the driver under every name that is looked for, so that none finds the driver that a host has.
fn driver() -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cu/standin/driver.cpp");
    let folder = folder();
    build(&source, &folder.join("libcuda.so"), &["-g", "-Wall", "-Wextra", "-Werror"])?;
    // Under a name of its own first: other processes do the same at the same time.
    let own = folder.join(format!("libcuda.so.{}", std::process::id()));
    let linked = symlink("libcuda.so", &own).and_then(|()| fs::rename(&own, folder.join("libcuda.so.1")));
    linked.expect("the folder of the tests can be written");
    Some(folder)
}

/// A library of these kernels, for `PSERVER_STANDIN_KERNELS`; made once for each text.
pub(super) fn kernels(module: &Module) -> Option<PathBuf> {
    let text = module.shim();
    let digest = blake3::hash(text.as_bytes()).to_hex();
    let source = folder().join(format!("kernels-{}.cpp", &digest[..16]));
    if !source.exists() {
        fs::write(&source, text).expect("the folder of the tests can be written");
    }
    build(&source, &source.with_extension("so"), &["-ffp-contract=off", "-fno-strict-aliasing", "-w"])
}

/// A file or folder beside the tests' program, which is in the build's own folder.
pub(super) fn beside_the_program(name: &str) -> PathBuf {
    env::current_exe().expect("a process knows its program").with_file_name(name)
}

/// Where what the tests build is.
fn folder() -> PathBuf {
    let folder = beside_the_program("standin");
    fs::create_dir_all(&folder).expect("the folder of the tests can be written");
    folder
}

/// Builds a library when its source is newer; none where there is no compiler.
fn build(source: &Path, into: &Path, options: &[&str]) -> Option<PathBuf> {
    // The tests of this process want the same at the same time, and one of them makes it.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = |path: &Path| fs::metadata(path).and_then(|found| found.modified());
    if matches!((changed(source), changed(into)), (Ok(source), Ok(into)) if source < into) {
        return Some(into.to_path_buf());
    }
    // To a name of its own first: other processes do the same at the same time.
    let own = into.with_extension(std::process::id().to_string());
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-fPIC", "-shared"]).args(options).arg("-o");
    match command.arg(&own).arg(source).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            skip("g++", "there is no C++ compiler to build the stand-in driver with");
            None
        }
        Err(error) => panic!("g++ cannot be started: {error}"),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            fs::rename(&own, into).expect("a file can be renamed in its folder");
            Some(into.to_path_buf())
        }
    }
}

/// Says that something was not tested (`docs/TESTING.md`, "Skips").
pub(super) fn skip(what: &str, why: &str) {
    let required = env::var("PSERVER_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one.trim() == what), "{what} is required here: {why}");
    let line = format!("SKIPPED: {what}: {why}");
    println!("{line}");
    let Ok(report) = env::var("PSERVER_SKIP_REPORT") else { return };
    let file = fs::OpenOptions::new().create(true).append(true).open(&report);
    let written = file.and_then(|mut file| io::Write::write_all(&mut file, format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("the report of skipped tests, {report}: {error}"));
}
