//! A shard that is killed and restarted equals a shard that was never killed: the same values, states and versions, bit
//! for bit, at any moment of the kill and at any progress of a checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::hosted::with_program;
use super::script::Script;
use super::stage::{Parcel, Plan, Stage, TIMEOUT};
use crate::checkpoint::storage::InMemory;
use crate::checkpoint::{Storage, inspect};
use crate::checksum::append;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Float64, Int64};
use crate::ids::{ChunkId, Generation, Incarnation, Round, Ticket, Version};
use crate::port::{Fault, FaultyAccelerator, Plain, Simulated};
use crate::prng::Prng;
use crate::wire::{Entry, Flags, Frame, Head, Kind, PushMessage, RowsPart, SettingMessage};

const DIRECTORY: &str = "server-0/shard-0";
const ADAM: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.01 }";
const CLIPPED: &str = "sgd { momentum: 0.9 } clip_norm: 2.5 const_lr { learning_rate: 0.1 }";
const ROWS: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.01 } l2: 0.01 \
                    sparse { height: 60 width: 3 buckets: 3 seed: 5 uniform { } }";
/// A user's rule: states that do not begin at zero, and the number of the update.
const WRITTEN: &str = "rule: 'state m = 0.5; state k = -1; m = b*m + g; k += 1; w -= lr*(m + sign(g)*k/n)' \
                       rule_set { key: 'b' value: 0.9 } const_lr { learning_rate: 0.1 }";
const WRITTEN_CLIPPED: &str = "rule: 'state m = 0.1; m = 0.5*m + g; w -= lr*m' clip_norm: 0.5 l2: 0.1";
/// A rule that reads a total: its share depends on its states too.
const TOTAL: &str = "sgd { momentum: 0.5 } const_lr { learning_rate: 0.1 } \
                     stage: 'state k = 1; g = g * total(sum(g * g) + norm(w)); update; k = 0.5 * k + w'";
/// A table whose buckets' gradients a total scales.
const ROWS_TOTAL: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.01 } l2: 0.01 \
                          stage: 'g = g * min(2 / (total(sum(g * g)) + 1), 1); update' \
                          sparse { height: 60 width: 3 buckets: 3 seed: 7 uniform { } }";
const ADD: &str = "algorithm: \"add\"";

/// Chunks with updates of their own, chunks with grouped updates, a chunk of integers, buckets of rows, and a total.
fn plan(mode: Mode, trainers: u32) -> Plan {
    let plan = Plan::new(mode, Merge::Mean, trainers)
        .with("a", Float32, 1027, ADAM)
        .with("g", Float32, 2050, CLIPPED)
        .with("n", Int64, 3, ADD)
        .with("d", Float64, 2, "optimizer: SGD")
        .with("r", Float32, 1026, WRITTEN)
        .with("s", Float32, 3, ROWS)
        .with("t", Float64, 700, WRITTEN_CLIPPED);
    if mode == Mode::Delta {
        return plan;
    }
    if mode != Mode::Sync {
        return with_program(plan);
    }
    let parts = ["algorithm: 'sum' total_part: Share", "algorithm: 'sum' total_part: Total"];
    let plan = plan
        .with("c", Float32, 1100, TOTAL)
        .with("share", Float64, 1, parts[0])
        .with("total", Float64, 1, parts[1])
        .with("rows", Float32, 3, ROWS_TOTAL)
        .with("rows_share", Float64, 3, parts[0])
        .with("rows_total", Float64, 3, parts[1]);
    with_program(plan)
}

/// Whether a chunk is a share, which the shard computes itself.
fn is_share(plan: &Plan, id: ChunkId) -> bool {
    ["share", "rows_share"].contains(&plan.parameters[id.parameter.0 as usize].name)
}

/// The trainer that alone may send to a chunk of a hosted program; none of a chunk of another parameter.
fn sender_to_program(plan: &Plan, id: ChunkId) -> Option<Option<u32>> {
    let parameter = &plan.parameters[id.parameter.0 as usize];
    let sender = (0..3).find(|sender| parameter.config.contains(&format!("sender: {sender}")));
    parameter.hosted.map(|_| sender)
}

/// Whether a chunk is a number that trainers make, without which no push can be.
fn is_total(plan: &Plan, id: ChunkId) -> bool {
    ["total", "rows_total"].contains(&plan.parameters[id.parameter.0 as usize].name)
}

/// Some rows of a bucket, which may be none, as a part.
fn rows(prng: &mut Prng, plan: &Plan, id: ChunkId, part: RowsPart) -> Vec<u8> {
    let buckets = plan.parameters[id.parameter.0 as usize].buckets.expect("it is sparse");
    let own: Vec<u64> = (0..60).filter(|row| u64::from(buckets.of(*row)) == id.chunk.0).collect();
    // Only the last part may have none.
    let count = prng.below(6).max(u64::from(part.index + 1 < part.count));
    if count == 0 && part.count == 1 {
        return Vec::new();
    }
    let ids: Vec<u64> = (0..count).map(|_| own[prng.index(own.len())]).collect();
    let mut number = || f32::from(i16::try_from(prng.below(2001)).expect("it is small") - 1000) / 1.0e3;
    let values: Vec<f32> = (0..count * 3).map(|_| number()).collect();
    let ids = ids.iter().flat_map(|id| id.to_le_bytes());
    part.encode().into_iter().chain(ids).chain(values.iter().flat_map(|value| value.to_le_bytes())).collect()
}

/// A setting of a parameter's rule, or none.
fn carried(prng: &mut Prng, plan: &Plan, parameter: u64) -> PushMessage {
    let index = usize::try_from(parameter).expect("there are few");
    let name = match plan.parameters[index].name {
        "a" => "beta_1",
        "g" | "c" => "momentum",
        "r" => "b",
        "t" => "l2",
        _ => return PushMessage::default(),
    };
    let hundredths = u8::try_from(1 + prng.below(98)).expect("it is small");
    let value = f64::from(hundredths) / 100.0;
    PushMessage { settings: vec![SettingMessage { name: name.to_owned(), value }], ..PushMessage::default() }
}

fn payload(prng: &mut Prng, plan: &Plan, id: ChunkId) -> Vec<u8> {
    if plan.parameters[id.parameter.0 as usize].buckets.is_some() {
        return rows(prng, plan, id, RowsPart::ONLY);
    }
    let bytes = plan.chunks().into_iter().find(|(one, _)| *one == id).expect("it is planned").1;
    let mut number = || i16::try_from(prng.below(20_001)).expect("it is small") - 10_000;
    let elements = u64::from(bytes) / plan.element_type(id).bytes();
    let one = |_| match plan.element_type(id) {
        Float32 => (f32::from(number()) / 1.0e4).to_le_bytes().to_vec(),
        Float64 => (f64::from(number()) / 1.0e4).to_le_bytes().to_vec(),
        _ => i64::from(number()).to_le_bytes().to_vec(),
    };
    (0..elements).flat_map(one).collect()
}

/// The settings of a random run, printed on failure.
#[derive(Clone, Debug)]
struct Course {
    mode: Mode,
    trainers: u32,
    moves: usize,
    seed: u64,
    /// Of a hundred moves, how many are followed by a kill, begin a checkpoint, or change the membership.
    kills: u64,
    checkpoints: u64,
    changes: u64,
    sync: bool,
    /// How many polls an accelerator takes at most for a piece of work; none where there is no accelerator.
    polls: u64,
    /// Injected fault, of those that lose nothing.
    fault: Fault,
    /// Of a hundred moves, before how many readers hold every value and nearly all other memory is taken.
    hungers: u64,
}

/// No fault.
const SOUND: Fault = Fault::Refuses(u64::MAX);

/// A frame without a known answer.
#[derive(Clone)]
struct Unanswered {
    trainer: u32,
    parcel: Parcel,
    /// Its chunks that the shard has acknowledged, and those whose answers were not lost.
    acknowledged: BTreeSet<ChunkId>,
    answered: BTreeSet<ChunkId>,
}

impl Unanswered {
    /// Notes an answer to the frame.
    fn note(&mut self, answer: &Frame, is_lost: bool) {
        let (asked, answered) = (&self.parcel.frame.head, &answer.head);
        // A welcome may have the number of a request.
        let is_answer = (asked.request, asked.trainer) == (answered.request, answered.trainer);
        if is_answer && answered.kind != Kind::Welcome {
            let is_whole = answer.entries.is_empty();
            let entries = if is_whole { &self.parcel.frame.entries } else { &answer.entries };
            self.acknowledged.extend(entries.iter().map(|entry| entry.id));
            if !is_lost {
                self.answered.extend(entries.iter().map(|entry| entry.id));
            }
        }
    }

    /// Whether `chunks` contains all chunks of the frame.
    fn is_within(&self, chunks: &BTreeSet<ChunkId>) -> bool {
        // A frame without a chunk is a leave, which is answered at once.
        self.parcel.frame.entries.iter().all(|entry| chunks.contains(&entry.id))
    }
}

/// Two shards that get the same frames: one in peace, one that is killed again and again.
struct Pair {
    course: Course,
    prng: Prng,
    peace: Stage,
    trouble: Stage,
    storage: InMemory,
    number: u64,
    /// Frames sent to the shard in trouble without a known answer to each of their chunks, in order.
    unanswered: Vec<Unanswered>,
    /// The round that each trainer pushes next for each chunk.
    rounds: Vec<Vec<u64>>,
    is_away: Vec<bool>,
    /// The second half of a push that travels in two frames.
    rest: Vec<Option<Parcel>>,
    /// Every earlier state of a chunk: its version, and a checksum of its value and its states.
    history: BTreeSet<(ChunkId, Version, u32)>,
}

impl Course {
    fn stage(&self, plan: Plan) -> Stage {
        let mut stage = Stage::empty(plan);
        if self.is_slow() {
            stage.shard.replays = 1 + self.seed % 100;
        }
        let bytes = [10_000, u64::MAX][usize::from(!self.seed.is_multiple_of(4))];
        let simulated = Simulated::new(Plain, bytes, self.polls.max(1));
        let accelerator = FaultyAccelerator::new(simulated, self.fault);
        if self.polls == 0 { stage } else { stage.with_accelerator(accelerator) }
    }

    /// Whether rows catch up in many turns.
    fn is_slow(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// Whether work goes on from turn to turn.
    fn is_late(&self) -> bool {
        0 < self.polls || self.is_slow()
    }
}

fn states(stage: &Stage) -> impl Iterator<Item = (ChunkId, Version, u32)> {
    let digest = |value: &[u8], states: &[Vec<u8>]| states.iter().fold(append(0, value), |sum, one| append(sum, one));
    stage.contents().into_iter().map(move |(id, version, value, states)| (id, version, digest(&value, &states)))
}

impl Pair {
    fn new(course: Course) -> Self {
        let plan = plan(course.mode, course.trainers);
        let storage = InMemory::new();
        let mut trouble = course.stage(plan.clone());
        restore(&mut trouble, &storage, course.sync);
        trouble.initialise();
        trouble.is_late = course.is_late();
        let chunks = plan.chunks().len();
        let trainers = course.trainers as usize;
        Self {
            prng: Prng(course.seed),
            peace: Stage::serving(plan),
            trouble,
            storage,
            number: 0,
            unanswered: Vec::new(),
            rounds: vec![vec![1; chunks]; trainers],
            is_away: vec![false; trainers],
            rest: (0..trainers).map(|_| None).collect(),
            history: BTreeSet::new(),
            course,
        }
    }

    fn run(&mut self) {
        self.history.extend(states(&self.peace));
        for _ in 0..self.course.moves {
            self.hunger();
            let trainer = u32::try_from(self.prng.below(self.course.trainers.into())).expect("few");
            if self.prng.below(100) < self.course.changes {
                self.change(trainer);
            } else if !self.is_away[trainer as usize] {
                self.act(trainer);
            }
            if self.prng.below(100) < self.course.checkpoints && !self.trouble.shard.is_checkpointing() {
                self.number += 1;
                let begun = self.trouble.begin_checkpoint(self.number);
                assert!(begun.expect("the disk is well"), "the shard serves");
            }
            self.turns();
            self.save_some_bytes();
            if self.prng.below(100) < self.course.kills {
                self.kill();
            }
        }
        if !self.course.sync && self.prng.below(2) == 0 {
            self.lose_host();
        } else {
            self.kill();
        }
    }

    /// Sometimes takes nearly all memory while readers hold every value, and sometimes frees the memory again.
    fn hunger(&mut self) {
        if self.prng.below(100) < self.course.hungers {
            self.trouble.holds = true;
            let plan = self.peace.plan.clone();
            let mut head = self.trouble.head(Kind::Pull, 0);
            head.request = Ticket(u64::MAX);
            let chunks = plan.chunks().into_iter().filter(|(_, bytes)| *bytes > 0);
            let entries = chunks.map(|(id, _)| Entry::bare(id, Round(0), plan.element_type(id))).collect();
            let parcel = Parcel { frame: Frame { entries, ..Frame::bare(head) }, body: Vec::new() };
            self.trouble.deliver(0, &parcel);
            self.trouble.starve();
            for _ in 0..self.prng.below(10) {
                let at = self.prng.index(self.trouble.taken.len());
                self.trouble.taken.remove(at);
            }
        } else if self.prng.below(4) == 0 {
            self.trouble.feed();
        }
    }

    /// Loses the host with a journal that was not synced: the restored chunks are those of some earlier moment.
    fn lose_host(&mut self) {
        self.storage.crash();
        let mut stage = Stage::empty(self.peace.plan.clone());
        restore(&mut stage, &self.storage, false);
        for one in states(&stage) {
            assert!(self.history.contains(&one), "chunk {:?} was never so at version {}", one.0, one.1);
        }
    }

    /// Completes all work of the shard in trouble. An accelerator refuses work once.
    fn settle(&mut self) {
        self.trouble.feed();
        if self.trouble.try_settle().is_err() {
            self.trouble.settle();
        }
    }

    /// Optional work between two frames.
    fn turns(&mut self) {
        if self.course.is_late() {
            for _ in 0..self.prng.below(5) {
                self.trouble.turn();
            }
        }
    }

    /// The two shards are equal, except for frames in flight.
    fn check(&self) {
        assert_eq!(self.peace.contents().len(), self.trouble.contents().len());
        for (peace, trouble) in self.peace.contents().iter().zip(self.trouble.contents()) {
            assert_eq!((peace.0, peace.1), (trouble.0, trouble.1), "the same chunk at the same version");
            if self.course.hungers > 0 && self.is_of_program(peace.0) {
                continue;
            }
            assert_eq!(peace.2, trouble.2, "the value of {:?} at version {}", peace.0, peace.1);
            assert_eq!(peace.3, trouble.3, "the states of {:?} at version {}", peace.0, peace.1);
        }
    }

    fn is_of_program(&self, id: ChunkId) -> bool {
        self.peace.plan.parameters[id.parameter.0 as usize].hosted.is_some()
    }

    /// The values of a hosted program. Where memory is short, items that waited for it and others that waited for room
    /// may be taken in another order than in peace: then they equal those before the kill.
    fn of_program(&self) -> Vec<(ChunkId, Version, Vec<u8>)> {
        let contents = self.trouble.contents().into_iter().filter(|one| self.is_of_program(one.0));
        contents.map(|(id, version, value, _)| (id, version, value)).collect()
    }

    fn act(&mut self, trainer: u32) {
        let parcel = match self.rest[trainer as usize].take() {
            Some(rest) => rest,
            None if self.prng.below(10) == 0 => self.set(trainer),
            None => match self.push(trainer) {
                Some(parcel) => parcel,
                None => return,
            },
        };
        self.send(trainer, parcel);
    }

    fn set(&mut self, trainer: u32) -> Parcel {
        let plan = self.peace.plan.clone();
        let is_set = |(id, bytes): &(ChunkId, u32)| *bytes > 0 && sender_to_program(&plan, *id).is_none();
        let chunks: Vec<_> = plan.chunks().into_iter().filter(is_set).collect();
        let id = chunks[self.prng.index(chunks.len())].0;
        let head = self.peace.call(Kind::Set, trainer);
        let payload = payload(&mut self.prng, &plan, id);
        Parcel::new(head, vec![(id, 0, plan.element_type(id), payload)])
    }

    /// A push of some parameters, each whole; the second half of it may come later.
    fn push(&mut self, trainer: u32) -> Option<Parcel> {
        let plan = self.peace.plan.clone();
        let contents = self.peace.contents();
        let only = self.prng.below(plan.parameters.len() as u64);
        let is_only = self.prng.below(3) == 0;
        let wanted = if is_only { 1 << only } else { 1 + self.prng.below((1 << plan.parameters.len()) - 1) };
        let mut message = if is_only { carried(&mut self.prng, &plan, only) } else { PushMessage::default() };
        let is_sync = self.course.mode == Mode::Sync;
        message.is_pass = is_sync && self.prng.below(10) == 0;
        message.is_void = message.is_pass && self.prng.below(2) == 0;
        let mut wants = self.prng.below(2) == 0;
        let rounds = &mut self.rounds[trainer as usize];
        let mut entries = Vec::new();
        for (slot_index, (id, version, ..)) in contents.iter().enumerate() {
            // Chunks of one parameter may be at different versions, so each chunk has its own round.
            let to_program = sender_to_program(&plan, *id);
            let has_rounds = is_sync || to_program.is_some();
            let may = !has_rounds || rounds[slot_index] <= version.0 + 2;
            let may = may && to_program.is_none_or(|sender| sender == Some(trainer));
            let may_pass = !message.is_pass || !is_total(&plan, *id) && to_program.is_none();
            if wanted & (1 << id.parameter.0) != 0 && may && may_pass && !is_share(&plan, *id) {
                let is_bucket = plan.parameters[id.parameter.0 as usize].buckets.is_some();
                wants &= !is_bucket;
                // A change of incarnation would leave parts incomplete, and their rows without a gradient.
                let is_passed = message.is_pass || is_sync && !is_bucket && self.prng.below(20) == 0;
                if is_passed && !is_total(&plan, *id) && to_program.is_none() {
                    entries.push((*id, rounds[slot_index], Vec::new()));
                } else if is_bucket && self.course.changes == 0 && self.prng.below(3) == 0 {
                    let index = u32::try_from(self.prng.below(2)).expect("it is 0 or 1");
                    for index in [index, 1 - index] {
                        let part = rows(&mut self.prng, &plan, *id, RowsPart { index, count: 2 });
                        entries.push((*id, rounds[slot_index], part));
                    }
                } else {
                    entries.push((*id, rounds[slot_index], payload(&mut self.prng, &plan, *id)));
                }
                rounds[slot_index] += 1;
            }
        }
        if entries.is_empty() {
            return None;
        }
        let second = entries.split_off(1 + self.prng.index(entries.len()));
        let first = self.peace.push(trainer, entries, wants).carrying(&message);
        if !second.is_empty() {
            let mut head = first.frame.head;
            head.request = Ticket(head.request.0 + 1_000_000);
            let typed = second.into_iter().map(|(id, round, bytes)| (id, round, plan.element_type(id), bytes));
            self.rest[trainer as usize] = Some(Parcel::new(head, typed.collect()).carrying(&message));
        }
        Some(first)
    }

    /// A trainer departs, or a new incarnation of it starts.
    fn change(&mut self, trainer: u32) {
        let at = trainer as usize;
        // While a frame waits for its round's record, a restarted shard has nothing of the trainer's change.
        let is_sync = self.course.mode == Mode::Sync;
        let plan = &self.peace.plan;
        let has_rounds = |one: &Unanswered| {
            let mut entries = one.parcel.frame.entries.iter();
            is_sync || entries.any(|entry| sender_to_program(plan, entry.id).is_some())
        };
        let waits = |one: &Unanswered| one.trainer == trainer && !one.is_within(&one.acknowledged) && has_rounds(one);
        if self.unanswered.iter().any(waits) {
            return;
        }
        let others = self.is_away.iter().enumerate().filter(|(other, away)| *other != at && !**away).count();
        if !self.is_away[at] && others > 0 && self.prng.below(2) == 0 && self.rest[at].is_none() {
            let head = self.peace.call(Kind::Leave, trainer);
            self.send(trainer, Parcel { frame: Frame::bare(head), body: Vec::new() });
            self.is_away[at] = true;
            return;
        }
        self.is_away[at] = false;
        self.rest[at] = None;
        self.unanswered.retain(|one| one.trainer != trainer);
        let incarnation = Incarnation(self.peace.actors[&trainer].incarnation.0 + 1);
        self.peace.connect(trainer, incarnation);
        self.trouble.connect(trainer, incarnation);
        self.history.extend(states(&self.peace));
        // A new incarnation starts at the current versions.
        let versions = self.peace.contents();
        self.rounds[at] = versions.iter().map(|(_, version, ..)| version.0 + 1).collect();
    }

    fn send(&mut self, trainer: u32, parcel: Parcel) {
        self.peace.answers.clear();
        self.peace.deliver(trainer, &parcel);
        self.history.extend(states(&self.peace));
        let is_refused = !self.peace.errors().is_empty();
        let (acknowledged, answered) = (BTreeSet::new(), BTreeSet::new());
        self.unanswered.push(Unanswered { trainer, parcel: parcel.clone(), acknowledged, answered });
        if self.prng.below(100) < self.course.kills {
            // The frame is lost on the way, or begins to land, when the shard is killed.
            if self.prng.below(2) == 0 && !parcel.body.is_empty() {
                let peer = self.trouble.actors[&trainer].peer;
                drop(self.trouble.post_receive(peer, &parcel));
            }
            self.restart();
        } else {
            self.deliver(trainer, &parcel);
        }
        self.note_answers();
        if is_refused {
            // A refused frame is not repeated; both shards refused it. With it the call is over, and its other frames,
            // which came before, are not repeated either: the trainer's next call may be ahead of them by now.
            // A resend of a departed trainer after a restart may have been refused.
            self.trouble.answers.retain(|one| one.frame.head.request == parcel.frame.head.request);
            assert_eq!(self.peace.errors(), self.trouble.errors());
            let call = |head: &Head| (head.trainer, head.incarnation, head.sequence);
            self.unanswered.retain(|one| call(&one.parcel.frame.head) != call(&parcel.frame.head));
            self.trouble.answers.clear();
        }
    }

    /// Delivers a frame to the shard in trouble. Its accelerator may be behind, its rows catching up, or a checkpoint
    /// may hold a chunk: a frame that is refused for that is retried.
    fn deliver(&mut self, trainer: u32, parcel: &Parcel) {
        let before = self.trouble.errors().len();
        self.trouble.deliver(trainer, parcel);
        if before < self.trouble.errors().len() {
            let last =
                self.trouble.answers.iter().rposition(|one| matches!(one.frame.head.kind, Kind::Error | Kind::Refused));
            self.trouble.answers.remove(last.expect("there is one more"));
            self.settle();
            self.trouble.deliver(trainer, parcel);
        }
    }

    /// Removes answered chunks from the unanswered frames; some answers are lost with the next kill all the same.
    fn note_answers(&mut self) {
        for answer in std::mem::take(&mut self.trouble.answers) {
            if matches!(answer.frame.head.kind, Kind::Error | Kind::Refused) {
                self.trouble.answers.push(answer);
                continue;
            }
            let is_lost = self.prng.below(4) == 0;
            self.unanswered.iter_mut().for_each(|one| one.note(&answer.frame, is_lost));
        }
        self.unanswered.retain(|one| !one.is_within(&one.answered));
    }

    fn save_some_bytes(&mut self) {
        let bytes = 1 + self.prng.below(6000);
        self.save(bytes);
    }

    fn save(&mut self, bytes: u64) {
        let continued = self.trouble.shard.continue_checkpoint(bytes);
        // A chunk whose states could not be read has no checkpoint.
        assert!(continued.is_ok() || self.course.fault != SOUND, "the disk is well");
        if let Ok(Some(writer)) = continued {
            writer.finish().expect("the disk is well");
            self.trouble.retain_journal().expect("the disk is well");
        }
    }

    fn kill(&mut self) {
        let mut before = None;
        if self.prng.below(2) == 0 {
            self.settle();
            self.note_answers();
            self.check();
            before = Some(self.of_program());
        }
        self.restart();
        self.note_answers();
        self.trouble.answers.clear();
        self.settle();
        self.note_answers();
        self.trouble.answers.clear();
        self.check();
        assert!(before.is_none_or(|before| before == self.of_program()), "the values of the program before the kill");
    }

    fn restart(&mut self) {
        let mut stage = self.course.stage(self.peace.plan.clone());
        if self.course.sync {
            self.storage.crash();
        }
        let restored = restore(&mut stage, &self.storage, self.course.sync);
        if let Some(number) = restored {
            self.number = self.number.max(number);
        }
        assert_eq!(stage.shard.generation(), Generation(1), "the shard serves again");
        stage.is_late = self.course.is_late();
        std::mem::swap(&mut self.trouble, &mut stage);
        for (trainer, actor) in stage.actors {
            self.trouble.connect(trainer, actor.incarnation);
        }
        self.trouble.answers.clear();
        for one in self.unanswered.clone() {
            self.deliver(one.trainer, &one.parcel);
        }
    }
}

fn restore(stage: &mut Stage, storage: &InMemory, sync: bool) -> Option<u64> {
    let storage: Arc<dyn Storage> = Arc::new(storage.clone());
    let restored = stage.restore(&storage, sync);
    assert_eq!(restored.loaded.iter().flat_map(|loaded| &loaded.fell_back).count(), 0);
    restored.loaded.map(|loaded| loaded.name.number)
}

/// Runs `before` on a shard, takes a checkpoint, and runs `after` on that shard and on the one restored from checkpoint
/// and journal.
fn check(plan: &Plan, before: &str, after: &str) {
    let storage = InMemory::new();
    let mut stage = Stage::empty(plan.clone());
    restore(&mut stage, &storage, false);
    stage.initialise();
    let mut peace = Script::new(stage);
    peace.run(before);
    peace.stage.checkpoint(1);

    let mut stage = Stage::empty(plan.clone());
    assert_eq!(restore(&mut stage, &storage.copy(), false), Some(1));
    stage.actors = peace.stage.actors.clone();
    for (trainer, actor) in peace.stage.actors.clone() {
        stage.connect(trainer, actor.incarnation);
    }
    assert_eq!(peace.stage.contents(), stage.contents());
    peace.run(after);
    let mut restarted = Script::new(stage);
    restarted.run(after);
    assert_eq!(peace.stage.contents(), restarted.stage.contents());
}

#[test]
fn the_value_of_a_step_outlasts_a_set_and_a_restart_with_or_without_a_checkpoint() {
    [false, true].into_iter().for_each(check_the_value_of_a_step);
}

fn check_the_value_of_a_step(has_checkpoint: bool) {
    let storage = InMemory::new();
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD");
    let mut stage = Stage::empty(plan.clone());
    restore(&mut stage, &storage, false);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run("push 0 1 w=100 -> *\n push 1 1 w=100 -> *\n set 0 w=10 -> *\n pull+ 1 1 w -> 1 value w@1=-100");
    if has_checkpoint {
        script.stage.checkpoint(1);
    }
    let mut restarted = Stage::empty(plan);
    restore(&mut restarted, &storage.copy(), false);
    for (trainer, actor) in script.stage.actors {
        restarted.connect(trainer, actor.incarnation);
    }
    restarted.answers.clear();
    Script::new(restarted).run("pull 1 1 w -> 1 value w@1=10\n pull+ 1 1 w -> 1 value w@1=-100");
}

#[test]
fn a_chunk_of_a_group_whose_round_is_void_counts_no_gradient_before_or_after_a_restart() {
    let storage = InMemory::new();
    let rule = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";
    let plan = Plan::new(Mode::Sync, Merge::Sum, 2).with("g", Float32, 1025, rule);
    let mut stage = Stage::empty(plan.clone());
    restore(&mut stage, &storage, false);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run(
        "push+ 1 1 g=2 g.1=3 ->
         void 0 1 g.1=none -> *
         push 0 1 g=1 -> *
         show g g.1 -> g@1=-3 & g.1@1=0",
    );
    let mut restarted = Stage::empty(plan);
    restore(&mut restarted, &storage.copy(), false);
    assert_eq!(script.stage.contents(), restarted.contents());
}

#[test]
fn a_void_repetition_of_a_counted_push_does_not_change_the_replay() {
    let plan =
        Plan::new(Mode::Sync, Merge::Sum, 2).with("w", Float32, 2, "optimizer: SGD const_lr { learning_rate: 1 }");
    // The round counts the gradient already, when a newer process, or the same call again, says that it is void.
    for is_newer in [true, false] {
        let storage = InMemory::new();
        let mut stage = Stage::empty(plan.clone());
        restore(&mut stage, &storage, false);
        stage.initialise();
        let mut script = Script::new(stage);
        script.run("push+ 1 1 w=2 ->");
        if is_newer {
            script.run("reborn 1\n void 1 1 w=none -> *");
        } else {
            let mut again = script.last[&1].clone();
            again.body.clear();
            again.frame.head.flags = Flags::default();
            again.frame.entries.iter_mut().for_each(|entry| entry.bytes = 0);
            let void = PushMessage { is_void: true, is_pass: true, ..PushMessage::default() };
            script.stage.deliver(1, &again.carrying(&void));
        }
        script.run("push 0 1 w=1 -> *\n show w -> w@1=-3");
        let mut restarted = Stage::empty(plan.clone());
        restore(&mut restarted, &storage.copy(), false);
        assert_eq!(script.stage.contents(), restarted.contents(), "a newer process: {is_newer}");
    }
}

#[test]
fn a_partial_gradient_is_kept_or_dropped_after_a_restart_as_before_it() {
    let plan = Plan::new(Mode::Async, Merge::Mean, 2).with("g", Float32, 1025, "optimizer: SGD clip_norm: 1e9");
    let after = "push 0 0 g=1 g.1=1 -> *\n show g g.1 -> ";
    let check = |before: &str, found: &str| check(&plan, before, &format!("{after}{found}"));
    // A trainer waited, departed, and would be admitted before the checkpoint; the replayed leave finds its gradient.
    check(
        "push 0 0 g=9 -> 0 done g@1\n push 1 0 g=5 ->\n leave 1 -> 1 done\n push 0 0 g.1=9 -> 0 done g.1@1",
        "g@2=-10 & g.1@2=-10",
    );
    // The same with a new incarnation that sends the other half.
    check(
        "push 0 0 g=9 -> 0 done g@1\n push 1 0 g=5 ->\n reborn 1\n push 1 0 g.1=7 ->\n push 0 0 g.1=9 -> *",
        "g@1=-9 & g.1@1=-9",
    );
    // A partial gradient that is open, and one that was dropped.
    check("push 1 0 g=5 -> 1 done g@1", "g@0=0 & g.1@0=0");
    check("push 1 0 g=5 -> 1 done g@1\n leave 1 -> 1 done", "g@1=-1 & g.1@1=-1");
}

#[test]
fn a_hosted_program_that_stopped_before_an_item_is_restored_stopped() {
    let plan = with_program(Plan::new(Mode::Sync, Merge::Mean, 1));
    check(
        &plan,
        "push 0 1 i0=666 i0.1=1 s0=1 -> *",
        "pull 0 0 k -> 0 error Invalid: the program \"p\" has stopped: *
         push 0 2 i0=1 i0.1=1 -> 0 error Invalid: the program \"p\" has stopped: *",
    );
}

#[test]
fn departures_and_returns_of_a_hosted_programs_trainers_are_the_same_after_a_restart() {
    let plan = with_program(Plan::new(Mode::Sync, Merge::Mean, 2));
    // Trainer 0 leaves behind an item that waits, and its next process sends another one.
    let before = "push 0 1 i0=2 i0.1=2 -> *
         push 0 2 i0=4 i0.1=4 -> *
         leave 0 -> *
         reborn 0
         push 0 1 s0=1 -> *";
    check(
        &plan,
        before,
        "show k -> k@1=2
         push 1 1 i1=1 i1.1=1 -> *
         show k -> k@3=5
         push 1 2 i1=1 i1.1=1 -> *
         push 1 3 i1=1 i1.1=1 -> *
         push 1 4 i1=1 i1.1=1 -> 1 done i1@4 i1.1@4
         show k i1 -> k@5=2.75 & i1@3=0",
    );
}

#[test]
fn a_checkpoint_names_the_states_of_a_users_rule() {
    let storage = InMemory::new();
    let mut stage = Stage::empty(Plan::new(Mode::Sync, Merge::Mean, 1).with("r", Float32, 2, WRITTEN));
    restore(&mut stage, &storage, false);
    stage.initialise();
    stage.checkpoint(1);
    let report = inspect(&storage, DIRECTORY).expect("there is a checkpoint");
    let text = report.to_string();
    assert!(
        report.is_sound() && text.contains("state/m/0/0 F32 [2]") && text.contains("state/k/0/0 F32 [2]"),
        "{text}"
    );
}

/// A set that arrived while its slot was busy, and gradients after the set.
#[test]
fn sets_and_gradients_that_wait_for_a_slot_are_applied_in_order_of_arrival() {
    let (sync, kills) = (false, 0);
    let async_mode = Course {
        mode: Mode::Async,
        trainers: 3,
        moves: 22,
        seed: 4_238_276_128_320_826_734,
        kills,
        checkpoints: 2,
        changes: 0,
        sync,
        polls: 5,
        fault: SOUND,
        hungers: 0,
    };
    let sync_mode = Course {
        mode: Mode::Sync,
        trainers: 2,
        moves: 24,
        seed: 4_678_073_339_432_507_064,
        kills,
        checkpoints: 24,
        changes: 15,
        sync,
        polls: 3,
        fault: SOUND,
        hungers: 0,
    };
    Pair::new(async_mode).run();
    Pair::new(sync_mode).run();
}

#[test]
fn a_part_that_was_refused_is_not_in_the_journal() {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 1).with("s", Float32, 3, ROWS);
    let (storage, id) = (InMemory::new(), plan.chunks()[0].0);
    let mut stage = Stage::empty(plan.clone());
    restore(&mut stage, &storage, false);
    stage.initialise();
    let mut prng = Prng(1);
    let mut parts = [0, 1, 2].map(|index| rows(&mut prng, &plan, id, RowsPart { index, count: 3 }));
    let first = stage.push(0, vec![(id, 1, std::mem::take(&mut parts[0]))], false);
    let [second, third] = [1, 2].map(|index: usize| {
        let payload = std::mem::take(&mut parts[index]);
        Parcel::new(first.frame.head, vec![(id, 1, Float32, payload)])
    });
    stage.deliver(0, &first);
    stage.deliver(0, &third);
    stage.wait(TIMEOUT);
    stage.answers.clear();
    stage.deliver(0, &second);
    assert!(stage.errors()[0].contains("push them anew"), "{:?}", stage.errors());
    let mut again = Stage::empty(plan);
    restore(&mut again, &storage, false);
    assert_eq!(again.contents(), stage.contents(), "nothing was put together");
    again.connect(0, Incarnation(1));
    again.deliver(0, &second);
    assert_eq!(again.contents()[0].1, Version(0), "the dropped parts are not there to be completed");
}

fn course(mode: impl Strategy<Value = Mode>, changes: u64) -> impl Strategy<Value = Course> {
    let fault = prop_oneof![
        2 => Just(SOUND),
        4 => (1u64..60).prop_map(Fault::Refuses),
        1 => (1u64..8).prop_map(Fault::IsFull),
        1 => Just(Fault::CannotPin),
    ];
    let hungers = prop_oneof![Just(0u64), 1u64..40];
    let rates = (0u64..20, 0u64..60, any::<bool>(), 0u64..6, fault, hungers);
    (mode, 1u32..4, 5usize..70, any::<u64>(), rates).prop_map(move |(mode, trainers, moves, seed, rates)| {
        let (kills, checkpoints, sync, polls, fault, hungers) = rates;
        Course { mode, trainers, moves, seed, kills, checkpoints, changes, sync, polls, fault, hungers }
    })
}

fn differences_or_bounded() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Delta), (1u32..4).prop_map(|bound| Mode::Staleness { bound })]
}

/// A case here takes long.
const CASES: u32 = 24;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn rounds_survive_every_kill(course in course(Just(Mode::Sync), 0)) {
        Pair::new(course).run();
    }

    #[test]
    fn rounds_survive_with_trainers_that_come_and_go(course in course(Just(Mode::Sync), 15)) {
        Pair::new(course).run();
    }

    #[test]
    fn gradients_applied_one_by_one_survive_every_kill(course in course(Just(Mode::Async), 0)) {
        Pair::new(course).run();
    }

    #[test]
    fn gradients_applied_one_by_one_survive_with_trainers_that_come_and_go(course in course(Just(Mode::Async), 15)) {
        Pair::new(course).run();
    }

    #[test]
    fn differences_and_bounded_staleness_survive_every_kill(
        course in course(differences_or_bounded(), 0)
    ) {
        Pair::new(course).run();
    }

    #[test]
    fn differences_and_bounded_staleness_survive_with_trainers_that_come_and_go(
        course in course(differences_or_bounded(), 15)
    ) {
        Pair::new(course).run();
    }
}

/// Momentum that a step may change, whose state shows the gradients' mean of it.
const CARRIED: &str = "rule: 'param mu in (0, 1) = 0.5; state m = 0; m = mu * m + g; w -= lr * m' \
                       regularizer: Coupled l2: 0.25 const_lr { learning_rate: 0.1 }";

#[test]
fn settings_of_open_and_applied_gradients_are_the_same_after_a_restart() {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float64, 1, CARRIED);
    // A round that is applied, an open one, and a gradient that is ahead, each with its settings.
    check(
        &plan,
        "push*mu:0.9*l2:0.5*0.3 1 1 w=0.3 -> 1 done w@1
         push*mu:0.7 0 1 w=0.1 -> 0 done w@1
         push*mu:0.6 1 2 w=0.7 -> 1 done w@2
         push*mu:0.8*l2:0.125 1 3 w=0.9 ->",
        "push*l2:0.0625 0 2 w=0.2 -> *
         push 0 3 w=0.4 -> *
         push*mu:0.3 0 4 w=0.4 -> 0 done w@4
         push 1 4 w=0.5 -> 1 done w@4
         show w -> *",
    );
}
