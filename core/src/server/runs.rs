//! The begin of a run at a shard: rounds wait for every trainer again, as at the job's start.
//!
//! The coordinator numbers runs, and a trainer's hello brings the number and the trainers of its run. The first frame
//! of a newer run that changes state begins the run, live and in replay. After all trainers have departed, a run may
//! have more or fewer trainers than the one before.

use super::chunk::Chunk;
use super::compiled_flows::Flows;
use super::context::Origin;
use super::initialisation::row_bytes;
use super::job::Job;
use super::presence::TrainerLife;
use super::reply::Refusal;
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::accumulator::AccumulatorPace;
use crate::error::Failure;
use crate::ids::{JobRun, TrainerId};
use crate::wire::{ErrorCode, Head};

impl Shard {
    /// Begins the run of a frame's sender, if it is newer than the shard's.
    pub(super) fn begin_run(&mut self, head: &Head, origin: Origin) -> Result<(), Refusal> {
        let run = self.trainers.run_of(TrainerLife::of(head));
        let Phase::Serving(serving) = &self.phase else { return Ok(()) };
        if !serving.is_new(run) || serving.table.generation != head.generation {
            return Ok(());
        }
        let trainers = serving.trainers_of(run);
        if trainers != serving.job.trainers {
            serving.check_boundary(run)?;
            self.resize(trainers)
                .map_err(|failure| Refusal::invalid(format!("a run of {trainers} trainers: {failure}")))?;
        }
        if let Phase::Serving(serving) = &mut self.phase {
            serving.begin_run(run, origin);
        }
        self.changes += 1;
        Ok(())
    }

    /// Changes the number of trainers between two runs.
    fn resize(&mut self, trainers: u32) -> Result<(), Failure> {
        let Phase::Serving(serving) = &mut self.phase else { return Ok(()) };
        if !serving.programs.is_empty() {
            let before = serving.job.trainers;
            return Err(Failure::call(format!("expected {before}, for which its hosted programs were made")));
        }
        let job = Job { trainers, ..serving.job.clone() };
        let flows = Flows::new(&job, &serving.table, self.options.compile)?;
        let receives = u64::try_from(self.options.receives).unwrap_or(u64::MAX);
        let before = serving.job.trainers;
        let more = serving.dense.growth(trainers.saturating_sub(before), receives);
        let rows = row_bytes(&serving.table, trainers.max(before), receives);
        let arena = self.pool.extend(&more, rows)?;
        if let (Some(device), Some(arena)) = (&mut self.device, arena) {
            device.pin(arena)?;
        }
        tracing::info!("the job has {trainers} trainers from this run on; it had {before}");
        serving.dense = std::mem::take(&mut serving.dense).with_trainers(trainers);
        self.pool.note_need(&serving.dense.needs(self.journal.open.is_some()));
        (serving.job, serving.flows) = (job, flows);
        Ok(())
    }
}

impl Serving {
    /// Whether a run is newer than the shard's.
    pub(super) fn is_new(&self, run: JobRun) -> bool {
        self.participants.run() < run.number
    }

    pub(super) fn trainers_of(&self, run: JobRun) -> u32 {
        if run.trainers == 0 { self.job.trainers } else { run.trainers }
    }

    /// Refuses another number of trainers while gradients of the earlier ones are not in the values.
    fn check_boundary(&self, run: JobRun) -> Result<(), Refusal> {
        let (before, trainers) = (self.job.trainers, self.trainers_of(run));
        if self.participants.have_departed() && self.table.chunks.iter().all(Chunk::lacks_nothing) {
            return Ok(());
        }
        let text = format!(
            "a run of {trainers} trainers begins, and the {before} trainers of the one before have not all left, or \
             left a round open; expected {before} trainers until all have left"
        );
        Err(Refusal::new(ErrorCode::Invalid, text))
    }

    fn begin_run(&mut self, run: JobRun, origin: Origin) {
        let returning = self.participants.begin(run.number, self.job.trainers);
        if returning.is_empty() {
            return;
        }
        let (run, names): (_, Vec<String>) = (run.number, returning.iter().map(TrainerId::to_string).collect());
        tracing::info!(%run, "a new run of trainers begins: rounds wait for trainer {} again", names.join(", "));
        let table = &self.table;
        self.programs.note_run(|slot_index| origin.is_before_restored(&table.chunks[slot_index]));
        // Clocks are levelled, so that no trainer waits for steps of the earlier run.
        let Self { flows, table, job, .. } = self;
        for (slot_index, chunk) in table.chunks.placed_mut() {
            let has_clocks = matches!(flows.of(slot_index).pace, AccumulatorPace::Bounded(_));
            if !has_clocks || origin.is_before_restored(chunk) {
                continue;
            }
            let all = (0..job.trainers).map(TrainerId);
            let fastest = all.clone().map(|one| chunk.heard(one).clock).max().unwrap_or(0);
            all.for_each(|one| chunk.heard_mut(one).clock = fastest);
        }
    }
}
