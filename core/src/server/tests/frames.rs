//! Frames of many chunks: each chunk has the result that it would have in a frame of its own.

use prost::Message;

use super::script::Script;
use super::stage::{Answer, Parcel, Plan, Stage, id};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Int64};
use crate::ids::{ChunkId, Round, Term, Version};
use crate::memory::Lease;
use crate::prng::Prng;
use crate::server::shard::Phase;
use crate::wire::{ErrorCode, ErrorMessage, Frame, Head, HelloMessage, Kind};

const SGD: &str = "optimizer: SGD";
const TRAINERS: u32 = 2;

/// Chunks of three programs, and a parameter whose chunks are updated together.
fn plan(mode: Mode) -> Plan {
    Plan::new(mode, Merge::Mean, TRAINERS)
        .with("many", Float32, 40 * 1024 - 3, SGD)
        .with("states", Float32, 5 * 1024, "optimizer: Adam adam {}")
        .with("counts", Int64, 700, "algorithm: \"add\"")
        .with("clipped", Float32, 3 * 1024, "sgd { momentum: 0.5 } clip_norm: 3")
}

/// Whether a trainer's next gradient of a chunk is accepted, or waits at most one round ahead.
fn is_allowed(mode: Mode, own: u64, fewest: u64) -> bool {
    match mode {
        Mode::Sync => own < fewest + 2,
        Mode::Staleness { bound } => own <= fewest + u64::from(bound),
        Mode::Async | Mode::Delta => true,
    }
}

/// Some chunks in some order, sometimes one of them twice; of a parameter whose chunks step together all or none.
fn chosen(prng: &mut Prng, chunks: &[ChunkId]) -> Vec<ChunkId> {
    let (odds, takes_clipped) = (1 + prng.index(4), prng.index(2) == 0);
    let is_taken = |prng: &mut Prng, one: &ChunkId| match one.parameter.0 {
        3 => takes_clipped,
        _ => prng.index(odds) == 0,
    };
    let mut some: Vec<ChunkId> = chunks.iter().filter(|one| is_taken(prng, one)).copied().collect();
    for at in (1..some.len()).rev() {
        some.swap(at, prng.index(at + 1));
    }
    if !some.is_empty() && prng.index(3) == 0 {
        let twice = some[prng.index(some.len())];
        some.insert(prng.index(some.len()), twice);
    }
    some
}

/// The answers by connection and chunk, independent of frames; a value with its bytes.
fn answered(answers: &[Answer]) -> Vec<(u64, u8, ChunkId, Round, Vec<u8>)> {
    let mut by_chunk = Vec::new();
    for Answer { peer, frame, body } in answers {
        let mut body = body.iter();
        for entry in &frame.entries {
            let bytes = if entry.bytes > 0 { body.next().expect("it has a payload").clone() } else { Vec::new() };
            by_chunk.push((peer.0, frame.head.kind as u8, entry.id, entry.round, bytes));
        }
    }
    by_chunk.sort();
    by_chunk
}

fn check(mode: Mode, seed: u64) {
    let mut prng = Prng(seed);
    let mut stages = [Stage::serving(plan(mode)), Stage::serving(plan(mode))];
    let chunks = stages[0].plan.chunks();
    let ids: Vec<ChunkId> = chunks.iter().map(|(id, _)| *id).collect();
    let mut pushed = vec![[0_u64; TRAINERS as usize]; ids.len()];
    for _ in 0..12 {
        let trainer = prng.index(TRAINERS as usize);
        let slot_index = |one: &ChunkId| ids.iter().position(|id| id == one).expect("it is one of them");
        let may = |one: &ChunkId| {
            let counts = pushed[slot_index(one)];
            is_allowed(mode, counts[trainer], counts.into_iter().min().expect("there are trainers"))
        };
        let some: Vec<ChunkId> = chosen(&mut prng, &ids).into_iter().filter(may).collect();
        let wants_value = prng.index(2) == 0;
        let entry = |one: &ChunkId| {
            let at = slot_index(one);
            let element =
                if one.parameter.0 == 2 { 3_i64.to_le_bytes().to_vec() } else { 0.5_f32.to_le_bytes().to_vec() };
            let gradient = element.repeat(chunks[at].1 as usize / element.len());
            (*one, pushed[at][trainer] + 1, gradient)
        };
        let entries: Vec<(ChunkId, u64, Vec<u8>)> = some.iter().map(entry).collect();
        entries.iter().for_each(|(one, round, _)| pushed[slot_index(one)][trainer] = *round);
        let trainer = u32::try_from(trainer).expect("few");
        let [together, apart] = &mut stages;
        let parcel = together.push(trainer, entries.clone(), wants_value).with_halves();
        together.deliver(trainer, &parcel);
        let all = apart.push(trainer, entries, wants_value);
        for (entry, payload) in all.frame.entries.iter().zip(&all.body) {
            let alone = vec![(entry.id, entry.round.0, entry.element_type, payload.clone())];
            apart.deliver(trainer, &Parcel::new(all.frame.head, alone).with_halves());
        }
        assert_eq!(together.errors(), Vec::<String>::new(), "{mode:?} {seed}");
        assert!(together.contents() == apart.contents(), "{mode:?} {seed}: the chunks differ");
        assert!(answered(&together.answers) == answered(&apart.answers), "{mode:?} {seed}: the answers differ");
    }
}

/// Twelve random sequences of pushes in each mode. `PSERVER_SEED` replays them.
#[test]
fn a_frame_of_many_chunks_equals_one_frame_for_each_chunk() {
    let given = std::env::var("PSERVER_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 = given.unwrap_or(0x5eed_0016);
    println!("a_frame_of_many_chunks_equals_one_frame_for_each_chunk: PSERVER_SEED={seed}");
    for course in 0..12 {
        for mode in [Mode::Sync, Mode::Async, Mode::Delta, Mode::Staleness { bound: 2 }] {
            check(mode, seed + course);
        }
    }
}

/// The last gradients of a round answer all trainers, chunk by chunk. The answers to one of them are one frame.
#[test]
fn the_answers_to_each_trainer_share_a_frame() {
    let plan = Plan::new(Mode::Sync, Merge::Sum, 3)
        .with("v", Float32, 2, SGD)
        .with("w", Float32, 2, SGD)
        .with("x", Float32, 2, SGD);
    let script = "push+ 0 1 v=1 w=1 x=1 ->
                  push 1 1 v=1 w=1 x=1 -> 1 done v@1 w@1 x@1
                  pull 1 1 w x ->
                  push+ 2 1 v=1 w=2 x=3 -> 0 value v@1=-3 w@1=-4 x@1=-5 & 2 value v@1=-3 w@1=-4 \
                  x@1=-5 & 1 value w@1=-4 x@1=-5";
    Script::new(Stage::serving(plan)).run(script);
}

/// The memory for new versions of one length runs out. Chunks of another length go on, and the chunks without memory
/// follow when some is free again.
#[test]
fn chunks_that_wait_for_memory_do_not_hold_up_the_others() {
    const CHUNKS: u64 = 40;
    let plan = Plan::new(Mode::Sync, Merge::Sum, 1).with("w", Float32, CHUNKS * 1024, SGD).with("v", Float32, 3, SGD);
    let mut stage = Stage::serving(plan);
    let gradient = |elements: usize| 1_f32.to_le_bytes().repeat(elements);
    let push = |stage: &mut Stage, round: u64| {
        let long = (0..CHUNKS).map(|chunk| (id(0, chunk), round, gradient(1024)));
        let parcel = stage.push(0, long.chain([(id(1, 0), round, gradient(3))]).collect(), true);
        stage.deliver(0, &parcel);
    };
    // Turns in which nothing arrives would retry.
    (stage.holds, stage.is_late) = (true, true);
    push(&mut stage, 1);
    let pool = &mut stage.shard.pool;
    let mut taken: Vec<Lease> = std::iter::from_fn(|| pool.take(4096).ok()).collect();
    // There is room for the gradients, and none for a new version beside them.
    taken.truncate(taken.len() - usize::try_from(CHUNKS).expect("few"));
    push(&mut stage, 2);
    let updated = |stage: &Stage, parameter: u32| {
        let contents = stage.contents().into_iter();
        contents.filter(|one| one.0.parameter.0 == parameter && one.1 == Version(2)).count()
    };
    let is_stalled = |stage: &Stage| matches!(&stage.shard.phase, Phase::Serving(serving) if serving.stalls.is_any());
    let found = (updated(&stage, 0), updated(&stage, 1), is_stalled(&stage));
    assert_eq!(found, (0, 1, true), "{:?}", stage.errors());
    stage.release();
    let found = (updated(&stage, 0) as u64, updated(&stage, 1), is_stalled(&stage));
    assert_eq!(found, (CHUNKS, 1, false), "all have room now");
    let lone = stage.contents()[0].2.clone();
    let long = stage.contents().into_iter().filter(|one| one.0.parameter.0 == 0);
    assert!(long.into_iter().all(|one| one.2 == lone), "no gradient is there twice or lost");
    drop(taken);
}

#[test]
fn a_client_that_knows_a_later_term_and_frames_of_other_terms_are_refused() {
    let mut stage = Stage::serving(Plan::new(Mode::Sync, Merge::Mean, 1).with("w", Float32, 4, SGD));
    let frame = stage.push(0, vec![(id(0, 0), 1, vec![0; 16])], true);
    let mut of_another = frame.clone();
    of_another.frame.head.term = Term(1);
    stage.deliver(0, &of_another);
    assert_eq!(stage.errors(), ["a frame of term 1; expected 0, that of the welcome"]);
    stage.answers.clear();
    stage.deliver(0, &frame);
    assert_eq!(stage.errors(), [""; 0]);
    stage.answers.clear();
    let head = Head { epoch: frame.frame.head.epoch, term: Term(1), ..stage.head(Kind::Hello, 0) };
    let hello = Frame::with_control(head, &HelloMessage::default());
    stage.deliver(0, &Parcel { frame: hello, body: Vec::new() });
    let refused = stage.errors().remove(0);
    assert!(refused.contains("led the shard under term 0, and the client knows one of term 1"), "{refused}");
    let message = ErrorMessage::decode(stage.answers[0].frame.control.as_slice()).expect("it parses");
    assert_eq!(message.code(), ErrorCode::Moved);
}
