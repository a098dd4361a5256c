//! Trainings whose processes are killed (SIGKILL) go on with the step after the last one: `pserver train --checkpoint
//! --resume`, and trainers of a running job, `--connect`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::cluster::job::{Job, TCP};
use crate::cluster::process::Processes;
use crate::trainings::{OneProcess, Place, Said, floats, numbers};

const OPTIMIZER: &str = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.02 }";
const PLAIN: &str = "optimizer: SGD const_lr { learning_rate: 0.02 }";
/// The same, with which parameters stay.
const STILL: &str = "optimizer: SGD const_lr { learning_rate: 0 }";
const BATCH: usize = 32;
/// Enough that a kill in the first ones comes long before the end.
const EPOCHS: usize = 300;
const SIGKILL: i32 = 9;

/// A folder with a program of `docs/programs`, its data, and the program's text.
fn place(program: &str, data: &str) -> (Place, String) {
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs");
    let place = Place::new();
    for (from, to) in [(format!("{program}.program"), "net.program"), (format!("{data}.npz"), "data.npz")] {
        fs::copy(documents.join(from), place.path().join(to)).expect("a file");
    }
    let text = fs::read_to_string(place.path().join("net.program")).expect("the program");
    (place, text)
}

fn arguments<'a>(epochs: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["train", "net.program", "--data", "data.npz", "--batch", "32", "--epochs", epochs];
    all.extend(["--optimizer", OPTIMIZER]);
    all.extend(more);
    all
}

/// Starts a training and waits until it has said that many epochs are done.
fn started(place: &Place, arguments: &[&str], epochs: usize) -> Child {
    let mut command = place.command(arguments);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines().map_while(Result::ok);
    let said: Vec<String> = lines.by_ref().filter(|line| line.starts_with("epoch ")).take(epochs).collect();
    assert_eq!(said.len(), epochs, "the training ended: {said:?}");
    // An end of the pipe would end the training.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

fn kill(mut child: Child) {
    child.kill().expect("it can be killed");
    let status = child.wait().expect("it can be waited for");
    assert_eq!(status.signal(), Some(SIGKILL), "the training ended before it was killed; expected more epochs");
}

#[test]
fn a_killed_training_goes_on_to_the_bits_of_an_undisturbed_one() {
    let (place, text) = place("mlp", "digits");
    let split = ["--trainers", "2", "--checkpoint", "kept", "--save", "model.safetensors"];
    let epochs = EPOCHS.to_string();
    let first = arguments(&epochs, &split);
    let again = arguments(&epochs, &[&split[..], &["--resume"]].concat());
    for (arguments, epochs) in [(&first, 2), (&again, 1), (&again, 7), (&again, 3)] {
        kill(started(&place, arguments, epochs));
    }
    let output = place.succeed(&again);
    let data = place.path().join("data.npz");
    let oracle = OneProcess { program: &text, optimizer: OPTIMIZER, data: &data, batch: BATCH, epochs: EPOCHS };
    assert!(place.model("model.safetensors") == oracle.train(2), "the bits differ from those of one process");
    assert!(numbers(&output)["loss"] < 0.1, "{output}");
    // Nothing is left to train, and the model is there again.
    fs::remove_file(place.path().join("model.safetensors")).expect("it was saved");
    let said = place.run(&again);
    assert!(said.is_success && said.output.is_empty(), "{said:?}");
    assert!(said.errors.contains("found as many epochs done; nothing is left to train"), "{said:?}");
    assert!(place.model("model.safetensors") == oracle.train(2));
}

/// `pserver train --resume` of a training of two epochs, with its arguments changed.
fn resume_changed(place: &Place, change: impl Fn(&mut Vec<&str>)) -> Said {
    let kept = ["--trainers", "2", "--checkpoint", "kept", "--save", "again.safetensors", "--resume"];
    let mut all = arguments("3", &kept);
    all[9] = PLAIN;
    change(&mut all);
    place.run(&all)
}

#[test]
fn a_resumed_training_takes_another_rate_and_refuses_other_rows_and_optimizers() {
    let (place, _) = place("mlp", "digits");
    let mut first = arguments("2", &["--trainers", "2", "--checkpoint", "kept", "--save", "model.safetensors"]);
    first[9] = PLAIN;
    place.succeed(&first);
    let refused = |change: &dyn Fn(&mut Vec<&str>), words: &[&str]| {
        let said = resume_changed(&place, change);
        assert!(!said.is_success, "{said:?}");
        words.iter().for_each(|word| assert!(said.errors.contains(word), "expected {word:?}: {said:?}"));
    };
    refused(&|all| all[5] = "16", &["--batch 16: ", "has steps of 32 rows", "expected --batch 32"]);
    refused(&|all| all.extend(["--shuffle", "7"]), &["found --shuffle 7: ", "has no --shuffle", "expected the same"]);
    refused(&|all| all.extend(["--validation", "0.5"]), &["--data: found ", "rows to train on", "expected as many"]);
    // With a rate of zero the parameters stay, also under another number of trainers.
    let said = resume_changed(&place, |all| {
        all[9] = STILL;
        all[11] = "1";
    });
    assert!(said.is_success, "{said:?}");
    assert!(place.model("again.safetensors") == place.model("model.safetensors"), "the rate is that of before");
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.02 }";
    refused(&|all| all[9] = adam, &["found the optimizer `", "only a constant learning rate may change"]);
    // The trainers that were refused have not left.
    refused(&|all| all[11] = "4", &["trainers = 4 (from --trainers)", "has not left it"]);
}

/// Servers that are at different steps after a kill apply each step once, and the trainers of the training agree on the
/// number of steps.
#[test]
fn tables_on_several_servers_go_on_after_a_kill() {
    let (place, _) = place("matrix_factorisation", "ratings");
    let split = ["--trainers", "2", "--servers", "3"];
    let epochs = "30";
    place.succeed(&arguments(epochs, &[&split[..], &["--save", "whole.safetensors"]].concat()));
    let kept = [&split[..], &["--checkpoint", "kept", "--save", "model.safetensors"]].concat();
    let again = arguments(epochs, &[&kept[..], &["--resume"]].concat());
    kill(started(&place, &arguments(epochs, &kept), 2));
    kill(started(&place, &again, 3));
    place.succeed(&again);
    let whole = place.model("whole.safetensors");
    for (name, tensor) in place.model("model.safetensors") {
        let pairs = floats(&tensor).iter().zip(floats(&whole[&name]));
        let largest = pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max);
        // One gradient may have been computed with values that were a step newer.
        assert!(largest < 0.05, "{name}: {largest}");
    }
}

#[test]
fn trainers_of_a_running_job_train_and_may_be_killed() {
    let (place, text) = place("mlp", "digits");
    // The other trainer waits for the killed one as long as the test may last.
    let job = Job { bind: TCP, ..Job::new(1, 2) }.with("--rank-grace-seconds", 60);
    let processes = Processes::start(job);
    let coordinator = processes.coordinator().to_string();
    let epochs = EPOCHS.to_string();
    let trainer = |rank| {
        let own = ["--connect", &coordinator, "--rank", rank, "--save", "model.safetensors"];
        arguments(&epochs, &own)
    };
    let mut first = place.command(&trainer("0"));
    let first = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    kill(started(&place, &trainer("1"), 2));
    kill(started(&place, &trainer("1"), 1));
    let second = place.run(&trainer("1"));
    let first = Said::of(first.wait_with_output().expect("it can be waited for"));
    for (rank, said) in [(0, &first), (1, &second)] {
        assert!(said.is_success && numbers(&said.output)["loss"] < 0.1, "trainer {rank}: {said:?}");
    }
    let data = place.path().join("data.npz");
    let oracle = OneProcess { program: &text, optimizer: OPTIMIZER, data: &data, batch: BATCH, epochs: EPOCHS };
    assert!(place.model("model.safetensors") == oracle.train(2), "the bits differ from those of one process");
    processes.terminate();
}

#[test]
fn a_resumed_training_needs_a_checkpoint() {
    let (place, _) = place("mlp", "digits");
    let said = place.run(&arguments("1", &["--checkpoint", "none", "--resume"]));
    assert!(said.errors.contains("found no checkpoint in none; expected the folder of an earlier"), "{said:?}");
}
