//! Successive jobs over one checkpoint directory: each waits for all its trainers, in any order of joining. Four jobs
//! run by default, a hundred with `PSERVER_FULL=1`.

use std::sync::mpsc;

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, Local, client, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, begin, pull, push, push_pull};
use pserver_client::Client;
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::wire::Address;

const TRAINERS: u32 = 2;
const STEPS: u64 = 5;

fn tensors() -> Vec<Tensor> {
    let adam = "optimizer: Adam adam {} const_lr { learning_rate: 0.01 }";
    vec![Tensor::new("weights", Float32, 10_000, adam), Tensor::new("wide", Float64, 5001, adam)]
}

/// A process of a rank: it goes on with the round after those that all servers have.
fn join(coordinator: &Address, tensors: &[Tensor], rank: u32) -> (Client, u64) {
    let client = client(coordinator, rank);
    begin(&client, tensors).expect("the tensors are there");
    let done = client.resume_rounds().expect("servers answer");
    (client, done)
}

/// One trainer of a job that ends with round `last`. The trainer reports when its first gradient is acknowledged, is
/// killed after round `killed`, and restarts.
fn work(coordinator: &Address, tensors: &[Tensor], (rank, last): (u32, u64), killed: u64, joined: &mpsc::Sender<()>) {
    let (mut client, mut done) = join(coordinator, tensors, rank);
    done += 1;
    push(&client, tensors, rank, done).expect("the round takes a gradient");
    joined.send(()).expect("the test waits for it");
    while done < last {
        if done == killed {
            drop(client);
            (client, done) = join(coordinator, tensors, rank);
        }
        done += 1;
        push_pull(&client, tensors, rank, done).unwrap_or_else(|failure| panic!("round {done}: {failure}"));
    }
    client.leave().expect("servers answer");
}

/// Trains to round `last`. A trainer joins when the one before it in `order` has sent its first gradient.
fn train(coordinator: &Address, tensors: &[Tensor], last: u64, order: &[u32], killed: u64) {
    std::thread::scope(|scope| {
        let (report, joined) = mpsc::channel();
        for rank in order.iter().copied() {
            let (report, of_rank) = (report.clone(), if rank == 0 { killed } else { 0 });
            scope.spawn(move || work(coordinator, tensors, (rank, last), of_rank, &report));
            joined.recv().expect("a trainer joins");
        }
    });
}

#[test]
fn a_frozen_parameter_does_not_reset_a_trainers_step() {
    let trained = tensors();
    let mut all = tensors();
    all.push(Tensor::new("frozen", Float32, 10, "optimizer: SGD"));
    let servers = Local::start(&Job::new(2, TRAINERS));
    let coordinator = servers.coordinator();
    let ((first, _), (second, _)) = (join(&coordinator, &all, 0), join(&coordinator, &all, 1));
    for round in 1..=STEPS {
        push(&first, &trained, 0, round).expect("the round takes a gradient");
        push_pull(&second, &trained, 1, round).expect("the round is complete");
    }
    drop(first);
    let (again, done) = join(&coordinator, &all, 0);
    assert_eq!(done, STEPS);
    push(&again, &trained, 0, STEPS + 1).expect("the round takes a gradient");
    push_pull(&second, &trained, 1, STEPS + 1).expect("the round is complete with it");
    servers.stop();
}

#[test]
fn each_of_several_jobs_over_a_directory_waits_for_all_its_trainers() {
    let mut prng = SeededPrng::of("jobs in a row");
    let (folder, tensors) = (folder(), tensors());
    let job = Job::new(2, TRAINERS).with_checkpoints(folder.path());
    let mut servers = Processes::start(job);
    let undisturbed = Local::start(&Job::new(1, TRAINERS));
    for number in 1..=if is_full() { 100 } else { 4 } {
        let (last, mut order) = (number * STEPS, [0, 1]);
        train(&undisturbed.coordinator(), &tensors, last, &order, 0);
        prng.shuffle(&mut order);
        let killed = if prng.below(2) == 0 { last - STEPS + 1 + prng.next() % STEPS } else { 0 };
        train(&servers.coordinator(), &tensors, last, &order, killed);
        let [found, expected] = [servers.coordinator(), undisturbed.coordinator()]
            .map(|coordinator| pull(&reader(&coordinator), &tensors).expect("the tensors are there"));
        assert!(found == expected, "job {number}, trainers in the order {order:?}, killed after round {killed}");
        for server in 0..servers.running.len() {
            match prng.below(3) {
                0 => servers.kill(server),
                1 => servers.stop(server),
                _ => continue,
            }
            servers.start_again(server);
        }
    }
    servers.terminate();
    undisturbed.stop();
}
