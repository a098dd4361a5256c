//! Synchronous training has one result, to the bit, for any number of servers, shards and bytes in a chunk, any
//! transport, any device for updates, and any order of arrival. `PSERVER_FULL=1` tries every
//! optimizer on every layout.

mod cluster;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cluster::asked::is_full;
use cluster::job::{BIND, Job, Local, TCP, client, folder};
use cluster::kept::Kept;
use cluster::seeded::SeededPrng;
use cluster::training::{Tensor, begin, pull, push, push_pull};
use pserver_client::Client;
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_kernels::conformance::skips::skip;
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;

const TRAINERS: u32 = 3;
const ROUNDS: u64 = 3;
/// The number of concurrent clusters: a cluster that stops mostly waits.
const AT_A_TIME: usize = 6;

/// The order in which gradients arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One tensor of one trainer after the other, in the order that this seed gives.
    Shuffled(u64),
    /// Trainers push all their gradients without delays.
    Racing,
}

/// One way to lay out a job.
#[derive(Clone, Copy, Debug)]
struct Layout {
    servers: u16,
    shards: u16,
    chunk_bytes: u32,
    bind: &'static str,
    device: &'static str,
    order: Order,
}

/// The processor, and a simulated accelerator that works asynchronously.
const DEVICES: [&str; 2] = ["cpu", "simulated"];

/// The addresses of both runs: TCP, and shared memory or the address of `PSERVER_TEST_BIND`.
fn binds() -> [&'static str; 2] {
    [TCP, if *BIND == TCP { "shm://127.0.0.1:0" } else { &BIND }]
}

/// Every layout, in `orders`.
fn all_layouts(orders: &[Order]) -> Vec<Layout> {
    let mut all = Vec::new();
    for servers in [1, 2, 3] {
        for shards in [1, 2, 4] {
            for chunk_bytes in [32 * 1024, 1024 * 1024] {
                for (bind, device) in binds().into_iter().flat_map(|bind| DEVICES.map(|device| (bind, device))) {
                    let layout = |order: &Order| Layout { servers, shards, chunk_bytes, bind, device, order: *order };
                    all.extend(orders.iter().map(layout));
                }
            }
        }
    }
    all
}

/// A few layouts that contain every pair of values of two columns.
fn covering_layouts(orders: &[Order]) -> Vec<Layout> {
    let layout = |number: usize| {
        let (row, column) = (number / 3, number % 3);
        let servers = [1, 2, 3][row];
        let shards = [1, 2, 4][column];
        let chunk_bytes = [32 * 1024, 1024 * 1024][(row + column) % 2];
        let bind = binds()[number / 2 % 2];
        let device = DEVICES[(row + 1) * (column + 1) % 2];
        Layout { servers, shards, chunk_bytes, bind, device, order: orders[(row + column) % orders.len()] }
    };
    (0..9).map(layout).collect()
}

/// Tiny, odd, of several chunks, wide, and one whose rule needs the whole gradient.
fn tensors(optimizer: &str) -> Vec<Tensor> {
    vec![
        Tensor::new("tiny", Float32, 1, optimizer),
        Tensor::new("several chunks", Float32, 3 * 8192 + 4097, optimizer),
        Tensor::new("wide", Float64, 5001, optimizer),
        Tensor::new("clipped", Float32, 20_011, &format!("{optimizer} clip_norm: 1.5")),
        Tensor::new("odd", Float32, 333, &format!("{optimizer} l2: 0.01")),
    ]
}

fn shuffled(clients: &[Client], tensors: &[Tensor], prng: &mut SeededPrng) {
    for round in 1..=ROUNDS {
        let mut turns: Vec<(u32, usize)> =
            (0..TRAINERS).flat_map(|trainer| (0..tensors.len()).map(move |tensor| (trainer, tensor))).collect();
        prng.shuffle(&mut turns);
        for (trainer, tensor) in turns {
            let client = &clients[usize::try_from(trainer).expect("trainers are few")];
            push(client, &tensors[tensor..=tensor], trainer, round).expect("a gradient is taken");
        }
    }
    for client in clients {
        pull(client, tensors).expect("every round is closed");
    }
}

fn racing(clients: &[Client], tensors: &[Tensor]) {
    std::thread::scope(|scope| {
        for (trainer, client) in (0..).zip(clients) {
            scope.spawn(move || {
                for round in 1..ROUNDS {
                    // Not waiting for the round's end lets a trainer run one round ahead.
                    push(client, tensors, trainer, round).expect("a gradient is taken");
                }
                push_pull(client, tensors, trainer, ROUNDS).expect("the last round is closed");
            });
        }
    });
}

fn train(layout: Layout, tensors: &[Tensor]) -> Kept {
    let folder = folder();
    let job = Job::new(layout.servers, TRAINERS).with_checkpoints(folder.path()).with("--device", layout.device);
    // The device also updates the small chunks of these tensors.
    let mut job = job.with("--device-least", "1KiB");
    (job.shards, job.chunk_bytes, job.bind) = (layout.shards, layout.chunk_bytes, layout.bind);
    let servers = Local::start(&job);
    let clients: Vec<Client> = (0..TRAINERS).map(|trainer| client(&servers.coordinator(), trainer)).collect();
    for (index, client) in clients.iter().enumerate() {
        assert_eq!(
            begin(client, tensors).expect("the tensors are initialised"),
            index == 0,
            "the first one asks first"
        );
    }
    match layout.order {
        Order::Shuffled(seed) => shuffled(&clients, tensors, &mut SeededPrng::new(seed)),
        Order::Racing => racing(&clients, tensors),
    }
    servers.stop();
    let kept = Kept::read(folder.path(), &job, tensors);
    assert_eq!(kept.versions(), (ROUNDS, ROUNDS), "{layout:?}: every chunk has seen every round");
    kept
}

fn check(name: &str, optimizer: &str, is_in_full: bool) {
    let mut prng = SeededPrng::of(name);
    let orders = [Order::Shuffled(prng.next()), Order::Racing, Order::Shuffled(prng.next())];
    let layouts =
        if is_in_full && *BIND == TCP || is_full() { all_layouts(&orders) } else { covering_layouts(&orders) };
    let tensors = tensors(optimizer);
    let results = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(layout) = layouts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let kept = train(*layout, &tensors);
                    results.lock().expect("nobody panics with it").push((*layout, kept));
                }
            });
        }
    });
    let results = results.into_inner().expect("nobody panics with it");
    assert_eq!(results.len(), layouts.len());
    let (first_layout, first) = &results[0];
    for (layout, kept) in &results {
        let difference = first.difference(kept).unwrap_or_default();
        assert_eq!(kept.digest(), first.digest(), "{name}: {layout:?} and {first_layout:?}: {difference}");
    }
    println!("{name}: {} layouts, digest {}", results.len(), first.digest());
}

/// The job runs on the first CUDA device, or without one on the stand-in driver, which reports the kernels that it ran.
#[test]
fn a_device_of_cuda_has_the_digest_of_the_processor() {
    if !standin::is_inside() && pserver_kernels::cuda::open(0).is_err() {
        return on_standin();
    }
    let optimizer = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    let (tensors, order) = (tensors(optimizer), Order::Racing);
    let layout = |servers, shards, chunk_bytes, device| {
        train(Layout { servers, shards, chunk_bytes, bind: binds()[0], device, order }, &tensors)
    };
    let cpu = layout(1, 1, 1024 * 1024, "cpu");
    for (servers, shards, chunk_bytes) in [(1, 1, 1024 * 1024), (2, 2, 32 * 1024)] {
        let cuda = layout(servers, shards, chunk_bytes, "cuda:0");
        let difference = cpu.difference(&cuda).unwrap_or_default();
        assert_eq!(cuda.digest(), cpu.digest(), "{servers} servers of {shards} shards: {difference}");
    }
    println!("cuda:0: digest {}", cpu.digest());
}

fn on_standin() {
    let mut vars = match standin::driver_with(&shipped::module()) {
        Ok(vars) => vars,
        Err(why) => return skip("g++", &why),
    };
    let folder = folder();
    let launched = folder.path().join("launched");
    vars.push(("PSERVER_STANDIN_LAUNCHED", launched.display().to_string()));
    standin::run_again(&vars.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>());
    let launched = std::fs::read_to_string(launched).unwrap_or_default();
    let updates = launched.lines().filter(|name| name.starts_with("pserver_update_")).count();
    // Two layouts, three tensors at the least, each updated in every round.
    assert!(6 <= updates / usize::try_from(ROUNDS).expect("few"), "the device ran {updates} updates");
    // One chunk of the clipped tensor in the one layout, three in the other.
    let norms = launched.lines().filter(|name| *name == "pserver_squares_f32").count();
    assert_eq!(norms, 4 * usize::try_from(ROUNDS).expect("few"), "sums of squares that the device made");
}

#[test]
fn sgd_has_one_digest() {
    check("sgd", "const_lr { learning_rate: 0.1 }", true);
}

#[test]
fn adam_has_one_digest() {
    let rate = "lr_policy: Linear linear_lr { learning_rate: 0.01 lr_decay_a: 0.001 lr_decay_b: 0.0001 }";
    check("adam", &format!("optimizer: Adam adam {{ }} {rate} l1: 0.0001"), true);
}

#[test]
fn momentum_has_one_digest() {
    check("momentum", "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 } l1: 0.001", false);
}

#[test]
fn nesterov_has_one_digest() {
    let optimizer = "sgd { momentum: 0.9 nesterov: true } const_lr { learning_rate: 0.05 } clip_value: 0.5";
    check("nesterov", optimizer, false);
}

#[test]
fn adagrad_has_one_digest() {
    check("adagrad", "optimizer: Adagrad adagrad { } const_lr { learning_rate: 0.1 }", false);
}

#[test]
fn adadelta_has_one_digest() {
    check("adadelta", "optimizer: Adadelta adadelta { } const_lr { learning_rate: 1.0 } clip_value: 0.7", false);
}

#[test]
fn rmsprop_has_one_digest() {
    check("rmsprop", "algorithm: \"rmsprop\" rmsprop { momentum: 0.9 } const_lr { learning_rate: 0.01 }", false);
}

#[test]
fn a_rule_of_a_users_own_has_one_digest() {
    let rule = "rule: 'state m = 0.25; m = b*m + (1-b)*g; w -= lr*(tanh(m)/sqrt(n) + 0.01*w)' \
                rule_set { key: 'b' value: 0.9 } clip_value: 0.5 l1: 0.001 const_lr { learning_rate: 0.01 }";
    check("rule", rule, false);
}

#[test]
fn adamw_has_one_digest() {
    check("adamw", "algorithm: \"adamw\" adamw { } const_lr { learning_rate: 0.01 }", false);
}

#[test]
fn ftrl_has_one_digest() {
    check("ftrl", "algorithm: \"ftrl\" ftrl { } const_lr { learning_rate: 0.1 } l1: 0.001", false);
}
