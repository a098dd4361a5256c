//! `pserver train`, `predict` and `convert` as a user runs them: from a program and a data file to a model and its
//! predictions, with the bits of one process, and the error text of each mistake.

use std::fmt::Write;
use std::fs;

use pserver_cli::quickstart::digits::Digits;
use pserver_kernels::cpu::Cpu;
use pserver_program::{Elements, Graph, PlainArithmetic, PlainRun, Program, Tensor, append_backward};
use pserver_trainer::{DataSet, write_tensors};

use crate::trainings::{OneProcess, Place, floats, numbers};

/// One hidden layer; forward only.
const NETWORK: &str = "block 0 {
    data pixels: float32[batch, 64]
    data label: int64[batch]
    parameter w1: float32[64, 16]
    parameter b1: float32[16]
    parameter w2: float32[16, 10]
    initialise w1 = uniform(low=-0.3, high=0.3, seed=7)
    initialise b1 = fill(value=0.0)
    initialise w2 = uniform(low=-0.4, high=0.4, seed=8)
    forward product = matmul(pixels, w1)
    forward shifted = add(product, b1)
    forward hidden = relu(shifted)
    forward scores = matmul(hidden, w2)
    forward losses, probabilities = softmax_with_cross_entropy(scores, label)
    forward loss = mean(losses)
    forward accuracy = accuracy(scores, label)
}
";
const OPTIMIZER: &str = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";
const BATCH: usize = 64;
const EPOCHS: usize = 3;

/// A folder with `network.program` and `digits.csv`.
fn digits() -> Place {
    let place = Place::new();
    place.write("network.program", NETWORK);
    let digits = Digits::load().expect("the digits are in the program");
    let rows = digits.part(0, 1).expect("one trainer has all");
    let mut text: String = (0..64).map(|pixel| format!("pixels.{pixel},")).collect();
    text.push_str("label\n");
    for digit in rows {
        digit.pixels.iter().for_each(|pixel| write!(text, "{pixel},").expect("a string takes everything"));
        writeln!(text, "{}", digit.label).expect("a string takes everything");
    }
    place.write("digits.csv", &text);
    place
}

/// Trains the network on the digits.
fn train(place: &Place, more: &[&str]) -> String {
    let (batch, epochs) = (BATCH.to_string(), EPOCHS.to_string());
    let mut arguments = vec!["train", "network.program", "--data", "digits.csv", "--batch", &batch];
    if !more.contains(&"--optimizer") {
        arguments.extend(["--optimizer", OPTIMIZER]);
    }
    if !more.contains(&"--epochs") {
        arguments.extend(["--epochs", &epochs]);
    }
    arguments.extend(more);
    place.succeed(&arguments)
}

#[test]
fn a_training_ends_with_the_bits_of_one_process_for_any_trainers_and_servers() {
    let place = digits();
    let data = place.path().join("digits.csv");
    let oracle = OneProcess { program: NETWORK, optimizer: OPTIMIZER, data: &data, batch: BATCH, epochs: EPOCHS };
    for (trainers, servers) in [("1", "1"), ("1", "3"), ("4", "1"), ("4", "3")] {
        let output = train(&place, &["--trainers", trainers, "--servers", servers, "--save", "model.safetensors"]);
        let expected = oracle.train(trainers.parse().expect("a number"));
        assert!(place.model("model.safetensors") == expected, "{trainers} trainers, {servers} servers");
        let loss = numbers(&output)["loss"];
        assert!(output.ends_with(&format!("loss {loss:.4}\n")) && loss < 1.0, "{output:?}");
    }
}

/// Nothing is learned, so that the losses of two epochs of one batch differ by the masks alone.
#[test]
fn dropout_gets_the_step_in_training_and_none_in_a_prediction() {
    let place = digits();
    let dropped = NETWORK
        .replace("    parameter w1", "    data step: int64[]\n    data first: int64[]\n    parameter w1")
        .replace("relu(shifted)", "relu(shifted)\n    forward kept = dropout(hidden, step, first, rate=0.5, seed=3)")
        .replace("matmul(hidden", "matmul(kept");
    place.write("dropped.program", &dropped);
    let rows = fs::read_to_string(place.path().join("digits.csv")).expect("the data");
    place.write("batch.csv", &rows.lines().take(BATCH + 1).collect::<Vec<_>>().join("\n"));
    let losses = |program: &str, trainers: &str| {
        let batch = BATCH.to_string();
        let said = place.run(
            &[
                &["train", program, "--data", "batch.csv", "--batch", &batch, "--epochs", "2", "--trainers", trainers],
                ["--optimizer", "const_lr { learning_rate: 0.0 }", "--save", "model.safetensors"].as_slice(),
                &["--validation", "batch.csv"],
            ]
            .concat(),
        );
        let losses = said.errors.lines().filter_map(|line| line.split_once("loss ")).map(|(_, loss)| loss.to_owned());
        (losses.collect::<Vec<_>>(), numbers(&said.output)["validation loss"])
    };
    let (dropped, validation) = losses("dropped.program", "1");
    assert!(dropped.len() == 2 && dropped[0] != dropped[1], "{dropped:?}");
    assert_eq!(losses("dropped.program", "4"), (dropped.clone(), validation), "a row's mask is that of one trainer");
    let (plain, plain_validation) = losses("network.program", "1");
    assert!(plain[0] == plain[1] && !dropped.contains(&plain[0]), "{plain:?}, {dropped:?}");
    assert_eq!(validation.to_bits(), plain_validation.to_bits(), "nothing is dropped in a validation");
    let predict = |program: &str| {
        place.succeed(&["predict", program, "--model", "model.safetensors", "--data", "batch.csv", "--fetch", "scores"])
    };
    assert_eq!(predict("dropped.program"), predict("network.program"));
}

/// An average of the last layer's weights that is a parameter: its gradient is the weights before each step.
#[test]
fn an_average_of_a_parameter_is_saved() {
    let place = digits();
    let mut program: Program = NETWORK.parse().expect("a program");
    append_backward(&mut program, "loss").expect("it has gradients");
    let text = program.to_string();
    let body = text.trim_end().strip_suffix('}').expect("it ends with a brace");
    let update = |name: &str, config: &str| {
        format!(
            "state {name}@count: int64[]\ninitialise {name}@count = fill(value=0.0)\n\
             optimize {name}, {name}@count = update({name}, {name}@gradient, {name}@count, config=\"{config}\")\n"
        )
    };
    let sgd = ["w1", "b1", "w2"].map(|name| update(name, "const_lr { learning_rate: 0.05 }")).concat();
    let average = update("mean", "rule: 'w = 0.9*w + 0.1*g' const_lr { learning_rate: 1.0 }");
    let whole = format!(
        "{body}
        parameter mean: float32[16, 10]
        initialise mean = fill(value=0.0)
        backward mean@gradient = scale(w2, factor=1.0)
        {sgd}{average}}}"
    );
    place.write("whole.program", &whole);
    let graph = Graph::new(whole.parse().expect("a program")).expect("a program");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Cpu::default());
    let beginning = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
    let mut weights = floats(beginning.value("w2").expect("it is initialised").tensor()).to_vec();
    let mut expected = vec![0.0_f32; 160];
    for epochs in ["1", "2", "3"] {
        // One step for each epoch.
        place.succeed(
            &[
                &["train", "whole.program", "--data", "digits.csv", "--batch", "1436", "--epochs", epochs][..],
                &["--trainers", "2", "--servers", "2", "--save", "model.safetensors"],
            ]
            .concat(),
        );
        expected.iter_mut().zip(&weights).for_each(|(mean, weight)| *mean = 0.9 * *mean + 0.1 * weight);
        let model = place.model("model.safetensors");
        assert_eq!(floats(&model["mean"]), expected, "after {epochs} steps");
        let new = floats(&model["w2"]).to_vec();
        assert_ne!(std::mem::replace(&mut weights, new), floats(&model["w2"]), "the weights move");
    }
}

#[test]
fn a_trained_model_is_validated_and_predicts() {
    let place = digits();
    let more = ["--metric", "accuracy", "--validation", "0.2", "--shuffle", "5", "--epochs", "6"];
    let output = train(&place, &[&more[..], &["--save", "model.safetensors", "--trainers", "2"]].concat());
    let found = numbers(&output);
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ["accuracy", "loss", "validation accuracy", "validation loss"]);
    assert!(found["validation accuracy"] > 0.85 && found["accuracy"] > 0.85, "{output}");
    let again = train(&place, &[&more[..], &["--save", "again.safetensors", "--trainers", "2"]].concat());
    assert_eq!(again, output, "the seed decides the order");
    assert!(place.model("again.safetensors") == place.model("model.safetensors"));
    let fetch = ["predict", "network.program", "--model", "model.safetensors", "--data", "digits.csv", "--fetch"];
    // The last fifth of the rows alone has the validation's accuracy.
    let text = fs::read_to_string(place.path().join("digits.csv")).expect("the data");
    let lines: Vec<&str> = text.lines().collect();
    let rows = lines.len() - 1;
    let held_out = [&lines[..1], &lines[lines.len() - rows / 5..]].concat().join("\n");
    place.write("held-out.csv", &held_out);
    let all = ["predict", "network.program", "--model", "model.safetensors", "--data", "held-out.csv", "--fetch"];
    let accuracy = place.succeed(&[&all[..], &["accuracy"]].concat());
    let accuracy: f64 = accuracy.strip_prefix("accuracy\n").expect("a header").trim().parse().expect("a number");
    assert!((accuracy - found["validation accuracy"]).abs() < 1e-4, "{accuracy}: {output}");
    // A table without labels, in each format, by several runs or one.
    let pixels: String = text.lines().map(|line| format!("{}\n", line.rsplit_once(',').expect("columns").0)).collect();
    place.write("pixels.csv", &pixels);
    let whole = place.succeed(&[&fetch[..], &["scores,hidden"]].concat());
    let head = whole.lines().next().expect("a header");
    assert!(head.starts_with("scores.0,scores.1,") && head.ends_with(",hidden.15"), "{head}");
    assert_eq!(whole.lines().count(), rows + 1);
    let by_parts = ["predict", "network.program", "--model", "model.safetensors", "--data", "pixels.csv"];
    let by_parts = place.succeed(&[&by_parts[..], &["--fetch", "scores,hidden", "--batch", "100"]].concat());
    assert_eq!(by_parts.lines().count(), rows + 1);
    place.succeed(&[&fetch[..], &["scores", "-o", "scores.npz"]].concat());
    place.succeed(&[&fetch[..], &["scores", "-o", "scores.safetensors"]].concat());
    let scores = "block 0 { data scores: float32[batch, 10] forward loss = mean(scores) }".parse::<Program>();
    let scores = Graph::new(scores.expect("a program")).expect("a program");
    let read = |name: &str| DataSet::read(&place.path().join(name), &scores).expect("it reads back");
    place.write("scores.csv", &whole);
    assert_eq!(read("scores.npz"), read("scores.safetensors"));
    assert_eq!(read("scores.npz"), read("scores.csv"));
}

#[test]
fn a_checkpoint_is_resumed_where_it_ended() {
    let place = digits();
    train(&place, &["--save", "whole.safetensors", "--trainers", "2", "--shuffle", "1"]);
    let split = ["--trainers", "2", "--servers", "2", "--shuffle", "1", "--checkpoint", "kept"];
    train(&place, &[&split[..], &["--epochs", "1"]].concat());
    let said = place.run(&[
        "train",
        "network.program",
        "--data",
        "digits.csv",
        "--batch",
        "64",
        "--epochs",
        "2",
        "--optimizer",
        OPTIMIZER,
        "--checkpoint",
        "kept",
    ]);
    assert!(said.errors.contains("found files; expected an empty folder, or --resume"), "{said:?}");
    train(&place, &[&split[..], &["--resume", "--save", "resumed.safetensors"]].concat());
    assert!(place.model("resumed.safetensors") == place.model("whole.safetensors"));
}

#[test]
fn a_program_is_the_same_in_both_forms() {
    let place = digits();
    place.succeed(&["convert", "network.program", "network.pb"]);
    place.succeed(&["convert", "network.pb", "again.txt"]);
    let read = |name: &str| fs::read(place.path().join(name)).expect("a file");
    let text = String::from_utf8(read("again.txt")).expect("text");
    assert_eq!(text.parse::<Program>(), NETWORK.parse::<Program>());
    let whole = |name| place.succeed(&["transpile", name, "--strategy", "whole"]);
    assert_eq!(whole("network.pb"), whole("network.program"));
    let said = place.run(&["convert", "network.program", "network.json"]);
    assert!(
        said.errors.contains("network.json: found the extension \"json\"; expected .pb, .program or .txt"),
        "{said:?}"
    );
}

/// Arguments of `train` that replace those of a good call, words separated by `|`, and parts of the text in order.
const MISTAKES: &[(&str, &[&str])] = &[
    ("--data|none.csv", &["none.csv", "No such file"]),
    ("--data|digits.txt", &["digits.txt", "found the extension \"txt\"", "expected .safetensors, .npz or .csv"]),
    (
        "--data|short.csv",
        &["short.csv", "found 2 columns for data \"pixels\": float32[batch, 64]", "expected pixels.0 to pixels.63"],
    ),
    ("--data|unlabelled.csv", &["found 0 columns for data \"label\": int64[batch]", "expected \"label\""]),
    ("--data|word.csv", &["word.csv", "line 3, column \"label\"", "found \"seven\"", "expected a number of int64"]),
    ("--data|half.csv", &["line 3, column \"label\"", "found \"1.5\"", "expected a number of int64"]),
    (
        "--data|range.csv|--batch|2",
        &["range.csv", "data \"label\": found 10 in row 1, counted from 0", "expected 0 to 9", "classes of \"scores\""],
    ),
    ("--data|infinite.npz", &["infinite.npz", "data \"pixels\": found inf in row 2", "expected finite numbers"]),
    ("--validation|range.csv", &["--validation", "range.csv", "found 10 in row 1"]),
    ("--data|endless.csv", &["endless.csv", "found no ordinary file"]),
    ("--save|taken.safetensors", &["--save taken.safetensors", "found a folder; expected a file"]),
    ("--data|ragged.csv", &["ragged.csv", "3", "65"]),
    ("--data|broken.npz", &["broken.npz", "not an npz file"]),
    ("--data|broken.safetensors", &["broken.safetensors", "not a safetensors file"]),
    ("--optimizer|/dev/zero", &["--optimizer \"/dev/zero\"", "/dev/zero: found more than 16777216 bytes"]),
    ("--loss|los", &["network.program", "found no variable \"los\" to be the loss", "expected a scalar"]),
    ("--loss|losses", &["the loss \"losses\" is float32[batch]", "expected a scalar"]),
    ("--metric|scores", &["the metric \"scores\" is float32[batch, 10]", "expected a scalar"]),
    ("--metric|f1", &["found no variable \"f1\" to be the metric", "expected a scalar"]),
    ("--batch|62|--trainers|4", &["digits.csv", "found a batch of 62 rows for 4 trainers", "expected a multiple of 4"]),
    ("--batch|5000", &["digits.csv", "found 1437 rows of data", "expected at least the 5000 of a batch"]),
    ("--batch|0", &["'0' for '--batch <ROWS>'"]),
    ("--optimizer|adam.conf", &["--optimizer \"adam.conf\"", "found neither a configuration such as", "nor a file"]),
    ("--optimizer|optimizer: Adma", &["\"optimizer\" has \"Adma\"", "the nearest is Adam"]),
    ("--save|model.bin", &["--save model.bin", "expected a file that ends in .safetensors"]),
    ("--save|none/model.safetensors", &["found no folder none", "expected one"]),
    ("--validation|1.5", &["--validation 1.5", "expected a share above 0 and below 1, or a file"]),
    ("--resume", &["--checkpoint"]),
    ("--connect|127.0.0.1:1|--trainers|2", &["cannot be used with"]),
];

#[test]
fn a_mistake_gets_a_text_that_names_what_was_found_and_expected() {
    let place = digits();
    let text = fs::read_to_string(place.path().join("digits.csv")).expect("the data");
    let lines: Vec<&str> = text.lines().take(3).collect();
    let pixels = |line: usize| lines[line].rsplit_once(',').expect("columns").0;
    let labelled = |label: &str| format!("{}\n{}\n{},{label}\n", lines[0], lines[1], pixels(2));
    place.write("digits.txt", &text);
    place.write("short.csv", "pixels.0,pixels.1,label\n0,0,1\n");
    place.write("unlabelled.csv", &format!("{}\n{}\n", pixels(0), pixels(1)));
    place.write("word.csv", &labelled("seven"));
    place.write("half.csv", &labelled("1.5"));
    place.write("range.csv", &labelled("10"));
    let mut pixels_of = vec![0.5_f32; 64 * 64];
    pixels_of[2 * 64] = f32::INFINITY;
    let columns = [
        ("pixels".to_owned(), Tensor::new([64, 64], Elements::Float32(pixels_of))),
        ("label".to_owned(), Tensor::new([64], Elements::Int64(vec![1; 64]))),
    ];
    write_tensors(&place.path().join("infinite.npz"), &columns).expect("there is room");
    std::os::unix::fs::symlink("/dev/zero", place.path().join("endless.csv")).expect("a link");
    fs::create_dir(place.path().join("taken.safetensors")).expect("there is room");
    place.write("ragged.csv", &format!("{}\n{}\n0,0\n", lines[0], lines[1]));
    place.write("broken.npz", "text");
    place.write("broken.safetensors", "text");
    let good = [("--data", "digits.csv"), ("--optimizer", OPTIMIZER), ("--batch", "64"), ("--epochs", "1")];
    for (mistake, expected) in MISTAKES {
        let words: Vec<&str> = mistake.split('|').collect();
        let mut arguments = vec!["train", "network.program"];
        for (option, value) in good.iter().filter(|(option, _)| !words.contains(option)) {
            arguments.extend([*option, *value]);
        }
        arguments.extend(&words);
        let said = place.run(&arguments);
        assert!(!said.is_success && said.output.is_empty(), "{mistake}: {said:?}");
        let mut rest = said.errors.as_str();
        for part in *expected {
            let place = rest.find(part).unwrap_or_else(|| panic!("{mistake}: no {part:?} in {said:?}"));
            rest = &rest[place + part.len()..];
        }
    }
}
