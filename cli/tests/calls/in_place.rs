//! Gradients in buffers and parameters in views: the values equal those of calls with copies, also under failures, and
//! no copy is made over shared memory.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::cluster::job::{Job, Local, client, client_with, folder, reader};
use crate::cluster::process::{Processes, one_test};
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, begin, given, pull, push_pull};
use pserver_client::{Client, GradientSlice, TransferPath, View};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::error::Failure;
use pserver_core::memory::Buffer;
use pserver_core::wire::Address;

const SGD: &str = "const_lr { learning_rate: 1.0 }";
const SHM: &str = "shm://127.0.0.1:0";
/// The variable with the address of the job for a child process.
const COORDINATOR: &str = "IN_PLACE_TEST_COORDINATOR";

fn tensors() -> Vec<Tensor> {
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    vec![
        Tensor::new("tiny", Float32, 3, SGD),
        Tensor::new("several chunks", Float32, 50 * 1024, SGD),
        // The next tensor begins at no multiple of 64 bytes.
        Tensor::new("odd", Float32, 20_011, adam),
        Tensor::new("wide", Float64, 9001, SGD),
        Tensor::new("summed", Float32, 64 * 1024, "algorithm: \"sum\""),
    ]
}

/// Writes the gradients of all tensors into one buffer, one after another.
fn fill(buffer: &mut Buffer, tensors: &[Tensor], trainer: u32, round: u64) {
    let mut rest: &mut [u8] = buffer;
    for tensor in tensors {
        let (place, after) = rest.split_at_mut(tensor.bytes());
        place.copy_from_slice(&tensor.gradient(trainer, round));
        rest = after;
    }
}

fn bytes(tensors: &[Tensor]) -> usize {
    tensors.iter().map(Tensor::bytes).sum()
}

/// The buffer as the gradients of the tensors.
fn cut<'a>(buffer: &'a Buffer, tensors: &'a [Tensor]) -> Vec<GradientSlice<'a>> {
    let mut rest: &[u8] = buffer;
    let one = |tensor: &'a Tensor| {
        let (content, after) = rest.split_at(tensor.bytes());
        rest = after;
        GradientSlice { name: &tensor.name, element_type: tensor.element_type, content }
    };
    tensors.iter().map(one).collect()
}

fn whole(view: &View) -> Vec<Vec<u8>> {
    (0..view.len()).map(|index| view.pieces(index).flatten().copied().collect()).collect()
}

/// The value of every tensor.
type Values = Vec<Vec<u8>>;
/// One round of a trainer; returns its values.
type Step = fn(&Client, &mut Buffer, &[Tensor], u32, u64) -> Values;

/// Values after each round of two trainers.
fn train(job: &Job, tensors: &[Tensor], rounds: u64, step: Step) -> Vec<Values> {
    let servers = Local::start(job);
    let coordinator = servers.coordinator();
    let seen = std::thread::scope(|scope| {
        let one = |trainer| {
            let coordinator = &coordinator;
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                begin(&client, tensors).expect("the tensors are initialised");
                let mut buffer = client.buffer(bytes(tensors)).expect("there is memory");
                let seen = (1..=rounds).map(|round| step(&client, &mut buffer, tensors, trainer, round)).collect();
                assert_eq!(client.path(buffer.start().addr()), Some(TransferPath::InPlace));
                seen
            })
        };
        let trainers = [0, 1].map(one);
        trainers.map(|trainer| trainer.join().expect("a round is closed")).into_iter().next().expect("there are two")
    });
    servers.stop();
    seen
}

fn in_place(client: &Client, buffer: &mut Buffer, tensors: &[Tensor], trainer: u32, round: u64) -> Vec<Vec<u8>> {
    fill(buffer, tensors, trainer, round);
    let view = client.push_pull_view(&cut(buffer, tensors), None).expect("a round is closed");
    // Short payloads are in the ring, and are copied.
    assert_eq!(view.pieces(4).len(), 8, "chunks are of 32 KiB");
    let seen = whole(&view);
    view.release().expect("nothing ended");
    seen
}

fn copied(client: &Client, _: &mut Buffer, tensors: &[Tensor], trainer: u32, round: u64) -> Vec<Vec<u8>> {
    push_pull(client, tensors, trainer, round).expect("a round is closed");
    pull(client, tensors).expect("they are there")
}

#[test]
fn buffers_and_views_give_the_same_bits_over_every_transport() {
    let tensors = tensors();
    let job = |bind| Job { shards: 2, bind, ..Job::new(1, 2) };
    let expected = train(&job("tcp://127.0.0.1:0"), &tensors, 5, copied);
    for bind in [SHM, "tcp://127.0.0.1:0"] {
        let found = train(&job(bind), &tensors, 5, in_place);
        assert!(found == expected, "{bind}: the numbers are those of calls that copy");
    }
    let journal = folder();
    let kept = job(SHM).with_checkpoints(journal.path()).with("--journal", "on");
    assert!(train(&kept, &tensors, 5, in_place) == expected, "with a journal");
    assert!(train(&job(SHM).with("--checks", "always"), &tensors, 5, in_place) == expected, "with checks");
}

/// Two trainers of one tensor of four chunks, in shared memory.
fn two(timeout_seconds: u32) -> (Local, [Client; 2], Vec<Tensor>) {
    let job = Job { bind: SHM, ..Job::new(1, 2) }.with("--round-timeout-seconds", timeout_seconds);
    let servers = Local::start(&job);
    let tensors = vec![Tensor::new("w", Float32, 32 * 1024, SGD).zeroed()];
    let clients = [0, 1].map(|trainer| client_with(&servers.coordinator(), trainer, Duration::from_secs(4)));
    for client in &clients {
        begin(client, &tensors).expect("the tensors are initialised");
    }
    (servers, clients, tensors)
}

#[test]
fn a_view_keeps_its_version_and_is_the_servers_own_memory() {
    let (servers, [one, other], tensors) = two(60);
    let mut buffer = one.buffer(bytes(&tensors)).expect("there is memory");
    fill(&mut buffer, &tensors, 0, 1);
    let view = one.pull_view(&["w"]).expect("it is there");
    assert!(view.is_in_place(), "nothing was copied");
    let before = whole(&view);
    for round in 1..=3_u8 {
        let ones = vec![tensors[0].constant(-1.0)];
        one.push(&given(&tensors, &ones), None).expect("a view does not keep anybody from sending");
        other.push(&given(&tensors, &ones), None).expect("a gradient is taken");
        assert_eq!(pull(&other, &tensors).expect("it is there")[0][..4], f32::from(round).to_le_bytes());
        assert!(whole(&view) == before, "round {round} was written elsewhere");
    }
    let refused = one.pull_view(&["w"]).err().map(|failure| failure.to_string()).unwrap_or_default();
    assert!(refused.contains("a view holds it"), "{refused}");
    view.release().expect("nothing ended");
    let reader = reader(&servers.coordinator());
    let copy = reader.pull_view(&["w"]).expect("readers have views too");
    assert!(!copy.is_in_place(), "of memory that servers need not reckon with");
    assert_eq!(whole(&copy), pull(&one, &tensors).expect("it is there"));
    let held = one.pull_view(&["w"]).expect("the first one was released");
    servers.stop();
    let text = held.release().err().map(|failure| failure.to_string()).unwrap_or_default();
    assert!(text.contains("ended while the view was held"), "{text}");
}

/// One trainer's call fails while its gradient waits for the other's. Later writes to the buffer
/// do not change the gradient.
fn fails_and_writes(timeout_seconds: u32, words: &str, expected: TransferPath) {
    let (servers, [one, other], tensors) = two(timeout_seconds);
    let mut buffer = one.buffer(bytes(&tensors)).expect("there is memory");
    buffer.copy_from_slice(&tensors[0].constant(-1.0));
    let failure = one.push_pull_view(&cut(&buffer, &tensors), None).err().expect("the other trainer is missing");
    assert!(failure.to_string().contains(words), "{failure}");
    assert_eq!(one.path(buffer.start().addr()), Some(expected));
    buffer.copy_from_slice(&tensors[0].constant(-100.0));
    let ones = vec![tensors[0].constant(-1.0)];
    other.push(&given(&tensors, &ones), None).expect("a gradient is taken");
    let value = pull(&other, &tensors).expect("the round is closed");
    assert!(value[0] == tensors[0].constant(1.0), "the mean of what was sent");
    // The repeated call resends the same gradient.
    buffer.copy_from_slice(&tensors[0].constant(-1.0));
    let view = one.push_pull_view(&cut(&buffer, &tensors), None).expect("the round is closed");
    assert!(whole(&view) == value);
    drop(view);
    servers.stop();
}

#[test]
fn a_trainer_whose_round_stalled_may_reuse_its_buffer() {
    fails_and_writes(1, "waits for trainer 1", TransferPath::InPlace);
}

#[test]
fn a_trainer_whose_call_timed_out_may_reuse_its_buffer() {
    fails_and_writes(60, "no answer within", TransferPath::Copied);
}

#[test]
fn rounds_in_place_keep_their_values_when_servers_are_killed() {
    let mut prng = SeededPrng::of("in place under kills");
    let (folder, tensors, rounds) = (folder(), tensors(), 40);
    let job = Job { shards: 2, bind: SHM, ..Job::new(1, 2) };
    let expected = train(&job, &tensors, rounds, in_place);
    let job = job.with_checkpoints(folder.path()).with("--journal", "on").with("--checkpoint-interval-seconds", 1);
    let mut processes = Processes::start(job);
    let coordinator = processes.coordinator();
    let (report, reports) = std::sync::mpsc::channel();
    let found = std::thread::scope(|scope| {
        let one = |trainer| {
            let (coordinator, tensors, report) = (&coordinator, &tensors, report.clone());
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                begin(&client, tensors).expect("the tensors are initialised");
                let mut buffer = client.buffer(bytes(tensors)).expect("there is memory");
                let step = |round| {
                    fill(&mut buffer, tensors, trainer, round);
                    let view = client.push_pull_view(&cut(&buffer, tensors), None).expect("a round is closed");
                    let _ = report.send(());
                    let seen = whole(&view);
                    // A killed server writes nothing more. Only the connections to it break.
                    view.release().map(|()| seen)
                };
                (1..=rounds).map(step).collect::<Vec<Result<_, Failure>>>()
            })
        };
        let trainers = [0, 1].map(one);
        for _ in 0..5 {
            for _ in 0..prng.below(8) {
                reports.recv_timeout(Duration::from_secs(60)).expect("training goes on");
            }
            processes.kill(0);
            processes.start_again(0);
        }
        trainers.map(|trainer| trainer.join().expect("every call succeeds"))
    });
    let mut compared = 0;
    for (round, expected) in expected.iter().enumerate() {
        for seen in found.iter().filter_map(|trainer| trainer[round].as_ref().ok()) {
            assert!(seen == expected, "round {}", round + 1);
            compared += 1;
        }
    }
    assert!(compared > rounds, "most views were whole: {compared}");
    processes.terminate();
}

/// The child process: its gradient is borrowed by the server when the child is killed.
#[test]
fn child_process_that_lends_a_gradient_and_waits() {
    let Ok(address) = std::env::var(COORDINATOR) else { return };
    let client = client(&Address::parse(&address).expect("it is an address"), 0);
    let mut buffer = client.buffer(128 * 1024).expect("there is memory");
    client.names().expect("the tensors are initialised");
    let tensors = [Tensor::new("w", Float32, 32 * 1024, SGD).zeroed()];
    buffer.copy_from_slice(&tensors[0].constant(-1.0));
    println!("\nsending");
    let _ = client.push_pull_view(&cut(&buffer, &tensors), None);
}

#[test]
fn a_gradient_lent_by_a_killed_trainer_is_read_to_the_end() {
    let mut prng = SeededPrng::of("a trainer is killed");
    for _ in 0..5 {
        let (servers, [one, other], tensors) = two(60);
        drop(one);
        let mut child = one_test("in_place::child_process_that_lends_a_gradient_and_waits")
            .env(COORDINATOR, servers.coordinator().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program can be run again");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        lines.map_while(Result::ok).find(|line| line == "sending").expect("it gets there");
        let (moment, begun) = (Duration::from_micros(prng.next() % 20_000), Instant::now());
        while begun.elapsed() < moment {
            std::hint::spin_loop();
        }
        child.kill().expect("it runs");
        child.wait().expect("it was killed");
        let ones = vec![tensors[0].constant(-1.0)];
        other.push(&given(&tensors, &ones), None).expect("a gradient is taken");
        let again = client(&servers.coordinator(), 0);
        again.names().expect("it joins");
        // With or without the gradient of the killed process, this round has one gradient of each trainer.
        again.push(&given(&tensors, &ones), None).expect("a gradient is taken, or known");
        let value = pull(&other, &tensors).expect("the round is closed");
        assert!(value[0] == tensors[0].constant(1.0), "the mean of ones");
        servers.stop();
    }
}
