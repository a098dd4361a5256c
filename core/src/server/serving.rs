//! Serving state of an initialised shard.
//!
//! Not here: the requests that change it or read it (`apply`, `pushes`, `pulls`, `sets`, `departures`).

use std::collections::VecDeque;

use super::bucket::{RowsAnswer, RowsWorkspace};
use super::chunk_table::ChunkTable;
use super::compiled_flows::Flows;
use super::contribution::ShardPushes;
use super::group::SlotIndex;
use super::job::{Job, rule_of_mode};
use super::needs::Holdings;
use super::participants::Participants;
use super::programs::Programs;
use super::stalls::Stalls;
use super::wait_index::WaitIndex;
use super::waiters::Waiter;
use crate::error::Failure;
use crate::ids::TrainerId;
use crate::optim::Numbers;
use crate::port::LoadProgram;
use crate::wire::Entry;

/// State of a serving shard.
pub(super) struct Serving {
    pub(super) job: Job,
    pub(super) table: ChunkTable,
    pub(super) flows: Flows,
    pub(super) programs: Programs,
    pub(super) participants: Participants,
    pub(super) pushes: ShardPushes,
    pub(super) stalls: Stalls,
    /// Pulls of rows that take several turns, in round-robin order.
    pub(super) slow_pulls: VecDeque<RowsPull>,
    pub(super) waits: WaitIndex,
    /// Where rows are merged and looked up.
    pub(super) rows_room: RowsWorkspace,
    /// Cached coefficients of the previous update.
    pub(super) numbers: Numbers,
    /// The sizes of dense chunks.
    pub(super) dense: Holdings,
}

/// A pull of rows in progress. Where rows replay many missed updates it takes several turns, and returns the version at
/// its start: each row is of that version or a later one.
pub(super) struct RowsPull {
    pub(super) slot_index: SlotIndex,
    pub(super) waiter: Waiter,
    pub(super) entry: Entry,
    pub(super) answer: RowsAnswer,
}

impl Serving {
    /// Starts serving with `flows`, which were made for this job and this table, and the programs that `load` makes.
    pub(super) fn new(job: Job, mut table: ChunkTable, flows: Flows, load: LoadProgram) -> Result<Self, Failure> {
        if let Some(rule) = rule_of_mode(job.mode) {
            table.replace_rule(&rule)?;
        }
        table.make_groups();
        let programs = Programs::of_table(&job, &table, load)?;
        let participants = Participants::new(job.trainers);
        let dense = Holdings::of_dense(&table, &job);
        Ok(Self {
            job,
            table,
            flows,
            programs,
            participants,
            pushes: ShardPushes::default(),
            stalls: Stalls::default(),
            slow_pulls: VecDeque::new(),
            waits: WaitIndex::default(),
            rows_room: RowsWorkspace::default(),
            numbers: Numbers::default(),
            dense,
        })
    }

    /// Trainers that have not departed from this run.
    pub(super) fn active(&self) -> impl Iterator<Item = TrainerId> + '_ {
        (0..self.job.trainers).map(TrainerId).filter(|trainer| self.is_active(*trainer))
    }

    /// Active trainers of which a round of a chunk needs a gradient: its only sender, or all; none of a total.
    pub(super) fn awaited(&self, slot_index: SlotIndex) -> impl Iterator<Item = TrainerId> + '_ {
        self.active().filter(move |trainer| self.flows.is_awaited(slot_index, *trainer))
    }

    pub(super) fn is_active(&self, trainer: TrainerId) -> bool {
        self.participants.of(trainer).is_active()
    }
}
