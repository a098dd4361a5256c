//! Imports of programs that PaddlePaddle 2.6.2 wrote (`paddle/make.py`): from its initial values and the same data,
//! five steps give the losses and the parameters of Paddle.

use std::path::Path;

use pserver_core::port::Plain;
use pserver_program::{Elements, Graph, PaddleImport, PlainArithmetic, PlainRun, Program, Tensor, import_paddle};
use serde_json::Value;

/// The largest difference between values in binary32 that are computed in different orders, relative to 1 or to the
/// value; the largest that was seen is a tenth.
const TOLERANCE: f64 = 1e-5;

fn file(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/paddle").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn import(name: &str) -> Result<PaddleImport, String> {
    let part = |part: &str| file(&format!("{name}.{part}.pb"));
    import_paddle(&part("main"), &part("startup")).map_err(|failure| failure.to_string())
}

fn results(name: &str) -> Value {
    serde_json::from_slice(&file(&format!("{name}.json"))).expect("make.py writes JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    value["values"].as_array().expect("a list").iter().map(|each| each.as_f64().expect("a number")).collect()
}

/// The tensor of a variable: a label's last dimension of 1 is dropped where the program's variable has none.
fn tensor(value: &Value, rank: usize) -> Tensor {
    let mut shape: Vec<u64> =
        value["shape"].as_array().expect("a list").iter().map(|length| length.as_u64().expect("a length")).collect();
    if shape.len() == rank + 1 {
        assert_eq!(shape.pop(), Some(1));
    }
    let values = numbers(value);
    let elements = match value["type"].as_str() {
        Some("int64") => Elements::Int64(values.iter().map(|value| whole(*value)).collect()),
        Some("float32") => Elements::Float32(values.iter().map(|value| single(*value)).collect()),
        other => panic!("values of {other:?}"),
    };
    Tensor::new(shape, elements)
}

fn check_close(what: &str, found: &Tensor, expected: &[f64]) {
    let Elements::Float32(found) = found.elements() else { panic!("{what}: {:?}", found.elements()) };
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(*found) - expected).abs();
        let bound = TOLERANCE * expected.abs().max(1.0);
        assert!(difference <= bound, "{what}, element {place}: found {found}; Paddle has {expected}");
    }
}

/// Trains an imported program as Paddle trained it; `like` names the program with the results to expect.
fn check_training(name: &str, like: &str) {
    check_results(name, &results(like));
}

fn check_results(name: &str, expected: &Value) {
    let PaddleImport { program, loss, .. } = import(name).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
    let program: Program = program.to_string().parse().expect("what is printed is read");
    let graph = Graph::new(program).expect("what is imported is a program");
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it is initialised");
    let rank = |variable: &str| match graph.facts(variable) {
        Some(pserver_program::VariableFacts::Dense { shape, .. }) => shape.len(),
        other => panic!("{name}: {variable:?} is {other:?}"),
    };
    let object = |value: &Value| value.as_object().expect("an object").clone();
    for (parameter, value) in object(&expected["before"]) {
        run.set(&parameter, tensor(&value, rank(&parameter))).unwrap();
    }
    if graph.find("dropout@step").is_some() {
        // Paddle computed these losses without dropout.
        run.set("dropout@step", Tensor::new([], Elements::Int64(vec![-1]))).unwrap();
        run.set("dropout@first", Tensor::new([], Elements::Int64(vec![0]))).unwrap();
    }
    let losses = expected["losses"].as_array().unwrap();
    let feeds = expected["feeds"].as_array().unwrap();
    assert_eq!((losses.len(), feeds.len()), (5, 5));
    for (step, (feed, expected)) in feeds.iter().zip(losses).enumerate() {
        for (data, value) in object(feed) {
            run.set(&data, tensor(&value, rank(&data))).unwrap();
        }
        run.step().unwrap_or_else(|failure| panic!("{name}: {failure}"));
        let found = run.value(&loss).expect("the loss is computed").tensor();
        check_close(&format!("{name}, loss of step {step}"), found, &[expected.as_f64().unwrap()]);
    }
    for (parameter, value) in object(&expected["after"]) {
        check_close(&format!("{name}, {parameter}"), run.value(&parameter).unwrap().tensor(), &numbers(&value));
    }
}

#[test]
fn imported_programs_train_as_paddle_trains_them() {
    for name in [
        "fc_sgd",
        "fc_sgd_l2",
        "fc_momentum",
        "fc_nesterov",
        "linear_adam",
        "fc_adam_l2",
        "fc_adamw",
        "fc_adamw_clip",
        "functions",
        "embedding_sparse_sgd",
        "embedding_dense_sgd",
        "embedding_sparse_adagrad",
        "embedding_dense_adagrad",
        "embedding_dense_adam",
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
        "autoencoder",
        "factorisation_machine",
        "bounded",
        "own_rates",
        "dropout",
    ] {
        check_training(name, name);
    }
}

/// Paddle's Adam of selected rows on the CPU takes the powers of beta of the next step; its dense Adam takes
/// those of this step, as ours does for both.
#[test]
fn adam_of_selected_rows_is_that_of_the_whole_table() {
    check_training("embedding_sparse_adam", "embedding_dense_adam");
}

/// Paddle's gradient of selected rows has the padding's row, which no lookup reads; ours does not, so that the row
/// keeps its value.
#[test]
fn the_row_of_a_padding_is_not_trained() {
    let mut expected = results("padded_sparse");
    let (padding, width) = (2, 3);
    for place in padding * width..(padding + 1) * width {
        let before = expected["before"]["embedding_0.w_0"]["values"][place].clone();
        let after = &mut expected["after"]["embedding_0.w_0"]["values"][place];
        assert_ne!(*after, before, "Paddle trains it");
        *after = before;
    }
    check_results("padded_sparse", &expected);
    let report = import("padded_sparse").unwrap().report.join("\n");
    assert!(report.contains("differs: row 2 of \"embedding_0.w_0\""), "{report}");
}

/// A dropout element is zero or kept: unchanged in the form that scales in predictions, scaled in the other form.
#[test]
fn dropped_elements_are_zero() {
    let PaddleImport { program, report, .. } = import("dropout").unwrap();
    let graph = Graph::new(program).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    for (data, value) in results("dropout")["feeds"][0].as_object().unwrap() {
        let Some(pserver_program::VariableFacts::Dense { shape, .. }) = graph.facts(data) else { panic!("{data}") };
        run.set(data, tensor(value, shape.len())).unwrap();
    }
    let mut dropped = [0, 0];
    for step in 0..40 {
        run.set("dropout@step", Tensor::new([], Elements::Int64(vec![step]))).unwrap();
        run.set("dropout@first", Tensor::new([], Elements::Int64(vec![0]))).unwrap();
        run.step().unwrap();
        let value = |name: &str| match run.value(name).unwrap().tensor().elements() {
            Elements::Float32(values) => values.clone(),
            other => panic!("{other:?}"),
        };
        for (place, factor) in [1.0 / 0.75, 1.0].into_iter().enumerate() {
            let (x, y) = (value(&format!("tanh_{place}.tmp_0")), value(&format!("dropout_{place}.tmp_0")));
            for (x, y) in x.iter().zip(y) {
                assert!(y == 0.0 || (y - factor * x).abs() < 1e-6, "{x} becomes {y}");
                dropped[place] += i32::from(y == 0.0);
            }
        }
    }
    // Of 960 elements each a quarter, or a half: more than five deviations are excluded.
    assert!((dropped[0] - 240).abs() < 70 && (dropped[1] - 480).abs() < 80, "{dropped:?}");
    assert_eq!(report.iter().filter(|line| line.starts_with("differs: the elements that op")).count(), 2, "{report:?}");
}

#[test]
fn ops_without_a_counterpart_are_refused_by_op_and_variable() {
    for (name, expected) in [
        (
            "embedding_lazy_adam",
            "main program, block 0, op 13 adam: found lazy_mode true with selected rows in \"embedding_0.w_0@GRAD\"; \
             expected false, because the op update moves every row's moments",
        ),
        (
            "refused_stop_gradient",
            "main program, block 0, op 3 mul: found no gradient of \"tanh_0.tmp_0\" in the backward part; expected \
             one, because the loss depends on a parameter through it: variables of stop_gradient are not mapped",
        ),
        (
            "refused_frozen",
            "main program, block 0, op 2 mul: found no gradient of \"fc_1.w_0\" in the backward part; expected \
             one, because the loss depends on a parameter through it: variables of stop_gradient are not mapped",
        ),
        ("refused_branch", "the main program has 5 blocks; expected 1, without loops and branches"),
        (
            "refused_norm",
            "main program, block 0, op 2 batch_norm: found an op that is not mapped; docs/PROGRAMS.md has the list",
        ),
        (
            "refused_sequence",
            "main program, block 0, op 3 matmul_v2: block 0, op 3 matmul: input 1 \"reshape2_0.tmp_0\" is \
             float32[batch, 2, 2]; expected two dimensions",
        ),
        ("refused_scale", "main program, block 0, op 2 layer_norm: found 0 variables in input \"Scale\"; expected 1"),
        ("refused_axis", "main program, block 0, op 2 softmax: found axis 0; expected -1 or 1, the last"),
        (
            "refused_padding",
            "main program, block 0, op 0 lookup_table_v2: found padding_idx 2 with is_sparse true and \
             \"embedding_0.w_0\" clipped by a norm, to which Paddle adds the padding's gradient; expected is_sparse \
             false",
        ),
        (
            "refused_rmsprop",
            "main program, block 0, op 15 rmsprop: found an op of the optimizer part that is not mapped; expected sgd, \
             momentum, adagrad, adam, adamw, an L2 regularizer or clipping of gradients by their global norm",
        ),
    ] {
        assert_eq!(import(name).map(|import| import.program.to_string()), Err(expected.to_owned()), "{name}");
    }
}

/// The main program "fc_sgd" with another op at its end: its kind, the variables of its input "X" and its output "Out",
/// and its role.
fn with_op(kind: &str, x: &str, out: &str, role: u8) -> Vec<u8> {
    let slot = |name: &[u8], variable: &str| [field(1, name), field(2, variable.as_bytes())].concat();
    // An attribute has its type in field 2, which is 0 for an integer, and the integer in field 3.
    let role = [field(1, b"op_role"), vec![2 << 3, 0, 3 << 3, role]].concat();
    let op = [field(1, &slot(b"X", x)), field(2, &slot(b"Out", out)), field(3, kind.as_bytes()), field(4, &role)];
    let main = file("fc_sgd.main.pb");
    // The block is the first field; its length takes two bytes.
    let length = usize::from(main[1] & 127) + (usize::from(main[2]) << 7);
    assert!(main[0] == 0x0A && main[1] >= 128 && main[2] < 128);
    field(1, &[&main[3..3 + length], &field(4, &op.concat())].concat())
}

/// Ops that Paddle's own functions do not write in this place, and whose effect would be lost.
#[test]
fn changes_of_gradients_and_of_parameters_are_refused() {
    let startup = file("fc_sgd.startup.pb");
    for ((kind, x, out, role), expected) in [
        (
            ("scale", "fc_0.b_0@GRAD", "fc_0.b_0@GRAD", 1),
            "found a change of gradient \"fc_0.b_0@GRAD\"; expected one op that computes it",
        ),
        (
            ("scale", "fc_1.b_0@GRAD", "fc_0.b_0@GRAD", 1),
            "found a change of gradient \"fc_0.b_0@GRAD\"; expected one op that computes it",
        ),
        (
            ("tanh_grad", "fc_1.tmp_1@GRAD", "other@GRAD", 1),
            "found it in the backward part; expected the gradient of an op of the forward part",
        ),
        (
            ("check_finite_and_unscale", "fc_0.b_0@GRAD", "other@GRAD", 1),
            "found it in the backward part; expected the gradient of an op of the forward part",
        ),
        (("relu", "fc_0.w_0", "late", 0), "found parameter \"fc_0.w_0\" read after its update; expected it before"),
        (
            ("scale", "fc_0.b_0@GRAD", "other@GRAD", 2),
            "found an op of the optimizer part that is not mapped; expected sgd, momentum, adagrad, adam, adamw, an L2 \
             regularizer or clipping of gradients by their global norm",
        ),
    ] {
        let refusal = import_paddle(&with_op(kind, x, out, role), &startup).expect_err(kind).to_string();
        assert_eq!(refusal, format!("main program, block 0, op 19 {kind}: {expected}"));
    }
    // An op that changes no gradient or parameter is not refused.
    let same = import_paddle(&with_op("assign", "fc_0.b_0@GRAD", "unread@GRAD", 1), &startup).expect("it is read");
    assert_eq!(same.program, import("fc_sgd").expect("it is read").program);
}

#[test]
fn the_import_report_lists_mapped_dropped_and_chosen_items() {
    let report = import("fc_adam_l2").unwrap().report.join("\n");
    for expected in [
        "mapped: 2 mul",
        "dropped: 8 ops of the backward part",
        "dropped: variable \"fc_0.w_0_beta1_pow_acc_0\"",
        "chosen: seed 1 for the random values of \"fc_0.w_0\"",
        "rule of 4 parameters: optimizer: Adam adam { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 } l2: 0.1 regularizer: \
         Coupled const_lr { learning_rate: 0.05 }",
    ] {
        assert!(report.contains(expected), "{report}\nexpected: {expected}");
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the kept numbers are small whole ones")]
fn whole(value: f64) -> i64 {
    value as i64
}

#[expect(clippy::cast_possible_truncation, reason = "the kept numbers were in binary32")]
fn single(value: f64) -> f32 {
    value as f32
}

/// A message of one field with bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 128 {
        message.push(u8::try_from(length % 128).expect("seven bits") | 128);
        length /= 128;
    }
    message.push(u8::try_from(length).expect("seven bits"));
    message.extend_from_slice(bytes);
    message
}

#[test]
fn sizes_are_refused_before_memory_is_taken() {
    let startup = file("fc_sgd.startup.pb");
    let refusal = |main: &[u8]| import_paddle(main, &startup).expect_err("this is refused").to_string();
    let check = |main: &[u8], expected: &str| {
        let said = refusal(main);
        assert!(said.contains(expected), "{said}\nexpected: {expected}");
    };
    check(&vec![0; (16 << 20) + 1], "the main program has 16777217 bytes; expected at most 16777216");
    // Empty ops, and one op with empty attributes, of two bytes each.
    let many = [0x22, 0].repeat(600_000);
    check(&field(1, &many), "the main program has more parts than 524288");
    check(&field(1, &field(4, &many)), "the main program has more parts than 524288");
    // A text with a length of 2^60 bytes but without content.
    check(&[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F], "the main program is no ProgramDesc");
    check(&[], "the main program has 0 blocks; expected 1");
    check(&field(1, &[]).repeat(2), "the main program has 2 blocks; expected 1");
    check(&field(1, &[]), "main program: found no op of op_role 257");
}

/// A program that is truncated anywhere, or has any one bit flipped, is read or refused. A truncated program is read
/// only if the cut removes versions, which the import ignores.
#[test]
fn damaged_programs_are_read_or_refused() {
    let (main, startup) = (file("fc_sgd.main.pb"), file("fc_sgd.startup.pb"));
    let whole = import_paddle(&main, &startup).unwrap().program;
    let mut refused = 0;
    for at in 0..main.len() {
        match import_paddle(&main[..at], &startup) {
            Ok(import) => assert_eq!(import.program, whole, "cut at {at}"),
            Err(_) => refused += 1,
        }
        let mut changed = main.clone();
        changed[at] ^= 1 << (at % 8);
        let _ = import_paddle(&changed, &startup);
    }
    assert!(refused > main.len() - 4, "{refused} of {} were refused", main.len());
    for name in ["shapes", "lenet", "parts", "dropout"] {
        let (mut main, startup) = (file(&format!("{name}.main.pb")), file(&format!("{name}.startup.pb")));
        for at in (0..main.len()).step_by(13) {
            // A small number becomes a large one, or the other way round.
            main[at] ^= 0x41;
            let _ = import_paddle(&main, &startup);
            main[at] ^= 0x41;
        }
    }
}
