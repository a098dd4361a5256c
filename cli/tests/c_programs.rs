//! C programs against the real library and real servers, plainly and under valgrind.
//!
//! On a machine without a compiler, `PSERVER_C_PROGRAMS` names a folder of programs that were built elsewhere from the
//! same sources. `PSERVER_TEST_BIND` is the address on which servers listen instead of [`TCP`].

mod cluster;
mod trainings;

use std::fmt::Write;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use pserver_cli::quickstart::digits::Digits;
use pserver_client::{Client, ClientOptions, DestinationSlice};
use pserver_core::wire::Address;
use pserver_kernels::conformance::skips::skip;
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;
use pserver_trainer::read_model;
use tempfile::TempDir;

use cluster::asked::is_set;
use cluster::process::Process;
use trainings::OneProcess;

const TCP: &str = "tcp://127.0.0.1:0";

/// A server process, which ends when this value does.
struct Server {
    process: Process,
    address: String,
}

/// How a program is linked.
#[derive(Clone, Copy)]
enum Link {
    Shared,
    Static,
}

/// The compiler of a program.
#[derive(Clone, Copy)]
enum Language {
    C,
    Cpp,
    Cpp17,
}

impl Server {
    fn start(folder: &Path, bind: &str, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
        command
            .args(["serve", "--bind", bind])
            .args(if more.contains(&"--trainers") { &[][..] } else { &["--trainers", "1"] })
            .args(["--optimizer", "optimizer: SGD const_lr { learning_rate: 0.1 }", "--model-dir"])
            .arg(folder)
            .args(more);
        let process = Process::run(&mut command).expect("the server starts");
        Self { address: process.address.to_string(), process }
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi")
}

/// A library that was built beside this test.
fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a test has a path");
    let mut folders = program.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    folders.find(|path| path.exists()).unwrap_or_else(|| panic!("{name} was not built beside {}", program.display()))
}

/// The folder with prebuilt programs.
fn made() -> Option<PathBuf> {
    std::env::var_os("PSERVER_C_PROGRAMS").map(PathBuf::from)
}

/// Compiles a program without any warning, and links it.
fn compile(folder: &Path, source: &str, language: Language, link: Link) -> PathBuf {
    if let Some(made) = made() {
        return made.join(Path::new(source).file_stem().expect("a source has a name"));
    }
    let program = folder.join("program");
    let (compiler, standard) = match language {
        Language::C => ("cc", ["-std=c99", "-xc"]),
        Language::Cpp => ("g++", ["-std=c++11", "-xc++"]),
        Language::Cpp17 => ("g++", ["-std=c++17", "-xc++"]),
    };
    let mut command = Command::new(compiler);
    command.args(standard).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g", "-I"]);
    command.arg(sources().join("include")).arg(sources().join(source)).arg("-xnone").arg("-o").arg(&program);
    match link {
        Link::Shared => {
            let built = library("libpaddle_pserver.so");
            let place = built.parent().expect("a file is in a folder").display().to_string();
            command.arg(format!("-L{place}")).arg("-lpaddle_pserver").arg(format!("-Wl,-rpath,{place}"));
        }
        Link::Static => {
            command.arg(library("libpaddle_pserver.a")).args(["-lpthread", "-ldl", "-lm"]);
        }
    }
    succeeded(&command.output().expect("there is a compiler"), source);
    program
}

fn succeeded(output: &Output, what: &str) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{what}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
}

/// Runs a program against new servers, with only their addresses in its environment.
fn run(command: Command, source: &str, argument: impl Fn(&str) -> Option<String>, place: (&Path, &str)) {
    run_with(command, source, argument, place, &[]);
}

/// Runs a program as `run` does, with further variables in its environment.
fn run_with(
    mut command: Command,
    source: &str,
    argument: impl Fn(&str) -> Option<String>,
    (folder, bind): (&Path, &str),
    more: &[(&str, &str)],
) {
    let first = Server::start(folder, bind, &["--shards", "2", "--servers", "2"]);
    let second = start_second(folder, bind, &first.address);
    command.env_clear().env("PSERVER_COORDINATOR", &first.address).env("PSERVER_DEADLINE", "60s");
    command.envs(more.iter().copied());
    command.args(argument(&first.address));
    succeeded(&command.output().expect("the program starts"), source);
    drop((first, second));
}

/// The second server says that it is ready once it has registered with the first.
fn start_second(folder: &Path, bind: &str, coordinator: &str) -> Server {
    Server::start(folder, bind, &["--servers", "2", "--index", "1", "--coordinator", coordinator])
}

fn check(source: &str, language: Language, link: Link, argument: impl Fn(&str) -> Option<String>) {
    let bind = std::env::var("PSERVER_TEST_BIND").unwrap_or_else(|_| TCP.to_owned());
    check_at(&bind, source, language, link, argument);
}

/// The same with servers that listen at `bind`.
fn check_at(bind: &str, source: &str, language: Language, link: Link, argument: impl Fn(&str) -> Option<String>) {
    let folder = TempDir::new().expect("there is room");
    let program = compile(folder.path(), source, language, link);
    run(Command::new(&program), source, &argument, (folder.path(), bind));
    // valgrind runs only where the program was compiled.
    if matches!(link, Link::Static) || made().is_some() {
        return;
    }
    if !has_valgrind() {
        skip("valgrind", &format!("it is not installed, and {source} does not run under it"));
        return;
    }
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]);
    command.arg("--show-leak-kinds=definite,indirect");
    command.arg(&program);
    // The shell's PATH is not in the environment that programs get, and valgrind finds its tools by itself.
    run(command, &format!("valgrind {source}"), &argument, (folder.path(), bind));
}

fn has_valgrind() -> bool {
    Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn nothing(_: &str) -> Option<String> {
    None
}

#[test]
fn edition_1_trains() {
    check("tests/c/edition1.c", Language::C, Link::Shared, nothing);
}

#[test]
fn edition_2_trains() {
    check("tests/c/edition2.c", Language::C, Link::Shared, nothing);
}

#[test]
fn edition_3_trains() {
    check("tests/c/edition3.c", Language::C, Link::Shared, nothing);
}

#[test]
fn edition_3_trains_from_cpp_and_from_the_static_library() {
    check("tests/c/edition3.c", Language::Cpp, Link::Static, nothing);
}

#[test]
fn every_class_of_the_cpp_header_works() {
    check("tests/c/faces.cpp", Language::Cpp17, Link::Shared, nothing);
}

#[test]
fn programs_are_trained_from_cpp() {
    check("tests/c/loaded.cpp", Language::Cpp17, Link::Shared, nothing);
}

#[test]
fn calls_of_64_bits_work_from_fortran() {
    check_fortran("tests/c/faces.f90");
}

#[test]
fn programs_are_trained_from_fortran() {
    check_fortran("tests/c/loaded.f90");
}

fn check_fortran(source: &str) {
    // Guests get no Fortran programs.
    if made().is_some() {
        return;
    }
    if Command::new("gfortran").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("gfortran", &format!("it is not installed, and {source} is not compiled"));
    }
    let folder = TempDir::new().expect("there is room");
    let (program, built) = (folder.path().join("program"), library("libpaddle_pserver.so"));
    let place = built.parent().expect("a file is in a folder").display().to_string();
    let mut command = Command::new("gfortran");
    command.args(["-std=f2008", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g", "-J"]).arg(folder.path());
    command.arg(sources().join("include/paddle_pserver.f90")).arg(sources().join(source)).arg("-o").arg(&program);
    command.arg(format!("-L{place}")).arg("-lpaddle_pserver").arg(format!("-Wl,-rpath,{place}"));
    succeeded(&command.output().expect("there is a compiler"), source);
    run(Command::new(program), source, nothing, (folder.path(), TCP));
}

#[test]
fn a_program_for_paddles_own_library_trains() {
    let addresses = |address: &str| Some(address.trim_start_matches("tcp://").to_owned());
    check("tests/c/go.c", Language::C, Link::Shared, addresses);
}

#[test]
fn bad_input_gets_a_status_and_a_text_and_never_a_crash() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("there is a port");
    let address = silent.local_addr().expect("it is bound");
    check("tests/c/bad_input.c", Language::C, Link::Shared, |_| Some(format!("tcp://{address}")));
}

#[test]
fn no_pointer_of_edition_1_may_be_null() {
    check("tests/c/bad_input_edition1.c", Language::C, Link::Shared, nothing);
}

#[test]
fn no_pointer_of_edition_2_may_be_null() {
    check("tests/c/bad_input_edition2.c", Language::C, Link::Shared, nothing);
}

#[test]
fn a_rule_comes_as_text_by_name_or_from_a_file() {
    let lion = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/rules/lion.rule");
    check("tests/c/rule.c", Language::C, Link::Shared, |_| Some(lion.to_owned()));
}

#[test]
fn threads_share_a_client() {
    check("tests/c/threads.c", Language::C, Link::Shared, nothing);
}

#[test]
fn calls_are_started_and_waited_for() {
    check("tests/c/started.c", Language::C, Link::Shared, nothing);
}

#[test]
fn a_job_that_runs_is_checkpointed_and_loaded_and_errors_have_codes() {
    check("tests/c/running.c", Language::C, Link::Shared, nothing);
    for bind in [TCP, "shm://127.0.0.1:0"] {
        let folder = TempDir::new().expect("there is room");
        let program = compile(folder.path(), "tests/c/running.c", Language::C, Link::Shared);
        let checkpoints = folder.path().join("checkpoints").display().to_string();
        let server = Server::start(folder.path(), bind, &["--checkpoint-dir", &checkpoints]);
        let mut command = Command::new(program);
        command.env_clear().env("PSERVER_COORDINATOR", &server.address).arg(folder.path().join("saved.safetensors"));
        succeeded(&command.output().expect("the program starts"), bind);
    }
}

#[test]
fn a_server_that_is_killed_ends_the_call_and_not_the_program() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    let binds = bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]);
    for (bind, when) in binds.iter().flat_map(|bind| [(bind, "under"), (bind, "between")]) {
        let folder = TempDir::new().expect("there is room");
        let program = compile(folder.path(), "tests/c/lost.c", Language::C, Link::Shared);
        let server = Server::start(folder.path(), bind, &[]);
        let mut command = Command::new(program);
        command.env_clear().env("PSERVER_COORDINATOR", &server.address).env("PSERVER_DEADLINE", "4s");
        let output = command.args([&server.process.id().to_string(), when]).output().expect("the program starts");
        succeeded(&output, &format!("{bind}, {when}"));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "alive\n");
    }
}

#[test]
fn calls_are_cancelled_by_signals_and_by_threads() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    for bind in bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]) {
        let folder = TempDir::new().expect("there is room");
        let program = compile(folder.path(), "tests/c/cancel.c", Language::C, Link::Shared);
        let server = Server::start(folder.path(), bind, &["--trainers", "2"]);
        let mut command = Command::new(program);
        command.env_clear().env("PSERVER_COORDINATOR", &server.address).env("PSERVER_DEADLINE", "60s");
        let output = command.output().expect("the program starts");
        println!("{bind}\n{}", String::from_utf8_lossy(&output.stdout));
        succeeded(&output, bind);
    }
}

#[test]
fn a_program_that_closes_every_descriptor_goes_on_and_keeps_its_own_files() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    for bind in bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]) {
        let folder = TempDir::new().expect("there is room");
        let source = "tests/c/closed.c";
        let program = compile(folder.path(), source, Language::C, Link::Shared);
        let server = Server::start(folder.path(), bind, &[]);
        let mut command = Command::new(program);
        command.env_clear().env("PSERVER_COORDINATOR", &server.address).env("PSERVER_DEADLINE", "20s");
        let output = command.output().expect("the program starts");
        succeeded(&output, &format!("{bind}: {source}"));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{bind}: no panic is printed");
    }
}

#[test]
fn rows_are_sent_and_fetched() {
    check("tests/c/rows.c", Language::C, Link::Shared, nothing);
}

#[test]
fn tensors_and_rows_are_transferred_listed_and_set_with_their_states() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    for bind in bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]) {
        check_at(bind, "tests/c/tensors.c", Language::C, Link::Shared, nothing);
    }
}

#[test]
fn lengths_have_64_bits() {
    // A guest's emulated processor would take a minute for gigabytes, and no length depends on the transport.
    if made().is_some() {
        return;
    }
    check_lengths(&[None, Some("program")]);
}

#[test]
fn data_of_a_program_have_64_bits() {
    if !is_set("PSERVER_LARGE") || made().is_some() {
        return skip("large", "PSERVER_LARGE=1 runs it");
    }
    check_lengths(&[Some("large")]);
}

fn check_lengths(arguments: &[Option<&str>]) {
    let (folder, source) = (TempDir::new().expect("there is room"), "tests/c/lengths.c");
    let program = compile(folder.path(), source, Language::C, Link::Shared);
    for argument in arguments {
        run(Command::new(&program), source, |_| argument.map(str::to_owned), (folder.path(), TCP));
    }
}

#[test]
fn gradients_and_parameters_need_no_copies() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    for bind in bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]) {
        check_at(bind, "tests/c/memory.c", Language::C, Link::Shared, |address| Some(address.to_owned()));
    }
}

#[test]
fn gradients_and_parameters_are_sent_in_half_precision() {
    let bind = std::env::var("PSERVER_TEST_BIND");
    for bind in bind.as_deref().map_or(vec![TCP, "shm://127.0.0.1:0"], |bind| vec![bind]) {
        check_at(bind, "tests/c/halves.c", Language::C, Link::Shared, nothing);
    }
}

#[test]
fn gradients_and_parameters_may_lie_on_a_device() {
    let mut more = match standin::driver_with(&shipped::module()) {
        Ok(vars) => vars,
        Err(why) => return skip("g++", &why),
    };
    more.extend([("PSERVER_STANDIN_GUARD", "1".to_owned()), ("PSERVER_STANDIN_DEVICES", "3".to_owned())]);
    let more: Vec<_> = more.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let folder = TempDir::new().expect("there is room");
    let source = "tests/c/device.c";
    let program = compile(folder.path(), source, Language::C, Link::Shared);
    for bind in ["tcp://127.0.0.1:0", "shm://127.0.0.1:0"] {
        run_with(Command::new(&program), source, nothing, (folder.path(), bind), &more);
    }
}

#[test]
fn a_child_process_makes_a_client_of_its_own() {
    let options = |address: &str| Some(format!("reader=yes coordinator={address}"));
    check("tests/c/fork.c", Language::C, Link::Shared, options);
}

#[test]
fn the_example_trains() {
    check("../examples/trainer.c", Language::C, Link::Shared, nothing);
}

/// A trainer of the example is killed again and again within calls and started again: the parameter ends with the bits
/// of an undisturbed job. The long form has 100 kills.
#[test]
fn the_example_goes_on_after_kills_with_the_bits_of_an_undisturbed_job() {
    let kills = if is_set("PSERVER_FULL") { 100 } else { 5 };
    let steps = 400 * (kills + 1);
    let folder = TempDir::new().expect("there is room");
    let program = compile(folder.path(), "../examples/trainer.c", Language::C, Link::Shared);
    let undisturbed = line_after(&program, folder.path(), steps, 0);
    assert_eq!(line_after(&program, folder.path(), steps, kills), undisturbed, "after {kills} kills");
}

/// The bytes of the example's parameter after the steps of two trainers. The second trainer is killed `kills` times.
fn line_after(program: &Path, folder: &Path, steps: u64, kills: u64) -> Vec<u8> {
    let bind = std::env::var("PSERVER_TEST_BIND").unwrap_or_else(|_| TCP.to_owned());
    let server = Server::start(folder, &bind, &["--trainers", "2"]);
    let trainer = |rank: &str| {
        let mut command = Command::new(program);
        command.env_clear().env("PSERVER_COORDINATOR", &server.address).env("PSERVER_TRAINER", rank);
        command.arg(steps.to_string()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts")
    };
    let coordinator = Address::parse(&server.address).expect("an address");
    let watcher = Client::new(ClientOptions { is_reader: true, ..ClientOptions::new(coordinator) }).expect("a client");
    let updates = || watcher.parameters().ok().and_then(|all| Some(all.first()?.version.0)).unwrap_or(0);
    let (first, mut second) = (trainer("0"), trainer("1"));
    for kill in 1..=kills {
        // Between two looks a call takes longer than this process does, so that the place within a step is random.
        while updates() < kill * steps / (kills + 1) {
            let ended = second.try_wait().expect("a child can be asked");
            assert!(ended.is_none(), "the trainer ended before kill {kill}: {ended:?}");
        }
        second.kill().expect("it runs");
        second.wait().expect("it ends");
        second = trainer("1");
    }
    for trainer in [first, second] {
        succeeded(&trainer.wait_with_output().expect("the program ends"), "examples/trainer.c");
    }
    assert_eq!(updates(), steps, "each step counts once");
    let mut line = vec![0; 8];
    watcher.pull(&mut [DestinationSlice::new("line", &mut line)]).expect("the server is there");
    line
}

#[test]
fn programs_are_loaded_fed_stepped_read_and_saved() {
    let folder = TempDir::new().expect("there is room");
    let place = folder.path().display().to_string();
    check("tests/c/program.c", Language::C, Link::Shared, |_| Some(place.clone()));
}

#[test]
fn the_example_trains_a_program_of_text_to_the_bits_of_one_process() {
    let text = include_str!("../../docs/programs/mlp.program");
    let folder = TempDir::new().expect("there is room");
    let file = |name: &str| folder.path().join(name);
    let digits = Digits::load().expect("the digits are in the program");
    let mut data: String = (0..64).map(|pixel| format!("pixels.{pixel},")).collect::<String>() + "label\n";
    for digit in digits.part(0, 1).expect("one trainer has all") {
        digit.pixels.iter().for_each(|pixel| write!(data, "{},", pixel * 16.0).expect("a string takes everything"));
        writeln!(data, "{}", digit.label).expect("a string takes everything");
    }
    fs::write(file("mlp.program"), text).expect("a file");
    fs::write(file("digits.csv"), &data).expect("a file");
    let program = compile(folder.path(), "../examples/digits.c", Language::C, Link::Shared);
    let bind = std::env::var("PSERVER_TEST_BIND").unwrap_or_else(|_| TCP.to_owned());
    let two = ["--servers", "2", "--trainers", "2"];
    let first = Server::start(folder.path(), &bind, &two);
    let second =
        Server::start(folder.path(), &bind, &[&two[..], &["--index", "1", "--coordinator", &first.address]].concat());
    let trainer = || {
        let mut command = Command::new(&program);
        command.current_dir(folder.path()).env_clear().env("PSERVER_COORDINATOR", &first.address);
        command.args(["mlp.program", "digits.csv", "2", "3", "model.safetensors"]).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).spawn().expect("the program starts")
    };
    let both = [trainer(), trainer()];
    for one in both {
        let output = one.wait_with_output().expect("the program ends");
        succeeded(&output, "examples/digits.c");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let accuracy = text.lines().last().and_then(|line| line.rsplit_once(' ')).expect("a line for each epoch").1;
        assert!(accuracy.parse::<f64>().expect("a number") > 0.85, "{text}");
    }
    drop((first, second));
    let optimizer = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";
    let oracle = OneProcess { program: text, optimizer, data: &file("digits.csv"), batch: 64, epochs: 3 };
    let model = read_model(&file("model.safetensors")).expect("a model");
    assert!(model == oracle.train(2), "the bits differ from those of one process");
}

#[test]
fn the_shared_library_exports_our_names_only() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library("libpaddle_pserver.so")).output();
    let output = output.expect("there is nm");
    succeeded(&output, "nm");
    let text = String::from_utf8(output.stdout).expect("names are ASCII");
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    names.sort_unstable();
    let listed: Vec<&str> = include_str!("../../capi/symbols.txt").lines().collect();
    assert_eq!(names, listed, "the exported symbols and capi/symbols.txt");
}
