//! Servers and trainers of one process, with no socket between them.

use std::thread;

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::training::{Tensor, begin, pull, push_pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_node::Server;
use pserver_transport::loopback::Hub;
use pserver_transport::network::{ChecksumPolicy, PollPolicy};

/// The addresses of a job's servers within this process.
const NAMES: [&str; 2] = ["loopback://server-0:1", "loopback://server-1:1"];
const ROUNDS: u64 = 3;

fn tensors() -> Vec<Tensor> {
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    vec![Tensor::new("weights", Float32, 70_001, adam), Tensor::new("bias", Float64, 17, adam)]
}

fn job() -> Job {
    Job { shards: 2, ..Job::new(2, 2) }
}

fn servers(job: &Job, hub: &Hub) -> Vec<Server> {
    let mut servers: Vec<Server> = Vec::new();
    for (index, bind) in (0..job.servers).zip(NAMES) {
        let coordinator = servers.first().map(|first| first.address().to_string());
        let settings = Job { bind, ..job.clone() }.settings(index, coordinator.as_deref());
        servers.push(Server::start_within(settings, hub).expect("nobody else has its name"));
    }
    servers
}

/// Values after some rounds of two trainers.
fn trained(make: impl Fn(u32) -> Client) -> Vec<Vec<u8>> {
    let tensors = tensors();
    let clients = [make(0), make(1)];
    thread::scope(|scope| {
        for (trainer, client) in (0..).zip(&clients) {
            let tensors = &tensors;
            scope.spawn(move || {
                begin(client, tensors).expect("the job begins");
                (0..ROUNDS).for_each(|round| push_pull(client, tensors, trainer, round).expect("a round"));
            });
        }
    });
    pull(&clients[0], &tensors).expect("the values are there")
}

#[test]
fn a_job_within_one_process_equals_one_over_sockets() {
    let local = Local::start(&job());
    let expected = trained(|trainer| client(&local.coordinator(), trainer));
    local.stop();
    for (checks, poll) in
        [(ChecksumPolicy::BetweenHosts, PollPolicy::Block), (ChecksumPolicy::Always, PollPolicy::Busy)]
    {
        let hub = Hub::default();
        let (models, checks_word) =
            (folder(), if checks == ChecksumPolicy::Always { "always" } else { "between-hosts" });
        let job = job().with("--model-dir", models.path().display()).with("--checks", checks_word);
        let servers = servers(&job, &hub);
        let coordinator = servers[0].address();
        let with = |trainer, is_reader| {
            let options = ClientOptions::new(coordinator.clone());
            Client::within(ClientOptions { trainer, is_reader, checks, poll, ..options }, &hub)
                .expect("it needs nothing of the system")
        };
        assert!(trained(|trainer| with(Some(trainer), false)) == expected, "with {checks:?} and {poll:?}");
        let (_, bytes) = with(None, true).save_model("model.safetensors").expect("server 0 reads the other's values");
        assert!(bytes > 70_001 * 4, "{bytes} bytes were saved");
        servers.into_iter().for_each(|server| server.stop().expect("a server stops without a failure"));
    }
}

#[test]
fn an_unusable_address_within_a_process_is_named() {
    let refused = |bind: &'static str, hub: &Hub| {
        let job = Job { bind, ..Job::new(1, 1) };
        Server::start_within(job.settings(0, None), hub).err().expect("it is refused").to_string()
    };
    let hub = Hub::default();
    let text = refused("tcp://127.0.0.1:0", &hub);
    assert!(text.contains("tcp://127.0.0.1:0") && text.contains("expected an address such as"), "{text}");
    let server = Server::start_within(Job { bind: NAMES[0], ..Job::new(1, 1) }.settings(0, None), &hub);
    let server = server.expect("nobody else has its name");
    let text = refused(NAMES[0], &hub);
    assert!(text.contains("another transport listens there"), "{text}");
    server.stop().expect("a server stops without a failure");
}
