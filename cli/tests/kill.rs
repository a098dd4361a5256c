//! Servers that are killed (SIGKILL) and started again lose no gradient and apply none twice. Ten kills run by
//! default, a hundred with `PSERVER_FULL=1`, as many as `PSERVER_KILLS` says.

mod cluster;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cluster::asked::is_full;
use cluster::job::{BIND, Job, client, client_with, folder, reader};
use cluster::kept::Kept;
use cluster::process::Processes;
use cluster::rows::Matrix;
use cluster::seeded::SeededPrng;
use cluster::training::{Tensor, begin, declare, given, places, pull, push_pull, wanted};
use pserver_client::Client;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{Float32, Float64};
use tempfile::TempDir;

const TRAINERS: u32 = 3;
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn kills() -> usize {
    match std::env::var("PSERVER_KILLS") {
        Ok(number) => number.parse().expect("PSERVER_KILLS is a number"),
        Err(_) => {
            if is_full() {
                100
            } else {
                10
            }
        }
    }
}

fn job(folder: &TempDir, mode: &'static str) -> Job {
    let job = Job::new(2, TRAINERS).with_checkpoints(folder.path());
    let job = job.with("--journal", "on").with("--checkpoint-interval-seconds", 1);
    Job { mode, shards: 2, ..job }
}

fn tensors(optimizer: &str) -> Vec<Tensor> {
    vec![
        Tensor::new("tiny", Float32, 3, optimizer),
        Tensor::new("several chunks", Float32, 5 * 8192 + 77, optimizer),
        Tensor::new("wide", Float64, 9001, optimizer),
        // The chunks of this tensor are a grouped update. Gradients of ones never reach the norm.
        Tensor::new("clipped", Float32, 3 * 8192 + 5, &format!("{optimizer} clip_norm: 1e6")),
    ]
}

/// Kills servers, each time after so many of the trainers' reports, sometimes twice in a row.
fn harass(processes: &mut Processes, reports: &mpsc::Receiver<()>, prng: &mut SeededPrng) {
    for _ in 0..kills() {
        while reports.try_recv().is_ok() {}
        let begun = Instant::now();
        // Sometimes long enough for a checkpoint, which is taken every second.
        let life = Duration::from_millis(if prng.below(4) == 0 { prng.next() % 1500 } else { 0 });
        for _ in 0..prng.below(12) {
            reports.recv_timeout(PATIENCE).expect("training goes on");
        }
        while begun.elapsed() < life {
            reports.recv_timeout(PATIENCE).expect("training goes on");
        }
        // The kill comes at a random time within a call, not only between two calls.
        let moment = Duration::from_micros(prng.next() % 3000);
        let begun = Instant::now();
        while begun.elapsed() < moment {
            std::hint::spin_loop();
        }
        let server = prng.below(processes.running.len());
        for _ in 0..=usize::from(prng.below(4) == 0) {
            processes.kill(server);
            processes.start_again(server);
        }
    }
}

/// Pushes ones for some tensors, and counts for each the pushes that were acknowledged.
fn count_up(client: &Client, tensors: &[Tensor], pushed: &[AtomicU64], prng: &mut SeededPrng) {
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    let first = prng.below(tensors.len());
    let last = first + prng.below(tensors.len() - first);
    client.push(&given(&tensors[first..=last], &ones[first..=last]), None).expect("a gradient is taken");
    for count in &pushed[first..=last] {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn element(tensor: &Tensor, bytes: &[u8]) -> f64 {
    match tensor.element_type {
        Float64 => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
        _ => f32::from_le_bytes(bytes.try_into().expect("four bytes")).into(),
    }
}

/// Every element is its initial value plus one for every push.
fn check_conserved(tensor: &Tensor, value: &[u8], pushed: u64) {
    let width = usize::try_from(tensor.element_type.bytes()).expect("an element is short");
    let pushed = f64::from(u32::try_from(pushed).expect("a test does not push as often"));
    for (at, element_bytes) in value.chunks(width).enumerate() {
        let found = element(tensor, element_bytes);
        assert!(found == pushed, "\"{}\" element {at}: {found} after {pushed} pushes of one", tensor.name);
    }
}

#[test]
fn no_gradient_is_lost_or_applied_twice_when_servers_are_killed() {
    check_nothing_is_lost("conservation", &BIND, "cpu");
}

#[test]
fn no_gradient_is_lost_or_applied_twice_when_servers_that_share_memory_are_killed() {
    check_nothing_is_lost("conservation in shared memory", "shm://127.0.0.1:0", "cpu");
}

#[test]
fn no_gradient_is_lost_or_applied_twice_when_servers_with_an_accelerator_are_killed() {
    check_nothing_is_lost("conservation on an accelerator", "shm://127.0.0.1:0", "simulated");
}

fn check_nothing_is_lost(name: &str, bind: &'static str, device: &str) {
    let mut prng = SeededPrng::of(name);
    let folder = folder();
    let mut processes = Processes::start(Job { bind, ..job(&folder, "async").with("--device", device) });
    let coordinator = processes.coordinator();
    let one = |tensor: Tensor| tensor.zeroed();
    let tensors: Vec<Tensor> = tensors("const_lr { learning_rate: 1.0 }").into_iter().map(one).collect();
    let pushed: Vec<AtomicU64> = tensors.iter().map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let (report, reports) = mpsc::channel();
        for trainer in 0..TRAINERS {
            let (coordinator, tensors, pushed, stop) = (&coordinator, &tensors, &pushed, &stop);
            let (report, mut prng) = (report.clone(), SeededPrng::new(prng.next()));
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                begin(&client, tensors).expect("the tensors are initialised");
                while !stop.load(Ordering::Acquire) {
                    count_up(&client, tensors, pushed, &mut prng);
                    // The receiver is dropped after the last kill.
                    let _ = report.send(());
                }
                // An acknowledged gradient may still be on the device; a push that fetches ends after its update.
                let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
                let mut values = places(tensors);
                let done = client.push_pull(&given(tensors, &ones), None, &mut wanted(tensors, &mut values));
                done.expect("the servers are there");
                for count in pushed {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        drop(report);
        harass(&mut processes, &reports, &mut prng);
        stop.store(true, Ordering::Release);
    });
    let values = pull(&reader(&coordinator), &tensors).expect("the servers are there");
    let counts: Vec<u64> = pushed.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    for ((tensor, value), count) in tensors.iter().zip(&values).zip(&counts) {
        check_conserved(tensor, value, *count);
    }
    println!("{name}: {} kills in {:.1} s, pushes {counts:?}", kills(), begun.elapsed().as_secs_f64());
    processes.terminate();
}

#[test]
fn a_disturbed_job_has_the_digest_of_an_undisturbed_one() {
    let mut prng = SeededPrng::of("digest under kills");
    let folder = folder();
    let job = job(&folder, "sync");
    let mut processes = Processes::start(job.clone());
    let coordinator = processes.coordinator();
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    let mut tensors = tensors(adam);
    tensors.push(Tensor::new("much clipped", Float32, 3 * 8192 + 5, &format!("{adam} clip_norm: 1.5")));
    // The last round, which is set when the last server was killed.
    let last = AtomicU64::new(u64::MAX);
    let latest = AtomicU64::new(0);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let (report, reports) = mpsc::channel();
        for trainer in 0..TRAINERS {
            let (coordinator, tensors, last, latest) = (&coordinator, &tensors, &last, &latest);
            let report = report.clone();
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                begin(&client, tensors).expect("the tensors are initialised");
                for round in 1.. {
                    latest.fetch_max(round, Ordering::SeqCst);
                    if last.load(Ordering::SeqCst) < round {
                        return;
                    }
                    push_pull(&client, tensors, trainer, round).expect("a round is closed");
                    // The receiver is dropped after the last kill.
                    let _ = report.send(());
                }
            });
        }
        drop(report);
        harass(&mut processes, &reports, &mut prng);
        // A trainer may be about to push for the latest round, and then all trainers must.
        last.store(latest.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    });
    let seconds = begun.elapsed().as_secs_f64();
    processes.terminate();
    let rounds = last.into_inner();
    let (disturbed, expected) =
        (Kept::read(folder.path(), &job, &tensors), Kept::undisturbed(&tensors, TRAINERS, rounds));
    let difference = expected.difference(&disturbed).unwrap_or_default();
    assert_eq!(disturbed.digest(), expected.digest(), "after {rounds} rounds: {difference}");
    println!("digest under kills: {} kills in {seconds:.1} s, {rounds} rounds, digest {}", kills(), expected.digest());
}

/// Every trainer pushes the same gradients to a dense and to a sparse parameter while servers are killed. Payloads are
/// so short that contributions come in parts.
#[test]
fn sparse_equals_dense_when_servers_are_killed() {
    let mut prng = SeededPrng::of("rows under kills");
    let folder = folder();
    let mut processes = Processes::start(Job { chunk_bytes: 4096, ..job(&folder, "sync") });
    let coordinator = processes.coordinator();
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 } l2: 0.01";
    let matrices = [
        Matrix::new("moves by itself", 300, 40, adam),
        Matrix { sparse: "buckets: 4".to_owned(), ..Matrix::new("stays", 500, 20, "const_lr { learning_rate: 0.1 }") },
    ];
    // The last round, which is set when the last server was killed.
    let (last, latest) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (report, reports) = mpsc::channel();
        for trainer in 0..TRAINERS {
            let (coordinator, matrices, last, latest) = (&coordinator, &matrices, &last, &latest);
            let report = report.clone();
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                if client.begin_init(&OptimizerSettings::default()).expect("somebody is chosen") {
                    matrices.iter().for_each(|matrix| matrix.declare(&client).expect("it is declared"));
                    client.finish_init().expect("the initialisation ends");
                }
                for round in 1.. {
                    latest.fetch_max(round, Ordering::SeqCst);
                    if last.load(Ordering::SeqCst) < round {
                        return;
                    }
                    for matrix in matrices {
                        matrix.push(&client, trainer, round).expect("rows are taken");
                    }
                    // The receiver is dropped after the last kill.
                    let _ = report.send(());
                }
            });
        }
        drop(report);
        reports.recv_timeout(PATIENCE).expect("the matrices are initialised");
        harass(&mut processes, &reports, &mut prng);
        // A trainer may be about to push for the latest round, and then all trainers must.
        last.store(latest.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    });
    let reader = reader(&coordinator);
    for matrix in &matrices {
        assert_ne!(matrix.pull_dense(&reader).expect("it is there"), matrix.initial(), "it was trained");
        matrix.check_alike(&reader, "after the kills");
    }
    println!("rows under kills: {} kills, {} rounds", kills(), last.into_inner());
    processes.terminate();
}

/// Kills a server while the first trainer declares tensors, and all three get through.
fn check_killed_while_initialising(server: usize, declared_before: usize) {
    let folder = folder();
    let mut processes = Processes::start(job(&folder, "sync"));
    let coordinator = processes.coordinator();
    let tensors = tensors("const_lr { learning_rate: 0.1 }");
    let first = client(&coordinator, 0);
    assert!(first.begin_init(&OptimizerSettings::default()).expect("somebody is chosen"));
    for tensor in &tensors[..declared_before] {
        declare(&first, tensor).expect("a tensor is declared");
    }
    processes.kill(server);
    std::thread::scope(|scope| {
        let others = [1, 2].map(|trainer| {
            let (coordinator, tensors) = (&coordinator, &tensors);
            scope.spawn(move || begin(&client(coordinator, trainer), tensors))
        });
        processes.start_again(server);
        let finished = tensors[declared_before..].iter().try_for_each(|tensor| declare(&first, tensor));
        let finished =
            finished.and_then(|()| first.finish_init()).is_ok() || begin(&first, &tensors).is_ok_and(|it| it);
        let others = others.map(|one| one.join().expect("it does not panic").expect("it is initialised"));
        let finishers = others.into_iter().chain([finished]).filter(|finished| *finished).count();
        assert_eq!(finishers, 1, "server {server} killed after {declared_before} tensors");
    });
    let values = pull(&reader(&coordinator), &tensors).expect("the tensors are there");
    assert!(tensors.iter().zip(values).all(|(tensor, value)| tensor.initial() == value));
    processes.terminate();
}

#[test]
fn a_server_killed_during_initialisation_does_not_block_the_job() {
    for server in [0, 1] {
        for declared_before in 0..=3 {
            check_killed_while_initialising(server, declared_before);
        }
    }
}

/// The greatest number of a checkpoint in a shard's folder.
fn newest_checkpoint(shard: &Path) -> u64 {
    let names = std::fs::read_dir(shard).expect("the folder is there").map_while(Result::ok);
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_suffix(".json")?.rsplit_once('-')?.1.parse().ok());
    numbers.max().unwrap_or(0)
}

#[test]
fn checkpoints_go_on_after_a_recovery() {
    let folder = folder();
    let mut processes = Processes::start(Job { trainers: 1, ..job(&folder, "sync") });
    let client = client(&processes.coordinator(), 0);
    let tensors = tensors("const_lr { learning_rate: 0.1 }");
    begin(&client, &tensors).expect("the tensors are initialised");
    let shards = ["server-0/shard-0", "server-0/shard-1", "server-1/shard-0", "server-1/shard-1"];
    let shards = shards.map(|shard| folder.path().join(shard));
    let mut round = 0;
    let mut train_until = |above: u64| {
        let begun = Instant::now();
        while shards.iter().any(|shard| newest_checkpoint(shard) <= above) {
            assert!(begun.elapsed() < PATIENCE, "no checkpoint above {above} within {PATIENCE:?}");
            round += 1;
            push_pull(&client, &tensors, 0, round).expect("a round is closed");
        }
        shards.iter().map(|shard| newest_checkpoint(shard)).max().expect("there are shards")
    };
    let before = train_until(0);
    for server in [0, 1] {
        processes.kill(server);
        processes.start_again(server);
    }
    train_until(before + 1);
    processes.terminate();
}

#[test]
fn a_trainer_joins_after_the_coordinator_was_killed() {
    let folder = folder();
    let mut processes = Processes::start(job(&folder, "async"));
    let tensors = tensors("const_lr { learning_rate: 0.1 }");
    begin(&client(&processes.coordinator(), 0), &tensors).expect("the tensors are initialised");
    processes.kill(0);
    processes.start_again(0);
    let late = client_with(&processes.coordinator(), 1, Duration::from_secs(20));
    assert!(!begin(&late, &tensors).expect("server 1 is still there, and need not register again"));
    pull(&late, &tensors).expect("the tensors are there");
    processes.terminate();
}

#[test]
fn a_trainer_that_was_superseded_stays_out_when_the_server_was_killed() {
    let folder = folder();
    let job = Job::new(1, 1).with_checkpoints(folder.path()).with("--journal", "on");
    let mut processes = Processes::start(Job { mode: "async", ..job });
    let coordinator = processes.coordinator();
    let tensors = vec![Tensor::new("w", Float32, 8, "const_lr { learning_rate: 1.0 }").zeroed()];
    let ones = vec![tensors[0].constant(-1.0)];
    let older = client(&coordinator, 0);
    begin(&older, &tensors).expect("the tensors are initialised");
    older.push(&given(&tensors, &ones), None).expect("a gradient is taken");
    // The newer incarnation only reads, so no gradient of it is in the journal.
    let newer = client(&coordinator, 0);
    assert_eq!(pull(&newer, &tensors).expect("they are there"), ones_times(&tensors[0], 1.0));
    processes.kill(0);
    processes.start_again(0);
    let refused = older.push(&given(&tensors, &ones), None).expect_err("its rank is the newer one's").to_string();
    assert!(refused.contains("was superseded by incarnation"), "{refused}");
    newer.push(&given(&tensors, &ones), None).expect("a gradient is taken");
    assert_eq!(pull(&newer, &tensors).expect("they are there"), ones_times(&tensors[0], 2.0));
    processes.terminate();
}

fn ones_times(tensor: &Tensor, number: f32) -> Vec<Vec<u8>> {
    vec![tensor.constant(number)]
}
