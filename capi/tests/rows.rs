//! Parameters that are updated by rows end like dense ones, to the bit, however they are spread.

mod cluster;

use cluster::job::{Job, Local, client};
use cluster::rows::{Matrix, settings};
use paddle_pserver::client::Client;
use pserver_core::config::OptimizerSettings;

const ROUNDS: u64 = 6;

/// Rules whose rows move by themselves, and rules whose rows do not.
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
fn sparse_is_dense_to_the_bit_for_one_trainer() {
    check_dense(1, 1, 1, "sync", "tcp://127.0.0.1:0");
    check_dense(1, 3, 2, "sync", "shm://127.0.0.1:0");
}

#[test]
fn sparse_is_dense_to_the_bit_for_many_trainers() {
    check_dense(4, 1, 1, "sync", "tcp://127.0.0.1:0");
    check_dense(2, 2, 3, "sync", "shm://127.0.0.1:0");
    check_dense(3, 3, 1, "sync", "tcp://127.0.0.1:0");
}

#[test]
fn sparse_is_dense_where_each_gradient_is_a_step_of_its_own() {
    check_dense(1, 2, 2, "async", "tcp://127.0.0.1:0");
    check_dense(1, 1, 2, "delta", "tcp://127.0.0.1:0");
}

#[test]
fn settings_are_read() {
    let _ = settings("sparse { height: 3 width: 2 }");
}
