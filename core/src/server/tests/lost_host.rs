//! Recovery after the loss of the host, on a storage that keeps only synced bytes: the newest checkpoint with its
//! journal, and with a synced journal every acknowledged frame.

use std::sync::Arc;

use super::script::Script;
use super::stage::{Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

const DIRECTORY: &str = "server-0/shard-0";
const ADAM: &str = "optimizer: Adam adam {} const_lr { learning_rate: 0.01 }";

/// A shard whose host is lost. Its trainers go on with the restored shard.
struct Host {
    memory: InMemory,
    disk: Arc<dyn Storage>,
    mode: Mode,
    sync: bool,
    script: Script,
}

impl Host {
    fn new(mode: Mode, sync: bool) -> Self {
        let memory = InMemory::new();
        let disk: Arc<dyn Storage> = Arc::new(memory.clone());
        let stage = Self::started(&disk, mode, sync).initialised();
        Self { memory, disk, mode, sync, script: Script::new(stage) }
    }

    fn started(disk: &Arc<dyn Storage>, mode: Mode, sync: bool) -> Stage {
        let plan = Plan::new(mode, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD");
        let mut stage = Stage::empty(plan.with("a", Float32, 700, ADAM));
        stage.restore(disk, sync);
        stage
    }

    fn checkpoint(&mut self, number: u64) {
        self.checkpoint_while(number, "");
    }

    /// Takes a checkpoint; the script runs between its start and its first chunk.
    fn checkpoint_while(&mut self, number: u64, script: &str) {
        assert!(self.script.stage.begin_checkpoint(number).expect("the disk is well"), "it serves");
        self.script.run(script);
        let shard = &mut self.script.stage.shard;
        let writer = shard.continue_checkpoint(u64::MAX).expect("the disk is well");
        writer.expect("all of it was written").finish().expect("the disk is well");
        self.script.stage.retain_journal().expect("the disk is well");
    }

    /// Loses the host and applies `damage` to the disk. Trainers connect to the restored shard.
    fn lose(&mut self, damage: impl FnOnce(&InMemory)) {
        self.memory.crash_after_removals();
        damage(&self.memory);
        let mut stage = Self::started(&self.disk, self.mode, self.sync);
        stage.actors = self.script.stage.actors.clone();
        for (trainer, actor) in stage.actors.clone() {
            stage.connect(trainer, actor.incarnation);
        }
        stage.answers.clear();
        self.script.stage = stage;
    }
}

/// A round of both trainers, whose answers are not looked at.
fn round(number: u64) -> String {
    format!("push 0 {number} w={number} a=1 -> *\n push 1 {number} w={number} a=0.5 -> *\n")
}

#[test]
fn a_checkpoint_survives_with_the_gradients_of_the_open_round() {
    let mut host = Host::new(Mode::Sync, false);
    for number in 1..=3_u64 {
        // This gradient is in no value, and its trainer does not resend it.
        let push = format!("push 0 {number} w=9 a=9 -> *");
        if number == 2 {
            host.checkpoint_while(number, &push);
        } else {
            host.script.run(&push);
            host.checkpoint(number);
        }
        let before = host.script.stage.contents();
        host.lose(|_| {});
        assert_eq!(host.script.stage.contents(), before, "checkpoint {number}");
        host.script.run(&format!("push 1 {number} w=1 a=1 -> *"));
        let is_closed = host.script.stage.contents().iter().all(|(_, version, ..)| version.0 == number);
        assert!(is_closed, "round {number} has the gradient that was acknowledged before the host was lost");
    }
}

#[test]
fn an_older_checkpoint_has_its_journal_up_to_the_newer_one() {
    let mut host = Host::new(Mode::Sync, false);
    host.checkpoint(1);
    host.script.run(&round(1));
    host.script.run(&round(2));
    let before = host.script.stage.contents();
    host.checkpoint(2);
    host.lose(|memory| {
        let names = memory.list(DIRECTORY).expect("it is there");
        let table = names.iter().rfind(|name| name.ends_with(".chunks")).expect("a checkpoint has one");
        let path = format!("{DIRECTORY}/{table}");
        memory.remove(&path).and_then(|()| memory.create(&path)?.write(&[b"damaged"])).expect("it can be written");
    });
    assert_eq!(host.script.stage.contents(), before, "checkpoint 1 and the journal behind it");
}

#[test]
fn a_synced_journal_has_everything_that_was_acknowledged() {
    let mut host = Host::new(Mode::Sync, true);
    for number in 1..=4_u64 {
        host.script.run(&round(number));
        let before = host.script.stage.contents();
        host.lose(|_| {});
        assert_eq!(host.script.stage.contents(), before, "round {number}");
        if number == 2 {
            host.checkpoint(1);
        }
    }
}

#[test]
fn a_push_that_is_in_a_checkpoint_is_not_applied_again() {
    let mut host = Host::new(Mode::Async, false);
    host.script.run("push 0 0 w=1 a=1 -> *\n push 1 0 w=2 -> *");
    host.checkpoint(1);
    let before = host.script.stage.contents();
    host.lose(|_| {});
    host.script.run("again 0 -> *\n again 1 -> *");
    assert_eq!(host.script.stage.contents(), before);
    host.script.run("push 0 0 w=1 -> 0 done w@3\n show w -> w@3=-4");
}

#[test]
fn a_trainer_departed_before_a_checkpoint_is_not_waited_for_after_it() {
    let mut host = Host::new(Mode::Sync, false);
    host.script.run("leave 1 -> 1 done");
    host.checkpoint(1);
    host.lose(|_| {});
    host.script.run("push 0 1 w=1 -> 0 done w@1\n show w -> w@1=-1");
}
