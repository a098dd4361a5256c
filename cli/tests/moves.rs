//! Shards that move between servers while trainers train. Twenty moves by default, two hundred with `PSERVER_FULL=1`,
//! as many as `PSERVER_MOVES` says.

mod cluster;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cluster::asked::is_full;
use cluster::job::{BIND, Job, client, folder, reader};
use cluster::kept::Kept;
use cluster::process::Processes;
use cluster::seeded::SeededPrng;
use cluster::training::{Tensor, begin, places, pull, push_pull, wanted};
use pserver_client::View;
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::ids::{ServerIndex, ShardId, ShardIndex};
use pserver_core::wire::Address;
use tempfile::TempDir;

const TRAINERS: u32 = 2;
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn moves() -> usize {
    match std::env::var("PSERVER_MOVES") {
        Ok(number) => number.parse().expect("PSERVER_MOVES is a number"),
        Err(_) if is_full() => 200,
        Err(_) => 20,
    }
}

fn job(folder: &TempDir, bind: &'static str) -> Job {
    let job = Job::new(2, TRAINERS).with_checkpoints(folder.path());
    let job = job.with("--journal", "on").with("--checkpoint-interval-seconds", 1);
    Job { mode: "sync", bind, shards: 2, ..job }
}

fn tensors() -> Vec<Tensor> {
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    vec![
        Tensor::new("tiny", Float32, 3, adam),
        Tensor::new("several chunks", Float32, 5 * 8192 + 77, adam),
        Tensor::new("wide", Float64, 9001, adam),
        // The chunks of this tensor are a grouped update.
        Tensor::new("clipped", Float32, 3 * 8192 + 5, &format!("{adam} clip_norm: 1.5")),
    ]
}

/// The shared state of the trainers and of the thread that moves shards.
struct Course {
    /// The last round, which is set when the last shard has moved.
    last: AtomicU64,
    latest: AtomicU64,
    /// Trainers within a call.
    pushing: AtomicU32,
}

/// Trains until the last round. The second trainer is lost from time to time, and another process has its rank.
fn train(trainer: u32, coordinator: &Address, tensors: &[Tensor], course: &Course, report: &mpsc::Sender<()>) {
    let mut one = client(coordinator, trainer);
    begin(&one, tensors).expect("the tensors are initialised");
    for round in 1.. {
        course.latest.fetch_max(round, Ordering::SeqCst);
        if course.last.load(Ordering::SeqCst) < round {
            return;
        }
        if trainer == 1 && round % 50 == 0 {
            one = client(coordinator, trainer);
            begin(&one, tensors).expect("the tensors are there");
        }
        course.pushing.fetch_add(1, Ordering::SeqCst);
        push_pull(&one, tensors, trainer, round).expect("a round is closed");
        course.pushing.fetch_sub(1, Ordering::SeqCst);
        // The receiver is dropped after the last move.
        let _ = report.send(());
    }
}

/// Moves shards, each at some point of a round, and kills a server now and then. Returns how many moves were ordered
/// while a trainer was within a call.
fn harass(
    processes: &mut Processes,
    course: &Course,
    reports: &mpsc::Receiver<()>,
    prng: &mut SeededPrng,
) -> (usize, Vec<Duration>) {
    let operator = reader(&processes.coordinator());
    let (mut hit, mut times) = (0, Vec::new());
    // Of the shards 0.0, 0.1, 1.0 and 1.1, which are at server 1.
    let mut is_at_second = [false, false, true, true];
    for number in 0..moves() {
        while reports.try_recv().is_ok() {}
        for _ in 0..1 + prng.below(6) {
            reports.recv_timeout(PATIENCE).expect("training goes on");
        }
        let moment = Instant::now() + Duration::from_micros(prng.next() % 5000);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        let moves = prng.below(4);
        let (home, index) = (u16::from(moves > 1), u16::from(!moves.is_multiple_of(2)));
        let shard = ShardId { server: ServerIndex(home), shard: ShardIndex(index) };
        is_at_second[moves] = !is_at_second[moves];
        let to = ServerIndex(u16::from(is_at_second[moves]));
        hit += usize::from(course.pushing.load(Ordering::SeqCst) > 0);
        let begun = Instant::now();
        operator.move_shard(shard, to).expect("the shard moves");
        times.push(begun.elapsed());
        if number % 7 == 6 {
            let server = prng.below(2);
            processes.kill(server);
            processes.start_again(server);
        }
    }
    (hit, times)
}

fn check_moves(name: &str, bind: &'static str) {
    let mut prng = SeededPrng::of(name);
    let folder = folder();
    let job = job(&folder, bind);
    let mut processes = Processes::start(job.clone());
    let coordinator = processes.coordinator();
    let tensors = tensors();
    let course = Course { last: AtomicU64::new(u64::MAX), latest: AtomicU64::new(0), pushing: AtomicU32::new(0) };
    let (hit, mut times) = std::thread::scope(|scope| {
        let (report, reports) = mpsc::channel();
        for trainer in 0..TRAINERS {
            let (coordinator, tensors, course, report) = (&coordinator, &tensors, &course, report.clone());
            scope.spawn(move || train(trainer, coordinator, tensors, course, &report));
        }
        drop(report);
        let found = harass(&mut processes, &course, &reports, &mut prng);
        // A trainer may be about to push for the latest round, and then all trainers must.
        course.last.store(course.latest.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
        found
    });
    processes.terminate();
    let rounds = course.last.into_inner();
    let (moved, expected) = (Kept::read(folder.path(), &job, &tensors), Kept::undisturbed(&tensors, TRAINERS, rounds));
    let difference = expected.difference(&moved).unwrap_or_default();
    assert_eq!(moved.digest(), expected.digest(), "after {rounds} rounds: {difference}");
    times.sort_unstable();
    println!(
        "{name}: {} moves, {hit} of them within a round, median {:?}, longest {:?}; {rounds} rounds, digest {}",
        times.len(),
        times[times.len() / 2],
        times[times.len() - 1],
        expected.digest()
    );
    assert!(moves() <= 2 * hit, "{hit} of {} moves were within a round", moves());
}

#[test]
fn shards_that_move_change_no_bit() {
    check_moves("moves over TCP and shared memory", &BIND);
}

fn seen(view: &View) -> Vec<u8> {
    view.pieces(0).flatten().copied().collect()
}

#[test]
fn a_view_outlives_the_move_of_its_shard() {
    let folder = folder();
    let job = Job::new(2, 1).with_checkpoints(folder.path());
    let processes = Processes::start(Job { mode: "sync", bind: "shm://127.0.0.1:0", ..job });
    let client = client(&processes.coordinator(), 0);
    let tensors = vec![Tensor::new("w", Float32, 8192, "const_lr { learning_rate: 1.0 }")];
    begin(&client, &tensors).expect("the tensors are initialised");
    let before = pull(&client, &tensors).expect("it is there");
    let view = client.pull_view(&["w"]).expect("it is shared");
    assert_eq!(seen(&view), before[0]);
    let operator = reader(&processes.coordinator());
    for to in [1, 0, 1] {
        let shard = ShardId { server: ServerIndex(0), shard: ShardIndex(0) };
        operator.move_shard(shard, ServerIndex(to)).expect("the shard moves");
        assert_eq!(seen(&view), before[0], "the memory of the former leader stays");
    }
    drop(view);
    push_pull(&client, &tensors, 0, 1).expect("a round is closed");
    let mut values = places(&tensors);
    client.pull(&mut wanted(&tensors, &mut values)).expect("it is there");
    assert_ne!(values, before, "it was trained");
    processes.terminate();
}

#[test]
fn a_shard_without_a_journal_stays() {
    let folder = folder();
    let job = Job::new(2, 1).with_checkpoints(folder.path()).with("--journal", "off");
    let processes = Processes::start(Job { mode: "sync", bind: &BIND, ..job });
    let client = client(&processes.coordinator(), 0);
    let tensors = vec![Tensor::new("w", Float32, 8, "const_lr { learning_rate: 1.0 }")];
    begin(&client, &tensors).expect("the tensors are initialised");
    let shard = ShardId { server: ServerIndex(0), shard: ShardIndex(0) };
    let refused = reader(&processes.coordinator()).move_shard(shard, ServerIndex(1)).expect_err("it would lose rounds");
    assert!(refused.to_string().contains("server 0 keeps no journal"), "{refused}");
    processes.terminate();
}

#[test]
fn a_shard_whose_next_leader_has_no_files_of_it_goes_back() {
    let folder = folder();
    // Each server has a directory of its own.
    let directories = folder.path().join("{index}");
    let job = Job::new(2, 1).with_checkpoints(&directories).with("--journal", "on");
    let mut processes = Processes::start(Job { mode: "sync", bind: &BIND, ..job });
    let client = client(&processes.coordinator(), 0);
    let tensors = vec![Tensor::new("w", Float32, 8192, "const_lr { learning_rate: 1.0 }")];
    begin(&client, &tensors).expect("the tensors are initialised");
    let shard = ShardId { server: ServerIndex(0), shard: ShardIndex(0) };
    for round in 1..=3 {
        let refused = reader(&processes.coordinator()).move_shard(shard, ServerIndex(1)).expect_err("it has no files");
        let expected = "server 1 cannot take server 0 shard 0 up: server-0/shard-0: expected the files of the shard";
        assert!(refused.to_string().contains(expected), "{refused}");
        push_pull(&client, &tensors, 0, round).expect("the shard is back");
        processes.kill(1);
        processes.start_again(1);
    }
    processes.terminate();
}
