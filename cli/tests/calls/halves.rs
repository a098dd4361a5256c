//! Values in half precision, to the bit: over every transport, beside trainers that pull f32, and when servers are
//! killed.

use std::thread;

use crate::cluster::job::{Job, Local, TCP, client, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::training::{Tensor, begin, given, pull, push_pull};
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::dtype::Half;
use pserver_core::narrowing;
use pserver_core::wire::Address;
use pserver_node::Server;
use pserver_transport::loopback::Hub;

const ADAM: &str = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
const CLIPPED: &str = "optimizer: SGD const_lr { learning_rate: 0.5 } clip_norm: 1.5";
const SHM: &str = "shm://127.0.0.1:0";
const ROUNDS: u64 = 4;

fn tensors() -> Vec<Tensor> {
    vec![
        Tensor::new("tiny", Float32, 3, "const_lr { learning_rate: 1.0 }"),
        Tensor::new("several chunks", Float32, 56 * 1024, ADAM),
        Tensor::new("odd", Float32, 20_011, ADAM),
        Tensor::new("clipped", Float32, 9_001, CLIPPED),
        Tensor::new("summed", Float32, 12_000, "algorithm: \"sum\""),
    ]
}

/// Values of f32, narrowed to half precision.
fn halved(values: &[Vec<u8>], half: Half) -> Vec<Vec<u8>> {
    let one = |value: &Vec<u8>| {
        let mut halves = vec![0; value.len() / 2];
        narrowing::narrow_to_half(half, value, &mut halves);
        halves
    };
    values.iter().map(one).collect()
}

fn places(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    tensors.iter().map(|tensor| vec![0xa5; tensor.bytes() / 2]).collect()
}

fn wanted<'a>(tensors: &'a [Tensor], contents: &'a mut [Vec<u8>], half: Half) -> Vec<DestinationSlice<'a>> {
    let half = Some(half);
    let one = |(tensor, content): (&'a Tensor, &'a mut Vec<u8>)| DestinationSlice {
        half,
        ..DestinationSlice::new(&tensor.name, content)
    };
    tensors.iter().zip(contents).map(one).collect()
}

/// A round of a trainer that pulls values in half precision and sends gradients as bfloat16.
fn step(client: &Client, tensors: &[Tensor], half: Half, trainer: u32, round: u64) -> Vec<Vec<u8>> {
    let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(trainer, round)).collect();
    let gradients = halved(&gradients, Half::Bfloat16);
    let given = |(tensor, content): (&Tensor, &Vec<u8>)| (tensor.name.clone(), content.clone());
    let held: Vec<_> = tensors.iter().zip(&gradients).map(given).collect();
    let element_type = Half::Bfloat16.element_type();
    let given: Vec<GradientSlice<'_>> =
        held.iter().map(|(name, content)| GradientSlice { name, element_type, content }).collect();
    let mut values = places(tensors);
    client.push_pull(&given, None, &mut wanted(tensors, &mut values, half)).expect("a round is closed");
    values
}

/// Rounds of both trainers: one pulls values in f32, the other in half precision. After each round both are compared
/// with the expected values of the round.
fn check_rounds(one: &Client, other: &Client, half: Half) -> Vec<Vec<u8>> {
    let tensors = tensors();
    let mut last = Vec::new();
    thread::scope(|scope| {
        let halves = scope.spawn(|| {
            begin(other, &tensors).expect("the job begins");
            (0..ROUNDS).map(|round| step(other, &tensors, half, 1, round)).collect::<Vec<_>>()
        });
        begin(one, &tensors).expect("the job begins");
        let whole = (0..ROUNDS).map(|round| {
            let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(0, round)).collect();
            let mut values = crate::cluster::training::places(&tensors);
            let mut wanted = crate::cluster::training::wanted(&tensors, &mut values);
            one.push_pull(&given(&tensors, &gradients), None, &mut wanted).expect("a round is closed");
            values
        });
        let whole: Vec<_> = whole.collect();
        let halves = halves.join().expect("its rounds are closed");
        for (round, (whole, found)) in whole.iter().zip(&halves).enumerate() {
            assert!(*found == halved(whole, half), "round {round} as {half}");
        }
        last = whole.last().cloned().unwrap_or_default();
    });
    last
}

#[test]
fn a_round_is_pulled_in_f32_and_half_precision_over_every_transport() {
    let job = |bind| Job { shards: 2, bind, ..Job::new(2, 2) };
    let mut seen = Vec::new();
    for (bind, half) in [(TCP, Half::Bfloat16), (SHM, Half::Bfloat16), (SHM, Half::Float16)] {
        let servers = Local::start(&job(bind));
        let clients = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
        seen.push(check_rounds(&clients[0], &clients[1], half));
        let mut values = places(&tensors());
        let reader = reader(&servers.coordinator());
        reader.pull(&mut wanted(&tensors(), &mut values, half)).expect("readers have halves too");
        assert!(values == halved(&seen[seen.len() - 1], half), "{bind}");
        servers.stop();
    }
    let hub = Hub::default();
    let settings = Job { bind: "loopback://halves:1", shards: 2, ..Job::new(1, 2) }.settings(0, None);
    let server = Server::start_within(settings, &hub).expect("nobody else has its name");
    let within = |trainer| {
        let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(server.address().clone()) };
        Client::within(options, &hub).expect("it needs nothing of the system")
    };
    seen.push(check_rounds(&within(0), &within(1), Half::Float16));
    server.stop().expect("a server stops without a failure");
    assert!(seen.iter().all(|values| *values == seen[0]), "how a trainer has a value changes none");
}

/// A view in half precision has half the length, and is the server's own memory.
#[test]
fn views_and_buffers_hold_half_precision_values() {
    let tensors = tensors();
    for bind in [SHM, TCP] {
        let servers = Local::start(&Job { bind, ..Job::new(1, 1) });
        let client = client(&servers.coordinator(), 0);
        begin(&client, &tensors).expect("the job begins");
        push_pull(&client, &tensors, 0, 1).expect("a round is closed");
        let whole = pull(&client, &tensors).expect("they are there");
        for half in Half::ALL {
            let names: Vec<_> = tensors.iter().map(|tensor| (&*tensor.name, Some(half))).collect();
            let view = client.pull_view_as(&names).expect("they are there");
            let seen: Vec<Vec<u8>> =
                (0..view.len()).map(|index| view.pieces(index).flatten().copied().collect()).collect();
            assert!(seen == halved(&whole, half), "{bind} {half}");
            assert_eq!(view.pieces(1).len(), 7, "a piece for each chunk of 32 KiB");
            view.release().expect("nothing ended");
        }
        let mut buffer = client.buffer(tensors[1].bytes()).expect("there is memory");
        let content = tensors[1].gradient(0, 2);
        buffer.copy_from_slice(&content);
        let given = [GradientSlice { name: &tensors[1].name, element_type: Float32, content: &buffer }];
        let view = client.push_pull_view_as(&given, None, &[Some(Half::Bfloat16)]).expect("a round is closed");
        let seen: Vec<u8> = view.pieces(0).flatten().copied().collect();
        assert_eq!(view.is_in_place(), bind == SHM, "they are read where the server made them");
        view.release().expect("nothing ended");
        let mut place = client.buffer(tensors[1].bytes() / 2).expect("there is memory");
        let half = Some(Half::Bfloat16);
        client
            .pull(&mut [DestinationSlice { half, ..DestinationSlice::new(&tensors[1].name, &mut place) }])
            .expect("it is there");
        assert_eq!(place[..], seen);
        let whole = pull(&client, &tensors).expect("they are there");
        assert!(seen == halved(&whole, Half::Bfloat16)[1]);
        servers.stop();
    }
}

#[test]
fn async_and_bounded_trainers_pull_current_values_in_half_precision() {
    let tensors = vec![Tensor::new("w", Float32, 20_000, "optimizer: SGD const_lr { learning_rate: 1 }").zeroed()];
    for mode in ["async", "bounded"] {
        let job = Job { mode, ..Job::new(1, 2) };
        let job = if mode == "bounded" { job.with("--staleness", 2) } else { job };
        let servers = Local::start(&job);
        let clients = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
        begin(&clients[0], &tensors).expect("the job begins");
        thread::scope(|scope| {
            for (client, half) in clients.iter().zip(Half::ALL) {
                let tensors = &tensors;
                scope.spawn(move || {
                    begin(client, tensors).expect("the job has begun");
                    let ones = vec![tensors[0].constant(-1.0)];
                    let mut before = 0.0;
                    for _ in 0..20 {
                        let mut values = places(tensors);
                        let mut wanted = wanted(tensors, &mut values, half);
                        client.push_pull(&given(tensors, &ones), None, &mut wanted).expect("it is taken");
                        let first = number(half, &values[0]);
                        assert!(before < first, "its own gradient is in it");
                        // Small whole numbers are the same in every type.
                        assert!(values[0].chunks(2 * 8192).all(|chunk| chunk.chunks(2).all(|one| *one == chunk[..2])));
                        before = first;
                    }
                });
            }
        });
        assert!(pull(&clients[0], &tensors).expect("it is there")[0] == tensors[0].constant(40.0), "{mode}");
        servers.stop();
    }
}

/// The first of several half-precision values.
fn number(half: Half, bytes: &[u8]) -> f64 {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    match half {
        Half::Float16 => half::f16::from_bits(bits).to_f64(),
        Half::Bfloat16 => half::bf16::from_bits(bits).to_f64(),
    }
}

#[test]
fn an_invalid_half_precision_pull_is_refused_by_name() {
    let tensors = vec![Tensor::new("d", Float64, 4, ADAM), Tensor::new("w", Float32, 4, ADAM)];
    let servers = Local::start(&Job::new(1, 1));
    let client = client(&servers.coordinator(), 0);
    begin(&client, &tensors).expect("the job begins");
    let check = |name: &str, bytes: usize, expected: &str| {
        let mut content = vec![0; bytes];
        let half = Some(Half::Bfloat16);
        let refused = client
            .pull(&mut [DestinationSlice { half, ..DestinationSlice::new(name, &mut content) }])
            .map_err(|one| one.to_string());
        assert!(refused.clone().is_err_and(|text| text.contains(expected)), "{refused:?}; expected {expected}");
    };
    check(
        "d",
        16,
        "parameter \"d\": its value as bfloat16; expected float64, as only float32 converts to half precision",
    );
    check("w", 16, "parameter \"w\": a destination of 16 bytes; expected 8");
    check("w", 6, "parameter \"w\": a destination of 6 bytes; expected 8");
    servers.stop();
}

/// Reads during a call: some tens of milliseconds.
const READS: u32 = 50;

/// Rounds of two trainers that pull values in two half-precision types. The call of the second trainer begins when
/// `meanwhile` has returned. `meanwhile` runs while the call of the first trainer is in progress: the servers have
/// answered a reader often since that call began.
fn course(coordinator: &Address, mut meanwhile: impl FnMut(u64)) -> Vec<[Vec<Vec<u8>>; 2]> {
    let tensors = tensors();
    let clients = [0, 1].map(|trainer| client(coordinator, trainer));
    let reader = reader(coordinator);
    clients.iter().for_each(|client| assert!(begin(client, &tensors).is_ok(), "the job begins"));
    let round = |round| {
        thread::scope(|scope| {
            let first = scope.spawn(|| step(&clients[0], &tensors, Half::Float16, 0, round));
            (0..READS).for_each(|_| assert!(pull(&reader, &tensors).is_ok(), "there are values"));
            meanwhile(round);
            let second = step(&clients[1], &tensors, Half::Bfloat16, 1, round);
            [first.join().expect("its round is closed"), second]
        })
    };
    (0..6).map(round).collect()
}

/// A pull that a server holds when it is killed is sent again after the restart, and returns the values of an
/// undisturbed job. The server has not answered before the kill: the other trainer has sent nothing.
#[test]
fn half_precision_pulls_survive_killed_servers() {
    let local = Local::start(&Job::new(2, 2));
    let expected = course(&local.coordinator(), |_| {});
    local.stop();
    let folder = folder();
    let mut processes = Processes::start(Job::new(2, 2).with_checkpoints(folder.path()).with("--journal", "on"));
    let coordinator = processes.coordinator();
    let found = course(&coordinator, |round| {
        if round % 2 == 1 {
            let server = usize::from(round % 4 == 1);
            processes.kill(server);
            processes.start_again(server);
        }
    });
    assert!(found == expected, "to the bit");
    processes.terminate();
}
