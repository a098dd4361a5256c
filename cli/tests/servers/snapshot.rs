//! One shard without a server around it: a checkpoint that is taken while rounds close and the restart after it, and
//! a trainer that dies in the middle of a push.

use std::sync::Arc;
use std::time::Duration;

use pserver_core::checkpoint::storage::InMemory;
use pserver_core::checkpoint::{Folder, Storage};
use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::{
    ChunkId, ChunkIndex, Epoch, Generation, Incarnation, ParameterIndex, PeerId, Round, Sequence, Term, Ticket,
    TrainerId,
};
use pserver_core::partition::{Declaration, DeclarationMessage, Name};
use pserver_core::port::{Event, ReceiveBuffers, Submit};
use pserver_core::server::{JournalOptions, NonFinite, ServerOutput, Shard, ShardOptions};
use pserver_core::time::Now;
use pserver_core::wire::{
    Entry, FinishMessage, Frame, Head, HelloMessage, InitMessage, JobMessage, Kind, PushMessage, Role,
};
use pserver_kernels::cpu::Cpu;

const FIRST: TestTrainer = TestTrainer { trainer: 0, incarnation: 1 };
const CHUNK_BYTES: u32 = 4096;
const CHUNKS: u64 = 3;

/// A shard, and the answers to its trainers.
struct World {
    shard: Shard,
    folder: Folder,
    requests: u64,
    /// The chunks of pushes that were acknowledged.
    acknowledged: usize,
}

/// A simulated trainer process: its rank and its incarnation.
#[derive(Clone, Copy)]
struct TestTrainer {
    trainer: u32,
    incarnation: u32,
}

impl TestTrainer {
    fn peer(self) -> PeerId {
        PeerId(u64::from(self.trainer) * 16 + u64::from(self.incarnation))
    }
}

impl World {
    /// A shard restored from `storage`, and the connection of the first trainer.
    fn restored(storage: &Arc<dyn Storage>) -> Self {
        let options = ShardOptions {
            term: Term(0),
            memory_limit: None,
            epoch: Epoch(1),
            round_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(2),
            shares_memory: false,
            receives: 1,
            nonfinite: NonFinite::Refuse,
            compile: pserver_program::server_flow::compile,
            load: pserver_core::port::no_programs,
        };
        let mut shard = Shard::new(options, Box::new(Cpu::new()));
        let folder = Folder::claim_alone(Arc::clone(storage), Epoch(1)).expect("memory takes it");
        let options = JournalOptions { is_on: true, ..JournalOptions::default() };
        shard.restore(&folder, options).expect("what was written can be read");
        let mut world = Self { shard, folder, requests: 0, acknowledged: 0 };
        world.connect(FIRST);
        world
    }

    fn connect(&mut self, sender: TestTrainer) {
        let accepted = Event::Accepted { peer: sender.peer(), origin: "a test".to_owned(), transport: String::new() };
        self.shard.handle(Now(0), accepted, &mut Vec::new());
        let hello = HelloMessage {
            role: Role::Trainer.into(),
            host: String::new(),
            process: 0,
            absence_millis: None,
            run: 0,
            run_trainers: 0,
        };
        self.send(sender, Frame::with_control(Head::new(Kind::Hello), &hello), &[]);
    }

    /// Delivers a frame of a trainer to the shard, which must not refuse the frame.
    fn send(&mut self, sender: TestTrainer, mut frame: Frame, payload: &[&[u8]]) {
        let peer = sender.peer();
        self.requests += 1;
        frame.head = Head {
            epoch: Epoch(1),
            trainer: TrainerId(sender.trainer),
            incarnation: Incarnation(sender.incarnation),
            generation: Generation(1),
            request: Ticket(self.requests),
            ..frame.head
        };
        let mut out = Vec::new();
        let mut body = ReceiveBuffers::new();
        if !payload.is_empty() {
            self.shard.handle(Now(0), Event::Head { peer, frame: frame.clone() }, &mut out);
            let Some(ServerOutput::Submit(Submit::PostReceive { into, .. })) = out.pop() else {
                panic!("a payload has a place")
            };
            body = into;
        }
        for (place, bytes) in body.iter_mut().zip(payload) {
            place.bytes_mut().copy_from_slice(bytes);
        }
        self.shard.handle(Now(0), Event::Received { peer, frame, body }, &mut out);
        for output in out {
            if let ServerOutput::Submit(Submit::Send { frame, .. }) = output {
                let text = String::from_utf8_lossy(&frame.control);
                assert!(!matches!(frame.head.kind, Kind::Error | Kind::Refused), "refused: {text}");
                self.acknowledged += if frame.head.kind == Kind::Done { frame.entries.len() } else { 0 };
            }
        }
    }

    fn initialise(&mut self, optimizer: &str, mode: u32, trainers: u32) {
        let rule = OptimizerSettings::from_text(optimizer).expect("it is an optimizer").rule.expect("it has a rule");
        let declaration = Declaration {
            name: Name::new(b"weights").expect("it is a name"),
            element_type: Float32,
            bytes: CHUNKS * u64::from(CHUNK_BYTES),
            shape: vec![CHUNKS * u64::from(CHUNK_BYTES) / 4],
            whole: !rule.is_element_wise(),
            config: ParameterConfig::of(rule).encode(),
            buckets: None,
            owner: None,
            sender: None,
            total_part: None,
            hosted: None,
        };
        let declaration = Some(DeclarationMessage::from(&declaration));
        let message = InitMessage { parameter: 0, declaration, chunk_bytes: CHUNK_BYTES };
        for chunk in 0..CHUNKS {
            let value = chunk_of(chunk, 0);
            let mut frame = Frame::with_control(Head::new(Kind::Init), &message);
            frame.entries.push(Entry::with_payload(id(chunk), Round(0), Float32, &value));
            self.send(FIRST, frame, &[&value]);
        }
        let job = JobMessage { mode, staleness: 0, merge: 0, trainers, chunk_bytes: CHUNK_BYTES };
        let message = FinishMessage { chunks: CHUNKS, job: Some(job) };
        self.send(FIRST, Frame::with_control(Head::new(Kind::Finish), &message), &[]);
        self.acknowledged = 0;
    }

    /// Pushes the gradients of the first so many chunks.
    fn push(&mut self, sender: TestTrainer, round: u64, chunks: u64) {
        let gradients: Vec<Vec<u8>> = (0..chunks).map(|chunk| chunk_of(chunk, round)).collect();
        let head = Head { sequence: Sequence(round), ..Head::new(Kind::Push) };
        let mut frame = Frame::with_control(head, &PushMessage::default());
        let entry = |(chunk, bytes)| Entry::with_payload(id(chunk), Round(round), Float32, bytes);
        frame.entries = (0..).zip(gradients.iter().map(Vec::as_slice)).map(entry).collect();
        let payload: Vec<&[u8]> = gradients.iter().map(Vec::as_slice).collect();
        self.send(sender, frame, &payload);
    }

    /// Versions, values and states.
    fn contents(&self) -> Vec<(u64, Vec<u8>, Vec<Vec<u8>>)> {
        let mut contents = Vec::new();
        self.shard.visit(&mut |_, version, value, states| {
            contents.push((version.0, value.to_vec(), states.iter().map(|state| state.to_vec()).collect()));
        });
        contents
    }
}

fn id(chunk: u64) -> ChunkId {
    ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(chunk) }
}

fn chunk_of(chunk: u64, round: u64) -> Vec<u8> {
    let number =
        |element: u32| f64::from(element).mul_add(0.37, f64::from(u32::try_from(chunk + 7 * round).expect("few")));
    #[expect(clippy::cast_possible_truncation, reason = "any number will do")]
    (0..CHUNK_BYTES / 4).flat_map(|element| (number(element).sin() as f32).to_le_bytes()).collect()
}

/// A round closes after a checkpoint has written so many bytes; a shard that restarts from it has the values of an
/// undisturbed shard.
fn check(optimizer: &str, bytes_before_the_round: u64) {
    let memory = InMemory::new();
    let storage: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut world = World::restored(&storage);
    world.initialise(optimizer, 0, 1);
    world.push(FIRST, 1, CHUNKS);
    assert!(world.shard.begin_checkpoint(&world.folder, 1).expect("memory takes it"));
    let early = world.shard.continue_checkpoint(bytes_before_the_round).expect("memory takes it");
    world.push(FIRST, 2, CHUNKS);
    let late = || world.shard.continue_checkpoint(u64::MAX).expect("memory takes it");
    early.or_else(late).expect("all is written").finish().expect("memory takes it");

    let copy: Arc<dyn Storage> = Arc::new(memory.copy());
    let mut again = World::restored(&copy);
    assert!(again.contents() == world.contents(), "{optimizer}: as it was, {bytes_before_the_round} bytes in");
    for round in 3..5 {
        world.push(FIRST, round, CHUNKS);
        again.push(FIRST, round, CHUNKS);
        assert!(again.contents() == world.contents(), "{optimizer}: round {round}, {bytes_before_the_round} bytes in");
    }
}

#[test]
fn a_round_that_closes_in_the_middle_of_a_checkpoint_survives_a_restart() {
    for optimizer in ["optimizer: Adam adam { }", "optimizer: Adam adam { } clip_norm: 0.5"] {
        for chunks in 0..=CHUNKS {
            // Adam has two states beside each value.
            check(optimizer, 1 + chunks * 3 * u64::from(CHUNK_BYTES));
        }
    }
}

/// A trainer sends a part of a gradient of a grouped update, and dies or leaves. The partial gradient does not block
/// other trainers, and is not mixed with later gradients.
fn check_unfinished_push(end: impl Fn(&mut World)) {
    let clipped = "optimizer: Adam adam { } clip_norm: 0.5";
    let start = || {
        let mut world = World::restored(&(Arc::new(InMemory::new()) as Arc<dyn Storage>));
        // Every gradient is a round of its own.
        world.initialise(clipped, 1, 2);
        world
    };
    let (other, successor) = (TestTrainer { trainer: 1, incarnation: 1 }, TestTrainer { trainer: 0, incarnation: 2 });
    let mut expected = start();
    expected.connect(other);
    expected.push(other, 7, CHUNKS);
    expected.connect(successor);
    expected.push(successor, 9, CHUNKS);

    let mut world = start();
    world.connect(other);
    world.push(FIRST, 1, 1);
    world.push(other, 7, CHUNKS);
    end(&mut world);
    world.connect(successor);
    world.push(successor, 9, CHUNKS);
    assert!(world.contents() == expected.contents(), "what was not finished is not in the value");
    assert_eq!(world.acknowledged, expected.acknowledged + 1, "nobody waits any more");
}

#[test]
fn an_unfinished_push_does_not_block_a_checkpoint_or_other_trainers() {
    check_unfinished_push(|_| {});
    check_unfinished_push(|world| world.send(FIRST, Frame::bare(Head::new(Kind::Leave)), &[]));
}
