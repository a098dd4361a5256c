//! A job with a token: a peer with the token trains, saves and registers. A peer without it is refused at once, and
//! changes nothing.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cluster::job::{DEADLINE, Job, Local, TCP, folder};
use crate::cluster::process::one_test;
use crate::cluster::training::{Tensor, begin, given, pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::wire::Address;
use pserver_kernels::conformance::skips::skip;
use pserver_node::Server;
use pserver_transport::network::JobToken;

const SGD: &str = "const_lr { learning_rate: 1.0 }";

fn write(folder: &Path, name: &str, secret: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, secret).expect("there is room");
    path
}

fn client(coordinator: &Address, trainer: u32, token_file: Option<&Path>) -> Result<Client, Failure> {
    let token = token_file.map(JobToken::read).transpose()?;
    let options = ClientOptions::new(coordinator.clone());
    Client::new(ClientOptions { trainer: Some(trainer), deadline: DEADLINE, token, ..options })
}

/// Asks for the job's names, which must be refused long before the deadline.
fn must_be_refused(coordinator: &Address, token_file: Option<&Path>, expected: &str) {
    let begun = Instant::now();
    let failure = client(coordinator, 1, token_file).and_then(|client| client.names()).expect_err("it is a stranger");
    let text = failure.to_string();
    assert!(text.contains(expected), "{text}; expected {expected}");
    assert!(begun.elapsed() < DEADLINE / 2, "it was told after {:?}", begun.elapsed());
}

#[test]
fn only_a_trainer_with_the_token_gets_in() {
    for bind in [TCP, "shm://127.0.0.1:0"] {
        let folder = folder();
        let token = write(folder.path(), "token", "correct horse battery staple\n");
        let other = write(folder.path(), "other", "correct horse battery stapler");
        let short = write(folder.path(), "short", "horse");
        let job = Job { bind, ..Job::new(2, 1) }
            .with("--token-file", token.display())
            .with("--model-dir", folder.path().join("models").display());
        let servers = Local::start(&job);
        let coordinator = servers.coordinator();
        let trainer = client(&coordinator, 0, Some(&token)).expect("the token is there");
        let tensors = [Tensor::new("w", Float32, 50_000, SGD).zeroed()];
        assert!(begin(&trainer, &tensors).expect("it is chosen"));
        must_be_refused(&coordinator, None, "the client shows no token, and this job has one");
        must_be_refused(&coordinator, Some(&other), "the server has another token than this side");
        must_be_refused(&coordinator, Some(&short), "a token of 5 bytes; expected 16 to 1024");
        must_be_refused(&coordinator, Some(&folder.path().join("none")), "none: No such file");
        trainer.push(&given(&tensors, &[tensors[0].constant(-1.0)]), None).expect("nobody disturbed it");
        let values = pull(&trainer, &tensors).expect("nobody disturbed it");
        assert!(values == [tensors[0].constant(1.0)], "{bind}: one gradient of one");
        trainer.save_model("model.safetensors").expect("the server reads its own job");
        drop(trainer);
        servers.stop();
    }
}

#[test]
fn a_server_with_another_token_does_not_join_and_one_without_a_token_is_not_trusted() {
    let folder = folder();
    let token = write(folder.path(), "token", "correct horse battery staple");
    let other = write(folder.path(), "other", "correct horse battery stapler");
    let job = Job::new(2, 1);
    let first = Server::start(job.clone().with("--token-file", token.display()).settings(0, None));
    let first = first.expect("a free port");
    let coordinator = first.address().to_string();
    let begun = Instant::now();
    let strangers = [
        (job.clone().with("--token-file", other.display()), "the server has another token than this side"),
        (job.clone(), "the client shows no token, and this job has one"),
    ];
    for (job, expected) in strangers {
        let refused = Server::start(job.settings(1, Some(&coordinator))).err().expect("it is a stranger").to_string();
        assert!(refused.contains(expected), "{refused}; expected {expected}");
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "it was told after {:?}", begun.elapsed());
    first.stop().expect("nothing happened to it");
    let open = Local::start(&Job::new(1, 1));
    must_be_refused(&open.coordinator(), Some(&token), "the server has another token than this side");
    open.stop();
}

#[test]
fn a_token_that_cannot_be_read_keeps_a_server_from_starting() {
    let failure = Server::start(Job::new(1, 1).with("--token-file", "/nowhere/token").settings(0, None));
    let text = failure.err().expect("there is no token").to_string();
    assert!(text.contains("token_file /nowhere/token: No such file"), "{text}");
}

/// The variable that makes a process of this test program the client without the token.
const STRANGER: &str = "PSERVER_TEST_STRANGER";
/// A user that owns nothing.
const NOBODY: u32 = 65534;

#[test]
fn on_loopback_a_user_finds_the_token_and_another_user_does_not_get_in() {
    if let Ok(coordinator) = std::env::var(STRANGER) {
        let coordinator = Address::parse(&coordinator).expect("the test says it");
        return must_be_refused(&coordinator, None, "the client shows no token, and this job has one");
    }
    let servers = Local::start(&Job { bind: TCP, ..Job::new(2, 1) });
    let coordinator = servers.coordinator();
    let trainer = client(&coordinator, 0, None).expect("the token is found");
    let tensors = [Tensor::new("w", Float32, 1000, SGD).zeroed()];
    assert!(begin(&trainer, &tensors).expect("it is chosen, and both servers know each other"));
    let mut stranger = one_test("token::on_loopback_a_user_finds_the_token_and_another_user_does_not_get_in");
    stranger.env(STRANGER, coordinator.to_string()).current_dir("/");
    match stranger.uid(NOBODY).output() {
        Ok(output) => {
            let is_refused = output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed");
            assert!(is_refused, "the stranger was not refused as it should be: {output:?}");
        }
        Err(error) => skip("another user", &format!("no process of another user can be started: {error}")),
    }
    trainer.push(&given(&tensors, &[tensors[0].constant(-1.0)]), None).expect("nobody disturbed it");
    drop(trainer);
    servers.stop();
}
