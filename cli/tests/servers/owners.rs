//! Two servers on one checkpoint directory: one of them acknowledges, and nothing acknowledged is lost. 10 tries by
//! default, 100 with `PSERVER_FULL=1`; half of them without the lock, so that the owner number alone must do.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, TCP, client_with, folder};
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, begin, given, pull};
use nix::sys::signal::{Signal, kill};
use pserver_client::Client;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::Address;

const SGD: &str = "const_lr { learning_rate: 1.0 }";
/// The time that a call to a paused or replaced server may take.
const SOON: Duration = Duration::from_secs(3);

fn tensors() -> Vec<Tensor> {
    vec![Tensor::new("w", Float32, 2000, SGD).zeroed()]
}

/// The arguments of a server on a port of its own.
fn arguments(root: &Path, is_locked: bool) -> Vec<String> {
    let job = Job { mode: "async", ..Job::new(1, 2) }.with_checkpoints(root);
    let mut arguments = job.arguments(0, &format!("{}{}", TCP.trim_end_matches('0'), free_port()), None);
    arguments.push(format!("--directory-lock={is_locked}"));
    arguments
}

fn trainer(address: &Address, rank: u32) -> Client {
    client_with(address, rank, SOON)
}

/// Pushes ones until `stop` is set or a push is refused. Counts acknowledged pushes, and pushes whose outcome is
/// unknown.
fn push_until(client: &Client, stop: &AtomicBool, acknowledged: &AtomicU64, unsure: &AtomicU64) {
    let tensors = tensors();
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    while !stop.load(Ordering::Acquire) {
        if client.push(&given(&tensors, &ones), None).is_err() {
            unsure.fetch_add(1, Ordering::SeqCst);
            return;
        }
        acknowledged.fetch_add(1, Ordering::SeqCst);
    }
}

fn value(client: &Client) -> u64 {
    let values = pull(client, &tensors()).expect("the tensor is there");
    let number = f32::from_le_bytes(values[0][..4].try_into().expect("four bytes"));
    assert!(values[0].chunks_exact(4).all(|bytes| bytes == number.to_le_bytes()), "every element has the same pushes");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is a small count")]
    let count = number as u64;
    count
}

/// A second server starts while the first one lives and holds the lock: it is refused, and the first goes on.
fn with_the_lock(prng: &mut SeededPrng) {
    let root = folder();
    let first = Process::start(&arguments(root.path(), true)).expect("the directory is free");
    let client = trainer(&first.address, 0);
    begin(&client, &tensors()).expect("the tensor is initialised");
    let (stop, acknowledged, unsure) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let is_paused = prng.below(2) == 0;
    std::thread::scope(|scope| {
        scope.spawn(|| push_until(&client, &stop, &acknowledged, &unsure));
        if is_paused {
            kill(first.id(), Signal::SIGSTOP).expect("the process is there");
        }
        let refused = Process::start(&arguments(root.path(), true)).err().expect("the first one lives");
        if is_paused {
            kill(first.id(), Signal::SIGCONT).expect("the process is there");
        }
        let words = &refused.words;
        let expected = format!("is in use by server 0, process {} on host", first.id());
        assert!(!refused.status.success() && words.contains(&expected), "expected {expected:?}: {words}");
        stop.store(true, Ordering::Release);
    });
    assert_eq!((value(&client), unsure.into_inner()), (acknowledged.into_inner(), 0));
    first.kill();
    Process::start(&arguments(root.path(), true)).expect("a killed process holds no lock").kill();
}

/// A second server takes the directory over, with the first one running or paused; the first one stops.
fn without_the_lock(prng: &mut SeededPrng) {
    let root = folder();
    let first = Process::start(&arguments(root.path(), false)).expect("the directory is free");
    let old = trainer(&first.address, 0);
    begin(&old, &tensors()).expect("the tensor is initialised");
    let (stop, acknowledged, unsure) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let is_paused = prng.below(2) == 0;
    let second = std::thread::scope(|scope| {
        scope.spawn(|| push_until(&old, &stop, &acknowledged, &unsure));
        // tidy: allow sleep: the second server starts at any moment of the first one's pushes
        std::thread::sleep(Duration::from_micros(prng.next() % 20_000));
        if is_paused {
            kill(first.id(), Signal::SIGSTOP).expect("the process is there");
        }
        let second = Process::start(&arguments(root.path(), false)).expect("there is no lock");
        let new = trainer(&second.address, 1);
        let (never, taken) = (AtomicBool::new(false), AtomicU64::new(0));
        scope.spawn(move || {
            begin(&new, &tensors()).expect("the second server has the tensor");
            std::thread::scope(|scope| {
                scope.spawn(|| push_until(&new, &never, &taken, &AtomicU64::new(0)));
                while taken.load(Ordering::SeqCst) < 5 {
                    std::thread::yield_now();
                }
                never.store(true, Ordering::Release);
            });
            taken.into_inner()
        });
        if is_paused {
            kill(first.id(), Signal::SIGCONT).expect("the process is there");
        }
        second
    });
    let ended = first.wait();
    assert!(!ended.status.success() && ended.words.contains("was replaced by owner 2"), "{ended:?}");
    let reader = trainer(&second.address, 1);
    let found = value(&reader);
    second.kill();
    let third = Process::start(&arguments(root.path(), false)).expect("the directory is free");
    let after = value(&trainer(&third.address, 1));
    assert_eq!(after, found, "what the second server had is there after it was killed");
    let least = acknowledged.into_inner();
    let most = least + unsure.into_inner();
    println!("first owner: {least} to {most}; in all {after}");
    assert!(after >= least + 5, "{after} of {least} and 5 or more acknowledged pushes");
    third.kill();
}

#[test]
fn of_two_servers_on_one_directory_only_the_owner_acknowledges() {
    let mut prng = SeededPrng::of("owners");
    for number in 0..if is_full() { 100 } else { 10 } {
        if number % 2 == 0 { with_the_lock(&mut prng) } else { without_the_lock(&mut prng) }
    }
}
