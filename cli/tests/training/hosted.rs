//! Programs that servers host: what no flow carries out runs on the executor of a shard, and computes what it computes
//! in one process, whatever is killed meanwhile.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::cluster::job::{Job, Local, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use pserver_client::DestinationSlice;
use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::wire::Address;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProgramPart, Transpiler};
use pserver_program::{Elements, Graph, Program, ProgramPeer, Tensor};
use pserver_trainer::{PartWay, Trainer, explain, initialise, trainable};

const STEPS: u64 = 300;
const WIDTH: usize = 5000;

fn part(peers: Vec<ProgramPeer>, text: &str) -> ProgramPart {
    let program: Program = text.parse().expect("it is a program");
    ProgramPart { peers, graph: Graph::new(program).expect("it checks") }
}

/// A server that takes gradients in pairs out of a queue, whoever sent them, beside a parameter that a flow carries
/// out.
fn pairs() -> Vec<ProgramPart> {
    let server = format!(
        "block 0 {{
            parameter w: float32[{WIDTH}]
            parameter v: float32[{WIDTH}]
            state v@count: int64[]
            state speed: float32[{WIDTH}]
            state gradients: queue(float32[{WIDTH}], 2)
            initialise w = fill(value=1.0)
            initialise v = fill(value=0.0)
            initialise v@count = fill(value=0.0)
            initialise speed = fill(value=0.0)
            communication send(w, channel=\"w\", to=trainer:0)
            communication send(w, channel=\"w\", to=trainer:1)
            communication send(v, channel=\"v\", to=trainer:0)
            communication send(v, channel=\"v\", to=trainer:1)
            communication loop_forever(block=1)
            communication loop_forever(block=2)
            communication loop_forever(block=3)
        }}
        block 1 in 0 {{
            temporary piece: float32[{WIDTH}]
            communication piece = recv(channel=\"g\")
            communication enqueue(gradients, piece)
        }}
        block 2 in 0 {{
            communication one, other = dequeue(gradients, min_count=2)
            optimize both = sum(one, other)
            optimize kept = scale(speed, factor=0.5)
            optimize speed = add(kept, both)
            optimize move = scale(speed, factor=-0.25)
            optimize w = add(w, move)
            communication send(w, channel=\"w\", to=trainer:0)
            communication send(w, channel=\"w\", to=trainer:1)
        }}
        block 3 in 0 {{
            temporary v@piece: float32[{WIDTH}]
            communication v@piece, sender = recv(channel=\"h\")
            communication v@gradient = gradient_accumulator(v@piece, sender, count=2, merge=sum, staleness=0)
            communication senders = string_accumulator(sender, count=2)
            optimize v, v@count = update(v, v@gradient, v@count, config=\"const_lr {{ learning_rate: 1 }}\")
            communication send(v, senders, channel=\"v\", to=senders)
        }}"
    );
    let trainer = format!(
        "block 0 {{
            data x: float32[{WIDTH}]
            temporary w: float32[{WIDTH}]
            temporary v: float32[{WIDTH}]
            communication w = recv(channel=\"w\")
            communication v = recv(channel=\"v\")
            forward g = mul(w, x)
            forward h = scale(x, factor=2.0)
            communication send(g, channel=\"g\", to=server:0)
            communication send(h, channel=\"h\", to=server:0)
        }}"
    );
    vec![
        part(vec![ProgramPeer::Trainer(0), ProgramPeer::Trainer(1)], &trainer),
        part(vec![ProgramPeer::Server(0)], &server),
    ]
}

fn data(trainer: u32, step: u64) -> Vec<f32> {
    let number = |at: usize| ((at as u64 * 7 + step * 13 + u64::from(trainer) * 5) % 11) as f32 / 16.0 - 0.25;
    (0..WIDTH).map(number).collect()
}

/// The value of the parameter of the flow, whose gradients have sums without a rounding.
fn expected_of_flow(steps: u64) -> Vec<f32> {
    let mut v = vec![0.0_f32; WIDTH];
    for step in 0..steps {
        for gradient in [data(0, step), data(1, step)] {
            v.iter_mut().zip(gradient).for_each(|(v, x)| *v -= 2.0 * x);
        }
    }
    v
}

/// The values that the pairs give in one process.
fn expected(steps: u64) -> Vec<f32> {
    let (mut w, mut speed) = (vec![1.0_f32; WIDTH], vec![0.0_f32; WIDTH]);
    for step in 0..steps {
        let [one, other] = [0, 1].map(|trainer| data(trainer, step));
        for at in 0..WIDTH {
            let both = w[at] * one[at] + w[at] * other[at];
            speed[at] = speed[at] * 0.5 + both;
            w[at] += speed[at] * -0.25;
        }
    }
    w
}

fn step(own: &mut Trainer<'_>, trainer: u32) {
    let step = own.steps_ended().expect("the server hosts a program");
    let x = Tensor::new([WIDTH as u64], Elements::Float32(data(trainer, step)));
    own.feed("x", x).expect("it fits");
    own.step().expect("a step succeeds");
}

fn value(own: &Trainer<'_>, name: &str) -> Vec<f32> {
    match own.fetch(name).expect("it is there").elements() {
        Elements::Float32(values) => values.clone(),
        _ => panic!("it is of float32"),
    }
}

/// The value of a parameter on the servers.
fn pulled(address: &Address, name: &str, elements: usize) -> Vec<f32> {
    let mut found = vec![0.0_f32; elements];
    let place = DestinationSlice::new(name, bytemuck::cast_slice_mut(&mut found));
    reader(address).pull(&mut [place]).expect("it is there");
    found
}

#[test]
fn a_server_takes_gradients_out_of_a_queue_in_pairs() {
    let running = Local::start(&Job { chunk_bytes: 4096, ..Job::new(1, 2) }.with("--merge", "sum"));
    let parts = pairs();
    std::thread::scope(|scope| {
        for trainer in 0..2 {
            let (address, parts) = (running.coordinator(), &parts);
            scope.spawn(move || {
                let client = client(&address, trainer);
                initialise(&client, parts).expect("it is initialised");
                let mut own = Trainer::new(&client, parts).expect("the part can run");
                (0..STEPS).for_each(|_| step(&mut own, trainer));
                client.leave().expect("it leaves");
                assert!(value(&own, "w") == expected(STEPS), "trainer {trainer} found other values");
                assert!(value(&own, "v") == expected_of_flow(STEPS), "trainer {trainer} found other sums");
            });
        }
    });
    running.stop();
}

/// Kills of servers in a test.
const KILLS: usize = 8;
/// The time that a call waits for an absent server.
const SHORT: Duration = Duration::from_millis(200);

/// Trains until all steps are ended: a process whose call fails repeats it, or ends, and another one of its rank goes
/// on. Returns the processes.
fn train_through_kills(address: &Address, trainer: u32, parts: &[ProgramPart], seed: u64) -> u32 {
    let mut prng = SeededPrng::new(seed + u64::from(trainer));
    let mut processes = 0;
    loop {
        processes += 1;
        assert!(processes < 200, "trainer {trainer} makes no progress");
        let client = client_with(address, trainer, SHORT);
        if initialise(&client, parts).is_err() {
            continue;
        }
        let Ok(mut own) = Trainer::new(&client, parts) else { continue };
        loop {
            let ended = own.steps_ended().expect("the server hosts a program");
            if ended == STEPS && client.leave().is_ok() {
                return processes;
            }
            let x = Tensor::new([WIDTH as u64], Elements::Float32(data(trainer, ended)));
            let is_fed = own.feed("x", x).is_ok();
            if trainer == 0 && prng.below(4) == 0 {
                let _ = client.checkpoint();
            }
            let is_made = ended == STEPS || own.step().is_ok();
            if !is_made && !is_fed && prng.below(2) == 0 || prng.below(6) == 0 {
                break;
            }
        }
    }
}

#[test]
fn a_hosted_program_survives_kills_of_servers_and_trainers() {
    let mut prng = SeededPrng::of("a_hosted_program_survives_kills_of_servers_and_trainers");
    let folder = folder();
    let job = Job { chunk_bytes: 4096, ..Job::new(1, 2) }.with_checkpoints(folder.path()).with("--journal", "on");
    let job = job.with("--merge", "sum");
    let mut servers = Processes::start(job);
    let (address, parts, seed) = (servers.coordinator(), pairs(), prng.next() >> 1);
    let left = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for trainer in 0..2 {
            let (address, parts, left) = (&address, &parts, &left);
            scope.spawn(move || {
                let processes = train_through_kills(address, trainer, parts, seed);
                println!("trainer {trainer}: {processes} processes");
                left.fetch_add(1, Ordering::SeqCst);
            });
        }
        for _ in 0..KILLS {
            // tidy: allow sleep: the moment of a kill is random
            std::thread::sleep(Duration::from_millis(prng.below(300) as u64));
            servers.kill(0);
            // tidy: allow sleep: calls fail in the longer half of the absences
            std::thread::sleep(Duration::from_millis(prng.below(400) as u64));
            servers.start_again(0);
        }
    });
    assert_eq!(left.load(Ordering::SeqCst), 2);
    servers.kill(0);
    servers.start_again(0);
    for (name, expected) in [("w", expected(STEPS)), ("v", expected_of_flow(STEPS))] {
        assert!(pulled(&address, name, WIDTH) == expected, "{name} has another value");
    }
    servers.terminate();
}

/// A gradient is the trainer's own row: element `t` of the weight counts the gradients of trainer `t`.
fn counting() -> Vec<ProgramPart> {
    let text = "block 0 {
        data x: float32[4]
        parameter w: float32[4]
        initialise w = fill(value=0.0)
        forward product = mul(x, w)
        forward loss = reduce_sum(product)
    }";
    let program = trainable(text.parse().expect("a program"), "loss", Some("const_lr { learning_rate: 1.0 }"));
    let late = LateGradients::NextRound;
    let transpiler = ParameterServer { merge: Merge::Sum, backup_trainers: 1, late, ..ParameterServer::default() };
    let cluster = Cluster { trainers: 4, servers: 1 };
    transpiler.transpile(&program.expect("it has gradients"), cluster, &CostModel::default()).expect("it divides")
}

#[test]
fn late_gradients_count_in_the_next_round_each_once() {
    let folder = folder();
    let parts = counting();
    let way = &explain(&parts, None).expect("servers run it")[0].way;
    assert!(matches!(way, PartWay::Executor(why) if why.contains("late gradients")), "{way:?}");
    let job = Job::new(1, 4).with("--merge", "sum").with_checkpoints(folder.path()).with("--journal", "on");
    let mut servers = Processes::start(job);
    let address = &servers.coordinator();
    let (half, over) = (&Barrier::new(3), &Barrier::new(2));
    std::thread::scope(|scope| {
        for trainer in 0..4 {
            let parts = &parts;
            scope.spawn(move || {
                let client = client(address, trainer);
                initialise(&client, parts).expect("it is initialised");
                let mut own = Trainer::new(&client, parts).expect("the part can run");
                let mut row = vec![0.0; 4];
                row[trainer as usize] = 1.0;
                for step in 0..STEPS {
                    // The last one stands still while the others make half of their steps.
                    match (trainer, step) {
                        (3, 1) => {
                            half.wait();
                            over.wait();
                        }
                        (0, step) if step == STEPS / 2 => {
                            half.wait();
                        }
                        _ => {}
                    }
                    own.feed("x", Tensor::new([4], Elements::Float32(row.clone()))).expect("it fits");
                    own.step().expect("a step succeeds");
                }
                client.leave().expect("it leaves");
            });
        }
        half.wait();
        servers.kill(0);
        servers.start_again(0);
        over.wait();
    });
    assert_eq!(pulled(address, "w", 4), [-(STEPS as f32); 4], "each gradient counts once");
    servers.terminate();
}

/// A server that looks up rows of a table, and keeps the last, beside a parameter that a flow carries out.
fn looking_up() -> Vec<ProgramPart> {
    let server = "block 0 {
            parameter w: float32[4, 2]
            state last: float32[1, 2]
            parameter v: float32[2]
            state v@count: int64[]
            initialise w = fill(value=1.0)
            initialise last = fill(value=0.0)
            initialise v = fill(value=0.0)
            initialise v@count = fill(value=0.0)
            communication send(v, channel=\"v\", to=trainer:0)
            communication loop_forever(block=1)
            communication loop_forever(block=2)
        }
        block 1 in 0 {
            temporary ids: int64[1]
            communication ids = recv(channel=\"ids\")
            optimize row = lookup_table(w, ids)
            optimize last = scale(row, factor=1.0)
        }
        block 2 in 0 {
            temporary piece: float32[2]
            communication piece, sender = recv(channel=\"g\")
            communication merged = gradient_accumulator(piece, sender, count=1, merge=sum, staleness=0)
            communication senders = string_accumulator(sender, count=1)
            optimize v, v@count = update(v, merged, v@count, config=\"const_lr { learning_rate: 1 }\")
            communication send(v, senders, channel=\"v\", to=senders)
        }";
    let trainer = "block 0 {
            data x: float32[2]
            data row: int64[1]
            temporary v: float32[2]
            communication v = recv(channel=\"v\")
            forward g = scale(x, factor=1.0)
            forward ids = slice(row, axis=0, start=0, end=1)
            communication send(g, channel=\"g\", to=server:0)
            communication send(ids, channel=\"ids\", to=server:0)
        }";
    vec![part(vec![ProgramPeer::Trainer(0)], trainer), part(vec![ProgramPeer::Server(0)], server)]
}

#[test]
fn a_step_that_a_stopped_program_refuses_is_repeated_and_counts_once_where_a_flow_has_it() {
    let folder = folder();
    let job = Job::new(1, 1).with("--merge", "sum").with_checkpoints(folder.path()).with("--journal", "on");
    let mut servers = Processes::start(job);
    let (address, parts) = (servers.coordinator(), looking_up());
    let client = client(&address, 0);
    initialise(&client, &parts).expect("it is initialised");
    let mut own = Trainer::new(&client, &parts).expect("the part can run");
    let feed = |own: &mut Trainer<'_>, row: i64| {
        own.feed("x", Tensor::new([2], Elements::Float32(vec![1.0; 2]))).expect("it fits");
        own.feed("row", Tensor::new([1], Elements::Int64(vec![row]))).expect("it fits");
    };
    feed(&mut own, 3);
    own.step().expect("the table has the row");
    feed(&mut own, 4);
    for kills in [0, 0, 1] {
        (0..kills).for_each(|_| servers.kill(0));
        (0..kills).for_each(|_| servers.start_again(0));
        let refused = own.step().expect_err("the table has no such row").to_string();
        assert!(refused.contains("has stopped") && refused.contains("lookup_table"), "{refused}");
        assert_eq!(value(&own, "v"), [-2.0; 2]);
        let checkpoint = client.checkpoint();
        assert!(checkpoint.is_ok(), "{checkpoint:?}");
    }
    drop(own);
    servers.terminate();
}
