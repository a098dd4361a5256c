//! `pserver train --strategy columns`: a layer whose columns are on several trainer processes, with the bits of one
//! process that splits its sums alike, and the refusals.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::cluster::job::{Job, TCP};
use crate::cluster::process::Processes;
use crate::trainings::{OneProcess, Place, Said, numbers};

const OPTIMIZER: &str = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";
const BATCH: usize = 32;
const EPOCHS: usize = 12;
const COLUMNS: usize = 100;

/// A network whose second layer has the largest weight. With several shares it is several products: in the reverse
/// order, because the gradient of their input is summed from the last product on.
fn network(shares: usize) -> String {
    let lengths: Vec<usize> =
        (0..shares).map(|share| COLUMNS / shares + usize::from(share < COLUMNS % shares)).collect();
    let names = |name: &str| (0..shares).map(|share| format!("{name}{share}")).collect::<Vec<_>>().join(", ");
    let products: String =
        (0..shares).rev().map(|share| format!("forward product{share} = matmul(hidden, wide{share})\n")).collect();
    let layer = match shares {
        1 => "forward product = matmul(hidden, wide)".to_owned(),
        _ => format!(
            "forward {} = split(wide, axis=1, lengths={lengths:?})\n{products}forward product = concat({}, axis=1)",
            names("wide"),
            names("product")
        ),
    };
    format!(
        "block 0 {{
            data pixels: float32[batch, 64]
            data label: int64[batch]
            parameter first: float32[64, 12]
            parameter wide: float32[12, {COLUMNS}]
            parameter last: float32[{COLUMNS}, 10]
            initialise first = uniform(low=-0.3, high=0.3, seed=7)
            initialise wide = uniform(low=-0.3, high=0.3, seed=8)
            initialise last = uniform(low=-0.3, high=0.3, seed=9)
            forward before = matmul(pixels, first)
            forward hidden = tanh(before)
            {layer}
            forward active = relu(product)
            forward scores = matmul(active, last)
            forward losses, probabilities = softmax_with_cross_entropy(scores, label)
            forward loss = mean(losses)
            forward accuracy = accuracy(scores, label)
        }}"
    )
}

/// A folder with the network and the digits.
fn place() -> Place {
    let place = Place::new();
    place.write("net.program", &network(1));
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs");
    fs::copy(documents.join("digits.npz"), place.path().join("digits.npz")).expect("a file");
    place
}

fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["train", "net.program", "--data", "digits.npz", "--batch", "32", "--epochs", "12"];
    all.extend(["--optimizer", OPTIMIZER, "--strategy", "columns"]);
    all.extend(more);
    all
}

/// Checks a saved model.
fn check(place: &Place, trainers: usize) {
    let data = place.path().join("digits.npz");
    let train = |shares| {
        let program = network(shares);
        OneProcess { program: &program, optimizer: OPTIMIZER, data: &data, batch: BATCH, epochs: EPOCHS }.train(1)
    };
    let found = place.model("model.safetensors");
    let expected = train(trainers);
    assert!(found == expected, "{trainers} trainers: the bits differ from those of one process that splits its sums");
    assert!(found != train(1), "no sum is split, so nothing is shown of it");
}

#[test]
fn columns_on_trainer_processes_have_the_bits_of_one_that_splits_its_sums() {
    let place = place();
    for (trainers, servers) in [("2", "1"), ("3", "2")] {
        let more = ["--trainers", trainers, "--servers", servers, "--save", "model.safetensors"];
        let output = place.succeed(&arguments(&more));
        assert!(numbers(&output)["loss"] < 1.5, "{output}");
        check(&place, trainers.parse().expect("a number"));
    }
    let more = ["--trainers", "2", "--metric", "accuracy", "--validation", "digits.npz"];
    let found = numbers(&place.succeed(&arguments(&more)));
    assert!(found["validation accuracy"] > 0.6 && found["validation loss"] < found["loss"], "{found:?}");
}

#[test]
fn columns_are_trained_by_processes_of_a_running_job() {
    let place = place();
    let processes = Processes::start(Job { bind: TCP, ..Job::new(1, 2) });
    let coordinator = processes.coordinator().to_string();
    let start = |rank: &str| {
        let own = ["--connect", &coordinator, "--rank", rank, "--save", "model.safetensors"];
        let mut command = place.command(&arguments(&own));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let both = ["1", "0"].map(start);
    let [second, first] = both.map(|one| Said::of(one.wait_with_output().expect("it can be waited for")));
    assert!(second.is_success && second.output.is_empty() && second.errors.is_empty(), "{second:?}");
    assert!(first.is_success && numbers(&first.output)["loss"] < 1.5, "{first:?}");
    check(&place, 2);
    // The columns of trainer 1 ended with its process.
    let again = Said::of(start("1").wait_with_output().expect("it can be waited for"));
    assert!(again.errors.contains("items sent; expected a new job"), "{again:?}");
    processes.terminate();
}

#[test]
fn a_program_that_cannot_be_cut_by_columns_is_refused() {
    let place = place();
    let refuse = |more: &[&str], expected: &str| {
        let said = place.run(&arguments(more));
        assert!(!said.is_success && said.output.is_empty() && said.errors.contains(expected), "{more:?}: {said:?}");
    };
    refuse(&["--trainers", "1"], "1 trainers to cut columns over; expected 2 to");
    refuse(&["--trainers", "2", "--checkpoint", "kept"], "--checkpoint: found --strategy columns, whose trainers keep");
    place.write("net.program", &network(2));
    refuse(&["--trainers", "13"], "found no weight that can be cut into 13 shares of columns; expected one with");
}
