//! Microbenchmarks of the parts of a shard and of a client.
//!
//! In tests every line runs once, at the small one of its sizes: there it is only to run.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pserver_bench::{Fused, LocalJob, Ping, catalogue, gradient, is_measured};
use pserver_core::checksum::checksum;
use pserver_core::config::{Merge, Mode, ParameterConfig};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::ids::{
    ChunkId, ChunkIndex, Epoch, Generation, Incarnation, ParameterIndex, PeerId, Round, Term, TrainerId, Version,
};
use pserver_core::optim::{Algorithm, Gradient, Prepared, Rule, Step};
use pserver_core::partition::{Declaration, DeclarationMessage, Name};
use pserver_core::port::{Event, Kernels, ReceiveBuffers, Submit, Update};
use pserver_core::rows::{Height, RowLayout, RowMerge, SelectedRows};
use pserver_core::server::{NonFinite, ServerOutput, Shard, ShardOptions};
use pserver_core::time::Now;
use pserver_core::wire::{
    Entry, FinishMessage, Flags, Frame, HEADER_BYTES, Head, HelloMessage, InitMessage, JobMessage, Kind, Prefix,
};
use pserver_kernels::cpu::{self, Cpu};

/// A size as it is measured, or as it only runs.
fn size<T>(measured: T, small: T) -> T {
    if is_measured() { measured } else { small }
}

/// Bytes of a chunk.
fn chunk() -> usize {
    size(pserver_bench::CHUNK, 4096)
}

fn partition(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("partition");
    let declared = size(10_000, 100);
    group.bench_function("declare 10,000 parameters of 1 KiB", |bencher| {
        bencher.iter(|| catalogue(black_box(declared), 1024).expect("within every bound").len());
    });
    for (what, count, bytes) in [("100,000", 100_000, 1024), ("1,000,000", 1_000_000, 64)] {
        let count = size(count, 1_000);
        let all = catalogue(count, bytes).expect("within every bound");
        let name = format!("layer{}/weight", count / 9 * 7);
        assert!(all.find(&name).is_some(), "{name} is one of {count}");
        group.bench_function(format!("find one of {what}"), |bencher| bencher.iter(|| all.find(black_box(&name))));
    }
    let big = catalogue(1, 3 << 30).expect("within every bound");
    let parameter = big.parameter(ParameterIndex(0)).expect("it was declared");
    group.bench_function("place of a chunk", |bencher| {
        bencher.iter(|| parameter.shard_of(black_box(ChunkIndex(1234))));
    });
    group.finish();
}

fn wire(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("wire");
    let entries = (0..size(1000, 10)).map(|index| {
        let id = ChunkId { parameter: ParameterIndex(index), chunk: ChunkIndex(0) };
        Entry { bytes: 1024, ..Entry::bare(id, Round(1), ElementType::Float32) }
    });
    let frame = Frame { entries: entries.collect(), ..Frame::bare(Head::new(Kind::Push)) };
    group.bench_function("encode 1,000 entries", |bencher| bencher.iter(|| black_box(&frame).encode().len()));
    let bytes = frame.encode();
    group.bench_function("decode 1,000 entries", |bencher| {
        bencher.iter(|| {
            let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>().expect("it is a frame");
            let prefix = Prefix::decode(header).expect("its checksum holds");
            prefix.finish(rest).expect("its checksum holds").entries.len()
        });
    });
    let payload = gradient(0, chunk());
    group.throughput(Throughput::Bytes(chunk() as u64));
    group.bench_function("checksum of a chunk", |bencher| bencher.iter(|| checksum(black_box(&payload))));
    group.finish();
}

fn sums(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sum");
    let payloads: Vec<Vec<u8>> = (0..8).map(|trainer| gradient(trainer, chunk())).collect();
    let mut into = vec![0; chunk()];
    for count in [2, 8] {
        let gradients: Vec<Gradient<'_>> =
            payloads[..count].iter().map(|bytes| Gradient { bytes, element_type: ElementType::Float32 }).collect();
        group.throughput(Throughput::Bytes((count * chunk()) as u64));
        group.bench_function(format!("{count} gradients of a chunk"), |bencher| {
            bencher.iter(|| cpu::sum(ElementType::Float32, black_box(&mut into), &gradients));
        });
    }
    group.finish();
}

fn updates(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update");
    group.throughput(Throughput::Elements((chunk() / 4) as u64));
    let payload = gradient(1, chunk());
    let (beta1, beta2, epsilon) = (0.9, 0.999, 1e-8);
    let algorithms = [
        ("add", Algorithm::Add),
        ("sum", Algorithm::Sum),
        ("sgd", Algorithm::Sgd),
        ("momentum", Algorithm::Momentum { momentum: 0.9, nesterov: false }),
        ("Nesterov", Algorithm::Momentum { momentum: 0.9, nesterov: true }),
        ("Adagrad", Algorithm::Adagrad { epsilon: 1e-6 }),
        ("Adadelta", Algorithm::Adadelta { rho: 0.95, epsilon: 1e-6 }),
        ("RMSProp", Algorithm::RmsProp { rho: 0.9, epsilon, momentum: 0.9 }),
        ("Adam", Algorithm::Adam { beta1, beta2, epsilon }),
        ("AdamW", Algorithm::AdamW { beta1, beta2, epsilon }),
        ("FTRL", Algorithm::Ftrl { learning_rate_power: -0.5, beta: 1.0 }),
        ("a user's Lion", Fused::Lion.rule().expect("its text is right").algorithm),
    ];
    for (name, algorithm) in algorithms {
        let rule = Rule { algorithm, ..Rule::default() };
        let step = Step { version: Version(3), rate: Some(0.01), ..Step::FIRST };
        let prepared = Prepared::new(rule.clone()).expect("it is a rule");
        let mut kernels = Cpu::new();
        let mut scalars = Vec::new();
        let mut parameter = gradient(0, chunk());
        let mut states = vec![vec![0; chunk()]; rule.states().len()];
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut states: Vec<&mut [u8]> = states.iter_mut().map(Vec::as_mut_slice).collect();
                kernels.update(Update {
                    formula: prepared.formula(&step, &mut scalars),
                    element_type: ElementType::Float32,
                    parameter: black_box(&mut parameter),
                    states: &mut states,
                    gradients: &[Gradient { bytes: &payload, element_type: ElementType::Float32 }],
                });
            });
        });
    }
    group.finish();
}

/// Values as halves, from the cache and from memory, beside a copy of what is read and written.
fn halves(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("halves");
    for (what, bytes) in [("a chunk", chunk()), ("128 MiB", size(128 << 20, 4096))] {
        let value = gradient(0, bytes);
        let mut into = vec![0; bytes / 2];
        // As many bytes move: three quarters are read, and as many written.
        let mut copied = vec![0; bytes / 4 * 3];
        group.throughput(Throughput::Bytes((bytes / 2 * 3) as u64));
        for half in Half::ALL {
            group.bench_function(format!("{what} as {half}"), |bencher| {
                bencher.iter(|| cpu::narrow_to_half(half, black_box(&value), black_box(&mut into)));
            });
        }
        group.bench_function(format!("copy of as many bytes as {what}"), |bencher| {
            bencher.iter(|| black_box(&mut copied).copy_from_slice(black_box(&value[..bytes / 4 * 3])));
        });
    }
    group.finish();
}

fn rows(criterion: &mut Criterion) {
    let count: u64 = size(16 * 1024, 128);
    let mut group = criterion.benchmark_group("SelectedRows");
    let layout = RowLayout::new(ElementType::Float32, 64, Height::Unbounded).expect("a row of 256 bytes");
    // Few ids often and many seldom: products of numbers that are even.
    let id = |row: u64| {
        let even = row.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (even >> 54) * (even >> 43 & 0x7ff)
    };
    let contributions: Vec<SelectedRows> = (0..4)
        .map(|trainer| {
            let ids: Vec<u64> = (0..count).map(|row| id(u64::from(trainer) * count + row)).collect();
            SelectedRows::new(layout, &ids, &gradient(trainer, ids.len() * 256)).expect("a row for each id")
        })
        .collect();
    let views: Vec<_> = contributions.iter().map(SelectedRows::view).collect();
    let mut merge = RowMerge::default();
    group.throughput(Throughput::Elements(4 * count));
    group.bench_function("merge, the order of 4 times 16,384 rows", |bencher| {
        bencher.iter(|| merge.unite(layout, black_box(&views)).expect("they fit").len());
    });
    let merged = merge.unite(layout, &views).expect("they fit");
    let mut sums = vec![0; merged.len() * 256];
    group.bench_function("merge, the sums of 4 times 16,384 rows of 64", |bencher| {
        bencher.iter(|| merged.sum(0..merged.len(), black_box(&mut sums)));
    });
    group.finish();
}

fn rounds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round");
    let mut ping = Ping::new().expect("a new hub has room");
    group.bench_function("loopback, a frame of 4 KiB there and back", |bencher| bencher.iter(|| ping.round()));
    for (what, parameters, bytes) in [("4 KiB", 1, 4096), ("10,000 parameters of 1 KiB", size(10_000, 50), 1024)] {
        let mut job = LocalJob::start(parameters, bytes).expect("this machine has sockets");
        group.bench_function(format!("tcp, push_pull of {what}"), |bencher| bencher.iter(|| job.round()));
    }
    group.finish();
}

/// A shard without a transport: what the server's program costs for each of many small chunks.
struct Alone {
    shard: Shard,
    frame: Frame,
    out: Vec<ServerOutput>,
}

impl Alone {
    const PEER: PeerId = PeerId(1);
    const CHUNK_BYTES: u32 = 1024;

    fn new(chunks: u32, mode: Mode) -> Self {
        let options = ShardOptions {
            memory_limit: None,
            term: Term(0),
            epoch: Epoch(1),
            round_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(2),
            shares_memory: false,
            receives: 1,
            nonfinite: NonFinite::Refuse,
            compile: pserver_program::server_flow::compile,
            load: pserver_core::port::no_programs,
        };
        let head = Head {
            epoch: Epoch(1),
            trainer: TrainerId(0),
            incarnation: Incarnation(1),
            generation: Generation(1),
            flags: Flags::WANT_VALUE,
            ..Head::new(Kind::Push)
        };
        let id = |index| ChunkId { parameter: ParameterIndex(index), chunk: ChunkIndex(0) };
        let entry =
            |index| Entry { bytes: Self::CHUNK_BYTES, ..Entry::bare(id(index), Round(0), ElementType::Float32) };
        let frame = Frame { entries: (0..chunks).map(entry).collect(), ..Frame::bare(head) };
        let mut alone = Self { shard: Shard::new(options, Box::new(Cpu::new())), frame, out: Vec::new() };
        alone.event(Event::Accepted { peer: Self::PEER, origin: "the bench".into(), transport: String::new() });
        alone.send(Frame::with_control(Head { kind: Kind::Hello, ..head }, &HelloMessage::default()));
        for index in 0..chunks {
            let message = InitMessage {
                parameter: index,
                declaration: Some(DeclarationMessage::from(&declaration(index, Self::CHUNK_BYTES))),
                chunk_bytes: 4096,
            };
            let init = Frame::with_control(Head { kind: Kind::Init, ..head }, &message);
            alone.send(Frame { entries: vec![entry(index)].into(), ..init });
        }
        let (mode, staleness) = mode.numbers();
        let merge = Merge::Mean.number();
        let job = Some(JobMessage { mode, staleness, merge, trainers: 1, chunk_bytes: 4096 });
        let message = FinishMessage { chunks: chunks.into(), job };
        alone.send(Frame::with_control(Head { kind: Kind::Finish, ..head }, &message));
        assert_eq!(alone.shard.generation(), Generation(1), "the shard serves");
        alone
    }

    /// Delivers a frame, and lets the transport give everything back.
    fn send(&mut self, frame: Frame) {
        let body = if frame.entries.is_empty() {
            ReceiveBuffers::new()
        } else {
            self.shard.handle(Now(1), Event::Head { peer: Self::PEER, frame: frame.clone() }, &mut self.out);
            match self.out.pop() {
                Some(ServerOutput::Submit(Submit::PostReceive { into, .. })) => into,
                _ => panic!("the answer to a head is where its payloads go"),
            }
        };
        self.event(Event::Received { peer: Self::PEER, frame, body });
    }

    fn event(&mut self, event: Event) {
        self.shard.handle(Now(1), event, &mut self.out);
        self.out.clear();
    }

    /// One round of every chunk.
    fn round(&mut self) {
        self.frame.head.sequence.0 += 1;
        self.frame.entries.iter_mut().for_each(|entry| entry.round.0 += 1);
        self.send(self.frame.clone());
    }
}

fn sgd() -> Rule {
    Rule { algorithm: Algorithm::Sgd, ..Rule::default() }
}

fn declaration(index: u32, bytes: u32) -> Declaration {
    let rule = sgd();
    Declaration {
        name: Name::new(format!("layer{index}").as_bytes()).expect("it is a name"),
        element_type: ElementType::Float32,
        bytes: bytes.into(),
        shape: vec![u64::from(bytes) / 4],
        whole: false,
        buckets: None,
        owner: None,
        sender: None,
        total_part: None,
        hosted: None,
        config: ParameterConfig::of(rule).encode(),
    }
}

fn shard(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("shard");
    for mode in [Mode::Sync, Mode::Async] {
        for (what, chunks) in [(100, size(100, 8)), (4_000, size(4_000, 32))] {
            group.throughput(Throughput::Elements(chunks.into()));
            let mut alone = Alone::new(chunks, mode);
            group.bench_function(format!("round of {what} chunks of 1 KiB, {mode:?}"), |bencher| {
                bencher.iter(|| alone.round());
            });
        }
    }
    group.finish();
}

criterion_group!(benches, partition, wire, sums, updates, halves, rows, rounds, shard);
criterion_main!(benches);
