//! Settings of clients and of `begin_init`, beside a new job and beside one that exists.

use super::{ADAM, RATE, SGD, secret, step, step_of, tensors, trainer, values};
use crate::certificates::Authority;
use crate::cluster::job::{Job, client, folder};
use crate::cluster::ports::free_port;
use crate::cluster::process::Processes;
use crate::cluster::settings_page::Outcome::{Refused, TakesEffect};
use crate::cluster::settings_page::{Case, check};
use crate::cluster::training::{begin, given, initialise, pull};
use pserver_client::environment::{Environment, find};
use pserver_client::{Client, setting_file};
use pserver_core::config::OptimizerSettings;
use pserver_core::error::Failure;
use pserver_core::wire::Address;

const CLIENTS: &str = "Clients";
const BEGIN_INIT: &str = "`paddle_begin_init_params`, `begin_init`, `init_all`";

/// A job of one server and two trainers, which has its parameters or not.
struct ClientScene {
    exists: bool,
}

impl ClientScene {
    /// A job with further options, and where it is.
    fn job(&self, more: &[(&'static str, &str)]) -> (Processes, Address) {
        let processes = Processes::start(more.iter().fold(Job::new(1, 2), |job, (name, value)| job.with(name, value)));
        let coordinator = processes.coordinator();
        if self.exists {
            begin(&client(&coordinator, 0), &tensors(0)).expect("nobody else does");
        }
        (processes, coordinator)
    }

    /// Initialises a new job, or finds the parameters of one that exists.
    fn begin(&self, client: &Client, text: &str) {
        assert_ne!(self.begin_with(client, text).expect("it fits"), self.exists);
        if !self.exists {
            initialise(client, &tensors(0)).expect("it was elected");
        }
    }

    fn begin_with(&self, client: &Client, text: &str) -> Result<bool, Failure> {
        client.begin_init(&OptimizerSettings::from_text(text).expect("the test's settings are right"))
    }
}

/// A client with options in text.
fn with(coordinator: &Address, options: &str) -> Client {
    let surroundings = Environment { variable: &|_| None, file: &setting_file::open };
    let found = find(&format!("coordinator={coordinator} {options}"), &surroundings).expect("the options are right");
    Client::new(found.options).expect("it is made")
}

const OF_CLIENTS: [Case<ClientScene>; 7] = [
    (&["coordinator", "poll", "checks", "rdma_device", "rdma_fabric"], TakesEffect, transport),
    (&["reader"], TakesEffect, reader),
    (&["deadline"], TakesEffect, deadline),
    (&["server_absence"], TakesEffect, absence),
    (&["token_file"], TakesEffect, token),
    (&["encrypt", "certificate", "private_key", "certificate_authority"], TakesEffect, encrypted),
    (&["trainer"], TakesEffect, rank),
];

#[test]
fn settings_of_clients_do_what_the_page_says() {
    for (column, exists) in [false, true].into_iter().enumerate() {
        check(CLIENTS, column, &ClientScene { exists }, &OF_CLIENTS);
    }
}

fn transport(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[]);
    let nowhere = Address { port: free_port(), ..coordinator.clone() };
    let text = with(&nowhere, "server_absence=0s").names().expect_err("nobody is there").to_string();
    assert!(text.contains(&nowhere.to_string()), "{text}");
    let other = with(&coordinator, "trainer=0 poll=block checks=always rdma_device=none rdma_fabric=timeout=20");
    scene.begin(&other, "");
    other.resume_rounds().expect("servers answer");
    assert_eq!(step_of(&[other, trainer(&coordinator, 1)], 0).1, [1.0; 2]);
    processes.terminate();
}

/// A reader takes no rank, and initialises nothing.
fn reader(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[]);
    let reader = with(&coordinator, "reader=yes deadline=400ms");
    if scene.exists {
        assert_eq!(values(&reader, 0), [0.0; 2]);
        let ones = tensors(0).each_ref().map(|one| one.constant(1.0));
        let text = reader.push(&given(&tensors(0), &ones), None).expect_err("it only reads").to_string();
        assert!(text.contains("reader"), "{text}");
    } else {
        let text = reader.begin_init(&OptimizerSettings::default()).expect_err("it only reads").to_string();
        assert!(text.contains("no trainer has offered to initialise"), "{text}");
    }
    let trainers = [0, 1].map(|rank| with(&coordinator, &format!("trainer={rank}")));
    assert_eq!(trainers.each_ref().map(|trainer| trainer.trainer().expect("its rank is free")), [0, 1]);
    drop((reader, trainers));
    processes.terminate();
}

/// A call that waits for another trainer ends.
fn deadline(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[]);
    let [first, second] = [0, 1].map(|rank| with(&coordinator, &format!("trainer={rank} deadline=400ms")));
    let text = if scene.exists {
        begin(&first, &[]).expect("servers answer");
        second.trainer().expect("servers answer");
        first
            .push(&given(&tensors(0), &tensors(0).each_ref().map(|one| one.constant(1.0))), None)
            .expect("it is taken");
        pull(&first, &tensors(0)).expect_err("the round waits for the second").to_string()
    } else {
        assert!(scene.begin_with(&first, "").expect("nobody else does"));
        scene.begin_with(&second, "").expect_err("the first has not finished").to_string()
    };
    assert!(text.contains("within 0.4 s"), "{text}");
    drop((first, second));
    processes.terminate();
}

/// A call ends that needs a server which was never there, or is there no longer.
fn absence(scene: &ClientScene) {
    if scene.exists {
        let (mut processes, coordinator) = scene.job(&[]);
        let client = with(&coordinator, "trainer=0 server_absence=0s");
        begin(&client, &[]).expect("servers answer");
        processes.kill(0);
        let text = pull(&client, &tensors(0)).expect_err("the server is gone").to_string();
        assert!(text.contains("has refused connections for 0."), "{text}");
    } else {
        let first = Job::new(2, 2).arguments(0, "tcp://127.0.0.1:0", None);
        let first = crate::cluster::process::Process::start(&first).expect("server 0 starts");
        let text = with(&first.address, "server_absence=0s").names().expect_err("server 1 is not there").to_string();
        assert!(text.contains("server 1 of 2 has not registered with server 0 for 0.0 s"), "{text}");
        first.kill();
    }
}

fn token(scene: &ClientScene) {
    let secrets = folder();
    let [right, wrong] = ["right", "wrong"].map(|name| secret(secrets.path(), name).display().to_string());
    let new = ClientScene { exists: false };
    let (processes, coordinator) = new.job(&[("--token-file", &right)]);
    let client = with(&coordinator, &format!("trainer=0 token_file={right}"));
    if scene.exists {
        new.begin(&client, "");
    }
    let text = with(&coordinator, &format!("trainer=0 token_file={wrong}")).names();
    let text = text.expect_err("it has another").to_string();
    assert!(text.contains("another token"), "{text}");
    assert_ne!(scene.begin_with(&client, "").expect("it has the token"), scene.exists);
    drop(client);
    processes.terminate();
}

/// A client without a certificate is refused, and one with it trains.
fn encrypted(scene: &ClientScene) {
    let files = folder();
    let authority = Authority::new(files.path());
    let ([certificate, key], of_authority) = (authority.certify("127.0.0.1"), authority.file());
    let new = ClientScene { exists: false };
    let (processes, coordinator) = new.job(&[
        ("--encrypt", "tcp"),
        ("--certificate", &certificate),
        ("--private-key", &key),
        ("--certificate-authority", &of_authority),
    ]);
    let [own, own_key] = authority.certify("trainer");
    let verifying = format!("encrypt=tcp certificate_authority={of_authority}");
    let certified = with(&coordinator, &format!("trainer=0 {verifying} certificate={own} private_key={own_key}"));
    if scene.exists {
        new.begin(&certified, "");
    }
    let text = with(&coordinator, &format!("trainer=0 {verifying}")).names();
    let text = text.expect_err("it has no certificate").to_string();
    assert!(text.contains("refuses this session"), "{text}");
    assert_ne!(scene.begin_with(&certified, "").expect("it has a certificate"), scene.exists);
    drop(certified);
    processes.terminate();
}

/// A rank that another process has is taken over from it.
fn rank(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[]);
    let [first, second] = [0, 1].map(|_| with(&coordinator, "trainer=1"));
    assert_eq!([first.trainer().expect("it is free"), second.trainer().expect("it is taken over")], [1, 1]);
    let text = first.begin_init(&OptimizerSettings::default()).expect_err("it has lost its rank").to_string();
    assert!(text.contains("trainer 1"), "{text}");
    scene.begin(&second, "");
    drop((first, second));
    processes.terminate();
}

const NEW: [Case<ClientScene>; 4] = [
    (&["optimizer"], TakesEffect, optimizer),
    (&["mode", "merge"], TakesEffect, sharing),
    (&["mode", "merge"], Refused, other_sharing),
    (&["sparse", "home", "sender", "total_part", "backup_trainers"], Refused, of_one_parameter),
];
const EXISTING: [Case<ClientScene>; 4] = [
    (&["optimizer"], TakesEffect, optimizer),
    (&["optimizer"], Refused, other_optimizer),
    (&["mode", "merge"], Refused, other_sharing),
    (&["sparse", "home", "sender", "total_part", "backup_trainers"], Refused, of_one_parameter),
];

#[test]
fn settings_of_begin_init_do_what_the_page_says() {
    check(BEGIN_INIT, 0, &ClientScene { exists: false }, &NEW);
    check(BEGIN_INIT, 1, &ClientScene { exists: true }, &EXISTING);
}

/// In a new job in place of that of the servers; in one that exists gradients of this trainer bring its rate.
fn optimizer(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[("--optimizer", SGD)]);
    let first = client(&coordinator, 0);
    scene.begin(&first, RATE);
    first.resume_rounds().expect("servers answer");
    let second = client(&coordinator, 1);
    second.begin_init(&OptimizerSettings::from_text(RATE).expect("it is right")).expect("it fits");
    second.resume_rounds().expect("servers answer");
    assert_eq!(step_of(&[first, second], 0), ([0.0; 2], [0.5; 2]));
    processes.terminate();
}

/// `begin_init` is refused, changes nothing, and the trainer goes on with settings that fit.
fn refused(scene: &ClientScene, more: &[(&'static str, &str)], table: &[(&str, &[&str])]) {
    let (processes, coordinator) = scene.job(more);
    let first = client(&coordinator, 0);
    for (settings, words) in table {
        let text = scene.begin_with(&first, settings).expect_err("it is refused").to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{settings}: expected {word:?} in: {text}"));
    }
    scene.begin(&first, "");
    first.resume_rounds().expect("servers answer");
    assert_eq!(step_of(&[first, trainer(&coordinator, 1)], 0), ([0.0; 2], [1.0; 2]));
    processes.terminate();
}

fn other_optimizer(scene: &ClientScene) {
    let words = ["found the optimizer `", "Adam", "learning_rate: 1", "only a constant learning rate may change"];
    refused(scene, &[("--optimizer", SGD)], &[(ADAM, &words)]);
}

/// Servers that were started without take the mode and the merge of the initialiser.
fn sharing(scene: &ClientScene) {
    let (processes, coordinator) = scene.job(&[("--optimizer", SGD)]);
    scene.begin(&client(&coordinator, 0), "merge: Sum");
    assert_eq!(step(0, &coordinator), ([0.0; 2], [2.0; 2]));
    processes.terminate();
    let (processes, coordinator) = scene.job(&[("--optimizer", SGD)]);
    let first = client(&coordinator, 0);
    scene.begin(&first, "mode: Async");
    // In mode async the push does not wait for another trainer.
    let ones = tensors(0).each_ref().map(|one| one.constant(1.0));
    first.push(&given(&tensors(0), &ones), None).expect("it is taken");
    assert_eq!(values(&first, 0), [-1.0; 2]);
    drop(first);
    processes.terminate();
}

fn other_sharing(scene: &ClientScene) {
    let mode = ["found mode Async", "expected Sync, as the job has", "another --mode"];
    let merge = ["found merge Sum", "expected Mean, as the job has", "another --merge"];
    let given = [("--optimizer", SGD), ("--mode", "sync"), ("--merge", "mean")];
    refused(scene, &given, &[("mode: Async", &mode), ("merge: Sum", &merge)]);
}

fn of_one_parameter(scene: &ClientScene) {
    refused(
        scene,
        &[("--optimizer", SGD)],
        &[
            ("sparse { rows: 1 }", &["sparse is a setting of one parameter"]),
            ("home: 1", &["home is a setting of one parameter"]),
            ("sender: 1", &["sender is a setting of one parameter"]),
            ("total_part: Share", &["total_part is a setting of one parameter"]),
            ("backup_trainers: 1", &["backup_trainers is a setting of one parameter"]),
        ],
    );
}
