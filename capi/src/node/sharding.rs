//! A shard with its disk: its checkpoints are taken between turns, and finished by a thread that may wait.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};
use pserver_core::checkpoint::{ShardCheckpoint, Storage};
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation};
use pserver_core::port::{Capabilities, Event, Kernels};
use pserver_core::server::{Output, Shard, ShardOptions};
use pserver_core::time::Now;
use pserver_kernels::cpu::Cpu;

use super::Start;
use super::device::{self, Opened};
use super::session::Session;
use crate::settings::Journal;

/// How much of a checkpoint is written between two turns: about a millisecond of the disk's cache.
const CHECKPOINT_STEP_BYTES: u64 = 2 * 1024 * 1024;

/// A device that has done nothing for so long when the server stops does not come back.
const SETTLE_LONGEST: Duration = Duration::from_secs(30);

/// How often a checkpoint waits for a device that had nothing to do any more: once is enough.
const SETTLES_MAX: u32 = 3;

pub(super) struct ShardNode {
    shard: Shard,
    /// When it last had something to do.
    now: Now,
    disk: Option<Disk>,
}

/// A journal longer than this, and than four times what it protects, makes a checkpoint due before its time: the
/// disk holds a bounded amount of it, and a restart replays a bounded amount.
const JOURNAL_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Where a shard's checkpoints go, and how far the current one is.
struct Disk {
    storage: Arc<dyn Storage>,
    directory: String,
    interval: Duration,
    number: u64,
    /// The generation that has a checkpoint: the first one is taken as soon as parameters are initialised.
    saved: Generation,
    due: Option<Now>,
    /// The journal's position at which a checkpoint is due whatever the time.
    due_at: u64,
    finishing: Option<Receiver<Result<u64, Failure>>>,
}

impl ShardNode {
    /// A shard, with what an earlier process left.
    pub(super) fn new(
        start: &Start,
        index: u16,
        epoch: Epoch,
        can: Capabilities,
        accelerator: Opened,
    ) -> Result<Self, Failure> {
        let options = ShardOptions {
            epoch,
            round_timeout: start.settings.round_timeout,
            shares_memory: start.shares_memory,
            landings: can.landings,
        };
        let kernels = Cpu::new();
        if index == 0 {
            tracing::info!("kernels: {}", kernels.name());
        }
        let mut shard = Shard::new(options, Box::new(kernels));
        if let Some(accelerator) = accelerator {
            shard = shard.with_accelerator(accelerator, device::no_room(&start.settings));
        }
        let Some(storage) = &start.storage else { return Ok(Self { shard, now: start.now(), disk: None }) };
        let directory = format!("server-{}/shard-{index}", start.settings.index);
        let sync = start.settings.journal == Journal::Sync;
        let restored = shard.restore(storage, &directory, sync)?;
        for reason in &restored.fell_back {
            tracing::warn!("{directory}: an older checkpoint is used: {reason}");
        }
        if restored.checkpoint.is_some() || restored.records > 0 {
            tracing::info!("{directory}: {} after {} journal records", shard.status(), restored.records);
        }
        if start.settings.journal == Journal::Off {
            shard.stop_journal();
        }
        let interval = start.settings.checkpoint_interval;
        let disk = Disk {
            storage: Arc::clone(storage),
            directory,
            interval,
            number: restored.checkpoint.unwrap_or(0),
            saved: if restored.checkpoint.is_some() { shard.generation() } else { Generation(0) },
            // A shard that comes back with a checkpoint takes its next one like any other.
            due: restored.checkpoint.map(|_| start.now() + interval),
            due_at: shard.journal_position() + JOURNAL_BYTES_MIN,
            finishing: None,
        };
        Ok(Self { shard, now: start.now(), disk: Some(disk) })
    }
}

impl Session for ShardNode {
    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<Output>) -> Result<(), Failure> {
        self.shard.handle(now, event, out);
        Ok(())
    }

    fn work(&mut self, now: Now, out: &mut Vec<Output>) -> Result<bool, Failure> {
        if self.shard.deadline().is_some_and(|deadline| deadline <= now) {
            self.shard.expire(now, out);
        }
        self.now = now;
        let is_busy = self.shard.attend(now, out)?;
        let Some(disk) = &mut self.disk else { return Ok(is_busy) };
        Ok(disk.work(now, &mut self.shard) || is_busy)
    }

    fn deadline(&self) -> Option<Now> {
        // While a checkpoint is finished by its thread, no other is due.
        let disk = self.disk.as_ref().filter(|disk| disk.finishing.is_none()).and_then(|disk| disk.due);
        self.shard.deadline().into_iter().chain(disk).min()
    }

    fn is_under_way(&self) -> bool {
        self.shard.is_under_way()
    }

    fn finish(&mut self) -> Result<(), Failure> {
        // Who is answered now has gone; what is in the values is what counts.
        self.shard.settle(self.now, SETTLE_LONGEST, &mut Vec::new())?;
        match &mut self.disk {
            Some(disk) => disk.finish(self.now, &mut self.shard),
            None => Ok(()),
        }
    }
}

impl Disk {
    /// Goes on with a checkpoint, or begins one that is due. A disk that refuses is reported and tried again
    /// later: training goes on, and what was saved before stays.
    fn work(&mut self, now: Now, shard: &mut Shard) -> bool {
        if self.collect(shard) {
            return false;
        }
        if shard.is_checkpointing() {
            return self.step(shard);
        }
        let generation = shard.generation();
        if generation == Generation(0) {
            return false;
        }
        let first = generation != self.saved;
        let due = self.due.is_some_and(|due| due <= now) || shard.journal_position() >= self.due_at;
        if !(first || due) {
            return false;
        }
        self.saved = generation;
        self.due = Some(now + self.interval);
        self.due_at = shard.journal_position() + JOURNAL_BYTES_MIN.max(shard.status().bytes * 4);
        self.number += 1;
        let begun = shard.begin_checkpoint(&self.storage, &self.directory, self.number);
        self.report(begun).unwrap_or(false)
    }

    /// Whether an earlier checkpoint is still being finished.
    fn collect(&mut self, shard: &mut Shard) -> bool {
        let Some(finishing) = &self.finishing else { return false };
        let finished = match finishing.try_recv() {
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => Err(Failure::Node("the thread that finished it is gone".to_owned())),
            Ok(finished) => finished,
        };
        self.finishing = None;
        if let Some(bytes) = self.report(finished) {
            tracing::debug!("{}: checkpoint {} of {bytes} bytes", self.directory, self.number);
            let retained = shard.retain_journal(&*self.storage, &self.directory);
            self.report(retained);
        }
        false
    }

    fn step(&mut self, shard: &mut Shard) -> bool {
        let stepped = shard.continue_checkpoint(CHECKPOINT_STEP_BYTES);
        let Some(Some(writer)) = self.report(stepped) else { return shard.is_checkpointing() };
        let (sender, receiver) = bounded(1);
        let spawned = finish_apart(writer, sender);
        if self.report(spawned).is_some() {
            self.finishing = Some(receiver);
        }
        false
    }

    /// The last checkpoint, taken whole while nobody waits.
    fn finish(&mut self, now: Now, shard: &mut Shard) -> Result<(), Failure> {
        if let Some(finishing) = self.finishing.take() {
            let _ = finishing.recv();
        }
        if shard.is_checkpointing() {
            write_rest(now, shard)?;
        }
        self.number += 1;
        if !shard.begin_checkpoint(&self.storage, &self.directory, self.number)? {
            return Ok(());
        }
        let bytes = write_rest(now, shard)?;
        tracing::info!("{}: last checkpoint, {bytes} bytes", self.directory);
        shard.retain_journal(&*self.storage, &self.directory)
    }

    fn report<T>(&self, outcome: Result<T, Failure>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(failure) => {
                tracing::error!("{}: checkpoint {}: {failure}", self.directory, self.number);
                None
            }
        }
    }
}

/// Writes what is left of the checkpoint that is being taken, and waits for the disk. What a device still does for a
/// chunk comes to its end first.
fn write_rest(now: Now, shard: &mut Shard) -> Result<u64, Failure> {
    for _ in 0..SETTLES_MAX {
        if let Some(writer) = shard.continue_checkpoint(u64::MAX)? {
            return writer.finish();
        }
        shard.settle(now, SETTLE_LONGEST, &mut Vec::new())?;
    }
    Err(Failure::call(format!("the last checkpoint waits for chunks that are not at rest after {SETTLES_MAX} waits")))
}

fn finish_apart(writer: ShardCheckpoint, done: Sender<Result<u64, Failure>>) -> Result<(), Failure> {
    std::thread::Builder::new()
        .name("pserver-checkpoint".to_owned())
        .spawn(move || {
            // Nobody listens any more when the server has stopped meanwhile.
            let _ = done.send(writer.finish());
        })
        .map(|_| ())
        .map_err(|error| Failure::Node(format!("starting a thread: {error}")))
}
