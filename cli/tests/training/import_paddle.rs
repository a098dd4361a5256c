//! `pserver import-paddle` as a user runs it: `pserver transpile` divides the printed program, and `pserver train`
//! trains it on several processes as Paddle does on one.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use pserver_program::{Elements, Graph, Program, Tensor};
use pserver_trainer::{read_model, write_tensors};
use serde_json::Value;

fn pserver(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pserver")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("it prints UTF-8")
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../program/tests/paddle").join(name);
    path.to_str().expect("a path in UTF-8").to_owned()
}

#[test]
fn an_imported_program_can_be_divided() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("program.txt");
    let file = file.to_str().expect("a path in UTF-8");
    for name in ["fc_sgd", "wide_deep"] {
        let [main, startup] = ["main", "startup"].map(|part| data(&format!("{name}.{part}.pb")));
        let printed = pserver(&["import-paddle", &main, &startup]);
        assert!(printed.status.success(), "{}", text(&printed.stderr));
        assert!(text(&printed.stderr).contains("dropped: "), "{}", text(&printed.stderr));
        let written = pserver(&["import-paddle", &main, &startup, "-o", file]);
        assert_eq!((written.status.success(), text(&written.stdout)), (true, String::new()));
        assert_eq!(std::fs::read_to_string(file).expect("it is written"), text(&printed.stdout));
        let divided = pserver(&["transpile", file, "--trainers", "2", "--servers", "2"]);
        assert!(divided.status.success(), "{}", text(&divided.stderr));
    }
}

#[test]
fn refusals_name_the_file_and_nothing_is_printed() {
    let [main, startup] = ["embedding_lazy_adam.main.pb", "embedding_lazy_adam.startup.pb"].map(data);
    let check = |main: &str, startup: &str, expected: &str| {
        let output = pserver(&["import-paddle", main, startup]);
        assert_eq!((output.status.success(), text(&output.stdout)), (false, String::new()));
        assert!(text(&output.stderr).contains(expected), "{}\nexpected: {expected}", text(&output.stderr));
    };
    check(&main, &startup, "embedding_lazy_adam.main.pb: main program, block 0, op 13 adam: found lazy_mode true");
    check(&data("make.py"), &startup, "make.py: the main program is no ProgramDesc");
    check(&data("none.pb"), &startup, "none.pb: ");
}

/// A program of Paddle's with its results (`program/tests/paddle/make.py`), in a folder.
struct Imported {
    folder: tempfile::TempDir,
    results: Value,
    graph: Graph,
    loss: String,
}

/// Rows of a step, of all trainers together.
const BATCH: &str = "6";
const STEPS: usize = 5;

impl Imported {
    /// Writes Paddle's initial values and imports the program with them.
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let results = std::fs::read(data(&format!("{name}.json"))).expect("make.py wrote it");
        let results: Value = serde_json::from_slice(&results).expect("make.py writes JSON");
        let before = results["before"].as_object().expect("an object");
        let values: Vec<_> = before.iter().map(|(name, value)| (name.clone(), tensor(&[value], None))).collect();
        write_tensors(&folder.path().join("before.npz"), &values).expect("it is written");
        let [main, startup] = ["main", "startup"].map(|part| data(&format!("{name}.{part}.pb")));
        let path = |name: &str| folder.path().join(name).to_str().expect("a path in UTF-8").to_owned();
        let printed =
            pserver(&["import-paddle", &main, &startup, "--values", &path("before.npz"), "-o", &path("p.txt")]);
        assert!(printed.status.success(), "{name}: {}", text(&printed.stderr));
        let report = text(&printed.stderr);
        assert_eq!(report.matches("given: the values of").count(), before.len(), "{name}: {report}");
        let program = std::fs::read_to_string(path("p.txt")).expect("it is written");
        let graph = Graph::new(program.parse::<Program>().expect("it is a program")).expect("it fits");
        let loss = results["loss"].as_str().expect("a name").to_owned();
        Self { folder, results, graph, loss }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a path in UTF-8").to_owned()
    }

    /// Trains on 2 servers and 2 trainers, each of which has half of Paddle's batch.
    fn train(&self) -> Output {
        let feeds = self.results["feeds"].as_array().expect("a list");
        assert_eq!(feeds.len(), STEPS);
        let names = feeds[0].as_object().expect("an object").keys();
        let columns = names.filter(|name| self.graph.find(name).is_some()).map(|name| {
            let steps: Vec<&Value> = feeds.iter().map(|feed| &feed[name]).collect();
            let Some(pserver_program::VariableFacts::Dense { shape, .. }) = self.graph.facts(name) else {
                panic!("{name} is no dense tensor")
            };
            (name.clone(), tensor(&steps, Some(shape.len())))
        });
        write_tensors(&self.folder.path().join("data.npz"), &columns.collect::<Vec<_>>()).expect("it is written");
        let [program, data, values, after] =
            ["p.txt", "data.npz", "before.npz", "after.safetensors"].map(|name| self.path(name));
        pserver(
            &[
                &["train", &program, "--loss", &self.loss, "--data", &data, "--values", &values, "--save", &after],
                &["--batch", BATCH, "--epochs", "1", "--trainers", "2", "--servers", "2"][..],
            ]
            .concat(),
        )
    }

    fn check(&self, name: &str) {
        let trained = self.train();
        assert!(trained.status.success(), "{name}: {}", text(&trained.stderr));
        let said = text(&trained.stdout);
        let loss: f64 =
            said.trim().strip_prefix(&format!("{} ", self.loss)).and_then(|loss| loss.parse().ok()).expect(&said);
        let losses: Vec<f64> = numbers(&self.results["losses"]).collect();
        let mean = losses.iter().sum::<f64>() / STEPS as f64;
        // Four digits are printed.
        assert!((loss - mean).abs() <= 5e-5 + TOLERANCE * mean.abs().max(1.0), "{name}: {said}, Paddle has {mean}");
        let found: BTreeMap<String, Tensor> =
            read_model(&self.folder.path().join("after.safetensors")).expect("a model");
        for (parameter, value) in self.results["after"].as_object().expect("an object") {
            let Elements::Float32(found) = found[parameter].elements() else { panic!("{name}, {parameter}") };
            let expected: Vec<f64> = numbers(&value["values"]).collect();
            assert_eq!(found.len(), expected.len(), "{name}, {parameter}");
            for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
                let difference = (f64::from(*found) - expected).abs();
                let is_close = difference <= TOLERANCE * expected.abs().max(1.0);
                assert!(is_close, "{name}, {parameter}, element {place}: found {found}; Paddle has {expected}");
            }
        }
    }
}

/// As in `program/tests/imports.rs`.
const TOLERANCE: f64 = 1e-5;

fn numbers(list: &Value) -> impl Iterator<Item = f64> {
    list.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number"))
}

/// Tensors one after another; a last dimension of 1 is dropped where there is one more than `rank`.
#[expect(clippy::cast_possible_truncation, reason = "the kept numbers are whole or were in binary32")]
fn tensor(parts: &[&Value], rank: Option<usize>) -> Tensor {
    let mut shape: Vec<u64> =
        parts[0]["shape"].as_array().expect("a list").iter().map(|length| length.as_u64().expect("a length")).collect();
    if rank.is_some_and(|rank| shape.len() == rank + 1) {
        assert_eq!(shape.pop(), Some(1));
    }
    if let (Some(rows), true) = (shape.first_mut(), parts.len() > 1) {
        *rows *= parts.len() as u64;
    }
    let values = parts.iter().flat_map(|part| numbers(&part["values"]));
    let elements = match parts[0]["type"].as_str() {
        Some("int64") => Elements::Int64(values.map(|value| value as i64).collect()),
        Some("float32") => Elements::Float32(values.map(|value| value as f32).collect()),
        other => panic!("values of {other:?}"),
    };
    Tensor::new(shape, elements)
}

/// Programs whose loss is a mean over the examples, so that the mean of two halves is that of the batch.
#[test]
fn imported_programs_train_on_several_processes_as_in_paddle() {
    for name in [
        "fc_sgd",
        "fc_nesterov",
        "linear_adam",
        "fc_adam_l2",
        "fc_adamw",
        "fc_adamw_clip",
        "functions",
        "embedding_sparse_sgd",
        "embedding_dense_adagrad",
        "embedding_sparse_adagrad",
        "embedding_dense_clip",
        "embedding_sparse_clip",
        "matrix_factorisation",
        "wide_deep",
        "shapes",
        "lenet",
        "pooled",
        "normalised",
        "activations",
        "parts",
        "padded_dense",
        "ranking",
        "experts",
        "factorisation_machine",
        "bounded",
        "own_rates",
    ] {
        Imported::new(name).check(name);
    }
}

#[test]
fn values_of_no_parameter_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("other.npz");
    let one = |name: &str, shape: &[u64]| {
        let tensor = Tensor::zeros(pserver_core::dtype::ElementType::Float32, shape);
        write_tensors(&path, &[(name.to_owned(), tensor)]).expect("it is written");
        let [main, startup] = ["main", "startup"].map(|part| data(&format!("fc_sgd.{part}.pb")));
        let refused = pserver(&["import-paddle", &main, &startup, "--values", path.to_str().expect("UTF-8")]);
        assert_eq!((refused.status.success(), text(&refused.stdout)), (false, String::new()));
        text(&refused.stderr)
    };
    let refusal = one("w", &[2]);
    assert!(refusal.contains("other.npz: found values of no parameter"), "{refusal}");
    let refusal = one("fc_0.w_0", &[4, 5]);
    let expected = "op 1 given: value \"fc_0.w_0\" is float32[4, 5]; expected float32[5, 4]";
    assert!(refusal.contains(expected), "{refusal}");
}
