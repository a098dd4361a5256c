//! Programs that `python/pserver/export.py` wrote, against what torch computed (`python/tests/make.py`): `pserver
//! predict` gives its outputs, and `pserver train` its losses and parameters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pserver_program::Tensor;
use pserver_trainer::read_model;
use serde::Deserialize;

use crate::trainings::{Place, floats, numbers};

/// The largest difference between sums in float32 that are computed in different orders, relative to 1 or to the value.
const TOLERANCE: f64 = 1e-5;

/// A training whose results are kept.
#[derive(Deserialize)]
struct KeptTraining {
    name: String,
    optimizer: String,
    batch: u32,
    epochs: u32,
    /// The mean of the last epoch's losses.
    loss: f64,
}

impl KeptTraining {
    fn all() -> Vec<Self> {
        let text = std::fs::read_to_string(folder().join("trainings.json")).expect("make.py wrote it");
        serde_json::from_str(&text).expect("make.py writes trainings")
    }

    fn path(&self, ending: &str) -> String {
        let path = folder().join(format!("{}.{ending}", self.name));
        path.to_str().expect("a path in UTF-8").to_owned()
    }

    fn tensors(&self, content: &str) -> BTreeMap<String, Tensor> {
        read_model(Path::new(&self.path(&format!("{content}.safetensors")))).expect("make.py wrote it")
    }

    fn train(&self, place: &Place, trainers: &str, servers: &str) -> String {
        let (program, data, values) =
            (self.path("program"), self.path("data.safetensors"), self.path("values.safetensors"));
        let (batch, epochs) = (self.batch.to_string(), self.epochs.to_string());
        place.succeed(&[
            "train",
            &program,
            "--data",
            &data,
            "--values",
            &values,
            "--optimizer",
            &self.optimizer,
            "--batch",
            &batch,
            "--epochs",
            &epochs,
            "--trainers",
            trainers,
            "--servers",
            servers,
            "--save",
            "trained.safetensors",
        ])
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/tests/data")
}

/// Compares tensors with torch's; gives the largest difference.
fn check_close(what: &str, found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) -> f64 {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    let mut largest = 0.0_f64;
    for (name, expected) in expected {
        let found = &found[name];
        assert_eq!(found.shape(), expected.shape(), "{what}, {name}");
        for (place, (found, expected)) in floats(found).iter().zip(floats(expected)).enumerate() {
            let difference = f64::from((found - expected).abs()) / f64::from(expected.abs().max(1.0));
            assert!(difference <= TOLERANCE, "{what}, {name}, {place}: found {found}; torch has {expected}");
            largest = largest.max(difference);
        }
    }
    largest
}

#[test]
fn exported_models_predict_what_torch_predicts() {
    for kept in KeptTraining::all() {
        let place = Place::new();
        let expected = kept.tensors("expected");
        let (program, data, values) =
            (kept.path("program"), kept.path("data.safetensors"), kept.path("values.safetensors"));
        let fetch = expected.keys().cloned().collect::<Vec<_>>().join(",");
        let arguments = ["--model", &values, "--data", &data, "--fetch", &fetch, "-o", "predicted.safetensors"];
        place.succeed(&[&["predict", program.as_str()], arguments.as_slice()].concat());
        let largest = check_close(&kept.name, &place.model("predicted.safetensors"), &expected);
        eprintln!("{}: predicted, at most {largest:.1e} from torch", kept.name);
    }
}

#[test]
fn exported_models_train_as_torch_trains_them() {
    for kept in KeptTraining::all() {
        let expected = kept.tensors("trained");
        for (trainers, servers) in [("1", "1"), ("2", "3")] {
            let place = Place::new();
            let loss = numbers(&kept.train(&place, trainers, servers))["loss"];
            let what = format!("{}, {trainers} trainers, {servers} servers", kept.name);
            let largest = check_close(&what, &place.model("trained.safetensors"), &expected);
            assert!((loss - kept.loss).abs() < 1e-4, "{what}: loss {loss}; torch has {}", kept.loss);
            eprintln!("{what}: trained, at most {largest:.1e} from torch");
        }
    }
}
