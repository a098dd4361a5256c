//! Settings that a job contradicts: each takes effect or is refused, as the tables of `docs/SETTINGS.md` say.

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::process::{Process, Processes};
use crate::cluster::training::{Tensor, declare, given, pull};
use pserver_client::Client;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";

/// A parameter with the default optimizer, and one with its own.
fn tensors() -> [Tensor; 2] {
    [Tensor::new("common", Float32, 5000, "").zeroed(), Tensor::new("own", Float32, 3, "rate_scale: 0.25").zeroed()]
}

fn begin(client: &Client, text: &str) -> Result<bool, Failure> {
    client.begin_init(&OptimizerSettings::from_text(text).expect("the test's settings are right"))
}

/// Initialises a job with SGD as default, or finds it.
fn initialise(client: &Client, text: &str) {
    if begin(client, text).expect("it fits the job") {
        tensors().iter().for_each(|tensor| declare(client, tensor).expect("it is right"));
        client.finish_init().expect("servers answer");
    }
}

/// The change of each parameter by a gradient of ones.
fn moved(client: &Client) -> String {
    let before = values(client);
    let ones = tensors().map(|tensor| tensor.constant(1.0));
    client.push(&given(&tensors(), &ones), None).expect("it is taken");
    let after = values(client);
    format!("{:.3} {:.3}", before[0] - after[0], before[1] - after[1])
}

fn values(client: &Client) -> [f32; 2] {
    let values = pull(client, &tensors()).expect("servers answer");
    let first = |value: &Vec<u8>| f32::from_le_bytes(value[..4].try_into().expect("four bytes"));
    [first(&values[0]), first(&values[1])]
}

#[test]
fn settings_of_a_trainer_that_joins_a_job_take_effect_or_are_refused() {
    let servers = Local::start(&Job::new(2, 1));
    let coordinator = servers.coordinator();
    let first = client(&coordinator, 0);
    initialise(&first, SGD);
    assert_eq!(moved(&first), "1.000 0.250");
    // One frame has both parameters, and each has its rate.
    let second = client(&coordinator, 0);
    initialise(&second, "optimizer: SGD const_lr { learning_rate: 0.5 }");
    assert_eq!(moved(&second), "0.500 0.250");
    let own = OptimizerSettings::from_text("rate_scale: 0.25 const_lr { learning_rate: 0.5 }").expect("it is right");
    second.follow_optimizer("own", &own).expect("the rate alone differs");
    assert_eq!(moved(&second), "0.500 0.125");
    initialise(&client(&coordinator, 0), SGD);
    assert_eq!(moved(&client(&coordinator, 0)), "1.000 0.250");

    let third = client(&coordinator, 0);
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 1 }";
    let polynomial = "optimizer: SGD lr_policy: Poly poly_lr { learning_rate: 1 lr_decay_a: 1 lr_decay_b: 1 }";
    for (settings, words) in [
        (adam, ["found the optimizer `", "Adam", "only a constant learning rate may change"]),
        (polynomial, ["found the optimizer `", "Poly", "only a constant learning rate may change"]),
        ("mode: Async", ["found mode Async", "expected Sync", "another --mode"]),
        ("merge: Sum", ["found merge Sum", "expected Mean", "another --merge"]),
        ("home: 1", ["home is a setting of one parameter", "", ""]),
    ] {
        let text = begin(&third, settings).expect_err("it contradicts the job").to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{settings}: {text}"));
    }
    let adam = OptimizerSettings::from_text(adam).expect("it is right");
    let text = third.follow_optimizer("own", &adam).expect_err("it is another").to_string();
    assert!(text.contains("parameter \"own\": found the optimizer `"), "{text}");
    servers.stop();
}

#[test]
fn a_mode_in_the_configuration_beside_that_of_the_servers_is_refused() {
    let servers = Local::start(&Job::new(1, 1).with("--mode", "sync").with("--merge", "mean"));
    let client = client(&servers.coordinator(), 0);
    for (settings, expected) in [("mode: Async", "expected Sync, as the job has"), ("merge: Sum", "expected Mean, as")]
    {
        let text = begin(&client, settings).expect_err("the servers have another").to_string();
        assert!(text.contains(expected), "{text}");
    }
    initialise(&client, "mode: Sync merge: Mean");
    servers.stop();
}

#[test]
fn a_restarted_server_takes_another_rate_and_number_of_trainers_and_refuses_the_rest() {
    let folder = folder();
    let optimizer = |text: &str| Job::new(1, 1).with_checkpoints(folder.path()).with("--optimizer", text);
    let mut servers = Processes::start(optimizer(SGD));
    let first = client(&servers.coordinator(), 0);
    initialise(&first, "");
    assert_eq!(moved(&first), "1.000 0.250");
    servers.stop(0);

    // The trainer has not departed.
    let bind = servers.coordinator().to_string();
    let refused = |job: Job, words: &[&str]| {
        let text = Process::start(&job.arguments(0, &bind, None)).err().expect("it is refused").words;
        words.iter().for_each(|word| assert!(text.contains(word), "expected {word:?} in: {text}"));
    };
    let trainers = |trainers| Job { trainers, ..optimizer(SGD) };
    refused(trainers(2), &["trainers = 2 (from --trainers)", "has 1 trainers, and trainer 0 has not left it"]);
    refused(optimizer(SGD).with("--merge", "sum"), &["merge = sum (from --merge)", "merge mean, which stays"]);
    refused(Job { mode: "async", ..optimizer(SGD) }, &["mode = async (from --mode)", "mode sync, which stays"]);
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 1 }";
    refused(optimizer(adam), &["was initialised with the optimizer `", "expected the same setting or none"]);

    servers.change(optimizer("optimizer: SGD const_lr { learning_rate: 0.5 }"));
    servers.start_again(0);
    let second = client(&servers.coordinator(), 0);
    initialise(&second, "");
    assert_eq!(moved(&second), "0.500 0.250");
    second.leave().expect("servers answer");
    drop((first, second));
    servers.stop(0);

    servers.change(trainers(2));
    servers.start_again(0);
    let pair = [0, 1].map(|rank| client(&servers.coordinator(), rank));
    pair.iter().for_each(|client| initialise(client, SGD));
    let gradient = |number: f32| tensors().map(|tensor| tensor.constant(number));
    let before = values(&pair[0])[0];
    for (client, number) in pair.iter().zip([1.0, 3.0]) {
        client.push(&given(&tensors(), &gradient(number)), None).expect("it is taken");
    }
    assert_eq!(format!("{:.3}", before - values(&pair[0])[0]), "2.000", "the mean of both");
    pair.iter().for_each(|client| client.leave().expect("servers answer"));
    servers.terminate();
}
