//! Export and import of the optimizer's state, checkpoints on request of a trainer, and loading of given values into a
//! running job.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cluster::job::{Job, Local, TCP, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::rows::Matrix;
use crate::cluster::training::{Tensor, begin, declare, given, pull, push_pull};
use pserver_client::{Client, DestinationSlice, GivenValue, OptimizerState, StateSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{self, Float32, Float64};
use pserver_core::error::Failure;

const SHM: &str = "shm://127.0.0.1:0";
/// Steps before the export of a state, and after its import.
const STEPS: u64 = 3;
/// Adam corrects its means by the number of updates, and the rate depends on it too.
const ADAM: &str = "optimizer: Adam adam { } lr_policy: Linear \
                    linear_lr { learning_rate: 0.01 lr_decay_a: 0.001 lr_decay_b: 0.0001 }";

fn tensors() -> Vec<Tensor> {
    vec![
        Tensor::new("several chunks", Float32, 5 * 8192 + 77, ADAM),
        Tensor::new("wide", Float64, 9001, "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }"),
        Tensor::new("clipped", Float32, 3 * 8192 + 5, &format!("{ADAM} clip_norm: 0.1")),
        Tensor::new("stateless", Float32, 3, "lr_policy: Linear linear_lr { learning_rate: 0.01 lr_decay_a: 0.001 }"),
    ]
}

fn job(bind: &'static str) -> Job {
    Job { bind, shards: 2, ..Job::new(2, 1) }
}

fn check(outcome: Result<impl Sized, Failure>, expected: &str) {
    let text = outcome.err().expect(expected).to_string();
    assert!(text.contains(expected), "{text}; expected {expected}");
}

fn train(client: &Client, tensors: &[Tensor], rounds: std::ops::RangeInclusive<u64>) -> Vec<Vec<u8>> {
    rounds.for_each(|round| push_pull(client, tensors, 0, round).expect("a round is closed"));
    pull(client, tensors).expect("the tensors are there")
}

fn slices(state: &OptimizerState) -> Vec<StateSlice<'_>> {
    // Tensors are found by name, in any order.
    state.tensors.iter().rev().map(|one| StateSlice { name: &one.name, content: &one.content }).collect()
}

fn states(client: &Client, tensors: &[Tensor]) -> Vec<OptimizerState> {
    tensors.iter().map(|tensor| client.optimizer_state(&tensor.name).expect("it has a state")).collect()
}

fn set_states(client: &Client, tensors: &[Tensor], states: &[OptimizerState]) {
    for (tensor, state) in tensors.iter().zip(states) {
        client.set_optimizer_state(&tensor.name, &slices(state), state.updates).expect("it is taken");
    }
}

#[test]
fn a_job_goes_on_from_the_state_of_another_to_the_bit() {
    for bind in [TCP, SHM] {
        let tensors = tensors();
        let first = Local::start(&job(bind));
        let trainer = client(&first.coordinator(), 0);
        begin(&trainer, &tensors).expect("they are initialised");
        let values = train(&trainer, &tensors, 1..=STEPS);
        let out = states(&trainer, &tensors);
        let names: Vec<Vec<&str>> =
            out.iter().map(|state| state.tensors.iter().map(|one| one.name.as_str()).collect()).collect();
        assert_eq!(names[0], ["first_moment", "second_moment"]);
        assert_eq!((names[1].len(), names[3].len()), (1, 0), "{names:?}");
        assert!(out.iter().all(|state| state.updates == STEPS), "{bind}: each has seen every step");
        assert_eq!(out[0].shape, [tensors[0].elements as u64]);
        let expected = train(&trainer, &tensors, STEPS + 1..=2 * STEPS);
        drop(trainer);
        first.stop();

        let second = Local::start(&Job { chunk_bytes: 64 * 1024, ..job(bind) });
        let trainer = client(&second.coordinator(), 0);
        begin(&trainer, &tensors).expect("they are initialised");
        // The other job has other values before the import.
        let elsewhere = train(&trainer, &tensors, 1..=1);
        assert_ne!(elsewhere, values);
        trainer.set(&given(&tensors, &values)).expect("they are taken");
        set_states(&trainer, &tensors, &out);
        assert_eq!(states(&trainer, &tensors), out, "{bind}: what went in comes out");
        let found = train(&trainer, &tensors, STEPS + 1..=2 * STEPS);
        for (tensor, (found, expected)) in tensors.iter().zip(found.iter().zip(&expected)) {
            assert!(found == expected, "{bind}: \"{}\" goes on as in the other job", tensor.name);
        }
        second.stop();
    }
}

#[test]
fn a_state_that_was_set_survives_servers_that_are_killed() {
    for has_checkpoint in [false, true] {
        let (folder, tensors) = (folder(), tensors());
        let job = job(TCP).with_checkpoints(folder.path()).with("--journal", "on");
        let mut processes = Processes::start(job);
        let trainer = client(&processes.coordinator(), 0);
        begin(&trainer, &tensors).expect("they are initialised");
        train(&trainer, &tensors, 1..=2);
        let mut wanted = states(&trainer, &tensors);
        for state in &mut wanted {
            state.updates = 1000;
            state.tensors.iter_mut().for_each(|one| one.content.fill(0x3D));
        }
        set_states(&trainer, &tensors, &wanted);
        if has_checkpoint {
            trainer.checkpoint().expect("it is on disk");
        }
        for server in 0..2 {
            processes.kill(server);
            processes.start_again(server);
        }
        assert_eq!(states(&trainer, &tensors), wanted, "with a checkpoint: {has_checkpoint}");
        train(&trainer, &tensors, 3..=3);
        assert!(states(&trainer, &tensors).iter().all(|state| state.updates == 1001));
        processes.terminate();
    }
}

/// Ends the pushes of the other trainer when it is dropped, also by a check that fails.
struct EndOfPushes<'a>(&'a AtomicBool);

impl Drop for EndOfPushes<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_state_is_of_one_version_while_others_push() {
    // Each element of the state counts the updates.
    let counting = "rule: 'state c = 0; c = c + 1; w -= lr*g' const_lr { learning_rate: 1 }";
    let tensors = [Tensor::new("table", Float32, 40 * 8192, counting)];
    let servers = Local::start(&Job { mode: "async", shards: 2, ..Job::new(2, 2) });
    let clients: Vec<Client> = (0..2).map(|trainer| client(&servers.coordinator(), trainer)).collect();
    begin(&clients[0], &tensors).expect("it is initialised");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                let content = tensors[0].gradient(1, round);
                clients[1].push(&given(&tensors, &[content]), None).expect("it is taken");
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let end = EndOfPushes(&is_over);
        let mut seen = 0;
        for _ in 0..20 {
            match clients[0].optimizer_state("table") {
                Ok(state) => {
                    let count = f32::from(u16::try_from(state.updates).expect("few updates")).to_le_bytes();
                    let is_alike = state.tensors[0].content.chunks(4).all(|element| element == count);
                    assert!(is_alike, "every element is after {} updates", state.updates);
                    seen += 1;
                }
                Err(failure) => check(Err::<(), _>(failure), "expected no gradients of other trainers meanwhile"),
            }
        }
        drop(end);
        println!("{seen} of 20 states were fetched between pushes");
    });
    let state = clients[0].optimizer_state("table").expect("nobody pushes");
    assert!(state.updates > 0);
    servers.stop();
}

#[test]
fn wrong_states_are_refused_and_change_nothing() {
    let servers = Local::start(&job(TCP));
    let (trainer, tensors) = (client(&servers.coordinator(), 0), tensors());
    let table = Matrix::new("rows", 10, 2, ADAM);
    assert!(trainer.begin_init(&OptimizerSettings::default()).expect("it is elected"));
    tensors.iter().try_for_each(|tensor| declare(&trainer, tensor)).expect("they are declared");
    table.declare_sparse(&trainer, &table.initial()).expect("it is declared");
    trainer.finish_init().expect("the initialisation ends");
    let before = states(&trainer, &tensors);
    let whole = vec![0; tensors[0].bytes()];
    let one = |name, content| StateSlice { name, content };
    let set = |slices: &[StateSlice<'_>], updates| trainer.set_optimizer_state("several chunks", slices, updates);
    check(trainer.optimizer_state("rows"), "\"rows\" is sparse");
    check(trainer.optimizer_state("none"), "unknown parameter \"none\"");
    check(
        set(&[one("first_moment", &whole)], 1),
        "states [\"first_moment\"]; expected [\"first_moment\", \"second_moment\"]",
    );
    let twice = [one("first_moment", &whole), one("first_moment", &whole)];
    check(set(&twice, 1), "each once");
    let short = [one("first_moment", &whole), one("second_moment", &whole[4..])];
    check(set(&short, 1), "bytes of state \"second_moment\"; expected");
    let right = [one("first_moment", &whole[..]), one("second_moment", &whole)];
    check(set(&right, u64::MAX), "a state after 18446744073709551615 updates; expected at most");
    let client = reader(&servers.coordinator());
    check(client.set_optimizer_state("several chunks", &right, 1), "a reader may pull and nothing else");
    assert_eq!(client.optimizer_state("wide").expect("a reader may pull"), before[1]);
    assert_eq!(states(&trainer, &tensors), before);
    servers.stop();
}

#[test]
fn a_checkpoint_that_a_trainer_asks_for_is_on_disk_when_the_call_returns() {
    for bind in [TCP, SHM] {
        let (folder, tensors) = (folder(), tensors());
        // Without a journal only a checkpoint keeps anything.
        let job = job(bind).with_checkpoints(folder.path()).with("--journal", "off");
        let mut processes = Processes::start(job.with("--checkpoint-interval-seconds", 3600));
        let trainer = client(&processes.coordinator(), 0);
        begin(&trainer, &tensors).expect("they are initialised");
        for last in [2, 4] {
            let values = train(&trainer, &tensors, last - 1..=last);
            let taken = trainer.checkpoint().expect("it is on disk");
            assert_eq!((taken.version.0, taken.shards.len()), (last, 4), "{taken:?}");
            assert!(taken.bytes > 0 && taken.shards.iter().all(|one| Path::new(&one.directory).is_dir()), "{taken:?}");
            for server in 0..2 {
                processes.kill(server);
                processes.start_again(server);
            }
            assert!(pull(&trainer, &tensors).expect("they are there") == values, "{bind}: after {last} rounds");
        }
        processes.terminate();
    }
}

#[test]
fn a_checkpoint_is_taken_though_a_server_is_killed_meanwhile() {
    let (folder, tensors) = (folder(), tensors());
    let mut processes = Processes::start(job(TCP).with_checkpoints(folder.path()).with("--journal", "on"));
    let trainer = client(&processes.coordinator(), 0);
    begin(&trainer, &tensors).expect("they are initialised");
    for round in 1..=3 {
        let values = train(&trainer, &tensors, round..=round);
        let taken = std::thread::scope(|scope| {
            let taking = scope.spawn(|| trainer.checkpoint());
            processes.kill(1);
            processes.start_again(1);
            taking.join().expect("the call does not panic")
        });
        assert_eq!(taken.expect("it is on disk").version.0, round);
        assert!(pull(&trainer, &tensors).expect("they are there") == values);
    }
    processes.terminate();
}

#[test]
fn a_checkpoint_needs_a_directory_and_a_trainer() {
    let servers = Local::start(&job(TCP));
    let (trainer, tensors) = (client(&servers.coordinator(), 0), tensors());
    begin(&trainer, &tensors).expect("they are initialised");
    check(trainer.checkpoint(), "this server takes no checkpoints; expected one with checkpoint_dir");
    check(reader(&servers.coordinator()).checkpoint(), "a reader may pull and nothing else");
    servers.stop();
}

fn value<'a>(name: &'a str, element_type: ElementType, shape: &'a [u64], content: &'a [u8]) -> GivenValue<'a> {
    GivenValue { name, element_type, shape, content }
}

#[test]
fn given_values_are_loaded_whole_or_not_at_all() {
    for bind in [TCP, SHM] {
        let folder = folder();
        let servers = Local::start(&job(bind).with("--model-dir", folder.path().display()));
        let (trainer, tensors) = (client(&servers.coordinator(), 0), tensors());
        begin(&trainer, &tensors).expect("they are initialised");
        let saved = train(&trainer, &tensors, 1..=2);
        let (path, _) = trainer.save_model("model.safetensors").expect("it is on disk");
        let later = train(&trainer, &tensors, 3..=4);
        assert_ne!(saved, later);
        let (shape, content) = ([tensors[3].elements as u64], tensors[3].constant(7.0));
        let right = value("stateless", Float32, &shape, &content);
        let wrong = [
            (value("no such", Float32, &[3], &content), "unknown parameter \"no such\""),
            (value("wide", Float64, &[9001, 1], &content), "\"wide\": a value of shape [9001, 1]; expected [9001]"),
            (value("wide", Float32, &[9001], &content), "\"wide\": element type float32; expected float64"),
            (value("wide", Float64, &[9001], &content), "\"wide\": 12 bytes; expected 72008"),
            (right, "is in one call twice"),
        ];
        for (wrong, expected) in wrong {
            check(trainer.load(&[right, wrong]), expected);
        }
        let broken = folder.path().join("broken.safetensors");
        std::fs::write(&broken, b"no tensors").expect("it is written");
        check(trainer.load_file(&broken), "not a safetensors file");
        check(trainer.load_file(&folder.path().join("none")), "none: ");
        assert!(pull(&trainer, &tensors).expect("they are there") == later, "{bind}: nothing was replaced");
        let mut names = trainer.load_file(Path::new(&path)).expect("it is the job's model");
        names.sort_unstable();
        assert_eq!(names, ["clipped", "several chunks", "stateless", "wide"]);
        assert!(pull(&trainer, &tensors).expect("they are there") == saved, "{bind}: as it was saved");
        trainer.load(&[right]).expect("one value");
        let after = pull(&trainer, &tensors).expect("they are there");
        assert!(after[..3] == saved[..3] && after[3] == content, "{bind}: the others stay");
        servers.stop();
    }
}

#[test]
fn values_are_loaded_though_a_server_is_killed_meanwhile() {
    let (folder, tensors) = (folder(), tensors());
    let mut processes = Processes::start(job(TCP).with_checkpoints(folder.path()).with("--journal", "on"));
    let hasty = client_with(&processes.coordinator(), 0, Duration::from_millis(300));
    begin(&hasty, &tensors).expect("they are initialised");
    for round in 0..4_u8 {
        let content = tensors[0].constant(round.into());
        let shape = [tensors[0].elements as u64];
        let loaded = std::thread::scope(|scope| {
            let load = || {
                // A call that ends while the server is away is repeated.
                (0..100).find_map(|_| hasty.load(&[value("several chunks", Float32, &shape, &content)]).ok())
            };
            let loading = scope.spawn(load);
            processes.kill(usize::from(round % 2));
            processes.start_again(usize::from(round % 2));
            loading.join().expect("the call does not panic")
        });
        loaded.expect("the server is there again");
        let mut found = vec![0; content.len()];
        let reader = reader(&processes.coordinator());
        reader.pull(&mut [DestinationSlice::new("several chunks", &mut found)]).expect("it is there");
        assert!(found == content, "round {round}");
    }
    processes.terminate();
}
