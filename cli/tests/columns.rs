//! A layer whose columns are on several trainers, with servers as queues between them.

mod cluster;

use cluster::job::{Job, client, folder};
use cluster::process::Processes;
use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::Version;

/// More than a chunk.
const QUEUE_BYTES: usize = 12_000;

fn item(number: u64) -> Vec<u8> {
    let byte = u8::try_from(number).expect("there are few");
    vec![byte; QUEUE_BYTES]
}

fn send(client: &Client, number: u64) -> Result<(), pserver_core::error::Failure> {
    client.push(&[GradientSlice { name: "q", element_type: Float32, content: &item(number) }], None)
}

/// Waits for an item and says which came.
fn received(client: &Client, number: u64) -> u64 {
    let mut found = vec![0; QUEUE_BYTES];
    let latest = client.pull_version(&mut [DestinationSlice::new("q", &mut found)], Version(number));
    let Version(latest) = latest.expect("it comes");
    assert!(found == item(latest), "the bytes are those of item {latest}");
    latest
}

#[test]
fn items_of_one_sender_reach_readers_in_order_also_when_the_server_is_killed() {
    let folder = folder();
    let job = Job { shards: 2, chunk_bytes: 4096, ..Job::new(1, 2) };
    let mut servers = Processes::start(job.with_checkpoints(folder.path()).with("--journal", "on"));
    let [reader, sender] = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
    assert_eq!(reader.begin_init(&OptimizerSettings::default()), Ok(true));
    let queue = OptimizerSettings::from_text("algorithm: 'sum' sender: 1").expect("it is a queue");
    reader.init_param("q", Float32, &[QUEUE_BYTES as u64 / 4], &item(0), &queue).expect("it fits");
    reader.finish_init().expect("all is there");
    std::thread::scope(|scope| {
        let (taken, takes) = std::sync::mpsc::channel();
        scope.spawn(move || {
            for number in 1..=9 {
                send(&sender, number).expect("it is taken");
                takes.recv().expect("the reader goes on");
            }
        });
        for number in 1..=9 {
            if number % 3 == 0 {
                servers.kill(0);
                servers.start_again(0);
            }
            assert_eq!(received(&reader, number), number, "the sender waits until it was taken");
            taken.send(()).expect("the sender goes on");
        }
    });
    let text = send(&reader, 1).expect_err("it is no sender").to_string();
    assert!(text.contains("parameter \"q\": trainer 0 sent to it; expected 1"), "{text}");
    assert_eq!(received(&reader, 3), 9, "an item that was overwritten is told by its number");
    servers.terminate();
}
