//! Standard output and standard error that are closed, or files on a full disk, and files beyond the limit of sizes: a
//! command ends with its status and a text, and never by a panic or a signal.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pserver");

/// A file of the repository.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn pserver(arguments: &[&str], folder: &Path) -> Command {
    let mut command = pserver_processes::unconfigured(Path::new(PROGRAM));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A pipe without a reader.
fn closed() -> Stdio {
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with a trained model.
fn trained() -> TempDir {
    let folder = TempDir::new().expect("there is room");
    let (program, data) = (file("docs/programs/mlp.program"), file("docs/programs/digits.npz"));
    fs::copy(program, folder.path().join("mlp.program")).expect("it is there");
    fs::copy(data, folder.path().join("digits.npz")).expect("it is there");
    let mut command = pserver(&TRAIN, folder.path());
    let output = command.args(["--save", "m.safetensors"]).output().expect("it can be run");
    assert!(output.status.success(), "{}", text(&output));
    folder
}

const TRAIN: [&str; 10] = [
    "train",
    "mlp.program",
    "--data",
    "digits.npz",
    "--batch",
    "32",
    "--epochs",
    "1",
    "--optimizer",
    "const_lr { learning_rate: 0.1 }",
];

#[test]
fn an_unwritable_output_is_an_error_and_never_a_panic() {
    let folder = trained();
    let paddle = ["main", "startup"].map(|part| file(&format!("program/tests/paddle/autoencoder.{part}.pb")));
    let [main, startup] = paddle.map(|path| path.display().to_string());
    let example = file("docs/programs/example.program").display().to_string();
    let small = ["--epochs", "1", "--trainers", "1", "--servers", "1", "--model-dir", "models"];
    let quickstart = [&["quickstart"][..], &small].concat();
    let commands: [(&[&str], i32); 10] = [
        (&["serve", "--print-config"], 1),
        (&["env"], 1),
        (&["predict", "mlp.program", "--model", "m.safetensors", "--data", "digits.npz", "--fetch", "scores"], 1),
        (&["transpile", &example, "--trainers", "2", "--servers", "2"], 1),
        (&["import-paddle", &main, &startup], 1),
        (&quickstart, 1),
        (&TRAIN, 1),
        (&["launch", "--", "echo", "a result"], 1),
        // The status of this command is a verdict; the status of a help text has no meaning.
        (&["inspect", "m.safetensors"], 0),
        (&["--help"], 0),
    ];
    for (arguments, status) in commands {
        let output = pserver(arguments, folder.path()).stdout(full()).output().expect("it can be run");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output));
        let has_reason = text(&output).contains("No space left on device");
        assert!(has_reason == (status == 1), "{arguments:?}: {}", text(&output));
        let output = pserver(arguments, folder.path()).stdout(closed()).output().expect("it can be run");
        let expected = if arguments[0] == "launch" { 128 + 13 } else { status };
        assert_eq!(output.status.code(), Some(expected), "{arguments:?}: {}", text(&output));
        let errors = text(&output);
        let is_quiet = !errors.contains("standard output") || arguments[0] == "launch";
        assert!(is_quiet && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
}

#[test]
fn an_unwritable_error_stream_does_not_end_the_work() {
    let folder = trained();
    let paddle = ["main", "startup"].map(|part| file(&format!("program/tests/paddle/autoencoder.{part}.pb")));
    let [main, startup] = paddle.map(|path| path.display().to_string());
    let commands: [(&[&str], i32); 4] = [
        (&["import-paddle", &main, &startup, "-o", "imported.program"], 0),
        (&TRAIN, 0),
        (&["inspect", "none"], 3),
        (&["env", "trainer=x"], 1),
    ];
    for (arguments, status) in commands {
        for stream in [full(), closed()] {
            let mut command = pserver(arguments, folder.path());
            let output = command.stderr(stream).output().expect("it can be run");
            assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        }
    }
    let imported = fs::read_to_string(folder.path().join("imported.program")).expect("it is written");
    assert!(imported.starts_with("block 0 {"), "{imported}");
}

#[test]
fn a_file_beyond_the_limit_of_sizes_is_an_error_of_its_writer() {
    let folder = trained();
    let limited = |arguments: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -f 8; exec \"$@\"", "sh"]).arg(PROGRAM).args(arguments);
        shell.current_dir(folder.path()).stdin(Stdio::null()).output().expect("it can be run")
    };
    let predict = ["predict", "mlp.program", "--model", "m.safetensors", "--data", "digits.npz", "--fetch", "scores"];
    let output = limited(&[&predict[..], &["-o", "scores.csv"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output).contains("scores.csv: File too large"), "{}", text(&output));
    let steps = ["--save", "n.safetensors"];
    let output = limited(&[&TRAIN[..], &steps].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output).contains("File too large"), "{}", text(&output));
}
