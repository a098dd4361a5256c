//! The programs of `docs/programs` by the commands in their comments, with 1 and 4 trainers and 1 and 3 servers: the
//! bits of one process, and what NumPy computes in float64 (`numpy/make.py`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pserver_program::{Elements, Graph, Program, Tensor, append_backward};
use pserver_trainer::DataSet;

use crate::trainings::{OneProcess, Place, floats, numbers};

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
    if name == "mlp" && other.is_none() {
        check_backup(&place, &words, losses[0]);
    }
    if other.is_none() {
        check_modes(&place, &words, (&oracle.train(1), &losses));
    }
}

/// Trains it with rounds of fewer gradients than trainers.
fn check_backup(place: &Place, words: &[String], before: f64) {
    for (trainers, backup) in [("2", "1"), ("4", "1")] {
        let mut arguments: Vec<&str> = words.iter().map(String::as_str).collect();
        arguments.extend(["--trainers", trainers, "--backup-trainers", backup, "--servers", "2"]);
        let loss = numbers(&place.succeed(&arguments))["loss"];
        assert!(loss < before / 2.0, "{trainers} trainers without {backup}: loss {loss} after {before}");
    }
}

/// Trains it in modes without rounds: a trainer alone has the bits of one process; of several the loss falls.
fn check_modes(place: &Place, words: &[String], (bits, losses): (&BTreeMap<String, Tensor>, &[f64])) {
    for (mode, trainers, servers) in
        [("async", "1", "3"), ("async", "2", "2"), ("bounded", "1", "2"), ("bounded", "2", "1")]
    {
        // Gradients of several trainers are added, where mode sync takes their mean.
        let slower = |word: &String| match word.split_once("learning_rate: ") {
            Some((before, rate)) if trainers == "2" => {
                let end = rate.find(' ').unwrap_or(rate.len());
                let half = rate[..end].parse::<f64>().expect("a rate") / 2.0;
                format!("{before}learning_rate: {half}{}", &rate[end..])
            }
            _ => word.clone(),
        };
        let words: Vec<String> = words.iter().map(slower).collect();
        let mut arguments: Vec<&str> = words.iter().map(String::as_str).collect();
        arguments.extend(["--mode", mode, "--trainers", trainers, "--servers", servers, "--save", "model.safetensors"]);
        let output = place.succeed(&arguments);
        let loss = numbers(&output)["loss"];
        eprintln!("{mode}, {trainers} trainers: loss {loss} after {}", losses[0]);
        assert!(loss < losses[0], "{mode}, {trainers} trainers: loss {loss} after {}", losses[0]);
        let is_alone = trainers == "1";
        assert!(!is_alone || place.model("model.safetensors") == *bits, "{mode}: the bits differ from one process");
    }
}

#[test]
fn lamb_and_lars_train_the_digits() {
    check_with("mlp", Some(("mlp_lamb", "algorithm: \"lamb\" const_lr { learning_rate: 0.02 }")));
    let lars = "algorithm: \"lars\" rule_set { key: \"share\" value: 0.05 } const_lr { learning_rate: 0.1 }";
    check_with("mlp", Some(("mlp_lars", lars)));
}

/// Optimizer ops of the text classifier: gradients are clipped by the norm of all of them together, for which trainers
/// make the table's rows a dense gradient.
const CLIPPED: &str = "
    temporary zeros: float32[500, 8]
    temporary limit: float32[]
    state word@velocity: float32[500, 8]
    state weight@velocity: float32[8, 4]
    state bias@velocity: float32[4]
    state word@count: int64[]
    state weight@count: int64[]
    state bias@count: int64[]
    initialise word@velocity = fill(value=0.0)
    initialise weight@velocity = fill(value=0.0)
    initialise bias@velocity = fill(value=0.0)
    initialise word@count = fill(value=0.0)
    initialise weight@count = fill(value=0.0)
    initialise bias@count = fill(value=0.0)
    backward zeros = fill(value=0.0)
    backward words@gradient = sum(zeros, word@gradient)
    optimize word@squares = mul(words@gradient, words@gradient)
    optimize weight@squares = mul(weight@gradient, weight@gradient)
    optimize bias@squares = mul(bias@gradient, bias@gradient)
    optimize word@square = reduce_sum(word@squares)
    optimize weight@square = reduce_sum(weight@squares)
    optimize bias@square = reduce_sum(bias@squares)
    optimize square = sum(word@square, weight@square, bias@square)
    optimize norm = sqrt(square)
    optimize limit = fill(value=0.15)
    optimize divisor = max(limit, norm)
    optimize factor = div(limit, divisor)
    optimize word@clipped = mul(words@gradient, factor)
    optimize weight@clipped = mul(weight@gradient, factor)
    optimize bias@clipped = mul(bias@gradient, factor)
    optimize word, word@count, word@velocity = update(word, word@clipped, word@count, word@velocity, config=MOMENTUM)
    optimize weight, weight@count, weight@velocity =
        update(weight, weight@clipped, weight@count, weight@velocity, config=MOMENTUM)
    optimize bias, bias@count, bias@velocity = update(bias, bias@clipped, bias@count, bias@velocity, config=MOMENTUM)
}";
const MOMENTUM: &str = "\"sgd { momentum: 0.9 } const_lr { learning_rate: 0.5 }\"";

#[test]
fn a_text_classifier_with_clipped_gradients_trains() {
    let forward = fs::read_to_string(documents().join("text_classifier.program")).expect("the program");
    let mut program: Program = forward.parse().expect("a program");
    append_backward(&mut program, "loss").expect("it has gradients");
    let text = program.to_string();
    let body = text.trim_end().strip_suffix('}').expect("it ends with a brace");
    let lines = CLIPPED.replace("MOMENTUM", MOMENTUM);
    let place = Place::new();
    place.write("clipped.program", &format!("{body}{lines}"));
    place.write("rows.program", &format!("{body}{}", lines.replace("mul(words@gradient", "mul(word@gradient")));
    let on_servers = lines.replace("backward zeros", "optimize zeros").replace("backward words", "optimize words");
    place.write("on-servers.program", &format!("{body}{on_servers}"));
    fs::copy(documents().join("texts.npz"), place.path().join("texts.npz")).expect("a file");
    let train = |name, more: &[&str]| {
        let all = ["train", name, "--data", "texts.npz", "--batch", "32", "--epochs", "5", "--save", "m.safetensors"];
        place.run(&[&all[..], more].concat())
    };
    let losses = expected("text_classifier_clipped", "losses", &[]).expect("NumPy's losses");
    let last_epoch = losses[40..].iter().sum::<f64>() / 10.0;
    for trainers in ["1", "2", "4"] {
        let mut bits = None;
        for servers in ["1", "2", "3"] {
            let said = train("clipped.program", &["--trainers", trainers, "--servers", servers]);
            assert!(said.is_success, "{said:?}");
            let model = place.model("m.safetensors");
            check_close("text_classifier_clipped", &model);
            assert!((numbers(&said.output)["loss"] - last_epoch).abs() < 1e-4, "{said:?}: NumPy has {last_epoch}");
            assert!(*bits.get_or_insert(model.clone()) == model, "{trainers} trainers, {servers} servers: other bits");
        }
    }
    let refused = |name, expected: &str| {
        let said = train(name, &["--trainers", "2", "--servers", "2"]);
        assert!(!said.is_success && said.errors.contains(expected), "{name}: {said:?}");
    };
    let expected =
        "mul: input 1 \"word@gradient\" is rows(float32, 500, 8); expected a dense tensor, which the sum of a";
    refused("rows.program", expected);
    refused("on-servers.program", "parameter \"word\": found a number of several parameters of a gradient of rows");
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
