//! Every cell of the table of `pserver train` on `docs/SETTINGS.md`: a case contradicts a training that ended with the
//! setting, and checks the effect that the cell documents.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::cluster::job::{Job, TCP, reader};
use crate::cluster::process::Processes;
use crate::cluster::settings_page::Outcome::{Refused, TakesEffect, Warned};
use crate::cluster::settings_page::{Case, check};
use crate::trainings::{Place, Said, numbers};
use pserver_core::config::Mode;
use pserver_program::{Elements, Tensor};
use pserver_trainer::write_tensors;

const TRAIN: &str = "`pserver train`";
const PROGRAM: &str = "block 0 {
    data x: float32[batch, 3]
    parameter w: float32[3, 4]
    parameter b: float32[4]
    initialise w = given(name=\"w\")
    initialise b = fill(value=0.25)
    forward product = matmul(x, w)
    forward y = add(product, b)
    forward square = mul(y, y)
    forward loss = mean(square)
    forward other = mean(y)
}
";
/// The arguments of a training of two epochs, each with its value.
const ARGUMENTS: [(&str, &str); 6] = [
    ("--data", "data.csv"),
    ("--batch", "8"),
    ("--epochs", "2"),
    ("--optimizer", "optimizer: SGD const_lr { learning_rate: 0.0625 }"),
    ("--values", "values.npz"),
    ("--save", "model.safetensors"),
];
/// The same optimizer, with which parameters stay.
const STILL: (&str, &str) = ("--optimizer", "optimizer: SGD const_lr { learning_rate: 0 }");
const ADAM: (&str, &str) = ("--optimizer", "optimizer: Adam adam { } const_lr { learning_rate: 0.0625 }");

type Model = BTreeMap<String, Tensor>;
/// Changed arguments, each with its value; a flag's is empty.
type Changes<'a> = &'a [(&'a str, &'a str)];
/// Parts of an error text.
type Words<'a> = &'a [&'a str];

/// A folder with a training of two epochs, its final model, and that of a training of four epochs.
struct TrainScene {
    place: Place,
    two: Model,
    four: Model,
    trainers: &'static str,
}

impl TrainScene {
    fn new(trainers: &'static str) -> Self {
        let place = Place::new();
        place.write("net.program", PROGRAM);
        place.write("other.program", &PROGRAM.replace("square = mul(y, y)", "square = mul(y, product)"));
        let more = PROGRAM.replace(
            "    initialise w",
            "    parameter c: float32[]\n    initialise c = fill(value=1.0)\n    initialise w",
        );
        place.write(
            "more.program",
            &more.replace("square = mul(y, y)", "moved = add(y, c)\n    forward square = mul(moved, y)"),
        );
        let table = |rows: u32, factor: u32| {
            let mut text = "x.0,x.1,x.2\n".to_owned();
            for row in 0..rows {
                writeln!(text, "{},{},{}", row * factor % 3, row % 5, row % 2).expect("a string takes everything");
            }
            text
        };
        place.write("on-1.txt", "w 1\nb 0\n");
        place.write("data.csv", &table(24, 1));
        place.write("other.csv", &table(24, 2));
        place.write("long.csv", &table(32, 1));
        for (file, number) in [("values.npz", 0.5), ("others.npz", 0.25)] {
            let value = |length: usize| Elements::Float32(vec![number; length]);
            let values = [("w".to_owned(), Tensor::new(vec![3, 4], value(12)))];
            write_tensors(&place.path().join(file), &values).expect("it is written");
        }
        let scene = Self { place, two: Model::new(), four: Model::new(), trainers };
        let four = scene.local("whole", &[("--epochs", "4")]);
        assert!(four.is_success, "{four:?}");
        let four = scene.model();
        let two = scene.local("kept", &[]);
        assert!(two.is_success, "{two:?}");
        let two = scene.model();
        Self { two, four, ..scene }
    }

    /// `pserver train` with changed arguments.
    fn run(&self, program: &str, changes: Changes<'_>) -> Said {
        let mut all: Vec<(&str, &str)> = ARGUMENTS.to_vec();
        for (name, value) in changes {
            all.retain(|(known, _)| known != name);
            all.push((name, value));
        }
        let mut words = vec!["train", program];
        all.iter().for_each(|(name, value)| words.extend([*name, *value].iter().filter(|word| !word.is_empty())));
        let _ = fs::remove_file(self.place.path().join("model.safetensors"));
        self.place.run(&words)
    }

    /// A training with its own servers.
    fn local(&self, folder: &str, changes: Changes<'_>) -> Said {
        self.run("net.program", &[&[("--trainers", self.trainers), ("--checkpoint", folder)], changes].concat())
    }

    fn model(&self) -> Model {
        self.place.model("model.safetensors")
    }

    /// A copy of the training's checkpoint.
    fn copied(&self) -> &'static str {
        let again = self.place.path().join("again");
        let _ = fs::remove_dir_all(&again);
        copy(&self.place.path().join("kept"), &again);
        "again"
    }

    /// Resumes the copy to four epochs with changes.
    fn resume(&self, changes: Changes<'_>) -> Said {
        self.local("again", &[&[("--resume", ""), ("--epochs", "4")], changes].concat())
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("there is room");
    for entry in fs::read_dir(from).expect("it is there") {
        let entry = entry.expect("it can be read");
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).expect("there is room");
        }
    }
}

/// Checks that the training succeeds and warns of no setting without effect other than --values, which a program with
/// an op `given` needs also where the values have no effect.
fn must_succeed(said: &Said) {
    let is_warning = |line: &str| line.contains("no effect") && !line.starts_with("--values values.npz: ");
    assert!(said.is_success && !said.errors.lines().any(is_warning), "{said:?}");
}

fn must_refuse(said: &Said, words: Words<'_>) {
    assert!(!said.is_success, "expected {words:?}: {said:?}");
    words.iter().for_each(|word| assert!(said.errors.contains(word), "expected {word:?}: {said:?}"));
}

#[test]
fn settings_beside_resume_do_what_the_page_says() {
    let cases: [Case<TrainScene>; 7] = [
        (&["--optimizer"], TakesEffect, |scene| {
            scene.copied();
            must_succeed(&scene.resume(&[STILL]));
            assert!(scene.model() == scene.two, "the rate of zero moves nothing");
        }),
        (
            &[
                "--optimizer",
                "--batch",
                "--shuffle",
                "--data",
                "--validation",
                "--trainers",
                "--servers",
                "--strategy",
                "--mode",
                "--staleness",
                "--backup-trainers",
                "--late-gradients",
                "--balance",
                "--memory",
                "--placement",
                "--rates",
                "program",
                "--loss",
                "--connect",
                "--rank",
            ],
            Refused,
            resume_refused,
        ),
        (&["--trainers"], TakesEffect, |scene| {
            scene.copied();
            must_succeed(&scene.resume(&[STILL, ("--trainers", "1")]));
            assert!(scene.model() == scene.two, "the rate of zero moves nothing");
        }),
        (&["--epochs", "--save", "--checkpoint", "--resume"], TakesEffect, |scene| {
            scene.copied();
            must_go_on(&scene.resume(&[]), scene);
        }),
        (&["--metric"], TakesEffect, |scene| {
            scene.copied();
            let said = scene.resume(&[("--metric", "other")]);
            must_go_on(&said, scene);
            assert!(numbers(&said.output).contains_key("other"), "{said:?}");
        }),
        (&["--values"], Warned, |scene| {
            scene.copied();
            let said = scene.resume(&[("--values", "others.npz")]);
            must_go_on(&said, scene);
            let words = "--values others.npz: no effect beside --resume; the checkpoint has the values";
            assert!(said.errors.contains(words), "{said:?}");
        }),
        (&["--values"], Warned, |scene| {
            let kept = scene.copied();
            fs::remove_file(scene.place.path().join(kept).join("training.json")).expect("the record is there");
            let said = scene.resume(&[("--values", "others.npz")]);
            assert!(said.errors.contains("--values others.npz: no effect beside --resume"), "{said:?}");
            assert!(said.errors.contains("found no again/training.json"), "{said:?}");
        }),
    ];
    check(TRAIN, 0, &TrainScene::new("2"), &cases);
}

/// The training went on with the step after its last one; the caller checks the warning of `--values`.
fn must_go_on(said: &Said, scene: &TrainScene) {
    assert!(said.is_success, "{said:?}");
    assert!(scene.model() == scene.four, "the bits are those of a training without a break");
}

/// All on one checkpoint, which then goes on as if nothing had been asked.
fn resume_refused(scene: &TrainScene) {
    scene.copied();
    let table: [(Changes<'_>, Words<'_>); 20] = [
        (&[("--batch", "4")], &["--batch 4: ", "has steps of 8 rows", "expected --batch 8, or a new folder"]),
        (&[("--shuffle", "7")], &["found --shuffle 7: ", "has no --shuffle", "expected the same, or a new folder"]),
        (&[("--data", "long.csv")], &["--data: found 32 rows", "has 24", "expected as many, or a new folder"]),
        (&[("--validation", "0.5")], &["--data: found 12 rows", "has 24", "expected as many, or a new folder"]),
        (&[("--loss", "other")], &["--loss other: ", "has the loss loss", "expected --loss loss, or a new folder"]),
        (&[("--servers", "2")], &["servers = 2 (from --servers)", "on 1 servers", "expected servers = 1"]),
        (&[("--strategy", "columns")], &["found --strategy columns", "expected --strategy parameter-server"]),
        (&[("--connect", "127.0.0.1:1")], &["cannot be used with", "--connect"]),
        (&[("--rank", "0")], &["'--trainers <TRAINERS>' cannot be used with '--rank"]),
        (&[("--mode", "async")], &["--checkpoint: found another --mode than sync", "expected sync"]),
        (&[("--staleness", "2")], &["--staleness: found another --mode than bounded"]),
        (&[("--balance", "bytes")], &["invalid value 'bytes' for '--balance", "time, memory"]),
        (&[("--memory", "64")], &["server:0 would hold", "expected at most 64 for each"]),
        (&[("--placement", "on-1.txt")], &["found the server 1 of the parameter \"w\"", "expected one below 1"]),
        (&[("--rates", "net.program")], &["--rates net.program", "line 1: found \"block 0 {\""]),
        (&[("--placement", "net.program")], &["--placement net.program", "line 1: found \"block 0 {\""]),
        (
            &[("--backup-trainers", "1")],
            &["found the optimizer `", "backup_trainers: 1", "only a constant learning rate"],
        ),
        (
            &[("--backup-trainers", "1"), ("--late-gradients", "next")],
            &["found the program", "expected the program and the strategy"],
        ),
        (&[ADAM], &["found the optimizer `", "Adam", "0.0625", "only a constant learning rate may change"]),
        // The trainers that were refused have not left.
        (&[("--trainers", "4")], &["trainers = 4 (from --trainers)", "has 2 trainers", "expected trainers = 2"]),
    ];
    for (changes, words) in table {
        must_refuse(&scene.resume(changes), words);
    }
    let other = [("--trainers", "2"), ("--checkpoint", "again"), ("--resume", ""), ("--epochs", "4")];
    let words = ["other.program: found a program", "that of the training in the checkpoint has", "expected the same"];
    must_refuse(&scene.run("other.program", &other), &words);
    must_go_on(&scene.resume(&[]), scene);
}

/// A job of one trainer, trained for two epochs, and a second trainer that joins it for two more.
struct Running {
    processes: Processes,
    address: String,
}

impl Running {
    fn new(trainers: u32) -> Self {
        let processes = Processes::start(Job { bind: TCP, ..Job::new(1, trainers) });
        let address = processes.coordinator().to_string();
        Self { processes, address }
    }

    fn trained(scene: &TrainScene) -> Self {
        let running = Self::new(1);
        let said = running.join(scene, "net.program", &[("--epochs", "2")]);
        assert!(said.is_success && scene.model() == scene.two, "{said:?}");
        running
    }

    fn join(&self, scene: &TrainScene, program: &str, changes: Changes<'_>) -> Said {
        scene.run(program, &[&[("--connect", self.address.as_str()), ("--epochs", "4")], changes].concat())
    }
}

/// A trainer with a change trains on, to other values than without it.
fn joined(scene: &TrainScene, program: &str, change: &[(&str, &str)]) -> (Said, Model) {
    let running = Running::trained(scene);
    let said = running.join(scene, program, change);
    assert!(said.is_success, "{change:?}: {said:?}");
    running.processes.terminate();
    (said, scene.model())
}

#[test]
fn settings_beside_connect_do_what_the_page_says() {
    let cases: [Case<TrainScene>; 7] = [
        (&["--optimizer"], TakesEffect, |scene| assert!(joined(scene, "net.program", &[STILL]).1 == scene.two)),
        (&["--batch", "--shuffle", "--data", "--validation", "program", "--loss"], TakesEffect, |scene| {
            let changes = [("--batch", "4"), ("--shuffle", "7"), ("--data", "other.csv"), ("--validation", "0.25")];
            for change in changes.into_iter().chain([("--loss", "other")]) {
                let (said, model) = joined(scene, "net.program", &[change]);
                assert!(model != scene.two && model != scene.four, "{change:?}: {said:?}");
            }
            let model = joined(scene, "other.program", &[]).1;
            assert!(model != scene.two && model != scene.four);
        }),
        (
            &[
                "--optimizer",
                "--trainers",
                "--servers",
                "--strategy",
                "--mode",
                "--staleness",
                "--backup-trainers",
                "--late-gradients",
                "--balance",
                "--memory",
                "--placement",
                "--rates",
                "program",
                "--checkpoint",
                "--resume",
            ],
            Refused,
            |scene| {
                connect_refused(scene);
                another_division();
            },
        ),
        (&["--epochs", "--save", "--connect", "--rank"], TakesEffect, |scene| {
            assert!(joined(scene, "net.program", &[("--rank", "0")]).1 == scene.four);
        }),
        (&["--metric"], TakesEffect, |scene| {
            let said = joined(scene, "net.program", &[("--metric", "other")]).0;
            assert!(numbers(&said.output).contains_key("other"), "{said:?}");
        }),
        (&["--values"], TakesEffect, |scene| {
            let running = Running::new(1);
            let said = running.join(scene, "net.program", &[("--values", "others.npz")]);
            must_succeed(&said);
            assert!(scene.model() != scene.four, "it begins with other values");
            running.processes.terminate();
        }),
        (&["--values"], Warned, |scene| {
            let (said, model) = joined(scene, "net.program", &[("--values", "others.npz")]);
            assert!(model == scene.four, "{said:?}");
            let words = "--values others.npz: no effect in a job that has had 6 steps and its values";
            assert!(said.errors.contains(words), "{said:?}");
        }),
    ];
    check(TRAIN, 1, &TrainScene::new("1"), &cases);
}

/// A trainer whose program would have its parameters on other servers than those of the job.
fn another_division() {
    let place = Place::new();
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs");
    for file in ["mlp.program", "digits.npz"] {
        fs::copy(documents.join(file), place.path().join(file)).expect("a file");
    }
    let processes = Processes::start(Job { bind: TCP, ..Job::new(2, 1).with("--mode", "async") });
    let address = processes.coordinator().to_string();
    let train = |more: &[&str]| {
        let all = ["train", "mlp.program", "--data", "digits.npz", "--batch", "32", "--epochs", "1"];
        let optimizer = ["--optimizer", "const_lr { learning_rate: 0.1 }", "--connect", &address];
        place.run(&[&all[..], &optimizer, more].concat())
    };
    // Without a mode of its own a trainer takes that of the job.
    must_succeed(&train(&[]));
    let client = reader(&processes.coordinator());
    assert_eq!(client.sharing().expect("it is initialised").mode, Mode::Async);
    let placed: String =
        ["layer1/weight", "layer1/bias", "layer2/weight", "layer2/bias"].map(|name| format!("{name} 1\n")).concat();
    place.write("placed.txt", &placed);
    // Servers so slow that each is to have half.
    place.write("slow.txt", "message_seconds = 0\nop_seconds = 0\nmemory_bytes_per_second = 1e6\n");
    for (more, words) in [
        (["--placement", "placed.txt"], ["found it on the servers [0] of the job", "expected server 1"]),
        (["--rates", "slow.txt"], ["found it on the servers [0] of the job", "expected server 1"]),
        (["--memory", "28KiB"], ["found it on the servers [0] of the job", "to which the program's division gives it"]),
        (["--mode", "sync"], ["found mode Sync in the configuration", "expected Async, as the job has"]),
    ] {
        must_refuse(&train(&more), &words);
    }
    must_succeed(&train(&["--mode", "async"]));
    processes.terminate();
}

/// All beside one job, which then goes on as if nothing had been asked.
fn connect_refused(scene: &TrainScene) {
    let running = Running::trained(scene);
    let table: [(&str, Changes<'_>, Words<'_>); 11] = [
        (
            "net.program",
            &[ADAM],
            &["found the optimizer `", "Adam", "0.0625", "only a constant learning rate may change"],
        ),
        ("net.program", &[("--trainers", "2")], &["'--connect <ADDRESS>' cannot be used with '--trainers"]),
        ("net.program", &[("--servers", "2")], &["'--connect <ADDRESS>' cannot be used with '--servers"]),
        ("net.program", &[("--checkpoint", "again")], &["cannot be used with", "--checkpoint"]),
        ("net.program", &[("--resume", "")], &["'--connect <ADDRESS>' cannot be used with '--resume"]),
        (
            "net.program",
            &[("--mode", "async")],
            &["found mode Async in the configuration; expected Sync, as the job has"],
        ),
        ("net.program", &[("--staleness", "2")], &["--staleness: found another --mode than bounded"]),
        ("net.program", &[("--backup-trainers", "1")], &["found 1 backup trainers of 1", "expected fewer"]),
        ("net.program", &[("--late-gradients", "next")], &["--late-gradients next: found no --backup-trainers"]),
        ("net.program", &[("--memory", "64")], &["server:0 would hold", "expected at most 64 for each"]),
        ("more.program", &[], &["found the parameter \"c\"", "in the job 2 others (w, b)", "expected the program"]),
    ];
    for (program, changes, words) in table {
        must_refuse(&running.join(scene, program, changes), words);
    }
    must_succeed(&running.join(scene, "net.program", &[]));
    assert!(scene.model() == scene.four);
    running.processes.terminate();
    other_strategy(scene);
}

/// Two trainers of a job whose parameters are on servers; one would come again with columns of its own.
fn other_strategy(scene: &TrainScene) {
    let running = Running::new(2);
    let both = |epochs: &str| {
        let join = |rank: &str| running.join(scene, "net.program", &[("--rank", rank), ("--epochs", epochs)]);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| join("0"));
            must_succeed(&join("1"));
            must_succeed(&first.join().expect("it does not panic"));
        });
    };
    both("2");
    let said = running.join(scene, "net.program", &[("--rank", "0"), ("--strategy", "columns")]);
    must_refuse(
        &said,
        &["found the queue \"x", "in the job 2 others (w, b)", "and the strategy with which the job was initialised"],
    );
    both("4");
    running.processes.terminate();
}
