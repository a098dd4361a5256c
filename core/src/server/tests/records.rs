//! Journal records of decided rounds: their contents, and the frames and answers that wait for them.

use std::sync::Arc;
use std::time::Duration;

use super::script::Script;
use super::stage::{Parcel, Plan, Stage, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::Incarnation;
use crate::limits::FRAME_ENTRIES_MAX;
use crate::memory::shared::{GiveBack, ReadOnly};
use crate::memory::{Arena, Budget, Lease};
use crate::port::{Event, Incoming, ReceiveBuffers};
use crate::wire::{Entry, Frame, Head, Kind};

const SGD: &str = "optimizer: SGD";
const BYTES: u32 = 4096;

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Sum, trainers).with("w", Float32, u64::from(BYTES / 4), SGD)
}

/// A shard with a journal.
fn kept(plan: Plan, memory: &InMemory) -> Script {
    let disk: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut stage = Stage::empty(plan);
    stage.restore(&disk, false);
    stage.initialise();
    Script::new(stage)
}

struct Nobody;

impl GiveBack for Nobody {
    fn give_back(&self, _: u32, _: u32) {}

    fn is_kept(&self) -> bool {
        true
    }
}

/// Memory that a trainer lends.
struct Lent {
    lease: Lease,
    memory: Arc<ReadOnly>,
}

impl Lent {
    fn new() -> Self {
        let mut budget = Budget::new();
        budget.line("test", BYTES, 1);
        let lease = Arena::shared(&budget).expect("this system shares memory").take(BYTES).expect("there is one");
        let place = lease.shared().expect("the arena is shared");
        let descriptor = place.file.descriptor().try_clone_to_owned().expect("descriptors are left");
        let memory = Arc::new(ReadOnly::open(&descriptor).expect("it is sealed"));
        Self { lease, memory }
    }

    fn fill(&mut self, number: f32) {
        self.lease.bytes_mut().as_chunks_mut().0.iter_mut().for_each(|element| *element = number.to_le_bytes());
    }

    /// The memory as a server reads it.
    fn view(&self) -> Incoming {
        let offset = self.lease.shared().expect("the arena is shared").offset;
        let lease = Lease::view(&self.memory, offset, BYTES, Arc::new(Nobody), 0).expect("it is inside");
        Incoming::Chunk { lease, bytes: BYTES }
    }
}

/// Sends a frame whose payload lies in its trainer's memory.
fn deliver(stage: &mut Stage, frame: Frame, lent: &Lent) {
    let peer = stage.actors[&frame.head.trainer.0].peer;
    let body = ReceiveBuffers::from_iter([lent.view()]);
    stage.event(Event::Received { peer, frame, body });
}

fn push(stage: &mut Stage, trainer: u32, round: u64, lent: &Lent, wants_value: bool) {
    let parcel = stage.push(trainer, vec![(id(0, 0), round, vec![0; BYTES as usize])], wants_value);
    deliver(stage, parcel.frame, lent);
}

fn restarted(plan: Plan, disk: &InMemory) -> Stage {
    let disk: Arc<dyn Storage> = Arc::new(disk.copy());
    let mut stage = Stage::empty(plan);
    stage.restore(&disk, false);
    stage
}

#[test]
fn a_trainers_later_writes_to_lent_memory_reach_neither_value_nor_journal() {
    for (mode, trainers, wants_value) in
        [(Mode::Sync, 1, true), (Mode::Sync, 2, true), (Mode::Sync, 2, false), (Mode::Async, 1, true)]
    {
        let (memory, plan) = (InMemory::new(), plan(mode, trainers));
        let mut stage = kept(plan.clone(), &memory).stage;
        let mut lent: Vec<Lent> = (0..trainers).map(|_| Lent::new()).collect();
        lent.iter_mut().for_each(|one| one.fill(1.0));
        for trainer in 0..trainers {
            push(&mut stage, trainer, 1, &lent[trainer as usize], wants_value);
        }
        // Also a value that is set.
        lent[0].fill(5.0);
        let head: Head = stage.call(Kind::Set, 0);
        let entry = Entry { bytes: BYTES, ..Entry::bare(id(0, 0), Default::default(), Float32) };
        let before = stage.contents();
        deliver(&mut stage, Frame { entries: [entry].into_iter().collect(), ..Frame::bare(head) }, &lent[0]);
        lent.iter_mut().for_each(|one| one.fill(9.0));
        assert_eq!(stage.errors(), Vec::<String>::new());
        let value = |contents: &super::stage::Contents| contents[0].2[..4].to_vec();
        let sum = i16::try_from(trainers).expect("few");
        assert_eq!(value(&before), (-f32::from(sum)).to_le_bytes(), "{mode:?}");
        assert_eq!(value(&stage.contents()), 5.0_f32.to_le_bytes(), "{mode:?}");
        assert_eq!(restarted(plan, &memory).contents(), stage.contents(), "{mode:?}");
    }
}

#[test]
fn a_round_of_pushes_that_want_the_value_is_journalled_as_one_gradient() {
    let memory = InMemory::new();
    let mut script = kept(plan(Mode::Sync, 3), &memory);
    let position = |script: &Script| script.stage.shard.journal_position();
    let before = position(&script);
    script.run("push+ 0 1 w=1 ->\n push+ 1 1 w=2 ->");
    assert_eq!(position(&script), before, "nobody has an answer");
    script.run("push+ 2 1 w=3 -> *");
    let one = u64::from(BYTES)..u64::from(BYTES) + 512;
    assert!(one.contains(&(position(&script) - before)), "{}", position(&script) - before);
    // Pushes that are acknowledged alone have records of their own, except the last one, which is part of the sum.
    let before = position(&script);
    script.run("push 0 2 w=1 -> 0 done w@2\n push 1 2 w=2 -> 1 done w@2\n push 2 2 w=3 -> 2 done w@2");
    let three = 3 * one.start..3 * one.end;
    assert!(three.contains(&(position(&script) - before)), "{}", position(&script) - before);
    // A restart has the closed rounds, and nothing of an open round whose trainers wait.
    script.run("push+ 0 3 w=4 ->\n show w -> w@2=-12");
    let mut again = Script::new(restarted(plan(Mode::Sync, 3), &memory));
    again.run("show w -> w@2=-12");
    for trainer in 0..3 {
        again.stage.connect(trainer, script.stage.actors[&trainer].incarnation);
        again.stage.actors.get_mut(&trainer).expect("it is connected").sequence = 10;
    }
    again.run("push 1 3 w=1 -> 1 done w@3\n push 2 3 w=1 -> 2 done w@3\n show w -> w@2=-12");
    again.run("push+ 0 3 w=4 -> 0 value w@3=-18");
}

/// A record has the sum in the parameter's type, whatever the types of gradients.
#[test]
fn gradients_of_half_precision_are_summed_in_the_record_as_in_the_update() {
    let memory = InMemory::new();
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 4, "sgd { momentum: 0.5 }");
    let mut script = kept(plan.clone(), &memory);
    script.run("push+ 0 1 w=1,2,-0,3b ->\n push+ 1 1 w=0.5,0.25,-0,1 -> *\n push+ 0 2 w=1b ->\n push+ 1 2 w=-3b -> *");
    assert_eq!(restarted(plan, &memory).contents(), script.stage.contents());
}

#[test]
fn a_round_and_later_frames_wait_until_the_disk_takes_the_rounds_record() {
    let memory = InMemory::new();
    memory.set_room(1 << 30);
    let plan = plan(Mode::Sync, 2);
    let mut script = kept(plan.clone(), &memory);
    script.run("push+ 0 1 w=1 -> ");
    script.stage.shard.reserve_disk(1 << 30, 0);
    script.run(
        "push+ 1 1 w=2 ->
         set 0 w=7 -> 0 error Busy: the journal cannot be written: rounds that were decided before wait for their record
         leave 0 -> 0 error Busy: *wait for their record
         ask 0 -> 0 *waits for the disk, which does not take its record
         show w -> w@0=0",
    );
    assert_eq!(restarted(plan.clone(), &memory).contents(), script.stage.contents(), "nothing of it is there");
    script.stage.shard.reserve_disk(0, 0);
    let mut kinds = Vec::new();
    for _ in 0..3 {
        script.stage.wait(Duration::from_millis(10));
        script.stage.turn();
        kinds.extend(script.stage.answers.iter().map(|one| one.frame.head.kind));
    }
    assert!(kinds.contains(&Kind::Value), "{kinds:?}");
    script.run("show w -> w@1=-3");
    assert_eq!(restarted(plan, &memory).contents(), script.stage.contents());
}

#[test]
fn a_push_without_a_value_is_acknowledged_once_its_round_is_journalled() {
    let memory = InMemory::new();
    memory.set_room(1 << 30);
    let mut script = kept(plan(Mode::Sync, 1), &memory);
    script.run("push 0 1 w=1 -> 0 done w@1");
    script.stage.shard.reserve_disk(1 << 30, 0);
    script.run("push 0 2 w=1 ->\n again 0 -> 0 error Busy: *wait for their record\n show w -> w@1=-1");
    script.stage.shard.reserve_disk(0, 0);
    script.run("wait 10 -> 0 done w@2\n show w -> w@2=-2");
    assert_eq!(restarted(plan(Mode::Sync, 1), &memory).contents(), script.stage.contents());
}

/// A round of a gradient of half precision needs memory for its record too.
#[test]
fn a_round_that_waits_for_memory_is_journalled_before_later_frames() {
    let memory = InMemory::new();
    let mut script = kept(plan(Mode::Sync, 1), &memory);
    script.stage.is_late = true;
    script.run(
        "hold ->
         pull 0 0 w -> 0 value w@0=0
         starve ->
         spare w ->
         push+ 0 1 w=1b ->
         spare w ->
         set 0 w=10 -> *error Busy: *wait for their record
         feed -> *value w@1=-1
         show w -> w@1=-1
         set 0 w=10 -> 0 done w@1",
    );
    assert_eq!(restarted(plan(Mode::Sync, 1), &memory).contents(), script.stage.contents());
}

/// The next round is merged for its record while the open one waits for memory, and becomes the open one without it.
#[test]
fn a_checkpoint_has_a_merged_round_whose_record_the_disk_refused() {
    let memory = InMemory::new();
    memory.set_room(1 << 30);
    let rule = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";
    let plan = Plan::new(Mode::Sync, Merge::Sum, 3).with("g", Float32, u64::from(BYTES / 2), rule);
    let mut script = kept(plan.clone(), &memory);
    script.stage.is_late = true;
    script.run(
        "hold ->
         pull 0 0 g g.1 -> 0 value g@0=0 g.1@0=0
         starve ->
         spare g g.1 ->
         push 0 1 g=1 g.1=1 -> 0 done g@1 g.1@1
         spare g g.1 ->
         push 1 1 g=1 g.1=1 -> 1 done g@1 g.1@1
         leave 2 -> 2 done
         spare g g.1 ->
         push 0 2 g=2 g.1=2 ->",
    );
    script.stage.shard.reserve_disk(1 << 30, 0);
    script
        .run("spare g g.1 g ->\n push+ 1 2 g=3 g.1=3 ->\n feed -> 0 done g@2 g.1@2\n show g g.1 -> g@1=-2 & g.1@1=-2");
    script.stage.shard.reserve_disk(0, 0);
    script.stage.checkpoint(1);
    script.stage.shard.commit().expect("the disk is well");
    let again = restarted(plan, &memory);
    script.run("wait 10 -> *\n show g g.1 -> g@2=-7 & g.1@2=-7");
    assert_eq!(again.contents(), script.stage.contents());
}

#[test]
fn rounds_without_gradients_and_void_ones_are_the_same_after_a_restart() {
    let memory = InMemory::new();
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2, "sgd { momentum: 0.5 }");
    let mut script = kept(plan.clone(), &memory);
    script.run(
        "push+ 0 1 w=1 ->
         push+ 1 1 w=none -> *
         push+ 0 2 w=none ->
         push+ 1 2 w=none -> *
         void 0 3 w=none -> *
         push+ 1 3 w=4 -> *
         push+*0.5 0 4 w=2 ->
         push+*0.25 1 4 w=8 -> *",
    );
    let again = restarted(plan, &memory);
    assert_eq!(again.contents(), script.stage.contents());
    assert_eq!(again.contents()[0].1.0, 4);
}

#[test]
fn a_trainer_rejoined_by_a_waiting_push_is_awaited_after_a_restart() {
    let memory = InMemory::new();
    let mut script = kept(plan(Mode::Sync, 2), &memory);
    script.run("leave 1 -> 1 done\n reborn 1\n push+ 1 1 w=1 ->");
    let mut again = restarted(plan(Mode::Sync, 2), &memory);
    for (trainer, actor) in script.stage.actors.clone() {
        again.connect(trainer, actor.incarnation);
    }
    again.answers.clear();
    Script::new(again).run("push 0 1 w=1 -> *\n show w -> w@1=-2");
}

/// The disk has room for a part of the bytes that follow the last gradient: in one case for the gradient, and not for
/// the record of its round.
#[test]
fn a_round_that_is_complete_without_a_record_is_decided_after_a_restart() {
    const FREE: u64 = 1 << 30;
    let plan = Plan::new(Mode::Sync, Merge::Sum, 2).with("g", Float32, 2, "optimizer: SGD clip_norm: 1e9");
    for room in (0..600).step_by(40) {
        let memory = InMemory::new();
        memory.set_room(FREE);
        let mut script = kept(plan.clone(), &memory);
        script.run("push 0 1 g=1 -> 0 done g@1");
        script.stage.shard.reserve_disk(memory.free().expect("it is limited") - room, 0);
        script.run("push 1 1 g=2 -> *");
        let mut again = restarted(plan.clone(), &memory);
        for (trainer, actor) in script.stage.actors.clone() {
            again.connect(trainer, actor.incarnation);
        }
        again.answers.clear();
        script.stage = again;
        script.run("again 1 -> *\n show g -> g@1=-3");
    }
}

/// After the leaves the frames of the journal would complete the round without the gradient that its record alone has.
#[test]
fn a_replay_waits_for_the_record_of_a_round_that_looks_complete() {
    let memory = InMemory::new();
    let mut script = kept(plan(Mode::Sync, 3), &memory);
    script.run(
        "push+ 0 1 w=1 ->
         push 1 1 w=2 -> 1 done w@1
         leave 0 -> 0 done
         leave 2 -> 0 value w@1=-3 & 2 done
         show w -> w@1=-3",
    );
    assert_eq!(restarted(plan(Mode::Sync, 3), &memory).contents(), script.stage.contents());
}

/// More chunks than a record has entries are decided by several records, of which the last one counts.
#[test]
fn a_decision_of_several_records_is_replayed_whole_or_not_at_all() {
    let chunks = u64::from(FRAME_ENTRIES_MAX) + 1;
    let rule = "sgd { momentum: 0.5 } clip_norm: 1";
    let plan = Plan::new(Mode::Sync, Merge::Mean, 1).with("g", Float32, chunks * u64::from(BYTES / 4), rule);
    let memory = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut stage = Stage::empty(plan.clone());
    stage.restore(&disk, false);
    stage.connect(0, Incarnation(1));
    for part in [0..chunks - 1, chunks - 1..chunks] {
        let parcel = stage.init(0, Some(&part.collect::<Vec<u64>>()));
        stage.deliver(0, &parcel);
    }
    let finish = stage.finish(chunks);
    stage.deliver(0, &finish);
    let gradient = 0.5_f32.to_le_bytes().repeat(BYTES as usize / 4);
    let first = (0..chunks - 1).map(|chunk| (id(0, chunk), 1, gradient.clone())).collect();
    let first = stage.push(0, first, true);
    let last = Parcel::new(first.frame.head, vec![(id(0, chunks - 1), 1, Float32, gradient)]);
    let before = stage.contents();
    stage.deliver(0, &first);
    let begun = memory.copy();
    stage.deliver(0, &last);
    assert_eq!(stage.errors(), Vec::<String>::new());
    let contents = stage.contents();
    assert!(contents != before && restarted(plan.clone(), &memory).contents() == contents);
    assert!(restarted(plan.clone(), &begun).contents() == before, "the push is not in the journal yet");
    // The journal without its last record.
    let name = "server-0/shard-0/journal-0000000001-00000000000000000000";
    let mut reader = disk.open(name).expect("it is there");
    let mut bytes = vec![0; usize::try_from(reader.len()).expect("it fits memory") - 1];
    reader.read_at(0, &mut bytes).expect("it is as long");
    disk.remove(name).expect("it is there");
    disk.create(name).and_then(|mut writer| writer.write(&[&bytes])).expect("there is room");
    assert!(restarted(plan, &memory).contents() == before, "half a decision is none");
}

#[test]
fn a_record_that_is_sent_as_a_frame_is_refused() {
    let mut script = Script::new(Stage::serving(plan(Mode::Sync, 1)));
    let head = script.stage.head(Kind::Rounds, 0);
    script.stage.deliver(0, &Parcel { frame: Frame::bare(head), body: Vec::new() });
    assert_eq!(script.stage.errors(), ["a shard has no answer to a frame of kind Rounds"]);
}

/// Takes a checkpoint of a shard, and restores a shard from the checkpoint and the journal behind it.
pub(super) fn saved(script: &mut Script, memory: &InMemory) -> Stage {
    let stage = &mut script.stage;
    stage.checkpoint(1);
    stage.shard.commit().expect("the disk is well");
    stage.retain_journal().expect("the disk is well");
    let mut again = restarted(stage.plan.clone(), memory);
    again.actors = stage.actors.clone();
    for (trainer, actor) in stage.actors.clone() {
        again.connect(trainer, actor.incarnation);
    }
    again.answers.clear();
    again
}

#[test]
fn a_checkpoint_carries_over_the_sum_of_an_open_rounds_first_gradients() {
    let memory = InMemory::new();
    // Another order of summation has other bits.
    let plan = Plan::new(Mode::Sync, Merge::Sum, 7).with("w", Float32, 1, SGD);
    let mut script = kept(plan, &memory);
    script.run(
        "push 0 1 w=1e8 -> *\n push 1 1 w=1 -> *\n push 2 1 w=-1e8 -> *\n push 3 1 w=1 -> *
         push 5 1 w=1e8 -> *\n push 6 1 w=-1e8 -> *\n push 0 2 w=3 ->",
    );
    let again = saved(&mut script, &memory);
    let rest = "push 4 1 w=1 -> *\n push 1 2 w=3 -> *\n show w -> *";
    let mut again = Script::new(again);
    again.run(rest);
    script.run(rest);
    assert_eq!(again.stage.contents(), script.stage.contents());
    assert_eq!(again.stage.contents()[0].1.0, 1);
}

#[test]
fn a_checkpoint_keeps_a_gradient_under_the_call_that_sent_it() {
    let memory = InMemory::new();
    let mut script = kept(plan(Mode::Sync, 2), &memory);
    // The next life of trainer 0 sends another gradient for the round, which counts the first.
    script.run("push 0 1 w=1 -> *\n reborn 0\n push 0 1 w=5 -> 0 done w@1");
    let mut again = Script::new(saved(&mut script, &memory));
    again.run("push 1 1 w=1 -> *\n show w -> w@1=-2");
}
