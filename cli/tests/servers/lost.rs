//! Servers without checkpoints that lose the job with their process: each error names the server and the remedy.

use crate::cluster::job::{Job, client};
use crate::cluster::process::Processes;
use crate::cluster::training::{Tensor, begin, pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::wire::Address;

fn tensors() -> Vec<Tensor> {
    // Two servers hold parts of the parameter.
    vec![Tensor::new("weights", Float32, 50_000, "")]
}

fn check<T>(result: Result<T, Failure>, words: &[&str]) {
    let text = result.err().expect("it fails").to_string();
    words.iter().for_each(|word| assert!(text.contains(word), "expected {word:?} in: {text}"));
}

#[test]
fn clients_of_a_restarted_server_0_are_told_to_make_new_clients() {
    let mut servers = Processes::start(Job::new(1, 1));
    let first = client(&servers.coordinator(), 0);
    assert!(begin(&first, &tensors()).expect("it is chosen"));
    servers.kill(0);
    servers.start_again(0);
    check(pull(&first, &tensors()), &["server 0 was started anew without a checkpoint_dir", "expected a new client"]);
    let second = client(&servers.coordinator(), 0);
    assert!(begin(&second, &tensors()).expect("the job is a new one"));
    pull(&second, &tensors()).expect("the parameters are there");
    servers.terminate();
}

#[test]
fn a_server_that_lost_its_parameters_is_named_to_old_clients_and_to_new_ones() {
    let mut servers = Processes::start(Job::new(2, 1));
    let first = client(&servers.coordinator(), 0);
    assert!(begin(&first, &tensors()).expect("it is chosen"));
    servers.kill(1);
    servers.start_again(1);
    let words = ["server 1 shard 0 at ", "was started anew and has none of the job's parameters", "all servers"];
    check(pull(&first, &tensors()), &words);
    let second = client(&servers.coordinator(), 0);
    assert_eq!(second.begin_init(&OptimizerSettings::default()), Ok(false));
    check(pull(&second, &tensors()), &words);
    servers.terminate();
}

#[test]
fn verbs_without_a_device_fail_at_once_with_the_reason() {
    let address = Address::parse("verbs://127.0.0.1:1").expect("it is an address");
    let options = ClientOptions { rdma_device: "none".parse().expect("it is a choice"), ..ClientOptions::new(address) };
    check(Client::new(options), &["connecting to verbs://127.0.0.1:1: ", "expected an RDMA device"]);
}
