//! Parameters that are updated by rows end like dense ones, to the bit, however they are spread.

use std::collections::BTreeMap;
use std::path::Path;

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::rows::{Matrix, Rows, bytes, floats, pull_rows, push_rows};
use pserver_client::{Client, DestinationSlice, GradientRows, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{self, Float32};
use pserver_core::error::Failure;

const ROUNDS: u64 = 6;

/// Rules that change rows without gradients, and rules that do not.
const OPTIMIZERS: [&str; 7] = [
    "const_lr { learning_rate: 0.1 }",
    "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }",
    "optimizer: Adam adam { } lr_policy: Linear linear_lr { learning_rate: 0.01 lr_decay_a: 0.001 lr_decay_b: 0.0001 }",
    "optimizer: Adagrad adagrad { } const_lr { learning_rate: 0.1 }",
    "const_lr { learning_rate: 0.1 } l1: 0.001 l2: 0.01",
    "algorithm: \"adamw\" adamw { decay: 0.01 } const_lr { learning_rate: 0.01 }",
    "algorithm: \"ftrl\" ftrl { } const_lr { learning_rate: 0.1 } l1: 0.001",
];

fn matrices() -> Vec<Matrix> {
    let sizes = [(1, 1), (40, 3), (300, 16), (1000, 8), (64, 2), (257, 5), (500, 4)];
    let one =
        |(number, ((height, width), optimizer))| Matrix::new(&format!("matrix {number}"), height, width, optimizer);
    (0..).zip(sizes.into_iter().zip(OPTIMIZERS)).map(one).collect()
}

fn begin(client: &Client, matrices: &[Matrix]) {
    if client.begin_init(&OptimizerSettings::default()).expect("somebody is chosen") {
        matrices.iter().for_each(|matrix| matrix.declare(client).expect("it is declared"));
        client.finish_init().expect("the initialisation ends");
    }
}

fn check_dense(trainers: u32, servers: u16, shards: u16, mode: &'static str, bind: &'static str) {
    let what = format!("{trainers} trainers, {servers} servers of {shards} shards, {mode}, {bind}");
    let job = Job { shards, mode, bind, chunk_bytes: 4096, ..Job::new(servers, trainers) };
    let servers = Local::start(&job);
    let matrices = matrices();
    let clients: Vec<Client> = (0..trainers).map(|trainer| client(&servers.coordinator(), trainer)).collect();
    clients.iter().for_each(|client| begin(client, &matrices));
    for round in 1..=ROUNDS {
        std::thread::scope(|scope| {
            for (trainer, client) in (0..).zip(&clients) {
                let matrices = &matrices;
                scope.spawn(move || {
                    for matrix in matrices {
                        matrix.push(client, trainer, round).expect("rows are taken");
                    }
                });
            }
        });
        if round % 3 == 0 {
            matrices.iter().for_each(|matrix| matrix.check_alike(&clients[0], &format!("{what}, round {round}")));
        }
    }
    servers.stop();
}

#[test]
fn sparse_equals_dense_to_the_bit_for_one_trainer() {
    check_dense(1, 1, 1, "sync", "tcp://127.0.0.1:0");
    check_dense(1, 3, 2, "sync", "shm://127.0.0.1:0");
}

#[test]
fn sparse_equals_dense_to_the_bit_for_many_trainers() {
    check_dense(4, 1, 1, "sync", "tcp://127.0.0.1:0");
    check_dense(2, 2, 3, "sync", "shm://127.0.0.1:0");
    check_dense(3, 3, 1, "sync", "tcp://127.0.0.1:0");
}

#[test]
fn sparse_equals_dense_where_each_gradient_is_a_step() {
    check_dense(1, 2, 2, "async", "tcp://127.0.0.1:0");
    check_dense(1, 1, 2, "delta", "tcp://127.0.0.1:0");
}

/// One parameter of rows on its own servers, and its first trainer.
fn alone(job: &Job, settings: &str) -> (Local, Client) {
    let servers = Local::start(job);
    let first = client(&servers.coordinator(), 0);
    assert!(first.begin_init(&OptimizerSettings::default()).expect("somebody is chosen"));
    let settings = crate::cluster::rows::settings(settings);
    first.init_param("rows", Float32, &[], &[], &settings).expect("it is declared");
    first.finish_init().expect("the initialisation ends");
    (servers, first)
}

#[test]
fn untouched_rows_have_the_same_initial_values_on_every_server() {
    let settings = "const_lr { learning_rate: 1 } sparse { rows: 1000 width: 4 seed: 9 uniform { low: -2 high: 2 } }";
    let ids = [0, 1 << 62, 77, 0, 12_345_678_901];
    let begins = |servers, shards| {
        let (servers, client) = alone(&Job { shards, ..Job::new(servers, 1) }, settings);
        let found = pull_rows(&client, "rows", &ids, 4).expect("rows are read");
        assert_eq!(client.list_rows("rows"), Ok(Vec::new()), "to read a row is not to touch it");
        servers.stop();
        found
    };
    let found = begins(1, 1);
    assert_eq!(found, begins(2, 3));
    assert!(floats(&found).iter().all(|value| (-2.0..2.0).contains(value)));
    assert_eq!(found[..16], found[48..64], "a row that is asked for twice comes twice");
    assert_ne!(found[..16], found[16..32]);
}

#[test]
fn rows_are_created_up_to_the_declared_number() {
    let job = Job { shards: 2, mode: "async", ..Job::new(1, 1) };
    let settings = "const_lr { learning_rate: 1 } sparse { rows: 500 width: 2 buckets: 2 }";
    let (servers, client) = alone(&job, settings);
    let rows = |from: u64, count: u64| Rows {
        ids: (from..from + count).map(|id| id * 1_000_003).collect(),
        values: vec![-1.0; usize::try_from(count * 2).expect("few")],
    };
    push_rows(&client, "rows", &rows(0, 400)).expect("there is room");
    let failure = push_rows(&client, "rows", &rows(400, 4000)).expect_err("there is no room").to_string();
    for part in ["\"rows\"", "new rows for bucket", "expected at most", "of the 500 that were declared"] {
        assert!(failure.contains(part), "{failure}; expected {part}");
    }
    push_rows(&client, "rows", &rows(0, 400)).expect("these rows are there");
    let values = pull_rows(&client, "rows", &rows(0, 400).ids, 2).expect("rows are read");
    assert!(floats(&values).iter().all(|value| *value == 2.0), "nobody's rows were lost or came twice");
    assert_eq!(client.list_rows("rows").expect("they are there").len(), 400);
    servers.stop();
}

#[test]
fn rows_survive_a_restart() {
    let folder = folder();
    let job = Job { shards: 2, ..Job::new(2, 1) }.with_checkpoints(folder.path());
    let matrix = Matrix::new("matrix", 200, 6, "optimizer: Adam adam { } const_lr { learning_rate: 0.01 } l2: 0.1");
    let servers = Local::start(&job);
    let first = client(&servers.coordinator(), 0);
    begin(&first, std::slice::from_ref(&matrix));
    (1..=4).for_each(|round| matrix.push(&first, 0, round).expect("rows are taken"));
    drop(first);
    servers.stop();
    let servers = Local::start(&job);
    let second = client(&servers.coordinator(), 0);
    begin(&second, std::slice::from_ref(&matrix));
    matrix.check_alike(&second, "after a restart");
    (5..=7).for_each(|round| matrix.push(&second, 0, round).expect("rows are taken"));
    matrix.check_alike(&second, "training goes on after a restart");
    servers.stop();
}

/// The names, types, shapes and bytes of a model's tensors.
fn tensors(path: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let file = std::fs::read(path).expect("the model is there");
    let header = usize::try_from(u64::from_le_bytes(file[..8].try_into().expect("eight bytes"))).expect("it is short");
    let json: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).expect("it is JSON");
    let number = |value: &serde_json::Value| usize::try_from(value.as_u64().expect("a number")).expect("it is short");
    let tensors = json.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, about): (&String, &serde_json::Value)| {
        let shape = about["shape"].as_array().expect("a list").iter().map(|one| one.as_u64().expect("a number"));
        let (start, end) = (number(&about["data_offsets"][0]), number(&about["data_offsets"][1]));
        let bytes = file[8 + header + start..8 + header + end].to_vec();
        (name.clone(), (about["dtype"].as_str().expect("a name").to_owned(), shape.collect(), bytes))
    };
    tensors.map(tensor).collect()
}

#[test]
fn a_model_has_matrices_or_ids_with_rows() {
    let folder = folder();
    let job = Job { shards: 2, ..Job::new(2, 1) }.with("--model-dir", folder.path().display());
    let servers = Local::start(&job);
    let client = client(&servers.coordinator(), 0);
    assert!(client.begin_init(&OptimizerSettings::default()).expect("somebody is chosen"));
    let matrix = Matrix::new("matrix", 30, 3, "const_lr { learning_rate: 0.5 }");
    matrix.declare(&client).expect("it is declared");
    let any = crate::cluster::rows::settings(
        "const_lr { learning_rate: 1 } sparse { rows: 100 width: 2 constant { value: 3 } }",
    );
    client.init_param("any", Float32, &[], &[], &any).expect("it is declared");
    client.finish_init().expect("the initialisation ends");
    matrix.push(&client, 0, 1).expect("rows are taken");
    let rows = Rows { ids: vec![1 << 40, 7], values: vec![1.0, 1.0, 2.0, 2.0] };
    push_rows(&client, "any", &rows).expect("rows are taken");
    client.save_model("model.safetensors").expect("the model is saved");
    let found = tensors(&folder.path().join("model.safetensors"));
    let whole = matrix.pull_sparse(&client).expect("it is there");
    assert_eq!(found["matrix"], ("F32".to_owned(), vec![30, 3], whole));
    assert_eq!(found["matrix"].2, found["matrix/dense"].2);
    let ids = [7_u64, 1 << 40].iter().flat_map(|id| id.to_le_bytes()).collect();
    assert_eq!(found["any:ids"], ("I64".to_owned(), vec![2], ids));
    assert_eq!(found["any:rows"], ("F32".to_owned(), vec![2, 2], bytes(&[1.0, 1.0, 2.0, 2.0])));
    assert_eq!(found.len(), 4);
    servers.stop();
}

#[test]
fn a_row_call_that_does_not_fit_is_refused_by_name() {
    let (servers, client) = alone(&Job::new(1, 1), "optimizer: SGD sparse { height: 10 width: 2 }");
    let check = |result: Result<(), Failure>, expected: &str| {
        let found = result.expect_err(expected).to_string();
        assert!(found.contains("parameter \"rows\"") && found.contains(expected), "{found}; expected {expected}");
    };
    let given = |element_type, ids: &[u64], values: &[u8]| {
        client.push_rows(&[GradientRows { name: "rows", element_type, ids, values }], None)
    };
    check(given(Float32, &[1, 10], &[0; 16]), "row 10 at place 1 of 2; expected ids below 10");
    check(given(Float32, &[1], &[0; 12]), "12 bytes of values for 1 rows; expected 8");
    check(given(ElementType::Float64, &[1], &[0; 16]), "rows of float64; expected float32");
    check(given(ElementType::Float16, &[1], &[0; 8]), "8 bytes of values for 1 rows; expected 4");
    assert_eq!(given(ElementType::Float16, &[1, 1], &[0; 8]), Ok(()), "halves are gradients");
    check(pull_rows(&client, "rows", &[10], 2).map(drop), "row 10 at place 0");
    check(pull_rows(&client, "rows", &[1], 3).map(drop), "a destination of 12 bytes for 1 rows; expected 8");
    let whole = GradientSlice { name: "rows", element_type: Float32, content: &[0; 80] };
    check(client.push(&[whole], None), "is sparse: it is sent and fetched by rows");
    check(client.set(&[whole]), "is sparse");
    let mut place = [0; 80];
    check(client.pull(&mut [DestinationSlice::new("rows", &mut place)]), "is sparse");
    servers.stop();
}

#[test]
fn an_invalid_declaration_of_rows_is_refused_by_name() {
    let servers = Local::start(&Job::new(1, 1));
    let client = client(&servers.coordinator(), 0);
    let whole = crate::cluster::rows::settings("sparse { rows: 1 width: 1 }");
    let refused = client.begin_init(&whole).expect_err("it is said of all").to_string();
    assert!(refused.contains("sparse is a setting of one parameter"), "{refused}");
    assert!(client.begin_init(&OptimizerSettings::default()).expect("somebody is chosen"));
    let check = |text: &str, shape: &[u64], content: &[u8], expected: &str| {
        let settings = crate::cluster::rows::settings(text);
        let found = client.init_param("rows", Float32, shape, content, &settings).expect_err(expected).to_string();
        assert!(found.contains("\"rows\"") && found.contains(expected), "{found}; expected {expected}");
    };
    check("clip_norm: 1 sparse { rows: 9 width: 1 }", &[], &[], "clip_norm");
    check("sparse { rows: 9 }", &[], &[], "neither width nor a shape");
    check("sparse { height: 9 width: 2 }", &[9, 3], &[], "its configuration says height 9 and width 2");
    check("sparse { height: 9 width: 2 }", &[18], &[], "expected height and width");
    check("sparse { height: 9 width: 2 }", &[], &[0; 8], "8 bytes of initial value; expected none, or 72");
    check("sparse { height: 9 rows: 3 width: 2 }", &[], &[0; 72], "when all of its rows may come to be");
    check("sparse { rows: 9 width: 100000 }", &[], &[], "expected 1 to 65536");
    servers.stop();
}
