//! `pserver train --values`: variables begin from a file; a file that does not fit is refused by a text with the
//! found and the expected value.

use std::fmt::Write;

use pserver_core::dtype::ElementType;
use pserver_program::{Elements, Graph, PlainArithmetic, PlainRun, Tensor};
use pserver_trainer::write_tensors;

use crate::trainings::Place;

/// A table with row gradients, a layer, and a scalar.
const NETWORK: &str = "block 0 {
    data id: int64[batch]
    data x: float32[batch, 3]
    parameter table: float32[20, 3]
    parameter w: float32[3, 1]
    parameter b: float32[]
    initialise table = uniform(low=-0.5, high=0.5, seed=1)
    initialise w = gaussian(mean=0.0, deviation=0.5, seed=2)
    initialise b = fill(value=0.25)
    forward row = lookup_table(table, id)
    forward met = mul(row, x)
    forward product = matmul(met, w)
    forward y = add(product, b)
    forward square = mul(y, y)
    forward loss = mean(square)
}
";

/// The network with values from outside.
fn given() -> String {
    let given = |line: &str| match line.trim_start().strip_prefix("initialise ").and_then(|op| op.split_once(" = ")) {
        Some((name, _)) => format!("    initialise {name} = given(name=\"first/{name}\")\n"),
        None => format!("{line}\n"),
    };
    NETWORK.lines().map(given).collect()
}

/// A folder with both networks and `data.csv`.
fn place() -> Place {
    let place = Place::new();
    place.write("computed.program", NETWORK);
    place.write("given.program", &given());
    let mut text = "id,x.0,x.1,x.2\n".to_owned();
    for row in 0..24 {
        writeln!(text, "{},{},{},{}", row * 7 % 20, row % 3, row % 5, row % 2).expect("a string takes everything");
    }
    place.write("data.csv", &text);
    place
}

const TRAIN: [&str; 8] =
    ["--data", "data.csv", "--batch", "8", "--epochs", "3", "--optimizer", "const_lr { learning_rate: 0.1 }"];

/// With given values that equal those of the initializers, a training ends with the same bits.
#[test]
fn a_training_begins_from_the_values_of_a_file() {
    let place = place();
    let computed = ["train", "computed.program", "--trainers", "2", "--servers", "2", "--save", "computed.safetensors"];
    place.succeed(&[&computed[..], &TRAIN].concat());
    let graph = Graph::new(NETWORK.parse().expect("it is a program")).expect("it fits");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, pserver_core::port::Plain);
    let run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
    let value = |name: &str| (format!("first/{name}"), run.value(name).expect("a value").tensor().clone());
    let values: Vec<(String, Tensor)> = ["table", "w", "b"].map(value).into();
    let expected = place.model("computed.safetensors");
    for file in ["values.npz", "values.safetensors"] {
        write_tensors(&place.path().join(file), &values).expect("it is written");
        let given = ["train", "given.program", "--values", file, "--save", "given.safetensors"];
        place.succeed(&[&given[..], &["--trainers", "2", "--servers", "2"], &TRAIN].concat());
        assert!(place.model("given.safetensors") == expected, "{file}");
    }
    let Elements::Float32(table) = expected["table"].elements() else { panic!("{:?}", expected["table"]) };
    let Elements::Float32(first) = values[0].1.elements() else { panic!("{:?}", values[0]) };
    // No example has the row 3; every other row of these was trained.
    assert!(table[..9] != first[..9] && table[9..12] != [0.0; 3], "{table:?}");
}

/// The program, the values, and parts of the text in order.
const MISTAKES: &[(&str, &str, &[&str])] = &[
    ("computed", "broken.npz", &["--values broken.npz", "found no op given in the program"]),
    ("given", "", &["found an op given(name=\"first/table\") and no values", "expected --values FILE"]),
    ("given", "none.npz", &["none.npz", "No such file"]),
    ("given", "broken.npz", &["broken.npz", "not an npz file"]),
    ("given", "broken.safetensors", &["broken.safetensors", "not a safetensors file", "expected at most"]),
    ("given", "short.safetensors", &["short.safetensors", "not a safetensors file"]),
    ("given", "cut.safetensors", &["cut.safetensors", "found 299 bytes of tensors; expected 300, as its header says"]),
    ("given", "data.csv", &["data.csv", "found CSV, which has no shapes"]),
    (
        "given",
        "named.safetensors",
        &["block 0, op 0 given", "named.safetensors: found no tensor \"first/table\" among 2", "expected one"],
    ),
    (
        "given",
        "shaped.npz",
        &["block 0, op 0 given", "value \"first/table\" is float32[3, 20]", "expected float32[20, 3]"],
    ),
    ("given", "typed.npz", &["block 0, op 1 given", "value \"first/w\" is float64[3, 1]", "expected float32[3, 1]"]),
];

#[test]
fn values_that_do_not_fit_are_refused_before_anything_starts() {
    let place = place();
    let write = |file: &str, values: &[(&str, Tensor)]| {
        let values: Vec<_> = values.iter().map(|(name, tensor)| (format!("first/{name}"), tensor.clone())).collect();
        write_tensors(&place.path().join(file), &values).expect("it is written");
    };
    let single = |shape: &[u64]| Tensor::zeros(ElementType::Float32, shape);
    write("named.safetensors", &[("w", single(&[3, 1])), ("b", single(&[]))]);
    write("shaped.npz", &[("table", single(&[3, 20]))]);
    write("typed.npz", &[("table", single(&[20, 3])), ("w", Tensor::zeros(ElementType::Float64, &[3, 1]))]);
    place.write("broken.npz", "text");
    place.write("broken.safetensors", "text that begins with no length");
    place.write("short.safetensors", "text");
    write("cut.safetensors", &[("table", single(&[25, 3]))]);
    let cut = place.path().join("cut.safetensors");
    let whole = std::fs::read(&cut).expect("it was written");
    std::fs::write(&cut, &whole[..whole.len() - 1]).expect("a file");
    for (program, file, expected) in MISTAKES {
        let program = format!("{program}.program");
        let values: &[&str] = if file.is_empty() { &[] } else { &["--values", file] };
        let said = place.run(&[&["train", &program], values, &TRAIN].concat());
        assert!(!said.is_success && said.output.is_empty(), "{file}: {said:?}");
        let mut rest = said.errors.as_str();
        for part in *expected {
            let place = rest.find(part).unwrap_or_else(|| panic!("{file}: no {part:?} in {said:?}"));
            rest = &rest[place + part.len()..];
        }
    }
}
