//! A trainer that writes into its lent buffers while the server reads them, against the contract, damages only its own
//! gradients: after every kill the server restarts with its values, and the sums of the other trainers are exact. Each
//! run has ten kills, or a hundred with `PSERVER_FULL=1`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, client, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, begin, given, pull};
use pserver_client::{Client, DestinationSlice, GradientSlice, TransferPath};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::Address;

const SGD: &str = "const_lr { learning_rate: 1.0 }";
const PATIENCE: Duration = Duration::from_secs(60);
/// The number with which the trainer overwrites its gradients.
const SCRIBBLED: [u8; 4] = 1.0_f32.to_le_bytes();

fn tensors() -> Vec<Tensor> {
    let one = |name, elements| Tensor::new(name, Float32, elements, SGD).zeroed();
    vec![one("honest", 3 * 8192 + 5), one("scribbled", 32 * 8192)]
}

/// Overwrites memory of this process through `/proc/self/mem`, because Rust does not allow writes to a lent buffer.
fn scribble(address: usize, bytes: usize, stop: &AtomicBool, mut prng: SeededPrng) {
    let memory = File::options().write(true).open("/proc/self/mem").expect("a process may write its own memory");
    let noise = SCRIBBLED.repeat(2048);
    let mut is_noise = false;
    while !stop.load(Ordering::Acquire) {
        is_noise = !is_noise;
        let content = if is_noise { noise.clone() } else { vec![0; noise.len()] };
        let at = prng.below(bytes - content.len()) / 4 * 4;
        memory.write_all_at(&content, u64::try_from(address + at).expect("64 bits")).expect("it is mapped");
    }
}

/// Lends a gradient again and again while another thread writes into it; counts the calls.
fn lend(client: &Client, tensor: &Tensor, calls: &AtomicU64, stop: &AtomicBool, prng: &mut SeededPrng) {
    let buffer = client.buffer(tensor.bytes()).expect("there is memory");
    let (address, seed) = (buffer.start().addr(), prng.next());
    std::thread::scope(|scope| {
        let scribbling = scope.spawn(move || scribble(address, tensor.bytes(), stop, SeededPrng::new(seed)));
        let mut value = vec![0; tensor.bytes()];
        while !stop.load(Ordering::Acquire) {
            let gradient = GradientSlice { name: &tensor.name, element_type: Float32, content: &buffer };
            let wanted = &mut [DestinationSlice::new(&tensor.name, &mut value)];
            client.push_pull(&[gradient], None, wanted).expect("a gradient is taken");
            calls.fetch_add(1, Ordering::Relaxed);
        }
        scribbling.join().expect("nobody stops it");
    });
    assert_eq!(client.path(address), Some(TransferPath::InPlace), "the servers read the buffer where it is");
}

/// Pushes ones, and counts the pushes that were acknowledged.
fn count_up(coordinator: &Address, tensors: &[Tensor], stop: &AtomicBool, report: &mpsc::Sender<()>) -> u16 {
    let client = client(coordinator, 1);
    begin(&client, tensors).expect("the tensors are initialised");
    let ones = vec![tensors[0].constant(-1.0)];
    let mut pushed = 0;
    while !stop.load(Ordering::Acquire) {
        client.push(&given(&tensors[..1], &ones), None).expect("a gradient is taken");
        pushed += 1;
        // The receiver is dropped after the last kill.
        let _ = report.send(());
    }
    pushed
}

fn kills() -> usize {
    if is_full() { 100 } else { 10 }
}

fn harass(processes: &mut Processes, reports: &mpsc::Receiver<()>, prng: &mut SeededPrng) -> usize {
    let kills = kills();
    for _ in 0..kills {
        while reports.try_recv().is_ok() {}
        for _ in 0..=prng.below(30) {
            reports.recv_timeout(PATIENCE).expect("training goes on");
        }
        processes.kill(0);
        processes.start_again(0);
    }
    kills
}

#[test]
fn a_trainer_that_overwrites_a_lent_buffer_harms_no_other_gradient() {
    let mut prng = SeededPrng::of("scribble");
    let folder = folder();
    let job = Job { bind: "shm://127.0.0.1:0", mode: "async", ..Job::new(1, 2) }.with_checkpoints(folder.path());
    let mut processes = Processes::start(job.with("--journal", "on").with("--checkpoint-interval-seconds", 2));
    let (coordinator, tensors) = (processes.coordinator(), tensors());
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let (report, reports) = mpsc::channel();
    let seed = prng.next();
    let (kills, pushed) = std::thread::scope(|scope| {
        let (coordinator, tensors, stop, calls) = (&coordinator, &tensors, &stop, &calls);
        scope.spawn(move || {
            let client = client(coordinator, 0);
            begin(&client, tensors).expect("the tensors are initialised");
            lend(&client, &tensors[1], calls, stop, &mut SeededPrng::new(seed));
        });
        let honest = scope.spawn(move || count_up(coordinator, tensors, stop, &report));
        let kills = harass(&mut processes, &reports, &mut prng);
        stop.store(true, Ordering::Release);
        (kills, honest.join().expect("every push is acknowledged"))
    });
    let values = pull(&reader(&coordinator), &tensors).expect("the server is there");
    let expected = f32::from(pushed).to_le_bytes();
    let wrong = values[0].chunks(4).filter(|element| *element != expected).count();
    assert_eq!(wrong, 0, "elements that are not the sum of {pushed} pushes of one");
    println!("scribble: {kills} kills, {pushed} honest pushes, {} scribbled ones", calls.load(Ordering::Relaxed));
    processes.terminate();
}

/// Lends a gradient a few times while another thread writes into it.
fn lend_some(client: &Client, tensor: &Tensor, times: usize, seed: u64) {
    let (calls, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let lending = scope.spawn(|| lend(client, tensor, &calls, &stop, &mut SeededPrng::new(seed)));
        let times = u64::try_from(times).expect("few");
        while calls.load(Ordering::Relaxed) < times && !lending.is_finished() {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Release);
    });
}

/// A server applies the bytes that it has journalled, also when the trainer overwrites its buffer in between. The bytes
/// are a gradient, or the sum of a round.
#[test]
fn values_from_an_overwritten_buffer_are_the_same_after_a_kill() {
    let mut prng = SeededPrng::of("scribbled");
    for mode in ["async", "sync"] {
        let folder = folder();
        let job = Job { bind: "shm://127.0.0.1:0", mode, ..Job::new(1, 1) }.with_checkpoints(folder.path());
        let mut processes = Processes::start(job.with("--journal", "on"));
        let (coordinator, tensors) = (processes.coordinator(), tensors());
        let client = client(&coordinator, 0);
        begin(&client, &tensors).expect("the tensors are initialised");
        let values = || pull(&reader(&coordinator), &tensors).expect("the server is there");
        let mut is_scribbled = false;
        for kill in 0..kills() {
            lend_some(&client, &tensors[1], 1 + prng.below(8), prng.next());
            let before = values();
            is_scribbled |= before[1].chunks(4).any(|element| element != SCRIBBLED && element != [0; 4]);
            processes.kill(0);
            processes.start_again(0);
            assert!(values() == before, "{mode}: values differ after kill {kill}");
        }
        assert!(is_scribbled, "{mode}: nothing was written while the gradient was lent");
        drop(client);
        processes.terminate();
    }
}
