//! The programs of `docs/programs` by the commands in their comments, with 1 and 4 trainers and 1 and 3 servers: the
//! bits of one process, and what NumPy computes in float64 (`numpy/make.py`).

mod trainings;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pserver_program::{Elements, Graph, Tensor};
use pserver_trainer::DataSet;

use trainings::{OneProcess, Place, floats, numbers};

/// The largest difference between float32 and NumPy's float64 after 50 steps, relative to 1 or to the value.
const TOLERANCE: f64 = 1e-5;
const STEPS: usize = 50;

fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs")
}

/// The words of the command in a program's comment, after `pserver`. Text between apostrophes is one word.
fn command(program: &str) -> Vec<String> {
    let lines = program.lines().filter_map(|line| line.strip_prefix("#     "));
    let text: String = lines.map(|line| format!("{} ", line.trim().trim_end_matches('\\'))).collect();
    let mut words = Vec::new();
    for (nth, part) in text.split('\'').enumerate() {
        match nth % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.split_whitespace().collect::<Vec<_>>().join(" ")),
        }
    }
    assert_eq!(words.remove(0), "pserver", "{text}");
    words
}

/// An array of float64 that NumPy wrote, with these dimensions after the first, if the file has it.
fn expected(name: &str, array: &str, dims: &[u64]) -> Option<Vec<f64>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/numpy/{name}.npz"));
    let dims: String = dims.iter().map(|length| format!(", {length}")).collect();
    let text = format!("block 0 {{ data {array:?}: float64[batch{dims}] }}");
    let graph = Graph::new(text.parse().expect("a program")).expect("a program");
    let data = match DataSet::read(&path, &graph) {
        Ok(data) => data,
        Err(failure) if failure.to_string().contains("found no column") => return None,
        Err(failure) => panic!("{failure}"),
    };
    let rows: Vec<usize> = (0..data.rows()).collect();
    match data.batch(&rows)[0].1.elements() {
        Elements::Float64(values) => Some(values.clone()),
        other => panic!("found {}", other.element_type()),
    }
}

/// Compares a model with NumPy's; gives the largest difference.
fn check_close(name: &str, model: &BTreeMap<String, Tensor>) -> f64 {
    let mut largest = 0.0_f64;
    for (parameter, tensor) in model {
        let (found, dims) = (floats(tensor), &tensor.shape()[1..]);
        let width = usize::try_from(dims.iter().product::<u64>()).expect("it is in memory");
        let values = expected(name, parameter, dims).unwrap_or_else(|| panic!("{name}.npz has no {parameter:?}"));
        let rows = expected(name, &format!("{parameter}@rows"), &[]);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "these are indices of rows")]
        let found: Vec<f32> = match rows {
            Some(rows) => rows.iter().flat_map(|row| &found[*row as usize * width..][..width]).copied().collect(),
            None => found.to_vec(),
        };
        assert_eq!(found.len(), values.len(), "{name}, {parameter}");
        for (place, (found, expected)) in found.iter().zip(&values).enumerate() {
            let difference = (f64::from(*found) - expected).abs() / expected.abs().max(1.0);
            assert!(difference <= TOLERANCE, "{name}, {parameter}, {place}: found {found}; NumPy has {expected}");
            largest = largest.max(difference);
        }
    }
    largest
}

fn check(name: &str) {
    check_with(name, None);
}

/// Trains a program by its own command, or by another optimizer, whose results `make.py` has under another name.
fn check_with(name: &str, other: Option<(&str, &str)>) {
    let program = fs::read_to_string(documents().join(format!("{name}.program"))).expect("the program");
    let mut words = command(&program);
    if let Some((_, optimizer)) = other {
        let place = words.iter().position(|word| word == "--optimizer").expect("it is given");
        optimizer.clone_into(&mut words[place + 1]);
    }
    let results = other.map_or(name, |(results, _)| results);
    let option = |name: &str| &words[words.iter().position(|word| word == name).expect("it is given") + 1];
    let number = |name: &str| option(name).parse().expect("a number");
    let data = documents().join(option("--data"));
    let (batch, epochs) = (number("--batch"), number("--epochs"));
    let oracle = OneProcess { program: &program, optimizer: option("--optimizer"), data: &data, batch, epochs };
    let place = Place::new();
    for file in [format!("{name}.program"), option("--data").clone()] {
        fs::copy(documents().join(&file), place.path().join(&file)).expect("a file");
    }
    let losses = expected(results, "losses", &[]).expect("NumPy's losses");
    assert_eq!(losses.len(), STEPS);
    let last_epoch = &losses[losses.len() - losses.len() / epochs..];
    let last_epoch = last_epoch.iter().sum::<f64>() / last_epoch.len() as f64;
    for trainers in [1, 4] {
        let bits = oracle.train(trainers);
        let largest = check_close(results, &bits);
        assert!(other.is_none() || largest <= 1e-6, "{results}: {largest:.1e} from NumPy");
        eprintln!("{results}, {trainers} trainers: at most {largest:.1e} from NumPy");
        for servers in ["1", "3"] {
            let trainers = trainers.to_string();
            let mut arguments: Vec<&str> = words.iter().map(String::as_str).collect();
            arguments.extend(["--trainers", &trainers, "--servers", servers, "--save", "model.safetensors"]);
            let output = place.succeed(&arguments);
            let what = format!("{results}, {trainers} trainers, {servers} servers");
            assert!(place.model("model.safetensors") == bits, "{what}: the bits differ from those of one process");
            let numbers = numbers(&output);
            let (loss, accuracy) = (numbers["loss"], numbers.get("accuracy"));
            assert!(accuracy.is_none_or(|accuracy| *accuracy > 0.8), "{what}: {output}");
            assert!((loss - last_epoch).abs() < 1e-4, "{what}: loss {loss}; NumPy has {last_epoch}");
        }
    }
}

#[test]
fn lamb_and_lars_train_the_digits() {
    check_with("mlp", Some(("mlp_lamb", "algorithm: \"lamb\" const_lr { learning_rate: 0.02 }")));
    let lars = "algorithm: \"lars\" rule_set { key: \"share\" value: 0.05 } const_lr { learning_rate: 0.1 }";
    check_with("mlp", Some(("mlp_lars", lars)));
}

macro_rules! examples {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            check($name);
        })*

        #[test]
        fn every_program_with_a_command_is_trained() {
            let mut found: Vec<String> = fs::read_dir(documents()).expect("a folder").filter_map(|entry| {
                let name = entry.expect("an entry").file_name().into_string().expect("UTF-8");
                let name = name.strip_suffix(".program")?.to_owned();
                (name != "example").then_some(name)
            }).collect();
            found.sort();
            assert_eq!(found, [$($name),*]);
        }
    };
}

examples! {
    an_autoencoder_trains: "autoencoder",
    a_convolutional_network_trains: "cnn",
    a_logistic_regression_trains: "logistic_regression",
    a_matrix_factorisation_trains: "matrix_factorisation",
    a_hidden_layer_trains: "mlp",
    a_pooled_embedding_trains: "pooled_embedding",
    a_text_classifier_trains: "text_classifier",
    wide_and_deep_trains: "wide_and_deep",
}
