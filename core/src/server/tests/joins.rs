//! A trainer's newer incarnation fences the older ones, also after a restart, and also when it never pushes: a join is
//! in the journal before it is acknowledged, and in every checkpoint.

use std::sync::Arc;

use super::stage::{Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::{Failing, InMemory, StorageFault};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::Incarnation;
use crate::wire::Kind;

fn plan() -> Plan {
    Plan::new(Mode::Async, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD")
}

/// A shard that is restored from this disk.
fn started(disk: &Arc<dyn Storage>) -> Stage {
    let mut stage = Stage::empty(plan());
    stage.restore(disk, true);
    stage
}

/// Connects, and returns the text of the refusal if the hello is refused.
fn join(stage: &mut Stage, trainer: u32, incarnation: u32) -> Option<String> {
    stage.answers.clear();
    stage.connect(trainer, Incarnation(incarnation));
    let refused = stage.errors().first().cloned();
    let is_welcome = stage.answers.iter().any(|answer| answer.frame.head.kind == Kind::Welcome);
    assert_eq!(is_welcome, refused.is_none(), "a hello is answered by a welcome or by a refusal");
    refused
}

fn checkpoint(stage: &mut Stage, number: u64) {
    stage.checkpoint(number);
    stage.retain_journal().expect("the disk is well");
}

#[test]
fn an_incarnation_that_only_read_fences_the_older_one_after_a_restart() {
    // The host is lost each time: the journal is synced before a join is acknowledged.
    for checkpoints in 0..4 {
        let memory = InMemory::new();
        let disk: Arc<dyn Storage> = Arc::new(memory.clone());
        let mut stage = started(&disk);
        stage.initialise();
        assert_eq!(join(&mut stage, 1, 3), None);
        // From the third checkpoint on the journal has forgotten the join.
        (1..=checkpoints).for_each(|number| checkpoint(&mut stage, number));
        memory.crash();
        let mut stage = started(&disk);
        assert_eq!(
            join(&mut stage, 1, 2).as_deref(),
            Some("trainer 1 incarnation 2 was superseded by incarnation 3"),
            "after {checkpoints} checkpoints"
        );
        assert_eq!(join(&mut stage, 0, 1), None, "the other trainer is as it was");
        assert_eq!(join(&mut stage, 1, 3), None, "the same incarnation connects again");
    }
}

#[test]
fn a_join_before_the_initialisation_survives_a_restart_too() {
    let memory = InMemory::new();
    let disk: Arc<dyn Storage> = Arc::new(memory.clone());
    let mut stage = started(&disk);
    assert_eq!(join(&mut stage, 0, 2), None);
    memory.crash();
    assert!(join(&mut started(&disk), 0, 1).is_some_and(|text| text.contains("superseded")));
}

#[test]
fn a_join_that_cannot_be_journalled_is_not_acknowledged() {
    let memory: Arc<dyn Storage> = Arc::new(InMemory::new());
    let reached = Arc::new(Failing::new(Arc::clone(&memory), StorageFault::None));
    let failing: Arc<dyn Storage> = reached.clone();
    let mut stage = started(&failing);
    stage.initialise();
    let operations = reached.operations();
    // The next write fails, and those after it do not.
    let memory = InMemory::new();
    let fault = StorageFault::Once { operation: operations };
    let failing: Arc<dyn Storage> = Arc::new(Failing::new(Arc::new(memory.clone()), fault));
    let copy = || -> Arc<dyn Storage> { Arc::new(memory.copy()) };
    let mut stage = started(&failing);
    stage.initialise();
    let refused = join(&mut stage, 1, 2).expect("the write fails");
    assert!(refused.contains("the journal cannot be written"), "{refused}");
    assert!(join(&mut started(&copy()), 1, 1).is_none(), "nothing was acknowledged, so nothing is fenced");
    assert_eq!(join(&mut stage, 1, 2), None, "the trainer tries again");
    assert!(join(&mut started(&copy()), 1, 1).is_some_and(|text| text.contains("superseded")));
}

#[test]
fn a_join_of_a_known_incarnation_is_not_journalled_again() {
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    let mut stage = started(&disk);
    stage.initialise();
    assert_eq!(join(&mut stage, 1, 2), None);
    let position = stage.shard.journal_position();
    assert_eq!(join(&mut stage, 1, 2), None);
    assert!(join(&mut stage, 1, 1).is_some(), "superseded");
    assert_eq!(stage.shard.journal_position(), position);
}
